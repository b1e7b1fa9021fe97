"""Makes tables and charts from the CSV files alone, and puts them between the marks of a page written by hand."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from benchmarks.learning.plan import ORACLE, PRETRAIN, RANDOM, TRPO, Family, Plan
from benchmarks.learning.results import SUCCESS, Row, Values, by_seed, read_rows
from maml_rl.report.plot import Plot, write_panels
from maml_rl.results.evaluation import (
    Evaluation,
    difference_interval,
    interval_cautions,
    pooled_intervals,
    probability_of_improvement,
)
from maml_rl.results.scales import Axis, listed
from maml_rl.results.statistics import interquartile_mean
from maml_rl.results.verdict import leads
from maml_rl.runs.atomic_files import replace_file

_BLOCK = re.compile(r"(<!-- results of ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
_STEP = 1
# Methods that the algorithms are compared with, and that are not algorithms themselves.
_REFERENCES = {PRETRAIN.name, ORACLE.name, RANDOM.name}
_HIGHLIGHTED = 3
# Families with as few tasks, as two directions, have a table with the returns of each.
_MOST_GROUPS = 4
# After the name of a method, in tables.
_CONTINUED = ", continued"
# A share of another's environment steps that still counts as equal: episodes may end early.
_ALIKE = 0.9

# Of the interval of a difference.
_PLACES = ("includes 0", "is below 0", "is above 0", "cannot be computed")
# Rows of two methods.
_Pair = tuple[list[Row], list[Row]]


def write_page(plan: Plan, only: Family | None = None) -> None:
    """Write the tables of every family, or of only one, into the page.

    Raises:
        ValueError: If the page has no marks for a family that has results, or has marks for one that is not in the
            plan.
    """
    text, marked = plan.page.read_text(encoding="utf-8"), marks(plan)
    wanted = [family.name for family in plan.families.values() if rows_of(plan, family)]
    if not set(wanted) <= set(marked) <= set(plan.families):
        raise ValueError(f"{plan.page} has marks for {marked}, and there are results of {wanted}")

    def filled(match: re.Match[str]) -> str:
        if only is not None and match[2] != only.name:
            return match[0]
        return f"{match[1]}\n{tables(plan, plan.families[match[2]])}\n\n{match[3]}"

    replace_file(plan.page, _BLOCK.sub(filled, text).encode())


def marks(plan: Plan) -> list[str]:
    """Return the names of the families whose tables have a place on the page."""
    return [match[2] for match in _BLOCK.finditer(plan.page.read_text(encoding="utf-8"))]


def rows_of(plan: Plan, family: Family) -> dict[str, list[Row]]:
    """Return the rows of the family's methods that have any, by name; another plan may have trained them for longer."""
    ranges, found = family.ranges(), {}
    for name in plan.methods:
        if name in plan.methods_of(family):
            rows = read_rows(plan.folder(family) / f"{name}.csv")
            found[name] = [replace(row, ranges=ranges) for row in rows if row.env_steps <= family.steps]
    return {name: rows for name, rows in found.items() if rows}


def chart_of(plan: Plan, family: Family) -> Path:
    """Return the file of a family's chart."""
    return plan.page.parent.parent / "images" / f"{plan.page.stem}-{family.name}.svg"


