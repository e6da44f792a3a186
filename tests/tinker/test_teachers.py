"""Models beside the one that is trained: clients sample from them and score with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("areal_x_torch")

from areal_x.testing.models import write_model
from areal_x.tinker.data import Datum
from tests.tinker.by_hand import ByHand
from tests.tinker.test_recovery import serving
from tests.tinker.test_server import BASE, OURS, TOKENS, post, result

TEACHER = "the/teacher"
PROMPT = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {"max_tokens": 2}, "prompt_logprobs": True}


def logprobs_of(directory: Path) -> np.ndarray:
    tokens = np.array(TOKENS, np.int32)
    found: np.ndarray = ByHand(directory, {}, 0.0).logprobs(Datum(tokens[:-1], tokens[1:, None])).detach().numpy()[:, 0]
    return found


def test_a_teacher_is_sampled_and_scores_by_its_own_weights_and_is_not_trained(tmp_path: Path) -> None:
    models = {BASE: write_model(tmp_path / "m", num_hidden_layers=1), TEACHER: write_model(tmp_path / "t", seed=1)}
    teachers = {TEACHER: models[TEACHER]}
    with serving(tmp_path, models[BASE], teachers) as (client, _, _):
        served = client.get("/api/v1/get_server_capabilities").json()["supported_models"]
        assert [(x["model_name"], x["trainable"], x["sampleable"]) for x in served] == [
            (BASE, True, True),
            (TEACHER, False, True),
        ]
        session = post(client, "create_session", tags=[], sdk_version="0")["session_id"]
        for number, (name, directory) in enumerate(models.items()):
            made = {"session_id": session, "sampling_session_seq_id": number, "base_model": name}
            sampler = post(client, "create_sampling_session", **made)["sampling_session_id"]
            found = result(client, post(client, "asample", sampling_session_id=sampler, seq_id=0, **PROMPT))
            np.testing.assert_allclose(found["prompt_logprobs"][1:], logprobs_of(directory), atol=2e-5)
            assert client.get(f"/api/v1/samplers/{sampler}").json()["base_model"] == name
        body = {"session_id": session, "model_seq_id": 0, "base_model": TEACHER, "lora_config": {"rank": 2}}
        assert "trains the model" in post(client, "create_model", OURS, 400, **body)["error"]
    with serving(tmp_path, models[BASE], teachers) as (client, _, _):  # started again
        once_more = result(client, post(client, "asample", sampling_session_id=sampler, seq_id=1, **PROMPT))
        assert once_more["prompt_logprobs"] == found["prompt_logprobs"]
    with serving(tmp_path, models[BASE]) as (client, _, _):
        failed = result(client, post(client, "asample", sampling_session_id=sampler, seq_id=2, **PROMPT))
        assert "start it with --teacher" in failed["error"]
