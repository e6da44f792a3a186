"""The mismatch between trainer and engine on the same tokens, by lag: the number of versions that a
token is old.

At lag 0 both hold the same weights, and the mismatch is numerical: different kernels, different
precision. At greater lags it includes what the policy has learnt since. It is measured in the
loss's own forward pass, which in the first optimizer step of a batch is that of the policy before
the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from array_api_compat import array_namespace

from areal_x.algorithms.arrays import clamp, masked, stop_gradient
from areal_x.algorithms.kl import k3
from areal_x.types import NOT_THE_POLICY, Array, Batch, LossTerms, Policy

PREFIX = "mismatch/"
MAX_LAGS = 8  # the last one holds everything older


@dataclass(frozen=True)
class LagMetrics:
    """A loss of 0 with metrics of the log-ratio d = logp - behavior, clamped to ±20, for each lag,
    over the tokens that a policy sampled.

    Each metric is 0 at tokens of other lags, so that its mean over all tokens is proportional to a
    sum over the lag's (see `metrics_by_lag`).
    """

    lags: int
    """Number of lags told apart; the last one includes all greater ones."""

    def __call__(self, policy: Policy, batch: Batch) -> LossTerms:
        ages: Array = batch.ages
        sampled = batch.mask & (batch.versions != NOT_THE_POLICY)
        xp = array_namespace(policy.logp)
        logp = masked(stop_gradient(policy.logp), sampled)
        behavior = masked(batch.behavior_logp, sampled)
        d = clamp(logp - behavior)
        ratio, ones = xp.exp(d), xp.ones_like(d)
        metrics: dict[str, Array] = {}
        for lag in range(self.lags):
            at = sampled & (ages >= lag if lag == self.lags - 1 else ages == lag)
            of_lag = {
                "tokens": ones,
                "kl": k3(behavior, logp),
                "ratio": ratio,
                "squared": ratio * ratio,
                "largest_ratio": xp.exp(xp.abs(d)),
            }
            metrics |= {f"{PREFIX}{name}_lag{lag}": masked(x, at) for name, x in of_lag.items()}
        return xp.zeros_like(d), metrics


def metrics_by_lag(means: Mapping[str, float]) -> dict[str, float]:
    """Converts the batch means of `LagMetrics`'s metrics to one row a lag that the batch has:

    tokens_lag: its share of the tokens. kl_lag: KL divergence of the engine's policy from the
    trainer's, E[r - 1 - log r], in nats a token. largest_ratio_lag: exp of the largest |d|.
    effective_share_lag: effective sample size of the tokens weighted by r, as a share of their
    number, (Σ r)² / (n Σ r²).
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
