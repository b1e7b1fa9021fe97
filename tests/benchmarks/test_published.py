"""The baseline of the authors' code, against one that goes through the tasks one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.published import FAMILY, PLAN, PreviousFit
from maml_rl.episode import TaskEpisodes
from maml_rl.experiment.train import train
from maml_rl.runs.metrics import read_metrics
from maml_rl.runs.run_folder import METRICS
from tests.synthetic import make_episodes, make_policy

LENGTHS = [[5, 5, 5], [5, 5, 5], [5, 5, 5], [5, 5, 5]]


class OneByOne:
    """Predicts the values of a task with the newest fit, then fits to the task; after all tasks, it fits to all."""

    def __init__(self) -> None:
        self.weights: NDArray[Any] | None = None

    def values(self, episodes: TaskEpisodes) -> list[NDArray[Any]]:
        found, features, returns = [], [], []
        for task in range(len(episodes)):
            paths = [self.features(path) for path in episodes.observations[task].unbind(1)]
            found.append(np.stack([np.zeros(5) if self.weights is None else path @ self.weights for path in paths], 1))
            features.append(np.concatenate(paths))
            returns.append(episodes.returns[task].T.flatten().numpy())
            self.fit(features[-1], returns[-1])
        self.fit(np.concatenate(features), np.concatenate(returns))
        return found

    def features(self, observations: torch.Tensor) -> NDArray[Any]:
        clipped = np.clip(observations.numpy(), -10, 10)
        time = np.arange(len(clipped)).reshape(-1, 1) / 100.0
        return np.concatenate([clipped, clipped**2, time, time**2, time**3, np.ones_like(time)], axis=1)

    def fit(self, features: NDArray[Any], returns: NDArray[Any]) -> None:
        products = features.T @ features + 1e-5 * np.identity(features.shape[1])
        self.weights = np.linalg.solve(products, features.T @ returns)


def episodes_of_phase(seed: int) -> TaskEpisodes:
    episodes = make_episodes(make_policy("normal"), LENGTHS, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    # Some entries are clipped.
    episodes.observations *= 6.0
    episodes.rewards = torch.randn(episodes.rewards.shape, generator=generator, dtype=torch.float64)
    episodes.gamma = 0.9
    return episodes


def test_values_of_a_task_are_those_of_the_fit_before_it() -> None:
    ours, theirs = PreviousFit(), OneByOne()
    for phase in range(3):
        episodes = episodes_of_phase(10 * phase)
        values = ours.fit(episodes)(episodes)
        np.testing.assert_allclose(values, np.stack(theirs.values(episodes)), rtol=1e-6, atol=1e-8)
        assert bool((values[0] == 0.0).all()) == (phase == 0)


def test_training_with_it_resumes_with_the_same_bytes(tmp_path: Path) -> None:
    config = PLAN.methods["previous-fit"].config(FAMILY, 0)
    config = config.override({"meta-batch-size": 2, "fast-batch-size": 2, "max-episode-steps": 40, "num-batches": 2})
    train(config, tmp_path / "whole", num_workers=0)
    for length in (1, 2):
        part = config.override({"num-batches": length})
        train(part, tmp_path / "parts", num_workers=0, resume=length > 1)
    whole, parts = ([each["digest"] for each in read_metrics(tmp_path / name / METRICS)] for name in ("whole", "parts"))
    assert whole == parts
    assert len(whole) == 2
