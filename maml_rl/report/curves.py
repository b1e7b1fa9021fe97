"""Charts of training: returns over the iterations, and the time per stage."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maml_rl.experiment.comparable import METHODS, Curve, RunGroup
from maml_rl.report.markup import Markup, element, join
from maml_rl.report.plot import Plot
from maml_rl.report.scales import Span, decimals, readable, readable_count

_SEEDS_FOR_A_BAND = 3
# The style sheet has as many colors for gradient steps and for groups.
_STEP_COLORS, _GROUP_COLORS = 6, 6
# Numbers of iterations to average over, from which the reader chooses.
_SMOOTHINGS = 1, 5, 25
_ON_TRAINING_TASKS = "Mean over the tasks of each iteration, on the tasks and episodes that training sampled."
_ON_HELD_OUT_TASKS = "Mean over held-out tasks, which are the same in every evaluation."
_ON_FIXED_TASKS = "Mean over training tasks of a fixed set, which are the same in every evaluation."
_STAGES = {"time/sample_s": "sampling", "time/update_s": "update"}
_DETAILED_STAGES = {
    "physics": "physics",
    "inference": "policy",
    "waiting": "environments",
    "assembly": "recording",
    "advantages": "advantages",
    "inner": "adaptation",
    "outer": "meta-update",
    "reset": "resets",
}


def step_css(step: int, last: int) -> str:
    """Return the class of the color for returns after `step` of `last` gradient steps; the last is always the same."""
    return f"step{_STEP_COLORS - 1 if step == last and step else min(step, _STEP_COLORS - 2)}"


def group_css(group: RunGroup) -> str:
    """Return the class of a group's color, the same on the whole page."""
    return f"group{group.index % _GROUP_COLORS}"


def after(steps: int, columns: str = "step") -> str:
    """Return how a legend names the returns after some steps of adaptation, or in an episode of a trial or the like."""
    if columns != "step":
        return f"in {columns} {steps + 1}" + " of the trial" * (columns == "episode")
    return "before adaptation" if steps == 0 else f"after {steps} step{'s' if steps > 1 else ''}"


