"""Draws the learning curves of runs: `python -m benchmarks.curves RUN [RUN ...] --chart curves.png`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.cli.console import Parser

_COLORS = ("#8a8f98", "#1f6fb2", "#c2571a", "#2c8a57")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the metrics of every run and draw its panels."""
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or metrics files")
    parser.add_argument("--chart", type=Path, required=True, help="the picture to write")
    parser.add_argument("--titles", nargs="+", help="one for each run; the folders' names by default")
    parser.add_argument("--smooth", type=int, default=1, help="iterations in a moving average (default: 1)")
    parser.add_argument("--infos", nargs="+", default=[], help="recorded infos, each with a panel of its own")
    options = parser.parse_args(arguments)
    titles = options.titles or [run.stem if run.suffix else run.name for run in options.runs]
    if len(titles) != len(options.runs):
        parser.error(f"expected one title for each of the {len(options.runs)} runs, got {len(titles)}")
    panels = [(title, read_metrics(run)) for title, run in zip(titles, options.runs, strict=True)]
    draw(panels, options.chart, options.smooth, options.infos)
    print(f"the chart is {options.chart}")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of all iterations of a run."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(
    panels: Sequence[tuple[str, Sequence[dict[str, Any]]]], chart: Path, smooth: int, infos: Sequence[str] = ()
) -> None:
    """Write the panels of every run: the mean return, and each of `infos`, by inner step or by episode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    quantities = {"return": "return", **{f"info/{name}": name for name in infos}}
    wanted = [(title, rows, quantity) for title, rows in panels for quantity in quantities]
    figure, axes = pyplot.subplots(1, len(wanted), figsize=(5.2 * len(wanted), 3.6), squeeze=False)
    for axis, (title, rows, quantity) in zip(axes[0], wanted, strict=True):
        for number, column in enumerate(columns(rows[0])):
            values = np.array([row[f"{quantity}/{column}"] for row in rows])
            axis.plot(*moving_average(values, smooth), color=_COLORS[number % len(_COLORS)], label=label(column))
        axis.set(title=title, xlabel="meta-update", ylabel=f"mean {quantities[quantity]} over tasks and episodes")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.tight_layout()
    chart.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(chart, dpi=130)
    pyplot.close(figure)


def columns(row: dict[str, Any]) -> list[str]:
    """Return what the metrics tell returns apart by, in order: `step_0` ..., or `episode_0` ... of a trial."""
    names = [name.removeprefix("return/") for name in row if name.startswith("return/")]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def label(column: str) -> str:
    """Return the words for a column."""
    kind, _, number = column.rpartition("_")
    if kind != "step":
        return f"{kind} {int(number) + 1}" + " of the trial" * (kind == "episode")
    steps = int(number)
    return "before adaptation" if steps == 0 else f"after {steps} gradient step" + "s" * (steps > 1)


def moving_average(values: NDArray[np.float64], width: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return iterations and the mean of the last `width` values at each."""
    width = max(1, min(width, len(values)))
    smoothed = np.convolve(values, np.full(width, 1.0 / width), mode="valid")
    return np.arange(width - 1, len(values)), smoothed


if __name__ == "__main__":
    main()
