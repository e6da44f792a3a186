"""Teachers that read another prompt, and several teachers: through real trainers, against a forward pass in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms.recipes import grpo, multi_distill, self_distill
from areal_x.algorithms.teaching import shares, solution, solved_attempt
from areal_x.batching.batch import Models, make_batches
from areal_x.batching.teachers import Reader
from areal_x.errors import ConfigError, UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.preflight.algorithm import check_algorithm, check_teachers
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.reference import Reference
from areal_x.types import Batch, Episode, Group, Images, Kept, Scored, Task, Trajectory
from areal_x.workflows.single_turn import encode
from tests.experiments import BACKEND
from tests.thorough import further

ROW = 48
TASK = Task("t", "12+7=", "19", {"domain": "sums"})

on_both = pytest.mark.parametrize("backend", [BACKEND, *further("jax" if BACKEND == "torch" else "torch")])


def behind_hint(task: Task) -> str:
    return f"{task.answer}>{task.prompt}"


@pytest.fixture
def trainer_of() -> Callable[[str, Path], Trainer]:
    @cache
    def made(backend: str, directory: Path) -> Trainer:
        pytest.importorskip(f"areal_x_{backend}")
        config = TrainerConfig(model=ModelConfig(str(directory)), frozen=True, micro_batch_rows=2, row_length=ROW)
        return create_trainer(backend, config)

    return made


def reader_of(directory: Path) -> Reader:
    tokenizer = load_tokenizer(directory)
    return Reader(tokenizer, partial(encode, tokenizer))


def dialogue(directory: Path, texts: list[tuple[str, bool]], **changes: Any) -> Trajectory:
    """A trajectory of texts, each sampled or not."""
    tokenizer = load_tokenizer(directory)
    parts = [np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32) for text, _ in texts]
    mask = np.repeat([sampled for _, sampled in texts], [len(part) for part in parts])
    tokens = np.concatenate(parts)
    logp = np.where(mask, -1.0, 0).astype(np.float32)
    return Trajectory(tokens, mask, logp, np.where(mask, 0, -1).astype(np.int32), reward=1.0, **changes)


def groups_of(directory: Path, tasks: list[Task]) -> list[Group]:
    """Two attempts at each task, one of which called a tool between two of its texts."""
    answers = [[("19", True)], [("1+", True), ("=2", False), ("345", True)]]
    return [
        Group(
            task,
            ticket,
            0,
            tuple(Episode(Scored(1.0), (dialogue(directory, [(str(task.prompt), False), *said]),)) for said in answers),
        )
        for ticket, task in enumerate(tasks)
    ]


def expected(reference: Reference, prompt: np.ndarray, trajectory: Trajectory) -> np.ndarray:
    """The log-probabilities of a trajectory's tokens from its first sampled one on, behind a prompt."""
    begin = int(np.argmax(trajectory.mask))
    scored = reference.logprobs(np.concatenate([prompt, trajectory.tokens[begin:]]))
    return np.concatenate([np.zeros(begin), scored[len(prompt) :]])


def found(batch: Batch, groups: list[Group], **how: Any) -> list[np.ndarray]:
    from areal_x.batching.batch import pack_groups

    return pack_groups(groups, ROW, **how).packed.gather(np.asarray(batch.reference_logp))


@on_both
@pytest.mark.parametrize("share_prompts", [False, True])
def test_the_teacher_scores_the_same_answer_behind_its_own_prompt(
    backend: str, share_prompts: bool, trainer_of: Any, tiny_model_dir: Path
) -> None:
    groups = groups_of(tiny_model_dir, [TASK, replace(TASK, id="u", prompt="3+4=", answer="7")])
    reader, trainer = reader_of(tiny_model_dir), trainer_of(backend, tiny_model_dir)
    algorithm = self_distill(behind_hint, teacher="current")
    models = Models(trainer, reader=reader)
    (batch,) = make_batches(groups, algorithm, ROW, models, share_prompts=share_prompts)
    reference = Reference(tiny_model_dir)
    trajectories = [(group.task, t) for group in groups for e in group.episodes for t in e.trajectories]
    for logp, (task, t) in zip(found(batch, groups, share_prompts=share_prompts), trajectories, strict=True):
        wanted = expected(reference, reader.encode(behind_hint(task)), t)
        np.testing.assert_allclose(logp[t.mask], wanted[t.mask], atol=2e-4)
    assert np.abs(logp[t.mask] - expected(reference, reader.encode(task.prompt), t)[t.mask]).max() > 0.01


def test_without_a_hint_the_model_before_the_step_teaches_itself_nothing(trainer_of: Any, tiny_model_dir: Path) -> None:
    groups = groups_of(tiny_model_dir, [TASK])
    trainer = trainer_of(BACKEND, tiny_model_dir)
    algorithm = self_distill(lambda task: None, teacher="current")
    (batch,) = make_batches(groups, algorithm, ROW, Models(trainer, reader=reader_of(tiny_model_dir)))
    np.testing.assert_allclose(batch.reference_logp[batch.mask], trainer.logprobs(batch)[batch.mask], atol=1e-5)


