"""Steps: named tensors with common leading axes, of transitions, of trials, or of the episodes of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from maml_rl import functional
from maml_rl.arrays import to_device
from maml_rl.episode.task_episodes import TaskEpisodes

# Before the name of an info among the names of tensors.
INFO = "info "
_UNKNOWN: Any = None


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps with common leading axes; unknown fields are None, padding is zero.

    (num,) or (M, num) are transitions; (L, N) trials, or other sequences of at most L steps, padded at their ends;
    (k, T, B) the episodes of k tasks.

    Attributes:
        observations: (..., *observation shape), seen before each action.
        actions: (..., *action shape).
        rewards: (...).
        next_observations: (..., *observation shape), seen after each action: the final one after an episode's last.
        terminations: (...) bool, whether a step led to a terminal state.
        truncations: (...) bool, whether the episode was cut off after a step.
        mask: (...) 1 for real steps, 0 for padding.
        log_probs: (...) log-probabilities recorded while sampling.
        advantages: (...).
        episodes: (L, N) int64 number of the episode within its trial or history.
        places: (N, L) int64, index of each step of a trial in the flattened (M, T, B); for padding that of a padded
            step.
        tasks: (k,) or (N,) int64 number of the task of each.
        infos: (...) float32 by name, those that the environments report at every step.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor = _UNKNOWN
    terminations: Tensor = _UNKNOWN
    truncations: Tensor = _UNKNOWN
    mask: Tensor = _UNKNOWN
    log_probs: Tensor | None = None
    advantages: Tensor = _UNKNOWN
    episodes: Tensor = _UNKNOWN
    places: Tensor = _UNKNOWN
    tasks: Tensor = _UNKNOWN
    infos: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Steps:
        """Return the steps of tensors by the names that `tensors` gives them."""
        infos = {name.removeprefix(INFO): tensor for name, tensor in tensors.items() if name.startswith(INFO)}
        return cls(**{name: tensor for name, tensor in tensors.items() if not name.startswith(INFO)}, infos=infos)

    def tensors(self) -> dict[str, Tensor]:
        """Return the known fields by name, then the infos."""
        known = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "infos"}
        known = {name: tensor for name, tensor in known.items() if tensor is not None}
        return known | {f"{INFO}{name}": tensor for name, tensor in self.infos.items()}

    def map(self, function: Callable[[Tensor], Tensor]) -> Steps:
        """Apply a function to every tensor."""
        return Steps.of({name: function(tensor) for name, tensor in self.tensors().items()})

    def to(self, device: torch.device | str) -> Steps:
        """Return the same steps on `device`."""
        return self.map(lambda values: to_device(values, torch.device(device)))

    @property
    def weights(self) -> Tensor:
        """(k, T, B) weight of each step in the mean over its task's real steps."""
        return self.mask / self.mask.sum((1, 2), keepdim=True).clamp(min=1.0)

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Return the lengths (N,) of whole trials, and their numbers."""
        return self.mask.sum(0).long(), torch.arange(self.mask.shape[1], device=self.mask.device)

    def with_end(self, last: Tensor | None = None) -> Tensor:
        """Return the observations of whole trials, and one more after the last real step of each, (L + 1, N, ...).

        Within a trial the observation after the end of an episode is the first of the next one: to a policy with a
        memory the end of an episode is a step like others.

        Args:
            last: (N, *observation shape), the further ones; None for those of `next_observations`.
        """
        lengths, columns = self._ends()
        if last is None:
            last = self.next_observations[lengths - 1, columns]
        longer = torch.cat((self.observations, torch.zeros_like(self.observations[:1])))
        longer[lengths, columns] = last.to(longer)
        return longer

    def terminal_ends(self) -> Tensor:
        """Return (L, N) 1 where the last step of a trial led to a terminal state."""
        lengths, columns = self._ends()
        terminal, last = torch.zeros_like(self.rewards), lengths - 1
        terminal[last, columns] = self.terminations[last, columns].to(terminal.dtype)
        return terminal

    @classmethod
    def of_tasks(
        cls,
        episodes: TaskEpisodes,
        tasks: slice = slice(None),
        *,
        columns: Tensor | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Steps:
        """Take the steps of the episodes of some tasks, (k, T, B), that losses and derivatives are computed from.

        Args:
            episodes: of all tasks, with advantages.
            tasks: which of them.
            columns: indices of the episodes to take of each task; all by default.
            dtype: of everything except observations and actions, which keep theirs.
            device: where to put them.
        """
        lengths = episodes.lengths[tasks]
        lengths = lengths if columns is None else lengths[:, columns]
        steps = int(lengths.max())
        real = torch.arange(steps, device=lengths.device).reshape(1, -1, 1) < lengths.unsqueeze(1)
        complete = bool(real.all())

        def take(values: Tensor) -> Tensor:
            values = values[tasks, :steps]
            values = values if columns is None else values[:, :, columns]
            if not complete:
                # The contents of the padding, NaN included, must not reach a matrix product.
                values = values.masked_fill(~real.reshape(*real.shape, *(1,) * (values.dim() - 3)), 0)
            return values.to(device)

        return cls(
            observations=take(episodes.observations),
            actions=take(episodes.actions),
            rewards=take(episodes.rewards).to(dtype),
            advantages=take(episodes.advantages).to(dtype),
            mask=real.to(device, dtype),
            log_probs=None if episodes.log_probs is None else take(episodes.log_probs).to(dtype),
            tasks=torch.arange(len(episodes), device=device)[tasks] + episodes.first_task,
        )

    @classmethod
    def of_trials(cls, episodes: TaskEpisodes, slots_per_task: int = 1) -> Steps:
        """Concatenate episodes (M, T, B, ...) to trials (L, N): those of slot s of a task are s, s + S, s + 2 S, ...

        Args:
            episodes: of M tasks.
            slots_per_task: S, a divisor of B; N = M * S. With S = B every episode is a sequence of its own.

        Raises:
            ValueError: If S does not divide B.
        """
        real, places = trial_places(episodes.mask, slots_per_task)

        def of_steps(values: Tensor) -> Tensor:
            return values.flatten(0, 2)[places.mT]

        return cls(
            observations=of_steps(episodes.observations),
            actions=of_steps(episodes.actions),
            rewards=of_steps(episodes.rewards),
            log_probs=None if episodes.log_probs is None else of_steps(episodes.log_probs),
            mask=real.mT.contiguous(),
            episodes=(places % episodes.mask.shape[2] // slots_per_task).mT,
            places=places,
        )

    def returns(self, gamma: float) -> Tensor:
        """Return the discounted sum of the rewards from each step to the end of its trial, (L, N).

        The sum continues across the ends of episodes, so that exploration in one is credited with what it gains in the
        next.
        """
        return functional.discounted_returns(self.rewards, self.mask, discount=gamma)

    def trial_advantages(
        self, values: Tensor, gamma: float, gae_lambda: float, final_values: Tensor | None = None
    ) -> Tensor:
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


def trial_places(mask: Tensor, slots_per_task: int = 1) -> tuple[Tensor, Tensor]:
    """Return where the steps of trials are in episodes: their mask (N, L), and `Steps.places`, of the same shape.

    Args:
        mask: (M, T, B), of the episodes of M tasks.
        slots_per_task: see `Steps.of_trials`.

    Raises:
        ValueError: If it does not divide B.
    """
    num_tasks, steps, per_task = mask.shape
    if per_task % slots_per_task:
        raise ValueError(f"slots_per_task must divide the {per_task} episodes of a task, got {slots_per_task}")
    waves = per_task // slots_per_task

    def by_slot(grid: Tensor) -> Tensor:
        """Return (M, T, B) as (N, waves * T)."""
        sequences = grid.reshape(num_tasks, steps, waves, slots_per_task).permute(0, 3, 2, 1)
        return sequences.reshape(num_tasks * slots_per_task, waves * steps)

    real, places = by_slot(mask), by_slot(torch.arange(mask.numel(), device=mask.device).reshape(mask.shape))
    longest = int(real.sum(1).max())
    if not bool(real.all()):
        # A stable sort keeps the order of the steps and moves padding to the end.
        order = torch.argsort(real, dim=1, descending=True, stable=True)[:, :longest]
        real, places = real.gather(1, order), places.gather(1, order)
    return real, places
