"""The figures of policies that adapt in their context."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import in_context
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.experiment.train import train
from tests.metalearners.histories import PULLS, SMALL, bandit_config, record
from tests.small_runs import config_of


def test_regret_is_the_difference_to_the_best_arm() -> None:
    pulls, none = torch.tensor([[0, 1, 1], [2, 2, 2]]).unsqueeze(-1), torch.zeros(2, 3, 1)
    ends = torch.ones(2, 1)
    episodes = TaskEpisodes(
        none.unsqueeze(-1),
        pulls,
        none,
        3 * ends,
        ends,
        0 * ends,
        ends.unsqueeze(-1),
        tasks=[{"mean": np.array([0.1, 0.4, 0.3])}, {"mean": np.array([0.0, 0.5, 0.6])}],
    )
    assert in_context.regrets(episodes) == pytest.approx([0.3, 0.0])


@pytest.mark.usefixtures("forked_workers")
def test_bandits_are_measured_by_regret_beside_thompson_sampling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(record(tmp_path / "data"))
    config = bandit_config("dpt", histories=data, num_updates=1, context=PULLS).override({"num-batches": 2})
    train(config, tmp_path / "run")
    capsys.readouterr()
    in_context.main([str(tmp_path / "run"), "--tasks", "7", "--training", str(tmp_path / "training.csv")])
    _, mine, classical = capsys.readouterr().out.splitlines()
    assert mine.startswith("dpt ")
    # No arm costs more than 1.
    assert 0.0 < float(classical.split()[3]) < PULLS
    lines = (tmp_path / "training.csv").read_text().splitlines()
    assert lines[0] == "updates,minutes,loss,accuracy"
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2"]


@pytest.mark.usefixtures("forked_workers")
def test_trials_are_measured_episode_by_episode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(env_name="DarkRoom-v0", max_episode_steps=2, fast_batch_size=3, observe_last=True)
    tasks = {"distribution": "fixed", "train": 4, "test": 2, "seed": 0}
    config = config.override({"algorithm": "ad", "algorithm-settings": SMALL, "tasks": tasks})
    csv, experiment = tmp_path / "trials.csv", in_context.make_experiment(config)
    in_context.measure_trials(experiment, 2, repetitions=2, last=1, path=csv)
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 + 1
    in_context.measure_trials(experiment, 2, last=1, training_tasks=True)
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 + 1
    header, *rows = csv.read_text().splitlines()
    assert header.startswith("episode,mean,goal ")
    assert [row.split(",")[0] for row in rows] == ["1", "2", "3"]
