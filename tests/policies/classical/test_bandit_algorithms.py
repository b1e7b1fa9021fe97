"""Classical bandit algorithms against formulas, enumerations and simulations written out here."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Beta

from maml_rl.policies.classical import (
    UCB1,
    BanditEpsilonGreedy,
    BanditPolicy,
    GittinsIndex,
    RandomPolicy,
    ThompsonSampling,
    gittins_indices,
)
from maml_rl.policies.distributions import invert_beta

History = list[tuple[int, float]]


def shown(last: tuple[int, float] | None, num_arms: int) -> Tensor:
    """Return the observation that a sampler gives for a bandit whose episodes are single pulls."""
    row = np.zeros(num_arms + 3, np.float32)
    if last is not None:
        row[1 + last[0]], row[-2], row[-1] = 1.0, last[1], 1.0
    return torch.from_numpy(row)


def counts_after(policy: BanditPolicy, history: History) -> tuple[Tensor, ...]:
    """Return the memory (1, 1, K) with which the policy acts after it has observed `history`."""
    memory = tuple(tensor.unsqueeze(0) for tensor in policy.initial_memory(1))
    for last in [None, *history]:
        noise = torch.full((1, 1, policy.noise_size), 0.5)
        _, memory = policy.act(shown(last, policy.num_actions).expand(1, 1, -1), noise, memory)
    return memory


def next_arm(policy: BanditPolicy, history: History) -> int:
    """Return the arm that a policy without noise pulls after `history`."""
    return int(policy.pull(*counts_after(policy, history), torch.full((1, 1, policy.noise_size), 0.5)))


def frequencies(policy: BanditPolicy, history: History, num_slots: int = 10_000) -> list[float]:
    """Return the frequency of each arm after `history`, over slots with different noise."""
    successes, failures = (counts.expand(num_slots, 1, -1) for counts in counts_after(policy, history))
    noise = torch.rand(num_slots, 1, policy.noise_size, generator=torch.Generator().manual_seed(0)).double()
    arms = policy.pull(successes, failures, noise)
    return (torch.bincount(arms.flatten(), minlength=policy.num_actions) / num_slots).tolist()


def expected_reward(policy: BanditPolicy, num_pulls: int) -> float:
    """Return the expected reward over all trials of two arms with uniform means; ties go to the first arm."""
    total = 0.0

    def follow(history: History, probability: float) -> None:
        nonlocal total
        if len(history) == num_pulls:
            total += probability * sum(reward for _, reward in history)
            return
        arm = next_arm(policy, history)
        wins = sum(reward for pulled, reward in history if pulled == arm)
        pulls = sum(pulled == arm for pulled, _ in history)
        success = (wins + 1) / (pulls + 2)
        follow([*history, (arm, 1.0)], probability * success)
        follow([*history, (arm, 0.0)], probability * (1 - success))

    follow([], 1.0)
    return total


def best_expected_reward(counts: tuple[tuple[int, int], ...], num_pulls: int) -> float:
    """Return the Bayes-optimal reward, by dynamic programming over (wins, losses) of each arm."""
    if num_pulls == 0:
        return 0.0
    best = 0.0
    for arm, (wins, losses) in enumerate(counts):
        success = (wins + 1) / (wins + losses + 2)

        def after(won: int, arm: int = arm, wins: int = wins, losses: int = losses) -> float:
            changed = (wins + won, losses + 1 - won)
            return best_expected_reward((*counts[:arm], changed, *counts[arm + 1 :]), num_pulls - 1)

        best = max(best, success * (1.0 + after(1)) + (1 - success) * after(0))
    return best


def test_random_policy_takes_every_action_equally_often() -> None:
    noise = torch.rand(1, 50_000, 5, generator=torch.Generator().manual_seed(0))
    arms = RandomPolicy(5).act(torch.zeros(1, 50_000, 1), noise)[0]
    share = torch.bincount(arms.flatten(), minlength=5) / 50_000
    assert share.tolist() == pytest.approx([0.2] * 5, abs=5 * math.sqrt(0.2 * 0.8 / 50_000))


def test_thompson_sampling_of_arms_with_long_histories_matches_draws_of_numpy() -> None:
    history = [(0, 1.0)] * 30 + [(0, 0.0)] * 20 + [(1, 1.0)] * 4 + [(1, 0.0)] * 4 + [(2, 0.0)] * 3
    random = np.random.default_rng(1)
    draws = random.beta([31, 5, 1], [21, 5, 4], (400_000, 3))
    expected = np.bincount(draws.argmax(1), minlength=3) / len(draws)
    assert frequencies(ThompsonSampling(3), history) == pytest.approx(expected, abs=5 * math.sqrt(0.25 / 10_000))


def test_optimistic_draws_pull_a_known_arm_as_often_as_its_mean_is_not_surpassed() -> None:
    # Arm 0 has the mean 2/3 and arm 1 the mean 1/2: max(Beta(2, 1), 2/3) > max(U, 1/2), enumerated with NumPy.
    random = np.random.default_rng(2)
    first, second = np.maximum(random.beta(2, 1, 10**6), 2 / 3), np.maximum(random.random(10**6), 0.5)
    share = frequencies(ThompsonSampling(2, at_least_mean=True), [(0, 1.0)])[0]
    assert share == pytest.approx((first > second).mean(), abs=5 * math.sqrt(0.25 / 10_000))


def test_most_probable_of_several_draws_is_used() -> None:
    policy, (successes, failures) = ThompsonSampling(3, num_draws=4), (torch.tensor([[1.0, 4.0, 2.0]]).double(),) * 2
    noise = torch.rand(50, 1, policy.noise_size, generator=torch.Generator().manual_seed(3)).double()
    chosen = []
    for numbers in noise[:, 0, 3:].reshape(50, 2, 4, 3):
        draws = invert_beta(successes.expand(4, 3), failures.expand(4, 3), numbers[0], numbers[1])
        likeliest = Beta(successes, failures).log_prob(draws).sum(-1).argmax()
        chosen.append(int(draws[likeliest].argmax()))
    arms = policy.pull(successes.expand(50, 1, 3), failures.expand(50, 1, 3), noise).flatten().tolist()
    assert arms == chosen
    assert len(set(chosen)) == 3


def test_ucb1_pulls_by_its_formula() -> None:
    random, last, beliefs = np.random.default_rng(4), None, []
    policy, noise, chosen = UCB1(4, 0.7, ties="first"), torch.full((1, 1, 4), 0.5), list[int]()
    memory = tuple(tensor.unsqueeze(0) for tensor in policy.initial_memory(1))
    wins, pulls = np.ones(4), np.full(4, 2.0)
    for time in range(1, 60):
        arm, memory = policy.act(shown(last, 4).expand(1, 1, -1), noise, memory)
        bounds = [wins[k] / pulls[k] + 0.7 * math.sqrt(2 * math.log(time) / pulls[k]) for k in range(4)]
        assert int(arm) == int(np.argmax(bounds))
        last = int(arm), float(random.random() < (int(arm) + 1) / 5)
        wins[last[0]] += last[1]
        pulls[last[0]] += 1
        chosen.append(last[0])
        beliefs.append(memory)
    assert set(chosen) == {0, 1, 2, 3}
    successes, failures = map(torch.cat, zip(*beliefs, strict=True))
    assert policy.pull(successes, failures, noise.expand(59, 1, 4)).flatten().tolist() == chosen


def test_epsilon_greedy_explores_with_probability_epsilon() -> None:
    share = frequencies(BanditEpsilonGreedy(4, 0.2), [(2, 1.0)])
    assert share == pytest.approx([0.05, 0.05, 0.85, 0.05], abs=5 * math.sqrt(0.25 / 10_000))


def test_ties_are_broken_at_random_or_by_the_first_arm() -> None:
    tied: History = [(0, 0.0), (2, 1.0), (1, 1.0)]
    share = frequencies(BanditEpsilonGreedy(3), tied)
    assert share == pytest.approx([0.0, 0.5, 0.5], abs=5 * math.sqrt(0.25 / 10_000))
    assert frequencies(BanditEpsilonGreedy(3, ties="first"), tied) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(("num_pulls", "discount"), [(2, 0.5), (5, 0.8)])
def test_gittins_index_achieves_the_optimum_within_the_error_of_a_discount(num_pulls: int, discount: float) -> None:
    optimal = best_expected_reward(((0, 0), (0, 0)), num_pulls)
    earned = expected_reward(GittinsIndex(2, num_pulls, discount, ties="first"), num_pulls)
    assert earned <= optimal + 1e-12
    assert earned == pytest.approx(optimal, abs=0.003)
    if num_pulls > 2:
        assert earned > expected_reward(BanditEpsilonGreedy(2, ties="first"), num_pulls)


def test_rewards_are_credited_to_their_arm_and_slot() -> None:
    policy = BanditEpsilonGreedy(2)
    memory = tuple(tensor.unflatten(0, (2, 2)) for tensor in policy.initial_memory(4))
    outcomes: list[tuple[int, float] | None] = [None, (0, 1.0), (1, 1.0), (1, 0.0)]
    observations = torch.stack([shown(last, 2) for last in outcomes]).unflatten(0, (2, 2))
    _, (successes, failures) = policy.act(observations, torch.full((2, 2, 3), 0.5), memory)
    assert successes.flatten(0, 1).tolist() == [[1, 1], [2, 1], [1, 2], [1, 1]]
    assert failures.flatten(0, 1).tolist() == [[1, 1], [1, 1], [1, 1], [1, 2]]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: BanditEpsilonGreedy(2, 1.5), "epsilon"),
        (lambda: UCB1(2, -1.0), "c must"),
        (lambda: UCB1(2, ties="last"), "ties"),  # type: ignore[arg-type]
        (lambda: ThompsonSampling(2, num_draws=0), "num_draws"),
        (lambda: GittinsIndex(2, 5, 1.0), "discount"),
        *(
            (lambda of=of: gittins_indices(*of), "discount inside")  # type: ignore[misc]
            for of in ((0.0, 5), (1.0, 5), (0.9, 0))
        ),
    ],
)
def test_a_bad_argument_is_named(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("observations", "actions", "named"),
    [
        (spaces.Box(0, 1, (6,)), spaces.Discrete(3), "does not fit the action space"),
        (spaces.Box(0, 1, (6,)), spaces.Box(0, 1, (2,)), "does not fit the action space"),
        (spaces.Box(0, 1, (1,)), spaces.Discrete(2), "observe_last=True"),
        (spaces.Discrete(7), spaces.Discrete(2), "observe_last=True"),
    ],
)
def test_spaces_that_do_not_fit_are_refused_with_the_remedy(
    observations: spaces.Space, actions: spaces.Space, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        UCB1(2).check_spaces(observations, actions)


def test_indices_are_those_of_the_published_tables() -> None:
    # Gittins 1979, table 1, for the discount 0.9 (successes 0 ... 4, failures 0 ... 2), to four digits.
    published = [
        [0.7029, 0.8001, 0.8452, 0.8723, 0.8905],
        [0.5001, 0.6346, 0.7072, 0.7539, 0.7869],
        [0.3796, 0.5163, 0.6010, 0.6579, 0.6996],
    ]
    indices = gittins_indices(0.9, 12)
    assert np.abs(indices[:5, :3].T - published).max() < 2e-4
    np.testing.assert_array_equal(np.isnan(indices), np.add.outer(range(12), range(12)) >= 12)
    assert indices[9, 1] == pytest.approx(0.8695, abs=1e-3)
    assert gittins_indices(0.99, 1)[0, 0] == pytest.approx(0.8699, abs=1e-3)
