"""What a vLLM server refuses because of how it was started, and how to start it."""

from __future__ import annotations

from areal_x.engines.fleet.client import MODEL
from areal_x.engines.vllm.plugin import BACKEND, RDT
from areal_x.engines.vllm.turns import GENERATE
from areal_x.errors import UserError

LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
OF_EVERY_SERVER = ("/v1/models", "/tokenize", "/v1/completions")


def required_flags(transfer: str) -> str:
    beside = {
        BACKEND: ", areal-x installed beside it",
        RDT: ", areal-x installed beside it, on a node of the Ray cluster with RAY_ADDRESS set",
    }.get(transfer, "")
    return (
        "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --logprobs-mode"
        " processed_logprobs "
        f"--served-model-name {MODEL} --weight-transfer-config"
        f' \'{{"backend":"{transfer}"}}\'{beside}'
    )


def explained(
    transfer: str, server: str, endpoint: str, status: int, words: str
) -> UserError | None:
    """Returns what the user must change (areal_x.engines.fleet.calls.Explanation). transfer: the
    weight-transfer backend that the server must have."""
    of_adapters = endpoint in (LOAD_ADAPTER, UNLOAD_ADAPTER)
    if status == 401:
        return UserError(
            f"{server} refused the key: set the environment variable that vllm.key_variable"
            " names to the server's key"
        )
    if status == 404 and endpoint in OF_EVERY_SERVER:
        wanted = "give a vLLM server's address without a path, like http://127.0.0.1:8000"
        return UserError(f"{server} does not offer {endpoint} ({status} {words}): {wanted}")
    # with other words the adapter was not found
    if status == 404 and of_adapters and words == "Not Found":
        wanted = (
            "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank"
            " RANK"
        )
        return UserError(f"{server} has no adapters enabled: {wanted}, at least lora.rank")
    if status == 404 and endpoint == GENERATE and "does not exist" in words:
        return None  # the adapter that a request named (areal_x.engines.fleet.named_adapters)
    if status in (403, 404) and not of_adapters:
        return UserError(
            f"{server} does not offer {endpoint} ({status} {words}): {required_flags(transfer)}"
        )
    return None
