"""The command `maml-rl compare`: trains what is missing, and writes a figure, a table and a sentence."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from maml_rl.cli.console import (
    Parser,
    add_num_workers,
    add_trust,
    count_or_file,
    ending_in_order,
    file_path,
    positive,
    run_command,
)
from maml_rl.cli.listing import readable_minutes
from maml_rl.cli.run_options import key_values, overridden, path_or_name, refuse_untrusted_code
from maml_rl.config.catalog import find_config, name_of
from maml_rl.config.config import TASKS, Config, load_config
from maml_rl.config.yaml_source import parse_value
from maml_rl.errors import ConfigError, NonFiniteError
from maml_rl.runs.atomic_files import check_output, replace_file

if TYPE_CHECKING:
    from maml_rl.results.comparable import Run

_SEEDS = 5
# Of variable length are episodes, so the iterations that reach the environment steps are found in a few rounds.
_ROUNDS = 5


def run_compare(arguments: Sequence[str], prog: str) -> int:
    """Compare algorithms, and return the exit code."""
    parser = Parser(
        prog=prog,
        description="Compare algorithms at equal environment steps: train what is missing; write a figure, a table and "
        "a sentence with intervals.",
    )
    parser.add_argument(
        "entries", nargs="+", type=path_or_name, metavar="RUN|CONFIG", help="folders of runs, or configs to train"
    )
    parser.add_argument("--seeds", type=positive, metavar="N", help="runs of each config (default: 5)")
    parser.add_argument(
        "--env-steps", help="environment steps of the runs to train (default: those of the shortest config, or run)"
    )
    parser.add_argument("--figure", type=file_path, metavar="FILE", help="the figure: .pdf, .svg or .png")
    parser.add_argument("--table", type=file_path, metavar="FILE", help="the table: .tex, or .md")
    parser.add_argument(
        "--tasks",
        type=count_or_file,
        default=40,
        metavar="COUNT|FILE",
        help="new tasks to measure policies on, or those in a file (default: 40)",
    )
    parser.add_argument(
        "--output-folder",
        type=file_path,
        default=Path("runs/compare"),
        help="where new runs go, and where finished ones are taken from (default: runs/compare)",
    )
    parser.add_argument("--set", nargs="+", metavar="KEY=VALUE", help="settings of all configs that are trained")
    parser.add_argument(
        "--unfinished", action="store_true", help="also compare unfinished runs, up to the steps that all runs have"
    )
    add_num_workers(parser)
    add_trust(parser)
    return run_command(parser, arguments, _compare, lambda options: "; the same command continues")


def _compare(options: argparse.Namespace) -> None:
    from maml_rl.cli.progress import StepProgress
    from maml_rl.experiment.measure import measure
    from maml_rl.report.paper import parts, table, write_figure
    from maml_rl.report.plot import check_figure
    from maml_rl.results.comparable import ONE_EXPERIMENT, check_comparable, read_runs
    from maml_rl.results.verdict import cautions, in_words, normalized, verdicts

    for name in ("figure", "table"):
        if (path := getattr(options, name)) is not None:
            check_output(path, f"--{name}")
    if options.table is not None and options.table.suffix not in (".tex", ".md"):
        raise ConfigError(f"--table {options.table} must end with .tex or .md")
    if options.figure is not None:
        check_figure(options.figure, "--figure")
    with ending_in_order():
        groups, notices = read_runs(_trained(options), unfinished=options.unfinished, trust=options.trust)
        finished = [group for group in groups if group.compared]
        if len(finished) < 2 and notices:
            alone = [] if len(groups) > 1 else [ONE_EXPERIMENT]
            raise ConfigError(" ".join(dict.fromkeys([*notices, *alone])))
        groups = finished
        for group in groups:
            for run in group.runs:
                refuse_untrusted_code(run.config, options)
        notices += check_comparable(groups)
        total, done = sum(len(group.runs) for group in groups), iter(range(10**6))
        with StepProgress("run") as progress:
            results, complaints = measure(
                groups,
                options.tasks,
                placement={"num-workers": options.num_workers},
                known=True,
                on_run=lambda run: progress(f"measuring {run.path}", next(done), total),
            )
            progress("measured", total, total)
        missing = [result.group.name for result in results if not result.evaluations]
        if missing:
            why = " ".join(complaints) or "no evaluation of `maml-rl test` is in its folder; leave out --tasks 0"
            raise ConfigError(f"no policy of {' and '.join(missing)} could be measured: {why}")
        notices += [complaint for complaint in complaints if "is not used here" not in complaint]
    for path in (options.figure, options.table):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    compared = parts(results)
    if options.figure is not None:
        write_figure(compared[0], options.figure)
    if options.table is not None:
        latex = options.table.suffix == ".tex"
        replace_file(options.table, "\n".join(table(part, latex=latex) for part in compared).encode())
    print("\n".join(map(table, compared)))
    sentences = [*map(in_words, verdicts(normalized(results))), *cautions(results)]
    print("\n\n".join([*sentences, *dict.fromkeys(notices)]))
    for path in (options.figure, options.table):
        if path is not None:
            print(f"wrote {path}")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A config to compare.

    Attributes:
        name: as it was given.
        config: with the settings for all, and seed 0.
        folder: of its runs, which are all of this experiment.
        completed: the config as its run has it.
    """

    name: str
    config: Config
    folder: Path
    completed: Config

    @property
    def identity(self) -> str:
        """That of its run."""
        from maml_rl.results.identity import identity

        return identity(self.completed)

    def has(self, run: "Run") -> bool:
        """Return whether a run is of this experiment, whatever its seed, on which a set of tasks may depend."""
        from maml_rl.experiment.build import settings_of_tasks
        from maml_rl.results.identity import identity

        own, completed = self.config.override({"seed": run.config.seed}), self.completed
        if own.tasks is not None:
            completed = completed.with_section(TASKS, settings_of_tasks(own)[1])
        return run.identity == identity(completed)

    def runs(self, seeds: int) -> list[Path]:
        """Return the folders of its runs."""
        return [self.folder / f"seed-{seed}" for seed in range(seeds)]


