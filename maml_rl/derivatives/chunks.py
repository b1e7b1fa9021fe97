"""How a batch of tasks is cut into chunks, and threads that work on them: one per core, with memory that it reuses."""

import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self, TypeVar

import torch
from torch import Tensor

from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.machine import chunk_threads, single_threaded

Item = TypeVar("Item")
Result = TypeVar("Result")

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
    number = number_kept(count, fraction)
    return None if number == count else torch.arange(number) * count // number


def sum_of_chunks(of_chunks: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, added one after the other."""
    return functools.reduce(torch.add, of_chunks)


def set_gradients(params: Sequence[Tensor], of_chunks: Iterable[Sequence[Tensor | None]]) -> None:
    """Give each parameter the sum of the chunks' gradients, which are None where a loss does not depend on it."""
    for param, gradients in zip(params, zip(*of_chunks, strict=True), strict=True):
        known = [gradient for gradient in gradients if gradient is not None]
        param.grad = sum_of_chunks(known) if known else None


class Workspace:
    """Named arrays that are allocated once: the pages of a fresh one cost more than the arithmetic on it."""

    def __init__(self) -> None:
        self._arrays: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an array of undefined content, with the dtype and device of `like`.

        It is valid until the same name is taken again.
        """
        size = math.prod(shape)
        array = self._arrays.get(name)
        if array is None or array.numel() < size or array.dtype != like.dtype or array.device != like.device:
            self._arrays[name] = array = torch.empty(size, dtype=like.dtype, device=like.device)
        return array[:size].view(shape)


_here = threading.local()


def scratch() -> Workspace:
    """Return the arrays that the calling thread reuses for intermediate results, until its `ChunkWorkers` end."""
    if not hasattr(_here, "arrays"):
        _here.arrays = Workspace()
    arrays: Workspace = _here.arrays
    return arrays


class ChunkWorkers:
    """Threads that work on chunks of tasks, `chunk_threads` of them or as many as there may be.

    Inside the `with` block torch computes every operation on one core, and the chunks run in parallel: that is faster
    than cutting every operation in two, and makes the results independent of the number of cores. On leaving, the
    caller's number of threads is restored.

    Args:
        device: where the computation runs; on an accelerator there is nothing to share out, and no thread is started.
        most: how many there may be: threads that call many small operations wait for Python's lock.
    """

    def __init__(self, device: torch.device, most: int | None = None) -> None:
        self._device, self._most = device, most
        self._stack = ExitStack()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cpu":
            count = chunk_threads() if self._most is None else min(chunk_threads(), self._most)
            self._stack.enter_context(single_threaded())
            if count > 1:
                self._pool = ThreadPoolExecutor(count, "maml_rl-update", initializer=_compute_on_one_core)
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        _here.__dict__.clear()
        self._stack.close()

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return `function(item)` for every item, in order, without gradient recording; or raise the first error."""

        def run(item: Item) -> Result:
            with torch.no_grad():
                return function(item)

        items = list(items)
        if self._pool is None or len(items) < 2:
            return [run(item) for item in items]
        return list(self._pool.map(run, items))


def _compute_on_one_core() -> None:
    """Give a new thread its number of torch threads."""
    # Until it asks for the first time it would take that of the process, which other threads change.
    torch.get_num_threads()
    torch.set_num_threads(1)
