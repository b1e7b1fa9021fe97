"""A worker's loop over the commands of its parent, run in this process."""

import os
import pickle
import socket
from typing import Any

import numpy as np
import pytest
from faulty_env import FaultyEnv

from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.failures import Failed
from maml_rl.samplers.work.child.child_env import ChildEnv
from maml_rl.samplers.work.child.messages import (
    AttachBuffers,
    Channel,
    Close,
    Done,
    Load,
    Make,
    ResetBuffers,
    ResetTask,
    SampleTasks,
    Step,
    encode,
)
from maml_rl.samplers.work.child.shared_buffers import SharedBuffers, SharedProgress, create_shared_file

pytestmark = pytest.mark.timeout(30)


def replies_to(memory: int, *commands: Any) -> list[Any]:
    """Return the replies of a worker whose slots are the last two of three, and which is asked to close."""
    end, other = socket.socketpair()
    load = Load(0, {}, pickle.dumps(Recipe.of(FaultyEnv, {}, 5)))
    with end, other:
        for command in (load, Make(0, 1, 2, 2, 1), AttachBuffers(0, 3), *commands, Close(9)):
            other.sendall(encode(command))
        ChildEnv(Channel(end), memory).run()
        other.setblocking(False)
        received, replies = Channel(other), []
        while some := received.receive_some():
            replies += some
    return replies


@pytest.fixture
def memory() -> Any:
    descriptor = create_shared_file()
    yield descriptor
    os.close(descriptor)


def test_worker_writes_its_own_slots_and_replies_to_every_command_in_order(memory: int) -> None:
    progress = SharedProgress(memory, 2)
    tasks = ({"goal": 1.0}, {"goal": 3.0})
    commands = (ResetTask(1, tasks), ResetBuffers(2), Step(3), SampleTasks(4, 2, 7, False))
    load, made, *replies = replies_to(memory, *commands)
    shared = SharedBuffers(memory, progress.size, made.result, 3)
    assert load == Done(0)
    assert [reply.generation for reply in replies] == [0, 1, 2, 3, 4]
    assert len(replies[-1].result) == 2
    # What a step returns here is the distance to the goal.
    np.testing.assert_allclose((shared.step.rewards + shared.step.observations[:, 0])[1:], [1.0, 3.0])
    assert not shared.step.observations[0].any()
    assert progress.physics_seconds[0] == 0.0 < progress.physics_seconds[1]


def test_command_that_raises_is_replied_with_slot_and_task_and_the_next_is_done(memory: int) -> None:
    tasks = ({"goal": 1.0}, {"goal": "far"})
    *_, failure, last = replies_to(memory, ResetTask(1, tasks), ResetBuffers(2), Step(3), SampleTasks(4, 1, 0, False))
    assert isinstance(failure, Failed)
    assert (failure.generation, failure.slot, failure.of_env) == (3, 2, True)
    assert failure.task == "{'goal': 'far'}"
    assert (last.generation, len(last.result)) == (4, 1)
