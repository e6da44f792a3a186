"""Addresses of gateways, as agents and workers are told them."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from areal_x.errors import ConfigError


def check_url(url: str, binding: str = "gateway.url") -> SplitResult:
    """Returns the parts of an address of a gateway. Raises: ConfigError for one that agents could
    not call, or that would have them send keys unencrypted over a network."""
    try:
        parts = urlsplit(url)
        _ = parts.port
        host = parts.hostname
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise ConfigError(binding, url, 'an address such as "https://run.example.com:8443"')
    if parts.username is not None:
        raise ConfigError(binding, _without_user(parts), "an address without a user name or key")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(
            binding, url, "the address without /v1, which is appended where it belongs"
        )
    if parts.scheme == "http" and not is_loopback(host):
        raise ConfigError(
            binding,
            url,
            "an address that begins with https: keys would cross the network unencrypted",
        )
    return parts


def is_loopback(host: str) -> bool:
    """True if a host of an address is this machine's own."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_user(parts: SplitResult) -> str:
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
