"""Trains methods, interleaved, evaluates their checkpoints on held-out tasks, and keeps the CSV files up to date.

An interrupted or killed run can be continued: every training resumes from its newest checkpoint, and rows that the CSV
files have are not computed again.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Event
from time import monotonic

import numpy as np

from benchmarks.learning.plan import Family, Method
from benchmarks.learning.results import SUCCESS, Row, read_rows, write_rows
from maml_rl import __version__
from maml_rl.envs.meta_env import Task
from maml_rl.errors import ConfigError, MamlRLError, explain
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.in_processes import in_processes
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.runs.metrics import Metrics, read_metrics
from maml_rl.runs.run_folder import CHECKPOINTS, CONFIG, METRICS, read_failure
from maml_rl.task_distributions.task_files import save_tasks

# Seed of the held-out tasks: their streams are those of evaluations, from which no training draws.
_TASK_SEED = 1000
NUM_TASKS = 40
# Iterations by which the time of those that are left is estimated.
_NEWEST = 20


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
        device: see `train`.
    """

    family: Family
    method: Method
    seed: int
    runs: Path
    results: Path
    num_workers: int | None
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Family, method and seed, for readers."""
        return f"{self.family.name}, {self.method.name}, seed {self.seed}"

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

    def failure(self) -> str:
        """Return what ended the training for good: it diverged; empty where nothing did."""
        return read_failure(self.run)

    def publish(self, row: Row | None = None) -> None:
        """Write a row of the run; the CSV file receives the run's rows unless it has those of a longer training.

        With them it loses the rows of all trainings with other settings. Without a row, it receives what a killed
        command did not publish any more.
        """
        rows = self._by_settings(self.run_csv)[0]
        if row is not None:
            rows = [*(each for each in rows if each.key != row.key), row]
            write_rows(self.run_csv, rows)
        alike, different = self._by_settings(self.csv)
        replaced = [each for each in alike if each.seed == self.seed] + different
        longest, published = (max((each.env_steps for each in group), default=-1) for group in (rows, replaced))
        if longest > published or (row is not None and row.env_steps >= published):
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

    def left(self) -> tuple[int, float | None]:
        """Return how many iterations are finished, and how many more minutes it takes; None where that is not known."""
        rows, last = self.rows(), self.points()[-1]
        metrics = read_metrics(self.run / METRICS) if (self.run / METRICS).is_file() else []
        done = max([row.iteration for row in rows] + [len(metrics)])
        newest = metrics[-_NEWEST:]
        minutes = self.family.minutes.get(self.method.name)
        if newest:
            seconds = sum(each["time/sample_s"] + each["time/update_s"] for each in newest)
            minutes = seconds / len(newest) * last / 60.0
        elif others := [row.minutes / row.iteration for row in read_rows(self.csv) if row.iteration]:
            minutes = others[-1] * last
        return done, None if minutes is None else minutes * max(last - done, 0) / max(last, 1)

    def refuse_large_files(self, most: int) -> None:
        """Refuse a training whose checkpoints would have files of more bytes than `most`.

        Raises:
            ConfigError: If they would; the message says how large they are.
        """
        size = checkpoint_bytes(make_experiment(self.method.config(self.family, self.seed)))
        if size > most:
            raise ConfigError(
                f"{self.name}: a checkpoint takes {size / 2**20:.1f} MiB, more than the {most / 2**20:g} MiB of "
                "--largest-file; choose smaller networks, or keep the runs where they need not be carried"
            )

    def advance(self, point: int, stop: Event, deadline: float) -> Row | None:
        """Train up to an iteration, evaluate there, and return the row; None if there was no time for it."""
        config = self.method.config(self.family, self.seed)
        if self.method.trained and point > 0:

            def look_at_the_clock(metrics: Metrics) -> None:
                if monotonic() > deadline:
                    stop.set()

            train(
                config.override({"num-batches": point}),
                self.run,
                num_workers=self.num_workers,
                device=self.device,
                resume=(self.run / CONFIG).is_file(),
                on_iteration=look_at_the_clock,
                stop=stop,
            )
            if len(read_metrics(self.run / METRICS)) < point:
                return None
        experiment = make_experiment(config, self.device)
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
        return Row(
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


def held_out_tasks(path: Path, experiment: Experiment) -> list[Task]:
    """Return the tasks in a file; a missing file is written first."""
    if not path.is_file():
        drawn = make_experiment(experiment.config.override({"seed": _TASK_SEED, "method": "maml"}))
        with make_sampler(drawn, num_workers=0, evaluation=True) as sampler:
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


def run_jobs(
    jobs: list[Job],
    minutes: float,
    say: Callable[[str], None] = print,
    *,
    in_order: bool = False,
    at_once: int = 1,
    on_row: Callable[[Job], None] = lambda job: None,
) -> bool:
    """Carry out the rest of the jobs; return False if the time is over before all are done.

    Args:
        jobs: to be done.
        minutes: after which no further iteration begins.
        say: gets a line about each row.
        in_order: bring one job to its end before the next, instead of interleaving all.
        at_once: jobs at the same time, each in a process; if more than one, they are in order.
        on_row: called after a row is written.

    Raises:
        MamlRLError: After the others, if some of the jobs failed. A run that diverged is not tried again.
    """
    deadline = monotonic() + 60.0 * minutes
    for job in jobs:
        job.publish()
    jobs = [job for job in jobs if not job.is_over() and not job.failure()]
    if at_once > 1:
        by_name = {job.name: job for job in jobs}
        calls = ((job.name, (job, deadline)) for job in jobs if monotonic() < deadline)
        rows = ((by_name[name], row) for name, row in in_processes(_send_rows, calls, at_once))
    else:
        rows = _rows([[job] for job in jobs] if in_order else [jobs], deadline)
    failed = []
    with closing(rows):
        for job, row in rows:
            if isinstance(row, str):
                say(f"{job.name} failed: {row}")
                failed.append(job)
                continue
            job.publish(row)
            on_row(job)
            returns = ", ".join(f"{value:.1f}" for value in row.returns())
            say(
                f"{job.name}: {returns} after {row.iteration} meta-updates, "
                f"{row.env_steps / 1e6:.1f} M environment steps, {row.minutes:.1f} minutes"
            )
    if any(not job.is_over() for job in jobs if job not in failed):
        say("the time is up; the same command continues")
    if failed:
        raise MamlRLError(f"{len(failed)} of {len(jobs)} trainings failed, as said above; the others went on")
    return all(job.is_over() for job in jobs)


def _rows(groups: list[list[Job]], deadline: float) -> Generator[tuple[Job, Row | str]]:
    """Yield the rows that are left until the deadline: of one group after the other, the jobs of a group interleaved.

    Of a job that fails, the last is the reason. What is asked for next is computed after the previous row is published.
    """
    stop, failed = Event(), set[str]()
    for job, point in chain.from_iterable(map(turns, groups)):
        if job.name in failed:
            continue
        row = _attempt(job, point, stop, deadline) if monotonic() < deadline else None
        if row is None:
            return
        if isinstance(row, str):
            failed.add(job.name)
        yield job, row


def _send_rows(send: Callable[[Row | str], None], job: Job, deadline: float) -> None:
    """Send the rows that are left of a job, in a process of its own. Only the caller writes CSV files."""
    for _, row in _rows([[job]], deadline):
        send(row)


def _attempt(job: Job, point: int, stop: Event, deadline: float) -> Row | str | None:
    """Return what `Job.advance` does, or the reason why it failed: the other jobs go on."""
    try:
        return job.advance(point, stop, deadline)
    except ConfigError:
        raise
    except Exception as error:
        return explain(error)


def checkpoint_bytes(experiment: Experiment) -> int:
    """Return about how many bytes the tensors of a checkpoint have: all numbers, and two of Adam for those trained."""
    networks = experiment.metalearner.networks
    modules = [experiment.policy, *([] if networks is None else [networks])]
    kept: list[int] = [tensor.nbytes for module in modules for tensor in module.state_dict().values()]
    trained = {parameter for module in modules for parameter in module.parameters() if parameter.requires_grad}
    return sum(kept) + 2 * sum(parameter.nbytes for parameter in trained)


def say_what_is_left(jobs: list[Job], at_once: int = 1, say: Callable[[str], None] = print) -> None:
    """Say which jobs are not over, how far they are, the minutes that they take, and which files they need for it."""
    left = [job for job in jobs if not job.is_over() and not job.failure()]
    for job in jobs:
        if job.failure():
            say(f"ended: {job.name} {job.failure()}; remove {job.run} to train it again")
    total, unknown = 0.0, 0
    for job in left:
        done, minutes = job.left()
        total, unknown = total + (minutes or 0.0), unknown + (minutes is None)
        expected = "" if minutes is None else f", about {minutes:.1f} minutes"
        say(f"left: {job.name}: from meta-update {done} of {job.points()[-1]}{expected}")
    if not left:
        say("nothing is left")
        return
    beside = f", of which {at_once} run at once" if at_once > 1 else ""
    more = f", and {unknown} jobs that were never timed" if unknown else ""
    say(f"left in all: {len(left)} jobs, about {total:.0f} minutes{beside}{more}")
    sizes = [path.stat().st_size for job in left for path in job.run.rglob("*") if path.is_file()]
    if sizes:
        begun = sum(job.run.is_dir() for job in left)
        say(
            f"to continue elsewhere, carry the results and {begun} folders below {left[0].runs}, with the CSV files "
            f"beside them: {sum(sizes) / 2**20:.1f} MiB in {len(sizes)} files, the largest of "
            f"{max(sizes) / 2**20:.2f} MiB"
        )
