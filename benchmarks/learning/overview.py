"""One chart and one table of all families of a plan, and a chart of each algorithm, for first screens of pages."""

import csv
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.learning.page import adapted, compared, curves, final_rows, leads_all, rows_of
from benchmarks.learning.plan import COMPARISON, ORACLE, PRETRAIN, RANDOM, Family, Plan
from benchmarks.learning.results import Values
from maml_rl.report.panels import write_panels
from maml_rl.report.plot import Axis, Plot
from maml_rl.results.evaluation import pooled_intervals
from maml_rl.results.scales import Span
from maml_rl.results.statistics import interquartile_mean

# Of a method, whichever of its settings a family has.
COLUMNS = {
    "MAML-TRPO": ("maml-trpo",),
    "ProMP": ("promp",),
    "RL2": ("rl2", "rl2-control"),
    "VariBAD": ("varibad",),
    "PEARL": ("pearl",),
    "pretrain": (PRETRAIN.name,),
    "oracle": (ORACLE.name,),
}
_COLORS = {name: f"group{place}" for place, name in enumerate(list(COLUMNS)[:5])}
_BLOCK = re.compile(r"(<!-- summary -->\n).*?(<!-- end of summary -->)", re.DOTALL)


def write_overview(plan: Plan, page: Path, chart: Path) -> None:
    """Write the table between the marks of a page, and the chart.

    Args:
        plan: whose results are shown.
        page: has the marks.
        chart: file of the chart.
    """
    text = page.read_text(encoding="utf-8")
    page.write_text(_BLOCK.sub(lambda found: f"{found[1]}\n{table(plan, page)}\n\n{found[2]}", text), encoding="utf-8")
    draw(plan, chart)


def table(plan: Plan, page: Path) -> str:
    """Return the return after adaptation of every method on every family; bold where it leads all others."""
    data = plan.page.relative_to(page.parent).as_posix()
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * len(COLUMNS)]
    for family in plan.families.values():
        found = rows_of(plan, family)
        finals = final_rows(found)
        best, _, differences = compared(found)
        cells = []
        for names in COLUMNS.values():
            name = next((name for name in names if name in finals), "")
            rows = finals.get(name, [])
            value = f"{pooled_intervals(adapted(rows), interquartile_mean)[-1, 0]:.1f}" if rows else ""
            cells.append(
                f"**{value}**" if name == best and leads_all(differences) else value + "\\*" * (len(rows) == 1)
            )
        anchor = re.sub(r"[^a-z0-9]+", "-", family.title.lower())
        lines.append(f"| [{family.title}]({data}#{anchor}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(plan: Plan, path: Path) -> None:
    """Draw the interquartile mean after adaptation over environment steps, a panel for each family."""
    panels = []
    for family in plan.families.values():
        lines = {}
        for name, rows in rows_of(plan, family).items():
            if max(row.iteration for row in rows) > 0:
                column = next(column for column, names in COLUMNS.items() if name in names)
                lines[column] = curves(rows)[0]
        x = Span.of([0.0], *(xs for xs, _ in lines.values()), margin=0.0)
        # The initial policies of a family may be far below everything that is learned.
        y = Span.of(*(middles[1:] for _, middles in lines.values()))
        across = Axis(x, "environment steps", counts=True)
        plot = Plot(across, Axis(y), family.title, width=238, height=190)
        for column, (xs, middles) in lines.items():
            plot.line(xs, np.clip(middles, y.low, y.high), _COLORS.get(column, "rest"))
        panels.append(("", family.title, plot))
    key = [*((css, name) for name, css in _COLORS.items()), ("rest", "pretrain, oracle")]
    write_panels(path, panels, columns=4, key=key, dark=True)


def draw_algorithms(suite: Plan, path: Path) -> None:
    """Draw a small chart of each algorithm: of those of a plan among the others of a family, in gray.

    Those that learn from recorded histories have the share of actions that they predict.
    """
    panels = []
    for plan, family, names in (
        (
            COMPARISON,
            COMPARISON.families["2d-navigation"],
            set(COMPARISON.methods) - {PRETRAIN.name, ORACLE.name, RANDOM.name},
        ),
        (suite, suite.families["halfcheetah-dir-2x200"], {"rl2-control", "varibad", "pearl"}),
    ):
        lines = _learned(plan, family)
        panels += [_panel(name, lines) for name in plan.methods if name in names]
    for name, file, x, y in (
        ("rsac", "rsac-wind.csv", "env_steps", "training_return"),
        ("ad", "ad-dark-room.csv", "updates", "accuracy"),
        ("dpt", "dpt-bandit-k5-n100.csv", "updates", "accuracy"),
    ):
        with (suite.page.parent / file).open(newline="") as opened:
            rows = [row for row in csv.DictReader(opened) if row.get("settings", "config") == "config"]
        rows = [row for row in rows if row.get("seed", "0") == "0" and row[x] and row[y]]
        points = (np.array([float(row[x]) for row in rows]), np.array([float(row[y]) for row in rows]))
        labels = ("gradient steps", "accuracy") if y == "accuracy" else ("environment steps", "return")
        panels.append(_panel(name, {name: points}, *labels))
    write_panels(path, panels, columns=4, dark=True)


def _learned(plan: Plan, family: Family) -> dict[str, tuple[Values, Values]]:
    found = rows_of(plan, family)
    return {name: curves(rows)[0] for name, rows in found.items() if max(row.iteration for row in rows) > 0}


def _panel(
    name: str, lines: Mapping[str, tuple[Values, Values]], x_label: str = "environment steps", y_label: str = "return"
) -> tuple[str, str, Plot]:
    x = Span.of([0.0], *(xs for xs, _ in lines.values()), margin=0.0)
    y = Span.of(*(middles[1:] for _, middles in lines.values()))
    plot = Plot(Axis(x, x_label, counts=True), Axis(y, y_label), name, width=238, height=190)
    for other, (xs, middles) in sorted(lines.items(), key=lambda line: line[0] == name):
        plot.line(xs, np.clip(middles, y.low, y.high), "group0" if other == name else "rest")
    return "group0", name.removesuffix("-control"), plot
