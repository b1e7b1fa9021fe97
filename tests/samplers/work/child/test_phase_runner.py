"""A worker's side of worker inference, run in this process."""

import copy
import os
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faulty_env import FaultyEnv
from phases import sample_here

from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.remote_store import Reference, Request
from maml_rl.samplers.work.body import Body
from maml_rl.samplers.work.child.phase_runner import PhaseRunner
from maml_rl.samplers.work.child.shared_buffers import PhasePlan, SharedPhase, SharedProgress, create_shared_file
from maml_rl.samplers.worker_progress import PhaseAbandonedError
from maml_rl.seeding import PhaseStreams

TASKS = tuple({"goal": float(goal)} for goal in range(3))


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
        self.progress = SharedProgress(self.file, 2)
        self.body = Body(Recipe.of(Abandoning, {}, 5), self.progress, 1)
        self.env = EnvDescription.of(self.body.slots(6))
        self.shared = SharedPhase(self.file, self.progress.size, self.plan, self.env)
        for name, value in self.params.items():
            self.shared.parameters[name][:] = value
        self.shared.constants["shift"][:] = 7.0
        self.phase = Phase(TASKS, self.policy, self.params, PhaseStreams(0, 0, 4), 2, 5)

    def load(self) -> PhaseRunner:
        shared = SharedPhase(self.file, self.progress.size, self.plan, self.env)
        return PhaseRunner(copy.deepcopy(self.policy), shared, self.body, is_stacked=True)

    def sample(self, runner: PhaseRunner, generation: int = 0, **options: Any) -> dict[str, float]:
        self.body.generation = generation
        arguments = {"alike": False, "timed": False, "number": 0} | options
        return runner.run(self.phase.unit(slice(3, 6)).without_policy(), 1, **arguments)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(sys, "argv", sys.argv)
    made = Worker()
    yield made
    made.body.close()
    os.close(made.file)


def test_abandoned_unit_samples_nothing_and_one_that_is_abandoned_later_stops(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = worker.load()
    worker.progress.generation[0] = 1
    with pytest.raises(PhaseAbandonedError):
        worker.sample(runner)
    assert not worker.shared.episodes[0].lengths.any()
    monkeypatch.setattr(Abandoning, "abandon", lambda _: worker.progress.generation.fill(2))
    with pytest.raises(PhaseAbandonedError):
        worker.sample(runner, 1)
    assert not worker.shared.episodes[0].lengths.any()
    monkeypatch.undo()
    assert min(worker.sample(runner, 2, timed=True).values()) > 0.0
    assert worker.shared.episodes[0].lengths.tolist() == [[0, 0], [0, 5], [5, 5]]


@pytest.mark.parametrize("alike", [False, True])
def test_unit_has_the_episodes_that_the_whole_phase_has_there(worker: Worker, alike: bool) -> None:
    params = {name: value[:1].expand_as(value) for name, value in worker.params.items()} if alike else worker.params
    whole = sample_here(SerialVectorEnv(FaultyEnv, 6), worker.phase.with_policy(worker.policy, params))
    worker.sample(worker.load(), number=1, alike=alike)
    for name in ("observations", "actions", "rewards"):
        sampled, expected = getattr(worker.shared.episodes[1], name), getattr(whole, name).numpy()
        np.testing.assert_array_equal(sampled[1, :, 1], expected[1, :, 1])
        np.testing.assert_array_equal(sampled[2], expected[2])
    assert not worker.shared.episodes[1].lengths[:2, 0].any()
    assert not worker.shared.episodes[0].lengths.any()
    assert worker.body.first_slot == 3


def test_work_is_on_the_own_blocks_with_the_newest_policy_and_objects_that_come_once(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    def keep(policy: Any, sample: Any, get: Any, beat: Any) -> Any:
        kept.append(SimpleNamespace(policy=policy, sample=sample, get=get, carry_out=lambda request: request.blocks))
        return kept[-1]

    monkeypatch.setattr("maml_rl.samplers.remote_store.KeptBlocks", keep)
    runner = worker.load()
    worker.sample(runner, number=1)

    def work(objects: dict[int, bytes], interpreter: Any = None) -> Any:
        return pickle.loads(runner.work(Request(Reference(0), (1, 3)), objects, 3, interpreter))

    runner.take({8: pickle.dumps("eight")}, {"sys_argv": ["first"]})
    assert sys.argv == ["first"]
    assert work({9: pickle.dumps("nine")}, {"sys_argv": ["second"]}) == (1, 3)
    assert sys.argv == ["second"]
    (first,) = kept
    assert first.policy.shift.item() == 7.0
    first.policy.shift.zero_()
    assert [first.get(Reference(number)) for number in (9, 8)] == ["nine", "eight"]
    with pytest.raises(KeyError):
        first.get(Reference(8))
    # Those of an earlier batch, about which this worker was asked nothing, are gone with the next.
    runner.take({5: pickle.dumps("five")}, None)
    runner.take({7: pickle.dumps("seven")}, None, 6)
    runner.take({8: pickle.dumps("eight")}, None, 6)
    assert list(runner._objects) == [7, 8]
    # The second phase of the batch, of the last task.
    episodes = first.sample(worker.phase.of_tasks(slice(2, 3)))
    np.testing.assert_array_equal(episodes.rewards, worker.shared.episodes[1].rewards[2:])
    assert episodes.lengths.tolist() == [[5, 5]]
    # What acts is another copy, until another policy is loaded.
    worker.sample(runner)
    assert first.policy.shift.item() == 0.0
    runner = worker.load()
    work({})
    assert len(kept) == 2
