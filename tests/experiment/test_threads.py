"""What is promised has the same bytes for any number of torch's threads, and leaves the caller's settings alone."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from maml_rl import MultiTaskSampler
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.config import Config
from maml_rl.derivatives import ChunkWorkers
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.record import record
from maml_rl.experiment.train import train
from maml_rl.metalearners import algorithms
from maml_rl.runs.checkpoint import latest_intact
from tests.metalearners.histories import bandit_config
from tests.metalearners.small_algorithms import OF_HISTORIES, once_a_kind
from tests.small_runs import config_of, untimed

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("histories")]
# Two chunks or more: wide networks on many steps, or many trials.
OF_STEPS = {"meta-batch-size": 4, "fast-batch-size": 16, "max-episode-steps": 100, "hidden-sizes": [64]}
OF_TRIALS = {"meta-batch-size": 66, "fast-batch-size": 2, "max-episode-steps": 5, "observe-last": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "rl2": {"hidden-size": 128, "num-minibatches": 1, "num-epochs": 1},
    "varibad": {"encoder-size": 128, "num-minibatches": 1, "num-epochs": 1, "belief-trials": 4, "belief-updates": 1},
    "rsac": {"hidden-size": 128, "batch-size": 64, "num-updates": 1, "warmup-trials": 4},
    "amago": {"hidden-size": 32, "num-bins": 16, "batch-size": 32, "num-updates": 1, "warmup-trials": 4},
    "pearl": {"batch-size": 600, "tasks-per-update": 4, "num-updates": 1, "warmup-steps": 20, "encoder-sizes": [64]},
    "ad": {"hidden-size": 64, "num-heads": 4, "batch-size": 520, "num-updates": 1},
}
SETTINGS["dpt"] = SETTINGS["ad"]
SETTINGS["amago-offline"] = {"batch-size": 16, "num-bins": 16, "critic-layers": [16], "num-updates": 1}


def config(algorithm: str, **values: Any) -> Config:
    keys = {"algorithm": algorithm, "num-batches": 2, "checkpoint-every": 2, "algorithm-settings": {}, **values}
    if algorithm in OF_HISTORIES:
        of_data = bandit_config(algorithm, histories="histories")
        return of_data.override({**keys, "algorithm-settings": {**of_data.algorithm_settings, **SETTINGS[algorithm]}})
    keys |= OF_TRIALS if algorithm in ("rl2", "varibad", "rsac", "amago") else OF_STEPS
    return config_of().override({**keys, "algorithm-settings": SETTINGS.get(algorithm, {})})


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, as the number of cores does for a user."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The calls of `ChunkWorkers.map`: the calling thread, the number of chunks, and that of threads for them."""
    calls: list[tuple[str, int, int]] = []
    usual = ChunkWorkers.map

    def watched(self: ChunkWorkers, function: Any, items: Any) -> Any:
        items = list(items)
        pool = self._pool
        calls.append((threading.current_thread().name, len(items), 1 if pool is None else pool._max_workers))
        return usual(self, function, items)

    monkeypatch.setattr(ChunkWorkers, "map", watched)
    return calls


