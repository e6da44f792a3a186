import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.tasks.stream import TaskStream
from areal_x.types import Task

TASKS = [Task(str(i), f"prompt {i}") for i in range(7)]


def draw(stream, count):
    return [stream.next()[1].id for _ in range(count)]


def test_every_epoch_has_every_task_once_and_its_own_order():
    drawn = draw(TaskStream(TASKS, seed=0), 28)
    epochs = [tuple(drawn[i : i + 7]) for i in range(0, 28, 7)]
    assert all(sorted(epoch) == list("0123456") for epoch in epochs)
    assert len(set(epochs)) > 1


def test_the_seed_alone_decides_the_order():
    assert draw(TaskStream(TASKS, seed=3), 20) == draw(TaskStream(TASKS, seed=3), 20)
    assert draw(TaskStream(TASKS, seed=3), 20) != draw(TaskStream(TASKS, seed=4), 20)


def test_without_shuffling_the_order_is_the_datasets():
    assert "".join(draw(TaskStream(TASKS, shuffle=False), 10)) == "0123456012"


def test_the_position_is_the_whole_state():
    stream = TaskStream(TASKS, seed=1)
    drawn = [stream.next() for _ in range(30)]
    assert [position for position, _ in drawn] == list(range(30))
    resumed = TaskStream(TASKS, seed=1)
    resumed.position = 11
    assert [resumed.next() for _ in range(19)] == drawn[11:]
    assert [resumed.task_at(position) for position, _ in reversed(drawn)] == [task for _, task in reversed(drawn)]


def test_an_empty_dataset_and_a_negative_seed_are_refused():
    with pytest.raises(UserError, match=r"train\.dataset has no tasks"):
        TaskStream([])
    with pytest.raises(ConfigError, match=r"train\.seed = -1"):
        TaskStream(TASKS, seed=-1)
