"""Tables of the certified benchmarks: the results of all policies, the best first."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from maml_rl.experiment.certified import FOLDER, find_benchmark, read_submission
from maml_rl.experiment.evaluation import NORMALIZED, Evaluation
from maml_rl.experiment.references import references
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
    """Return the rows of a benchmark's table, its head first, then the highest mean return, of a mixture normalized.

    Args:
        submissions: to one benchmark, by file.
        folder: below which the names link to their files, as seen from a page; empty for no links.
    """
    infos = sorted({name for content in submissions.values() for name in content.get("infos", {})})
    parts = {path: _parts(content) for path, content in submissions.items()}
    families = list(dict.fromkeys(name for means in parts.values() for name in means))
    rows = []
    for path, content in submissions.items():
        policy = content["policy"]
        tasks = np.array(content["returns"], np.float64)[..., -1].mean(axis=1)
        middle = interquartile_mean(tasks[None], np.full(tasks.size, 1.0 / tasks.size))[0]
        cells = [
            f"[{_escaped(policy['name'])}]({folder}{quote(path.name)})" if folder else _escaped(policy["name"]),
            _escaped(policy.get("algorithm") or ""),
            f"{content['episodes-before']}",
            f"{tasks.mean():.2f}",
            f"{middle:.2f}",
            f"{tasks.min():.2f}",
            *(f"{parts[path][name]:.2f}" for name in families),
            *(_mean(content.get("infos", {}).get(name)) for name in infos),
            ", then ".join(_code(command) for command in (policy.get("trained-by"), content.get("command")) if command),
        ]
        rows.append((parts[path].get(NORMALIZED, float(tasks.mean())), cells))
    head = [*_HEAD, *families, *(f"mean {name}" for name in infos), "command"]
    return [head, *(cells for _, cells in sorted(rows, key=lambda row: -row[0]))]


def _parts(content: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean returns of each family of a mixture, and the normalized mean of all; see `Evaluation.parts`."""
    rules = find_benchmark(content["benchmark"])
    returns = np.array(content["returns"], np.float32).transpose(0, 2, 1)
    known = references(rules.env_kwargs, rules.max_episode_steps)
    whole = Evaluation(rules.env_name, content["seed"], rules.tasks(), (), returns, references=known)
    return {name: float(part.task_returns()[:, -1].mean()) for name, part in whole.parts().items()}


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows of `standings` as a table in Markdown."""
    lines = [rows[0], ["---", "---", *["---:"] * (len(rows[0]) - 3), "---"], *rows[1:]]
    # A command may have bars, and a cell must not.
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |" for cells in lines)


def _escaped(text: str) -> str:
    """Return text that is shown as it is: without HTML, links, code and attributes."""
    return re.sub(r"[\\`*<>&|\[\]{}]", lambda found: f"&#{ord(found.group())};", text)


def _code(command: str) -> str:
    return f"<code>{_escaped(command)}</code>" if "`" in command else f"`{command}`"


def _mean(values: Any) -> str:
    """Return the mean of an info in the episodes that count; nothing where a submission lacks it."""
    return "" if values is None else f"{np.mean(np.array(values)[..., -1]):.3f}"
