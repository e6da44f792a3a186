"""Agents that are programs: any command, in any language, run once per episode.

    train.workflow = @agent_process()
    agent_process.command = ("node", "agent.mjs")

The program finds the address and key of its session in its environment.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import gin

from areal_x.agents.agent import AgentWorkflow
from areal_x.agents.calling import AgentResult
from areal_x.agents.client import Session
from areal_x.agents.external_program import inherited_environment, run_program
from areal_x.agents.gateway.session import GatewaySession
from areal_x.errors import ConfigError, at_least
from areal_x.types import Task


@gin.configurable("agent_process", denylist=["host", "pool"])
@dataclass(frozen=True, kw_only=True)
class AgentProcess(AgentWorkflow):
    """Any command, in any language, that reads the address of its session from its environment.

    It finds OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, which the
    official clients read, and the task as JSON in AREAL_X_TASK (id, prompt and metadata, not the
    answer). It may give rewards to its session (areal_x.agents.session, or POST OPENAI_BASE_URL +
    "/reward"); otherwise `reward` scores what it printed. A nonzero exit status fails the episode.
    Everything that it started ends with it.
    """

    binding: ClassVar[str] = "agent_process"

    command: tuple[str, ...]
    """The words of the command, in which {prompt} and {id} stand for the task's. No shell parses
    it."""
    variables: tuple[str, ...] = ()
    """Names of the run's environment variables that it inherits, such as ("HTTPS_PROXY",
    "SEARCH_KEY"), beside PATH, HOME and others that hold no secret."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables, with their values."""
    directory: str = "."
    """Its working directory."""
    processes: int = 64
    """Most processes of one episode at once."""
    output_kilobytes: int = 64
    """How much of its output is kept; of more, the end."""

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise ConfigError(
                f"{self.binding}.command",
                self.command,
                'a tuple of words, as ("node", "agent.mjs")',
            )
        if isinstance(self.variables, str):
            raise ConfigError(
                f"{self.binding}.variables",
                self.variables,
                'a tuple of names, as ("HTTPS_PROXY",)',
            )
        at_least(f"{self.binding}.processes", self.processes, 1)
        at_least(f"{self.binding}.output_kilobytes", self.output_kilobytes, 1)

    def setup(self, tokenizer: Any) -> Any:
        """Raises: UserError if the program does not exist."""
        program = self.command[0]
        if shutil.which(program) is None and not (Path(self.directory) / program).is_file():
            raise ConfigError(
                f"{self.binding}.command",
                self.command,
                f"a program that exists: no {program!r} was found",
            )
        return super().setup(tokenizer)

    async def work(self, task: Task, session: GatewaySession) -> AgentResult:
        printed = await self.run_command(task, session, {})
        return None if session.state.rewards else printed

    async def run_command(
        self, task: Task, session: GatewaySession, more: Mapping[str, str]
    ) -> str:
        """Runs the program and returns what it printed. more: variables of its environment.

        Raises: ProgramFailed.
        """
        address = Session(session.url, session.key)
        environment = {
            **inherited_environment(self.variables),
            **address.environment,
            **self.environment,
            **more,
        }
        most = self.output_kilobytes * 1024
        return await run_program(
            self.command, task, environment, self.directory, most, self.processes
        )
