"""The cost of an iteration whose update is where the episodes are, measured and extrapolated to more actors.

Costs are seconds of processor time, which other work on the machine does not change. The driver sends a request to
every actor as a message, and receives a vector of the size of the parameters for each block of tasks.
"""

import argparse
import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import psutil
import torch

from benchmarks.measuring import Samples
from benchmarks.reporting import Report, Row, progress
from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.derivatives import Answer, ParameterLayout, blocks_of, cut
from maml_rl.experiment.batch_metrics import count_steps, digest_of, policy_spread
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.machine import intra_op_threads

COSTS, MEASURED = "Costs of an iteration (MAML-TRPO)", "Iterations here, and what the model says of them"
MEMORY = "The driver in an iteration of many tasks of 2D navigation, 20 x 100 (MAML-TRPO, update in the actors)"
SPEEDUP = "Modeled speed-up of a whole iteration over one core"
SECONDS = "Modeled seconds of a whole iteration"
ACTORS, TASKS = (16, 64, 256, 2048), (40, 400, 4000)
# Episodes per task and phase, and their steps.
_EPISODES, _STEPS = 20, 100
_FAMILY = "HalfCheetahDir-v5"


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in seconds of processor time, unless stated otherwise.

    Attributes:
        sampling: of a task, in an actor: all phases, advantages and adaptation.
        updating: of a task, in an actor: all operations of the update.
        message: of the driver, to one actor and back.
        request: of the driver, for what is put into the store once for all actors.
        block: of the driver, for the vectors of one block in one request.
        waiting: of the driver, for each second in which it supervises working actors.
        requests: their number in an iteration.
        answers: number of those that are answered with vectors.
        samples_per_task: of a phase; determines the chunks of tasks.
        width: of the policy's widest layer.
    """

    sampling: float
    updating: float
    message: float
    request: float
    block: float
    waiting: float
    requests: float
    answers: float
    samples_per_task: int
    width: int

    def num_blocks(self, num_tasks: int) -> int:
        """Return the number of blocks into which a batch is cut."""
        chunks = cut(num_tasks, self.samples_per_task, self.width, torch.device("cpu"))
        return len(blocks_of(num_tasks, chunks))

    def of_driver(self, num_actors: int, num_tasks: int) -> float:
        """Return seconds of the driver in an iteration, in which actors wait for it."""
        blocks = self.num_blocks(num_tasks)
        # Blocks are sampled by whichever actor is free; later requests go to each actor once.
        messages = blocks + self.requests * min(num_actors, blocks)
        return messages * self.message + (self.requests + 1) * self.request + self.answers * blocks * self.block

    def of_tasks(self, num_tasks: float) -> float:
        """Return seconds of one core for the work on tasks."""
        return num_tasks * (self.sampling + self.updating)

    def of_iteration(self, num_actors: int, num_tasks: int) -> float:
        """Return the seconds of an iteration on actors: the largest share of the tasks, and then the driver."""
        return self.of_largest_share(num_actors, num_tasks) + self.of_driver(num_actors, num_tasks)

    def of_largest_share(self, num_actors: int, num_tasks: int) -> float:
        """Return the seconds of the actor that has most blocks."""
        blocks = self.num_blocks(num_tasks)
        return self.of_tasks(-(-blocks // min(num_actors, blocks)) * num_tasks / blocks)


@dataclass(slots=True)
class Counted:
    """Counts of the replies that the driver received.

    Attributes:
        requests: how many.
        answers: number of those with vectors.
        num_bytes: of the replies.
    """

    requests: int = 0
    answers: int = 0
    num_bytes: int = 0


def experiment_of(num_tasks: int, family: str = _FAMILY, **settings: Any) -> Experiment:
    """Return MAML-TRPO on tasks of 20 episodes of 100 steps."""
    values = {
        "env-name": family,
        "meta-batch-size": num_tasks,
        "fast-batch-size": _EPISODES,
        "max-episode-steps": _STEPS,
        "hidden-sizes": [64, 64],
        "num-batches": 1,
        "num-workers": 0,
        **settings,
    }
    return make_experiment(Config.from_mapping(Mapping("the benchmark", values)))


def iterate(experiment: Experiment, sampler: Any) -> dict[str, float]:
    """Carry out one iteration of training, and return the seconds of this process: `collect` and `update`."""
    learner = experiment.metalearner
    started = time.process_time()
    batch = learner.collect(sampler, sampler.sample_tasks(experiment.config.meta_batch_size))
    collected = time.process_time()
    hosts = learner.hosts_of(batch)
    policy_spread(learner.policy, hosts)
    learner.learn(batch, 0)
    count_steps(hosts), learner.returns(batch), learner.infos(batch), digest_of(hosts)
    return {"collect": collected - started, "update": time.process_time() - collected}


@contextlib.contextmanager
def counting(sampler: Any) -> Iterator[Counted]:
    """Count the replies of a sampler's actors."""
    counted, carrier = Counted(), sampler._workers.backend
    carry_out: Callable[..., Any] = carrier.carry_out

    def carry_and_count(request: Any, batch: Any) -> Iterator[Any]:
        counted.requests += request.operation is not None
        vectors = False
        for block, reply in carry_out(request, batch):
            counted.num_bytes += len(pickle.dumps(reply)) if reply is not None else 0
            vectors |= isinstance(reply, Answer) and bool(reply.sums)
            yield block, reply
        counted.answers += vectors

    carrier.carry_out = carry_and_count
    try:
        yield counted
    finally:
        del carrier.carry_out


