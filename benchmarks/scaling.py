"""Growth of speed with the number of cores: sampling and its replay, the update, the iteration.

    python -m benchmarks.scaling --json scaling.json --chart scaling.svg

HalfCheetahDir, 40 tasks x 20 episodes x 100 steps, on 1, 2, 4, ... of the cores of this machine, the most first. From
two cores on, updates are in threads and in workers. Each row is printed, and written, as soon as it is known. With few
cores the counts say what happens with more: slots of the busiest worker, bytes sent, seconds under Python's lock, and
the CPU time of the main process, for which all wait, with `--workers` on any number of cores.
`--environments` measures on all cores how speed and memory grow with the number of environments.
"""

import argparse
import importlib.util
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic

from benchmarks.hosting import Host
from benchmarks.measuring import Measurements, Samples, machine, ratios
from benchmarks.reporting import (
    Report,
    Row,
    check_packages,
    chosen,
    common_options,
    finish,
    number,
    progress,
    write_json,
)
from benchmarks.systems.layouts import Workload
from benchmarks.systems.scaled import IN_THREADS, IN_WORKERS, LIMIT, SAMPLER, THREADS
from maml_rl.machine import usable_cores
from maml_rl.samplers.phase import slots_together, split_slots

RATES = "Environment steps per second"
SHARES = "Sampling, share of the replay"
SECONDS = "Seconds of an iteration"
STAGES = "Seconds of the stages of its sampling, of the busiest worker"
BUSIEST = "Slots of the busiest worker over the mean"
COUNTS = "Counts"
ENVIRONMENTS = "All cores, environment steps per second"
MEMORY = "Peak memory of all processes together"
# Tasks, episodes of each, and workers.
CASES = ((40, 20, 16), (40, 20, 12), (20, 10, 16), (5, 40, 8), (80, 1, 16))
EPISODES_PER_TASK = 20


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options)
    report = Report("scaling", machine(), chosen(options))
    workload = Workload("HalfCheetahDir-v5", 40, EPISODES_PER_TASK, 100, seed=options.seed, adapted=False)
    if options.quick:
        workload = replace(workload, num_tasks=2, episodes_per_task=2, horizon=5)
    for case in CASES:
        value = _busiest_over_mean(*case)
        _add(report, options, BUSIEST, "{} tasks x {} episodes, {} workers".format(*case), Samples([value]), "ratio")
    started = monotonic()
    for index, cores in enumerate(options.cores):
        weights = [1.0 / each + 0.4 for each in options.cores[index:]]
        # Some are left for the counts.
        left = 50.0 * options.minutes - (monotonic() - started) if options.minutes else None
        seconds = None if left is None else left * weights[0] / sum(weights)
        _measure_cores(report, options, workload, cores, seconds)
    for size in options.environments:
        _measure_environments(report, options, workload_of(size, options), size)
    finish(report, options)


def _busiest_over_mean(tasks: int, episodes: int, workers: int) -> float:
    slots = tasks * episodes
    parts = split_slots(slots, workers, slots_together(tasks, episodes, workers))
    return max(float(part.stop - part.start) for part in parts) * workers / slots


