"""Classical algorithms for Bernoulli bandits; see `maml_rl.policies.classical`.

Arguments that a class does not describe are those of its base.
"""

import math
from abc import abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.arguments import check_count, check_number
from maml_rl.policies.classical.counting import CountingPolicy, Ties, check_fraction
from maml_rl.policies.distributions import invert_beta
from maml_rl.policies.heads import Params
from maml_rl.policies.policy import Acted, Memory

# Reward rates between which indices are interpolated.
_NUM_RATES = 401
# Pulls after which an arm's mean counts as known: enough that the discount or the posterior makes the error negligible.
_REST, _MOST_PULLS = 1e-4, 500


class BanditPolicy(CountingPolicy):
    """Counts the successes and failures of every arm, and chooses an arm by them.

    Args:
        num_arms: K.
        further_noise: numbers of noise that `pull` takes beside those that break ties.
        ties: which of several best arms is pulled: "random", or the "first".
    """

    prior: Tensor

    def __init__(self, num_arms: int, *, further_noise: int = 0, ties: Ties = "random") -> None:
        super().__init__(num_arms, further_noise=further_noise, ties=ties)
        # One success and one failure, the uniform prior Beta(1, 1) of an arm's mean; a buffer, so that it moves with
        # the device.
        self.register_buffer("prior", torch.ones(2, dtype=torch.float64))

    @abstractmethod
    def pull(self, successes: Tensor, failures: Tensor, noise: Tensor) -> Tensor:
        """Return the arm (...) int64 to pull next.

        Args:
            successes: (..., K) sum of each arm's rewards, and the prior's success.
            failures: (..., K) number of its pulls less that sum, and the prior's failure.
            noise: (..., noise_size) from U[0, 1); the first K break ties.
        """

    def initial_memory(self, num: int) -> Memory:
        """Return the successes and failures of each arm, (num, K) each: those of the prior."""
        return tuple(self.prior[kind].expand(num, self.num_actions).clone() for kind in range(2))

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Acted:
        """Count the last pull, and choose the next."""
        pulled, reward, _ = self.last_step(observations)
        won = pulled * reward[..., None]
        successes, failures = memory[0] + won, memory[1] + pulled - won
        return self.pull(successes, failures, noise.double()), (successes, failures)


class BanditEpsilonGreedy(BanditPolicy):
    """Pulls a random arm with probability `epsilon`, else the arm of the largest posterior mean.

    Args:
        epsilon: in [0, 1]; 0 is the greedy algorithm.
    """

    def __init__(self, num_arms: int, epsilon: float = 0.0, *, ties: Ties = "random") -> None:
        super().__init__(num_arms, further_noise=1, ties=ties)
        self.epsilon = check_fraction("epsilon", epsilon)

    def pull(self, successes: Tensor, failures: Tensor, noise: Tensor) -> Tensor:
        greedy = self.best(successes / (successes + failures), noise)
        return self.mostly(greedy, self.epsilon, noise)


class UCB1(BanditPolicy):
    """Pulls the arm of the largest upper confidence bound, mean + c * sqrt(2 log t / pulls), before pull t = 1, 2, ...

    Mean and pulls count the prior's success and failure.

    Args:
        c: width of the bounds, at least 0; 1 is the algorithm of the first paper.

    Source: Auer et al. 2002, https://doi.org/10.1023/A:1013689704352; tunable as in Audibert and Munos 2011
    """

    def __init__(self, num_arms: int, c: float = 1.0, *, ties: Ties = "random") -> None:
        super().__init__(num_arms, ties=ties)
        self.c = check_number("c", c)
        if c < 0.0:
            raise ValueError(f"c must not be negative, got {c}")

    def pull(self, successes: Tensor, failures: Tensor, noise: Tensor) -> Tensor:
        pulls = successes + failures
        time = (pulls - self.prior.sum()).sum(-1, keepdim=True) + 1.0
        return self.best(successes / pulls + self.c * torch.sqrt(2.0 * torch.log(time) / pulls), noise)


