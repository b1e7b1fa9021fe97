"""Guarantees of every registered family about episodes; registering a new id is enough to test it."""

from typing import Any

import gymnasium
import numpy as np

from maml_rl.envs import FAMILIES, MetaVectorEnv, make_vector_env
from maml_rl.spaces import is_image
from tests.envs.contract import STEPS, assert_same_slot, assert_same_tasks, play, random_actions, same


def test_slots_are_bit_identical_to_single_environments(stepping_env_id: str) -> None:
    """The test of episodes of full length tries all families."""
    env_id = stepping_env_id
    limit = STEPS - 1
    batch = make_vector_env(env_id, {}, 4, max_episode_steps=limit)
    tasks = batch.sample_tasks(4, seed=1)
    batch.reset_task(tasks)
    observations, infos = batch.reset(seed=7)
    singles = [gymnasium.make(env_id, max_episode_steps=limit) for _ in tasks]
    running = set(range(4))
    for slot, (single, task) in enumerate(zip(singles, tasks, strict=True)):
        single.unwrapped.reset_task(task)
        observation, info = single.reset(seed=7 + slot)
        assert_same_slot(slot, (observations, infos), (observation, info))
    for actions in random_actions(batch, STEPS):
        results = batch.step(actions)
        for slot in sorted(running):
            result = singles[slot].step(actions[slot])
            assert_same_slot(slot, results, result)
            if result[2] or result[3]:
                running.remove(slot)
    assert not running


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


def test_slot_does_not_depend_on_the_number_of_slots(base_env_id: str) -> None:
    few, many = make_vector_env(base_env_id, {}, 2), make_vector_env(base_env_id, {}, 5)
    tasks = few.sample_tasks(5, seed=2)
    few.reset_task(tasks[:2])
    many.reset_task(tasks)
    assert same(play(few, 3), [array[:2] for array in play(many, 3)])


def test_seed_zero_is_a_seed(base_vector_env: MetaVectorEnv) -> None:
    first = play(base_vector_env, 0)
    assert same(first, play(base_vector_env, 0))
    base_vector_env.reset(seed=0)
    tasks = base_vector_env.sample_tasks(2)
    base_vector_env.reset(seed=0)
    assert_same_tasks(tasks, base_vector_env.sample_tasks(2))


def test_integer_seed_means_consecutive_seeds(base_vector_env: MetaVectorEnv) -> None:
    first = play(base_vector_env, 5)
    assert same(first, play(base_vector_env, [5, 6, 7, 8]))
    assert same(first, play(base_vector_env, np.arange(5, 9)))


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


def test_time_limit_truncates_without_terminating(stepping_env_id: str) -> None:
    vector_env = make_vector_env(stepping_env_id, {}, 3, max_episode_steps=2)
    vector_env.reset(seed=0)
    steps = [vector_env.step(actions) for actions in random_actions(vector_env, 2)]
    first, last = [(terminated, truncated) for _, _, terminated, truncated, _ in steps]
    assert not first[1].any()
    np.testing.assert_array_equal(last[1], ~first[0])
    assert last[0].all() if "Bandit" in stepping_env_id else not last[0].any()


def test_default_time_limit_is_that_of_the_id(base_env_id: str) -> None:
    limit = FAMILIES[base_env_id].max_episode_steps
    assert gymnasium.spec(base_env_id).max_episode_steps == limit
    expected = 1 if "Bandit" in base_env_id else limit
    assert make_vector_env(base_env_id).max_episode_steps == expected
    assert gymnasium.make_vec(base_env_id, num_envs=2).max_episode_steps == expected


def test_frozen_slots_keep_their_final_observation_and_ignore_actions(stepping_env_id: str) -> None:
    vector_env = make_vector_env(stepping_env_id, {}, 4, max_episode_steps=2)
    vector_env.reset(seed=0)
    for actions in random_actions(vector_env, 2):
        final = vector_env.step(actions)
    assert (final[2] | final[3]).all()
    fresh = vector_env.observation_space.sample()
    vector_env.reset(seed=5, options={"reset_mask": np.array([True, False, False, True])})
    poison = random_actions(vector_env, 1, seed=8)[0]
    poison[1:3] = np.nan if np.issubdtype(poison.dtype, np.floating) else -7
    observations, rewards, terminated, truncated, infos = vector_env.step(poison)
    for array, before in zip((observations, terminated, truncated), (final[0], final[2], final[3]), strict=True):
        np.testing.assert_array_equal(array[1:3], before[1:3])
    np.testing.assert_array_equal(rewards[1:3], 0.0)
    assert np.isfinite(rewards).all()
    assert infos["_task"].tolist() == [True, False, False, True]
    assert fresh.shape == observations.shape


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


def test_results_have_the_declared_dtypes_and_spaces(stepping_vector_env: MetaVectorEnv) -> None:
    observations, _ = stepping_vector_env.reset(seed=0)
    assert stepping_vector_env.observation_space.contains(observations)
    for actions in random_actions(stepping_vector_env, 3):
        observations, rewards, terminated, truncated, _ = stepping_vector_env.step(actions)
        assert stepping_vector_env.observation_space.contains(observations)
    expected = np.uint8 if is_image(stepping_vector_env.single_observation_space) else np.float32
    assert (observations.dtype, rewards.dtype) == (expected, np.float64)
    assert terminated.dtype == truncated.dtype == np.bool_


def test_info_has_the_reward_terms_and_the_task(vector_env: MetaVectorEnv) -> None:
    tasks = vector_env.sample_tasks(4, seed=0)
    vector_env.reset_task(tasks)
    vector_env.reset(seed=0)
    _, rewards, _, _, infos = vector_env.step(random_actions(vector_env, 1)[0])
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
