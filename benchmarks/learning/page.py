"""Tables and charts from the CSV files alone, put between the marks of a page whose other text is written by hand."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.learning.plan import Family, Plan
from benchmarks.learning.results import Row, Values, by_seed, passing_rows, read_rows
from maml_rl.experiment.evaluate import interval_scope, pooled_intervals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLOCK = re.compile(r"(<!-- results of ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
_STEP = 1

# (plan, family) -> Markdown.
Tables = Callable[[Plan, Family], str]
# (plan, family, what the file is to be) -> nothing.
Draw = Callable[[Plan, Family, Path], None]


def write_page(plan: Plan, tables: Tables) -> None:
    """Write the tables of every family into the page.

    Args:
        plan: whose page it is.
        tables: returns those of a family.

    Raises:
        ValueError: If the page has no marks for a family that has results, or marks for one that the plan has not.
    """
    text = plan.page.read_text(encoding="utf-8")
    marked = [match[2] for match in _BLOCK.finditer(text)]
    wanted = [family.name for family in plan.families.values() if rows_of(plan, family)]
    if not set(wanted) <= set(marked) <= set(plan.families):
        raise ValueError(f"{plan.page} has marks for {marked}, and there are results of {wanted}")

    def filled(match: re.Match[str]) -> str:
        return f"{match[1]}\n{tables(plan, plan.families[match[2]])}\n\n{match[3]}"

    plan.page.write_text(_BLOCK.sub(filled, text), encoding="utf-8")


def rows_of(plan: Plan, family: Family) -> dict[str, list[Row]]:
    """Return the rows of the contenders that have some, by name."""
    found = {name: read_rows(plan.folder(family) / f"{name}.csv") for name in plan.contenders}
    return {name: rows for name, rows in found.items() if rows}


def chart_of(plan: Plan, family: Family) -> Path:
    """Return the file of a family's chart."""
    return plan.page.parent / "images" / f"{plan.page.stem}-{family.name}.svg"


