"""From AReaL's YAML (GRPO, PPO and SFT configurations) to a gin file.

Names follow AReaL's `cli_args.py`, of the versions with `allocation_mode` and those with
`actor.backend` and `rollout.backend`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_x.convert.algorithm import convert_algorithm, warm_up_and_schedule
from areal_x.convert.allocation import PROGRAMS, Allocation, parse_allocation
from areal_x.convert.fields import Fields, read_fields
from areal_x.convert.gin_text import GinText, Raw
from areal_x.convert.reasons import SILENT, reason_for
from areal_x.errors import UserError

GSM8K_TASKS = 7473  # of its train split
PROMPT = 1024  # tokens, where AReaL bounds no prompt
VLLM_SEQUENCES = 256  # AReaL's max_num_seqs


def convert(file: Path, tasks: int | None = None) -> str:
    """Returns the gin file for a YAML file of AReaL's. tasks: the number of training tasks.

    Raises: UserError for a file that is not of AReaL, or configures something that is not converted.
    """
    fields = read_fields(file)
    try:
        return _convert(file, fields, tasks)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{fields.last} = {fields.peek(fields.last)!r} cannot be read: {error}"
        ) from error


def _convert(file: Path, fields: Fields, tasks: int | None) -> str:
    supervised = fields.any_below("model")
    if not supervised and not fields.any_below("actor"):
        raise UserError(
            f"{file} has neither actor (GRPO, PPO) nor model (SFT): it is no training configuration of"
            " AReaL's"
        )
    kind = str(fields.get("train_dataset.type", "sft" if supervised else "rl"))
    if kind not in ("rl", "sft"):
        raise UserError(
            f"train_dataset.type = {kind!r} is not converted: see docs/recipes.md for reward models"
            " and pairs"
        )
    gin = GinText()
    gin.comment(
        f"Converted from {file.name} of AReaL by `areal-x convert areal`; what was not carried over is"
        " listed at the end."
    )
    _dataset(fields, gin, supervised)
    model = "model" if supervised else "actor"
    steps = _lengths_and_steps(fields, gin, tasks, supervised)
    _model(fields, gin, model)
    convert_algorithm(fields, gin, supervised)
    warm_up_and_schedule(fields, gin, model, steps)
    _parallel(fields, gin, model, supervised)
    _bookkeeping(fields, gin, steps)
    return gin.text() + _not_carried(fields, gin)


def _dataset(fields: Fields, gin: GinText, supervised: bool) -> None:
    path = fields.get("train_dataset.path")
    if not path:
        raise UserError("train_dataset.path is missing: the gin file needs a dataset")
    gsm8k = _is_gsm8k(path)
    gin.section("The task")
    if gsm8k:
        gin.comment("`areal-x example gsm8k` copies the module out of an installed package.")
        gin.line("import examples.gsm8k.task")
    else:
        gin.comment(
            "Rows need the columns prompt and answer; otherwise bind load_dataset.to_task"
            " (docs/extending.md)."
        )
    name = "gsm8k" if gsm8k else "load_dataset"
    gin.bind(f"{name}.path", path)
    gin.bind("train.dataset", Raw(f"@{name}()"))
    if held_out := fields.get("valid_dataset.path"):
        gin.bind("train.held_out", Raw(f"@held_out/{name}()"))
        gin.bind(f"held_out/{name}.path", held_out)
        gin.bind(f"held_out/{name}.split", "test")
        if _is_gsm8k(held_out) != gsm8k:
            gin.comment("The held-out tasks have another path: give them a loader of their own.")
    if supervised:
        gin.bind("train.workflow", Raw("@demonstrations()"))
        return
    gin.bind("train.workflow", Raw("@single_turn()"))
    gin.comment(
        "AReaL's reward is a Python function of its script: bind yours in place of this one."
    )
    gin.bind("single_turn.reward", Raw("@math_answer"))


def _is_gsm8k(path: Any) -> bool:
    return str(path).rstrip("/").rpartition("/")[2].lower() == "gsm8k"


def _lengths_and_steps(
    fields: Fields, gin: GinText, tasks: int | None, supervised: bool
) -> dict[str, int | None]:
    """Binds batch and lengths. Returns the steps of an epoch and of the run, None if unknown."""
    gin.section("Sizes and lengths")
    groups = int(fields.get("train_dataset.batch_size", 1))
    gin.bind("train.groups_per_step", groups)
    prompt = fields.get("train_dataset.max_length")
    if supervised:
        tokens_of_micro_batch = fields.get("model.mb_spec.max_tokens_per_mb")
        row = int(prompt or tokens_of_micro_batch or PROMPT)
        gin.bind("train.group_size", 1)
    else:
        tokens_of_micro_batch = fields.get("actor.mb_spec.max_tokens_per_mb")
        gin.bind("train.group_size", int(fields.get("gconfig.n_samples", 1)))
        new = int(fields.get("gconfig.max_new_tokens", 16384))
        gin.bind("sampling.max_tokens", new)
        gin.bind("sampling.temperature", float(fields.get("gconfig.temperature", 1.0)))
        if (top_p := float(fields.get("gconfig.top_p", 1.0))) != 1:
            gin.bind("sampling.top_p", top_p)
        top_k = int(fields.get("gconfig.top_k", 0))
        if 0 < top_k < 10**6:  # AReaL's "all" is 10**8
            gin.bind("sampling.top_k", top_k)
        if stops := fields.get("gconfig.stop_token_ids"):
            gin.bind("sampling.stop_token_ids", tuple(stops))
        row = min(int(prompt or PROMPT) + new, int(fields.get("gconfig.max_tokens", 2**62)))
        if prompt:
            gin.bind("train.longest_prompt", min(int(prompt), row))
        gin.bind("train.max_staleness", int(fields.get("rollout.max_head_offpolicyness", 0)))
    gin.bind("train.row_length", row, "" if prompt else f"with {PROMPT} for a prompt")
    if tokens_of_micro_batch:
        rows = max(1, int(tokens_of_micro_batch) // row)
        gin.bind("trainer.micro_batch_rows", rows, f"of {row} tokens, for {tokens_of_micro_batch}")
    return _steps(fields, gin, groups, tasks)


def _steps(fields: Fields, gin: GinText, groups: int, tasks: int | None) -> dict[str, int | None]:
    if tasks is None and _is_gsm8k(fields.get("train_dataset.path")):
        tasks = GSM8K_TASKS
    epoch = max(1, tasks // groups) if tasks else None
    epochs = int(fields.get("total_train_epochs", 1))
    steps = epochs * epoch if epoch else None
    if most := fields.get("total_train_steps"):
        steps = min(steps, int(most)) if steps else int(most)
        if not epoch:
            gin.note(
                "total_train_epochs", "total_train_steps ends the run; --tasks N makes epochs count"
            )
    if steps:
        gin.bind("train.steps", steps, f"{epochs} epochs of {epoch}" if epoch else "")
    else:
        gin.comment(
            f"train.steps: {epochs} epochs; set it to epochs × tasks / {groups}, or convert with"
            " --tasks N."
        )
    return {"epoch": epoch, "run": steps}


def _model(fields: Fields, gin: GinText, model: str) -> None:
    gin.section("The model")
    path = fields.get(f"{model}.path")
    if not path:
        raise UserError(f"{model}.path is missing: the gin file needs a model")
    gin.bind("model.path", path)
    if fields.peek("tokenizer_path") in (path, None, ""):
        fields.get("tokenizer_path")
    gin.bind("train.backend", "torch")
    dtype = str(fields.get(f"{model}.dtype", "bfloat16"))
    precisions = {"bfloat16": "bf16", "float32": "fp32"}
    if dtype in precisions:
        gin.bind("trainer.precision", precisions[dtype])
    else:
        gin.note(f"{model}.dtype", "trainer.precision takes bf16, fp32 and fp8")
    if fields.get(f"{model}.gradient_checkpointing"):
        gin.bind("trainer.remat", "layers")
    if fields.get(f"{model}.fsdp.offload_params") or fields.get(f"{model}.optimizer.offload"):
        gin.bind("trainer.offload", True)
    optimizer = f"{model}.optimizer"
    kind = str(fields.get(f"{optimizer}.type", "adam"))
    if kind == "adam_bf16":
        gin.bind("optimizer.moments", "bf16")
    elif kind not in ("adam", "adamw"):
        gin.note(f"{optimizer}.type", "optimizer.name takes adamw, adafactor and muon")
    for theirs, ours, default in (
        ("lr", "learning_rate", 1e-3),
        ("weight_decay", "weight_decay", 0.01),
        ("beta1", "beta1", 0.9),
        ("beta2", "beta2", 0.999),
        ("eps", "eps", 1e-8),
        ("gradient_clipping", "clip_norm", 1.0),
    ):
        gin.bind(f"optimizer.{ours}", float(fields.get(f"{optimizer}.{theirs}", default)))
    if fields.get(f"{model}.use_lora"):
        gin.bind("lora.rank", int(fields.get(f"{model}.lora_rank", 32)))
        gin.bind("lora.alpha", float(fields.get(f"{model}.lora_alpha", 16)))
        targets = [str(x) for x in fields.get(f"{model}.target_modules", [])]
        if targets and not any(x.startswith("all") for x in targets):
            gin.bind("lora.targets", tuple(targets))


def _allocation(fields: Fields, model: str) -> Allocation:
    if text := fields.get("allocation_mode"):
        return parse_allocation(str(text))
    trainer = str(fields.get(f"{model}.backend", "d1"))
    if not any(character.isdigit() for character in trainer):
        trainer = "d1"
    server = fields.get("rollout.backend")
    return parse_allocation(f"{server}+{trainer}" if server else trainer, "backend")


def _parallel(fields: Fields, gin: GinText, model: str, supervised: bool) -> None:
    found = _allocation(fields, model)
    gin.section("Accelerators")
    if supervised:
        gin.bind("train.engine", "none")
    else:
        _servers(fields, gin, found)
    sizes = found.training
    for letter, axis in (("d", "fsdp"), ("t", "tensor"), ("p", "stage"), ("c", "context")):
        if sizes.get(letter, 1) > 1:
            gin.bind(f"mesh.{axis}", sizes[letter])
    if (experts := sizes.get("e", 1)) > 1:
        data = sizes.get("d", 1)
        if data % experts == 0:  # both divide rows: experts take their part of them
            gin.replace("mesh.fsdp", data // experts)
            gin.bind("mesh.expert", experts)
        else:
            gin.note(
                "allocation_mode", f"mesh.expert = {experts} must divide the {data} data shards"
            )
    if found.processes > 1:
        gin.bind("train.cluster", "ray")
        gin.bind("mesh.processes", found.processes)
    chunks = int(fields.get(f"{model}.megatron.virtual_pipeline_parallel_size", 1))
    if chunks > 1:
        gin.bind("mesh.stage_chunks", chunks)
    if found.shared:
        if found.processes == 1 and found.program:
            gin.bind("train.colocate", True)
        else:
            gin.note(
                "allocation_mode",
                "train.colocate shares accelerators with a trainer of one process (docs/colocate.md);"
                " here trainer and servers need accelerators of their own",
            )


def _servers(fields: Fields, gin: GinText, found: Allocation) -> None:
    program = found.program or "vllm"
    gin.bind("train.engine", program)
    if program == "sglang":
        gin.comment(
            "sglang.python names the interpreter of an environment with SGLang (docs/sglang.md)."
        )
    sizes = found.generation
    servers, tensor, stages = sizes.get("d", 1), sizes.get("t", 1), sizes.get("p", 1)
    gin.bind(f"{program}.servers", servers)
    if tensor > 1:
        gin.bind(f"{program}.tensor", tensor)
    if stages > 1 and program == "vllm":
        gin.bind("vllm.pipeline", stages)
    elif stages > 1:
        gin.note("allocation_mode", f"sglang.pipeline must be 1, and is {stages} there")
    if found.processes == 1 and not found.shared:
        width = tensor * stages
        visible = tuple(
            ",".join(str(1 + server * width + i) for i in range(width)) for server in range(servers)
        )
        gin.comment("The trainer computes on the first accelerator; without others leave this out.")
        gin.bind(f"{program}.devices", visible)
    samples = int(fields.get("gconfig.n_samples", 1))
    episodes = fields.get("rollout.max_concurrent_rollouts") or fields.get(
        "rollout.consumer_batch_size"
    )
    bound = {"vllm": "vllm.max_num_seqs", "sglang": "sglang.max_running_requests"}[program]
    most = int(fields.get(bound, VLLM_SEQUENCES))
    if episodes:
        requests = -(-int(episodes) * samples // servers)
        gin.bind(f"{program}.concurrency", max(1, min(requests, most)), "requests of each server")
    memory = {
        "vllm": ("vllm.gpu_memory_utilization", "--gpu-memory-utilization"),
        "sglang": ("sglang.mem_fraction_static", "--mem-fraction-static"),
    }[program]
    if share := fields.get(memory[0]):
        gin.bind(f"{program}.arguments", (memory[1], str(share)))


def _bookkeeping(fields: Fields, gin: GinText, steps: dict[str, int | None]) -> None:
    gin.section("The run")
    gin.bind("train.seed", int(fields.get("seed", 1)))
    if root := fields.get("cluster.fileroot"):
        gin.bind("train.runs", root)
    for section, ours in (("evaluator", "evaluate_every"), ("saver", "export_every")):
        if every := _every(fields, section, steps["epoch"]):
            gin.bind(f"train.{ours}", every)
    recovers = fields.get("recover.mode", "disabled") not in ("disabled", "off")
    every = _every(fields, "recover", steps["epoch"])
    if every:
        gin.bind("train.checkpoint_every", every)
    if recovers:
        retries = fields.get("recover.retries", 3)
        gin.comment(
            f"To restart after a crash as there: areal-x train FILE.gin --retries {retries}"
        )
    loggers = []
    for logger in ("wandb", "swanlab"):
        mode = fields.get(f"stats_logger.{logger}.mode", "disabled")
        if mode == "disabled":
            continue
        loggers.append(logger)
        if mode == "offline":
            gin.bind("tracking.mode", "offline")
        at = f"stats_logger.{logger}"
        if entity := fields.get(f"{at}.entity"):
            gin.bind("tracking.entity", entity)
        if group := fields.get(f"{at}.group"):
            gin.bind("tracking.run_group", group)
        if tags := fields.get(f"{at}.tags"):
            gin.bind("tracking.tags", tuple(tags))
        gin.replace("train.project", fields.get(f"{at}.project") or fields.get("experiment_name"))
    if loggers:
        gin.bind("train.loggers", tuple(loggers))


def _every(fields: Fields, section: str, epoch: int | None) -> int | None:
    """Returns the steps between two actions of a section; None if it has no frequency in steps or
    epochs."""
    if every := fields.get(f"{section}.freq_steps"):
        return int(every)
    epochs = fields.peek(f"{section}.freq_epochs")
    if epochs and epoch:
        fields.get(f"{section}.freq_epochs")
        return int(epochs) * epoch
    return None


def _not_carried(fields: Fields, gin: GinText) -> str:
    """Returns comments that list the fields that were not read, and those with a note, by reason."""
    by_reason: dict[str, list[str]] = {}
    unused = next((x for x in PROGRAMS if f"train.engine = {x!r}" not in gin.text()), "")
    for path, why in gin.notes:
        by_reason.setdefault(why, []).append(f"{path} = {fields.peek(path)!r}")
    for path, value in fields.unread().items():
        why = SILENT if value is None or value in ("", [], {}) else reason_for(path, unused)
        by_reason.setdefault(why, []).append(path if why == SILENT else f"{path} = {value!r}")
    if not by_reason:
        return ""
    lines = ["", "# Not carried over:"]
    for why, listed in sorted(by_reason.items(), key=lambda pair: pair[0] == SILENT):
        lines += ["#", f"#   {why}:", *(f"#     {entry}" for entry in listed)]
    return "\n".join(lines) + "\n"
