"""The command line of every plan of trainings."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning.page import draw_charts, write_page
from benchmarks.learning.plan import Plan
from benchmarks.learning.training import Job, run_jobs
from maml_rl.arguments import suggest
from maml_rl.cli.console import Parser
from maml_rl.envs import FAMILIES


def run(plan: Plan, arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, if `--train` is given, and make the page from the CSV files."""
    parser = Parser(
        description=f"Make {plan.page.name} from the CSV files; with --train, first train what they lack.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--train", action="store_true", help="first train and evaluate what the CSV files lack")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop training after so many; resumable")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="folder of the runs")
    parser.add_argument("--families", nargs="+", metavar="NAME", default=[], help="only these")
    parser.add_argument("--methods", nargs="+", metavar="NAME", default=[], help="instead of those of a family")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="only these")
    parser.add_argument("--num-workers", type=int, help="worker processes; one for each core if not given")
    options = parser.parse_args(arguments)
    for what, known in (("families", plan.families), ("methods", plan.methods)):
        for name in getattr(options, what):
            if name not in known:
                parser.error(f"--{what} has no {name!r}{suggest(name, list(known))}")
    if options.train:
        asked = options.families
        missing = _missing(plan, asked or list(plan.families))
        for name, extra in missing.items():
            remedy = f"{name} needs the extra {extra}; docs/families.md says how to install it"
            if asked:
                parser.error(f"--families: {remedy}")
            print(f"left out: {remedy}")
        options.families = asked or [name for name in plan.families if name not in missing]
        run_jobs(_jobs(plan, options), options.minutes)
    write_page(plan)
    charts = draw_charts(plan)
    print("\n".join(f"written: {path}" for path in (plan.page, *charts)))


def _missing(plan: Plan, names: Sequence[str]) -> dict[str, str]:
    """Return which of the families cannot be made here, and the extra that each of them needs."""
    method = next(iter(plan.methods.values()))
    extras = {name: FAMILIES[method.config(plan.families[name], 0).env_name].extra for name in names}
    return {name: extra for name, extra in extras.items() if extra and importlib.util.find_spec(extra) is None}


def _jobs(plan: Plan, options: argparse.Namespace) -> list[Job]:
    """Return the requested trainings."""
    return [
        Job(family, plan.methods[method], seed, options.runs, plan.folder(family), options.num_workers)
        for family in (plan.families[name] for name in options.families)
        for method in options.methods or plan.methods_of(family)
        for seed in plan.seeds[family.name]
        if seed in (options.seeds or plan.seeds[family.name])
    ]
