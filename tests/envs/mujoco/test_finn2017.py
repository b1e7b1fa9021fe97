"""The half-cheetah of the MAML paper's code against plain MuJoCo on a model that is edited by hand."""

import mujoco
import numpy as np
import pytest

from maml_rl.envs import make_vector_env

DIRECTION, VELOCITY = "HalfCheetahDir-finn2017-v0", "HalfCheetahVel-finn2017-v0"


def center_of_mass_velocity(model, data):
    """Return the mean of the bodies' velocities, each at its center of mass, weighted by mass."""
    momentum, velocity = np.zeros(3), np.zeros(6)
    for body in range(1, model.nbody):
        mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_BODY, body, velocity, 0)
        momentum += model.body_mass[body] * velocity[3:]
    return momentum / model.body_mass.sum()


def beside_mujoco(env_id, tasks, model, steps):
    """Yield our results and plain MuJoCo's states after every step of one substep, a forward pass and real forces."""
    env = make_vector_env(env_id, {}, len(tasks))
    assert (env.dt, env.metadata["render_fps"]) == (model.opt.timestep, round(1.0 / model.opt.timestep))
    env.reset_task(tasks)
    env.reset(seed=3)
    datas = [mujoco.MjData(model) for _ in tasks]
    for slot, data in enumerate(datas):
        data.qpos[:], data.qvel[:] = env._qpos[slot], env._qvel[slot]
        mujoco.mj_forward(model, data)
    random = np.random.default_rng(0)
    for _ in range(steps):
        # Some actions lie outside of the actuators' range.
        actions = random.uniform(-1.3, 1.3, (len(tasks), model.nu)).astype(np.float32)
        results = env.step(actions)
        for data, action in zip(datas, actions, strict=True):
            data.ctrl[:] = np.clip(action, -1.0, 1.0)
            mujoco.mj_step(model, data)
            mujoco.mj_forward(model, data)
            mujoco.mj_rnePostConstraint(model, data)
        yield results, datas
    env.close()


@pytest.mark.parametrize(
    ("env_id", "tasks"),
    [
        (DIRECTION, [{"direction": sign} for sign in (1, -1, 1)]),
        (VELOCITY, [{"velocity": velocity} for velocity in (0.0, 0.7, 2.0)]),
    ],
)
def test_steps_are_those_of_plain_mujoco(env_id, tasks, ordinary_model, in_empty_folder):
    """One step of 0.01 s, then a forward pass; reward and last observations from the center of mass after the step."""
    # Gymnasium's model with rllab's options.
    model = ordinary_model("half_cheetah.xml")
    model.opt.timestep, model.opt.integrator = 0.01, mujoco.mjtIntegrator.mjINT_EULER
    touched = 0
    for (observations, rewards, terminated, _, infos), datas in beside_mujoco(env_id, tasks, model, 200):
        assert not terminated.any()
        for slot, (data, task) in enumerate(zip(datas, tasks, strict=True)):
            expected = np.concatenate((data.qpos[1:], data.qvel, data.subtree_com[1])).astype(np.float32)
            np.testing.assert_array_equal(observations[slot], expected)
            center = model.body_mass @ data.xipos / model.body_mass.sum()
            np.testing.assert_allclose(observations[slot, 17:], center, rtol=1e-5, atol=1e-6)
            velocity = center_of_mass_velocity(model, data)[0]
            forward = task["direction"] * velocity if "direction" in task else -abs(velocity - task["velocity"])
            control = 0.05 * float((data.ctrl**2).sum())
            assert rewards[slot] == pytest.approx(forward - control, rel=1e-9, abs=1e-12)
            assert infos["x_velocity"][slot] == pytest.approx(velocity, rel=1e-9, abs=1e-12)
            touched += data.ncon > 0
    assert touched > 100


