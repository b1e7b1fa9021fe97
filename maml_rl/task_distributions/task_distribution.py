"""Task distributions: the protocol, and the registry of their names.

A distribution is a subclass of `TaskDistribution`. It draws from a random stream that is keyed by seed and iteration,
and keeps nothing except its `state_dict`: then the tasks are bit-identical wherever the environments are, and
after a run is resumed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np

from maml_rl.arguments import suggest
from maml_rl.arrays import Floats
from maml_rl.config import SettingsModel
from maml_rl.envs.global_generators import refusing_draws
from maml_rl.envs.meta_env import Task
from maml_rl.envs.tasks import TaskSpace
from maml_rl.errors import UsersCode, explain
from maml_rl.named_modules import import_named

# Purpose of drawn tasks: validation chooses something, such as a checkpoint, and must not see the tasks of the test.
TaskSplit = Literal["training", "validation", "test"]


@dataclass(frozen=True, slots=True)
class FamilyTasks:
    """The family whose tasks a distribution draws.

    Attributes:
        name: of the family.
        declared_space: what its tasks are made from; None where the family does not declare it.
        draw_seeded: draws a number of tasks from the family's own distribution, with a seed.
        seed: of the run, for fixed sets of tasks.
        draw_test_seeded: as `draw_seeded`, from the family's test tasks, where it keeps them apart; None for the same.
    """

    name: str
    declared_space: TaskSpace | None
    draw_seeded: Callable[[int, int], list[Task]]
    seed: int = 0
    draw_test_seeded: Callable[[int, int], list[Task]] | None = None

    def draw(self, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw tasks from the family's own distribution; for a test from that of its test tasks."""
        return self.draw_seeded(num_tasks, int(rng.integers(2**63)))

    def drawing_by(self, call: Callable[..., Any]) -> "FamilyTasks":
        """Return the family with draws for which a function is called, as that of `refusing_draws`."""
        of_test = self.draw_test_seeded and partial(call, self.draw_test_seeded)
        return replace(self, draw_seeded=partial(call, self.draw_seeded), draw_test_seeded=of_test)

    @property
    def space(self) -> TaskSpace:
        """The parameters of its tasks.

        Raises:
            ValueError: If the family does not declare it.
        """
        if self.declared_space is None:
            raise ValueError(
                f"{self.name} does not say what its tasks are made from; give it an attribute task_space, or draw from "
                "a list of tasks"
            )
        return self.declared_space


class TaskDistribution(ABC):
    """Draws the tasks of training, and of the evaluations that go with it.

    Attributes:
        Settings: the settings in a config, by the names of the constructor's arguments.
    """

    Settings: ClassVar[type[SettingsModel]] = SettingsModel
    # The family that it was checked with last.
    _admitted: str | None = None

    @classmethod
    def from_settings(cls, settings: Any, env_name: str) -> Self:
        """Make the distribution that a config describes, for the family `env_name`."""
        return cls(**{name: getattr(settings, name) for name in type(settings).model_fields})

    @classmethod
    def complete(cls, settings: Any, seed: int) -> Any:
        """Return the settings as a run keeps them, with what depends on its seed written out."""
        return settings

    @abstractmethod
    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw the tasks of one iteration of training.

        Args:
            family: whose tasks.
            num_tasks: how many.
            rng: the random stream of this iteration; draw from nothing else.
        """

    def sample_validation(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw tasks for the evaluations during training, which choose a checkpoint: never test tasks.

        They come from the family's own distribution, unless a subclass keeps test tasks apart.
        """
        return family.draw(num_tasks, rng)

    def sample_test(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw tasks for an evaluation: from the family's own distribution, unless a subclass has test tasks."""
        return family.draw(num_tasks, rng)

    def check(self, family: FamilyTasks) -> list[Task]:
        """Return tasks at the limits of what can be drawn, for the environment to try before training begins.

        Raises:
            ValueError: If the family has no such tasks, in one line with the remedy.
        """
        return []

    def admit(self, family: FamilyTasks, try_all: Callable[[Sequence[Task]], None]) -> None:
        """Check this distribution with a family, once before its first draw; see `check`.

        Args:
            family: whose tasks.
            try_all: gives tasks to an environment, and raises if it cannot use one.
        """
        if self._admitted != family.name:
            name = type(self).__name__
            with refusing_draws(f"check of {name}", "draw from np.random.default_rng(family.seed)") as excused:
                tasks = self.check(family.drawing_by(excused))
            if not isinstance(tasks, list | tuple):
                raise TypeError(f"check of {name} returned {tasks!r:.80}; return a list of tasks, [] for none")
            try_all(tasks)
            self._admitted = family.name

    def check_batch(self, num_tasks: int) -> None:
        """Refuse a number of tasks that training cannot draw at once; called after `check`.

        Raises:
            ValueError: In one line with the remedy.
        """
        return

    def fixed_tasks(self) -> dict[TaskSplit, list[Task]]:
        """Return the sets of tasks that were drawn once and for all, "training" and "test"; they go to the run folder.

        An evaluation measures on such a set as a whole, each task once.
        """
        return {}

    def take_fixed_tasks(self, tasks: Mapping[TaskSplit, list[Task]]) -> None:
        """Restore the sets of a run."""
        return

    def update(self, tasks: Sequence[Task], returns: Floats) -> None:
        """Receive the returns of an iteration; called before the next tasks are drawn.

        Args:
            tasks: the M tasks of the iteration.
            returns: (M, columns) mean return of each task after 0, 1, ... inner steps, or in each episode of a trial.
        """
        return

    def metrics(self) -> dict[str, float]:
        """Return metrics by name after each `update`; they go to `metrics.jsonl` as `tasks/NAME`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `update` has changed, as JSON values; a tuple comes back as a list."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: If it does not fit.
        """
        return


_REGISTRY: dict[str, type[TaskDistribution]] = {}


def register_task_distribution(name: str, distribution: type[TaskDistribution]) -> None:
    """Give a distribution a name for configs.

    Raises:
        ValueError: If the name is taken by another class, or holds a colon.
    """
    if ":" in name:
        raise ValueError(f"the name of a task distribution must not contain a colon, got {name!r}")
    if _REGISTRY.setdefault(name, distribution) is not distribution:
        raise ValueError(f"the name {name!r} is taken by {_REGISTRY[name]}; choose another")


def task_distributions() -> list[str]:
    """Return the registered names."""
    return list(_REGISTRY)


def find_task_distribution(name: str) -> type[TaskDistribution]:
    """Return the class of a registered name, or of "module:Class".

    Raises:
        ValueError: If there is none; with the nearest name.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        if name not in _REGISTRY:
            raise ValueError(f"unknown task distribution {name!r}{suggest(name, task_distributions())}")
        return _REGISTRY[name]
    with UsersCode(lambda error: ValueError(f"cannot import the task distribution {name!r} ({explain(error)})")):
        kind = getattr(import_named(module), attribute)
    if not (isinstance(kind, type) and issubclass(kind, TaskDistribution)):
        raise ValueError(f"{name!r} is not a task distribution; make it a subclass of TaskDistribution")
    return kind