def whole(options: argparse.Namespace, report: Report) -> None:
    """Measure costs, model iterations on many actors, and check the model where an iteration can be measured."""
    from benchmarks.cluster import actor_processes, cluster_of, wait_for_actors

    num_tasks = 4 if options.quick else 16
    here = experiment_of(num_tasks)
    with here.make_sampler() as sampler, intra_op_threads(1):
        # The first iteration creates the environments.
        own = [iterate(here, sampler) for _ in range(options.repeats + 1)][1:]
    size = ParameterLayout(here.policy).size
    with cluster_of(1, 1):
        message, request = _messages(options, wait_for_actors)
        progress(options)("the costs of messages are measured")
        runs: dict[int, list[tuple[float, float, float, Counted]]] = {}
        for num_actors in (1, 2):
            there = experiment_of(num_tasks, backend="ray", update="workers")
            with there.make_sampler(num_workers=num_actors) as sampler:
                wait_for_actors(sampler, num_actors)
                runs[num_actors] = []
                for _ in range(options.repeats + 1):
                    before = sum(_seconds_of(process) for process in actor_processes())
                    started = time.perf_counter()
                    with counting(sampler) as counted:
                        of_driver = sum(iterate(there, sampler).values())
                    took = time.perf_counter() - started
                    of_actors = sum(_seconds_of(process) for process in actor_processes()) - before
                    runs[num_actors].append((took, of_driver, of_actors, counted))
                    progress(options)(f"an iteration on {num_actors} actors took {took:.1f} s")
    last = runs[2][-1][3]
    costs = Costs(
        sampling=_median([each["collect"] for each in own]) / num_tasks,
        updating=_median([each["update"] for each in own]) / num_tasks,
        message=_median(message),
        request=_median(request),
        block=_merge_seconds(size),
        waiting=0.0,
        requests=last.requests,
        answers=last.answers,
        samples_per_task=_EPISODES * _STEPS,
        width=ParameterLayout(here.policy).width,
    )
    # The remaining cost is measured on one actor; two must confirm it.
    left = [of_driver - costs.of_driver(1, num_tasks) for _, of_driver, _, _ in runs[1][1:]]
    costs = replace(costs, waiting=max(0.0, _median(left)) / _median([took for took, *_ in runs[1][1:]]))
    note = f"{_FAMILY}, {_EPISODES} x {_STEPS} before and after one inner step, {size:,} parameters"
    for name, value, unit in (
        ("sampling and adaptation of a task", costs.sampling, "s"),
        ("update of a task", costs.updating, "s"),
        ("driver: a message to an actor and back", costs.message, "s"),
        ("driver: a request", costs.request, "s"),
        ("driver: the vectors of a block", costs.block, "s"),
        ("driver: a second of waiting", costs.waiting, "s"),
        ("requests of an iteration", costs.requests, "count"),
        ("of these with vectors", costs.answers, "count"),
    ):
        report.add(COSTS, Row(name, Samples([value]), unit, note))
    for num_actors, measured in runs.items():
        wall, of_drivers, of_actor_processes, messages = zip(*measured[1:], strict=True)
        of = f"{num_actors} actor{'s' * (num_actors > 1)}"
        of_driver_modeled = costs.of_driver(num_actors, num_tasks) + costs.waiting * _median(list(wall))
        model = {
            "seconds": (list(wall), costs.of_iteration(num_actors, num_tasks), "s"),
            "driver's seconds of a processor": (list(of_drivers), of_driver_modeled, "s"),
            "actors' seconds of a processor": (list(of_actor_processes), costs.of_tasks(num_tasks), "s"),
        }
        for what, (values, modeled, unit) in model.items():
            report.add(MEASURED, Row(f"{of}: {what}", Samples(values), unit, f"{num_tasks} tasks"))
            report.add(MEASURED, Row(f"{of}: {what}, modeled", Samples([modeled]), unit, f"{num_tasks} tasks"))
        received = [each.num_bytes for each in messages]
        report.add(MEASURED, Row(f"{of}: bytes received", Samples(received), "bytes", f"{num_tasks} tasks"))
    for tasks in TASKS:
        alone = costs.of_tasks(tasks)
        for actors in ACTORS:
            name, modeled = f"{tasks} tasks, {actors} actors", costs.of_iteration(actors, tasks)
            of_driver = costs.of_driver(actors, tasks) + costs.waiting * costs.of_largest_share(actors, tasks)
            share = of_driver / (of_driver + alone)
            of_driver_share = f"the driver's share of all seconds of processors is {share:.1%}"
            report.add(SPEEDUP, Row(name, Samples([alone / modeled]), "ratio", of_driver_share))
            report.add(SECONDS, Row(name, Samples([modeled]), "s", note))
        cores = next((number for number in range(1, 4096) if costs.of_iteration(number, tasks) < alone / 64), None)
        found = "no cluster" if cores is None else f"a cluster of {cores} actors or more"
        report.remarks.append(f"{tasks} tasks: {found} is faster than one machine of 64 cores without Ray.")


