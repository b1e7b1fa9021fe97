"""Where the policy acts if nobody says: in the children wherever that is faster, and in this process elsewhere."""

import dataclasses
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from maml_rl import MultiTaskSampler
from maml_rl.policies import NormalMLPPolicy
from maml_rl.policies.policy import Params
from maml_rl.profiling import StageTimer

pytestmark = pytest.mark.timeout(60)


class CountingPolicy(NormalMLPPolicy):
    """Counts how often it acts in this process."""

    calls = 0

    def act(self, observations: Tensor, noise: Tensor, params: Params | None = None) -> Tensor:
        type(self).calls += 1
        return super().act(observations, noise, params)


class RememberingPolicy(CountingPolicy):
    """One whose copies in other processes would not act as itself does."""

    stateless = False


@dataclasses.dataclass
class Case:
    """A sampler with two children, and whether the policy is to act in them."""

    in_children: bool
    num_tasks: int = 2
    policy: type[CountingPolicy] = CountingPolicy
    nonlinearity: Any = "tanh"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(True), id="a task for every child"),
        pytest.param(Case(True, 5), id="more tasks than children"),
        pytest.param(Case(False, 1), id="a child without a task"),
        pytest.param(Case(True, 1, options={"inference": "worker"}), id="a child without a task, but asked for"),
        pytest.param(Case(False, policy=RememberingPolicy), id="a policy with a memory"),
        pytest.param(Case(False, nonlinearity=lambda units: torch.relu(units)), id="a policy that cannot be pickled"),
        pytest.param(Case(False, options={"inference": "central"}), id="asked for the parent"),
        pytest.param(Case(False, options={"recv_timeout": 1.0}), id="recv_timeout"),
        pytest.param(Case(False, options={"num_groups": 2}), id="num_groups"),
        pytest.param(Case(False, options={"num_workers": 0}), id="no children"),
    ],
)
def test_policy_acts_in_the_children_where_that_is_possible_and_pays(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CountingPolicy, "calls", 0)
    monkeypatch.setattr(RememberingPolicy, "calls", 0)
    policy = case.policy(2, 2, (4,), case.nonlinearity)
    options = {"num_workers": 2, "start_method": "fork", "max_episode_steps": 3, "seed": 0, **case.options}
    with MultiTaskSampler("2DNavigation-v0", {}, 2, policy, **options) as sampler:
        sampler.rollout(sampler.sample_tasks(case.num_tasks))
    assert (case.policy.calls == 0) == case.in_children


def test_number_of_tasks_decides_anew_every_time() -> None:
    policy = NormalMLPPolicy(2, 2, (4,))
    options: dict[str, Any] = {"start_method": "fork", "max_episode_steps": 3, "seed": 0}
    with (
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy, num_workers=2, **options) as sampler,
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy, num_workers=0, **options) as in_process,
    ):
        for num_tasks in (4, 1, 4):
            tasks = sampler.sample_tasks(num_tasks)
            assert sampler.rollout(tasks).digest() == in_process.rollout(in_process.sample_tasks(num_tasks)).digest()


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
