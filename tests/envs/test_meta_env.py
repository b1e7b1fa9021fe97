"""Small parts of the contract that all vector environments share."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from maml_rl.envs.meta_env import StepBuffers, low_seeds, read_reset_mask, slot_seeds


def test_slot_seeds_follow_gymnasium() -> None:
    assert slot_seeds(None, 3) == [None, None, None]
    assert slot_seeds(0, 3) == [0, 1, 2]
    assert slot_seeds(np.int64(4), 2) == [4, 5]
    assert slot_seeds([7, None, 0], 3) == [7, None, 0]
    assert slot_seeds(np.array([2**63 - 1]), 1) == [2**63 - 1]
    assert low_seeds([2**40 + 5, 2**32 + 2**31], 2**31 - 1) == [5, 0]


@pytest.mark.parametrize("seed", [-1, [0, 1], [0, -3, 2], [0.5, 1.5, 2.5], 2**63, ["0", "1", "2"]], ids=str)
def test_bad_seed_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed"):
        slot_seeds(seed, 3)


@pytest.mark.parametrize("mask", [[True], [False] * 3, [1, 0, 0]], ids=str)
def test_bad_reset_mask_is_refused(mask: Any) -> None:
    with pytest.raises(ValueError, match=r"reset_mask must be a boolean array of shape \(3,\)"):
        read_reset_mask({"reset_mask": np.array(mask)}, 3)


def test_episode_begins_in_the_buffers_of_its_slots_alone() -> None:
    buffers = StepBuffers.allocate(spaces.Discrete(3), 3, {"success": "episode"})
    for array in (buffers.rewards, buffers.terminated, buffers.truncated, buffers.restarted, buffers.infos["success"]):
        array[:] = 1
    buffers.part(slice(1, 3)).begin(np.array([True, False]), restarted=True)
    assert buffers.rewards.tolist() == [1.0, 0.0, 1.0]
    assert buffers.terminated.tolist() == buffers.truncated.tolist() == buffers.over.tolist() == [True, False, True]
    buffers.begin(0)
    assert buffers.restarted.tolist() == [False, True, True]
    np.testing.assert_array_equal(buffers.infos["success"], [np.nan, np.nan, 1.0])
