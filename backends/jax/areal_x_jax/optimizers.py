"""The optimizers: directions of a step, shardings of their states, and how states are saved.

Each one is clipping by global norm, a direction, decay of matrices and the learning rate; the
directions are about as large as AdamW's, so that one learning rate suits all of them. A leaf under
one of STACKS is a stack of layers, perhaps with experts within each: what is done to a matrix is
done to each of them separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey, KeyPath, tree_leaves_with_path, tree_map_with_path
from jaxtyping import Array, Float, Int32

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x_jax.architecture import Architecture
from areal_x_jax.parameters import FIXED, Params, layer_leaves
from areal_x_jax.sharding import addressable, put_sharded
from areal_x_jax.stack_order import in_model_order, stored
from areal_x_jax.weights import from_file, places, saved_name, to_file, write_into_stack

STACKS = DictKey("layers"), DictKey("deepstack")
# Muon's constants, as in its reference and torch.optim.Muon: the quintic's coefficients, its steps,
# the least norm, the momentum.
QUINTIC, STEPS, LEAST, MOMENTUM = (3.4445, -4.7750, 2.0315), 5, 1e-7, 0.95


class Settings(NamedTuple):
    """The numbers of an OptimizerConfig as inputs of a compiled step."""

    learning_rate: Array
    beta1: Array
    beta2: Array
    eps: Array
    weight_decay: Array
    clip_norm: Array
    """Infinite if nothing is clipped."""


def settings_of(config: OptimizerConfig, step: int) -> Settings:
    """Returns those of an optimizer step (0 is the first)."""
    return Settings(
        learning_rate=np.float32(config.learning_rate_at(np.float32(step))),
        beta1=np.float32(config.beta1),
        beta2=np.float32(config.beta2),
        eps=np.float32(config.eps),
        weight_decay=np.float32(config.weight_decay),
        clip_norm=np.float32(config.clip_norm or np.inf),
    )


def with_settings(config: OptimizerConfig, settings: Settings) -> optax.GradientTransformation:
    """Returns the optimizer of `make_optimizer` with its numbers in arrays, and states of the same
    form."""
    return _chain(
        config,
        optax.clip_by_global_norm(settings.clip_norm),
        optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps),
        settings.weight_decay,
        lambda _: settings.learning_rate,
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Chains clipping, a direction with moments in `config.moments`, decay of matrices, and the
    learning rate."""
    clips = config.clip_norm > 0
    return _chain(
        config,
        optax.clip_by_global_norm(config.clip_norm) if clips else optax.identity(),
        optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        config.weight_decay,
        config.learning_rate_at,
    )


def _chain(
    config: OptimizerConfig,
    clip: optax.GradientTransformation,
    adam: optax.GradientTransformation,
    weight_decay: Any,
    learning_rate_at: Any,
) -> optax.GradientTransformation:
    direction = {
        "adamw": adam,
        "adafactor": factored(),
        "muon": optax.partition({"muon": muon(), "adamw": adam}, _muon_labels),
    }[config.name]
    return of_trained(
        optax.chain(
            clip,
            with_moment_dtype(
                {"fp32": jnp.float32, "bf16": jnp.bfloat16}[config.moments], direction
            ),
            optax.add_decayed_weights(weight_decay, matrices),
            optax.scale_by_learning_rate(learning_rate_at),
        )
    )


