"""Makes tasks for agents from the proposals of a module: of its program, or of a gin file's model.

    python -m areal_x.synthesize examples.customer_service.synthesis --tasks 200 --out tasks.jsonl
    python -m areal_x.synthesize MODULE --tasks 200 --out tasks.jsonl --gin FILE.gin -b "train.engine = 'vllm'"

The module has `proposed(seed)`, which yields proposals (areal_x.agents.Proposal), and `questions(seed)`,
which yields prompts for the model, each with a function that reads its text as a proposal. Every verifier
is tried in the sandbox, near duplicates are dropped, and what was refused is counted (docs/data.md).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import gin

from areal_x.agents.synthesis import Synthesized, proposals_of, synthesize, write_tasks
from areal_x.config.reader import Config
from areal_x.errors import UserError
from areal_x.experiment import Experiment
from areal_x.hf.model_dir import resolve
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.engine import SamplingParams
from areal_x.runtime.loop import run
from areal_x.sandbox.pool import Sandbox
from areal_x.train import fail, parser_of, with_config

ATTEMPTS = 20  # most proposals for each task that is wanted


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `areal_x.train` does."""
    parser = parser_of("synthesize", __doc__)
    parser.add_argument("module", metavar="MODULE", help="its name, as Python imports it")
    parser.add_argument("--tasks", type=int, required=True, metavar="N", help="how many to make")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "--gin", type=Path, metavar="FILE", help="its model proposes, on its engine"
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of a model's proposal, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    def write(made: Synthesized) -> None:
        write_tasks(options.out, made.tasks)
        print(f"{made}\nwritten to {options.out}")

    try:
        module = proposing(options.module, "proposed" if options.gin is None else "questions")
        if options.gin is None:
            write(run(by_program(module, options.tasks, options.seed), "synthesis"))
            return 0
    except UserError as error:
        return fail(error)

    def work(_: Config) -> None:
        experiment = gin.get_configurable("train")()
        of = experiment, module, options.tasks, options.seed, options.tokens
        write(run(by_model(*of), "synthesis"))

    return with_config(options.gin, [*options.bindings, "train.serving = True"], work)


def proposing(name: str, function: str) -> ModuleType:
    """Returns the module of this name. Raises: UserError if it is not there or lacks the function."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(name)
    except ImportError as error:
        raise UserError(
            f"the module {name!r} cannot be imported: {error}; give its name, such as"
            " examples.customer_service.synthesis"
        ) from error
    if not callable(getattr(module, function, None)):
        raise UserError(f"{name} has no function {function}(seed), which yields what to try")
    return module


async def by_program(module: ModuleType, count: int, seed: int) -> Synthesized:
    """Returns tasks that a module's program proposes."""
    sandbox = Sandbox(workers=2)
    try:
        return await synthesize(module.proposed(seed), sandbox, count, ATTEMPTS * count)
    finally:
        await sandbox.close()


async def by_model(
    experiment: Experiment, module: ModuleType, count: int, seed: int, tokens: int
) -> Synthesized:
    """Returns tasks that the model of an experiment proposes, on its engine. tokens: of one proposal, at
    most."""
    directory = resolve(experiment.trainer.model.path)
    tokenizer = load_tokenizer(directory)
    workflow = experiment.workflow.setup(tokenizer)
    trainer = experiment.create_models(directory, workflow).policy
    engine = experiment.create_engine(directory, trainer, workflow, Path(experiment.runs), print)
    sandbox = Sandbox(workers=2)
    sampling = SamplingParams(max_tokens=tokens)
    try:
        await engine.start()
        await engine.swap(engine.stage(trainer))
        proposals = proposals_of(engine, tokenizer, module.questions(seed), sampling)
        return await synthesize(proposals, sandbox, count, ATTEMPTS * count)
    finally:
        await workflow.close()
        await sandbox.close()
        await engine.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
