"""Trains while workers are killed, stopped, starved and frozen at random, and checks that results do not change.

    python -m benchmarks.soak --minutes 60
    python -m benchmarks.soak --kills 1000

It repeats the same short training runs of several families; the policy acts alternately in the workers and in the
parent. It compares the digests of all episodes, and of the parameters after every update, with those of an undisturbed
run in one process. With --kills it only kills workers, one after the other, and measures the time from each kill to
sampling again. The exit code is 1 if anything went wrong.
"""

import argparse
import faulthandler
import gc
import hashlib
import itertools
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from benchmarks.chaos import KINDS, Chaos, RecoveryClock
from benchmarks.measuring import Samples, machine
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress
from maml_rl import MultiTaskSampler
from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.errors import ChildEnvTimeout
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.metalearners import MetaLearner

FAMILIES = ("2DNavigation-v0", "TabularMDP-v0", "HalfCheetahDir-v5")
FOUND = "What was found"
RECOVERY = "From a kill to sampling again"
GROWTH = "Growth from the first runs to the last"
# More than any number of kills: in this benchmark workers die again and again.
_MAX_RESTARTS = 1_000_000


class RestartCounter(logging.Handler):
    """Counts the warnings about replaced workers instead of printing them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self.count += 1


@dataclass(slots=True)
class SoakRecord:
    """The events and resources so far.

    Attributes:
        runs: training runs that have ended.
        iterations: iterations that have ended.
        timeouts: frozen workers that the sampler reported; the iteration was then repeated.
        mismatches: iterations whose digest differs from the undisturbed run's.
        hangs: iterations that did not end.
        memory: bytes of this process after each run.
        files: open files after each run.
        workers: processes that remain after each run.
        last_progress: when the last iteration ended.
    """

    runs: int = 0
    iterations: int = 0
    timeouts: int = 0
    mismatches: int = 0
    hangs: int = 0
    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    last_progress: float = field(default_factory=time.monotonic)

    def take_stock(self) -> None:
        """Record the resources that this process holds now."""
        gc.collect()
        process = psutil.Process()
        self.memory.append(process.memory_info().rss)
        self.files.append(process.num_fds())
        self.workers.append(len(process.children(recursive=True)))


def growth(values: list[int]) -> float:
    """Return by how much the median of the last third exceeds that of the first, without the very first run."""
    settled = values[1:]
    third = max(1, len(settled) // 3)
    return statistics.median(settled[-third:]) - statistics.median(settled[:third])


class Soak:
    """The runs, and the thread that disturbs them.

    Args:
        options: of the command.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._tell = progress(options)
        self.clock = RecoveryClock()
        self.clock.pids = self.pids
        self.record = SoakRecord()
        self.restarts = RestartCounter()
        self._sampler: MultiTaskSampler | None = None
        self._ended = threading.Event()
        kills_only = options.kills is not None
        self.chaos = Chaos(
            self.pids,
            self.clock,
            seed=options.seed,
            weights=(1, 0, 0, 0) if kills_only else options.weights,
            longest_pause=options.longest_pause,
            limit=options.kills,
        )

    def pids(self) -> list[int]:
        """Return the workers of the run under way."""
        return [] if self._sampler is None else self._sampler.pids

    def run(self) -> None:
        """Repeat the runs until the time is over or the workers have died often enough."""
        configs = [self._config(family) for family in self._options.families]
        undisturbed = {config.env_name: list(self._digests(config.override({"num-workers": 0}))) for config in configs}
        modes = [config.override({"inference": mode}) for mode in ("auto", "central") for config in configs]
        self.record = SoakRecord()
        log = logging.getLogger("maml_rl")
        log.addHandler(self.restarts)
        log.propagate, propagated = False, log.propagate
        self.chaos.start()
        started = time.monotonic()
        try:
            for config in itertools.cycle(modes):
                with closing(self._digests(config)) as digests:
                    for digest, expected in zip(digests, undisturbed[config.env_name], strict=True):
                        self.record.mismatches += digest != expected
                        # Every family has a run before the end.
                        if self.record.runs >= len(modes) and self._over(started):
                            return
                self.record.runs += 1
                self.record.take_stock()
                self._tell(
                    f"{time.monotonic() - started:6.0f} s  run {self.record.runs}, {config.env_name}, "
                    f"inference {config.placement.inference}: "
                    f"{self.chaos.total} faults, {self.record.timeouts} reported as hung, "
                    f"{self.record.mismatches} digest mismatches"
                )
        finally:
            self._ended.set()
            self.chaos.end()
            log.removeHandler(self.restarts)
            log.propagate = propagated

    def watch(self, give_up: Callable[[], None]) -> None:
        """Call `give_up` when no iteration has ended for too long; runs in a thread."""
        while time.monotonic() - self.record.last_progress < self._options.patience:
            if self._ended.wait(0.5):
                return
        self.record.hangs += 1
        faulthandler.dump_traceback(all_threads=True)
        give_up()

    def _over(self, started: float) -> bool:
        if self._options.kills is not None:
            return self.chaos.total >= int(self._options.kills)
        return time.monotonic() - started >= 60.0 * float(self._options.minutes)

    def _config(self, family: str) -> Config:
        """Return the config of the runs of a family, by MAML-TRPO."""
        tasks, episodes, horizon = self._options.size
        values = {
            "env-name": family,
            "meta-batch-size": tasks,
            "fast-batch-size": episodes,
            "max-episode-steps": horizon,
            "hidden-sizes": [16],
            "seed": self._options.seed,
            "num-workers": self._options.num_workers,
            "step-timeout": self._options.step_timeout,
            "max-restarts": _MAX_RESTARTS,
        }
        return Config.from_mapping(Mapping("the soak", values))

    def _digests(self, config: Config) -> Generator[str]:
        """Train from the beginning, and yield a digest of everything after each iteration."""
        experiment = make_experiment(config)
        sampler = make_sampler(experiment, timer=self.clock)
        self._sampler = sampler if config.placement.num_workers != 0 else None
        try:
            for iteration in range(self._options.iterations):
                yield self._iterate(experiment.metalearner, sampler, iteration)
                self.record.iterations += 1
                self.record.last_progress = time.monotonic()
        finally:
            self._sampler = None
            self.clock.forget()
            sampler.close()

    def _iterate(self, learner: MetaLearner, sampler: MultiTaskSampler, iteration: int) -> str:
        while True:
            try:
                batch = learner.collect(sampler, sampler.sample_tasks(self._options.size[0]))
                break
            except ChildEnvTimeout:
                self.record.timeouts += 1
                sampler.seek(iteration - 1)
        digest = hashlib.sha256("".join(episodes.digest() for episodes in batch.phases).encode())
        learner.update(batch)
        digest.update(torch.nn.utils.parameters_to_vector(learner.policy.parameters()).detach().numpy().tobytes())
        return digest.hexdigest()


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options)
    facts = machine()
    shared_memory, processes = _shared_files(), len(psutil.Process().children(recursive=True))
    soak = Soak(options)

    def report_hang() -> None:
        _report(soak, facts, options, 0, 0)
        sys.stdout.flush()
        os._exit(1)

    threading.Thread(target=soak.watch, args=(report_hang,), daemon=True, name="watch").start()
    soak.run()
    left = len(psutil.Process().children(recursive=True)) - processes
    files = len(_shared_files() - shared_memory)
    _report(soak, facts, options, left, files)
    record = soak.record
    if record.mismatches or record.hangs or left or files:
        raise SystemExit(1)


