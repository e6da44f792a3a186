"""The sampler's states of gated delta rule layers (areal_x_jax.delta_rule), in place of keys and
values: of fixed size for each slot, whatever its length."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from areal_x_jax import delta_rule
from areal_x_jax.architecture import Architecture
from areal_x_jax.parameters import Params
from areal_x_jax.prefill_chunks import Chunk
from areal_x_jax.recurrent_layers import project_mixed, recurrent_inputs, recurrent_output


class State(NamedTuple):
    """A layer's last inputs of the convolution, oldest first, and matrices."""

    inputs: Float[Array, "slots channels width-1"]
    matrices: Float32[Array, "slots key_heads group key_dim value_dim"]


States: TypeAlias = tuple[State, ...]


def empty(arch: Architecture, slots: int, dtype: Any) -> States:
    rule = arch.delta
    if rule is None:
        return ()
    matrices = slots, rule.key_heads, rule.group, rule.key_dim, rule.value_dim
    return tuple(
        State(jnp.zeros((slots, rule.channels, rule.width - 1), dtype), jnp.zeros(matrices))
        for _ in rule.layers
    )


def advance(
    arch: Architecture,
    layer: Params,
    x: Float[Array, "slots hidden"],
    state: State,
    first: Bool[Array, " slots"],
) -> tuple[Float[Array, "slots values"], State]:
    """Returns a layer's outputs for the newest token of each slot, and the states after it. first:
    slots without earlier tokens, whose states are another sequence's."""
    mixed = project_mixed(arch, layer, x)
    inputs = jnp.where(first[:, None, None], 0, state.inputs)
    matrices = jnp.where(first[:, None, None, None, None], 0, state.matrices)
    seen = jnp.concatenate([inputs, mixed.channels[..., None].astype(inputs.dtype)], axis=-1)
    convolved = (seen * layer["convolution"].T).sum(-1)
    found, matrices = delta_rule.next_token(
        recurrent_inputs(arch, layer, convolved, mixed), matrices
    )
    return recurrent_output(arch, layer, found, mixed.gate), State(seen[..., 1:], matrices)


class Pending(NamedTuple):
    """A layer's state before several tokens of each slot, of which only some will count, and what is
    needed to advance it by those. seen: inputs of the convolution, those before the tokens first."""

    before: State
    seen: Float[Array, "slots channels width-1+tokens"]
    inputs: delta_rule.Inputs


def advance_several(
    arch: Architecture,
    layer: Params,
    x: Float[Array, "slots tokens hidden"],
    state: State,
    first: Bool[Array, " slots"],
) -> tuple[Float[Array, "slots tokens values"], Pending]:
    """Returns a layer's outputs for several tokens of each slot, one after another as `advance` computes
    them, and what `settled` needs."""
    mixed, tokens = project_mixed(arch, layer, x), x.shape[1]
    old = jnp.where(first[:, None, None], 0, state.inputs)
    matrices = jnp.where(first[:, None, None, None, None], 0, state.matrices)
    new = mixed.channels.swapaxes(1, 2).astype(old.dtype)
    seen = jnp.concatenate([old, new], axis=-1)
    kernel = layer["convolution"].T
    width = kernel.shape[-1]
    convolved = [(seen[..., at : at + width] * kernel).sum(-1) for at in range(tokens)]
    inputs = recurrent_inputs(arch, layer, jnp.stack(convolved, axis=1), mixed)
    found, after = [], matrices
    for at in range(tokens):
        one, after = delta_rule.next_token(_token(inputs, at), after)
        found.append(one)
    outputs = recurrent_output(arch, layer, jnp.stack(found, axis=1), mixed.gate)
    return outputs, Pending(State(old, matrices), seen, inputs)


def settled(pending: Pending, counts: Int[Array, " slots"]) -> State:
    """Returns the states after the first `counts` tokens of each slot."""
    before, seen, inputs = pending
    matrices, behind = before.matrices, before.inputs.shape[-1]
    for at in range(seen.shape[-1] - behind):
        _, after = delta_rule.next_token(_token(inputs, at), matrices)
        matrices = jnp.where((at < counts)[:, None, None, None, None], after, matrices)
    last = jax.vmap(lambda x, n: jax.lax.dynamic_slice_in_dim(x, n, behind, axis=1))(seen, counts)
    return State(last, matrices)


def _token(inputs: delta_rule.Inputs, at: int) -> delta_rule.Inputs:
    return delta_rule.Inputs(*(part[:, at] for part in inputs))


def prefill(
    arch: Architecture, layer: Params, x: Float[Array, "tokens hidden"], state: State, chunk: Chunk
) -> tuple[Float[Array, "tokens values"], State]:
    """Returns a layer's outputs for a chunk of prompts, and the states after its pieces."""
    mixed, behind = project_mixed(arch, layer, x), state.inputs.shape[-1]
    continues = chunk.past > 0
    before = jnp.where(continues, 0, delta_rule.NONE)
    old = state.inputs[chunk.slot[0]].T
    channels = jnp.concatenate([old.astype(mixed.channels.dtype), mixed.channels])
    ids = jnp.concatenate([jnp.full(behind, before), chunk.piece])
    convolved = delta_rule.convolve(channels[None], layer["convolution"], ids[None])[0, behind:]
    inputs = recurrent_inputs(arch, layer, convolved, mixed)
    found, scanned = delta_rule.scan_chunks(
        jax.tree.map(lambda part: part[None], inputs),
        chunk.piece[None],
        state.matrices[chunk.slot[0]][None],
        before,
    )

    def piece(i: Array, state: State) -> State:
        end = chunk.first[i] + chunk.length[i]
        last = jax.lax.dynamic_slice_in_dim(channels, end, behind)
        own = jax.lax.dynamic_slice_in_dim(ids, end, behind) == i
        after = State(
            jnp.where(own[:, None], last, 0).T.astype(state.inputs.dtype),
            delta_rule.state_after(scanned, end - 1),
        )
        return jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_index_in_dim(whole, new, chunk.slot[i], 0),
            state,
            after,
        )

    state = jax.lax.fori_loop(0, chunk.count, piece, state)
    return recurrent_output(arch, layer, found[0], mixed.gate), state
