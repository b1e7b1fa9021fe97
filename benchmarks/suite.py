"""The suite of families: `python -m benchmarks.suite` makes docs/suite.md from the CSV files; `--train` trains first.

The trainings are those of `benchmarks.learning`, of fewer algorithms on more families. The page follows rliable's
conventions: interquartile means over trainings and tasks, probabilities of improvement, stratified bootstrap. The
library itself cannot be imported beside a present pandas, and would bring fourteen packages for what is below.

Source: Agarwal et al. 2021, https://arxiv.org/abs/2108.13264
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning.command import run
from benchmarks.learning.page import chart_of, compared_rows, rows_of
from benchmarks.learning.plan import (
    HALFCHEETAH_DIR,
    NAVIGATION,
    ORACLE,
    PRETRAIN,
    RANDOM,
    RL2_OF_400_EPISODES,
    ROOT,
    TRPO,
    Contender,
    Family,
    Plan,
    named,
)
from benchmarks.learning.results import Row, Values
from maml_rl.experiment.statistics import interquartile_mean

_REPETITIONS = 2_000
_STEP = 1


# What HalfCheetahDir learns fastest with; a whole training of a family of physics then takes minutes.
def _as_halfcheetah_dir(**env_kwargs: float) -> dict[str, Any]:
    """Return the changes; of RL2 with noise as large as the actuators' range, in an environment of these arguments."""
    return {
        "changes": {"meta-batch-size": 20, "fast-batch-size": 10, "fast-lr": 0.5},
        "algorithm_changes": {
            "maml-trpo": {"max-kl": 0.03},
            "promp": {"algorithm-settings": {"learning-rate": 3e-3}},
            "rl2": RL2_OF_400_EPISODES,
            "rl2-control": {"env-kwargs": env_kwargs},
        },
    }


