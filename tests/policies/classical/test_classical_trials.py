"""Classical algorithms in trials of the sampler: the same episodes in any placement, and the known returns."""

from typing import Any

import pytest

from maml_rl import MultiTaskSampler, TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.policies.classical import PSRL, UCB1, BanditEpsilonGreedy, RandomPolicy, ThompsonSampling

pytestmark = [pytest.mark.timeout(90)]


def trials(policy: Policy, env: str, num_tasks: int, num_episodes: int, **options: Any) -> TaskEpisodes:
    settings = {"seed": 0, "slots_per_task": 1, "observe_last": True, "num_workers": 0, **options}
    with MultiTaskSampler(env, {}, num_episodes, policy, **settings) as sampler:
        return sampler.rollout_trials(sampler.sample_tasks(num_tasks))


@pytest.mark.parametrize(
    ("policy", "env"),
    [
        (ThompsonSampling(5, num_draws=3), "Bandit-K5-v0"),
        (PSRL(10, 5, 10, num_draws=2), "TabularMDP-v0"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_trials_are_bit_identical_for_any_placement(policy: Policy, env: str) -> None:
    here = trials(policy, env, 5, 4)
    for options in (
        {"num_workers": 2, "start_method": "fork"},
        {"num_workers": 2, "start_method": "fork", "inference": "central", "num_groups": 2},
    ):
        assert trials(policy, env, 5, 4, **options).digest() == here.digest()


def test_greedy_trials_of_two_pulls_achieve_the_enumerated_return() -> None:
    # Of five arms with uniform means: 1/2, then 2/3 after a success, and 1/2 after a failure.
    returns = trials(BanditEpsilonGreedy(5), "Bandit-K5-v0", 4000, 2).rewards.sum((1, 2))
    assert abs(returns.mean() - (1 / 2 + 1 / 2 * 2 / 3 + 1 / 2 * 1 / 2)) < 4 * returns.std() / 4000**0.5


def test_tabular_algorithm_learns_within_a_trial() -> None:
    returns = trials(PSRL(10, 5, 10), "TabularMDP-v0", 100, 12).episode_returns()
    assert returns[:, 9:].mean() > returns[:, 0].mean() + 3.0


def test_sampler_without_the_last_step_is_refused_where_it_is_learned_from() -> None:
    actions = trials(RandomPolicy(5), "Bandit-K5-v0", 4, 20, observe_last=False).actions
    assert actions.unique().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="observe_last=True"):
        trials(UCB1(5), "Bandit-K5-v0", 2, 2, observe_last=False)
    with pytest.raises(ValueError, match="slots_per_task"):
        trials(UCB1(5), "Bandit-K5-v0", 2, 2, slots_per_task=2)
