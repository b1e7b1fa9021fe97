"""The tasks that several bodies share: every body has its own range, and draws from it."""

import inspect

import numpy as np
import pytest

from maml_rl.envs.mujoco.ant import AntDirVectorEnv, AntVelVectorEnv
from maml_rl.envs.mujoco.planar import (
    HalfCheetahDirVectorEnv,
    HalfCheetahVelVectorEnv,
    HopperVelVectorEnv,
    SwimmerVelVectorEnv,
    Walker2DDirVectorEnv,
    Walker2DVelVectorEnv,
)

RANGES = {
    HalfCheetahVelVectorEnv: (0.0, 2.0),
    AntVelVectorEnv: (0.0, 3.0),
    Walker2DVelVectorEnv: (0.0, 2.0),
    HopperVelVectorEnv: (0.0, 2.0),
    SwimmerVelVectorEnv: (0.1, 0.2),
}


@pytest.mark.parametrize("family", RANGES)
def test_velocities_are_drawn_from_the_range_of_the_body(family):
    low, high = RANGES[family]
    parameters = inspect.signature(family).parameters
    assert list(parameters) == ["num_envs", "low", "high", "options"]
    assert (parameters["num_envs"].default, parameters["low"].default, parameters["high"].default) == (1, low, high)
    drawn = family().draw_tasks(np.random.default_rng(0), 5)
    assert drawn == [{"velocity": velocity} for velocity in np.random.default_rng(0).uniform(low, high, 5)]
    assert f"[{low:g}, {high:g}]" in family.task_description
    narrow = family(low=5.0, high=5.5).draw_tasks(np.random.default_rng(0), 50)
    assert all(5.0 <= task["velocity"] < 5.5 for task in narrow)
    with pytest.raises(ValueError, match=r"low must be below high, got 2\.0 and 1\.0"):
        family(low=2.0, high=1.0)


@pytest.mark.parametrize("family", [HalfCheetahDirVectorEnv, AntDirVectorEnv, Walker2DDirVectorEnv])
def test_directions_are_drawn_in_the_same_way_for_every_body(family):
    assert list(inspect.signature(family).parameters) == ["num_envs", "options"]
    signs = 2.0 * np.random.default_rng(0).integers(2, size=50) - 1.0
    assert family().draw_tasks(np.random.default_rng(0), 50) == [{"direction": sign} for sign in signs]
    with pytest.raises(ValueError, match="'direction' of a task must be -1 or 1, got 0"):
        family(task={"direction": 0.0})
