"""Charts of training: returns over environment steps, iterations or minutes, and the time per stage."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maml_rl.report.figures import SMOOTHINGS, X_AXES, Series, figure, legend, numbers, row, table
from maml_rl.report.markup import Markup, element
from maml_rl.report.plot import Plot, switched
from maml_rl.results.comparable import METHODS, Curve, RunGroup, common_steps, equal_steps
from maml_rl.results.scales import Axis, counted, decimals, readable, readable_count

_SEEDS_FOR_A_BAND = 3
# The style sheet has as many colors for gradient steps and for groups; further groups have dashes, too.
_STEP_COLORS, _GROUP_COLORS = 6, 6
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
# Of the charts of one metric: title, label of the vertical axis, how to read it, and whether that axis begins at 0.
METRICS = {
    "time/steps_per_s": ("Throughput", "steps per second", "Environment steps per second while sampling.", True),
    "loss": (
        "Loss on histories",
        "loss",
        "Mean negative log-probability, in nats, of the actions to predict, on the training data.",
        False,
    ),
    "kl": (
        "Size of the meta-updates",
        "KL divergence",
        "KL divergence between the policies before and after each meta-update.",
        True,
    ),
    "policy/std": (
        "Standard deviation of the policy",
        "standard deviation",
        "Of the meta-policy's actions before adaptation, mean over their entries. The closer to 0, the less the policy "
        "explores, and the larger the gradients of adaptation.",
        True,
    ),
    "policy/entropy": (
        "Entropy of the policy",
        "entropy in nats",
        "Of the meta-policy's actions before adaptation, mean over observations.",
        False,
    ),
}


def step_css(step: int, last: int) -> str:
    """Return the class of the color for returns after `step` of `last` gradient steps; the last is always the same."""
    return f"step{_STEP_COLORS - 1 if step == last and step else min(step, _STEP_COLORS - 2)}"


def group_css(group: RunGroup) -> str:
    """Return the class of a group's color, the same on the whole page."""
    return f"group{group.index % _GROUP_COLORS}{' again' * (group.index >= _GROUP_COLORS)}"


def after(steps: int, columns: str = "step") -> str:
    """Return how a legend names the returns after some steps of adaptation, or in an episode of a trial or the like."""
    if columns != "step":
        return f"in {columns} {steps + 1}" + " of the trial" * (columns == "episode")
    return "before adaptation" if steps == 0 else f"after {steps} step{'s' if steps > 1 else ''}"