def of_trained(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Leaves the parameters FIXED as they are: they have neither updates nor moments."""

    def trained(tree: Params) -> Params:
        return {
            n: trained(x) if isinstance(x, dict) else x for n, x in tree.items() if n not in FIXED
        }

    def whole(found: Params, tree: Params) -> Params:
        """Returns the updates of all parameters of a tree; of fixed ones 0."""
        return {
            n: jnp.zeros_like(x)
            if n in FIXED
            else (whole(found[n], x) if isinstance(x, dict) else found[n])
            for n, x in tree.items()
        }

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        of_params = None if params is None else trained(params)
        found, state = transform.update(trained(updates), state, of_params)
        return whole(found, updates), state

    return optax.GradientTransformation(lambda params: transform.init(trained(params)), update)


def matrices(params: Params) -> Params:
    """Returns for each leaf whether it is a matrix or a stack of matrices."""
    found: Params = tree_map_with_path(
        lambda path, x: x.ndim > (2 if any(key in path for key in STACKS) else 1), params
    )
    return found


def _muon_labels(params: Params) -> Params:
    """Muon gets a layer's matrices with more than one row and column; AdamW gets embeddings, heads,
    vectors and kernels of single channels."""

    def label(path: KeyPath, x: Array) -> str:
        of_layers = DictKey("layers") in path and DictKey("convolution") not in path
        return "muon" if of_layers and x.ndim > 2 and min(x.shape[-2:]) > 1 else "adamw"

    labels: Params = tree_map_with_path(label, params)
    return labels


def with_moment_dtype(
    dtype: Any, transform: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Runs a transform in fp32 on a state whose floating-point numbers have this dtype between
    steps."""

    def cast(state: Any, to: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(to) if jnp.issubdtype(x.dtype, jnp.floating) else x, state
        )

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        updates, state = transform.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(transform.init(params), dtype), update)


class Factored(NamedTuple):
    """Means of squared gradients over columns, [..., rows, 1], and over rows, [..., 1, columns];
    see `factored`."""

    count: Int32[Array, ""]
    row: Params
    column: Params


def factored(least: float = 1e-30) -> optax.GradientTransformation:
    """Adafactor without momentum and without scaling by the parameter: gradient / sqrt(v), divided
    by its root mean square if that is above 1.

    v = row · column / mean(row), two moving averages with the decay 1 - t^-0.8. A vector is a
    matrix of one column, whose v is exact. Source: arXiv 1804.04235, algorithm 4, with the decay of
    section 7.2. (optax's version factors the two longest axes, which may be that of layers, and
    takes the root mean square over all layers.)
    """

    def in_columns(tree: Params) -> Params:
        shaped: Params = jax.tree.map(
            lambda x, matrix: x if matrix else x[..., None], tree, matrices(tree)
        )
        return shaped

    def init(params: Params) -> Factored:
        shaped = in_columns(params)
        row = jax.tree.map(lambda x: jnp.zeros((*x.shape[:-1], 1), jnp.float32), shaped)
        column = jax.tree.map(
            lambda x: jnp.zeros((*x.shape[:-2], 1, x.shape[-1]), jnp.float32), shaped
        )
        return Factored(jnp.zeros((), jnp.int32), row, column)

    def update(
        updates: Params, state: Factored, params: Params | None = None
    ) -> tuple[Params, Factored]:
        count = optax.safe_increment(state.count)
        fresh = count.astype(jnp.float32) ** -0.8

        def average(old: Array, gradient: Array, axis: int) -> Array:
            return old + fresh * (jnp.mean(gradient**2 + least, axis, keepdims=True) - old)

        def direction(gradient: Array, row: Array, column: Array, like: Array) -> Array:
            # Two roots in a row: the product of two small means would be 0 in fp32.
            x = (
                gradient
                * jax.lax.rsqrt(row / jnp.mean(row, -2, keepdims=True))
                * jax.lax.rsqrt(column)
            )
            return (x / jnp.maximum(1, jnp.sqrt(jnp.mean(x**2, (-2, -1), keepdims=True)))).reshape(
                like.shape
            )

        shaped = in_columns(updates)
        row = jax.tree.map(lambda old, x: average(old, x, -1), state.row, shaped)
        column = jax.tree.map(lambda old, x: average(old, x, -2), state.column, shaped)
        return jax.tree.map(direction, shaped, row, column, updates), Factored(count, row, column)

    return optax.GradientTransformation(init, update)


def muon() -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised, times 0.2 · sqrt(the longer side): the root mean square of
    AdamW's updates.

    Sources: kellerjordan.github.io/posts/muon; the size, arXiv 2502.16982, eq. 4. (optax's version
    joins the axes of layers and experts, so that devices that share the experts would all gather
    them.)
    """

    def direction(momentum: Array) -> Array:
        # Layer by layer, because the iteration holds three copies of its matrix.
        return 0.2 * max(momentum.shape[-2:]) ** 0.5 * jax.lax.map(orthogonal, momentum)

    return optax.chain(
        optax.trace(MOMENTUM, nesterov=True),
        optax.stateless(lambda updates, _: jax.tree.map(direction, updates)),
    )


def orthogonal(x: Float[Array, "*stack rows columns"]) -> Float[Array, "*stack rows columns"]:
    """Returns approximately the nearest matrix with equal singular values: five steps of a quintic
    bring them to 0.7 … 1.2."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT).mT
    a, b, c = QUINTIC
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), LEAST)

    def step(_: Array, x: Array) -> Array:
        gram = x @ x.mT
        return a * x + (b * gram + c * gram @ gram) @ x

    return jax.lax.fori_loop(0, STEPS, step, x)


