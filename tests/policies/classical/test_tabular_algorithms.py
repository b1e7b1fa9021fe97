"""Classical algorithms for tabular processes: plans against enumeration, counts and draws against closed forms."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.policies.classical import BEB, PSRL, UCRL2, TabularEpsilonGreedy, TabularPolicy, value_iteration
from maml_rl.seeding import expand_noise


def process(num_states: int, num_actions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(seed)
    rewards = random.normal(size=(num_states, num_actions))
    return torch.from_numpy(rewards), torch.from_numpy(random.dirichlet(np.ones(num_states), (num_states, num_actions)))


def shown(state: int, num_states: int, num_actions: int, last: tuple[int, float, bool] | None) -> Tensor:
    """Return the observation that a sampler gives for `TabularMDP-v0`."""
    row = torch.zeros(num_states + num_actions + 2)
    row[state] = 1.0
    if last is not None:
        row[num_states + last[0]], row[-2], row[-1] = 1.0, last[1], last[2]
    return row.expand(1, 1, -1)


def counts(policy: TabularPolicy, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return the initial counts of a policy, for some rows."""
    return policy.initial_memory(rows)[:3]


def test_value_iteration_is_the_best_of_all_policies() -> None:
    states, actions, horizon = 2, 2, 3
    rewards, transitions = process(states, actions)
    values = value_iteration(rewards, transitions, horizon)
    returns = []
    for choices in product(range(actions), repeat=states * horizon):
        distribution, total = np.array([1.0, 0.0]), 0.0
        for step in range(horizon):
            of_step = choices[step * states : (step + 1) * states]
            total += sum(distribution[s] * float(rewards[s, of_step[s]]) for s in range(states))
            distribution = sum(distribution[s] * transitions[s, of_step[s]].numpy() for s in range(states))
        returns.append(total)
    assert values[0, 0].max().item() == pytest.approx(max(returns))
    assert torch.equal(values[-1], rewards)


def test_extended_value_iteration_finds_the_best_process_within_the_distance() -> None:
    rewards, transitions = process(3, 2, seed=1)
    radii = torch.tensor([[0.3, 0.05], [1.0, 2.5], [0.6, 0.0]]).double()
    values = value_iteration(rewards, transitions, 2, radii)
    last = rewards.amax(-1).numpy()
    steps = np.linspace(0.0, 1.0, 401)
    grid = np.array([(a, b, 1 - a - b) for a in steps for b in steps if a + b <= 1 + 1e-12])
    for state, action in product(range(3), range(2)):
        near = np.abs(grid - transitions[state, action].numpy()).sum(1) <= radii[state, action].item() + 5e-3
        best = float(rewards[state, action]) + (grid[near] @ last).max()
        # Every distribution is within 1/200 of a point of the grid.
        assert values[0, state, action].item() == pytest.approx(best, abs=0.015)
    assert torch.equal(value_iteration(rewards, transitions, 2, torch.zeros(3, 2).double())[1], rewards)


