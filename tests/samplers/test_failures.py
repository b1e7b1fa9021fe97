"""An environment's error is reported in the same way in every placement: with its id, slot, task and step."""

import asyncio
import gc
import re
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_env import HORIZON, FaultyEnv
from faulty_sampler import faulty_sampler
from slow_env import OVER

from maml_rl import MultiTaskSampler
from maml_rl.errors import ChildEnvError, ChildEnvTimeout, TaskError, explain
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.failures import describe_exit, describe_task, describe_tasks, shorten
from tests.envs.third_party import WalkEnv

pytestmark = [pytest.mark.timeout(60)]

PLACEMENTS: dict[str, dict[str, Any]] = {
    "in process": {"num_workers": 0},
    "central": {"num_workers": 2, "start_method": "fork", "inference": "central"},
    "in children": {"num_workers": 2, "start_method": "fork", "inference": "worker"},
}
PLACES = {
    "make": "while making the environment",
    "sample_tasks": "in sample_tasks",
    "reset_task": "in reset_task",
    "reset": "in reset",
    3: "in step 3",
}


TASKS = [{"goal": 1.0}, {"goal": 7.0}]


def fail(placement: str, fault: str, place: Any) -> ChildEnvError:
    """Return the error of sampling in an environment that fails at one place."""
    with faulty_sampler({"fault": fault, "place": place}, **PLACEMENTS[placement]) as sampler:
        # Drawing tasks resets a slot, too.
        work = partial(sampler.sample_tasks, 2) if place == "sample_tasks" else partial(sampler.rollout, TASKS)
        with pytest.raises(ChildEnvError) as raised:
            work()
    return raised.value


@pytest.mark.parametrize(
    ("place", "fault"), [*((place, "raise_os") for place in PLACES), (3, "leave_quietly"), (3, "raise_unpicklable")]
)
def test_error_of_an_environment_here_names_environment_slot_task_and_step(fault: str, place: Any) -> None:
    error = fail("in process", fault, place)
    name = {"leave_quietly": "SystemExit", "raise_os": "OSError", "raise_unpicklable": "UnpicklableError"}[fault]
    told = str(error)
    assert told.startswith("faulty_env.FaultyEnv raised in slot 0")
    assert f", {PLACES[place]}: {name} in " in told or "<no text" in told
    assert "\n" not in told
    assert explain(error) in told
    assert type(error.__cause__).__name__ == name
    if place in ("reset_task", "reset", 3):
        assert "with the task {'goal': 1.0}" in told


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("placement", ["central", "in children"])
def test_errors_from_workers_name_the_same(placement: str, place: Any) -> None:
    told = str(fail(placement, "leave_quietly", place))
    assert told.startswith("SystemExit in slot ")
    assert f", {PLACES[place]}, of faulty_env.FaultyEnv: 0" in told
    if place in ("reset_task", "reset", 3):
        assert told.startswith(
            (
                "SystemExit in slot 0 with the task {'goal': 1.0}, w",
                "SystemExit in slot 2 with the task {'goal': 7.0}, w",
            )
        )


def test_slot_that_raises_is_the_one_that_is_named() -> None:
    with (
        faulty_sampler({"fault": "raise", "place": 1, "slot_task": 7.0}, num_workers=0) as sampler,
        pytest.raises(ChildEnvError, match=r"raised in slot 2 with the task \{'goal': 7.0\}, in step 1: .*out of"),
    ):
        sampler.rollout(TASKS)


def test_ctrl_c_in_an_environment_of_this_process_is_not_wrapped() -> None:
    with faulty_sampler({"fault": "interrupt", "place": 1}, num_workers=0) as sampler, pytest.raises(KeyboardInterrupt):
        sampler.rollout(sampler.sample_tasks(2))


def test_refused_task_stays_a_task_error() -> None:
    def refuse(*_: Any) -> None:
        raise TaskError("the entry 'goal' is missing")

    class Refusing(FaultyEnv):
        reset_task = refuse

    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    with (
        MultiTaskSampler(Refusing, {}, 2, policy, num_workers=0, max_episode_steps=HORIZON) as sampler,
        pytest.raises(TaskError, match=r"^the entry 'goal' is missing$"),
    ):
        sampler.rollout(sampler.sample_tasks(1))


def test_sampler_continues_after_an_error_in_this_process(tmp_path: Path) -> None:
    with faulty_sampler({"fault": "raise_os", "place": 2, "marker": str(tmp_path / "once")}, num_workers=0) as sampler:
        tasks = sampler.sample_tasks(2)
        with pytest.raises(ChildEnvError):
            sampler.rollout(tasks)
        again = sampler.rollout(tasks).digest()
    with faulty_sampler(None, num_workers=0) as sampler:
        assert sampler.rollout(sampler.sample_tasks(2)).digest() == again


