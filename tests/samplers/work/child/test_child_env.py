"""A worker's loop over the commands of its parent, and the commands of a worker that acts, run in this process."""

import os
import pickle
import socket
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faulty_env import FaultyEnv
from phases import sample_here

from maml_rl.envs.calls import CallRules
from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.failures import Failed
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.remote_store import Reference, Request
from maml_rl.samplers.work.child import child_env
from maml_rl.samplers.work.child.child_env import ChildEnv, run_child
from maml_rl.samplers.work.child.messages import Channel, Command, Done, encode
from maml_rl.samplers.work.child.process_setup import ChildEnds
from maml_rl.samplers.work.child.shared_buffers import (
    PhasePlan,
    SharedBuffers,
    SharedPhase,
    SharedProgress,
    create_shared_file,
)
from maml_rl.samplers.worker_progress import PhaseAbandonedError
from maml_rl.seeding import PhaseStreams

pytestmark = pytest.mark.timeout(30)

TASKS = ({"goal": 1.0}, {"goal": 3.0})


def run_here(end: socket.socket, memory: int) -> None:
    """Be a child in this process, at one end of a socket, and expect that it ends well."""
    statuses: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_env, "enter_child", lambda ends: None)
        patch.setattr(child_env, "leave_child", statuses.append)
        run_child(ChildEnds(os.dup(end.fileno()), -1, -1, memory))
    assert statuses == [0]


def replies_to(memory: int, *commands: Any, env: Any = FaultyEnv, **rules: Any) -> list[Any]:
    """Return the replies of a worker whose slots are the last two of three, and which is asked to close."""
    end, other = socket.socketpair()
    recipe = Recipe.of(env, {}, 5, CallRules(timeout=20.0, **rules))
    start = Command(0, "start", ({"sys_argv": ["a parent's"]}, {}, pickle.dumps(recipe)))
    with end, other:
        made = Command(0, "make", (1, 2, slice(1, 3))), Command(0, "attach", (3,))
        for command in (start, *made, *commands, Command(9, "close")):
            other.sendall(encode(command))
        run_here(end, memory)
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
        start = Command(0, "start", ({}, {}, pickle.dumps(Recipe.of(FaultyEnv, {}, 5))))
        other.sendall(encode(start) + encode(Command(0, "make", (0, 1, slice(0, 1)))))
        other.close()
        run_here(end, memory)


# With a policy.

GOALS = tuple({"goal": float(goal)} for goal in range(3))


class Abandoning(FaultyEnv):
    """Has its phase abandoned in its third step, if there is anything to abandon it with."""

    abandon: Any = None

    def _misbehave(self, place: Any) -> None:
        if place == 2 and self.abandon is not None:
            self.abandon()


class Worker:
    """Worker 1 of two, on the phases of three tasks with two slots each, whose policy has a constant."""

    def __init__(self) -> None:
        self.policy = NormalMLPPolicy(2, 1, (4,), "tanh")
        self.policy.register_buffer("shift", torch.zeros(1))
        scales = torch.linspace(0.5, 1.5, 3)
        own = dict(self.policy.named_parameters())
        self.params = {name: torch.stack([scale * value.detach() for scale in scales]) for name, value in own.items()}
        layout = {name: (tuple(value.shape), np.dtype(np.float32)) for name, value in self.params.items()}
        self.plan = PhasePlan((3, 2, 5), layout, {"shift": ((1,), np.dtype(np.float32))}, num_phases=2)
        self.file = create_shared_file()
        self.child = ChildEnv(self.file)
        self.child.start({}, {}, pickle.dumps(Recipe.of(Abandoning, {}, 5)))
        env = self.child.make(1, 2, slice(0, 6))
        self.child.attach(6)
        self.progress = SharedProgress(self.file, 2)
        buffers = SharedBuffers(self.file, self.progress.size, env, 6)
        self.shared = SharedPhase(self.file, buffers.size, self.plan, env)
        for name, value in self.params.items():
            self.shared.parameters[name][:] = value
        self.shared.constants["shift"][:] = 7.0
        self.phase = Phase(GOALS, self.policy, self.params, PhaseStreams(0, 0, 4), 2, 5)

    def load(self) -> None:
        self.child.load_policy(self.plan, pickle.dumps(self.policy))

    def sample(self, generation: int = 0, **options: Any) -> dict[str, float]:
        self.child.begin(Command(generation, "run"))
        arguments = {"alike": False, "timed": False, "number": 0} | options
        return self.child.run(self.phase.unit(slice(3, 6)).without_policy(), 1, **arguments)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(sys, "argv", sys.argv)
    made = Worker()
    yield made
    made.child.close()
    os.close(made.file)


