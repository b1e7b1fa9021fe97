"""Prints a digest of a small run of every learner, so that two versions of the package can be compared byte for byte.

    python scripts/digest_runs.py > before.txt                      # in one checkout
    python scripts/digest_runs.py --checkout ../other > after.txt   # the runs of another one
    diff before.txt after.txt

A line has the name of a run, its number of workers, and a digest of its metrics (without times), of the tensors and
the state of its last checkpoint, and of an evaluation of its policy. A run that fails says why instead.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TRANSFORMER = {"cell": "transformer", "hidden-size": 8, "num-heads": 2, "layers": []}
# Further runs than one of each algorithm: (algorithm, settings).
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "maml-trpo, with a memory": ("maml-trpo", {"memory": "gru"}),
    "maml-trpo, episodes in waves": ("maml-trpo", {"slots-per-task": 2}),
    "rl2, transformer": ("rl2", {"algorithm-settings": TRANSFORMER}),
}


def main() -> None:
    """Print the digests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of runs; all by default")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parent.parent, help="whose package is run")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="numbers of workers (default: 0 2)")
    parser.add_argument("--update", choices=["auto", "driver", "workers"], help="where updates are computed")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    os.environ["PYTHONPATH"] = str(checkout)
    sys.path.insert(0, str(checkout))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        digest_all(arguments.names, arguments.workers, {"update": arguments.update} if arguments.update else {})


def digest_all(names: list[str], workers: list[int], placement: dict[str, Any]) -> None:
    """Print a line for each run and number of workers."""
    from maml_rl.metalearners import algorithms
    from tests.metalearners.histories import record

    record(Path("histories"))
    runs = {name: (name, {}) for name in algorithms()} | MORE
    for name in names or runs:
        algorithm, settings = runs[name]
        for number in workers:
            print(f"{name}; {number} workers; {digest_of(algorithm, {**settings, **placement}, number)}", flush=True)


def digest_of(algorithm: str, settings: dict[str, Any], num_workers: int) -> str:
    """Return the digest of a run, or the first line of the error that ended it."""
    import torch

    from maml_rl.experiment.build import make_experiment
    from maml_rl.experiment.evaluate import evaluate
    from maml_rl.experiment.train import train
    from maml_rl.runs.checkpoint import latest_intact
    from tests.metalearners.small_algorithms import small
    from tests.small_runs import untimed

    found = hashlib.sha256()

    def include(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            found.update(json.dumps(value, sort_keys=True, default=repr).encode())

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            config = small(algorithm)
            # A policy with a memory has one layer.
            config = config.override(settings) if settings else config
            train(config, run, num_workers=num_workers)
            include(untimed(run))
            checkpoint = latest_intact(run / "checkpoints")[1]
            for values in (checkpoint.tensors, checkpoint.learner):
                for key in sorted(values):
                    include(key)
                    include(values[key])
            include(checkpoint.state)
            experiment = make_experiment(config)
            experiment.restore("last", run)
            include(evaluate(experiment, 3, num_workers=num_workers).returns.tolist())
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    return found.hexdigest()[:16]


if __name__ == "__main__":
    main()
