"""Slots that show their tasks or the last step: for every family, and for third-party environments."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from maml_rl.envs import LastStepParts, MetaVectorEnv, ObservedLastStep, ObservedTask, Retry, make_vector_env
from maml_rl.envs.calls import CallRules
from maml_rl.errors import TaskError
from maml_rl.policies import get_policy_for_env
from maml_rl.samplers import MultiTaskSampler
from maml_rl.samplers.failures import describe_env
from maml_rl.spaces import PackedSpace
from tests.envs.contract import assert_same_tasks, play, random_actions
from tests.envs.third_party import CellEnv, KnobsEnv, PixelEnv, SwitchesEnv, WalkEnv, WordEnv


def numbers_of(task: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.ravel(task[name]) for name in sorted(task)])


def flat(space: spaces.Space[Any], values: np.ndarray) -> np.ndarray:
    return np.stack([spaces.flatten(space, value) for value in values])


def split(space: spaces.Space[Any], seen: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an environment's own observations, flat, and the numbers after them."""
    if not isinstance(space, PackedSpace):
        return seen[:, :size], seen[:, size:]
    assert seen.dtype == np.uint8
    own, further = space.read(seen)
    return own.reshape(len(own), -1), further


@pytest.mark.parametrize("env", ["Bandit-K5-v0", "2DNavigation-v0", "PixelNavigation-v0", WalkEnv, PixelEnv, CellEnv])
def test_task_follows_the_environments_own_observation(env: Any) -> None:
    plain, shown = (make_vector_env(made, {}, 4, max_episode_steps=5) for made in (env, ObservedTask(env)))
    tasks = plain.sample_tasks(4, seed=3)
    assert_same_tasks(shown.sample_tasks(4, seed=3), tasks)
    plain.reset_task(tasks)
    shown.reset_task(tasks)
    own_space, space = plain.single_observation_space, shown.single_observation_space
    size = spaces.flatdim(own_space)
    if isinstance(own_space, spaces.Box) and not isinstance(space, PackedSpace):
        assert space.dtype == own_space.dtype
        np.testing.assert_array_equal(space.low[:size], own_space.low.ravel())
    for index, (array, observed) in enumerate(zip(play(plain, 7), play(shown, 7), strict=True)):
        # Observations of the reset, then for each step observations, rewards, terminated, truncated.
        if index == 0 or index % 4 == 1:
            own, after = split(space, observed, size)
            np.testing.assert_array_equal(own, flat(own_space, array))
            np.testing.assert_array_equal(after, np.array([numbers_of(task) for task in tasks], after.dtype))
            assert all(space.contains(row) for row in observed)
        else:
            np.testing.assert_array_equal(observed, array)
    plain.close()
    shown.close()


def test_a_finished_slot_keeps_its_final_observation_with_its_task() -> None:
    shown = make_vector_env(ObservedTask("2DNavigation-v0"), {}, 2, max_episode_steps=2)
    shown.reset_task([{"goal": [0.1, 0.2]}, {"goal": [0.3, 0.4]}])
    shown.reset(seed=0)
    for actions in random_actions(shown, 4):
        last = shown.step(actions)
    assert last[3].all()
    np.testing.assert_allclose(last[0][:, 2:], [[0.1, 0.2], [0.3, 0.4]], rtol=1e-6)


