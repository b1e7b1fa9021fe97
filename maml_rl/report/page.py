"""The page: what was found, in the order in which somebody wants to know it."""

import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

import numpy as np

from maml_rl.config.config import Config
from maml_rl.experiment.evaluate import pooled_intervals
from maml_rl.report import curves, tasks
from maml_rl.report.comparison import step_returns, step_table
from maml_rl.report.markup import Markup, element, join
from maml_rl.report.runs import RunGroup
from maml_rl.report.scales import readable, readable_count, readable_seconds
from maml_rl.report.trial import Findings

GENERATOR = "maml_rl.report"
_PACKAGES = ("maml-rl", "torch", "numpy", "gymnasium", "mujoco", "mjbatch")


def page(
    findings: Sequence[Findings], videos: Sequence[Markup | None], notices: Sequence[str], *, title: str | None = None
) -> str:
    """Return the whole report as HTML.

    Args:
        findings: one per group of runs.
        videos: of each group.
        notices: what the reader has to know first.
        title: of the page; by default the names of the groups.
    """
    groups = [found.group for found in findings]
    title = title or " and ".join(group.name for group in groups)
    several = len(groups) > 1
    body = element(
        "main",
        _header(title, groups),
        element("ul", [_notice(notice) for notice in notices], class_="notices") if notices else None,
        _comparison(findings) if several else _tiles(findings[0]),
        [
            _section(None, curves.compared_learning_curves(groups), step_returns(findings), step_table(findings)),
            [
                _section(found.group.name, *_about_one(found, films, alone=False))
                for found, films in zip(findings, videos, strict=True)
            ],
            _section("Training", curves.throughput(groups), curves.divergence(groups)),
        ]
        if several
        else [
            _section("Learning", *_about_one(findings[0], videos[0], alone=True)),
            _section("Speed", curves.time_per_stage(groups[0]), curves.throughput(groups)),
        ],
        _section("Settings", _settings(groups)),
        _section("Runs", _runs(groups)),
        _footer(),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=GENERATOR),
        element("meta", name="color-scheme", content="light dark"),
        # An icon of nothing keeps the browser from asking a server for one.
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(files("maml_rl.report").joinpath("style.css").read_text(encoding="utf-8"))),
    )
    return "<!doctype html>\n" + element("html", head, element("body", body), lang="en") + "\n"


def _notice(sentence: str) -> Markup:
    """Return a notice, with what stands in backquotes as code."""
    parts = [element("code", part) if index % 2 else part for index, part in enumerate(sentence.split("`"))]
    return element("li", parts)


def _section(title: str | None, *content: Markup | None, css: str = "grid") -> Markup | None:
    shown = [part for part in content if part]
    if not shown:
        return None
    return element("section", element("h2", title) if title else None, element("div", shown, class_=css))


def _header(title: str, groups: Sequence[RunGroup]) -> Markup:
    families = ", ".join(dict.fromkeys(group.config.env_name for group in groups))
    seeds = sum(len(group.runs) for group in groups)
    made = datetime.now().astimezone().strftime("%d %B %Y, %H:%M")
    return element(
        "header",
        element("h1", title),
        element("p", f"{families} \N{MIDDLE DOT} {seeds} run{'s' if seeds > 1 else ''} \N{MIDDLE DOT} {made}"),
    )


def _about_one(found: Findings, films: Markup | None, *, alone: bool) -> Iterable[Markup | None]:
    yield curves.learning_curve(found.group)
    if alone:
        yield step_returns([found])
    if found.evaluations:
        yield tasks.task_returns(found.evaluations[0])
    if alone:
        yield curves.divergence([found.group])
        yield step_table([found])
    if found.trial is not None:
        yield tasks.navigation_paths(found.trial)
    yield films


def _tiles(found: Findings) -> Markup:
    group = found.group
    tiles = []
    if found.evaluations:
        intervals = pooled_intervals(found.evaluations)
        for step in dict.fromkeys((0, 1, len(intervals) - 1)):
            if step < len(intervals):
                mean, low, high = intervals[step]
                interval = f"return on new tasks, [{readable(low)}, {readable(high)}]"
                css = "before" if step == 0 else "after"
                label = curves.after(step) if len(intervals) > 1 else "without adaptation"
                tiles.append(_tile(label, readable(mean), interval, css))
    for label, value, detail in _amounts(group):
        tiles.append(_tile(label, value, detail))
    return element("dl", tiles, class_="tiles")


def _tile(label: str, value: str, detail: str = "", css: str | None = None) -> Markup:
    return element("div", element("dt", label), element("dd", value, element("small", detail)), class_=css)


