"""Returns after each gradient step on new tasks: of one policy, or of several policies and their baselines."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from maml_rl.report.curves import group_css
from maml_rl.report.evaluations import GroupResult
from maml_rl.report.figures import Series, figure, legend, named, numbers, row, table
from maml_rl.report.markup import Markup, element
from maml_rl.report.plot import Axis, Plot
from maml_rl.report.published import published_returns
from maml_rl.results.comparable import (
    METHODS,
    RunGroup,
    common_steps,
    difference_at_common_steps,
    equal_steps,
    readable_value,
    unequal_settings,
)
from maml_rl.results.evaluation import (
    Evaluation,
    difference_interval,
    improvement_interval,
    interval_scope,
    pooled_intervals,
    profile_intervals,
    share_tasks,
)
from maml_rl.results.scales import Span, counted, decimals, readable, readable_count, readable_interval, readable_share
from maml_rl.results.statistics import ENOUGH_TASKS, interquartile_mean, mean

# Maximum number of numbers below an axis.
_MOST_NAMES = 12
# Returns at which a profile is drawn.
_THRESHOLDS = 81
# Few runs are in a table one by one, too: their interval assumes more of them than anybody can see.
_FEW_RUNS = 5
# Settings that differ and are named at the top of the page, with their values where these are short.
_MOST_SETTINGS, _LONGEST_VALUES = 6, 40
_CHANCE = "probability of improvement"

Line = tuple[str, str, Sequence[Evaluation]]


def verdict(results: Sequence[GroupResult]) -> Markup | None:
    """Return which experiment of one family has the highest return, and by how much; None for fewer than two.

    Policies with equal environment steps are compared on new tasks; others, and those that were not tried there, by
    what was recorded of the training where all have their common steps.
    """
    if len(results) < 2:
        return None
    groups = [result.group for result in results]
    equal = equal_steps(groups)
    if equal and all(result.evaluations for result in results):
        returns = [float(pooled_intervals(result.evaluations)[-1, 0]) for result in results]
    else:
        equal = False
        returns = [_recorded(group, groups) for group in groups]
    order = np.argsort([-value if np.isfinite(value) else np.inf for value in returns], kind="stable")
    best, *others = [results[index] for index in order]
    sentences = [_lead(best, other, tried=equal) for other in others]
    unequal = unequal_settings(groups)
    if unequal:
        texts = {key: "; ".join(dict.fromkeys(map(readable_value, values))) for key, values in unequal.items()}
        named_settings = [f"{key} ({text})" if len(text) <= _LONGEST_VALUES else key for key, text in texts.items()][
            :_MOST_SETTINGS
        ]
        more = f", and {len(unequal) - _MOST_SETTINGS} more" if len(unequal) > _MOST_SETTINGS else ""
        caution = f"Besides algorithm and seed, the configs differ in {', '.join(named_settings)}{more}."
    else:
        caution = ""
    return element(
        "div",
        element("h2", "Verdict"),
        [element("p", sentence) for sentence in sentences],
        element("p", caution, class_="caution") if caution else None,
        class_="card verdict",
    )


def _recorded(group: RunGroup, groups: Sequence[RunGroup]) -> float:
    """Return how far a group is above the first of several at the steps that both have; NaN where that is unknown."""
    found = difference_at_common_steps(group, groups[0])
    return float(found.interval[0]) if found is not None else float("nan")


def _lead(best: GroupResult, other: GroupResult, *, tried: bool) -> list[Markup | str]:
    """Return a sentence about the difference of two experiments, with its interval, the number of runs and the steps.

    Args:
        best: the one with the higher return.
        other: the one that it is compared with.
        tried: whether their policies were tried on new tasks at equal environment steps.
    """
    groups = best.group, other.group
    names = [named(group_css(group), group.name) for group in groups]
    at = f"{readable_count(common_steps(groups))} environment steps"
    if tried:
        found = difference_interval(best.evaluations, other.evaluations)
        counts = [len(result.evaluations) for result in (best, other)]
        everyone = [*best.evaluations, *other.evaluations]
        numbers_of_tasks = " or ".join(map(str, sorted({len(each.tasks) for each in everyone})))
        where = f"{numbers_of_tasks} new tasks{', different ones for each run' * (not share_tasks(everyone))}"
    else:
        recorded = difference_at_common_steps(*groups)
        if recorded is None:
            return [
                names[0],
                " and ",
                names[1],
                " have no returns at the same environment steps, and are not compared.",
            ]
        found, counts = recorded.interval, [len(group.runs) for group in groups]
        where = "held-out tasks during training" if recorded.evaluated else "training tasks"
        if not equal_steps(groups):
            at += ", which both have"
    runs = f"{counts[0]} and {counts[1]} runs, {where}"
    value, bounds = readable_interval(found)
    if not bounds:
        why = "a single run has no interval" if min(counts) == 1 else "the interval is unknown"
        return [f"At {at}, the return of ", names[0], " is above that of ", names[1], f" by {value} ({runs}); {why}."]
    caution = " The interval does not cover the seeds of an experiment with a single run." * (min(counts) == 1)
    if found[1] <= 0.0:
        return [
            f"At {at}, ",
            names[0],
            " and ",
            names[1],
            f" do not differ clearly: {value} {bounds} ({runs}).{caution}",
        ]
    return [f"At {at}, ", names[0], " leads ", names[1], f" by {value} {bounds} ({runs}).{caution}"]


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
    known = [np.array(published)] if published else []
    plot = Plot(
        # Of many names, some.
        Axis(
            Span(-0.2, steps - 0.8),
            f"{counted or 'gradient steps'} on a new task",
            [(step, str(step + bool(counted))) for step in range(0, steps, -(-steps // _MOST_NAMES))],
        ),
        Axis(Span.of(*bounds, *known, *(curve[:steps] for _, _, curve in sources)), "mean return"),
        "; ".join(
            f"{name}: " + ", ".join(readable(row[0]) for row in values)
            for (_, name, _), values in zip(lines, intervals, strict=True)
        )
        + (f" in each {counted}." if counted else " after 0, 1, ... gradient steps."),
    )
    entries = _entries(lines)
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
        if len(values) > 1:
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
    if not _trained_alike(results):
        note += " The policies were trained for unequal environment steps, so the chart does not compare algorithms."
    if sources:
        note += " The recorded learners are those of the histories, on their own tasks, from their first episode on."
    title = f"Return by {counted}" if counted else "Return after each gradient step"
    series = [
        Series(css, name, {counted or "gradient steps": np.arange(len(values)) + bool(counted)}, *values.T)
        for (css, name, _), values in zip(lines, intervals, strict=True)
    ]
    return figure(title, note, legend(entries), plot.svg(), data=numbers("mean return", series))


def step_table(results: Sequence[GroupResult]) -> Markup | None:
    """Return the numbers of `step_returns`, with interquartile means; None where nothing was evaluated."""
    lines = _lines(results)
    if not lines:
        return None
    steps = max(evaluation.returns.shape[1] for _, _, evaluations in lines for evaluation in evaluations)
    counted = _counted(lines)
    # Of many, some, the last among them.
    shown = sorted({*range(0, steps, -(-steps // _MOST_NAMES)), steps - 1})
    head = [counted or "gradient steps", "statistic", *(str(step + bool(counted)) for step in shown)]
    statistics = {"mean": mean, "interquartile mean": interquartile_mean}
    found = [
        {label: pooled_intervals(evaluations, each) for label, each in statistics.items()}
        for _, _, evaluations in lines
    ]
    digits = [
        decimals(*(each[step, 0] for values in found for each in values.values() if step < len(each))) for step in shown
    ]
    rows = []
    for (css, name, evaluations), values in zip(lines, found, strict=True):
        cells = {
            label: [
                element("td", value, element("small", f" {bounds}"))
                for step, precision in zip(shown, digits, strict=True)
                if step < len(intervals)
                for value, bounds in [readable_interval(intervals[step], precision)]
            ]
            for label, intervals in values.items()
        }
        if 1 < len(evaluations) <= _FEW_RUNS:
            means = [evaluation.task_returns().mean(axis=0) for evaluation in evaluations]
            cells["mean of each run"] = [
                element("td", element("small", ", ".join(readable(each[step], precision) for each in means)))
                for step, precision in zip(shown, digits, strict=True)
                if step < min(map(len, means))
            ]
        title = element("th", named(css, name), rowspan=len(cells), scope="rowgroup")
        for label, of_label in cells.items():
            first = title if label == "mean" else None
            rows.append(element("tr", first, element("th", label, scope="row"), of_label))
    content = table("Returns in numbers", head, rows, "facts numbers")
    scopes: dict[str, list[str]] = {}
    for _, name, evaluations in lines:
        scopes.setdefault(interval_scope(evaluations), []).append(name)
    sentences = [scope if len(scopes) == 1 else f"of {' and '.join(names)}, {scope}" for scope, names in scopes.items()]
    note = f"{_which_tasks(lines)} In brackets are 95 % intervals: {'; '.join(sentences)}."
    return figure("Returns in numbers", note, content, css="wide")


def _counted(lines: Sequence[Line]) -> str:
    """Return what all returns are counted by, as "episode of the trial"; empty for steps, and where they differ."""
    nouns = {evaluation.columns for _, _, evaluations in lines for evaluation in evaluations}
    noun = nouns.pop()
    return "" if nouns or noun == "step" else noun + " of the trial" * (noun == "episode")


def difference_table(results: Sequence[GroupResult]) -> Markup | None:
    """Return by how much each group is above the one that it is compared with.

    None for fewer than two, and where their policies have unequal environment steps.

    They are compared with pretraining where it is one of them, and else with the first. The compared return is that
    after the last step, or in the last episode of a trial, and every recorded info there.
    """
    known = [result for result in results if result.evaluations]
    if len(known) < 2 or not _trained_alike(known):
        return None
    base = next((result for result in known if result.group.config.method == "pretrain"), known[0])
    everyone = [evaluation for result in known for evaluation in result.evaluations]
    infos = sorted(set.intersection(*(set(evaluation.infos) for evaluation in everyone)))
    shared = share_tasks(everyone)
    heads = ["experiment", "runs", "return", *([_CHANCE] if shared else []), *(f"mean {name}" for name in infos)]
    rows = []
    for result in known:
        if result is base:
            continue
        found = [
            readable_interval(difference_interval(result.evaluations, base.evaluations, info))
            for info in (None, *infos)
        ]
        if shared:
            found.insert(1, readable_share(improvement_interval(result.evaluations, base.evaluations)))
        cells = [element("td", value, element("small", f" {bounds}")) for value, bounds in found]
        counts = f"{len(result.evaluations)} and {len(base.evaluations)}"
        rows.append(row(named(group_css(result.group), result.group.name), element("td", counts), cells))
    title = f"Difference to {base.group.name}"
    how = "task by task" if shared else "on different tasks"
    note = (
        f"After adaptation, {how}. In brackets are 95 % intervals. Two experiments differ if the interval of the "
        "difference excludes 0, even if the intervals of their means overlap, or if that of the probability excludes "
        f"50 %. A missing interval is unknown; it needs {ENOUGH_TASKS} tasks, or several adaptations to fixed tasks."
    )
    return figure(title, note, table(title, heads, rows, "facts numbers"), css="wide")


def performance_profiles(results: Sequence[GroupResult]) -> Markup | None:
    """Return the chart of the share of trainings and tasks above each return.

    None for a single policy, and for experiments whose policies have unequal environment steps.

    Source: Agarwal et al. 2021, section 4.2, https://arxiv.org/abs/2108.13264
    """
    lines = _lines(results)
    alone = sum(len(evaluations) for css, _, evaluations in lines if css != "untrained") < 2
    if alone or not _trained_alike(results):
        return None
    returns = np.concatenate([each.task_returns()[:, -1] for _, _, evaluations in lines for each in evaluations])
    span = Span.of(returns)
    thresholds = np.linspace(span.low, span.high, _THRESHOLDS)
    profiles = [profile_intervals(evaluations, thresholds).T for _, _, evaluations in lines]
    middles = [float(np.median([each.task_returns()[:, -1] for each in evaluations])) for _, _, evaluations in lines]
    plot = Plot(
        Axis(span, "return on a new task after adaptation"),
        Axis(Span(0.0, 1.04), "share of trainings and tasks above it"),
        "Performance profiles. Half of the returns are above "
        + ", ".join(f"{readable(middle)} ({name})" for (_, name, _), middle in zip(lines, middles, strict=True))
        + ".",
    )
    for (css, _, evaluations), (shares, low, high) in zip(lines, profiles, strict=True):
        # The interval of two seeds would fill the chart.
        if len(evaluations) != 2:
            plot.band(thresholds, low, high, css)
        plot.line(thresholds, shares, css)
    series = [
        Series(css, name, {"return": thresholds}, *profile)
        for (css, name, _), profile in zip(lines, profiles, strict=True)
    ]
    data = numbers("share above", series, {"return": plot})
    note = (
        f"{_which_tasks(lines)} A line above another one is better at every return; a steep one has tasks of similar "
        f"returns. Bands are 95 % intervals: {interval_scope(lines[0][2])}."
    )
    return figure("Performance profiles", note, legend(_entries(lines)), plot.svg(), data=data)


def _lines(results: Sequence[GroupResult]) -> list[Line]:
    """Return (class, name, evaluations) of every policy that was evaluated."""
    known = [result for result in results if result.evaluations]
    several = len(results) > 1
    lines: list[Line] = [
        (
            group_css(result.group) if several else "run",
            result.group.name if several else f"this policy, {METHODS[result.group.config.method]}",
            result.evaluations,
        )
        for result in known
    ]
    # One of each is enough: untrained policies do not depend on the training.
    untrained = next((result.untrained for result in known if result.untrained is not None), None)
    if untrained is not None:
        lines.append(("untrained", "random initialization", [untrained]))
    return lines


def _entries(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return the entries of a legend, with the number of runs of each experiment."""
    return [
        (css, f"{name}, {counted(len(each), 'run')}" if css.startswith("group") else name) for css, name, each in lines
    ]


def _sources(results: Sequence[GroupResult]) -> list[tuple[str, str, NDArray[np.float32]]]:
    """Return (class, name, returns by episode) of the learners whose histories were learned from."""
    several = len(results) > 1
    found = []
    for result in results:
        if result.sampled is not None and (curve := result.sampled.source_returns) is not None:
            whose = f"what {result.group.name} was learned from" if several else "what was learned from"
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
    if share_tasks(evaluations):
        return f"On {'the same ' if len(evaluations) > 1 else ''}{len(first.tasks)} tasks {origin}, {how}."
    counts = sorted({len(evaluation.tasks) for evaluation in evaluations})
    return f"On {' or '.join(map(str, counts))} new tasks, different ones for each run, {how}."


def _trained_alike(results: Sequence[GroupResult]) -> bool:
    return len(results) < 2 or equal_steps([result.group for result in results])
