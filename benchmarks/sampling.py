"""Sampling speed against the limit set by the physics, and against other systems that do the same job.

    python -m benchmarks.sampling --json sampling.json --chart sampling.svg

Every system collects M tasks x B episodes x T steps under a policy with separate parameters for every task, from the
reset of the environments to the finished arrays of observations, actions and rewards. Those with one process or object
per environment hold 160 of them and collect in waves of whole tasks, which suits them best; the slowest collect one
wave only, since more would take longer without changing the result.
"""

import argparse
import importlib.util
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.hosting import Host
from benchmarks.measuring import Participant, Samples, machine, of_cpu_time, ratios, take_turns
from benchmarks.reporting import HOW_TO_INSTALL, Report, Row, check_packages, chosen, common_options, finish, progress
from benchmarks.systems.layouts import Job, Workload

PARTS = ("limit", "others")
CHEETAH = "HalfCheetah, environment steps per second"
PHYSICS = "Other workloads with physics, environment steps per second"
MORE = ("Walker2DRandParams-v5", "AntDir-v5", "HumanoidDir-v5")
ENVS = ("HalfCheetahDir-v5", *MORE)
SHARES = "Share of the limit"
TIMES = "How many times as fast as others, HalfCheetah"


@dataclass(frozen=True, slots=True)
class Other:
    """A system to compare with ours.

    Attributes:
        name: of its row.
        make: function that makes it, called with the name, the job, and `arguments`.
        layout: how its environments are arranged.
        needs: the package that must be installed.
        arguments: further arguments of `make`.
        one_wave: collect one wave of tasks only.
    """

    name: str
    make: str
    layout: str
    needs: str = "gymnasium"
    arguments: tuple[Any, ...] = ()
    one_wave: bool = False


OTHERS = (
    Other("envpool", "envpool_envs:make_sync", "{slots} environments", "envpool"),
    Other(
        "workers with queues",
        "queue_workers:make_queue_workers",
        "8 processes, {slots} environment objects",
        arguments=(8,),
    ),
    Other(
        "gymnasium SyncVectorEnv",
        "gymnasium_envs:make_sync",
        "{slots} environment objects in one process",
        one_wave=True,
    ),
    Other(
        "Stable-Baselines3 SubprocVecEnv",
        "stable_baselines:make_subproc",
        "{slots} processes",
        "stable_baselines3",
        one_wave=True,
    ),
    Other("gymnasium AsyncVectorEnv", "gymnasium_envs:make_async", "{slots} processes", one_wave=True),
)


@dataclass(slots=True)
class Plan:
    """The participants, and the remarks about them.

    Attributes:
        participants: in the order of the table.
        places: table and layout of each row.
        quotients: (table, name, layout, row above, row below).
        remarks: for the reader.
    """

    participants: list[Participant] = field(default_factory=list)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    quotients: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def fill(self, report: Report, rows: dict[str, Samples]) -> None:
        """Write the tables."""
        for name, samples in rows.items():
            table, layout = self.places[name]
            report.add(table, Row(name, samples, "steps/s", layout))
        for table, name, layout, above, below in self.quotients:
            report.add(table, Row(name, ratios(rows[above], rows[below]), "ratio", layout))
        report.remarks += self.remarks


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options, psutil="the CPU time")
    report = Report("sampling", machine(), chosen(options))
    plan = Plan()
    with ExitStack() as stack:
        _plan_physics(plan, stack, options)
        if "others" in options.only:
            _plan_others(plan, stack, options)
        rows = take_turns(plan.participants, repeats=options.repeats, warmup=options.warmup, report=progress(options))
    plan.fill(report, rows)
    finish(report, options)


def workloads(options: argparse.Namespace) -> tuple[Workload, ...]:
    """Return the workloads with physics; the first is what others are compared on."""
    cheetah = Workload("HalfCheetahDir-v5", 40, 20, 100, seed=options.seed, num_workers=options.num_workers)
    if options.quick:
        cheetah = replace(cheetah, num_tasks=2, episodes_per_task=2, horizon=5)
        return cheetah, *(replace(cheetah, env=env) for env in (MORE if options.env else MORE[:1]))
    return cheetah, replace(cheetah, num_tasks=8, horizon=200), *(replace(cheetah, env=env) for env in MORE)


def _plan_physics(plan: Plan, stack: ExitStack, options: argparse.Namespace) -> None:
    first, *more = workloads(options)
    asked = [workload for workload in (first, *more) if not options.env or workload.env in options.env]
    for workload in asked if "limit" in options.only else (first,):
        _plan_replay(plan, stack, workload, CHEETAH if workload is first else PHYSICS)


def _plan_replay(plan: Plan, stack: ExitStack, workload: Workload, table: str) -> None:
    """Plan a workload with physics, and its limit right after it."""
    ours, limit = f"maml_rl, {workload}", f"replay, {workload}"
    host = _host(stack, ours, "own_sampler:SamplerAndReplay", workload, ours, limit, True)
    plan.participants.append(host.participant())
    for name in (str, of_cpu_time):
        plan.places[name(ours)] = table, _placement(workload)
        plan.places[name(limit)] = table, "the same trajectories by plain mj_step, one process per core"
        plan.quotients.append((SHARES, name(str(workload)), _placement(workload), name(ours), name(limit)))


def _plan_others(plan: Plan, stack: ExitStack, options: argparse.Namespace) -> None:
    workload = workloads(options)[0]
    job = Job(
        workload.num_tasks, workload.episodes_per_task, workload.horizon, workload.hidden_sizes, seed=options.seed
    )
    for other in OTHERS:
        if importlib.util.find_spec(other.needs) is None:
            plan.remarks.append(
                f"{other.name} was left out, because {other.needs} is not installed; try: {HOW_TO_INSTALL}"
            )
            continue
        its_job = replace(job, num_tasks=job.tasks_per_wave) if other.one_wave else job
        host = _host(stack, other.name, other.make, other.name, its_job, *other.arguments)
        plan.participants.append(host.participant())
        layout = other.layout.format(slots=job.slots)
        plan.places[other.name] = CHEETAH, layout
        plan.quotients.append((TIMES, f"maml_rl / {other.name}", layout, f"maml_rl, {workload}", other.name))


def _host(stack: ExitStack, name: str, make: str, *arguments: Any) -> Host:
    host = Host(name, f"benchmarks.systems.{make}", *arguments)
    stack.callback(host.close)
    return host


def _placement(workload: Workload) -> str:
    return "default placement" if workload.num_workers is None else f"num_workers={workload.num_workers}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--env", nargs="+", choices=ENVS, help="families that the limit is measured for (default: all)")
    parser.add_argument("--num-workers", type=int, help="worker processes of our sampler; its own default if not given")
    options = parser.parse_args(arguments)
    if options.env and "others" in options.only:
        parser.error("other systems are compared on HalfCheetahDir-v5; leave out --env, or add --only limit")
    if options.quick:
        options.repeats, options.warmup = 1, 1
    return options


if __name__ == "__main__":
    main()
