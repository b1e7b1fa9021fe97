"""From run folders to the file `report.html`."""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from maml_rl.errors import ConfigError, MamlRLError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.comparable import RunGroup, read_runs
from maml_rl.report.data import FIRST_COLUMN, returns_table, training_table
from maml_rl.report.evaluations import GroupResult, evaluate_group
from maml_rl.report.markup import Markup
from maml_rl.report.page import GENERATOR, page
from maml_rl.report.videos import videos
from maml_rl.runs.atomic_files import check_writable, replace_file

FILE = "report.html"
_DATA = ".training.csv", ".returns.csv"
# The mark of a report is near its beginning.
_HEAD = 2_000

OnPart = Callable[[str, int, int], object]

logger = logging.getLogger(__name__)


def write_report(
    runs: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    title: str | None = None,
    num_tasks: int = 40,
    task_file: str | Path | None = None,
    num_videos: int = 2,
    num_workers: int | None = None,
    placement: Mapping[str, Any] | None = None,
    trust: bool = False,
    unfinished: bool = False,
    on_part: OnPart = lambda what, done, total: None,
) -> Path:
    """Write a self-contained page about one or several training runs, and its numbers as CSV beside it.

    Beside `report.html` are `report.training.csv`, the metrics of every iteration, and `report.returns.csv`, the mean
    return of every task after every gradient step.

    Runs whose configs differ only in the seed are shown together, as a mean with its interval. A missing part, because
    a run is unfinished, say, or the machine cannot draw, is replaced by a sentence at the top of the page, which is
    logged as a warning, too.

    Args:
        runs: run folders, or folders that hold run folders.
        output: the file; by default `report.html` in the folder, or in the one that holds all of several folders.
        title: of the page; by default the names of the runs.
        num_tasks: new tasks on which each policy is evaluated; 0 for none.
        task_file: tasks on which each is evaluated instead; see `test.py --save-tasks`.
        num_videos: tasks of which a video is made, for families that draw themselves.
        num_workers: worker processes for the evaluation; see `MultiTaskSampler`.
        placement: other settings of a config for the placement of its episodes: "backend", "num-workers",
            "ray-address", "strict", and others that begin with "ray-".
        trust: import modules that the configs of the runs name: families, policies, algorithms, task distributions.
            Without it no such module is imported, whether installed or not; such policies are shown from their files
            only, and not tried.
        unfinished: also compare runs that are unfinished, as far as all runs have come.
        on_part: called with the next part, the number of finished parts and their total; a run is a part, and so is a
            video.

    Returns:
        The file.

    Raises:
        ConfigError: If no folder holds a run, the output exists and is not a report, or the tasks fit no run.
    """
    groups, notices = read_runs(runs, unfinished=unfinished)
    # Checked before any work: these errors are the same for all runs.
    groups[0].config.override(dict(placement or {}))
    path = Path(output) if output is not None else _default_output(runs)
    _check_output(path)
    held_out = None if task_file is None else Path(task_file)
    if held_out is not None:
        _check_tasks(held_out, groups, trust=trust)
    results: list[GroupResult] = []
    films: list[Markup | None] = []
    total, done = sum(len(group.runs) + num_videos for group in groups), 0
    for group in groups:
        parts = count(done)
        result, complaints = evaluate_group(
            group,
            num_tasks=num_tasks,
            num_workers=num_workers,
            placement=placement,
            task_file=held_out,
            trust=trust,
            on_run=lambda parts=parts: on_part("trying policies", next(parts), total),  # type: ignore[misc]
            # The compared policies of one family have the same initial policy.
            with_untrained=all(
                earlier.untrained is None or earlier.group.config.env_name != group.config.env_name
                for earlier in results
            ),
        )
        notices += complaints
        film, complaints = None, []
        if result.sampled is not None:
            film, complaints = videos(
                result.sampled,
                num_videos,
                lambda parts=parts: on_part("drawing videos", next(parts), total),  # type: ignore[misc]
            )
        notices += complaints
        # Without pictures, or with a fault, a group has fewer videos.
        done += len(group.runs) + num_videos
        results.append(result)
        films.append(film)
    on_part("writing the page", total, total)
    notices = list(dict.fromkeys(notices))
    for notice in notices:
        logger.warning("%s", notice)
    data = {path.with_suffix(suffix): table for suffix, table in _data(results).items()}
    for file, table in data.items():
        replace_file(file, table.encode())
    names = [file.name for file in data]
    replace_file(path, page(results, films, notices, title=title, data=names).encode())
    return path


def _data(results: Sequence[GroupResult]) -> dict[str, str]:
    """Return the tables behind the page, by the ends of their names."""
    tables = training_table([result.group for result in results]), returns_table(results)
    return dict(zip(_DATA, tables, strict=True))


def _check_tasks(path: Path, groups: Sequence[RunGroup], *, trust: bool) -> None:
    """Refuse tasks that fit none of the evaluated groups."""
    errors = []
    for group in groups:
        if not trust and group.config.named_code():
            continue
        try:
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
        head = path.read_bytes()[:_HEAD].decode("utf-8", errors="replace")
        if not re.search(f'name="generator" content="{re.escape(GENERATOR)}"', head):
            raise ConfigError(f"{path} exists and is not a report; choose another --output")
    for data in map(path.with_suffix, _DATA):
        if data.exists() and not re.match(rb"%b[,\r\n]" % FIRST_COLUMN.encode(), data.read_bytes()):
            raise ConfigError(f"{data} exists and is not a table of a report; move it, or choose another --output")
