"""Lock-free shared arrays of parent and workers: every worker owns a slice, and no place has two writers at once.

The memory is anonymous (a memfd on Linux, elsewhere a temporary file that is deleted while open): nothing is
left behind when a process dies, and a small /dev/shm, as in containers, is not a limit.
"""

import errno
import math
import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.meta_env import EnvDescription, StepBuffers
from maml_rl.errors import ChildEnvError
from maml_rl.machine import available_memory
from maml_rl.samplers.episode_arrays import EpisodeArrays, Layout
from maml_rl.samplers.worker_progress import Progress
from maml_rl.spaces import array_layout

# Arrays start on cache lines of their own.
_ALIGNMENT = 64


def create_shared_file() -> int:
    """Return the descriptor of an empty anonymous file, for `SharedProgress` and `SharedBuffers` of all processes."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("maml_rl", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedProgress(Progress):
    """The progress of W workers in memory that all processes share. It is there before any environment is made.

    Attributes:
        size: bytes of all, up to where other arrays may begin.
    """

    def __init__(self, file: int, num_workers: int) -> None:
        arrays, self.size = map_arrays(file, 0, self.layout(num_workers), f"the progress of {num_workers} workers")
        super().__init__(arrays)


class SharedBuffers:
    """The arrays that a vector environment and its workers share, over N slots.

    Attributes:
        step: what workers write at every reset and step.
        actions: (N, *act), written by the parent before a step.
        seeds: (N,) int64, written by the parent before a reset.
        size: bytes of the file up to where other arrays may begin.
    """

    def __init__(self, file: int, start: int, env: EnvDescription, num_envs: int) -> None:
        observation_shape, observation_dtype = array_layout(env.observation_space)
        action_shape, action_dtype = array_layout(env.action_space)
        real, flag = np.dtype(np.float64), np.dtype(np.bool_)
        layout: Layout = {
            "observations": ((num_envs, *observation_shape), observation_dtype),
            "rewards": ((num_envs,), real),
            "terminated": ((num_envs,), flag),
            "truncated": ((num_envs,), flag),
            "restarted": ((num_envs,), flag),
            "actions": ((num_envs, *action_shape), action_dtype),
            "seeds": ((num_envs,), np.dtype(np.int64)),
            **{f"info {name}": ((num_envs,), real) for name in env.recorded_infos},
        }
        arrays, self.size = map_arrays(file, start, layout, f"{num_envs} slots of {env.observation_space}")
        self.actions, self.seeds = arrays.pop("actions"), arrays.pop("seeds")
        infos = {name: arrays.pop(f"info {name}") for name in env.recorded_infos}
        self.step = StepBuffers(**arrays, infos=infos)


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The properties of a phase that determine where its arrays are in the shared file.

    Attributes:
        sizes: M, B and T.
        parameters: layout of the policy's parameters, each (M, ...) or as the policy's own.
        constants: layout of the policy's constants (the buffers of its modules), the same for all tasks.
        is_stacked: whether every task has its own parameters, (M, ...).
        num_phases: how many phases' episodes are there at once.
    """

    sizes: tuple[int, int, int]
    parameters: Layout
    constants: Layout
    is_stacked: bool = True
    num_phases: int = 1


class SharedPhase:
    """Arrays in the shared file. The parent writes the parameters, each worker the episodes of its units.

    Attributes:
        parameters: {name: (M, ...)}, or as the policy's own.
        constants: {name: array}.
        episodes: of each phase, (M, T, B, ...), valid until the next phase of this number begins.
    """

    def __init__(self, file: int, start: int, plan: PhasePlan, env: EnvDescription) -> None:
        sizes = plan.sizes
        episodes, phases = EpisodeArrays.layout(env, *sizes), range(plan.num_phases)
        kinds = {"parameter": plan.parameters, "constant": plan.constants}
        kinds |= {f"episodes of phase {phase}": episodes for phase in phases}
        layout = {f"{kind} {name}": entry for kind, of_kind in kinds.items() for name, entry in of_kind.items()}
        arrays, _ = map_arrays(
            file, start, layout, f"episodes of {len(phases)} x {sizes[0]} x {sizes[1]} x {sizes[2]} steps"
        )
        self.parameters, self.constants, *by_name = (
            {name: arrays[f"{kind} {name}"] for name in of_kind} for kind, of_kind in kinds.items()
        )
        self.episodes = [EpisodeArrays.of(each) for each in by_name]


def map_arrays(file: int, start: int, layout: Layout, purpose: str) -> tuple[dict[str, NDArray[Any]], int]:
    """Map arrays into this process, one after the other from byte `start` of a file, which grows as needed.

    Args:
        file: descriptor from `create_shared_file`.
        start: 0, or the end of other arrays.
        layout: of the arrays.
        purpose: for messages.

    Returns:
        The arrays, and where others may begin.
    """
    offsets, size = [], 0
    for shape, dtype in layout.values():
        offsets.append(size)
        # Python integers: the size of an absurd request must not wrap around.
        num_bytes = dtype.itemsize * math.prod(int(length) for length in shape)
        size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    memory = _map(file, start, max(size, 1), purpose)
    arrays: dict[str, NDArray[Any]] = {
        name: np.ndarray(shape, dtype, buffer=memory, offset=offset)
        for (name, (shape, dtype)), offset in zip(layout.items(), offsets, strict=True)
    }
    return arrays, start + -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _map(file: int, start: int, size: int, purpose: str) -> mmap.mmap:
    try:
        left = available_memory()
        if left is not None and start + size - os.fstat(file).st_size > left:
            # The kernel would end processes before it refuses.
            raise OSError(errno.ENOMEM, f"that is more memory than the {left / 2**20:.1f} MiB that are left")
        if hasattr(os, "posix_fallocate"):
            # Reserves the pages now: a file that is only lengthened would end the process by SIGBUS when they run out.
            os.posix_fallocate(file, start, size)
        else:
            os.ftruncate(file, max(start + size, os.fstat(file).st_size))
        return mmap.mmap(file, size, offset=start)
    except OSError as error:
        raise ChildEnvError(
            f"cannot get {size / 2**20:.1f} MiB of shared memory for {purpose}: {error}; free some, or use fewer slots "
            "(slots_per_task), shorter episodes or smaller observations"
        ) from error
