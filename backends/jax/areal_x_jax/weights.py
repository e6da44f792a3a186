"""Conversion between Hugging Face's tensors and the decoder's stacked parameters, one tensor at a
time, directly to and from the devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.hf.adapters import PEFT_PREFIX
from areal_x.protocols.trainer import Mine
from areal_x_jax.architecture import STACKS, Architecture
from areal_x_jax.families import IN_MEMORY, ON_DISK
from areal_x_jax.leaf import Leaf
from areal_x_jax.parameters import (
    EXACT,
    FIXED,
    Params,
    head_of,
    layer_leaves,
    module_of,
    other_leaves,
    parameter_shapes,
    sizes_of,
)
from areal_x_jax.sharding import (
    ONE_DEVICE,
    Partitioner,
    addressable,
    parameter_shardings,
    put_sharded,
)
from areal_x_jax.varied_parameters import is_unused
from areal_x_jax.vision_architecture import MODULES, TOWER_MODULES
from areal_x_jax.vision_parameters import stack_of, tensor_name, vision_leaves

# Names of a language model's head in files.
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# What embeds the images of a Gemma 4 without a tower, in memory and in files.
EMBEDDERS = (
    ("model.embed_vision.multimodal_embedder.", "model.embed_vision."),
    ("model.embed_vision.p", "model.vision_embedder.p"),
)


@dataclass(frozen=True)
class Place:
    """The place of a tensor: path of its leaf, index in the stack (a layer, or a layer and an
    expert), the order of the leaf's axes in the tensor, some of which are joined or split there (None
    if they are the same), and the tensor's own shape."""

    path: tuple[str, ...]
    index: tuple[int, ...]
    order: tuple[int, ...] | None
    tensor: tuple[int, ...]


def places(arch: Architecture) -> dict[str, Place]:
    """Returns the place of every tensor by the name under which transformers saves it, in the
    model's order."""
    found, sizes = {}, sizes_of(arch)

    def place(path: tuple[str, ...], leaf: Leaf, *index: int) -> Place:
        tensor = tuple(sizes[axis] for axis in leaf.axes["{expert}" in leaf.name :])
        if leaf.order is not None:
            tensor = tuple(tensor[axis] for axis in leaf.order)
        if len(tensor) == 3 and "rank" in leaf.axes:  # of experts' adapters
            a, b, c = tensor
            tensor = (a * b, c) if leaf.axes[2] == "rank" else (a, b * c)
        if leaf.axes[:1] == ("delta_width",):  # each channel has a kernel of its own
            tensor = tensor[0], 1, tensor[1]
        return Place(path, index, leaf.order, tensor)

    outside = other_leaves(arch)
    if "embed" in outside:
        found[outside["embed"].name] = place(("embed",), outside["embed"])
    count = arch.experts.count if arch.experts else 0
    leaves, stacks = (
        layer_leaves(arch),
        {stack: arch.stacked(stack) for stack in STACKS},
    )
    for layer in range(arch.layers):
        for name, leaf in leaves.items():
            if layer not in stacks[leaf.stack]:
                continue
            at = stacks[leaf.stack].index(layer)
            full = f"{PEFT_PREFIX if arch.adapters else ''}{module_of(arch)}.layers.{layer}.{leaf.name}"
            path = "layers", name
            if "{expert}" in full:
                for expert in range(count):
                    found[full.format(expert=expert)] = place(path, leaf, at, expert)
            else:
                found[full] = place(path, leaf, at)
    for name, leaf in outside.items():
        found.setdefault(leaf.name, place((name,), leaf))
    if arch.vision is not None and arch.adapters is None:
        for within, leaf in vision_leaves(arch.vision).items():
            for index in np.ndindex(*(sizes[axis] for axis in stack_of(within))):
                found[tensor_name(leaf, index)] = place(("vision", *within), leaf, *index)
        if arch.vision.convolved:
            kernel = vision_leaves(arch.vision)["patch",].name
            whole = arch.vision.hidden, *arch.vision.form.patch
            found[kernel] = replace(found[kernel], tensor=whole)
    return found


def to_file(x: Any, order: tuple[int, ...] | None, shape: tuple[int, ...]) -> Any:
    """Returns an array, of numpy or JAX, as it stands in a file, with this shape. order: see `Place`."""
    return x if order is None else x.transpose(order).reshape(shape)


