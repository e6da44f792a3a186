"""Bytes of the images of a group in the journal, in a shard's message and in a batch to trainers: the table in docs/images.md.

    python -m benchmarks.image_bytes

Beside what they are, what they would be if each episode's images were its own: measured with images that differ in one number.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler  # writes what multiprocessing and Ray send

import numpy as np

from areal_x.batching.packing import pack
from areal_x.cluster.dealing import Dealer
from areal_x.protocols import backends
from areal_x.protocols.shares import Shares
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.run.group_bytes import encode
from areal_x.shards.messages import Finished
from areal_x.types import Episode, Group, Images, Scored, Task, Trajectory

EPISODES, ANSWER, SIDE, FEATURES = 8, 64, 16, 1176  # patches along a side, and numbers in each: Qwen2.5-VL's


def picture(seed: int, copy: int = 0) -> np.ndarray:
    patches = np.random.default_rng(seed).normal(size=(SIDE**2, FEATURES)).astype(np.float32)
    patches[-1, -1] += copy
    return patches


def trajectory(number: int, own: bool, conversation: bool) -> Trajectory:
    """own: no image of it is another's."""
    shown = [picture(0, number if own else 0), *([picture(1 + number)] if conversation else [])]
    prompt = np.arange(len(shown) * SIDE**2 // 4 + 16, dtype=np.int32)
    images = Images(np.concatenate(shown), np.array([[1, SIDE, SIDE]] * len(shown), np.int32))
    answer = np.arange(ANSWER, dtype=np.int32)
    return Trajectory.from_completion(prompt, answer, np.zeros(ANSWER), np.zeros(ANSWER), 1.0, images=images)


def journal(group: Group) -> int:
    return len(encode(group))


def message(group: Group) -> int:
    return len(ForkingPickler.dumps(Finished(0, group.episodes, None)))


def batch(group: Group) -> int:
    trajectories = [t for episode in group.episodes for t in episode.trajectories]
    packed = pack(trajectories, max(map(len, trajectories)), rows_multiple=2)
    config = TrainerConfig(model=ModelConfig("unread"), micro_batch_rows=1)
    shares = [Shares((rank,), 2) for rank in range(2)]
    dealt, _ = Dealer(backends.load_backend("torch"), config, shares, ["node"] * 2).deal(packed.batch, "update")
    return len(ForkingPickler.dumps(dealt.values["node"]))


def main() -> None:
    measured: dict[str, Callable[[Group], int]] = {"journal": journal, "shard's message": message, "batch, to a node": batch}
    for conversation in (False, True):
        for name, size in measured.items():
            both = []
            for own in (True, False):
                episodes = (Episode(Scored(1.0), (trajectory(i, own, conversation),)) for i in range(EPISODES))
                both.append(size(Group(Task("", ""), 0, 0, tuple(episodes))))
            kind = "conversations" if conversation else "one prompt"
            print(f"{kind}: {name}: {both[0] / 1e6:.1f} MB, {both[1] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
