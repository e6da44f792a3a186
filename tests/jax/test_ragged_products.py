"""Products of groups of rows by blocks: against XLA's, with groups of every kind of size, and their gradients."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp

from areal_x_jax.ragged_products import Blocks, by_blocks

SIZES = {
    "all alike": (8, 8, 8, 8),
    "some without rows": (0, 13, 0, 7, 0),
    "one has all": (0, 40, 0),
    "just more than a block each": (9, 9, 17, 5),
    "fewer rows than groups": (0, 1, 0, 0, 1, 0, 0, 0),
    "one row": (0, 0, 1),
    "one group": (11,),
    "more than the largest block": (300, 1, 0, 211),
    "every block needed": (9, 9),
    "no row": (0, 0),
}


@pytest.mark.parametrize("beyond", [0, 2, 6])
@pytest.mark.parametrize("name", SIZES)
def test_it_is_the_ragged_product(name, beyond):
    """beyond: rows of no group, as those of another device's experts are."""
    sizes = jnp.array(SIZES[name], jnp.int32)
    rows = int(sizes.sum()) + beyond
    if not rows:
        return
    rng = np.random.default_rng(len(name))
    x, of = (rng.normal(size=(rows, n)).astype(np.float32) for n in (5, 3))
    kernels = rng.normal(size=(len(sizes), 5, 3)).astype(np.float32)

    group = np.repeat(np.arange(len(sizes)), sizes)
    each = np.einsum("ni,nio->no", x[: len(group)], kernels[group])
    expected = np.concatenate([each, np.zeros((beyond, 3), np.float32)])
    np.testing.assert_allclose(jax.jit(by_blocks)(x, kernels, sizes), expected, atol=1e-5)

    gradient = jax.jit(jax.grad(lambda x, kernels: (by_blocks(x, kernels, sizes) * of).sum(), (0, 1)))
    of_x, of_kernels = gradient(jnp.asarray(x), jnp.asarray(kernels))
    of_each = np.einsum("no,nio->ni", of[: len(group)], kernels[group])
    np.testing.assert_allclose(of_x, np.concatenate([of_each, np.zeros((beyond, 5), np.float32)]), atol=1e-5)
    summed = np.zeros_like(kernels)
    np.add.at(summed, group, np.einsum("ni,no->nio", x[: len(group)], of[: len(group)]))
    np.testing.assert_allclose(of_kernels, summed, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 3, 16])
def test_there_are_blocks_for_any_sizes(groups):
    """Every row has a place of its own, however the rows are divided, and blocks are no more than needed at most."""
    rng = np.random.default_rng(groups)
    for rows in (1, 2, 7, 64, 129):
        for _ in range(10):
            sizes = rng.multinomial(rows, rng.dirichlet(np.full(groups, 0.3))).astype(np.int32)
            blocks = Blocks.of(rows, jnp.asarray(sizes))
            places = np.asarray(blocks.place)
            assert len(set(places)) == rows
            assert np.asarray(blocks.filled).sum() == rows
            np.testing.assert_array_equal(np.asarray(blocks.source).reshape(-1)[places], np.arange(rows))
            assert blocks.source.size <= 2 * rows + groups * blocks.source.shape[1]


def test_a_stage_axis_around_it():
    rng = np.random.default_rng(0)
    x, kernels = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 12, 5), (2, 3, 5, 4)))
    sizes = jnp.array([[4, 0, 8], [1, 10, 1]])
    both = jax.vmap(by_blocks)(x, kernels, sizes)
    for i in range(2):
        np.testing.assert_allclose(both[i], by_blocks(x[i], kernels[i], sizes[i]), atol=1e-5)
