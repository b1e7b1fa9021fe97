"""Kills actors and nodes of a Ray cluster on this machine at random moments, and compares all episodes.

    python -m benchmarks.cluster --kills 200 --json kills.json

Half of the kills come while episodes are being transferred. All digests are compared with those of one process.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks.measuring import Samples, machine
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress
from maml_rl import MultiTaskSampler
from maml_rl.policies import NormalMLPPolicy
from maml_rl.profiling import StageTimer

FOUND, RECOVERY = "What was found", "From a killed actor to the next finished unit"
STORE = 200 * 2**20
# A phase that takes longer counts as hung.
_HANG_SECONDS = 180.0
# Episodes for each task of the training's phases, and of its evaluation's, which take turns.
_BATCH_SIZES = 10, 4
# How many actors start at once, and how long one may take.
_START_AT_ONCE = 4
_START_SECONDS = 180.0


@contextlib.contextmanager
def cluster_of(*cpus: int) -> Iterator[Any]:
    """Start a cluster on this machine with a node for each number of CPUs, and connect to it."""
    import ray
    from ray.cluster_utils import Cluster

    paths = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    options = {"object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False, **options})
    try:
        for number in cpus[1:]:
            cluster.add_node(num_cpus=number, **options)
        environment = {"env_vars": {"PYTHONPATH": paths}}
        ray.init(address=cluster.address, runtime_env=environment, logging_level="ERROR", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def actor_processes() -> list[psutil.Process]:
    """Return the processes of actors below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RolloutActor" in "".join(process.cmdline()):
                found.append(process)
    return found


def wait_for_actors(sampler: MultiTaskSampler, num_actors: int) -> None:
    """Wait until this many actors have started, a few at a time: each imports torch, and there may be few cores.

    Raises:
        RuntimeError: If none has started for minutes.
    """
    started, since = 0, time.monotonic()
    while started < num_actors:
        sampler.prepare(min(num_actors, started - started % _START_AT_ONCE + _START_AT_ONCE))
        if len(sampler.pids) > started:
            started, since = len(sampler.pids), time.monotonic()
        elif time.monotonic() > since + _START_SECONDS:
            raise RuntimeError(f"{started} of {num_actors} actors have started, none of them in {_START_SECONDS:g} s")
        time.sleep(0.05)


