"""Results of a benchmark: a table on the screen, a JSON file, a chart; and the options that all benchmarks share."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import Samples, describe
from maml_rl.cli.console import Parser

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOW_TO_INSTALL = "pip install -e '.[fast,bench]'"


@dataclass(slots=True)
class Row:
    """One line of a table.

    Attributes:
        name: of a system or of a quantity.
        samples: values of the rounds.
        unit: of the values.
        note: the layout, or the figure to compare with.
    """

    name: str
    samples: Samples
    unit: str
    note: str = ""


@dataclass(slots=True)
class Report:
    """The results of one run of a benchmark.

    Attributes:
        benchmark: its name.
        machine: as returned by `measuring.machine`.
        settings: the sizes and repeats of this run.
        tables: rows by title.
        remarks: sentences for the reader, such as which system was left out and why.
    """

    benchmark: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    tables: dict[str, list[Row]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def add(self, title: str, row: Row) -> None:
        """Append a row to the table of that title."""
        self.tables.setdefault(title, []).append(row)

    def as_text(self) -> str:
        """Return the tables in Markdown, below a line about the machine."""
        parts = [f"`{self.machine['command']}`", describe(self.machine)]
        for title, rows in self.tables.items():
            parts.append(f"## {title}\n\n{_markdown(rows)}")
        parts += self.remarks
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "benchmark": self.benchmark,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "tables": {
                title: [{"name": row.name, "unit": row.unit, "note": row.note, **row.samples.as_dict()} for row in rows]
                for title, rows in self.tables.items()
            },
            "remarks": self.remarks,
        }


def common_options(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes and one round: shows that it runs, not how fast"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the tasks, the policy and the noise")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured to this file")
    parser.add_argument("--chart", type=Path, metavar="PATH", help="draw the chart into this file (.svg, .png, .pdf)")
    parser.add_argument("--quiet", action="store_true", help="no line per turn")
    return parser


def chosen(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options as plain data, without the paths of results."""
    return {
        name: value if isinstance(value, int | float | str | bool | list | type(None)) else str(value)
        for name, value in vars(arguments).items()
        if name not in {"json", "chart", "quiet"}
    }


def progress(arguments: argparse.Namespace) -> Any:
    """Return the function that reports every turn on the error stream, so that the tables can be piped."""
    return (lambda line: None) if arguments.quiet else (lambda line: print(line, file=sys.stderr, flush=True))


def check_packages(arguments: argparse.Namespace, **needed: str) -> None:
    """End the command at once if a missing package would end it after hours of measurements.

    Args:
        arguments: the options of the command.
        needed: by package, what needs it.

    Raises:
        SystemExit: If a needed package, or matplotlib for a requested chart, is not installed.
    """
    if arguments.chart is not None:
        needed["matplotlib"] = "--chart"
    for package, what in needed.items():
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"{what} needs {package}, which is not installed; try: {HOW_TO_INSTALL}")


def write_json(report: Report, path: Path) -> None:
    """Write the report to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.as_dict(), indent=2, default=str) + "\n")


def bar_chart(report: Report, options: argparse.Namespace) -> None:
    """Draw one panel of bars per table."""
    from matplotlib import pyplot

    tables = report.tables
    heights = [0.6 + 0.38 * len(rows) for rows in tables.values()]
    figure, panels = pyplot.subplots(
        len(tables), 1, figsize=(9.0, sum(heights) + 0.6), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for panel, (title, rows) in zip(panels[:, 0], tables.items(), strict=True):
        bars(panel, title, rows)
    save_figure(figure, report, options.chart)
    pyplot.close(figure)


def save_figure(figure: Any, report: Report, path: Path) -> None:
    """Write a figure with the machine in small print below it."""
    facts = report.machine
    figure.supxlabel(f"{facts['cpu']}, {facts['cores']} cores, {facts['command']}", fontsize=7, color="0.4")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def finish(
    report: Report, arguments: argparse.Namespace, chart: Callable[[Report, argparse.Namespace], None] = bar_chart
) -> None:
    """Print the tables and write the requested files.

    Args:
        report: the results.
        arguments: the options of the command.
        chart: draws the report into `arguments.chart`.
    """
    print(report.as_text())
    if arguments.json is not None:
        write_json(report, arguments.json)
    if arguments.chart is not None:
        import matplotlib

        # Charts go to files; there may be no screen.
        matplotlib.use("Agg")
        chart(report, arguments)


def bars(panel: "Axes", title: str, rows: Sequence[Row], *, notes: bool = True) -> None:
    """Draw a table: each bar ends at the median; its line goes from the minimum to the maximum."""
    names = [row.name + (f"\n{row.note}" if notes and row.note else "") for row in rows]
    medians = [row.samples.median for row in rows]
    below = [row.samples.median - row.samples.low for row in rows]
    above = [row.samples.high - row.samples.median for row in rows]
    drawn = panel.barh(range(len(rows)), medians, xerr=(below, above), color="#4c72b0", ecolor="0.2", height=0.7)
    panel.bar_label(drawn, [f" {number(median)}" for median in medians], fontsize=8)
    panel.set_yticks(range(len(rows)), names, fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_title(title, loc="left", fontsize=10)
    panel.set_xlabel(rows[0].unit, fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def number(value: float) -> str:
    """Return `value` as text: with three significant digits, or rounded to an integer if it is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _markdown(rows: Sequence[Row]) -> str:
    lines = ["| what | layout | unit | median | min | max |", "|---|---|---|---:|---:|---:|"]
    for row in rows:
        values = " | ".join(number(value) for value in (row.samples.median, row.samples.low, row.samples.high))
        if len(row.samples.values) == 1:
            values = f"{number(row.samples.median)} | |"
        lines.append(f"| {row.name} | {row.note} | {row.unit} | {values} |")
    return "\n".join(lines)