def _measure_cores(
    report: Report, options: argparse.Namespace, workload: Workload, cores: int, seconds: float | None
) -> None:
    """Add the rows of a number of cores, measured for about so many seconds."""
    started = monotonic()
    with ExitStack() as stack:
        host = Host(f"{cores} cores", "benchmarks.systems.scaled:Scaled", workload, cores, options.threads)
        stack.callback(host.close)
        turns: list[Measurements] = []
        made = monotonic()
        while len(turns) < options.warmup + options.repeats:
            turns.append(host.turn())
            each = (monotonic() - made) / len(turns)
            # The first turns also start workers.
            enough = len(turns) > options.warmup
            if enough and seconds is not None and monotonic() - started + each > seconds:
                break
        counted = turns[options.warmup :]
        # A stage may be missing in a turn.
        names = [name for name in counted[0] if all(name in turn for turn in counted)]
        rows = {name: Samples([turn[name] for turn in counted]) for name in names}
        on_cores = f"{cores} core{'s' * (cores > 1)}"
        for name in (SAMPLER, LIMIT, THREADS):
            if name in rows:
                _add(report, options, RATES, f"{on_cores}, {name}", rows[name], "steps/s")
        for name in (SAMPLER, THREADS):
            if name in rows:
                _add(report, options, SHARES, f"{on_cores}, {name}", ratios(rows[name], rows[LIMIT]), "ratio")
        for name in (*IN_THREADS, *IN_WORKERS):
            if name in rows:
                _add(report, options, SECONDS, f"{on_cores}, {name}", rows[name], "s")
        for name, samples in rows.items():
            if name.startswith("stage "):
                _add(report, options, STAGES, f"{on_cores}, {name.removeprefix('stage ')}", samples, "s")
        if cores == options.cores[0]:
            for name, (value, unit) in host.call("main_process", options.workers).items():
                _add(
                    report, options, COUNTS, f"{options.workers} workers, main process, {name}", Samples([value]), unit
                )
        sent, size = host.call("messages")
        _add(report, options, COUNTS, f"{on_cores}, messages to workers in a phase", Samples([sent]), "messages")
        _add(report, options, COUNTS, f"{on_cores}, sent to workers in a phase", Samples([size]), "bytes")
        if cores == 1:
            whole, locked = host.call("under_the_lock")
            _add(report, options, COUNTS, "update on one core, profiled", Samples([whole]), "s")
            _add(report, options, COUNTS, "of these under Python's lock", Samples([locked]), "s")


def _add(report: Report, options: argparse.Namespace, title: str, name: str, samples: Samples, unit: str) -> None:
    """Add a row, and show and write it at once."""
    report.add(title, Row(name, samples, unit))
    progress(options)(f"{title}: {name} {number(samples.median)} {unit}")
    if options.json is not None:
        write_json(report, options.json)


def workload_of(size: int, options: argparse.Namespace) -> Workload:
    """Return the workload with `size` environments, one per episode."""
    per_task, horizon = min(EPISODES_PER_TASK, size), 5 if options.quick else 100
    return Workload("HalfCheetahDir-v5", size // per_task, per_task, horizon, seed=options.seed, adapted=False)


def _measure_environments(report: Report, options: argparse.Namespace, workload: Workload, size: int) -> None:
    """Add the rows of a number of environments, on all cores; the memory is measured in a phase of its own."""
    with ExitStack() as stack:
        host = Host(str(workload), "benchmarks.systems.own_sampler:SamplerAndReplay", workload, SAMPLER, LIMIT)
        stack.callback(host.close)
        if importlib.util.find_spec("psutil") is not None:
            from benchmarks.memory import PeakMemory

            with PeakMemory(host.pid) as memory:
                host.call("sample")
            _add(report, options, MEMORY, f"{size:,} environments", Samples([memory.peak / 1e9]), "GB")
        turns = [host.turn() for _ in range(options.warmup + options.repeats)][options.warmup :]
        rows = {name: Samples([turn[name] for turn in turns]) for name in turns[0]}
        for name, samples in {**rows, "share": ratios(rows[SAMPLER], rows[LIMIT])}.items():
            unit = "ratio" if name == "share" else "steps/s"
            _add(report, options, ENVIRONMENTS, f"{size:,} environments, {name}", samples, unit)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.set_defaults(repeats=3)
    most = usable_cores()
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    parser.add_argument("--cores", nargs="*", type=int, default=[most, *reversed(powers)], help="numbers of cores")
    parser.add_argument(
        "--workers", type=int, default=16, help="worker processes with which the main process's costs are counted"
    )
    parser.add_argument(
        "--minutes", type=float, help="take about so long: as many rounds as fit, at least one after the warm-up"
    )
    parser.add_argument(
        "--no-threads", dest="threads", action="store_false", help="on several cores measure worker processes only"
    )
    parser.add_argument("--environments", nargs="*", type=int, default=[], help="numbers of environments, on all cores")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.warmup, options.workers = 1, 0, 2
    for cores in options.cores:
        if not 1 <= cores <= most:
            parser.error(f"--cores must be from 1 to {most}, those of this machine, got {cores}")
    for size in options.environments:
        if size < 1 or (size > EPISODES_PER_TASK and size % EPISODES_PER_TASK):
            parser.error(f"a size above {EPISODES_PER_TASK} must be a multiple of it, one task each; got {size}")
    return options


if __name__ == "__main__":
    main()
