"""Charts of single tasks: the return of each before and after adaptation, and the paths of 2D navigation."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maml_rl.envs.meta_env import Task
from maml_rl.report.curves import after
from maml_rl.report.figures import Series, figure, legend, numbers
from maml_rl.report.markup import Markup, element
from maml_rl.report.plot import Plot
from maml_rl.results.evaluation import Evaluation, SampledEvaluation
from maml_rl.results.scales import Axis, decimals, readable

NAVIGATION = "2DNavigation-v0"
_FEW_VALUES = 4
_SHADES = 7
_PATH_TASKS, _PATHS_PER_TASK = 8, 3
_JITTER = 0.18


def describe(task: Mapping[str, Any]) -> str:
    """Return a task in a few words: "velocity 1.27", "goal (0.31, −0.2)"."""
    return ", ".join(f"{name} {_value(np.asarray(value))}" for name, value in task.items())


def _value(array: NDArray[Any]) -> str:
    if array.dtype.kind not in "iuf":
        return str(array)
    if array.ndim == 0:
        return f"{float(array):.3g}".replace("-", "\N{MINUS SIGN}")
    if array.size <= 3:
        return "(" + ", ".join(_value(entry) for entry in array) + ")"
    return "\N{MULTIPLICATION SIGN}".join(map(str, array.shape))


def spread_out(tasks: list[Task], count: int) -> list[int]:
    """Return the indices of `count` tasks that differ as much as possible, by one number where possible."""
    parameter = _only_entry(tasks)
    if parameter is None or parameter.ndim != 1:
        return list(range(min(count, len(tasks))))
    order = np.argsort(parameter, kind="stable")
    places = np.linspace(0, len(tasks) - 1, min(count, len(tasks)))
    return [int(order[round(place)]) for place in places]


def task_returns(evaluation: Evaluation) -> Markup | None:
    """Return every task's return before and after adaptation, against the task where that can be drawn."""
    returns = evaluation.task_returns()
    if returns.shape[1] < 2 or not np.isfinite(returns).all():
        return None
    parameter = _only_entry(evaluation.tasks)
    if parameter is not None and parameter.ndim == 1:
        return _against_number(evaluation, parameter)
    if parameter is not None and parameter.shape[1:] == (2,):
        return _on_map(evaluation, parameter)
    return _one_by_one(evaluation)


def _only_entry(tasks: list[Task]) -> NDArray[np.float64] | None:
    """Return the values (n, ...) of the only entry that tasks have; None where there are more, or no numbers."""
    names = {name for task in tasks for name in task}
    if len(names) != 1:
        return None
    name = names.pop()
    try:
        return np.array([task[name] for task in tasks], np.float64)
    except (ValueError, TypeError, KeyError):
        return None


def _before_and_after(evaluation: Evaluation) -> tuple[NDArray[np.float64], NDArray[np.float64], tuple[str, str]]:
    """Return the first and the last return of each task, and their names."""
    returns = evaluation.task_returns()
    names = after(0, evaluation.columns), after(returns.shape[1] - 1, evaluation.columns)
    return returns[:, 0], returns[:, -1], names


def _against_number(evaluation: Evaluation, parameter: NDArray[np.float64]) -> Markup:
    before, later, (first, last) = _before_and_after(evaluation)
    name = next(iter(evaluation.tasks[0]))
    values = np.unique(parameter)
    few = len(values) <= _FEW_VALUES
    if few:
        # Tasks with equal values would cover each other.
        places = np.searchsorted(values, parameter).astype(np.float64)
        places += _JITTER * np.sin(2.4 * np.arange(len(places)))
        names = [(index, _value(np.asarray(value))) for index, value in enumerate(values)]
        x = Axis(-0.5, len(values) - 0.5, name, names)
    else:
        places, x = parameter, Axis.of(parameter, label=name)
    plot = Plot(
        x,
        Axis.of(before, later, label="return of a task"),
        f"Return against {name}: {readable(before.mean())} on average {first}, {readable(later.mean())} {last}.",
    )
    for css, returns in (("before", before), ("after", later)):
        titles = [f"{describe(task)}: {readable(value)}" for task, value in zip(evaluation.tasks, returns, strict=True)]
        plot.dots(places, returns, css, titles=titles)
    return figure(
        f"Return against {name}",
        f"Each dot is one of {len(before)} new tasks, its return averaged over {evaluation.returns.shape[2]} episodes.",
        legend([("before", first), ("after", last)]),
        plot.svg(),
        data=_numbers(evaluation, {name: parameter}),
    )


def _on_map(evaluation: Evaluation, places: NDArray[np.float64]) -> Markup:
    before, later, (first, last) = _before_and_after(evaluation)
    name = next(iter(evaluation.tasks[0]))
    low, high = min(before.min(), later.min()), max(before.max(), later.max())
    digits = decimals([low, high])
    axis = Axis.of(places, margin=0.08)
    maps = []
    for title, returns in ((first, before), (last, later)):
        plot = Plot(
            axis, axis, f"Return by {name}, {title}: {readable(returns.mean())} on average.", equal=True, width=300
        )
        shades = np.clip((returns - low) / max(high - low, 1e-12) * _SHADES, 0, _SHADES - 1).astype(int)
        for (x, y), value, shade in zip(places, returns, shades, strict=True):
            plot.dots([x], [y], f"shade{shade}", radius=6, titles=[f"({x:.2f}, {y:.2f}): {readable(value)}"])
        maps.append(element("div", element("h4", title), plot.svg()))
    scale = element(
        "p",
        readable(low, digits),
        [element("i", class_=f"shade{shade}") for shade in range(_SHADES)],
        readable(high, digits),
        class_="scale",
    )
    return figure(
        f"Return by {name}",
        f"Each dot is one of {len(before)} new tasks, at its {name}; the color is its mean return.",
        element("div", maps, class_="pair"),
        scale,
        data=_numbers(evaluation, {f"{name} {axis}": places[:, index] for index, axis in enumerate("xy")}),
    )


