"""The interface of a route, compared with what the system's own tables say."""

from __future__ import annotations

import psutil
import pytest

from areal_x_torch.interfaces import interface_of_ipv4, interface_of_ipv6, interface_towards


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "localhost"])
def test_loopback_addresses_are_reached_by_the_loopback_interface(address: str) -> None:
    expected = [name for name, found in psutil.net_if_addrs().items() if any(x.address == "127.0.0.1" for x in found)]
    assert [interface_towards(address)] == expected


def test_an_address_belongs_to_the_interface_that_has_it() -> None:
    for name, found in psutil.net_if_addrs().items():
        for address in found:
            if address.family.name == "AF_INET6":
                assert interface_of_ipv6(address.address.partition("%")[0]) == name
        first = [address.address for address in found if address.family.name == "AF_INET"][:1]
        assert all(interface_of_ipv4(address) == name for address in first)


def test_an_address_that_no_interface_has_has_none() -> None:
    assert interface_of_ipv4("192.0.2.1") is None
    assert interface_of_ipv6("2001:db8::1") is None
    assert interface_towards("no-such-host.invalid") is None
