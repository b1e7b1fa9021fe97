"""Guarantees of every registered family's interface; registering a new id is enough to test its own code.

What the base classes do for all families is tested with one family of each.
"""

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from maml_rl.envs import FAMILIES, MetaVectorEnv, check_meta_env, make_vector_env
from tests.envs.contract import random_actions

# These warnings do not apply: positions have no bounds, and navigation takes steps of 0.1.
OPINIONS = (
    r".*A Box observation space m(in|ax)imum value is -?infinity.*",
    r".*For Box action spaces, we recommend.*",
    r"The minimal resolution for an image is 36x36.*",
    r".*We recommend you to use a symmetric and normalized Box action space.*",
)


@pytest.mark.filterwarnings(*(f"ignore:{opinion}" for opinion in OPINIONS))
def test_single_environment_passes_gymnasiums_checker(stepping_env_id: str) -> None:
    env = gymnasium.make(stepping_env_id)
    check_env(
        env.unwrapped, skip_render_check=FAMILIES[stepping_env_id].has_physics or bool(FAMILIES[stepping_env_id].extra)
    )
    env.close()


def test_single_environment_passes_stable_baselines3s_checker(stepping_env_id: str, stable_baselines3: Any) -> None:
    env = gymnasium.make(stepping_env_id)
    with warnings.catch_warnings():
        for opinion in OPINIONS:
            warnings.filterwarnings("ignore", opinion)
        stable_baselines3.common.env_checker.check_env(env)


def test_stable_baselines3_can_make_single_environments(base_env_id: str, stable_baselines3: Any) -> None:
    """It requests pictures first, and handles the `TypeError`."""
    with warnings.catch_warnings():
        # Gymnasium warns that a family without rendering has none.
        warnings.filterwarnings("ignore", r".*not in the possible render_modes.*")
        envs = stable_baselines3.common.env_util.make_vec_env(base_env_id, n_envs=2, seed=0)
    assert envs.reset().shape[0] == 2
    envs.close()


# Random actions do not reach the goal of a family with sparse rewards.
@pytest.mark.filterwarnings("ignore:every task gave the reward (0.0|-0.1)")
def test_single_environment_passes_our_checker(env_id: str) -> None:
    env = gymnasium.make(env_id)
    check_meta_env(env)
    env.close()


def test_make_vec_finds_the_batched_family(base_env_id: str) -> None:
    env = gymnasium.make_vec(base_env_id, num_envs=3)
    assert isinstance(env, MetaVectorEnv)
    assert env.num_envs == 3
    env.close()


def test_calls_out_of_order_are_refused(base_env_id: str) -> None:
    vector_env = make_vector_env(base_env_id, {}, 2)
    actions = random_actions(vector_env, 1)[0]
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset first"):
        vector_env.step(actions)
    with pytest.raises(gymnasium.error.ResetNeeded, match="without reset_mask"):
        vector_env.reset(options={"reset_mask": np.array([True, False])})
    vector_env.reset(seed=0)
    with pytest.raises(RuntimeError, match="call step_send first"):
        vector_env.step_recv()
    vector_env.step_send(0, actions)
    with pytest.raises(RuntimeError, match="call step_recv first"):
        vector_env.step_send(0, actions)
    vector_env.reset(seed=0)
    with pytest.raises(ValueError, match="one action for each of the 2 slots"):
        vector_env.step(actions[:1])
    vector_env.step(actions)


@pytest.mark.parametrize("name", ["num_envs", "max_episode_steps"])
def test_bad_count_is_refused_by_name(name: str) -> None:
    for value in (0, -1, 1.5, "3", True):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {value!r}"):
            make_vector_env("2DNavigation-v0", **{"num_envs": 2, name: value})


def test_unknown_argument_is_refused_by_name(stepping_env_id: str) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        make_vector_env(stepping_env_id, {"no_such_argument": 1})


def test_unknown_render_mode_is_refused(base_env_id: str) -> None:
    with pytest.raises((ValueError, TypeError), match="no render_mode 'depth'"):
        make_vector_env(base_env_id, {"render_mode": "depth"})


def test_single_environment_leaves_the_time_limit_to_gymnasium(base_env_id: str) -> None:
    env_class = type(gymnasium.make(base_env_id).unwrapped)
    with pytest.raises(TypeError, match="never truncates; pass max_episode_steps"):
        env_class(max_episode_steps=3)
