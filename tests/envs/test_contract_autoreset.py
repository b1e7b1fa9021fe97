"""Guarantees of every registered family to code that steps it like Gymnasium's, without resetting slots itself."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from maml_rl.envs import make_vector_env
from tests.envs.contract import random_actions

SLOTS = 4
LIMIT = 3
AUTORESET = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]


def assert_same_results(first: Any, second: Any) -> None:
    """Compare what two vector environments return, down to types and the last bit."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for name in first:
            assert_same_results(first[name], second[name])
    elif isinstance(first, tuple):
        for one, other in zip(first, second, strict=True):
            assert_same_results(one, other)
    elif first.dtype == object:
        assert [entry is None for entry in first] == [entry is None for entry in second]
        for one, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(one, other)
    else:
        np.testing.assert_array_equal(first, second, strict=True)


@pytest.mark.parametrize("mode", AUTORESET)
def test_finished_slots_are_reset_as_gymnasium_resets_single_environments(
    base_env_id: str, mode: AutoresetMode
) -> None:
    batch: Any = gymnasium.make_vec(base_env_id, num_envs=SLOTS, max_episode_steps=LIMIT, autoreset_mode=mode)
    sync: Any = gymnasium.make_vec(
        base_env_id,
        num_envs=SLOTS,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        max_episode_steps=LIMIT,
    )
    tasks = batch.sample_tasks(SLOTS, seed=1)
    batch.reset_task(tasks)
    for env, task in zip(sync.envs, tasks, strict=True):
        env.unwrapped.reset_task(task)
    assert_same_results(batch.reset(seed=5), sync.reset(seed=5))
    ends = 0
    for index, actions in enumerate(random_actions(batch, 4 * LIMIT)):
        if index == LIMIT - 1:
            # From here on the slots' episodes end at different steps.
            mask = np.array([False, True, False, False])
            batch_results, sync_results = (env.reset(options={"reset_mask": mask.copy()}) for env in (batch, sync))
            np.testing.assert_array_equal(batch_results[0], sync_results[0])
        results = batch.step(actions)
        assert_same_results(results, sync.step(actions))
        ends += int((results[2] | results[3]).sum())
    assert ends >= 2 * SLOTS
    batch.close()
    sync.close()


def test_make_vec_resets_at_the_next_step_by_default(base_env_id: str) -> None:
    env: Any = gymnasium.make_vec(base_env_id, num_envs=2, max_episode_steps=1)
    assert env.metadata["autoreset_mode"] is env.autoreset_mode is AutoresetMode.NEXT_STEP
    env.reset(seed=0)
    actions = random_actions(env, 1)[0]
    lengths = [env.step(actions)[2:4] for _ in range(4)]
    ended = [bool((terminated | truncated).all()) for terminated, truncated in lengths]
    assert ended == [True, False, True, False]


@pytest.mark.parametrize("mode", [*AutoresetMode, *(mode.value for mode in AutoresetMode)], ids=str)
def test_mode_may_be_given_by_name(mode: Any) -> None:
    env = gymnasium.make_vec("Bandit-K5-v0", num_envs=2, autoreset_mode=mode)
    assert env.metadata["autoreset_mode"] is AutoresetMode(mode)


def test_unknown_mode_is_refused(base_env_id: str) -> None:
    for mode in ("next-step", None, 3):
        with pytest.raises(ValueError, match=r"autoreset_mode must be one of 'NextStep', 'SameStep', 'Disabled', got"):
            gymnasium.make_vec(base_env_id, num_envs=2, autoreset_mode=mode)


def test_only_vector_environments_declare_a_mode(base_env_id: str) -> None:
    env = gymnasium.make(base_env_id)
    assert "autoreset_mode" not in env.metadata
    declared = gymnasium.make_vec(base_env_id, num_envs=1).metadata
    assert env.metadata == {"render_modes": [], **{key: declared[key] for key in declared if key != "autoreset_mode"}}
    with pytest.raises(TypeError, match=r"autoreset_mode is for gymnasium\.make_vec"):
        gymnasium.make(base_env_id, autoreset_mode=AutoresetMode.DISABLED)


def test_sampler_accepts_slots_without_autoreset(base_env_id: str) -> None:
    env = make_vector_env(base_env_id, {}, 2)
    assert env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    with pytest.raises(ValueError, match="leave autoreset_mode out of the environment's arguments"):
        make_vector_env(base_env_id, {"autoreset_mode": AutoresetMode.DISABLED})


def test_mode_is_an_attribute_that_can_be_set(base_env_id: str) -> None:
    """Other packages read the attribute, and prefer slots that they reset themselves by a mask."""
    env: Any = gymnasium.make_vec(base_env_id, num_envs=3, max_episode_steps=1)
    env.autoreset_mode = AutoresetMode.DISABLED
    env.reset(seed=0)
    actions = random_actions(env, 1)[0]
    for _ in range(2):
        _, _, terminated, truncated, _ = env.step(actions)
        assert (terminated | truncated).all()
    env.reset(options={"reset_mask": np.array([True, False, False])})
    assert not (env.buffers.terminated | env.buffers.truncated)[0]