def test_tokens_that_sampling_kept_are_those_that_the_teacher_chooses_from(trainer_of: Any, tiny_model_dir: Path) -> None:
    t = dialogue(tiny_model_dir, [("12+7=", False), ("19", True)])
    begin = int(np.argmax(t.mask))
    others = np.array([[tokens, (tokens + 3) % 20 + 2] for tokens in t.tokens[begin:]], np.int32)
    counts = np.where(t.mask, 2, 0).astype(np.int32)
    t = replace(t, kept=Kept(counts, others.reshape(-1)))
    group = Group(TASK, 0, 0, (Episode(Scored(1.0), (t,)),))
    reader = reader_of(tiny_model_dir)
    models = Models(trainer_of(BACKEND, tiny_model_dir), reader=reader)
    (batch,) = make_batches([group], self_distill(behind_hint, teacher="current"), ROW, models)
    prompt = reader.encode(behind_hint(TASK))
    table = Reference(tiny_model_dir).distributions(np.concatenate([prompt, t.tokens[begin:]]))[len(prompt) - 1 :]
    for i, (own, ids) in enumerate(zip(t.tokens[begin:], others, strict=True)):
        wanted = table[i, own] - np.logaddexp.reduce(table[i, ids])
        assert batch.reference_logp[batch.mask][i] == pytest.approx(wanted, abs=2e-4)


@on_both
def test_a_mixture_is_the_weighted_mean_of_its_teachers_log_probabilities(
    backend: str, trainer_of: Any, tiny_model_dir: Path, tied_model_dir: Path
) -> None:
    tasks = [TASK, replace(TASK, id="u", metadata={"domain": "other"}), replace(TASK, id="v", metadata={"domain": "both"})]
    groups, asked = groups_of(tiny_model_dir, tasks), []

    class Watched:
        def __init__(self, trainer: Trainer, name: str) -> None:
            self.trainer, self.name = trainer, name

        def logprobs(self, batch: Batch) -> np.ndarray:
            asked.append((self.name, int(np.asarray(batch.mask).sum())))
            return self.trainer.logprobs(batch)

    def weigh(task: Task) -> Mapping[str, float]:
        return {"sums": {"a": 1}, "other": {"b": 2.0, "a": 0.0}, "both": {"a": 1, "b": 3}}[task.metadata["domain"]]

    directories = {"a": tiny_model_dir, "b": tied_model_dir}
    teachers = {name: Watched(trainer_of(backend, path), name) for name, path in directories.items()}
    models = Models(trainer_of(backend, tiny_model_dir), teacher_servers=teachers)
    (batch,) = make_batches(groups, multi_distill(weigh), ROW, models)
    shares_of = [{"a": 1.0}, {"b": 1.0}, {"a": 0.25, "b": 0.75}]
    references = {name: Reference(path) for name, path in directories.items()}
    rows = iter(found(batch, groups))
    for group, own in zip(groups, shares_of, strict=True):
        for e in group.episodes:
            (t,) = e.trajectories
            wanted = sum(w * references[name].logprobs(t.tokens) for name, w in own.items())
            np.testing.assert_allclose(next(rows)[t.mask], wanted[t.mask], atol=2e-4)
    each = int(batch.mask.sum()) // 3
    assert sorted(asked) == [("a", 2 * each), ("b", 2 * each)]  # nobody scores what he does not teach


def test_the_gradient_of_a_mixture_is_that_of_the_weighted_divergences() -> None:
    """Summed over every token of a small vocabulary at its probability, by finite differences."""
    rng = np.random.default_rng(0)
    logits, teachers, weights = rng.normal(size=6), rng.normal(size=(3, 6)), np.array([0.2, 0.5, 0.3])
    log_q = teachers - np.logaddexp.reduce(teachers, axis=1, keepdims=True)

    def log_p(x: np.ndarray) -> np.ndarray:
        return x - np.logaddexp.reduce(x)

    def divergence(x: np.ndarray) -> float:
        return float(sum(w * (np.exp(log_p(x)) * (log_p(x) - q)).sum() for w, q in zip(weights, log_q, strict=True)))

    p, gap = np.exp(log_p(logits)), weights @ log_q - log_p(logits)
    policy_gradient = sum(p[y] * -gap[y] * (np.eye(6)[y] - p) for y in range(6))
    steps = 1e-6 * np.eye(6)
    numeric = np.array([(divergence(logits + s) - divergence(logits - s)) / 2e-6 for s in steps])
    np.testing.assert_allclose(policy_gradient, numeric, atol=1e-8)


