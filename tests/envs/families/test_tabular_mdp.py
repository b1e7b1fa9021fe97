"""Transitions and rewards of tabular MDPs follow their task."""

from typing import Any

import numpy as np
import pytest

from maml_rl.envs.families.tabular_mdp import TabularMDPVectorEnv

SLOTS = 60_000


def states_of(observations: Any) -> Any:
    assert (np.sort(observations, axis=1)[:, :-1] == 0.0).all()
    assert (observations.max(axis=1) == 1.0).all()
    return observations.argmax(axis=1)


def test_transitions_and_rewards_follow_the_task() -> None:
    transitions = np.array(
        [[[0.2, 0.5, 0.3], [0.0, 1.0, 0.0]], [[1.0, 0.0, 0.0], [0.25, 0.25, 0.5]], [[0.0, 0.0, 1.0]] * 2]
    )
    rewards_mean = np.array([[1.0, -2.0], [3.0, 0.0], [10.0, 20.0]])
    env = TabularMDPVectorEnv(
        SLOTS, num_states=3, num_actions=2, task={"transitions": transitions, "rewards_mean": rewards_mean}
    )
    observations, _ = env.reset(seed=0)
    assert (states_of(observations) == 0).all()
    actions = np.arange(SLOTS) % 2
    states = np.zeros(SLOTS, int)
    for _ in range(3):
        observations, rewards, terminated, truncated, _ = env.step(actions)
        following = states_of(observations)
        for state in range(3):
            for action in range(2):
                chosen = (states == state) & (actions == action)
                if chosen.sum() < 1_000:
                    assert not chosen.any()
                    continue
                error = 5.0 / np.sqrt(chosen.sum())
                frequencies = np.bincount(following[chosen], minlength=3) / chosen.sum()
                np.testing.assert_allclose(frequencies, transitions[state, action], atol=0.5 * error)
                np.testing.assert_array_equal(frequencies[transitions[state, action] == 0.0], 0.0)
                paid = rewards[chosen]
                assert paid.mean() == pytest.approx(rewards_mean[state, action], abs=error)
                assert paid.std() == pytest.approx(1.0, abs=error)
        states = following
    assert not (terminated | truncated).any()


def test_rewards_and_transitions_are_independent() -> None:
    env = TabularMDPVectorEnv(
        SLOTS, num_states=2, num_actions=1, task={"transitions": [[[0.5, 0.5]]] * 2, "rewards_mean": [[0.0]] * 2}
    )
    env.reset(seed=0)
    observations, rewards, _, _, _ = env.step(np.zeros(SLOTS, int))
    assert abs(np.corrcoef(states_of(observations), rewards)[0, 1]) < 5.0 / np.sqrt(SLOTS)


def test_tasks_have_the_documented_distribution() -> None:
    tasks = TabularMDPVectorEnv(1, num_states=4, num_actions=3).sample_tasks(2_000, seed=0)
    transitions = np.array([task["transitions"] for task in tasks])
    rewards_mean = np.array([task["rewards_mean"] for task in tasks])
    assert transitions.shape == (2_000, 4, 3, 4)
    assert rewards_mean.shape == (2_000, 4, 3)
    np.testing.assert_allclose(transitions.sum(axis=-1), 1.0, atol=1e-12)
    # Dirichlet(1) over 4 states: mean 1/4, variance 3/80. Tolerances are above five standard errors.
    np.testing.assert_allclose(transitions.mean(axis=(0, 1, 2)), 0.25, atol=0.007)
    np.testing.assert_allclose(transitions.var(axis=(0, 1, 2)), 3.0 / 80.0, atol=0.002)
    assert rewards_mean.mean() == pytest.approx(1.0, abs=0.033)
    assert rewards_mean.std() == pytest.approx(1.0, abs=0.023)


def test_rounded_table_is_accepted_and_never_enters_an_impossible_state() -> None:
    task = {"transitions": [[[0.3333333, 0.6666666, 0.0]]] * 3, "rewards_mean": [[0.0]] * 3}
    env = TabularMDPVectorEnv(SLOTS, num_states=3, num_actions=1, task=task)
    # The largest uniform number exceeds the sum of the table, but not that of the distribution.
    assert (env._cumulative[:, :, :, 1] == 1.0).all()
    env.reset(seed=0)
    assert states_of(env.step(np.zeros(SLOTS, int))[0]).max() == 1
