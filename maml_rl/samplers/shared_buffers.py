"""Lock-free shared arrays between parent and children: every child owns a slice, and no place has two writers at once.

The memory is anonymous (a memfd on Linux, elsewhere a temporary file that is deleted while open): nothing is left
behind whoever dies, and a small /dev/shm, as containers have it, is no limit.
"""

import mmap
import os
import tempfile
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.envs.meta_env import StepBuffers, array_layout
from maml_rl.errors import ChildEnvError

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

    Attributes:
        step: what children write at every reset and step.
        actions: (N, *act), written by the parent before a step.
        seeds: (N,) int64, written by the parent before a reset.
        physics_seconds: (W,) seconds that each child has spent stepping and resetting.
        current_slots: (W,) slot, counted within the child, that the child works on; -1 for none or all of them.

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
    ) -> None:
        observation_shape, observation_dtype = array_layout(observation_space)
        action_shape, action_dtype = array_layout(action_space)
        layout: list[tuple[tuple[int, ...], np.dtype[Any]]] = [
            ((num_envs, *observation_shape), observation_dtype),
            ((num_envs, *action_shape), action_dtype),
            ((num_envs,), np.dtype(np.float64)),
            ((num_envs,), np.dtype(np.bool_)),
            ((num_envs,), np.dtype(np.bool_)),
            ((num_envs,), np.dtype(np.int64)),
            ((num_children,), np.dtype(np.float64)),
            ((num_children,), np.dtype(np.int64)),
        ]
        offsets, size = [], 0
        for shape, dtype in layout:
            offsets.append(size)
            # Python integers: the size of an absurd request must not wrap around.
            num_bytes = dtype.itemsize
            for length in shape:
                num_bytes *= length
            size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        memory = _map(file, size, f"{num_envs} slots of {observation_space}")
        arrays: list[NDArray[Any]] = [
            np.ndarray(shape, dtype, buffer=memory, offset=offset)
            for (shape, dtype), offset in zip(layout, offsets, strict=True)
        ]
        observations, self.actions, rewards, terminated, truncated, *rest = arrays
        self.step = StepBuffers(observations, rewards, terminated, truncated)
        self.seeds, self.physics_seconds, self.current_slots = rest

    def part(self, slots: slice) -> StepBuffers:
        """Return the views of a range of slots."""
        return StepBuffers(
            observations=self.step.observations[slots],
            rewards=self.step.rewards[slots],
            terminated=self.step.terminated[slots],
            truncated=self.step.truncated[slots],
        )


def _map(file: int, size: int, purpose: str) -> mmap.mmap:
    try:
        if hasattr(os, "posix_fallocate"):
            # Reserves the pages now: a file that is only lengthened would end the process by SIGBUS when they run out.
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
        return mmap.mmap(file, size)
    except (OSError, OverflowError, ValueError) as error:
        raise ChildEnvError(
            f"cannot get {size / 2**20:.1f} MiB of shared memory for {purpose}: {error}; free some, or use fewer slots"
        ) from error
