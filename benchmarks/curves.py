"""Draws the learning curves of runs: `python -m benchmarks.curves RUN [RUN ...] --chart curves.svg`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.charts import write_panels
from maml_rl.cli.console import Parser
from maml_rl.experiment.comparable import moving_mean
from maml_rl.report.curves import after
from maml_rl.report.plot import Axis, Plot
from maml_rl.report.scales import Span


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the metrics of every run and draw its panels."""
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or metrics files")
    parser.add_argument("--chart", type=Path, required=True, help="the SVG file to write")
    parser.add_argument("--titles", nargs="+", help="one for each run; the folders' names by default")
    parser.add_argument("--smooth", type=int, default=1, help="iterations in a moving mean (default: 1)")
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
    quantities = {"return": "return", **{f"info/{name}": name for name in infos}}
    drawn = []
    for title, rows in panels:
        names = columns(rows[0])
        places = np.array([row["iteration"] for row in rows])
        for quantity, word in quantities.items():
            values = np.array([[row[f"{quantity}/{name}"] for row in rows] for name in names], np.float64)
            smoothed = moving_mean(values, smooth)
            plot = Plot(
                Axis(Span.of(places, margin=0.0), "meta-update", counts=True),
                Axis(Span.of(smoothed), f"mean {word}"),
                f"{title}: mean {word} over meta-updates",
                width=320,
                height=250,
            )
            for number, line in enumerate(smoothed):
                plot.line(places, line, f"group{number}")
            plot.key([(f"group{number}", label(name)) for number, name in enumerate(names)])
            drawn.append(("run", title, plot))
    write_panels(chart, drawn)


def columns(row: dict[str, Any]) -> list[str]:
    """Return the keys by which the metrics split returns, in order: `step_0` ..., or `episode_0` ... of a trial."""
    names = [name.removeprefix("return/") for name in row if name.startswith("return/")]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def label(column: str) -> str:
    """Return the label of a column."""
    kind, _, index = column.rpartition("_")
    return after(int(index), kind).removeprefix("in ").removesuffix(" of the trial")


if __name__ == "__main__":
    main()
