"""Small parts of the contract that all vector environments share."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from maml_rl.envs.meta_env import StepBuffers, slot_seeds
from maml_rl.spaces import array_layout


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (spaces.Box(-1.0, 1.0, (3,), np.float64), (3,), np.float64),
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), (8, 8, 3), np.uint8),
        (spaces.Box(-1.0, 1.0, (), np.float32), (), np.float32),
        (spaces.Discrete(7, start=2), (), np.int64),
    ],
)
def test_buffers_have_the_shape_and_dtype_of_the_space(space: Any, shape: tuple[int, ...], dtype: Any) -> None:
    assert array_layout(space) == (shape, np.dtype(dtype))
    buffers = StepBuffers.allocate(space, 5)
    assert (buffers.observations.shape, buffers.observations.dtype) == ((5, *shape), dtype)
    assert (buffers.rewards.shape, buffers.rewards.dtype) == ((5,), np.float64)
    for flags in (buffers.terminated, buffers.truncated):
        assert (flags.shape, flags.dtype) == ((5,), np.bool_)
    assert buffers.observations.itemsize * buffers.observations.size == buffers.observations.nbytes


def test_slot_seeds_follow_gymnasium() -> None:
    assert slot_seeds(None, 3) == [None, None, None]
    assert slot_seeds(0, 3) == [0, 1, 2]
    assert slot_seeds(np.int64(4), 2) == [4, 5]
    assert slot_seeds([7, None, 0], 3) == [7, None, 0]
    assert slot_seeds(np.array([2**63 - 1]), 1) == [2**63 - 1]
