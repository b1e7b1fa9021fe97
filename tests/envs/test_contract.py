"""What every registered family promises; a new id is tested by being registered."""

import json
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from numpy.typing import NDArray

from maml_rl.envs import FAMILIES, MetaVectorEnv, Task, check_meta_env, make_vector_env
from maml_rl.errors import TaskError

# Nobody expects these to hold: positions have no bounds, and navigation takes steps of 0.1.
OPINIONS = (
    r".*A Box observation space m(in|ax)imum value is -?infinity.*",
    r".*For Box action spaces, we recommend.*",
    r".*We recommend you to use a symmetric and normalized Box action space.*",
)
# Enough steps for every reward to have shown itself, few enough for physics.
STEPS = 6


@pytest.fixture(params=list(FAMILIES))
def env_id(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def vector_env(env_id: str) -> Iterator[MetaVectorEnv]:
    vector_env = make_vector_env(env_id, {}, 4)
    yield vector_env
    vector_env.close()


def random_actions(env: MetaVectorEnv, steps: int, seed: int = 0) -> list[NDArray[Any]]:
    """Actions that do not depend on the number of slots: slot i always gets the same."""
    env.single_action_space.seed(seed)
    rows = [env.single_action_space.sample() for _ in range(steps * 8)]
    return [np.array(rows[step * 8 : step * 8 + env.num_envs]) for step in range(steps)]


def play(env: MetaVectorEnv, seed: Any, steps: int = STEPS) -> list[NDArray[Any]]:
    """Everything that one run shows: arrays of observations, rewards and flags."""
    history = [env.reset(seed=seed)[0]]
    for actions in random_actions(env, steps):
        history += env.step(actions)[:4]
    return history


def same(first: list[NDArray[Any]], second: list[NDArray[Any]]) -> bool:
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings(*(f"ignore:{opinion}" for opinion in OPINIONS))
def test_single_environment_passes_gymnasiums_checker(env_id: str) -> None:
    env = gymnasium.make(env_id)
    check_env(env.unwrapped, skip_render_check=FAMILIES[env_id].has_physics)
    env.close()


def test_single_environment_passes_stable_baselines3s_checker(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the import of other packages has to say
        checker = pytest.importorskip("stable_baselines3.common.env_checker")
    env = gymnasium.make(env_id)
    with warnings.catch_warnings():
        for opinion in OPINIONS:
            warnings.filterwarnings("ignore", opinion)
        checker.check_env(env)


def test_single_environment_passes_our_checker(env_id: str) -> None:
    env = gymnasium.make(env_id)
    check_meta_env(env)
    env.close()


def test_make_vec_finds_the_batched_family(env_id: str) -> None:
    env = gymnasium.make_vec(env_id, num_envs=3)
    assert isinstance(env, MetaVectorEnv)
    assert env.num_envs == 3
    assert env.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.DISABLED
    env.close()


def test_slots_are_bit_identical_to_single_environments(env_id: str) -> None:
    limit = STEPS - 1
    batch = gymnasium.make_vec(env_id, num_envs=4, max_episode_steps=limit)
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


def assert_same_slot(slot: int, batch: tuple[Any, ...], single: tuple[Any, ...]) -> None:
    for array, value in zip(batch[:-1], single[:-1], strict=True):
        np.testing.assert_array_equal(array[slot], value, strict=isinstance(value, np.ndarray))
    assert_same_infos(slot, batch[-1], single[-1])


def assert_same_infos(slot: int, batch: dict[str, Any], single: dict[str, Any]) -> None:
    assert {name for name in batch if not name.startswith("_")} == set(single)
    for name, value in single.items():
        assert batch[f"_{name}"][slot]
        if isinstance(value, dict):
            assert_same_infos(slot, batch[name], value)
        else:
            np.testing.assert_array_equal(batch[name][slot], value)


def test_slot_does_not_depend_on_the_number_of_slots(env_id: str) -> None:
    few, many = make_vector_env(env_id, {}, 2), make_vector_env(env_id, {}, 5)
    tasks = few.sample_tasks(5, seed=2)
    few.reset_task(tasks[:2])
    many.reset_task(tasks)
    assert same(play(few, 3), [array[:2] for array in play(many, 3)])


def test_single_and_batched_environment_draw_the_same_tasks(env_id: str, vector_env: MetaVectorEnv) -> None:
    single = gymnasium.make(env_id)
    single.reset(seed=9)
    vector_env.reset(seed=9)
    drawn = single.unwrapped.sample_tasks(3)
    assert_same_tasks(drawn, vector_env.sample_tasks(3))
    assert_same_tasks(drawn, vector_env.sample_tasks(3, seed=9))


def assert_same_tasks(first: list[Task], second: list[Task]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_seeded_sample_tasks_repeats_and_unseeded_goes_on(vector_env: MetaVectorEnv, seed: int) -> None:
    tasks = vector_env.sample_tasks(30, seed=seed)
    following = vector_env.sample_tasks(30)
    assert_same_tasks(vector_env.sample_tasks(30, seed=seed), tasks)
    with pytest.raises(AssertionError):
        assert_same_tasks(tasks, following)


def test_sampled_tasks_belong_to_the_caller(vector_env: MetaVectorEnv) -> None:
    tasks = vector_env.sample_tasks(4, seed=0)
    vector_env.reset_task(tasks)
    before = play(vector_env, 0)
    for task in tasks:
        for name, value in task.items():
            task[name] = value * 0.0
            if isinstance(value, np.ndarray):
                value[...] = 0.0
    assert same(before, play(vector_env, 0))


def test_seed_zero_is_a_seed(vector_env: MetaVectorEnv) -> None:
    first = play(vector_env, 0)
    assert same(first, play(vector_env, 0))
    vector_env.reset(seed=0)
    tasks = vector_env.sample_tasks(2)
    vector_env.reset(seed=0)
    assert_same_tasks(tasks, vector_env.sample_tasks(2))


def test_integer_seed_stands_for_consecutive_seeds(vector_env: MetaVectorEnv) -> None:
    first = play(vector_env, 5)
    assert same(first, play(vector_env, [5, 6, 7, 8]))
    assert same(first, play(vector_env, np.arange(5, 9)))


def test_reset_buffers_is_reset_without_copies(vector_env: MetaVectorEnv) -> None:
    expected = play(vector_env, [3, 1, 4, 2**62])
    vector_env.reset_buffers(np.array([3, 1, 4, 2**62]))
    history = [vector_env.buffers.observations.copy()]
    for actions in random_actions(vector_env, STEPS):
        history += vector_env.step(actions)[:4]
    assert same(expected, history)


def test_unseeded_reset_goes_on_from_the_seeded_one(vector_env: MetaVectorEnv) -> None:
    first = [play(vector_env, 4), play(vector_env, None)]
    second = [play(vector_env, 4), play(vector_env, None)]
    assert same(first[0], second[0])
    assert same(first[1], second[1])


def test_reset_task_changes_the_rewards_and_survives_reset(vector_env: MetaVectorEnv) -> None:
    def rewards_under(tasks: list[Task]) -> NDArray[np.float64]:
        vector_env.reset_task(tasks)
        runs = [np.array(play(vector_env, seed)[2::4]) for seed in range(10)]
        repeated = [np.array(play(vector_env, seed)[2::4]) for seed in range(10)]
        np.testing.assert_array_equal(runs, repeated)
        return np.array(runs)

    tasks = vector_env.sample_tasks(20, seed=0)
    other = next(task for task in tasks if any(np.any(task[name] != tasks[0][name]) for name in task))
    before, mixed = rewards_under([tasks[0]] * 4), rewards_under([tasks[0], other, tasks[0], other])
    np.testing.assert_array_equal(before[..., [0, 2]], mixed[..., [0, 2]])
    assert (before[..., [1, 3]] != mixed[..., [1, 3]]).any()


def test_reset_task_takes_effect_at_the_next_step(vector_env: MetaVectorEnv) -> None:
    first, second = vector_env.sample_tasks(2, seed=0)
    actions = random_actions(vector_env, 1)[0]
    vector_env.reset_task([first] * 4)
    vector_env.reset(seed=0)
    vector_env.reset_task([second] * 4)
    changed = vector_env.step(actions)
    vector_env.reset(seed=0)
    expected = vector_env.step(actions)
    assert same(list(changed[:4]), list(expected[:4]))


def test_tasks_survive_json(vector_env: MetaVectorEnv) -> None:
    tasks = vector_env.sample_tasks(4, seed=0)
    vector_env.reset_task(tasks)
    before = play(vector_env, 0)
    vector_env.reset_task(json.loads(json.dumps(tasks, default=np.ndarray.tolist)))
    assert same(before, play(vector_env, 0))


def test_task_at_construction_is_the_task(env_id: str, vector_env: MetaVectorEnv) -> None:
    task = vector_env.sample_tasks(2, seed=5)[1]
    vector_env.reset_task([task] * 4)
    made = gymnasium.make_vec(env_id, num_envs=4, task=task)
    assert same(play(vector_env, 0), play(made, 0))
    info = gymnasium.make(env_id, task=task).reset(seed=0)[1]
    assert_same_tasks([info["task"]], [task])


def test_environments_without_a_task_all_have_the_same(env_id: str, vector_env: MetaVectorEnv) -> None:
    assert same(play(vector_env, 0), play(make_vector_env(env_id, {}, 4), 0))


@pytest.mark.parametrize("flaw", ["missing", "misspelt", "shape", "nan", "infinite", "text", "none", "truth", "ragged"])
def test_malformed_task_is_refused_by_name_and_changes_nothing(vector_env: MetaVectorEnv, flaw: str) -> None:
    tasks = vector_env.sample_tasks(4, seed=0)
    vector_env.reset_task(tasks)
    before = play(vector_env, 0)
    for name, value in tasks[2].items():
        bad = dict(tasks[2])
        array = np.array(value, np.float64)
        match flaw:
            case "missing":
                del bad[name]
            case "misspelt":
                bad[name[:-1] + "z"] = bad.pop(name)
            case "shape":
                bad[name] = np.zeros((*array.shape, 7))
            case "nan":
                array.flat[0] = np.nan
                bad[name] = array
            case "infinite":
                array.flat[0] = np.inf
                bad[name] = array
            case "text":
                bad[name] = "1.0"
            case "none":
                bad[name] = None
            case "truth":
                bad[name] = np.ones(array.shape, np.bool_)
            case "ragged":
                bad[name] = [[1.0], [2.0, 3.0]]
        with pytest.raises(TaskError, match=rf"slot 2: .*{name!r}"):
            vector_env.reset_task([tasks[0], tasks[1], bad, tasks[3]])
    assert same(before, play(vector_env, 0))


def test_task_of_another_family_is_refused_by_name(vector_env: MetaVectorEnv) -> None:
    with pytest.raises(TaskError, match="slot 0: unknown entry 'colour' of a task; expected"):
        vector_env.reset_task([{"colour": 1.0}] * 4)
    with pytest.raises(TaskError, match="slot 0: a task is a dict"):
        vector_env.reset_task([1.0] * 4)  # type: ignore[list-item]


def test_wrong_number_of_tasks_is_refused(vector_env: MetaVectorEnv) -> None:
    with pytest.raises(TaskError, match="one task for each of the 4 slots, got 3"):
        vector_env.reset_task(vector_env.sample_tasks(3))


def test_time_limit_truncates_without_terminating(env_id: str) -> None:
    vector_env = make_vector_env(env_id, {}, 3, max_episode_steps=2)
    vector_env.reset(seed=0)
    steps = [vector_env.step(actions) for actions in random_actions(vector_env, 2)]
    first, last = [(terminated, truncated) for _, _, terminated, truncated, _ in steps]
    assert not first[1].any()
    np.testing.assert_array_equal(last[1], ~first[0])
    assert last[0].all() if "Bandit" in env_id else not last[0].any()


def test_default_time_limit_is_that_of_the_id(env_id: str) -> None:
    limit = FAMILIES[env_id].max_episode_steps
    assert gymnasium.spec(env_id).max_episode_steps == limit
    expected = 1 if "Bandit" in env_id else limit
    assert make_vector_env(env_id).max_episode_steps == expected
    assert gymnasium.make_vec(env_id, num_envs=2).max_episode_steps == expected


def test_frozen_slots_keep_their_final_observation_and_ignore_actions(env_id: str) -> None:
    vector_env = make_vector_env(env_id, {}, 4, max_episode_steps=2)
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


def test_reset_mask_resets_the_masked_slots_alone(env_id: str) -> None:
    undisturbed, masked = make_vector_env(env_id, {}, 4), make_vector_env(env_id, {}, 4)
    before = undisturbed.reset(seed=3)[0], masked.reset(seed=3)[0]
    np.testing.assert_array_equal(*before)
    actions = random_actions(masked, 4)
    undisturbed.step(actions[0])
    masked.step(actions[0])
    mask = np.array([False, True, True, False])
    masked.reset(seed=[0, 44, 45, 0], options={"reset_mask": mask})
    fresh = make_vector_env(env_id, {}, 4)
    fresh.reset(seed=[0, 44, 45, 0])
    for step in actions[1:]:
        for result, same_as, new in zip(
            masked.step(step)[:4], undisturbed.step(step)[:4], fresh.step(step)[:4], strict=True
        ):
            np.testing.assert_array_equal(result[~mask], same_as[~mask])
            np.testing.assert_array_equal(result[mask], new[mask])


def test_slot_that_waits_frozen_goes_on_as_if_it_had_not_waited(env_id: str) -> None:
    """Unseeded resets go on with a slot's own stream, which steps of other slots must not move."""
    alone, together = (make_vector_env(env_id, {}, 2, max_episode_steps=2) for _ in range(2))
    first, second = np.array([True, False]), np.array([False, True])
    actions = random_actions(alone, 4)
    for env in (alone, together):
        env.reset(seed=3)
        for step in actions[:2]:
            env.step(step)
    # Slot 1 of `together` waits through two more steps of slot 0.
    together.reset(options={"reset_mask": first})
    for step in actions[2:]:
        together.step(step)
    expected = [alone.reset(options={"reset_mask": second})[0]]
    actual = [together.reset(options={"reset_mask": second})[0]]
    for step in actions[:2]:
        expected += alone.step(step)[:4]
        actual += together.step(step)[:4]
    assert same([array[1:] for array in expected], [array[1:] for array in actual])


def test_returned_arrays_belong_to_the_caller(vector_env: MetaVectorEnv) -> None:
    buffers = vector_env.buffers
    own = (buffers.observations, buffers.rewards, buffers.terminated, buffers.truncated)
    returned: list[Any] = [vector_env.reset(seed=0)[0]]
    for actions in random_actions(vector_env, 2):
        returned += vector_env.step(actions)[:4]
    for number, array in enumerate(returned):
        assert not any(np.shares_memory(array, other) for other in (*own, *returned[:number]))


def test_results_have_the_dtypes_and_spaces_they_should(vector_env: MetaVectorEnv) -> None:
    observations, _ = vector_env.reset(seed=0)
    assert vector_env.observation_space.contains(observations)
    for actions in random_actions(vector_env, 3):
        observations, rewards, terminated, truncated, _ = vector_env.step(actions)
        assert vector_env.observation_space.contains(observations)
    assert (observations.dtype, rewards.dtype) == (np.float32, np.float64)
    assert terminated.dtype == truncated.dtype == np.bool_


def test_info_tells_the_reward_terms_and_the_task(vector_env: MetaVectorEnv) -> None:
    tasks = vector_env.sample_tasks(4, seed=0)
    vector_env.reset_task(tasks)
    vector_env.reset(seed=0)
    _, rewards, _, _, infos = vector_env.step(random_actions(vector_env, 1)[0])
    terms = [value for name, value in infos.items() if name.startswith("reward_")]
    np.testing.assert_allclose(sum(terms), rewards, rtol=1e-12, atol=1e-12)
    for name in tasks[0]:
        np.testing.assert_array_equal(infos["task"][name], [task[name] for task in tasks])
    listed = gymnasium.wrappers.vector.DictInfoToList(vector_env).step(random_actions(vector_env, 1)[0])[4]
    assert len(listed) == 4


def test_calls_out_of_order_are_refused(env_id: str) -> None:
    vector_env = make_vector_env(env_id, {}, 2)
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


@pytest.mark.parametrize(
    "seed", [-1, [0, 1], [0, 1, 2, -3], [0.5, 1.5, 2.5, 3.5], 2**63, ["0", "1", "2", "3"]], ids=str
)
def test_bad_seed_is_refused(vector_env: MetaVectorEnv, seed: Any) -> None:
    with pytest.raises(ValueError, match="seed"):
        vector_env.reset(seed=seed)


@pytest.mark.parametrize("mask", [[True], [False] * 4, [1, 0, 0, 0]], ids=str)
def test_bad_reset_mask_is_refused(vector_env: MetaVectorEnv, mask: Any) -> None:
    vector_env.reset(seed=0)
    with pytest.raises(ValueError, match="reset_mask must be a boolean array"):
        vector_env.reset(options={"reset_mask": np.array(mask)})


@pytest.mark.parametrize("name", ["num_envs", "max_episode_steps"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_bad_count_is_refused_by_name(env_id: str, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {value!r}"):
        make_vector_env(env_id, **{"num_envs": 2, name: value})


def test_unknown_argument_is_refused_by_name(env_id: str) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        make_vector_env(env_id, {"no_such_argument": 1})


def test_unknown_render_mode_is_refused(env_id: str) -> None:
    with pytest.raises(ValueError, match="no render_mode 'depth'"):
        make_vector_env(env_id, {"render_mode": "depth"})


def test_single_environment_leaves_the_time_limit_to_gymnasium(env_id: str) -> None:
    env_class = type(gymnasium.make(env_id).unwrapped)
    with pytest.raises(TypeError, match="never truncates; pass max_episode_steps"):
        env_class(max_episode_steps=3)
