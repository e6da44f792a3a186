"""Which devices a trainer can leave to servers. (That its state survives: areal_x.testing.conformance and test_sharding.)"""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from areal_x.errors import UserError
from areal_x_jax import resting


def test_only_a_process_that_frees_what_it_leaves_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(resting.ALLOCATOR, raising=False)
    resting.check_can_rest("cpu")
    with pytest.raises(UserError, match=r"needs XLA_PYTHON_CLIENT_ALLOCATOR=platform in the environment"):
        resting.check_can_rest("gpu")
    with pytest.raises(UserError, match="a TPU belongs to one process"):
        resting.check_can_rest("tpu")
    monkeypatch.setenv(resting.ALLOCATOR, "platform")
    resting.check_can_rest("gpu")
