"""Every wait in the code has a name, or a reason not to need one; and of each name a stall is named right."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from areal_x.runtime.waits import watching
from tests import blocking_calls
from tests.stalls import STALLS, Stall

for part in ("of_runs", "of_episodes", "of_servers"):
    import_module(f"tests.stalls_{part}")

SILENCE = 0.3  # seconds: short, so that the tests are


@dataclass(frozen=True)
class Inside:
    """It is called only while a wait of this name, or of those that it calls in turn, is open."""

    name: str


@dataclass(frozen=True)
class Bounded:
    """It has a time limit: a constant of its module, of so many seconds at most."""

    constant: str


AT_ONCE = "ends at once: what it asks for is there, or it asks without waiting, or cancels first"
TEST = "a test, and no part of a run"
PAGE = "of a page about runs, in a process of its own, which no run waits for"
CLIENTS = "of the server of Tinker clients, in a process of its own, which no run waits for"
SERVED = "of a worker process of the gateway, which no run waits for"
OURS_TO_END = "waits for something to do, on a task or thread that its owner ends"

REWARD, SERVER, STEP, AGENT = "its reward", "the server at {} to answer {}", "the trainer's step {}", "its agent"
TOOL, GROUPS, EVALUATION, ENGINE = "its tool {}", "the groups of step {}", "the evaluation", "the engine"
COMMAND, FILES, STOPPED = "a command in its container", "files of its container", "its container to end"
SANDBOX, MCP, SENT = "its program in the sandbox", "the MCP server to start", "its weights to be sent"
CHECKPOINT, ROLLOUT_END, CALL = "the checkpoint before to be completed", "the rollout to end", "the engine"

ALLOWED: dict[str, Inside | Bounded | str] = {
    "run/checkpoint.py Saver.__exit__: self.wait()": Inside(CHECKPOINT),
    "run/checkpoint.py Saver.save: self.wait()": Inside(CHECKPOINT),
    "run/checkpoint.py complete: begun.wait()": Inside(CHECKPOINT),
    "batching/batch.py Models.save.wait_for_all: wait()": Inside(CHECKPOINT),
    "testing/conformance/test_files.py test_a_checkpoint_saved_in_the_background_restores_the_state_at_its_time: wait()": TEST,
    "cluster/connection.py check_closed: stranger.wait()": Bounded("SECONDS_TO_PROBE"),
    "engines/vllm/turns.py Turns.hold: await asyncio.wait": Bounded("SECONDS_TO_ANSWER"),
    "cluster/hosts.py RayHosts._watch: await asyncio.sleep": OURS_TO_END,
    "cluster/hosts.py RayHosts._watch: await asyncio.to_thread": OURS_TO_END,
    "cluster/hosts.py RayHosts.close: self._thread.join()": AT_ONCE,
    "runtime/hosts.py Services._result: asyncio.run_coroutine_threadsafe().result()": OURS_TO_END,  # in a process of Ray
    "runtime/hosts.py Services._run: await getattr(self._made[key], method)": OURS_TO_END,  # in a process of Ray
    "runtime/hosts.py Spread._take: turn.result()": AT_ONCE,
    "runtime/hosts.py Spread.call: await getattr(self._own, method)": Inside(REWARD),
    "cluster/installed.py check_installed: ray.wait()": Bounded("SECONDS"),
    "cluster/leader.py Leader._ended: call.result()": AT_ONCE,
    "cluster/leader.py Leader.wait: threading.Event().wait()": OURS_TO_END,  # in a process of Ray, as the next ones
    "cluster/leader.py Leader.failure: self._failures.get()": OURS_TO_END,
    "cluster/process.py Process.call_all: self._leader.wait()": OURS_TO_END,
    "cluster/process.py Process.stay: threading.Event().wait()": OURS_TO_END,
    "cluster/node.py wait_for_nodes: time.sleep()": "a command of a job, before the run, that says what it waits for",
    "cluster/on_ray.py RayGang._noticed: watch.result()": AT_ONCE,
    "cluster/on_ray.py RayGang._result: ray.wait()": Bounded("SECONDS_TO_BLAME"),
    "cluster/parent.py _watch: time.sleep()": OURS_TO_END,  # in a process of Ray
    "cluster/places.py RayKeeper.lives: await asyncio.wrap_future": Bounded("SECONDS_TO_ANSWER"),
    "cluster/places.py answer.settle: done.result()": AT_ONCE,
    "cluster/places.py RayPlace.keepers: await asyncio.gather": Bounded("SECONDS_TO_ANSWER"),
    "cluster/places.py give_back: reserving.result()": AT_ONCE,
    "cluster/places.py has_ended: ray.wait()": AT_ONCE,
    "cluster/places.py reserved: await asyncio.shield": Inside("room in the cluster"),
    "cluster/places.py reserved.asked: await asyncio.to_thread": Inside("room in the cluster"),
    "cluster/places.py result: await asyncio.wrap_future": Inside("its keeper to start"),
    "shards/engine.py ShardedEngine.spans: answer.result()": Bounded("SECONDS_TO_ANSWER"),
    "shards/episodes.py ShardedEpisodes.evaluate: async with asyncio.TaskGroup": Inside("a shard to answer"),
    "shards/episodes.py ShardedEpisodes.evaluate: await asyncio.sleep": Bounded("LOOK_SECONDS"),
    "shards/episodes.py ShardedEpisodes.evaluate: task.result()": AT_ONCE,
    "shards/parts.py ShardEngine.swap: await asyncio.to_thread": Inside("a shard to answer"),  # in the driver, as the next ones
    "shards/shard.py Shard._close: async with AsyncExitStack": Inside("a shard to answer"),
    "shards/shard.py Shard._close: await asyncio.wait": Inside("a shard to answer"),
    "shards/shard.py Shard._run: asyncio.run_coroutine_threadsafe().result()": Inside("a shard to answer"),
    "shards/shard.py Shard._news: await asyncio.sleep": Bounded("GATHER_SECONDS"),
    "shards/shard.py Shard._news: await self._happened.wait": Bounded("NEWS_SECONDS"),
    "shards/shards.py Shards._open: async with self._weights": Inside("a shard to answer"),
    "shards/shards.py Shards._open_again: await asyncio.sleep": Bounded("LONGEST_RETRY_SECONDS"),
    "shards/shards.py Shards.close: await asyncio.gather": Inside("a shard to answer"),
    "shards/shards.py Shards.close: await asyncio.wait": AT_ONCE,
    "shards/shards.py Shards.swap: async with self._weights": Inside("a shard to answer"),
    "shards/shards.py Shards.swap: await asyncio.gather": Inside("a shard to answer"),
    "runtime/memory_group.py _remove: time.sleep()": Bounded("REMOVAL_SECONDS"),
    "rewards/pool.py RewardPool._start: await asyncio.open_connection": AT_ONCE,  # over a socket that is connected
    "rewards/pool.py _ask: await worker.reader.readline": Inside(REWARD),
    "rewards/pool.py _ask: await worker.writer.drain": Inside(REWARD),
    "agents/gateway/streams.py _disconnected: await receive": OURS_TO_END,
    "agents/calling.py BackgroundLoop.close: self._thread.join()": Inside("the agents' thread to end"),
    "agents/calling.py BackgroundLoop.run: await asyncio.wrap_future": Inside(AGENT),
    "agents/agent.py AgentWorkflow.outcome: await asyncio.gather": AT_ONCE,
    "agents/agent.py AgentWorkflow.outcome: await asyncio.wait": Bounded("GRACE_SECONDS"),
    "agents/agent.py AgentWorkflow.outcome: ending.result()": AT_ONCE,
    "agents/agent.py AgentWorkflow.outcome: working.result()": AT_ONCE,
    "agents/calling.py call_function: await function": Inside(AGENT),
    "agents/calling.py call_function: await given": Inside(AGENT),
    "agents/external_program.py wait_for_exit: await asyncio.wait_for": Inside("its agent's process to end"),
    "agents/external_program.py wait_for_exit: process.wait()": Inside("its agent's process to end"),
    "agents/external_program.py run_program: await asyncio.create_subprocess_exec": Inside(AGENT),
    "agents/external_program.py run_program: await asyncio.gather": Inside(AGENT),
    "agents/multi_turn.py ToolUse._results: await asyncio.gather": Inside(TOOL),
    "engines/embedded.py EmbeddedEngine.generate: await self.submit([request])[0]": Inside(ENGINE),
    "engines/embedded.py EmbeddedEngine.put_adapter: await future": CLIENTS,
    "engines/embedded.py EmbeddedEngine.swap: await future": Inside("the engine to take version {}"),
    "agents/gateway/http.py with_errors.endpoint: await handler": Inside(CALL),
    "agents/gateway/answering.py answered: async with asyncio.TaskGroup": Inside(CALL),
    "agents/gateway/answering.py answered: task.result()": AT_ONCE,
    "agents/gateway/channel.py Channel._finish: await work": Inside(CALL),
    "agents/gateway/channel.py Channel.call: await future": SERVED,  # and of the run, see Workers.open_clients
    "agents/gateway/channel.py Channel.open: await asyncio.get_running_loop().create_connection": AT_ONCE,
    "agents/gateway/session.py GatewaySession.generate: await work": Inside(CALL),
    "agents/gateway/worker.py open_clients: await asyncio.sleep": SERVED,
    "agents/gateway/worker.py serve_requests: await server.ready.wait": SERVED,
    "agents/gateway/worker.py serve_requests: await serving": SERVED,
    "agents/gateway/workers.py Worker.keep: await self._lost.wait": OURS_TO_END,
    "agents/gateway/workers.py Worker.keep: await self._process.wait": AT_ONCE,  # it has closed its end of the channel
    "agents/gateway/workers.py Workers.close: await asyncio.gather": Inside("the gateway to end"),
    "agents/gateway/workers.py Workers.open_clients: await asyncio.gather": Bounded("CLIENTS_SECONDS"),
    "agents/gateway/connections.py GatewayServer._accept: await asyncio.sleep": OURS_TO_END,
    "agents/gateway/connections.py GatewayServer._connect: await asyncio.get_running_loop().connect_accepted_socket": Bounded(
        "REQUEST_SECONDS"
    ),
    "agents/board.py Board.answer_to: await asyncio.wait": Inside(AGENT),
    "agents/board.py Board.answer_to: lease.answered.result()": AT_ONCE,
    "agents/board.py Board.lease_for: offer.taken.result()": AT_ONCE,
    "agents/gateway/connections.py GatewayServer._accept: await loop.sock_accept": OURS_TO_END,
    "agents/gateway/connections.py GatewayServer.shutdown: await asyncio.gather": AT_ONCE,
    "agents/gateway/gateway.py Gateway.open_waiting: await self.on_open": Inside("the gateway to serve"),
    "agents/gateway/gateway.py Gateway.start: self._server.ready.wait()": Inside("the gateway to serve"),
    "agents/gateway/gateway.py Gateway.start: self._serving.result()": AT_ONCE,
    "agents/gateway/streams.py PendingResponse.__call__: await asyncio.gather": AT_ONCE,
    "agents/gateway/streams.py PendingResponse._finish: await asyncio.sleep": AT_ONCE,
    "agents/gateway/streams.py PendingResponse._finish: work.result()": AT_ONCE,
    "agents/gateway/streams.py PendingResponse._wait: await asyncio.wait": Inside(CALL),
    "agents/gateway_workflow.py LazyGateway.start: async with self._starting": Inside("the gateway to serve"),
    "run/journal.py Journal._failed: self._entries.get()": AT_ONCE,
    "run/journal.py Journal._write: self._entries.get()": AT_ONCE,
    "run/journal.py Journal._write: self._urgent.wait()": Bounded("GATHER_SECONDS"),
    "agents/judge.py Judge._asked: await asyncio.sleep": Inside("its judge"),
    "workflows/learned_reward.py RewardModel._score_queue: await loop.run_in_executor": Inside("the learned reward"),
    "runtime/loop.py result: future.result()": AT_ONCE,
    "runtime/loop.py result: wait()": Inside(GROUPS),  # and in every other call of the rollout
    "runtime/loop.py run: thread.join()": AT_ONCE,
    "runtime/loop.py together: await asyncio.gather": Inside(SERVER),
    "agents/tools/mcp_tools.py read_message: await process.stdout.readline": Inside(MCP),  # or on the task that reads answers
    "agents/tools/mcp_tools.py McpConnection._started: await asyncio.create_subprocess_exec": Inside(MCP),
    "agents/tools/mcp_tools.py McpConnection.call: async with self._lock": Inside(MCP),
    "agents/tools/mcp_tools.py McpConnection.open: async with self._lock": Inside(MCP),
    "agents/online.py Online.run: self.slots.wait()": AT_ONCE,
    "rollout/pacing.py WavePacing._deliver: done.result()": AT_ONCE,
    "rollout/pacing.py WavePacing.generate: await future": Inside(ENGINE),
    "engines/fleet/calls.py Calls.close: await asyncio.sleep": AT_ONCE,
    "engines/fleet/staging.py Staging.__init__: fcntl.flock()": AT_ONCE,  # of a file that nobody else sees yet
    "engines/fleet/folders.py remove_left_behind: fcntl.flock()": AT_ONCE,
    "rollout/rollout.py Rollout.end: async with AsyncExitStack": Inside(ROLLOUT_END),
    "rollout/rollout.py Rollout.end: await asyncio.wait": Inside(ROLLOUT_END),
    "rollout/runner.py Runner._change: await self._changed.wait": Inside(GROUPS),
    "rollout/episodes.py LocalEpisodes.run: async with asyncio.TaskGroup": Inside("its workflow"),
    "rollout/episodes.py LocalEpisodes.run: episode.result()": AT_ONCE,
    "rollout/episodes.py LocalEpisodes.run: greedy.result()": AT_ONCE,
    "rollout/episodes.py LocalEpisodes.evaluate_some.one: async with places": Inside(EVALUATION),
    "rollout/episodes.py LocalEpisodes.evaluate_some: async with asyncio.TaskGroup": Inside(EVALUATION),
    "rollout/episodes.py LocalEpisodes.evaluate_some: episode.result()": AT_ONCE,
    "rollout/runner.py Runner.run: async with asyncio.TaskGroup": Inside("its workflow"),
    "agents/json_checks/schemas.py _end: process.communicate()": AT_ONCE,
    "sandbox/folder.py Folder.add: async with self._lock": Inside(SANDBOX),
    "sandbox/folder.py Folder.read: async with self._lock": Inside(SANDBOX),
    "sandbox/folder.py Folder.run: async with self._lock": Inside(SANDBOX),
    "sandbox/containers/command_line.py _write: await stream.drain": Inside(FILES),
    "sandbox/containers/command_line.py run_words: await asyncio.create_subprocess_exec": Inside(COMMAND),
    "sandbox/containers/command_line.py run_words: await asyncio.gather": Inside(COMMAND),
    "sandbox/containers/command_line.py run_words: await process.wait": Inside(COMMAND),
    "sandbox/containers/command_line.py works: subprocess.run()": Bounded("WORKS_SECONDS"),
    "sandbox/containers/on_daytona.py DaytonaMachine.download: async for parts": Inside(FILES),
    "sandbox/containers/on_daytona.py DaytonaMachine.download: await self._sandbox.fs.download_file_stream": Inside(FILES),
    "sandbox/containers/on_daytona.py DaytonaMachine.execute: await self._sandbox.process.exec": Inside(COMMAND),
    "sandbox/containers/on_daytona.py DaytonaMachine.remove: await self._sandbox.delete": Inside(STOPPED),
    "sandbox/containers/on_daytona.py DaytonaMachine.upload: await self._sandbox.fs.upload_file": Inside(FILES),
    "sandbox/containers/on_e2b.py E2BMachine.download: async for reader": Inside(FILES),
    "sandbox/containers/on_e2b.py E2BMachine.download: async with reader": Inside(FILES),
    "sandbox/containers/on_e2b.py E2BMachine.remove: await self._sandbox.kill": Inside(STOPPED),
    "sandbox/containers/on_e2b.py E2BMachine.upload: await self._sandbox.files.write": Inside(FILES),
    "agents/container_door.py open_door.answer: await reader.readline": Bounded("REQUEST_SECONDS"),
    "agents/container_door.py open_door.answer: await writer.drain": Bounded("REQUEST_SECONDS"),
    "agents/container_door.py open_door: await asyncio.start_unix_server": AT_ONCE,
    "agents/repository.py archive_of: subprocess.run()": Bounded("ARCHIVE_SECONDS"),
    "agents/harbor.py Harbor.work: async with open_door": AT_ONCE,
    "agents/harbor.py Harbor.work: async with self.container": Inside("its container to start"),
    "agents/swe.py Swe.judge: async with self.container": Inside("its container to start"),
    "agents/swe.py Swe.work: async with open_door": AT_ONCE,
    "agents/swe.py Swe.work: async with self.container": Inside("its container to start"),
    "agents/tools/terminal.py Terminal.score: await asyncio.gather": Inside(SANDBOX),
    "agents/tools/toolbox.py FunctionTool.call: await result": Inside(TOOL),
    "agents/tools/toolbox.py FunctionTool.call: await self.function": Inside(TOOL),
    "agents/tools/toolbox.py Toolbox.setup: async with self._starting": Inside(MCP),
    "agents/external_program.py write_all: await stream.drain": Inside(AGENT),
    "agents/nemo_gym.py nemo_gym_agent: async with client": Inside(AGENT),
    "agents/package_programs.py listed: subprocess.run()": "of a dataset, before the run",
    "agents/verifiers_tasksets.py play: async with environment.serving": Inside(AGENT),
    "agents/verifiers_environment.py verifiers_agent: async with AsyncOpenAI": Inside(AGENT),
    "agents/verifiers_environment.py verifiers_agent: await _environment().run_rollout": Inside(AGENT),
    "engines/vllm/gpu_transfer.py WeightSyncClient.finish_weight_update: self._begin().result()": Inside(SENT),
    "engines/vllm/gpu_transfer.py WeightSyncClient.init_weight_transfer_engine: self._begin().result()": Inside(SENT),
    "engines/vllm/gpu_transfer.py WeightSyncClient.start_weight_update: self._begin().result()": Inside(SENT),
    "engines/vllm/gpu_transfer.py WeightSyncClient.update_weights: self._begin().result()": Inside(SENT),
    "engines/fleet/dispatcher.py Dispatcher.change: await self._changed.wait": Inside("the next version to be staged"),
    "engines/vllm/handles.py HandlesSender._explain: await call": Inside(SERVER),
    "engines/sglang/client.py SGLangClient.validate_folder: await asyncio.to_thread": AT_ONCE,  # headers of files
    "engines/sglang/installed.py installed: subprocess.run()": Bounded("SECONDS"),
    "agents/chat/server_renderer.py ServerRenderer._any: await ask": Inside(SERVER),
    "engines/fleet/scorer.py ServerScorer._clients: async with AsyncExitStack": AT_ONCE,
    "engines/fleet/scorer.py ServerScorer._inspect_servers: async with self._clients": AT_ONCE,
    "engines/fleet/scorer.py ServerScorer._score.score: async with free": Inside(SERVER),  # of those that are asked already
    "engines/fleet/scorer.py ServerScorer._score: async with self._clients": AT_ONCE,
    "engines/fleet/server.py Server.stop: self.process.wait()": Bounded("STOP_SECONDS"),
    "engines/fleet/placed.py Keeper.wait: server.process.wait()": OURS_TO_END,  # in the keeper's process
    "engines/fleet/placed.py PlacedServer._end: self._ended[0].result()": AT_ONCE,
    "engines/fleet/placed.py PlacedServer.stop: stopped.result()": Bounded("SECONDS_TO_STOP"),
    "engines/fleet/placed.py PlacedServer.stop: copy.ended.wait()": Bounded("SECONDS_TO_STOP"),
    "engines/fleet/log_copy.py LogCopy._copy: ask().result()": OURS_TO_END,
    "engines/fleet/log_copy.py log_part: time.sleep()": OURS_TO_END,  # in the keeper's process
    "engines/fleet/elastic.py Elastic._watch: await asyncio.to_thread": AT_ONCE,  # it asks Ray for a list
    "engines/fleet/delta/cache.py Cache._take: fcntl.flock()": AT_ONCE,
    "engines/fleet/delta/cache.py Cache.make: fcntl.flock()": AT_ONCE,
    "engines/fleet/delta/maker.py Maker.answer: job[1].result()": AT_ONCE,
    "engines/fleet/proof/prover.py Prover.prove: await self._whole": Inside("version {} to be written whole"),
    "engines/fleet/proof/prover.py Prover._workers: await self._whole": Inside("version {} to be written whole"),
    "engines/fleet/proof/prover.py Prover._claimed: async with self._reading": AT_ONCE,  # it reads a file
    "engines/fleet/proof/prover.py Prover._claimed: await asyncio.to_thread": AT_ONCE,  # it reads a file
    "engines/fleet/proof/prover.py Prover.prove: async with self._reading": AT_ONCE,  # it reads a file
    "engines/fleet/proof/prover.py Prover.prove: await asyncio.to_thread": AT_ONCE,  # it reads a file
    "engines/fleet/proof/prover.py Prover._workers: await asyncio.to_thread": AT_ONCE,  # as well
    "engines/fleet/replica.py Replica.vacate: await asyncio.to_thread": AT_ONCE,  # its process has ended
    "engines/fleet/supervisor.py Supervisor._compare.scored: async with turns": Inside(SERVER),
    "engines/fleet/supervisor.py Supervisor._compare: await asyncio.gather": Inside(SERVER),
    "engines/fleet/supervisor.py Supervisor._check_alive: await asyncio.gather": Inside(SERVER),
    "engines/fleet/supervisor.py Supervisor.wake: self._watching.result()": AT_ONCE,
    "engines/fleet/publisher.py Publisher.sleep: self._fleet.sleep()": AT_ONCE,
    "engines/fleet/publisher.py Publisher.sleep: replica.sleep()": Inside(SERVER),
    "rollout/episode.py run_episode: async with ": AT_ONCE,  # the limit; what is limited has a name
    "engines/fleet/supervisor.py Supervisor.unless_lost: await call": Inside(SERVER),
    "engines/fleet/supervisor.py cancel_and_wait: await asyncio.wait": AT_ONCE,
    "run/run_dir.py _lock: fcntl.flock()": AT_ONCE,
    "sandbox/pool.py Sandbox._request: await asyncio.open_connection": AT_ONCE,
    "sandbox/pool.py Sandbox._ready: async with self._starting": Inside("the sandbox to start"),
    "sandbox/pool.py _ForkServer.has_exited: self.control.recv()": AT_ONCE,
    "sandbox/pool.py _first_line: await asyncio.get_running_loop().sock_recv": Inside("the sandbox to start"),
    "serve.py Service.close: await asyncio.gather": AT_ONCE,  # the sessions were closed before
    "serve.py serve.until_interrupted: await asyncio.Event().wait": OURS_TO_END,  # no run: it serves until Ctrl-C
    "runtime/waits.py _watch: ended.wait()": OURS_TO_END,
    "runtime/waits.py moved: _moves.get()": AT_ONCE,
    "runtime/waits.py _OnBehalfOf.__enter__: _moves.get()": AT_ONCE,
    "runtime/waits.py whose: _whose.get()": AT_ONCE,
    "runtime/waits.py watching: thread.join()": AT_ONCE,
    "engines/vllm/broadcast.py Broadcast.close: self._start().result()": Inside("the sending of weights to end"),
    "engines/fleet/connections.py exchange: async with request_slots": Inside("the server at {} to answer {}"),
    "engines/fleet/request_slots.py RequestSlots.acquire: await granted": Inside("the server at {} to answer {}"),
    "engines/fleet/http.py Pool._connect: await self.loop.create_connection": Inside("the server at {} to answer {}"),
    "engines/fleet/connections.py exchange: await asyncio.sleep": Inside("the server at {} to answer {}"),
    "engines/vllm/gate.py Gate.__call__: await self.app": OURS_TO_END,  # in the server's own process
    "engines/vllm/wide.py ask_all: await asyncio.gather": OURS_TO_END,  # in the server's own process
    "lab/answers.py rows_page: select()": PAGE,
    "lab/answers.py searched: select()": PAGE,
    "lab/app.py Lab.index: await asyncio.wait": PAGE,
    "lab/app.py Lab.index: refreshed.result()": AT_ONCE,
    "lab/app.py Lab.read: await loop.run_in_executor": PAGE,
    "lab/app.py application.write_notes: async for request.stream()": PAGE,
    "lab/app.py as_json.endpoint: await handler": PAGE,
    "lab/app.py guarded.outer: await inner": PAGE,
    "lab/index.py Index._read_new: time.sleep()": PAGE,
    "lab/index.py Index.refresh: self._lock.acquire()": PAGE,
    "lab/terminal.py show: time.sleep()": PAGE,
    "tinker/app.py application.route.answer: await handler": CLIENTS,
    "tinker/reading.py bytes_of: async for request.stream()": CLIENTS,
    "tinker/reading.py durable.answer: await handler": CLIENTS,
    "tinker/journal.py Journal.close: await asyncio.wait": "the end of the server, for a transaction",
    "tinker/journal.py Journal.written: await done": CLIENTS,
    "tinker/futures.py Futures._make_room: self.requests.pop(id).done.result()": AT_ONCE,
    "tinker/futures.py Futures.result: await asyncio.wait": CLIENTS,
    "tinker/futures.py Futures.result: done.result()": AT_ONCE,
    "tinker/command.py serve.until_interrupted: await api.serve": CLIENTS,
    "tinker/sampling.py Samplers._scored: await own": CLIENTS,
    "tinker/gathering.py Gathering._gather: await asyncio.wait_for": Bounded("MOST_WAIT"),
    "tinker/gathering.py Gathering._gather: self._arrived.wait()": Bounded("MOST_WAIT"),
    "tinker/gathering.py Gathering._run: await asyncio.sleep": AT_ONCE,
    "tinker/gathering.py Gathering.forward: await waiting.done": CLIENTS,
    "tinker/embedded_weights.py EmbeddedWeights._holding: await turn": CLIENTS,
    "tinker/embedded_weights.py EmbeddedWeights._put: await asyncio.gather": CLIENTS,
    "tinker/embedded_weights.py EmbeddedWeights.holding: async with self._holding": CLIENTS,
    "tinker/embedded_weights.py EmbeddedWeights.holding: await asyncio.shield": CLIENTS,
    "tinker/embedded_weights.py EmbeddedWeights.holding.generate: await asyncio.gather": CLIENTS,
    "tinker/served_weights.py ServedWeights.holding: async with self._whole.holding": CLIENTS,
    "tinker/served_weights.py ServedWeights.holding: await asyncio.shield": CLIENTS,
    "tinker/served_weights.py ServedWeights._look: await asyncio.sleep": OURS_TO_END,
    "tinker/served_weights.py ServedWeights._remove: await served.name": CLIENTS,
    "engines/fleet/engine.py FleetEngine.add_adapter: await asyncio.to_thread": CLIENTS,
    "engines/fleet/named_adapters.py NamedAdapters._ensure: await asyncio.shield": CLIENTS,
    "engines/fleet/named_adapters.py NamedAdapters.remove: await asyncio.to_thread": CLIENTS,
    "engines/fleet/named_adapters.py NamedAdapters.remove: await loaded": CLIENTS,
    "tinker/sampling.py Samplers.sample: await likely": CLIENTS,
    "tinker/sampling.py Samplers.sample: async with self.weights.holding": CLIENTS,
    "agents/synthesis.py each: async for proposals": "a command that makes tasks, before any run",
    "agents/synthesis.py synthesize: async for each(proposals)": "a command that makes tasks, before any run",
    "run/retries.py _run: child.wait()": "the command that runs another one, which is the run",
}


def test_every_wait_has_a_name_or_a_reason_not_to_need_one() -> None:
    found = {str(place) for place in blocking_calls.unnamed()}
    assert sorted(found - ALLOWED.keys()) == [], "name them: with waiting(who, what): …"
    assert sorted(ALLOWED.keys() - found) == [], "these are there no more"


def test_the_reasons_hold() -> None:
    names = blocking_calls.names()
    for place, reason in ALLOWED.items():
        if isinstance(reason, Inside):
            assert reason.name in names, place
        elif isinstance(reason, Bounded):
            module = place.split()[0].removesuffix(".py").replace("/", ".")
            assert 0 < getattr(import_module(f"areal_x.{module}"), reason.constant) <= 120, place


def test_the_documentation_lists_every_name() -> None:
    text = Path("docs/monitoring.md").read_text(encoding="utf-8").partition("## When nothing moves")[2].partition("\n## ")[0]
    plain = re.sub(r"\b(N|NAME|URL|PATH)\b", "{}", text)
    assert [name for name in blocking_calls.names() if name not in plain] == []


def test_of_every_name_there_is_a_stall() -> None:
    assert set(blocking_calls.names()) == set(STALLS)


@pytest.mark.parametrize("name", sorted(STALLS))
def test_a_stall_is_named_and_its_end_is_seen(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    stall = Stall(tmp_path, name, request)
    with watching(stall.heard.put, tmp_path, silence_seconds=SILENCE):
        asyncio.run(asyncio.wait_for(STALLS[name](stall), 300))
    assert stall.named
