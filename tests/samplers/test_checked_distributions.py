"""A task distribution that a config would refuse is refused by a sampler that gets it directly."""

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl import MultiTaskSampler
from maml_rl.envs import global_generators
from maml_rl.envs.families.navigation import Navigation2DVectorEnv
from maml_rl.errors import TaskError
from maml_rl.policies import get_policy_for_env
from maml_rl.task_distributions import FamilyTasks, FixedTasks, Split, TaskDistribution, TaskList

FAMILY = "2DNavigation-v0"
GOALS = [[0.1, 0.2], [0.3, 0.4]]


class Own(TaskDistribution):
    """Draws what it was made with."""

    def __init__(self, *tasks: Any) -> None:
        self.tasks = list(tasks)

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Any]:
        return (self.tasks * num_tasks)[:num_tasks]


class Forgetful(Own):
    """Returns nothing."""

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> Any:
        self.tasks = super().sample(family, num_tasks, rng)


class Unchecked(Own):
    """Returns nothing to try."""

    def check(self, family: FamilyTasks) -> Any:
        self.tasks.append(family.name)


class Endless(Own):
    """Draws without an end."""

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> Any:
        return itertools.cycle(self.tasks)


class Lazy(Own):
    """Draws the first task alone, one after the other, and changes it later."""

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> Any:
        return (self.tasks[0] for _ in range(num_tasks))


class Elsewhere(Own):
    """Draws from a generator of the process."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__({"goal": [0.0, 0.0]})
        self.draw = draw

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Any]:
        self.draw()
        return super().sample(family, num_tasks, rng)

    sample_test = sample_validation = sample


class ChecksElsewhere(Elsewhere):
    """Draws from it when it is checked."""

    sample = Own.sample

    def check(self, family: FamilyTasks) -> list[Any]:
        self.draw()
        return []


class LaterElsewhere(Elsewhere):
    """Draws from it when its tasks are read."""

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> Any:
        yield from super().sample(family, num_tasks, rng)

    sample_test = sample_validation = sample


def sampler_of(distribution: TaskDistribution | None, **options: Any) -> MultiTaskSampler:
    policy = get_policy_for_env(MultiTaskSampler.spaces(FAMILY), (4,))
    settings = {"num_workers": 0, "seed": 0, **options}
    return MultiTaskSampler(FAMILY, policy=policy, batch_size=2, task_distribution=distribution, **settings)


@pytest.mark.parametrize(
    ("distribution", "message", "num_workers"),
    [
        (Split({"goal_0": [-0.4, 0.2]}, {"goal_0": [0.0, 0.4]}), "'train' and 'test' overlap", 0),
        (TaskList(tasks=[{"speed": 1.0}]), "task 1 in the distribution: .*unknown entry 'speed'", 0),
        (FixedTasks(train=2, test=2), "a batch has distinct tasks, and there are 2 training tasks", 0),
        (Own({"speed": 1.0}), "task 1 in the first draw of Own: .*unknown entry 'speed'", 0),
        (Own({"goal": [0.0]}), "task 1 in the first draw of Own: .*goal", 1),
        (Own(3), "sample of Own drew 3; a task is a dict", 0),
        (Own(), r"sample\(3\) of Own returned 0 tasks", 0),
        (Unchecked(), r"check of Unchecked returned None; return a list of tasks, \[\] for none", 0),
        (Forgetful(), "sample of Forgetful returned None; it must return a list of tasks", 0),
        (Endless({"goal": [0.0, 0.0]}), r"sample\(3\) of Endless returned more than 3 tasks", 0),
    ],
)
@pytest.mark.usefixtures("forked_workers")
def test_every_rule_of_a_check_holds_for_a_sampler(
    distribution: TaskDistribution, message: str, num_workers: int
) -> None:
    refused = pytest.raises((TypeError, ValueError, TaskError), match=message)
    with sampler_of(distribution, num_workers=num_workers) as sampler, refused as caught:
        sampler.sample_tasks(3)
    assert "\n" not in str(caught.value)


def test_distribution_is_checked_once_for_each_family() -> None:
    tried: list[Sequence[Any]] = []
    split = Split({"goal_0": [-0.4, -0.1]}, {"goal_0": [0.1, 0.4]})
    space = MultiTaskSampler.spaces(FAMILY).task_space
    for name in ("a", "a", "b"):
        split.admit(FamilyTasks(name, space, lambda count, seed: []), tried.append)
    assert len(tried) == 2


@pytest.mark.parametrize("distribution", [TaskList([{"goal": np.array(goal)} for goal in GOALS]), Lazy()])
def test_tasks_that_a_distribution_draws_are_copies_of_their_own(distribution: Any) -> None:
    if isinstance(distribution, Lazy):
        distribution.tasks = [{"goal": np.array(GOALS[0])}]
    with sampler_of(distribution) as sampler:
        for _ in range(2):
            tasks = sampler.sample_tasks(3)
            assert all(task["goal"].tolist() in GOALS for task in tasks)
            # Such as a learner that scales what it was given.
            for task in tasks:
                task["goal"] *= 9.0
            assert all(np.abs(task["goal"]).max() < 9.0 for task in tasks)


@pytest.mark.parametrize(
    ("name", "draw", "split", "kind"),
    [
        ("np.random", np.random.random, "training", Elsewhere),
        ("torch", lambda: torch.rand(1), "validation", Elsewhere),
        ("random", random.random, "test", LaterElsewhere),
        ("np.random", np.random.random, "training", ChecksElsewhere),
    ],
)
def test_distribution_that_draws_from_a_generator_of_the_process_is_refused(
    name: str, draw: Callable[[], Any], split: Any, kind: type[Elsewhere]
) -> None:
    told = rf"(sample\w*|check) of {kind.__name__} draws from {name}, which no seed repeats; draw from"
    refused = pytest.raises(RuntimeError, match=told)
    with global_generators.KeptGenerators(), sampler_of(kind(draw), task_split=split) as sampler, refused:
        sampler.sample_tasks(3)


def test_draws_of_other_threads_during_later_batches_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    other = Elsewhere(lambda: None)
    with global_generators.KeptGenerators(), sampler_of(other) as sampler:
        sampler.sample_tasks(3)
        assert not caplog.records
        other.draw = random.random
        sampler.sample_tasks(3)
    (record,) = caplog.records
    assert "Elsewhere draws from random" in record.message
    assert "another thread has drawn meanwhile" in record.message


@pytest.mark.parametrize("is_drawn", [False, True])
def test_distribution_is_not_blamed_for_what_its_family_draws(is_drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfFamily(TaskDistribution):
        def check(self, family: FamilyTasks) -> list[Any]:
            return family.draw(2, np.random.default_rng(0))

        def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Any]:
            if is_drawn:
                np.random.random()
            return family.draw(num_tasks, rng)

    draw_tasks = Navigation2DVectorEnv.draw_tasks

    def draw(self: Any, rng: np.random.Generator, num_tasks: int) -> Any:
        random.random()
        return draw_tasks(self, rng, num_tasks)

    monkeypatch.setattr(Navigation2DVectorEnv, "draw_tasks", draw)
    told = pytest.raises(RuntimeError, match=r"sample of OfFamily draws from np\.random, which")
    refused = told if is_drawn else nullcontext()
    with global_generators.KeptGenerators(), sampler_of(OfFamily()) as sampler, refused:
        assert len(sampler.sample_tasks(3)) == 3
