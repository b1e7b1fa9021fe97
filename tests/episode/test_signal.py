"""Rewards without a signal change nothing, and the scale of rewards does not matter."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn.utils import parameters_to_vector

from maml_rl import MultiTaskSampler
from maml_rl.adaptation import adapt
from maml_rl.baseline import LinearFeatureBaseline, ZeroBaseline
from maml_rl.episode import TaskEpisodes
from maml_rl.experiment.train import share_without_signal
from maml_rl.metalearners import MAMLTRPO
from maml_rl.metalearners.adam import MAMLVPG
from maml_rl.metalearners.rl2 import RL2
from maml_rl.plan import Plan
from maml_rl.policies import GRUPolicy, NormalMLPPolicy
from tests.synthetic import update


class Walk(gymnasium.Env[Any, Any]):
    """A point that moves by its actions. The reward is -1, or the distance to a goal, times a scale."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, scale: float = 1.0, constant: bool = False) -> None:
        self.scale, self.constant = np.float32(scale), constant
        self.goal = np.zeros(2, np.float32)
        self.place = np.zeros(2, np.float32)

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"goal": goal.astype(np.float32)} for goal in self.np_random.normal(size=(num_tasks, 2))]

    def reset_task(self, task: dict[str, Any]) -> None:
        self.goal = task["goal"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2).astype(np.float32)
        return self.place.copy(), {}

    def step(self, action: Any) -> Any:
        self.place = self.place + 0.1 * action.astype(np.float32)
        reward = -1.0 if self.constant else -float(np.float32(np.linalg.norm(self.place - self.goal)))
        return self.place.copy(), float(np.float32(reward) * self.scale), False, False, {}


def phases(horizon: int, baseline: Any, **env_kwargs: Any) -> tuple[NormalMLPPolicy, list[TaskEpisodes], TaskEpisodes]:
    policy = NormalMLPPolicy(2, 2, (8,), seed=0)
    options: dict[str, Any] = {"seed": 0, "num_workers": 0, "max_episode_steps": horizon}
    with MultiTaskSampler(Walk, env_kwargs, 4, policy, baseline, **options) as sampler:
        train, valid = sampler.sample(sampler.sample_tasks(3), num_steps=1, fast_lr=0.5, gamma=0.99, gae_lambda=0.97)
    return policy, train, valid


# 100 steps: a cubic function of time is off by 5e-4 of the returns, far above any rounding error.
@pytest.mark.parametrize(
    ("horizon", "baseline"), [(100, LinearFeatureBaseline(2)), (10, ZeroBaseline())], ids=["linear", "zero"]
)
def test_equal_rewards_of_all_episodes_change_nothing(horizon: int, baseline: Any) -> None:
    policy, train, valid = phases(horizon, baseline, constant=True)
    before = [param.detach().clone() for param in policy.parameters()]
    assert all(not episodes.advantages.any() for episodes in (*train, valid))
    assert not train[0].compute_advantages(baseline, gamma=0.99).any()
    assert not train[0][1].compute_advantages(baseline.fit(train[0][1])).any()
    adapted = adapt(policy, train[0], step_size=0.5)
    for own, tasks in zip(before, adapted.values(), strict=True):
        assert all(torch.equal(own, task) for task in tasks)
    metalearner = MAMLTRPO(policy, 0.5)
    metrics = metalearner.step(train, valid)
    assert (metrics["accepted"], metrics["grad_norm"], metrics["kl"], metrics["line_search_steps"]) == (False, 0, 0, 0)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))
    assert share_without_signal(metalearner.store_of([*train, valid])) == {"no_signal": 1.0}


def test_without_a_signal_adam_does_not_follow_earlier_gradients() -> None:
    policy, train, valid = phases(10, LinearFeatureBaseline(2))
    learner = MAMLVPG(policy, plan=Plan(gamma=0.99))
    assert learner.update(learner.store_of([*train, valid]))["grad_norm"] > 0.0
    before = [param.detach().clone() for param in policy.parameters()]
    _, *flat = phases(10, LinearFeatureBaseline(2), constant=True)
    learner.update(learner.store_of([*flat[0], flat[1]]))
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


