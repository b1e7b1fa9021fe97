"""The command line of every plan of trainings."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning.page import draw_charts, marks, write_page
from benchmarks.learning.plan import Plan, read_plan
from benchmarks.learning.training import Job, run_jobs, say_what_is_left
from maml_rl.arguments import suggest
from maml_rl.cli.console import FAILED, INTERRUPTED, Parser, ending_in_order, file_path, positive, positive_number
from maml_rl.envs import FAMILIES
from maml_rl.errors import ConfigError, MamlRLError


def run(plan: Plan, arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, if `--train` is given, and make the page from the CSV files.

    A row is in its CSV file, on the page and in the chart as soon as it is known. Whatever ends the command, the same
    command continues.
    """
    parser = Parser(
        description=f"Make {plan.page.name} from the CSV files; with --train, first train what they lack.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--plan", type=file_path, metavar="FILE", help="a YAML file with another plan")
    parser.add_argument("--train", action="store_true", help="first train and evaluate what the CSV files lack")
    parser.add_argument("--left", action="store_true", help="only say what is left, and which files it needs")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop training after so many; resumable")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="folder of the runs")
    parser.add_argument("--families", nargs="+", metavar="NAME", default=[], help="only these")
    parser.add_argument("--methods", nargs="+", metavar="NAME", default=[], help="instead of those of a family")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="only these")
    parser.add_argument("--num-workers", type=int, help="worker processes; one for each core if not given")
    parser.add_argument("--device", default="cpu", help="where policies and updates are")
    parser.add_argument(
        "--at-once", type=positive, default=1, metavar="N", help="trainings side by side, each in a process"
    )
    parser.add_argument(
        "--largest-file", type=positive_number, metavar="MIB", help="refuse runs with larger files, to be carried"
    )
    options = parser.parse_args(arguments)
    try:
        plan = plan if options.plan is None else read_plan(options.plan)
        _carry_out(plan, options, parser)
    except ConfigError as error:
        parser.error(str(error))
    except MamlRLError as error:
        parser.exit(FAILED, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(INTERRUPTED, "interrupted; the same command continues\n")


def _carry_out(plan: Plan, options: argparse.Namespace, parser: Parser) -> None:
    for what, known in (("families", plan.families), ("methods", plan.methods)):
        for name in getattr(options, what):
            if name not in known:
                parser.error(f"--{what} has no {name!r}{suggest(name, list(known))}")
    if options.left:
        options.families = options.families or list(plan.families)
        say_what_is_left(_jobs(plan, options), options.at_once)
        return
    if options.train:
        asked = options.families
        missing = _missing(plan, asked or list(plan.families))
        for name, extra in missing.items():
            remedy = f"{name} needs the extra {extra}; docs/families.md says how to install it"
            if asked:
                parser.error(f"--families: {remedy}")
            print(f"left out: {remedy}")
        options.families = asked or [name for name in plan.families if name not in missing]
        _train(plan, _jobs(plan, options), options)
    write_page(plan)
    charts = draw_charts(plan)
    print("\n".join(f"written: {path}" for path in (plan.page, *charts)))


def _train(plan: Plan, jobs: list[Job], options: argparse.Namespace) -> None:
    """Carry out the jobs; after each row, make its family's part of the page anew."""

    def show(job: Job) -> None:
        write_page(plan, job.family)
        draw_charts(plan, job.family)

    if unmarked := {job.family.name for job in jobs} - set(marks(plan)):
        raise ConfigError(f"{plan.page} has no marks for {', '.join(sorted(unmarked))}; write them where tables go")
    if options.largest_file is not None:
        first_of_each = {(job.family.name, job.method.name): job for job in reversed(jobs)}
        for job in first_of_each.values():
            job.refuse_large_files(int(options.largest_file * 2**20))
    try:
        with ending_in_order():
            run_jobs(jobs, options.minutes, in_order=plan.timed, at_once=options.at_once, on_row=show)
    finally:
        say_what_is_left(jobs, options.at_once)


def _missing(plan: Plan, names: Sequence[str]) -> dict[str, str]:
    """Return which of the families cannot be made here, and the extra that each of them needs."""
    method = next(iter(plan.methods.values()))
    extras = {name: FAMILIES[method.config(plan.families[name], 0).env_name].extra for name in names}
    return {name: extra for name, extra in extras.items() if extra and importlib.util.find_spec(extra) is None}


def _jobs(plan: Plan, options: argparse.Namespace) -> list[Job]:
    """Return the requested trainings."""
    return [
        Job(family, plan.methods[method], seed, options.runs, plan.folder(family), options.num_workers, options.device)
        for family in (plan.families[name] for name in options.families)
        for method in options.methods or plan.methods_of(family)
        for seed in plan.seeds[family.name]
        if seed in (options.seeds or plan.seeds[family.name])
    ]
