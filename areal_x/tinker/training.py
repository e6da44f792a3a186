"""What the requests that train a model do: create_model, forward, forward_backward, optim_step."""

from __future__ import annotations

import time

import numpy as np

from areal_x.errors import UserError
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x.runtime.thread import inline_or_in_pool
from areal_x.tinker import datums, requests, results
from areal_x.tinker.account import Account, Job
from areal_x.tinker.host import Work
from areal_x.tinker.journal import Sent
from areal_x.tinker.losses import Evaluated
from areal_x.tinker.models import Shape

MOST_RANK = 512
LEAST_RATE = 1e-300  # stands for 0, and is 0 in fp32


def create_model(account: Account, body: requests.CreateModel, sent: Sent) -> Job:
    """Raises: UserError; Unknown."""
    account.check_base(body.base_model)
    check_optimizer(body.optimizer_config.type)
    shape = shape_of(body.lora_config)
    seed = 0 if body.lora_config is None else body.lora_config.seed or 0
    if not 0 <= seed < 2**63:
        raise UserError(f"the seed {seed} is out of range")
    trained = account.begin_model(body.session_id, body.model_seq_id, shape, seed)
    model = trained.model

    async def work() -> results.Result:
        await account.run(trained, account.server.host.create)
        account.begin_run(model, body.user_metadata)
        return results.plain({"type": "create_model", "model_id": model.id})

    return Job(trained, 0, sent, work)


def forward_backward(
    account: Account, body: datums.ForwardBackward, sent: Sent, apart: bool = False
) -> Job:
    """apart: see `Gathering.forward`. Raises: Unknown."""
    trained = account.trained(body.model_id)

    async def work() -> results.Result:
        backward = not body.forward_only
        if backward:
            trained.snapshots.stepped = False
        start = time.perf_counter()
        own = Work(trained.model, body.datums, body.loss, body.config, backward)
        found = await account.server.gathering.forward(account.owner, own, apart)
        trained.snapshots.seconds += time.perf_counter() - start
        size = sum(x.targets.size for x in body.datums)
        return await inline_or_in_pool(size, outputs_of, body, *found)

    return Job(trained, body.seq_id, sent, work)


def outputs_of(
    body: datums.ForwardBackward, logprobs: list[np.ndarray], evaluated: Evaluated
) -> results.Result:
    outputs = []
    for datum, logp, terms in zip(body.datums, logprobs, evaluated.terms, strict=True):
        named = {"logprobs": logp, "elementwise_loss": terms}
        flat = datum.targets.shape[0] if datum.flat else datum.targets.shape
        outputs.append({name: x.reshape(flat) for name, x in named.items()})
    total = float(sum(np.sum(x, dtype=np.float64) for x in evaluated.terms))
    return results.forward_backward(outputs, {"loss:sum": total})


def optim_step(account: Account, body: requests.OptimStep, sent: Sent) -> Job:
    """Raises: UserError; Unknown."""
    trained = account.trained(body.model_id)
    optimizer = optimizer_of(body)

    async def work() -> results.Result:
        metrics = await account.run(trained, account.server.host.step, optimizer)
        trained.snapshots.stepped = True
        return results.plain({"metrics": dict(metrics)})

    return Job(trained, body.seq_id, sent, work)


def optimizer_of(body: requests.OptimStep) -> OptimizerConfig:
    """Raises: UserError."""
    if body.optimizer_params is not None:
        check_optimizer(body.optimizer_params.type)
    given = body.adam_params or requests.Adam()
    check_optimizer(given.type)
    if not given.learning_rate >= 0:
        raise UserError(f"learning_rate = {given.learning_rate} is not at least 0")
    if not (given.eps > 0 and given.weight_decay >= 0):
        raise UserError("eps must be above 0, and weight_decay at least 0")
    return OptimizerConfig(
        learning_rate=max(given.learning_rate, LEAST_RATE),
        beta1=given.beta1,
        beta2=given.beta2,
        eps=given.eps,
        weight_decay=given.weight_decay,
        clip_norm=max(given.grad_clip_norm, 0.0),
    )


def shape_of(lora: requests.Lora | None) -> Shape:
    """Raises: UserError."""
    if lora is None:
        return Shape(0)
    if not 1 <= lora.rank <= MOST_RANK:
        raise UserError(f"a LoRA rank is from 1 to {MOST_RANK}, not {lora.rank}")
    if not (lora.train_attn or lora.train_mlp):
        raise UserError(
            "adapters of the unembedding alone are not supported: train_attn or train_mlp"
        )
    return Shape(lora.rank, lora.train_attn, lora.train_mlp)


def check_optimizer(name: str) -> None:
    """Raises: UserError."""
    if name != "adamw":
        raise UserError(f"this server's optimizer is adamw, not {name!r}")
