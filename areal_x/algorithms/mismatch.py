"""How far trainer and engine disagree about the same tokens, by how many versions old a token is.

At lag 0 both hold the same weights, and what is left is numerical: another kernel, another
precision. At later lags it is what the policy has learnt since. Measured by the loss's own forward
pass: of the first optimizer step of a turn, that is the policy from before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from array_api_compat import array_namespace

from areal_x.algorithms.arrays import clamp, masked, stop_gradient
from areal_x.algorithms.kl import k3
from areal_x.types import NOT_THE_POLICY, Array, Batch, LossTerms, Policy

PREFIX = "mismatch/"
MOST_LAGS = 8  # the last one holds everything older


@dataclass(frozen=True)
class ByLag:
    """No loss: metrics of the log-ratio d = θ - b, clamped to ±20, of the tokens of each lag that a
    policy drew.

    Each is 0 elsewhere, so that a mean over all tokens is a sum over the lag's: see `by_lag`. lags:
    how many are told apart.
    """

    lags: int

    def __call__(self, policy: Policy, batch: Batch) -> LossTerms:
        ages: Array = batch.ages
        spoken = batch.mask & (batch.versions != NOT_THE_POLICY)
        xp = array_namespace(policy.logp)
        now, then = masked(stop_gradient(policy.logp), spoken), masked(batch.behavior_logp, spoken)
        d = clamp(now - then)
        ratio, ones = xp.exp(d), xp.ones_like(d)
        metrics: dict[str, Array] = {}
        for lag in range(self.lags):
            at = spoken & (ages >= lag if lag == self.lags - 1 else ages == lag)
            of_lag = {
                "tokens": ones,
                "kl": k3(then, now),
                "ratio": ratio,
                "squared": ratio * ratio,
                "largest_ratio": xp.exp(xp.abs(d)),
            }
            metrics |= {f"{PREFIX}{name}_lag{lag}": masked(x, at) for name, x in of_lag.items()}
        return xp.zeros_like(d), metrics


def by_lag(means: Mapping[str, float]) -> dict[str, float]:
    """What the means of `ByLag`'s metrics over a batch say of each lag that the batch has:

    tokens_lag: its share of the tokens. kl_lag: of the engine's policy from the trainer's, E[r - 1
    - log r], in nats a token. largest_ratio_lag: exp of the largest |d|. effective_share_lag: the
    effective sample size of tokens weighted by r, as a share of their number, (Σ r)² / (n Σ r²).
    """
    found: dict[str, float] = {}
    lag = 0
    while f"{PREFIX}tokens_lag{lag}" in means:
        share, kl, ratio, squared, largest = (
            means[f"{PREFIX}{name}_lag{lag}"]
            for name in ("tokens", "kl", "ratio", "squared", "largest_ratio")
        )
        if share > 0:
            of_lag = {
                "tokens": share,
                "kl": kl / share,
                "largest_ratio": largest,
                "effective_share": ratio**2 / (squared * share),
            }
            found |= {f"{PREFIX}{name}_lag{lag}": x for name, x in of_lag.items()}
        lag += 1
    return found
