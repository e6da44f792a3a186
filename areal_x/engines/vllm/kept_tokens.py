"""Runs inside the vLLM server: reports which tokens top-p, top-k and min-p kept.

vLLM 0.32 can return them itself (--return-sampling-mask), but with its second model runner alone,
which needs a GPU, for requests with a top_k alone, and never beside a greedy request. Its
scheduler, its outputs and its generate endpoint pass them on for any runner; so the first runner
is made to fill them in, for the requests that truncate and for no others.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

REPORTING_RUNNER = "0"  # value of VLLM_USE_V2_MODEL_RUNNER with which a server reports them


def install() -> None:
    """Makes this process's sampler and scheduler report them. Costs nothing while no request
    truncates. A vLLM that cannot pass them on (areal_x.engines.vllm.dialects.KEPT_TOKENS) is left
    as it is."""
    from vllm.v1 import outputs

    if not hasattr(outputs, "SamplingMaskLists"):
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.sample.sampler import Sampler

    schedule, make, sample = Scheduler.__init__, Sampler.__init__, Sampler.sample

    @wraps(schedule)
    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        schedule(self, *arguments, **named)
        self.return_sampling_mask = True

    @wraps(make)
    def make_reporting(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self.kept = None
        _report_from_runner()  # imported by now, in a process that has one

    @wraps(sample)
    def sample_and_keep(self: Any, logits: Any, metadata: Any, *others: Any, **named: Any) -> Any:
        sampled, logprobs = sample(self, logits, metadata, *others, **named)
        self.kept = kept_by(logprobs, metadata)
        return sampled, logprobs

    Scheduler.__init__, Sampler.__init__, Sampler.sample = begin, make_reporting, sample_and_keep


def _report_from_runner() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    run = GPUModelRunner.sample_tokens
    if hasattr(run, "reports_kept"):
        return

    @wraps(run)
    def run_and_report(self: Any, *arguments: Any, **named: Any) -> Any:
        self.sampler.kept = None
        output = run(self, *arguments, **named)
        kept, self.sampler.kept = self.sampler.kept, None
        # Speculative decoding calls the sampler for other tokens than it returns.
        if kept is not None and self.speculative_config is None:
            # With asynchronous scheduling the output proper is inside.
            getattr(output, "_model_runner_output", output).sampling_masks = kept
        return output

    run_and_report.reports_kept = True  # type: ignore[attr-defined]
    GPUModelRunner.sample_tokens = run_and_report


def kept_by(logprobs: Any, metadata: Any) -> Any:
    """Returns the tokens that are left in each row that truncates, as vLLM's SamplingMaskLists; no
    token of a row that does not. None if no row does.

    logprobs: those of --logprobs-mode processed_logprobs, -inf where a token was left out.
    """
    import torch
    from vllm.v1.outputs import SamplingMaskLists
    from vllm.v1.sample.logits_processor import MinPLogitsProcessor
    from vllm.v1.sample.sampler import _SAMPLING_EPS

    if logprobs is None or metadata.all_greedy:
        return None
    each = []
    if metadata.top_k is not None:
        each.append(metadata.top_k < logprobs.shape[-1])
    if metadata.top_p is not None:
        each.append(metadata.top_p < 1)
    for processor in metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            each.append(processor.min_p.reshape(-1) > 0)
    if not each:
        return None
    rows = torch.stack(each).any(0)
    if not metadata.all_random:  # vLLM divides a greedy row by 1
        rows &= metadata.temperature >= _SAMPLING_EPS
    mask = (logprobs > -torch.inf) & rows[:, None]
    offsets = torch.nn.functional.pad(mask.sum(-1).cumsum(0), (1, 0))
    ids = mask.nonzero()[:, 1].to(torch.int32)
    return SamplingMaskLists(ids.cpu().numpy(), offsets.cpu().numpy())
