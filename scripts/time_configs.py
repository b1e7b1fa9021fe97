"""Measures what the shipped configs take, for `maml-rl configs`: `python -m scripts.time_configs [NAME ...]`.

Each config is trained for three iterations with two workers, without evaluations; on a fifth of its tasks where the
learner takes gradient steps on each and an iteration takes more than two seconds. What counts is the CPU time that this
process and its workers spend in the last two, divided by two cores and times the config's `num-batches`, because other
work on the machine disturbs it less than the wall clock. The return to expect is the one of the policy in the zoo that
the config has trained. The file is written after each config; without names, those that it lacks are measured.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import psutil

from maml_rl.config.catalog import full_name, shipped_configs, zoo
from maml_rl.config.config import Config, load_config
from maml_rl.config.settings import MEASURED
from maml_rl.errors import MamlRLError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.estimate import estimate
from maml_rl.metalearners.registry import algorithm_of
from maml_rl.runs.atomic_files import replace_file

WORKERS = 2
# Tasks are timed in part: this share of them, but not fewer than so many.
PARTS, FEWEST = 5, 4
# Seconds of an iteration that is timed as a whole: there, what does not depend on the number of tasks counts.
QUICK = 2.0
# Settings with which a run is still one of its config.
OF_A_RUN = {"seed", "num-batches", "checkpoint-every", "keep-checkpoints", "evaluate-every", "evaluation-tasks"}


def main() -> None:
    """Measure configs, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of configs, or the beginnings of their names")
    parser.add_argument("--whole", action="store_true", help="time all tasks of an iteration, for a check")
    parser.add_argument("--returns-only", action="store_true", help="measure no times")
    options = parser.parse_args()
    measured: dict[str, dict[str, Any]] = json.loads(MEASURED.read_text("utf-8")) if MEASURED.is_file() else {}
    policies = {folder: algorithm_of(load_config(folder / "config.json"))[-1] for folder in zoo().values()}
    for path in shipped_configs().values():
        name, config = full_name(path), load_config(path)
        wanted = name.startswith(tuple(options.names)) if options.names else "env-steps" not in measured.get(name, {})
        entry = measured.setdefault(name, {})
        try:
            entry |= returns_of(algorithm_of(config)[-1], policies)
            if wanted and not options.returns_only:
                entry |= what_it_takes(config, whole=options.whole)
                print(f"{name}: {entry['minutes']} minutes", flush=True)
        except (MamlRLError, ImportError) as error:
            print(f"{name}: {error}", flush=True)
        text = ",\n".join(
            f"{json.dumps(key)}: {json.dumps(measured[key])}" for key in sorted(measured) if measured[key]
        )
        replace_file(Path(MEASURED), f"{{\n{text}\n}}\n".encode())


def what_it_takes(config: Config, *, whole: bool) -> dict[str, Any]:
    """Return the environment steps and the minutes of a whole run."""
    tasks = config.meta_batch_size
    # The cost of learners that take gradient steps on each task is proportional to the number of tasks.
    if not whole and make_experiment(config).metalearner.rule is not None:
        tasks = min(tasks, max(tasks // PARTS, FEWEST))
    tried = config.override({"evaluate-every": None, "meta-batch-size": tasks, "num-workers": WORKERS})
    found = estimate(tried, clock=time_of_cores)
    ratio = config.meta_batch_size / tasks
    if ratio > 1.0 and ratio * found.seconds < QUICK:
        return what_it_takes(config, whole=True)
    return {"env-steps": round(ratio * found.total_env_steps), "minutes": float(f"{ratio * found.minutes:.2g}")}


def time_of_cores() -> float:
    """Return the CPU seconds of this process and its workers, divided by the number of cores that they share."""
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in tree)) / WORKERS


def returns_of(config: Config, policies: dict[Path, Config]) -> dict[str, Any]:
    """Return the mean returns on new tasks, before adaptation and after it, of a policy that a config has trained."""
    for folder, trained in policies.items():
        if set(config.differences(trained)) <= OF_A_RUN:
            evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
            first, last = (evaluation["intervals"][place][0] for place in (0, -1))
            counted = {"columns": evaluation["columns"], "number": len(evaluation["intervals"])}
            return {"first": round(first, 1), "last": round(last, 1), "iterations": trained.num_batches, **counted}
    return {}


if __name__ == "__main__":
    main()
