"""What is sent to an SGLang server and what is made of its answers, without one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_x.engines.fleet.failures import ServerLost, ServerRefused, ServerRestarted
from areal_x.engines.fleet.http import Pool
from areal_x.engines.fleet.staging import StagedFiles, Staging
from areal_x.engines.sglang import launcher
from areal_x.engines.sglang.client import SGLangClient
from areal_x.engines.sglang.config import SGLangConfig, check_run
from areal_x.engines.sglang.installed import check_version, installed
from areal_x.engines.sglang.requests import generate_body
from areal_x.engines.sglang.responses import Generated, completion_from, generated_from, scores_from
from areal_x.engines.sglang.server import CACHE_BYTES, MARGIN, Launch, cache_tokens, command, environment
from areal_x.engines.sglang.truncation import narrowed
from areal_x.engines.sglang.weights import check_covers
from areal_x.errors import ConfigError, TaskError, UserError
from areal_x.hf.model_dir import read_tensors
from areal_x.protocols.engine import EngineError, SamplingParams
from areal_x.testing.models import write_model
from tests.engines.conformance import truncated
from tests.engines.fleet.test_http import Server, talk

PROMPT = np.int32([3, 4, 5])


def answer(**changes: Any) -> Generated:
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 1, None]],
        **changes,
    }
    return generated_from(json.dumps({"text": "ab", "output_ids": [7, 1], "meta_info": meta}).encode())


# ---- requests


def test_stop_tokens_are_never_sent_with_what_switches_them_off() -> None:
    with_stops = generate_body(PROMPT, SamplingParams(stop_token_ids=(1, 2)), "policy", (), 48)
    without = generate_body(PROMPT, SamplingParams(), "policy", (), 48)
    assert (with_stops["sampling_params"]["ignore_eos"], without["sampling_params"]["ignore_eos"]) == (False, True)
    assert with_stops["sampling_params"]["stop_token_ids"] == [1, 2]


def test_every_request_has_a_seed_of_its_own_and_a_name_that_begins_no_others() -> None:
    bodies = [generate_body(PROMPT, SamplingParams(), "policy", (), 48) for _ in range(100)]
    assert len({body["sampling_params"]["sampling_seed"] for body in bodies}) == 100
    assert len({body["rid"] for body in bodies}) == 100
    assert len({len(body["rid"]) for body in bodies}) == 1


@pytest.mark.parametrize(
    ("sampling", "is_truncated"),
    [
        ({"top_k": 5}, True),
        ({"top_k": 50}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({}, False),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.9}, False),
    ],
)
def test_the_truncated_distribution_is_asked_for_where_there_is_one(sampling: dict[str, Any], is_truncated: bool) -> None:
    body = generate_body(PROMPT, SamplingParams(**sampling), "policy", (), 48)
    assert body.get("return_sampling_mask", False) is is_truncated
    if is_truncated:  # with an endless one the server refuses
        assert body["sampling_params"]["top_k"] == min(sampling.get("top_k", 48), 48)
        assert body["sampling_params"]["min_p"] == sampling.get("min_p", 0.0)


@pytest.mark.parametrize("most", [9, None])
def test_only_a_top_p_beside_others_gets_what_these_keep(most: int | None) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    logprobs = np.log(rng.dirichlet(np.full(50, 2.0), 40)).astype(np.float32)
    rows = [
        (int(rng.choice([1, 3, 9] if most else [3, 1 << 30])), float(rng.choice([1.0, 0.5])), float(rng.choice([0.0, 0.2])))
        for _ in logprobs
    ]
    top_ks, top_ps, min_ps = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = narrowed(torch.tensor(np.exp(logprobs)), top_ks, top_ps, min_ps, most).numpy()
    for row, (top_k, top_p, min_p), logp in zip(found, rows, logprobs, strict=True):
        expected = truncated(logp, min(top_k, 50), 1.0, min_p) if top_p < 1 else np.exp(logp)
        np.testing.assert_allclose(row, expected, atol=1e-6)
        assert (row > 0).tolist() == (expected > 0).tolist()


def test_a_top_p_beside_others_is_refused_by_name_where_the_run_did_not_start_the_server(tmp_path: Path) -> None:
    async def ask(**sampling: Any) -> None:
        client = SGLangClient("http://127.0.0.1:1", "key", "key", write_model(tmp_path))  # nothing listens there
        try:
            await client.generate(PROMPT, SamplingParams(**sampling))
        finally:
            await client.close()

    for beside in ({"top_k": 5}, {"min_p": 0.1}):
        with pytest.raises(UserError, match=r"sampling\.top_p = 0\.9 beside top_k or min_p .* let the run start the servers"):
            asyncio.run(ask(top_p=0.9, **beside))
        with pytest.raises(ServerLost):  # it was sent
            asyncio.run(ask(**beside))


def test_an_adapter_is_named_and_the_model_itself_is_not() -> None:
    assert "lora_path" not in generate_body(PROMPT, SamplingParams(), "policy", (), 48)
    assert generate_body(PROMPT, SamplingParams(), "policy-3", (), 48)["lora_path"] == "policy-3"


@pytest.mark.parametrize("token", [-1, 48, 10**6])
def test_a_token_outside_the_vocabulary_is_refused_before_it_is_sent(token: int, tmp_path: Path) -> None:
    model = write_model(tmp_path)

    async def ask() -> None:
        client = SGLangClient("http://127.0.0.1:1", "key", "key", model)  # nothing listens there
        vocabulary = client._vocabulary
        wrong = token if token < 0 or token >= vocabulary else vocabulary
        with pytest.raises(TaskError, match=f"the token {wrong} .* vocabulary of {vocabulary}"):
            await client.generate(np.int32([3, wrong]), SamplingParams())
        with pytest.raises(TaskError, match="vocabulary"):
            await client.probe("policy", [3, wrong])
        await client.close()

    asyncio.run(ask())


# ---- answers


def scored(*entries: tuple[float | None, int]) -> Generated:
    return answer(input_token_logprobs=[[logprob, token, None] for logprob, token in entries])


def test_a_prompts_logprobs_are_those_of_its_tokens_though_the_last_of_the_vocabulary_is_named_0() -> None:
    found = scores_from(scored((None, 5), (-1.5, 0), (-0.5, 0), (-2.0, 6)), [5, 43, 0, 6])
    assert found.tolist() == [0.0, -1.5, -0.5, -2.0]


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ((), "does not score prompts"),
        (((None, 5), (-1.0, 6)), "does not score prompts"),
        (((None, 5), (-1.0, 6), (-1.0, 8)), "does not score prompts"),
        (((None, 5), (-1.0, 6), (None, 7)), "omitted the log-probability"),
        (((None, 5), (-1.0, 6), (2.5, 7)), "omitted the log-probability"),
    ],
    ids=["none", "too few", "of other tokens", "null", "a logit"],
)
def test_a_prompts_logprobs_must_be_complete(entries: tuple[tuple[float | None, int], ...], error: str) -> None:
    with pytest.raises(EngineError, match=error):
        scores_from(scored(*entries), [5, 6, 7])


def test_tokens_have_their_logprobs_and_versions() -> None:
    completion = completion_from(answer(), (), is_truncated=False)
    assert completion.tokens.tolist() == [7, 1]
    assert completion.versions.tolist() == [3, 4]
    assert completion.logprobs.tolist() == [-0.5, -1.5]
    assert completion.finish_reason == "length"


def test_a_truncated_distributions_logprobs_are_the_renormalised_ones_beside_what_it_kept() -> None:
    truncated = {"output_token_sampling_logprobs": [-0.25, -1.0], "output_token_sampling_mask": [[7], [4, 1, 9]]}
    found = completion_from(answer(**truncated), (), is_truncated=True)
    assert found.logprobs.tolist() == [-0.25, -1.0]
    assert found.kept is not None
    assert (found.kept.counts.tolist(), found.kept.ids.tolist()) == ([1, 3], [7, 4, 1, 9])
    assert completion_from(answer(), (), is_truncated=False).kept is None
    with pytest.raises(EngineError, match="omitted the log-probability"):
        completion_from(answer(), (), is_truncated=True)


@pytest.mark.parametrize("mask", [None, [[7]], [[7], []], [[7], [4, 9]], [[7], [1], [1]]])
def test_kept_tokens_that_cannot_be_are_an_error(mask: Any) -> None:
    truncated = {"output_token_sampling_logprobs": [-0.25, -1.0], "output_token_sampling_mask": mask}
    with pytest.raises(EngineError, match=r"sets of kept tokens for 2 tokens"):
        completion_from(answer(**truncated), (), is_truncated=True)


@pytest.mark.parametrize(
    ("matched", "stops", "reason"),
    [(1, (1,), "stop"), (1, (5,), "length"), (1, (), "length"), ("ab", (), "stop"), ("ab", (5,), "stop")],
)
def test_only_what_the_request_named_ends_a_completion(matched: Any, stops: tuple[int, ...], reason: str) -> None:
    ended = answer(finish_reason={"type": "stop", "matched": matched})
    assert completion_from(ended, stops, is_truncated=False).finish_reason == reason


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight_versions": None}, EngineError, r"does not return the weight version .* 0\.5\.20"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, ServerRestarted, "for 2 tokens"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, ServerRestarted, "for 2 tokens"),
        ({"output_token_logprobs": [[-0.5, 7, None]]}, EngineError, "other tokens than it sampled"),
        ({"output_token_logprobs": [[-0.5, 7, None], [-0.5, 8, None]]}, EngineError, "other tokens than it sampled"),
        ({"output_token_logprobs": [[-0.5, 7, None], [None, 1, None]]}, EngineError, "may contain NaN"),
        ({"finish_reason": {"type": "crash"}}, EngineError, "ended a request with 'crash'"),
        ({"finish_reason": None}, EngineError, "ended a request with None"),
    ],
)
def test_an_answer_that_lacks_something_is_an_error(changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        completion_from(answer(**changes), (), is_truncated=False)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"meta_info": 3}', b"<html>"])
def test_what_is_no_answer_is_an_error_of_the_servers(body: bytes) -> None:
    with pytest.raises(EngineError, match="responded to a generate request with"):
        generated_from(body)


# ---- weights


Stage = Callable[[dict[str, np.ndarray]], StagedFiles]


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Stage]:
    staging = Staging(tmp_path / "staging")
    yield lambda tensors: staging.stage(tensors.items(), 1)
    staging.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t, None),
        (lambda t: {name: x for name, x in t.items() if "norm" not in name}, r"lack .*norm.* and \d+ more"),
        (lambda t: {**t, "model.extra.weight": np.zeros(3, np.float32)}, r"have, and the model has not, model\.extra\.weight:"),
        (lambda t: {name: x[:-1] if "embed" in name else x for name, x in t.items()}, "other shapes for .*embed"),
    ],
    ids=["the model's", "fewer", "more", "another shape"],
)
def test_staged_weights_must_be_the_models(change: Any, message: str | None, staged: Stage, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    files = staged(change(dict(read_tensors(model))))
    if message is None:
        check_covers(model, files.folder.parent, files.folder)
        return
    with pytest.raises(ServerRefused, match=message):
        check_covers(model, files.folder.parent, files.folder)


def test_a_truncated_file_and_a_folder_elsewhere_are_refused(staged: Stage, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    files = staged(dict(read_tensors(model)))
    with pytest.raises(ServerRefused, match="outside the staging folder"):
        check_covers(model, files.folder.parent, tmp_path / "model")
    file = next(files.folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ServerRefused, match=r"cannot be (read|loaded)"):
        check_covers(model, files.folder.parent, files.folder)


@pytest.mark.parametrize("has_head", [True, False])
def test_a_tied_head_may_be_among_the_tensors_or_not(has_head: bool, staged: Stage, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = dict(read_tensors(model))
    tensors.pop("lm_head.weight", None)
    for file in model.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, model / "model.safetensors")
    if has_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    files = staged(tensors)
    check_covers(model, files.folder.parent, files.folder)


# ---- how a server is started


def launch_of(model: Path, **changes: Any) -> Launch:
    return Launch(model, Path("log"), Path("staging"), 128, 8, seed=3, **changes)


def test_the_key_is_in_the_environment_and_on_no_command_line(tmp_path: Path) -> None:
    launch = launch_of(write_model(tmp_path))
    assert environment(launch, "the-key", cpu=True)[launcher.KEY] == "the-key"
    words = command(launch, 1234, cpu=True)
    assert "the-key" not in " ".join(words)
    assert words[words.index("--host") + 1] == "127.0.0.1"


def test_what_would_change_log_probabilities_is_not_inherited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    env = environment(launch_of(write_model(tmp_path)), "key", cpu=False)
    assert not {"SGLANG_RETURN_ORIGINAL_LOGPROB", "PYTHONPATH"} & env.keys()


def test_only_a_cpu_server_is_told_its_precision_and_its_cache(tmp_path: Path) -> None:
    launch = launch_of(write_model(tmp_path))
    assert "--dtype" in command(launch, 1, cpu=True)
    assert not {"--dtype", "--device", "--max-total-tokens"} & set(command(launch, 1, cpu=False))
    assert cache_tokens(launch) == (128 + MARGIN) * 8


@pytest.mark.parametrize(
    ("rank", "flags"), [(0, ["--enable-memory-saver"]), (4, ["--enable-memory-saver", "--enable-weights-cpu-backup"])]
)
def test_a_server_that_sleeps_saves_memory_on_a_gpu_and_the_weights_that_adapters_need(
    rank: int, flags: list[str], tmp_path: Path
) -> None:
    launch = launch_of(write_model(tmp_path), sleeps=True, lora_rank=rank)
    saving = {"--enable-memory-saver", "--enable-weights-cpu-backup"}
    assert [word for word in command(launch, 1, cpu=False) if word in saving] == flags
    # on a CPU the launcher's code saves memory, and reads whether to keep the weights
    assert [word for word in command(launch, 1, cpu=True) if word in saving] == flags[1:]


def test_a_large_models_cache_on_a_cpu_is_bounded(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**4, "head_dim": 128}))
    tokens = cache_tokens(launch_of(model))
    assert tokens * 2 * 4 * 10**4 * 128 * config["num_key_value_heads"] <= CACHE_BYTES or tokens == 2 * (128 + MARGIN)


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "nccl"}, r"sglang\.transport = 'nccl' .* 'files'"),
        ({"adaptive": True}, r"sglang\.adaptive = True .* sglang\.concurrency"),
        ({"hosts": 2}, r"sglang\.hosts = 2 .* one node each"),
        ({"arguments": ("--api-key=x",)}, r"sglang\.arguments .* without --api-key"),
        ({"arguments": ("--weight_version", "x")}, r"without --weight-version"),
        ({"arguments": ("--use-ray",)}, r"without --use-ray: .* does not reach"),
        ({"arguments": ("--rl-on-policy-target", "fsdp")}, r"sglang\.arguments .* without --rl-on-policy-target"),
        ({"servers": 0}, r"sglang\.servers = 0"),
        ({"urls": ("ftp://x",)}, r"sglang\.urls .* http://"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SGLangConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "here", "shards", "message"),
    [
        ({"most": 2}, True, 0, r"sglang\.most = 2 .* train\.cluster = 'here', where no machine joins: set sglang\.servers"),
        ({"devices": ("0",)}, False, 0, r"sglang\.devices .* Ray gives each server its accelerators"),
        ({}, False, 2, r"cluster\.shards = 2"),
        ({"urls": ("http://127.0.0.1:1",)}, False, 2, r"cluster\.shards = 2"),
    ],
)
def test_runs_that_sglang_does_not_serve_yet_are_refused_by_name(
    settings: dict[str, Any], here: bool, shards: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(SGLangConfig(**settings), here, shards, None)
    for placed in ({"servers": 4, "tensor": 2}, {"least": 1, "most": 3}):
        check_run(SGLangConfig(**placed), here=False, shards=0, sampling=None)
    seeded = SGLangConfig(arguments=("--enable-deterministic-inference",))
    check_run(seeded, here=True, shards=0, sampling=SamplingParams(top_k=5, top_p=0.9))
    with pytest.raises(ConfigError, match=r"sampling\.min_p = 0\.1 .* 0 with --enable-deterministic-inference"):
        check_run(seeded, here=True, shards=0, sampling=SamplingParams(min_p=0.1))
    elsewhere = SGLangConfig(urls=("http://127.0.0.1:1",))
    check_run(elsewhere, here=False, shards=0, sampling=SamplingParams(top_p=0.9))
    for beside in ({"top_k": 5}, {"min_p": 0.1}):
        check_run(SGLangConfig(), here=True, shards=0, sampling=SamplingParams(top_p=0.9, **beside))
        check_run(elsewhere, here=False, shards=0, sampling=SamplingParams(top_p=0.9, temperature=0.0, **beside))
        with pytest.raises(
            ConfigError, match=r"sampling\.top_p = 0\.9 .* 1\.0 beside top_k or min_p with servers of sglang\.urls"
        ):
            check_run(elsewhere, here=False, shards=0, sampling=SamplingParams(top_p=0.9, **beside))


def test_each_key_is_read_from_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "a")
    monkeypatch.delenv("SGLANG_ADMIN_API_KEY", raising=False)
    assert SGLangConfig().keys() == ("a", "a")
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "b")
    assert SGLangConfig().keys() == ("a", "b")


@pytest.mark.parametrize(
    ("version", "fits"), [("0.5.19", False), ("0.4.99.post1", False), ("0.5.20", True), ("0.6.0+cu13", True)]
)
def test_a_release_without_versions_of_tokens_is_refused(version: str, fits: bool) -> None:
    if fits:
        check_version(version, "it")
        return
    with pytest.raises(UserError, match=r"does not tell the weight version .* 0\.5\.20 or later"):
        check_version(version, "it")


def test_an_interpreter_without_sglang_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no SGLang: .* sglang\.python"):
        installed("")  # the tests' own
    with pytest.raises(UserError, match=r"sglang\.python = .* cannot be run"):
        installed(str(tmp_path / "nothing"))


def test_a_connection_that_the_server_had_closed_loses_nothing(tmp_path: Path) -> None:
    """As SGLang closes one that was idle for five seconds: the request had not reached it."""
    meta = {"finish_reason": {"type": "length", "length": 1}, "output_token_logprobs": [[-0.5, 7, None]]}
    meta["weight_versions"] = [{"version": "3", "start": 0, "end": 1}]
    body = json.dumps({"output_ids": [7], "meta_info": meta}).encode()
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    server = Server([[whole], [None], [whole]])
    model = write_model(tmp_path)

    async def ask_twice(pool: Pool) -> list[int]:
        client = SGLangClient(server.url, "key", "key", model)
        answers = [await client.generate(PROMPT, SamplingParams(max_tokens=1)) for _ in range(2)]
        await client.close()
        return [int(completion.tokens[0]) for completion in answers]

    assert talk(server, ask_twice) == [7, 7]
    assert server.connections == 2


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        ("400 Bad Request", {"success": False, "message": "Unsupported action='areal_x_prove {a long question}'"}),
        ("200 OK", {"success": True, "message": "Success."}),
        ("200 OK", {"success": True, "ranks": [{"checksums": {"model.norm.weight": "00"}}]}),
    ],
)
def test_a_server_without_the_action_for_proofs_is_one_short_sentence(status: str, answer: Any, tmp_path: Path) -> None:
    body = json.dumps(answer).encode()
    server = Server([[b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)]])

    async def ask(pool: Pool, ours: bool = True) -> str:
        client = SGLangClient(server.url, "key", "key", tmp_path, ours)
        with pytest.raises(ServerRefused) as error:
            await client.prove("{a long question}")
        await client.close()
        return str(error.value)

    assert "has no action for proofs" in (sentence := talk(server, ask))
    assert "question" not in sentence
    assert "that the run starts" in talk(server, lambda pool: ask(pool, ours=False))  # without asking
    assert server.connections == 1


PATCHED = """
import runpy, sys
from pathlib import Path
launcher = sys.argv[1]
runpy.run_path(launcher, run_name="__mp_main__")
import areal_x.engines.sglang.truncation
assert areal_x.__file__ == str(Path(launcher).parents[2] / "__init__.py"), areal_x.__file__
assert not {"sglang", "torch", "gin", "jaxtyping"} & sys.modules.keys()
seen = []
finders = [x for x in sys.meta_path if type(x).__name__ == "AfterImport"]
finders[0]._name, finders[0]._function = "wave", seen.append
import colorsys, wave
assert seen == [wave]
assert len(finders) == 3
try:
    import beside
except ImportError:
    print("fine")
"""


def test_a_servers_process_gets_this_package_alone_and_patches_a_module_as_it_is_imported(tmp_path: Path) -> None:
    """Not the packages beside it, which are those of another environment."""
    package = Path(launcher.__file__).parents[2]
    (tmp_path / package.name).symlink_to(package)
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / package.name / "engines" / "sglang" / "launcher.py"
    found = subprocess.run([sys.executable, "-I", "-c", PATCHED, str(path)], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.returncode) == ("fine\n", 0), found.stderr