def after_last(count: int, columns: str = "step") -> str:
    """Return how a legend names the last of `count` columns of returns."""
    if count > 1:
        return after(count - 1, columns)
    return {"step": "without adaptation", "episode": "in the trial"}.get(columns, after(0, columns))


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Return names with their colors; each entry is (class, name)."""
    return element("ul", [element("li", element("i", class_=css), name) for css, name in entries], class_="legend")


def figure(title: str, explanation: str, *content: Markup | None, css: str = "") -> Markup:
    """Return a card with a title, the drawing, and how to read it."""
    return element(
        "figure",
        element("figcaption", element("h3", title)),
        content,
        element("p", explanation, class_="note") if explanation else None,
        class_=f"card {css}".strip(),
    )


def scrolling(title: str, table: Markup) -> Markup:
    """Return a table in a frame that shows that it scrolls where it is wider than the page."""
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=title)


def smoothing_choices() -> list[Markup]:
    """Return the inputs for the labels below the curves; they must come before all charts, and need no script."""
    return [
        element(
            "input",
            type="radio",
            name="smoothing",
            id=f"smoothing-{width}",
            class_="smoothing",
            checked=width == 1,
            aria_label=f"curves smoothed over {width} iterations" if width > 1 else "curves not smoothed",
        )
        for width in _SMOOTHINGS
    ]


def _smoothing_labels() -> Markup:
    names = [element("label", str(width) if width > 1 else "none", for_=f"smoothing-{width}") for width in _SMOOTHINGS]
    words = "Smoothing, the mean of the last iterations:"
    return element("p", words, [join([" ", name]) for name in names], class_="note choices")


def learning_curve(group: RunGroup) -> Markup | None:
    """Return the training returns of one group, one line per inner step; None where training has none."""
    known = [group.returns(width) for width in _SMOOTHINGS] if group.keys("return/") else None
    return _curves_by_step("Learning curve", "return", group, known) if known else None


def evaluation_curve(group: RunGroup) -> Markup | None:
    """Return the returns of the evaluations during training, one line per inner step; None without an evaluation."""
    curves = group.evaluations()
    return _curves_by_step("Evaluations", "return", group, [curves], _evaluated_on([group])) if curves else None


def info_curves(group: RunGroup) -> Iterator[Markup | None]:
    """Yield the means of each recorded info over training, one line per inner step."""
    keys = group.keys("info/")
    for name in dict.fromkeys(key.split("/", 1)[1].rpartition("/")[0] for key in keys):
        mine = [key for key in keys if key.rpartition("/")[0] == f"info/{name}"]
        curves = [[group.curve(key, width) for key in mine] for width in _SMOOTHINGS]
        yield _curves_by_step(f"Mean {name}", name, group, curves)


def _curves_by_step(
    title: str, what: str, group: RunGroup, smoothed: Sequence[Sequence[Curve]], note: str = _ON_TRAINING_TASKS
) -> Markup | None:
    """Return the chart of curves, one for each inner step; drawn without smoothing, then with each."""
    curves = smoothed[0]
    last, columns = len(curves) - 1, group.columns
    if not len(curves[0].iterations):
        return None
    plot = Plot(
        Span.of(curves[0].iterations, margin=0.0),
        _span(curves),
        f"{what.capitalize()} over {len(curves[0].iterations)} iterations, from {readable(curves[0].mean[0])} "
        f"{after(0, columns)} in the first to {readable(curves[last].mean[-1])} {after(last, columns)} in the last.",
        x_label="iteration",
        y_label=f"mean {what}",
        x_counts=True,
    )
    names = [after(step, columns) for step in range(last + 1)]
    styles = [step_css(step, last) for step in range(last + 1)]
    _draw_all(plot, smoothed, styles, names if last else [what])
    entries = [(step_css(step, last), after(step, columns)) for step in range(last + 1)]
    if len(entries) > _STEP_COLORS and columns != "step":
        # Those between the first ones and the last have one color.
        middle = f"in {columns}s {_STEP_COLORS - 1} to {last}" + " of the trial" * (columns == "episode")
        entries = [*entries[: _STEP_COLORS - 2], (step_css(last - 1, last), middle), entries[-1]]
    if last == 0 and columns == "step":
        entries = [(step_css(0, 0), f"{METHODS[group.config.method]}; training does not adapt")]
    return figure(title, _seeds_note([group], note), legend(entries), plot.svg(), _choices(smoothed))


def compared_learning_curves(groups: Sequence[RunGroup]) -> Markup | None:
    """Return the returns of several groups of one family, each after its own inner steps, over environment steps."""
    sampled = [group for group in groups if group.keys("return/")]
    smoothed = [[group.returns(width) for group in sampled] for width in _SMOOTHINGS]
    return _compared("Learning curves", sampled, smoothed, _ON_TRAINING_TASKS)


def compared_evaluation_curves(groups: Sequence[RunGroup]) -> Markup | None:
    """Return the returns on held-out tasks of those groups that were evaluated during training, over their steps."""
    known = {group.index: curves for group in groups if (curves := group.evaluations())}
    evaluated = [group for group in groups if group.index in known]
    return _compared("Evaluations", evaluated, [list(known.values())], _evaluated_on(evaluated))


def _evaluated_on(groups: Sequence[RunGroup]) -> str:
    """Return a note on the tasks of evaluations during training: the test tasks of a fixed set wait for the test."""
    notes = (
        _ON_FIXED_TASKS if (group.config.tasks or {}).get("distribution") == "fixed" else _ON_HELD_OUT_TASKS
        for group in groups
    )
    return " Or: ".join(dict.fromkeys(notes))


def _compared(
    title: str, groups: Sequence[RunGroup], smoothed: Sequence[Sequence[Sequence[Curve]]], note: str
) -> Markup | None:
    """Return the chart of the last curve of each group; drawn without smoothing, then with each."""
    lasts = [[each[-1] for each in by_step] for by_step in smoothed]
    curves = lasts[0]
    # One method may use several times the environment steps of another in an iteration.
    costs = [group.curve("env_steps").mean[curve.iterations] for group, curve in zip(groups, curves, strict=True)]
    if not any(len(curve.iterations) for curve in curves):
        return None
    plot = Plot(
        Span.of([0.0], *costs, margin=0.0),
        _span(curves),
        f"{title}: return over environment steps, for each experiment.",
        x_label="environment steps",
        y_label="mean return",
        x_counts=True,
    )
    names = [group.name for group in groups]
    _draw_all(plot, lasts, [group_css(group) for group in groups], names, costs)
    entries = [
        (group_css(group), f"{name}, {after_last(len(each), group.columns)}")
        for group, name, each in zip(groups, names, smoothed[0], strict=True)
    ]
    return figure(title, _seeds_note(groups, note), legend(entries), plot.svg(), _choices(smoothed))


def _seeds_note(groups: Sequence[RunGroup], text: str) -> str:
    seeds = max(len(group.runs) for group in groups)
    if seeds == 1:
        return f"{text} One seed; several (--seeds 0 1 2) would show a band."
    if seeds < _SEEDS_FOR_A_BAND:
        return f"{text} The thick line is the mean over {seeds} seeds, the thin ones are the seeds."
    return f"{text} The line is the mean over {seeds} seeds, the band its 95 % interval (Student's t)."


def _span(curves: Sequence[Curve]) -> Span:
    """Return the span of all that `_draw` draws."""
    return Span.of(*(values for curve in curves for values in _drawn(curve)))


def _drawn(curve: Curve) -> list[NDArray[np.float64]]:
    # The interval of two seeds is six times as wide as their difference: it would hide the curves.
    return [curve.low, curve.high, curve.mean] if len(curve.seeds) >= _SEEDS_FOR_A_BAND else [curve.mean, *curve.seeds]


def _choices(smoothed: Sequence[object]) -> Markup | None:
    return _smoothing_labels() if len(smoothed) > 1 else None


def _draw_all(
    plot: Plot,
    smoothed: Sequence[Sequence[Curve]],
    styles: Sequence[str],
    names: Sequence[str],
    costs: Sequence[NDArray[np.float64]] | None = None,
) -> None:
    """Draw the curves of each smoothing as a layer of its own, with their values for the pointer.

    Args:
        plot: to draw in.
        smoothed: of each smoothing, the curves.
        styles: class of each curve.
        names: of each curve.
        costs: places of each curve's iterations; None for the iterations.
    """
    for width, curves in zip(_SMOOTHINGS, smoothed, strict=False):
        if len(smoothed) > 1:
            plot.layer(f"smoothed width{width}")
        places = [curve.iterations for curve in curves] if costs is None else costs
        for curve, css, xs in zip(curves, styles, places, strict=True):
            _draw(plot, curve, css, xs)
        # Values are shown at the points of the longest curve.
        common = max(places, key=lambda xs: float(np.nanmax(xs, initial=0.0)))
        heads = [f"iteration {x:,.0f}" if costs is None else f"{readable_count(x)} steps" for x in common]
        lines = [
            (css, name, _at(common, xs, curve.mean))
            for css, name, xs, curve in zip(styles, names, places, curves, strict=True)
        ]
        plot.readings(common, heads, lines)


def _at(places: ArrayLike, xs: ArrayLike, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the last value of a curve at some points; NaN before its beginning and beyond its end."""
    places, xs = np.asarray(places, np.float64), np.asarray(xs, np.float64)
    if not len(xs):
        return np.full(len(places), np.nan)
    found = values[np.clip(np.searchsorted(xs, places, side="right") - 1, 0, len(xs) - 1)]
    return np.where((places >= xs[0]) & (places <= xs[-1]), found, np.nan)