def test_a_solution_is_shown_in_the_last_user_message_whatever_braces_it_has() -> None:
    messages = [
        {"role": "user", "content": "f = {x}"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "{hint}"},
    ]
    task = Task("t", messages, r"\frac{1}{2}")
    shown = solution(task, template="{prompt} [{hint}]")
    assert [m["content"] for m in shown] == ["f = {x}", "?", r"{hint} [\frac{1}{2}]"]  # type: ignore[index]
    assert messages[2]["content"] == "{hint}"  # the task itself has not changed
    assert solution(replace(task, prompt="1+1=", metadata={"why": "2"}), template="{hint}>{prompt}", key="why") == "2>1+1="
    with pytest.raises(UserError, match=r"task 't' has no solution .* its answer is None"):
        solution(Task("t", "1+1="))
    with pytest.raises(UserError, match="no user message"):
        solution(Task("t", [{"role": "system", "content": "be brief"}], "2"))


def test_another_attempt_that_succeeded_is_shown(tiny_model_dir: Path) -> None:
    said = {"19": 1.0, "18": 0.0, "17": 0.0}
    episodes = tuple(
        Episode(Scored(r), (dialogue(tiny_model_dir, [("12+7=", False), (text, True)]),)) for text, r in said.items()
    )
    group, tokenizer = Group(TASK, 0, 0, episodes), load_tokenizer(tiny_model_dir)
    show = partial(solved_attempt, group=group, tokenizer=tokenizer, template="{hint}>{prompt}")
    assert show(episode=episodes[1]) == "19>12+7="
    assert show(episode=episodes[0]) is None  # its own success is no news to it


@pytest.mark.parametrize("weights", [{"a": -1.0, "b": 2.0}, {"a": 0.0}, {}, {"a": float("nan")}])
def test_weights_that_are_none_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(UserError, match="finite, at least 0 and not all 0"):
        shares(weights, TASK)
    with pytest.raises(UserError, match="finite, at least 0 and not all 0"):
        multi_distill(weights)


def test_what_cannot_be_taught_is_said_with_its_task(trainer_of: Any, tiny_model_dir: Path) -> None:
    groups = groups_of(tiny_model_dir, [TASK])
    trainer = trainer_of(BACKEND, tiny_model_dir)
    models = Models(trainer, teacher_servers={"maths": trainer}, reader=reader_of(tiny_model_dir))

    def learn(algorithm: Any, given: list[Group] = groups) -> None:
        make_batches(given, algorithm, ROW, models)

    with pytest.raises(UserError, match=r"'t' is to be taught by 'sums', which train.teachers has not: it has 'maths'"):
        learn(multi_distill())
    with pytest.raises(UserError, match=r"task 't' names no teacher: it has no metadata\['domain'\]"):
        learn(multi_distill(), [replace(groups[0], task=replace(TASK, metadata={}))])
    with pytest.raises(UserError, match=r"for task 't', its context and an answer, has \d\d tokens .* raise train.row_length"):
        learn(self_distill(lambda task: "1" * 46, teacher="current"))
    with pytest.raises(UserError, match="returned 7 for task 't'"):
        learn(self_distill(lambda task: 7, teacher="current"))
    seen = Images(np.zeros((4, 3), np.float32), np.array([[1, 2, 2]], np.int32))
    pictured = replace(groups[0].episodes[0], trajectories=(replace(groups[0].episodes[0].trajectories[0], images=seen),))
    with pytest.raises(UserError, match="task 't' has images"):
        learn(self_distill(behind_hint, teacher="current"), [replace(groups[0], episodes=(pictured,))])


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"self_distill.teacher = 'best'"):
        self_distill(teacher="best")
    with pytest.raises(ConfigError, match=r"teacher_context = None .* teaches itself nothing"):
        self_distill(teacher="current", teacher_context=None)
    with pytest.raises(ConfigError, match=r"grpo.teacher_context .* left out, as no teacher"):
        grpo(teacher_context=behind_hint)
    with pytest.raises(ConfigError, match=r"grpo.teacher_weights"):
        grpo(teacher_weights=lambda task: {})
    with pytest.raises(ConfigError, match=r"without either 'reference' or 'teachers'"):
        multi_distill(kl_coefficient=0.1)
    with pytest.raises(ConfigError, match=r"multi_distill.clip = 0"):
        multi_distill(clip=0.0)
    assert multi_distill(rl=grpo()).advantages is grpo().advantages
    assert self_distill(reward_kl=0.1).needs == {"teacher"}


def test_check_names_the_task_that_no_teacher_teaches() -> None:
    tasks = [TASK, TASK, replace(TASK, id="u", metadata={"domain": "law"})]
    assert check_teachers(multi_distill(), ["sums"], tasks[:2]) == "sums teaches 2 of 2 tasks"
    with pytest.raises(UserError, match="task 'u' is to be taught by 'law'"):
        check_teachers(multi_distill(), ["sums"], tasks)
    pytest.importorskip(f"areal_x_{BACKEND}")
    for algorithm in (multi_distill(), self_distill(), self_distill(solved_attempt, teacher="current")):
        assert "has a gradient" in check_algorithm(algorithm, BACKEND, 2, [TASK], teachers=["sums"])
