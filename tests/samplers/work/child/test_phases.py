"""Worker inference: episodes bit-identical to those of central inference, one message per phase, and faults."""

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_env import HORIZON, FaultyEnv
from phases import sample_here
from script_runs import Run

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.envs import make_vector_env
from maml_rl.envs.meta_env import RecordedInfos
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ChildEnvError, ChildEnvTimeout
from maml_rl.policies import GRUPolicy, NormalMLPPolicy
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.work.child.phases import WorkerPhases
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv
from maml_rl.samplers.work.child.worker_pool import WorkerPool
from maml_rl.seeding import PhaseStreams

pytestmark = [pytest.mark.usefixtures("forked_workers"), pytest.mark.slow, pytest.mark.timeout(120)]

# Forked children share the torch of this process, and so start at once.
IN_CHILDREN: dict[str, Any] = {"inference": "worker", "start_method": "fork"}


def sample_faulty(num_workers: int, options: dict[str, Any] | None = None, **fault: Any) -> str:
    """Sample a phase of three tasks in `FaultyEnv`, and return its digest."""
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    settings = {"seed": 0, "max_episode_steps": HORIZON, **(IN_CHILDREN if num_workers else {}), **(options or {})}
    env = partial(FaultyEnv, **fault)
    with MultiTaskSampler(env, {}, 2, policy, num_workers=num_workers, **settings) as sampler:
        return sampler.rollout([{"goal": 0.0}, {"goal": 1.0}, {"goal": 2.0}]).digest()


# The policy acts in the children.


def make_slots(num_workers: int = 2, **options: Any) -> ParallelVectorEnv:
    """Return two slots for each of three tasks of 2D navigation."""
    settings = {"granularity": 2, "start_method": "fork", "max_episode_steps": 5, **options}
    return ParallelVectorEnv("2DNavigation-v0", {}, 6, num_workers, **settings)


def whole_phase(policy: Any, number: int = 0, params: Any = None, horizon: int = 5) -> Phase:
    tasks = tuple({"goal": [0.1 * (task + 1), 0.3]} for task in range(3))
    return Phase(tasks, policy, params, PhaseStreams(0, 0, number), 2, horizon)


def phase(slots: WorkerPhases, policy: Any, number: int = 0, params: Any = None, horizon: int = 5) -> Any:
    sampled = whole_phase(policy, number, params, horizon)
    return TaskEpisodes(**slots.sample(sampled)[0].copy().by_name(), tasks=sampled.tasks)


