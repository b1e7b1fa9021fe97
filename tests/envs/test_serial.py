"""The adapter around third-party environments."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

from maml_rl.envs import Retry
from maml_rl.envs.calls import CallRules
from maml_rl.envs.global_generators import SlotGenerators
from maml_rl.envs.serial import SerialVectorEnv, Slot
from tests.envs.third_party import SplitEnv, WalkEnv

SLOPES = [{"slope": slope} for slope in (0.5, -2.0, 3.0)]


def walks(num_envs: int = 3, make_env: Any = WalkEnv, **kwargs: Any) -> SerialVectorEnv:
    vector_env = SerialVectorEnv(partial(make_env, **kwargs), num_envs)
    vector_env.reset_task(SLOPES[:num_envs])
    return vector_env


def test_actions_are_clipped_to_the_bounds_and_have_their_dtype() -> None:
    vector_env = walks(1)
    start = vector_env.reset(seed=0)[0][0, 0]
    observations = vector_env.step(np.array([[7.0]]))[0]
    assert observations[0, 0] == pytest.approx(start + 0.5)


@pytest.mark.parametrize(
    ("make_env", "limit"),
    [
        (WalkEnv, None),
        (lambda: TimeLimit(WalkEnv(), 7), 7),
        (lambda: RecordEpisodeStatistics(TimeLimit(WalkEnv(), 7)), 7),
        (lambda: TimeLimit(TimeLimit(WalkEnv(), 7), 9), 7),
    ],
)
def test_time_limit_is_found_under_wrappers(make_env: Any, limit: int | None) -> None:
    assert SerialVectorEnv(make_env).max_episode_steps == limit


def test_methods_and_declarations_are_found_under_wrappers() -> None:
    known = type("Known", (WalkEnv,), {"value_ranges": {"reward": (0, 1)}})
    vector_env = walks(make_env=lambda: RecordEpisodeStatistics(TimeLimit(known(), 5)))
    assert vector_env.value_ranges == {"reward": (0.0, 1.0)}
    vector_env.reset(seed=0)
    assert len(vector_env.sample_tasks(2)) == 2
    assert [env.unwrapped.slope for env in vector_env.envs] == [0.5, -2.0, 3.0]


def test_long_seeds_are_masked_to_32_bits() -> None:
    vector_env = walks()
    infos = vector_env.reset(seed=[2**32 + 5, 5, 2**63 - 1])[1]
    assert infos["seed"].tolist() == [5, 5, 2**32 - 1]
    first = vector_env.buffers.observations.copy()
    vector_env.reset_buffers(np.array([2**32 + 5, 5, 2**63 - 1]))
    np.testing.assert_array_equal(vector_env.buffers.observations, first)
    assert (first[0] == first[1]).all()


def test_seed_zero_is_a_seed_and_a_missing_seed_stays_none() -> None:
    vector_env = walks()
    assert vector_env.reset(seed=0)[1]["seed"].tolist() == [0, 1, 2]
    assert vector_env.reset()[1]["seed"].tolist() == [-1, -1, -1]
    assert vector_env.reset(seed=[0, None, 0])[1]["seed"].tolist() == [0, -1, 0]


def test_seeded_sample_tasks_repeats_and_needs_a_reset_after_it() -> None:
    vector_env = walks()
    vector_env.reset(seed=3)
    tasks = vector_env.sample_tasks(4, seed=2**40 + 1)
    assert tasks == vector_env.sample_tasks(4, seed=2**40 + 1)
    assert tasks != vector_env.sample_tasks(4)
    assert tasks != vector_env.sample_tasks(4, seed=0)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset first"):
        vector_env.step(np.zeros((3, 1), np.float32))


def test_reset_mask_resets_only_the_masked_slots_and_other_options_pass_through() -> None:
    vector_env = walks()
    vector_env.reset(seed=0)
    before, rewards = vector_env.step(np.full((3, 1), 0.1, np.float32))[:2]
    mask = np.array([False, True, False])
    observations, infos = vector_env.reset(seed=7, options={"reset_mask": mask, "level": 3})
    np.testing.assert_array_equal(observations[~mask], before[~mask])
    np.testing.assert_array_equal(vector_env.buffers.rewards, np.where(mask, 0.0, rewards))
    assert infos["seed"].tolist() == [0, 8, 0]
    assert infos["options"]["level"].tolist() == [0, 3, 0]
    assert [env.steps for env in vector_env.envs] == [1, 0, 1]


class WithObservation(WalkEnv):
    def __init__(self, observation: Any, space: Any) -> None:
        super().__init__()
        self.observation, self.observation_space = observation, space

    def observe(self) -> Any:
        return self.observation


@pytest.mark.parametrize(
    ("observation", "space"),
    [
        (np.zeros(1), spaces.Box(-1.0, 1.0, (2,))),
        (0.0, spaces.Box(-1.0, 1.0, (2,))),
        (np.zeros((4, 4)), spaces.Box(0, 255, (4, 4), np.uint8)),
        (np.array([1.5]), spaces.Box(0, 255, (1,), np.uint8)),
        (1.5, spaces.Discrete(3)),
    ],
)
def test_observation_that_does_not_fit_its_space_is_refused(observation: Any, space: Any) -> None:
    vector_env = SerialVectorEnv(partial(WithObservation, observation, space))
    with pytest.raises(ValueError, match=r"returned an observation of shape .* its space is"):
        vector_env.reset(seed=0)


def test_slots_with_different_spaces_are_refused_and_closed() -> None:
    made: list[WithObservation] = []

    def make() -> WithObservation:
        made.append(WithObservation(0, spaces.Discrete(3 + len(made) // 2)))
        return made[-1]

    with pytest.raises(ValueError, match=r"slot 0 has Discrete\(3\), slot 2 has Discrete\(4\)"):
        SerialVectorEnv(make, 4)
    assert len(made) == 3
    assert all(env.closed for env in made)


def test_failing_constructor_closes_what_was_made_and_a_wrong_number_is_refused() -> None:
    made: list[WalkEnv] = []

    def make() -> WalkEnv:
        if len(made) == 2:
            raise OSError("no more licenses")
        made.append(WalkEnv())
        return made[-1]

    with pytest.raises(OSError, match="no more licenses"):
        SerialVectorEnv(make, 3)
    assert [env.closed for env in made] == [True, True]
    for wrong in (0, -2, 1.5):
        with pytest.raises(ValueError, match="num_envs must be an integer of at least 1"):
            SerialVectorEnv(WalkEnv, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("make_env", [SplitEnv, lambda: TimeLimit(SplitEnv(), 5)])
def test_evaluations_draw_test_tasks_where_a_family_has_them(make_env: Any) -> None:
    vector_env = SerialVectorEnv(make_env)
    training, test = vector_env.sample_tasks(9, seed=0), vector_env.sample_tasks(9, seed=0, evaluation=True)
    assert all(-1.0 <= task["slope"] <= 1.0 for task in training)
    assert all(2.0 <= task["slope"] <= 3.0 for task in test)
    assert vector_env.sample_tasks(9, seed=0, evaluation=True) == test
    others = walks()
    assert others.sample_tasks(9, seed=0, evaluation=True) == others.sample_tasks(9, seed=0)


def test_current_slot_is_that_of_the_environment_that_raised() -> None:
    vector_env = walks()
    with pytest.raises(ValueError, match="expected the entry 'slope'"):
        vector_env.reset_task([SLOPES[0], {"tilt": 1.0}, SLOPES[2]])
    assert vector_env.current_slots.tolist() == [1]


def test_every_slot_is_rendered() -> None:
    pictures = SerialVectorEnv(lambda: WalkEnv(render_mode="rgb_array"), 2).render()
    assert pictures is not None
    assert [picture.shape for picture in pictures] == [(2, 2, 3)] * 2
    assert SerialVectorEnv(WalkEnv).render() is None


class Busy(WalkEnv):
    """Raises `Retry` in as many resets and steps as are left of them."""

    resets, steps = 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.resets:
            self.resets -= 1
            raise Retry(0.5, "the service is busy")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.steps:
            self.steps -= 1
            raise Retry
        return super().step(action)


def test_call_is_repeated_as_often_as_allowed_after_the_pauses_that_it_asks_for() -> None:
    env, slot, pauses = Busy(), Slot(1, 2, SlotGenerators(2)), []
    slot.take(env)

    def begin(resets: int) -> Any:
        env.resets = resets
        observation, _ = slot.reset(7, None).carry_out(lambda number, seconds: pauses.append((number, seconds)))
        return observation.tolist()

    assert begin(0) == begin(2)
    assert (pauses, slot.restarts, slot.restarted) == ([(1, 0.5)] * 2, 2, False)
    with pytest.raises(RuntimeError, match=r"raised Retry 3 times .*max_retries=2 .*: the service is busy"):
        begin(3)
    # The count begins anew.
    assert begin(2) == begin(0)
    assert (len(pauses), slot.restarts) == (6, 6)


def test_retry_of_a_step_begins_the_episode_again_once() -> None:
    env, slot = Busy(), Slot(0, 3, SlotGenerators(1))
    slot.take(env)
    first, _ = slot.reset(7, None).carry_out(lambda number, seconds: None)
    env.steps, env.resets = 1, 1
    again, _ = slot.step(np.zeros(1, np.float32)).carry_out(lambda number, seconds: None)
    np.testing.assert_array_equal(again, first)
    assert (slot.restarts, slot.restarted) == (2, True)


def test_mark_changes_during_a_pause_and_is_the_slot_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busier(Busy):
        resets = 1

    vector_env, marks = SerialVectorEnv(Busier, 1, rules=CallRules(max_retries=1)), []
    monkeypatch.setattr("maml_rl.envs.serial.sleep", lambda seconds: marks.append(int(vector_env.current_slots[0])))
    monkeypatch.setattr("maml_rl.envs.serial.monotonic", lambda: 0.3 * len(marks))
    vector_env.reset(seed=0)
    assert (marks, vector_env.current_slots.tolist()) == ([-1, 0], [0])
