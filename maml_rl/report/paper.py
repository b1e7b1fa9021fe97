"""A comparison for a paper: a figure and a table of policies that were measured on the same tasks.

The quantities are those of rliable: interquartile mean, performance profile, probability of improvement. Its
interquartile mean drops whole values, a quarter of them rounded down at each end, so it is that of the middle half
where their number is a multiple of 4; here values at the edges count with the share of them that is inside.

Source: Agarwal et al. 2021, https://arxiv.org/abs/2108.13264
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maml_rl.errors import ConfigError, explain
from maml_rl.results.comparable import common_steps
from maml_rl.results.evaluation import (
    Line,
    difference_interval,
    pooled_intervals,
    profile_intervals,
    returns_table,
    share_tasks,
)
from maml_rl.results.scales import readable_count
from maml_rl.results.statistics import interquartile_mean
from maml_rl.results.verdict import GroupResult, after, base_of

# Okabe and Ito 2008: colors that readers with any color vision tell apart; and dashes, for prints in gray.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)))
# The text width of a page, in inches; and iterations over whose mean each curve is smoothed.
_WIDTH, _SMOOTHING, _THRESHOLDS = 6.75, 5, 201
_ENDINGS = (".pdf", ".svg", ".png")


def parts(results: Sequence[GroupResult]) -> list[Sequence[GroupResult]]:
    """Return the comparison; or of a mixture the normalized one, where that is known, and that of each family."""
    names = results[0].evaluations[0].parts()
    return [[side.part(name) for side in results] for name in names] or [results]


def table(results: Sequence[GroupResult], *, latex: bool = False) -> str:
    """Return the numbers of a comparison in Markdown, or in LaTeX with booktabs."""
    lines = [Line(each.group.name, each.evaluations) for each in results]
    found = returns_table(lines, base=lines[base_of(results)], last=True)
    return found.latex(caption(results)) if latex else found.markdown(caption(results))


def caption(results: Sequence[GroupResult]) -> str:
    """Return what the numbers of a comparison are."""
    first = results[0].evaluations[0]
    everyone = [each for result in results for each in result.evaluations]
    kind = "test" if first.fixed_tasks else "new"
    tasks = f"the same {len(first.tasks)} {kind} tasks" if share_tasks(everyone) else f"{kind} tasks of each run"
    steps = min(each for result in results for each in result.env_steps)
    at = f" at {readable_count(steps)} environment steps" if steps > 0.0 else ""
    return (
        f"Returns on {tasks} of {first.env_name}, {after(results)}{at}. In brackets are 95 % intervals over runs"
        f"{' and tasks' * (not first.fixed_tasks)}; n is the number of runs. The interval of the difference says which "
        "is better; the probability is of a higher return on a task, and has no interval of its own."
    )


def check_figure(path: Path) -> None:
    """Refuse a figure that could not be written, before anything is trained."""
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError(f"--figure {path} must end with {', '.join(_ENDINGS)}")
    try:
        import matplotlib.figure  # noqa: F401
    # One that is there and broken, as beside another NumPy, may raise anything.
    except Exception as error:
        raise ConfigError(
            f"a figure needs matplotlib, which cannot be imported ({explain(error)}); run pip install "
            "'maml-rl[figures]'"
        ) from None


def write_figure(measured: Sequence[GroupResult], path: Path) -> None:
    """Write a figure as wide as a page: curves, interquartile means, profiles, and probabilities of improvement."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text that stays text: in PDF as TrueType, which publishers ask for.
    style: Any = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42}
    style |= {"svg.fonttype": "none", "svg.hashsalt": "maml-rl", "legend.frameon": False}
    with rc_context(style):
        figure = Figure(figsize=(_WIDTH, 0.68 * _WIDTH), layout="constrained")
        (curves, means), (profiles, better) = figure.subplots(2, 2)
        _draw_curves(curves, measured)
        _draw_means(means, measured)
        _draw_profiles(profiles, measured)
        _draw_differences(better, measured)
        handles, labels = curves.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(measured), 3))
        # Without the time, so that the same runs give the same file.
        date = {".pdf": "CreationDate", ".svg": "Date"}.get(path.suffix.lower())
        figure.savefig(path, dpi=300, metadata={date: None} if date else None)


