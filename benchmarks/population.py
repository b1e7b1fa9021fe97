"""The cost of populations: `PopulationEvaluator` against the sampler, in the same slots and with the same policy.

    python -m benchmarks.population --json population.json

256 members are evaluated on one episode each, every member with weights of its own. The sampler fills as many slots
with tasks of 16 episodes, as meta-learning does: its forward passes multiply 16 rows by each set of weights, those of a
population one row. A third row measures the sampler with the population's shape, 256 tasks of one episode.
"""

import argparse
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from benchmarks.hosting import Host
from benchmarks.measuring import Participant, machine, ratios, take_turns
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress
from benchmarks.systems.layouts import Workload

RATES = "Environment steps per second"
SHARES = "Share of the sampler's speed"
EVALUATOR = "PopulationEvaluator"


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options)
    report = Report("population", machine(), chosen(options))
    population = Workload(
        "HalfCheetahDir-v5",
        options.members,
        1,
        options.horizon,
        seed=options.seed,
        num_workers=options.num_workers,
        adapted=False,
    )
    tasks = replace(population, num_tasks=options.members // options.task_size, episodes_per_task=options.task_size)
    samplers = {f"MultiTaskSampler, {workload}": workload for workload in (tasks, population)}
    with ExitStack() as stack:
        evaluator = Host(EVALUATOR, "benchmarks.systems.own_populations:Populations", population, EVALUATOR)
        stack.callback(evaluator.close)
        participants = [evaluator.participant()]
        for name, workload in samplers.items():
            host = Host(name, "benchmarks.systems.own_sampler:SamplerAndReplay", workload, name, "")
            stack.callback(host.close)
            participants.append(Participant(name, partial(host.call, "sample")))
        rows = take_turns(participants, repeats=options.repeats, warmup=options.warmup, report=progress(options))
    for name, samples in rows.items():
        report.add(RATES, Row(name, samples, "steps/s", str(samplers.get(name, population))))
    for name, workload in samplers.items():
        share = ratios(rows[EVALUATOR], rows[name])
        report.add(SHARES, Row(f"{EVALUATOR} / {name}", share, "ratio", str(workload)))
    finish(report, options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.add_argument("--members", type=int, default=256, help="of the population")
    parser.add_argument("--task-size", type=int, default=16, help="episodes of each task of the sampler")
    parser.add_argument("--horizon", type=int, default=200, help="steps of an episode")
    parser.add_argument("--num-workers", type=int, help="worker processes; the default placement if not given")
    options = parser.parse_args(arguments)
    if options.quick:
        options.members, options.task_size, options.horizon, options.repeats, options.warmup = 4, 2, 5, 1, 0
    if options.task_size < 1 or options.members < 1 or options.members % options.task_size:
        parser.error(f"--members must be a multiple of --task-size, got {options.members} and {options.task_size}")
    return options


if __name__ == "__main__":
    main()
