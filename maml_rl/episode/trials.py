"""Trials: the episodes of a slot, one after the other, as one sequence without gaps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maml_rl import functional
from maml_rl.episode.task_episodes import TaskEpisodes


def with_end(observations: Tensor, mask: Tensor, last: Tensor) -> Tensor:
    """Return observations (L, N, ...) with one more after the last real step of each trial, (L + 1, N, ...).

    Args:
        observations: of N trials, padded at the end.
        mask: (L, N) 1 for real steps.
        last: (N, ...) the further ones.
    """
    longer = torch.cat((observations, torch.zeros_like(observations[:1])))
    longer[mask.sum(0).long(), torch.arange(len(last), device=longer.device)] = last.to(longer)
    return longer


@dataclass(frozen=True, slots=True)
class Trials:
    """N trials as sequences of at most L steps, padded with zeros at the end.

    Attributes:
        observations: (L, N, *observation shape).
        actions: (L, N, *action shape).
        rewards: (L, N) float32.
        log_probs: (L, N) log-probabilities recorded while sampling; None if they were not.
        mask: (L, N) float32, 1 for real steps.
        episodes: (L, N) int64 number of the episode within the trial that each step belongs to.
        places: (N, L) int64, index of each step in the flattened (M, T, B); for padding, the index of a padded step.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    log_probs: Tensor | None
    mask: Tensor
    episodes: Tensor
    places: Tensor

    def with_end(self, last: Tensor) -> Tensor:
        """Return the observations with one more after the last real step of each trial, (L + 1, N, ...).

        Args:
            last: (N, *observation shape).
        """
        return with_end(self.observations, self.mask, last)

    @classmethod
    def of(cls, episodes: TaskEpisodes, slots_per_task: int = 1) -> Trials:
        """Concatenate episodes (M, T, B, ...): those of slot s of a task are s, s + S, s + 2 S, ...

        Args:
            episodes: of M tasks.
            slots_per_task: S, a divisor of B; N = M * S. With S = B every episode is a sequence of its own.

        Raises:
            ValueError: If S does not divide B.
        """
        num_tasks, steps, per_task = episodes.rewards.shape
        if per_task % slots_per_task:
            raise ValueError(f"slots_per_task must divide the {per_task} episodes of a task, got {slots_per_task}")
        waves = per_task // slots_per_task

        def by_slot(grid: Tensor) -> Tensor:
            """Return (M, T, B) as (N, waves * T)."""
            sequences = grid.reshape(num_tasks, steps, waves, slots_per_task).permute(0, 3, 2, 1)
            return sequences.reshape(num_tasks * slots_per_task, waves * steps)

        places = torch.arange(episodes.mask.numel(), device=episodes.device).reshape(episodes.mask.shape)
        real, places = by_slot(episodes.mask), by_slot(places)
        longest = int(real.sum(1).max())
        if not bool(real.all()):
            # A stable sort keeps the order of the steps and moves padding to the end.
            order = torch.argsort(real, dim=1, descending=True, stable=True)[:, :longest]
            real, places = real.gather(1, order), places.gather(1, order)

        def of_steps(values: Tensor) -> Tensor:
            return values.flatten(0, 2)[places.mT]

        return cls(
            of_steps(episodes.observations),
            of_steps(episodes.actions),
            of_steps(episodes.rewards),
            None if episodes.log_probs is None else of_steps(episodes.log_probs),
            real.mT.contiguous(),
            (places % per_task // slots_per_task).mT,
            places,
        )

    def returns(self, gamma: float) -> Tensor:
        """Return the discounted sum of the rewards from each step to the end of its trial, (L, N).

        The sum continues across the ends of episodes, so that exploration in one is credited with what it gains in the
        next.
        """
        return functional.discounted_returns(self.rewards, self.mask, discount=gamma)

    def advantages(self, values: Tensor, gamma: float, gae_lambda: float, final_values: Tensor | None = None) -> Tensor:
        """Estimate advantages by GAE through the trial, (L, N), not normalized.

        The end of an episode is an ordinary step.

        Args:
            values: (L, N), estimates of `returns`.
            gamma: discount per step, in [0, 1].
            gae_lambda: in [0, 1].
            final_values: (N,), of the state after the trial, zero where it is terminal; None if it always is.

        Source: Duan et al. 2016, section 2.2, https://arxiv.org/abs/1611.02779
        """
        lengths = self.mask.sum(0).long()
        # In float64 the recursion neither loses precision nor overflows.
        final = torch.zeros_like(values[0]) if final_values is None else final_values
        following = functional.next_values(values.double(), final.double(), lengths)
        return functional.generalized_advantages(
            self.rewards.double(), values.double(), following, self.mask, discount=gamma, gae_lambda=gae_lambda
        ).to(values.dtype)

    def as_episodes(self, values: Tensor, like: TaskEpisodes) -> Tensor:
        """Return per-step values (L, N) in the layout of the episodes: (M, T, B), zero on padding.

        Args:
            values: one number for each step.
            like: the episodes from which the trials were made.
        """
        flat = values.new_zeros(like.mask.numel())
        flat[self.places] = (values * self.mask).mT
        return flat.reshape(like.mask.shape)