_STEP_OF_NAVIGATION = {"promp": {"algorithm-settings": {"learning-rate": 1e-2}}}
FAMILIES = (
    NAVIGATION,
    Family(
        "sparse-point-goal",
        "Sparse point goals",
        "sparse-point-goal.yaml",
        60,
        20,
        algorithm_changes=_STEP_OF_NAVIGATION,
    ),
    HALFCHEETAH_DIR,
    Family(
        "halfcheetah-vel",
        "HalfCheetahVel, horizon 100",
        "halfcheetah-vel.yaml",
        60,
        20,
        **_as_halfcheetah_dir(low=0.0, high=2.0),
    ),
    Family("ant-dir", "AntDir, horizon 100", "ant-dir.yaml", 60, 20, **_as_halfcheetah_dir()),
    Family("tabular-mdp", "Tabular MDPs", "tabular-mdp.yaml", 60, 20, algorithm_changes=_STEP_OF_NAVIGATION),
)
# Trials of two episodes: as many episodes of training as the others have with 20 tasks.
_RL2 = Contender(
    "rl2",
    "rl2",
    {
        "observe-last": True,
        "fast-batch-size": 2,
        "meta-batch-size": 400,
        "algorithm-settings": {
            "hidden-size": 64,
            "value": "network",
            "learning-rate": 1e-3,
            "num-epochs": 8,
            "num-minibatches": 4,
            "clip": 0.2,
        },
    },
)
# What control needs: observations in units of their deviation, layers that act on them and on the memory, and many
# small steps. Five meta-updates have as many episodes as one of the others.
_RL2_CONTROL = Contender(
    "rl2-control",
    "rl2",
    {
        "observe-last": True,
        "gamma": 0.97,
        "gae-lambda": 0.9,
        "fast-batch-size": 2,
        "meta-batch-size": 40,
        "algorithm-settings": {
            "hidden-size": 64,
            "layers": [64],
            "normalize-observations": True,
            "learning-rate": 1e-3,
            "num-epochs": 8,
            "num-minibatches": 4,
            "clip": 0.2,
            "entropy-coefficient": 0.01,
        },
    },
    updates=5,
)
SUITE = Plan(
    ROOT / "docs" / "suite.md",
    named(*FAMILIES),
    named(TRPO, Contender("promp", "promp"), _RL2, _RL2_CONTROL, PRETRAIN, ORACLE, RANDOM),
    {family.name: (0, 1, 2) for family in FAMILIES},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run(SUITE, arguments, tables=tables, draw=draw)


def scores_of(plan: Plan, family: Family) -> dict[str, Values]:
    """Return the compared returns after one step, or without one for an oracle, by name: (trainings, tasks)."""
    compared = compared_rows(plan, rows_of(plan, family))
    return {name: np.stack([_after_step(row) for row in rows]) for name, rows in compared.items()}


def _after_step(row: Row) -> Values:
    column: Values = row.task_returns[:, min(_STEP, row.task_returns.shape[1] - 1)]
    return column


def interquartile_means(scores: dict[str, Values]) -> dict[str, Values]:
    """Return the interquartile mean over trainings and tasks, and its 95 % interval, (3,), by name."""
    found = {}
    for name, values in scores.items():
        weights = np.full(values.size, 1.0 / values.size)
        draws = resampled(values, resample_tasks=True)
        estimates = [interquartile_mean(each.reshape(len(each), -1), weights) for each in (values[None], draws)]
        found[name] = _with_percentiles(*estimates)
    return found


def improvements(scores: dict[str, Values], over: str) -> dict[str, Values]:
    """Return the probability that a training beats one of `over` on a task, and its 95 % interval, (3,), by name."""
    found = {}
    for name, values in scores.items():
        if name != over and over in scores:
            others = scores[over]
            drawn = _wins(resampled(values), resampled(others, seed=1))
            found[name] = _with_percentiles(_wins(values[None], others[None]), drawn)
    return found


def resampled(values: Values, *, resample_tasks: bool = False, seed: int = 0) -> Values:
    """Draw trainings anew, for each task by itself, and tasks if they are drawn, too: (R, N) -> (repetitions, R, N)."""
    random = np.random.default_rng(seed)
    trainings, tasks = values.shape
    rows = random.integers(trainings, size=(_REPETITIONS, trainings, tasks))
    columns = random.integers(tasks, size=(_REPETITIONS, 1, tasks)) if resample_tasks else np.arange(tasks)
    drawn: Values = values[rows, columns]
    return drawn


def _wins(values: Values, others: Values) -> Values:
    """Return the share of pairs of trainings and of tasks in which the first have more, (repetitions,)."""
    signs = np.sign(values[:, :, None] - others[:, None])
    shares: Values = (signs.mean(axis=(1, 2, 3)) + 1.0) / 2.0
    return shares


def _with_percentiles(estimate: Values, drawn: Values) -> Values:
    return np.concatenate([estimate, np.percentile(drawn, (2.5, 97.5))])


def tables(plan: Plan, family: Family) -> str:
    """Return the table of one family as Markdown."""
    scores = scores_of(plan, family)
    if not scores:
        return "No results yet."
    finals = compared_rows(plan, rows_of(plan, family))
    over = {other: improvements(scores, other) for other in (PRETRAIN.name, TRPO.name)}
    lines = [
        f"![{family.title}: interquartile means](images/{chart_of(plan, family).name})",
        "",
        "| | trainings | meta-updates | environment steps | interquartile mean | over `pretrain` | over `maml-trpo` |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (value, low, high) in interquartile_means(scores).items():
        steps = np.mean([row.env_steps for row in finals[name]]) / 1e6
        chances = [_percent(over[other].get(name)) for other in over]
        cells = [name, str(len(finals[name])), str(finals[name][0].iteration), f"{steps:.1f} M"]
        lines.append(f"| {' | '.join([*cells, f'{value:.1f} [{low:.1f}, {high:.1f}]', *chances])} |")
    return "\n".join(lines)


def _percent(estimate: Values | None) -> str:
    if estimate is None:
        return ""
    value, low, high = 100.0 * estimate
    # With one training on either side there is nothing to resample.
    return f"{value:.0f} %" + (f" [{low:.0f}, {high:.0f}]" if low < high else "")


def draw(plan: Plan, family: Family, path: Path) -> None:
    """Draw the interquartile means with their intervals."""
    from matplotlib import pyplot

    estimates = interquartile_means(scores_of(plan, family))
    figure, panel = pyplot.subplots(figsize=(7.0, 0.8 + 0.4 * len(estimates)), layout="constrained")
    for place, (value, low, high) in enumerate(estimates.values()):
        panel.barh(place, high - low, left=low, height=0.6, color=f"C{place}", alpha=0.75)
        panel.vlines(value, place - 0.3, place + 0.3, color="0.2")
    panel.set_yticks(range(len(estimates)), list(estimates))
    panel.invert_yaxis()
    panel.set_title(f"{family.title}: interquartile mean of the return after one step", loc="left", fontsize=10)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.grid(axis="x", color="0.9")
    panel.set_axisbelow(True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
