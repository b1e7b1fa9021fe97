"""Runs of learners that adapt by a memory or a context: tested and reported in their units, and acting by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl import MultiTaskSampler
from maml_rl.config import load_config
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.load_policy import load_policy
from maml_rl.experiment.train import train
from maml_rl.report import write_report
from maml_rl.runs.metrics import read_metrics
from tests.metalearners.small_algorithms import small

EPISODES = 3
TRIALS = {"env_name": "TabularMDP-v0", "max_episode_steps": 4, "fast_batch_size": EPISODES, "num_batches": 2}
# What returns are counted by, and words that a report has and has not.
COUNTED = {
    "rl2": ("episode", ["Return by episode of the trial", "in episode 3 of the trial"], "before adaptation"),
    "pearl": ("round", ["Return by round"], "gradient step"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(small("rl2", **TRIALS), folder / "rl2", num_workers=0)
    train(small("pearl"), folder / "pearl", num_workers=0)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", COUNTED)
def test_columns_are_named_by_the_learner(algorithm: str, runs: Path, tmp_path: Path) -> None:
    noun, words, wrong = COUNTED[algorithm]
    keys = [key for key in read_metrics(runs / algorithm / "metrics.jsonl")[-1] if key.startswith("return/")]
    assert keys == [f"return/{noun}_{number}" for number in range(3)]
    experiment = make_experiment(load_config(runs / algorithm / "config.json"))
    experiment.restore("latest", runs / algorithm)
    batches: list[Any] = []
    evaluation = evaluate(experiment, tasks=5, num_steps=2, num_workers=0, on_batch=batches.append)
    assert [line.split()[0] for line in evaluation.table().splitlines()] == [noun, "1", "2", "3"]
    if algorithm == "rl2":
        np.testing.assert_array_equal(evaluation.returns[:, :, 0], batches[0].phases[0].rewards.sum(1))
    evaluation.save(tmp_path / "results.npz")
    with np.load(tmp_path / "results.npz") as saved:
        assert str(saved["columns"]) == noun
        assert saved["step_sizes"].shape == (0,)
    place = tmp_path / "report.html"
    write_report([runs / algorithm], place, tasks=2, placement={"num-workers": 0}, num_videos=0, trust=True)
    page = place.read_text(encoding="utf-8")
    assert all(word in page for word in words)
    assert wrong not in page


def test_loaded_policy_steps_through_a_trial_as_in_the_sampler(runs: Path) -> None:
    policy = load_policy(runs / "rl2")
    with MultiTaskSampler(
        "TabularMDP-v0", {}, 2, policy, num_workers=0, slots_per_task=1, max_episode_steps=4, observe_last=True, seed=0
    ) as sampler:
        sampled = sampler.rollout_trials(sampler.sample_tasks(1))
    # The same observations lead to the same memories, and so to the same probabilities.
    memory = None
    for episode in range(2):
        for seen in sampled.observations[0, :, episode]:
            _, memory = policy.choose(seen.numpy(), memory)
    assert memory is not None
    unrolled = policy.unroll(sampled.observations[0].transpose(0, 1).flatten(0, 1).unsqueeze(1))
    torch.testing.assert_close(memory[0], unrolled.memory[0])
