"""A run of RL2 after training: tested and reported by episode of the trial, and acting in a trial by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl import MultiTaskSampler
from maml_rl.config import load_config
from maml_rl.envs import ObservedLastStep, make_vector_env
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.load_policy import load_policy
from maml_rl.experiment.train import train
from maml_rl.report import write_report
from maml_rl.runs.metrics import read_metrics
from tests.small_runs import config_of

pytestmark = pytest.mark.usefixtures("forked_workers")

EPISODES = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl2") / "run"
    config = config_of().override(
        {
            "env-name": "TabularMDP-v0",
            "max-episode-steps": 4,
            "algorithm": "rl2",
            "observe-last": True,
            "fast-batch-size": EPISODES,
            "num-batches": 2,
            "algorithm-settings": {"hidden-size": 8},
        }
    )
    train(config, folder, num_workers=0)
    return folder


def test_metrics_are_by_episode_of_the_trial(run: Path) -> None:
    keys = [key for key in read_metrics(run / "metrics.jsonl")[-1] if key.startswith("return/")]
    assert keys == [f"return/episode_{episode}" for episode in range(EPISODES)]


def test_evaluation_is_by_episode_of_the_trial(run: Path, tmp_path: Path) -> None:
    experiment = make_experiment(load_config(run / "config.json"))
    experiment.restore("latest", run)
    batches: list[Any] = []
    evaluation = evaluate(experiment, tasks=5, num_workers=0, on_batch=batches.append)
    episodes = batches[0].phases[0]
    np.testing.assert_array_equal(evaluation.returns[:, :, 0], episodes.rewards.sum(1))
    lines = evaluation.table().splitlines()
    assert lines[0].split()[0] == "episode"
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3"]
    evaluation.save(tmp_path / "results.npz")
    with np.load(tmp_path / "results.npz") as saved:
        assert str(saved["columns"]) == "episode"
        assert saved["step_sizes"].shape == (0,)


@pytest.mark.slow
def test_report_is_by_episode_of_the_trial(run: Path, tmp_path: Path) -> None:
    write_report([run], tmp_path / "report.html", tasks=3)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Return by episode of the trial" in page
    assert "in episode 3 of the trial" in page
    assert "before adaptation" not in page


def test_loaded_policy_steps_through_a_trial_as_in_the_sampler(run: Path) -> None:
    policy = load_policy(run)
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


def test_loaded_policy_acts_through_a_trial_by_hand(run: Path) -> None:
    policy, memory, rng = load_policy(run), None, np.random.default_rng(0)
    env = make_vector_env(ObservedLastStep("TabularMDP-v0"), max_episode_steps=4)
    env.reset_task(env.sample_tasks(1, seed=1))
    rewards = []
    for episode in range(EPISODES):
        observation, _ = env.reset(seed=episode)
        assert observation[0, -1] == (episode > 0)
        while not env.buffers.truncated[0]:
            action, memory = policy.choose(observation[0], memory, rng)
            observation, reward, *_ = env.step(np.array([action]))
            rewards.append(reward[0])
    env.close()
    assert len(rewards) == 4 * EPISODES
