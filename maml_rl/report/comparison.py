"""Returns after each gradient step on new tasks: of one policy, or of several and what they are compared with."""

from collections.abc import Sequence

import numpy as np

from maml_rl.experiment.evaluate import Evaluation, interval_scope, pooled_intervals, same_tasks
from maml_rl.experiment.statistics import interquartile_mean, mean
from maml_rl.report.curves import METHODS, figure, group_css, group_names, legend
from maml_rl.report.markup import Markup, element
from maml_rl.report.plot import Plot
from maml_rl.report.published import published_returns
from maml_rl.report.scales import Span, readable
from maml_rl.report.trial import Findings

Line = tuple[str, str, Sequence[Evaluation]]


def step_returns(findings: Sequence[Findings]) -> Markup | None:
    """Return the chart of returns on new tasks after each gradient step; None where nothing was evaluated.

    An oracle takes no steps; it is a level that the others may reach.

    Source: Finn et al. 2017, figures 4 and 5, https://arxiv.org/abs/1703.03400
    """
    lines = _lines(findings)
    if not lines:
        return None
    intervals = [pooled_intervals(evaluations) for _, _, evaluations in lines]
    configs = [found.group.config for found in findings if found.evaluations]
    published = next((returns for config in configs if (returns := published_returns(config))), None)
    steps = max([len(values) for values in intervals] + [len(published or ())])
    plot = Plot(
        Span(-0.2, steps - 0.8),
        Span.of(*intervals, *([np.array(published)] if published else [])),
        "; ".join(
            f"{name}: " + ", ".join(readable(row[0]) for row in values)
            for (_, name, _), values in zip(lines, intervals, strict=True)
        )
        + " after 0, 1, ... gradient steps.",
        x_label="gradient steps on a new task",
        y_label="mean return",
        x_names=[(step, str(step)) for step in range(steps)],
    )
    entries = [(css, name) for css, name, _ in lines]
    if published is not None:
        entries.append(("published", "MAML as published (Finn et al. 2017)"))
        plot.line(range(len(published)), published, "published")
        plot.dots(range(len(published)), published, "published", radius=3.5, titles=[*map(readable, published)])
    for (css, _, _), values in zip(lines, intervals, strict=True):
        if len(values) == 1 and steps > 1:
            plot.line([0, steps - 1], [values[0, 0]] * 2, f"{css} level")
        plot.line(range(len(values)), values[:, 0], css)
        for step, (_, low, high) in enumerate(values):
            plot.interval(step, low, high, css)
        titles = [f"{readable(mean)} [{readable(low)}, {readable(high)}]" for mean, low, high in values]
        plot.dots(range(len(values)), values[:, 0], css, titles=titles)
    note = f"{_which_tasks(lines)} Bars are 95 % intervals."
    return figure("Return after each gradient step", note, legend(entries), plot.svg())


def step_table(findings: Sequence[Findings]) -> Markup | None:
    """Return the numbers of `step_returns`, with interquartile means; None where nothing was evaluated."""
    lines = _lines(findings)
    if not lines:
        return None
    steps = max(evaluation.returns.shape[1] for _, _, evaluations in lines for evaluation in evaluations)
    head = element(
        "tr", element("th", "gradient steps"), element("th"), [element("th", str(step)) for step in range(steps)]
    )
    rows = []
    for css, name, evaluations in lines:
        title = element("th", element("b", name, class_=css), rowspan=2)
        for label, statistic in (("mean", mean), ("interquartile mean", interquartile_mean)):
            cells = [
                element("td", readable(value), element("small", f" [{readable(low)}, {readable(high)}]"))
                for value, low, high in pooled_intervals(evaluations, statistic)
            ]
            rows.append(element("tr", title if statistic is mean else None, element("th", label), cells))
    table = element("div", element("table", head, rows, class_="facts numbers"), class_="scroll")
    scopes = dict.fromkeys(interval_scope(evaluations) for _, _, evaluations in lines)
    note = f"{_which_tasks(lines)} In brackets are 95 % intervals: {'; '.join(scopes)}."
    return figure("Returns in numbers", note, table, css="wide")


def _lines(findings: Sequence[Findings]) -> list[Line]:
    """Return (class, name, evaluations) of every policy that was evaluated."""
    known = [(index, found) for index, found in enumerate(findings) if found.evaluations]
    several = len(findings) > 1
    names = group_names([found.group for found in findings])
    lines: list[Line] = [
        (
            group_css(index) if several else "meta",
            names[index] if several else f"this policy, {METHODS[found.group.config.method]}",
            found.evaluations,
        )
        for index, found in known
    ]
    # One of each is enough: what is untrained does not depend on how the others were trained.
    untrained = next((found.untrained for _, found in known if found.untrained is not None), None)
    if untrained is not None:
        lines.append(("untrained", "random initialisation", [untrained]))
    return lines


def _which_tasks(lines: Sequence[Line]) -> str:
    first, *others = (evaluation for _, _, evaluations in lines for evaluation in evaluations)
    origin = "of a file" if first.fixed_tasks else "that training never drew"
    if _same(lines):
        return (
            f"On {'the same ' if others else ''}{len(first.tasks)} tasks {origin}, with new episodes before each step."
        )
    count = sum(len(evaluation.tasks) for evaluation in lines[0][2])
    return f"On {count} tasks {origin}, not the same for all, with new episodes before each step."


def _same(lines: Sequence[Line]) -> bool:
    first, *others = (evaluation for _, _, evaluations in lines for evaluation in evaluations)
    return all(same_tasks(evaluation.tasks, first.tasks) for evaluation in others)
