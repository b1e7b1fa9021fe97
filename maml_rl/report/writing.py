"""From run folders to the file `report.html`."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from maml_rl.atomic_files import replace_file
from maml_rl.errors import ConfigError
from maml_rl.report.page import GENERATOR, page
from maml_rl.report.runs import read_runs
from maml_rl.report.trial import find_out
from maml_rl.report.videos import videos

FILE = "report.html"
# The mark that a report carries stands near its beginning.
_HEAD = 2_000

logger = logging.getLogger(__name__)


def write_report(
    runs: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    title: str | None = None,
    num_tasks: int = 40,
    num_videos: int = 2,
    num_workers: int | None = None,
) -> Path:
    """Write a self-contained page about one or several training runs.

    Runs whose configs differ in the seed alone are shown together, as a mean with its interval. What cannot be shown,
    because a run is unfinished, say, or the machine cannot draw, is replaced by a sentence at the top of the page,
    which is logged as a warning, too.

    Args:
        runs: run folders, or folders that hold run folders.
        output: the file; by default `report.html` in the folder, or beside the folders where there are several.
        title: of the page; by default the names of the runs.
        num_tasks: new tasks on which each policy is tried; 0 for none.
        num_videos: tasks of which a video is made, for families that draw themselves.
        num_workers: child processes for the trial; see `MultiTaskSampler`.

    Returns:
        The file.

    Raises:
        ConfigError: If there is no run among the folders, or the output exists and is no report.
    """
    groups, notices = read_runs(runs)
    path = Path(output) if output is not None else _default_output(runs)
    _check_output(path)
    findings, films = [], []
    for group in groups:
        found, complaints = find_out(group, num_tasks=num_tasks, num_workers=num_workers)
        notices += complaints
        film, complaints = videos(found.trial, num_videos) if found.trial is not None else (None, [])
        notices += complaints
        findings.append(found)
        films.append(film)
    notices = list(dict.fromkeys(notices))
    for notice in notices:
        logger.warning("%s", notice)
    replace_file(path, page(findings, films, notices, title=title).encode())
    return path


def _default_output(runs: Sequence[str | Path]) -> Path:
    return (Path(runs[0]) if len(runs) == 1 else Path()) / FILE


def _check_output(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} for the report; make it first, or choose another --output")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give --output the name of a file")
    if path.exists():
        head = path.read_bytes()[:_HEAD].decode("utf-8", errors="replace")
        if not re.search(f'name="generator" content="{re.escape(GENERATOR)}"', head):
            raise ConfigError(f"{path} exists and is no report; choose another --output")