def _trained(options: argparse.Namespace) -> list[Path]:
    """Return the folders of all runs, after training those of configs that are missing."""
    from maml_rl.experiment.estimate import Estimate, estimate
    from maml_rl.results.comparable import require_several
    from maml_rl.results.identity import refuse_different_problems

    given = [Path(entry) for entry in options.entries if Path(entry).is_dir()]
    for name in ("seeds", "env_steps", "set") if len(given) == len(options.entries) else ():
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is for configs that are trained, and these are folders of runs; leave it out")
    entries, seeds = _entries(options), options.seeds or _SEEDS
    folders = [run for entry in entries for run in entry.runs(seeds)]
    known = _read([*given, *(run for run in folders if (run / "config.json").is_file())])
    if entries:
        # Before training; runs alone are counted where their code is known to be trusted.
        others = [run for run in known if not any(entry.has(run) for entry in entries)]
        require_several({*(entry.identity for entry in entries), *(run.identity for run in others)})
    refuse_different_problems([*(entry.config for entry in entries), *(run.config for run in known)])
    by_path: dict[Path, Run] = {run.path.resolve(): run for run in known}
    complete = {path: run.env_steps for path, run in by_path.items() if run.complete and run.env_steps > 0.0}
    failed = {path for path, run in by_path.items() if run.failure}
    estimates: dict[str, Estimate] = {}
    for entry in entries:
        if any(run.resolve() not in complete.keys() | failed for run in entry.runs(seeds)):
            estimates[entry.name] = estimate(entry.config)
    shortest = [*complete.values(), *(timed.total_env_steps for timed in estimates.values())]
    budget = min(shortest, default=0.0)
    if options.env_steps is not None:
        budget = parse_value(options.env_steps, "--env-steps")
        if not isinstance(budget, int | float) or not 0 < budget < math.inf:
            raise ConfigError(f"--env-steps must be a positive number, got {options.env_steps}")
    if not all(timed.env_steps for timed in estimates.values()):
        raise ConfigError("a learner of recorded data takes no environment steps; train it first, and give its runs")
    for entry in entries:
        wanted = [
            run
            for run in entry.runs(seeds)
            if run.resolve() not in failed and complete.get(run.resolve(), 0.0) < 0.99 * budget
        ]
        if entry.name in estimates:
            timed = estimates[entry.name]
            minutes = len(wanted) * timed.seconds * budget / timed.env_steps / 60.0
            about = f"{len(wanted)} runs of {budget:,.0f} environment steps, about {readable_minutes(minutes)}"
            print(f"{entry.name}: {about}, in {entry.folder}", flush=True)
        for run in wanted:
            # Environment steps of an iteration.
            if entry.name in estimates:
                rate = estimates[entry.name].env_steps
            else:
                rate = complete[run.resolve()] / load_config(run / "config.json").num_batches
            seed = int(run.name.removeprefix("seed-"))
            _train(entry.config.override({"seed": seed}), run, budget, rate, options)
    return [*given, *folders]


