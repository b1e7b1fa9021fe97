"""The effect of not waiting for all workers: every way of waiting, on the same code.

    python -m benchmarks.waiting --json waiting.json --chart waiting.svg
    python -m benchmarks.waiting --horizons 250 40 10 --repeats 2 --json waiting.json --chart waiting.svg

The first command takes an hour, the second a few minutes.

It repeats a published experiment: 8 processes, 160 to 32,000 environments, a parent that waits for all workers, or for
a given number of seconds at most and then acts for those that have answered; with a small and a large network. It adds
the other ways of collecting: two groups of workers that take turns, policies that act within the workers, and a policy
on an accelerator if there is one.

Collecting ahead makes no step faster, but overlaps with the update. So its gain is measured in whole training
iterations, at the fewest environments and with the first network, beside training that collects on demand.
`benchmarks.population` measures the cost of populations.
"""

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.hosting import Host
from benchmarks.measuring import Samples, machine, ratios, take_turns
from benchmarks.reporting import Report, Row, check_packages, chosen, common_options, finish, progress, save_figure
from benchmarks.systems.layouts import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODES: dict[str, dict[str, Any]] = {
    "wait for all": {"inference": "central"},
    "at most 0.1 s": {"recv_timeout": 0.1},
    "at most 0.0001 s": {"recv_timeout": 0.0001},
    "two groups": {"num_groups": 2},
    "policy in the workers": {"inference": "worker"},
}
ACCELERATOR: dict[str, dict[str, Any]] = {"policy on the accelerator": {"device": "cuda"}}
PREFETCH = {"training, collecting when needed": 0, "training, collecting one batch ahead": 1}
NETWORKS = {"small": (64, 64), "large": (512, 512)}
# Steps of an episode by number of environments: enough steps to time, in minutes rather than hours.
HORIZONS = {160: 1_000, 4_000: 200, 32_000: 50}
QUANTITIES = {
    "rate": ("Environment steps per second", "steps/s"),
    "workers": ("Mean number of workers per forward pass", "workers"),
    "waiting": ("Share of the time that the parent waits", "share"),
}
TRAINING = {
    "rate": ("Environment steps per second, update included", "steps/s"),
    "waiting": ("Share of the time that the update waits", "share"),
}
GAIN = "Gain of collecting ahead"
PARTS = ("steps", "training")


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    check_packages(options)
    report = Report("waiting", machine(), chosen(options))
    rows: dict[str, Samples] = {}
    modes = modes_here()
    if "steps" in options.only:
        for size in options.sizes:
            for network in options.networks:
                rows |= _measure(size, network, modes, options)
        for quantity, (title, unit) in QUANTITIES.items():
            for size in options.sizes:
                for network in options.networks:
                    note = str(_workload(size, network, options))
                    for mode in modes:
                        name = _name(size, network, mode)
                        report.add(title, Row(name, rows[f"{name}: {quantity}"], unit, note))
    if "training" in options.only:
        _add_training(report, options)
    if "steps" in options.only:
        finish(report, options, chart=lambda _, __: _chart(report, rows, list(modes), options))
    else:
        finish(report, options)


def modes_here() -> dict[str, dict[str, Any]]:
    """Return the sampler's arguments for every mode that this machine can run."""
    return MODES | ACCELERATOR if torch.cuda.is_available() else MODES


def _add_training(report: Report, options: argparse.Namespace) -> None:
    """Measure training that collects on demand and training that collects ahead, interleaved."""
    workload = _workload(min(options.sizes), options.networks[0], options)
    with ExitStack() as stack:
        participants = []
        for name, prefetch in PREFETCH.items():
            make = "benchmarks.systems.training_ahead:TrainingAhead"
            host = Host(name, make, workload, name, prefetch, options.iterations)
            stack.callback(host.close)
            participants.append(host.participant())
        rows = take_turns(participants, repeats=options.repeats, warmup=options.warmup, report=progress(options))
    for quantity, (title, unit) in TRAINING.items():
        for name in PREFETCH:
            report.add(title, Row(name, rows[f"{name}: {quantity}"], unit, str(workload)))
    needed, ahead = (rows[f"{name}: rate"] for name in PREFETCH)
    report.add(GAIN, Row("ahead / when needed", ratios(ahead, needed), "ratio", str(workload)))


