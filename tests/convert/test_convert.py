"""AReaL's YAML in several shapes, as gin files that the project's own checks accept."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import gin
import pytest
import yaml

from areal_x import check, convert
from areal_x.config.reader import Config, load
from areal_x.config.types import check_early, check_experiment
from areal_x.convert import areal
from areal_x.convert.allocation import Allocation, parse_allocation
from areal_x.convert.fields import Fields
from areal_x.errors import UserError
from tests.thorough import further

HERE = Path(__file__).parent
SHAPES = ("grpo", "dapo_lora", "ppo", "sft")


def converted(shape: str, folder: Path) -> Config:
    """The settings that a gin file of this shape sets, checked as `areal-x train` checks them."""
    file = folder / f"{shape}.gin"
    file.write_text(areal.convert(HERE / f"{shape}.yaml"))
    config = load(file)
    check_early(config)
    check_experiment(config)
    return config


@pytest.mark.parametrize("shape", SHAPES)
def test_every_field_is_carried_over_or_listed_with_a_reason(shape: str) -> None:
    """Of a field that is neither bound nor listed, a change of its value would change no line."""
    tree = yaml.safe_load((HERE / f"{shape}.yaml").read_text())
    text = text_of(tree)
    listed = text.partition("# Not carried over:")[2]
    for path, value in Fields(tree)._leaves.items():
        if f"#     {path} = " in listed or f"#     {path}\n" in listed or (isinstance(value, str) and value.startswith("${")):
            continue
        assert any(text_of(changed(tree, path, x)) != text for x in others(value)), path


def changed(tree: Any, path: str, value: Any) -> Any:
    """A copy of the tree with another value at a path."""
    copied = copy.deepcopy(tree)
    inner = copied
    *sections, last = path.split(".")
    for key in sections:
        inner = inner[key]
    inner[last] = value
    return copied


def others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value // 4, 7]
    if isinstance(value, list):
        return [[*value, "more"]]
    return [
        {"auto": "disabled", "sglang:d4t2+megatron:d2t2p2": "vllm:d1+d1", "bfloat16": "float32", "float32": "bfloat16"}.get(
            value, "0.5"
        )
    ]


def text_of(tree: Any) -> str:
    """The gin file of a tree, or the refusal."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.yaml"
        file.write_text(yaml.safe_dump(tree))
        try:
            return areal.convert(file).replace("x.yaml", "")
        except UserError as error:
            return str(error)