def memory(options: argparse.Namespace, report: Report) -> None:
    """Measure what the driver needs in one iteration of many tasks, with few requests of the update."""
    from benchmarks.cluster import cluster_of, wait_for_actors

    num_tasks = 8 if options.quick else options.tasks
    process, over, sizes = psutil.Process(), threading.Event(), [0]
    short = {"cg-iters": 1, "ls-max-steps": 2}
    settings = {"backend": "ray", "update": "workers", "algorithm-settings": short}

    def watch() -> None:
        while not over.wait(0.05):
            sizes.append(process.memory_info().rss)

    with cluster_of(1, 1):
        experiment = experiment_of(num_tasks, "2DNavigation-v0", **settings)
        with experiment.make_sampler(num_workers=2) as sampler:
            wait_for_actors(sampler, 2)
            idle, started = process.memory_info().rss, time.perf_counter()
            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                with counting(sampler) as counted:
                    of_driver = sum(iterate(experiment, sampler).values())
            finally:
                over.set()
                watcher.join()
            took = time.perf_counter() - started
    note = f"{num_tasks} tasks on 2 actors, {', '.join(f'{key} {value}' for key, value in short.items())}"
    for name, value, unit in (
        ("peak above idle", float(max(sizes) - idle), "bytes"),
        ("received", float(counted.num_bytes), "bytes"),
        ("requests", float(counted.requests), "count"),
        ("seconds of a processor", of_driver, "s"),
        ("seconds", took, "s"),
    ):
        report.add(MEMORY, Row(name, Samples([value]), unit, note))


def _one_task_each(num_tasks: int, *rest: Any) -> list[slice]:
    """Return chunks of one task."""
    return [slice(task, task + 1) for task in range(num_tasks)]


def _messages(options: argparse.Namespace, wait_for_actors: Callable[[Any, int], None]) -> tuple[list[float], ...]:
    """Return the driver's seconds for a message, and for a request apart from its messages, on two actors."""
    from maml_rl.samplers import hosting

    few, many = (2, 4) if options.quick else (4, 64)
    messages, requests = [], []
    experiment = experiment_of(
        many, "2DNavigation-v0", **{"backend": "ray", "update": "workers", "max-episode-steps": 1}
    )
    rule = experiment.metalearner.rule
    assert rule is not None
    with experiment.make_sampler(num_workers=2) as sampler:
        wait_for_actors(sampler, 2)
        for turn in range(options.repeats + 1):
            seconds = []
            for num_tasks in (few, many):
                tasks = sampler.sample_tasks(num_tasks)
                with patch.object(hosting, "cut", _one_task_each):
                    started = time.process_time()
                    hosts = sampler.sample_on_hosts(tasks, 0, rule)
                    seconds.append(time.process_time() - started)
            assert isinstance(hosts, hosting.RemoteHosts)
            started = time.process_time()
            for _ in range(5):
                count_steps(hosts)
            asked = (time.process_time() - started) / 5
            if turn:
                messages.append(max(0.0, seconds[1] - seconds[0]) / (many - few))
                requests.append(max(0.0, asked - 2 * messages[-1]))
    return messages, requests


def _merge_seconds(size: int) -> float:
    """Return seconds for unpickling and adding up the vectors of a block."""
    count = 64
    pickled = [pickle.dumps(Answer((torch.zeros(6),), (torch.zeros(size),))) for _ in range(count)]
    times = []
    with intra_op_threads(1):
        for _ in range(5):
            started = time.process_time()
            Answer.merge([pickle.loads(each) for each in pickled])
            times.append((time.process_time() - started) / count)
    return _median(times)


def _seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _median(values: list[float]) -> float:
    return Samples(values).median
