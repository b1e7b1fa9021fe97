"""Other people's code, whose tasks and numbers are the same in every placement, whatever generators it draws from."""

import copy
import gc
import random
import re
import warnings
import weakref
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from placements import PLACEMENTS

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.envs import Retry, global_generators
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import TaskError
from tests.envs.third_party import WalkEnv

PLACES: dict[str, dict[str, Any]] = {**PLACEMENTS, "waves": {"num_workers": 0, "slots_per_task": 2}}
pytestmark = pytest.mark.timeout(60)


def sampled(make_env: Any, num_tasks: int = 3, **options: Any) -> TaskEpisodes:
    settings = {"batch_size": 4, "seed": 0, "max_episode_steps": 6, **options}
    if "policy" not in settings:
        settings["policy"] = get_policy_for_env(make_env(), (4,), "tanh")
    with MultiTaskSampler(make_env, **settings) as sampler:
        tasks = sampler.sample_tasks(num_tasks)
        given = copy.deepcopy(tasks)
        episodes = sampler.rollout(tasks)
    for task, before in zip(tasks, given, strict=True):
        assert task.keys() == before.keys()
        assert all(np.array_equal(task[name], before[name]) for name in task)
    return episodes


class Levels(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Redirects the seed, as wrappers around environments with levels do."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._level = 0

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"level": int(level)} for level in self.np_random.integers(2**31, size=num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        if task.keys() != {"level"}:
            raise ValueError("expected a level alone")
        self._level = task["level"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=self._level, options=options)


class AsyncLevels(WalkEnv):
    """Draws levels of its own choice, and must be awaited."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=3, options=options)

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        return super().step(action)


def drawn(make_env: Any, iterations: int = 3, num_tasks: int = 3, **options: Any) -> list[list[dict[str, Any]]]:
    policy = get_policy_for_env(WalkEnv() if make_env is AsyncLevels else make_env(), (4,))
    with MultiTaskSampler(make_env, policy=policy, max_episode_steps=2, **{"num_workers": 0, **options}) as sampler:
        return [sampler.sample_tasks(num_tasks) for _ in range(iterations)]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("make_env", [Levels, AsyncLevels])
def test_family_that_redirects_the_seed_draws_new_tasks_in_every_iteration(make_env: Any) -> None:
    batches = [*drawn(make_env, seed=0), *drawn(make_env, seed=1), *drawn(make_env, seed=0, evaluation=True)]
    numbers = [value for batch in batches for task in batch for value in task.values()]
    assert len(set(numbers)) == len(numbers) == 27
    assert drawn(make_env, seed=0, num_workers=2) == batches[:3]


class DrawsAtReset(WalkEnv):
    """Draws more numbers in a reset, the steeper its task is."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = super().reset(seed=seed)
        self.np_random.normal(size=int(100 * abs(self.slope)))
        return result


def test_drawn_tasks_do_not_depend_on_the_task_of_the_slot_that_draws() -> None:
    policy = get_policy_for_env(DrawsAtReset(), (4,))
    settings: dict[str, Any] = {"batch_size": 1, "seed": 0, "max_episode_steps": 2, "num_workers": 0}
    with MultiTaskSampler(DrawsAtReset, policy=policy, **settings) as sampler:
        sampler.rollout(sampler.sample_tasks(1))
        after_a_task = sampler.sample_tasks(1)
    with MultiTaskSampler(DrawsAtReset, policy=policy, **settings) as sampler:
        sampler.seek(0)
        assert sampler.sample_tasks(1) == after_a_task


class DrawsTheSame(WalkEnv):
    """Draws from a generator that it seeds itself."""

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"slope": float(slope)} for slope in np.random.default_rng(5).uniform(1.0, 2.0, num_tasks)]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_family_that_draws_the_same_tasks_for_every_seed_is_refused(num_workers: int) -> None:
    with pytest.raises(TaskError, match=r"draws the same 50 tasks for two seeds, .*levels"):
        drawn(DrawsTheSame, iterations=2, num_workers=num_workers)


