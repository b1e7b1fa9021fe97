"""A worker's loop over the commands of its parent, run in this process."""

import os
import pickle
import socket
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from faulty_env import FaultyEnv

from maml_rl.envs.calls import CallRules
from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.samplers.failures import Failed
from maml_rl.samplers.work.child.child_env import ChildEnv
from maml_rl.samplers.work.child.messages import Channel, Command, Done, encode
from maml_rl.samplers.work.child.shared_buffers import SharedBuffers, SharedProgress, create_shared_file

pytestmark = pytest.mark.timeout(30)

TASKS = ({"goal": 1.0}, {"goal": 3.0})


def replies_to(memory: int, *commands: Any, env: Any = FaultyEnv, **rules: Any) -> list[Any]:
    """Return the replies of a worker whose slots are the last two of three, and which is asked to close."""
    end, other = socket.socketpair()
    recipe = Recipe.of(env, {}, 5, CallRules(timeout=20.0, **rules))
    start = Command(0, "start", ({"sys_argv": ["a parent's"]}, pickle.dumps(recipe)))
    with end, other:
        made = Command(0, "make", (1, 2, slice(1, 3))), Command(0, "attach", (3,))
        for command in (start, *made, *commands, Command(9, "close")):
            other.sendall(encode(command))
        ChildEnv(Channel(end), memory).serve()
        other.setblocking(False)
        received, replies = Channel(other), []
        while some := received.receive_some():
            replies += some
    return replies


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", sys.argv)
    descriptor = create_shared_file()
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("stepping", ["serial", "threads"])
def test_worker_writes_its_own_slots_and_replies_to_every_command_in_order(memory: int, stepping: str) -> None:
    env = SerialVectorEnv(FaultyEnv, 2)
    progress = SharedProgress(memory, 2)
    shared = SharedBuffers(memory, progress.size, EnvDescription.of(env), 3)
    shared.actions[:, 0], shared.seeds[:] = [0.0, -0.5, 0.5], [0, 5, 7]
    drawn = Command(4, "sample_tasks", (2, 7, False))
    commands = (Command(1, "reset_task", (TASKS,)), Command(2, "reset_buffers"), Command(3, "step"), drawn)
    load, _, *replies = replies_to(memory, *commands, stepping=stepping)
    assert (load, sys.argv) == (Done(0), ["a parent's"])
    assert [reply.generation for reply in replies] == [0, 1, 2, 3, 4]
    assert len(replies[-1].result) == 2
    env.reset_task(TASKS)
    env.reset_buffers(np.array([5, 7]))
    env.step_send(0, np.array([[-0.5], [0.5]], np.float32))
    env.step_recv()
    np.testing.assert_array_equal(shared.step.rewards[1:], env.buffers.rewards)
    np.testing.assert_array_equal(shared.step.observations[1:], env.buffers.observations)
    assert not shared.step.observations[0].any()
    assert (progress.physics_seconds > 0.0).tolist() == [False, stepping == "serial"]


@pytest.mark.parametrize("fault", ["raise", "leave"])
def test_command_that_raises_is_replied_with_slot_and_task_and_the_next_is_done(memory: int, fault: str) -> None:
    env = partial(FaultyEnv, fault, 0, slot_task=3.0)
    *_, failure, unknown, last = replies_to(
        memory,
        Command(1, "reset_task", (TASKS,)),
        Command(2, "reset_buffers"),
        Command(3, "step"),
        Command(4, "run", (None, 0)),
        Command(5, "sample_tasks", (1, 0, False)),
        env=env,
    )
    assert isinstance(failure, Failed)
    assert (failure.generation, failure.slot, failure.of_env) == (3, 2, True)
    assert failure.task == "{'goal': 3.0}"
    # There is no policy for a phase, which is no fault of the environment.
    assert (unknown.generation, unknown.of_env) == (4, False)
    assert (last.generation, len(last.result)) == (5, 1)


def test_slot_that_cannot_be_made_is_counted_over_all_workers(memory: int) -> None:
    _, failure, *_ = replies_to(memory, env=partial(FaultyEnv, "raise", "make"))
    assert (failure.slot, failure.of_env) == (1, True)


def test_worker_whose_parent_has_ended_ends_without_an_error(memory: int) -> None:
    end, other = socket.socketpair()
    with end, other:
        start = Command(0, "start", ({}, pickle.dumps(Recipe.of(FaultyEnv, {}, 5))))
        other.sendall(encode(start) + encode(Command(0, "make", (0, 1, slice(0, 1)))))
        other.close()
        ChildEnv(Channel(end), memory).serve()
