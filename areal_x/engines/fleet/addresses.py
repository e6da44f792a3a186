"""Addresses of servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from areal_x.errors import ConfigError

LOOPBACK = "127.0.0.1"
LOCAL_HOSTS = (LOOPBACK, "localhost", "::1")


def is_local(url: str) -> bool:
    """True if the server is on this machine."""
    return urlsplit(url).hostname in LOCAL_HOSTS


def url_of(host: str, port: int) -> str:
    """Returns the address of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_urls(
    binding: str, given: str | Sequence[str] | Callable[[], str] | None
) -> tuple[str, ...]:
    """Returns the addresses of servers, or () for a directory, a hub name, a function that creates
    a directory, and None.

    Raises: ConfigError for a list of anything but addresses.
    """
    if given is None or callable(given) or (isinstance(given, str) and not is_url(given)):
        return ()
    urls = (given,) if isinstance(given, str) else tuple(given)
    if not urls or not all(map(is_url, urls)):
        raise ConfigError(
            binding,
            given,
            "a directory, a hub name, or one or more http:// or https:// addresses of servers",
        )
    return urls


def is_url(text: str) -> bool:
    return urlsplit(text).scheme in ("http", "https")
