"""The Ray backend on a cluster of several nodes on this machine: speed, fixed cost, scaling, and kills.

    python -m benchmarks.cluster --json cluster.json
    python -m benchmarks.cluster --only kills --kills 200 --json kills.json

"speed" compares two actors with two child processes. "fixed" measures phases of two steps. "scaling" has environments
that wait instead of computing, so that a few cores can simulate many. "kills" ends actors and nodes at random moments,
half of them while episodes are being transferred, and compares all digests with those of one process.
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
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.measuring import Measurements, Participant, Samples, machine, ratios, take_turns
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress
from benchmarks.systems.layouts import Workload
from benchmarks.systems.own_sampler import OwnSampler
from maml_rl import MultiTaskSampler
from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.meta_env import Task
from maml_rl.envs.task_entries import TaskEntry
from maml_rl.policies import NormalMLPPolicy
from maml_rl.profiling import StageTimer
from maml_rl.seeding import SlotStreams

PARTS = ("speed", "fixed", "scaling", "kills")
RATES, SHARES, FIXED = (
    "Environment steps per second",
    "Share of the child processes' speed",
    "A phase of next to nothing",
)
SCALING, EFFICIENCY = "Steps per second of environments that wait", "Parallel efficiency"
FOUND, RECOVERY = "What was found", "From a killed actor to the next finished unit"
CHILDREN, ACTORS = "2 child processes", "2 Ray actors"
STORE = 200 * 2**20
# A phase that takes longer counts as hung.
_HANG_SECONDS = 180.0
# How many actors start at once, and how long one may take.
_START_AT_ONCE = 4
_START_SECONDS = 180.0
# Tasks, episodes and steps that each actor samples in a phase of "scaling".
_SHARE = 4, 8, 25
# Seconds that a step of a waiting environment takes.
_STEP_SECONDS = 0.002


class WaitingFamily(BatchedFamily):
    """Waits for 2 ms for every step of every slot, of all slots at once.

    A separate wait for each slot would wake a process 500 times a second: 32 such processes would need more than two
    cores for that alone.
    """

    task_description = "number: one that means nothing, uniform in [0, 1]"

    def __init__(self, num_envs: int = 1, *, max_episode_steps: int | None = None) -> None:
        super().__init__(
            num_envs,
            gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32),
            gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32),
            {"number": TaskEntry((), "a number", np.isfinite)},
            max_episode_steps=max_episode_steps,
        )

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw numbers without a meaning."""
        return [{"number": number} for number in random.uniform(size=num_tasks)]

    def _reset_slots(self, mask: NDArray[np.bool_] | None, streams: SlotStreams) -> None:
        pass

    def _step_slots(
        self, actions: NDArray[Any], active: NDArray[np.bool_] | None, streams: SlotStreams
    ) -> tuple[NDArray[np.float64], bool]:
        time.sleep(_STEP_SECONDS * (self.num_envs if active is None else int(active.sum())))
        return np.zeros(self.num_envs), False

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:] = 0.0


if "Waiting-v0" not in gymnasium.registry:
    gymnasium.register("Waiting-v0", vector_entry_point="benchmarks.cluster:WaitingFamily")


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


def own_sampler(workload: Workload) -> OwnSampler:
    """Return a sampler of a workload on the connected cluster, with all its actors started."""
    made = OwnSampler(replace(workload, options={"backend": "ray"}))
    wait_for_actors(made.sampler, workload.num_workers or 1)
    return made


def speed(options: argparse.Namespace, report: Report) -> None:
    """Compare two actors with two child processes, interleaved."""
    sizes = (4, 2, 5) if options.quick else (40, 20, 100)
    workload = Workload("HalfCheetahDir-v5", *sizes, seed=options.seed, num_workers=2)

    def turn(name: str, system: OwnSampler) -> Measurements:
        episodes, _, seconds = system.sample()
        return {name: episodes.num_steps / seconds}

    with (
        cluster_of(1, 1),
        contextlib.closing(own_sampler(workload)) as actors,
        contextlib.closing(OwnSampler(workload)) as children,
    ):
        participants = [
            Participant(CHILDREN, partial(turn, CHILDREN, children)),
            Participant(ACTORS, partial(turn, ACTORS, actors)),
        ]
        warmup = max(options.warmup, 2)
        rows = take_turns(participants, repeats=options.repeats, warmup=warmup, report=progress(options))
    for name, samples in rows.items():
        report.add(RATES, Row(name, samples, "steps/s", str(workload)))
    report.add(SHARES, Row(f"{ACTORS} / {CHILDREN}", ratios(rows[ACTORS], rows[CHILDREN]), "ratio", str(workload)))