def _entries(options: argparse.Namespace) -> list[_Entry]:
    """Return the configs, each with a folder that has no runs of another experiment; say where one is a new one."""
    from maml_rl.experiment.build import make_experiment

    settings = {"num-workers": options.num_workers, **key_values(options.set or [], "--set")}
    taken: dict[Path, str] = {}
    entries = []
    for name in options.entries:
        if Path(name).is_dir():
            continue
        path = Path(name) if Path(name).is_file() else find_config(name)
        # Which seeds are trained does not depend on that of the config.
        config = overridden(load_config(path), settings).override({"seed": 0})
        config = refuse_untrusted_code(config, options)
        usual = options.output_folder / name_of(path)
        entry = _Entry(name, config, usual, make_experiment(config).config)
        whose, earlier = entry.identity, _read([path.parent for path in usual.glob("seed-*/config.json")])
        if taken.get(usual, whose) != whose or not all(map(entry.has, earlier)):
            entry = replace(entry, folder=usual.with_name(f"{usual.name}-{whose[:8]}"))
            print(
                f"{usual} has runs of other settings, or of another version; those of {name} are in {entry.folder}",
                flush=True,
            )
        taken[entry.folder] = whose
        entries.append(entry)
    return entries


def _read(folders: Sequence[Path]) -> list["Run"]:
    """Return the runs in some folders, unfinished and failed ones included."""
    from maml_rl.results.comparable import read_runs

    groups = read_runs(folders, unfinished=True)[0] if folders else []
    return [run for group in groups for run in (*group.runs, *group.failed)]


def _train(config: Config, run: Path, budget: float, rate: float, options: argparse.Namespace) -> None:
    """Train a run, or continue it, up to some environment steps; say where it diverges, and leave it."""
    from maml_rl.cli.progress import TrainingProgress
    from maml_rl.experiment.train import train
    from maml_rl.runs.metrics import read_metrics

    for _ in range(_ROUNDS):
        config = config.override({"num-batches": max(1, math.ceil(budget / rate - 1e-6))})
        try:
            with TrainingProgress(config.num_batches, str(run)) as progress:
                begun = (run / "config.json").is_file()
                train(config, run, resume=begun, on_iteration=progress)
        except NonFiniteError as error:
            print(f"{run} diverged, and is left out: {error}", flush=True)
            return
        last = read_metrics(run / "metrics.jsonl")[-1]
        if last["env_steps"] >= 0.99 * budget:
            return
        rate = last["env_steps"] / (last["iteration"] + 1)
