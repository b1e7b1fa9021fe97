"""The Bayes optimum of grid navigation, through the sampler."""

import pytest
import torch

from benchmarks.bayes_optimal import HEIGHT, OPTIMUM, WIDTH, BayesOptimalGridNavi
from maml_rl.envs.families.grids import possible_goals
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.samplers import MultiTaskSampler


def trials(num_episodes: int, steps: int = 15, **env_kwargs: int) -> TaskEpisodes:
    """Return a trial of every possible goal."""
    tasks = [{"goal": goal} for goal in possible_goals(WIDTH, HEIGHT)]
    with MultiTaskSampler(
        "GridNavi-v0",
        env_kwargs,
        num_episodes,
        BayesOptimalGridNavi(),
        seed=0,
        num_workers=0,
        slots_per_task=1,
        observe_last=True,
        max_episode_steps=steps,
    ) as sampler:
        return sampler.rollout_trials(tasks)


def test_policy_achieves_the_optimum_in_every_episode() -> None:
    returns = trials(6).episode_returns().double().mean(0)
    expected = torch.tensor([*OPTIMUM, *OPTIMUM[-1:] * 2], dtype=torch.float64)
    torch.testing.assert_close(returns, expected, rtol=0.0, atol=1e-5)
    assert sum(OPTIMUM) == pytest.approx(521 / 14)


def test_policy_remembers_a_goal_that_it_finds_with_the_last_step_of_an_episode() -> None:
    episodes = trials(2, steps=3)
    found_last = (episodes.rewards[:, :2, 0] < 0).all(1) & (episodes.rewards[:, 2, 0] > 0)
    assert found_last.any()
    # The policy takes the shortest path to it.
    assert (episodes.rewards[found_last][..., 1].sum(1) > -0.3 + 1e-6).all()


def test_other_grid_is_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"a grid of 5 x 5 cells does not fit observations up to \[3.0, 2.0\]"):
        trials(1, width=4, height=3)