def fixed(options: argparse.Namespace, report: Report) -> None:
    """Measure phases of two steps, on two actors."""
    workload = Workload("2DNavigation-v0", 2, 1, 1, seed=options.seed, num_workers=2, adapted=False)
    with cluster_of(1, 1), contextlib.closing(own_sampler(workload)) as actors:
        for _ in range(5):
            actors.sample()
        seconds = [actors.sample()[2] * 1000.0 for _ in range(3 if options.quick else 300)]
    report.add(FIXED, Row("a phase of 2 steps, 2 actors", Samples(seconds), "ms", "2DNavigation-v0 2 x 1 x 1"))


def scaling(options: argparse.Namespace, report: Report) -> None:
    """Sample waiting environments, the same number per actor, on few and on many actors, interleaved."""
    numbers = [1, 2] if options.quick else options.actors
    tasks_per_actor, episodes, steps = (2, 1, 5) if options.quick else _SHARE
    policy = NormalMLPPolicy(2, 1, (8,))

    def turn(number: int, sampler: MultiTaskSampler, tasks: list[Any]) -> Measurements:
        started = time.perf_counter()
        num_steps = sampler.rollout(tasks).num_steps
        return {f"{number} actors": num_steps / (time.perf_counter() - started)}

    largest = max(numbers)
    with cluster_of(-(-largest // 2), largest // 2), contextlib.ExitStack() as stack:
        participants = []
        for number in numbers:
            made = MultiTaskSampler(
                "benchmarks.cluster:Waiting-v0",
                {},
                episodes,
                policy,
                seed=0,
                num_workers=number,
                backend="ray",
                max_episode_steps=steps,
            )
            sampler = stack.enter_context(made)
            wait_for_actors(sampler, number)
            progress(options)(f"{number} actors have started")
            tasks = sampler.sample_tasks(number * tasks_per_actor)
            participants.append(Participant(f"{number} actors", partial(turn, number, sampler, tasks)))
        # The first phases create the environments and choose the size of units.
        warmup = max(options.warmup, 2)
        rows = take_turns(participants, repeats=options.repeats, warmup=warmup, report=progress(options))
    note = f"waiting 2 ms a step, {tasks_per_actor} x {episodes} x {steps} for each actor"
    fewest = numbers[0]
    for number, (name, samples) in zip(numbers, rows.items(), strict=True):
        report.add(SCALING, Row(name, samples, "steps/s", note))
        shares = [share * fewest / number for share in ratios(samples, rows[f"{fewest} actors"]).values]
        compared = f"steps per second and actor, divided by those with {fewest}"
        report.add(EFFICIENCY, Row(name, Samples(shares), "ratio", compared))


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


def kills(options: argparse.Namespace, report: Report) -> None:
    """Sample while actors and nodes are killed."""
    sizes = {"batch_size": 10, "max_episode_steps": 100, "seed": options.seed}
    policy = NormalMLPPolicy(2, 2, (64, 64))

    def digest(sampler: MultiTaskSampler) -> str:
        sampler.seek(0)
        return sampler.rollout(tasks).digest()

    with MultiTaskSampler("2DNavigation-v0", {}, policy=policy, num_workers=0, **sizes) as sampler:
        tasks = sampler.sample_tasks(24)
        expected = digest(sampler)
    changed = hangs = phases = 0
    with cluster_of(2, 2, 2) as cluster:
        timer = Kills(cluster, options)
        with MultiTaskSampler(
            "2DNavigation-v0",
            {},
            policy=policy,
            backend="ray",
            num_workers=6,
            max_restarts=1_000_000,
            timer=timer,
            **sizes,
        ) as sampler:
            wait_for_actors(sampler, 6)
            timer.sampler = sampler
            timer.start()
            while not timer.over:
                timer.replace_nodes()
                started = time.monotonic()
                changed += digest(sampler) != expected
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
        report.add(FOUND, Row(name, Samples([count]), "count", "2DNavigation-v0 24 x 10 x 100, 6 actors on 3 nodes"))
    if timer.latencies:
        report.add(RECOVERY, Row("the next unit", Samples(timer.latencies), "s", "while lost actors start anew"))


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options, ray="the benchmark")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    report = Report("cluster", machine(), chosen(options))
    parts = {each.__name__: each for each in (speed, fixed, scaling, kills)}
    for part in options.only:
        parts[part](options, report)
    finish(report, options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 4, 16, 32], help="numbers of actors of scaling")
    parser.add_argument("--kills", type=int, default=200, help="of actors and nodes")
    parser.add_argument("--minutes", type=float, default=60.0, help="the kills end after, however many there were")
    parser.add_argument("--actors-per-node", type=int, default=9, help="killed actors for each killed node")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.warmup, options.kills = 1, 0, 2
    return options


if __name__ == "__main__":
    main()
