"""The rewards of bandits follow their task."""

from typing import Any

import numpy as np
import pytest

from maml_rl.envs import make_vector_env
from maml_rl.envs.families.bandit import BernoulliBanditVectorEnv, GaussianBanditVectorEnv
from maml_rl.errors import TaskError

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


@pytest.mark.parametrize("family", [BernoulliBanditVectorEnv, GaussianBanditVectorEnv])
def test_means_are_drawn_from_the_unit_interval(family: Any) -> None:
    means = np.array([task["mean"] for task in family(1, k=10).sample_tasks(4_000, seed=0)])
    assert means.shape == (4_000, 10)
    assert means.min() >= 0.0
    assert means.max() < 1.0
    # Five standard errors of 40,000 draws from U[0, 1].
    assert means.mean() == pytest.approx(0.5, abs=0.0073)
    assert means.var() == pytest.approx(1.0 / 12.0, abs=0.0019)


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        *(
            (BernoulliBanditVectorEnv, {"k": 2, "task": {"mean": mean}}, "'mean' of a task must be probabilities in")
            for mean in ([0.5, 1.1], [-0.1, 0.5])
        ),
        *((BernoulliBanditVectorEnv, {"k": k}, "k must be an integer of at least 1") for k in (0, 2.0, "5")),
        (GaussianBanditVectorEnv, {"k": -5}, "k must be an integer of at least 1"),
        *((GaussianBanditVectorEnv, {"std": std}, "std must") for std in (-1.0, np.nan, np.inf, "1")),
        (BernoulliBanditVectorEnv, {"pulls": 0}, "pulls"),
    ],
)
def test_bad_argument_is_refused_by_name(family: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError if "task" in arguments else ValueError, match=message):
        family(1, **arguments)


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
