"""From run folders to the file `report.html`, and its numbers as tables of comma-separated values."""

import csv
import io
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from maml_rl.envs.tasks import task_key
from maml_rl.errors import ConfigError, MamlRLError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.measure import measure
from maml_rl.foreign_files import read_regular
from maml_rl.report.markup import Markup
from maml_rl.report.page import GENERATOR, page
from maml_rl.report.videos import videos
from maml_rl.results.comparable import RunGroup, read_runs
from maml_rl.results.identity import problem_of
from maml_rl.results.scales import readable_value
from maml_rl.results.verdict import GroupResult
from maml_rl.runs.atomic_files import check_writable, replace_file
from maml_rl.runs.trust import unknown_code
from maml_rl.task_distributions.task_files import read_tasks

FILE = "report.html"
_DATA = ".training.csv", ".returns.csv"
# Both tables begin with this column.
_FIRST_COLUMN = "experiment"
# The mark of a report is near its beginning.
_HEAD = 2_000

logger = logging.getLogger(__name__)


def write_report(
    runs: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    title: str | None = None,
    tasks: int | Path = 40,
    num_videos: int = 2,
    placement: Mapping[str, Any] = MappingProxyType({}),
    trust: bool = False,
    unfinished: bool = False,
    on_step: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> Path:
    """Write a self-contained page about one or several training runs, and its numbers as CSV beside it.

    Beside `report.html` are `report.training.csv`, the metrics of every iteration, and `report.returns.csv`, the mean
    return of every task after every gradient step.

    Runs whose configs differ only in the seed are shown together, as a mean with its interval. Where something is
    missing, because a run is unfinished, say, or the machine cannot draw, a sentence at the top of the page says so,
    which is logged as a warning, too.

    Args:
        runs: run folders, or folders that hold run folders.
        output: the file; by default `report.html` in the folder, or in the one that holds all of several folders.
        title: of the page; by default the names of the runs.
        tasks: how many new tasks each policy is evaluated on, 0 for none; or the file of those tasks, as
            `test.py --save-tasks` writes it.
        num_videos: tasks of which a video is made, for families that draw themselves.
        placement: settings of a config for the placement of the evaluation: "num-workers", "backend", "ray-address",
            "strict", and others that begin with "ray-".
        trust: import modules that the configs of the runs name: families, policies, algorithms, task distributions.
            Without it no such module is imported, whether installed or not; such policies are shown from their files
            only, and not tried.
        unfinished: also compare unfinished runs, up to the steps that all runs have.
        on_step: called with what is done next, the number of finished steps and their total; a run is a step, and so
            is a video.

    Returns:
        The file.

    Raises:
        ConfigError: If no folder holds a run, the output exists and is not a report, or the tasks fit no run.
    """
    groups, notices = read_runs(runs, unfinished=unfinished, trust=trust)
    # Checked before any work: these errors are the same for all runs.
    groups[0].config.override(dict(placement))
    path = Path(output) if output is not None else _default_output(runs)
    _check_output(path)
    if isinstance(tasks, Path):
        _check_tasks(tasks, groups)
    results: list[GroupResult] = []
    films: list[Markup | None] = []
    # Without pictures, or with a fault, a group has fewer videos.
    total, done = sum(len(group.runs) + num_videos for group in groups), count()
    problems: dict[str, list[RunGroup]] = {}
    for group in groups:
        # Runs of other problems, and those that are not compared, are measured by themselves.
        problem = readable_value(problem_of(group.config)) if group.compared else str(group.index)
        problems.setdefault(problem, []).append(group)
    for members in problems.values():
        measured, complaints = measure(
            members,
            tasks,
            placement=placement,
            pictures=True,
            with_untrained=True,
            on_run=lambda run: on_step(f"measuring {run.path}", next(done), total),
        )
        notices += complaints
        results += measured
    results.sort(key=lambda result: result.group.index)
    for result in results:
        film, complaints = None, []
        if result.sampled is not None:
            film, complaints = videos(result.sampled, num_videos, lambda: on_step("drawing videos", next(done), total))
        notices += complaints
        films.append(film)
    on_step("writing the page", total, total)
    notices = list(dict.fromkeys(notices))
    for notice in notices:
        logger.warning("%s", notice)
    data = [path.with_suffix(suffix) for suffix in _DATA]
    for file, table in zip(data, (training_table(groups), returns_table(results)), strict=True):
        replace_file(file, table.encode())
    names = [file.name for file in data]
    replace_file(path, page(results, films, notices, title=title, data=names).encode())
    return path


def _check_tasks(path: Path, groups: Sequence[RunGroup]) -> None:
    """Refuse tasks that fit none of the evaluated groups."""
    errors = []
    for group in groups:
        try:
            if unknown_code(group.config, known=False):
                read_tasks(path, group.config.env_name)
            else:
                make_experiment(group.config).load_tasks(path)
            return
        except MamlRLError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _default_output(runs: Sequence[str | Path]) -> Path:
    """Return the report's place: the folder, or the lowest that holds all of them; here where that is the root."""
    try:
        folder = Path(os.path.commonpath(runs))
    except ValueError:  # Some are absolute paths and some are not.
        folder = Path()
    return (Path() if folder == folder.parent else folder) / FILE


def _check_output(path: Path) -> None:
    check_writable(path, "--output")
    if path.exists():
        head = _there(path)[:_HEAD].decode("utf-8", errors="replace")
        if not re.search(f'name="generator" content="{re.escape(GENERATOR)}"', head):
            raise ConfigError(f"{path} exists and is not a report; choose another --output")
    for data in map(path.with_suffix, _DATA):
        if data.exists() and not re.match(rb"%b[,\r\n]" % _FIRST_COLUMN.encode(), _there(data)):
            raise ConfigError(f"{data} exists and is not a table of a report; move it, or choose another --output")


def _there(path: Path) -> bytes:
    """Return what is in the place of an output."""
    try:
        return read_regular(path)
    except OSError as error:
        raise ConfigError(f"cannot replace {path}: {error.strerror or error}; choose another --output") from None


def training_table(groups: Sequence[RunGroup]) -> str:
    """Return the metrics of every iteration of every run."""
    return _table(
        {_FIRST_COLUMN: group.name, "folder": run.path, "seed": run.config.seed, **metrics}
        for group in groups
        for run in group.runs
        for metrics in run.metrics
    )


def returns_table(results: Sequence[GroupResult]) -> str:
    """Return the mean return of every task after every gradient step, for each policy and repetition."""
    evaluations = [
        (result.group.name, policy, evaluation)
        for result in results
        for policy, evaluation in enumerate(result.evaluations)
    ]
    evaluations += [
        (f"{result.group.name}: random initialization", 0, result.untrained)
        for result in results
        if result.untrained is not None
    ]
    return _table(
        {
            _FIRST_COLUMN: name,
            "policy": policy,
            "task": task,
            "parameters": task_key(evaluation.tasks[task]),
            "repetition": repetition,
            "gradient_steps": step,
            "return": value,
        }
        for name, policy, evaluation in evaluations
        for (task, repetition, step), value in np.ndenumerate(evaluation.repetition_returns())
    )


def _table(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows under all of their columns; missing cells are empty."""
    listed = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys([_FIRST_COLUMN, *(key for row in listed for key in row)])))
    writer.writeheader()
    writer.writerows(listed)
    return text.getvalue()
