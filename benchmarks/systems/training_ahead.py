"""Our whole training iterations, with batches of tasks collected on demand or ahead."""

import itertools
import time
from pathlib import Path

from benchmarks.measuring import Measurements
from benchmarks.systems.layouts import Workload
from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.experiment.train import train
from maml_rl.runs.metrics import Metrics


class TrainingAhead:
    """Trains a few iterations from the start in every turn, and times those between the first and the last.

    In the first iteration nothing overlaps, and during the last nothing is left to be collected; in between there is
    one collection for each update, ahead or not.

    Args:
        workload: what to sample in every phase.
        name: of the rows.
        prefetch: number of batches ahead.
        iterations: number of timed iterations.
    """

    def __init__(self, workload: Workload, name: str, prefetch: int, iterations: int) -> None:
        self._name, self._iterations, self._num_workers = name, iterations, workload.num_workers
        self._folders = (Path(f"run-{number}") for number in itertools.count())
        settings = {
            "env-name": workload.env,
            "env-kwargs": dict(workload.env_kwargs),
            "max-episode-steps": workload.horizon,
            "hidden-sizes": list(workload.hidden_sizes),
            "fast-batch-size": workload.episodes_per_task,
            "meta-batch-size": workload.num_tasks,
            # One iteration before the timed ones, and one after.
            "num-batches": iterations + 2,
            "checkpoint-every": iterations + 2,
            "prefetch": prefetch,
            "seed": workload.seed,
        }
        self._config = Config.from_mapping(Mapping("the benchmark", settings))

    def turn(self) -> Measurements:
        """Train; return steps per second, updates included, and the share of time that the update waits."""
        ends: list[float] = []
        rows: list[Metrics] = []

        def note(metrics: Metrics) -> None:
            ends.append(time.perf_counter())
            rows.append(metrics)

        train(self._config, next(self._folders), num_workers=self._num_workers, on_iteration=note)
        seconds = ends[self._iterations] - ends[0]
        timed = rows[1 : self._iterations + 1]
        # Without a batch ahead, the update waits for as long as it takes to collect one.
        waited = sum(float(row["time/wait_s" if "time/wait_s" in row else "time/sample_s"]) for row in timed)
        steps = rows[self._iterations]["env_steps"] - rows[0]["env_steps"]
        return {f"{self._name}: rate": steps / seconds, f"{self._name}: waiting": waited / seconds}

    def close(self) -> None:
        """Do nothing: every turn ends its own workers."""
