"""The log-probabilities recorded in a conversation equal the trainer's, wherever templates put the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tests.agents.chat.conversations import FAMILIES
from tests.agents.chat.talking import TURNS, talked
from tests.thorough import further


@pytest.mark.parametrize("family, backend", [*((family, "torch") for family in FAMILIES), *further(("qwen3", "jax"))])
def test_the_trainer_says_of_each_token_of_a_conversation_what_the_engine_said(family, backend, tmp_path):
    pytest.importorskip(backend)
    trajectories, recorded, computed = talked(family, backend, tmp_path / "model", range(8), slots=8)
    assert len(recorded) >= 8 * TURNS
    assert any(np.flatnonzero(np.diff(t.mask.astype(int)) == 1).size > 1 for t in trajectories)  # several turns in one line
    np.testing.assert_allclose(recorded, computed, atol=1e-4)
