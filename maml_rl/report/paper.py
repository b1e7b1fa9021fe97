"""A comparison for a paper: a figure and a table of policies that were measured on the same tasks.

The quantities are those of rliable: interquartile mean, performance profile, probability of improvement. Its
interquartile mean drops whole values, a quarter of them rounded down at each end, so it is that of the middle half
where their number is a multiple of 4; here values at the edges count with the share of them that is inside.

Source: Agarwal et al. 2021, https://arxiv.org/abs/2108.13264
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maml_rl.report.curves import group_css
from maml_rl.report.plot import Plot, write_panels
from maml_rl.results.comparable import common_steps
from maml_rl.results.evaluation import (
    Line,
    difference_interval,
    pooled_intervals,
    profile_intervals,
    returns_table,
    share_tasks,
    whose_tasks_differ,
)
from maml_rl.results.scales import Axis, readable_count
from maml_rl.results.statistics import interquartile_mean
from maml_rl.results.verdict import GroupResult, after, base_of

# Of each chart, two of which are as wide as a page (6.75 inches); and iterations over whose mean curves are smoothed.
_WIDTH, _HEIGHT, _SMOOTHING, _THRESHOLDS, _DASHES = 306, 200, 5, 201, 4


def parts(results: Sequence[GroupResult]) -> list[Sequence[GroupResult]]:
    """Return the comparison; or of a mixture the normalized one, where that is known, and that of each family."""
    names = results[0].evaluations[0].parts()
    return [[side.part(name) for side in results] for name in names] or [results]


def table(results: Sequence[GroupResult], *, latex: bool = False) -> str:
    """Return the numbers of a comparison in Markdown, or in LaTeX with booktabs."""
    lines = [Line(result.group.name, result.evaluations) for result in results]
    returns = returns_table(lines, base=lines[base_of(results)], last=True)
    return returns.latex(caption(results)) if latex else returns.markdown(caption(results))


def caption(results: Sequence[GroupResult]) -> str:
    """Return what the numbers of a comparison are."""
    first = results[0].evaluations[0]
    everyone = [evaluation for result in results for evaluation in result.evaluations]
    kind = "test" if first.fixed_tasks else "new"
    differ = whose_tasks_differ([Line(result.group.name, result.evaluations) for result in results])
    tasks = f"the same {len(first.tasks)} {kind} tasks" if share_tasks(everyone) else f"{kind} tasks ({differ})"
    steps = min(each for result in results for each in result.env_steps)
    at = f" at {readable_count(steps)} environment steps" if steps > 0.0 else ""
    return (
        f"Returns on {tasks} of {first.env_name}, {after(results)}{at}. In brackets are 95 % intervals over runs"
        f"{' and tasks' * (not first.fixed_tasks)}; n is the number of runs. The interval of the difference says which "
        "is better; the probability is of a higher return on a task, and has no interval of its own."
    )


def write_figure(measured: Sequence[GroupResult], path: Path) -> None:
    """Write a figure as wide as a page: curves, interquartile means, profiles, and differences."""
    charts = (
        _curves(measured),
        ("(b) new tasks; open: before adaptation", _means(measured)),
        ("(c) performance profiles", _profiles(measured)),
        (f"(d) difference to {measured[base_of(measured)].group.name}", _differences(measured)),
    )
    write_panels(
        path,
        [("label", title, plot) for title, plot in charts],
        columns=2,
        key=[(_css(result), f"{result.group.name} (n = {len(result.evaluations)})") for result in measured],
        caption=f"{measured[0].evaluations[0].env_name}: returns {after(measured)}.",
    )


def _css(result: GroupResult) -> str:
    """Return the classes of a color for any color vision, and of dashes for prints in gray."""
    return f"{group_css(result.group)} dash{result.group.index % _DASHES}"


def _chart(x: Axis, y: Axis, summary: str) -> Plot:
    return Plot(x, y, summary, width=_WIDTH, height=_HEIGHT)


def _curves(measured: Sequence[GroupResult]) -> tuple[str, Plot]:
    recorded = all(result.group.keys("evaluation/return/") for result in measured)
    key = "evaluation/return/" if recorded else "return/"
    # A learner of recorded data samples nothing in training.
    measured = [result for result in measured if result.group.keys(key)]
    limit = common_steps([result.group for result in measured]) if measured else np.nan
    by_steps = bool(np.isfinite(limit) and limit > 0.0)
    shown = []
    for result in measured:
        curve = result.group.curve(result.group.keys(key)[-1], 1 if recorded else _SMOOTHING)
        x = curve.steps if by_steps else curve.iterations.astype(np.float64)
        known = np.isfinite(curve.mean) & (x <= limit * 1.001 if by_steps else True)
        # The interval of two seeds would fill the chart.
        bounds = [curve.low[known], curve.high[known]] if len(result.group.runs) > 2 else []
        shown.append((x[known], curve.mean[known], bounds))
    plot = _chart(
        Axis.of(
            [0.0],
            *(x for x, *_ in shown),
            label="environment steps" if by_steps else "iteration",
            margin=0.0,
            counts=True,
        ),
        Axis.of(*(line for _, mean, bounds in shown for line in (mean, *bounds)), label="return after adaptation"),
        "returns while training",
    )
    for result, (x, mean, bounds) in zip(measured, shown, strict=True):
        if bounds:
            plot.band(x, bounds[0], bounds[1], group_css(result.group))
        plot.line(x, mean, _css(result))
    return "(a) evaluations during training" if recorded else "(a) training", plot


def _named_rows(measured: Sequence[GroupResult]) -> Axis:
    """Return the axis with the names of experiments, the first on top."""
    names = [(-float(place), result.group.name) for place, result in enumerate(measured)]
    return Axis(0.5 - len(measured), 0.5, names=names)


def _means(measured: Sequence[GroupResult]) -> Plot:
    middles = [pooled_intervals(result.evaluations, interquartile_mean) for result in measured]
    x = Axis.of(*(values[[0, -1]] for values in middles), label="interquartile mean")
    plot = _chart(x, _named_rows(measured), "interquartile means of the returns on new tasks")
    for place, (result, intervals) in enumerate(zip(measured, middles, strict=True)):
        css = group_css(result.group)
        for (value, low, high), y, kind in ((intervals[0], 0.12, " open"), (intervals[-1], -0.12, "")):
            plot.across(low, high, y - place, css)
            plot.dots([value], [y - place], css + kind)
    return plot


def _profiles(measured: Sequence[GroupResult]) -> Plot:
    returns = (evaluation.task_returns()[:, -1] for side in measured for evaluation in side.evaluations)
    x = Axis.of(*returns, label="return after adaptation", margin=0.02)
    thresholds = np.linspace(x.low, x.high, _THRESHOLDS)
    y = Axis(0.0, 1.02, "share of runs and tasks above it")
    plot = _chart(x, y, "performance profiles")
    for result in measured:
        shares, low, high = profile_intervals(result.evaluations, thresholds).T
        if len(result.evaluations) > 2:
            plot.band(thresholds, low, high, group_css(result.group))
        plot.line(thresholds, shares, _css(result))
    return plot


def _differences(measured: Sequence[GroupResult]) -> Plot:
    base = measured[base_of(measured)]
    others = [result for result in measured if result is not base]
    differences = [difference_interval(other.evaluations, base.evaluations) for other in others]
    rows = _named_rows(others)
    plot = _chart(Axis.of([0.0], *differences, label="difference of the mean returns"), rows, "differences")
    plot.line([0.0, 0.0], [rows.low, rows.high], "rest level")
    for place, (other, (value, low, high)) in enumerate(zip(others, differences, strict=True)):
        plot.across(low, high, -place, group_css(other.group))
        plot.dots([value], [-place], group_css(other.group))
    return plot
