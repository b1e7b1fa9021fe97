"""Breaks short runs on purpose, one cause each, and says at which place `maml-rl diagnose` names it.

`python -m benchmarks.flat_curves` takes ten seconds of a core.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maml_rl.cli.console import Parser
from maml_rl.config.config import Config
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.experiment.train import train
from maml_rl.results.comparable import read_runs
from maml_rl.results.diagnosis import Cause, diagnose

NAVIGATION = {"env-name": "2DNavigation-v0", "max-episode-steps": 15, "hidden-sizes": [16], "fast-lr": 0.1}
MDP = {"env-name": "TabularMDP-v0", "hidden-sizes": [16]}
SIZES = {"meta-batch-size": 10, "fast-batch-size": 5, "num-batches": 16, "checkpoint-every": 100}
RL2 = {"env-name": "TabularMDP-v0", "algorithm": "rl2", "observe-last": True, **SIZES, "fast-batch-size": 3}
PEARL = {"env-name": "SemiCircle-v0", "algorithm": "pearl", **SIZES, "meta-batch-size": 3, "max-episode-steps": 10}


def rl2(**settings: Any) -> dict[str, Any]:
    """Return RL2 with some settings."""
    hyphenated = {key.replace("_", "-"): value for key, value in settings.items()}
    return RL2 | {"algorithm-settings": {"hidden-size": 16, "learning-rate": 1e-3, **hyphenated}}


# What is wrong with a run, and how a reader finds it on the page.
BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "episodes end before the goal": (
        "no reward",
        {"env-name": "DarkRoom-v0", "hidden-sizes": [16], **SIZES, "max-episode-steps": 3},
    ),
    "one episode of one step": (
        "no signal",
        {"env-name": "Bandit-K5-v0", **SIZES, "fast-batch-size": 1, "max-episode-steps": 1, "baseline": "zero"},
    ),
    "one try of a huge step": (
        "line search",
        NAVIGATION | SIZES | {"algorithm-settings": {"max-kl": 2.0, "ls-max-steps": 1, "cg-iters": 5}},
    ),
    "a tiny trust region": ("updates too small", NAVIGATION | SIZES | {"algorithm-settings": {"max-kl": 1e-8}}),
    "Adam with 1": ("updates too large", rl2(learning_rate=1.0, clip=10.0)),
    "a policy that starts certain": ("no exploration", MDP | SIZES | {"output-scale": 300.0}),
    "values that are not learned": ("values do not fit", rl2(value_coefficient=0.0)),
    "an inner step of nothing": ("adaptation does nothing", NAVIGATION | SIZES | {"fast-lr": 1e-7}),
    "an inner step of 30": ("inner step too large", NAVIGATION | SIZES | {"fast-lr": 30.0}),
    "one task": ("too few tasks", NAVIGATION | SIZES | {"meta-batch-size": 1, "fast-batch-size": 3}),
    "a warm-up that does not end": (
        "no update",
        PEARL | {"algorithm-settings": {"warmup-steps": 100_000, "num-updates": 1}},
    ),
}


def found(settings: dict[str, Any], folder: Path, num_workers: int = 0) -> list[Cause]:
    """Train with some settings, and return what the diagnosis says."""
    config = Config.from_mapping(parse_mapping(json.dumps(settings), "the broken run"))
    train(config, folder, num_workers=num_workers)
    groups, _ = read_runs([folder])
    return diagnose(groups[0].runs[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Break all runs, and print the place of each cause."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of the runs, or parts of them; all if none is given")
    parser.add_argument("--seed", type=int, default=0, help="of the runs (default: 0)")
    options = parser.parse_args(arguments)
    early = 0
    chosen = {name: each for name, each in BROKEN.items() if not options.names or any(n in name for n in options.names)}
    for name, (cause, settings) in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            causes = found(settings | {"seed": options.seed}, Path(folder) / "run")
        names = list(dict.fromkeys(each.name for each in causes))
        place = names.index(cause) + 1 if cause in names else None
        early += place in (1, 2)
        print(f"{name}: {cause!r} is {place or 'not named'}; {', '.join(names)}", flush=True)
    print(f"first or second: {early} of {len(chosen)}")


if __name__ == "__main__":
    main()
