"""Policies for tabular Markov decision processes: classical ones, see `maml_rl.policies.classical`, and a Q-table.

Arguments that a class does not describe are those of its base.
"""

from abc import abstractmethod
from typing import Any, TypedDict, Unpack

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maml_rl.arguments import check_count, check_number, check_positive
from maml_rl.envs.observing import LastStepParts
from maml_rl.policies.classical.counting import CountingPolicy, check_fraction
from maml_rl.policies.distributions import invert_gamma, invert_normal
from maml_rl.policies.heads import Params
from maml_rl.policies.policy import Acted, Memory
from maml_rl.seeding import expand_noise
from maml_rl.spaces import stored_actions


def value_iteration(
    rewards: Tensor, transitions: Tensor, horizon: int, radii: Tensor | None = None, bonuses: Tensor | None = None
) -> Tensor:
    """Compute the optimal action values of a finite horizon.

    Q_t(s, a) = r(s, a) + b(s, a) (H - 1 - t) + sum_s' p(s' | s, a) max_a' Q_{t+1}(s', a'), and Q_H = 0.

    Args:
        rewards: (..., S, A) mean rewards.
        transitions: (..., S, A, S) probabilities.
        horizon: H.
        radii: (..., S, A); with these, the best p within this L1 distance of `transitions` replaces them, at every
            step: extended value iteration.
        bonuses: (..., S, A) b, for every step that follows; None for 0.

    Returns:
        (..., H, S, A).

    Source: Jaksch et al. 2010, section 3.1, for the extended one, https://jmlr.org/papers/v11/jaksch10a
    """
    values = torch.zeros_like(rewards[..., 0])
    by_step = []
    for following in range(horizon):
        if radii is None:
            # A sum, not a matrix product, whose rounding would depend on the number of trials.
            expected = (transitions * values[..., None, None, :]).sum(-1)
        else:
            expected = _most_expected(transitions, values, radii)
        by_step.append(rewards + expected if bonuses is None else rewards + expected + following * bonuses)
        values = by_step[-1].amax(-1)
    return torch.stack(by_step[::-1], -3)


def _most_expected(transitions: Tensor, values: Tensor, radii: Tensor) -> Tensor:
    """Return the largest expectation (..., S, A) of `values` (..., S) within an L1 distance of `transitions`."""
    values, worst_first = values.sort(-1)
    sorted_by_value = transitions.gather(-1, worst_first[..., None, None, :].expand(transitions.shape))
    # The best state gains half of the distance, at most up to probability 1; the worst states lose it.
    best = torch.clamp(sorted_by_value[..., -1] + 0.5 * radii, max=1.0)
    to_pay = best - sorted_by_value[..., -1]
    others = sorted_by_value[..., :-1]
    paid_before = others.cumsum(-1) - others
    paid = torch.minimum(torch.clamp(to_pay[..., None] - paid_before, min=0.0), others)
    return ((others - paid) * values[..., None, None, :-1]).sum(-1) + best * values[..., None, None, -1]


class Prior(TypedDict, total=False):
    """The prior of a `TabularPolicy`."""

    reward_prior: tuple[float, float]
    transition_prior: float


