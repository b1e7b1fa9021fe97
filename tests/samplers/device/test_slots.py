"""Slots on a device: their tasks, what they show beside their own observations, and what of them can be recorded."""

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from device_phases import Counting, policy_for, require_as_on_the_cpu, require_same_when_recorded, sample

from maml_rl import MultiTaskSampler
from maml_rl.arrays import copied
from maml_rl.config.placement import Placement
from maml_rl.envs.global_generators import KeptGenerators
from maml_rl.envs.make_env import ObservedLastStep, ObservedTask, Recipe, make_vector_env
from maml_rl.envs.observing import LastStepVectorEnv
from maml_rl.envs.tasks import TaskEntry
from maml_rl.errors import ChildEnvError, ConfigError, TaskError
from maml_rl.samplers.device.slots import reason_against
from maml_rl.samplers.make_backend import choose
from tests.envs.third_party import WalkEnv


def test_an_oracle_sees_its_task_and_its_last_step_as_on_the_cpu():
    require_as_on_the_cpu(ObservedTask(ObservedLastStep("Bandit-K5-v0")))


def test_a_malformed_task_is_named():
    with (
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy_for("2DNavigation-v0"), backend="device") as sampler,
        pytest.raises(TaskError, match=r"task 1: .*'goal'"),
    ):
        sampler.rollout([{"goal": (0.0, 0.1)}, {"goal": (1.0,)}])


class TakesTasks(Counting):
    taken: ClassVar[list[int]] = []

    def _tasks_changed(self) -> None:
        self.taken.append(len(self.tasks["first"]))


def test_the_tasks_of_the_phase_before_are_not_given_again():
    with MultiTaskSampler(TakesTasks, {}, 2, policy_for(TakesTasks), seed=0, backend="device") as sampler:
        tasks, others = sampler.sample_tasks(2), sampler.sample_tasks(2)
        taken = []
        for given in (tasks, tasks, others, others, tasks):
            TakesTasks.taken.clear()
            sampler.rollout(given)
            taken.append(len(TakesTasks.taken) > 0)
    assert taken == [True, False, True, False, True]


class OfTexts(Counting):
    def __init__(self, num_envs: int, **options: Any) -> None:
        super().__init__(num_envs, **options)
        self.entries = {"first": TaskEntry(), "kind": TaskEntry(choices=("one", "other"))}


class Remembering(Counting):
    """Keeps something of its tasks where only other placements call it."""

    def reset_task(self, tasks: Any) -> None:
        super().reset_task(tasks)
        self._offset = self.tasks["first"] + 1.0


def test_what_is_not_array_code_of_numbers_is_refused_and_sampled_on_the_cpu():
    assert "the tasks of OfTexts have texts in them" in reason_against(OfTexts(1))
    assert "is not array code over slots" in reason_against(make_vector_env(ObservedLastStep(WalkEnv), {}, 1))
    assert "Remembering has a reset_task of its own" in reason_against(make_vector_env(Remembering, {}, 1))
    assert reason_against(make_vector_env(ObservedLastStep("2DNavigation-v0"), {}, 1)) == ""
    kwargs = {"families": ["PointGoal-v0", "SparsePointGoal-v0"]}
    recipe, policy = Recipe.of("Mixture-v0", kwargs, 5), policy_for("Mixture-v0", kwargs)
    assert choose(Placement(device="cuda"), recipe, policy).backend == "auto"
    with pytest.raises(ConfigError, match="tasks of MixtureVectorEnv have texts"):
        sample("device", "Mixture-v0", env_kwargs=kwargs)


class InManyPlaces(Counting):
    """Keeps state in all ways that work: views, arrays that become others, change places or are results, containers."""

    def __init__(self, num_envs: int, **options: Any) -> None:
        self._pair = np.zeros((num_envs, 2))
        self._second, self._kind = self._pair[:, 1], np.zeros(num_envs, np.int64)
        super().__init__(num_envs, **options)

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._pair[:] = 0.0
        self._start, self._kind = self._count, self._count + 0.25
        self._odd, self._even = self._count + 1.0, self._count + 2.0
        self._past = {"counts": self._count, "listed": 1.0}
        self._list = [self._count, self._count]

    def _next(self) -> Any:
        before, self._past = self._count, {"counts": self._count, "listed": 1.0}
        super()._next()
        self._pair += self._count[:, None]
        self._odd, self._even = self._even, self._odd
        self._list = [self._list[1], self._kind + self._count]
        found = (self._second, self._start, self._kind, self._odd, self._past["counts"], self._list[0])
        self._reward_terms = {"before": before}
        self._sum = sum(place * array for place, array in zip((1, 10, 100, 1e3, 1e4, 1e5), found, strict=True))
        return self._sum


