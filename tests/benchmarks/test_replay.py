"""The replay limit steps exactly the given trajectories."""

import copy
from dataclasses import replace
from pathlib import Path

import gymnasium.envs.mujoco
import mujoco
import numpy as np
import pytest

from benchmarks.replay import Replay, Trajectories

SUBSTEPS = 5


@pytest.fixture(scope="module")
def model():
    return mujoco.MjModel.from_xml_path(str(Path(gymnasium.envs.mujoco.__file__).parent / "assets" / "hopper.xml"))


@pytest.fixture
def trajectories(model):
    random = np.random.default_rng(0)
    lengths = np.array([4, 0, 7, 2, 7])
    return Trajectories(
        qpos=model.qpos0 + 0.01 * random.standard_normal((5, model.nq)),
        qvel=0.1 * random.standard_normal((5, model.nv)),
        controls=random.uniform(-1.0, 1.0, (5, 7, model.nu)).astype(np.float32),
        lengths=lengths,
    )


def final_state(model, trajectories, episode):
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = trajectories.qpos[episode], trajectories.qvel[episode]
    mujoco.mj_forward(model, data)
    for controls in trajectories.controls[episode, : trajectories.lengths[episode]]:
        data.ctrl[:] = controls
        mujoco.mj_step(model, data, SUBSTEPS)
    return data.qpos.copy(), data.qvel.copy()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("processes", [1, 3])
def test_replay_ends_in_the_final_state_of_each_episode_for_any_number_of_processes(model, trajectories, processes):
    replay = Replay(model, SUBSTEPS, processes)
    try:
        replay.load(trajectories)
        assert replay.run() > 0.0
        first = replay.final_states()
        replay.run()
        second = replay.final_states()
    finally:
        replay.close()
    expected = [final_state(model, trajectories, episode) for episode in range(5)]
    for qpos, qvel in (first, second):
        np.testing.assert_array_equal(qpos, [state[0] for state in expected])
        np.testing.assert_array_equal(qvel, [state[1] for state in expected])


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_replay_gives_every_episode_its_own_model(model, trajectories):
    masses = model.body_mass * np.array([[1.0], [1.0], [3.0], [3.0], [0.5]])
    replay = Replay(model, SUBSTEPS, 2)
    try:
        replay.load(replace(trajectories, fields={"body_mass": masses}))
        replay.run()
        found = replay.final_states()
    finally:
        replay.close()
    for episode in range(5):
        own = copy.copy(model)
        own.body_mass[:] = masses[episode]
        mujoco.mj_setConst(own, mujoco.MjData(own))
        qpos, qvel = final_state(own, trajectories, episode)
        np.testing.assert_array_equal(found[0][episode], qpos)
        np.testing.assert_array_equal(found[1][episode], qvel)
