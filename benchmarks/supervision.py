"""The cost of supervision and transport: the sampler's workers against unsupervised processes.

    python -m benchmarks.supervision --json supervision.json

Both sides sample HalfCheetahDir under one set of parameters per task, by the same loop. On one side are the sampler's
workers: supervised, with their episodes handed to the parent. On the other side is one process per core that samples
its share of the tasks and keeps the episodes. So the share is a lower bound: the difference is the cost of heartbeats,
commands, deadlines and the transfer of episodes together.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

from benchmarks.hosting import Host
from benchmarks.measuring import Measurements, Participant, machine, ratios, take_turns
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress
from benchmarks.systems.layouts import Workload
from maml_rl.machine import usable_cores

RATES = "Environment steps per second"
SHARES = "Share that supervision and transport leave"
SUPERVISED, ALONE = "maml_rl, supervised workers", "unsupervised processes"


class Unwatched:
    """Processes that sample at the same time, each of them its own tasks.

    Args:
        workload: of all of them together.
        stack: closes them.
    """

    def __init__(self, workload: Workload, stack: ExitStack) -> None:
        count = min(usable_cores(), workload.num_tasks)
        self._hosts = []
        for index in range(count):
            tasks = (index + 1) * workload.num_tasks // count - index * workload.num_tasks // count
            part = replace(workload, num_tasks=tasks, num_workers=0, env_kwargs={"num_threads": 1})
            host = Host(f"{ALONE}, {index}", "benchmarks.systems.own_sampler:SamplerAndReplay", part, ALONE, "")
            stack.callback(host.close)
            self._hosts.append((tasks, host))
        self._steps_per_task = workload.episodes_per_task * workload.horizon
        self._pool = stack.enter_context(ThreadPoolExecutor(count))

    def turn(self) -> Measurements:
        """Sample once, until the last process has finished."""
        runs = [(tasks, self._pool.submit(host.call, "sample")) for tasks, host in self._hosts]
        steps = [tasks * self._steps_per_task for tasks, _ in runs]
        seconds = [count / run.result()[ALONE] for count, (_, run) in zip(steps, runs, strict=True)]
        return {ALONE: sum(steps) / max(seconds)}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options)
    report = Report("supervision", machine(), chosen(options))
    workload = Workload("HalfCheetahDir-v5", 40, 20, 100, seed=options.seed)
    if options.quick:
        workload = replace(workload, num_tasks=2, episodes_per_task=2, horizon=5)
    with ExitStack() as stack:
        ours = Host(SUPERVISED, "benchmarks.systems.own_sampler:SamplerAndReplay", workload, SUPERVISED, "")
        stack.callback(ours.close)
        participants = [
            Participant(SUPERVISED, lambda: ours.call("sample")),
            Participant(ALONE, Unwatched(workload, stack).turn),
        ]
        rows = take_turns(participants, repeats=options.repeats, warmup=options.warmup, report=progress(options))
    for name, samples in rows.items():
        report.add(RATES, Row(name, samples, "steps/s", str(workload)))
    report.add(SHARES, Row("supervised / unwatched", ratios(rows[SUPERVISED], rows[ALONE]), "ratio", str(workload)))
    finish(report, options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.warmup = 1, 0
    return options


if __name__ == "__main__":
    main()
