"""Runs on a GPU: killed and resumed, and checkpoints that move between it and the CPU."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from maml_rl.config import Config
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.experiment.load_policy import load_policy
from maml_rl.experiment.train import train
from maml_rl.runs.checkpoint import latest_intact
from tests.small_runs import assert_same_run, untimed

GPU = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
OF_ALL = {"meta-batch-size": 4, "fast-batch-size": 2, "checkpoint-every": 2, "seed": 1}
NAVIGATION = {"env-name": "2DNavigation-v0", "max-episode-steps": 10, "hidden-sizes": [8]}
CHEETAHS = {"env-name": "HalfCheetahDir-v5", "max-episode-steps": 10, "hidden-sizes": [8], "engine": "warp"}
WIND = {"env-name": "Wind-v0", "max-episode-steps": 8, "observe-last": True}
SMALL = {"hidden-size": 8, "batch-size": 4, "num-updates": 4, "warmup-trials": 1, "buffer-steps": 500}
RUNS: dict[str, dict[str, Any]] = {
    "maml-trpo": NAVIGATION,
    "rl2": {**WIND, "algorithm-settings": {"hidden-size": 8, "num-epochs": 5}},
    "rsac": {**WIND, "hidden-sizes": [8], "algorithm-settings": SMALL},
    "amago": {**WIND, "algorithm-settings": SMALL | {"num-bins": 9, "critic-layers": [6]}},
}


def as_json(algorithm: str, num_batches: int, family: dict[str, Any]) -> str:
    return json.dumps({**OF_ALL, **family, "algorithm": algorithm, "num-batches": num_batches})


def config_of(text: str) -> Config:
    return Config.from_mapping(parse_mapping(text, "x.yaml"))


def kill_after(text: str, folder: Path, iterations: int) -> None:
    """Start a run on the GPU by the command, and kill it after so many iterations."""
    config, metrics = folder.parent / "config.yaml", folder / "metrics.jsonl"
    config.write_text(text, encoding="utf-8")
    command = ["train", "--config", str(config), "--output-folder", str(folder), "--device", GPU, "--quiet"]
    with subprocess.Popen([sys.executable, "-m", "maml_rl", *command]) as process:
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= iterations):
            assert process.poll() is None, "the run was over before it was killed"
            time.sleep(0.002)
        process.kill()


@pytest.mark.parametrize("algorithm", RUNS)
def test_a_run_of_array_code_that_is_killed_ends_with_the_same_bytes(algorithm: str, tmp_path: Path) -> None:
    text = as_json(algorithm, 30, RUNS[algorithm])
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    kill_after(text, killed, 4)
    assert len(untimed(killed)) < 30
    for folder in (killed, undisturbed):
        train(config_of(text), folder, device=GPU, resume=True)
    assert_same_run(killed, undisturbed)


def test_a_run_of_mujoco_warp_that_is_killed_is_finished(tmp_path: Path) -> None:
    pytest.importorskip("mujoco_warp")
    text = as_json("maml-trpo", 12, CHEETAHS)
    kill_after(text, tmp_path / "run", 3)
    before = untimed(tmp_path / "run")
    assert len(before) < 12
    train(config_of(text), tmp_path / "run", device=GPU, resume=True)
    rows = untimed(tmp_path / "run")
    assert [row["iteration"] for row in rows] == list(range(12))
    # What the last checkpoint before the kill holds is not sampled again.
    assert rows[:2] == before[:2]
    assert all(bool(param.isfinite().all()) for param in load_policy(tmp_path / "run").parameters())


@pytest.mark.parametrize("algorithm", RUNS)
def test_a_run_moves_to_the_cpu_and_back(algorithm: str, tmp_path: Path) -> None:
    for device, num_batches in ((GPU, 2), ("cpu", 4), (GPU, 6)):
        config = config_of(as_json(algorithm, num_batches, RUNS[algorithm]))
        train(config, tmp_path, num_workers=None if device == GPU else 0, device=device, resume=True)
    checkpoint = latest_intact(tmp_path / "checkpoints")[1]
    tensors = [each for kind in (checkpoint.tensors, checkpoint.learner) for each in kind.values()]
    assert all(bool(each.isfinite().all()) for each in tensors if isinstance(each, torch.Tensor))
    steps = {key: float(value) for key, value in checkpoint.learner.items() if key.endswith(".0.step")}
    # 5 epochs of RL2 in an iteration, and 4 updates of the others.
    assert list(steps.values()) == {"maml-trpo": [], "rl2": [30.0]}.get(algorithm, [24.0])
    assert len(untimed(tmp_path)) == 6
    assert all(param.device.type == "cpu" for param in load_policy(tmp_path).parameters())