def _report(soak: Soak, facts: dict[str, object], options: argparse.Namespace, left: int, files: int) -> None:
    record, chaos = soak.record, soak.chaos
    report = Report("soak", facts, chosen(options))

    def found(name: str, value: float, note: str = "") -> None:
        report.add(FOUND, Row(name, Samples([value]), "count", note))

    for kind in KINDS:
        found(f"faults injected: {kind}", chaos.injected[kind])
    found("workers replaced", soak.restarts.count, "after a warning that named each")
    found("training runs", record.runs, ", ".join(options.families))
    found("iterations", record.iterations)
    found("workers reported as hung", record.timeouts, "then the iteration was repeated")
    found("digest mismatches", record.mismatches)
    found("hangs", record.hangs)
    found("processes left", left)
    found("files left in /dev/shm", files)
    if soak.clock.latencies:
        report.add(RECOVERY, Row("seconds", Samples(soak.clock.latencies), "s"))
    for name, values, scale, unit in (
        ("memory of the parent", record.memory, 1e6, "MB"),
        ("open files", record.files, 1, "count"),
        ("processes", record.workers, 1, "count"),
    ):
        if len(values) >= 3:
            report.add(GROWTH, Row(name, Samples([growth(values) / scale]), unit))
    finish(report, options)


def _shared_files() -> set[str]:
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=1.0, help="how long to run, with all kinds of faults mixed")
    length.add_argument("--kills", type=int, help="instead, run until so many workers have been killed, one by one")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), help="ids, each in its turn")
    parser.add_argument("--iterations", type=int, default=10, help="of one training run")
    parser.add_argument("--size", nargs=3, type=int, default=[4, 5, 50], metavar=("M", "B", "T"), help="of a phase")
    parser.add_argument("--num-workers", type=int, default=2, help="worker processes")
    parser.add_argument("--step-timeout", type=float, default=3.0, help="seconds after which a worker counts as hung")
    parser.add_argument("--longest-pause", type=float, default=0.3, help="seconds between two faults, at most")
    parser.add_argument(
        "--weights", nargs=4, type=float, default=[10, 5, 2, 1], metavar=KINDS, help="how often each fault comes"
    )
    parser.add_argument("--patience", type=float, default=120.0, help="seconds without progress that count as a hang")
    options = parser.parse_args(arguments)
    if options.quick:
        options.minutes, options.iterations = min(options.minutes, 0.1), 2
        options.kills = None if options.kills is None else min(options.kills, 3)
    if options.kills is None and options.minutes <= 0.0:
        parser.error(f"--minutes must be positive, got {options.minutes}")
    return options


if __name__ == "__main__":
    main()
