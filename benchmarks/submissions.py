"""The table of certified benchmarks: `python -m benchmarks.submissions` makes docs/benchmarks.md from submissions.

A submission is a file that `maml-rl test --benchmark NAME --submit FILE` or `save_submission` has written, put into
docs/results/submissions/. With `--classical` those of classical algorithms are measured anew first.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning.plan import ROOT
from maml_rl.cli.console import Parser
from maml_rl.experiment.certified import (
    Benchmark,
    benchmarks,
    find_benchmark,
    measure,
    read_submission,
    save_submission,
    submission,
)
from maml_rl.experiment.statistics import interquartile_mean
from maml_rl.policies import Policy
from maml_rl.policies.classical import PSRL, UCB1, BayesOptimalGridNavi, GittinsIndex, RandomPolicy, ThompsonSampling

FOLDER = ROOT / "docs" / "results" / "submissions"
PAGE = ROOT / "docs" / "benchmarks.md"
# By benchmark and name: what makes a policy, and the episodes of its trials; None for as many as there may be.
_CLASSICAL: dict[tuple[str, str], tuple[Callable[[], Policy], int | None]] = {
    ("bandit-k5-n10-v1", "Gittins index"): (lambda: GittinsIndex(5, 10), None),
    ("bandit-k5-n10-v1", "UCB1"): (lambda: UCB1(5, 0.2), None),
    ("bandit-k5-n10-v1", "Thompson sampling"): (lambda: ThompsonSampling(5), None),
    ("bandit-k5-n10-v1", "random"): (lambda: RandomPolicy(5), None),
    ("tabular-mdp-v1", "PSRL"): (lambda: PSRL(10, 5, 10), 10),
    ("tabular-mdp-v1", "random"): (lambda: RandomPolicy(5), 1),
    ("gridnavi-v1", "Bayes optimum"): (BayesOptimalGridNavi, 4),
    ("gridnavi-v1", "random"): (lambda: RandomPolicy(5), 1),
}
BEGIN, END = "<!-- submissions -->", "<!-- end of submissions -->"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the submissions")
    parser.add_argument("--page", type=Path, default=PAGE, help="whose tables are made anew")
    parser.add_argument("--classical", action="store_true", help="measure the classical algorithms first")
    options = parser.parse_args(arguments)
    if options.classical:
        for (name, policy_name), (make, num_episodes) in _CLASSICAL.items():
            rules = find_benchmark(name)
            evaluation = measure(make(), rules, num_episodes=num_episodes)
            entrant = {"name": policy_name, "algorithm": "classical"}
            content = submission(
                rules, evaluation, policy=entrant, command="python -m benchmarks.submissions --classical"
            )
            save_submission(options.folder / f"classical-{name}-{policy_name.lower().replace(' ', '-')}.json", content)
    page = options.page.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    options.page.write_text(f"{before}{BEGIN}\n\n{tables(options.folder)}\n{END}{after}", encoding="utf-8")


def tables(folder: Path) -> str:
    """Return the tables of all benchmarks as Markdown, the best policy first."""
    submissions = {path.name: read_submission(path) for path in sorted(folder.glob("*.json"))}
    parts = []
    for name, rules in benchmarks().items():
        mine = {file: content for file, content in submissions.items() if content["benchmark"] == name}
        parts.append(f"### {name}\n\n{_rules(rules)}\n")
        if mine:
            parts.append(_table(mine))
    return "\n".join(parts)


def _rules(rules: Benchmark) -> str:
    arguments = ", ".join(f"`{key}: {value}`" for key, value in rules.env_kwargs.items())
    family = f"`{rules.env_name}`" + (f" with {arguments}" if arguments else "")
    before = f"episodes before those that count: at most {rules.episodes_before}"
    return (
        f"{rules.description} {family}, {len(rules.tasks())} tasks, {rules.repetitions} adaptations to each; {before}."
    )


def _table(submissions: dict[str, dict[str, Any]]) -> str:
    rows = []
    infos = sorted({name for content in submissions.values() for name in content.get("infos", {})})
    for file, content in submissions.items():
        policy = content["policy"]
        scores = np.array(content["returns"], np.float64)[..., -1]
        tasks = scores.mean(axis=1)
        middle = interquartile_mean(tasks[None], np.full(tasks.size, 1.0 / tasks.size))[0]
        cells = [
            f"[{policy['name']}](results/submissions/{file})",
            str(policy.get("algorithm", "")),
            f"{content['episodes-before']}",
            f"{tasks.mean():.2f}",
            f"{middle:.2f}",
            f"{tasks.min():.2f}",
            *(_mean(content.get("infos", {}).get(name)) for name in infos),
            f"`{content['command']}`" if content.get("command") else "",
        ]
        rows.append((float(tasks.mean()), cells))
    head = ["policy", "algorithm", "episodes before", "mean return", "interquartile mean", "worst task"]
    head += [*(f"mean {name}" for name in infos), "command"]
    lines = [
        head,
        ["---", "---", *["---:"] * (len(head) - 3), "---"],
        *(cells for _, cells in sorted(rows, key=lambda row: -row[0])),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _mean(values: Any) -> str:
    """Return the mean of what counts of an info; nothing where a submission lacks it."""
    return "" if values is None else f"{np.mean(np.array(values)[..., -1]):.3f}"


if __name__ == "__main__":
    main()
