"""Guarantees of every registered family; registering a new id is enough to test it.

Of its episodes, to code that steps it like Gymnasium's, without resetting slots itself, and to planners: copies
continue from the same state, and survive closing.
"""

import copy
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from maml_rl.envs import FAMILIES, MetaVectorEnv, check_meta_env, make_vector_env
from maml_rl.envs.families.navigation import Navigation2DVectorEnv
from maml_rl.errors import TaskError
from maml_rl.spaces import is_image
from tests.envs.contract import (
    BASES,
    OWN_STEPS,
    STEPS,
    TRIED,
    assert_same_slot,
    assert_same_tasks,
    marks,
    play,
    random_actions,
    same,
)
from tests.envs.third_party import WalkEnv


def step_beside(batch: Any, singles: list[Any], actions: Any, running: set[int]) -> None:
    """Step all slots, compare those that run with single environments, and remove those that are over."""
    results = batch.step(actions)
    for slot in sorted(running):
        result = singles[slot].step(actions[slot])
        assert_same_slot(slot, results, result)
        if result[2] or result[3]:
            running.remove(slot)


def test_rewards_and_infos_are_within_the_range_that_is_declared(vector_env: MetaVectorEnv) -> None:
    ranges = vector_env.value_ranges
    assert set(ranges) <= {"reward", *vector_env.recorded_infos}
    vector_env.reset_task(vector_env.sample_tasks(4, seed=1))
    vector_env.reset(seed=7)
    for actions in random_actions(vector_env, STEPS):
        vector_env.step(actions)
        for name, (low, high) in ranges.items():
            values = vector_env.buffers.rewards if name == "reward" else vector_env.buffers.infos[name]
            values = values[np.isfinite(values)]
            assert ((low <= values) & (values <= high)).all(), (name, values)


def test_integer_seed_is_that_of_the_first_slot_and_zero_is_one(base_vector_env: MetaVectorEnv) -> None:
    first = play(base_vector_env, 0)
    for seeds in (0, [0, 1, 2, 3], np.arange(4)):
        assert same(first, play(base_vector_env, seeds))
    base_vector_env.reset(seed=0)
    tasks = base_vector_env.sample_tasks(2)
    base_vector_env.reset(seed=0)
    assert_same_tasks(tasks, base_vector_env.sample_tasks(2))


def test_reset_buffers_is_reset_without_copies(base_vector_env: MetaVectorEnv) -> None:
    expected = play(base_vector_env, [3, 1, 4, 2**62])
    base_vector_env.reset_buffers(np.array([3, 1, 4, 2**62]))
    buffers = base_vector_env.buffers
    for array in (buffers.rewards, buffers.terminated, buffers.truncated):
        assert not array.any()
    history = [buffers.observations.copy()]
    for actions in random_actions(base_vector_env, STEPS):
        history += base_vector_env.step(actions)[:4]
    assert same(expected, history)


def test_unseeded_reset_continues_from_the_seeded_one(base_vector_env: MetaVectorEnv) -> None:
    first = [play(base_vector_env, 4), play(base_vector_env, None)]
    second = [play(base_vector_env, 4), play(base_vector_env, None)]
    assert same(first[0], second[0])
    assert same(first[1], second[1])


def test_default_time_limit_is_that_of_the_id(stepping_env_id: str) -> None:
    family = FAMILIES[stepping_env_id]
    limit = family.max_episode_steps
    assert gymnasium.spec(stepping_env_id).max_episode_steps == limit
    if family.has_physics:
        assert limit == (None if stepping_env_id == "Mixture-v0" else 200)
    made: Any = make_vector_env(stepping_env_id)
    expected = 1 if "Bandit" in stepping_env_id else limit or 200
    assert made.max_episode_steps == expected
    assert gymnasium.make_vec(stepping_env_id, num_envs=2).max_episode_steps == expected
    # Also of its class, without the id.
    assert made.default_steps == limit


