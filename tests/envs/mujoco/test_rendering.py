import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.error import DependencyNotInstalled

import maml_rl  # noqa: F401 - registers the families
from maml_rl.envs.mujoco import rendering
from maml_rl.envs.mujoco.planar import HalfCheetahDirVectorEnv


def run_python(code, **variables):
    """Run a script in an interpreter of its own, without a screen in its environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    environment.pop("MUJOCO_GL", None)
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("family", ["HalfCheetahVel-v5", "AntPos-v5"])
def test_picture_shows_the_state_and_changes_with_it(family, opengl):
    with gymnasium.make(family, render_mode="rgb_array") as env:
        env.reset(seed=0)
        first = env.render()
        assert first.shape == (480, 480, 3)
        assert first.dtype == np.uint8
        assert len(np.unique(first.reshape(-1, 3), axis=0)) > 50
        np.testing.assert_array_equal(env.render(), first)
        for _ in range(10):
            env.step(env.action_space.high)
        assert np.mean(env.render() != first) > 0.01
        env.reset(seed=0)
        np.testing.assert_array_equal(env.render(), first)


def test_sky_is_above_the_floor(opengl):
    with gymnasium.make("HalfCheetahDir-v5", render_mode="rgb_array") as env:
        env.reset(seed=0)
        picture = env.render().astype(float)
    # The sky darkens from row to row; the floor is a checkerboard.
    assert picture[:100].std(axis=1).max() < 1.0
    assert picture[-100:].std(axis=1).max() > 50.0


def test_vector_environments_give_one_picture_per_slot_even_with_another_one_open(opengl):
    one = gymnasium.make_vec("HalfCheetahDir-v5", num_envs=3, render_mode="rgb_array")
    two = gymnasium.make_vec("AntDir-v5", num_envs=1, render_mode="rgb_array")
    one.reset(seed=0), two.reset(seed=0)
    before = one.render()
    ant = two.render()[0]
    after = one.render()
    assert len(before) == 3
    assert (before[0] != before[1]).any()
    for first, second in zip(before, after, strict=True):
        np.testing.assert_array_equal(first, second)
    two.close()
    np.testing.assert_array_equal(one.render()[2], before[2])
    assert (ant != before[0]).any()
    one.close()


def test_drawing_does_not_disturb_the_simulation(opengl):
    envs = [HalfCheetahDirVectorEnv(2, render_mode=mode) for mode in (None, "rgb_array")]
    for env in envs:
        env.reset(seed=0)
    for _ in range(5):
        plain, drawn = (env.step(np.full((2, 6), 0.3)) for env in envs)
        envs[1].render()
        np.testing.assert_array_equal(plain[0], drawn[0])
    assert envs[0].render() is None
    for env in envs:
        env.close()


def test_steps_touch_no_environment_variable_and_what_is_never_closed_ends_silently(opengl):
    code = (
        "import os\n"
        "before = dict(os.environ)\n"
        "import gymnasium, maml_rl\n"
        "envs = [gymnasium.make(name, render_mode='rgb_array') for name in ('HalfCheetahDir-v5', 'AntDir-v5')]\n"
        "for env in envs:\n"
        "    env.reset(seed=0)\n"
        "    env.step(env.action_space.sample())\n"
        "assert dict(os.environ) == before\n"
        "for env in envs:\n"
        "    env.render()\n"
    )
    run = run_python(code)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_missing_opengl_is_reported_with_the_remedy(monkeypatch):
    def broken():
        raise AttributeError("'NoneType' object has no attribute 'eglQueryString'")

    monkeypatch.setattr(rendering, "_context_class", broken)
    env = HalfCheetahDirVectorEnv(1, render_mode="rgb_array")
    env.reset(seed=0)
    with pytest.raises(
        DependencyNotInstalled, match=r"no usable OpenGL .*eglQueryString.*scripts/install-system-packages"
    ):
        env.render()
    env.step(np.zeros((1, 6)))
    env.close()


def test_opengl_that_is_switched_off_is_reported_with_the_remedy():
    code = (
        "import gymnasium, maml_rl\n"
        "env = gymnasium.make('HalfCheetahDir-v5', render_mode='rgb_array')\n"
        "env.reset(seed=0)\n"
        "try:\n"
        "    env.render()\n"
        "except gymnasium.error.DependencyNotInstalled as error:\n"
        "    print(error)\n"
    )
    run = run_python(code, MUJOCO_GL="disable")
    assert run.returncode == 0, run.stderr
    assert "scripts/install-system-packages" in run.stdout
