"""The Bayes-optimal policy for `GridNavi-v0` in VariBAD's setting: 5 x 5 cells, 4 episodes of 15 steps.

Until the goal is found, every step looks the same: it costs, and where it ends is known beforehand. The optimal search
is therefore a fixed walk, which starts again in every episode. Once the goal is found, it is optimal to stay, and in
later episodes to go straight to the goal. The walk was found by dynamic programming over visited cells and position
(commit db09b839): no policy without knowledge of the goal achieves a larger expected return of a trial.
"""

from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.envs.families.grids import ELSEWHERE, MOVES, ON_GOAL
from maml_rl.envs.observing import LastStepParts
from maml_rl.policies.classical.counting import CountingPolicy
from maml_rl.policies.heads import Params
from maml_rl.policies.policy import Memory

WIDTH = HEIGHT = 5
# Expected return of each episode.
OPTIMUM = 4.0, 155 / 14, 155 / 14, 155 / 14
# Moves of the first two episodes, as in `MOVES`; they pass all cells with a goal. Then it stays.
_WALK = "222214414122234", "111122224444333", "0" * 15


class BayesOptimalGridNavi(CountingPolicy):
    """Searches the goal of `GridNavi-v0` on the optimal walk, and goes straight to it once it is known."""

    actions: Tensor

    def __init__(self) -> None:
        super().__init__(len(MOVES), ties="first")
        # A buffer, so that it moves with the device.
        self.register_buffer("actions", torch.tensor([[int(move) for move in episode] for episode in _WALK]))

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
        last = torch.tensor([WIDTH - 1, HEIGHT - 1], device=cell.device)
        led = torch.minimum((cell + moves[actions]).clamp(min=0), last)
        return actions, (torch.cat((episode.unsqueeze(-1), step.unsqueeze(-1), goal, led), -1),)

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Also refuse another grid; see `CountingPolicy.check_spaces`."""
        super().check_spaces(observation_space, action_space)
        own = LastStepParts.within(observation_space, action_space).observation
        assert isinstance(observation_space, spaces.Box)
        high = observation_space.high[own].tolist()
        if high != [WIDTH - 1, HEIGHT - 1]:
            raise ValueError(
                f"{type(self).__name__} for a grid of {WIDTH} x {HEIGHT} cells does not fit observations up to {high}"
            )