def compared_rows(plan: Plan, found: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """Return the rows of the trainings, by contender, after as many meta-updates as all contenders have reached.

    Of those with smaller batches, as many count as one as the plan says. Those that are not trained have their only row
    instead.
    """
    counts = {name: [row.iteration // plan.contenders[name].updates for row in rows] for name, rows in found.items()}
    common = min((max(numbers) for numbers in counts.values() if max(numbers) > 0), default=0)
    return {
        name: [row for row, number in zip(rows, counts[name], strict=True) if number == min(common, max(counts[name]))]
        for name, rows in found.items()
    }


def tables(plan: Plan, family: Family) -> str:
    """Return the tables of one family as Markdown."""
    found = rows_of(plan, family)
    if not found:
        return "No results yet."
    parts = [f"![{family.title}: returns](images/{chart_of(plan, family).name})", _final_table(plan, found)]
    if family.threshold is not None:
        parts.append(_threshold_table(found, family.threshold))
    return "\n\n".join(parts)


def _final_table(plan: Plan, found: dict[str, list[Row]]) -> str:
    finals = compared_rows(plan, found)
    steps = max(row.task_returns.shape[1] for rows in finals.values() for row in rows)
    lines = [
        "| | seeds | meta-updates | environment steps | "
        + " | ".join(f"k={step}" for step in range(steps))
        + " | minutes | seconds of an update | above `pretrain` |",
        "|---|---:|---:|---:|" + "---:|" * (steps + 3),
    ]
    for name, rows in finals.items():
        intervals = pooled_intervals([row.evaluation() for row in rows])
        cells = [_with_interval(*intervals[step]) if step < len(intervals) else "" for step in range(steps)]
        minutes = np.mean([row.minutes for row in rows])
        update = np.mean([row.update_seconds / max(1, row.iteration) for row in rows])
        trained = rows[0].iteration > 0
        others = finals.get("pretrain", [])
        # A pretraining that is not as far says nothing.
        comparable = trained and bool(others) and others[0].iteration == rows[0].iteration
        shown = comparable and name not in ("pretrain", "oracle")
        above = f"{100.0 * probability_above(rows, others):.0f} %" if shown else ""
        lines.append(
            f"| {name} | {len(rows)} | {rows[0].iteration} | {np.mean([row.env_steps for row in rows]) / 1e6:.1f} M | "
            + " | ".join(cells)
            + (f" | {minutes:.1f} | {update:.2f} | " if trained else " | | | ")
            + above
            + " |"
        )
    # That of several seeds comes first.
    scopes = sorted({interval_scope([row.evaluation() for row in rows]) for rows in finals.values()})
    scope = "; where there is one seed, ".join(scopes)
    return "\n".join(lines) + f"\n\nBrackets hold 95 % intervals: {scope}."


def probability_above(rows: Sequence[Row], others: Sequence[Row], step: int = _STEP) -> float:
    """Return how often, over all pairs of trainings and all tasks, the one has the higher return after `step` steps.

    Source: Agarwal et al. 2021, probability of improvement, https://arxiv.org/abs/2108.13264
    """
    pairs = [
        np.sign(row.task_returns[:, step] - other.task_returns[:, step])
        for row in rows
        for other in others
        if row.task_returns.shape[1] > step
    ]
    return float(np.mean((np.array(pairs) + 1.0) / 2.0)) if pairs else float("nan")


def _threshold_table(found: dict[str, list[Row]], threshold: float) -> str:
    lines = [
        f"Until the return after one step is at least {threshold:g} in two evaluations in a row:",
        "",
        "| | trainings | that reach it | environment steps | minutes |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, rows in found.items():
        trainings = [of_seed for of_seed in by_seed(rows).values() if len(of_seed) > 1]
        if not trainings or rows[0].task_returns.shape[1] <= _STEP:
            continue
        reached = passing_rows(trainings, threshold)
        steps = f"{np.mean([row.env_steps for row in reached]) / 1e6:.1f} M" if reached else ""
        minutes = f"{np.mean([row.minutes for row in reached]):.1f}" if reached else ""
        lines.append(f"| {name} | {len(trainings)} | {len(reached)} | {steps} | {minutes} |")
    return "\n".join(lines)


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.1f}" + (f" [{low:.1f}, {high:.1f}]" if np.isfinite(low) else "")


def draw_charts(plan: Plan, draw: Draw) -> list[Path]:
    """Draw one chart for each family with results, and return their files."""
    import matplotlib

    matplotlib.use("Agg")
    # The same bytes for the same results.
    matplotlib.rcParams["svg.hashsalt"] = "maml_rl"
    charts = []
    for family in plan.families.values():
        if rows_of(plan, family):
            charts.append(chart_of(plan, family))
            charts[-1].parent.mkdir(parents=True, exist_ok=True)
            draw(plan, family, charts[-1])
    return charts


def draw_curves(plan: Plan, family: Family, path: Path) -> None:
    """Draw the return after one step over environment steps and over minutes, and the final returns as bars."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(15.0, 5.2), layout="constrained")
    palette = pyplot.get_cmap("tab20")
    colors = {name: palette(index % 20) for index, name in enumerate(plan.contenders)}
    found = rows_of(plan, family)
    for name in found:
        trainings = [of_seed for of_seed in by_seed(found[name]).values() if len(of_seed) > 1]
        if not trainings:
            continue
        common = sorted(set.intersection(*({row.iteration for row in of_seed} for of_seed in trainings)))
        at = [[row for row in of_seed if row.iteration in common] for of_seed in trainings]
        returns = np.array([[row.returns()[min(_STEP, len(row.returns()) - 1)] for row in of_seed] for of_seed in at])
        for panel, across in (
            (panels[0], np.mean([[row.env_steps / 1e6 for row in of_seed] for of_seed in at], axis=0)),
            (panels[1], np.mean([[row.minutes for row in of_seed] for of_seed in at], axis=0)),
        ):
            panel.plot(across, returns.mean(axis=0), color=colors[name], label=name, lw=1.6)
            panel.fill_between(across, returns.min(axis=0), returns.max(axis=0), color=colors[name], alpha=0.15, lw=0)
    for panel, label in ((panels[0], "million environment steps"), (panels[1], "minutes of sampling and updates")):
        panel.set(xlabel=label, ylabel="return after one step")
        panel.spines[["top", "right"]].set_visible(False)
        if family.threshold is not None:
            panel.axhline(family.threshold, color="0.6", lw=0.8, ls=":")
    _draw_final(panels[2], compared_rows(plan, found), colors)
    figure.suptitle(family.title, x=0.01, ha="left", fontsize=11)
    _add_legend(figure, *panels[0].get_legend_handles_labels())
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _add_legend(figure: "Figure", handles: list[Any], labels: list[str]) -> None:
    """Put a legend below the panels, in as many columns as the figure is wide."""
    for columns in range(min(7, len(labels)), 0, -1):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        if legend.get_window_extent().width <= figure.bbox.width or columns == 1:
            return
        legend.remove()


def _draw_final(panel: "Axes", finals: dict[str, list[Row]], colors: dict[str, Any]) -> None:
    for place, (name, rows) in enumerate(finals.items()):
        intervals: Values = pooled_intervals([row.evaluation() for row in rows])
        value, low, high = intervals[min(_STEP, len(intervals) - 1)]
        reach = [[value - low], [high - value]] if np.isfinite(low) else None
        panel.errorbar([value], [place], xerr=reach, fmt="o", color=colors[name], capsize=3)
    panel.set_yticks(range(len(finals)), list(finals))
    panel.invert_yaxis()
    panel.set_xlabel("return after one step (oracle: without),\n95 % interval")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="x", color="0.9")