def test_abandoned_unit_samples_nothing_and_one_that_is_abandoned_later_stops(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.load()
    worker.progress.generation[0] = 1
    with pytest.raises(PhaseAbandonedError):
        worker.sample()
    assert not worker.shared.episodes[0].lengths.any()
    monkeypatch.setattr(Abandoning, "abandon", lambda _: worker.progress.generation.fill(2))
    with pytest.raises(PhaseAbandonedError):
        worker.sample(1)
    assert not worker.shared.episodes[0].lengths.any()
    monkeypatch.undo()
    assert min(worker.sample(2, timed=True).values()) > 0.0
    assert worker.shared.episodes[0].lengths.tolist() == [[0, 0], [0, 5], [5, 5]]


@pytest.mark.parametrize("alike", [False, True])
def test_unit_has_the_episodes_that_the_whole_phase_has_there(worker: Worker, alike: bool) -> None:
    params = {name: value[:1].expand_as(value) for name, value in worker.params.items()} if alike else worker.params
    whole = sample_here(SerialVectorEnv(FaultyEnv, 6), worker.phase.with_policy(worker.policy, params))
    worker.load()
    worker.sample(number=1, alike=alike)
    for name in ("observations", "actions", "rewards"):
        sampled, expected = getattr(worker.shared.episodes[1], name), getattr(whole, name).numpy()
        np.testing.assert_array_equal(sampled[1, :, 1], expected[1, :, 1])
        np.testing.assert_array_equal(sampled[2], expected[2])
    assert not worker.shared.episodes[1].lengths[:2, 0].any()
    assert not worker.shared.episodes[0].lengths.any()
    assert worker.child._made.first_slot == 3


def test_work_is_on_the_own_blocks_with_the_newest_policy_and_objects_that_come_once(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    def keep(policy: Any, sample: Any, get: Any, beat: Any) -> Any:
        kept.append(SimpleNamespace(policy=policy, sample=sample, get=get, carry_out=lambda request: request.blocks))
        return kept[-1]

    monkeypatch.setattr("maml_rl.samplers.remote_store.KeptBlocks", keep)
    worker.load()
    worker.sample(number=1)

    def work(objects: dict[int, bytes]) -> Any:
        return pickle.loads(worker.child.work(Request(Reference(0), (1, 3)), objects, 3))

    worker.child.take({8: pickle.dumps("eight")})
    assert work({9: pickle.dumps("nine")}) == (1, 3)
    (first,) = kept
    assert first.policy.shift.item() == 7.0
    first.policy.shift.zero_()
    assert [first.get(Reference(number)) for number in (9, 8)] == ["nine", "eight"]
    with pytest.raises(KeyError):
        first.get(Reference(8))
    # Those of an earlier batch, about which this worker was asked nothing, are gone with the next.
    worker.child.take({5: pickle.dumps("five")})
    worker.child.take({7: pickle.dumps("seven")}, 6)
    worker.child.take({8: pickle.dumps("eight")}, 6)
    assert list(worker.child._objects) == [7, 8]
    # The second phase of the batch, of the last task.
    episodes = first.sample(worker.phase.of_tasks(slice(2, 3)))
    np.testing.assert_array_equal(episodes.rewards, worker.shared.episodes[1].rewards[2:])
    assert episodes.lengths.tolist() == [[5, 5]]
    # What acts is another copy, until another policy is loaded.
    worker.sample()
    assert first.policy.shift.item() == 0.0
    worker.load()
    work({})
    assert len(kept) == 2


def test_main_module_is_imported_before_the_first_pickle_that_names_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[Any] = []
    monkeypatch.setattr(child_env, "restore_interpreter", restored.append)
    interpreter, main = {"sys_path": []}, {"init_main_from_path": "script.py"}
    for name, imports in (("no part of main", []), ("of __main__", [main])):
        worker.child.start(interpreter, main, pickle.dumps(name))
        assert restored == [interpreter, *imports]
        restored.clear()
        worker.policy.name = name
        worker.load()
        assert restored == imports
        restored.clear()
