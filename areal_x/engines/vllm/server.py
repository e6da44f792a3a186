"""How a vLLM server is started: its command line and its environment."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from areal_x.engines.fleet import server as servers
from areal_x.engines.fleet.addresses import LOCAL_HOSTS, LOOPBACK
from areal_x.engines.fleet.client import MODEL
from areal_x.engines.fleet.widths import Widths, experts_in
from areal_x.engines.vllm import adapters, dialects, gate, headless
from areal_x.engines.vllm.client import KIND, VLLMClient
from areal_x.engines.vllm.features import NORMALISED
from areal_x.engines.vllm.installed import installed_dialect, is_cpu_build
from areal_x.engines.vllm.kept_tokens import REPORTING_RUNNER
from areal_x.engines.vllm.plugin import BACKEND
from areal_x.engines.vllm.responses import RECORD_EXPERTS
from areal_x.errors import ConfigError
from areal_x.hf.model_dir import read_config, text_config
from areal_x.protocols.speculation import Speculation

# keeps NCCL between processes of one machine off the network address that it listens on by default
LISTEN = ("NCCL_SOCKET_IFNAME", "lo")
UNPICKLE = "VLLM_ALLOW_INSECURE_SERIALIZATION"
TUNED = "attn_temperature_tuning"


@dataclass(frozen=True)
class Launch(servers.Launch):
    """How to start one vLLM server."""

    kind: ClassVar[str] = KIND

    transfer: str = BACKEND
    """vLLM's name of the weight-transfer backend."""

    def command(self, port: int) -> list[str]:
        return command(self, port, is_cpu_build(), installed_dialect())

    def environment(self, key: str) -> dict[str, str]:
        return environment(self, key, is_cpu_build())

    def client(self, url: str, key: str) -> VLLMClient:
        return VLLMClient(url, key, self.transfer, guesses=self.speculation.active)


def command(
    launch: Launch, port: int, cpu: bool, dialect: dialects.Dialect = dialects.LATEST
) -> list[str]:
    """Returns the command line. Raises: ConfigError for what vLLM on a CPU does not support."""
    if cpu and launch.experts:
        wanted = (
            "False with vLLM on a CPU: its second model runner, which records experts, needs a GPU"
        )
        raise ConfigError("trainer.replay_experts", True, wanted)
    if cpu:
        check_mixture(launch)
    arguments = {
        "--model": str(launch.model),
        "--served-model-name": MODEL,
        "--host": launch.host,
        "--port": str(port),
        "--max-model-len": str(launch.context),
        "--max-num-seqs": str(launch.concurrency),
        "--seed": str(launch.seed),
        # Log-probabilities after temperature, top-k and top-p, as sampled from.
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": f'{{"backend": "{launch.transfer}"}}',
        # Ignore the sampling settings that a model directory recommends for chatting (a repetition
        # penalty, a top-p).
        "--generation-config": "vllm",
        "--middleware": gate.GATE,
    }
    flags = ["--disable-uvicorn-access-log", *width_flags(launch.widths)]
    if dialect.has(dialects.SCALE_OUT):
        flags.append("--enable-scale-out")
    if not launch.metrics:
        flags.append("--disable-log-stats")
    if launch.lora_rank:
        flags += adapters.arguments(launch.lora_rank, launch.lora_batched)
    if cpu:
        # As the trainers compute on a CPU; its kernels for fp8 take no float32.
        arguments["--dtype"] = "bfloat16" if is_quantised(launch.model) else "float32"
        # compiling was seen to double the start (16 s to 37 s) for a quarter more tokens/s
        flags.append("--enforce-eager")
    elif launch.sleeps:
        flags.append("--enable-sleep-mode")  # on a CPU: areal_x.engines.vllm.cpu_sleep
    if launch.speculation.active:
        arguments["--speculative-config"] = speculative_config(launch.speculation)
    if launch.experts:
        flags.append(RECORD_EXPERTS)
    if has_vision(launch.model) and dialect.has(dialects.NORMALISATION):
        flags.append(NORMALISED)
    if (tuned := tunes_temperature(launch.model)) is not None:
        arguments["--override-generation-config"] = json.dumps({TUNED: tuned})
    program = "vllm.entrypoints.openai.api_server"
    if launch.part is not None:
        address, meeting_port = launch.part.meeting_place
        arguments |= {
            "--nnodes": str(launch.part.hosts),
            "--node-rank": str(launch.part.rank),
            "--master-addr": address,
            "--master-port": str(meeting_port),
        }
        if launch.widths.data > 1:
            arguments["--data-parallel-rpc-port"] = str(launch.part.engines_port)
        if launch.part.rank:  # it computes, and serves nothing
            program = headless.__name__
            flags.append("--headless")
    pairs = [word for pair in arguments.items() for word in pair]
    return [
        sys.executable,
        "-P",
        "-m",
        program,
        *pairs,
        *flags,
        *launch.arguments,
    ]


