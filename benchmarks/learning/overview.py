"""One chart and one table of all families of a plan, and a chart of each algorithm, for first screens of pages."""

import csv
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.learning.page import adapted, compared, curves, final_rows, leads_all, rows_of
from benchmarks.learning.plan import COMPARISON, ORACLE, PRETRAIN, Plan
from benchmarks.learning.results import Values
from maml_rl.report.plot import Plot, write_panels
from maml_rl.results.evaluation import pooled_intervals
from maml_rl.results.scales import Axis
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
# Of the charts of algorithms: pixels, the share of the width for names, and of the height between two names.
_WIDTH, _HEIGHT, _ROOM, _APART, _NUM_COLORS = 400, 300, 0.34, 0.065, 6
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
        places = (xs for xs, _ in lines.values())
        x = Axis.of([0.0], *places, label="environment steps", margin=0.0, counts=True)
        # The initial policies of a family may be far below everything that is learned.
        y = Axis.of(*(middles[1:] for _, middles in lines.values()))
        plot = Plot(x, y, family.title, width=238, height=190)
        for column, (xs, middles) in lines.items():
            plot.line(xs, np.clip(middles, y.low, y.high), _COLORS.get(column, "rest"))
        panels.append(("", family.title, plot))
    key = [*((css, name) for name, css in _COLORS.items()), ("rest", "pretrain, oracle")]
    write_panels(path, panels, columns=4, key=key, dark=True)


def draw_algorithms(suite: Plan, path: Path) -> None:
    """Draw a chart for each family with the names of algorithms at their lines.

    Those that learn from recorded histories have the share of actions that they predict.
    """
    panels = []
    for plan, name in ((COMPARISON, "2d-navigation"), (suite, "halfcheetah-dir-2x200")):
        family = plan.families[name]
        found = {each: rows for each, rows in rows_of(plan, family).items() if max(row.iteration for row in rows) > 0}
        lines = {each.removesuffix("-control"): curves(rows)[0] for each, rows in found.items()}
        panels.append(_panel(family.title, lines, "environment steps", "return after one step"))
    for name, title, file, x, y in (
        ("rsac", "Wind", "rsac-wind.csv", "env_steps", "training_return"),
        ("ad", "Dark room", "ad-dark-room.csv", "updates", "accuracy"),
        ("dpt", "Bandits", "dpt-bandit-k5-n100.csv", "updates", "accuracy"),
    ):
        with (suite.page.parent / file).open(newline="") as opened:
            rows = [row for row in csv.DictReader(opened) if row.get("settings", "config") == "config"]
        rows = [row for row in rows if row.get("seed", "0") == "0" and row[x] and row[y]]
        points = (np.array([float(row[x]) for row in rows]), np.array([float(row[y]) for row in rows]))
        labels = ("gradient steps", "predicted actions") if y == "accuracy" else ("environment steps", "return")
        panels.append(_panel(title, {name: points}, *labels))
    write_panels(path, panels, columns=2, dark=True)


def _panel(title: str, lines: Mapping[str, tuple[Values, Values]], x_label: str, y_label: str) -> tuple[str, str, Plot]:
    reached = max(float(xs[-1]) for xs, _ in lines.values())
    # To the right of the lines is room for their names. Initial policies may be far below everything that is learned.
    x = Axis(0.0, (1.0 + _ROOM) * reached, x_label, counts=True)
    y = Axis.of(*(middles[1:] for _, middles in lines.values()), label=y_label)
    plot = Plot(x, y, title, width=_WIDTH, height=_HEIGHT)
    ends = np.array([middles[-1] for _, middles in lines.values()])
    places = spread(ends, y, _APART * (y.high - y.low))
    ranks = np.argsort(np.argsort(-ends))
    for (name, (xs, middles)), place, rank in zip(lines.items(), places, ranks, strict=True):
        reference = name in (PRETRAIN.name, ORACLE.name)
        css = "rest" if reference else f"group{rank % _NUM_COLORS} dash{rank // _NUM_COLORS}"
        plot.line(xs, np.clip(middles, y.low, y.high), css)
        plot.line([xs[-1], 1.02 * reached], [middles[-1], place], f"{css} seed")
        plot.label(1.02 * reached, place, name, css, beside=True)
    return "label", title, plot


def spread(values: Values, span: Axis, apart: float) -> Values:
    """Return places in a span for labels of values, near them and in their order, each so far from the next."""
    places, order = values.copy(), np.argsort(values, kind="stable")
    for below, above in pairwise(order):
        places[above] = max(places[above], places[below] + apart)
    limit = span.high
    for index in order[::-1]:
        places[index] = limit = min(places[index], limit)
        limit -= apart
    return places
