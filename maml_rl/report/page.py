"""The page: the results, in the order of their interest to readers."""

import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.resources import files
from typing import Any

import numpy as np

from maml_rl.config.config import Config
from maml_rl.config.settings import SettingsModel
from maml_rl.metalearners.registry import find_metalearner
from maml_rl.report import curves, task_charts
from maml_rl.report.comparison import performance_profiles, step_returns, step_table, verdict
from maml_rl.report.figures import choices, named, row, table
from maml_rl.report.markup import Markup, element, join
from maml_rl.results.comparable import Run, RunGroup
from maml_rl.results.evaluation import NORMALIZED, pooled_intervals
from maml_rl.results.scales import (
    counted,
    decimals,
    readable,
    readable_count,
    readable_interval,
    readable_seconds,
    readable_value,
)
from maml_rl.results.verdict import GroupResult, normalized
from maml_rl.runs.system import package_versions

GENERATOR = "maml_rl.report"
THROUGHPUT = "time/steps_per_s"
# In a title.
_MOST_NAMES = 4


def page(
    results: Sequence[GroupResult],
    videos: Sequence[Markup | None],
    notices: Sequence[str],
    *,
    title: str | None,
    data: Sequence[str],
) -> str:
    """Return the whole report as HTML.

    Args:
        results: one per group of runs.
        videos: of each group.
        notices: sentences that the reader must see first.
        title: of the page; None for the names of the groups.
        data: names of the files beside the page that hold its numbers.
    """
    groups = [result.group for result in results]
    names = [group.name for group in groups[:_MOST_NAMES]] + ["others"] * (len(groups) > _MOST_NAMES)
    # Names may have commas.
    title = title or (" and " if len(names) == 2 else "; ").join(names)
    families: dict[str, list[GroupResult]] = {}
    for result in results:
        families.setdefault(result.group.config.env_name, []).append(result)
    body = element(
        "main",
        _header(title, groups),
        element("ul", [_notice(notice) for notice in notices], class_="notices") if notices else None,
        choices(),
        [
            part
            for name, members in families.items()
            for part in (*_family(name, members, videos, alone=len(families) == 1), *_parts(members))
        ],
        _section("Settings", _settings(groups)),
        _section("Runs", _runs(groups)),
        _footer(data),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=GENERATOR),
        element("meta", name="color-scheme", content="light dark"),
        # An empty icon keeps the browser from requesting one from a server.
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", _text("charts.css"), _text("style.css")),
    )
    return (
        "<!doctype html>\n"
        + element("html", head, element("body", body, element("script", _text("page.js"))), lang="en")
        + "\n"
    )


def _text(name: str) -> Markup:
    return Markup(files("maml_rl.report").joinpath(name).read_text(encoding="utf-8"))


def _notice(sentence: str) -> Markup:
    """Return a notice, with text in backquotes as code."""
    parts = [element("code", part) if index % 2 else part for index, part in enumerate(sentence.split("`"))]
    return element("li", parts)


def _section(title: str | None, *content: Markup | None, whose: RunGroup | None = None) -> Markup | None:
    """Return a section of cards, in the color of the group whose it is, if it is one of several on the page."""
    shown = [part for part in content if part]
    if not shown:
        return None
    heading = (
        None if title is None else element("h2", title if whose is None else named(curves.group_css(whose), title))
    )
    css = None if whose is None else f"of-{curves.group_css(whose).split()[0]}"
    return element("section", heading, element("div", shown, class_="grid"), class_=css)


def _header(title: str, groups: Sequence[RunGroup]) -> Markup:
    families = ", ".join(dict.fromkeys(group.config.env_name for group in groups))
    runs = [run for group in groups for run in group.runs]
    made = datetime.now().astimezone().strftime("%d %B %Y, %H:%M")
    return element(
        "header",
        element("h1", title),
        element("p", f"{families} \N{MIDDLE DOT} {counted(len(runs), 'run')} \N{MIDDLE DOT} {made}"),
        [element("p", line) for line in dict.fromkeys(map(_trained_on, runs)) if line],
    )


def _trained_on(run: Run) -> str:
    """Return the commit and the processor with which a run was started; nothing where they were not recorded."""
    parts = [f"commit {run.system['commit']}"] if run.system.get("commit") else []
    if run.system.get("cpu"):
        parts.append(f"{run.system.get('cores')} cores of {run.system['cpu']}")
    return f"trained with {', on '.join(parts)}" if parts else ""


def _family(
    name: str, members: Sequence[GroupResult], videos: Sequence[Markup | None], *, alone: bool
) -> Iterable[Markup | None]:
    """Return the sections about the groups of one family; returns of different families are not comparable."""
    compared = [result for result in members if result.group.compared]
    if len(compared) > 1:
        yield from _compared(name, compared, videos, alone=alone)
    for result in members:
        if len(compared) > 1 and result in compared:
            continue
        groups = [result.group]
        alone &= len(members) == 1
        yield (
            None
            if alone
            else element("h2", f"{groups[0].name}: {name}" if name not in groups[0].name else groups[0].name)
        )
        yield _tiles(result)
        yield _section("Learning" if alone else None, *_about_one(result, videos[groups[0].index], compared=False))
        speed = curves.time_per_stage(groups[0]), curves.over_iterations(groups, THROUGHPUT)
        yield _section("Speed" if alone else None, *speed)


