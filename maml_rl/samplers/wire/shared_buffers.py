"""Lock-free shared arrays between parent and children: every child owns a slice, and no place has two writers at once.

The memory is anonymous (a memfd on Linux, elsewhere a temporary file that is deleted while open): nothing is left
behind whoever dies, and a small /dev/shm, as containers have it, is no limit.
"""

import errno
import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.envs.meta_env import RecordedInfos, StepBuffers, array_layout
from maml_rl.errors import ChildEnvError

# Shape and type of an array, by its name.
Layout = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]

# Arrays start on cache lines of their own.
_ALIGNMENT = 64


def create_shared_file() -> int:
    """Return the descriptor of an empty anonymous file, to be given to children and later sized by `SharedBuffers`."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("maml_rl", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedBuffers:
    """The arrays that a vector environment and its children share, over N slots and W children.

    Args:
        file: descriptor from `create_shared_file`; it may be closed once all processes have mapped it.
        observation_space: of one slot.
        action_space: of one slot.
        num_envs: N.
        num_children: W.
        recorded_infos: of the environments.

    Attributes:
        step: what children write at every reset and step.
        actions: (N, *act), written by the parent before a step.
        seeds: (N,) int64, written by the parent before a reset.
        physics_seconds: (W,) seconds that each child has spent stepping and resetting.
        current_slots: (W,) slot, counted within the child, that the child works on; -1 for none or all of them.
        heartbeats: (W,) time, on the monotonic clock, at which each child began its latest reset or step of a phase
            that it samples by itself.
        progress: (W,) steps that it then had behind it; -1 for a reset.
        generation: (1,) of the parent's current work; who samples a phase of an earlier one can stop.
        size: bytes of all, up to where other arrays may begin.

    Raises:
        ChildEnvError: If the memory cannot be had.
        TypeError: If a space is neither Box nor Discrete.
    """

    def __init__(
        self,
        file: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        num_envs: int,
        num_children: int,
        recorded_infos: RecordedInfos = MappingProxyType({}),
    ) -> None:
        observation_shape, observation_dtype = array_layout(observation_space)
        action_shape, action_dtype = array_layout(action_space)
        whole, real, flag = np.dtype(np.int64), np.dtype(np.float64), np.dtype(np.bool_)
        layout: Layout = {
            "observations": ((num_envs, *observation_shape), observation_dtype),
            "actions": ((num_envs, *action_shape), action_dtype),
            "rewards": ((num_envs,), real),
            "terminated": ((num_envs,), flag),
            "truncated": ((num_envs,), flag),
            "seeds": ((num_envs,), whole),
            "physics_seconds": ((num_children,), real),
            "current_slots": ((num_children,), whole),
            "heartbeats": ((num_children,), real),
            "progress": ((num_children,), whole),
            "generation": ((1,), whole),
            **{f"info {name}": ((num_envs,), real) for name in recorded_infos},
        }
        arrays, self.size = map_arrays(file, 0, layout, f"{num_envs} slots of {observation_space}")
        step = {name: arrays.pop(name) for name in ("observations", "rewards", "terminated", "truncated")}
        infos = {name: arrays.pop(f"info {name}") for name in recorded_infos}
        self.step = StepBuffers(**step, infos=infos)
        self.actions, self.seeds, self.physics_seconds, self.current_slots, *rest = arrays.values()
        self.heartbeats, self.progress, self.generation = rest

    def part(self, slots: slice) -> StepBuffers:
        """Return the views of a range of slots."""
        return StepBuffers(
            observations=self.step.observations[slots],
            rewards=self.step.rewards[slots],
            terminated=self.step.terminated[slots],
            truncated=self.step.truncated[slots],
            infos={name: values[slots] for name, values in self.step.infos.items()},
        )


def map_arrays(file: int, start: int, layout: Layout, purpose: str) -> tuple[dict[str, NDArray[Any]], int]:
    """Map arrays into this process, one after the other from byte `start` of a file, which grows as needed.

    Args:
        file: descriptor from `create_shared_file`.
        start: 0, or the end of other arrays.
        layout: of the arrays.
        purpose: for messages.

    Returns:
        The arrays, and where others may begin.

    Raises:
        ChildEnvError: If the memory cannot be had.
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
        if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            # The kernel would end processes before it refuses.
            raise OSError(errno.ENOMEM, "that is more memory than this machine has")
        if hasattr(os, "posix_fallocate"):
            # Reserves the pages now: a file that is only lengthened would end the process by SIGBUS when they run out.
            os.posix_fallocate(file, start, size)
        else:
            os.ftruncate(file, max(start + size, os.fstat(file).st_size))
        return mmap.mmap(file, size, offset=start)
    except OSError as error:
        raise ChildEnvError(
            f"cannot get {size / 2**20:.1f} MiB of shared memory for {purpose}: {error}; free some, or use fewer slots"
        ) from error
