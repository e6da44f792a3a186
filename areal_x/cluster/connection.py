"""The connection to a Ray cluster. Ray is imported when it is needed, so that a run of one process
needs none."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from areal_x.errors import UserError, sentence
from areal_x.runtime.waits import waiting

SECONDS_TO_CONNECT = 30.0
SECONDS_TO_PROBE = 60.0
# Of every node of a cluster.
SETTINGS = {
    # Ray's default kills the guards of servers and rewards, whose job is to end those.
    "RAY_kill_child_processes_on_worker_exit": "false",
    "RAY_worker_niceness": "0",  # Ray's default gives way to any other process
    "RAY_USAGE_STATS_ENABLED": "0",
}
PROBE = (
    "import sys; from ray._raylet import GcsClient;"
    " GcsClient(address=sys.argv[1]).check_alive([], timeout=30)"
)


@contextmanager
def connected(cpus: float) -> Iterator[None]:
    """Connects to the cluster of RAY_ADDRESS; without it, starts one on this machine that ends with
    this process. cpus: how many such a cluster offers at least.

    Raises: UserError if Ray is not installed, or if the cluster cannot be reached or needs no
    token.
    """
    address = os.environ.get("RAY_ADDRESS")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if not address:  # read when Ray is imported
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import ray
    except ImportError:
        raise UserError("train.cluster = 'ray' needs Ray: pip install areal-x[ray]") from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if ray.is_initialized():  # a notebook's
        check_closed()
        yield
        return
    with waiting("the run", "the Ray cluster"), same_signals():
        if address:
            _connect(address, quiet)
        else:
            offered = max(cpus, os.cpu_count() or 1)
            local: dict[str, Any] = {"num_cpus": offered, "include_dashboard": False}
            ray.init(address="local", _node_ip_address="127.0.0.1", **local, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def same_signals() -> Iterator[None]:
    """Installs the handlers of signals again that the body replaces: Ray's would end the process at
    once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _connect(address: str, options: dict[str, Any]) -> None:
    import ray

    host, _, port = address.rpartition(":")
    if port.isdecimal():  # Ray would try for ever
        try:
            socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_CONNECT).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(
                f"no Ray cluster answers at {address} ({reason}): see RAY_ADDRESS"
            ) from None
    try:
        ray.init(address=address, **options)
    except Exception as error:
        reason = (sentence(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"the Ray cluster at {address} cannot be used: {reason}") from error
    try:
        check_closed()
    except BaseException:
        ray.shutdown()
        raise


def check_closed() -> None:
    """Raises: UserError if the cluster answers a program that has no token. Another process tries,
    as Ray reads its settings once."""
    import ray

    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen(
        [sys.executable, "-c", PROBE, address],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as stranger:
        try:
            refused = stranger.wait(SECONDS_TO_PROBE) != 0
        except subprocess.TimeoutExpired:
            refused = True  # it waits for an answer
        finally:
            stranger.kill()
    if not refused:
        raise UserError(
            f"the Ray cluster at {address} needs no token, so anyone who reaches it can run code in"
            " it: export RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH on all nodes before ray start"
        )


def nodes(labels: Mapping[str, str] | None = None) -> list[dict[str, float]]:
    """Returns the resources of each node that is there and has these labels."""
    import ray

    wanted = (labels or {}).items()
    return [
        node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and wanted <= node.get("Labels", {}).items()
    ]
