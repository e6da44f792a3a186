"""Fixtures for all tests: tiny random models, written once, and settings of pytest and JAX."""

from __future__ import annotations

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

from areal_x.testing.models import write_model
from tests import forking
from tests.servers import (  # noqa: F401  (fixtures)
    given_url,
    nothing_is_lost_unasked,
    other_model_dir,
    run,
    vllm_engine,
    vllm_server,
    watch,
)

pytest.register_assert_rewrite("areal_x.testing.conformance")

# The duration of an example depends on the load of the machine.
settings.register_profile("any_speed", deadline=None)
settings.load_profile("any_speed")

os.environ.setdefault("QUICKSTART_STEPS", "2")  # for the notebook, which is run as a test


# Compilation is most of the suite's time: it takes half as long without these emitters, and a fifth less if programs are not
# split for threads whose cores another worker occupies.
COMPILES_QUICKLY = (
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_multi_thread_eigen=false",
)


CACHED_BYTES = 2 << 30  # of compiled programs, the newest of all sessions


def pytest_sessionstart(session: pytest.Session) -> None:
    """Deletes the oldest compiled programs of earlier sessions. JAX would do it at each program that it writes: it reads the
    whole folder then, under a lock, which takes longer than to compile a small program."""
    cache = getattr(session.config, "cache", None)
    if cache is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    files = [(file.stat(), file) for file in cache.mkdir("programs").iterdir()]
    left = sum(stat.st_size for stat, _ in files) - CACHED_BYTES
    for stat, file in sorted(files, key=lambda x: x[0].st_mtime):
        if left <= 0:
            break
        file.unlink(missing_ok=True)  # another session may be at it
        left -= stat.st_size


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # else the modules with most tests come first
    # Programs that a shell starts in the background ignore Ctrl-C, and so do their children; tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Two workers on two cores: a second thread for products of tiny matrices would wait, spinning, for a core that another has.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if find_spec("jaxlib") and version("jaxlib").startswith("0.10."):  # other releases may lack the flags
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *COMPILES_QUICKLY]).strip()


# The modules that take longest, so that no worker of pytest-xdist is left with one of them at the end.
LONGEST_FIRST = (
    "tests/engines/vllm/test_vllm_engine.py",
    "tests/torch/test_processes.py",
    "tests/test_backends_conform.py",
    "tests/jax/test_processes.py",
    "tests/test_random_runs.py",
    "tests/test_recipes_run.py",
    "tests/test_share_prompts.py",
    "tests/test_experiment.py",
    "tests/sandbox/test_pool.py",
    "tests/jax/test_sharding.py",
    "tests/jax/test_optimizers.py",
    "colab/quickstart.ipynb",
    "tests/test_replay.py",
    "tests/test_losses_in_trainers.py",
    "tests/test_damaged.py",
    "tests/jax/test_lora.py",
    "tests/jax/test_images.py",
    "tests/runtime/test_loop_turns.py",
    "tests/jax/test_sampler.py",
    "tests/runtime/test_interrupts.py",
    "tests/engines/vllm/test_vllm_families.py",
    "tests/engines/vllm/test_vllm_torn.py",
    "tests/jax/test_sharded_checkpoint.py",
    "tests/test_docs.py",
    "tests/test_extras.py",
    "tests/agents/tools/test_mcp_tools.py",
    "tests/jax/test_attention.py",
    "tests/torch/test_decoder_blocks.py",
)
# Modules of which each function is one worker's.
DIVIDED = {"tests/jax/test_families.py"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Assigns each module to one worker of pytest-xdist, unless it is marked otherwise, so that module fixtures run once."""

    def module(item: pytest.Item) -> str:
        return item.nodeid.partition("::")[0]

    for item in items:
        if item.path.suffix == ".ipynb" and item.path.stem != "gradients":  # which trains no model
            item.add_marker(pytest.mark.cluster if item.path.stem == "cluster" else pytest.mark.thorough)
        if item.path.name == "trajectories.ipynb" and not find_spec("anywidget"):
            item.add_marker(pytest.mark.skip(reason="needs anywidget"))
        if item.path.name == "tinker.ipynb" and not os.environ.get("TINKER_PYTHON"):
            item.add_marker(pytest.mark.skip(reason="TINKER_PYTHON names no Python with the cookbook"))
        if item.get_closest_marker("xdist_group") is None:
            # A file of many cases, whose functions share no models that take long to make, would keep one worker alone at last.
            divided = module(item) in DIVIDED and isinstance(item, pytest.Function)
            group = f"{module(item)}::{item.originalname}" if divided else module(item)
            item.add_marker(pytest.mark.xdist_group(group))
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(module(item), len(places)))


pytest_plugins = ["tests.quick", "tests.thorough", "tests.garbage"]


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
    """Clears gin's bindings, and the record of objects that gin made, after each test."""
    yield
    gin.clear_config()
    if writer := sys.modules.get("areal_x.config.writer"):
        writer._made.clear()
        writer._built.clear()


@pytest.fixture(autouse=True)
def same_folder() -> Iterator[None]:
    """Fails a test that leaves this process in another working directory, where later tests of the worker would fail."""
    folder = Path.cwd()
    yield
    left_in = Path.cwd()
    os.chdir(folder)
    assert left_in == folder


@pytest.fixture(scope="session", autouse=True)
def quick_compilation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes JAX compile with little optimisation, and each program once: compilation takes most of these tests' time. The
    workers of pytest-xdist share the compiled programs, and so does the next session, through pytest's cache directory."""
    if not find_spec("jax"):
        return
    import jax

    base = tmp_path_factory.getbasetemp()
    programs = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    if request.config.pluginmanager.hasplugin("cacheprovider"):
        programs = request.config.cache.mkdir("programs")
    settings = {
        "jax_compilation_cache_dir": str(programs),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_disable_most_optimizations": True,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        # Processes that a test starts share them too, and do not use the user's own cache.
        if "cache" in name:
            os.environ[name.upper()] = str(value)


# Environment of a process whose JAX compiles with as little optimisation.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def environment_with(devices: int, **more: str) -> dict[str, str]:
    """Environment of a process whose JAX has this many CPU devices and which can import what this one can."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    return {**os.environ, **QUICK, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": paths, **more}


def python_with(devices: int, *arguments: str, **environment: str) -> str:
    """Runs python with these arguments and this many CPU devices for JAX; returns its output."""
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
