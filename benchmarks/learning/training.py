"""Trains methods, interleaved, evaluates their checkpoints on held-out tasks, and keeps the CSV files up to date.

An interrupted run can be continued: every training resumes from its newest checkpoint, and rows that the CSV files have
are not computed again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import monotonic

import numpy as np

from benchmarks.learning.plan import Family, Method
from benchmarks.learning.results import SUCCESS, Row, read_rows, write_rows
from maml_rl import __version__
from maml_rl.envs.meta_env import Task
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.train import train
from maml_rl.runs.metrics import Metrics, read_metrics
from maml_rl.runs.run_folder import CHECKPOINTS, CONFIG, METRICS
from maml_rl.task_distributions.task_files import save_tasks

# Seed of the held-out tasks: their streams are those of evaluations, from which no training draws.
_TASK_SEED = 1000
NUM_TASKS = 40


@dataclass(frozen=True, slots=True)
class Job:
    """One training: a method on a family with one seed.

    Attributes:
        family: the family that it trains on.
        method: the method that it trains.
        seed: of training.
        runs: folder of the runs.
        results: folder of the tasks and the CSV files.
        num_workers: see `train`.
    """

    family: Family
    method: Method
    seed: int
    runs: Path
    results: Path
    num_workers: int | None

    @property
    def csv(self) -> Path:
        """The method's published rows, of all seeds."""
        return self.results / f"{self.method.name}.csv"

    @property
    def run(self) -> Path:
        """The folder of the training."""
        return self.runs / self.family.name / self.method.name / f"seed-{self.seed}"

    @property
    def run_csv(self) -> Path:
        """The rows of the training in `run`, beside it."""
        return self.run.with_suffix(".csv")

    def points(self) -> list[int]:
        """Return the iterations that are evaluated."""
        return self.method.points(self.family)

    def rows(self) -> list[Row]:
        """Return the rows that exist: the published ones of a whole training, else those of the run.

        A published training that is incomplete starts again if its run is missing. Rows with other settings do not
        count, and `train` refuses to continue their run.
        """
        published = [row for row in self._by_settings(self.csv)[0] if row.seed == self.seed]
        return published if self._is_over(published) else self._by_settings(self.run_csv)[0]

    def is_over(self) -> bool:
        """Return whether nothing is left to do."""
        return self._is_over(self.rows())

    def publish(self, row: Row) -> None:
        """Write a row of the run; the CSV file receives the run's rows unless it has those of a longer training.

        With them it loses the rows of all trainings with other settings.
        """
        rows = [*(each for each in self._by_settings(self.run_csv)[0] if each.key != row.key), row]
        write_rows(self.run_csv, rows)
        alike, different = self._by_settings(self.csv)
        replaced = [each for each in alike if each.seed == self.seed] + different
        if row.env_steps >= max((each.env_steps for each in replaced), default=0):
            write_rows(self.csv, [*(each for each in alike if each.seed != self.seed), *rows])

    def _by_settings(self, csv: Path) -> tuple[list[Row], list[Row]]:
        """Return the rows of a CSV file with the plan's settings, or with unknown ones, and those with others."""
        # The digest needs the config, which is read from its file.
        of_plan = {"", self.method.settings(self.family)}
        alike, different = list[Row](), list[Row]()
        for row in read_rows(csv):
            (alike if row.settings in of_plan else different).append(row)
        return alike, different

    def _is_over(self, rows: list[Row]) -> bool:
        """Return whether rows are those of a whole training."""
        return self.points()[-1] in (row.iteration for row in rows)

    def advance(self, point: int, stop: Event, deadline: float) -> bool:
        """Train up to an iteration, evaluate there, and write the row; return whether there was time for it."""
        config = self.method.config(self.family, self.seed)
        if self.method.trained and point > 0:

            def look_at_the_clock(metrics: Metrics) -> None:
                if monotonic() > deadline:
                    stop.set()

            train(
                config.override({"num-batches": point}),
                self.run,
                num_workers=self.num_workers,
                resume=(self.run / CONFIG).is_file(),
                on_iteration=look_at_the_clock,
                stop=stop,
            )
            if len(read_metrics(self.run / METRICS)) < point:
                return False
        experiment = make_experiment(config)
        if point > 0:
            experiment.restore(self.run / CHECKPOINTS / f"iteration-{point:06d}", self.run)
        evaluation = evaluate(
            experiment,
            meta_batch_size=NUM_TASKS,
            tasks=held_out_tasks(self.results / "tasks.json", experiment),
            num_workers=self.num_workers,
        )
        returns = evaluation.task_returns()
        successes = evaluation.task_returns(SUCCESS) if SUCCESS in evaluation.infos else None
        if experiment.metalearner.columns != "step":
            # What adapts from episode to episode is before adaptation in the first, and in the last after all others.
            returns, successes = returns[:, [0, -1]], None if successes is None else successes[:, [0, -1]]
        metrics = read_metrics(self.run / METRICS)[:point] if point > 0 else []
        row = Row(
            seed=self.seed,
            iteration=point,
            env_steps=metrics[-1]["env_steps"] if metrics else 0,
            # With prefetch, batches are sampled during the updates, which sometimes wait for them.
            sample_seconds=sum(each["time/wait_s" if "time/wait_s" in each else "time/sample_s"] for each in metrics),
            update_seconds=sum(each["time/update_s"] for each in metrics),
            version=__version__,
            task_returns=np.round(returns, 2),
            task_successes=successes,
            digest=metrics[-1]["digest"] if metrics else "",
            settings=self.method.settings(self.family),
        )
        self.publish(row)
        return True


def held_out_tasks(path: Path, experiment: Experiment) -> list[Task]:
    """Return the tasks in a file; a missing file is written first."""
    if not path.is_file():
        drawn = make_experiment(experiment.config.override({"seed": _TASK_SEED, "method": "maml"}))
        with drawn.make_sampler(num_workers=0, evaluation=True) as sampler:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_tasks(path, experiment.config.env_name, sampler.sample_tasks(NUM_TASKS))
    return experiment.load_tasks(path)


def turns(jobs: list[Job]) -> Iterator[tuple[Job, int]]:
    """Yield the remaining evaluations, one after the other; at each of them all methods and all seeds, interleaved.

    So unfinished trainings have had the same number of environment steps, and other load on the machine affects all of
    them equally.
    """
    left = [(job, job.points(), {row.iteration for row in job.rows()}) for job in jobs]
    for number in range(max((len(points) for _, points, _ in left), default=0)):
        for job, points, done in left:
            if number < len(points) and points[number] not in done and not job.is_over():
                yield job, points[number]


def run_jobs(jobs: list[Job], minutes: float, say: Callable[[str], None] = print) -> bool:
    """Carry out the rest of the jobs; return False if the time is over before all are done."""
    deadline, stop = monotonic() + 60.0 * minutes, Event()
    for job, point in turns(jobs):
        if monotonic() > deadline or not job.advance(point, stop, deadline):
            say("the time is up; the same command continues")
            return False
        last = next(row for row in read_rows(job.run_csv) if row.iteration == point)
        returns = ", ".join(f"{value:.1f}" for value in last.returns())
        say(
            f"{job.family.name}, {job.method.name}, seed {job.seed}: {returns} after {point} meta-updates, "
            f"{last.env_steps / 1e6:.1f} M environment steps, {last.minutes:.1f} minutes"
        )
    return True