def drawing(draw: Callable[[int], list[Any]]) -> type[WalkEnv]:
    return type("Draws", (WalkEnv,), {"sample_tasks": lambda self, num_tasks: draw(num_tasks)})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (WordEnv, r"entry 'slope' of a task cannot be observed: expected numbers, got 'steep'"),
        (drawing(lambda num_tasks: [1.0] * num_tasks), r"drew 1\.0; a task is a dict of numbers and arrays"),
        (drawing(lambda num_tasks: [{}] * num_tasks), r"a dict of numbers and arrays can be observed, got \{\}"),
    ],
)
def test_tasks_that_are_not_numbers_are_refused(env: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_vector_env(ObservedTask(env))


def test_tasks_of_different_sizes_are_refused() -> None:
    growing = drawing(lambda num_tasks: [{"slope": np.zeros(1 + index)} for index in range(num_tasks)])
    shown = make_vector_env(ObservedTask(growing), {}, 2)
    with pytest.raises(TaskError, match=r"^slot 1: .* the same shape in all tasks, \(1,\) in the first, got \(2,\)"):
        shown.reset_task(shown.sample_tasks(2))


def test_observed_task_is_a_constructor_of_one_slot() -> None:
    slot = ObservedTask("2DNavigation-v0")(low=-0.1, high=0.1)
    assert slot.num_envs == 1
    assert abs(slot.reset(seed=0)[0][0, 2:]).max() <= 0.1


def play_trial(plain: MetaVectorEnv, shown: MetaVectorEnv, num_steps: int) -> None:
    """Play two episodes in both; compare the shown steps with the real ones."""
    parts = LastStepParts.of(plain.single_observation_space, plain.single_action_space)
    tasks = plain.sample_tasks(plain.num_envs, seed=3)
    plain.reset_task(tasks)
    shown.reset_task(tasks)
    further = np.zeros((plain.num_envs, parts.size - parts.observation.stop), np.float32)
    for episode in range(2):
        for env in (plain, shown):
            env.reset_buffers(np.arange(plain.num_envs) + 10 * episode)
        if episode:
            further[:, -1] = 1.0
        for step in range(num_steps):
            seen, own = shown.buffers.observations, plain.buffers.observations
            own_seen, after = split(shown.single_observation_space, seen, parts.observation.stop)
            assert seen.dtype in (np.float32, np.uint8)
            np.testing.assert_array_equal(own_seen, flat(plain.single_observation_space, own).astype(np.float32))
            np.testing.assert_array_equal(after, further)
            assert all(shown.single_observation_space.contains(row) for row in seen)
            (actions,) = random_actions(plain, 1, seed=step + 100 * episode)
            stepped = ~(plain.buffers.terminated | plain.buffers.truncated)
            for env in (plain, shown):
                env.step_send(0, actions)
                env.step_recv()
            np.testing.assert_array_equal(shown.buffers.rewards, plain.buffers.rewards)
            over = plain.buffers.terminated | plain.buffers.truncated
            outcome = np.column_stack([flat(plain.single_action_space, actions), plain.buffers.rewards, over])
            further = np.where(stepped[:, None], outcome, further).astype(np.float32)
    plain.close()
    shown.close()


@pytest.mark.parametrize(
    "env",
    [
        *("Bandit-K5-v0", "2DNavigation-v0", "PixelNavigation-v0"),
        *(WalkEnv, PixelEnv, CellEnv, KnobsEnv, SwitchesEnv),
    ],
)
def test_last_step_follows_the_environments_own_observation(env: Any) -> None:
    plain, shown = (make_vector_env(made, {}, 3, max_episode_steps=3) for made in (env, ObservedLastStep(env)))
    play_trial(plain, shown, 5)


def test_oracle_can_also_observe_its_last_step() -> None:
    both = make_vector_env(ObservedLastStep(ObservedTask("2DNavigation-v0")), {}, 2)
    assert both.single_observation_space.shape == (2 + 2 + 2 + 2,)


def test_parts_of_the_last_step_are_found_in_the_space() -> None:
    shown = make_vector_env(ObservedLastStep("TabularMDP-v0"), {}, 1)
    parts = LastStepParts.within(shown.single_observation_space, shown.single_action_space)
    assert parts == LastStepParts(slice(0, 10), slice(10, 15), slice(15, 16), slice(16, 17), 17)
    with pytest.raises(ValueError, match="observe_last=True"):
        LastStepParts.within(spaces.Box(0, 1, (5,)), shown.single_action_space)


class FailsAtItsSecondStep(WalkEnv):
    def step(self, action: Any) -> Any:
        if self.steps == 1:
            raise Retry
        return super().step(action)


def test_restarted_episode_shows_what_it_began_with_after_a_reset_of_other_slots() -> None:
    env = make_vector_env(ObservedLastStep(FailsAtItsSecondStep), {}, 2)
    env.reset_task(env.sample_tasks(2, seed=0))
    env.reset(seed=1)
    actions = np.full((2, 1), 0.5, np.float32)
    assert (env.step(actions)[0][:, -3] == 0.5).all()
    env.reset(seed=1, options={"reset_mask": np.array([True, False])})
    shown = env.step(actions)[0]
    assert env.buffers.restarted.tolist() == [False, True]
    assert not shown[1, -3:].any()
    env.close()


def test_step_of_a_phase_that_was_left_is_not_shown_in_the_next_one() -> None:
    """As after an error of another slot."""
    with closing(make_vector_env(ObservedLastStep(WalkEnv), {}, 2, rules=CallRules(stepping="threads"))) as env:
        tasks = env.sample_tasks(2, seed=0)
        env.reset_task(tasks)
        env.reset(seed=1)
        for slot in range(2):
            env.step_send(slot, np.full((1, 1), 0.5, np.float32))
        env.reset_task(tasks)
        for slot in range(2):
            env.reset_send(slot, slot)
        assert env.step_recv() == [0, 1]
        assert not env.buffers.observations[:, -3:].any()


@pytest.mark.slow
@pytest.mark.parametrize("env", ["TabularMDP-v0", ObservedTask(WalkEnv)])
def test_sampler_shows_the_last_step_in_every_placement(env: Any) -> None:
    digests = set()
    policy = get_policy_for_env(make_vector_env(ObservedLastStep(env), {}, 1), (4,))
    for options in ({"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "inference": "central"}):
        settings: dict[str, Any] = {"max_episode_steps": 4, "slots_per_task": 1, "seed": 0, "observe_last": True}
        if options["num_workers"]:
            settings["start_method"] = "fork"
        with MultiTaskSampler(env, {}, 3, policy, **settings, **options) as sampler:
            episodes = sampler.rollout_trials(sampler.sample_tasks(3))
        digests.add(episodes.digest())
    assert len(digests) == 1
    first, later = episodes.observations[:, 0, 0], episodes.observations[:, 0, 1:]
    reward = policy.input_size - 2
    assert not first[:, reward:].any()
    last = episodes.rewards.gather(1, (episodes.lengths - 1).unsqueeze(1))[:, 0]
    np.testing.assert_array_equal(later[..., reward], last[:, :-1])
    assert (later[..., reward + 1] == 1.0).all()


def test_error_names_the_observed_environment() -> None:
    assert describe_env(ObservedLastStep(ObservedTask(WalkEnv))).endswith(
        "WalkEnv with observed tasks with observed last steps"
    )