def test_value_iteration_of_a_row_does_not_depend_on_the_others() -> None:
    many = [process(4, 3, seed) for seed in range(7)]
    rewards, transitions = (torch.stack(tensors) for tensors in zip(*many, strict=True))
    radii = torch.rand(7, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    for distances in (None, radii):
        together = value_iteration(rewards, transitions, 5, distances)
        for row in range(7):
            own = None if distances is None else distances[row : row + 1]
            alone = value_iteration(rewards[row : row + 1], transitions[row : row + 1], 5, own)
            assert torch.equal(together[row], alone[0])


class Recorded(TabularPolicy):
    """Records the arguments of its plans, and plans to take action 1."""

    def plan(self, visits: Tensor, rewards: Tensor, transitions: Tensor, noise: Tensor) -> Tensor:
        self.planned = [*getattr(self, "planned", []), (visits, rewards, transitions)]
        values = torch.zeros(len(visits), self.horizon, self.num_states, self.num_actions).double()
        values[..., 1] = 1.0
        return values


def test_steps_are_counted_and_plans_are_made_at_the_start_of_episodes() -> None:
    policy = Recorded(3, 2, 2, reward_prior=(0.5, 2.0), transition_prior=1.5)
    memory = tuple(tensor.unsqueeze(0) for tensor in policy.initial_memory(1))
    # Two episodes of two steps, 0 -> 2, and then from 0 again; the result of the last step is not observed.
    trial = [(0, None), (2, (1, 4.0, False)), (0, (0, -1.0, True)), (1, (1, 3.0, False))]
    for state, last in trial:
        noise = torch.full((1, 1, policy.noise_size), 0.5)
        action, memory = policy.act(shown(state, 3, 2, last), noise, memory)
        assert action.tolist() == [[1]]
    visits, rewards, transitions = (tensor[0, 0] for tensor in memory[:3])
    assert (visits - 2.0).tolist() == [[0, 2], [0, 0], [1, 0]]
    assert (rewards - 1.0).tolist() == [[0, 7], [0, 0], [-1, 0]]
    moves = torch.zeros(3, 2, 3)
    moves[0, 1, 2], moves[0, 1, 1] = 1, 1
    assert torch.equal((transitions - 1.5).float(), moves)
    assert len(policy.planned) == 2
    assert (policy.planned[1][0][0] - 2.0).tolist() == [[0, 1], [0, 0], [1, 0]]


def test_each_step_follows_the_plan_of_its_slot_its_step_and_its_state() -> None:
    class ByPlace(Recorded):
        def plan(self, visits: Tensor, rewards: Tensor, transitions: Tensor, noise: Tensor) -> Tensor:
            first = noise[:, :1] > 0.5  # Index of the plan of each slot.
            best = (torch.arange(2)[:, None] + torch.arange(3)) % 3
            best = torch.where(first[..., None], best, (best + 1) % 3)
            return torch.nn.functional.one_hot(best, 3).double()

    policy = ByPlace(3, 3, 2)
    memory = tuple(tensor.unflatten(0, (2, 1)) for tensor in policy.initial_memory(2))
    noise = torch.full((2, 1, 3), 0.9)
    noise[1, 0, 0] = 0.1
    for step, state, last in [(0, 0, None), (1, 2, (0, 0.0, False)), (0, 0, (1, 0.0, True))]:
        action, memory = policy.act(shown(state, 3, 3, last).expand(2, 1, -1), noise, memory)
        assert action.flatten().tolist() == [(step + state) % 3, (step + state + 1) % 3]
    assert memory[4].flatten(0, 1).tolist() == [[0, 0], [0, 0]]


def test_draws_of_psrl_have_the_moments_of_the_posterior() -> None:
    policy, rows = PSRL(3, 1, 2, reward_prior=(1.0, 4.0)), 20_000
    visits, rewards, transitions = counts(policy, rows)
    visits, rewards = visits + 5.0, rewards + 10.0
    alpha = torch.tensor([1.0, 3.0, 8.0]).double()
    transitions = alpha.expand(transitions.shape).clone()
    noise = torch.rand(rows, 12, generator=torch.Generator().manual_seed(0)).double()
    means, probabilities = policy.draw(visits, rewards, transitions, noise)
    # The prior is worth 4 rewards of 1, and 5 rewards sum to 10: N(14 / 9, 1 / 9).
    assert means.mean(0).flatten().tolist() == pytest.approx([14 / 9] * 3, abs=5 / 3 / math.sqrt(rows))
    assert means.var(0).flatten().tolist() == pytest.approx([1 / 9] * 3, rel=0.06)
    expected = alpha / 12
    variance = expected * (1 - expected) / 13
    assert probabilities.sum(-1).flatten().tolist() == pytest.approx([1.0] * 3 * rows)
    assert probabilities[:, 0, 0].mean(0).tolist() == pytest.approx(expected.tolist(), abs=0.005)
    assert probabilities[:, 0, 0].var(0).tolist() == pytest.approx(variance.tolist(), rel=0.06)


def test_optimistic_psrl_takes_the_largest_value_of_its_draws() -> None:
    policy = PSRL(2, 2, 3, num_draws=4)
    beliefs = counts(policy, 5)
    noise = torch.rand(5, policy.noise_size, generator=torch.Generator().manual_seed(1))
    numbers = torch.from_numpy(expand_noise(noise[:, 2:].numpy(), 4 * 12)).double().reshape(5, 4, 12)
    separately = [value_iteration(*policy.draw(*beliefs, numbers[:, draw]), 3) for draw in range(4)]
    assert torch.equal(policy.plan(*beliefs, noise.double()), torch.stack(separately).amax(0))
    assert len({tuple(values.flatten().tolist()) for values in separately}) == 4


def test_with_one_state_the_bonuses_are_those_of_the_formulas() -> None:
    # After 3 pulls of action 0 with a reward of 2 each, and 1 of action 1 with a reward of 0.5.
    pulls, paid = torch.tensor([[[3.0, 1.0]]]).double(), torch.tensor([[[6.0, 0.5]]]).double()

    def values_of(policy: TabularPolicy, step: int = -1) -> list[float]:
        visits, rewards, transitions = counts(policy)
        noise = torch.full((1, policy.noise_size), 0.5).double()
        return policy.plan(visits + pulls, rewards + paid, transitions + pulls[..., None], noise)[0, step, 0].tolist()

    assert values_of(TabularEpsilonGreedy(1, 2, 1)) == pytest.approx([2.0, 0.5], rel=1e-3)
    # A prior reward of 0 and a prior transition count.
    last = [6 / 4 + 1 / 5, 0.5 / 2 + 1 / 3]
    assert values_of(BEB(1, 2, 1, 10.0)) == pytest.approx(last)
    assert values_of(BEB(1, 2, 2, 10.0), 0) == pytest.approx([last[0] + 10 / 5 + last[0], last[1] + 10 / 3 + last[0]])
    bonus = 0.3 * math.sqrt(7 * math.log(2 * 1 * 2 * 4 / 0.05) / 2)
    assert values_of(UCRL2(1, 2, 1, 0.3)) == pytest.approx([2 + bonus / math.sqrt(3), 0.5 + bonus], rel=1e-3)


def test_plans_with_certain_knowledge_are_optimal() -> None:
    rewards, transitions = process(4, 3, seed=2)
    optimal = value_iteration(rewards, transitions, 5)
    seen = 1e9
    for policy in (
        TabularEpsilonGreedy(4, 3, 5),
        PSRL(4, 3, 5),
        PSRL(4, 3, 5, num_draws=3),
        UCRL2(4, 3, 5),
        BEB(4, 3, 5, 1.0),
    ):
        noise = torch.full((1, policy.noise_size), 0.3).double()
        beliefs = torch.full((1, 4, 3), seen).double(), seen * rewards[None], seen * transitions[None]
        assert policy.plan(*beliefs, noise)[0].flatten().tolist() == pytest.approx(optimal.flatten().tolist(), abs=0.01)


def test_epsilon_greedy_explores_with_probability_epsilon() -> None:
    policy, slots = TabularEpsilonGreedy(2, 4, 3, 0.2), 20_000
    noise = torch.rand(slots, policy.noise_size, generator=torch.Generator().manual_seed(0))
    actions = policy.follow(torch.tensor([0.0, 2.0, 1.0, 0.0]).double().expand(slots, 4), noise)
    share = torch.bincount(actions, minlength=4) / slots
    assert share.tolist() == pytest.approx([0.05, 0.85, 0.05, 0.05], abs=5 * math.sqrt(0.25 / slots))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: PSRL(0, 2, 3), "num_states"),
        (lambda: PSRL(2, 2, 3, transition_prior=0.5), "at least 1"),
        (lambda: PSRL(2, 2, 3, reward_prior=(0.0, 0.0)), "reward_prior"),
        (lambda: UCRL2(2, 2, 3, 0.0), "scale"),
        (lambda: UCRL2(2, 2, 3, delta=5.0), "delta"),
        (lambda: BEB(2, 2, 3, -1.0), "beta"),
        (lambda: TabularEpsilonGreedy(2, 2, 3, -0.1), "epsilon"),
    ],
)
def test_a_bad_argument_is_named(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]


def test_another_number_of_states_is_refused_with_both_numbers() -> None:
    spaces_of_ten = spaces.Box(0.0, 1.0, (10 + 5 + 2,)), spaces.Discrete(5)
    PSRL(10, 5, 10).check_spaces(*spaces_of_ten)
    with pytest.raises(ValueError, match="for 9 states does not fit observations of 10 numbers"):
        PSRL(9, 5, 10).check_spaces(*spaces_of_ten)