def speculative_config(speculation: Speculation) -> str:
    """Returns the value of vLLM's --speculative-config."""
    named: dict[str, Any] = {"num_speculative_tokens": speculation.tokens}
    if speculation.method == "ngram":
        named |= {"method": "ngram"}
        named |= {
            "prompt_lookup_max": speculation.longest,
            "prompt_lookup_min": speculation.shortest,
        }
    else:
        named |= {"method": "draft_model", "model": speculation.draft}
    return json.dumps(named)


def check_mixture(launch: Launch) -> None:
    """Raises: ConfigError for mixtures of which vLLM 0.32's workers on CPUs cannot compute parts: they
    die of divided experts, and exchange no tokens between data-parallel engines."""
    widths = launch.widths
    if widths.expert > 1:
        wanted = "1 with vLLM on a CPU, whose workers cannot compute a part of the experts"
        raise ConfigError("vllm.expert", widths.expert, wanted)
    if widths.data > 1 and experts_in(text_config(read_config(launch.model))):
        wanted = "1 for a mixture with vLLM on a CPU, whose engines cannot exchange tokens: set vllm.servers"
        raise ConfigError("vllm.data", widths.data, wanted)


def width_flags(widths: Widths) -> list[str]:
    """Returns the arguments of the parallel sizes."""
    sizes = {
        "--tensor-parallel-size": widths.tensor,
        "--pipeline-parallel-size": widths.pipeline,
        "--data-parallel-size": widths.data,
    }
    flags = [word for name, size in sizes.items() if size > 1 for word in (name, str(size))]
    return [*flags, "--enable-expert-parallel"] if widths.expert > 1 else flags


def tunes_temperature(model: Path) -> bool | None:
    """Returns whether a Llama 4 scales its queries by their positions; None for other models.

    vLLM 0.32 reads it from the generation config, not from config.json, and where that lacks it decides
    by the server's context: up to 32,768 tokens nothing is scaled. Trainers scale.
    """
    config = text_config(read_config(model)) if (model / "config.json").is_file() else {}
    if config.get("model_type") != "llama4_text":
        return None
    return bool(config.get(TUNED, True))


def is_quantised(model: Path) -> bool:
    """True if the model in a directory is stored in fp8."""
    return (model / "config.json").is_file() and "quantization_config" in read_config(model)


def has_vision(model: Path) -> bool:
    """True if the model in a directory has a vision tower."""
    return (model / "config.json").is_file() and "vision_config" in read_config(model)


def environment(launch: Launch, key: str, cpu: bool) -> dict[str, str]:
    """Returns the server's environment. It carries the key, which never appears on a command line
    or in a log."""
    env = dict(os.environ) | {
        gate.KEY: key,
        gate.HOSTS: "" if launch.host in LOCAL_HOSTS else launch.host,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # On an NPU, weights in a layout of their own cannot be replaced.
        "VLLM_ASCEND_ENABLE_NZ": "0",
        # for connections among the server's own processes
        "VLLM_HOST_IP": LOOPBACK if launch.part is None else launch.part.address,
    }
    # UNPICKLE makes vLLM unpickle the content of requests: only if the user allowed it for these
    # servers, never because a shell left it set.
    env.pop(UNPICKLE, None)
    if launch.transfer == "ipc":
        env[UNPICKLE] = "1"
    if launch.transfer == "nccl":
        env.setdefault(*LISTEN)
    if launch.experts:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only runner that records experts
    elif launch.kept:
        env["VLLM_USE_V2_MODEL_RUNNER"] = REPORTING_RUNNER
    if launch.lora_rank:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if launch.device is not None:
        env |= dict.fromkeys(servers.VISIBLE, launch.device)
    if cpu:
        env["OMP_NUM_THREADS"] = str(launch.threads)
        # one process less: starts in 16 s instead of 24 s, at the same tokens/s
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        env.setdefault("OMP_WAIT_POLICY", "passive")  # see `default_threads`
        if launch.widths.accelerators > 1:
            # vLLM binds each worker to a memory node of its own, of which a machine may have one
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # Otherwise the sampler compiles a C++ kernel during the first requests, for seconds during
        # which no pause could begin.
        env.setdefault("TORCH_COMPILE_DISABLE", "1")
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return env
