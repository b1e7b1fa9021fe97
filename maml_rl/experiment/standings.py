"""Tables of the certified benchmarks: the results of all policies, the best first."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maml_rl.experiment.certified import FOLDER, read_submission
from maml_rl.experiment.statistics import interquartile_mean

# A link to docs/results/submissions/ of the repository; where the package is installed, a copy of it.
ENTERED = FOLDER / "submissions"

_HEAD = "policy", "algorithm", "episodes before", "mean return", "interquartile mean", "worst task"


def read_submissions(paths: Iterable[Path]) -> dict[str, dict[Path, dict[str, Any]]]:
    """Return submissions by their benchmark and file.

    Raises:
        ConfigError: If one is not a submission.
    """
    found: dict[str, dict[Path, dict[str, Any]]] = {}
    for path in paths:
        content = read_submission(path)
        found.setdefault(content["benchmark"], {})[path] = content
    return found


def standings(submissions: Mapping[Path, Mapping[str, Any]], folder: str = "") -> list[list[str]]:
    """Return the rows of a benchmark's table, its head first, then the highest mean return.

    Args:
        submissions: to one benchmark, by file.
        folder: below which the names link to their files, as seen from a page; empty for no links.
    """
    infos = sorted({name for content in submissions.values() for name in content.get("infos", {})})
    rows = []
    for path, content in submissions.items():
        policy = content["policy"]
        tasks = np.array(content["returns"], np.float64)[..., -1].mean(axis=1)
        middle = interquartile_mean(tasks[None], np.full(tasks.size, 1.0 / tasks.size))[0]
        cells = [
            f"[{policy['name']}]({folder}{path.name})" if folder else str(policy["name"]),
            str(policy.get("algorithm", "")),
            f"{content['episodes-before']}",
            f"{tasks.mean():.2f}",
            f"{middle:.2f}",
            f"{tasks.min():.2f}",
            *(_mean(content.get("infos", {}).get(name)) for name in infos),
            ", then ".join(f"`{command}`" for command in (policy.get("trained-by"), content.get("command")) if command),
        ]
        rows.append((float(tasks.mean()), cells))
    head = [*_HEAD, *(f"mean {name}" for name in infos), "command"]
    return [head, *(cells for _, cells in sorted(rows, key=lambda row: -row[0]))]


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows of `standings` as a table in Markdown."""
    lines = [rows[0], ["---", "---", *["---:"] * (len(rows[0]) - 3), "---"], *rows[1:]]
    # A name may have bars and line breaks, and a cell must not.
    return "\n".join(f"| {' | '.join(' '.join(c.split()).replace('|', '&#124;') for c in cells)} |" for cells in lines)


def _mean(values: Any) -> str:
    """Return the mean of an info in the episodes that count; nothing where a submission lacks it."""
    return "" if values is None else f"{np.mean(np.array(values)[..., -1]):.3f}"
