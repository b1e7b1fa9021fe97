"""The Bayes-optimal policy for `GridNavi-v0`, and the largest possible expected return.

Until the goal is found, every step looks the same: it costs, and where it ends is known beforehand. The optimal search
is therefore a fixed walk, which starts again in every episode. Once the goal is found, it is optimal to stay, and in
later episodes to go straight to the goal. The value of a walk is a sum over cells, of the value of finding the goal
there at that step. Dynamic programming over visited cells and position, forward in time, finds the best walk. It drops
states whose upper bound does not reach the value of a walk that is already known, which leaves few.
"""

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.arguments import check_count
from maml_rl.envs.families.grids import ELSEWHERE, MOVES, ON_GOAL, possible_goals
from maml_rl.envs.last_step import LastStepParts
from maml_rl.policies.classical.counting import CountingPolicy
from maml_rl.policies.heads import Params
from maml_rl.policies.policy import Memory

Floats = NDArray[np.float64]

# States of one step that the first pass keeps, which finds a good walk; and that the exact one may have.
_BEAM, _MOST_STATES = 2_000, 4_000_000
# Goals that fit into an integer, beside the cell.
_MOST_GOALS = 48
# Values that differ by less are equal up to rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class OptimalSearch:
    """The optimal search for the goal, and its returns.

    Attributes:
        actions: (E, T) int64 action in each step while the goal has not been found.
        episode_returns: (E,) expected return of each episode, where one goes straight to the goal once it is known.
    """

    actions: NDArray[np.int64]
    episode_returns: Floats

    @property
    def value(self) -> float:
        """Expected return of a trial, the largest of all policies."""
        return float(self.episode_returns.sum())


def optimal_search(width: int, height: int, num_steps: int, num_episodes: int) -> OptimalSearch:
    """Compute the exact optimum for trials of `GridNavi-v0`.

    Args:
        width: cells along x.
        height: cells along y.
        num_steps: T, of an episode.
        num_episodes: E, of a trial.

    Raises:
        ValueError: If a number is not positive, the grid has no room for a goal, or the search does not fit.
    """
    problem = _Problem(
        check_count("width", width),
        check_count("height", height),
        check_count("num_steps", num_steps),
        check_count("num_episodes", num_episodes),
    )
    gain, walk = problem.search(-np.inf, _BEAM)
    if walk.is_exact:
        return problem.describe(walk)
    return problem.describe(problem.search(gain - _ROUNDING, None)[1])


class BayesOptimalGridNavi(CountingPolicy):
    """Searches the goal of `GridNavi-v0` on the optimal walk, and goes straight to it once it is known.

    No policy without knowledge of the goal achieves a larger expected return of a trial.

    Args:
        width: cells along x.
        height: cells along y.
        num_steps: T, of an episode.
        num_episodes: E, of a trial; in later ones it stays where it is while it does not know the goal.

    Attributes:
        optimum: its search for the goal, and the expected return of each episode.

    Raises:
        ValueError: If an argument is out of range, or the search for the walk does not fit; the message says why.
    """

    actions: Tensor

    def __init__(self, width: int = 5, height: int = 5, *, num_steps: int = 15, num_episodes: int = 4) -> None:
        super().__init__(len(MOVES), ties="first")
        self.width, self.height = width, height
        self.optimum = optimal_search(width, height, num_steps, num_episodes)
        # Where the search is over one stays; a buffer, so that it moves with the device.
        stay = np.zeros((1, num_steps), np.int64)
        self.register_buffer("actions", torch.from_numpy(np.concatenate((self.optimum.actions, stay))))

    def initial_memory(self, num: int) -> Memory:
        """Return episode, step, goal (x, y; -1: unknown) and where the last step led (x, y), (num, 6) int64."""
        before = torch.tensor([0, -1, -1, -1, 0, 0], device=self.actions.device)
        return (before.expand(num, 6).clone(),)

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Follow the walk, or go to the goal; see `Policy.act`."""
        episode, step, *places = memory[0].unbind(-1)
        goal, led = torch.stack(places[:2], -1), torch.stack(places[2:], -1)
        _, reward, ended = self.last_step(observations)
        found = reward > 0.5 * (ON_GOAL + ELSEWHERE)
        goal = torch.where(found.unsqueeze(-1), led, goal)
        # An episode may have another length than the walk was made for.
        episode = torch.clamp(episode + ended, max=len(self.actions) - 1)
        step = torch.where(ended, 0, torch.clamp(step + 1, max=self.actions.shape[1] - 1))
        cell = observations[..., :2].round().long()
        away = goal - cell
        # Up and down are along y, right and left along x, as in `MOVES`.
        along_x = torch.where(away[..., 0] > 0, 2, 4)
        along_y = torch.where(away[..., 1] > 0, 1, 3)
        to_goal = torch.where(away[..., 0] != 0, along_x, torch.where(away[..., 1] != 0, along_y, 0))
        actions = torch.where(goal[..., 0] >= 0, to_goal, self.actions[episode, step])
        moves = torch.as_tensor(MOVES, device=cell.device)
        last = torch.tensor([self.width - 1, self.height - 1], device=cell.device)
        led = torch.minimum((cell + moves[actions]).clamp(min=0), last)
        return actions, (torch.cat((episode.unsqueeze(-1), step.unsqueeze(-1), goal, led), -1),)

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Also refuse another grid; see `CountingPolicy.check_spaces`."""
        super().check_spaces(observation_space, action_space)
        own = LastStepParts.within(observation_space, action_space).observation
        assert isinstance(observation_space, spaces.Box)
        high = observation_space.high[own].tolist()
        if high != [self.width - 1, self.height - 1]:
            raise ValueError(
                f"{type(self).__name__} for a grid of {self.width} x {self.height} cells does not fit observations up "
                f"to {high}; make it for the width and height of the environment"
            )


