"""The watch over the servers of other tests sees a lost server and an engine that died, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from areal_x.engines.fleet.supervisor import Supervisor
from areal_x.engines.vllm.config import VLLMConfig
from tests.engines.fleet.watching import Watch, compare, tracebacks

START = "(APIServer pid=7) INFO 11-23 02:36:27 [api_utils.py:286] non-default args: {'port': 1}\n"
DIED = """\
(EngineCore pid=8) ERROR 11-23 02:27:38 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=8) ERROR 11-23 02:27:38 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=8) ERROR 11-23 02:27:38 [core.py:1512]   File "core.py", line 1, in step
(EngineCore pid=8) ERROR 11-23 02:27:38 [core.py:1512] RuntimeError: einsum(): subscript b has size 4
"""
ENDED = """\
(APIServer pid=7) INFO 11-23 02:27:38 [launcher.py:254] [shutdown] API server: shutdown triggered
(APIServer pid=7) ERROR 11-23 02:27:38 [async_llm.py:906] Traceback (most recent call last):
(APIServer pid=7) ERROR 11-23 02:27:38 [async_llm.py:906]   File "async_llm.py", line 1, in run
(APIServer pid=7) ERROR 11-23 02:27:38 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: see above
INFO:     Shutting down
"""
ERROR = "RuntimeError: einsum(): subscript b has size 4"


@pytest.mark.parametrize(
    ("log", "errors"),
    [
        (START, []),
        (START + DIED, [ERROR]),
        (START + DIED + DIED, [ERROR, ERROR]),
        (START + ENDED, []),
        (START + DIED + ENDED + START + DIED, [ERROR, ERROR]),
        (START + "Traceback (most recent call last):\n", ["a traceback without an end"]),
    ],
)
def test_the_errors_in_a_log_are_those_before_a_server_is_told_to_end(log: str, errors: list[str]) -> None:
    assert list(tracebacks(log)) == errors


def test_each_error_is_shown_once_and_to_the_test_in_which_it_came(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("another_test")  # this test's own is looked through when it has ended
    watch, log = Watch(), folder / "logs" / "vllm-0.log"
    log.parent.mkdir()
    log.write_text(START)
    watch.check((), (), folder)
    log.write_text(START + DIED)
    with pytest.raises(AssertionError, match=r"log has a traceback, which the test does not declare:\nRuntimeError: einsum"):
        watch.check((), (), None)
    watch.check((), (), None)
    log.write_text(START + DIED + DIED)
    watch.check((), ["^RuntimeError"], None)


def test_what_was_declared_must_come() -> None:
    compare("x", ["server 1 is lost", "server 1 does not come back"], ["1 is lost", "come back"])
    with pytest.raises(AssertionError, match=r"declared and did not come \(x\): \['2 is lost'\]"):
        compare("x", ["server 1 is lost"], ["1 is lost", "2 is lost"])


def test_a_fleet_that_an_engine_uses_is_watched(watch: Watch) -> None:
    async def nothing(replica: object) -> bool:
        return False

    async def scores(replica: object) -> np.ndarray:
        return np.zeros(1, np.float32)

    fleet = Supervisor(VLLMConfig(), print, nothing, nothing, scores, lambda: None).fleet  # type: ignore[arg-type]
    for name, end in (("a", fleet.lost), ("b", fleet.quarantine)):
        fleet.join(name, True, 0.0)
        fleet.due(0.0)
        fleet.reached(name)
        assert fleet.accepted(name, 0, 0.0)
        end(name, "it died", 1.0)
    with pytest.raises(AssertionError, match=r"a is lost \(it died\)[^\n]*\nb was quarantined: it died"):
        watch.check((), (), None)