def _draw(plot: Plot, curve: Curve, css: str, places: ArrayLike | None = None) -> None:
    """Draw the mean over the seeds, and their band where there are enough of them; by default over the iterations."""
    xs = curve.iterations if places is None else places
    if len(curve.seeds) >= _SEEDS_FOR_A_BAND:
        plot.band(xs, curve.low, curve.high, css)
    elif len(curve.seeds) > 1:
        for seed in curve.seeds:
            plot.line(xs, seed, f"{css} seed")
    plot.line(xs, curve.mean, css)


def time_per_stage(group: RunGroup) -> Markup | None:
    """Return the chart of an iteration's time; with all stages, where the run was profiled."""
    shares = {key: group.curve(key).mean for key in group.keys("time/share/")}
    if shares:
        whole = np.nanmean(sum(group.curve(key).mean for key in _STAGES))
        names = {key: key.removeprefix("time/share/") for key in shares}
        seconds = {
            _DETAILED_STAGES.get(name, name): float(np.nanmean(shares[key]) * whole) for key, name in names.items()
        }
        note = "Mean over all iterations, as measured by --profile."
    else:
        seconds = {
            name: float(np.nanmean(mean))
            for key, name in _STAGES.items()
            if np.isfinite(mean := group.curve(key).mean).any()
        }
        note = "Mean over all iterations; train with --profile to see the stages within."
    if not seconds:
        return None
    longest = max(*seconds.values(), 1e-12)
    digits = decimals(longest)
    rows = [
        element(
            "tr",
            element("th", name),
            element("td", element("i", class_="bar", style=f"width:{max(0.0, value) / longest:.1%}"), class_="bars"),
            element("td", f"{readable(value, digits)} s"),
        )
        for name, value in sorted(seconds.items(), key=lambda entry: -entry[1])
        if value >= 0.0005 * longest
    ]
    return figure("Time per iteration", note, element("table", rows, class_="times"))