def test_slots_at_their_time_limit_are_truncated_and_keep_their_final_observation(stepping_env_id: str) -> None:
    vector_env = make_vector_env(stepping_env_id, {}, 4, max_episode_steps=2)
    vector_env.reset(seed=0)
    first, final = (vector_env.step(actions) for actions in random_actions(vector_env, 2))
    assert not first[3].any()
    np.testing.assert_array_equal(final[3], ~first[2])
    assert final[2].all() if "Bandit" in stepping_env_id else not final[2].any()
    vector_env.reset(seed=5, options={"reset_mask": np.array([True, False, False, True])})
    poison = random_actions(vector_env, 1, seed=8)[0]
    poison[1:3] = np.nan if np.issubdtype(poison.dtype, np.floating) else -7
    observations, rewards, terminated, truncated, infos = vector_env.step(poison)
    for array, before in zip((observations, terminated, truncated), (final[0], final[2], final[3]), strict=True):
        np.testing.assert_array_equal(array[1:3], before[1:3])
    np.testing.assert_array_equal(rewards[1:3], 0.0)
    assert np.isfinite(rewards).all()
    assert infos["_task"].tolist() == [True, False, False, True]


def test_reset_mask_resets_only_the_masked_slots(stepping_env_id: str) -> None:
    undisturbed, masked = make_vector_env(stepping_env_id, {}, 4), make_vector_env(stepping_env_id, {}, 4)
    before = undisturbed.reset(seed=3)[0], masked.reset(seed=3)[0]
    np.testing.assert_array_equal(*before)
    actions = random_actions(masked, 4)
    undisturbed.step(actions[0])
    masked.step(actions[0])
    mask = np.array([False, True, True, False])
    masked.reset(seed=[0, 44, 45, 0], options={"reset_mask": mask})
    fresh = make_vector_env(stepping_env_id, {}, 4)
    fresh.reset(seed=[0, 44, 45, 0])
    for step in actions[1:]:
        for result, same_as, new in zip(
            masked.step(step)[:4], undisturbed.step(step)[:4], fresh.step(step)[:4], strict=True
        ):
            np.testing.assert_array_equal(result[~mask], same_as[~mask])
            np.testing.assert_array_equal(result[mask], new[mask])


def test_slot_continues_the_same_way_after_being_frozen(base_env_id: str) -> None:
    """Unseeded resets continue a slot's own stream, which steps of other slots must not advance."""
    alone, together = (make_vector_env(base_env_id, {}, 8, max_episode_steps=2) for _ in range(2))
    waiting = np.arange(8) >= 4
    actions = random_actions(alone, 2)
    seen: dict[MetaVectorEnv, list[Any]] = {alone: [], together: []}
    for env in seen:
        env.reset(seed=3)
    for _ in range(3):
        for env, history in seen.items():
            for step in actions:
                history += env.step(step)[:4]
        # Half of the slots of `together` wait while the others play another episode.
        together.reset(options={"reset_mask": ~waiting})
        for step in actions:
            together.step(step)
        for env, history in seen.items():
            history += [env.reset(options={"reset_mask": waiting})[0]]
    assert same(*([array[waiting] for array in history] for history in seen.values()))


def test_returned_arrays_belong_to_the_caller(base_vector_env: MetaVectorEnv) -> None:
    buffers = base_vector_env.buffers
    own = [buffers.observations, buffers.rewards, buffers.terminated, buffers.truncated]
    results = [base_vector_env.reset(seed=0)]
    results += [base_vector_env.step(actions) for actions in random_actions(base_vector_env, 2)]
    returned = [array for *arrays, infos in results for array in (*arrays, *arrays_in(infos))]
    for number, array in enumerate(returned):
        assert not any(np.shares_memory(array, other) for other in (*own, *returned[:number]))