@dataclass(frozen=True, slots=True)
class _Walk:
    """Actions (E * T,), and whether the search was exact."""

    actions: NDArray[np.int64]
    is_exact: bool


class _Problem:
    """The walks of a trial, and their gains: (E * T) steps, n goals, C cells."""

    def __init__(self, width: int, height: int, num_steps: int, num_episodes: int) -> None:
        self._width, self._height, self._steps, self._episodes = width, height, num_steps, num_episodes
        self._goals = possible_goals(width, height)
        if len(self._goals) > _MOST_GOALS:
            raise ValueError(self._too_large(f"it has {len(self._goals)} possible goals, more than {_MOST_GOALS}"))
        cells = np.array(list(np.ndindex(width, height)))
        # By cell and action (without staying, which gains nothing before the goal is found), the next cell.
        ends = np.clip(cells[:, None] + MOVES[1:], 0, [width - 1, height - 1])
        self._next = ends @ [height, 1]
        # By cell, the bit of its goal; 0 where no goal can be.
        self._bits = np.zeros(len(cells), np.int64)
        # Goals are in the order of their cells.
        self._bits[self._goals @ [height, 1]] = 1 << np.arange(len(self._goals))
        # From every cell to every goal, and from the start.
        self._distances = np.abs(cells[:, None] - self._goals).sum(-1)
        self._from_start = self._distances[0]
        lengths = np.minimum(self._from_start, num_steps + 1)
        # Return of an episode in which the goal is known from the beginning.
        self._known = ELSEWHERE * (lengths - 1) + ON_GOAL * (num_steps + 1 - lengths)

    def _too_large(self, reason: str) -> str:
        return (
            f"the Bayes optimum of a grid of {self._width} x {self._height} cells with {self._episodes} episodes of "
            f"{self._steps} steps does not fit: {reason}; choose a smaller grid, or fewer steps"
        )

    def _found(self, episode: int, step: int) -> float:
        """Return the reward of a trial up to the end of the episode in which step `step` (from 1) finds the goal."""
        before = episode * self._steps + step - 1
        return ELSEWHERE * before + ON_GOAL * (self._steps + 1 - step)

    def _gains(self, episode: int, step: int) -> Floats:
        """Return the gain from finding each goal (n,) in this step, compared with never finding it."""
        never = ELSEWHERE * self._steps * self._episodes
        gains: Floats = self._found(episode, step) + (self._episodes - 1 - episode) * self._known - never
        return gains

    def search(self, least: float, beam: int | None) -> tuple[float, _Walk]:
        """Return the gain (summed over goals) of the best walk that gains more than `least`, and the walk.

        Args:
            least: lower bound of the optimal gain, slightly reduced.
            beam: how many states of each step to keep, those of the largest bounds; None for all.

        Raises:
            ValueError: If there are too many states.
        """
        cells, visited, gains = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1)
        parents: list[NDArray[np.int64]] = []
        taken: list[NDArray[np.int64]] = []
        is_exact = True
        for episode in range(self._episodes):
            for step in range(1, self._steps + 1):
                if step == 1 and episode:
                    # All walks start again: the last cell no longer matters.
                    cells = np.zeros_like(cells)
                ends = self._next[cells]
                bits = self._bits[ends]
                is_new = (visited[:, None] & bits) == 0
                worth = np.zeros(len(self._bits))
                worth[self._bits > 0] = self._gains(episode, step)
                gained = gains[:, None] + np.where(is_new, worth[ends], 0.0)
                after = visited[:, None] | bits
                kept = _best_of_each(ends.ravel(), after.ravel(), gained.ravel())
                cells, visited, gains = ends.ravel()[kept], after.ravel()[kept], gained.ravel()[kept]
                bounds = gains + self._bound(cells, visited, episode, step)
                chosen = np.flatnonzero(bounds >= least)
                if beam is not None and len(chosen) > beam:
                    chosen, is_exact = chosen[np.argpartition(-bounds[chosen], beam)[:beam]], False
                if len(chosen) > _MOST_STATES:
                    raise ValueError(
                        self._too_large(f"step {step} of episode {episode + 1} has {len(chosen):,} beliefs")
                    )
                cells, visited, gains, kept = cells[chosen], visited[chosen], gains[chosen], kept[chosen]
                parents.append(kept // self._next.shape[1])
                taken.append(kept % self._next.shape[1] + 1)
        place = best = int(gains.argmax())
        actions = []
        for came_from, did in zip(reversed(parents), reversed(taken), strict=True):
            actions.append(int(did[place]))
            place = int(came_from[place])
        return float(gains[best]), _Walk(np.array(actions[::-1]), is_exact)

    def _bound(self, cells: NDArray[np.int64], visited: NDArray[np.int64], episode: int, step: int) -> Floats:
        """Return more than any continuation can gain after a step, (states,).

        In the bound, every remaining goal is found in the next episode on the shortest path, except as many as there
        are steps left, beginning with the nearest. The gain per earlier step does not depend on the goal: what a goal
        far from the start loses, it need not gain in later episodes.
        """
        later = np.zeros(len(self._goals))
        reachable = self._from_start <= self._steps
        if episode + 1 < self._episodes:
            at = [self._gains(episode + 1, int(distance))[goal] for goal, distance in enumerate(self._from_start)]
            later[reachable] = np.array(at)[reachable]
        bound, left = np.zeros(len(cells)), np.zeros(len(cells), np.int64)
        nearest = np.full(len(cells), self._steps + 1)
        for goal in range(len(self._goals)):
            is_left = (visited >> goal & 1) == 0
            bound += np.where(is_left, later[goal], 0.0)
            if reachable[goal]:
                left += is_left
                nearest = np.where(is_left, np.minimum(nearest, self._distances[cells, goal]), nearest)
        sooner = [
            self._found(episode, at) - ELSEWHERE * (episode + 1) * self._steps for at in range(1, self._steps + 1)
        ]
        # By the step that finds the first, and the number of steps: sums of what the steps from there on are worth.
        sums = np.concatenate(([0.0], np.cumsum(sooner)))
        first = np.minimum(step + nearest, self._steps + 1)
        last = np.minimum(first - 1 + left, self._steps)
        extra = sums[last] - sums[first - 1]
        total: Floats = bound + extra
        return total

    def describe(self, walk: _Walk) -> OptimalSearch:
        """Return the results of a walk."""
        actions = walk.actions.reshape(self._episodes, self._steps)
        # Every goal is found in the step that first ends there; if none does, in none.
        returns = np.full((len(self._goals), self._episodes), ELSEWHERE * self._steps)
        seen: set[int] = set()
        for episode in range(self._episodes):
            cell = 0
            for step in range(1, self._steps + 1):
                cell = int(self._next[cell, actions[episode, step - 1] - 1])
                bit = int(self._bits[cell])
                if bit and bit not in seen:
                    seen.add(bit)
                    goal = bit.bit_length() - 1
                    returns[goal, episode] = ELSEWHERE * (step - 1) + ON_GOAL * (self._steps + 1 - step)
                    returns[goal, episode + 1 :] = self._known[goal]
        return OptimalSearch(actions, returns.mean(axis=0))


def _best_of_each(cells: NDArray[np.int64], visited: NDArray[np.int64], gains: Floats) -> NDArray[np.int64]:
    """Return, of all entries that agree in cell and visited goals, the numbers of those that gained most."""
    order = np.lexsort((-gains, cells, visited))
    ordered = visited[order], cells[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (ordered[0][1:] != ordered[0][:-1]) | (ordered[1][1:] != ordered[1][:-1])
    return order[is_first]
