"""Phases with another number of episodes than the sampler's, and phases in which the policy draws nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from placements import PLACEMENTS
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Laplace

from maml_rl.envs import make_vector_env
from maml_rl.plan import Plan
from maml_rl.policies import (
    CategoricalMLPPolicy,
    GRUPolicy,
    MultiCategoricalMLPPolicy,
    NormalMLPPolicy,
    Policy,
    get_policy_for_env,
)
from maml_rl.policies.module_policy import as_policy
from maml_rl.policies.policy import greedy
from maml_rl.samplers import MultiTaskSampler


class Choosing(nn.Module):
    """A user's module, with a distribution that takes uniform noise."""

    def __init__(self, discrete: bool, inputs: int) -> None:
        super().__init__()
        self.discrete = discrete
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4 if discrete else 2, inputs, generator=generator))

    def forward(self, observations: Tensor) -> torch.distributions.Distribution:
        units = observations @ self.weight.T
        if self.discrete:
            return Categorical(logits=units)
        return Independent(Laplace(units, torch.ones_like(units)), 1)


def policy_for(name: str) -> tuple[str, Policy]:
    navigation, tabular = make_vector_env("2DNavigation-v0"), make_vector_env("TabularMDP-v0")
    spaces = tabular.single_observation_space, tabular.single_action_space
    policies: dict[str, tuple[str, Any]] = {
        "normal": ("2DNavigation-v0", lambda: get_policy_for_env(navigation, (4,))),
        "categorical": ("TabularMDP-v0", lambda: get_policy_for_env(tabular, (4,))),
        "recurrent": ("TabularMDP-v0", lambda: GRUPolicy(*spaces, 6)),
        "module": ("2DNavigation-v0", lambda: as_policy(Choosing(False, 2), (2,))),
    }
    env_name, make = policies[name]
    policy = make()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in policy.parameters():
            # Far from uniform, so that a draw and the most probable action sometimes differ, and ties never occur.
            param.add_(torch.randn(param.shape, generator=generator))
    return env_name, policy


def sampler_for(name: str, placement: str, **options: Any) -> tuple[MultiTaskSampler, Policy]:
    env_name, policy = policy_for(name)
    options = {"batch_size": 4, "slots_per_task": 2, "max_episode_steps": 5, "seed": 0, **options}
    return MultiTaskSampler(env_name, {}, policy=policy, **options, **PLACEMENTS[placement]), policy


@pytest.mark.timeout(120)
@pytest.mark.parametrize("placement", ["in process", "in children"])
def test_first_episodes_of_a_task_are_the_same_for_any_number(placement: str) -> None:
    sampler, _ = sampler_for("normal", placement)
    with sampler:
        tasks = sampler.sample_tasks(3)
        usual = sampler.rollout(tasks)
        for count in (2, 6, 4):
            sampler.seek(0)
            episodes = sampler.rollout(tasks, num_episodes=count)
            assert episodes.rewards.shape[2] == count
            shared = min(count, 4)
            assert torch.equal(episodes.observations[:, :, :shared], usual.observations[:, :, :shared])
            assert torch.equal(episodes.rewards[:, :, :shared], usual.rewards[:, :, :shared])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["normal", "categorical", "recurrent", "module"])
def test_deterministic_phases_take_the_mode_in_every_placement(name: str) -> None:
    digests, drawn = [], []
    for placement in PLACEMENTS:
        sampler, policy = sampler_for(name, placement, slots_per_task=1 if name == "recurrent" else 2)
        with sampler:
            tasks = sampler.sample_tasks(3)
            stacked = policy.stack_parameters(3)
            episodes = sampler.rollout(tasks, stacked, deterministic=True)
            digests.append(episodes.digest())
            sampler.seek(0)
            drawn.append(sampler.rollout(tasks, stacked).digest())
    assert len(set(digests)) == len(set(drawn)) == 1
    assert digests[0] != drawn[0], "the streams of the actions are not used"
    for task in range(3):
        memory = None
        for episode in range(4):
            for step in range(int(episodes.lengths[task, episode])):
                action, memory = policy.choose(episodes.observations[task, step, episode].numpy(), memory or None)
                np.testing.assert_allclose(episodes.actions[task, step, episode].numpy(), action, rtol=1e-5, atol=1e-6)


def test_greedy_policies_choose_modes_that_no_noise_changes() -> None:
    rows = torch.linspace(-1.0, 1.0, 12).reshape(2, 3, 2)
    multi, one = MultiCategoricalMLPPolicy(2, [3, 4], [5], seed=1), CategoricalMLPPolicy(2, 6, [5], seed=1)
    for policy, size in ((multi, 2), (one, 1), (as_policy(Choosing(True, 2), (2,)), 1)):
        with torch.no_grad():
            for param in policy.parameters():
                param.mul_(3.0).add_(0.1)
        stacked = policy.stack_parameters(2)
        actions, _ = greedy(policy).actor(stacked)(rows, torch.full((2, 3, size), 0.5), ())
        assert torch.equal(actions, policy(rows).mode)
        assert not policy.is_greedy
        assert greedy(policy).get_parameter(next(iter(stacked))) is policy.get_parameter(next(iter(stacked)))


class Counter(NormalMLPPolicy):
    """May keep something of its own."""

    stateless = False


def test_invalid_options_are_refused_in_one_line() -> None:
    sampler, _ = sampler_for("normal", "in process")
    with sampler:
        tasks = sampler.sample_tasks(1)
        for count, message in (
            (3, "num_episodes must be a multiple of slots_per_task, which is 2, got 3; make the .* slots_per_task=1"),
            (0, "num_episodes"),
        ):
            with pytest.raises(ValueError, match=message) as caught:
                sampler.rollout(tasks, num_episodes=count)
            assert "\n" not in str(caught.value)
    with MultiTaskSampler("2DNavigation-v0", {}, 2, Counter(2, 2, (4,)), num_workers=0, max_episode_steps=2) as sampler:
        tasks = sampler.sample_tasks(1)
        for options, message in (
            ({"deterministic": True}, "Counter keeps something itself, so that it cannot sample deterministically"),
            ({"num_episodes": 4}, "cannot sample more than 2 episodes of a task"),
        ):
            with pytest.raises(ValueError, match=message):
                sampler.rollout(tasks, **options)


def test_trials_of_any_length_leave_the_memory_of_their_last_step() -> None:
    sampler, _ = sampler_for("recurrent", "in process", slots_per_task=1, record_memory=True)
    with sampler:
        tasks = sampler.sample_tasks(2)
        whole = sampler.rollout_trials(tasks, num_episodes=3, deterministic=True)
    shorter, _ = sampler_for("recurrent", "in process", slots_per_task=1, batch_size=2)
    shorter.policy = sampler.policy
    with shorter:
        shorter.seek(0)
        adapted = shorter.collect(tasks, Plan(whole_trials=True, deterministic=True, adapt_only=True))
        (part,), memory = adapted.phases, adapted.memory
        assert torch.equal(part.actions, whole.actions[:, :, :2])
        # The memory after two episodes is the one with which the third begins.
        assert whole.memory is not None
        assert torch.equal(memory[0], whole.memory[0][:, 0, 2])