class ThompsonSampling(BanditPolicy):
    """Draws the arms' means from their posterior, and pulls the best arm of the draw.

    Args:
        num_draws: with several, the draw of the largest posterior density is used: the optimistic variant as in Duan et
            al. 2016, which is nearer to the posterior's mode the more draws there are.
        at_least_mean: let no draw be below its arm's posterior mean: the optimistic variant of May et al. 2012.

    Source: Thompson 1933, https://doi.org/10.1093/biomet/25.3-4.285; May et al. 2012, https://jmlr.org/papers/v13/may12a
    """

    def __init__(self, num_arms: int, *, num_draws: int = 1, at_least_mean: bool = False) -> None:
        super().__init__(num_arms, further_noise=2 * num_arms * check_count("num_draws", num_draws))
        self.num_draws, self.at_least_mean = num_draws, at_least_mean

    def pull(self, successes: Tensor, failures: Tensor, noise: Tensor) -> Tensor:
        # (..., draws, K): every draw of an arm's mean takes two numbers.
        first, second = noise[..., self.num_actions :].unflatten(-1, (2, self.num_draws, self.num_actions)).unbind(-3)
        shapes = [shape.unsqueeze(-2).expand(first.shape) for shape in (successes, failures)]
        draws = invert_beta(shapes[0], shapes[1], first, second)
        if self.num_draws > 1:
            densities = (torch.xlogy(shapes[0] - 1.0, draws) + torch.xlogy(shapes[1] - 1.0, 1.0 - draws)).sum(-1)
            likeliest = densities.argmax(-1)[..., None, None].expand(*draws.shape[:-2], 1, self.num_actions)
            draws = draws.gather(-2, likeliest)
        means = draws.squeeze(-2)
        if self.at_least_mean:
            means = torch.maximum(means, successes / (successes + failures))
        return self.best(means, noise)


class GittinsIndex(BanditPolicy):
    """Pulls the arm of the largest Gittins index, which is optimal for discounted rewards over an infinite horizon.

    Args:
        num_pulls: n, pulls of a trial.
        discount: in (0, 1); None for 1 - 1 / n, under which rewards count for n pulls together.

    Source: Gittins 1979, https://doi.org/10.1111/j.2517-6161.1979.tb01068.x
    """

    indices: Tensor

    def __init__(self, num_arms: int, num_pulls: int, discount: float | None = None, *, ties: Ties = "random") -> None:
        super().__init__(num_arms, ties=ties)
        self.num_pulls = check_count("num_pulls", num_pulls)
        self.discount = 1.0 - 1.0 / max(num_pulls, 2) if discount is None else discount
        self.register_buffer("indices", torch.from_numpy(gittins_indices(self.discount, num_pulls)))

    def pull(self, successes: Tensor, failures: Tensor, noise: Tensor) -> Tensor:
        counts = ((count - prior).long() for count, prior in zip((successes, failures), self.prior, strict=True))
        return self.best(self.indices[tuple(count.clamp(0, self.num_pulls - 1) for count in counts)], noise)


def gittins_indices(discount: float, num_pulls: int) -> NDArray[np.float64]:
    """Compute the Gittins index of an arm with the prior Beta(1, 1) after each number of successes and failures.

    An arm's index is the certain reward per pull at which retiring to it at once is as good as pulling the arm with the
    right to retire after any pull. For each rate of a grid, dynamic programming over (successes, failures) gives the
    value of continuing; the index is the rate at which that equals the value of retiring.

    Args:
        discount: in (0, 1).
        num_pulls: n; the dynamic program looks far beyond it.

    Returns:
        (n, n) index after s successes and f failures, at [s, f]; NaN where s + f >= n. Within 1e-3, and within 1e-4
        for discounts up to 0.9.

    Source: Gittins et al. 2011, Multi-armed bandit allocation indices, chapter 8, https://doi.org/10.1002/9780470980033
    """
    if num_pulls < 1 or not 0.0 < discount < 1.0:
        raise ValueError(f"num_pulls must be at least 1 and discount inside (0, 1), got {num_pulls} and {discount}")
    rates = np.linspace(0.0, 1.0, _NUM_RATES)
    retiring = rates / (1.0 - discount)
    depth = num_pulls + min(math.ceil(math.log(_REST) / math.log(discount)), _MOST_PULLS)
    indices = np.full((num_pulls, num_pulls), np.nan)
    # After `depth` pulls the mean counts as known. Row s of the values is for s successes among all pulls.
    means = (np.arange(depth + 1) + 1.0) / (depth + 2.0)
    values = np.maximum(means[:, None] / (1.0 - discount), retiring)
    for pulls in reversed(range(depth)):
        successes = np.arange(pulls + 1)
        means = ((successes + 1.0) / (pulls + 2.0))[:, None]
        pulling = means * (1.0 + discount * values[1:]) + (1.0 - means) * discount * values[:-1]
        if pulls < num_pulls:
            # Falls with the rate, from above zero to zero or below.
            gain = pulling - retiring
            before = np.minimum((gain > 0.0).sum(1) - 1, _NUM_RATES - 2)
            high, low = gain[successes, before], gain[successes, before + 1]
            indices[successes, pulls - successes] = rates[before] + (rates[1] - rates[0]) * high / (high - low)
        values = np.maximum(pulling, retiring)
    return indices
