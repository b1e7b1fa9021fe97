"""Growth of speed and memory with the number of environments, up to tens of thousands.

    python -m benchmarks.scale --json scale.json --chart scale.svg

Every size samples whole phases of HalfCheetahDir, tasks x 20 episodes x 100 steps, every task under its own parameters,
and replays the same trajectories as the limit. The peak memory is that of all processes of the sampler together, the
interpreter and its libraries included, during one more phase that is not timed.
"""

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks.hosting import Host
from benchmarks.measuring import Samples, machine, ratios, take_turns
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress, save_figure
from benchmarks.systems.layouts import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATES = "Environment steps per second"
SHARES = "Share of the limit"
MEMORY = "Peak memory of all processes together"
EPISODES_PER_TASK = 20


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options, psutil="the peak memory")
    report = Report("scale", machine(), chosen(options))
    memory: dict[int, Samples] = {}
    with ExitStack() as stack:
        participants = []
        for size in options.sizes:
            workload = workload_of(size, options)
            host = Host(str(workload), "benchmarks.systems.own_sampler:SamplerAndReplay", workload, *_names(size))
            stack.callback(host.close)
            memory[size] = Samples([_peak_gigabytes(host) for _ in range(options.memory_repeats)])
            progress(options)(f"{size} environments: {memory[size].median:.2f} GB")
            participants.append(host.participant())
        rows = take_turns(participants, repeats=options.repeats, warmup=options.warmup, report=progress(options))
    for size in options.sizes:
        layout = str(workload_of(size, options))
        ours, limit = _names(size)
        report.add(RATES, Row(f"{size:,} environments", rows[ours], "steps/s", layout))
        report.add(RATES, Row(f"{size:,} environments, replay", rows[limit], "steps/s", layout))
        report.add(SHARES, Row(f"{size:,} environments", ratios(rows[ours], rows[limit]), "ratio", layout))
        report.add(MEMORY, Row(f"{size:,} environments", memory[size], "GB", layout))
    finish(report, options, chart=_chart)


def workload_of(size: int, options: argparse.Namespace) -> Workload:
    """Return the workload with `size` environments, one per episode."""
    per_task = min(EPISODES_PER_TASK, size)
    return Workload(
        "HalfCheetahDir-v5",
        size // per_task,
        per_task,
        options.horizon,
        seed=options.seed,
        num_workers=options.num_workers,
        adapted=False,
    )


def _names(size: int) -> tuple[str, str]:
    return f"{size} environments", f"{size} environments, replay"


def _peak_gigabytes(host: Host) -> float:
    from benchmarks.memory import PeakMemory

    with PeakMemory(host.pid) as memory:
        host.call("sample")
    return memory.peak / 1e9


def _chart(report: Report, options: argparse.Namespace) -> None:
    """Draw speed and memory over the number of environments."""
    from matplotlib import pyplot

    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
    rates = report.tables[RATES]
    _line(speed, options.sizes, [row for row in rates if "replay" not in row.name], "maml_rl")
    _line(speed, options.sizes, [row for row in rates if "replay" in row.name], "replay: the limit")
    speed.set_ylabel("environment steps per second", fontsize=8)
    speed.legend(fontsize=8)
    _line(memory, options.sizes, report.tables[MEMORY], "all processes")
    memory.set_ylabel("peak memory of all processes, GB", fontsize=8)
    save_figure(figure, report, options.chart)
    pyplot.close(figure)


def _line(panel: "Axes", sizes: list[int], rows: list[Row], label: str) -> None:
    samples = [row.samples for row in rows]
    spread = [one.median - one.low for one in samples], [one.high - one.median for one in samples]
    panel.errorbar(sizes, [one.median for one in samples], spread, marker="o", ms=3, label=label)
    panel.set_xscale("log")
    panel.set_ylim(0.0, 1.05 * max(panel.get_ylim()[1], *(one.high for one in samples)))
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
    panel.minorticks_off()
    panel.set_xlabel("environments", fontsize=8)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.set_defaults(repeats=3)
    parser.add_argument("--sizes", nargs="+", type=int, default=[160, 800, 4_000, 32_000], help="environments")
    parser.add_argument("--horizon", type=int, default=100, help="steps of an episode")
    parser.add_argument("--memory-repeats", type=int, default=2, help="phases whose memory is watched")
    parser.add_argument("--num-workers", type=int, help="worker processes of our sampler; its own default if not given")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.horizon = [4, 40], 5
        options.repeats, options.warmup, options.memory_repeats = 1, 0, 1
    for size in options.sizes:
        if size < 1 or (size > EPISODES_PER_TASK and size % EPISODES_PER_TASK):
            parser.error(f"a size above {EPISODES_PER_TASK} must be a multiple of it, one task each; got {size}")
    return options


if __name__ == "__main__":
    main()
