"""One chart and one table of all families of a plan, for the first screen of a page."""

import re
from pathlib import Path

import numpy as np

from benchmarks.charts import write_panels
from benchmarks.learning.page import adapted, compared, curves, final_rows, leads, rows_of
from benchmarks.learning.plan import ORACLE, PRETRAIN, Plan
from maml_rl.experiment.evaluate import pooled_intervals
from maml_rl.experiment.statistics import interquartile_mean
from maml_rl.report.plot import Plot
from maml_rl.report.scales import Span

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
            cells.append(f"**{value}**" if name == best and leads(differences) else value + "\\*" * (len(rows) == 1))
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
        plot = Plot(x, y, family.title, x_label="environment steps", x_counts=True, width=238, height=190)
        for column, (xs, middles) in lines.items():
            plot.line(xs, np.clip(middles, y.low, y.high), _COLORS.get(column, "rest"))
        panels.append(("", family.title, plot))
    key = [*((css, name) for name, css in _COLORS.items()), ("rest", "pretrain, oracle")]
    write_panels(path, panels, columns=4, key=key)