# ---- states: trees that contain copies of the tree of parameters, whole or in part


def parameter_path(path: KeyPath) -> tuple[str, ...]:
    """Returns the path of the parameter that a number of a state belongs to, () for a count."""
    return tuple(
        key.key for key in takewhile(lambda key: isinstance(key, DictKey), reversed(path))
    )[::-1]


def _moment(path: KeyPath) -> str:
    """Returns the moment that a number of a state belongs to, such as "trace"; "" for a count."""
    own = parameter_path(path)
    return str(path[-len(own) - 1].name) if own else ""


def moment_name(path: KeyPath) -> str:
    """Returns a moment's name in this backend's own form: moment and parameter,
    "trace.layers.q"."""
    return ".".join((_moment(path), *parameter_path(path)))


def moment_shardings(
    state: Any, params: Params, shardings: Params, replicated: NamedSharding
) -> Any:
    """Returns the shardings of a state: each moment like its parameter, except for axes it lacks;
    counts on every device."""
    of = {
        parameter_path(path): (x.shape, at)
        for (path, x), at in zip(
            tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }

    def lie(path: KeyPath, x: Array) -> NamedSharding:
        if not parameter_path(path):
            return replicated
        whole, at = of[parameter_path(path)]
        kept = (
            axis if mine == its else None
            for mine, its, axis in zip(x.shape, whole, at.spec, strict=False)
        )
        return NamedSharding(at.mesh, PartitionSpec(*kept))

    return tree_map_with_path(lie, state)


class MomentPlace(NamedTuple):
    """A moment of one tensor of the files: its name in the state, the path of its parameter, the
    index in its stack."""

    moment: str
    path: tuple[str, ...]
    index: tuple[int, ...]  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    tensor: tuple[int, ...]  # shape in a file
    order: tuple[int, ...] | None  # see areal_x_jax.weights.Place


IN_FILES = {"trace": "trace", "mu": "exp_avg", "nu": "exp_avg_sq", "row": "row", "column": "column"}
ACROSS = {"row": "column", "column": "row"}  # names in files for transposed kernels


def portable(config: OptimizerConfig, arch: Architecture) -> bool:
    """True if a state can be saved as moments of single tensors, for any backend. AdamW's always
    can. Muon and Adafactor compute with matrices: torch joins the tensors of a mixture's experts, PEFT
    those of their adapters, and torch makes other matrices of kernels of more than two axes: a vision
    tower's, a convolution's."""
    mixture = any(
        "{expert}" in leaf.name or {"experts", "rank"} <= {*leaf.axes}
        for leaf in layer_leaves(arch).values()
    )
    tower = arch.vision is not None and arch.adapters is None
    convolves = arch.delta is not None and arch.adapters is None
    return config.name == "adamw" or not (mixture or tower or convolves)


def moment_places(arch: Architecture, state: Any) -> dict[str, MomentPlace]:
    """Returns the moments of a state by their names in a file, "exp_avg.model.norm.weight"."""
    leaves = {
        (_moment(path), parameter_path(path)): x.shape
        for path, x in tree_leaves_with_path(state)
        if parameter_path(path)
    }
    found = {}
    for which, in_file in IN_FILES.items():
        for name, place in places(arch).items():
            if (which, place.path) not in leaves:
                continue
            own = leaves[which, place.path][len(place.index) :]
            of_file = in_file if place.order is None else ACROSS.get(in_file, in_file)
            across = own if place.order is None else own[::-1]
            whole = across if which in ACROSS else place.tensor
            found[f"{of_file}.{name}"] = MomentPlace(
                which, place.path, place.index, whole, place.order
            )
    return found


def moment_tensors(
    config: OptimizerConfig, arch: Architecture, state: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the moments of a state, one at a time: under the names of tensors if they are portable,
    else under those of this backend's parameters."""
    leaves = {
        (_moment(path), parameter_path(path)): x
        for path, x in tree_leaves_with_path(state)
        if parameter_path(path)
    }

    def fetched(x: Array) -> np.ndarray:
        return np.asarray(jax.device_get(addressable(x)))

    def in_file(own: MomentPlace) -> np.ndarray:
        whole = leaves[own.moment, own.path]
        value = fetched(whole[own.index] if own.index else whole)
        return np.ascontiguousarray(to_file(value, own.order, own.tensor)).reshape(own.tensor)

    if portable(config, arch):
        for name, place in moment_places(arch, state).items():
            yield name, in_file(place)
    else:
        for (moment, path), x in leaves.items():
            yield ".".join((moment, *path)), in_model_order(arch, path, fetched(x))


def read_moments(
    directory: Path, arch: Architecture, state: Any, shardings: Any, *, version: int, own_form: bool
) -> Any:
    """Returns a state of the shapes and dtypes of `state` with the moments of a checkpoint and all
    counts at `version`. own_form: the moments have the names of this backend's parameters.

    Raises: UserError for moments of another model.
    """
    read = (
        _read_own_form(arch, state, shardings, directory)
        if own_form
        else _read_portable(arch, state, shardings, directory)
    )
    # From a host value, so that each of the optimizer's counts gets a buffer of its own to donate.
    return jax.device_put(optax.tree.set(read, count=np.int32(version)), shardings)


def _read_portable(arch: Architecture, state: Any, shardings: Any, directory: Path) -> Any:
    """Returns the state with the moments of each tensor in a file, put on the devices one at a
    time."""
    wanted, source = moment_places(arch, state), directory / model_dir.MOMENTS
    of_leaves = zip(tree_leaves_with_path(state), jax.tree.leaves(shardings), strict=True)
    leaves = {
        (_moment(path), parameter_path(path)): (x, at)
        for (path, x), at in of_leaves
        if parameter_path(path)
    }
    made: dict[Any, Any] = {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, (x, _) in leaves.items()
    }
    for given, x in model_dir.read_moments(directory):
        which, _, tensor = given.partition(".")
        name = f"{which}.{saved_name(arch, tensor)}"
        own = wanted.pop(name, None)
        if own is None or own.tensor != x.shape:
            raise UserError(f"{source} is of another model: its {given} has no place in this one")
        old, at = leaves[own.moment, own.path]
        value = from_file(x, own.order, old.shape[len(own.index) :]).astype(old.dtype)
        if not np.isfinite(value).all():
            raise UserError(
                f"{source}: {given} holds numbers that are not finite: the file is damaged"
            )
        made[own.moment, own.path] = write_into_stack(
            made[own.moment, own.path], value, own.index, at
        )
    if wanted:
        raise UserError(f"{source} lacks {next(iter(wanted))}: copy the checkpoint again")
    return tree_map_with_path(
        lambda path, x: made[_moment(path), parameter_path(path)] if parameter_path(path) else x,
        state,
    )


def _read_own_form(arch: Architecture, state: Any, shardings: Any, directory: Path) -> Any:
    """Returns the state with the moments of a file in this backend's own form, put on the devices
    one at a time."""
    wanted = {
        moment_name(path): (parameter_path(path), x, at)
        for (path, x), at in zip(
            tree_leaves_with_path(state), jax.tree.leaves(shardings), strict=True
        )
    }
    found = {}
    for name, x in model_dir.read_moments(directory):
        own, old, at = wanted.get(name, ((), None, None))
        if old is None or old.shape != x.shape:
            raise UserError(
                f"{directory / model_dir.MOMENTS} is of another model: its {name} has no place in"
                " this one"
            )
        found[name] = put_sharded(stored(arch, own, x.astype(old.dtype)), at)
    missing = [
        name
        for path, _ in tree_leaves_with_path(state)
        if parameter_path(path) and (name := moment_name(path)) not in found
    ]
    if missing:
        raise UserError(
            f"{directory / model_dir.MOMENTS} lacks {missing[0]}: copy the checkpoint again"
        )
    return tree_map_with_path(
        lambda path, x: found[moment_name(path)] if parameter_path(path) else x, state
    )
