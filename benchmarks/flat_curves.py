"""Breaks short runs on purpose, one cause each, and says at which place `maml-rl diagnose` names it.

`python -m benchmarks.flat_curves` takes ten seconds of a core. `--held-out` tries twelve other broken runs and twelve
that learn, on none of which the rules were adjusted: two minutes.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
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
    "a policy that starts certain": ("no exploration", MDP | SIZES | {"output-scale": 3000.0}),
    "values that are not learned": ("values do not fit", rl2(value_coefficient=0.0)),
    "an inner step of nothing": ("adaptation does nothing", NAVIGATION | SIZES | {"fast-lr": 1e-7}),
    "an inner step of 30": ("inner step too large", NAVIGATION | SIZES | {"fast-lr": 30.0}),
    "one task": ("too few tasks", NAVIGATION | SIZES | {"meta-batch-size": 1, "fast-batch-size": 3}),
    "a warm-up that does not end": (
        "no update",
        PEARL | {"algorithm-settings": {"warmup-steps": 100_000, "num-updates": 1}},
    ),
}

BANDIT = {"env-name": "Bandit-K5-v0", "hidden-sizes": [16], "fast-lr": 0.5}
LONGER = {"meta-batch-size": 20, "fast-batch-size": 10, "num-batches": 30, "checkpoint-every": 100}
MEMORY = {"meta-batch-size": 40, "num-batches": 120, "checkpoint-every": 100}
PROMP = {"algorithm": "promp", "algorithm-settings": {"learning-rate": 0.003}}

# Runs on which no rule was adjusted.
HELD_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "a last layer of 30": ("actions too large", NAVIGATION | SIZES | {"output-scale": 30.0}),
    "an entropy coefficient of 10": ("too much exploration", rl2(entropy_coefficient=10.0)),
    "key and door in four steps": (
        "no reward",
        {"env-name": "DarkKeyDoor-v0", "hidden-sizes": [16], **SIZES, "max-episode-steps": 4},
    ),
    "a circle that is never reached": (
        "no reward",
        {"env-name": "SparsePointGoal-v0", **SIZES, "max-episode-steps": 3},
    ),
    "pulls of one arm only": ("no signal", BANDIT | SIZES | {"fast-batch-size": 1, "baseline": "zero"}),
    "ProMP with a rate of 1e-9": (
        "updates too small",
        MDP | SIZES | PROMP | {"algorithm-settings": {"learning-rate": 1e-9}},
    ),
    "ProMP with a rate of 0.5": (
        "updates too large",
        NAVIGATION | SIZES | PROMP | {"algorithm-settings": {"learning-rate": 0.5, "clip": 5.0}},
    ),
    "RL2 with a rate of 1e-10": ("updates too small", rl2(learning_rate=1e-10)),
    "ANIL without an inner step": (
        "adaptation does nothing",
        MDP | SIZES | {"algorithm": "anil", "fast-lr": 1e-8},
    ),
    "Reptile with an inner step of 100": (
        "inner step too large",
        NAVIGATION | SIZES | {"algorithm": "reptile", "fast-lr": 100.0},
    ),
    "two tasks": ("too few tasks", MDP | SIZES | {"meta-batch-size": 2, "fast-batch-size": 4}),
    "a recurrent critic that waits": (
        "no update",
        RL2 | {"algorithm": "rsac", "algorithm-settings": {"warmup-trials": 10_000}},
    ),
}
HEALTHY: dict[str, dict[str, Any]] = {
    "MAML-TRPO, navigation": NAVIGATION | LONGER | {"seed": 7},
    "MAML-TRPO, pulls": BANDIT | LONGER,
    "MAML-TRPO, decision processes": MDP | LONGER | {"fast-lr": 1.0},
    "ProMP, navigation": NAVIGATION | LONGER | PROMP,
    "ProMP, decision processes": MDP | LONGER | PROMP | {"fast-lr": 1.0},
    "E-MAML, navigation": NAVIGATION | LONGER | {"algorithm": "e-maml", "algorithm-settings": {"learning-rate": 0.01}},
    "Meta-SGD, navigation": NAVIGATION | LONGER | {"algorithm": "meta-sgd"},
    "CAVIA, navigation": NAVIGATION | LONGER | {"algorithm": "cavia"},
    "RL2, decision processes": rl2(learning_rate=1e-2) | MEMORY,
    "RL2, dark room": rl2(learning_rate=1e-2) | MEMORY | {"env-name": "DarkRoom-v0", "env-kwargs": {"size": 3}},
    "RL2, pulls": rl2(learning_rate=1e-2) | MEMORY | {"env-name": "Bandit-K5-v0", "fast-batch-size": 10},
    "MAML-PPO, navigation": NAVIGATION | LONGER | {"algorithm": "maml-ppo"},
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
    parser.add_argument("--held-out", action="store_true", help="try the runs on which no rule was adjusted")
    options = parser.parse_args(arguments)

    def named(settings: dict[str, Any]) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            causes = found({"seed": options.seed} | settings, Path(folder) / "run")
        return list(dict.fromkeys(each.name for each in causes))

    def chosen(names: Iterable[str]) -> list[str]:
        return [name for name in names if not options.names or any(part in name for part in options.names)]

    broken = HELD_OUT if options.held_out else BROKEN
    places = []
    for name in chosen(broken):
        cause, settings = broken[name]
        names = named(settings)
        places.append(names.index(cause) + 1 if cause in names else 0)
        print(f"{name}: {cause!r} is {places[-1] or 'not named'}; {', '.join(names)}", flush=True)
    early = sum(place in (1, 2, 3) for place in places)
    print(f"first {places.count(1)}, among the first three {early}, of {len(places)}")
    if options.held_out:
        sick = 0
        for name in chosen(HEALTHY):
            names = named(HEALTHY[name])
            sick += bool(names)
            print(f"{name}: {', '.join(names) or 'nothing'}", flush=True)
        print(f"runs that learn, and have a cause: {sick} of {len(chosen(HEALTHY))}")


if __name__ == "__main__":
    main()