def _style(index: int) -> dict[str, Any]:
    return {"color": _COLORS[index % len(_COLORS)], "linestyle": _DASHES[index % len(_DASHES)]}


def _draw_curves(axes: Any, measured: Sequence[GroupResult]) -> None:
    limit = common_steps([each.group for each in measured])
    by_steps = np.isfinite(limit) and limit > 0.0
    unit, name = (1e6, "million environment steps") if limit >= 1e6 else (1e3, "thousand environment steps")
    key = "evaluation/return/" if all(each.group.keys("evaluation/return/") for each in measured) else "return/"
    for index, each in enumerate(measured):
        curve = each.group.curve(each.group.keys(key)[-1], _SMOOTHING if key == "return/" else 1)
        steps = curve.steps if by_steps else curve.iterations.astype(np.float64)
        shown = np.isfinite(curve.mean) & (steps <= limit * 1.001 if by_steps else True)
        x = steps[shown] / (unit if by_steps else 1.0)
        # A single evaluation is a point.
        marker = "o" if shown.sum() == 1 else None
        axes.plot(x, curve.mean[shown], label=_head(each), marker=marker, markersize=3, **_style(index))
        # The interval of two seeds would fill the chart.
        if len(each.group.runs) > 2:
            axes.fill_between(x, curve.low[shown], curve.high[shown], color=_style(index)["color"], alpha=0.2, lw=0)
    axes.set(
        title="(a) training" if key == "return/" else "(a) evaluations during training",
        xlabel=name if by_steps else "iteration",
        ylabel="return after adaptation",
    )


def _draw_means(axes: Any, measured: Sequence[GroupResult]) -> None:
    for index, each in enumerate(measured):
        intervals = pooled_intervals(each.evaluations, interquartile_mean)
        for place, filled in ((0, False), (-1, True)):
            value, low, high = intervals[place]
            color = _style(index)["color"]
            face = color if filled else "white"
            label = None if index else "after adaptation" if filled else "before adaptation"
            y = index + (0.12 if filled else -0.12)
            if np.isfinite(low):
                axes.plot([low, high], [y, y], color=color, lw=1.2)
            axes.plot(value, y, "o", color=color, markerfacecolor=face, markersize=4, label=label)
    axes.set_yticks(range(len(measured)), [each.group.name for each in measured])
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set(title="(b) new tasks", xlabel="interquartile mean of the return")
    axes.legend(fontsize=7)


def _draw_profiles(axes: Any, measured: Sequence[GroupResult]) -> None:
    returns = np.concatenate([each.task_returns()[:, -1] for side in measured for each in side.evaluations])
    room = 0.02 * max(float(np.ptp(returns)), 1e-6)
    thresholds = np.linspace(returns.min() - room, returns.max() + room, _THRESHOLDS)
    for index, each in enumerate(measured):
        share, low, high = profile_intervals(each.evaluations, thresholds).T
        axes.plot(thresholds, share, **_style(index))
        if len(each.evaluations) > 2:
            axes.fill_between(thresholds, low, high, color=_style(index)["color"], alpha=0.2, lw=0)
    axes.set(title="(c) performance profiles", xlabel="return", ylabel="share of runs and tasks above it")
    axes.set_ylim(-0.02, 1.02)


def _draw_differences(axes: Any, measured: Sequence[GroupResult]) -> None:
    base = measured[base_of(measured)]
    others = [each for each in measured if each is not base]
    for place, other in enumerate(others):
        value, low, high = difference_interval(other.evaluations, base.evaluations)
        if np.isfinite(low):
            axes.plot([low, high], [place, place], color="black", lw=1.2)
        axes.plot(value, place, "o", color="black", markersize=4)
    axes.axvline(0.0, color="gray", lw=0.8, linestyle=":")
    axes.set_yticks(range(len(others)), [each.group.name for each in others])
    axes.set_ylim(len(others) - 0.5, -0.5)
    axes.set(title=f"(d) difference to {base.group.name}", xlabel="difference of the mean returns")


def _head(result: GroupResult) -> str:
    return f"{result.group.name} (n = {len(result.evaluations)})"
