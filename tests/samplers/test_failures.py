"""An environment's error is reported in the same way in every placement: with its id, slot, task and step."""

import asyncio
import re
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from faulty_env import FaultyEnv
from faulty_sampler import PLACES, TASKS, error_of
from placements import PLACEMENTS

from maml_rl import MultiTaskSampler
from maml_rl.envs import ObservedTask
from maml_rl.errors import ChildEnvError, ChildEnvTimeout, NonFiniteError, TaskError
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.failures import describe_env, describe_exit, describe_task, describe_tasks, failed, shorten
from tests.envs.third_party import WalkEnv

pytestmark = [pytest.mark.timeout(60)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "place"),
    [("central", "make"), ("central", "reset_task"), ("in children", "sample_tasks"), ("in children", 3)],
)
def test_errors_from_workers_name_the_same(placement: str, place: Any) -> None:
    told = str(error_of("leave_quietly", place, **PLACEMENTS[placement]))
    assert told.startswith("SystemExit in slot ")
    assert f", {PLACES[place]}, of faulty_env.FaultyEnv: 0" in told
    assert "in _leave_quietly" in told
    if place in ("reset_task", 3):
        assert told.startswith(
            (
                "SystemExit in slot 0 with the task {'goal': 1.0}, w",
                "SystemExit in slot 2 with the task {'goal': 7.0}, w",
            )
        )


def raised_by(env: Any, tasks: Any, kind: type[Exception] = ChildEnvError, **options: Any) -> str:
    """Return the error of a phase of these tasks, with one slot of each."""
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    with (
        MultiTaskSampler(env, {}, 1, policy, seed=0, max_episode_steps=3, **options) as sampler,
        pytest.raises(kind) as raised,
    ):
        sampler.rollout(tasks)
    return str(raised.value)


def test_refused_task_stays_a_task_error() -> None:
    def refuse(*_: Any) -> None:
        raise TaskError("the entry 'goal' is missing")

    class Refusing(FaultyEnv):
        reset_task = refuse

    assert raised_by(Refusing, TASKS, TaskError, num_workers=0) == "the entry 'goal' is missing"


@pytest.mark.parametrize("placement", ["in process", "in children"])
def test_task_with_an_object_in_it_is_refused_in_every_placement(placement: str) -> None:
    told = raised_by(WalkEnv, [{"slope": Ellipsis}], **PLACEMENTS[placement])
    assert "in slot 0 with the task {'slope': Ellipsis}" in told
    assert ": a task holds numbers and arrays, got Ellipsis" in told


class StopsEnv(FaultyEnv):
    """Raises errors whose text is empty, or which Python replaces where they leave a generator."""

    def __init__(self, error: type[BaseException], place: str | int) -> None:
        self.error = error
        super().__init__("stop", place)

    def _stop(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("options", "error", "place"),
    [
        (PLACEMENTS["in process"], StopIteration, 0),
        (PLACEMENTS["in process"], asyncio.CancelledError, "reset"),
        (PLACEMENTS["in process"], GeneratorExit, "reset_task"),
        (PLACEMENTS["in children"], GeneratorExit, 0),
        ({"num_workers": 0, "stepping": "threads"}, GeneratorExit, 0),
    ],
    ids=str,
)
def test_error_without_a_text_is_reported_by_its_line(error: Any, place: str | int, options: dict[str, Any]) -> None:
    first = raised_by(partial(StopsEnv, error=error, place=place), TASKS, **options).splitlines()[0]
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


@pytest.mark.parametrize("placement", ["in process", "in children"])
def test_observation_of_a_wrong_shape_is_one_line_in_every_placement(placement: str) -> None:
    told = raised_by(WrongShapeEnv, [{"slope": 0.5}], **PLACEMENTS[placement])
    assert "returned an observation of shape (3,)" in told
    assert "in slot 0 with the task {'slope': 0.5}" in told
    assert "\n" not in told


class OldStepEnv(WalkEnv):
    def step(self, action: Any) -> Any:
        return super().step(action)[:4]


class ForgetfulEnv(WalkEnv):
    def step(self, action: Any) -> Any:
        super().step(action)


@pytest.mark.parametrize("env", [OldStepEnv, ForgetfulEnv])
@pytest.mark.parametrize("placement", ["in process", "in children"])
def test_result_that_the_time_limit_cannot_read_is_explained_in_every_placement(env: Any, placement: str) -> None:
    told = raised_by(env, [{"slope": 0.5}], **PLACEMENTS[placement])
    assert "; step of the environment must return the observation, the reward, terminated, truncated, and" in told
    assert ("four values are those of old versions of Gym" in told) == (env is OldStepEnv)


# Ends the calls that never return, after the test: threads cannot be killed, and some tests fork this process.
OVER = threading.Event()


class HangsEnv(WalkEnv):
    def step(self, action: Any) -> Any:
        if self.slope == 0.5:
            OVER.wait()
        return super().step(action)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_slot_that_hangs_is_named_once_in_plain_words(num_workers: int) -> None:
    OVER.clear()
    options = {"stepping": "threads", "step_timeout": 0.5, "start_method": "fork", "num_workers": num_workers}
    told = raised_by(HangsEnv, [{"slope": 0.2}, {"slope": 0.5}], ChildEnvTimeout, **options)
    OVER.set()
    where = r", worker 1 \(pid \d+, slots? 1\)" if num_workers else ""
    line = (
        rf"test_failures.HangsEnv hangs in slot 1 with the task {{'slope': 0.5}}{where}, in step \d: a call has not re"
    )
    assert re.match(line, told)


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
    assert len(text) < 200


def test_report_of_an_error_names_what_it_knows_even_if_it_has_no_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert failed(0, Mute(), None, 0, (), "in reset").message == "<no text: ValueError while describing it>"
    error = NonFiniteError("no number")
    error.tasks = (3,)
    report = failed(0, error, 1, 4, [{}, {"goal": 2}], "in reset")
    assert (report.slot, report.task, report.in_tasks) == (5, "{'goal': 2}", (3,))
    assert describe_env(ObservedTask("2DNavigation-v0")) == "'2DNavigation-v0' with observed tasks"


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
