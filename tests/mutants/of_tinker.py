"""Bugs in the server of Tinker clients."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

SERVER = ("tests/tinker/test_server.py",)
RECOVERY = ("tests/tinker/test_recovery.py",)
ISOLATION = ("tests/tinker/test_isolation.py",)
DOWNLOADS = ("tests/tinker/test_downloads.py",)
STEPS = ("tests/tinker/test_steps_by_hand.py",)
MANY = ("tests/tinker/test_many_adapters.py",)
TEACHERS = ("tests/tinker/test_teachers.py",)
EXACT_SAMPLES = ("tests/tinker/test_exact_samples.py",)
SERVED = ("tests/tinker/test_served_weights.py",)
NAMED = ("tests/engines/fleet/test_named_adapters.py",)
TARGETS = ("tests/tinker/test_targets.py",)
TRIES = ("tests/protocols/test_tries.py",)

MUTANTS: list[Mutant] = [
    *planted(
        "areal_x/tinker/recovery.py",
        RECOVERY,
        (
            "Tinker: requests that are computed again share passes",
            "training.forward_backward(account, body, sent, apart=again)",
            "training.forward_backward(account, body, sent)",
        ),
    ),
    *planted(
        "areal_x/tinker/listening.py",
        SERVER,
        (
            "Tinker: a server that ends leaves its clients waiting",
            "account.futures.end_polls()",
            "account.futures.requests.copy()",
        ),
    ),
    *planted(
        "areal_x/tinker/data.py",
        TARGETS,
        ("Tinker: a target without weight takes one from its neighbour", "np.where(weights != 0,", "np.where(weights > 0,"),
    ),
    *planted(
        "areal_x/protocols/tries.py",
        TRIES,
        (
            "tries: what is computed alone has its parents in the whole row",
            "own[row, number[row, token]] = before[row, token]",
            "own[row, number[row, token]] = parents[row, token]",
        ),
        ("tries: padding has a segment", "np.where(self.at >= 0, found, np.int32(0))", "found"),
    ),
    *planted(
        "backends/torch/areal_x_torch/flat_rows.py",
        TARGETS,
        (
            "torch: of rows after the first, the first one's tokens are computed",
            "at = (firsts + found.at).reshape(-1)",
            "at = found.at.reshape(-1)",
        ),
        (
            "torch: a target is read from its own place in the row",
            "states = at[self.before]",
            "states = np.where(at[self.before] < 0, -1, at[:-1])",
        ),
    ),
    *planted(
        "areal_x/tinker/data.py",
        STEPS,
        (
            "Tinker: a target that is not the next token is taken for it",
            "leaf = ~on_chain",
            "leaf = ~on_chain & (np.arange(count)[:, None] == count - 1)",
        ),
        (
            "Tinker: a leaf continues the token before its own",
            "depths[at[leaf]] = targets[leaf], own[rows], rows + 1",
            "depths[at[leaf]] = targets[leaf], own[rows] - (rows == count - 1), rows + 1",
        ),
    ),
    *planted(
        "areal_x/tinker/losses.py",
        STEPS,
        (
            "Tinker: an upper threshold is taken for a distance from 1",
            "thresholds[LOW], clip_high=thresholds[HIGH] - 1",
            "thresholds[LOW], clip_high=thresholds[HIGH]",
        ),
        (
            "Tinker: a gradient ascends",
            "layout.gather(-np.asarray(gradient.logp))",
            "layout.gather(np.asarray(gradient.logp))",
        ),
        (
            "Tinker: a prompt's targets count in a sequence's ratio",
            "layout.batch.mask & (of[COUNTED] != 0)",
            "layout.batch.mask",
        ),
        (
            "Tinker: stable_reinforce has no bound on its importance weights",
            "partial(losses.cispo, clip_high=thresholds[HIGH] - 1)",
            "partial(losses.cispo, clip_high=1e6)",
        ),
    ),
    *planted(
        "areal_x/tinker/datums.py",
        SERVER,
        (
            "Tinker: the targets of a prompt are taken for sampled ones",
            "sampled = [2 in span for span in read]",
            "sampled = [1 in span for span in read]",
        ),
    ),
    *planted(
        "areal_x/tinker/stored.py",
        DOWNLOADS,
        (
            "Tinker: a copy that is asked for again is made again",
            'request.headers.get("x-idempotency-key") or uuid.uuid4().hex',
            "uuid.uuid4().hex",
        ),
    ),
    *planted(
        "areal_x/tinker/account.py",
        TEACHERS,
        (
            "Tinker: a teacher scores with the weights of the base model",
            "samplers = self.server.teachers[sampler.base]",
            "pass",
        ),
    ),
    *planted(
        "areal_x/tinker/account.py",
        SERVER,
        (
            "Tinker: an inflight sampler keeps the weights that it began with",
            "if found.follows == sampler.follows and other != id:",
            "if False:",
        ),
    ),
    *planted(
        "areal_x/tinker/turns.py",
        STEPS,
        (
            "Tinker: the model that leaves the trainer is not written",
            "write_whole(model.state, self._trainer.save)  # it stays if that fails",
            "pass",
        ),
        (
            "Tinker: gradients of a step are used again in the next",
            "pending, model.pending = model.pending, []",
            "pending = model.pending",
        ),
    ),
    *planted(
        "areal_x/tinker/host.py",
        STEPS,
        (
            "Tinker: weights are sampled as they are now, not as they were saved",
            "if model is not None and model.steps == source.steps:\n            own",
            "if model is not None and model.steps >= source.steps:\n            own",
        ),
    ),
    *planted(
        "areal_x/tinker/host.py",
        MANY,
        (
            "Tinker: a request that fails keeps the gradient of its first datums",
            "name, keep = str(work.model.directory), work.error is None",
            "name, keep = str(work.model.directory), True",
        ),
        (
            "Tinker: an adapter leaves memory without its state",
            "                self.save(model, model.state)\n",
            "                pass\n",
        ),
    ),
    *planted(
        "areal_x/tinker/gathering.py",
        MANY,
        (
            "Tinker: a pass does not wait for the clients of the last one",
            "                await self._gather()\n",
            "",
        ),
        (
            "Tinker: requests that are to be exact share a pass",
            "chosen = self._waiting[:1] if apart else together",
            "chosen = list(self._waiting)",
        ),
        (
            "Tinker: shares are of requests, not of clients",
            "each = max(left // (len(owners) * len(own)), 1)",
            "each = max(left // len(hungry), 1)",
        ),
    ),
    *planted(
        "backends/torch/areal_x_torch/bank.py",
        MANY,
        (
            "Tinker: an adapter's scale is that of another rank",
            "adapter = Adapter(self.shapes(config), config.scale, self.device)",
            "adapter = Adapter(self.shapes(config), config.alpha, self.device)",
        ),
        (
            "Tinker: adapters' gradients do not go back through A",
            "add_product(of_x, places, of_h, part.a.to(x.dtype), 1.0)",
            "pass",
        ),
    ),
    *planted(
        "backends/torch/areal_x_torch/slot_adapters.py",
        EXACT_SAMPLES,
        (
            "Tinker: a sequence is sampled with the adapters of all",
            "[[x == name for x in adapters] for name in names]",
            "[[True for x in adapters] for name in names]",
        ),
        (
            "Tinker: what is not finite in an adapter reaches the others' sequences",
            "torch.where(rows[index], y + inner @ b.narrow(0, begin, count), y)",
            "y + (inner * rows[index]) @ b.narrow(0, begin, count)",
        ),
        (
            "Tinker: an adapter is put where another is",
            "if begin + count <= taken.start:",
            "if begin + ALIGNED <= taken.start:",
        ),
    ),
    *planted(
        "backends/torch/areal_x_torch/independent_rows.py",
        EXACT_SAMPLES,
        (
            "Tinker: a sample's bits depend on the longest sequence",
            "used = padded(self.used + number, self.whole)",
            "used = self.used + number",
        ),
    ),
    *planted(
        "backends/torch/areal_x_torch/sampler.py",
        EXACT_SAMPLES,
        (
            "Tinker: a sample's bits depend on the number of sequences",
            "size = self.at_once or count",
            "size = count",
        ),
        (
            "Tinker: prompts of a sampler that is exact are computed together",
            "0 if self.at_once else PREFILL",
            "PREFILL",
        ),
    ),
    *planted(
        "areal_x/protocols/sampler.py",
        MANY,
        (
            "Tinker: sequences of two adapters with one prompt share its cache",
            "shown, request.adapter\n",
            "shown\n",
        ),
    ),
    *planted(
        "areal_x/tinker/futures.py",
        SERVER,
        (
            "Tinker: a request that is sent again runs again",
            "request, new = self.futures.add(id, kind)\n        if not new:\n            return False",
            "request, new = self.futures.add(id, kind)\n        if False:\n            return False",
        ),
        (
            "Tinker: a model's requests run in the order of arrival",
            "while self.next in self.arrived:",
            "while self.arrived and setattr(self, 'next', min(self.arrived)) is None:",
        ),
    ),
    *planted(
        "areal_x/tinker/app.py",
        SERVER,
        (
            "Tinker: every key has the same account",
            "accounts = {key: Account(server, key) for key in keys}",
            "accounts = dict.fromkeys(keys, Account(server, keys[0]))",
        ),
        (
            "Tinker: a part of a key is enough",
            "hmac.compare_digest(given, key.encode())",
            "key.encode().startswith(given)",
        ),
    ),
    *planted(
        "areal_x/tinker/embedded_weights.py",
        MANY,
        (
            "Tinker: a swap does not wait for running requests, nor is there one",
            "elif key == self._loaded:",
            "elif self._loaded is not None:",
        ),
    ),
    *planted(
        "areal_x/tinker/embedded_weights.py",
        MANY,
        (
            "Tinker: two adapters that come at the same time make the same room",
            "                del self._adapters[name]\n",
            "                await engine.put_adapter(name, None)\n                del self._adapters[name]\n",
        ),
    ),
    *planted(
        "backends/torch/areal_x_torch/optimizers.py",
        STEPS,
        (
            "torch: set_optimizer keeps the first betas",
            'group["betas"] = config.beta1, config.beta2',
            'group.setdefault("betas", (config.beta1, config.beta2))',
        ),
    ),
    *planted(
        "areal_x/tinker/recovery.py",
        RECOVERY,
        (
            "Tinker: steps whose result is known are not repeated after a restart",
            "line.repeat(row.number, work if has_effect(row) else None)",
            "line.repeat(row.number, None)",
        ),
        (
            "Tinker: numbers of a sampler's clients begin anew after a restart",
            "account.joins[id] = joined",
            "account.joins[id] = 0",
        ),
    ),
    *planted(
        "areal_x/tinker/account.py",
        RECOVERY,
        (
            "Tinker: a step's request is forgotten once it has a result",
            "results.stored(outcome), kind in LASTING)",
            "results.stored(outcome), False)",
        ),
        (
            "Tinker: a sample without a seed is another one after a restart",
            "hashlib.sha256(id.encode())",
            "hashlib.sha256(uuid.uuid4().bytes)",
        ),
    ),
    *planted(
        "areal_x/tinker/saving.py",
        RECOVERY,
        (
            "Tinker: a model needs the checkpoint that it was loaded from after a restart",
            "        await account.snapshot(trained, number)\n",
            "",
        ),
    ),
    *planted(
        "areal_x/tinker/checkpoints.py",
        RECOVERY,
        (
            "Tinker: a save is refused after a restart, for the checkpoint that it had written",
            "if there is not None and there.request == about.request is not None:",
            "if False:",
        ),
    ),
    *planted(
        "areal_x/tinker/account.py",
        ISOLATION,
        (
            "Tinker: checkpoints of other keys are readable",
            "if about is not None and about.public:",
            "if about is not None:",
        ),
    ),
    *planted(
        "areal_x/tinker/exports.py",
        ISOLATION,
        (
            "Tinker: a signature opens every file of a checkpoint",
            "text = json.dumps([str(ref), name, expires])",
            "text = json.dumps([str(ref), expires])",
        ),
        (
            "Tinker: an address stays good for ever",
            "text = json.dumps([str(ref), name, expires])",
            "text = json.dumps([str(ref), name])",
        ),
    ),
    *planted(
        "areal_x/tinker/exports.py",
        DOWNLOADS,
        (
            "Tinker: moments are exported",
            "if is_private(file.name):\n            file.unlink()",
            "if False:\n            file.unlink()",
        ),
        (
            "Tinker: a mistyped recipient is accepted",
            "or check != 1 or size",
            "or size",
        ),
    ),
    *planted(
        "areal_x/tinker/served_weights.py",
        SERVED,
        (
            "Tinker: a checkpoint that was replaced is served under the name of the one before",
            "if not source.is_there():  # it may have been replaced meanwhile",
            "if False:",
        ),
        (
            "Tinker: an adapter with requests leaves the servers",
            "idle = [x for x in self._adapters.values() if not x.users]",
            "idle = list(self._adapters.values())",
        ),
        (
            "Tinker: adapters of expired checkpoints stay on servers",
            "gone = [x for x in idle if not x.source.is_there()]",
            "gone: list[Served] = []",
        ),
        (
            "Tinker: an adapter is larger than the servers have room for",
            "if shape.rank > self.engine.room.rank:",
            "if shape.rank > 10 * self.engine.room.rank:",
        ),
    ),
    *planted(
        "areal_x/tinker/models.py",
        SERVER,
        (
            "Tinker: a sampler of a checkpoint that was overwritten answers with the new weights",
            'return bool(lasts and about["created"] == self.created)',
            "return bool(lasts)",
        ),
    ),
    *planted(
        "areal_x/engines/fleet/named_adapters.py",
        NAMED,
        (
            "a server that was started again has the adapters of before",
            "self._loads.setdefault(replica.client, {})",
            "self._loads.setdefault(self, {})",
        ),
        (
            "each request loads its adapter",
            "if name not in loads:",
            "if True:",
        ),
        (
            "a server that lost its adapters is taken for one that refuses a request",
            "if model in await replica.client.adapters():\n                raise\n",
            "raise\n",
        ),
        (
            "an adapter that could not be loaded is never loaded",
            "            loads.pop(name, None)  # the next request tries again\n",
            "",
        ),
        (
            "a removed adapter stays on its servers",
            "await replica.client.unload_adapter(name)",
            "pass",
        ),
    ),
    *planted(
        "areal_x/engines/fleet/slices.py",
        NAMED,
        ("slices of a request repeat the random numbers of the first", "if not drawn:", "if True:"),
    ),
    *planted(
        "areal_x/engines/vllm/cpu_seeds.py",
        ("tests/engines/vllm/test_cpu_seeds.py",),
        (
            "a preempted request with a seed begins its random numbers again",
            "made.begin = generator.get_state()",
            "made.begin = type(made)().manual_seed(generator.initial_seed()).get_state()",
        ),
        (
            "what vLLM discards takes random numbers",
            "self.set_state(self.begin)",
            "pass",
        ),
    ),
]