def after_last(count: int, columns: str) -> str:
    """Return how a legend names the last of `count` columns of returns."""
    if count > 1:
        return after(count - 1, columns)
    return {"step": "without adaptation", "episode": "in the trial"}.get(columns, after(0, columns))


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a chart: its color and name, whose it is, and the curve of each smoothing."""

    css: str
    name: str
    group: RunGroup
    curves: Sequence[Curve]


def learning_curve(group: RunGroup) -> Markup | None:
    """Return the training returns of one group, one line per inner step; None where training has none."""
    return _by_step("Learning curve", "return", group, group.keys("return/"))


def evaluation_curve(group: RunGroup) -> Markup | None:
    """Return the returns of the evaluations during training, one line per inner step; None without an evaluation."""
    return _by_step("Evaluations", "return", group, group.keys("evaluation/return/"))


def family_curves(group: RunGroup) -> Iterator[Markup | None]:
    """Yield the returns of the evaluations during training of each family of a mixture, and the normalized ones."""
    keys = group.keys("evaluation/of ")
    for prefix in dict.fromkeys(key.rpartition("/")[0] for key in keys):
        mine, name = [key for key in keys if key.rpartition("/")[0] == prefix], prefix.removeprefix("evaluation/of ")
        yield _by_step(f"Evaluations: {name}", "return", group, mine)


def info_curves(group: RunGroup) -> Iterator[Markup | None]:
    """Yield the means of each recorded info over training, one line per inner step."""
    keys = group.keys("info/")
    for name in dict.fromkeys(key.split("/", 1)[1].rpartition("/")[0] for key in keys):
        mine = [key for key in keys if key.rpartition("/")[0] == f"info/{name}"]
        yield _by_step(f"Mean {name}", name, group, mine)


def _by_step(title: str, what: str, group: RunGroup, keys: Sequence[str]) -> Markup | None:
    """Return the chart of one quantity, with a line for each of its keys."""
    if not keys:
        return None
    last, columns = len(keys) - 1, group.columns
    names = [after(step, columns) for step in range(last + 1)]
    lines = [
        _Line(step_css(step, last), names[step] if last else what, group, _smoothed(group, key))
        for step, key in enumerate(keys)
    ]
    entries = [(line.css, name) for line, name in zip(lines, names, strict=True)]
    if len(entries) > _STEP_COLORS and columns != "step":
        # Those between the first ones and the last have one color.
        middle = f"in {columns}s {_STEP_COLORS - 1} to {last}" + " of the trial" * (columns == "episode")
        entries = [*entries[: _STEP_COLORS - 2], (step_css(last - 1, last), middle), entries[-1]]
    if last == 0 and columns == "step":
        entries = [(step_css(0, 0), f"{METHODS[group.config.method]}; training does not adapt")]
    return _over_training(title, f"mean {what}", lines, _note([group], keys[0]), entries)


def compared_learning_curves(groups: Sequence[RunGroup]) -> Markup | None:
    """Return the returns of several groups of one family, each after its own inner steps, over their common steps."""
    return _compared("Learning curves", groups, "return/")


def compared_evaluation_curves(groups: Sequence[RunGroup]) -> Markup | None:
    """Return the returns on held-out tasks of those groups that were evaluated during training, over common steps."""
    return _compared("Evaluations", groups, "evaluation/return/")


def _compared(title: str, groups: Sequence[RunGroup], prefix: str) -> Markup | None:
    """Return the chart of the last curve of each group that has one."""
    note = _note(groups, prefix)
    groups = [group for group in groups if group.keys(prefix)]
    counts = [len(group.keys(prefix)) for group in groups]
    lines = [_Line(group_css(group), group.name, group, _smoothed(group, group.keys(prefix)[-1])) for group in groups]
    entries = [
        (line.css, f"{line.name}, {after_last(count, line.group.columns)}, {counted(len(line.group.runs), 'run')}")
        for line, count in zip(lines, counts, strict=True)
    ]
    return _over_training(title, "mean return", lines, note, entries)


def _smoothed(group: RunGroup, key: str) -> list[Curve]:
    """Return the curve of each smoothing; of evaluations, only those iterations that have one."""
    if key.startswith("evaluation/"):
        return [group.curve(key).known()]
    return [group.curve(key, width) for width in SMOOTHINGS]


def _note(groups: Sequence[RunGroup], key: str) -> str:
    """Return what returns of training, or of its evaluations, are means of: tasks, then seeds."""
    text = _ON_TRAINING_TASKS
    if key.startswith("evaluation/"):
        # The test tasks of a fixed set wait for the test.
        fixed = [(group.config.tasks or {}).get("distribution") == "fixed" for group in groups]
        text = " Or: ".join(dict.fromkeys(_ON_FIXED_TASKS if each else _ON_HELD_OUT_TASKS for each in fixed))
    counts = {len(group.runs) for group in groups if group.keys(key)}
    kinds = {
        1: "One seed; several (--seeds 0 1 2) would show a band.",
        2: "The thick line is the mean over 2 seeds, the thin ones are the seeds.",
    }
    if not counts:
        return text
    if max(counts) == min(counts):
        band = f"The line is the mean over {max(counts)} seeds, the band its 95 % interval (Student's t)."
        return f"{text} {kinds.get(max(counts), band)}"
    return (
        f"{text} Lines are means over the runs of an experiment. Bands are 95 % intervals (Student's t); where there "
        "are fewer than three runs, thin lines are the runs."
    )


def _over_training(
    title: str, label: str, lines: Sequence[_Line], note: str, entries: Sequence[tuple[str, str]], *, zero: bool = False
) -> Markup | None:
    """Return the chart of lines over each horizontal axis, as far as all of them go; None where nothing is known."""
    groups = list({line.group.index: line.group for line in lines}.values())
    limit = common_steps(groups) if len(groups) > 1 else np.nan
    if np.isfinite(limit) and not equal_steps(groups):
        lines = [
            _Line(line.css, line.name, line.group, [_within(line.group, curve, limit) for curve in line.curves])
            for line in lines
        ]
        note += f" Up to {readable_count(limit)} environment steps, which all runs have."
    if not any(np.isfinite(line.curves[0].seeds).any() for line in lines):
        return None
    first = [line.curves[0] for line in lines]
    y = Axis.of(*(values for curve in first for values in _drawn(curve)), label=label)
    y = Axis(0.0, y.high, label) if zero and y.high > 0 else y
    ends = ", ".join(
        f"{line.name} from {readable(curve.mean[0])} to {readable(curve.mean[-1])}"
        for line, curve in zip(lines, first, strict=True)
        if len(curve.mean)
    )
    places = [_places(line.group, curve) for line, curve in zip(lines, first, strict=True)]
    plots = {}
    for name in X_AXES:
        # Steps and times may be unknown; a learner of recorded histories takes no steps.
        known = all(np.isfinite(place[name]).all() and place[name].any() for place in places)
        axis = name if known else "iterations"
        across = (place[axis] for place in places)
        x = Axis.of([0.0], *across, label=X_AXES[axis], margin=0.0, counts=axis != "minutes")
        plot = Plot(x, y, f"{title}: {ends}.")
        for index, width in enumerate(SMOOTHINGS[: len(lines[0].curves)]):
            if len(lines[0].curves) > 1:
                plot.layer(f"smoothed width{width}")
            for line, place in zip(lines, places, strict=True):
                _draw(plot, line.curves[index], line.css, place[axis])
        plots[name] = plot
    series = [
        Series(line.css, line.name, place, curve.mean, curve.low, curve.high)
        for line, curve, place in zip(lines, first, places, strict=True)
    ]
    return figure(
        title, note, legend(entries) if entries else None, switched(plots), data=numbers(label, series, plots)
    )


def _places(group: RunGroup, curve: Curve) -> dict[str, NDArray[np.float64]]:
    """Return where the iterations of a curve are on each horizontal axis, as means over the seeds."""
    seconds = np.sum([np.nan_to_num(group.curve(key).mean) for key in _STAGES], axis=0)
    return {
        "steps": curve.steps,
        "iterations": np.add(curve.iterations, 1, dtype=np.float64),
        "minutes": np.asarray(np.cumsum(seconds)[curve.iterations] / 60.0, np.float64),
    }


def _within(group: RunGroup, curve: Curve, limit: float) -> Curve:
    """Return a curve up to the iteration that ends nearest to some environment steps."""
    steps = group.curve("env_steps").steps
    nearest = steps - np.diff(steps, prepend=0.0) / 2.0
    return curve.at(np.asarray(nearest[curve.iterations] < limit))


def _drawn(curve: Curve) -> list[NDArray[np.float64]]:
    # The interval of two seeds is six times as wide as their difference: it would hide the curves.
    return [curve.low, curve.high, curve.mean] if len(curve.seeds) >= _SEEDS_FOR_A_BAND else [curve.mean, *curve.seeds]


def _draw(plot: Plot, curve: Curve, css: str, places: NDArray[np.float64]) -> None:
    """Draw the mean over the seeds, and their band where there are enough of them."""
    if len(curve.seeds) >= _SEEDS_FOR_A_BAND:
        plot.band(places, curve.low, curve.high, css)
    elif len(curve.seeds) > 1:
        for seed in curve.seeds:
            plot.line(places, seed, f"{css} seed")
    plot.line(places, curve.mean, css)


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
        row(
            name,
            element("td", element("i", class_="bar", style=f"width:{max(0.0, value) / longest:.1%}"), class_="bars"),
            element("td", f"{readable(value, digits)} s"),
        )
        for name, value in sorted(seconds.items(), key=lambda entry: -entry[1])
        if value >= 0.0005 * longest
    ]
    return figure("Time per iteration", note, table("Time per iteration", (), rows, "times", wide=False))


def over_iterations(groups: Sequence[RunGroup], key: str) -> Markup | None:
    """Return the chart of one of the metrics of `METRICS`, with a line for each group that has it."""
    groups = [group for group in groups if group.keys(key)]
    title, label, note, zero = METRICS[key]
    bound = groups[0].config.algorithm_settings.get("max-kl") if groups and key == "kl" else None
    if bound is not None:
        note = f"{note[:-1]}, which the trust region bounds by max-kl = {bound:g}."
    if key == "policy/entropy" and all(group.columns == "episode" for group in groups):
        note = "Of the policy's actions, mean over the steps of the trials."
    several = len(groups) > 1
    lines = [
        _Line(group_css(group) if several else "run", group.name if several else label, group, _smoothed(group, key))
        for group in groups
    ]
    entries = [(line.css, line.name) for line in lines] if several else []
    return _over_training(title, label, lines, note, entries, zero=zero)