class Kills(StageTimer):
    """The timer of a sampler, and the thread that kills its actors and nodes.

    The time from a killed actor to the next unit ends when the driver has received a unit that it waited for after the
    kill.

    Args:
        cluster: its nodes, except the head, are killed.
        options: of the command.
    """

    def __init__(self, cluster: Any, options: argparse.Namespace) -> None:
        super().__init__()
        self._cluster, self._options = cluster, options
        self._random = random.Random(options.seed)
        self.sampler: MultiTaskSampler | None = None
        self.latencies: list[float] = []
        self.actors = self.nodes = self.in_transfer = 0
        self._killed_at = self._waited_until = 0.0
        self._transfer, self._ended = threading.Event(), threading.Event()
        self._until = float("inf")
        self.missing: list[Any] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def total(self) -> int:
        """All kills so far."""
        return self.actors + self.nodes

    @property
    def over(self) -> bool:
        """Whether there will be no more kills."""
        return self.total >= self._options.kills or time.monotonic() >= self._until

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Notice when a unit has come back."""
        # The assembly at the beginning of a phase is of another kind, and follows no wait.
        if name == "assembly" and self._waited_until:
            self._transfer.set()
            if 0.0 < self._killed_at < self._waited_until:
                self.latencies.append(time.perf_counter() - self._killed_at)
                self._killed_at = 0.0
            self._waited_until = 0.0
        yield
        if name == "waiting":
            self._waited_until = time.perf_counter()

    def start(self) -> None:
        """Start killing."""
        self._until = time.monotonic() + self._options.minutes * 60.0
        self._thread.start()

    def end(self) -> None:
        """Stop killing, and raise the error of the killing thread, if there is one."""
        self._ended.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._kill()
        # The thread that calls `end` raises it.
        except BaseException as error:
            self._failure, self._until = error, 0.0

    def _kill(self) -> None:
        for number in itertools.count():
            if number % 2:
                # Wait for a unit to come back, so that others are being transferred.
                self._transfer.clear()
                self._transfer.wait(5.0)
                self.in_transfer += 1
            elif self._ended.wait(self._random.uniform(0.0, 0.5)):
                return
            if self._ended.is_set() or self.over:
                return
            if self.nodes * self._options.actors_per_node < self.actors:
                self._kill_node()
            else:
                self._kill_actor()
            # At least one actor must survive the next kill; the others restart meanwhile.
            while not self._ended.wait(0.05) and self.sampler is not None and len(self.sampler.pids) < 2:
                continue

    def _kill_actor(self) -> None:
        pids = self.sampler.pids if self.sampler is not None else []
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), signal.SIGKILL)
                self.actors += 1
                # Until a unit has come back, the clock of an earlier kill continues.
                self._killed_at = self._killed_at or time.perf_counter()

    def _kill_node(self) -> None:
        nodes = sorted(self._cluster.worker_nodes, key=lambda node: node.unique_id)
        if len(nodes) < 2:
            return
        node = self._random.choice(nodes)
        self._cluster.remove_node(node, allow_graceful=False)
        self.nodes += 1
        self.missing.append(node)

    def replace_nodes(self) -> None:
        """Start a node for each that was killed; Ray lets only the main thread do so."""
        while self.missing:
            self.missing.pop()
            self._cluster.add_node(num_cpus=2, object_store_memory=STORE)


def kill(options: argparse.Namespace, report: Report) -> None:
    """Sample for a training and for its evaluation while their actors and nodes are killed."""
    policy = NormalMLPPolicy(2, 2, (64, 64))

    def sampler_of(batch_size: int, **place: Any) -> MultiTaskSampler:
        sizes = {"batch_size": batch_size, "max_episode_steps": 100, "seed": options.seed}
        return MultiTaskSampler("2DNavigation-v0", {}, policy=policy, **sizes, **place)

    def digest(sampler: MultiTaskSampler) -> str:
        sampler.seek(0)
        return sampler.rollout(sampler.sample_tasks(24)).digest()

    expected = []
    for batch_size in _BATCH_SIZES:
        with sampler_of(batch_size, num_workers=0) as alone:
            expected.append(digest(alone))
    changed = hangs = phases = 0
    with cluster_of(2, 2, 2) as cluster:
        timer = Kills(cluster, options)
        place = {"backend": "ray", "num_workers": 6, "max_restarts": 1_000_000}
        with (
            sampler_of(_BATCH_SIZES[0], timer=timer, **place) as sampler,
            sampler_of(_BATCH_SIZES[1], **place) as evaluation,
        ):
            wait_for_actors(sampler, 6)
            timer.sampler = sampler
            timer.start()
            while not timer.over:
                timer.replace_nodes()
                started = time.monotonic()
                number = phases % 2
                changed += digest((sampler, evaluation)[number]) != expected[number]
                phases += 1
                hangs += time.monotonic() - started > _HANG_SECONDS
                if phases % 50 == 0:
                    progress(options)(f"{phases} phases, {timer.actors} actors and {timer.nodes} nodes killed")
            timer.sampler = None
            timer.end()
        _, left = psutil.wait_procs(actor_processes(), timeout=20)
    found = {
        "actors killed": timer.actors,
        "nodes killed": timer.nodes,
        "of these while episodes were on their way": timer.in_transfer,
        "phases": phases,
        "changed digests": changed,
        "hangs": hangs,
        "actors left over": len(left),
    }
    for name, count in found.items():
        report.add(
            FOUND, Row(name, Samples([count]), "count", "2DNavigation-v0 24 x 10 and 24 x 4 x 100, 6 actors on 3 nodes")
        )
    if timer.latencies:
        report.add(RECOVERY, Row("the next unit", Samples(timer.latencies), "s", "while lost actors start anew"))


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options, ray="the benchmark")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    report = Report("cluster", machine(), chosen(options))
    kill(options, report)
    finish(report, options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="of actors and nodes")
    parser.add_argument("--minutes", type=float, default=60.0, help="the kills end after, however many there were")
    parser.add_argument("--actors-per-node", type=int, default=9, help="killed actors for each killed node")
    options = parser.parse_args(arguments)
    if options.quick:
        options.kills = 2
    return options


if __name__ == "__main__":
    main()
