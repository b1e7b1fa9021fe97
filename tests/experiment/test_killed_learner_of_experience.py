"""A learner with a replay is killed at random times, without warning; resumed, it ends with the same bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maml_rl.config import Config
from maml_rl.experience import replay_segments
from maml_rl.experiment.train import train
from maml_rl.machine import single_threaded
from maml_rl.runs.checkpoint import latest_intact
from tests.small_runs import assert_same_run

# The replays hold the trials of a few iterations, so that segments are added and removed.
SETTINGS = {
    "rsac": {"hidden-size": 8, "batch-size": 4, "num-updates": 3, "warmup-trials": 10, "buffer-steps": 500},
    "amago": {
        "hidden-size": 8, "cell": "gru", "num-bins": 9, "critic-layers": [6], "batch-size": 4, "num-updates": 3,
        "warmup-trials": 10, "buffer-steps": 500,
    },
    "varibad": {"encoder-size": 8, "belief-trials": 4, "belief-updates": 2, "replay-steps": 500},
    "pearl": {
        "context-size": 2, "encoder-sizes": [6], "batch-size": 5, "context-batch": 4, "tasks-per-update": 2,
        "num-updates": 2, "warmup-steps": 20, "buffer-steps": 500,
    },
}  # fmt: skip
SEGMENT_BYTES = 5_000
# Forks a training for every number of finished iterations at which one is killed: its imports take most of the time.
KILLER = f"""
import json, os, signal, sys, time
from pathlib import Path
from random import Random
import torch._dynamo
from maml_rl.config import Config
import maml_rl.experience.replay_segments as replay_segments
from maml_rl.experiment.train import train

replay_segments.SEGMENT_BYTES = {SEGMENT_BYTES}
config, folder = Config.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2])
random, metrics, kills = Random(0), folder / "metrics.jsonl", 0
for goal in json.loads(sys.argv[3]):
    if (pid := os.fork()) == 0:
        train(config, folder, num_workers=0, resume=True, on_iteration=lambda metrics: time.sleep(0.04))
        os._exit(0)
    while not (metrics.exists() and metrics.read_bytes().count(b"\\n") >= goal):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "a run was over before it was killed"
        time.sleep(0.002)
    # Anywhere within an iteration or the checkpoint after it.
    time.sleep(0.1 * random.random())
    os.kill(pid, signal.SIGKILL)
    kills += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
print(kills)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("algorithm", "goals"),
    [
        ("rsac", (9,)),
        *(pytest.param(name, tuple(range(2, 82, 2)), marks=pytest.mark.nightly, id=f"{name}-40") for name in SETTINGS),
    ],
)
def test_learner_killed_at_random_ends_with_the_same_bytes(
    algorithm: str, goals: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    monkeypatch.setattr(replay_segments, "SEGMENT_BYTES", SEGMENT_BYTES)
    mapping = {
        "env-name": "Wind-v0",
        "observe-last": algorithm != "pearl",
        "max-episode-steps": 8,
        "fast-batch-size": 2,
        "meta-batch-size": 5,
        **({} if algorithm == "amago" else {"hidden-sizes": [8]}),
        "num-batches": goals[-1] + 10,
        "checkpoint-every": 4,
        "algorithm": algorithm,
        "algorithm-settings": SETTINGS[algorithm],
    }
    config = Config.model_validate(mapping)
    command = [sys.executable, "-c", KILLER, json.dumps(mapping), str(killed), json.dumps(goals)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"{len(goals)}\n"), ended.stderr
    with single_threaded():
        train(config, killed, num_workers=0, resume=True)
        train(config, undisturbed, num_workers=0)
    assert_same_run(killed, undisturbed)
    replays = latest_intact(undisturbed / "checkpoints")[1].state["experience"].values()
    assert max(len(replay["segments"]) for replay in replays) > 3
