"""The status and error of a program that has ended, from why and how it did and what it reported."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from typing import Any

from areal_x.runtime import guard


def verdict(reason: str, code: int, reported: bytes, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the status and error of the program. code: of its first process; a signal is
    negative, or as in a shell (128 + n)."""
    code = guard.shell_exit_code(code)
    match reason:
        case "timeout":
            return {
                "status": "timeout",
                "error": f"the program was ended after {settings['seconds']:g} seconds",
            }
        case "memory":
            return {
                "status": "memory",
                "error": f"the program used more than {settings['memory_mb']:g} MB of memory",
            }
        case "processes":
            return {
                "status": "killed",
                "error": f"the program had more than {settings['processes']} processes or threads",
            }
        case "files":
            most = f"{settings['files']} files or {settings['file_mb']:g} MB"
            return {"status": "killed", "error": f"the program wrote more than {most}"}
    if code == 0:
        return {"status": "ok", "error": None}
    if report := _report(reported):
        return report
    if code == 128 + signal.SIGXCPU:
        return {
            "status": "timeout",
            "error": f"the program used its {settings['cpu_seconds']:g} seconds of processor time",
        }
    if code - 128 in signal.valid_signals():
        return {
            "status": "killed",
            "error": f"the program was ended by {signal.Signals(code - 128).name}",
        }
    return {"status": "error", "error": f"exit status {code}"}


def _report(reported: bytes) -> dict[str, str] | None:
    """Returns the program's own report, which may hold anything."""
    try:
        report = json.loads(reported)
        known = report["status"] in ("error", "memory", "killed") and isinstance(
            report["error"], str
        )
        return {"status": report["status"], "error": report["error"]} if known else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
