"""Runs a command-line agent once, pointed at the session of its episode, and prints its answer.

    python examples/coding_agents/launch.py claude-code "What is the opposite of hot?"

The agents are the programs as they are published, in their non-interactive modes:

    claude-code      npm's @anthropic-ai/claude-code, by Anthropic's messages
    codex            npm's @openai/codex, by OpenAI's responses
    opencode         npm's opencode-ai, by OpenAI's chat completions
    mini-swe-agent   PyPI's mini-swe-agent, by OpenAI's chat completions

Each gets an empty folder to work in and a home of its own, with nothing but the configuration below, so
that neither the user's settings nor earlier episodes change what it does. They are looked for in
AREAL_X_CLIENTS, by default the folder of this file: its node_modules, and its mini-swe-agent, which is
a Python environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "AREAL_X_CLIENTS"
MODEL = "policy"  # the gateway answers to any name


@dataclass(frozen=True)
class Start:
    """How a program is started. answer: the file that it writes its answer to; by default it prints
    nothing else."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    answer: Path | None = None


def installed(name: str) -> Path:
    """Returns the program of this name, wherever it is: it may not exist."""
    clients = Path(os.environ.get(FOLDER) or Path(__file__).parent)
    if name == "mini":
        return clients / "mini-swe-agent" / "bin" / name
    return clients / "node_modules" / ".bin" / name


def claude_code(prompt: str, home: Path, url: str, key: str) -> Start:
    """url: without the version, which its client appends itself."""
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",  # it lets root use tools without asking only where it is told so
    }
    options = ["--model", MODEL, "--permission-mode", "bypassPermissions", "--max-turns", "10"]
    return Start([str(installed("claude")), "-p", prompt, *options], environment)


def codex(prompt: str, home: Path, url: str, key: str) -> Start:
    settings = home / ".codex" / "config.toml"
    settings.parent.mkdir()
    settings.write_text(
        f'model = "{MODEL}"\n'
        'model_provider = "gateway"\n'
        'web_search = "disabled"\n'  # a tool of OpenAI's own servers
        "[model_providers.gateway]\n"
        'name = "gateway"\n'
        f'base_url = "{url}/v1"\n'
        'env_key = "OPENAI_API_KEY"\n'
        'wire_api = "responses"\n'
        "[analytics]\nenabled = false\n"
    )
    answer = home / "answer"
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command = [str(installed("codex")), "exec", *options, "-o", str(answer), prompt]
    return Start(command, {"OPENAI_API_KEY": key}, answer)


def opencode(prompt: str, home: Path, url: str, key: str) -> Start:
    settings = home / ".config" / "opencode" / "opencode.json"
    settings.parent.mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {MODEL: {"name": MODEL}},
    }
    model = f"gateway/{MODEL}"
    about = {
        "provider": {"gateway": provider},
        "model": model,
        "small_model": model,
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
    }
    settings.write_text(json.dumps(about))
    environment = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    return Start([str(installed("opencode")), "run", "-m", model, prompt], environment)


def mini_swe_agent(prompt: str, home: Path, url: str, key: str) -> Start:
    answer = home / "trajectory.json"
    environment = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",  # nobody knows what the policy costs
        "MSWEA_GLOBAL_CONFIG_DIR": str(home),
    }
    options = ["-m", f"openai/{MODEL}", "-y", "--exit-immediately", "-o", str(answer)]
    return Start([str(installed("mini")), *options, "-t", prompt], environment, answer)


AGENTS: Mapping[str, Callable[[str, Path, str, str], Start]] = {
    "claude-code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "mini-swe-agent": mini_swe_agent,
}


def answer_in(file: Path) -> str:
    """Returns the answer in a file that an agent wrote: mini-swe-agent's is in the record of all
    that it did."""
    text = file.read_text()
    return json.loads(text)["info"]["submission"] if file.suffix == ".json" else text


def main(agent: str, prompt: str) -> int:
    """Returns the exit status of the agent."""
    url = os.environ["ANTHROPIC_BASE_URL"]
    key = os.environ["ANTHROPIC_API_KEY"]
    with tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        home.mkdir()
        work.mkdir()
        start = AGENTS[agent](prompt, home, url, key)
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
        ended = subprocess.run(
            start.command,
            env={**kept, "HOME": str(home), **start.environment},
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=None if start.answer is None else sys.stderr,
            check=False,
        )
        if start.answer is not None and start.answer.exists():
            print(answer_in(start.answer), end="")
        return ended.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