@pytest.mark.parametrize(
    ("slopes", "num_tasks"),
    [
        *((lambda env, num_tasks: env.np_random.integers(1, 3, num_tasks), number) for number in (1, 3)),
        # Lists its tasks in order, of which there may be no more.
        (lambda env, num_tasks: [1.0 + index % 3 for index in range(num_tasks)], 3),
        *((lambda env, num_tasks: [[1.0, 2.0, 3.0][index] for index in range(num_tasks)], number) for number in (1, 3)),
    ],
)
def test_family_with_few_tasks_may_draw_the_same_again(slopes: Any, num_tasks: int) -> None:
    def draw(env: WalkEnv, num_tasks: int) -> list[dict[str, Any]]:
        return [{"slope": float(slope)} for slope in slopes(env, num_tasks)]

    make_env = type("Few", (WalkEnv,), {"sample_tasks": draw})
    assert len(drawn(make_env, 6, num_tasks, seed=0)) == 6


def test_recipe_for_levels_passes_the_check_and_keeps_test_levels_apart() -> None:
    page = (Path(__file__).parents[2] / "docs" / "task-distributions.md").read_text()
    (block,) = [block for block in re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M) if "class Levels" in block]
    names: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        exec(block, names)
    # As the page says.
    (remark,) = remarks
    assert "env_checker on Levels" in str(remark.message)

    def make_env() -> Any:
        return names["Levels"](gymnasium.make("CartPole-v1"))

    training = [drawn(make_env, seed=seed) for seed in (0, 1)]
    test = [drawn(make_env, seed=seed, evaluation=True) for seed in (0, 1)]
    levels = [[task["level"] for batch in batches for task in batch] for batches in (*training, *test)]
    assert len({tuple(of_seed) for of_seed in levels}) == 4
    assert max(levels[0] + levels[1]) < names["TRAINING"] <= min(levels[2] + levels[3])


