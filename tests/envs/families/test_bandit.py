"""The rewards of bandits follow their task."""

from typing import Any

import numpy as np
import pytest

from maml_rl.envs import make_vector_env
from maml_rl.envs.families.bandit import BernoulliBanditVectorEnv, GaussianBanditVectorEnv

PULLS = 40_000


def test_bernoulli_arms_pay_one_with_their_probability() -> None:
    env = BernoulliBanditVectorEnv(PULLS, k=4, task={"mean": [0.0, 0.3, 0.8, 1.0]})
    arms = np.arange(PULLS) % 4
    env.reset(seed=0)
    _, rewards, terminated, truncated, _ = env.step(arms)
    assert set(rewards) == {0.0, 1.0}
    paid = [rewards[arms == arm].mean() for arm in range(4)]
    assert (paid[0], paid[3]) == (0.0, 1.0)
    np.testing.assert_allclose(paid[1:3], [0.3, 0.8], atol=5 * 0.5 / np.sqrt(PULLS / 4))
    assert terminated.all()
    assert not truncated.any()


@pytest.mark.parametrize("std", [0.5, 1.0])
def test_gaussian_arms_pay_their_mean_and_spread(std: float) -> None:
    env = GaussianBanditVectorEnv(PULLS, k=2, std=std, task={"mean": [-3.0, 7.0]})
    arms = np.arange(PULLS) % 2
    env.reset(seed=0)
    rewards = env.step(arms)[1]
    for arm, mean in enumerate([-3.0, 7.0]):
        paid = rewards[arms == arm]
        assert paid.mean() == pytest.approx(mean, abs=5 * std / np.sqrt(PULLS / 2))
        assert paid.std() == pytest.approx(std, rel=5 / np.sqrt(PULLS))


def test_gaussian_arm_without_spread_pays_its_mean() -> None:
    env = GaussianBanditVectorEnv(2, k=2, std=0, task={"mean": [0.25, 0.5]})
    env.reset(seed=0)
    np.testing.assert_array_equal(env.step(np.array([1, 0]))[1], [0.5, 0.25])


@pytest.mark.parametrize("actions", [[0, 5], [-1, 0], [0.0, 1.0]])
def test_missing_arm_is_refused(actions: list[Any]) -> None:
    env = BernoulliBanditVectorEnv(2, k=5)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"actions must be integers in \[0, 5\)"):
        env.step(np.array(actions))


def test_an_episode_of_several_pulls_terminates_with_the_last() -> None:
    env = make_vector_env("Bandit-K5-v0", {"pulls": 3}, 2)
    assert env.max_episode_steps == 3
    env.reset(seed=0)
    ends = [env.step(np.zeros(2, np.int64))[2].tolist() for _ in range(4)]
    assert ends == [[False, False], [False, False], [True, True], [True, True]]
    env.close()
