"""The CSV files: one row for each seed and evaluated iteration, and what is computed from them."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maml_rl.experiment.evaluate import Evaluation
from maml_rl.runs.atomic_files import replace_file

Values = NDArray[np.float64]
_FIRST = ("seed", "iteration", "env_steps", "sample_seconds", "update_seconds", "version")
_RETURN, _TASKS = "return_", "task_returns_"


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
    """

    seed: int
    iteration: int
    env_steps: int
    sample_seconds: float
    update_seconds: float
    version: str
    task_returns: Values

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
        returns = self.task_returns if steps is None else self.task_returns[:, : steps + 1]
        return Evaluation("", self.seed, tasks, (), returns[:, :, None].astype(np.float32))


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, by seed and iteration; none where there is no file."""
    if not path.is_file():
        return []
    rows = []
    for cells in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))):
        steps = sum(name.startswith(_RETURN) for name in cells)
        texts = [cells[f"{_TASKS}{step}"] for step in range(steps)]
        rows.append(
            Row(
                seed=int(cells["seed"]),
                iteration=int(cells["iteration"]),
                env_steps=int(cells["env_steps"]),
                sample_seconds=float(cells["sample_seconds"]),
                update_seconds=float(cells["update_seconds"]),
                version=cells["version"],
                task_returns=np.array([[float(value) for value in text.split()] for text in texts]).T,
            )
        )
    return sorted(rows, key=lambda row: row.key)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows of all seeds; the file is replaced atomically."""
    rows = sorted(rows, key=lambda row: row.key)
    steps = max(row.task_returns.shape[1] for row in rows)
    numbers = range(steps)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_FIRST, *(f"{_RETURN}{step}" for step in numbers), *(f"{_TASKS}{step}" for step in numbers)])
    for row in rows:
        tasks = [" ".join(f"{value:g}" for value in column) for column in np.round(row.task_returns.T, 2)]
        writer.writerow(
            [
                row.seed,
                row.iteration,
                row.env_steps,
                f"{row.sample_seconds:.3f}",
                f"{row.update_seconds:.3f}",
                row.version,
                *(f"{value:.3f}" for value in row.returns()),
                *tasks,
            ]
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.getvalue().encode())


def by_seed(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Return the rows of each training, in the order of iterations."""
    found: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.key):
        found.setdefault(row.seed, []).append(row)
    return found


def first_passing(rows: Sequence[Row], threshold: float, step: int = 1) -> Row | None:
    """Return the first evaluation of a training with a return of at least `threshold` in it and in the next one."""
    for one, following in pairwise(rows):
        if min(one.returns()[step], following.returns()[step]) >= threshold:
            return one
    return None


def passing_rows(trainings: Iterable[Sequence[Row]], threshold: float) -> list[Row]:
    """Return the evaluation at which each training passes the threshold; see `first_passing`. Some may not."""
    found = (first_passing(of_seed, threshold) for of_seed in trainings)
    return [row for row in found if row is not None]
