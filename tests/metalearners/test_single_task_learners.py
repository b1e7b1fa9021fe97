"""Learners of single tasks in parallel: each learns as it would alone, by the equations of its algorithm."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from maml_rl import MultiTaskSampler
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.metalearners.single_task import (
    QLearning,
    QLearningSettings,
    SingleTaskLearner,
    SingleTaskPPO,
    SingleTaskPPOSettings,
)
from maml_rl.policies.classical.tabular import QTablePolicy
from maml_rl.policies.layers import empty_layer

DARK_ROOM = gymnasium.make("DarkRoom-v0")


def sample(learner: SingleTaskLearner, iteration: int = 0, num_tasks: int = 3) -> TaskEpisodes:
    options: dict[str, Any] = {"policy": learner.policy, "num_workers": 0, "seed": 4, "max_episode_steps": 12}
    with MultiTaskSampler("DarkRoom-v0", {}, batch_size=4, **options) as sampler:
        tasks = [{"goal": np.array([4.0, 5.0])}, {"goal": np.array([3.0, 4.0])}, {"goal": np.array([5.0, 4.0])}]
        sampler.seek(iteration)
        return sampler.rollout(tasks[:num_tasks], learner.params)


def ppo(seeds: list[int], **settings: Any) -> SingleTaskPPO:
    return SingleTaskPPO(DARK_ROOM, seeds, SingleTaskPPOSettings(**settings), hidden_sizes=(8,))


def test_update_of_ppo_is_that_of_a_separate_network_and_optimizer_for_each_task() -> None:
    learner = ppo([5, 6, 7], num_epochs=3, clip=0.1, entropy_coefficient=0.02)
    before = {name: param.clone() for name, param in learner.params.items()}
    episodes = sample(learner)
    learner.update(episodes)
    make = partial(empty_layer, nn.Linear)
    for task in range(3):
        network = nn.Sequential(make(81, 8), nn.Tanh(), make(8, 5))
        with torch.no_grad():
            for mine, name in zip(network.parameters(), before, strict=True):
                mine.copy_(before[name][task])
        optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
        rewards = episodes.rewards[task].double()
        # Without a baseline and termination, advantages are the sums of the rewards to come.
        returns = torch.stack([sum(0.99**k * rewards[t + k] for k in range(12 - t)) for t in range(12)])
        advantages = (returns - returns.mean()) / (returns.std(correction=0) + 1e-8)
        old = None
        for _ in range(3):
            found = torch.distributions.Categorical(logits=network(episodes.observations[task]))
            log_probs = found.log_prob(episodes.actions[task])
            old = log_probs.detach() if old is None else old
            ratio = (log_probs - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
            optimizer.zero_grad()
            (-gain.mean() - 0.02 * found.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
        for mine, name in zip(network.parameters(), before, strict=True):
            assert torch.allclose(mine, learner.params[name][task], atol=1e-5), name
            assert not torch.allclose(mine, before[name][task], atol=1e-4), name


def test_q_learning_is_the_rule_applied_backward_through_each_episode() -> None:
    settings = QLearningSettings(learning_rate=0.3, initial_value=0.5, explore_over=4)
    learner = QLearning(DARK_ROOM, 3, settings, gamma=0.9)
    episodes = sample(learner)
    episodes.terminated[1, 2], episodes.lengths[1, 2] = True, 7
    learner.update(episodes)
    for task in range(3):
        table = np.full((81, 5), 0.5)
        for column in range(4):
            length = int(episodes.lengths[task, column])
            seen = [*episodes.observations[task, :length, column], episodes.final_observations[task, column]]
            if length < 12:
                seen[-1] = episodes.final_observations[task, column]
            states = [int(each.argmax()) for each in seen]
            for step in reversed(range(length)):
                ends = step == length - 1 and bool(episodes.terminated[task, column])
                following = 0.0 if ends else 0.9 * table[states[step + 1]].max()
                place = states[step], int(episodes.actions[task, step, column])
                table[place] += 0.3 * (float(episodes.rewards[task, step, column]) + following - table[place])
        assert np.allclose(learner.params["table"][task].numpy(), table, atol=1e-5)
    # A quarter of the way from 1 to 0.05.
    assert learner.params["epsilon"].tolist() == pytest.approx([0.7625] * 3)
    # States that are counted from 100, and padding that is zero.
    counted = spaces.Discrete(81, start=100)
    other = QLearning(
        SimpleNamespace(observation_space=counted, action_space=spaces.Discrete(5)), 3, settings, gamma=0.9
    )
    real = torch.arange(12)[:, None] < episodes.lengths.unsqueeze(1)
    states, last = (seen.argmax(-1) + 100 for seen in (episodes.observations, episodes.final_observations))
    rest = {name: getattr(episodes, name) for name in ("actions", "rewards", "lengths", "terminated", "truncated")}
    other.update(TaskEpisodes(states * real, final_observations=last, **rest))
    assert torch.equal(other.params["table"], learner.params["table"])


def test_table_acts_greedily_except_with_probability_epsilon() -> None:
    policy = QTablePolicy(spaces.Discrete(3, start=2), spaces.Discrete(2))
    table = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]]).repeat(2, 1, 1)
    params = {"table": table, "epsilon": torch.tensor([0.0, 1.0])}
    observations = torch.tensor([[2, 3, 4], [2, 3, 4]])
    noise = torch.tensor([0.9, 0.1, 0.5]).expand(2, 3, 3)
    actions, _ = policy.act(observations, noise, (), params)
    # The second task's learner draws all of its actions, by the noise that also breaks ties.
    assert actions.tolist() == [[1, 0, 0], [0, 0, 0]]


def test_spaces_without_a_table_are_refused() -> None:
    for space in (spaces.Box(-1.0, 1.0, (2,)), spaces.MultiBinary(2)):
        with pytest.raises(TypeError, match="states that can be counted"):
            QTablePolicy(space, spaces.Discrete(2))
    with pytest.raises(TypeError, match="needs Discrete actions"):
        QTablePolicy(spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,)))
    with pytest.raises(ValueError, match="needs one-hot observations"):
        QTablePolicy(spaces.Box(0.0, 1.0, (2,)), spaces.Discrete(2)).states(torch.tensor([0.5, 0.5]))
