"""The messages to the author of an environment."""

import random
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import TimeLimit

from maml_rl import MultiTaskSampler
from maml_rl.cli.main import main
from maml_rl.envs import TaskParameter, TaskSpace, check_meta_env, make_vector_env
from maml_rl.envs.checking import check_vector_family
from maml_rl.envs.global_generators import construct
from maml_rl.errors import ChildEnvError
from maml_rl.policies import NormalMLPPolicy
from tests.envs.third_party import CellEnv, DictEnv, KnobsEnv, NoTaskEnv, PixelEnv, SplitEnv, SwitchesEnv, WalkEnv


def walk(name: str, **members: Any) -> type[WalkEnv]:
    """Return a `WalkEnv` with these methods and attributes instead of its own."""
    return type(name, (WalkEnv,), members)


def drawing(name: str, draw: Callable[[int], list[Any]]) -> type[WalkEnv]:
    return walk(name, sample_tasks=lambda self, num_tasks: draw(num_tasks))


def paying(name: str, pay: Callable[[float], float]) -> type[WalkEnv]:
    def step(self: WalkEnv, action: Any) -> Any:
        observation, reward, *rest = WalkEnv.step(self, action)
        return observation, pay(reward), *rest

    return walk(name, step=step)


def remarks_on(make_env: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        check_meta_env(make_env(), make_another=make_env)
    return [str(remark.message) for remark in remarks]


@pytest.mark.parametrize(
    "make_env",
    [
        *(WalkEnv, PixelEnv, CellEnv, DictEnv, KnobsEnv, SwitchesEnv, SplitEnv),
        lambda: TimeLimit(WalkEnv(), 3),
        # A family whose task is a direction: the first three draws are equal.
        drawing("HasTwoTasks", lambda num: [{"slope": 1.0 if index < 3 else -1.0} for index in range(num)]),
    ],
)
def test_good_environment_passes(make_env: Any) -> None:
    check_meta_env(make_env())


@pytest.mark.parametrize("thing", [WalkEnv, 3, None, gymnasium.vector.SyncVectorEnv([WalkEnv])])
def test_object_that_is_not_an_environment_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="expected a gymnasium.Env, got"):  # noqa: RUF043
        check_meta_env(thing)


def test_everything_missing_is_listed() -> None:
    with pytest.raises(TypeError) as caught:
        check_meta_env(NoTaskEnv())
    message = str(caught.value)
    assert message.startswith("NoTaskEnv is not a task family: ")
    assert "it lacks sample_tasks(num_tasks), which draws that many tasks" in message
    assert "it lacks reset_task(task), which takes effect at the next step and survives reset" in message
    assert "as its observation space it has an unsupported space Sequence" in message
    assert "as its action space it has an unsupported space Tuple" in message
    observation, action = message.split("as its observation space")[1].split("as its action space")
    assert " at ['y']: expected Box, Discrete" in observation
    assert "TransformObservation" in observation
    assert "TransformAction" in action
    assert "TransformObservation" not in action


UNSEEDED = np.random.default_rng(0)
WRAPPING = spaces.Box(-128, 127, (1,), np.int8)


