"""A learner with a replay is killed at random times, without warning; resumed, it ends with the same bytes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from time import monotonic, sleep

import pytest
import torch

from maml_rl.config import Config
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.experience import replay
from maml_rl.experiment.train import train
from maml_rl.machine import intra_op_threads
from maml_rl.runs.checkpoint import latest_intact
from tests.small_runs import untimed

CONFIG = {
    "env-name": "Wind-v0",
    "observe-last": True,
    "max-episode-steps": 8,
    "fast-batch-size": 2,
    "meta-batch-size": 5,
    "hidden-sizes": [8],
    "num-batches": 60,
    "checkpoint-every": 4,
    "algorithm": "rsac",
    # The replay holds the trials of six iterations, so that segments come and go.
    "algorithm-settings": {
        "hidden-size": 8, "batch-size": 4, "num-updates": 3, "warmup-trials": 10, "buffer-steps": 500,
    },
}  # fmt: skip
SEGMENT_BYTES = 5_000
SCRIPT = f"""
import json, sys, time
from pathlib import Path
from maml_rl.config import Config
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.config.yaml_source import parse_mapping
import maml_rl.experience.replay as replay
from maml_rl.experiment.train import train
replay.SEGMENT_BYTES = {SEGMENT_BYTES}
train(Config.from_mapping(parse_mapping(sys.argv[1], "x.yaml")), Path(sys.argv[2]), num_workers=0, resume=True,
      on_iteration=lambda metrics: time.sleep(0.04))
"""


def start(folder: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, json.dumps(CONFIG), str(folder)], env=environment)


def finished(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("goals", [(14, 36), pytest.param((4, 14, 25, 36, 48), marks=pytest.mark.nightly)])
def test_killed_at_random_it_ends_with_the_same_bytes(
    goals: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    monkeypatch.setattr(replay, "SEGMENT_BYTES", SEGMENT_BYTES)
    with intra_op_threads(1):
        train(Config.from_mapping(parse_mapping(json.dumps(CONFIG), "x.yaml")), undisturbed, num_workers=0)
    random, kills = Random(0), 0
    for goal in goals:
        process = start(killed)
        deadline = monotonic() + 100.0
        while finished(killed) < goal and process.poll() is None and monotonic() < deadline:
            sleep(0.002)
        # Anywhere within an iteration or the checkpoint after it.
        sleep(0.1 * random.random())
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills == len(goals), "a run was over before it was killed"
    assert start(killed).wait() == 0
    assert untimed(killed) == untimed(undisturbed)
    found, wanted = (latest_intact(folder / "checkpoints")[1] for folder in (killed, undisturbed))
    assert found.state == wanted.state
    assert len(wanted.state["experience"]["trials"]["segments"]) > 3
    for mine, theirs in ((found.tensors, wanted.tensors), (found.learner, wanted.learner)):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(mine[name], value) if isinstance(value, torch.Tensor) else mine[name] == value, name
    segments = [
        {path.name: path.read_bytes() for path in (folder / "experience" / "trials").iterdir()}
        for folder in (killed, undisturbed)
    ]
    assert segments[0] == segments[1]