class DrawsGlobally(WalkEnv):
    """Draws from the generators of the process, as many simulators do, and observes the numbers.

    Args:
        calls: in which calls.
        which: the generators.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, calls: str = "reset step", which: str = "numpy random") -> None:
        super().__init__()
        self.calls, self.which = calls.split(), which.split()
        self.of_task = 0.0

    def number(self, call: str) -> float:
        total = 0.0
        if call in self.calls:
            # The first of two normal numbers is drawn with the second.
            total += float(np.random.standard_normal()) if "numpy" in self.which else 0.0
            total += random.gauss(0.0, 1.0) if "random" in self.which else 0.0
            total += float(torch.rand(())) if "torch" in self.which else 0.0
        return total

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        slopes = self.np_random.uniform(1.0, 2.0, num_tasks)
        return [{"slope": float(slope) + self.number("sample_tasks")} for slope in slopes]

    def reset_task(self, task: dict[str, Any]) -> None:
        self.slope, self.of_task = task["slope"], self.number("reset_task")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.array([self.number("reset"), self.of_task]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        # Slots begin to draw at different times, in the middle of an episode.
        drawn = self.number("step") if self.steps >= self.slope + 1.0 else 0.0
        return np.array([drawn, self.of_task]), drawn, False, False, {}


GLOBAL = {
    "every call": {"calls": "sample_tasks reset_task reset step"},
    "steps": {"calls": "step", "which": "random"},
    "torch": {"calls": "reset step", "which": "torch"},
}


@pytest.mark.parametrize(("kind", "steps_tried"), [*((kind, 100) for kind in GLOBAL), ("every call", 0)])
def test_environment_that_draws_from_global_generators_has_equal_digests_everywhere(
    kind: str, steps_tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With none tried, the first call that draws is noticed afterwards, and its episode restarts.
    monkeypatch.setattr(global_generators, "STEPS_TRIED", steps_tried)
    make_env = partial(DrawsGlobally, **GLOBAL[kind])
    episodes = {name: sampled(make_env, **place) for name, place in PLACES.items()}
    digests = {name: of_place.digest() for name, of_place in episodes.items()}
    assert len(set(digests.values())) == 1, digests
    observations = episodes["in process"].observations
    monkeypatch.setattr(global_generators, "STEPS_TRIED", 100 - steps_tried)
    assert sampled(make_env, num_workers=0).digest() == episodes["central"].digest()
    if "reset" in GLOBAL[kind]["calls"].split():
        assert len(observations[:, 0, :, 0].unique()) == 12
    if "step" in GLOBAL[kind]["calls"].split():
        assert len(observations[:, 4, :, 0].unique()) == 12
    if "reset_task" in GLOBAL[kind]["calls"].split():
        assert len(observations[..., 1].unique()) == 3


class DrawsLate(DrawsGlobally):
    """Draws from its third episode on, long after its slot is believed not to draw."""

    begun = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.begun += 1
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        drawn = self.number("step") if self.begun > 2 else 0.0
        return np.array([drawn, self.of_task]), drawn, False, False, {}


@pytest.mark.parametrize("which", ["numpy", "random", "torch", "torch-normal"])
def test_environment_that_draws_late_has_equal_digests_everywhere(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_generators, "STEPS_TRIED", 6)
    if which == "torch-normal":
        monkeypatch.setattr(torch, "rand", lambda shape: torch.randn(shape, dtype=torch.float64))
    make_env, digests = partial(DrawsLate, calls="step", which=which.partition("-")[0]), set()
    policy = get_policy_for_env(make_env(), (4,), "tanh")
    options: dict[str, Any] = {"policy": policy, "seed": 0, "max_episode_steps": 6, "batch_size": 4}
    for place in ("in process", "in children"):
        with MultiTaskSampler(make_env, **options, **PLACEMENTS[place]) as sampler:
            for _ in range(3):
                episodes = sampler.rollout(sampler.sample_tasks(3))
        assert len(episodes.rewards[:, -1].unique()) == 12
        digests.add(episodes.digest())
    assert len(digests) == 1


class DrawsWhenMade(DrawsGlobally):
    """Draws in its constructor, and pays the number."""

    def __init__(self, **options: Any) -> None:
        super().__init__("constructor", **options)
        self.of_task = self.paid = self.number("constructor")

    def reset_task(self, task: dict[str, Any]) -> None:
        self.slope = task["slope"]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, *rest = super().step(action)
        return observation, self.paid, *rest


def test_constructors_that_draw_globally_make_one_family_everywhere() -> None:
    make_env, digests = partial(DrawsWhenMade, which="numpy random torch"), set()
    policy = get_policy_for_env(DrawsGlobally(), (4,), "tanh")
    with global_generators.KeptGenerators() as generators:
        for seed, place in enumerate((*PLACES.values(), {"num_workers": 0, "stepping": "threads"})):
            # What others have drawn before.
            generators.seed(seed)
            episodes = sampled(make_env, policy=policy, **place)
            assert len(episodes.observations[..., 1].unique()) == 1
            digests.add(episodes.digest())
    assert len(digests) == 1


class Busy(WalkEnv):
    """Raises `Retry` once, and notes the error."""

    raised: ClassVar[list[weakref.ref[Retry]]] = []

    def step(self, action: Any) -> Any:
        if not self.raised:
            raise self._noted(Retry())
        return super().step(action)

    def _noted(self, error: Retry) -> Retry:
        self.raised.append(weakref.ref(error))
        return error


def test_error_of_a_step_that_is_tried_again_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Busy, "raised", [])
    with closing(SerialVectorEnv(Busy, 1)) as env:
        env.reset_task(env.sample_tasks(1))
        env.reset(seed=0)
        gc.disable()
        try:
            env.step(np.array([env.single_action_space.sample()]))
            assert Busy.raised[0]() is None
        finally:
            gc.enable()
