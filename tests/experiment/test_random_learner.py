"""A learner with a second network and random numbers of its own: one seed, one result."""

import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from maml_rl.config import Config
from maml_rl.derivatives import EpisodeStore
from maml_rl.envs.global_generators import KeptGenerators, seeded_generators
from maml_rl.experiment.train import train
from maml_rl.metalearners.metalearner import MetaLearner, State
from maml_rl.runs.metrics import Metrics
from tests.small_runs import SMALL, assert_same_run, untimed


class Drawing(MetaLearner):
    """Draws weights in its constructor, and dropout and noise in every update, as users' code does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.critic = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        with torch.no_grad():
            self.critic[0].bias.fill_(random.random() + np.random.random())

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        loss = self.critic(batch.valid_episodes.observations).square().mean() + torch.randn(())
        with torch.no_grad():
            for param in (*self.policy.parameters(), *self.critic.parameters()):
                param.add_(torch.randn_like(param), alpha=1e-3)
                param.add_(torch.randn(param.shape, generator=self.torch_generator("noise")), alpha=1e-3)
        drawn = {"of numpy": np.random.random(), "of python": random.random()}
        return {"loss/before": loss.item(), "own": self.generator("own").random(), **drawn}

    def state_dict(self) -> State:
        return {f"critic.{name}": value for name, value in self.critic.state_dict().items()}

    def load_state_dict(self, state: State) -> None:
        self.critic.load_state_dict({name.removeprefix("critic."): value for name, value in state.items()})


def drawing(**values: Any) -> Any:
    learner = {"algorithm": "tests.experiment.test_random_learner:Drawing", "num-batches": 4, "checkpoint-every": 1}
    small = {key: value for key, value in SMALL.items() if key != "cg-iters"}
    return Config.model_validate({**small, **learner, **values})


def test_runs_of_one_seed_are_equal_after_any_draws_of_others_and_when_resumed(tmp_path: Path) -> None:
    runs = []
    for index in range(2):
        with KeptGenerators() as generators:
            generators.seed(index)
            train(drawing(), tmp_path / str(index), num_workers=0)
            assert generators.drawn() == []
        runs.append(untimed(tmp_path / str(index)))
    assert runs[0] == runs[1]
    train(drawing(seed=1), tmp_path / "other", num_workers=0)
    assert untimed(tmp_path / "other") != runs[0]
    for key in ("loss/before", "own", "of numpy", "of python"):
        assert len({row[key] for row in runs[0]}) == len(runs[0])
    # Resumed, after other draws.
    train(drawing(**{"num-batches": 2}), tmp_path / "parts", num_workers=0)
    with KeptGenerators() as generators:
        generators.seed(7)
        train(drawing(), tmp_path / "parts", num_workers=0, resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "0")


def test_error_in_the_block_restores_the_generators() -> None:
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match="randn"), seeded_generators(3):
        torch.randn("five")  # type: ignore[call-overload]
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = torch.randn(5)
    with seeded_generators(3):
        assert torch.equal(torch.randn(5), expected)


def test_blocks_in_two_threads_draw_what_each_draws_alone_and_restore_the_generator() -> None:
    def draw(seeds: Sequence[int]) -> list[list[float]]:
        found = []
        for seed in seeds:
            with seeded_generators(seed):
                found.append([torch.rand(()).item() for _ in range(20)])
        return found

    parts, before, interval = [range(100), range(100, 200)], torch.get_rng_state(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(draw, parts))
    finally:
        sys.setswitchinterval(interval)
    assert found == [draw(part) for part in parts]
    assert torch.equal(torch.get_rng_state(), before)


def test_two_trainings_in_one_process_are_those_of_each_alone(tmp_path: Path) -> None:
    seeds = (1, 2)

    def run(seed: int) -> list[Metrics]:
        folder = tmp_path / f"{seed}-{threading.current_thread().name}"
        train(drawing(seed=seed), folder, num_workers=0)
        return untimed(folder)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, seeds))
    assert found == [run(seed) for seed in seeds]
