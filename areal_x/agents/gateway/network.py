"""Where a gateway listens, which addresses may connect to it, and how its connections are encrypted.

Beyond this machine every connection is encrypted: by the gateway itself, with a certificate, or by
a proxy in front of it, which then is all that may connect. Whatever else a configuration asks for is
refused before a socket is opened.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from pathlib import Path

from areal_x.agents.address import check_url
from areal_x.errors import ConfigError, UserError

LOOPBACK = "127.0.0.1"
RENEWED_SECONDS = 60.0  # between two looks at the certificate's files
LEAST_KEY = 32  # characters: a key that people make up is shorter, and found by trying

Address = IPv4Address | IPv6Address


@dataclass(frozen=True)
class Network:
    """The part of a gateway's settings that is about the network, checked.

    Raises: ConfigError, see Gateway for the settings.
    """

    host: str = LOOPBACK
    url: str = ""
    certificate: str = ""
    certificate_key: str = ""
    tls_by_proxy: bool = False
    networks: tuple[str, ...] = ()
    _networks: tuple[IPv4Network | IPv6Network, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_networks", tuple(map(_network, _tuple(self.networks))))
        if self.certificate_key and not self.certificate:
            raise ConfigError(
                "gateway.certificate",
                self.certificate,
                "the certificate of gateway.certificate_key",
            )
        if self.url:
            check_url(self.url)
        if not _address(self.host).is_loopback:
            self._check_reachable()

    def _check_reachable(self) -> None:
        """Raises: ConfigError for what must not be reachable from other machines."""
        if not self.certificate and not self.tls_by_proxy:
            raise ConfigError(
                "gateway.host",
                self.host,
                f"{LOOPBACK}, unless gateway.certificate encrypts what is sent, or"
                " gateway.tls_by_proxy = True says that a proxy does and gateway.networks has its"
                " address",
            )
        if not self.certificate and not self.networks:
            raise ConfigError(
                "gateway.networks",
                self.networks,
                "the addresses of the proxy that gateway.tls_by_proxy speaks of, as"
                ' ("10.0.0.2/32",): anybody else would send keys unencrypted',
            )
        if self.is_everywhere and not self.url:
            raise ConfigError(
                "gateway.url",
                self.url,
                f"the address that agents call, since gateway.host = {self.host!r} is none",
            )

    @property
    def is_everywhere(self) -> bool:
        """True for the host that stands for all addresses of this machine."""
        return _address(self.host).is_unspecified

    def told_url(self, port: int) -> str:
        """Returns the address that agents are told, without a slash at its end."""
        if self.url:
            return self.url.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.certificate else 'http'}://{host}:{port}"

    def admits(self, address: str) -> bool:
        """True if this address may connect; every one may while no networks are set."""
        if not self._networks:
            return True
        found = ip_address(address.partition("%")[0])
        # a socket for both families shows IPv4's addresses in IPv6's form
        found = getattr(found, "ipv4_mapped", None) or found
        return any(found in network for network in self._networks)

    def encryption(self) -> Encryption | None:
        """Returns that of connections, None without a certificate. Raises: UserError for files that
        cannot be used."""
        if not self.certificate:
            return None
        return Encryption(self.certificate, self.certificate_key or self.certificate)


class Encryption:
    """The encryption of connections (TLS 1.2 or later), with a certificate that may be renewed
    while it is in use. Raises: UserError for files that cannot be used."""

    def __init__(self, certificate: str, key: str) -> None:
        self._files = certificate, key
        self._renewed = self._times()
        self._looked_at = -RENEWED_SECONDS
        self.context = tls_context(certificate, key)

    def renew(self, now: float) -> None:
        """Reads files that have changed, at most once a minute. now: seconds of any one clock.
        Raises: UserError if they cannot be used; what was read before stays in use."""
        if now - self._looked_at < RENEWED_SECONDS:
            return
        self._looked_at = now
        if (times := self._times()) != self._renewed:
            # a context of its own: a failure would leave the one in use without its key
            self.context = tls_context(*self._files)
            self._renewed = times

    def _times(self) -> tuple[int, ...]:
        try:
            return tuple(Path(file).stat().st_mtime_ns for file in self._files)
        except OSError:
            return ()


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    _check_readable("gateway.certificate", certificate)
    _check_readable("gateway.certificate_key", key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # without this function OpenSSL would ask for a passphrase at the terminal, on the event loop
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise UserError(
            f"gateway.certificate = {certificate!r} and gateway.certificate_key = {key!r} cannot be"
            f" used together ({error.reason or error}): they must be PEM files, the chain with the"
            " server's own certificate first, and its key without a passphrase"
        ) from None
    return context


def _check_readable(binding: str, file: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise UserError(f"{binding} = {file!r} cannot be read: {error.strerror}") from None


def key_in(variable: str) -> str:
    """Returns the key in an environment variable. Raises: UserError for none, or a short one."""
    key = os.environ.get(variable, "").strip()
    if len(key) < LEAST_KEY:
        found = f"has {len(key)} characters" if key else "is not set"
        raise UserError(
            f"gateway.key_variable = {variable!r} cannot work: the environment variable {found}; a key"
            f" of at least {LEAST_KEY} is made by `openssl rand -hex 32`"
        )
    return key


def _address(host: str) -> Address:
    try:
        return ip_address(host)
    except ValueError:
        raise ConfigError(
            "gateway.host", host, f"an address of this machine in numbers, such as {LOOPBACK!r}"
        ) from None


def _tuple(networks: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(networks, str):
        raise ConfigError("gateway.networks", networks, 'a tuple of networks, as ("10.0.0.0/8",)')
    return networks


def _network(network: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(network)
    except ValueError as error:
        raise ConfigError(
            "gateway.networks", network, f'a tuple of networks, as ("10.0.0.0/8",): {error}'
        ) from None