def _measure(
    size: int, network: str, modes: dict[str, dict[str, Any]], options: argparse.Namespace
) -> dict[str, Samples]:
    """Measure the modes at one size, interleaved."""
    with ExitStack() as stack:
        participants = []
        for mode, arguments in modes.items():
            name = _name(size, network, mode)
            workload = _workload(size, network, options, arguments)
            host = Host(name, "benchmarks.systems.own_sampler:WaitingMode", workload, name)
            stack.callback(host.close)
            participants.append(host.participant())
        return take_turns(participants, repeats=options.repeats, warmup=options.warmup, report=progress(options))


def _workload(
    size: int, network: str, options: argparse.Namespace, arguments: dict[str, Any] | None = None
) -> Workload:
    """Return a workload with one task per worker, so that a worker's environments are a whole task."""
    tasks = options.num_workers
    return Workload(
        "HalfCheetahDir-v5",
        tasks,
        size // tasks,
        options.horizons[options.sizes.index(size)],
        NETWORKS[network],
        options.seed,
        options.num_workers,
        adapted=False,
        options=arguments or {},
    )


def _name(size: int, network: str, mode: str) -> str:
    return f"{size:,} environments, {network} network, {mode}"


def _chart(report: Report, rows: dict[str, Samples], modes: list[str], options: argparse.Namespace) -> None:
    """Draw a grid: a row of panels for each quantity, a column for each number of environments."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(QUANTITIES),
        len(options.sizes),
        figsize=(3.4 * len(options.sizes) + 1.6, 7.0),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    for line, (quantity, (title, _)) in enumerate(QUANTITIES.items()):
        for column, size in enumerate(options.sizes):
            panel = panels[line, column]
            for offset, network in enumerate(options.networks):
                samples = [rows[f"{_name(size, network, mode)}: {quantity}"] for mode in modes]
                _bars(panel, samples, offset, len(options.networks), f"{network} network {NETWORKS[network]}")
            panel.set_xticks(range(len(modes)), modes if line == len(QUANTITIES) - 1 else [], rotation=40, ha="right")
            panel.tick_params(labelsize=7)
            panel.spines[["top", "right"]].set_visible(False)
            if line == 0:
                panel.set_title(f"{size:,} environments", fontsize=9)
        panels[line, 0].set_ylabel(title.replace(" per ", "\nper ").replace(" that ", "\nthat "), fontsize=8)
    panels[0, 0].legend(fontsize=7)
    save_figure(figure, report, options.chart)
    pyplot.close(figure)


def _bars(panel: "Axes", samples: list[Samples], offset: int, count: int, label: str) -> None:
    width = 0.8 / count
    places = [index + (offset - (count - 1) / 2.0) * width for index in range(len(samples))]
    spread = [one.median - one.low for one in samples], [one.high - one.median for one in samples]
    panel.bar(places, [one.median for one in samples], width, yerr=spread, label=label, ecolor="0.3")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").partition("\n")[0])
    parser.set_defaults(repeats=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--iterations", type=int, default=4, help="of training that are timed in a turn")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(HORIZONS), help="environments")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), help="policies")
    parser.add_argument("--horizons", nargs="+", type=int, help="steps of an episode for each of --sizes")
    parser.add_argument("--num-workers", type=int, default=8, help="worker processes, at least 2")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.networks, options.horizons, options.num_workers = [8], ["small"], [5], 2
        options.repeats, options.warmup, options.iterations = 1, 0, 1
    if options.iterations < 1:
        parser.error(f"--iterations must be at least 1, got {options.iterations}")
    if options.horizons is None:
        options.horizons = [HORIZONS.get(size, 100) for size in options.sizes]
    if len(options.horizons) != len(options.sizes):
        parser.error(f"--horizons needs one number for each of the {len(options.sizes)} sizes")
    if options.num_workers < 2 or any(size % options.num_workers for size in options.sizes):
        parser.error(f"every size must be a multiple of --num-workers, at least 2, got {options.num_workers}")
    return options


if __name__ == "__main__":
    main()