def _parts(members: Sequence[GroupResult]) -> Iterable[Markup | None]:
    for name in dict.fromkeys(
        name for result in members for evaluation in result.evaluations for name in evaluation.parts()
    ):
        results = [result.part(name) for result in members]
        titles = {evaluation.parts()[name].env_name for result in members for evaluation in result.evaluations}
        yield _section(titles.pop(), step_returns(results), step_table(results))


def _compared(
    name: str, members: Sequence[GroupResult], videos: Sequence[Markup | None], *, alone: bool
) -> Iterable[Markup | None]:
    groups = [result.group for result in members]
    yield None if alone else element("h2", name)
    yield verdict(normalized(members))
    yield _comparison(members)
    learning = curves.compared_learning_curves(groups), curves.compared_evaluation_curves(groups)
    adapted = step_returns(members), performance_profiles(members), step_table(members)
    yield _section("Returns", *learning, *adapted)
    for result in members:
        of_group = _about_one(result, videos[result.group.index], compared=True)
        yield _section(result.group.name, *of_group, whose=result.group)
    yield _section("Training", *(curves.over_iterations(groups, key) for key in curves.METRICS))


def _about_one(result: GroupResult, films: Markup | None, *, compared: bool) -> Iterable[Markup | None]:
    yield curves.learning_curve(result.group)
    yield curves.evaluation_curve(result.group)
    yield from curves.family_curves(result.group)
    yield from curves.info_curves(result.group)
    if not compared:
        yield step_returns([result])
    if result.evaluations:
        yield task_charts.task_returns(result.evaluations[0])
    if not compared:
        yield from (curves.over_iterations([result.group], key) for key in curves.METRICS if key != THROUGHPUT)
        yield performance_profiles([result])
        yield step_table([result])
    if result.sampled is not None:
        yield task_charts.navigation_paths(result.sampled)
    yield films


def _tiles(result: GroupResult) -> Markup:
    group = result.group
    tiles = []
    if result.evaluations:
        of_families = result.part(NORMALIZED).evaluations
        intervals = pooled_intervals(of_families or result.evaluations)
        what = "normalized return" if of_families else "return"
        digits = decimals(intervals[:, 0])
        for step in dict.fromkeys((0, 1, len(intervals) - 1)):
            if step < len(intervals):
                mean, interval = readable_interval(intervals[step], digits)
                css = "before" if step == 0 else "after"
                columns = result.evaluations[0].columns
                label = curves.after(step, columns) if len(intervals) > 1 else curves.after_last(1, columns)
                tiles.append(_tile(label, mean, f"{what} on new tasks {interval}", css))
        for name in result.evaluations[0].infos:
            means = pooled_intervals(result.evaluations, info=name)
            value, interval = readable_interval(means[-1])
            last = curves.after(len(means) - 1, result.evaluations[0].columns)
            before = f"; {readable(means[0, 0])} before" if len(means) > 1 else ""
            tiles.append(_tile(f"mean {name}", value, f"on new tasks {last} {interval}{before}"))
    return element("dl", tiles, [_tile(*amount) for amount in _amounts(group)], class_="tiles")


def _tile(label: str, value: str, detail: str, css: str | None = None) -> Markup:
    return element("div", element("dt", label), element("dd", value, element("small", detail)), class_=css)


def _amounts(group: RunGroup) -> list[tuple[str, str, str]]:
    """Return (label, value, detail) of the amount of training."""
    if not any(run.metrics for run in group.runs):
        return []
    each = " each" if len(group.runs) > 1 else ""
    iterations, env_steps, sample, update = _totals(group)
    amounts = [("iterations", readable_count(iterations), f"{readable_count(env_steps)} environment steps{each}")]
    if sample > 0:
        amounts.append(("steps per second", readable_count(env_steps / sample), "while sampling"))
    if sample + update > 0:
        share = f"{sample / (sample + update):.0%} of it sampling{each}"
        amounts.append(("training time", readable_seconds(sample + update), share))
    return amounts


def _totals(group: RunGroup) -> tuple[float, float, float, float]:
    """Return the iterations of the longest run, and means over the runs: steps, seconds of sampling and of updates."""
    runs = [run for run in group.runs if run.metrics]
    return (
        max(run.finished for run in runs),
        float(np.mean([run.metrics[-1].get("env_steps") or 0 for run in runs])),
        float(np.mean([run.total("time/sample_s") for run in runs])),
        float(np.mean([run.total("time/update_s") for run in runs])),
    )


