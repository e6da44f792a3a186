"""Bugs in how servers divide a model, apply a delta, and take turns with the trainer."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

FLEET = "areal_x/engines/fleet/"
WIDTHS = ("tests/engines/fleet/test_widths.py",)
DELTA = ("tests/engines/fleet/test_delta.py",)
CHECK = (
    "tests/preflight/test_check.py::"
    "test_two_versions_beside_the_trainer_and_two_beside_each_machines_servers_are_counted_for_deltas",
)
TURNS = ("tests/rollout/test_turns.py",)
SLEEPING = ("tests/engines/fleet/test_sleeping.py",)
FLEETS = ("tests/engines/fleet/test_fleet.py",)
CPU_SLEEP = (
    "tests/engines/vllm/test_vllm_sleep.py::"
    "test_a_worker_on_a_cpu_gives_the_pages_of_caches_and_weights_back_and_can_fill_them_again",
)
JAX_RESTING = (
    "tests/test_backends_conform.py::test_a_trainer_that_rested_on_the_host_continues_bit_by_bit_and_is_saved_from_there",
)
TORCH_RESTING = ("tests/torch/test_resting.py",)

OF_WIDTHS: list[Mutant] = [
    *planted(
        "areal_x/engines/vllm/server.py",
        WIDTHS,
        (
            "vLLM: stages and slices are swapped",
            '"--tensor-parallel-size": widths.tensor,\n        "--pipeline-parallel-size": widths.pipeline,',
            '"--tensor-parallel-size": widths.pipeline,\n        "--pipeline-parallel-size": widths.tensor,',
        ),
        (
            "vLLM: whole experts are divided as slices",
            'return [*flags, "--enable-expert-parallel"] if widths.expert > 1 else flags',
            "return flags",
        ),
        (
            "vLLM: each worker on a CPU wants a memory node",
            "if launch.widths.accelerators > 1:",
            "if launch.widths.accelerators > 99:",
        ),
        (
            "vLLM on a CPU: a mixture has several engines",
            "if widths.data > 1 and experts_in(",
            "if widths.data > 99 and experts_in(",
        ),
    ),
    *planted(
        "areal_x/engines/sglang/server.py",
        WIDTHS,
        (
            "SGLang: experts and slices are swapped",
            '"--tp-size": widths.tensor, "--ep-size": widths.expert',
            '"--tp-size": widths.expert, "--ep-size": widths.tensor',
        ),
    ),
    *planted(
        FLEET + "widths.py",
        WIDTHS,
        ("a server's engines share accelerators", "self.tensor * self.pipeline * self.data", "self.tensor * self.pipeline"),
        ("each node has a whole server's accelerators", "self.accelerators // self.hosts", "self.accelerators"),
        ("the sizes of old files are dropped", "        sizes[name] = size\n", ""),
        (
            "experts are divided within an engine",
            'sizes["expert"] = sizes["tensor"] * sizes["data"]',
            'sizes["expert"] = sizes["tensor"]',
        ),
        (
            "of an argument given twice the first counts",
            "found[names[argument]] = (argument, int(size))",
            "found.setdefault(names[argument], (argument, int(size)))",
        ),
        ("key heads are not divided", "if key_heads and key_heads % tensor and tensor % key_heads:", "if False:"),
        ("a vocabulary is divided without its padding", "-(-vocabulary // PADDED) * PADDED", "vocabulary"),
        ("a stage may have no layer", "if widths.pipeline > layers:", "if widths.pipeline > layers + 1:"),
        (
            "an expert's slices are one engine's",
            "slices = 1 if widths.expert > 1 else tensor * widths.data",
            "slices = 1 if widths.expert > 1 else tensor",
        ),
    ),
    *planted(
        FLEET + "config.py",
        WIDTHS,
        ("servers of others are judged", "return not self.urls and self.widths != Widths()", "return self.widths != Widths()"),
        ("the sizes of a file are vLLM's", 'lambda name: value(f"{program}.{name}")', 'lambda name: value(f"vllm.{name}")'),
        (
            "a server may have fewer devices than accelerators",
            'if len(device.split(",")) != (width := self.widths.accelerators):',
            'if len(device.split(",")) > (width := self.widths.accelerators):',
        ),
    ),
    *planted(
        "areal_x/cluster/needs.py",
        ("tests/cluster/test_needs.py",),
        (
            "each node holds all of a server's accelerators",
            "server_room(cluster, servers.accelerators // hosts, there)",
            "server_room(cluster, servers.accelerators, there)",
        ),
        ("one node for a server of several", "count=servers.count * hosts", "count=servers.count"),
    ),
]

OF_DELTAS: list[Mutant] = [
    *planted(
        FLEET + "delta/codec.py",
        DELTA,
        (
            "a delta leaves out the last value",
            "difference = new[changed] - base[changed]",
            "changed[np.flatnonzero(changed)[-1]] = False\n        difference = new[changed] - base[changed]",
        ),
        ("differences lose their sign", "folded = (difference << 1) ^ (0 - sign)", "folded = difference << 1"),
        ("positions may lie outside", "if bits[len(words) :].any() or", "if"),
        ("positions need not be as many as values", " or int(np.count_nonzero(bits)) != count:", ":"),
        ("a delta may change more than there is", "if count > len(words):", "if False:"),
    ),
    *planted(
        FLEET + "delta/files.py",
        DELTA,
        (
            "a delta leaves out tensors whose last block is as before",
            "changed |= len(block) > LENGTH.size",
            "changed = len(block) > LENGTH.size",
        ),
        ("a delta forgets tensors that are gone", "        if unseen:\n", "        if False:\n"),
        (
            "a delta is made between types",
            "(base.shape, base.dtype) != (tensor.shape, tensor.dtype)",
            "base.shape != tensor.shape",
        ),
        (
            "a digest is of values without types",
            "[dtype, list(shape) or [1], of_bytes.hexdigest()]",
            "[list(shape) or [1], of_bytes.hexdigest()]",
        ),
        ("a delta may be larger than whole files", "if file.tell() > self._most_bytes:", "if False:"),
    ),
    *planted(
        FLEET + "delta/cache.py",
        DELTA,
        ("the digest of a result is not compared", "if found != order.digest:", "if False:"),
        (
            "a delta of another base is applied",
            "if (delta.base, delta.digest) != (order.base, order.digest):",
            "if delta.digest != order.digest:",
        ),
        ("versions pile up in a cache", "        self.keep(made)\n", ""),
        ("a cache may be anybody's", "if not stat.S_ISDIR(found.st_mode) or not private:", "if False:"),
        (
            "a full disk refuses whole files too",
            "if order.base or error.errno not in FULL:",
            "if True:",
        ),
    ),
    *planted(
        FLEET + "delta/history.py",
        DELTA,
        (
            "the copy that servers have is overwritten",
            "            kept = None if base is None else self._copies.pop(base.version, None)\n"
            "            unused = next(iter(self._copies.values()), WeightCopy())\n",
            "            unused = next(iter(self._copies.values()), WeightCopy())\n"
            "            kept = None if base is None else self._copies.pop(base.version, None)\n",
        ),
        ("whole weights come one publication late", "self._deltas + 1 >= self._every", "self._deltas >= self._every"),
        (
            "whole weights do not count",
            "self._deltas = self._deltas + 1 if staged.base else 0",
            "self._deltas = self._deltas + 1",
        ),
    ),
    *planted(
        FLEET + "delta/version.py",
        DELTA,
        (
            "changes of a tensor that the base lacks are forgotten",
            "if delta is not None and (more := delta.names - changed):",
            "if delta is not None and (more := delta.names - delta.names):",
        ),
        ("links are followed", "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK", "os.O_RDONLY | os.O_NONBLOCK"),
    ),
    *planted(
        FLEET + "delta/feed.py",
        DELTA,
        ("one worker's place is all workers'", "    if None in places:\n        return None\n", "    places.discard(None)\n"),
        (
            "a server that refuses a delta goes without",
            'for instead in ("whole", "from the staging folder, without its cache")',
            'for instead in ("from the staging folder, without its cache",)',
        ),
    ),
    *planted(
        FLEET + "delta/__init__.py",
        (*CHECK, DELTA[0] + "::test_a_chain_of_deltas_gives_each_version_exactly_in_the_room_of_one"),
        ("check counts one version of a cache", "CACHED = 2", "CACHED = 1"),
        ("check counts one version beside the trainer", "COPIED = 2", "COPIED = 1"),
    ),
    *planted(
        "areal_x/preflight/deltas.py",
        CHECK,
        ("check forgets what is staged beside a cache", "needed, beside = needed + staged,", "needed, beside = needed,"),
        ("check looks for others' caches here", "if room.servers_here:", "if True:"),
        (
            "check counts a cache on disk as memory",
            "self.cache if self.servers_here and self.in_memory else 0.0",
            "self.cache if self.servers_here else 0.0",
        ),
    ),
    *planted(
        "areal_x/preflight/memory.py",
        CHECK,
        ("check adds no deltas up", "self.activations + self.engine + self.deltas", "self.activations + self.engine"),
    ),
]

OF_TURNS: list[Mutant] = [
    *planted(
        FLEET + "replica.py",
        SLEEPING,
        (
            "a server wakes before its weights are there",
            "                await client.wake(WEIGHTS)\n",
            "                await client.wake(WEIGHTS)\n                await client.resume()\n",
        ),
        (
            "a server goes on before its weights are proved",
            "        await prove(self, staged)\n        if self.asleep:\n            await client.wake(CACHES)\n",
            "        if self.asleep:\n            await client.wake(CACHES)\n            await client.resume()\n"
            "        await prove(self, staged)\n        if self.asleep:\n",
        ),
        ("a server gets no memory for its caches", "            await client.wake(CACHES)\n", ""),
        (
            "a sleeping server with old weights goes on",
            "client, changing = self.client, self.asleep",
            "client, changing = self.client, False",
        ),
        (
            "a server that kept its weights drops them",
            "await self.client.sleep(keep_weights)",
            "await self.client.sleep(False)",
        ),
        (
            "a server wakes without its weights' memory",
            "for memory in (WEIGHTS, CACHES):",
            "for memory in (CACHES,):",
        ),
        ("a server sleeps twice", "        if not self.asleep:\n", "        if True:\n"),
    ),
    *planted(
        FLEET + "publisher.py",
        SLEEPING,
        (
            "adapters' servers drop the base model",
            "replica.sleep(keep_weights=self._lora)",
            "replica.sleep(keep_weights=False)",
        ),
        ("a server that does not sleep goes on", "                await replica.close()\n", ""),
        (
            "servers wake without weights",
            'raise EngineError("servers that sleep need weights to wake, and none were published")',
            "return",
        ),
        ("servers that are awake are woken", "        if not self._fleet.asleep:\n            return\n", ""),
    ),
    *planted(
        FLEET + "fleet.py",
        FLEETS,
        ("servers are started in the trainer's turn", "        if self.asleep:\n            return []\n", ""),
        ("a server that sleeps is lost for its silence", "member.requests and not self.asleep and", "member.requests and"),
        (
            "the silence of a sleep counts afterwards",
            "            member.progress_at = now\n        if self.none_since",
            "            pass\n        if self.none_since",
        ),
        (
            "the wait for servers counts their sleep",
            "        if self.none_since is not None:\n            self.none_since = now\n",
            "",
        ),
    ),
    *planted(
        "areal_x/rollout/rollout.py",
        TURNS,
        ("the trainer's state does not rest", "            self._models.rest()\n", "            pass\n"),
        ("the trainer's state does not return", "            self._models.wake()\n", "            pass\n"),
        ("servers generate in the trainer's turn", "        await self.engine.sleep()\n", ""),
        ("limits of episodes run in the trainer's turn", "        self.runner.limits.stop()\n", ""),
        (
            "limits of episodes stand still for good",
            "            self.runner.limits.go_on()\n            if self.evaluates_only",
            "            if self.evaluates_only",
        ),
        ("servers wake for groups that are there", "        if not wait and self._turn_goes_on():\n", "        if False:\n"),
        (
            "the last version may be left out",
            "        if not wait and self._turn_goes_on():\n",
            "        if self._turn_goes_on():\n",
        ),
        ("an evaluation has the version before", "            self.publish(*self._put_off)\n", "            pass\n"),
        ("a pause is told twice", "before, self._last = self._last, Published(0.0, 0.0)", "before = self._last"),
        (
            "an evaluation in the trainer's turn keeps the accelerators",
            "        if returns:\n            self._trains()\n",
            "",
        ),
    ),
    *planted(
        "areal_x/rollout/queue.py",
        ("tests/rollout/test_queue.py",),
        (
            "a step is ready before its oldest group",
            "return self._next_step() is not None",
            "return self.depth >= self.groups_per_step",
        ),
    ),
    *planted(
        "areal_x/engines/vllm/cpu_sleep.py",
        CPU_SLEEP,
        ("vLLM on a CPU: caches stay", "        release(cache)\n", "        pass\n"),
        ("vLLM on a CPU: weights that are kept go", "    if level == DROPS_WEIGHTS:\n", "    if True:\n"),
    ),
    *planted(
        "backends/torch/areal_x_torch/resting.py",
        TORCH_RESTING,
        (
            "torch: gradients stay on the device",
            "                x.grad.data = moved(x.grad.data, to)\n",
            "                pass\n",
        ),
        ("torch: moments stay on the device", "            state[name] = moved(x, to)\n", "            pass\n"),
        (
            "torch: buffers stay on the device",
            "                part._buffers[name] = moved(buffer, to)\n",
            "                pass\n",
        ),
        (
            "torch: only the first model rests",
            "    for module in modules:\n        for part in",
            "    for module in modules[:1]:\n        for part in",
        ),
        (
            "torch: a tied head becomes another parameter",
            "            x.data = moved(x.data, to)\n",
            "            x.data = x.data.clone()\n",
        ),
    ),
    *planted(
        "backends/jax/areal_x_jax/trainer.py",
        JAX_RESTING,
        (
            "JAX: moments stay on the device",
            "        return self.params, self.moments, self.base, self.teacher\n",
            "        return self.params, None, self.base, self.teacher\n",
        ),
        (
            "JAX: a trainer that rests twice forgets its shardings",
            "        if self._resting_shardings is None:\n",
            "        if True:\n",
        ),
    ),
]

MUTANTS: list[Mutant] = [*OF_WIDTHS, *OF_DELTAS, *OF_TURNS]