class TabularPolicy(CountingPolicy):
    """Estimates rewards and transitions, plans at the beginning of every episode, and follows the plan through it.

    Observations of the environment itself are states as one-hot vectors. The next state of the last step of an episode
    is never seen.

    Args:
        num_states: S.
        num_actions: A.
        horizon: H, steps of an episode.
        reward_prior: mean of a mean reward under its normal prior, and its weight in rewards of variance 1.
        transition_prior: pseudo-count of transitions to every state, a Dirichlet prior.
        further_noise: numbers of noise that `plan` and `follow` take beside those that break ties.
    """

    prior: Tensor

    def __init__(
        self,
        num_states: int,
        num_actions: int,
        horizon: int,
        *,
        reward_prior: tuple[float, float] = (0.0, 1.0),
        transition_prior: float = 1.0,
        further_noise: int = 0,
    ) -> None:
        super().__init__(num_actions, further_noise=further_noise)
        self.num_states, self.horizon = check_count("num_states", num_states), check_count("horizon", horizon)
        mean, weight = check_number("reward_prior", reward_prior[0]), check_positive("reward_prior", reward_prior[1])
        pseudo_count = check_positive("transition_prior", transition_prior)
        # A buffer, so that it moves with the device.
        self.register_buffer("prior", torch.tensor([mean, weight, pseudo_count], dtype=torch.float64))

    @abstractmethod
    def plan(self, visits: Tensor, rewards: Tensor, transitions: Tensor, noise: Tensor) -> Tensor:
        """Return the values (N, H, S, A) of actions in the episode that begins.

        Args:
            visits: (N, S, A) how many rewards have been seen, with those of the prior.
            rewards: (N, S, A) their sum.
            transitions: (N, S, A, S) how many transitions, with those of the prior.
            noise: (N, noise_size) from U[0, 1); the first A break ties.
        """

    def follow(self, values: Tensor, noise: Tensor) -> Tensor:
        """Return an action (...) from the values (..., A) of all of them; see `plan` for the noise."""
        return self.best(values, noise)

    def initial_memory(self, num: int) -> Memory:
        """Return the counts before a trial, an empty plan, and the state and step of no step."""
        states, actions = self.num_states, self.num_actions
        mean, weight, pseudo_count = self.prior
        return (
            weight.expand(num, states, actions).clone(),
            (mean * weight).expand(num, states, actions).clone(),
            pseudo_count.expand(num, states, actions, states).clone(),
            self.prior.new_zeros(num, self.horizon, states, actions),
            torch.zeros(num, 2, dtype=torch.int64, device=self.prior.device),
        )

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Acted:
        """Count the last step, plan where an episode begins, and act by the plan."""
        visits, rewards, transitions, values, (last_state, step) = *memory[:4], memory[4].unbind(-1)
        action, reward, ended = self.last_step(observations)
        shown, noise = observations[..., : self.num_states].double(), noise.double()
        seen = torch.nn.functional.one_hot(last_state, self.num_states)[..., None] * action[..., None, :]
        visits, rewards = visits + seen, rewards + seen * reward[..., None, None]
        # The first state of an episode does not follow from an action.
        follows = shown * ~ended[..., None]
        transitions = transitions + seen[..., None] * follows[..., None, None, :]
        begins = ended | (action.amax(-1) == 0.0)
        if begins.any():
            counted = visits[begins], rewards[begins], transitions[begins]
            values = values.index_put((begins,), self.plan(*counted, noise[begins]))
        state = shown.argmax(-1)
        step = torch.where(begins, 0, torch.clamp(step + 1, max=self.horizon - 1))
        places = (step * self.num_states + state)[..., None, None].expand(*step.shape, 1, self.num_actions)
        of_state = values.flatten(-3, -2).gather(-2, places).squeeze(-2)
        return self.follow(of_state, noise), (visits, rewards, transitions, values, torch.stack((state, step), -1))

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        super().check_spaces(observation_space, action_space)
        shown = LastStepParts.within(observation_space, action_space).observation.stop
        if shown != self.num_states:
            raise ValueError(
                f"{type(self).__name__} for {self.num_states} states does not fit observations of {shown} numbers; it "
                "needs states as one-hot vectors"
            )

    def mean_model(self, visits: Tensor, rewards: Tensor, transitions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the posterior means of the rewards (N, S, A) and of the transitions (N, S, A, S)."""
        return rewards / visits, transitions / transitions.sum(-1, keepdim=True)


class TabularEpsilonGreedy(TabularPolicy):
    """Takes a random action with probability `epsilon`, else plans with the posterior means.

    Args:
        epsilon: in [0, 1]; 0 is the greedy algorithm.
        prior: by default almost none, so that the means are those of what was observed.
    """

    def __init__(
        self, num_states: int, num_actions: int, horizon: int, epsilon: float = 0.0, **prior: Unpack[Prior]
    ) -> None:
        weak: Prior = {"reward_prior": (0.0, 1e-4), "transition_prior": 1e-4}
        super().__init__(num_states, num_actions, horizon, further_noise=1, **(weak | prior))
        self.epsilon = check_fraction("epsilon", epsilon)

    def plan(self, visits: Tensor, rewards: Tensor, transitions: Tensor, noise: Tensor) -> Tensor:
        return value_iteration(*self.mean_model(visits, rewards, transitions), self.horizon)

    def follow(self, values: Tensor, noise: Tensor) -> Tensor:
        return self.mostly(self.best(values, noise), self.epsilon, noise)


class PSRL(TabularPolicy):
    """Plans for a process drawn from the posterior (posterior sampling for reinforcement learning).

    Args:
        num_draws: with several, an action's value is the largest that it has in any of the drawn processes: optimistic
            PSRL.
        prior: with a `transition_prior` of at least 1.

    Source: Strens 2000; Osband et al. 2013, https://arxiv.org/abs/1306.0940
    """

    def __init__(
        self, num_states: int, num_actions: int, horizon: int, *, num_draws: int = 1, **prior: Unpack[Prior]
    ) -> None:
        self._sizes = num_states * num_actions, num_states * num_actions * num_states
        super().__init__(num_states, num_actions, horizon, further_noise=4, **prior)
        if self.prior[2] < 1.0:
            raise ValueError(f"transition_prior must be at least 1, got {prior['transition_prior']}")
        self.num_draws = check_count("num_draws", num_draws)

    def plan(self, visits: Tensor, rewards: Tensor, transitions: Tensor, noise: Tensor) -> Tensor:
        # Episodes begin at few steps, and only there the numbers are needed.
        few = noise[..., self.num_actions :].float().cpu().numpy()
        numbers = torch.from_numpy(expand_noise(few, self.num_draws * sum(self._sizes))).to(noise)
        values = [
            value_iteration(*self.draw(visits, rewards, transitions, of_draw), self.horizon)
            for of_draw in numbers.chunk(self.num_draws, -1)
        ]
        return torch.stack(values).amax(0)

    def draw(self, visits: Tensor, rewards: Tensor, transitions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean rewards (N, S, A) and transitions (N, S, A, S) from the posterior; see `plan`.

        The noise, (N, S * A + S * A * S), is from U[0, 1).
        """
        of_rewards, of_transitions = noise.split(self._sizes, -1)
        means = rewards / visits + invert_normal(of_rewards.reshape(visits.shape)) / visits.sqrt()
        masses = invert_gamma(transitions, of_transitions.reshape(transitions.shape))
        return means, masses / masses.sum(-1, keepdim=True)


class UCRL2(TabularPolicy):
    """Plans for the best process within confidence bounds, by extended value iteration.

    The bound of a reward is `scale` * sqrt(7 log(2 S A t / delta) / (2 visits)), that of the transitions' L1 distance
    `scale` * sqrt(14 S log(2 A t / delta) / visits), t steps into the trial. The algorithm's episodes are those of the
    environment.

    Args:
        scale: positive; 1 is the algorithm of the paper.
        delta: in (0, 1], the probability that a bound may fail.

    Source: Jaksch et al. 2010, https://jmlr.org/papers/v11/jaksch10a
    """

    def __init__(
        self, num_states: int, num_actions: int, horizon: int, scale: float = 1.0, *, delta: float = 0.05
    ) -> None:
        super().__init__(num_states, num_actions, horizon, reward_prior=(0.0, 1e-4), transition_prior=1e-5)
        self.scale, self.delta = check_positive("scale", scale), check_positive("delta", check_fraction("delta", delta))

    def plan(self, visits: Tensor, rewards: Tensor, transitions: Tensor, noise: Tensor) -> Tensor:
        seen = visits - self.prior[1]
        time = torch.clamp(seen.sum((-2, -1), keepdim=True), min=1.0)
        counted = torch.clamp(seen, min=1.0)
        pairs = 2.0 * self.num_actions * time / self.delta
        of_rewards = torch.sqrt(3.5 * torch.log(self.num_states * pairs) / counted)
        of_transitions = torch.sqrt(14.0 * self.num_states * torch.log(pairs) / counted)
        means, probabilities = self.mean_model(visits, rewards, transitions)
        return value_iteration(
            means + self.scale * of_rewards, probabilities, self.horizon, self.scale * of_transitions
        )


class BEB(TabularPolicy):
    """Plans with the posterior means, and with bonuses for rarely visited pairs (Bayesian exploration bonus).

    A reward is raised by 1 / (1 + visits). As transitions are not known either, the value of an action is raised by
    `beta` / (1 + n) for every step that follows. Visits and n, of transitions, count the prior's.

    Args:
        beta: at least 0; in the paper's bound it grows with H^2.

    Source: Kolter and Ng 2009, https://doi.org/10.1145/1553374.1553441
    """

    def __init__(self, num_states: int, num_actions: int, horizon: int, beta: float, **prior: Unpack[Prior]) -> None:
        super().__init__(num_states, num_actions, horizon, **prior)
        self.beta = check_number("beta", beta)
        if beta < 0.0:
            raise ValueError(f"beta must not be negative, got {beta}")

    def plan(self, visits: Tensor, rewards: Tensor, transitions: Tensor, noise: Tensor) -> Tensor:
        means, probabilities = self.mean_model(visits, rewards, transitions)
        of_transitions = self.beta / (1.0 + transitions.sum(-1))
        return value_iteration(means + 1.0 / (1.0 + visits), probabilities, self.horizon, bonuses=of_transitions)


class QTablePolicy(CountingPolicy):
    """Takes an action of the largest value in its state, or with probability `epsilon` a random one.

    Both are parameters, so that each task may have its own. A state is a Discrete observation, or the index of the 1 in
    a one-hot vector; actions are Discrete. In the beginning all actions have the same value in all states.
    """

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], initial_value: float = 0.0
    ) -> None:
        check_countable(observation_space)
        if not isinstance(action_space, spaces.Discrete):
            raise TypeError(f"a table needs Discrete actions, and they are {action_space}; use another learner")
        super().__init__(int(action_space.n), further_noise=1)
        self._is_vector = isinstance(observation_space, spaces.Box)
        self._start = 0 if self._is_vector else int(getattr(observation_space, "start", 0))
        self._spaces = observation_space, stored_actions(action_space)
        self.table = nn.Parameter(torch.full((spaces.flatdim(observation_space), self.num_actions), initial_value))
        self.epsilon = nn.Parameter(torch.ones(()))

    def initial_memory(self, num: int) -> Memory:
        return ()

    def states(self, observations: Tensor) -> Tensor:
        """Return the numbers (...) int64 of the states that observations (..., *observation shape) show.

        A vector that is all zero counts as the first state; one that is neither zero nor one-hot is a ValueError.
        """
        if not self._is_vector:
            return observations.long() - self._start
        if not bool(((observations == 0) | (observations == 1)).all() and (observations.sum(-1) <= 1).all()):
            raise ValueError("a table needs one-hot observations, and these vectors hold other numbers; use ppo")
        return observations.argmax(-1)

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Acted:
        table, epsilon = (self.table, self.epsilon) if params is None else (params["table"], params["epsilon"])
        states = self.states(observations)
        values = table[states] if table.dim() == 2 else table[torch.arange(len(table))[:, None], states]
        random = noise[..., -1] < epsilon.unsqueeze(-1)
        return torch.where(random, noise[..., : self.num_actions].argmax(-1), self.best(values, noise)), ()

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        if (observation_space, action_space) != self._spaces:
            raise ValueError(f"the table is for {self._spaces}, and the environment has others; make one for it")


def check_countable(observation_space: gymnasium.Space[Any]) -> None:
    """Refuse, by a TypeError, observations that are neither Discrete nor vectors of numbers in [0, 1]."""
    space = observation_space
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        if bool((space.low >= 0).all() and (space.high <= 1).all()):
            return
    elif isinstance(space, spaces.Discrete):
        return
    raise TypeError(
        f"a table needs states that can be counted, Discrete or one-hot vectors, and the observations are {space}; use "
        "another learner"
    )
