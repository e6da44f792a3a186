"""Model families go through a swap in a real SGLang server, compared with transformers, and prove what they use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.engines.fleet.proof.judge import Verdict
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from areal_x.testing.models import write_tokenizer
from tests.engines.conformance import expected_logprobs
from tests.engines.families import TIED, UNTIED, widened
from tests.engines.sglang.conftest import PYTHON
from tests.engines.sglang.test_sglang_heads import NO_SUCH_HEAD
from tests.engines.sglang.test_sglang_proof import REQUEST, proved
from tests.model_families import CASES, ON_SGLANG
from tests.models import write_config
from tests.servers import Run, Weights

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]


@pytest.mark.parametrize("head", ["", "-tied"])
@pytest.mark.parametrize("family", ON_SGLANG)
def test_after_a_swap_a_family_says_and_proves_what_the_new_weights_are(
    family: str, head: str, tmp_path: Path, run: Run
) -> None:
    if f"{family}{head}" in NO_SUCH_HEAD:
        pytest.skip("refused, as SGLang has no such head")
    config: dict[str, Any] = widened(CASES[f"{family}-0"]) | (TIED if head else UNTIED)
    old, new = (write_config(config, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    write_tokenizer(old)
    engine = SGLangEngine(SGLangConfig(context=64, concurrency=4, python=PYTHON), old, tmp_path)

    async def swap() -> None:
        await engine.start()
        for version, model in enumerate((old, new), 1):
            engine.stager._claimed = 0  # all tensors are proved
            await engine.swap(engine.stage(Weights(model, version)))
            assert await proved(engine) == Verdict([], {}, {})
            said = await engine.generate(REQUEST)
            np.testing.assert_allclose(said.logprobs, expected_logprobs(model, REQUEST, said), atol=1e-4)

    try:
        run(swap())
    finally:
        run(engine.close())
