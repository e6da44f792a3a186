"""Bugs in what happens around the trainer: queue, runner, engines, weights, conversations, journal, checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

LINES = ("tests/agents/chat/test_merging.py", "tests/agents/chat/test_credit.py")

MUTANTS: list[Mutant] = [
    *planted(
        "areal_x/rollout/queue.py",
        ("tests/rollout/test_queue.py",),
        (
            "slow groups are passed over without bound",
            "        return batch if batch[-1] < self._oldest_unfinished() + self.window else None",
            "        return batch",
        ),
        (
            "a slot is free when its group is consumed, before its weights are out",
            " - (self.step - self.version) * self.groups_per_step",
            "",
        ),
        (
            "weights count as published that are not",
            "        self.version = version\n\n    @property\n    def unfinished",
            "        self.version = self.step\n\n    @property\n    def unfinished",
        ),
        (
            "a group that is given back keeps its slot",
            "        del self._live[ticket]\n        self.dropped += 1",
            "        self.dropped += 1",
        ),
        (
            "what an earlier run had not finished is forgotten",
            "        self._readmit = sorted(pending, reverse=True)",
            "        self._readmit = []",
        ),
    ),
    *planted(
        "areal_x/rollout/rollout.py",
        ("tests/rollout/test_rollout.py",),
        (
            "an evaluation does not wait for the weights that are on their way",
            "        self.finish_publication()\n        if returns :=",
            "        if returns :=",
        ),
        (
            "two publications are under way at a time",
            "        self.finish_publication()\n        began =",
            "        began =",
        ),
        (
            "a trainer changes weights that are being read",
            "if wait or staged.reads_trainer:",
            "if wait:",
        ),
    ),
    *planted(
        "areal_x/rollout/episodes.py",
        ("tests/rollout/test_runner.py", "tests/rollout/test_rollout.py"),
        (
            "the attempts of a group share a seed",
            "(self.settings.seed, TRAINING, group.ticket, index)",
            "(self.settings.seed, TRAINING, group.ticket)",
        ),
        ("evaluations draw what training draws", "TRAINING, EVALUATION = 0, 1 ", "TRAINING, EVALUATION = 0, 0 "),
        (
            "each call of an episode has the same seed",
            "            request = replace(request, seed=seed_of(*self.key, self.calls))",
            "            request = replace(request, seed=seed_of(*self.key))",
        ),
    ),
    *planted(
        "areal_x/rollout/runner.py",
        ("tests/rollout/test_runner.py", "tests/rollout/test_rollout.py"),
        (
            "staleness is counted from when a group is finished",
            "        rejected_by = self._rejected_by(group)\n",
            "        group = replace(group, admitted_version=self.queue.version)\n"
            "        rejected_by = self._rejected_by(group)\n",
        ),
        (
            "filters are not asked",
            "next((keep for keep in self.filters if not keep(group)), None)",
            "None",
        ),
    ),
    *planted(
        "areal_x/rollout/pacing.py",
        ("tests/rollout/test_pacing.py",),
        (
            "a wave enters in the order of arrival",
            "        wave = sorted(self._waiting.items(), key=lambda item: item[0])",
            "        wave = list(self._waiting.items())",
        ),
        (
            "a wave enters while the one before is in flight",
            "        if self._active or self._in_flight or not self._waiting:",
            "        if self._active or not self._waiting:",
        ),
    ),
    *planted(
        "areal_x/engines/embedded.py",
        ("tests/engines/test_embedded.py",),
        (
            "a completion's tokens all have the version that ended it",
            "            running.versions += [version] * count",
            "            running.versions = [version] * len(running.tokens)",
        ),
        (
            "after a swap a sequence draws its first tokens' numbers again",
            "            generated=len(self.tokens),",
            "            generated=0,",
        ),
        (
            "after a swap a sequence goes on from its prompt",
            "        so_far = np.concatenate([self.request.tokens, np.asarray(self.tokens, np.int32)]).astype(np.int32)",
            "        so_far = np.asarray(self.request.tokens, np.int32)",
        ),
        (
            "weights are not delivered but their version is",
            "            self._sampler.load(staged.snapshot)\n",
            "            self.version < 0 and self._sampler.load(staged.snapshot)\n",
        ),
        (
            "what ended with a stop token is said to have been cut off",
            '            finish_reason="stop" if stopped else "length",',
            '            finish_reason="length",',
        ),
    ),
    *planted(
        "areal_x/engines/fleet/slices.py",
        ("tests/engines/fleet/test_slices.py",),
        (
            "each slice may be as long as the whole",
            "    left = most - drawn\n",
            "    left = most\n",
        ),
        (
            "slices under different weights have one version",
            "        versions=np.concatenate([part.versions for part in parts]),",
            "        versions=np.concatenate([parts[-1].versions[:1].repeat(len(part.versions)) for part in parts]),",
        ),
        (
            "a slice's prompt lacks what was drawn before",
            "np.concatenate([prompt, *(part.tokens for part in parts)])",
            "np.concatenate([prompt, *(part.tokens for part in parts[-1:])])",
        ),
    ),
    *planted(
        "areal_x/engines/fleet/routing.py",
        ("tests/engines/fleet/test_fleet.py", "tests/engines/vllm/test_vllm_client.py"),
        (
            "a block's name does not depend on what stands before it",
            "        chain = hash((chain, data[4 * start : 4 * end]))",
            "        chain = hash(data[4 * start : 4 * end])",
        ),
    ),
    *planted(
        "areal_x/engines/fleet/dispatcher.py",
        ("tests/engines/vllm/test_vllm_spread.py",),
        (
            "a new request goes before those that wait",
            "        if not self._waiting:\n            server = self._route",
            "        if True:\n            server = self._route",
        ),
    ),
    *planted(
        "areal_x/engines/fleet/fleet.py",
        ("tests/engines/fleet/test_fleet.py",),
        (
            "a server that comes back serves with old weights",
            "        if not self._is(name, State.CHECKING) or version != self.target:",
            "        if not self._is(name, State.CHECKING):",
        ),
        (
            "the requests of a lost server are lost",
            "        member.retry_at = now + wait\n        self._release(member)\n",
            "        member.retry_at = now + wait\n",
        ),
    ),
    *planted(
        "areal_x/agents/chat/merging.py",
        LINES,
        (
            "a tool's output is trained on",
            "        mask=np.concatenate([old.mask, new.mask[held:]]),",
            "        mask=np.concatenate([old.mask, np.ones(len(new.mask) - held, np.bool_)]),",
        ),
        (
            "the log-probabilities of earlier turns are lost",
            "        logprobs=np.concatenate([old.logprobs, new.logprobs[held:]]),",
            "        logprobs=new.logprobs,",
        ),
        ("each call is trained on as if it had no history", "        if whole:\n", "        if not trajectories:\n"),
    ),
    *planted(
        "areal_x/agents/chat/credit.py",
        LINES,
        (
            "earlier calls count more than later ones",
            "            counts = [credit.discount ** (last - index) for index in range(len(calls))]",
            "            counts = [credit.discount**index for index in range(len(calls))]",
        ),
        (
            "every call is credited where only the last should be",
            "            return [item.trajectory for item in separate_calls(calls[last:]).trajectories]",
            "            return [item.trajectory for item in separate_calls(calls).trajectories]",
        ),
    ),
    *planted(
        "areal_x/agents/chat/prompts.py",
        ("tests/agents/chat/test_prompts.py",),
        (
            "a conversation's history is tokenised anew",
            "    if not text.startswith(held.before):\n",
            "    if text is not None:\n",
        ),
    ),
    *planted(
        "areal_x/workflows/single_turn.py",
        ("tests/workflows/test_workflows.py", "tests/test_experiment.py"),
        (
            "a greedy evaluation samples",
            "        return replace(self, sampling=replace(self.sampling, temperature=0.0))\n\n    async def score",
            "        return replace(self, sampling=replace(self.sampling, temperature=1.0))\n\n    async def score",
        ),
    ),
    *planted(
        "areal_x/run/journal.py",
        ("tests/run/test_journal.py",),
        (
            "of the groups that a step consumed one is recorded",
            "            self._append(CONSUME, (step, place, group.ticket))",
            "            self._append(CONSUME, (step, 0, group.ticket))",
        ),
        (
            "a resumed run trains again on the last step's groups",
            '"ticket NOT IN (SELECT ticket FROM consumed WHERE step <= ?) ORDER BY ticket"',
            '"ticket NOT IN (SELECT ticket FROM consumed WHERE step < ?) ORDER BY ticket"',
        ),
        (
            "a resumed run repeats the last task",
            "(0, 0) if newest is None else (1 + newest, 1 + position)",
            "(0, 0) if newest is None else (1 + newest, position)",
        ),
        (
            "the journal goes on after a transaction that failed",
            "            if self._error is None:  # else there would be a gap",
            "            if True:",
        ),
        (
            "a replay trains in another order",
            'WHERE step = ? ORDER BY place"',
            'WHERE step = ? ORDER BY place DESC"',
        ),
    ),
    *planted(
        "areal_x/run/journal.py",
        ("tests/run/test_resuming.py",),
        (
            "what the end of the journal lacks is trained on again",
            "            rows = [row for row in rows if row[0] in waiting or saved_ticket <= row[0] < next_ticket]",
            "            pass",
        ),
    ),
    *planted(
        "areal_x/run/group_bytes.py",
        ("tests/run/test_journal.py",),
        (
            "numbers are read back without what they are above",
            '    x = np.full(size, low, "<i8")',
            '    x = np.full(size, 0, "<i8")',
        ),
    ),
    *planted(
        "areal_x/tasks/stream.py",
        ("tests/tasks/test_stream.py",),
        (
            "every epoch has the order of the first",
            "np.random.default_rng([seed, epoch])",
            "np.random.default_rng([seed, 0])",
        ),
        (
            "a task of each epoch is left out",
            "        epoch, place = divmod(position, len(self.dataset))",
            "        epoch, place = divmod(position, max(len(self.dataset) - 1, 1))",
        ),
    ),
    *planted(
        "areal_x/run/checkpoint.py",
        ("tests/run/test_checkpoint.py",),
        (
            "a damaged checkpoint is resumed from",
            "        if found != digest:",
            "        if False:",
        ),
        (
            "the newest checkpoints are deleted, the oldest kept",
            "[s for s in steps(begun.run) if s <= begun.step][:-keep]",
            "[s for s in steps(begun.run) if s <= begun.step][keep:]",
        ),
        (
            "a checkpoint that was cut short takes its place",
            "        shutil.rmtree(begun.unfinished, ignore_errors=True)\n        if is_disk_full(error):",
            "        begun.unfinished.rename(begun.place)\n        if is_disk_full(error):",
        ),
    ),
    *planted(
        "areal_x/build.py",
        ("tests/test_experiment.py",),
        (
            "a checkpoint is on the disk before the journal that it was made from",
            "            self.journal.sync()",
            "            self.journal.flush()",
        ),
    ),
    *planted(
        "areal_x/experiment.py",
        ("tests/test_experiment.py",),
        (
            "a resumed run counts optimizer steps as its own",
            "range(parts.start.step + 1, self.steps + 1)",
            "range(models.policy.version // self.minibatches + 1, self.steps + 1)",
        ),
        (
            "minibatches are counted as steps",
            "            means[name] = sum(values) if counts else float(np.mean(values))",
            "            means[name] = sum(values) if counts else float(np.sum(values))",
        ),
    ),
]