def test_one_other_reward_is_a_signal() -> None:
    _, train, _ = phases(10, LinearFeatureBaseline(2), constant=True)
    train[0].rewards[1, 4, 2] = -1.01
    advantages = train[0].compute_advantages(LinearFeatureBaseline(2), gamma=0.99)
    assert [bool(task.any()) for task in advantages] == [False, True, False]
    torch.testing.assert_close(advantages[1].std(correction=0), torch.tensor(1.0))


def test_advantages_below_the_precision_of_their_values_are_zero() -> None:
    # Values that are off from the returns by less than float32 resolves, and by more.
    _, (episodes,), _ = phases(10, ZeroBaseline())

    class Off(ZeroBaseline):
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, episodes: Any) -> torch.Tensor:
            sign = 1.0 - 2.0 * (torch.arange(episodes.rewards.shape[-2]) % 2)
            return episodes.returns.double() * (1.0 + self.by * sign.unsqueeze(-1))

    assert not episodes.compute_advantages(Off(1e-8), bootstrap=False).any()
    assert episodes.compute_advantages(Off(1e-5), bootstrap=False).any()


# About 1e-30 and 1e30, powers of two: the rewards themselves are not rounded.
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
@pytest.mark.parametrize("baseline", [LinearFeatureBaseline(2), ZeroBaseline()], ids=["linear", "zero"])
def test_adaptation_and_update_do_not_depend_on_the_scale_of_rewards(baseline: Any, scale: float) -> None:
    policy, train, valid = phases(20, baseline)
    other, scaled_train, scaled_valid = phases(20, baseline, scale=scale)
    assert torch.equal(scaled_train[0].rewards, scale * train[0].rewards)
    for episodes, scaled in ((train[0], scaled_train[0]), (valid, scaled_valid)):
        torch.testing.assert_close(scaled.advantages, episodes.advantages, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(scaled.actions, episodes.actions, rtol=1e-5, atol=1e-6)
    # With damping the direction is as precise as the gradient; otherwise the curvature of few episodes is nearly
    # singular, and conjugate gradients amplify the last digits.
    settings = MAMLTRPO.Settings(cg_damping=0.1)
    before = parameters_to_vector(policy.parameters()).detach()
    metrics, scaled_metrics = (
        MAMLTRPO(policy, 0.5, settings=settings).step(train, valid),
        MAMLTRPO(other, 0.5, settings=settings).step(scaled_train, scaled_valid),
    )
    assert metrics["accepted"]
    assert scaled_metrics["accepted"]
    assert scaled_metrics["kl"] == pytest.approx(metrics["kl"], rel=1e-3)
    step, scaled_step = (parameters_to_vector(each.parameters()).detach() - before for each in (policy, other))
    assert float((scaled_step - step).norm() / step.norm()) < 1e-2


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_ppo_on_trials_does_not_depend_on_the_scale_of_rewards(scale: float) -> None:
    def updated(scale: float) -> list[torch.Tensor]:
        policy = GRUPolicy(Walk.observation_space, Walk.action_space, 6, value="none", seed=0)
        _, train, _ = phases(8, ZeroBaseline())
        train[0].rewards = train[0].rewards * scale
        update(RL2(policy, plan=Plan(gamma=0.99)), [train[0]])
        return [param.detach().clone() for param in policy.parameters()]

    for own, scaled in zip(updated(1.0), updated(scale), strict=True):
        torch.testing.assert_close(scaled, own, rtol=1e-3, atol=1e-4)


def test_equal_rewards_of_all_trials_do_not_change_a_policy_without_values() -> None:
    policy = GRUPolicy(Walk.observation_space, Walk.action_space, 6, value="none", seed=0)
    before = [param.detach().clone() for param in policy.parameters()]
    _, train, _ = phases(8, ZeroBaseline(), constant=True)
    metrics = update(RL2(policy, plan=Plan(gamma=0.99)), [train[0]])
    assert (metrics["no_signal"], metrics["grad_norm"], metrics["kl"]) == (1.0, 0.0, 0.0)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))
