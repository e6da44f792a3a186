"""Bugs in the gateway's worker processes, and in what the run keeps for them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

WORKERS = ("tests/agents/gateway/test_worker_processes.py",)
GATEWAY = "areal_x/agents/gateway/"

MUTANTS: list[Mutant] = [
    *planted(
        GATEWAY + "workers.py",
        WORKERS,
        (
            "an answer that a killed worker did not send is counted",
            "            self._drop(id, [call])\n",
            "            pass\n",
        ),
        ("a retry never gets the answer that the other worker made", "is_open is None or x in is_open", "True"),
    ),
    *planted(
        GATEWAY + "wire.py",
        WORKERS,
        ("any class is made", "kind != OBJECT or rest[0] not in CLASSES", "kind != OBJECT"),
        ("texts with half a character cannot be sent", 'value.encode("utf-8", "surrogatepass")', 'value.encode("utf-8")'),
    ),
    *planted(
        GATEWAY + "worker.py",
        WORKERS,
        ("a tokenizer that changed is used", 'if digest_of(tokenizer) != described["digest"]:', "if False:"),
        ("padding is a change of the tokenizer", 'name not in ("padding", "truncation")', "name"),
    ),
    *planted(
        GATEWAY + "remote.py",
        WORKERS,
        (
            "a reply is not found again",
            'self.channel.tell("remember", self.session, key, held.reply.reasoning, wire.dumps(held))',
            "pass",
        ),
    ),
]