def throughput(groups: Sequence[RunGroup]) -> Markup | None:
    """Return environment steps per second of the sampling, over the iterations."""
    return _single_metric(
        groups,
        "time/steps_per_s",
        "Throughput",
        "steps per second",
        "Environment steps per second while sampling.",
        zero=True,
    )


def divergence(groups: Sequence[RunGroup]) -> Markup | None:
    """Return the chart of the divergence of each meta-update."""
    bound = groups[0].config.algorithm_settings.get("max-kl")
    note = "KL divergence between the policies before and after each meta-update"
    return _single_metric(
        groups,
        "kl",
        "Size of the meta-updates",
        "KL divergence",
        f"{note}." if bound is None else f"{note}, which the trust region bounds by max-kl = {bound:g}.",
        zero=True,
    )


def prediction(groups: Sequence[RunGroup]) -> Markup | None:
    """Return the chart of how well a learner predicts the actions of recorded histories."""
    return _single_metric(
        groups,
        "loss",
        "Loss on histories",
        "loss",
        "Mean negative log-probability, in nats, of the actions to predict, on the training data.",
        zero=False,
    )


def policy_spread(groups: Sequence[RunGroup]) -> list[Markup | None]:
    """Return the chart of exploration during training: the deviation and the entropy of the meta-policy's actions."""
    return [
        _single_metric(
            groups,
            "policy/std",
            "Standard deviation of the policy",
            "standard deviation",
            "Of the meta-policy's actions before adaptation, mean over their entries. The closer to 0, the less the "
            "policy explores, and the larger the gradients of adaptation.",
            zero=True,
        ),
        _single_metric(
            groups,
            "policy/entropy",
            "Entropy of the policy",
            "entropy in nats",
            "Of the policy's actions, mean over the steps of the trials."
            if all(group.columns == "episode" for group in groups)
            else "Of the meta-policy's actions before adaptation, mean over observations.",
            zero=False,
        ),
    ]


def _single_metric(
    groups: Sequence[RunGroup], key: str, title: str, label: str, note: str, *, zero: bool
) -> Markup | None:
    smoothed = [[group.curve(key, width) for group in groups] for width in _SMOOTHINGS]
    curves = smoothed[0]
    longest = max(curves, key=lambda curve: len(curve.iterations))
    if not any(np.isfinite(curve.mean).any() for curve in curves):
        return None
    span = _span(curves)
    plot = Plot(
        Span.of(longest.iterations, margin=0.0),
        Span(0.0, span.high) if zero and span.high > 0 else span,
        f"{label} over the iterations, {readable(float(np.nanmean(curves[0].mean)))} on average.",
        x_label="iteration",
        y_label=label,
        x_counts=True,
    )
    several = len(groups) > 1
    styles = [group_css(group) if several else "run" for group in groups]
    names = [group.name if several else label for group in groups]
    _draw_all(plot, smoothed, styles, names)
    entries = legend(list(zip(styles, names, strict=True))) if several else None
    return figure(title, note, entries, plot.svg(), _choices(smoothed))