def _comparison(results: Sequence[GroupResult]) -> Markup:
    returns = [pooled_intervals(result.evaluations)[:, 0] if result.evaluations else np.zeros(0) for result in results]
    columns: dict[str, list[float]] = {
        f"return {_column(step, results)}": [values[step] if step < len(values) else np.nan for values in returns]
        for step in range(max(map(len, returns)))
    }
    totals = [
        _totals(result.group) if any(run.metrics for run in result.group.runs) else (np.nan,) * 4 for result in results
    ]
    columns |= {
        "iterations": [total[0] for total in totals],
        "million environment steps": [total[1] / 1e6 for total in totals],
        "minutes of training": [(total[2] + total[3]) / 60.0 for total in totals],
    }
    digits = {label: 0 if label == "iterations" else decimals(values) for label, values in columns.items()}
    rows = [
        row(
            named(curves.group_css(result.group), result.group.name),
            element("td", len(result.group.runs)),
            [
                element("td", readable(values[index], digits[label]) if np.isfinite(values[index]) else "")
                for label, values in columns.items()
            ],
        )
        for index, result in enumerate(results)
    ]
    content = table("Comparison", ["experiment", "runs", *columns], rows, "compared")
    return element("div", content, class_="card")


def _column(column: int, results: Sequence[GroupResult]) -> str:
    kinds = {evaluation.columns for result in results for evaluation in result.evaluations}
    return " or ".join(curves.after(column, kind) for kind in sorted(kinds, reverse=True))


def _settings(groups: Sequence[RunGroup]) -> Markup:
    """Return tables of all settings: first those that differ between groups, or from the defaults."""
    configs = [group.config.flat() for group in groups]
    defaults = {key: value for group in groups for key, value in _defaults(group.config).items()}
    differing: list[Markup] = []
    changed: list[Markup] = []
    others: list[Markup] = []
    # Where a group has several seeds, the table of runs has them.
    hidden = "seed" if any(len(group.runs) > 1 for group in groups) else ""
    # Those of one algorithm alone come last.
    keys = dict.fromkeys(key for config in configs for key in config)
    for key in sorted(keys, key=lambda key: not all(key in config for config in configs)):
        if key == hidden:
            continue
        texts = [readable_value(config[key]) if key in config else "" for config in configs]
        cells = [element("td", element("code", text)) for text in texts]
        if len(set(texts)) > 1:
            differing.append(row(key, cells))
        else:
            (others if texts[0] == readable_value(defaults.get(key)) else changed).append(row(key, cells[0]))
    parts = []
    if differing:
        # Groups of different families have the same colors.
        alone = len({group.config.env_name for group in groups}) == len(groups)
        head = ["setting", *(group.name if alone else named(curves.group_css(group), group.name) for group in groups)]
        parts.append(_card("What differs", table("What differs", head, differing, "facts")))
    if changed:
        parts.append(_card("Changed from the defaults", _halves("Changed from the defaults", changed)))
    rest = element(
        "details", element("summary", f"{len(others)} settings with their defaults"), _halves("Defaults", others)
    )
    return join([*parts, element("div", rest, class_="card wide")])


def _card(title: str, content: Markup) -> Markup:
    return element("div", element("h3", title), content, class_="card wide")


def _halves(title: str, rows: Sequence[Markup]) -> Markup:
    """Return rows of settings as two tables beside each other."""
    half = -(-len(rows) // 2)
    parts = [part for part in (rows[:half], rows[half:]) if part]
    return element("div", [table(title, (), part, "facts", wide=False) for part in parts], class_="grid")


def _defaults(config: Config) -> dict[str, Any]:
    """Return the defaults of a config and of its algorithm's settings; none of one that is not registered.

    A page imports nothing that a run names.
    """
    models: list[type[SettingsModel]] = [Config]
    with suppress(ValueError):
        if ":" not in config.algorithm:
            models.append(find_metalearner(config.algorithm).Settings)
    return {
        key: field.get_default(call_default_factory=True)
        for model in models
        for key, field in model.fields_by_key().items()
    }


def _runs(groups: Sequence[RunGroup]) -> Markup:
    head = ["folder", "trained by", "seed", "iterations", "digest of the last iteration"]
    rows = [
        row(
            element("code", str(run.path)),
            element("td", element("code", run.system["command"]) if run.system.get("command") else "not recorded"),
            element("td", run.config.seed),
            element("td", f"{run.finished} of {run.config.num_batches}"),
            element("td", element("code", str(run.metrics[-1].get("digest", ""))[:16] if run.metrics else "")),
        )
        for group in groups
        for run in group.runs
    ]
    return element("div", table("Runs", head, rows, "facts"), class_="card wide")


def _footer(data: Sequence[str]) -> Markup:
    versions = ", ".join(f"{package} {number}" for package, number in package_versions().items())
    where = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    names = " and ".join(data)
    return element(
        "footer",
        element("p", f"The numbers behind the charts are in {names}, beside this page.") if data else None,
        element("p", f"Report made with {versions}, {where}."),
    )