def test_a_cluster_run_keeps_its_sizes_schedule_and_bookkeeping(tmp_path: Path) -> None:
    config = converted("grpo", tmp_path)
    expected = {
        "train.steps": 3 * (7473 // 64),
        "train.groups_per_step": 64,
        "train.group_size": 8,
        "train.minibatches": 2,
        "train.max_staleness": 3,
        "train.row_length": 256 + 768,
        "trainer.micro_batch_rows": 8,
        "optimizer.learning_rate": 2e-6,
        "optimizer.schedule_steps": 696,
        "optimizer.warmup_steps": 70,
        "decoupled_ppo.clip_high": 0.35,
        "decoupled_ppo.high": 4.0,
        "sglang.servers": 4,
        "sglang.tensor": 2,
        "sglang.concurrency": 128,
        "mesh.fsdp": 2,
        "mesh.stage": 2,
        "mesh.processes": 8,
        "train.export_every": 116,
        "train.checkpoint_every": 20,
        "train.loggers": ("wandb",),
        "tracking.entity": "us",
    }
    assert {name: config.value(name) for name in expected} == expected
    assert gin.query_parameter("ppo_clip.dual_clip") == 3.0


@pytest.mark.parametrize(
    ("shape", "algorithm", "settings"),
    [
        ("dapo_lora", "dapo", {"lora.rank": 4, "lora.targets": ("q_proj", "v_proj"), "train.steps": 40, "vllm.concurrency": 8}),
        ("ppo", "ppo", {"train.colocate": True, "critic.learning_rate": 1e-6, "sampling.temperature": 0.9}),
        ("sft", "sft", {"train.engine": "none", "train.group_size": 1, "train.evaluate_every": 934}),
    ],
)
def test_the_recipe_follows_from_the_switches(shape: str, algorithm: str, settings: dict[str, Any], tmp_path: Path) -> None:
    config = converted(shape, tmp_path)
    built = copy.deepcopy(config.value("train.algorithm"))  # calls gin's reference
    assert built.name == algorithm
    assert {name: config.value(name) for name in settings} == settings
    needs = {"dapo_lora": {"reference"}, "ppo": {"values", "reference"}, "sft": set()}[shape]
    assert built.needs == needs


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_decoupled_loss": False, "recompute_logprob": False}, "grpo.weighting = @weighting.token_mean"),
        ({"importance_sampling_level": "sequence"}, "gspo.corrections = @corrections.masked"),
        ({"use_sapo_loss": True, "sapo_tau_neg": 2.0}, "sapo.tau_negative = 2.0"),
        ({"m2_threshold": 0.1}, "m2po.threshold = 0.1"),
        ({"reward_norm": {"mean_level": "group", "mean_leave1out": True}}, "decoupled_ppo.advantages = @leave_one_out"),
        ({"reward_norm": {"mean_level": "group", "std_level": "batch"}}, "group_relative.scale = 'batch'"),
        ({"reward_norm": None}, "train.algorithm = @reinforce_pp()"),
        ({"mask_no_eos_with_zero": True}, "decoupled_ppo.truncated = 'mask'"),
        ({"prox_logp_method": "loglinear"}, "decoupled_ppo.proximal = 'interpolate'"),
    ],
)
def test_variants_of_the_loss_build(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    tree = yaml.safe_load((HERE / "grpo.yaml").read_text())
    tree["actor"] |= changes
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    text = areal.convert(tmp_path / "x.yaml")
    assert expected in text
    (tmp_path / "x.gin").write_text(text)
    config = load(tmp_path / "x.gin")
    check_early(config)
    assert copy.deepcopy(config.value("train.algorithm")).explain()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sglang:d4p1t2+d4p1t1", Allocation("sglang", {"d": 4, "p": 1, "t": 2}, {"d": 4, "p": 1, "t": 1}, False)),
        ("vllm.d2t4+fsdp:d8", Allocation("vllm", {"d": 2, "t": 4}, {"d": 8}, False)),
        ("vllm[rollout]:d8|fsdp[actor]:d8", Allocation("vllm", {"d": 8}, {"d": 8}, True)),
        ("vllm:d2+megatron:(attn:d4p2t2|ffn:d2p2t2e2)", Allocation("vllm", {"d": 2}, {"d": 4, "p": 2, "t": 2, "e": 2}, False)),
        ("d4t2", Allocation(None, {}, {"d": 4, "t": 2}, False)),
    ],
)  # fmt: skip
def test_allocations_of_every_form_are_read(text: str, expected: Allocation) -> None:
    assert parse_allocation(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "has no fields"),
        ("seed: 1", "has neither actor (GRPO, PPO) nor model (SFT)"),
        ("actor: {path: m}", "train_dataset.path is missing"),
        ("model: {path: m}\ntrain_dataset: {path: p, type: rw}", "train_dataset.type = 'rw' is not converted"),
        ("actor: {path: m}\ntrain_dataset: {path: p}\nallocation_mode: a+b", "allocation_mode = 'a+b' is of an unknown form"),
        ("actor: {path: m}\ntrain_dataset: {path: p, batch_size: many}", "train_dataset.batch_size = 'many' cannot be read"),
        ("actor: {path: '${actor.path}'}\ntrain_dataset: {path: p}", "refers to itself"),
    ],
)  # fmt: skip
def test_what_is_not_converted_is_refused_in_a_sentence(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert convert.main(["areal", str(tmp_path / "x.yaml")]) == 1
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def test_a_file_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["areal", str(HERE / "sft.yaml"), "-o", str(tmp_path / "mine.gin")]
    assert convert.main(words) == 0
    assert "check it with:" in capsys.readouterr().out
    assert convert.main(words) == 1
    assert "exists and is not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["dapo_lora", *further("ppo", "sft")])
def test_areal_x_check_accepts_the_file_with_a_tiny_model(
    shape: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("areal_x_torch")
    pytest.importorskip("math_verify")
    for split in ("train", "test"):
        rows = [{"prompt": f"{i}+1=", "question": f"{i}+1=", "answer": f"#### {i + 1}"} for i in range(12)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages[0].content[:8] }}")
    converted(shape, tmp_path)
    data = "load_dataset.path" if shape == "dapo_lora" else "gsm8k.path"
    bindings = [f"model.path = {str(model)!r}", f"{data} = {str(tmp_path)!r}", f"train.runs = {str(tmp_path)!r}"]
    if shape != "dapo_lora":
        bindings.append(f"held_out/gsm8k.path = {str(tmp_path)!r}")
    else:  # a machine with one device, and a reference that is here
        bindings += ["vllm.devices = ()", f"train.reference = {str(tiny_model_dir)!r}"]
    if shape == "ppo":  # turns need accelerators
        bindings += ["train.colocate = False", "train.row_length = 192", "train.longest_prompt = 150"]
    words = [str(tmp_path / f"{shape}.gin"), *(word for binding in bindings for word in ("-b", binding))]
    assert check.main(words) == 0, capsys.readouterr().out
