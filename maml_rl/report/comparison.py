"""Returns after each gradient step on new tasks: of one policy, or of several policies and their baselines."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from maml_rl.experiment.comparable import METHODS
from maml_rl.experiment.evaluate import (
    Evaluation,
    difference_interval,
    improvement_interval,
    interval_scope,
    pooled_intervals,
    profile_intervals,
    same_tasks,
)
from maml_rl.experiment.statistics import ENOUGH_TASKS, interquartile_mean, mean
from maml_rl.report.curves import figure, group_css, legend, scrolling
from maml_rl.report.evaluations import GroupResult
from maml_rl.report.markup import Markup, element
from maml_rl.report.plot import Plot
from maml_rl.report.published import published_returns
from maml_rl.report.scales import Span, decimals, readable, readable_interval

# Maximum number of numbers below an axis.
_MOST_NAMES = 12
# Returns at which a profile is drawn.
_THRESHOLDS = 81
# Few runs are in a table one by one, too: their interval assumes more of them than anybody can see.
_FEW_RUNS = 5
_CHANCE = "probability of improvement"

Line = tuple[str, str, Sequence[Evaluation]]


def step_returns(results: Sequence[GroupResult]) -> Markup | None:
    """Return the chart of returns on new tasks after each gradient step; None where nothing was evaluated.

    An oracle takes no steps; it is a level.

    Source: Finn et al. 2017, figures 4 and 5, https://arxiv.org/abs/1703.03400
    """
    lines = _lines(results)
    if not lines:
        return None
    intervals = [pooled_intervals(evaluations) for _, _, evaluations in lines]
    sources = _sources(results)
    evaluated = [(result.group.config, evaluation) for result in results for evaluation in result.evaluations]
    published = next((returns for each in evaluated if (returns := published_returns(*each))), None)
    steps = max([len(values) for values in intervals] + [len(published or ())])
    counted = _counted(lines)
    # The interval of two seeds is so wide that it would flatten the chart: the table has it.
    two_seeds = [len(evaluations) == 2 for _, _, evaluations in lines]
    bounds = [values[:, :1] if two else values for values, two in zip(intervals, two_seeds, strict=True)]
    plot = Plot(
        Span(-0.2, steps - 0.8),
        Span.of(*bounds, *([np.array(published)] if published else []), *(curve[:steps] for _, _, curve in sources)),
        "; ".join(
            f"{name}: " + ", ".join(readable(row[0]) for row in values)
            for (_, name, _), values in zip(lines, intervals, strict=True)
        )
        + (f" in each {counted}." if counted else " after 0, 1, ... gradient steps."),
        x_label=f"{counted or 'gradient steps'} on a new task",
        y_label="mean return",
        # Of many, some.
        x_names=[(step, str(step + bool(counted))) for step in range(0, steps, -(-steps // _MOST_NAMES))],
    )
    entries = [(css, name) for css, name, _ in lines]
    if published is not None:
        entries.append(("published", "MAML as published (Finn et al. 2017)"))
        plot.line(range(len(published)), published, "published")
        plot.dots(range(len(published)), published, "published", radius=3.5, titles=[*map(readable, published)])
    for css, name, curve in sources:
        entries.append((f"{css} source", name))
        plot.line(range(min(steps, len(curve))), curve[:steps], f"{css} source")
    # Side by side, so that no interval hides another.
    many = steps > _MOST_NAMES
    shifts = np.linspace(-1.0, 1.0, len(lines)) * (0.0 if many else min(0.03 * (len(lines) - 1), 0.15))
    for (css, _, _), values, two, shift in zip(lines, intervals, two_seeds, shifts, strict=True):
        places = np.arange(len(values)) + shift
        if len(values) == 1 and steps > 1:
            plot.line([0, steps - 1], [values[0, 0]] * 2, f"{css} level")
        plot.line(places, values[:, 0], css)
        if many:
            if not two:
                plot.band(places, values[:, 1], values[:, 2], css)
            continue
        if not two:
            for place, (_, low, high) in zip(places, values, strict=True):
                plot.interval(place, low, high, css)
        titles = [" ".join(readable_interval(interval)) for interval in values]
        plot.dots(places, values[:, 0], css, titles=titles)
    drawn = "Bands" if many else "Bars"
    note = f"{_which_tasks(lines)} {drawn} are 95 % intervals{'; of two seeds, the table has them' * any(two_seeds)}."
    if sources:
        note += " The recorded learners are those of the histories, on their own tasks, from their first episode on."
    title = f"Return by {counted}" if counted else "Return after each gradient step"
    return figure(title, note, legend(entries), plot.svg())


def step_table(results: Sequence[GroupResult]) -> Markup | None:
    """Return the numbers of `step_returns`, with interquartile means; None where nothing was evaluated."""
    lines = _lines(results)
    if not lines:
        return None
    steps = max(evaluation.returns.shape[1] for _, _, evaluations in lines for evaluation in evaluations)
    counted = _counted(lines)
    # Of many, some, the last among them.
    shown = sorted({*range(0, steps, -(-steps // _MOST_NAMES)), steps - 1})
    head = element(
        "tr",
        element("th", counted or "gradient steps"),
        element("th"),
        [element("th", str(step + bool(counted))) for step in shown],
    )
    statistics = {"mean": mean, "interquartile mean": interquartile_mean}
    numbers = [
        {label: pooled_intervals(evaluations, each) for label, each in statistics.items()}
        for _, _, evaluations in lines
    ]
    digits = [
        decimals(*(each[step, 0] for row in numbers for each in row.values() if step < len(each))) for step in shown
    ]
    rows = []
    for (css, name, evaluations), row in zip(lines, numbers, strict=True):
        each = evaluations if 1 < len(evaluations) <= _FEW_RUNS else []
        title = element("th", element("b", name, class_=css), rowspan=2 + bool(each))
        for label, intervals in row.items():
            cells = []
            for step, precision in zip(shown, digits, strict=True):
                if step >= len(intervals):
                    break
                interval = intervals[step]
                value, bounds = readable_interval(interval, precision)
                cells.append(element("td", value, element("small", f" {bounds}")))
            rows.append(element("tr", title if label == "mean" else None, element("th", label), cells))
        if each:
            means = [evaluation.task_returns().mean(axis=0) for evaluation in each]
            cells = [
                element("td", element("small", ", ".join(readable(mean[step], precision) for mean in means)))
                for step, precision in zip(shown, digits, strict=True)
                if step < min(map(len, means))
            ]
            rows.append(element("tr", None, element("th", "mean of each run"), cells))
    table = scrolling("Returns in numbers", element("table", head, rows, class_="facts numbers"))
    scopes: dict[str, list[str]] = {}
    for _, name, evaluations in lines:
        scopes.setdefault(interval_scope(evaluations), []).append(name)
    sentences = [scope if len(scopes) == 1 else f"of {' and '.join(names)}, {scope}" for scope, names in scopes.items()]
    note = f"{_which_tasks(lines)} In brackets are 95 % intervals: {'; '.join(sentences)}."
    return figure("Returns in numbers", note, table, css="wide")


def _counted(lines: Sequence[Line]) -> str:
    """Return what all returns are counted by, as "episode of the trial"; empty for steps, and where they differ."""
    nouns = {evaluation.columns for _, _, evaluations in lines for evaluation in evaluations}
    noun = nouns.pop()
    return "" if nouns or noun == "step" else noun + " of the trial" * (noun == "episode")


def difference_table(results: Sequence[GroupResult]) -> Markup | None:
    """Return by how much each group is above the one that it is compared with; None for fewer than two.

    They are compared with pretraining where it is one of them, and else with the first. The compared return is that
    after the last step, or in the last episode of a trial, and every recorded info there.
    """
    known = [result for result in results if result.evaluations]
    if len(known) < 2:
        return None
    names = [result.group.name for result in known]
    place = next((index for index, result in enumerate(known) if result.group.config.method == "pretrain"), 0)
    base = known[place]
    everyone = [evaluation for result in known for evaluation in result.evaluations]
    infos = sorted(set.intersection(*(set(evaluation.infos) for evaluation in everyone)))
    shared = all(same_tasks(evaluation.tasks, everyone[0].tasks) for evaluation in everyone)
    heads = ["return", *([_CHANCE] if shared else []), *(f"mean {name}" for name in infos)]
    rows = []
    for name, result in zip(names, known, strict=True):
        if result is base:
            continue
        found = [
            readable_interval(difference_interval(result.evaluations, base.evaluations, info))
            for info in (None, *infos)
        ]
        if shared:
            found.insert(1, _in_percent(improvement_interval(result.evaluations, base.evaluations)))
        cells = [element("td", value, element("small", f" {bounds}")) for value, bounds in found]
        rows.append(element("tr", element("th", element("b", name, class_=group_css(result.group))), cells))
    title = f"Difference to {names[place]}"
    head = element("tr", element("th"), [element("th", label) for label in heads])
    how = "task by task" if shared else "on different tasks"
    note = (
        f"After adaptation, {how}. In brackets are 95 % intervals. Two experiments differ if the interval of the "
        "difference excludes 0, even if the intervals of their means overlap, or if that of the probability excludes "
        f"50 %. A missing interval is unknown; it needs {ENOUGH_TASKS} tasks, or several adaptations to fixed tasks."
    )
    return figure(title, note, scrolling(title, element("table", head, rows, class_="facts numbers")), css="wide")


def _in_percent(shares: NDArray[np.float64]) -> tuple[str, str]:
    """Return a share and its interval; nothing for an interval that is unknown."""
    value, low, high = shares.tolist()
    return f"{value:.0%}", f"[{low:.0%}, {high:.0%}]" if np.isfinite(low) else ""


def performance_profiles(results: Sequence[GroupResult]) -> Markup | None:
    """Return the chart of the share of trainings and tasks above each return; None for a single policy.

    Source: Agarwal et al. 2021, section 4.2, https://arxiv.org/abs/2108.13264
    """
    lines = _lines(results)
    if sum(len(evaluations) for css, _, evaluations in lines if css != "untrained") < 2:
        return None
    returns = np.concatenate([each.task_returns()[:, -1] for _, _, evaluations in lines for each in evaluations])
    span = Span.of(returns)
    thresholds = np.linspace(span.low, span.high, _THRESHOLDS)
    profiles = [profile_intervals(evaluations, thresholds).T for _, _, evaluations in lines]
    middles = [float(np.median([each.task_returns()[:, -1] for each in evaluations])) for _, _, evaluations in lines]
    plot = Plot(
        span,
        Span(0.0, 1.04),
        "Performance profiles. Half of the returns are above "
        + ", ".join(f"{readable(middle)} ({name})" for (_, name, _), middle in zip(lines, middles, strict=True))
        + ".",
        x_label="return on a new task after adaptation",
        y_label="share of trainings and tasks above it",
    )
    for (css, _, evaluations), (shares, low, high) in zip(lines, profiles, strict=True):
        # The interval of two seeds would fill the chart.
        if len(evaluations) != 2:
            plot.band(thresholds, low, high, css)
        plot.line(thresholds, shares, css)
    plot.readings(
        thresholds,
        [f"above {readable(threshold)}" for threshold in thresholds],
        [(css, name, 100.0 * shares) for (css, name, _), (shares, *_) in zip(lines, profiles, strict=True)],
        unit=" %",
    )
    note = (
        f"{_which_tasks(lines)} A line above another one is better at every return; a steep one has tasks of similar "
        f"returns. Bands are 95 % intervals: {interval_scope(lines[0][2])}."
    )
    return figure("Performance profiles", note, legend([(css, name) for css, name, _ in lines]), plot.svg())


def _lines(results: Sequence[GroupResult]) -> list[Line]:
    """Return (class, name, evaluations) of every policy that was evaluated."""
    known = [(index, result) for index, result in enumerate(results) if result.evaluations]
    several = len(results) > 1
    names = [result.group.name for result in results]
    lines: list[Line] = [
        (
            group_css(result.group) if several else "run",
            names[index] if several else f"this policy, {METHODS[result.group.config.method]}",
            result.evaluations,
        )
        for index, result in known
    ]
    # One of each is enough: untrained policies do not depend on the training.
    untrained = next((result.untrained for _, result in known if result.untrained is not None), None)
    if untrained is not None:
        lines.append(("untrained", "random initialization", [untrained]))
    return lines


def _sources(results: Sequence[GroupResult]) -> list[tuple[str, str, NDArray[np.float32]]]:
    """Return (class, name, returns by episode) of the learners whose histories were learned from."""
    several = len(results) > 1
    names = [result.group.name for result in results]
    found = []
    for name, result in zip(names, results, strict=True):
        if result.sampled is not None and (curve := result.sampled.source_returns) is not None:
            whose = f"what {name} was learned from" if several else "what was learned from"
            found.append((group_css(result.group) if several else "run", f"{whose} (dashed)", curve))
    return found


def _which_tasks(lines: Sequence[Line]) -> str:
    evaluations = [evaluation for _, _, each in lines for evaluation in each]
    first = evaluations[0]
    origin = "of a file" if first.fixed_tasks else "that training never drew"
    episodes = sorted({evaluation.returns.shape[2] // evaluation.repetitions for evaluation in evaluations})
    how = f"with {' or '.join(map(str, episodes))} new episodes before each step"
    if _counted(lines) == "episode of the trial":
        how = "one trial of each"
    if _same(lines):
        return f"On {'the same ' if len(evaluations) > 1 else ''}{len(first.tasks)} tasks {origin}, {how}."
    count = sum(len(evaluation.tasks) for evaluation in lines[0][2])
    return f"On {count} tasks {origin}, not the same for all, {how}."


def _same(lines: Sequence[Line]) -> bool:
    first, *others = (evaluation for _, _, evaluations in lines for evaluation in evaluations)
    return all(same_tasks(evaluation.tasks, first.tasks) for evaluation in others)