def from_file(x: np.ndarray, order: tuple[int, ...] | None, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a file's array as it stands in a leaf, with this shape. order: see `Place`."""
    if order is None:
        return x
    return x.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


def saved_name(arch: Architecture, name: str) -> str:
    """Returns the name under which transformers saves this tensor: vision-language models are on
    the hub under either of MODULES' names, other multimodal ones under those of files or memory."""
    if arch.adapters is not None:
        return name
    if arch.module:
        for module in (IN_MEMORY, ON_DISK):
            if name.startswith(f"{module}."):
                return f"{arch.module}.{name.removeprefix(f'{module}.')}"
        if arch.vision is not None and arch.module == ON_DISK:
            name = name.removeprefix("model.")
            for module in reversed(TOWER_MODULES):
                if name.startswith(f"{module}."):
                    return f"{arch.vision.module}.{name.removeprefix(f'{module}.')}"
        if arch.vision is not None and arch.vision.family == "gemma4_unified":
            for module, of_file in EMBEDDERS:
                if name.startswith(module):
                    return f"{of_file}{name.removeprefix(module)}"
        return head_of(arch) if name in HEADS else name
    if arch.vision is None:
        return name
    text, tower = MODULES[arch.vision.family]
    for prefix, module in (
        ("model.visual.", tower),
        ("visual.", tower),
        ("model.language_model.", text),
        ("model.", text),
    ):
        if name.startswith(prefix):
            return f"{module}.{name.removeprefix(prefix)}"
    return name


def from_tensors(
    arch: Architecture,
    tensors: Iterable[tuple[str, np.ndarray]],
    source: str,
    partitioner: Partitioner = ONE_DEVICE,
    dtype: Any = jnp.float32,
) -> Params:
    """Returns the tree of parameters in this dtype (EXACT ones in fp32) on the devices, sharded by the
    partitioner: the host holds one tensor at a time.

    Raises: UserError listing tensors that are missing, left over, of another shape, or not finite.
    """
    where, made = places(arch), parameter_shapes(arch)
    shardings = (
        parameter_shardings(partitioner, arch)
        if partitioner.mesh is not None
        else jax.tree.map(lambda _: None, made)
    )
    missing, left_over = set(where), []
    for given, tensor in tensors:
        name = saved_name(arch, given)
        if name not in where:
            if not is_ignored(arch, name):
                left_over.append(given)
            continue
        place = where[name]
        check_size(given, tensor.shape, place, source)
        holder, last = get_leaf(made, place.path[:-1]), place.path[-1]
        shape = holder[last].shape[len(place.index) :]
        value = np.asarray(from_file(tensor, place.order, shape), np.float32)
        unbounded = place.path[-1] == "bounds" and not np.isnan(value)
        if not (unbounded or np.isfinite(value).all()):
            raise UserError(
                f"{source}: {given} holds numbers that are not finite: the file is damaged, or its"
                " training failed"
            )
        value = value if place.path[-1] in EXACT else value.astype(dtype)
        holder[last] = write_into_stack(
            holder[last], value, place.index, get_leaf(shardings, place.path)
        )
        missing.discard(name)
    refuse_mismatch(missing, left_over, source)
    return made


def check_tensors(arch: Architecture, tensors: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raises: UserError for what `from_tensors` would refuse of tensors of these shapes, without
    reading them. A score may be missing, which then is 0."""
    where = places(arch)
    names = {saved_name(arch, given): given for given in tensors}
    for name in names.keys() & where.keys():
        check_size(names[name], tensors[names[name]], where[name], source)
    missing = where.keys() - names.keys() - ({"score.weight"} if arch.scores else set())
    refuse_mismatch(
        missing,
        [
            given
            for name, given in names.items()
            if name not in where and not is_ignored(arch, name)
        ],
        source,
    )


def as_stored(arch: Architecture, directory: Path) -> Architecture:
    """Returns the architecture with the names of a directory's tower, and without a tied head if the
    directory has a head of its own, which then counts, as it does in transformers: Mistral Small 3.1's
    config leaves out that it is not tied."""
    if arch.vision is not None and arch.vision.module in TOWER_MODULES:
        inner = TOWER_MODULES[1]
        if any(f"{inner}." in name for name in model_dir.shapes(directory)):
            arch = replace(arch, vision=replace(arch.vision, module=inner))
    if not arch.tied or arch.scores:
        return arch
    ends = head_of(arch), f"{module_of(arch)}.embed_tokens.weight"
    stored = {saved_name(arch, name): name for name in model_dir.shapes(directory)}
    if not all(name in stored for name in ends):
        return arch
    read = dict(model_dir.read_tensors(directory, {stored[name] for name in ends}))
    head, embedding = (read[stored[name]] for name in ends)
    return arch if np.array_equal(head, embedding) else replace(arch, tied=False)


def is_ignored(arch: Architecture, name: str) -> bool:
    """True for a tied head that was saved a second time, for a language model's head in a model that
    scores, for layers that predict further tokens, for what rotations compute anew, and for what no
    layer reads."""
    if name.startswith("mtp."):
        return arch.delta is not None
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    if is_beside(arch, name) or is_unused(arch, f"{module_of(arch)}.layers", name):
        return True
    further = (
        f"{module_of(arch)}.layers.{arch.layers + number}." for number in range(arch.predictors)
    )
    if name.startswith(tuple(further)) or (arch.predictors and ".mtp_" in name):
        return True
    return name == head_of(arch) and (arch.tied or arch.scores)


def is_beside(arch: Architecture, name: str) -> bool:
    """True for a tensor of the parts of a multimodal checkpoint that are not trained: a vision tower's,
    or only the pooling in it that Gemma 3 does not read, and what hears."""
    if arch.vision is not None:
        unread = f"{arch.vision.module}.head.", "model.audio_tower.", "model.embed_audio."
        return bool(arch.module) and name.startswith(unread)
    return bool(arch.module) and not name.startswith((f"{arch.module}.", head_of(arch), "score."))


def tensors_beside(arch: Architecture, directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields these tensors of a directory as they are, one at a time."""
    if arch.module:
        beside = {x for x in model_dir.shapes(directory) if is_beside(arch, saved_name(arch, x))}
        yield from model_dir.read_tensors(directory, beside)


def check_size(name: str, size: tuple[int, ...], place: Place, source: str) -> None:
    if size != place.tensor:
        raise UserError(
            f"{source}: {name} has the shape {size}, but its config.json requires {place.tensor}"
        )


def refuse_mismatch(missing: Collection[str], left_over: list[str], source: str) -> None:
    if missing or left_over:
        complaints = {"missing": sorted(missing), "left over": left_over}
        listed = "; ".join(
            f"{what} {_listed(names)}" for what, names in complaints.items() if names
        )
        raise UserError(
            f"the tensors of {source} are not those that its config.json requires: {listed}"
        )


def get_leaf(tree: Params, path: tuple[str, ...]) -> Any:
    """Returns the leaf or tree at a path."""
    return reduce(lambda inner, key: inner[key], path, tree)


def write_into_stack(
    whole: Any, value: np.ndarray, index: tuple[int, ...], sharding: Any
) -> jax.Array:
    """Returns `whole` (a shape as long as it is empty) with `value` at this index of its stack."""
    if not index:
        return put_sharded(np.ascontiguousarray(value), sharding)
    if not isinstance(whole, jax.Array):
        whole = jnp.zeros(whole.shape, value.dtype, device=sharding)
    part = value[(None,) * len(index)]
    start = np.array([*index, *(0 for _ in value.shape)], np.int32)
    return writer(sharding)(whole, part, start)


@cache
def writer(sharding: Any) -> Any:
    def write(whole: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(whole, part, list(start))

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def to_tensors(
    arch: Architecture, params: Params, dtype: Any = None, mine: Mine | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each tensor under its Hugging Face name, fetched from the devices one at a time.

    dtype: converts them, but for FIXED ones. mine: fetches only these (areal_x.protocols.trainer). The devices convert
    and transpose in a third of the host's time.
    """
    for name, part in to_arrays(arch, params, dtype):
        wanted = mine is None or mine(part.nbytes)
        part = addressable(part)
        if wanted:
            yield name, np.ascontiguousarray(jax.device_get(part)).reshape(part.shape)


def to_arrays(
    arch: Architecture, params: Params, dtype: Any = None
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the same on the devices, where processes may have parts of it."""
    for name, place in places(arch).items():
        leaf = get_leaf(params, place.path)
        part = leaf[place.index] if place.index else leaf
        if dtype is not None and place.path[-1] not in FIXED:
            part = part.astype(dtype)
        yield name, to_file(part, place.order, place.tensor)


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
