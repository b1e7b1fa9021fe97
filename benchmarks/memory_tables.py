"""The tables of docs/memory.md: rewards of trials of bandits and tabular processes, beside the published figures.

    python -m benchmarks.memory_tables                                # measures what the CSV file lacks
    python -m benchmarks.memory_tables --rows bandit-10-5 mdp-10      # some rows alone
    python -m benchmarks.memory_tables --rows bandit-100-50 --algorithms greedy --trials 8000 --csv more.csv
    python -m benchmarks.memory_tables --rows --runs runs/rl2/bandit  # the column of RL2, from trained runs

Every algorithm is tested on the same 1,000 tasks. If an algorithm has a setting, the best value of a grid is chosen on
other tasks.

Source: Duan et al. 2016, tables 1 and 2, https://arxiv.org/abs/1611.02779
"""

import argparse
import csv
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maml_rl import MultiTaskSampler, load_policy
from maml_rl.cli.console import Parser
from maml_rl.config import Config
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.policies import Policy
from maml_rl.policies.classical import (
    BEB,
    PSRL,
    UCB1,
    UCRL2,
    BanditEpsilonGreedy,
    GittinsIndex,
    RandomPolicy,
    TabularEpsilonGreedy,
    ThompsonSampling,
)
from maml_rl.runs.checkpoint import find_checkpoint
from maml_rl.runs.run_folder import CHECKPOINTS

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_CSV, _PAGE = _DOCS / "results" / "memory-tables.csv", _DOCS / "memory.md"
_BLOCK = re.compile(r"(<!-- results of ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
_NUM_STATES, _NUM_ACTIONS, _HORIZON = 10, 5, 10


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a table.

    Attributes:
        num_episodes: n, number of episodes of a trial, or of pulls of a bandit.
        num_arms: k, or None for tabular processes.
    """

    num_episodes: int
    num_arms: int | None = None

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"mdp-{self.num_episodes}" if self.num_arms is None else f"bandit-{self.num_episodes}-{self.num_arms}"

    @property
    def env(self) -> str:
        """Id of the family."""
        return "TabularMDP-v0" if self.num_arms is None else f"Bandit-K{self.num_arms}-v0"

    @classmethod
    def of(cls, config: Config) -> "Problem":
        """Return the problem that a run was trained on."""
        arms = re.fullmatch(r"Bandit-K(\d+)-v0", config.env_name)
        if arms is None:
            return cls(config.fast_batch_size)
        pulls = config.env_kwargs.get("pulls", 1)
        assert isinstance(pulls, int)
        return cls(config.fast_batch_size * pulls, int(arms[1]))


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One column of a table.

    Attributes:
        make: the policy for a problem and a value of the setting.
        setting: its name; without a grid, a remark about the algorithm.
        grid: values to choose from.
    """

    make: Callable[[Problem, float], Policy]
    setting: str = ""
    grid: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the CSV file.

    Attributes:
        problem: its name.
        algorithm: its name.
        setting: chosen from the grid, or a remark about the algorithm.
        trials: how many, each of another task.
        seed: of the tasks and the trials.
        mean: of the total reward of a trial.
        standard_error: of the mean.
    """

    problem: str
    algorithm: str
    setting: str
    trials: int
    seed: int
    mean: float
    standard_error: float


def _arms(problem: Problem) -> int:
    assert problem.num_arms is not None
    return problem.num_arms


_SIZES = (_NUM_STATES, _NUM_ACTIONS, _HORIZON)
_TENTHS = tuple(round(0.1 * number, 1) for number in range(11))
# The published figures were computed with greedy choices that take the first of several best arms.
_BANDIT_ALGORITHMS = {
    "random": Algorithm(lambda problem, _: RandomPolicy(_arms(problem))),
    "Gittins": Algorithm(lambda problem, _: GittinsIndex(_arms(problem), problem.num_episodes)),
    "TS": Algorithm(lambda problem, _: ThompsonSampling(_arms(problem))),
    "OTS": Algorithm(lambda problem, _: ThompsonSampling(_arms(problem), num_draws=20)),
    "UCB1": Algorithm(lambda problem, c: UCB1(_arms(problem), c), "c", _TENTHS),
    "epsilon-greedy": Algorithm(
        lambda problem, epsilon: BanditEpsilonGreedy(_arms(problem), epsilon, ties="first"), "epsilon", _TENTHS
    ),
    "greedy": Algorithm(lambda problem, _: BanditEpsilonGreedy(_arms(problem), ties="first")),
}
_MDP_ALGORITHMS = {
    "random": Algorithm(lambda problem, _: RandomPolicy(_NUM_ACTIONS)),
    "PSRL": Algorithm(lambda problem, _: PSRL(*_SIZES)),
    "OPSRL": Algorithm(lambda problem, _: PSRL(*_SIZES, num_draws=10)),
    "UCRL2": Algorithm(lambda problem, scale: UCRL2(*_SIZES, scale), "scale", _TENTHS[1:]),
    "BEB": Algorithm(lambda problem, beta: BEB(*_SIZES, beta), "beta", (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)),
    "epsilon-greedy": Algorithm(lambda problem, epsilon: TabularEpsilonGreedy(*_SIZES, epsilon), "epsilon", _TENTHS),
    "greedy": Algorithm(lambda problem, _: TabularEpsilonGreedy(*_SIZES)),
}
# Explanations of differences: the same algorithms with one change, by the problems that show its effect.
_TRUE_PRIOR = (1.0, 1.0)
VARIANTS: dict[str, tuple[tuple[str, ...], Algorithm]] = {
    "greedy, ties at random": (
        ("bandit-100-5", "bandit-100-50", "bandit-500-5"),
        Algorithm(lambda problem, _: BanditEpsilonGreedy(_arms(problem))),
    ),
    "OTS, no draw below the mean": (
        ("bandit-10-5", "bandit-100-5", "bandit-100-50"),
        Algorithm(lambda problem, _: ThompsonSampling(_arms(problem), at_least_mean=True)),
    ),
    "PSRL, prior mean 1": (
        ("mdp-10", "mdp-50"),
        Algorithm(lambda problem, _: PSRL(*_SIZES, reward_prior=_TRUE_PRIOR)),
    ),
    "OPSRL, prior mean 1": (
        ("mdp-10", "mdp-50"),
        Algorithm(lambda problem, _: PSRL(*_SIZES, num_draws=10, reward_prior=_TRUE_PRIOR)),
    ),
    "greedy, true prior": (
        ("mdp-10", "mdp-50"),
        Algorithm(lambda problem, _: TabularEpsilonGreedy(*_SIZES, reward_prior=_TRUE_PRIOR, transition_prior=1.0)),
    ),
    "epsilon-greedy, epsilon 0.1": (
        ("mdp-10",),
        Algorithm(lambda problem, _: TabularEpsilonGreedy(*_SIZES, 0.1)),
    ),
}

_BANDIT_COLUMNS = (*_BANDIT_ALGORITHMS, "RL2")
_MDP_COLUMNS = (*_MDP_ALGORITHMS, "RL2")
# Figures in the order of the columns, means of 1,000 trials.
PUBLISHED: Mapping[Problem, Mapping[str, float]] = {
    **{
        Problem(*sizes): dict(zip(_BANDIT_COLUMNS, figures, strict=True))
        for sizes, figures in {
            (10, 5): (5.0, 6.6, 5.7, 6.5, 6.7, 6.6, 6.6, 6.7),
            (10, 10): (5.0, 6.6, 5.5, 6.2, 6.7, 6.6, 6.6, 6.7),
            (10, 50): (5.1, 6.5, 5.2, 5.5, 6.6, 6.5, 6.5, 6.8),
            (100, 5): (49.9, 78.3, 74.7, 77.9, 78.0, 75.4, 74.8, 78.7),
            (100, 10): (49.9, 82.8, 76.7, 81.4, 82.4, 77.4, 77.1, 83.5),
            (100, 50): (49.8, 85.2, 64.5, 67.7, 84.3, 78.3, 78.0, 84.9),
            (500, 5): (249.8, 405.8, 402.0, 406.7, 405.8, 388.2, 380.6, 401.6),
            (500, 10): (249.0, 437.8, 429.5, 438.9, 437.1, 408.0, 395.0, 432.5),
            (500, 50): (249.6, 463.7, 427.2, 437.6, 457.6, 413.6, 402.8, 438.9),
        }.items()
    },
    **{
        Problem(num_episodes): dict(zip(_MDP_COLUMNS, figures, strict=True))
        for num_episodes, figures in {
            10: (100.1, 138.1, 144.1, 146.6, 150.2, 132.8, 134.8, 156.2),
            25: (250.2, 408.8, 425.2, 424.1, 427.8, 377.3, 368.8, 445.7),
            50: (499.7, 904.4, 930.7, 918.9, 917.8, 823.3, 769.3, 936.1),
            75: (749.9, 1417.1, 1449.2, 1427.6, 1422.6, 1293.9, 1172.9, 1428.8),
            100: (999.4, 1939.5, 1973.9, 1942.1, 1935.1, 1778.2, 1578.5, 1913.7),
        }.items()
    },
}
PROBLEMS = {problem.name: problem for problem in PUBLISHED}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the CSV file lacks, and write the tables."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", metavar="ROW", default=list(PROBLEMS), help="to measure (default: all)")
    parser.add_argument("--trials", type=int, default=1000, help="tasks for each algorithm (default: 1000)")
    parser.add_argument("--tuning-trials", type=int, default=300, help="tasks of each value of a grid (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and trials (default: 0)")
    parser.add_argument(
        "--num-workers", type=int, default=0, help="child processes; they change no figure (default: 0)"
    )
    parser.add_argument("--algorithms", nargs="*", metavar="NAME", help="columns to measure (default: all)")
    parser.add_argument("--runs", nargs="*", type=Path, default=[], metavar="RUN", help="folders of runs of rl2")
    parser.add_argument("--checkpoint", default="last", help="of the runs: last, best, or an iteration (default: last)")
    parser.add_argument("--csv", type=Path, default=_CSV, help="the results (default: docs/results/memory-tables.csv)")
    parser.add_argument("--page", type=Path, help="where the tables go (default: docs/memory.md for the default --csv)")
    options = parser.parse_args(arguments)
    algorithms = dict.fromkeys([*_BANDIT_ALGORITHMS, *_MDP_ALGORITHMS, *VARIANTS])
    for given, known in ((options.rows, PROBLEMS), (options.algorithms or (), algorithms)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    results = read_results(options.csv)
    for run in options.runs:
        try:
            result = measure_run(run, options)
        except (ConfigError, CheckpointError) as error:
            parser.error(str(error))
        results[result.problem, result.algorithm] = result
        write_results(options.csv, results)
    for name in options.rows:
        problem = PROBLEMS[name]
        for algorithm, column in algorithms_of(problem).items():
            if options.algorithms is not None and algorithm not in options.algorithms:
                continue
            found = results.get((name, algorithm))
            if found is None or (found.trials, found.seed) != (options.trials, options.seed):
                results[name, algorithm] = measure(problem, algorithm, column, options)
                write_results(options.csv, results)
    text = {kind: table(kind, results) for kind in ("bandit", "mdp", "variants")}
    print("\n\n".join(text.values()))
    page = options.page or (_PAGE if options.csv == _CSV else None)
    if page is not None:
        before = page.read_text(encoding="utf-8")
        filled = _BLOCK.sub(lambda match: f"{match[1]}\n{text[match[2]]}\n\n{match[3]}", before)
        page.write_text(filled, encoding="utf-8")


def algorithms_of(problem: Problem) -> dict[str, Algorithm]:
    """Return the algorithms that are measured on a problem, by name: the columns of its table, and the variants."""
    columns = _MDP_ALGORITHMS if problem.num_arms is None else _BANDIT_ALGORITHMS
    return columns | {name: variant for name, (where, variant) in VARIANTS.items() if problem.name in where}


def measure(
    problem: Problem, name: str, algorithm: Algorithm, options: argparse.Namespace, config: Config | None = None
) -> Result:
    """Choose the setting, and run the trials, in the environment of `config` if there is one."""
    start = time.perf_counter()
    setting, chosen = 0.0, algorithm.setting
    if algorithm.grid:
        tried = {
            value: total_rewards(problem, algorithm.make(problem, value), options, tuning=True).mean()
            for value in algorithm.grid
        }
        setting = max(tried, key=lambda value: tried[value])
        chosen = f"{algorithm.setting} = {setting:g}"
    totals = total_rewards(problem, algorithm.make(problem, setting), options, config)
    error = float(totals.std(ddof=1) / len(totals) ** 0.5)
    mean, seconds = float(totals.mean()), time.perf_counter() - start
    print(f"{problem.name}: {name} {chosen} {mean:.2f} +- {error:.2f}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return Result(problem.name, name, chosen, len(totals), options.seed, round(mean, 4), round(error, 4))


def measure_run(run: Path, options: argparse.Namespace) -> Result:
    """Run the trials of the policy of a run.

    Raises:
        ConfigError: If there is no run, or no row for its problem.
        CheckpointError: If the checkpoint is missing or broken.
    """
    policy = load_policy(run, options.checkpoint)
    config = policy.trained_with
    problem = Problem.of(config)
    if config.algorithm != "rl2" or config.env_name != problem.env or problem not in PUBLISHED:
        raise ConfigError(
            f"{run} is a run of {config.algorithm} on {config.env_name}, for which there is no row; give runs of rl2 "
            f"on one of {', '.join(PROBLEMS)}"
        )
    _, saved = find_checkpoint(options.checkpoint, run / CHECKPOINTS)
    trained = Algorithm(lambda *_: policy, f"{saved.iteration} meta-updates")
    return measure(problem, "RL2", trained, options, config)


def total_rewards(
    problem: Problem,
    policy: Policy,
    options: argparse.Namespace,
    config: Config | None = None,
    *,
    tuning: bool = False,
) -> NDArray[np.float64]:
    """Return the total reward of each trial; trials for tuning have tasks of their own."""
    with MultiTaskSampler(
        problem.env,
        {} if config is None else config.env_kwargs,
        problem.num_episodes if config is None else config.fast_batch_size,
        policy,
        seed=options.seed,
        num_workers=options.num_workers,
        slots_per_task=1,
        observe_last=True,
        evaluation=not tuning,
    ) as sampler:
        episodes = sampler.rollout_trials(sampler.sample_tasks(options.tuning_trials if tuning else options.trials))
        totals: NDArray[np.float64] = episodes.episode_returns().double().sum(1).numpy()
        return totals


def read_results(path: Path) -> dict[tuple[str, str], Result]:
    """Return the results of a CSV file by problem and algorithm; none if there is no file."""
    if not path.exists():
        return {}
    kinds = {field.name: field.type for field in fields(Result)}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [
            Result(**{name: kinds[name](value) for name, value in row.items()})  # type: ignore[operator]
            for row in csv.DictReader(file)
        ]
    return {(row.problem, row.algorithm): row for row in rows}


def write_results(path: Path, results: Mapping[tuple[str, str], Result]) -> None:
    """Write the CSV file, in the order of the tables."""
    order = [(name, algorithm) for name, problem in PROBLEMS.items() for algorithm in (*algorithms_of(problem), "RL2")]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Result)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(results[key]) for key in order if key in results)


def table(kind: str, results: Mapping[tuple[str, str], Result]) -> str:
    """Return a table in Markdown: our mean and its standard error, and the published mean in brackets.

    Args:
        kind: "bandit", "mdp", or "variants".
        results: by problem and algorithm.
    """
    if kind == "variants":
        rows = [
            [name, problem, _cell(results[problem, name], None), _published(problem, name)]
            for name, (where, _) in VARIANTS.items()
            for problem in where
            if (problem, name) in results
        ]
        return _markdown(["variant", "row", "total reward", "published for the algorithm"], rows)
    problems = [problem for problem in PUBLISHED if problem.name.startswith(kind)]
    columns = _MDP_COLUMNS if kind == "mdp" else _BANDIT_COLUMNS
    rows = []
    for problem in problems:
        found = {column: results.get((problem.name, column)) for column in columns}
        if any(found.values()):
            sizes = [problem.num_episodes, problem.num_arms]
            cells = [_cell(found[column], PUBLISHED[problem][column]) for column in columns]
            rows.append([", ".join(str(size) for size in sizes if size is not None), *cells])
    return _markdown(["n" if kind == "mdp" else "n, k", *columns], rows)


def _cell(result: Result | None, published: float | None) -> str:
    if result is None:
        return f"({published})"
    digits = 2 if result.mean < 20.0 else 1
    ours = f"{result.mean:.{digits}f} ± {result.standard_error:.{digits}f}"
    if published is None:
        return ours
    is_far = abs(result.mean - published) > 3.0 * result.standard_error
    return f"**{ours}** ({published})" if is_far else f"{ours} ({published})"


def _published(problem: str, variant: str) -> str:
    return str(PUBLISHED[PROBLEMS[problem]][variant.partition(",")[0]])


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