def arrays_in(infos: dict[str, Any]) -> list[Any]:
    nested = [arrays_in(value) if isinstance(value, dict) else [value] for value in infos.values()]
    return [array for arrays in nested for array in arrays]


def test_results_have_the_declared_types_and_infos_the_reward_terms_and_the_task(vector_env: MetaVectorEnv) -> None:
    tasks = vector_env.sample_tasks(4, seed=0)
    vector_env.reset_task(tasks)
    observations, _ = vector_env.reset(seed=0)
    assert vector_env.observation_space.contains(observations)
    observations, rewards, terminated, truncated, infos = vector_env.step(random_actions(vector_env, 1)[0])
    assert vector_env.observation_space.contains(observations)
    expected = np.uint8 if is_image(vector_env.single_observation_space) else np.float32
    assert (observations.dtype, rewards.dtype) == (expected, np.float64)
    assert terminated.dtype == truncated.dtype == np.bool_
    terms = [value for name, value in infos.items() if name.startswith("reward_")]
    # Environments of other packages, in JAX, have no terms.
    if ".jax." not in type(vector_env.unwrapped).__module__:
        np.testing.assert_allclose(sum(terms), rewards, rtol=1e-12, atol=1e-12)
    for slot, task in enumerate(tasks):
        for name, value in task.items():
            assert infos["task"][f"_{name}"][slot]
            np.testing.assert_array_equal(infos["task"][name][slot], value)
    listed = gymnasium.wrappers.vector.DictInfoToList(vector_env).step(random_actions(vector_env, 1)[0])[4]
    assert len(listed) == 4


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


def test_mode_may_be_given_by_name_and_is_next_step_by_default() -> None:
    for mode in (*AutoresetMode, *(mode.value for mode in AutoresetMode)):
        env = gymnasium.make_vec("Bandit-K5-v0", num_envs=2, autoreset_mode=mode)
        assert env.metadata["autoreset_mode"] is AutoresetMode(mode)
    by_default: Any = gymnasium.make_vec("Bandit-K5-v0", num_envs=2)
    assert by_default.metadata["autoreset_mode"] is by_default.autoreset_mode is AutoresetMode.NEXT_STEP
    for unknown in ("next-step", None, 3):
        with pytest.raises(ValueError, match=r"autoreset_mode must be one of 'NextStep', 'SameStep', 'Disabled', got"):
            gymnasium.make_vec("Bandit-K5-v0", num_envs=2, autoreset_mode=unknown)


def test_only_vector_environments_declare_a_mode(base_env_id: str) -> None:
    env = gymnasium.make(base_env_id)
    assert "autoreset_mode" not in env.metadata
    declared = gymnasium.make_vec(base_env_id, num_envs=1).metadata
    assert env.metadata == {"render_modes": [], **{key: declared[key] for key in declared if key != "autoreset_mode"}}
    with pytest.raises(TypeError, match=r"autoreset_mode is for gymnasium\.make_vec"):
        gymnasium.make(base_env_id, autoreset_mode=AutoresetMode.DISABLED)


def test_slots_of_samplers_have_no_autoreset(base_vector_env: MetaVectorEnv) -> None:
    assert base_vector_env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    with pytest.raises(ValueError, match="leave autoreset_mode out of the environment's arguments"):
        make_vector_env("Bandit-K5-v0", {"autoreset_mode": AutoresetMode.DISABLED})


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


COPIES: tuple[Callable[[Any], Any], ...] = (copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env)))


def on_engines(names: Iterable[str]) -> list[Any]:
    """Return families with arguments: those with physics also on plain MuJoCo."""
    return [
        pytest.param(name, arguments, marks=marks(name))
        for name in names
        for arguments in ({}, {"engine": "mujoco"})[: 1 + FAMILIES[name].has_physics]
    ]


def go_on(env: Any, actions: list[Any]) -> list[Any]:
    """Return the results of some steps with an unseeded reset between them, which continues the current streams."""
    seen: list[Any] = []
    for index, action in enumerate(actions):
        if index == len(actions) // 2:
            seen.append(env.reset()[0])
        seen += [np.asarray(part) for part in env.step(action)[:4]]
    return seen


