"""Messages about wrong arguments: one line, which names the argument and the remedy."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import maml_rl
from maml_rl import AdaptationRule, LinearFeatureBaseline, MultiTaskSampler, adapt
from maml_rl.errors import ConfigError, TaskError
from maml_rl.policies import CNNPolicy, GRUPolicy, NormalMLPPolicy, get_policy_for_env
from tests.synthetic import make_problem

NAVIGATION = gymnasium.make("2DNavigation-v0")


def make_sampler(num_workers: int = 0, **options: Any) -> MultiTaskSampler:
    policy = get_policy_for_env(NAVIGATION, (4,))
    baseline = LinearFeatureBaseline.for_space(NAVIGATION.observation_space)
    settings: dict[str, Any] = {"seed": 0, "max_episode_steps": 3, "slots_per_task": 4, **options}
    return MultiTaskSampler("2DNavigation-v0", {}, 4, policy, baseline, num_workers=num_workers, **settings)


def test_arrays_are_accepted_like_tensors() -> None:
    policy, (episodes,), _ = make_problem("normal", 1)
    adapted = adapt(policy, episodes, step_size=0.1, create_graph=False)
    arrays = {name: value.numpy().astype(np.float32) for name, value in adapted.items()}
    again = adapt(policy, episodes, arrays, step_size=0.1, create_graph=False)
    expected = adapt(policy, episodes, adapted, step_size=0.1, create_graph=False)
    for name, value in expected.items():
        torch.testing.assert_close(again[name], value, rtol=1e-4, atol=1e-6)
    observations = episodes.observations[0, 0]
    assert torch.equal(policy(observations.numpy()).mean, policy(observations).mean)
    with make_sampler() as sampler:
        tasks = sampler.sample_tasks(2)
        stacked = sampler.policy.stack_parameters(2)
        sampler.seek(0)
        digest = sampler.rollout(tasks, stacked).digest()
        sampler.seek(0)
        own = {name: value.detach().numpy() for name, value in stacked.items()}
        assert sampler.rollout(tasks, own).digest() == digest  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: get_policy_for_env(NAVIGATION, 64), TypeError, r"hidden_sizes must be a sequence.*\(64,\); got 64"),  # type: ignore[arg-type]
        (lambda: AdaptationRule(-0.1), ValueError, "a step size must be a number of at least 0, got -0.1"),
        (lambda: AdaptationRule([0.1, float("nan")]), ValueError, "a step size must be a number .* got nan"),
        (
            lambda: NormalMLPPolicy(2, 2)(torch.zeros(5, 3)),
            ValueError,
            r"for observations of shape \(2,\), got observations of shape \(5, 3\); make it .* with get_policy_for_env",
        ),
        (
            lambda: adapt(NormalMLPPolicy(5, 2), make_problem("normal", 1)[1][0], step_size=0.1),
            ValueError,
            "for observations of shape",
        ),
        (
            lambda: MultiTaskSampler("CartPole-v1", policy=NormalMLPPolicy(4, 1)),
            TypeError,
            "CartPole-v1 is not a task family: it lacks sample_tasks.*; it lacks reset_task",
        ),
        (
            lambda: get_policy_for_env(NAVIGATION, image_scale=10.0),
            ValueError,
            "image_scale is for images, and the observations are Box",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_malformed_tasks_are_named_by_their_number(num_workers: int) -> None:
    good = {"goal": [0.1, 0.2]}
    with make_sampler(num_workers) as sampler:
        with pytest.raises(TypeError, match=r"tasks must be a list of tasks, got a dict; pass \[task\] for one task"):
            sampler.rollout(good)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="task 1 is 'goal'; a task is a dict"):
            sampler.rollout([good, "goal"])  # type: ignore[list-item]
        with pytest.raises(TaskError, match=r"^task 2: unknown entry 'gaol' of a task; did you mean 'goal'\?$"):
            sampler.rollout([good, dict(good), {"gaol": [0.1, 0.2]}])


def test_only_policies_that_adapt_by_gradient_steps_accept_their_settings() -> None:
    goal = {"goal": [0.1, 0.2]}
    policy = GRUPolicy(NAVIGATION.observation_space, NAVIGATION.action_space, 4)
    for given in ({"rule": AdaptationRule(0.1)}, {"step_size": 0.1}):
        with pytest.raises(ConfigError, match="GRUPolicy, which has a memory, does not adapt by gradient steps; leave"):
            maml_rl.adapt_to_task(policy, "2DNavigation-v0", goal, **given)
    adapted = maml_rl.adapt_to_task(policy, "2DNavigation-v0", goal, num_episodes=1, max_episode_steps=2)
    assert all(torch.equal(x, adapted.get_parameter(f"inner.{name}")) for name, x in policy.named_parameters())


class Normalized:
    """A user's factory of a family behind a wrapper that keeps statistics."""

    def __init__(self, updates: bool) -> None:
        self.updates = updates

    def __call__(self) -> gymnasium.Env[Any, Any]:
        env = gymnasium.wrappers.NormalizeObservation(gymnasium.make("2DNavigation-v0"))
        env.update_running_mean = self.updates
        return env


def test_wrappers_with_running_statistics_are_refused_unless_frozen() -> None:
    policy = NormalMLPPolicy(2, 2)
    with (
        MultiTaskSampler(Normalized(True), {}, 2, policy, num_workers=0, max_episode_steps=3) as sampler,
        pytest.raises(ConfigError, match=r"wrapped in NormalizeObservation, .* set the wrapper's update_running_mean"),
    ):
        sampler.sample_tasks(1)
    digests = []
    for slots in (1, 4):
        options: dict[str, Any] = {"seed": 0, "num_workers": 0, "slots_per_task": slots, "max_episode_steps": 3}
        with MultiTaskSampler(Normalized(False), {}, 4, policy, **options) as sampler:
            digests.append(sampler.rollout(sampler.sample_tasks(2)).digest())
    assert digests[0] == digests[1]


def test_images_are_divided_by_the_largest_number_of_their_space_or_by_the_switch() -> None:
    spaces = gymnasium.spaces
    made = []
    symbols = torch.randint(11, (5, 8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for high, scale in ((255, None), (10, None), (255, 10.0)):
        env = gymnasium.Env[Any, Any]()
        env.observation_space = spaces.Box(0, high, (8, 8, 3), np.uint8)
        env.action_space = spaces.Discrete(3)
        policy = get_policy_for_env(env, (4,), image_scale=scale)
        assert isinstance(policy, CNNPolicy)
        made.append(policy(symbols).logits)
    assert torch.equal(made[1], made[2])
    assert not torch.allclose(made[0], made[1])
    # The features of symbols are those that the same policy has for colors of the same brightness.
    env.observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    colors = get_policy_for_env(env, (4,))
    assert torch.allclose(made[0], colors(symbols).logits)
    assert torch.allclose(made[1], get_policy_for_env(env, (4,), image_scale=10.0)(symbols).logits)
