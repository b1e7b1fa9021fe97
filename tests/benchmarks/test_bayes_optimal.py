"""The Bayes optimum of grid navigation, against all policies on small grids, and through the sampler."""

from functools import cache

import numpy as np
import pytest
import torch

from benchmarks import bayes_optimal as searching
from benchmarks.bayes_optimal import BayesOptimalGridNavi, optimal_search
from maml_rl.envs.families.grids import possible_goals
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.samplers import MultiTaskSampler

Cell = tuple[int, int]


def best_of_all_policies(width: int, height: int, num_steps: int, num_episodes: int) -> float:
    """Return the value of the belief before a trial, by Bellman's equation over all beliefs and all actions."""

    @cache
    def value(cell: Cell, goals: frozenset[Cell], step: int, episode: int) -> float:
        if step == num_steps:
            return 0.0 if episode == num_episodes - 1 else value((0, 0), goals, 0, episode + 1)
        return max(after(cell, move, goals, step, episode) for move in ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)))

    def after(cell: Cell, move: Cell, goals: frozenset[Cell], step: int, episode: int) -> float:
        there = min(max(cell[0] + move[0], 0), width - 1), min(max(cell[1] + move[1], 0), height - 1)
        chance = (there in goals) / len(goals)
        paid = chance * (1.0 + value(there, frozenset([there]), step + 1, episode)) if chance else 0.0
        if chance == 1.0:
            return paid
        return paid + (1.0 - chance) * (-0.1 + value(there, goals - {there}, step + 1, episode))

    return value((0, 0), frozenset(map(tuple, possible_goals(width, height).tolist())), 0, 0)


@pytest.mark.parametrize(
    ("width", "height", "num_steps", "num_episodes"),
    [
        (3, 2, 2, 1),
        (2, 3, 5, 3),
        (3, 3, 5, 3),
        (4, 3, 6, 3),
        (1, 5, 6, 2),
        (5, 2, 3, 3),
        (3, 3, 1, 2),
    ],
)
def test_optimum_is_the_best_of_all_policies(width: int, height: int, num_steps: int, num_episodes: int) -> None:
    best = best_of_all_policies(width, height, num_steps, num_episodes)
    assert optimal_search(width, height, num_steps, num_episodes).value == pytest.approx(best, abs=1e-9)


def test_first_pass_that_finds_a_poor_walk_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [optimal_search(4, 4, steps, 2).value for steps in (7, 9)]
    monkeypatch.setattr(searching, "_BEAM", 1)
    assert [optimal_search(4, 4, steps, 2).value for steps in (7, 9)] == pytest.approx(wanted, abs=1e-9)


def test_bound_is_never_below_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    pruned = optimal_search(4, 3, 6, 2).value
    monkeypatch.setattr(searching._Problem, "_bound", lambda *_: np.inf)
    monkeypatch.setattr(searching, "_BEAM", 1)
    assert optimal_search(4, 3, 6, 2).value == pytest.approx(pruned, abs=1e-9)


def test_published_setting_has_its_optimum() -> None:
    optimum = optimal_search(5, 5, 15, 4)
    np.testing.assert_allclose(optimum.episode_returns, [4.0, 155 / 14, 155 / 14, 155 / 14])
    assert optimum.value == pytest.approx(521 / 14)


def trials(policy: BayesOptimalGridNavi, num_episodes: int, **kwargs: int) -> tuple[TaskEpisodes, int]:
    """Return a trial of every possible goal."""
    goals = possible_goals(policy.width, policy.height)
    env_kwargs = {"width": policy.width, "height": policy.height, **kwargs}
    with MultiTaskSampler(
        "GridNavi-v0",
        env_kwargs,
        num_episodes,
        policy,
        seed=0,
        num_workers=0,
        slots_per_task=1,
        observe_last=True,
    ) as sampler:
        return sampler.rollout_trials([{"goal": goal} for goal in goals]), len(goals)


@pytest.mark.parametrize(
    ("width", "height", "num_steps", "num_episodes"), [(5, 5, 15, 4), (3, 2, 4, 2), (3, 3, 3, 2), (4, 3, 6, 3)]
)
def test_policy_achieves_the_optimum_in_every_episode(
    width: int, height: int, num_steps: int, num_episodes: int
) -> None:
    policy = BayesOptimalGridNavi(width, height, num_steps=num_steps, num_episodes=num_episodes)
    episodes, num_goals = trials(policy, num_episodes, max_episode_steps=num_steps)
    assert len(episodes) == num_goals
    returns = episodes.episode_returns().double().mean(0)
    torch.testing.assert_close(returns, torch.from_numpy(policy.optimum.episode_returns), rtol=0.0, atol=1e-5)


def test_policy_remembers_a_goal_that_it_finds_with_the_last_step_of_an_episode() -> None:
    policy = BayesOptimalGridNavi(3, 3, num_steps=3, num_episodes=2)
    episodes, _ = trials(policy, 2, max_episode_steps=3)
    found_last = (episodes.rewards[:, :2, 0] < 0).all(1) & (episodes.rewards[:, 2, 0] > 0)
    assert found_last.any()
    # The policy takes the shortest path to it.
    assert (episodes.rewards[found_last][..., 1].sum(1) > -0.3 + 1e-6).all()


def test_grid_that_does_not_fit_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a grid of 8 x 8 cells with 1 episodes of 5 steps does not fit: it has 60"):
        optimal_search(8, 8, 5, 1)
    monkeypatch.setattr(searching, "_MOST_STATES", 100)
    with pytest.raises(ValueError, match=r"does not fit: step \d+ of episode 1 has \d+ beliefs; choose a smaller grid"):
        optimal_search(5, 5, 15, 1)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"num_steps": 0}, {"num_episodes": 0}, {"width": 2, "height": 2}])
def test_argument_out_of_range_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be an integer of at least 1|has no room for a goal"):
        BayesOptimalGridNavi(**wrong)


def test_other_grid_is_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"a grid of 4 x 3 cells does not fit observations up to \[4.0, 4.0\]"):
        trials(BayesOptimalGridNavi(4, 3, num_steps=4, num_episodes=1), 1, width=5, height=5)
