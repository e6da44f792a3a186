"""The engine over vLLM servers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from areal_x.engines.fleet.engine import FleetEngine
from areal_x.engines.fleet.replica import DirectSender
from areal_x.engines.fleet.rotations import check_rotations
from areal_x.engines.vllm import adapters
from areal_x.engines.vllm.broadcaster import Broadcaster
from areal_x.engines.vllm.client import VLLMClient, vllm_client
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.features import Packer, check_sent_images, served_format
from areal_x.engines.vllm.gate import unprotected_warning
from areal_x.engines.vllm.handles import HandlesSender
from areal_x.engines.vllm.server import Launch
from areal_x.engines.vllm.transports import (
    TRANSPORTS,
    check_delta,
    check_machine,
    experimental,
)
from areal_x.protocols.engine import Request


class VLLMEngine(FleetEngine[VLLMConfig]):
    """The engine over vLLM servers."""

    context_flag: ClassVar[str] = VLLMClient.context_flag

    def check(self, trainer_here: bool) -> None:
        check_machine(self.config, trainer_here)
        check_rotations(self.config.kind, self.model)
        if self.room.rank:
            adapters.arguments(self.room.rank)  # rejects a rank above vLLM's maximum
        if self.lora is not None:
            check_delta(self.config, self.lora.rank)

    def launch(self, number: int) -> Launch:
        return Launch(**self.launch_settings(number), transfer=TRANSPORTS[self.config.transport])

    def connect(self, url: str) -> VLLMClient:
        key = os.environ.get(self.config.key_variable)
        return VLLMClient(url, key, TRANSPORTS[self.config.transport])

    def unprotected_warning(self, url: str) -> str:
        return unprotected_warning(url)

    @property
    def prove_every(self) -> int:
        return 0 if self.config.direct else self.config.prove_every

    def direct_sender(self) -> DirectSender | None:
        if not self.config.direct:
            return None
        self.report(experimental(self.config.transport))
        if self.config.transport == "handles":
            return HandlesSender(self.config, self.supervisor, self.dispatcher)
        return Broadcaster(self.config, self.supervisor, self.dispatcher, {})

    def features(self, request: Request) -> dict[str, Any] | None:
        if request.images is None:
            return None
        return self._packer.features(request.tokens, request.images)

    @cached_property
    def _packer(self) -> Packer:
        """Of images for the served model. Raises: UserError if its servers cannot be sent any."""
        check_sent_images(self.model, self.config)
        return Packer(served_format(self.model))

    def chat_servers(self) -> Sequence[VLLMClient]:
        return [vllm_client(self.supervisor.replicas[name]) for name in self.fleet.serving()]
