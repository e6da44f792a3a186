"""Every family of models on meshes of two and four processes: two updates with the numbers of one device."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.launching import finished
from tests.model_families import CASES, FAMILY_MODELS, HYBRIDS, MIXTURES
from tests.models import write_config
from tests.thorough import further, run_values

from .processes import UPDATES

# Text only, with shapes of their own in other tests.
SHAPES = {family: shapes[0] for family, shapes in FAMILY_MODELS.items()}
# One key head for two processes, and Gemma 4's experts beside an MLP, with other numbers of key heads in full layers.
SHAPES |= {name: CASES[name] for name in ("llama-1", "gemma4_text-1", "gemma4_text-3", "gemma4_text-4")}
BY_EXPERTS = (*MIXTURES, "gemma4_text-1", "gemma4_text-4")  # the last has six experts
FIRST = ("phi3",)  # products of which each process takes some rows
FAMILIES = [*FIRST, *further(*(family for family in SHAPES if family not in FIRST))]
# Mesh → its axes, and whether the head is tied where the family's is not, and adapters are trained.
PAIRS: dict[str, tuple[dict[str, int], bool]] = {
    "tensor": ({"tensor": 2}, False),
    "adapters": ({"tensor": 2}, True),
    "sequence": ({"tensor": 2, "sequence": True}, False),
    "context": ({"context": 2}, False),
    "expert": ({"expert": 2}, False),
}
FOURS = {
    "expert-tensor": ({"expert": 2, "tensor": 2}, False),
    "context-sequence": ({"context": 2, "tensor": 2, "sequence": True}, True),
}
AT_ONCE = 20  # meshes that one start of the processes is asked for: these have a time limit
REFUSED = {
    ("qwen3_5", "context"): "rows with images",
    ("qwen3_5_moe", "context"): "rows with images",
    **{(family, "sequence"): "a model with images" for family, config in SHAPES.items() if "vision_config" in config},
}


def far_of(family: str) -> float:
    """A delta rule's state adds up the rounding of all tokens before: transformers' own log-probabilities move by 1e-4 where
    each weight moves by a rounding. Its gradients of Gemma 4 are as far from those in float64."""
    if f"{family}-0" in HYBRIDS:
        return 1e-3
    return 6e-4 if family.startswith("gemma4") else 5e-5


def other_head(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the same model with a tied head if its own is not, and the reverse."""
    from transformers import AutoConfig

    text = AutoConfig.for_model(**config).get_text_config()
    tied = {"tie_word_embeddings": not text.tie_word_embeddings}
    return config | tied | ({"text_config": config["text_config"] | tied} if "text_config" in config else {})


def meshes_of(family: str, meshes: dict[str, tuple[dict[str, int], bool]]) -> Iterator[tuple[str, dict[str, int], bool]]:
    for name, (mesh, adapted) in meshes.items():
        if "expert" not in mesh or family in BY_EXPERTS:
            yield name, mesh, adapted


def find(folder: Path, families: set[str], meshes: dict[str, tuple[dict[str, int], bool]]) -> Path:
    """Has as many processes as the meshes take compare each family's with one device."""
    asked, processes = [], max(prod(mesh.values()) for mesh, _ in meshes.values())
    for family in sorted(families):
        for name, mesh, adapted in meshes_of(family, meshes):
            directory = folder / f"{family}{'-other' * adapted}"
            if not directory.exists():
                config = SHAPES[family]
                write_config(other_head(config) if adapted else config, directory, seed=len(family))
            about = {"name": f"{family}-{name}", "directory": str(directory), "adapted": adapted}
            asked.append({**about, "processes": processes, **mesh})
    for begin in range(0, len(asked), AT_ONCE):
        part = map(json.dumps, asked[begin : begin + AT_ONCE])
        finished([sys.executable, "-m", "tests.torch.family_meshes", str(folder), *part], processes, 1, folder)
    return folder


@pytest.fixture(scope="module")
def of_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return find(tmp_path_factory.mktemp("two"), run_values(request, "family"), PAIRS)


@pytest.fixture(scope="module")
def of_four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return find(tmp_path_factory.mktemp("four"), run_values(request, "mixture"), FOURS)


def in_one_worker(test: Callable[..., None]) -> Callable[..., None]:
    """One worker has all families trained, by one group of processes."""
    for mark in (pytest.mark.xdist_group("family_meshes"), pytest.mark.timeout(1800), pytest.mark.slow):
        test = mark(test)
    return test


def assert_is_one_device(found: dict[str, Any], refused: str | None, far: float) -> None:
    """far: how far what comes after the first update may be."""
    if refused is not None or "refused" in found:
        assert refused is not None, found
        assert refused in found["refused"]
        return
    assert len(found) > 8
    # A loss is a small difference of large terms.
    most = {"before": 1e-5, "grad_norm 0": 1e-5} | {f"loss {step}": max(far, 1e-4) for step in range(UPDATES)}
    assert not {part: x for part, x in found.items() if x > most.get(part, far)}


@in_one_worker
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_each_family_as_one_does(family: str, of_two: Path) -> None:
    for mesh, _, _ in meshes_of(family, PAIRS):
        found = json.loads((of_two / f"{family}-{mesh}.json").read_text())
        assert_is_one_device(found, REFUSED.get((family, mesh)), far_of(family))


@in_one_worker
@pytest.mark.parametrize("mixture", further(*BY_EXPERTS[:-1]))
def test_four_processes_train_each_mixture_by_experts_and_heads(mixture: str, of_four: Path) -> None:
    for mesh, _, _ in meshes_of(mixture, FOURS):
        refused = [REFUSED[mixture, axis] for axis in mesh.split("-") if (mixture, axis) in REFUSED]
        found = json.loads((of_four / f"{mixture}-{mesh}.json").read_text())
        assert_is_one_device(found, refused[0] if refused else None, far_of(mixture))
