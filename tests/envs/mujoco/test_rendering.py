import subprocess
import sys
import types

import gymnasium
import numpy as np
import pytest
from gymnasium.error import DependencyNotInstalled

import maml_rl  # noqa: F401 - registers the families
from maml_rl.envs.mujoco import rendering
from maml_rl.envs.mujoco.planar import HalfCheetahDirVectorEnv


def test_pictures_show_the_state_of_each_slot_and_disturb_nothing(opengl):
    plain, drawn = (HalfCheetahDirVectorEnv(2, render_mode=mode) for mode in (None, "rgb_array"))
    for env in (plain, drawn):
        env.reset(seed=0)
    assert plain.render() is None
    start = drawn.render()
    assert [(picture.shape, picture.dtype) for picture in start] == [((480, 480, 3), np.uint8)] * 2
    assert len(np.unique(start[0].reshape(-1, 3), axis=0)) > 50
    assert (start[0] != start[1]).any()
    # The sky darkens from row to row; the floor is a checkerboard.
    assert start[0][:100].astype(float).std(axis=1).max() < 1.0
    assert start[0][-100:].astype(float).std(axis=1).max() > 50.0
    for _ in range(10):
        np.testing.assert_array_equal(*(env.step(np.ones((2, 6)))[0] for env in (plain, drawn)))
    moved = drawn.render()
    assert np.mean(moved[0] != start[0]) > 0.01
    with gymnasium.make("AntPos-v5", render_mode="rgb_array") as ant:
        ant.reset(seed=0)
        assert np.mean(ant.render() != moved[0]) > 0.01
        np.testing.assert_array_equal(drawn.render(), moved)
    drawn.reset(seed=0)
    np.testing.assert_array_equal(drawn.render(), start)
    for env in (plain, drawn):
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
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100)
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


def test_opengl_is_that_which_mujoco_chooses_where_it_is_told_to(opengl, monkeypatch):
    chosen = types.ModuleType("mujoco.gl_context")
    chosen.GLContext = object
    monkeypatch.setitem(sys.modules, "mujoco.gl_context", chosen)
    assert rendering._context_class() is not object
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "disable")
            assert rendering._context_class() is object