def _one_by_one(evaluation: Evaluation) -> Markup:
    before, later, (first, last) = _before_and_after(evaluation)
    plot = Plot(
        # If they were sorted by noisy returns, the worst would improve and the best get worse by chance.
        Axis(-1.0, len(before), "tasks, in the order in which they were drawn", names=[]),
        Axis.of(before, later, label="return of a task"),
        f"Return of each task: {readable(before.mean())} on average {first}, {readable(later.mean())} {last}.",
    )
    places = range(len(before))
    for place in places:
        plot.line([place, place], [before[place], later[place]], "link")
    for css, returns in (("before", before), ("after", later)):
        plot.dots(places, returns, css, radius=3.5, titles=[readable(value) for value in returns])
    return figure(
        "Return of every task",
        f"{len(before)} new tasks, each averaged over {evaluation.returns.shape[2]} episodes.",
        legend([("before", first), ("after", last)]),
        plot.svg(),
        data=_numbers(evaluation, {"task": np.arange(len(before))}),
    )


def _numbers(evaluation: Evaluation, places: Mapping[str, ArrayLike]) -> Markup:
    before, later, (first, last) = _before_and_after(evaluation)
    return numbers("return", [Series("before", first, places, before), Series("after", last, places, later)])


def navigation_paths(sampled: SampledEvaluation) -> Markup | None:
    """Return the paths of the point in some tasks, before and after adaptation; None where there are none."""
    if sampled.config.env_name != NAVIGATION or len(sampled.phases) < 2:
        return None
    tasks = sampled.evaluation.tasks
    chosen = range(min(_PATH_TASKS, len(tasks)))
    goals = [np.asarray(tasks[task]["goal"], np.float64) for task in chosen]
    last = len(sampled.phases) - 1
    returns = sampled.evaluation.task_returns()[: len(goals)][:, [0, -1]]
    digits = decimals(returns)
    paths = [{css: _paths(sampled, phase, task) for css, phase in (("before", 0), ("after", last))} for task in chosen]
    # Equal axes, so that the maps compare.
    across, up = _square(
        np.concatenate([[[0.0, 0.0]], goals, *(path for of_task in paths for of in of_task.values() for path in of)])
    )
    maps, series = [], []
    for task, goal, phases in zip(chosen, goals, paths, strict=True):
        before, later = (readable(value, digits) for value in returns[task])
        plot = Plot(
            across,
            up,
            f"Paths to the {describe(tasks[task])}: return {before} before, {later} after.",
            equal=True,
            width=240,
        )
        for css, (first, *others) in phases.items():
            for path in others:
                plot.line(path[:, 0], path[:, 1], f"{css} other")
            plot.line(path_x := first[:, 0], first[:, 1], css)
            steps = np.arange(len(first))
            places = {"task": np.full(len(first), task), "step": steps, "x": path_x}
            series.append(Series(css, after(0 if css == "before" else last), places, first[:, 1]))
        plot.dots([0.0], [0.0], "start", radius=4)
        plot.dots([goal[0]], [goal[1]], "goal", radius=6, titles=["the goal"])
        maps.append(element("div", plot.svg(), element("p", f"{before} \N{RIGHTWARDS ARROW} {later}")))
    return figure(
        "Paths before and after adaptation",
        f"One episode of each phase in {len(maps)} new tasks, and {_PATHS_PER_TASK - 1} more as thin lines, all on the "
        "same axes; below each, the task's mean return before and after.",
        legend([("before", after(0)), ("after", after(last)), ("start", "start"), ("goal", "goal")]),
        element("div", maps, class_="maps"),
        css="wide",
        data=numbers("y", series),
    )


def _square(points: NDArray[np.float64]) -> tuple[Axis, Axis]:
    """Return axes of the same width that hold all points (n, 2)."""
    low, high = points.min(axis=0), points.max(axis=0)
    middle, half = (low + high) / 2.0, max(0.55 * float((high - low).max()), 1e-3)
    return Axis(middle[0] - half, middle[0] + half), Axis(middle[1] - half, middle[1] + half)


def _paths(sampled: SampledEvaluation, phase: int, task: int) -> list[NDArray[np.float64]]:
    """Return positions (steps + 1, 2) of some episodes."""
    episodes = sampled.phases[phase]
    return [
        np.concatenate(
            [
                episodes.observations[task, : episodes.lengths[task, episode], episode].double().cpu().numpy(),
                episodes.final_observations[task, episode].double().cpu().numpy()[None],
            ]
        )
        for episode in range(min(_PATHS_PER_TASK, episodes.lengths.shape[1]))
    ]