def content(folder: Path) -> Any:
    """Return the metrics of a run, and the bytes of its last checkpoint."""
    path, _ = latest_intact(folder / "checkpoints")
    return untimed(folder), {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", once_a_kind(algorithms()))
def test_run_has_the_same_bytes_for_any_number_of_threads(
    algorithm: str, tmp_path: Path, threads: Callable[[int], None], chunks: list[tuple[str, int, int]]
) -> None:
    found = []
    for number in (1, 4):
        threads(number)
        train(config(algorithm), tmp_path / str(number), num_workers=0)
        assert torch.get_num_threads() == number
        found.append(content(tmp_path / str(number)))
    # One step of these is computed as a whole.
    as_a_whole = algorithm in ("rsac", "amago", "amago-offline")
    assert as_a_whole or {many for _, count, many in chunks if count > 1} == {1, 4}
    assert found[0] == found[1]


@pytest.mark.parametrize("learner", ["ppo", "q-learning"])
def test_recording_has_the_same_bytes_for_any_number_of_threads(
    learner: str, tmp_path: Path, threads: Callable[[int], None], chunks: list[tuple[str, int, int]]
) -> None:
    # As `maml-rl record dark-room --tasks 20`.
    keys: dict[str, Any] = {
        "env_name": "DarkRoom-v0",
        "max_episode_steps": None,
        "fast_batch_size": 20,
        "hidden_sizes": [64, 64],
    }
    keys |= {"num_batches": 3, "num_workers": 0}
    found = []
    for number in (1, 4):
        threads(number)
        folder = record(config_of(**keys), tmp_path / str(number), num_tasks=20, learner=learner, minari=False).folder
        found.append({path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    assert found[0] == found[1]
    assert learner != "ppo" or {many for _, count, many in chunks if count > 1} == {1, 4}


def test_chunks_of_batches_collected_ahead_have_as_many_threads_as_those_of_updates(
    tmp_path: Path, threads: Callable[[int], None], chunks: list[tuple[str, int, int]]
) -> None:
    found = []
    for number in (1, 2):
        threads(number)
        train(config("maml-ppo", prefetch=2, **{"num-batches": 3}), tmp_path / str(number), num_workers=0)
        found.append(content(tmp_path / str(number)))
    assert found[0] == found[1]
    assert {(name, many) for name, _, many in chunks} == {
        (name, many) for name in ("MainThread", "maml_rl-prefetch") for many in (1, 2)
    }


@pytest.mark.slow
def test_sampler_in_another_thread_changes_nothing_of_a_training(
    tmp_path: Path, threads: Callable[[int], None]
) -> None:
    threads(2)
    train(config("promp"), tmp_path / "alone", num_workers=0)
    over, policy, digests = threading.Event(), make_experiment(config("promp")).policy, set()

    def sample() -> None:
        with MultiTaskSampler("2DNavigation-v0", {}, 4, policy, LinearFeatureBaseline(2), num_workers=0) as sampler:
            while not over.is_set():
                sampler.seek(0)
                (train_episodes, _) = sampler.sample(sampler.sample_tasks(2), num_steps=1)
                digests.add((train_episodes[0].digest(), torch.get_num_threads()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        for number in range(2):
            train(config("promp"), tmp_path / str(number), num_workers=0)
            assert content(tmp_path / str(number)) == content(tmp_path / "alone")
            assert torch.get_num_threads() == 2
    finally:
        over.set()
        thread.join()
    assert len(digests) == 1


def test_run_is_the_same_where_gradients_are_off(tmp_path: Path) -> None:
    train(config("rl2"), tmp_path / "usual", num_workers=0)
    # It is stricter than `no_grad`.
    with torch.inference_mode():
        train(config("rl2"), tmp_path / "off", num_workers=0)
        assert not torch.is_grad_enabled()
    assert content(tmp_path / "off") == content(tmp_path / "usual")


def test_other_default_device_is_refused_in_one_line(tmp_path: Path) -> None:
    with (
        torch.device("meta"),
        pytest.raises(ConfigError, match=r"default device is 'meta'.*set_default_device\(None\)"),
    ):
        train(config("pearl"), tmp_path / "run", num_workers=0)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
def test_gradient_steps_are_trained_in_float64_and_a_replay_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pearl .*set_default_dtype\(torch.float32\)"):
        train(config("pearl"), tmp_path / "run", num_workers=0)
    assert not (tmp_path / "run").exists()
    small = {"num-batches": 1, "meta-batch-size": 2, "fast-batch-size": 2}
    policy = train(config("maml-trpo", **small), tmp_path / "run", num_workers=0)
    assert {param.dtype for param in policy.parameters()} == {torch.float64}