class ReplacingLastStep(LastStepVectorEnv):
    """Shows the last step by another array after every step."""

    def take_step(self, *arguments: Any) -> None:
        self._last = copied(self._last)
        super().take_step(*arguments)


class ObservedReplacing(ObservedLastStep):
    wrapper = ReplacingLastStep


@pytest.mark.parametrize("env", [InManyPlaces, ObservedReplacing("2DNavigation-v0")], ids=["own", "shown"])
def test_state_in_many_places_is_kept_when_steps_are_recorded(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    require_same_when_recorded(env, monkeypatch)


class InATuple(Counting):
    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._pair = (self._count, self._count)

    def _next(self) -> Any:
        self._pair = (self._pair[1], super()._next())
        return self._pair[1]


class InANumber(Counting):
    _number = 0

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._number = 0

    def _next(self) -> Any:
        self._number += 1
        count = super()._next()
        return count if self._number % 2 else 2.0 * count


class InAnObject(Counting):
    def __init__(self, num_envs: int, **options: Any) -> None:
        self._held = SimpleNamespace(steps=[0])
        super().__init__(num_envs, **options)

    def _next(self) -> Any:
        self._held.steps[0] += 1
        return super()._next()


class Growing(Counting):
    def _next(self) -> Any:
        count = super()._next()
        self._past = count[:, None] if not hasattr(self, "_past") else self._past.repeat(1, 2)
        return count


class OfAnEpisode(Counting):
    _episode = 0

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._episode += 1


class OfNumPy(Counting):
    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._rates = np.ones(self.num_envs)


@pytest.mark.parametrize(
    ("made", "name", "what"),
    [
        (InATuple, "_pair", "tuple"),
        (InANumber, "_number", "int"),
        (InAnObject, "_held", "SimpleNamespace"),
        (Growing, "_past", "Tensor"),
        (OfAnEpisode, "_episode", "int"),
        (OfNumPy, "_rates", "ndarray"),
    ],
)
def test_state_that_a_recorded_step_cannot_see_is_refused_by_name(made, name, what):
    with pytest.raises(ConfigError, match=rf"{made.__name__} has state in its attribute '{name}', a {what}"):
        sample("device", made, slots_per_task=1)


class EndsTogether(Counting):
    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        return self._next(), True


class EndsLater(Counting):
    calls: ClassVar[list[int]] = []

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        self.calls.append(1)
        return self._next(), len(self.calls) % 3 == 0


class EndsSooner(Counting):
    _calls = 0

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        type(self)._calls += 1
        return self._next(), self._calls == 1 and self._count >= 3.0


class OneForAll(Counting):
    """Has one number or flag for all slots, and attributes named as methods of the package."""

    recorded_infos: ClassVar[Any] = {"speed": "step"}
    begin = advance = is_truncated = None

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        self._reward_terms = {"speed": 2.0}
        return -1.0, np.False_


class RewardsOfNumPy(Counting):
    def _next(self) -> Any:
        return np.ones(self.num_envs)


def test_terminated_may_be_a_bool_that_stays_the_same():
    require_as_on_the_cpu(Counting)
    assert set(require_as_on_the_cpu(ObservedLastStep(OneForAll)).lengths.flatten().tolist()) == {5}
    with pytest.raises(ChildEnvError, match=r"rewards is an array of NumPy; make it by functions of self\.xp"):
        sample("device", RewardsOfNumPy)
    assert set(require_as_on_the_cpu(EndsTogether).lengths.flatten().tolist()) == {1}
    for made in (EndsLater, EndsSooner):
        told = f"{made.__name__} returns False for terminated in one step and more in another"
        with pytest.raises(ConfigError, match=told):
            sample("device", made)


class Drawing(Counting):
    def _next(self) -> Any:
        return super()._next() + np.random.standard_normal()


@pytest.mark.parametrize("backend", ["device", "in-process"])
def test_draws_from_the_generators_of_the_process_are_noticed(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    with KeptGenerators():
        sample(backend, Drawing)
    assert "it draws from np.random, a generator that all slots of the process share" in caplog.text
