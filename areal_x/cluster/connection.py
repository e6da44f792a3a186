"""The connection to a Ray cluster. Ray is imported when it is needed, so that a run of one process
needs none."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from areal_x.errors import UserError, sentence
from areal_x.runtime.credentials import RAY_TOKEN
from areal_x.runtime.interrupts import same_signals
from areal_x.runtime.waits import waiting

SECONDS_TO_CONNECT = 30.0
SECONDS_TO_PROBE = 60.0
# Of every node of a cluster.
SETTINGS = {
    # Ray's default kills the guards of servers and rewards, whose job is to end those.
    "RAY_kill_child_processes_on_worker_exit": "false",
    "RAY_worker_niceness": "0",  # Ray's default gives way to any other process
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that is silent is gone after at most 4 · (2 + 4) seconds; by Ray's defaults after 65.
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "4",
}
# Of a cluster that a run starts for itself.
OWN_SETTINGS = {
    # Ray listens on all interfaces, whatever address its node is given, unless it may not be
    # reached from other machines, which is its default on the systems in this variable's name.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
}
LOOPBACK = "127.0.0.1"
# What Ray says of versions that differ.
VERSIONS = re.compile(
    r"Version mismatch: The cluster was started with:\s+Ray: (\S+)\s+Python: (\S+)\s+"
    r"This process on .+ was started with:\s+Ray: (\S+)\s+Python: (\S+)"
)
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
        os.environ.update(OWN_SETTINGS)
        os.environ.setdefault(RAY_TOKEN, secrets.token_hex(32))
    try:
        import ray
    except ImportError:
        raise UserError("train.cluster = 'ray' needs Ray: pip install areal-x[ray]") from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if ray.is_initialized():  # a notebook's
        check_closed()
        yield
        return
    with waiting("the run", "the Ray cluster"):
        if address:
            _connect(address, quiet)
        else:
            offered = max(cpus, os.cpu_count() or 1)
            local: dict[str, Any] = {"num_cpus": offered, "include_dashboard": False}
            with same_signals():
                ray.init(address="local", **local, **quiet)
            _check_own()
    try:
        yield
    finally:
        ray.shutdown()


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
        with same_signals():
            context = ray.init(address=address, **options)
    except Exception as error:
        raise UserError(f"the Ray cluster at {address} {why_unusable(error)}") from error
    try:
        check_closed()
    except BaseException:
        ray.shutdown()
        raise
    if context.dashboard_url:
        print(f"Ray's dashboard: http://{context.dashboard_url}")


def why_unusable(error: Exception) -> str:
    """Returns the rest of the sentence about a cluster that refused this process."""
    text = sentence(error)
    if (found := VERSIONS.search(text)) is not None:
        ray, python, own_ray, own_python = found.groups()
        return (
            f"has Ray {ray} and Python {python}, this process Ray {own_ray} and Python"
            f" {own_python}: install the same versions on all nodes"
        )
    lines = text.strip().splitlines() or [type(error).__name__]
    return f"cannot be used: {lines[0].strip()}"


def _check_own() -> None:
    """Raises: UserError if Ray did not read OWN_SETTINGS, as they came after its import."""
    import ray

    if ray.util.get_node_ip_address() != LOOPBACK:
        ray.shutdown()
        raise UserError(
            "Ray was imported before this run could keep it to 127.0.0.1: import it later, or export"
            " RAY_ADDRESS of a cluster that is there"
        )


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
