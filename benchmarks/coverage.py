"""How often the intervals of this package cover the truth, simulated: the tables of docs/results/coverage.md.

    python -m benchmarks.coverage                # the whole grid, a quarter of an hour of one core; writes the page
    python -m benchmarks.coverage --simulations 100 --print

Scores are a training's luck, a task's difficulty and noise, and the truth is known: an episode succeeds where its score
is below a number. The intervals are those of `maml_rl.results.evaluation`, as `maml-rl test`, report and suite show
them. One that is not shown is counted nowhere: whether it is shown must depend on the numbers of tasks and
trainings alone. Profiles leave out bands where few returns are on a side, and count here with them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from maml_rl.cli.console import Parser
from maml_rl.results.evaluation import (
    Evaluation,
    difference_interval,
    pooled_intervals,
)
from maml_rl.results.statistics import Statistic, interquartile_mean, mean, performance_profile

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "coverage.md"
TRUTHS = 0.05, 0.5, 0.9, 0.97
SEEDS = 1, 2, 3, 5, 10
TASKS = 10, 40, 200
SIMULATIONS = 400
# In each adaptation.
EPISODES = 5
# Share of the tasks that no run solves; and numbers for a truth without a formula.
_UNSOLVED, _MANY = 0.3, 2_000_000
# Simulations that are in memory at once.
_AT_ONCE = 200
_INFO = "success"
_BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)

Values = NDArray[np.float64]
_NORMAL = NormalDist()


class World(NamedTuple):
    """What scores are made of: shares of their variance; the rest is noise of every training on every task."""

    luck: float
    tasks: float


WORLDS = {"a fifth": World(0.2, 0.2), "half": World(0.5, 0.2)}


class Cell(NamedTuple):
    """Simulated intervals of one kind and size.

    Attributes:
        kind: of the interval.
        world: name of the world, or of the distribution.
        seeds: number of trainings; of tasks that are fixed, of adaptations to each.
        tasks: number of tasks.
        truth: the share; 0 of means.
        covered: share of the intervals that cover the truth; NaN where none is shown.
        shown: share of the simulations that have an interval.
    """

    kind: str
    world: str
    seeds: int
    tasks: int
    truth: float
    covered: float
    shown: float


# (random generator, number of simulations) -> intervals (K, 3), and the truth that they should cover.
_Simulate = Callable[[np.random.Generator, int], tuple[Values, float]]


def draw(
    random: np.random.Generator,
    world: World,
    seeds: int,
    tasks: int,
    count: int,
    transform: Callable[[Values], Values] = lambda values: values,
) -> Values:
    """Return scores of variance 1, (seeds, tasks, count), whose mean is 0; a single training has no luck.

    Args:
        random: draws them.
        world: their parts.
        seeds: number of trainings.
        tasks: number of tasks, which all share.
        count: of simulations.
        transform: makes the luck, and the difficulty, of what is drawn from a normal distribution.
    """
    luck = np.sqrt(world.luck) * transform(random.normal(size=(seeds, 1, count))) if seeds > 1 else 0.0
    difficulty = np.sqrt(world.tasks) * transform(random.normal(size=(1, tasks, count)))
    # Without its luck, a training's scores vary less.
    noise = np.sqrt(1.0 - world.tasks - (world.luck if seeds > 1 else 0.0))
    return np.asarray(luck + difficulty + noise * random.normal(size=(seeds, tasks, count)))


def skewed(sigma: float, values: Values) -> Values:
    """Return lognormal numbers of mean 0 and variance 1 from normal ones."""
    variance = np.exp(sigma**2)
    return np.asarray((np.exp(sigma * values) - np.sqrt(variance)) / np.sqrt(variance * (variance - 1.0)))


def evaluations(returns: Values, successes: NDArray[np.bool_] | None = None, **options: Any) -> list[Evaluation]:
    """Return evaluations of trainings, whose dimension of gradient steps holds the simulations.

    Args:
        returns: (R, N, K) or (R, N, K, B).
        successes: (R, N, K, B).
        **options: attributes of the evaluations.
    """
    tasks = [{"number": number} for number in range(returns.shape[1])]
    returns = returns[..., None] if returns.ndim == 3 else returns
    infos = [{}] * len(returns) if successes is None else [{_INFO: each.astype(np.float32)} for each in successes]
    if successes is not None:
        returns = np.broadcast_to(returns, successes.shape)
    return [
        Evaluation("", seed, tasks, (), each.astype(np.float32), infos=info, **options)
        for seed, (each, info) in enumerate(zip(returns, infos, strict=True))
    ]


def _succeed(random: np.random.Generator, scores: Values, rate: float, world: World) -> NDArray[np.bool_]:
    """Return whether episodes succeed, (R, N, K, B): half of the noise of a score is that of its episodes."""
    noise = np.sqrt(1.0 - world.luck - world.tasks)
    episodes = noise * random.normal(size=(*scores.shape, EPISODES))
    return np.asarray(scores[..., None] + episodes < _NORMAL.inv_cdf(rate) * np.sqrt(1.0 + noise**2))


def success_rate(world: World, seeds: int, tasks: int, rate: float) -> _Simulate:
    """The rate of success of an algorithm, or with one training of a policy."""

    def simulate(random: np.random.Generator, count: int) -> tuple[Values, float]:
        alone = World(0.0, world.tasks) if seeds == 1 else world
        succeed = _succeed(random, draw(random, alone, seeds, tasks, count), rate, alone)
        return pooled_intervals(evaluations(np.zeros((seeds, tasks, count)), succeed), info=_INFO), rate

    return simulate


def profile(world: World, seeds: int, tasks: int, share: float) -> _Simulate:
    """The share of trainings and tasks above a return."""

    def simulate(random: np.random.Generator, count: int) -> tuple[Values, float]:
        scores = draw(random, world, seeds, tasks, count)
        threshold = np.array([_NORMAL.inv_cdf(1.0 - share)])
        each = (performance_profile(list(scores[..., index]), threshold, drawn_tasks=True) for index in range(count))
        return np.concatenate(list(each)), share

    return simulate


SHARES = {
    "rate of success": success_rate,
    "performance profile": profile,
}
DISTRIBUTIONS: dict[str, Callable[[Values], Values]] = {
    "normal": lambda values: values,
    "skewed (lognormal, 0.5)": partial(skewed, 0.5),
    "very skewed (lognormal, 1)": partial(skewed, 1.0),
}
# Of the certified benchmarks, and fewer adaptations to two tasks: numbers of tasks, and of adaptations to each.
NEARLY_FIXED = (2, 3), (21, 3), (21, 10), (40, 3)
FIXED = (2, 3), (2, 10), (21, 10), (40, 3), (100, 3)


def mean_return(name: str, seeds: int, tasks: int, statistic: Statistic = mean) -> _Simulate:
    """The mean return, or another statistic of symmetric returns, where luck and difficulty have this distribution."""

    def simulate(random: np.random.Generator, count: int) -> tuple[Values, float]:
        scores = draw(random, WORLDS["half"], seeds, tasks, count, DISTRIBUTIONS[name])
        return pooled_intervals(evaluations(scores), statistic), 0.0

    return simulate


def mean_difference(name: str, seeds: int, tasks: int) -> _Simulate:
    """The difference of the mean returns of two algorithms on the same tasks, to which both respond differently."""

    def simulate(random: np.random.Generator, count: int) -> tuple[Values, float]:
        world, transform = WORLDS["half"], DISTRIBUTIONS[name]
        found = []
        for _ in range(count):
            difficulty = transform(random.normal(size=(1, tasks, 1)))
            # One is twice as sensitive to the difficulty as the other.
            one, other = (
                evaluations(draw(random, World(world.luck, 0.0), seeds, tasks, 1, transform) + factor * difficulty)
                for factor in (0.5, 1.0)
            )
            found.append(difference_interval(one, other))
        return np.stack(found), 0.0

    return simulate


def fixed_tasks(name: str, adaptations: int, tasks: int) -> _Simulate:
    """The mean return of one policy on fixed tasks, where the adaptations to a task have this distribution."""

    def simulate(random: np.random.Generator, count: int) -> tuple[Values, float]:
        levels = np.arange(tasks)[:, None, None]
        scores = levels + DISTRIBUTIONS[name](random.normal(size=(tasks, count, adaptations)))
        found = pooled_intervals(evaluations(scores[None], fixed_tasks=True, repetitions=adaptations))
        return found, float(levels.mean())

    return simulate


def of_two_kinds(name: str, seeds: int, tasks: int, statistic: Statistic) -> _Simulate:
    """The mean or interquartile mean where three in ten tasks return nothing, for every run."""

    def simulate(random: np.random.Generator, count: int) -> tuple[Values, float]:
        returns = np.where(
            random.random((1, tasks, count)) < _UNSOLVED, 0.0, 1.0 + 0.2 * random.normal(size=(1, tasks, count))
        )
        luck = 0.1 * random.normal(size=(seeds, 1, count)) if seeds > 1 else np.zeros((1, 1, count))
        noise = 0.05 * random.normal(size=(seeds, tasks, count))
        return pooled_intervals(evaluations(returns + luck + noise), statistic), _truth_of_two_kinds(statistic, seeds)

    return simulate


@cache
def _truth_of_two_kinds(statistic: Statistic, seeds: int) -> float:
    """Return what many tasks and runs would give."""
    if statistic is mean:
        return 1.0 - _UNSOLVED
    random = np.random.default_rng(0)
    luck = 0.1 if seeds > 1 else 0.0
    solved = 1.0 + np.hypot(np.hypot(0.2, 0.05), luck) * random.normal(size=_MANY)
    unsolved = np.hypot(0.05, luck) * random.normal(size=_MANY)
    values = np.where(random.random(_MANY) < _UNSOLVED, unsolved, solved)
    return float(interquartile_mean(values, np.full(_MANY, 1.0 / _MANY)))


def alike(name: str, adaptations: int, tasks: int) -> _Simulate:
    """The rate of success on fixed tasks whose outcomes hardly ever differ within a task."""

    def simulate(random: np.random.Generator, count: int) -> tuple[Values, float]:
        rates = np.where(np.arange(tasks) % 3 == 0, 0.05, 0.97)
        succeed = random.random((1, tasks, count, adaptations)) < rates[:, None, None]
        given = evaluations(np.zeros((1, tasks, count)), succeed, fixed_tasks=True, repetitions=adaptations)
        return pooled_intervals(given, info=_INFO), float(rates.mean())

    return simulate


def failing(name: str, seeds: int, tasks: int) -> _Simulate:
    """The mean return where one run in ten fails, and earns nothing."""

    def simulate(random: np.random.Generator, count: int) -> tuple[Values, float]:
        level = np.where(random.random((seeds, 1, count)) < 0.1, 0.0, 1.0 + 0.1 * random.normal(size=(seeds, 1, count)))
        return pooled_intervals(evaluations(level + 0.1 * random.normal(size=(seeds, tasks, count)))), 0.9

    return simulate


def _cell(kind: str, world: str, seeds: int, tasks: int, truth: float, simulate: _Simulate, simulations: int) -> Cell:
    """Return how many intervals cover the truth; the random numbers depend on the cell alone."""
    covered, shown = [], []
    key = crc32(f"{kind} {world} {seeds} {tasks} {truth}".encode())
    for index, start in enumerate(range(0, simulations, _AT_ONCE)):
        random = np.random.default_rng([key, index])
        intervals, value = simulate(random, min(_AT_ONCE, simulations - start))
        _, low, high = intervals.T
        known = np.isfinite(low)
        shown.extend(known)
        covered.extend(((low - 1e-9 <= value) & (value <= high + 1e-9))[known])
    return Cell(kind, world, seeds, tasks, truth, float(np.mean(covered)) if covered else np.nan, float(np.mean(shown)))


def share_cells(
    simulations: int,
    seeds: Iterable[int] = SEEDS,
    tasks: Iterable[int] = TASKS,
    truths: Iterable[float] = TRUTHS,
    worlds: Iterable[str] = tuple(WORLDS),
    kinds: Iterable[str] = tuple(SHARES),
) -> Iterator[Cell]:
    """Yield the cells of shares."""
    sizes = [(seed, task, truth) for seed in seeds for task in tasks for truth in truths]
    for kind in kinds:
        for world in worlds:
            for size in sizes:
                yield _cell(kind, world, *size, SHARES[kind](WORLDS[world], *size), simulations)


def mean_cells(
    simulations: int, seeds: Iterable[int] = SEEDS, tasks: Iterable[int] = TASKS[1:], fixed: Any = FIXED
) -> Iterator[Cell]:
    """Yield the cells of mean returns, of interquartile means, and of fixed tasks."""
    sizes = [(seed, task) for seed in seeds for task in tasks]
    for name in DISTRIBUTIONS:
        for size in sizes:
            yield _cell("mean return", name, *size, 0.0, mean_return(name, *size), simulations)
        for size in (each for each in sizes if each[0] > 1):
            yield _cell("difference of two means", name, *size, 0.0, mean_difference(name, *size), simulations)
        for number, adaptations in fixed:
            simulate = fixed_tasks(name, adaptations, number)
            yield _cell("fixed tasks", name, adaptations, number, 0.0, simulate, simulations)
    for size in sizes:
        simulate = mean_return("normal", *size, interquartile_mean)
        yield _cell("interquartile mean", "normal", *size, 0.0, simulate, simulations)


def hard_cells(
    simulations: int, seeds: Iterable[int] = (1, 3, 5), tasks: Iterable[int] = (40, 100, 200), fixed: Any = NEARLY_FIXED
) -> Iterator[Cell]:
    """Yield the cells in which earlier intervals were wrong."""
    sizes = [(seed, task) for seed in seeds for task in tasks]
    for name, statistic in {"mean return": mean, "interquartile mean": interquartile_mean}.items():
        for size in sizes:
            simulate = of_two_kinds(name, *size, statistic)
            yield _cell(f"{name}, three in ten tasks return nothing", "", *size, 0.0, simulate, simulations)
    for number, adaptations in fixed:
        simulate = alike("", adaptations, number)
        yield _cell(
            "success on fixed tasks, outcomes alike within a task", "", adaptations, number, 0.0, simulate, simulations
        )
    for size in sizes:
        if size[0] > 1:
            yield _cell("mean return, one run in ten fails", "", *size, 0.0, failing("", *size), simulations)


def _table(cells: Sequence[Cell], titles: Sequence[str], row: Callable[[Cell], tuple[str, ...]], column: str) -> str:
    """Return a table with rows named by `row`, and a column for each value of an attribute of the cells."""
    by_row: dict[tuple[str, ...], dict[Any, list[Cell]]] = {}
    for cell in cells:
        by_row.setdefault(row(cell), {}).setdefault(getattr(cell, column), []).append(cell)
    values = list(dict.fromkeys(getattr(cell, column) for cell in cells))
    names = [value if isinstance(value, str) else f"{column} {value:g}" for value in values]
    lines = [f"| {' | '.join((*titles, *names))} |", "|" + "---|" * len(titles) + "---:|" * len(names)]
    for name, of_row in by_row.items():
        shares = (" / ".join(f"{100.0 * cell.covered:.0f}" for cell in of_row.get(value, [])) for value in values)
        lines.append(f"| {' | '.join((*name, *shares))} |")
    return "\n".join(lines)


def share_table(cells: Sequence[Cell]) -> str:
    """Return a table of shares: a row for each kind, world and number of trainings, a column for each truth."""
    # A single training has no luck.
    first = next(iter(WORLDS))
    shown = [cell for cell in cells if cell.seeds > 1 or cell.world == first]
    return _table(
        shown,
        ("interval", "luck", "runs"),
        lambda cell: (cell.kind, cell.world if cell.seeds > 1 else "", str(cell.seeds)),
        "truth",
    )


def mean_table(cells: Sequence[Cell]) -> str:
    """Return a table of means: a row for each kind and size, a column for each distribution."""

    def row(cell: Cell) -> tuple[str, str]:
        if cell.kind == "fixed tasks":
            return cell.kind, f"{cell.tasks} tasks x {cell.seeds} adaptations"
        return cell.kind, f"{cell.seeds} runs" if cell.seeds > 1 else "one policy"

    return _table(cells, ("interval", "of"), row, "world")


def hard_table(cells: Sequence[Cell]) -> str:
    """Return a table of the hard cells: a row for each kind and size."""
    lines = ["| interval | of | covered |", "|---|---|---:|"]
    for cell in cells:
        runs = f"{cell.seeds} runs" if cell.seeds > 1 else "one policy"
        of = f"{cell.tasks} tasks x {cell.seeds} adaptations" if "fixed" in cell.kind else f"{runs}, {cell.tasks} tasks"
        lines.append(f"| {cell.kind} | {of} | {100.0 * cell.covered:.0f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--simulations", type=int, default=SIMULATIONS, help="of each cell (%(default)s)")
    parser.add_argument("--print", action="store_true", help="print the tables, and leave the page as it is")
    options = parser.parse_args(arguments)
    simulated = f"Of {options.simulations:,} simulations each:"
    tables = {
        "shares": f"{simulated}\n\n{share_table(list(share_cells(options.simulations)))}",
        "means": f"{simulated}\n\n{mean_table(list(mean_cells(options.simulations)))}",
        "hard": f"{simulated}\n\n{hard_table(list(hard_cells(options.simulations)))}",
    }
    if options.print:
        print("\n\n".join(tables.values()))
        return
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_BLOCK.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n\n{found[3]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