def test_the_parent_itself_does_not_act(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = NormalMLPPolicy(2, 2, (4,), "tanh")

    def actor(*_: Any) -> Any:
        raise AssertionError("the parent acts")

    with make_slots() as slots:
        phases = WorkerPhases(slots)
        first = phase(phases, policy)
        # The workers were forked before.
        monkeypatch.setattr(NormalMLPPolicy, "actor", actor)
        with pytest.raises(AssertionError, match="the parent acts"):
            sample_here(slots, whole_phase(policy))
        assert phase(phases, policy).digest() == first.digest()


def test_a_phase_takes_one_message_to_each_child(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[tuple[int, str]] = Counter()
    send = WorkerPool.send

    def counting(pool: WorkerPool, index: int, command: Any, *rest: Any) -> None:
        sent[index, type(command).__name__] += 1
        send(pool, index, command, *rest)

    policy = NormalMLPPolicy(2, 2, (4,), "tanh")
    with make_slots() as slots:
        monkeypatch.setattr(WorkerPool, "send", counting)
        phases = WorkerPhases(slots)
        for number in range(3):
            phase(phases, policy, number)
    assert sent == {(child, kind): count for child in (0, 1) for kind, count in (("LoadPolicy", 1), ("RunPhase", 3))}


def test_parameters_of_every_phase_reach_the_children() -> None:
    policy = NormalMLPPolicy(2, 2, (4,), "tanh", init_std=1e-6)
    with make_slots() as slots:
        phases = WorkerPhases(slots)
        for biases in ((0.05, -0.05, 0.01), (-0.02, 0.0, 0.08)):
            params = {name: torch.zeros_like(value) for name, value in policy.stack_parameters(3).items()}
            params["sigma"] -= 20.0
            params["mu.bias"] += torch.tensor(biases).unsqueeze(1)
            actions = phase(phases, policy, params=params).actions
            expected = torch.tensor(biases).reshape(3, 1, 1, 1).expand_as(actions)
            torch.testing.assert_close(actions, expected, atol=1e-5, rtol=0.0)


class ShiftedPolicy(NormalMLPPolicy):
    """Adds a constant that is not a parameter."""

    def __init__(self) -> None:
        super().__init__(2, 2, (4,), "tanh")
        self.register_buffer("shift", torch.zeros(2))

    def act(self, observations: torch.Tensor, noise: torch.Tensor, memory: Any = (), params: Any = None) -> Any:
        return super().act(observations, noise, params=params)[0] + self.shift, ()


def test_constants_of_the_policy_reach_the_children() -> None:
    policy = ShiftedPolicy()
    with make_slots() as slots:
        phases = WorkerPhases(slots)
        before = phase(phases, policy, horizon=1).actions
        policy.shift += 5.0
        after = phase(phases, policy, horizon=1).actions
    torch.testing.assert_close(after, before + 5.0)


def test_another_policy_and_another_horizon_replace_the_first() -> None:
    with make_slots() as slots:
        phases = WorkerPhases(slots)
        for hidden, horizon in (((4,), 5), ((9, 3), 2), ((4,), 5)):
            policy = NormalMLPPolicy(2, 2, hidden, "tanh")
            central = sample_here(slots, whole_phase(policy, 1, horizon=horizon))
            assert phase(phases, policy, 1, horizon=horizon).digest() == central.digest()


@pytest.mark.slow
def test_policy_of_the_main_script_is_found_by_the_children(run: Run) -> None:
    script = run("""
        from maml_rl import MultiTaskSampler, get_policy_for_env
        from maml_rl.policies import GRUPolicy, NormalMLPPolicy

        class MyPolicy(NormalMLPPolicy):
            pass

        if __name__ == "__main__":
            policy = MyPolicy(2, 2, (4,), "tanh")
            options = dict(seed=0, max_episode_steps=3, inference="worker", num_workers=1)
            with MultiTaskSampler("2DNavigation-v0", {}, 2, policy, **options) as sampler:
                print(sampler.rollout(sampler.sample_tasks(2)).num_steps)
    """)
    output, errors = script.communicate(timeout=110)
    assert output == "12\n", errors


# Faults.


@pytest.mark.parametrize("place", ["reset_task", "reset", 0, 2, HORIZON - 1])
def test_killed_child_is_replaced_and_the_phase_is_bit_identical(
    place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = str(tmp_path / "marker")
    found = sample_faulty(2, fault="kill", place=place, marker=marker, slot_task=1.0)
    assert os.path.exists(marker)
    assert found == sample_faulty(0)
    (record,) = caplog.records
    doing = f"in step {place}" if isinstance(place, int) else f"in {place}"
    assert f"SIGKILL (by a user, or by the kernel when memory ran out) {doing} with the tasks" in record.getMessage()


@pytest.mark.parametrize(("fault", "place"), [("hang", "reset"), ("hang_with_gil", 2)])
def test_hung_child_is_shown_with_task_step_and_stack_and_killed(fault: str, place: Any) -> None:
    start = time.monotonic()
    with pytest.raises(ChildEnvTimeout) as caught:
        sample_faulty(2, {"step_timeout": 2.0}, fault=fault, place=place, slot_task=1.0)
    assert time.monotonic() - start < 30.0
    doing = f"in step {place}" if isinstance(place, int) else f"in {place}"
    # Each worker has one slot of this task; a busy machine decides whose hang is noticed first.
    assert re.search(rf"hangs {doing} of slot [23] with the task {{'goal': 1.0}}", str(caught.value))
    assert f"in _{fault}" in str(caught.value)


class SlowEnv(FaultyEnv):
    """Takes long for every step."""

    def step(self, action: Any) -> Any:
        time.sleep(0.1)
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info


def test_phase_may_take_longer_than_the_time_for_one_step() -> None:
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    options: dict[str, Any] = {"step_timeout": 1.0, "max_episode_steps": 12, **IN_CHILDREN}
    with MultiTaskSampler(SlowEnv, {}, 1, policy, seed=0, num_workers=1, **options) as sampler:
        start = time.monotonic()
        assert sampler.rollout([{"goal": 0.0}]).num_steps == 12
        assert time.monotonic() - start > 1.0


def test_slots_of_a_phase_may_take_longer_together_than_the_time_of_one() -> None:
    # Six slots of one worker take 1.2 s.
    assert sample_faulty(1, {"step_timeout": 0.6}, fault="work", place=1) == sample_faulty(0)


def test_phase_whose_worker_dies_too_often_ends_although_another_still_samples() -> None:
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    env = partial(SlowEnv, fault="kill", place=0, slot_task=1.0)
    with ParallelVectorEnv(env, {}, 2, 2, start_method="fork", max_restarts=1) as slots:
        # A phase of 1,000 steps would take 100 seconds.
        long = Phase(({"goal": 0.0}, {"goal": 1.0}), policy, None, PhaseStreams(0, 0, 0), 1, 1000)
        start = time.monotonic()
        with pytest.raises(ChildEnvError, match=r"worker 1 of .* died 2 times in one phase, more often than max_"):
            WorkerPhases(slots).sample(long)
        assert time.monotonic() - start < 40.0
        assert slots.pids == []


# Bad input.


def test_policy_that_cannot_be_pickled_is_refused_by_name() -> None:
    policy = NormalMLPPolicy(2, 2, (4,), lambda units: torch.relu(units))
    with pytest.raises(
        TypeError, match=r"the policy NormalMLPPolicy\.perceptron\.nonlinearity cannot be pickled .* top level"
    ):
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy, num_workers=2, inference="worker")


# The cut.


class EndingEnv(FaultyEnv):
    """Episodes of different lengths, with numbers that are recorded."""

    recorded_infos: RecordedInfos = {"clock": "step", "success": "episode"}  # noqa: RUF012

    def step(self, action: Any) -> Any:
        observation, reward, *_ = super().step(action)
        over = bool(observation[0] > 0.5)
        return observation, reward, over, False, {"clock": self._steps, "success": over}


CUT: dict[str, dict[str, Any]] = {
    "images": {"env_name": "PixelNavigation-v0"},
    "waves": {"env_name": "2DNavigation-v0", "slots_per_task": 2},
    "memory": {"env_name": "2DNavigation-v0"},
    "memory over waves": {"env_name": "2DNavigation-v0", "slots_per_task": 2, "reset_memory_each_episode": True},
    "infos": {"env_name": EndingEnv},
    "infos over waves": {"env_name": EndingEnv, "slots_per_task": 2},
    "threads": {"env_name": EndingEnv, "stepping": "threads"},
    "threads over waves": {"env_name": EndingEnv, "stepping": "threads", "slots_per_task": 2},
    "deterministic": {"env_name": "2DNavigation-v0"},
}


@pytest.mark.parametrize("name", CUT)
def test_episodes_do_not_depend_on_the_cut(name: str) -> None:
    options = {"batch_size": 4, "seed": 0, "max_episode_steps": 6, **CUT[name]}
    with closing(make_vector_env(options["env_name"])) as env:
        spaces = env.single_observation_space, env.single_action_space
        policy: Any = GRUPolicy(*spaces, 5) if "memory" in name else get_policy_for_env(env, (8,), "tanh")
    params = {key: value.detach().clone() for key, value in policy.stack_parameters(3).items()}
    for value in params.values():
        value += torch.arange(3.0).reshape(3, *(1,) * (value.dim() - 1)) * 0.01
    found = []
    for num_workers in (0, 2, 3, 5, 9):
        placement = IN_CHILDREN if num_workers else {}
        with MultiTaskSampler(policy=policy, num_workers=num_workers, **options, **placement) as sampler:
            tasks = sampler.sample_tasks(3)
            sampled = [sampler.rollout(tasks, given, deterministic=name == "deterministic") for given in (None, params)]
            found.append([each.digest() for each in sampled])
    assert found == found[:1] * 5


@pytest.mark.parametrize(("num_workers", "lengths"), [(1, [6]), (2, [2, 4]), (3, [2, 2, 2]), (9, [2, 2, 2])])
def test_children_get_whole_tasks_where_they_stay_together(num_workers: int, lengths: Sequence[int]) -> None:
    with make_slots(num_workers) as slots:
        assert [part.stop - part.start for part in slots.parts] == lengths
