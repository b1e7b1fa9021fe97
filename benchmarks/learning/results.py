"""The CSV files: one row for each seed and evaluated iteration, and what is computed from them."""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.meta_env import ValueRanges
from maml_rl.results.evaluation import Evaluation
from maml_rl.runs.atomic_files import replace_file

Values = NDArray[np.float64]
_FIRST = ("seed", "iteration", "env_steps", "sample_seconds", "update_seconds", "version", "digest", "settings")
_RETURN, _TASKS = "return_", "task_returns_"
_SUCCESS, _TASK_SUCCESSES = "success_", "task_successes_"
SUCCESS = "success"
# Rates have four digits, which tell shares of fewer episodes apart.
_MOST_EPISODES, _ROUNDING = 100, 6e-5


@dataclass(frozen=True, slots=True)
class Row:
    """One evaluation of one training.

    Attributes:
        seed: of training.
        iteration: meta-updates before it.
        env_steps: environment steps before it.
        sample_seconds: time spent on them; with prefetch, time that meta-updates waited for them.
        update_seconds: time spent on the meta-updates.
        version: of the package.
        task_returns: (N, K + 1) mean return on each held-out task after 0 ... K steps.
        task_successes: (N, K + 1) the same for the success rate; None where the family has no success.
        digest: SHA-256 of all episodes of the last batch before it; a repetition of the training has the same.
        settings: digest of the training's settings, see `Method.settings`; empty where it was not recorded.
        ranges: of the evaluations, see `Evaluation`.
    """

    seed: int
    iteration: int
    env_steps: int
    sample_seconds: float
    update_seconds: float
    version: str
    task_returns: Values
    task_successes: Values | None = None
    digest: str = ""
    settings: str = ""
    ranges: ValueRanges = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the row in its file."""
        return self.seed, self.iteration

    @property
    def minutes(self) -> float:
        """Minutes of training before it: sampling and meta-updates."""
        return (self.sample_seconds + self.update_seconds) / 60.0

    def returns(self) -> Values:
        """Return the mean over tasks after 0 ... K steps, (K + 1,)."""
        means: Values = self.task_returns.mean(axis=0)
        return means

    def evaluation(self, steps: int | None = None) -> Evaluation:
        """Return the row as an evaluation, whose intervals are for the family that the tasks were drawn from.

        Args:
            steps: last step to include; None for all.
        """
        tasks = [{"number": index} for index in range(len(self.task_returns))]
        kept = slice(None if steps is None else steps + 1)
        returns, infos = self.task_returns[:, kept, None].astype(np.float32), {}
        if self.task_successes is not None:
            # Episodes with these rates: the interval of a rate needs to know that each succeeds or fails.
            count = _fewest_episodes(self.task_successes)
            succeed = np.arange(count) < np.round(self.task_successes[:, kept, None] * count)
            returns, infos = np.repeat(returns, count, axis=2), {SUCCESS: succeed.astype(np.float32)}
        return Evaluation("", self.seed, tasks, (), returns, infos=infos, ranges=self.ranges)


def _fewest_episodes(rates: Values) -> int:
    """Return the least number of episodes for which all of the rates, of four digits, are shares of successes."""
    for count in range(1, _MOST_EPISODES):
        if np.abs(rates * count - np.round(rates * count)).max() < _ROUNDING * count:
            return count
    return _MOST_EPISODES


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, by seed and iteration; none where there is no file."""
    if not path.is_file():
        return []
    rows = []
    for cells in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")), restval=""):
        returns, successes = _of_tasks(cells, _TASKS), _of_tasks(cells, _TASK_SUCCESSES)
        assert returns is not None
        rows.append(
            Row(
                seed=int(cells["seed"]),
                iteration=int(cells["iteration"]),
                env_steps=int(cells["env_steps"]),
                sample_seconds=float(cells["sample_seconds"]),
                update_seconds=float(cells["update_seconds"]),
                version=cells["version"],
                task_returns=returns,
                task_successes=successes,
                digest=cells.get("digest", ""),
                settings=cells.get("settings", ""),
            )
        )
    return sorted(rows, key=lambda row: row.key)


def _of_tasks(cells: Mapping[str, str], prefix: str) -> Values | None:
    """Return the values of all tasks, (N, K + 1), from the cells with this prefix; None where there are none."""
    columns = [[float(value) for value in text.split()] for name, text in cells.items() if name.startswith(prefix)]
    return np.array(columns).T if columns and columns[0] else None


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows of all seeds; the file is replaced atomically."""
    rows = sorted(rows, key=lambda row: row.key)
    steps = max(row.task_returns.shape[1] for row in rows)
    prefixes = [_RETURN, _TASKS]
    if any(row.task_successes is not None for row in rows):
        prefixes += [_SUCCESS, _TASK_SUCCESSES]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_FIRST, *(f"{prefix}{step}" for prefix in prefixes for step in range(steps))])
    for row in rows:
        cells = [row.seed, row.iteration, row.env_steps, f"{row.sample_seconds:.3f}", f"{row.update_seconds:.3f}"]
        cells += [row.version, row.digest, row.settings, *_cells(row.task_returns, 2)]
        cells += _cells(row.task_successes, 4) if row.task_successes is not None else []
        writer.writerow(cells)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.getvalue().encode())


def _cells(of_tasks: Values, digits: int) -> list[str]:
    """Return a cell with the mean of each column, and one with the values of all tasks."""
    means = [f"{mean:.3f}" for mean in of_tasks.mean(axis=0)]
    return [*means, *(" ".join(f"{value:g}" for value in column) for column in np.round(of_tasks.T, digits))]


def by_seed(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Return the rows of each training, in the order of iterations."""
    found: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.key):
        found.setdefault(row.seed, []).append(row)
    return found
