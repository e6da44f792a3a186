"""Agents: programs that train through an OpenAI- or Anthropic-shaped API, conversations of several
turns, tools.

`from areal_x.agents import session` is all that a program outside of a run needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_x.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from areal_x.agents.agent import Agent as Agent
    from areal_x.agents.agent_process import AgentProcess as AgentProcess
    from areal_x.agents.chat.credit import Credit as Credit
    from areal_x.agents.chat.credit import episode_of_calls as episode_of_calls
    from areal_x.agents.chat.dialogue import ChatEngine as ChatEngine
    from areal_x.agents.chat.dialogue import Dialogue as Dialogue
    from areal_x.agents.chat.rendering import TemplateRenderer as TemplateRenderer
    from areal_x.agents.client import Session as Session
    from areal_x.agents.client import SessionError as SessionError
    from areal_x.agents.client import session as session
    from areal_x.agents.environment import Environment as Environment
    from areal_x.agents.environment import environment_tasks as environment_tasks
    from areal_x.agents.gateway import Gateway as Gateway
    from areal_x.agents.gateway import SessionLimits as SessionLimits
    from areal_x.agents.judge import LLMJudge as LLMJudge
    from areal_x.agents.multi_turn import MultiTurn as MultiTurn
    from areal_x.agents.multi_turn import ToolUse as ToolUse
    from areal_x.agents.online import Online as Online
    from areal_x.agents.online import online_tasks as online_tasks
    from areal_x.agents.remote_agent import RemoteAgent as RemoteAgent
    from areal_x.agents.swe import Swe as Swe
    from areal_x.agents.synthesis import Proposal as Proposal
    from areal_x.agents.synthesis import json_object as json_object
    from areal_x.agents.synthesis import verified as verified
    from areal_x.agents.tools.bm25 import BM25 as BM25
    from areal_x.agents.tools.calculator import Calculator as Calculator
    from areal_x.agents.tools.documents import DocumentSearch as DocumentSearch
    from areal_x.agents.tools.mcp_tools import McpServer as McpServer
    from areal_x.agents.tools.terminal import Terminal as Terminal
    from areal_x.agents.tools.toolbox import PythonExecutor as PythonExecutor
    from areal_x.agents.tools.toolbox import Toolbox as Toolbox
    from areal_x.agents.tools.toolbox import ToolError as ToolError

_NAMES = {
    "areal_x.agents.agent": "Agent",
    "areal_x.agents.agent_process": "AgentProcess",
    "areal_x.agents.chat.credit": "Credit episode_of_calls",
    "areal_x.agents.chat.dialogue": "Dialogue ChatEngine",
    "areal_x.agents.chat.rendering": "TemplateRenderer",
    "areal_x.agents.client": "Session SessionError session",
    "areal_x.agents.multi_turn": "MultiTurn ToolUse",
    "areal_x.agents.environment": "Environment environment_tasks",
    "areal_x.agents.gateway": "Gateway SessionLimits",
    "areal_x.agents.online": "Online online_tasks",
    "areal_x.agents.remote_agent": "RemoteAgent",
    "areal_x.agents.judge": "LLMJudge",
    "areal_x.agents.synthesis": "Proposal json_object verified",
    "areal_x.agents.swe": "Swe",
    "areal_x.agents.tools.bm25": "BM25",
    "areal_x.agents.tools.calculator": "Calculator",
    "areal_x.agents.tools.documents": "DocumentSearch",
    "areal_x.agents.tools.mcp_tools": "McpServer",
    "areal_x.agents.tools.terminal": "Terminal",
    "areal_x.agents.tools.toolbox": "PythonExecutor ToolError Toolbox",
}

# An episode's guard lives in this package and must start fast: nothing is imported before its use.
if not TYPE_CHECKING:  # to a type checker, every name would exist
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