class ForgetsTheTaskUnlessSeeded(WalkEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is None:
            self.slope = 7.0
        return super().reset(seed=seed, options=options)


class IgnoresTheTask(WalkEnv):
    def reset_task(self, task: dict[str, Any]) -> None:
        if set(task) != {"slope"}:
            raise ValueError("not my task")


class TakesAnyTask(WalkEnv):
    def reset_task(self, task: dict[str, Any]) -> None:
        self.slope = task.get("slope", 1.0)


class RaisesKeyError(WalkEnv):
    def reset_task(self, task: dict[str, Any]) -> None:
        if len(task) > 1:
            raise ValueError("too many entries")
        self.slope = task["slope"]


class ChangesBeforeRefusing(WalkEnv):
    def reset_task(self, task: dict[str, Any]) -> None:
        self.slope = 9.0
        super().reset_task(task)


class NeedsATask(WalkEnv):
    def __init__(self) -> None:
        super().__init__()
        del self.slope


class NeedsAReset(WalkEnv):
    def reset_task(self, task: dict[str, Any]) -> None:
        super().reset_task(task)
        self.place += 0.0


class RefusesItsOwnRange(WalkEnv):
    task_space = TaskSpace.of_numbers(slope=TaskParameter.between(-9, 9))

    def reset_task(self, task: dict[str, Any]) -> None:
        if abs(task.get("slope", 0.0)) > 2.0:
            raise ValueError("too steep")
        super().reset_task(task)


class FillsOneDict(WalkEnv):
    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        task: dict[str, Any] = {}
        for drawn in super().sample_tasks(num_tasks):
            task.update(drawn)
        return [task] * num_tasks


class SharesItsTask(WalkEnv):
    shared = 1.0

    def reset_task(self, task: dict[str, Any]) -> None:
        super().reset_task(task)
        type(self).shared = self.slope

    def step(self, action: Any) -> Any:
        self.slope = self.shared
        return super().step(action)


class KeepsItsLastAction(WalkEnv):
    last = 0.0

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        reward, self.last = reward + self.last, float(action[0])
        return observation, reward, *rest


class NeedsMoreActionsUphill(WalkEnv):
    def reset_task(self, task: dict[str, Any]) -> None:
        super().reset_task(task)
        self.action_space = spaces.Box(-0.5, 0.5, (1 + (self.slope > 0),), np.float32)


@pytest.mark.parametrize(
    ("env_class", "message"),
    [
        (
            walk("SeesNothing", observe=lambda self: np.array([np.nan, 0.1])),
            r"observations must be finite, got NaN after reset: \[nan 0.1\]",
        ),
        (
            walk("SeesInfinity", observe=lambda self: np.array([np.inf if self.steps == 2 else 0.0, 0.1])),
            r"observations must be finite, got infinity at step 2",
        ),
        (
            walk("Wraps", observation_space=WRAPPING, observe=lambda self: np.array([100 + 20 * self.steps])),
            r"Wraps returned an observation with 140 at \[0\], outside of its space",
        ),
        (NeedsATask, "must work before any reset_task, .* AttributeError in .*third_party.py, line .* 'slope'"),
        (NeedsAReset, "reset_task must work before the first reset, .* AttributeError in .*test_checking.py, line"),
        (
            drawing("IgnoresTheSeed", lambda num: [{"slope": slope} for slope in UNSEEDED.uniform(size=num)]),
            "sample_tasks must repeat after",
        ),
        (
            drawing("OwnSeed", lambda num: [{"slope": slope} for slope in np.random.default_rng(5).uniform(size=num)]),
            r"draws the same 50 tasks for two seeds, .*self.np_random",
        ),
        (
            walk("DrawsTooFew", sample_tasks=lambda self, num: WalkEnv.sample_tasks(self, num - 1)),
            r"sample_tasks\(3\) must return 3 tasks, got 2",
        ),
        (drawing("DrawsTheSameTask", lambda num: [{"slope": 1.0}] * num), "must draw different tasks"),
        (drawing("DrawsNumbers", lambda num: [0.5] * num), "a task must be a dict, got float"),
        (
            drawing("DrawsRaggedLists", lambda num: [{"slope": 1.0, "walls": [[1], [2, 3]]}] * num),
            r"entry 'walls' is \[\[1\], \[2, 3\]\]",
        ),
        (FillsOneDict, "must draw different tasks"),
        (ForgetsTheTaskUnlessSeeded, "a task must survive reset"),
        (KeepsItsLastAction, "must repeat an episode after another one: reset must set again all that steps change"),
        (SharesItsTask, "must not change where another environment steps beside it: keep the task and all .* in self"),
        (NeedsMoreActionsUphill, r"action_space must be the same for all tasks, .* and Box\(.*\(\d,\), .*'slope'"),
        (walk("DeclaresNoSuchInfo", recorded_infos={"speed": "step"}), "declares 'speed' in recorded_infos, so its"),
        (IgnoresTheTask, "every task gave the same episodes"),
        (ChangesBeforeRefusing, "must leave the task as it was"),
        (paying("StepsUnseeded", lambda reward: reward + UNSEEDED.uniform()), "must repeat an episode"),
        (paying("PaysInfinity", lambda _: np.inf), "rewards must be finite"),
        (
            walk("RefusesItsTestTasks", sample_test_tasks=lambda self, num: [{"tilt": 1.0}] * num),
            "reset_task must take a task of sample_test_tasks, as {'tilt': 1.0}: ValueError in",
        ),
        (
            walk("DrawsOneTestTask", sample_test_tasks=lambda self, num: self.sample_tasks(1)),
            r"sample_test_tasks\(3\) must return 3 tasks, got 1",
        ),
        (
            walk("DeclaresAnotherEntry", task_space=TaskSpace.of_numbers(tilt=TaskParameter.between(-1, 1))),
            "task_space must be that of the tasks of sample_tasks: .*tilt",
        ),
        (RefusesItsOwnRange, "reset_task must take a task within task_space, as {'slope': .*too steep"),
    ],
)
def test_violation_of_the_contract_is_reported_in_plain_words(env_class: Any, message: str) -> None:
    state = random.getstate()
    with pytest.raises(AssertionError, match=message):
        check_meta_env(env_class(), make_another=env_class)
    random.setstate(state)


@pytest.mark.parametrize(
    ("env_class", "messages"),
    [
        (TakesAnyTask, ["'no_task_has_this_entry': 0.0} and took it; a ValueError", "{} and took it"]),
        (RaisesKeyError, ["raised KeyError"]),
    ],
)
def test_malformed_task_that_is_not_refused_is_a_remark(env_class: Any, messages: list[str]) -> None:
    with pytest.warns(UserWarning, match="reset_task was given the task") as remarks:
        check_meta_env(env_class())
    said = "\n".join(str(remark.message) for remark in remarks)
    assert all(message in said for message in messages), said


def test_another_environment_is_made_from_the_spec_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gymnasium.envs.registration.EnvSpec("NeedsAReset-v0", NeedsAReset)
    monkeypatch.setitem(gymnasium.registry, "NeedsAReset-v0", spec)
    with pytest.raises(AssertionError, match="reset_task must work before the first reset"):
        check_meta_env(gymnasium.make("NeedsAReset-v0"))
    check_meta_env(NeedsAReset())


class ResetsGlobally(WalkEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed, options=options)
        self.place = np.random.uniform(-0.1, 0.1) + random.gauss(0.0, 0.1)
        return self.observe(), result[1]


@pytest.mark.parametrize(
    ("make_env", "names"),
    [
        (drawing("DrawsGlobally", lambda num: [{"slope": np.random.uniform()} for _ in range(num)]), "np.random"),
        (paying("StepsGlobally", lambda reward: reward + random.random()), "random"),
        (ResetsGlobally, "np.random and random"),
    ],
)
def test_use_of_generators_of_the_process_is_a_remark_with_its_cost(make_env: Any, names: str) -> None:
    states = np.random.get_state(), random.getstate()
    said, *_ = remarks_on(make_env)
    assert re.match(rf"the environment draws from {names}; .* for \d+ microseconds a step", said)
    assert repr(states) == repr((np.random.get_state(), random.getstate()))


class MadeGlobally(WalkEnv):
    def __init__(self) -> None:
        super().__init__()
        self.bias = float(np.random.uniform()) + float(torch.rand(()))


def test_constructor_that_draws_from_generators_of_the_process_is_a_remark() -> None:
    env, drawn = construct(MadeGlobally)
    assert drawn == ["np.random", "torch"]
    assert env.bias == construct(MadeGlobally)[0].bias
    with pytest.warns(UserWarning, match=r"its constructor draws from np.random and torch; .* the same numbers in eve"):
        check_meta_env(env, make_another=MadeGlobally)


class MovesItsSlope(WalkEnv):
    """Changes the array of its task."""

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"slope": self.np_random.uniform(size=1)} for _ in range(num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        super().reset_task({name: float(array[0]) for name, array in task.items()})
        task["slope"] += 0.5


class TakesItsTaskApart(WalkEnv):
    def reset_task(self, task: dict[str, Any]) -> None:
        slope = task.pop("slope", None)
        if slope is None or task:
            raise ValueError("expected the entry 'slope' alone")
        self.slope = slope


@pytest.mark.parametrize(
    ("env_class", "remark"),
    [
        (MovesItsSlope, "changes the entry 'slope' of the task that it was given"),
        (TakesItsTaskApart, "changes the entry 'slope' of the task that it was given"),
        # Random actions never find the reward.
        (paying("PaysAlmostNever", lambda _: 0.0), r"every task gave the reward 0.0 at each .* with sparse rewards"),
        # The task is the seed of a level.
        (
            walk("PassesALevelOn", reset=lambda self, *, seed=None, options=None: WalkEnv.reset(self, seed=3)),
            r"does not seed the generator .* a generator of your own .*levels",
        ),
        (
            walk("SeesBeyondItsBox", observe=lambda self: np.array([self.place, 5.0 if self.steps else 0.1])),
            r"on SeesBeyondItsBox: .*obs .* is not within the observation space",
        ),
    ],
)
def test_what_may_be_meant_is_a_remark(env_class: Any, remark: str) -> None:
    assert any(re.search(remark, said) for said in remarks_on(env_class))


@pytest.mark.parametrize(
    ("env_class", "message"),
    [
        (
            walk("TakesNoOptions", reset=lambda self, *, seed=None: WalkEnv.reset(self, seed=seed)),
            "got an unexpected keyword argument 'options'",
        ),
        (
            walk("ReturnsItAlone", reset=lambda self, *, seed=None, options=None: WalkEnv.reset(self, seed=seed)[0]),
            "reset of .* returned array.*; it must return the observation and a dict of infos",
        ),
        (
            walk("SeesAnotherShape", observe=lambda self: np.zeros(3)),
            r"returned an observation of shape \(3,\) and dtype float64; its space is Box",
        ),
        (walk("Exits", step=lambda self, action: sys.exit(0)), "SystemExit in .*test_checking.py, line .*: 0"),
        (
            walk("Stops", reset=lambda self, **options: next(iter(()))),
            r"StopIteration in .*test_checking.py, line .*next\(iter",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused_and_only_that_is_said(env_class: Any, message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_meta_env(env_class())
    assert re.search(message, str(caught.value))
    assert "before any reset_task" not in str(caught.value)
    # The sampler refuses them, too.
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    with (
        pytest.raises((ChildEnvError, TypeError, ValueError)),
        MultiTaskSampler(env_class, {}, 2, policy, seed=0, num_workers=0, max_episode_steps=3) as sampler,
    ):
        sampler.rollout(sampler.sample_tasks(2))


class IsAwaited(WalkEnv):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed, options=options)

    async def step(self, action: Any) -> Any:
        return super().step(action)


def test_environment_that_must_be_awaited_is_checked() -> None:
    check_meta_env(IsAwaited())
    with pytest.raises(AssertionError, match="rewards must be finite, got infinity at step 1"):
        check_meta_env(IsAwaited(scale=np.inf))


class SharesItsInfos(WalkEnv):
    """Like many packages: one dict for all infos."""

    def __init__(self) -> None:
        super().__init__()
        self.info: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0], self.info

    def step(self, action: Any) -> Any:
        return *super().step(action)[:-1], self.info


class LibraryArray:
    """An array of a library whose comparisons are arrays, too, as those of JAX."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self.array, dtype)

    def __eq__(self, other: object) -> Any:
        return LibraryArray(self.array == np.asarray(other))

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self.array)


class ReturnsLibraryArrays(WalkEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return LibraryArray(super().reset(seed=seed)[0]), {}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        return LibraryArray(observation), LibraryArray(reward), LibraryArray(terminated), LibraryArray(truncated), {}


class LibraryBox(spaces.Box):
    def contains(self, x: Any) -> bool:
        return super().contains(np.asarray(x))


ReturnsLibraryArrays.observation_space = LibraryBox(-1.0, 1.0, (2,), np.float64)


class Family(gymnasium.Wrapper):
    """A family that is a wrapper around somebody else's environment, whose infos breach a rule."""

    slope = 1.0

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"slope": float(slope)} for slope in self.np_random.uniform(-1.0, 1.0, num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        if set(task) != {"slope"}:
            raise ValueError("slope")
        self.slope = task["slope"]

    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, self.slope * float(reward), *rest


def make_wrapper_family() -> Any:
    return TimeLimit(Family(SharesItsInfos()), 4)


@pytest.mark.parametrize(
    ("make_env", "note"),
    [
        (SharesItsInfos, "on SharesItsInfos: .*[Tt]he infos returned by .* share an object"),
        (ReturnsLibraryArrays, "on ReturnsLibraryArrays: .*The truth value of an array"),
        (make_wrapper_family, "on Family: .*[Tt]he infos returned by .* share an object"),
    ],
)
def test_breach_of_gymnasiums_rules_is_a_remark_with_its_source_and_is_sampled(make_env: Any, note: str) -> None:
    remarks = remarks_on(make_env)
    assert all(remark.startswith("gymnasium.utils.env_checker on ") for remark in remarks)
    assert any(re.search(note, remark) for remark in remarks)
    assert not any("unwrapped" in remark for remark in remarks)
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    returns = []
    for make in (make_env, WalkEnv):
        with MultiTaskSampler(make, {}, 2, policy, seed=0, num_workers=0, max_episode_steps=4) as sampler:
            returns.append(sampler.rollout([{"slope": 0.5}]).digest())
    assert returns[0] == returns[1]


class GlowBatch(VectorEnv[Any, Any, Any]):
    """Shows a random walk that drifts with the task; each slot draws from a generator of its own."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
    np_random: Any = None

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.max_episode_steps = num_envs, 6
        self.single_observation_space = self.single_action_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.observation_space = self.action_space = batch_space(self.single_action_space, num_envs)
        self.drift = np.zeros(num_envs)

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"drift": float(drift)} for drift in self.np_random.uniform(-1.0, 1.0, num_tasks)]

    def reset_task(self, tasks: list[dict[str, Any]]) -> None:
        self.drift = np.array([task["drift"] for task in tasks])

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.generators = [np.random.default_rng(each) for each in seed]
            self.place = np.zeros((self.num_envs, 1))
        self.steps = 0
        return self.place.copy(), {}

    def step(self, actions: Any) -> Any:
        self.place += self.noise() + self.drift[:, None] + actions
        self.steps += 1
        over = np.full(self.num_envs, self.steps >= self.max_episode_steps)
        return self.place.copy(), -np.abs(self.place[:, 0]), np.zeros(self.num_envs, np.bool_), over, {}

    def noise(self) -> Any:
        return np.stack([each.normal(size=1) for each in self.generators])


def glow(name: str, noise: Callable[[GlowBatch, Any], Any]) -> type[GlowBatch]:
    return type(name, (GlowBatch,), {"noise": lambda self: noise(self, GlowBatch.noise(self))})


class ForgetsTasks(GlowBatch):
    is_new = False

    def reset_task(self, tasks: list[dict[str, Any]]) -> None:
        super().reset_task(tasks)
        self.is_new = True

    def reset(self, **options: Any) -> Any:
        self.drift, self.is_new = self.drift * self.is_new, False
        return super().reset(**options)


class FillsOneDictForAll(GlowBatch):
    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        task: dict[str, Any] = {}
        for drawn in super().sample_tasks(num_tasks):
            task.update(drawn)
        return [task] * num_tasks


# As ManiSkill: one generator for the whole batch.
OneGenerator = glow("OneGenerator", lambda batch, _: batch.generators[0].normal(size=(batch.num_envs, 1)))
TaskHasNoEffect = type("TaskHasNoEffect", (GlowBatch,), {"reset_task": lambda self, tasks: None})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            type("RefusesTestTasks", (GlowBatch,), {"sample_test_tasks": lambda self, num: [{"tilt": 1.0}] * num}),
            "reset_task must take a task of sample_test_tasks, as {'tilt': 1.0}: KeyError",
        ),
        (
            type("OtherEntry", (GlowBatch,), {"task_space": TaskSpace.of_numbers(tilt=TaskParameter.between(-1, 1))}),
            "task_space must be that of the tasks of sample_tasks: .*tilt",
        ),
        (ForgetsTasks, "the observation at step 1 differs where the tasks are kept over a reset"),
        (FillsOneDictForAll, "sample_tasks must draw different tasks, got the same each time"),
        (OneGenerator, "the observation at step 1 differs where slots change places; .* a generator of its own"),
        (
            glow("BySize", lambda batch, noise: noise * batch.num_envs),
            "the observation at step 1 differs where slot 0 is a batch of one",
        ),
        (
            glow("NeverRepeats", lambda _, noise: np.random.default_rng().normal(size=noise.shape)),
            "the observation at step 1 differs where the same seeds, tasks and actions are repeated",
        ),
    ],
)
def test_vector_family_whose_slots_depend_on_more_than_their_tasks_is_refused(made: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_vector_family(partial(make_vector_env, made, {}))


@pytest.mark.parametrize(
    ("made", "note"),
    [
        (glow("BySizeRounded", lambda batch, noise: noise * (1.0 + 1e-9 * batch.num_envs)), "by rounding"),
        (TaskHasNoEffect, "has no effect"),
    ],
)
def test_vector_family_that_may_be_right_is_warned_of(made: Any, note: str) -> None:
    with pytest.warns(UserWarning, match=note):
        check_vector_family(partial(make_vector_env, made, {}))


def test_command_checks_a_vector_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "tests.envs.test_checking:GlowBatch"]) == 0
    assert "in batches of any size and order" in capsys.readouterr().out
    gymnasium.register("GlowBatch-v0", vector_entry_point="tests.envs.test_checking:OneGenerator")
    assert main(["check-env", "GlowBatch-v0"]) == 1
    assert "slots change places" in capsys.readouterr().err
