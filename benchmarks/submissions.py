"""The tables of certified benchmarks: `python -m benchmarks.submissions` makes docs/results/submissions.md.

A submission is a file that `maml-rl test --benchmark NAME --submit FILE` or `save_submission` has written, put into
docs/results/submissions/. With `--classical` those of classical algorithms are first measured again.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bayes_optimal import BayesOptimalGridNavi
from benchmarks.learning.plan import ROOT
from maml_rl.cli.console import Parser
from maml_rl.experiment.certified import (
    Benchmark,
    benchmarks,
    find_benchmark,
    measure,
    save_submission,
    submission,
)
from maml_rl.experiment.standings import as_markdown, read_submissions, standings
from maml_rl.policies import Policy
from maml_rl.policies.classical import PSRL, UCB1, GittinsIndex, RandomPolicy, ThompsonSampling

FOLDER = ROOT / "docs" / "results" / "submissions"
PAGE = FOLDER.parent / "submissions.md"
# By benchmark and name: the function that makes a policy, and the episodes of its trials; None for the maximum.
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
    submissions = read_submissions(sorted(folder.glob("*.json")))
    parts = []
    for name, rules in benchmarks().items():
        parts.append(f"## {name}\n\n{_rules(rules)}\n")
        if name in submissions:
            parts.append(as_markdown(standings(submissions[name], "submissions/")) + "\n")
    return "\n".join(parts)


def _rules(rules: Benchmark) -> str:
    arguments = ", ".join(f"`{key}: {value}`" for key, value in rules.env_kwargs.items())
    family = f"`{rules.env_name}`" + (f" with {arguments}" if arguments else "")
    before = f"episodes before those that count: at most {rules.episodes_before}"
    adaptations = "1 adaptation" if rules.repetitions == 1 else f"{rules.repetitions} adaptations"
    return f"{rules.description} {family}, {len(rules.tasks())} tasks, {adaptations} to each; {before}."


if __name__ == "__main__":
    main()
