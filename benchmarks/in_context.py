"""Performance of a policy that adapts in its context on held-out tasks: the figures on the pages of `ad` and `dpt`.

    python -m benchmarks.in_context runs/ad/dark-room --repetitions 5 --training a.csv --trials b.csv
    python -m benchmarks.in_context runs/dpt/bandit-k5-n100 --tasks 500

It prints the return of every task in the last episodes of its trials, or of bandits the regret, and that of Thompson
sampling on the same ones: the expected reward of the best arm, minus that of the arms pulled.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl import MultiTaskSampler
from maml_rl.cli.console import Parser
from maml_rl.config import load_config
from maml_rl.envs.meta_env import Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.policies.classical import ThompsonSampling
from maml_rl.runs.checkpoint import find_checkpoint
from maml_rl.runs.metrics import read_metrics
from maml_rl.runs.run_folder import CHECKPOINTS, CONFIG, METRICS

# Trials of Thompson sampling on each bandit.
_DRAWS = 5


def load(run: Path) -> Experiment:
    """Return the experiment of a run with its last checkpoint."""
    experiment = make_experiment(load_config(run / CONFIG), num_workers=0)
    experiment.restore(find_checkpoint("last", run / CHECKPOINTS)[0], run)
    return experiment


def training_rows(run: Path) -> list[dict[str, Any]]:
    """Return the course of the training: gradient steps, minutes of them, loss, and accuracy."""
    rows, minutes = [], 0.0
    for metrics in read_metrics(run / METRICS):
        minutes += metrics["time/update_s"] / 60
        rows.append(
            {"updates": metrics["updates"], "minutes": round(minutes, 2)}
            | {name: round(metrics[name], 4) for name in ("loss", "accuracy") if name in metrics}
        )
    return rows


def regrets(episodes: TaskEpisodes) -> NDArray[np.float64]:
    """Return the regret (M,) of trials of one episode of bandits with the tasks `{"mean": (k,)}`."""
    means = np.stack([task["mean"] for task in episodes.tasks])
    pulled = means[np.arange(len(means))[:, None], episodes.actions[:, :, 0].numpy()]
    regret: NDArray[np.float64] = (means.max(1, keepdims=True) - pulled).sum(1)
    return regret


def _name(task: Task) -> str:
    """Return the numbers of a task in a line, as `goal 4 8`."""
    return " ".join(f"{key} {' '.join(f'{number:g}' for number in np.ravel(value))}" for key, value in task.items())


def _write(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    if path is None:
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def measure_bandits(experiment: Experiment, num_tasks: int) -> None:
    """Print the regret on bandits on which no learner was recorded, and that of Thompson sampling on them."""
    found: list[TaskEpisodes] = []
    evaluate(experiment, num_tasks, on_batch=lambda batch: found.append(batch.phases[0]))
    (mine,) = found
    config = experiment.config
    policy = ThompsonSampling(len(mine.tasks[0]["mean"]))
    options: dict[str, Any] = {"slots_per_task": 1, "observe_last": True, "num_workers": 0, "evaluation": True}
    classical = []
    for seed in range(_DRAWS):
        with MultiTaskSampler(config.env_name, config.env_kwargs, 1, policy, seed=seed, **options) as sampler:
            classical.append(sampler.rollout_trials(mine.tasks))
    print(f"{'':<20}{'reward':>8}{'regret':>8}{'error':>8}{'90 %':>8}")
    for name, drawn in ((config.algorithm, found), ("Thompson sampling", classical)):
        reward = np.mean([float(episodes.episode_returns().mean()) for episodes in drawn])
        each = np.stack([regrets(episodes) for episodes in drawn])
        error = each.mean(0).std() / np.sqrt(each.shape[1])
        print(f"{name:<20}{reward:>8.2f}{each.mean():>8.2f}{error:>8.2f}{np.quantile(each, 0.9):>8.2f}")


def measure_trials(
    experiment: Experiment,
    num_tasks: int,
    *,
    repetitions: int = 1,
    last: int = 10,
    training_tasks: bool = False,
    path: Path | None = None,
) -> None:
    """Print the return of every task in the last episodes of its trials, and write all returns to a CSV file."""
    evaluation = evaluate(
        experiment, num_tasks, repetitions=repetitions, split="training" if training_tasks else "test"
    )
    # (N, R, episodes of a trial)
    returns = evaluation.repetition_returns()
    in_the_end = returns[:, :, -last:].mean(2)
    print(f"mean return of the last {last} of {returns.shape[2]} episodes, {repetitions} trials a task")
    names = [_name(task) for task in evaluation.tasks]
    for name, of_task in zip(names, in_the_end, strict=True):
        print(f"{name:<40}{of_task.mean():>8.2f}   in {of_task.round(1).tolist()}")
    print(f"{'all':<40}{in_the_end.mean():>8.2f}   in {in_the_end.mean(0).round(2).tolist()}")
    of_episodes = returns.mean(1).T
    _write(
        path,
        [
            {"episode": episode + 1, "mean": round(float(row.mean()), 3)}
            | {name: round(float(value), 2) for name, value in zip(names, row, strict=True)}
            for episode, row in enumerate(of_episodes)
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = Parser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a training run")
    parser.add_argument("--tasks", type=int, default=40, help="held-out tasks; of a fixed set all are taken")
    parser.add_argument("--repetitions", type=int, default=1, help="trials of each task, not of bandits")
    parser.add_argument("--last", type=int, default=10, help="episodes at the end of a trial whose returns are shown")
    parser.add_argument(
        "--training-tasks", action="store_true", help="measure on the tasks of training instead; not of bandits"
    )
    parser.add_argument("--training", type=Path, help="CSV file of the training that is written")
    parser.add_argument("--trials", type=Path, help="CSV file of the returns of all episodes that is written")
    options = parser.parse_args(arguments)
    experiment = load(options.run)
    _write(options.training, training_rows(options.run))
    if experiment.config.env_name.startswith("Bandit-"):
        measure_bandits(experiment, options.tasks)
    else:
        measure_trials(
            experiment,
            options.tasks,
            repetitions=options.repetitions,
            last=options.last,
            training_tasks=options.training_tasks,
            path=options.trials,
        )


if __name__ == "__main__":
    main()
