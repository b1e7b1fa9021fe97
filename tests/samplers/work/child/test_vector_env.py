"""ParallelVectorEnv: its results are those of the same slots in one process, for any number of children."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from faulty_env import DifferentEnv, FaultyEnv, NestedEnv
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from phases import NUM_SLOTS, first_goals, make_parallel, play, play_in_process

from maml_rl.envs import make_vector_env
from maml_rl.envs.meta_env import SlotCounts
from maml_rl.errors import ChildEnvError, TaskError
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv

pytestmark = pytest.mark.timeout(60)


# The same as in one process.


@pytest.mark.parametrize("num_workers", [1, 3, 100])
def test_slots_give_the_same_results_for_any_number_of_children(num_workers: int) -> None:
    with make_parallel(num_workers) as vector_env:
        assert vector_env.num_workers == len(vector_env.pids) == min(num_workers, NUM_SLOTS)
        lengths = [part.stop - part.start for part in vector_env.parts]
        assert sum(lengths) == NUM_SLOTS
        assert max(lengths) - min(lengths) <= 1
        assert [part.stop for part in vector_env.parts[:-1]] == [part.start for part in vector_env.parts[1:]]
        np.testing.assert_array_equal(play(vector_env), play_in_process())


def test_batched_families_give_the_same_results_through_gymnasiums_interface() -> None:
    with (
        ParallelVectorEnv("TabularMDP-v0", {}, 3, 2, start_method="fork") as children,
        closing(make_vector_env("TabularMDP-v0", {}, 3)) as alone,
    ):
        assert children.metadata["autoreset_mode"] is AutoresetMode.DISABLED
        assert children.observation_space == alone.observation_space
        assert children.action_space == alone.action_space
        assert children.max_episode_steps == alone.max_episode_steps
        tasks = alone.sample_tasks(3, seed=4)
        action_space = gymnasium.vector.utils.batch_space(alone.single_action_space, 3)
        action_space.seed(1)
        results = []
        for vector_env in (alone, children):
            vector_env.reset_task(tasks)
            results.append([*vector_env.reset(seed=[3, 1, 2])[:1]])
        for _ in range(4):
            actions = action_space.sample()
            for vector_env, result in zip((alone, children), results, strict=True):
                result.extend(vector_env.step(actions)[:4])
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


def test_results_are_the_callers_own() -> None:
    with make_parallel() as vector_env:
        observations, _ = vector_env.reset(seed=0)
        kept = observations.copy()
        stepped, rewards, *_ = vector_env.step(np.ones((NUM_SLOTS, 1), np.float32))
        kept_rewards = rewards.copy()
        vector_env.step(np.ones((NUM_SLOTS, 1), np.float32))
        np.testing.assert_array_equal(observations, kept)
        np.testing.assert_array_equal(rewards, kept_rewards)
        assert not np.shares_memory(stepped, vector_env.buffers.observations)


# Waiting.


@pytest.fixture
def half_blocked(tmp_path: Path) -> Any:
    """Two children; the second does not finish its first step before the gate is open."""
    marker = str(tmp_path / "marker")
    with make_parallel(fault="wait", place=0, marker=marker, slot_task=first_goals()[3]) as vector_env:
        vector_env.reset_task([{"goal": goal} for goal in first_goals()])
        vector_env.reset_buffers(np.arange(NUM_SLOTS))
        for index, part in enumerate(vector_env.parts):
            vector_env.step_send(index, np.zeros((part.stop - part.start, 1), np.float32))
        yield vector_env, Path(f"{marker}.gate")


def test_partial_wait_takes_at_least_one_worker_and_all_that_have_replied(half_blocked: Any) -> None:
    vector_env, gate = half_blocked
    assert vector_env.step_recv(0.0) == [0]
    gate.touch()
    assert vector_env.step_recv(0.05) == [1]
    with pytest.raises(NoAsyncCallError):
        vector_env.step_recv()


def test_wait_for_one_group_leaves_the_other_alone(half_blocked: Any) -> None:
    vector_env, gate = half_blocked
    assert vector_env.step_recv(None, [0]) == [0]
    vector_env.step_send(0, np.zeros((2, 1), np.float32))
    gate.touch()
    assert vector_env.step_recv(None, [1]) == [1]
    # The reply of worker 0, which arrived during the wait for worker 1, is kept.
    assert vector_env.step_recv(None, [0]) == [0]


def test_unfinished_step_is_dropped_by_the_next_reset(half_blocked: Any) -> None:
    vector_env, gate = half_blocked
    assert vector_env.step_recv(0.0) == [0]
    gate.touch()
    np.testing.assert_array_equal(play(vector_env), play_in_process())
    assert vector_env.pool.generation == 1


# Calls out of order, and bad input.


def test_calls_out_of_order_are_refused() -> None:
    actions = np.zeros((2, 1), np.float32)
    with make_parallel() as vector_env:
        with pytest.raises(ResetNeeded):
            vector_env.step_send(0, actions)
        vector_env.reset(seed=0)
        with pytest.raises(NoAsyncCallError):
            vector_env.step_recv()
        vector_env.step_send(0, actions)
        with pytest.raises(AlreadyPendingCallError):
            vector_env.step_send(0, actions)
        with pytest.raises(NoAsyncCallError):
            vector_env.step_recv(None, [1])
        assert vector_env.step_recv() == [0]


def test_wrong_shapes_are_refused() -> None:
    with make_parallel() as vector_env:
        with pytest.raises(TaskError, match="one task for each of the 5 slots, got 2"):
            vector_env.reset_task([{"goal": 0.0}] * 2)
        with pytest.raises(ValueError, match="one seed for each of the 5 slots"):
            vector_env.reset_buffers([1, 2])
        for options in ({}, {"seed": 0, "options": {"reset_mask": np.ones(5, np.bool_)}}):
            with pytest.raises(ValueError, match="reset together, each with a seed"):
                vector_env.reset(**options)
        vector_env.reset(seed=0)
        with pytest.raises(ValueError, match=r"shape \(2, 1\) for worker 0, got \(3, 1\)"):
            vector_env.step_send(0, np.zeros((3, 1)))
        with pytest.raises(ValueError, match="one action for each"):
            vector_env.step(np.zeros((3, 1)))


def test_numbers_out_of_range_and_unknown_ids_are_refused_by_name() -> None:
    for name in ("num_envs", "num_workers", "step_timeout"):
        with pytest.raises(ValueError, match=name):
            ParallelVectorEnv(FaultyEnv, **{name: 0})
    with pytest.raises(ValueError, match=r"did you mean '2DNavigation-v0'"):
        ParallelVectorEnv("2DNavigatoin-v0")


def test_task_that_cannot_be_pickled_is_named() -> None:
    with make_parallel() as vector_env:
        tasks: list[dict[str, Any]] = [{"goal": 0.0} for _ in range(NUM_SLOTS)]
        tasks[3] = {"goal": 0.0, "hook": lambda: None}
        with pytest.raises(TypeError, match=r"entry 'hook' of the task of slot 3.*cannot be pickled"):
            vector_env.reset_task(tasks)
        np.testing.assert_array_equal(play(vector_env), play_in_process())


def test_spaces_that_differ_between_children_or_are_unsupported_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"same observation space: slot 0 \(worker 0\) has Box.*slot 1 \(worker 1\) has Box"
    ):
        ParallelVectorEnv(DifferentEnv, None, 2, 2, start_method="fork")
    with pytest.raises(ChildEnvError, match="unsupported space Sequence"):
        ParallelVectorEnv(NestedEnv, None, 2, 2, start_method="fork")


def test_children_get_whole_tasks_where_they_stay_together() -> None:
    with ParallelVectorEnv("2DNavigation-v0", {}, 6, 2, granularity=2, start_method="fork") as slots:
        assert [part.stop - part.start for part in slots.parts] == [2, 4]


# What workers report.


def test_counts_are_those_of_all_workers_and_memory_is_released_at_the_end() -> None:
    with make_parallel(2) as vector_env:
        progress = vector_env._progress
        progress.retries[:], progress.waiting_seconds[:] = (2, 3), (0.5, 2.0)
        assert (vector_env.retries, vector_env.waiting_seconds) == (5, 2.0)
        assert vector_env.slot_counts() is None
        progress.slot_counts[0] = 1, 1, 0, 1, 0.5
        # The other worker has not begun.
        assert vector_env.slot_counts() is None
        progress.slot_counts[1] = 0, 2, 1, 0, 2.0
        # Slot 0 of the second worker, whose slots begin at 2.
        assert vector_env.slot_counts() == SlotCounts(1, 3, 1, 2, 2.0)
        vector_env.reset(seed=0)
        for _ in range(2):
            vector_env.step(np.zeros((NUM_SLOTS, 1), np.float32))
        assert {worker.doing for worker in vector_env.pool.living()} == {"between commands, after 2 steps"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(vector_env.memory)


def test_workers_that_differ_from_those_they_replace_are_all_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(self: ParallelVectorEnv, index: int, slot: Any) -> None:
        raise ValueError(f"worker {index} differs")

    with make_parallel() as vector_env:
        vector_env.pool.stop(0.0)
        monkeypatch.setattr(ParallelVectorEnv, "_compare", differs)
        with pytest.raises(ValueError, match="worker 0 differs"):
            vector_env.reset(seed=0)
        assert vector_env.pids == []


def test_workers_with_threads_have_time_to_say_themselves_what_hangs() -> None:
    for stepping, has_grace in (("serial", False), ("threads", True)):
        with make_parallel(options={"stepping": stepping}) as vector_env:
            assert (vector_env.pool.grace > 0.0) == has_grace
