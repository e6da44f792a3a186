"""Bugs in who reaches a gateway, and in how episodes are given to workers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

NETWORK = ("tests/agents/gateway/test_network.py",)
REMOTE = ("tests/agents/test_remote_agent.py", "tests/agents/test_workers.py")
BOARD = ("tests/agents/test_board.py", *REMOTE)
GATEWAY = "areal_x/agents/gateway/"

MUTANTS: list[Mutant] = [
    *planted(
        GATEWAY + "network.py",
        NETWORK,
        ("plain HTTP is served to other machines", "if not self.certificate and not self.tls_by_proxy:", "if False:"),
        ("anybody may speak plain HTTP in place of a proxy", "if not self.certificate and not self.networks:", "if False:"),
        (
            "an IPv4 client of a socket for both families is in no network",
            'getattr(found, "ipv4_mapped", None) or found',
            "found",
        ),
        ("a renewed certificate is not used", "(times := self._times()) != self._renewed", "not (times := self._times())"),
        ("a key may be short", "if len(key) < LEAST_KEY:", "if not key:"),
    ),
    *planted(
        "areal_x/agents/address.py",
        (*NETWORK, "tests/test_agents_command.py"),
        ("keys are sent unencrypted", 'if parts.scheme == "http" and not is_loopback(host):', "if False:"),
        ("a key in an address is shown", "_without_user(parts)", "url"),
    ),
    *planted(
        GATEWAY + "connections.py",
        NETWORK,
        ("networks are not asked", "if not self._admits(address[0]):", "if False:"),
        ("clients name their own address", "proxy_headers=False", "proxy_headers=True"),
        ("handshakes are without number", "if len(self._handshakes) >= HANDSHAKES:", "if False:"),
        ("a handshake has no time limit", 'ssl_handshake_timeout": REQUEST_SECONDS', 'ssl_handshake_timeout": 60.0'),
        (
            "a failed handshake counts as a connection for good",
            "            self._open.pop(made, None)\n            accepted",
            "            accepted",
        ),
    ),
    *planted(
        GATEWAY + "gateway.py",
        NETWORK,
        ("whoever asks gets episodes", 'self._check_key(keys, "taking episodes")', "pass"),
    ),
    *planted(
        "areal_x/agents/board.py",
        BOARD,
        ("signs of life change nothing", "                self._leases[id].until = until\n", "                pass\n"),
        ("a worker that was given up keeps its session", "        lease.session.close()\n", ""),
        ("a worker that was given up may answer", "self._leases.pop(lease.session.id, None)", "pass"),
        (
            "an episode is lost with the worker that disconnects",
            "                self._put(offer, first=True)\n",
            "                pass\n",
        ),
        (
            "an episode that was cancelled as it was taken stays with its worker",
            "                self.end(offer.taken.result())\n",
            "                pass\n",
        ),
        (
            "rewards of a session are overruled by what a program printed",
            "None if session.state.rewards else answer.printed",
            "answer.printed",
        ),
    ),
    *planted(
        "areal_x/agents/remote_agent.py",
        BOARD,
        ("a dead worker's episode has failed", "while died < self.attempts:", "while attempt < 1:"),
        ("answers leave the run", "task.answer if answer else None", "task.answer"),
    ),
    *planted(
        "areal_x/agents/worker.py",
        REMOTE,
        (
            "an agent goes on after its episode was given to another",
            "self._running.pop(lease).cancel()",
            "self._running.pop(lease)",
        ),
        (
            "a worker that ends keeps its episodes until it is missed",
            'returns = [self._ask(f"work/{lease}/return", {}) for lease in running]',
            "returns = []",
        ),
    ),
    *planted(
        "areal_x/agents/client.py",
        REMOTE,
        ("keys follow redirections", "urllib.request.build_opener(_NoRedirects)", "urllib.request.build_opener()"),
    ),
]
