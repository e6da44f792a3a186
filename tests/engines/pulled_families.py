"""Pulls the weights of every model family into vLLM's own engine by its sharded-RDT class, one after the other.

    python -m tests.engines.pulled_families [NAME...]   # prints a line of JSON for each

Ray, NIXL and CUDA are replaced as in tests/engines/fleet/local_ray.py.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.engines.families import SETTINGS, Served, distance_from, last_of_each_kind, prepare, report_each

if __name__ == "__main__":
    os.environ.update(SETTINGS)

from areal_x.engines.vllm import rdt_sender
from areal_x.engines.vllm.plugin import RDT
from tests.engines.vllm.test_vllm_rdt import Trainer


def join(served: Served, tensors: dict[str, Any]) -> Trainer:
    trainer = Trainer(tensors)
    invitation = rdt_sender.invite(trainer, 0, [1], True)
    (info,) = rdt_sender.joining(invitation, [1])
    served.call("init_weight_transfer_engine", info)
    return trainer


def publish(served: Served, trainer: Trainer) -> None:
    with ThreadPoolExecutor(1) as pool:
        served.call("start_weight_update")
        sending = pool.submit(rdt_sender.send, trainer, 0)
        served.call("update_weights", {})
        served.call("finish_weight_update")
        assert sending.result() is None
    served.llm.reset_prefix_cache()


def tried(name: str, scratch: Path) -> dict[str, Any]:
    """Runs one family and returns the measurements.

    before, after, again: largest difference from transformers in a prompt's log-probabilities, with the first weights, with
    others that were pulled, and with a third version. unnoticed: tensors without which a server joins.
    """
    from safetensors.torch import load_file

    old, new, tokens = prepare(name, scratch)
    served = Served(old, RDT)
    report = {"name": name, "before": distance_from(served, old, tokens)}
    tensors = load_file(new / "model.safetensors")
    trainer = join(served, tensors)
    publish(served, trainer)
    report["after"] = distance_from(served, new, tokens)
    report["unnoticed"] = [left_out for left_out in last_of_each_kind(tensors) if not is_refused(served, tensors, left_out)]
    trainer = join(served, tensors)
    trainer.tensors = load_file(old / "model.safetensors")
    publish(served, trainer)
    report["again"] = distance_from(served, old, tokens)
    return report


def is_refused(served: Served, tensors: dict[str, Any], left_out: str) -> bool:
    try:
        join(served, {name: x for name, x in tensors.items() if name != left_out})
    except (RuntimeError, ValueError):
        return True
    return False


def main(names: list[str]) -> None:
    from tests.engines.fleet.local_ray import replace_ray

    replace_ray(setattr)
    rdt_sender.missing_packages = str  # type: ignore[assignment]
    report_each(names, tried)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # whatever a refused server's producers still wait for
