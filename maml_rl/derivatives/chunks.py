"""How a batch of tasks is cut into chunks, on which losses and derivatives are computed at once."""

import math
from collections.abc import Sequence

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
