"""The interpolated proximal policy against its formula, token by token."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from areal_x.algorithms.proximal import interpolate
from tests.algorithms.agreement import agree
from tests.algorithms.frameworks import value_and_gradient


def make():
    rng = np.random.default_rng(0)
    versions = rng.integers(-1, 9, (3, 14)).astype(np.int32)  # -1 is no policy; 8 is newer than the version below
    return -np.abs(rng.normal(size=versions.shape)), -np.abs(rng.normal(size=versions.shape)), versions


def test_the_older_a_token_the_nearer_its_anchor_is_to_the_policy_that_learns():
    logp, behavior, versions = make()
    found = interpolate(logp, behavior, versions, 7)
    for at in np.ndindex(logp.shape):
        age = 7 - versions[at]
        share = {-1: 0, 0: 0, 1: 0, 2: 1 / 2, 3: 2 / 3, 4: 3 / 4, 5: 4 / 5, 6: 5 / 6, 7: 6 / 7, 8: 7 / 8}[age]
        assert found[at] == pytest.approx(behavior[at] + share * (logp[at] - behavior[at]), rel=1e-12)


def test_numpy_jax_and_torch_agree():
    agree(partial(interpolate, version=7), *make())
    agree(interpolate, *make(), np.int32(7))  # a version that is traced


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_the_policy_that_learns_gets_no_gradient_through_its_anchor(framework):
    logp, behavior, versions = make()

    def total(leaves, rest):
        return (interpolate(leaves["logp"], rest["behavior"], rest["versions"], 7) * leaves["logp"]).sum()

    rest = {"behavior": behavior, "versions": versions}
    _, gradient = value_and_gradient(total, {"logp": logp}, rest, framework=framework)
    np.testing.assert_allclose(gradient["logp"], interpolate(logp, behavior, versions, 7), rtol=1e-12)
