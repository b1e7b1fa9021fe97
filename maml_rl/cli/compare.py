"""The command `maml-rl compare`: trains what is missing, and writes a figure, a table and a sentence."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

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
from maml_rl.config.config import Config, load_config
from maml_rl.config.yaml_source import parse_value
from maml_rl.errors import ConfigError
from maml_rl.runs.atomic_files import check_output, replace_file

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
    parser.add_argument("--seeds", type=positive, default=5, metavar="N", help="runs of each config (default: 5)")
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
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all configs that are trained"
    )
    parser.add_argument(
        "--unfinished", action="store_true", help="also compare unfinished runs, up to the steps that all runs have"
    )
    add_num_workers(parser)
    add_trust(parser)
    return run_command(parser, arguments, _compare, lambda options: "; the same command continues")


def _compare(options: argparse.Namespace) -> None:
    from maml_rl.cli.progress import StepProgress
    from maml_rl.report.paper import check_comparable, check_figure, measure, parts, sentences, table, write_figure
    from maml_rl.results.comparable import read_runs

    for name in ("figure", "table"):
        if (path := getattr(options, name)) is not None:
            check_output(path, f"--{name}")
    if options.table is not None and options.table.suffix not in (".tex", ".md"):
        raise ConfigError(f"--table {options.table} must end with .tex or .md")
    if options.figure is not None:
        check_figure(options.figure)
    with ending_in_order():
        groups, notices = read_runs(_trained(options), unfinished=options.unfinished, trust=options.trust)
        groups = [group for group in groups if group.compared]
        for group in groups:
            for run in group.runs:
                refuse_untrusted_code(run.config, options)
        notices += check_comparable(groups)
        total, done = sum(len(group.runs) for group in groups), iter(range(10**6))
        with StepProgress("run") as progress:
            measured = measure(
                groups,
                options.tasks,
                num_workers=options.num_workers,
                on_run=lambda name: progress(f"measuring {name}", next(done), total),
            )
            progress("measured", total, total)
    for path in (options.figure, options.table):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    compared = parts(measured)
    if options.figure is not None:
        write_figure(compared[0], options.figure)
    if options.table is not None:
        latex = options.table.suffix == ".tex"
        replace_file(options.table, "\n".join(table(part, latex=latex) for part in compared).encode())
    print("\n".join(map(table, compared)))
    print("\n\n".join([*(each for part in compared for each in sentences(part)), *dict.fromkeys(notices)]))
    for path in (options.figure, options.table):
        if path is not None:
            print(f"wrote {path}")


def _trained(options: argparse.Namespace) -> list[Path]:
    """Return the folders of all runs, after training those of configs that are missing."""
    from maml_rl.experiment.estimate import Estimate, estimate
    from maml_rl.report.paper import refuse_different_problems
    from maml_rl.results.comparable import read_runs

    given = [Path(entry) for entry in options.entries if Path(entry).is_dir()]
    configs = {entry: _config(entry, options) for entry in options.entries if not Path(entry).is_dir()}
    folders = {
        entry: [options.output_folder / name_of(path) / f"seed-{seed}" for seed in range(options.seeds)]
        for entry, (path, _) in configs.items()
    }
    there = [*given, *(run for runs in folders.values() for run in runs if (run / "config.json").is_file())]
    known = [run for group in read_runs(there)[0] for run in group.runs] if there else []
    refuse_different_problems([*(config for _, config in configs.values()), *(run.config for run in known)])
    complete = {run.path.resolve(): run.env_steps for run in known if run.complete and run.env_steps > 0.0}
    estimates: dict[str, Estimate] = {}
    for entry, (_, config) in configs.items():
        if any(run.resolve() not in complete for run in folders[entry]):
            estimates[entry] = estimate(config)
    shortest = [*complete.values(), *(found.total_env_steps for found in estimates.values())]
    budget = min(shortest, default=0.0)
    if options.env_steps is not None:
        budget = parse_value(options.env_steps, "--env-steps")
        if not isinstance(budget, int | float) or not budget > 0:
            raise ConfigError(f"--env-steps must be a positive number, got {options.env_steps}")
    if estimates and not budget:
        raise ConfigError("a learner of recorded data takes no environment steps; train it first, and give its runs")
    for entry, found in estimates.items():
        rate = found.env_steps
        missing = [run for run in folders[entry] if complete.get(run.resolve(), 0.0) < 0.99 * budget]
        minutes = len(missing) * found.seconds * budget / rate / 60.0
        print(f"{entry}: {len(missing)} runs of {budget:,.0f} environment steps, about {readable_minutes(minutes)}")
    for entry, (_, config) in configs.items():
        for seed, run in enumerate(folders[entry]):
            if complete.get(run.resolve(), 0.0) < 0.99 * budget:
                rate = estimates[entry].env_steps if entry in estimates else _rate(run, complete)
                _train(config.override({"seed": seed}), run, budget, rate, options)
    return [*given, *(run for runs in folders.values() for run in runs)]


def _rate(run: Path, complete: dict[Path, float]) -> float:
    """Return the environment steps of an iteration of a complete run."""
    return complete[run.resolve()] / load_config(run / "config.json").num_batches


def _config(entry: str, options: argparse.Namespace) -> tuple[Path, Config]:
    """Return a config and its file, with the settings for all."""
    path = Path(entry) if Path(entry).is_file() else find_config(entry)
    settings = {"num-workers": options.num_workers, **key_values(options.set, "--set")}
    return path, refuse_untrusted_code(overridden(load_config(path), settings), options)


def _train(config: Config, run: Path, budget: float, rate: float, options: argparse.Namespace) -> None:
    """Train a run, or continue it, up to some environment steps."""
    from maml_rl.cli.progress import TrainingProgress
    from maml_rl.experiment.train import train
    from maml_rl.runs.metrics import read_metrics

    for _ in range(_ROUNDS):
        config = config.override({"num-batches": max(1, math.ceil(budget / rate - 1e-6))})
        with TrainingProgress(config.num_batches, str(run)) as progress:
            begun = (run / "config.json").is_file()
            train(config, run, resume=begun, on_iteration=progress)
        last = read_metrics(run / "metrics.jsonl")[-1]
        if last["env_steps"] >= 0.99 * budget:
            return
        rate = last["env_steps"] / (last["iteration"] + 1)