@pytest.mark.parametrize(("env_id", "arguments"), on_engines(OWN_STEPS))
def test_copy_of_a_single_environment_continues_bit_identically(env_id: str, arguments: dict[str, Any]) -> None:
    env: Any = gymnasium.make(env_id, **arguments)
    env.reset(seed=3)
    env.unwrapped.reset_task(env.unwrapped.sample_tasks(1)[0])
    env.reset()
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(12)]
    if "Bandit" not in env_id:
        for action in actions[:5]:
            env.step(action)
    copies = [way(env) for way in COPIES] + [way(way(env)) for way in COPIES]
    played, *others = [go_on(each, actions) for each in (env, *copies)]
    assert all(same(played, other) for other in others)
    tasks = str(env.unwrapped.sample_tasks(2))
    assert all(str(each.unwrapped.sample_tasks(2)) == tasks for each in copies)
    for each in (env, *copies):
        each.close()


@pytest.mark.parametrize(("env_id", "arguments"), on_engines(BASES))
def test_copy_of_a_batch_continues_bit_identically(env_id: str, arguments: dict[str, Any]) -> None:
    env: Any = make_vector_env(env_id, arguments, 3, max_episode_steps=7, num_threads=2)
    env.reset_task(env.sample_tasks(3, seed=0))
    env.reset(seed=3)
    actions = random_actions(env, 12)
    for action in actions[:5]:
        env.step(action)
    copies = [way(env) for way in COPIES]
    played, *others = [go_on(each, actions) for each in (env, *copies)]
    assert all(same(played, other) for other in others)
    for each in (env, *copies):
        each.close()


@pytest.mark.parametrize(("env_id", "arguments"), on_engines(BASES))
def test_environment_can_be_reset_after_it_was_closed(env_id: str, arguments: dict[str, Any]) -> None:
    env: Any = gymnasium.make(env_id, **arguments)
    before = env.reset(seed=1)[0]
    env.close()
    np.testing.assert_array_equal(env.reset(seed=1)[0], before)
    env.step(env.action_space.sample())
    env.close()
    batch: Any = make_vector_env(env_id, arguments, 4, num_threads=2)
    before = batch.reset(seed=1)[0]
    batch.close()
    np.testing.assert_array_equal(batch.reset(seed=1)[0], before)
    batch.step(random_actions(batch, 1)[0])


def test_deep_copies_share_the_model() -> None:
    env: Any = gymnasium.make("HalfCheetahDir-v5").unwrapped
    assert copy.deepcopy(env)._family.model is env._family.model


@pytest.mark.slow
def test_whole_episodes_are_bit_identical_to_single_environments(stepping_env_id: str) -> None:
    """Each slot has a task and a seed of its own, and some are reset while the others continue."""
    limit = min(40, FAMILIES[stepping_env_id].max_episode_steps or 40)
    batch: Any = make_vector_env(stepping_env_id, {}, 3, max_episode_steps=limit)
    tasks = batch.sample_tasks(3, seed=1)
    batch.reset_task(tasks)
    singles: list[Any] = [gymnasium.make(stepping_env_id, task=task, max_episode_steps=limit) for task in tasks]
    seeds = [2**40, 0, 77]
    observations, infos = batch.reset(seed=seeds)
    for slot, (single, seed) in enumerate(zip(singles, seeds, strict=True)):
        assert_same_slot(slot, (observations, infos), single.reset(seed=seed))
    running, restarted = {0, 1, 2}, False
    for actions in random_actions(batch, 2 * (batch.max_episode_steps or 1) + 2):
        step_beside(batch, singles, actions, running)
        if not running and restarted:
            break
        if 1 not in running and not restarted:
            # Without a seed: slot 1 continues its own stream, as the single environment does.
            observations, infos = batch.reset(options={"reset_mask": np.array([False, True, False])})
            assert_same_slot(1, (observations, infos), singles[1].reset())
            running.add(1)
            restarted = True
    assert restarted
    assert not running
    for env in (batch, *singles):
        env.close()