def _amounts(group: RunGroup) -> list[tuple[str, str, str]]:
    """Return (label, value, detail) of how much was done."""
    runs = [run for run in group.runs if run.metrics]
    if not runs:
        return []
    each = " each" if len(runs) > 1 else ""
    iterations = max(run.finished for run in runs)
    env_steps = float(np.mean([run.metrics[-1].get("env_steps") or 0 for run in runs]))
    sample = float(np.mean([run.total("time/sample_s") for run in runs]))
    update = float(np.mean([run.total("time/update_s") for run in runs]))
    amounts = [("iterations", readable_count(iterations), f"{readable_count(env_steps)} environment steps{each}")]
    if sample > 0:
        amounts.append(("steps per second", readable_count(env_steps / sample), "while sampling"))
        amounts.append(
            (
                "training time",
                readable_seconds(sample + update),
                f"{sample / (sample + update):.0%} of it sampling{each}",
            )
        )
    return amounts


def _comparison(findings: Sequence[Findings]) -> Markup:
    steps = max((found.evaluations[0].returns.shape[1] for found in findings if found.evaluations), default=0)
    labels = list(dict.fromkeys(label for found in findings for label, _, _ in _amounts(found.group)))
    head = element(
        "tr",
        element("th", "experiment"),
        [element("th", f"return {curves.after(step)}") for step in range(steps)],
        [element("th", label) for label in labels],
    )
    rows = []
    names = curves.group_names([found.group for found in findings])
    for index, found in enumerate(findings):
        intervals = pooled_intervals(found.evaluations) if found.evaluations else np.zeros((0, 3))
        amounts = {label: value for label, value, _ in _amounts(found.group)}
        rows.append(
            element(
                "tr",
                element("th", element("b", names[index], class_=curves.group_css(index))),
                [element("td", readable(intervals[step][0]) if step < len(intervals) else "") for step in range(steps)],
                [element("td", amounts.get(label, "")) for label in labels],
            )
        )
    table = element("table", element("thead", head), element("tbody", rows), class_="compared")
    return element("div", element("div", table, class_="scroll"), class_="card")


def _settings(groups: Sequence[RunGroup]) -> Markup:
    """Return a table of all settings; those that differ between groups or from the defaults stand out."""
    configs = [group.config.model_dump(mode="json", by_alias=True) for group in groups]
    defaults = {
        field.alias or name: field.get_default(call_default_factory=True) for name, field in Config.model_fields.items()
    }
    rows: list[Markup] = []
    differing: list[Markup] = []
    # Where a group has several seeds, the table of runs has them.
    hidden = "seed" if any(len(group.runs) > 1 for group in groups) else ""
    for key in configs[0]:
        if key == hidden:
            continue
        values = [config[key] for config in configs]
        changed = any(_plain(value) != _plain(defaults.get(key)) for value in values)
        same = all(value == values[0] for value in values)
        cells = [element("td", element("code", _plain(value))) for value in (values[:1] if same else values)]
        (rows if same else differing).append(
            element("tr", element("th", key), cells, class_="changed" if changed and len(groups) == 1 else None)
        )
    head = element("tr", element("th"), [element("th", group.name) for group in groups])
    compared = element(
        "div",
        element("h3", "What differs"),
        element("table", head, differing, class_="facts"),
        class_="card wide scroll",
    )
    note = "Bold settings are not the defaults." if len(groups) == 1 else "Settings that all have in common."
    half = -(-len(rows) // 2)
    columns = element(
        "div", [element("table", part, class_="facts") for part in (rows[:half], rows[half:])], class_="grid"
    )
    common = element("div", columns, element("p", note, class_="note"), class_="card wide")
    return join([compared if differing else None, common])


def _plain(value: object) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _runs(groups: Sequence[RunGroup]) -> Markup:
    head = element(
        "tr", [element("th", label) for label in ("folder", "seed", "iterations", "digest of the last iteration")]
    )
    rows = [
        element(
            "tr",
            element("td", element("code", str(run.path))),
            element("td", run.config.seed),
            element("td", f"{run.finished} of {run.config.num_batches}"),
            element("td", element("code", str(run.metrics[-1].get("digest", ""))[:16] if run.metrics else "")),
        )
        for group in groups
        for run in group.runs
    ]
    return element("div", element("table", head, rows, class_="facts"), class_="card wide scroll")


def _footer() -> Markup:
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    where = f"Python {sys.version.split()[0]}, {platform.system()} {platform.machine()}"
    return element("footer", f"Report made with {', '.join(versions)}, {where}.")