@pytest.mark.parametrize(
    ("env_id", "task"),
    [
        ("AntDir-finn2017-v0", {"direction": -1}),
        ("AntVel-finn2017-v0", {"velocity": 1.7}),
        ("AntPos-finn2017-v0", {"position": [1.0, -2.0]}),
    ],
)
def test_steps_of_the_ant_are_those_of_plain_mujoco(env_id, task, ordinary_model, in_empty_folder):
    """One Runge-Kutta step of 0.02 s, then a forward pass and the contact forces of the state after it."""
    model = ordinary_model("ant.xml")
    model.opt.timestep = 0.02
    model.geom_solimp[:, :3] = [0.8, 0.8, 0.01]
    assert model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4
    # Torques of at most 150.
    np.testing.assert_array_equal(model.actuator_gear[:, 0] * model.actuator_ctrlrange[:, 1], [150.0] * 8)
    touched = 0
    for (observations, rewards, terminated, _, _), datas in beside_mujoco(env_id, [task] * 2, model, 40):
        for slot, data in enumerate(datas):
            forces = np.clip(data.cfrc_ext, -1.0, 1.0).ravel()
            seen = (data.qpos, data.qvel, forces, data.xmat[1], data.subtree_com[1])
            np.testing.assert_array_equal(observations[slot], np.concatenate(seen).astype(np.float32))
            velocity = center_of_mass_velocity(model, data)[0]
            match task:
                case {"direction": direction}:
                    reward = direction * velocity + 0.05
                case {"velocity": wanted}:
                    reward = 1.0 - abs(velocity - wanted) + 0.05
                case {"position": position}:
                    reward = 4.0 - np.abs(data.subtree_com[1, :2] - position).sum() + 0.05
            reward -= 0.005 * float((data.ctrl**2).sum()) + 0.0005 * float((forces**2).sum())
            assert rewards[slot] == pytest.approx(reward, rel=1e-9, abs=1e-12)
            touched += bool(forces.any())
            assert terminated[slot] == (not 0.2 <= data.qpos[2] <= 1.0)
        if terminated.any():
            break
    assert touched > 5


def test_the_body_has_the_numbers_of_rllabs_file():
    """The expected numbers are from rllab's half_cheetah.xml."""
    model = make_vector_env(DIRECTION).model
    assert model.opt.timestep == 0.01
    assert model.opt.integrator == mujoco.mjtIntegrator.mjINT_EULER
    np.testing.assert_array_equal(model.opt.gravity, [0.0, 0.0, -9.81])
    assert model.body_mass.sum() == pytest.approx(14.0)
    np.testing.assert_array_equal(model.actuator_gear[:, 0], [120.0, 90.0, 60.0, 120.0, 60.0, 30.0])
    np.testing.assert_array_equal(model.actuator_ctrlrange, [[-1.0, 1.0]] * 6)
    np.testing.assert_array_equal(model.jnt_stiffness, [0.0, 0.0, 0.0, 240.0, 180.0, 120.0, 180.0, 120.0, 60.0])
    np.testing.assert_array_equal(model.dof_damping, [0.0, 0.0, 0.0, 6.0, 4.5, 3.0, 4.5, 3.0, 1.5])
    np.testing.assert_array_equal(model.dof_armature, [0.0, 0.0, 0.0, *[0.1] * 6])
    ranges = [[-0.52, 1.05], [-0.785, 0.785], [-0.4, 0.785], [-1.0, 0.7], [-1.2, 0.87], [-0.5, 0.5]]
    np.testing.assert_array_equal(model.jnt_range[3:], ranges)
    np.testing.assert_array_equal(model.geom_friction, [[0.4, 0.1, 0.1]] * model.ngeom)
    np.testing.assert_array_equal(model.geom_solref, [[0.02, 1.0]] * model.ngeom)
    np.testing.assert_array_equal(model.geom_solimp[:, :3], [[0.0, 0.8, 0.01]] * model.ngeom)
    lengths = [0.5, 0.15, 0.145, 0.15, 0.094, 0.133, 0.106, 0.07]
    np.testing.assert_allclose(model.geom_size[1:, :2], [[0.046, length] for length in lengths])


@pytest.mark.parametrize("env_id", [DIRECTION, "AntDir-finn2017-v0"])
def test_start_states_are_normal_around_those_of_rllab(env_id):
    env = make_vector_env(env_id, {}, 4000)
    env.reset(seed=0)
    # The ant begins on bent legs.
    start = [0.0, 0.0, 0.55, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, -1.0, 0.0, -1.0, 0.0, 1.0]
    start = env.model.qpos0 if env_id == DIRECTION else start
    noise = np.hstack(((env._qpos - start) / 0.01, env._qvel / 0.1))
    np.testing.assert_allclose(noise.mean(axis=0), 0.0, atol=0.08)
    np.testing.assert_allclose(noise.std(axis=0), 1.0, atol=0.05)
    np.testing.assert_allclose((np.abs(noise) < 1.0).mean(axis=0), 0.6827, atol=0.035)
    assert np.abs(np.corrcoef(noise.T) - np.eye(noise.shape[1])).max() < 0.08
