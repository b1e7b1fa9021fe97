"""The numbers behind a report, as tables of comma-separated values."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from maml_rl.envs.task_space import task_key
from maml_rl.experiment.comparable import RunGroup
from maml_rl.report.evaluations import GroupResult

# Both tables begin with this column.
FIRST_COLUMN = "experiment"


def training_table(groups: Sequence[RunGroup]) -> str:
    """Return the metrics of every iteration of every run."""
    return _table(
        {FIRST_COLUMN: group.name, "folder": run.path, "seed": run.config.seed, **metrics}
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
            FIRST_COLUMN: name,
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
    kept = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys([FIRST_COLUMN, *(key for row in kept for key in row)])))
    writer.writeheader()
    writer.writerows(kept)
    return text.getvalue()