def final_rows(found: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """Return the last rows of the trainings, by method: those of the last iteration that all of its seeds have.

    A training with its initial policy alone counts only if all are like that, as of a method that is not trained.
    """
    finals = {}
    for name, rows in found.items():
        seeds = by_seed(rows)
        begun = {seed: of_seed for seed, of_seed in seeds.items() if of_seed[-1].iteration > 0} or seeds
        common = set.intersection(*({row.iteration for row in of_seed} for of_seed in begun.values()))
        finals[name] = [row for of_seed in begun.values() for row in of_seed if row.iteration == max(common)]
    return finals


def with_continued(found: Mapping[str, Sequence[Row]]) -> dict[str, Sequence[Row]]:
    """Return the rows of each line of a table: of a method, and after it of those of its trainings that went on."""
    lines = {}
    for name, ended in final_rows(found).items():
        lines[name] = found[name]
        longest = max(found[name], key=lambda row: row.iteration)
        if ended[0].env_steps < _ALIKE * longest.env_steps:
            seeds = {row.seed for row in found[name] if row.iteration == longest.iteration}
            lines[name + _CONTINUED] = [row for row in found[name] if row.seed in seeds]
    return lines


def at_equal_steps(one: Sequence[Row], other: Sequence[Row]) -> _Pair | None:
    """Return the last rows of two methods that have about as many environment steps.

    One that is not trained is compared as it is. None if a method was not evaluated where the other one ended.
    """
    both = {"one": one, "other": other}
    finals = final_rows(both)
    if all(rows[0].iteration > 0 for rows in finals.values()):
        limit = min(_steps(rows) for rows in finals.values()) / _ALIKE
        within = {name: [row for row in rows if row.env_steps <= limit] for name, rows in both.items()}
        finals = final_rows({name: rows for name, rows in within.items() if rows})
        if len(finals) < len(both) or any(rows[0].iteration == 0 for rows in finals.values()):
            return None
    return finals["one"], finals["other"]


def adapted(rows: Sequence[Row]) -> list[Evaluation]:
    """Return the returns of each row that are compared: those after up to one step, of an oracle those without one."""
    return [row.evaluation(_STEP) for row in rows]


def ranked(finals: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the names of the algorithms, the one with the highest interquartile mean first."""
    middles = {name: float(_middles([rows])[0]) for name, rows in finals.items() if name not in _REFERENCES}
    return sorted(middles, key=lambda name: -middles[name])


def leader(found: Mapping[str, Sequence[Row]]) -> str:
    """Return which method is best, with its intervals, in a few sentences. A single run is no evidence.

    The best is the one with the highest return at its end; it is compared with each other at equal environment steps.
    """
    finals = final_rows(found)
    names = ranked(finals)
    if not names:
        return "No algorithm was trained yet."
    single = [name for name in names if len(finals[name]) == 1]
    caution = f" One run each, which is no evidence: {listed(single)}." if single else ""
    caution += _shorter({name: finals[name] for name in names})
    best, pairs, differences = compared(found)
    if not differences:
        return f"**No statement is possible**: it needs several runs of at least two algorithms.{caution}"
    middle = _with_interval(*pooled_intervals(adapted(finals[best]), interquartile_mean)[-1])
    if leads_all(differences):
        gaps = [f"{name} by {_with_interval(*gap)} at {_at(pairs[name])} steps" for name, gap in differences.items()]
        sentences = [f"**{best} leads** {listed(gaps)}. Its interquartile mean is {middle}."]
    else:
        where = {name: _place_of_zero(gap) for name, gap in differences.items()}
        places = [place for place in _PLACES if place in where.values()]
        parts = [f"to {listed([name for name in where if where[name] == place])} {place}" for place in places]
        sentences = [
            f"**No algorithm leads all others.** {best} has the highest interquartile mean, {middle}.",
            f"At equal environment steps, the 95 % interval of its difference {', that '.join(parts)}.",
        ]
    if PRETRAIN.name in finals and finals[PRETRAIN.name][0].iteration > 0:
        pair = at_equal_steps(found[best], found[PRETRAIN.name])
        if pair is not None:
            chance = f"{probability_of_improvement(*map(adapted, pair)):.0%}".replace("%", " %")
            sentences.append(f"It beats `{PRETRAIN.name}` on the same task in {chance} of the runs.")
    return " ".join(sentences) + caution


def compared(found: Mapping[str, Sequence[Row]]) -> tuple[str, dict[str, _Pair], dict[str, Values]]:
    """Return the best method of several runs, and what it is compared with at equal environment steps.

    Returns:
        Its name; rows of the two methods by the other one's name; and the intervals of the differences, all NaN where
        the methods were not evaluated at equal steps. There are no differences without two methods of several runs.
    """
    finals = final_rows(found)
    best, *others = [name for name in ranked(finals) if len(finals[name]) > 1] or [""]
    pairs = {name: pair for name in others if (pair := at_equal_steps(found[best], found[name])) is not None}
    gaps = {name: difference_interval(adapted(one), adapted(other)) for name, (one, other) in pairs.items()}
    return best, pairs, {name: gaps.get(name, np.full(3, np.nan)) for name in others}


def leads_all(differences: Mapping[str, Values]) -> bool:
    """Return whether the best method is better than every other one, by these intervals."""
    return bool(differences) and all(map(leads, differences.values()))


def _place_of_zero(gap: Values) -> str:
    if not np.isfinite(gap).all():
        return _PLACES[-1]
    return "is above 0" if leads(gap) else "is below 0" if leads(-gap[[0, 2, 1]]) else "includes 0"


def _at(pair: tuple[Sequence[Row], Sequence[Row]]) -> str:
    """Return at how many environment steps two methods are compared."""
    return _millions(max(_steps(rows) for rows in pair))


def _shorter(finals: Mapping[str, Sequence[Row]]) -> str:
    """Return a sentence about algorithms that were trained for fewer environment steps than others, if some were."""
    steps = {name: _steps(rows) for name, rows in finals.items()}
    longest = max(steps, key=lambda name: steps[name])
    shorter = [f"{name} ({_millions(steps[name])})" for name in steps if steps[name] < _ALIKE * steps[longest]]
    if not shorter:
        return ""
    verb, most = "was" if len(shorter) == 1 else "were", f"{longest} ({_millions(steps[longest])})"
    return f" {listed(shorter)} {verb} trained for fewer steps than {most}."


def _steps(rows: Sequence[Row]) -> float:
    """Return the mean of the environment steps."""
    return float(np.mean([row.env_steps for row in rows]))


def _millions(steps: float) -> str:
    return f"{steps / 1e6:.1f} M"


def tables(plan: Plan, family: Family) -> str:
    """Return the best method on a family, its chart, and its tables, as Markdown."""
    found = rows_of(plan, family)
    if not found:
        return "No results yet."
    finals = final_rows(found)
    parts = [leader(found)]
    if highlighted := _highlighted(found):
        words = f"{family.title}: return after one step over environment steps; highlighted: {listed(highlighted)}"
        parts.append(f"![{words}](../images/{chart_of(plan, family).name})")
    lines = with_continued(found)
    parts.append(_final_table(lines, family, timed=plan.timed))
    if len(groups := _groups(plan, family)) <= _MOST_GROUPS:
        parts.append(_group_table(final_rows(lines), groups))
    earlier = [
        name
        for name, rows in finals.items()
        if {row.settings for row in rows} - {"", plan.methods[name].settings(family)}
    ]
    if earlier:
        parts.append(f"With earlier settings than those of the plan: {listed(earlier)}.")
    parts.append(_sources(plan, family))
    return "\n\n".join(parts)


def _sources(plan: Plan, family: Family) -> str:
    """Return a link to the tasks that all methods are measured on."""
    tasks = plan.folder(family) / "tasks.json"
    digest = sha256(tasks.read_bytes()).hexdigest()
    return f"Held-out tasks: [SHA-256 `{digest[:16]}`]({family.name}/{tasks.name})."


def _final_table(found: Mapping[str, Sequence[Row]], family: Family, *, timed: bool) -> str:
    finals = final_rows(found)
    steps = max(row.task_returns.shape[1] for rows in finals.values() for row in rows)
    # Before the pretraining has begun there is nothing to report.
    rivals = [name for name in (PRETRAIN.name, TRPO.name) if name in finals and finals[name][0].iteration > 0]
    # Rows that were written before success was recorded lack it.
    succeed = [name for name, rows in finals.items() if all(row.task_successes is not None for row in rows)]
    successes = [f"success {_when(step)}" for step in range(_STEP + 1)] if succeed else []
    titles = [
        "runs",
        "meta-updates",
        "steps",
        *["minutes"] * timed,
        *(_when(step) for step in range(steps)),
        "each run",
        *successes,
    ]
    titles += [f"beats `{name}`" for name in rivals]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for name, rows in finals.items():
        intervals = pooled_intervals([row.evaluation() for row in rows], interquartile_mean)
        cells = [
            f"[{name}]({family.name}/{name.removesuffix(_CONTINUED)}.csv)",
            str(len(rows)),
            str(rows[0].iteration),
            _millions(_steps(rows)),
            *[f"{np.mean([row.minutes for row in rows]):.1f}"] * timed,
        ]
        cells += [_with_interval(*intervals[step]) if step < len(intervals) else "" for step in range(steps)]
        alone = _middles([[row] for row in rows]).tolist()
        cells.append(", ".join(f"{middle:.1f}" for middle in alone) if len(alone) > 1 else "")
        rates = [_in_percent(rate) for rate in pooled_intervals(adapted(rows), info=SUCCESS)] if name in succeed else []
        # An oracle has none after a step.
        cells += [*rates, *[""] * (len(successes) - len(rates))]
        for other in rivals:
            # Runs that went on are compared with each other, where there are some of both.
            goes_on = name.endswith(_CONTINUED) and other + _CONTINUED in finals
            with_whom = other + _CONTINUED if goes_on else other
            pair = at_equal_steps(found[name], found[with_whom]) if with_whom != name else None
            chance = None if pair is None else 100.0 * probability_of_improvement(*map(adapted, pair))
            cells.append("" if chance is None else f"{chance:.0f} %")
        lines.append(f"| {' | '.join(cells)} |")
    measured = {name: [row.evaluation() for row in rows] for name, rows in finals.items()}
    cautions = [f"{name}: {each}." for name, rows in measured.items() for each in interval_cautions(rows)]
    return "\n".join(lines) + "\n\n" + " ".join([f"A whole run: {family.steps / 1e6:g} M steps.", *cautions])


def _when(step: int) -> str:
    return "after " + ("1 step" if step == 1 else f"{step} steps") if step else "before"


def _groups(plan: Plan, family: Family) -> dict[str, list[int]]:
    """Return the numbers of the held-out tasks that are equal, by what they are."""
    groups: dict[str, list[int]] = {}
    tasks = json.loads((plan.folder(family) / "tasks.json").read_text(encoding="utf-8"))["tasks"]
    for number, task in enumerate(tasks):
        groups.setdefault(", ".join(f"{name} {value}" for name, value in task.items()), []).append(number)
    return dict(sorted(groups.items()))


def _group_table(finals: Mapping[str, Sequence[Row]], groups: Mapping[str, list[int]]) -> str:
    lines = [
        "Mean return after one step in each task:",
        "",
        f"| | {' | '.join(groups)} | mean |",
        "|---|" + "---:|" * (len(groups) + 1),
    ]
    for name, rows in finals.items():
        returns = np.mean([each.task_returns()[:, -1] for each in adapted(rows)], axis=0)
        means = [float(returns[numbers].mean()) for numbers in groups.values()]
        lines.append(f"| {name} | {' | '.join(f'{mean:.1f}' for mean in (*means, np.mean(means)))} |")
    return "\n".join(lines)


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.1f}" + (f" [{low:.1f}, {high:.1f}]" if np.isfinite(low) else "")


def _in_percent(estimate: Values) -> str:
    value, low, high = 100.0 * estimate
    return f"{value:.0f} %" + (f" [{low:.0f}, {high:.0f}]" if np.isfinite(low) else "")


def draw_charts(plan: Plan, only: Family | None = None) -> list[Path]:
    """Draw one chart for each family with results, or for only one, and return the files."""
    charts = []
    for family in [only] if only is not None else plan.families.values():
        if _highlighted(rows_of(plan, family)):
            charts.append(chart_of(plan, family))
            draw_curves(plan, family, charts[-1])
    return charts


def draw_curves(plan: Plan, family: Family, path: Path) -> None:
    """Draw the return after one step over environment steps: a panel for each of the best methods.

    The thick line is the interquartile mean over trainings and tasks, the thin ones are the trainings. All other
    methods are gray. Below are those over minutes, if the plan has minutes that can be compared.
    """
    panels = _panels(plan, family, "environment steps", _env_steps)
    if plan.timed:
        panels += _panels(plan, family, "minutes", lambda row: row.minutes)
    write_panels(path, panels, dark=True)


def _panels(plan: Plan, family: Family, label: str, place: Callable[[Row], float]) -> list[tuple[str, str, Plot]]:
    found = rows_of(plan, family)
    lines = {name: curves(rows, place) for name, rows in found.items() if max(row.iteration for row in rows) > 0}
    chosen = _highlighted(found)
    # The initial policies of a family may be far below everything that is learned.
    later = [middle[1:] for (_, middle), *_ in lines.values()]
    later += [training[1:] for name in chosen for _, training in lines[name][1:]]
    places = (xs for curves in lines.values() for xs, _ in curves)
    x = Axis.of([0.0], *places, label=label, margin=0.0, counts=place is _env_steps)
    y = Axis.of(*later, label="return after one step")
    panels = []
    for number, name in enumerate(chosen):
        plot = Plot(
            x,
            y,
            f"{family.title}: {name}",
            # Three panels side by side fill the width of a page.
            width=290,
            height=240,
        )
        for other, ((xs, middle), *_) in lines.items():
            if other != name:
                plot.line(xs, np.clip(middle, y.low, y.high), "rest")
            if other in (PRETRAIN.name, ORACLE.name):
                plot.label(xs[-1], middle[-1], other, "rest")
        (xs, middle), *trainings = lines[name]
        for of_training, training in trainings if len(trainings) > 1 else []:
            plot.line(of_training, np.clip(training, y.low, y.high), f"group{number} seed")
        plot.line(xs, np.clip(middle, y.low, y.high), f"group{number}")
        panels.append((f"group{number}", name, plot))
    return panels


def _highlighted(found: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the methods that a chart highlights: those with the highest returns."""
    trained = {name: rows for name, rows in found.items() if max(row.iteration for row in rows) > 0}
    return ranked(final_rows(trained))[:_HIGHLIGHTED]


def _env_steps(row: Row) -> float:
    return row.env_steps


def curves(rows: Sequence[Row], place: Callable[[Row], float] = _env_steps) -> list[tuple[Values, Values]]:
    """Return a method's mean at the points that all of its trainings reached, and each training to its end.

    `place` says where a row is on the horizontal axis.
    """
    trainings = list(by_seed(rows).values())
    common = sorted(set.intersection(*({row.iteration for row in of_seed} for of_seed in trainings)))
    at = [[row for row in of_seed if row.iteration in common] for of_seed in trainings]
    places = np.mean([[place(row) for row in of_seed] for of_seed in at], axis=0)
    middles = _middles([list(of_iteration) for of_iteration in zip(*at, strict=True)])
    each = [
        (np.array([place(row) for row in of_seed], np.float64), _middles([[row] for row in of_seed]))
        for of_seed in trainings
    ]
    return [(places, middles), *each]


def _middles(groups: Sequence[Sequence[Row]]) -> Values:
    """Return the interquartile mean of each group of rows."""
    scores = [np.concatenate([each.task_returns()[:, -1] for each in adapted(rows)]) for rows in groups]
    return np.array([interquartile_mean(each, np.full(len(each), 1.0 / len(each))) for each in scores])
