"""What every test may use: a tiny random model directory, made once."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import gin
import pytest
from hypothesis import settings

from tests import forking
from tests.servers import nothing_is_lost_unasked, run, vllm_engine, vllm_server, watch  # noqa: F401  (fixtures)

# How long an example takes says how busy the machine is.
settings.register_profile("any_speed", deadline=None)
settings.load_profile("any_speed")

os.environ.setdefault("QUICKSTART_STEPS", "6")  # of the notebook, which is run like a test


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # else what has the most tests comes first
    # What a shell starts in the background ignores Ctrl-C, and so would what that starts; tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Two workers on two cores: a second thread for products of tiny matrices would wait, spinning, for a core that another has.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Most of the suite's time is the compiler's, which needs half as long without these; other releases may lack the flag.
    if find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()


# The modules that take longest, so that no worker of pytest-xdist is left with one of them at the end.
LONGEST_FIRST = (
    "tests/torch/test_processes.py",
    "tests/engines/vllm/test_vllm_engine.py",
    "tests/jax/test_processes.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker of pytest-xdist takes a module whole, unless that says otherwise, so that what a fixture makes for a module is
    made once."""

    def module(item: pytest.Item) -> str:
        return item.nodeid.partition("::")[0]

    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(module(item)))
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(module(item), len(places)))


CHARACTERS = "0123456789+=,>.abcdefghijklmnopqrstuvwxyz "


def write_tokenizer(directory: Path, characters: str = CHARACTERS) -> None:
    """A character tokenizer in Hugging Face form: ids 0 and 1 are padding and end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<end>": 1, **{c: i + 2 for i, c in enumerate(characters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(directory)


def write_model(directory: Path, *, seed: int = 0, **changes: object) -> Path:
    """A random Qwen3 with its tokenizer, in the form `save_pretrained` gives, written without torch."""
    import numpy as np
    from safetensors.numpy import save_file

    c = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": len(CHARACTERS) + 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
        **changes,
    }
    rng = np.random.default_rng(seed)
    h, inter, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {
            p + "self_attn.q_proj.weight": (q, h),
            p + "self_attn.k_proj.weight": (kv, h),
            p + "self_attn.v_proj.weight": (kv, h),
            p + "self_attn.o_proj.weight": (h, q),
            p + "self_attn.q_norm.weight": (d,),
            p + "self_attn.k_norm.weight": (d,),
            p + "mlp.gate_proj.weight": (inter, h),
            p + "mlp.up_proj.weight": (inter, h),
            p + "mlp.down_proj.weight": (h, inter),
            p + "input_layernorm.weight": (h,),
            p + "post_attention_layernorm.weight": (h,),
        }
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], h)
    # Norms are drawn around 1 and matrices large enough that a wrong layer shows in the logits.
    draw = {
        n: rng.normal(1.0 if len(s) == 1 else 0.0, 0.1 if len(s) == 1 else 0.15, s).astype(np.float32)
        for n, s in shapes.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(draw, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(c, indent=2))
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True, seed=1)


@pytest.fixture(scope="session")
def model_dir_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a random model of `tests.models`, written once."""
    from tests.models import write_random

    return cache(lambda name: write_random(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(autouse=True)
def no_bindings() -> Iterator[None]:
    """What a config binds, and what is known of objects that gin made of it, ends with the test that read it."""
    yield
    gin.clear_config()
    if recorded := sys.modules.get("areal_x.config.writer"):
        recorded._made.clear()
        recorded._built.clear()


@pytest.fixture(scope="session", autouse=True)
def quick_compilation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """JAX compiles with little optimisation, and each program once: most of the time of tests that compile goes there. The
    programs lie where the other workers of pytest-xdist find them too."""
    if not find_spec("jax"):
        return
    import jax

    base = tmp_path_factory.getbasetemp()
    programs = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    settings = {
        "jax_compilation_cache_dir": str(programs),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_disable_most_optimizations": True,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
    # So that every process that a test starts takes them there too, and none from the user's own cache.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


# For a process whose JAX shall compile with as little optimisation.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def environment_with(devices: int, **more: str) -> dict[str, str]:
    """For a process whose JAX sees so many devices of a CPU, and which finds what this one can import."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    return {**os.environ, **QUICK, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": paths, **more}


def python_with(devices: int, *arguments: str, **environment: str) -> str:
    """What python with these arguments prints where JAX sees so many devices of a CPU."""
    made = environment_with(devices, **environment)
    answer = forking.run([sys.executable, *arguments], made, Path.cwd(), timeout=900)
    if answer.returncode:
        raise RuntimeError(answer.stderr)
    return answer.stdout


@pytest.fixture(scope="module", params=["jax", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that is installed."""
    pytest.importorskip(f"areal_x_{request.param}")
    return str(request.param)
