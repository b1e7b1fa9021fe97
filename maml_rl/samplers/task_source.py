"""Where the tasks of a sampler come from: the family itself, or a task distribution over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from maml_rl.arguments import check_count
from maml_rl.envs.checking import DrawsBySeed
from maml_rl.envs.meta_env import Task
from maml_rl.errors import ConfigError, TaskError
from maml_rl.samplers.backend import RolloutBackend
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.seeding import StreamKey, generator
from maml_rl.task_distributions import FamilyTasks, TaskDistribution
from maml_rl.task_distributions.task_distribution import TaskSplit
from maml_rl.task_distributions.task_files import try_tasks

Result = TypeVar("Result")


class Workers(Protocol):
    """Workers that do work again after every loss of one of them."""

    def do(self, work: Callable[[RolloutBackend], Result]) -> Result:
        """Return the result of the work."""


class TaskSource:
    """Draws tasks by keys, and refuses what are no tasks of the family.

    Args:
        recipe: of the environment.
        workers: draw the family's own tasks.
        distribution: what `sample` draws from; None for the family's own distribution.
        split: which tasks, where some are kept apart.
        seed: of the sampler.
        in_process: whether environments may be made in this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        workers: Workers,
        distribution: TaskDistribution | None,
        split: TaskSplit,
        seed: int,
        *,
        in_process: bool,
    ) -> None:
        self._recipe, self._workers, self._seed = recipe, workers, seed
        self._distribution, self._split = distribution, split
        self._draws = DrawsBySeed()
        self._has_drawn = False
        # An environment of the user's own may belong to the workers alone; of such a task the phase says what is wrong.
        self._tries = in_process or recipe.family is not None

    def draw(self, num_tasks: int, key: StreamKey) -> list[Task]:
        """Draw tasks of the family's own distribution from the random stream `key`."""
        check_count("num_tasks", num_tasks)
        return self._draw_seeded(num_tasks, int(generator(key).integers(2**63)))

    def _draw_seeded(self, num_tasks: int, seed: int) -> list[Task]:
        def draw(count: int, seed: int) -> list[Task]:
            return self._workers.do(lambda backend: backend.sample_tasks(count, seed, self._split == "test"))

        tasks = draw(num_tasks, seed)
        self._draws.check(seed, tasks, draw)
        return tasks

    def sample(self, num_tasks: int, key: StreamKey) -> list[Task]:
        """Draw tasks from the random stream `key`; see `PhaseSampler.sample_tasks`."""
        distribution = self._distribution
        if distribution is None:
            return self.draw(num_tasks, key)
        self._workers.do(lambda backend: backend.prepare(check_count("num_tasks", num_tasks)))
        family = FamilyTasks(
            self._recipe.source.id or "the family",
            self._workers.do(lambda backend: backend.describe()).task_space,
            self._draw_seeded,
            self._seed,
            lambda count, seed: self._workers.do(lambda backend: backend.sample_tasks(count, seed, True)),
        )
        distribution.admit(family, lambda tasks: self._try(tasks, "the distribution"))
        if self._split == "training":
            distribution.check_batch(num_tasks)
        draw = {
            "training": distribution.sample,
            "validation": distribution.sample_validation,
            "test": distribution.sample_test,
        }[self._split]
        tasks = draw(family, num_tasks, generator(key))
        if len(tasks) != num_tasks:
            raise TaskError(f"{type(distribution).__name__} was asked for {num_tasks} tasks and drew {len(tasks)}")
        if not self._has_drawn:
            self._try(tasks, f"the first draw of {type(distribution).__name__}")
            self._has_drawn = True
        return tasks

    def _try(self, tasks: Sequence[Task], origin: str) -> None:
        """Refuse what are no tasks, in an environment of this process if there may be one."""
        if not all(isinstance(task, Mapping) for task in tasks):
            raise TaskError(f"{origin} has {tasks!r:.80}; a task is a dict from names to values")
        if not (tasks and self._tries):
            return
        env = self._recipe.make(1)
        try:
            try_tasks(tasks, env, origin)
        except ConfigError as error:
            raise TaskError(str(error)) from error
        finally:
            env.close()