@pytest.mark.parametrize("fault", ["leave_quietly", "raise_os"])
def test_environment_that_fails_to_close_in_a_sampler_is_a_warning(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty_sampler({"fault": fault, "place": "close"}, num_workers=0) as sampler:
        sampler.rollout(sampler.sample_tasks(1))
    assert "close() raises" in caplog.text


def test_environment_is_freed_after_its_last_use_without_the_garbage_collector() -> None:
    made: list[Any] = []

    class Counted(FaultyEnv):
        def __init__(self) -> None:
            super().__init__()
            made.append(weakref.ref(self))

    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    gc.collect()
    gc.disable()
    try:
        with MultiTaskSampler(Counted, {}, 2, policy, num_workers=0, max_episode_steps=HORIZON) as sampler:
            sampler.rollout(sampler.sample_tasks(1))
        del sampler
        # The collector of a forked child, which inherits the environment, must not find it.
        assert [env() for env in made] == [None] * len(made) != []
    finally:
        gc.enable()


class StopsEnv(WalkEnv):
    """Raises errors whose text is empty, or which Python replaces where they leave a generator."""

    def __init__(self, error: type[BaseException], place: str) -> None:
        super().__init__()
        self.error, self.place_of_error = error, place

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.place_of_error == "reset":
            raise self.error
        return super().reset(seed=seed, options=options)

    def reset_task(self, task: Any) -> None:
        if self.place_of_error == "reset_task":
            raise self.error
        super().reset_task(task)

    def step(self, action: Any) -> Any:
        if self.place_of_error == "step":
            raise self.error
        return super().step(action)


@pytest.mark.parametrize(
    ("options", "error", "place"),
    [
        (PLACEMENTS["in process"], StopIteration, "step"),
        (PLACEMENTS["in process"], asyncio.CancelledError, "reset"),
        (PLACEMENTS["in process"], GeneratorExit, "reset_task"),
        (PLACEMENTS["central"], GeneratorExit, "step"),
        (PLACEMENTS["in children"], GeneratorExit, "step"),
        ({"num_workers": 0, "stepping": "threads"}, StopIteration, "step"),
        ({"num_workers": 0, "stepping": "threads"}, GeneratorExit, "step"),
    ],
    ids=str,
)
def test_error_without_a_text_is_reported_by_its_line(error: Any, place: str, options: dict[str, Any]) -> None:
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    env = partial(StopsEnv, error=error, place=place)
    with (
        MultiTaskSampler(env, {}, 2, policy, seed=0, max_episode_steps=3, **options) as sampler,
        pytest.raises(ChildEnvError) as raised,
    ):
        sampler.rollout([{"slope": 0.5}, {"slope": 0.2}])
    first = str(raised.value).splitlines()[0]
    assert re.search(
        rf"{error.__name__} in .*test_failures.py, line \d+: raise self.error|: in .*line \d+: raise", first
    )
    assert first.count(error.__name__) == 1
    assert "generator" not in first
    assert "slot" in first


class WrongShapeEnv(WalkEnv):
    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return np.zeros(len(observation) + 1, np.float32), *rest


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_observation_of_a_wrong_shape_is_one_line_in_every_placement(placement: str) -> None:
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    options = PLACEMENTS[placement]
    with (
        MultiTaskSampler(WrongShapeEnv, {}, 1, policy, seed=0, max_episode_steps=3, **options) as sampler,
        pytest.raises(ChildEnvError) as raised,
    ):
        sampler.rollout([{"slope": 0.5}])
    told = str(raised.value)
    assert "returned an observation of shape (3,)" in told
    assert "in slot 0 with the task {'slope': 0.5}" in told
    assert "\n" not in told


class HangsEnv(WalkEnv):
    def step(self, action: Any) -> Any:
        if self.slope == 0.5:
            OVER.wait()
        return super().step(action)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_slot_that_hangs_is_named_once_in_plain_words(num_workers: int) -> None:
    OVER.clear()
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    options = {"stepping": "threads", "step_timeout": 0.5, "start_method": "fork", "num_workers": num_workers}
    with (
        MultiTaskSampler(HangsEnv, {}, 1, policy, seed=0, max_episode_steps=3, **options) as sampler,
        pytest.raises(ChildEnvTimeout) as raised,
    ):
        sampler.rollout([{"slope": 0.2}, {"slope": 0.5}])
    OVER.set()
    where = r", worker 1 \(pid \d+, slots? 1\)" if num_workers else ""
    line = (
        rf"test_failures.HangsEnv hangs in slot 1 with the task {{'slope': 0.5}}{where}, in step \d: a call has not re"
    )
    assert re.match(line, str(raised.value))


# In words.


def test_descriptions_stay_on_one_line_and_within_bounds() -> None:
    task = {"a": 1.5, "b": [1, 2], "c": list(range(1000)), "d": "x\ny" * 1000}
    text = describe_task(task)
    assert text.startswith("{'a': 1.5, 'b': [1, 2], 'c': <1000 numbers of shape (1000,)>, 'd': ")
    assert len(text) < 250
    assert "\n" not in text
    other = {"a": 2}
    assert describe_tasks([task, task, other, other]).endswith("{'a': 2}")
    assert describe_tasks([{"a": number} for number in range(9)]) == "{'a': 0}, {'a': 1}, {'a': 2}, ... (9 in all)"
    assert describe_task(3) == "3"


def test_shortened_text_keeps_both_ends() -> None:
    assert shorten("short", 10) == "short"
    text = shorten("begin" + "x" * 10_000 + "end", 100)
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "9908 characters left out" in text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "killed by SIGKILL (by a user, or by the kernel when memory ran out)"),
        (-11, "killed by SIGSEGV (Segmentation fault)"),
        (-50, "killed by signal 50"),
        (3, "exited with status 3"),
        (None, "unknown reason"),
    ],
)
def test_cause_of_death_is_reported(code: int | None, text: str) -> None:
    assert text in describe_exit(code)
