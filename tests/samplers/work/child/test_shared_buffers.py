"""Shared arrays: the right types and shapes, and one memory for all processes that map it."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from gymnasium import spaces

from maml_rl.envs.meta_env import EnvDescription
from maml_rl.errors import ChildEnvError
from maml_rl.samplers.work.child.shared_buffers import SharedBuffers, SharedProgress, create_shared_file

PICTURES = spaces.Box(0, 255, (4, 3), np.uint8)
ENV = EnvDescription(PICTURES, spaces.Discrete(5), None, {})


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = create_shared_file()
    yield descriptor
    os.close(descriptor)


def test_arrays_have_the_types_of_their_spaces_and_no_extra_bytes(file: int) -> None:
    progress = SharedProgress(file, 2)
    shared = SharedBuffers(file, progress.size, ENV, 7)
    assert shared.step.observations.dtype == np.uint8
    assert shared.step.observations.nbytes == 7 * 4 * 3
    assert shared.step.observations.shape == (7, 4, 3)
    assert shared.actions.dtype == np.int64
    assert shared.actions.shape == (7,)
    assert shared.step.rewards.dtype == np.float64
    assert shared.step.terminated.dtype == shared.step.truncated.dtype == np.bool_
    assert progress.physics_seconds.shape == progress.current_slots.shape == (2,)
    everything = (
        shared.step.observations,
        shared.actions,
        shared.step.rewards,
        shared.step.terminated,
        shared.step.truncated,
        shared.seeds,
        progress.physics_seconds,
        progress.current_slots,
    )
    for index, array in enumerate(everything):
        assert not array.any()
        assert not any(np.shares_memory(array, other) for other in everything[:index])
        assert array.ctypes.data % 64 == 0


@pytest.mark.parametrize("num_envs", [10**12, 10**30])
def test_absurd_size_is_a_clear_error(file: int, num_envs: int) -> None:
    with pytest.raises(
        ChildEnvError, match=r"cannot get \d+\.\d MiB of shared memory for 10+ slots of Box.*more memory than"
    ):
        SharedBuffers(file, 0, ENV, num_envs)
