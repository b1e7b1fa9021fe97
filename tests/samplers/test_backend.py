"""Backends: all give the same episodes, for any range of the tasks; and the default place where the policy acts."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from maml_rl import MultiTaskSampler
from maml_rl.config.placement import Placement
from maml_rl.envs.make_env import Recipe
from maml_rl.policies import Memory, NormalMLPPolicy, Params, Policy
from maml_rl.profiling import StageTimer
from maml_rl.samplers.backend import RolloutBackend
from maml_rl.samplers.make_backend import make_backend

# Longer than `step_timeout`, whose error shows where a child hangs.
pytestmark = pytest.mark.timeout(90)

# Forked children share the torch of this process, and so start at once.
BACKENDS: dict[str, dict[str, Any]] = {
    "in-process": {},
    "processes, central": {"num_workers": 2, "inference": "central"},
    "processes, auto": {"num_workers": 2},
}


@contextmanager
def backend_of(policy: Policy, num_workers: int = 0, **options: Any) -> Iterator[RolloutBackend]:
    placement = Placement(num_workers=num_workers, start_method="fork", **options)
    backend = make_backend(placement, Recipe.of("2DNavigation-v0", None, 4), policy, 1, 1)
    try:
        yield backend
    finally:
        backend.close()


# The protocol.


@pytest.mark.parametrize("name", [*BACKENDS][1:])
def test_every_backend_draws_the_same_tasks_and_describes_the_same_slots(name: str) -> None:
    policy = NormalMLPPolicy(2, 2, (4,))
    with backend_of(policy) as in_process, backend_of(policy, **BACKENDS[name]) as backend:
        assert backend.describe() == in_process.describe()
        assert backend.describe().max_episode_steps == 4
        goals = [[tuple(task["goal"]) for task in each.sample_tasks(3, 11)] for each in (backend, in_process)]
        assert goals[0] == goals[1]
        assert len(set(goals[0])) == 3


def test_preparing_starts_the_workers_that_the_phase_uses() -> None:
    policy = NormalMLPPolicy(2, 2, (4,))
    with MultiTaskSampler(
        "2DNavigation-v0", {}, 2, policy, seed=0, num_workers=2, start_method="fork", max_episode_steps=3
    ) as sampler:
        assert sampler.pids == []
        sampler.prepare(4)
        pids = sampler.pids
        assert len(pids) == 2
        sampler.rollout(sampler.sample_tasks(4))
        assert sampler.pids == pids


# Where the policy acts.


class CountingPolicy(NormalMLPPolicy):
    """Counts how often it acts in this process."""

    calls = 0

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        type(self).calls += 1
        return super().act(observations, noise, params=params)


class RememberingPolicy(CountingPolicy):
    """Acts by its earlier calls: a copy, or another order of calls, would act differently."""

    stateless = False


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 1, "inference": "central"},
        {"num_workers": 0, "slots_per_task": 1},
    ],
)
def test_policy_with_a_memory_is_refused_where_its_actions_could_be_wrong(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"RememberingPolicy is not stateless.*num_workers=0 .*`stateless = True`"):
        MultiTaskSampler("2DNavigation-v0", {}, 2, RememberingPolicy(2, 2, (4,)), **options)


@pytest.mark.parametrize("options", [{"backend": "device"}, {"backend": "in-process", "inference": "central"}])
def test_policy_that_is_told_who_acts_is_refused_on_an_accelerator(options: dict[str, Any]) -> None:
    policy = NormalMLPPolicy(2, 2, (4,))
    policy.told_who_acts = True  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"NormalMLPPolicy is told on the CPU which slots act, got device='cuda:0'"):
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy, num_workers=0, device="cuda:0", **options)


def test_policy_with_a_memory_acts_in_this_process_for_all_slots_at_once() -> None:
    policy = RememberingPolicy(2, 2, (4,))
    with MultiTaskSampler("2DNavigation-v0", {}, 2, policy, seed=0, num_workers=0, max_episode_steps=3) as sampler:
        assert sampler.rollout(sampler.sample_tasks(2)).num_steps == 12


@pytest.mark.parametrize(
    ("in_children", "num_tasks", "options"),
    [
        pytest.param(True, 5, {}, id="more tasks than children"),
        pytest.param(True, 1, {}, id="a task for two children"),
        pytest.param(True, 1, {"num_workers": 3}, id="a child without a slot"),
        pytest.param(False, 2, {"inference": "central"}, id="asked for the parent"),
        pytest.param(False, 2, {"policy": lambda units: torch.relu(units)}, id="a policy that cannot be pickled"),
    ],
)
def test_policy_acts_in_the_children_where_that_is_possible_and_faster(
    in_children: bool, num_tasks: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CountingPolicy, "calls", 0)
    settings = {"num_workers": 2, "start_method": "fork", "max_episode_steps": 3, "seed": 0, **options}
    settings["policy"] = CountingPolicy(2, 2, (4,), options.get("policy", "tanh"))
    with MultiTaskSampler("2DNavigation-v0", {}, 2, **settings) as sampler:
        sampler.rollout(sampler.sample_tasks(num_tasks))
    assert (CountingPolicy.calls == 0) == in_children


def test_timer_gets_the_stages_of_children_that_act() -> None:
    timer = StageTimer()
    options: dict[str, Any] = {"start_method": "fork", "max_episode_steps": 20, "seed": 0, "timer": timer}
    with MultiTaskSampler("2DNavigation-v0", {}, 4, NormalMLPPolicy(2, 2, (4,)), num_workers=2, **options) as sampler:
        start = perf_counter()
        sampler.rollout(sampler.sample_tasks(4))
        whole = perf_counter() - start
    seconds = timer.take()
    assert {"inference", "assembly", "waiting"} <= seconds.keys()
    assert min(seconds["inference"], seconds["assembly"]) > 0.0
    assert sum(seconds.values()) <= whole
