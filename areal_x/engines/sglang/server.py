"""How an SGLang server is started: its command line and its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from areal_x.engines.fleet import server as servers
from areal_x.engines.sglang import launcher
from areal_x.engines.sglang.client import KIND, MARGIN, SGLangClient
from areal_x.engines.sglang.installed import installed, interpreter
from areal_x.errors import ConfigError
from areal_x.hf.config_defaults import described_text, vocabulary_of
from areal_x.protocols.speculation import Speculation

CACHE_BYTES = 1 << 30  # of a server on a CPU, whose default would be most of the machine's memory
# adapters that one batch may use, and that are kept before one is read again from its folder
BATCHED, CACHED = 8, 16
# Variables that lead the interpreter of another environment to this one's packages, or change what a
# server's log-probabilities are of.
DROPPED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_RETURN_ORIGINAL_LOGPROB")


@dataclass(frozen=True)
class Launch(servers.Launch):
    """How to start one SGLang server."""

    kind: ClassVar[str] = KIND

    python: str = ""
    """The setting sglang.python."""

    def command(self, port: int) -> list[str]:
        return command(self, port, installed(self.python).is_cpu)

    def environment(self, key: str) -> dict[str, str]:
        return environment(self, key, installed(self.python).is_cpu)

    def client(self, url: str, key: str) -> SGLangClient:
        return SGLangClient(url, key, key, self.model, ours=True)


def command(launch: Launch, port: int, cpu: bool) -> list[str]:
    arguments = {
        "--model-path": str(launch.model),
        "--host": launch.host,
        "--port": str(port),
        "--context-length": str(server_context(launch)),
        # as many as top-p may keep: else it is refused beside log-probabilities
        "--sampling-mask-max-tokens": str(vocabulary_of(launch.model)),
        "--max-running-requests": str(launch.concurrency),
        "--random-seed": str(launch.seed),
        "--weight-version": "0",
        "--grammar-backend": "none",
        "--log-level-http": "warning",
    }
    widths = launch.widths
    sizes = {"--tp-size": widths.tensor, "--ep-size": widths.expert}
    arguments |= {name: str(size) for name, size in sizes.items() if size > 1}
    flags = []
    if launch.speculation.active:
        arguments |= guessing(launch.speculation, cpu)
    if launch.lora_rank:
        flags.append("--enable-lora")
        batched = launch.lora_batched or BATCHED
        arguments |= {
            "--max-lora-rank": str(launch.lora_rank),
            "--lora-target-modules": "all",
            "--max-loras-per-batch": str(batched),
            "--max-loaded-loras": str(max(CACHED, batched)),
        }
    if cpu:
        # float32, as the trainers compute on a CPU, by PyTorch's own kernels
        arguments |= {
            "--device": "cpu",
            "--dtype": "float32",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--mem-fraction-static": "0.3",
            "--max-total-tokens": str(cache_tokens(launch)),
        }
        flags.append("--disable-overlap-schedule")
        if launch.lora_rank:
            arguments["--lora-backend"] = "torch_native"
    elif launch.sleeps:
        flags.append("--enable-memory-saver")  # on a CPU: areal_x.engines.sglang.cpu_sleep
    if launch.sleeps and launch.lora_rank:
        flags.append("--enable-weights-cpu-backup")
    pairs = [word for pair in arguments.items() for word in pair]
    return [
        interpreter(launch.python),
        "-P",
        str(Path(launcher.__file__)),
        *pairs,
        *flags,
        *launch.arguments,
    ]


def guessing(speculation: Speculation, cpu: bool) -> dict[str, str]:
    """Returns the arguments of speculative decoding: one chain of guesses, from n-grams.

    Raises: ConfigError for SGLang on a CPU.
    """
    check_exact(speculation, cpu)
    return {
        "--speculative-algorithm": "NGRAM",
        "--speculative-num-draft-tokens": str(speculation.tokens + 1),  # with the newest one
        "--speculative-ngram-min-bfs-breadth": "1",
        "--speculative-ngram-max-bfs-breadth": "1",
        "--speculative-ngram-max-trie-depth": str(speculation.longest + speculation.tokens),
    }


def check_exact(speculation: Speculation, cpu: bool) -> None:
    """Raises: ConfigError for SGLang on a CPU, where 0.5.23 checks guesses against the most likely
    token, whatever the temperature (`_verify_uses_greedy`)."""
    if speculation.active and cpu:
        wanted = (
            "'none' with SGLang on a CPU, where it takes the most likely token in place of a sampled"
            " one beside guesses"
        )
        raise ConfigError("speculation.method", speculation.method, wanted)


def server_context(launch: Launch) -> int:
    """Returns the context of the server, which may not be longer than the model's."""
    longest = described_text(launch.model).get("max_position_embeddings")
    wanted = launch.context + MARGIN
    return min(wanted, max(int(longest), launch.context)) if longest else wanted


def cache_tokens(launch: Launch) -> int:
    """Returns the tokens in the KV cache of a server on a CPU: as many as all requests may have, or
    as fit into CACHE_BYTES, and at least one request's."""
    config = described_text(launch.model)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    of_token = 2 * 4 * config["num_hidden_layers"] * head_dim
    of_token *= config.get("num_key_value_heads") or heads
    wanted = server_context(launch) * launch.concurrency
    return int(max(2 * server_context(launch), min(wanted, CACHE_BYTES // of_token)))


def environment(launch: Launch, key: str, cpu: bool) -> dict[str, str]:
    """Returns the server's environment. It carries the key, which never appears on a command line
    or in a log."""
    env = {name: x for name, x in os.environ.items() if name not in DROPPED}
    env |= {
        launcher.KEY: key,
        # /health generates a token otherwise, and waits for 20 s while the server is paused
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if launch.device is not None:
        env |= dict.fromkeys(servers.VISIBLE, launch.device)
    if cpu:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["OMP_NUM_THREADS"] = str(launch.threads)
        env.setdefault("OMP_WAIT_POLICY", "passive")  # see `default_threads`
        if (workers := launch.widths.accelerators) > 1:
            # SGLang gives each worker a memory node of its own, of which a machine may have one
            all_cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([all_cores] * workers))
    return env
