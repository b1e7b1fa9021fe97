"""The cost of a whole MAML-TRPO iteration, by stage, and its growth with the sizes.

    python -m benchmarks.iteration --json iteration.json --chart iteration.svg

The iteration is compared with the time that workers with queues need for its sampling, and its update with the
straightforward double-backward version on the same episodes. Every turn is one iteration from the same parameters.
"""

import argparse
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.hosting import Host
from benchmarks.measuring import Measurements, Participant, Samples, machine, ratios, take_turns
from benchmarks.reporting import (
    Report,
    Row,
    bars,
    check_packages,
    chosen,
    common_options,
    finish,
    progress,
    save_figure,
)
from benchmarks.systems.layouts import Job, Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = ("whole", "growth")
SECONDS = "Seconds of one iteration"
STAGES = "Stages, share of the iteration"
SHARES = "Share of others' time"
QUEUES = "workers with queues, the sampling alone"
# Quantities that grow: their sizes, and those of --quick; everything else is as in `base`.
AXES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "tasks": ((10, 20, 40, 80), (1, 2)),
    "episodes per task": ((5, 10, 20, 40), (1, 2)),
    "steps": ((25, 50, 100, 200), (3, 5)),
    "hidden units": ((32, 64, 128, 256), (4, 8)),
    "inner steps": ((1, 2, 3), (1, 2)),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options)
    report = Report("iteration", machine(), chosen(options))
    if "whole" in options.only:
        _measure_whole(report, options)
    if "growth" in options.only:
        _measure_growth(report, options)
    finish(report, options, chart=_chart)


def base(options: argparse.Namespace) -> Workload:
    """Return the workload of the main result."""
    workload = Workload("HalfCheetahDir-v5", 40, 20, 100, seed=options.seed, num_workers=options.num_workers)
    return replace(workload, num_tasks=2, episodes_per_task=2, horizon=5) if options.quick else workload


def _measure_whole(report: Report, options: argparse.Namespace) -> None:
    workload = base(options)
    job = Job(
        workload.num_tasks, workload.episodes_per_task, workload.horizon, workload.hidden_sizes, seed=options.seed
    )
    with ExitStack() as stack:
        ours = Host("maml_rl", "benchmarks.systems.whole_iteration:IterationAndReference", workload, 1)
        stack.callback(ours.close)
        queues = Host(QUEUES, "benchmarks.systems.queue_workers:make_queue_workers", QUEUES, job, 8, True)
        stack.callback(queues.close)

        def sampling_of_an_iteration() -> Measurements:
            # Two phases, before and after adaptation; this design has no tasks, so the second is like the first.
            return {QUEUES: sum(job.steps / queues.turn()[QUEUES] for _ in range(2))}

        rows = take_turns(
            [ours.participant(), Participant(QUEUES, sampling_of_an_iteration)],
            repeats=options.repeats,
            warmup=options.warmup,
            report=progress(options),
        )
    for name in ("iteration", "sampling", "update", "reference update", QUEUES):
        report.add(SECONDS, Row(name, rows[name], "s", str(workload)))
    shares = {
        name.removeprefix("stage "): ratios(samples, rows["iteration"])
        for name, samples in rows.items()
        if name.startswith("stage ")
    }
    rounds = zip(*(samples.values for samples in shares.values()), strict=True)
    shares["everything else"] = Samples([1.0 - sum(of_round) for of_round in rounds])
    for name, samples in shares.items():
        report.add(STAGES, Row(name, samples, "share"))
    for above, below in (("iteration", QUEUES), ("update", "reference update")):
        report.add(SHARES, Row(f"{above} / {below}", ratios(rows[above], rows[below]), "ratio", str(workload)))


def growth_sizes(options: argparse.Namespace) -> dict[str, list[tuple[int, Workload, int]]]:
    """Return for each axis the value on it, the workload, and the inner steps."""
    workload = base(options)

    def at(axis: str, value: int) -> tuple[int, Workload, int]:
        changes: dict[str, dict[str, Any]] = {
            "tasks": {"num_tasks": value},
            "episodes per task": {"episodes_per_task": value},
            "steps": {"horizon": value},
            "hidden units": {"hidden_sizes": (value, value)},
            "inner steps": {},
        }
        return value, replace(workload, **changes[axis]), value if axis == "inner steps" else 1

    return {axis: [at(axis, value) for value in values[options.quick]] for axis, values in AXES.items()}


def _measure_growth(report: Report, options: argparse.Namespace) -> None:
    sizes = growth_sizes(options)
    # The base is a point on every axis, and is measured once.
    distinct = {_label(*size[1:]): size[1:] for of_axis in sizes.values() for size in of_axis}
    labeled = [(label, *size) for label, size in distinct.items()]
    with ExitStack() as stack:
        host = Host("growth", "benchmarks.systems.whole_iteration:Growth", labeled)
        stack.callback(host.close)
        rows = take_turns([host.participant()], repeats=options.growth_repeats, warmup=0, report=progress(options))
    for axis, of_axis in sizes.items():
        for value, workload, num_steps in of_axis:
            for part in ("sampling", "update"):
                samples = rows[f"{_label(workload, num_steps)}, {part}"]
                report.add(_growth_title(axis), Row(f"{axis} = {value}, {part}", samples, "s", str(workload)))


def _label(workload: Workload, num_steps: int) -> str:
    return f"{workload}, {workload.hidden_sizes}, {num_steps} inner steps"


def _growth_title(axis: str) -> str:
    return f"Growth with {axis}, seconds of one iteration"


def _chart(report: Report, options: argparse.Namespace) -> None:
    """Draw the seconds as bars, and below them one panel for each size that grows."""
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(11.0, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, len(AXES), height_ratios=(1.2, 1.0))
    if SECONDS in report.tables:
        bars(figure.add_subplot(grid[0, :3]), SECONDS, report.tables[SECONDS], notes=False)
        bars(figure.add_subplot(grid[0, 3:]), STAGES, report.tables[STAGES])
    for column, axis in enumerate(AXES):
        if _growth_title(axis) in report.tables:
            panel = figure.add_subplot(grid[1, column])
            _growth_panel(panel, axis, report.tables[_growth_title(axis)])
            if column == 0:
                panel.set_ylabel("seconds", fontsize=8)
                panel.legend(fontsize=7)
    save_figure(figure, report, options.chart)
    pyplot.close(figure)


def _growth_panel(panel: "Axes", axis: str, rows: list[Row]) -> None:
    for part in ("sampling", "update"):
        points = [(int(row.name.split(" = ")[1].split(",")[0]), row.samples) for row in rows if row.name.endswith(part)]
        values, samples = [value for value, _ in points], [sample for _, sample in points]
        panel.errorbar(values, [sample.median for sample in samples], _spread(samples), marker="o", ms=3, label=part)
    panel.set_xticks(values)
    panel.set_xlabel(axis, fontsize=8)
    panel.set_ylim(0.0, 1.05 * max(row.samples.high for row in rows))
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)


def _spread(samples: list[Samples]) -> tuple[list[float], list[float]]:
    return [one.median - one.low for one in samples], [one.high - one.median for one in samples]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--growth-repeats", type=int, default=3, help="rounds over all sizes that grow")
    parser.add_argument("--num-workers", type=int, help="worker processes of our sampler; its own default if not given")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.warmup, options.growth_repeats = 1, 0, 1
    return options


if __name__ == "__main__":
    main()
