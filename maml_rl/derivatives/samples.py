"""The part of some tasks' episodes that losses and derivatives are computed from, and how it is cut into chunks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maml_rl.episode.task_episodes import TaskEpisodes

# Samples times width of one chunk on a CPU. Below the first, Python takes longer for the calls than the cores for the
# arithmetic; from the second on, with arrays of two megabytes, larger chunks gain nothing more.
_CPU_CHUNK = 1 << 17, 1 << 19
# Between the two, a batch is cut into at least this many chunks, so that as many cores can share them.
_CPU_CHUNKS = 8
# On an accelerator small chunks only cost launches; the limit is its memory.
_DEVICE_CHUNK = 1 << 26


@dataclass(frozen=True, slots=True)
class Samples:
    """Steps of k tasks, on the device and in the precision of the computation; padding is zero.

    Attributes:
        observations: (k, T, B, *observation shape).
        actions: (k, T, B, *action shape).
        rewards: (k, T, B).
        advantages: (k, T, B).
        mask: (k, T, B) 1 for real steps, 0 for padding.
        log_probs: (k, T, B) log-probabilities recorded while sampling, or None.
        tasks: (k,) numbers of the tasks in their batch.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    advantages: Tensor
    mask: Tensor
    log_probs: Tensor | None
    tasks: Tensor

    @classmethod
    def of(
        cls,
        episodes: TaskEpisodes,
        tasks: slice,
        *,
        columns: Tensor | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Samples":
        """Take the samples of some tasks.

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

    @property
    def weights(self) -> Tensor:
        """(k, T, B) weight of each step in the mean over its task's real steps."""
        return self.mask / self.mask.sum((1, 2), keepdim=True).clamp(min=1.0)


def cut(num_tasks: int, samples_per_task: int, width: int, device: torch.device) -> list[slice]:
    """Cut a batch of tasks into chunks that are large enough for the cores; it depends on nothing but the arguments.

    Args:
        num_tasks: M.
        samples_per_task: T * B, of the longest possible episodes: the chunks are known before anything is sampled.
        width: number of outputs of the widest layer.
        device: where the computation runs.

    Returns:
        Slices of tasks, in order and of almost equal length.
    """
    width_of_task = max(1, samples_per_task * width)
    if device.type == "cpu":
        smallest, largest = (max(1, room // width_of_task) for room in _CPU_CHUNK)
        size = min(largest, max(smallest, math.ceil(num_tasks / _CPU_CHUNKS)))
    else:
        size = max(1, _DEVICE_CHUNK // width_of_task)
    return even_chunks(num_tasks, size)


def even_chunks(num_tasks: int, size: int) -> list[slice]:
    """Cut a batch of tasks into chunks of at most `size` tasks: slices in order and of almost equal length."""
    count = math.ceil(num_tasks / size)
    if count > 2:  # A multiple of four keeps two or four cores busy to the end.
        count = min(num_tasks, 4 * math.ceil(count / 4))
    return [slice(num_tasks * index // count, num_tasks * (index + 1) // count) for index in range(count)]


def chunks_of(phases: Sequence[TaskEpisodes], width: int, device: torch.device) -> list[slice]:
    """Cut an update's tasks into the chunks in which all of it is computed, the adaptation included; see `cut`."""
    if phases[0].chunks is not None:
        return list(phases[0].chunks)
    samples_per_task = max(episodes.horizon * episodes.rewards.shape[2] for episodes in phases)
    return cut(len(phases[0]), samples_per_task, width, device)


def number_kept(count: int, fraction: float) -> int:
    """Return how many `every_nth` keeps, at least 1."""
    return max(1, round(fraction * count))


def every_nth(count: int, fraction: float) -> Tensor | None:
    """Return the indices of a `fraction` of `count` episodes, evenly spread; None for all of them."""
    kept = number_kept(count, fraction)
    return None if kept == count else torch.arange(kept) * count // kept