@pytest.mark.slow
def test_unseeded_environments_differ(base_env_id: str) -> None:
    one, other = make_vector_env(base_env_id, {}, 8), make_vector_env(base_env_id, {}, 8)
    # A pull of a bandit has two outcomes; hundreds of them are practically never all equal.
    times = 2 if FAMILIES[base_env_id].has_physics or FAMILIES[base_env_id].extra else 20
    plays = [[array for _ in range(times) for array in play(env, None)] for env in (one, other, one)]
    # Episodes of others are deterministic.
    chance = base_env_id != "2DNavigation-v0" and not base_env_id.startswith("MetaWorld/")
    assert same(plays[0], plays[1]) is not chance
    assert same(plays[0], plays[2]) is not chance
    with pytest.raises(AssertionError):
        assert_same_tasks(one.sample_tasks(30), other.sample_tasks(30))


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_families_print_nothing_write_no_file_and_do_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys, gymnasium, numpy as np, maml_rl\n"
        f"for env_id in {[name for name in TRIED if not FAMILIES[name].extra]}:\n"
        "    for env in (gymnasium.make(env_id), gymnasium.make_vec(env_id, num_envs=2)):\n"
        "        env.reset(seed=0)\n"
        "        env.unwrapped.sample_tasks(2)\n"
        "        env.step(env.action_space.sample())\n"
        "        env.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=50)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


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


def test_single_environment_passes_stable_baselines3s_checker(base_env_id: str, stable_baselines3: Any) -> None:
    env = gymnasium.make(base_env_id)
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
def test_single_environment_passes_our_checker(stepping_env_id: str) -> None:
    env = gymnasium.make(stepping_env_id)
    check_meta_env(env)
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


@pytest.mark.parametrize("env", ["2DNavigation-v0", WalkEnv])
@pytest.mark.parametrize("name", ["num_envs", "max_episode_steps"])
def test_bad_count_is_refused_by_name(env: Any, name: str) -> None:
    for value in (0, -1, 1.5, "3", True):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {value!r}"):
            make_vector_env(env, **{"num_envs": 2, name: value})


def test_wrong_arguments_of_a_family_are_refused_by_name(base_env_id: str) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        make_vector_env(base_env_id, {"no_such_argument": 1})
    with pytest.raises((ValueError, TypeError), match="no render_mode 'depth'"):
        make_vector_env(base_env_id, {"render_mode": "depth"})
    env_class = type(gymnasium.make(base_env_id).unwrapped)
    with pytest.raises(TypeError, match="never truncates; pass max_episode_steps"):
        env_class(max_episode_steps=3)


