"""Distributions of tasks: a list, a grid, strata, the sides of a split, a curriculum."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue

from maml_rl.arguments import check_count
from maml_rl.arrays import Floats
from maml_rl.config import SettingsModel
from maml_rl.config.settings import Count, Fraction
from maml_rl.envs.meta_env import Task
from maml_rl.envs.tasks import TaskParameter, TaskSpace, apportion, family_of, task_key
from maml_rl.seeding import Purpose, StreamKey, generator
from maml_rl.task_distributions.task_distribution import FamilyTasks, TaskDistribution, TaskSplit
from maml_rl.task_distributions.task_files import read_tasks

Ranges = Mapping[str, Sequence[Any]]
# More tasks than any training can visit.
_LARGEST_GRID = 100_000
# How often a set of fixed tasks is drawn from a family in which tasks repeat.
_DRAWS = 100


class TaskList(TaskDistribution):
    """Tasks of a list, in a new random order each time.

    A batch has every task equally often, up to a difference of one; of a mixture it has the list's shares of families.

    Args:
        tasks: the list. A config may name a file instead, as `maml-rl test --save-tasks` writes it.

    Raises:
        ValueError: If there are no tasks, or two lists.
    """

    class Settings(SettingsModel):
        """In a config: the tasks themselves, or a file."""

        tasks: Annotated[list[dict[str, JsonValue]] | None, Field(description="the tasks")] = None
        file: Annotated[str | None, Field(description="file with them, as `test.py --save-tasks` writes it")] = None

    def __init__(self, tasks: Sequence[Task]) -> None:
        if not tasks:
            raise ValueError("a list of tasks needs at least one; add 'tasks', or a 'file'")
        self.tasks = list(tasks)
        self._digest = _digest(self.tasks)

    @classmethod
    def from_settings(cls, settings: Any, env_name: str) -> Self:
        """Make it from the tasks, or from the file."""
        if settings.tasks is not None and settings.file is not None:
            raise ValueError("two lists of tasks; keep 'tasks' or 'file'")
        return cls(settings.tasks or [] if settings.file is None else read_tasks(settings.file, env_name))

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw tasks without repetition until all are drawn, of a mixture as many of each family as are its share."""
        members: dict[str, list[Task]] = {}
        for task in self.tasks:
            members.setdefault(family_of(task), []).append(task)
        sizes = np.array([len(member) for member in members.values()])
        counts = apportion(sizes * num_tasks / len(self.tasks), rng).tolist()
        drawn: list[Task] = []
        for member, count in zip(members.values(), counts, strict=True):
            orders = [rng.permutation(len(member)) for _ in range(-(-count // len(member)))]
            drawn += [member[index] for order in orders for index in order][:count]
        return drawn if len(members) == 1 else [drawn[index] for index in rng.permutation(num_tasks)]

    def check(self, family: FamilyTasks) -> list[Task]:
        """Return all tasks."""
        return self.tasks

    def state_dict(self) -> dict[str, Any]:
        """Return a digest of the tasks, so that a resumed run cannot continue with others."""
        return {"sha256": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse the digest of other tasks."""
        if state != self.state_dict():
            raise ValueError("the tasks are not those with which the run began; put the earlier file back")


class FixedTasks(TaskDistribution):
    """A set of training tasks and one of test tasks, drawn once from the family; no task is in both.

    A batch of training has distinct tasks of the set, new ones in every iteration. Evaluations measure on all test
    tasks, those during training (`evaluate-every`) on training tasks. Of a mixture, both sets and every batch have as
    many tasks of a family as its weight says, up to rounding.

    Args:
        train: number of training tasks.
        test: number of test tasks.
        seed: which ones; None for the seed of the run.

    Raises:
        ValueError: If a number is less than 1.

    Source: the protocol of Rakelly et al. 2019, https://arxiv.org/abs/1903.08254
    """

    class Settings(SettingsModel):
        """In a config."""

        train: Annotated[Count, Field(description="training tasks")] = 100
        test: Annotated[Count, Field(description="test tasks, none of which is a training task")] = 30
        seed: Annotated[int | None, Field(ge=0, lt=2**32, description="which tasks; null: by the run's seed")] = None

    def __init__(self, train: int = 100, test: int = 30, seed: int | None = None) -> None:
        self.train, self.test = check_count("train", train), check_count("test", test)
        self.seed = seed
        self._sets: dict[TaskSplit, list[Task]] = {}

    @classmethod
    def complete(cls, settings: Any, seed: int) -> Any:
        """Return the settings with the seed: a test with another seed measures on the same tasks."""
        return settings if settings.seed is not None else settings.model_copy(update={"seed": seed})

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw distinct training tasks.

        Raises:
            ValueError: If the set has fewer.
        """
        self._draw(family)
        self.check_batch(num_tasks)
        return TaskList(self._sets["training"]).sample(family, num_tasks, rng)

    def sample_validation(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw training tasks, each equally often up to a difference of one."""
        self._draw(family)
        return TaskList(self._sets["training"]).sample(family, num_tasks, rng)

    def sample_test(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw test tasks, each equally often up to a difference of one."""
        self._draw(family)
        return TaskList(self._sets["test"]).sample(family, num_tasks, rng)

    def check(self, family: FamilyTasks) -> list[Task]:
        """Draw the tasks, and return them all."""
        self._draw(family)
        return [*self._sets["training"], *self._sets["test"]]

    def check_batch(self, num_tasks: int) -> None:
        """Refuse more tasks than there are: a batch has distinct ones."""
        if num_tasks > self.train:
            raise ValueError(
                f"a batch has distinct tasks, and there are {self.train} training tasks for a meta-batch-size of "
                f"{num_tasks}; lower meta-batch-size, or raise 'train'"
            )

    def fixed_tasks(self) -> dict[TaskSplit, list[Task]]:
        """Return both sets."""
        return dict(self._sets)

    def take_fixed_tasks(self, tasks: Mapping[TaskSplit, list[Task]]) -> None:
        """Take over the sets of a run."""
        self._sets = dict(tasks)

    def state_dict(self) -> dict[str, Any]:
        """Return a digest of the tasks, so that a resumed run cannot continue with others."""
        return {"sha256": _digest([*self._sets["training"], *self._sets["test"]])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse the digest of other tasks."""
        if state != self.state_dict():
            raise ValueError("the tasks are not those with which the run began; put the earlier files of tasks back")

    def _draw(self, family: FamilyTasks) -> None:
        """Draw both sets, unless they exist."""
        if self._sets:
            return
        rng = generator(StreamKey(family.seed if self.seed is None else self.seed, Purpose.FIXED_TASKS))
        taken: set[str] = set()
        sides: tuple[tuple[TaskSplit, int, Callable[[int, int], list[Task]]], ...] = (
            ("training", self.train, family.draw_seeded),
            ("test", self.test, family.draw_test_seeded or family.draw_seeded),
        )
        drawn: dict[TaskSplit, list[Task]] = {}
        for side, count, draw in sides:
            chosen: list[Task] = drawn.setdefault(side, [])
            # How many of each family of a mixture are missing: the first draw has as many as its weight says.
            missing: Counter[str] = Counter()
            for _ in range(_DRAWS):
                tasks = draw(count, int(rng.integers(2**63)))
                missing = missing or Counter(map(family_of, tasks))
                for task in tasks:
                    text, name = task_key(task), family_of(task)
                    if text not in taken and missing[name]:
                        taken.add(text)
                        chosen.append(task)
                        missing[name] -= 1
                if len(chosen) == count:
                    break
            else:
                short = next(iter(+missing))
                known = sum(family_of(task) == short for task in [*drawn["training"], *drawn.get("test", [])])
                raise ValueError(
                    f"{short or family.name} has too few different tasks for {'its share of ' if short else ''}"
                    f"{self.train} training tasks and {self.test} test tasks that are not among them: {known} were "
                    f"found; lower 'train' or 'test'{', or its weight' if short else ''}"
                )
        self._sets = drawn


def _digest(tasks: Sequence[Task]) -> str:
    return hashlib.sha256(task_key(tasks).encode()).hexdigest()


class Grid(TaskDistribution):
    """All combinations of a few values of every parameter, in a new random order each time; see `TaskList`.

    Args:
        values: for every parameter of the family the list of its values, or how many: that many parts of its range are
            equally likely, and the values are their medians.
    """

    class Settings(SettingsModel):
        """In a config."""

        values: Annotated[
            dict[str, JsonValue] | None,
            Field(description="for every parameter of the tasks its values, or how many across its range"),
        ] = None

    def __init__(self, values: Mapping[str, int | Sequence[float]] | None) -> None:
        self.values = dict(values or {})
        self._list: TaskList | None = None

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw points of the grid without repetition until all are drawn."""
        self._list = self._list or TaskList(self.tasks(family))
        return self._list.sample(family, num_tasks, rng)

    def check(self, family: FamilyTasks) -> list[Task]:
        """Return tasks that have every value of every parameter."""
        columns = self._columns(family)
        longest = max(map(len, columns.values()))
        return family.space.to_tasks({name: np.resize(column, longest) for name, column in columns.items()})

    def tasks(self, family: FamilyTasks) -> list[Task]:
        """Return the tasks of the grid; the last parameter varies fastest."""
        columns = self._columns(family)
        points = np.meshgrid(*columns.values(), indexing="ij")
        return family.space.to_tasks({name: array.ravel() for name, array in zip(columns, points, strict=True)})

    def _columns(self, family: FamilyTasks) -> dict[str, Floats]:
        space = family.space
        given = {name: _values(name, space.find(name), values) for name, values in self.values.items()}
        missing = [name for name in space.parameters if name not in given]
        if missing:
            others = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise ValueError(f"a grid of {family.name} needs 'values' of {missing[0]!r}{others}; add them")
        sizes = [len(values) for values in given.values()]
        if math.prod(sizes) > _LARGEST_GRID:
            raise ValueError(
                f"a grid of {' x '.join(map(str, sizes))} = {math.prod(sizes):,} tasks is too large; give fewer "
                f"values, for {_LARGEST_GRID:,} tasks at most, or draw in strata"
            )
        return {name: given[name] for name in space.parameters}


def _values(name: str, parameter: TaskParameter, values: Any) -> Floats:
    """Return the values of one parameter of a grid."""
    if isinstance(values, int) and not isinstance(values, bool):
        most = len(parameter.values) or _LARGEST_GRID
        if not 1 <= values <= most:
            raise ValueError(f"the number of values of {name!r} must be in [1, {most}], got {values}")
        return parameter.at((np.arange(values) + 0.5) / values)
    try:
        array = np.array(values, np.float64)
    except (TypeError, ValueError):
        array = np.array(np.nan)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ValueError(f"the values of {name!r} must be a list of numbers, or how many, got {values!r}")
    return array


class Stratified(TaskDistribution):
    """The family's distribution, drawn evenly: a Latin hypercube.

    Of M tasks, each of M equally likely parts of a parameter's range gets exactly one, for each parameter by itself.

    Args:
        parameters: which are drawn so; None for all. The others are drawn independently.

    Source: McKay et al. 1979, A comparison of three methods for selecting values of input variables,
    https://doi.org/10.1080/00401706.1979.10489755
    """

    class Settings(SettingsModel):
        """In a config."""

        parameters: Annotated[
            tuple[str, ...] | None, Field(strict=False, description="which parameters have strata; null: all")
        ] = None

    def __init__(self, parameters: Sequence[str] | None = None) -> None:
        self.parameters = parameters

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw one task for each stratum."""
        return family.space.tasks_at(_quantiles(family.space, num_tasks, rng, self._names(family)))

    def check(self, family: FamilyTasks) -> list[Task]:
        """Refuse unknown parameters."""
        self._names(family)
        return []

    def _names(self, family: FamilyTasks) -> list[str]:
        names = list(family.space.parameters if self.parameters is None else self.parameters)
        for name in names:
            family.space.find(name)
        return names


def _quantiles(space: TaskSpace, num_tasks: int, rng: np.random.Generator, stratified: Sequence[str] = ()) -> Floats:
    """Draw quantiles (M, number of parameters), of some parameters one from each of M strata."""
    parameters = list(space.parameters)
    quantiles = rng.random((num_tasks, len(parameters)))
    for column, name in enumerate(parameters):
        if name in stratified:
            quantiles[:, column] = _within_parts(quantiles[:, column], rng.permutation(num_tasks), num_tasks)
    return quantiles


def _within_parts(quantiles: Floats, parts: NDArray[Any], count: int) -> Floats:
    """Return quantiles (n,) of a whole as those of its parts, of `count` equal ones, that have the numbers `parts`."""
    # Rounding must not lead into the next part.
    moved: Floats = np.minimum((parts + quantiles) / count, np.nextafter((parts + 1) / count, 0.0))
    return moved


class Split(TaskDistribution):
    """Training draws from some ranges of the parameters, evaluations from others.

    Either side may be outside of the family's own range, as far as the family allows it. A parameter that is not named
    has the family's range.

    Args:
        train: by parameter [low, high], or several ranges; for a parameter with values, the list of them.
        test: likewise. The two sides must be disjoint in at least one parameter.
        stratified: whether each side is drawn in strata; see `Stratified`.
    """

    class Settings(SettingsModel):
        """In a config."""

        train: Annotated[
            dict[str, JsonValue] | None,
            Field(description="range [low, high] of each parameter in training, a list of ranges, or values"),
        ] = None
        test: Annotated[dict[str, JsonValue] | None, Field(description="the same for the tasks of evaluations")] = None
        stratified: Annotated[bool, Field(description="draw both sides in strata")] = False

    def __init__(self, train: Ranges | None = None, test: Ranges | None = None, stratified: bool = False) -> None:
        self.train, self.test, self.stratified = dict(train or {}), dict(test or {}), stratified

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw from the side of training."""
        return self._draw(family, "train", num_tasks, rng)

    def sample_validation(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw from the side of training."""
        return self._draw(family, "train", num_tasks, rng)

    def sample_test(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw from the side of evaluations."""
        return self._draw(family, "test", num_tasks, rng)

    def check(self, family: FamilyTasks) -> list[Task]:
        """Return tasks at the ends of all ranges."""
        if not (self.train or self.test):
            raise ValueError("a split needs ranges of 'train', of 'test', or of both; add them")
        sides = [self._side(family, side) for side in ("train", "test")]
        train, test = ({**family.space.parameters, **side} for side in sides)
        if all(train[name].overlaps(test[name]) for name in train):
            raise ValueError(
                "'train' and 'test' overlap, so that evaluations would see tasks of training; make the ranges of one "
                "parameter disjoint"
            )
        tasks = []
        for side in sides:
            for name, parameter in side.items():
                middle = np.full((1, len(train)), 0.5)
                tasks += [
                    family.space.tasks_at(middle, {**side, name: TaskParameter.choice(end)})[0]
                    for end in parameter.ends()
                ]
        return tasks

    def _draw(self, family: FamilyTasks, side: str, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        stratified = list(family.space.parameters) if self.stratified else []
        return family.space.tasks_at(_quantiles(family.space, num_tasks, rng, stratified), self._side(family, side))

    def _side(self, family: FamilyTasks, side: str) -> dict[str, TaskParameter]:
        parameters = {}
        for name, wanted in getattr(self, side).items():
            parameter = family.space.find(name)
            try:
                parameters[name] = parameter.within(wanted)
            except ValueError as error:
                raise ValueError(f"{side!r}, {name!r}: {error}") from None
        return parameters


class Curriculum(TaskDistribution):
    """Draws more where the return changes: parts of a parameter's range by how much was learned or forgotten there.

    The parts are equally likely in the family's distribution. Progress in a part is the difference of two running
    averages of the return after adaptation, a fast and a slow one; the share of a part in what is drawn is in
    proportion to it. A part that was never drawn has the share of the best.

    Args:
        parameter: whose range; None for the only one.
        parts: into how many.
        uniform: share of tasks that are drawn from the family's distribution regardless of progress.
        fast: weight of the newest returns in the fast average.
        slow: in the slow average.

    Source: Kanitscheider et al. 2021, section 3 (whose tasks succeed or fail), https://arxiv.org/abs/2106.14876
    """

    class Settings(SettingsModel):
        """In a config."""

        parameter: Annotated[str | None, Field(description="drawn by progress; null: the only one")] = None
        parts: Annotated[Count, Field(description="parts of its range")] = 10
        uniform: Annotated[Fraction, Field(description="share of tasks that are drawn as the family does")] = 0.2
        fast: Annotated[Fraction, Field(description="weight of the newest returns in the fast average")] = 0.3
        slow: Annotated[Fraction, Field(description="likewise in the slow average")] = 0.05

    def __init__(
        self,
        parameter: str | None = None,
        parts: int = 10,
        uniform: float = 0.2,
        fast: float = 0.3,
        slow: float = 0.05,
    ) -> None:
        self.parameter, self.parts = parameter, check_count("parts", parts, 2)
        self.uniform, self.fast, self.slow = uniform, fast, slow
        if not slow < fast:
            raise ValueError(f"'slow' must be below 'fast', got {slow:g} and {fast:g}")
        self._averages: list[list[float] | None] = [None] * parts
        self._space: TaskSpace | None = None

    def probabilities(self) -> Floats:
        """Return the share of each part, (parts,), in the next draws."""
        known = [abs(fast - slow) for fast, slow in filter(None, self._averages)]
        best = max(known, default=0.0)
        progress = np.array([best if pair is None else abs(pair[0] - pair[1]) for pair in self._averages])
        even = np.full(self.parts, 1.0 / self.parts)
        return even if progress.sum() == 0.0 else (1.0 - self.uniform) * progress / progress.sum() + self.uniform * even

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        """Draw parts by progress, and tasks within them as the family does."""
        self._space = family.space
        quantiles = _quantiles(self._space, num_tasks, rng)
        column = list(self._space.parameters).index(self._name(self._space))
        parts = rng.choice(self.parts, num_tasks, p=self.probabilities())
        quantiles[:, column] = _within_parts(quantiles[:, column], parts, self.parts)
        return self._space.tasks_at(quantiles)

    def check(self, family: FamilyTasks) -> list[Task]:
        """Refuse an unknown parameter."""
        self._name(family.space)
        return []

    def update(self, tasks: Sequence[Task], returns: Floats) -> None:
        """Move the averages of the tasks' parts toward their returns after adaptation."""
        if self._space is None:
            raise ValueError("a curriculum can only be updated with tasks that it has drawn; call sample first")
        name = self._name(self._space)
        parameter = self._space.parameters[name]
        quantiles = np.array([parameter.quantile(self._space.values_of(task)[name]) for task in tasks])
        # A value at the lower end of a part may come back a rounding below it.
        parts = np.minimum(np.floor(quantiles * self.parts + 1e-9).astype(int), self.parts - 1)
        for part in np.unique(parts):
            newest = float(returns[parts == part, -1].mean())
            fast, slow = self._averages[part] or (newest, newest)
            self._averages[part] = [fast + self.fast * (newest - fast), slow + self.slow * (newest - slow)]

    def metrics(self) -> dict[str, float]:
        """Return the share of each part in the next draws, and the fast average of each that was drawn."""
        shares = {f"share/part_{part}": float(share) for part, share in enumerate(self.probabilities())}
        known = {part: pair[0] for part, pair in enumerate(self._averages) if pair is not None}
        return shares | {f"return/part_{part}": fast for part, fast in known.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        return {"averages": [None if pair is None else list(pair) for pair in self._averages]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over averages."""
        averages = state.get("averages")
        if not isinstance(averages, list) or len(averages) != self.parts:
            raise ValueError(f"expected the averages of {self.parts} parts, got {state!r}")
        self._averages = [None if pair is None else [float(pair[0]), float(pair[1])] for pair in averages]

    def _name(self, space: TaskSpace) -> str:
        names = list(space.parameters)
        if self.parameter is None and len(names) > 1:
            raise ValueError(f"a curriculum needs a 'parameter', such as {names[0]!r} or {names[1]!r}; add it")
        name = names[0] if self.parameter is None else self.parameter
        space.find(name)
        return name
