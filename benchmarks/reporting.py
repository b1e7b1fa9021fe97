"""Results of a benchmark: a table on the screen, a JSON file, a chart; and the options that all benchmarks share.

    python -m benchmarks.reporting docs/results/benchmark-sampling.json docs/images/sampling.svg

draws the chart of results that were written before.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring import Samples, describe
from maml_rl.cli.console import Parser
from maml_rl.errors import ConfigError
from maml_rl.report.plot import Plot, check_figure, write_panels
from maml_rl.results.scales import Axis

# Pixels: of a chart's width, of a bar's row, and of what is around all rows.
_WIDTH, _ROW, _AROUND = 700, 38, 54
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
        SystemExit: If a needed package is not installed, or a requested chart cannot be written.
    """
    if arguments.chart is not None:
        try:
            check_figure(arguments.chart, "--chart")
        except ConfigError as error:
            raise SystemExit(str(error)) from None
    for package, what in needed.items():
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"{what} needs {package}, which is not installed; try: {HOW_TO_INSTALL}")


def write_json(report: Report, path: Path) -> None:
    """Write the report to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.as_dict(), indent=2, default=str) + "\n")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw what `Report.as_dict` returned: a chart of bars for each table, and the machine below them.

    Each bar ends at the median; its line goes from the minimum to the maximum.
    """
    machine = results["machine"]
    charts = [("label", title, _bars(rows)) for title, rows in results["tables"].items()]
    caption = f"{machine['cpu']}, {machine['cores']} cores, {machine['command']}"
    write_panels(path, charts, 1, caption=caption, dark=True)


def _bars(rows: Sequence[Mapping[str, Any]]) -> Plot:
    # At the right end is room for the number of the longest bar.
    across = Axis(0.0, 1.1 * max(row["max"] for row in rows) or 1.0, rows[0]["unit"])
    up = Axis(0.5 - len(rows), 0.5, names=())
    height = _ROW * len(rows) + _AROUND
    plot = Plot(across, up, "medians of the rounds", width=_WIDTH, height=height)
    for place, row in enumerate(rows):
        plot.label(0.0, 0.1 - place, ", ".join(filter(None, (row["name"], row["note"]))), "")
        plot.across(0.0, row["median"], -0.2 - place, "bar rest")
        plot.across(row["min"], row["max"], -0.2 - place, "run")
        plot.label(row["max"], -0.2 - place, number(row["median"]), "", beside=True)
    return plot


def finish(report: Report, arguments: argparse.Namespace) -> None:
    """Print the tables of the results, and write the files that the options of the command ask for."""
    print(report.as_text())
    if arguments.json is not None:
        write_json(report, arguments.json)
    if arguments.chart is not None:
        draw(report.as_dict(), arguments.chart)


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the chart of a JSON file of results again."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file that a benchmark has written")
    parser.add_argument("chart", type=Path, help="SVG file to write")
    options = parser.parse_args(arguments)
    draw(json.loads(options.results.read_text()), options.chart)


if __name__ == "__main__":
    main()
