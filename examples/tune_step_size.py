"""Ray Tune searches inner step sizes: each trial is a training, which reports the return of every iteration.

With `--actors 2` the episodes of a trial are sampled by two Ray actors, in the placement group of the trial; without,
in its process. A trial that dies continues from its last checkpoint, with the bytes that it would have had.

    pip install -e '.[tune]'
    python examples/tune_step_size.py --step-sizes 0.05 0.1 0.2 --actors 2
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from ray import tune

from maml_rl.config import load_config
from maml_rl.experiment.train import train

METRIC = "return/step_1"


def train_trial(settings: dict[str, Any]) -> None:
    """Train with settings that replace those of a config, and report every iteration to Tune."""
    others = dict(settings)
    config = load_config(others.pop("config")).override(others)
    folder = Path(tune.get_context().get_trial_dir(), "run")
    train(config, folder, resume=True, on_iteration=lambda metrics: tune.report({METRIC: metrics[METRIC]}))


def main(arguments: list[str] | None = None) -> None:
    """Run a trial for each step size, and print its return."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default="configs/maml/2d-navigation.yaml", help="what to train")
    parser.add_argument("--step-sizes", type=float, nargs="+", default=[0.05, 0.1, 0.2], help="one for each trial")
    parser.add_argument("--iterations", type=int, default=20, help="of each trial (default: 20)")
    parser.add_argument("--tasks", type=int, default=20, help="in each iteration (default: 20)")
    parser.add_argument("--actors", type=int, default=0, help="Ray actors of each trial (default: none)")
    parser.add_argument("--folder", type=Path, default="runs/tune", help="where results go, on storage of all nodes")
    options = parser.parse_args(arguments)

    settings: dict[str, Any] = {
        "config": str(options.config.resolve()),
        "fast-lr": tune.grid_search(options.step_sizes),
        "num-batches": options.iterations,
        "meta-batch-size": options.tasks,
        "num-workers": options.actors,
        "backend": "ray" if options.actors else "in-process",
    }
    ray.init(log_to_driver=False)
    # The first bundle is for the process of the trial, and the others are for its actors.
    places = tune.PlacementGroupFactory([{"CPU": 1}] * (1 + options.actors))
    tuner = tune.Tuner(
        tune.with_resources(train_trial, places),
        param_space=settings,
        tune_config=tune.TuneConfig(metric=METRIC, mode="max"),
        run_config=tune.RunConfig(
            storage_path=str(options.folder.resolve()),
            failure_config=tune.FailureConfig(max_failures=2),
            verbose=0,
        ),
    )
    results = tuner.fit()
    for result in results:
        print(f"step size {result.config['fast-lr']:g}: return {result.metrics[METRIC]:.2f} after one step")
    print(f"best step size: {results.get_best_result().config['fast-lr']:g}")
    ray.shutdown()


if __name__ == "__main__":
    main()