@pytest.mark.parametrize(
    ("env_id", "arguments", "message"),
    [
        ("Bandit-K5-v0", {"k": 0}, "k must be an integer of at least 1, got 0"),
        ("Bandit-K5-v0", {"pulls": 0}, "pulls must be an integer of at least 1, got 0"),
        ("GaussianBandit-K5-v0", {"std": -1.0}, r"std must not be negative, got -1\.0"),
        ("GaussianBandit-K5-v0", {"std": np.nan}, "std must be a finite number, got nan"),
        ("TabularMDP-v0", {"num_states": 0}, "num_states must be an integer of at least 1"),
        ("TabularMDP-v0", {"num_actions": -1}, "num_actions must be an integer of at least 1"),
        ("2DNavigation-v0", {"low": 0.5, "high": 0.5}, r"low must be below high, got 0\.5 and 0\.5"),
        *(("2DNavigation-v0", {"low": low}, "low must be a finite number") for low in (np.nan, -np.inf, None, True)),
        ("2DNavigation-v0", {"high": "1"}, "high must be a finite number, got '1'"),
        ("PointGoal-v0", {"normalization_scale": 0.0}, r"normalization_scale must be positive, got 0\.0"),
        *(("SemiCircle-v0", {name: "dense"}, f"{name} must be one of .*, got 'dense'") for name in ("start", "reward")),
        ("DarkRoom-v0", {"size": 1}, "size must be an integer of at least 2"),
        ("GridNavi-v0", {"width": 2, "height": 2}, "a grid of 2 x 2 cells has no room for a goal"),
        ("HalfCheetahVel-v5", {"low": 2.0, "high": 1.0}, "low must be below high"),
        ("HalfCheetahDir-v5", {"normalization_scale": np.nan}, "normalization_scale must be a finite number"),
        ("AntPos-v5", {"low": 1.0, "high": 1.0}, "low must be below high"),
        ("AntGoal-v5", {"radius": 0.0}, "radius must be positive"),
        ("HopperRandParams-v5", {"log_scale_limit": 0.0}, "log_scale_limit must be positive"),
    ],
)
def test_argument_out_of_its_range_is_refused_by_name(env_id: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_vector_env(env_id, arguments)


@pytest.mark.parametrize(
    ("env_id", "entry", "change", "message"),
    [
        *(("Bandit-K5-v0", "mean", [number], "probabilities in") for number in (1.1, -0.1)),
        *(("TabularMDP-v0", "transitions", row, "distributions") for row in ([0.4], [1.2], [1.5, -0.5])),
        *(("DarkRoom-v0", "goal", cell, "a cell, two integers from 0 to 8") for cell in ([9.0], [-1.0], [0.5])),
        ("GridNavi-v0", "goal", [5.0, 0.0], "a cell, integers from 0 to 4 and from 0 to 4"),
        ("HalfCheetahDir-v5", "direction", [0.0], r"-1 or 1, got array\(0\.\)"),
        *(("HopperRandParams-v5", "body_mass", [factor], "positive factors") for factor in (0.0, -1.0)),
    ],
)
def test_task_out_of_its_range_is_refused_by_name(env_id: str, entry: str, change: list[float], message: str) -> None:
    env = make_vector_env(env_id)
    (task,) = env.sample_tasks(1, seed=0)
    values = np.array(task[entry])
    if env_id == "TabularMDP-v0":
        values[0, 0] = 0.0
    values.flat[: len(change)] = change
    with pytest.raises(TaskError, match=f"entry {entry!r} of a task must be {message}"):
        env.reset_task([{**task, entry: values}])


@pytest.mark.parametrize(("env_id", "size", "colors"), [("DarkKeyDoor-v0", 252, 4), ("PointCorner-v0", 256, 3)])
def test_picture_shows_what_is_hidden_in_colors_of_their_own(env_id: str, size: int, colors: int) -> None:
    env = gymnasium.make(env_id, render_mode="rgb_array")
    env.reset(seed=0)
    picture: Any = env.render()
    assert picture.shape == (size, size, 3)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) >= colors


class HasHelpers(Navigation2DVectorEnv):
    """Has helpers of its own, named as what it inherits for devices."""

    def begin(self, where: Any) -> None:  # type: ignore[override]
        super()._reset_slots(where, self._streams)

    def advance(self, actions: Any, active: Any) -> Any:  # type: ignore[override]
        return super()._step_slots(actions, active, self._streams)

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        self.begin(mask)

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        return self.advance(actions, active)


def test_helpers_of_a_family_may_have_the_names_of_what_devices_need() -> None:
    rewards = []
    for family in (Navigation2DVectorEnv, HasHelpers):
        env = family(2)
        env.reset_task(env.sample_tasks(2, seed=0))
        env.reset(seed=0)
        rewards.append(env.step(np.full((2, 2), 0.05, np.float32))[1].tolist())
    assert rewards[0] == rewards[1]
