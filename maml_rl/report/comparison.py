"""Returns after each gradient step on new tasks: of one policy, or of several policies and their baselines."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from maml_rl.config.config import Config
from maml_rl.envs.tasks import task_key
from maml_rl.report.curves import group_css
from maml_rl.report.figures import Series, figure, legend, named, numbers, table
from maml_rl.report.markup import Markup, element
from maml_rl.report.plot import Plot
from maml_rl.results.comparable import METHODS, unequal_settings
from maml_rl.results.evaluation import (
    Evaluation,
    Line,
    all_fixed,
    interval_scope,
    pooled_intervals,
    profile_intervals,
    returns_table,
    share_tasks,
    whose_tasks_differ,
)
from maml_rl.results.scales import Axis, counted, readable, readable_interval, readable_value
from maml_rl.results.verdict import GroupResult, at_common_steps, base_of, cautions, verdicts

# Maximum number of numbers below an axis.
_MOST_NAMES = 12
# Returns at which a profile is drawn.
_THRESHOLDS = 81
# Tasks of a family with as small a share of different ones are not held out from training.
_DIFFERENT = 0.9
# Settings that differ and are named at the top of the page, with their values where these are short.
_MOST_SETTINGS, _LONGEST_VALUES = 6, 40
# Mean return over 40 test tasks of 2D navigation after 0 ... 3 gradient steps of MAML, decoded from the authors' result
# files. Their locomotion has other physics than the bodies of the same name here: those figures compare with nothing.
# Source: Finn et al. 2017, figure 4, https://arxiv.org/abs/1703.03400
_MAML = (-40.4, -11.7, -3.3, -3.2)
_STEP_SIZES = (0.5, 0.25, 0.25)
_EPISODES_BEFORE_A_STEP = 40
_PROTOCOL = {
    "env-name": "2DNavigation-v0",
    "tasks": None,
    "env-kwargs": {"low": -0.5, "high": 0.5, "normalization_scale": 1.0},
    "algorithm": "maml-trpo",
    "method": "maml",
    "max-episode-steps": 100,
    "gamma": 0.99,
    "bootstrap": False,
    "hidden-sizes": [100, 100],
    "nonlinearity": "relu",
    "fast-batch-size": 20,
    "num-steps": 1,
    "fast-lr": 0.5,
}
_MOST_ITERATIONS = 100


def verdict(results: Sequence[GroupResult]) -> Markup | None:
    """Return which experiment of one family has the highest return, and by how much; None for fewer than two."""
    decided = verdicts(results)
    if not decided:
        return None
    sentences = [
        [word if isinstance(word, str) else named(group_css(word), word.name) for word in verdict]
        for verdict in decided
    ]
    unequal = unequal_settings([result.group for result in results])
    texts = {key: "; ".join(dict.fromkeys(map(readable_value, values))) for key, values in unequal.items()}
    settings = [f"{key} ({text})" if len(text) <= _LONGEST_VALUES else key for key, text in texts.items()]
    more = f", and {len(unequal) - _MOST_SETTINGS} more" * (len(unequal) > _MOST_SETTINGS)
    warnings = cautions(results)
    if unequal:
        listed = ", ".join(settings[:_MOST_SETTINGS])
        warnings.append(f"Besides algorithm and seed, the configs differ in {listed}{more}.")
    return element(
        "div",
        element("h2", "Verdict"),
        [element("p", sentence) for sentence in sentences],
        [element("p", warning, class_="caution") for warning in warnings],
        class_="card verdict",
    )


def step_returns(results: Sequence[GroupResult]) -> Markup | None:
    """Return the chart of returns on new tasks after each gradient step; None where nothing was evaluated.

    An oracle takes no steps; it is a level.

    Source: Finn et al. 2017, figures 4 and 5, https://arxiv.org/abs/1703.03400
    """
    lines = _lines(results)
    if not lines:
        return None
    intervals = [pooled_intervals(line.evaluations) for line in lines]
    sources = _sources(results)
    evaluated = [(result.group.config, evaluation) for result in results for evaluation in result.evaluations]
    published = next((returns for problem in evaluated if (returns := published_returns(*problem))), None)
    steps = max([len(values) for values in intervals] + [len(published or ())])
    counted = _counted(lines)
    # The interval of two seeds is so wide that it would flatten the chart: the table has it.
    two_seeds = [len(line.evaluations) == 2 for line in lines]
    bounds = [values[:, :1] if two else values for values, two in zip(intervals, two_seeds, strict=True)]
    known = [np.array(published)] if published else []
    plot = Plot(
        # Of many names, some.
        Axis(
            -0.2,
            steps - 0.8,
            f"{counted or 'gradient steps'} on a new task",
            [(step, str(step + bool(counted))) for step in range(0, steps, -(-steps // _MOST_NAMES))],
        ),
        Axis.of(*bounds, *known, *(curve[:steps] for _, _, curve in sources), label="mean return"),
        "; ".join(
            f"{line.name}: " + ", ".join(readable(row[0]) for row in values)
            for line, values in zip(lines, intervals, strict=True)
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
    for line, values, two, shift in zip(lines, intervals, two_seeds, shifts, strict=True):
        css = line.css
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
        Series(line.css, line.name, {counted or "gradient steps": np.arange(len(values)) + bool(counted)}, *values.T)
        for line, values in zip(lines, intervals, strict=True)
    ]
    return figure(title, note, legend(entries), plot.svg(), data=numbers("mean return", series))


def step_table(results: Sequence[GroupResult]) -> Markup | None:
    """Return the table of returns after each step, with the differences of several; None without an evaluation."""
    lines = _lines(results)
    if not lines:
        return None
    known = [result for result in results if result.evaluations]
    steps = max(evaluation.returns.shape[1] for line in lines for evaluation in line.evaluations)
    # Of many, some, the last among them.
    shown = sorted({*range(0, steps, -(-steps // _MOST_NAMES)), steps - 1})
    compared = len(known) > 1 and at_common_steps(known)
    returns = returns_table(lines, base=lines[base_of(known)] if compared else None, shown=shown)
    each_run = any(row.each for row in returns.rows)
    head = ["", _counted(lines) or "gradient steps", *returns.columns, *(["each run"] if each_run else [])]
    rows = []
    for previous, current, cells in zip([None, *returns.rows], returns.rows, returns.cells(), strict=False):
        line, first = current.line, previous is None or previous.line is not current.line
        count = sum(other.line is line for other in returns.rows)
        title = element("th", named(line.css, line.name), rowspan=count, scope="rowgroup") if first else None
        numbers_of = [element("td", value, element("small", f" {bounds}")) for value, bounds in cells]
        alone = element("td", element("small", ", ".join(map(readable, current.each)))) if each_run else None
        rows.append(element("tr", title, element("th", current.place, scope="row"), numbers_of, alone))
    scopes: dict[str, list[str]] = {}
    for line in lines:
        scopes.setdefault(interval_scope(line.evaluations), []).append(line.name)
    sentences = [scope if len(scopes) == 1 else f"of {' and '.join(names)}, {scope}" for scope, names in scopes.items()]
    note = f"{_which_tasks(lines)} In brackets are 95 % intervals: {'; '.join(sentences)}."
    if compared:
        note += (
            " The interval of the difference says which is better; a probability is of a higher return on a task, and "
            "has no interval of its own."
        )
    return figure("Returns in numbers", note, table("Returns in numbers", head, rows, "facts numbers"), css="wide")


def _counted(lines: Sequence[Line]) -> str:
    """Return what all returns are counted by, as "episode of the trial"; empty for steps, and where they differ."""
    nouns = {evaluation.columns for line in lines for evaluation in line.evaluations}
    noun = nouns.pop()
    return "" if nouns or noun == "step" else noun + " of the trial" * (noun == "episode")


def performance_profiles(results: Sequence[GroupResult]) -> Markup | None:
    """Return the chart of the share of trainings and tasks above each return.

    None for a single policy, and for experiments whose policies have unequal environment steps.

    Source: Agarwal et al. 2021, section 4.2, https://arxiv.org/abs/2108.13264
    """
    lines = _lines(results)
    alone = sum(len(line.evaluations) for line in lines if line.css != "untrained") < 2
    if alone or not _trained_alike(results):
        return None
    returns = np.concatenate([evaluation.task_returns()[:, -1] for line in lines for evaluation in line.evaluations])
    x = Axis.of(returns, label="return on a new task after adaptation")
    thresholds = np.linspace(x.low, x.high, _THRESHOLDS)
    profiles = [profile_intervals(line.evaluations, thresholds).T for line in lines]
    middles = [
        float(np.median([evaluation.task_returns()[:, -1] for evaluation in line.evaluations])) for line in lines
    ]
    plot = Plot(
        x,
        Axis(0.0, 1.04, "share of trainings and tasks above it"),
        "Performance profiles. Half of the returns are above "
        + ", ".join(f"{readable(middle)} ({line.name})" for line, middle in zip(lines, middles, strict=True))
        + ".",
    )
    for line, (shares, low, high) in zip(lines, profiles, strict=True):
        # The interval of two seeds would fill the chart.
        if len(line.evaluations) != 2:
            plot.band(thresholds, low, high, line.css)
        plot.line(thresholds, shares, line.css)
    series = [
        Series(line.css, line.name, {"return": thresholds}, *profile)
        for line, profile in zip(lines, profiles, strict=True)
    ]
    data = numbers("share above", series, {"return": plot})
    note = (
        f"{_which_tasks(lines)} A line above another one is better at every return; a steep one has tasks of similar "
        f"returns. Bands are 95 % intervals: {interval_scope(lines[0].evaluations)}."
    )
    return figure("Performance profiles", note, legend(_entries(lines)), plot.svg(), data=data)


def _lines(results: Sequence[GroupResult]) -> list[Line]:
    """Return every policy that was evaluated; that of random initialization comes last."""
    known = [result for result in results if result.evaluations]
    several = len(results) > 1
    lines = [
        Line(
            result.group.name if several else f"this policy, {METHODS[result.group.config.method]}",
            result.evaluations,
            group_css(result.group) if several else "run",
        )
        for result in known
    ]
    # One of each is enough: untrained policies do not depend on the training.
    untrained = next((result.untrained for result in known if result.untrained is not None), None)
    if untrained is not None:
        lines.append(Line("random initialization", [untrained], "untrained"))
    return lines


def _entries(lines: Sequence[Line]) -> list[tuple[str, str]]:
    return [
        (
            line.css,
            f"{line.name}, {counted(len(line.evaluations), 'run')}" if line.css.startswith("group") else line.name,
        )
        for line in lines
    ]


def _sources(results: Sequence[GroupResult]) -> list[tuple[str, str, NDArray[np.float32]]]:
    """Return (class, name, returns by episode) of the learners whose histories were learned from."""
    several = len(results) > 1
    learners = []
    for result in results:
        if result.sampled is not None and (curve := result.sampled.source_returns) is not None:
            whose = f"what {result.group.name} was learned from" if several else "what was learned from"
            learners.append((group_css(result.group) if several else "run", f"{whose} (dashed)", curve))
    return learners


def _which_tasks(lines: Sequence[Line]) -> str:
    evaluations = [evaluation for line in lines for evaluation in line.evaluations]
    first = evaluations[0]
    origin = "of a file" if first.fixed_tasks else "that training never drew"
    kinds = len({task_key([task]) for task in first.tasks})
    if not first.fixed_tasks and kinds < _DIFFERENT * len(first.tasks):
        origin = f"of which {kinds} differ: the family has so few that training drew them, too"
    episodes = sorted({evaluation.returns.shape[2] // evaluation.repetitions for evaluation in evaluations})
    how = f"with {' or '.join(map(str, episodes))} new episodes before each step"
    if _counted(lines) == "episode of the trial":
        how = "one trial of each"
    if share_tasks(evaluations):
        return f"On {'the same ' if len(evaluations) > 1 else ''}{len(first.tasks)} tasks {origin}, {how}."
    counts = sorted({len(evaluation.tasks) for evaluation in evaluations})
    kind = "fixed" if all_fixed(evaluations) else "new"
    return f"On {' or '.join(map(str, counts))} {kind} tasks, {whose_tasks_differ(lines)}, {how}."


def _trained_alike(results: Sequence[GroupResult]) -> bool:
    known = [result for result in results if result.evaluations]
    return len(known) < 2 or at_common_steps(known)


def published_returns(config: Config, evaluation: Evaluation) -> tuple[float, ...] | None:
    """Return the published mean returns of the same protocol, or None where a run has another one.

    Returns:
        The return after 0, 1, ... gradient steps, as far as the evaluation takes steps of the published sizes.
    """
    settings = config.model_dump(mode="json", by_alias=True)
    trained_alike = all(settings[key] == value for key, value in _PROTOCOL.items())
    if not trained_alike or config.algorithm_settings.get("first-order") or config.num_batches > _MOST_ITERATIONS:
        return None
    if evaluation.returns.shape[2] != _EPISODES_BEFORE_A_STEP * evaluation.repetitions:
        return None
    steps = 0
    while steps < len(_STEP_SIZES) and evaluation.step_sizes[steps : steps + 1] == _STEP_SIZES[steps : steps + 1]:
        steps += 1
    return _MAML[: steps + 1]
