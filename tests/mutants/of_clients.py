"""Bugs in what the gateway makes of what real clients send."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

IGNORED = ("tests/agents/gateway/test_ignored.py",)
GATEWAY = "areal_x/agents/gateway/"

MUTANTS: list[Mutant] = [
    *planted(
        GATEWAY + "exchange.py",
        IGNORED,
        ("what changes the distribution is ignored", "            if name in WITHOUT_EFFECT:\n", "            if False:\n"),
        ("images below a tool's result are not counted", "below += [one", "[one"),
        ("a value without an effect is refused", "value == WITHOUT_EFFECT[name]", "False"),
    ),
    *planted(
        GATEWAY + "session.py",
        IGNORED,
        ("what is ignored is logged at each request", "if IGNORED + name not in self._warned", "if True"),
        ("responses are kept without number", "len(self.stored) > MOST_STORED", "False"),
    ),
    *planted(
        "areal_x/agents/external_program.py",
        ("tests/agents/test_agent.py",),
        ("the status of a program is taken from the thread that waits for it", "os.kill(process.pid, ", "process.send_signal("),
    ),
    *planted(
        GATEWAY + "content.py",
        IGNORED,
        (
            "a document of text is not shown",
            'return self.data if self.type == "text" else text_of(self.media_type, self.data)',
            "return None",
        ),
    ),
    *planted(
        GATEWAY + "tools.py",
        IGNORED,
        ("the call of a custom tool has JSON for its text", "            return text\n", "            return arguments\n"),
    ),
]
