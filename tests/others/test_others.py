"""Families of other people's packages: checked against a plain loop, trained, killed, resumed, tested and reported."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maml_rl.cli import main as cli
from maml_rl.config import Config
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.experiment.train import train
from tests.small_runs import assert_same_run, untimed

FOLDER = Path(__file__).resolve().parent / "families"
# A training that is killed, without warning, after its first iteration.
KILLED = """
import os, signal, sys
from maml_rl.config import load_config
from maml_rl.experiment.train import train
train(load_config(sys.argv[1]), sys.argv[2], num_workers=0, on_iteration=lambda _: os.kill(os.getpid(), signal.SIGKILL))
"""


@dataclass(frozen=True)
class Family:
    """A family, and what trains on it.

    Attributes:
        package: that the family is of, by the name of its import.
        settings: of the training, besides those of all.
        renders: whether it can be drawn.
        forks: whether its workers are forked, which spares them its import.
        by_day: whether it is trained for every change; another has the kind of learner or of observations of the rest.
    """

    package: str
    settings: dict[str, Any] = field(default_factory=dict)
    renders: bool = True
    forks: bool = True
    by_day: bool = False


# None: a setting that the learner does not use.
RL2 = {
    "algorithm": "rl2",
    "observe-last": True,
    "hidden-sizes": None,
    "evaluation-steps": None,
    "algorithm-settings": {"hidden-size": 8},
}
PEARL = {
    "algorithm": "pearl",
    "num-steps": 1,
    "evaluation-steps": 1,
    "slots-per-task": 1,
    "fast-batch-size": 1,
    "algorithm-settings": {
        "context-size": 2,
        "encoder-sizes": [8],
        "batch-size": 5,
        "context-batch": 4,
        "tasks-per-update": 2,
        "num-updates": 2,
        "warmup-steps": 10,
    },
}
FAMILIES = {
    "ale_modes:Modes-v0": Family("ale_py", {"conv-layers": [[4, 4, 4]]}),
    "carl_context:Context-v0": Family("carl", {"algorithm": "promp"}),
    "crafter_wishes:Wishes-v0": Family("crafter", {"conv-layers": [[4, 4, 4]]}),
    "dm_control_gravity:Gravity-v0": Family("dm_control", PEARL),
    "flappy_gaps:Gaps-v0": Family("flappy_bird_gymnasium", {"algorithm": "reptile"}),
    "highway_traffic:Traffic-v0": Family("highway_env", {"algorithm": "promp"}),
    "lander_landing:Landing-v0": Family("Box2D", {"algorithm": "maml-ppo"}),
    "minigrid_levels:Levels-v0": Family("minigrid", {"conv-layers": [[4, 3, 1]]}, forks=False, by_day=True),
    "mo_weights:Weights-v0": Family("mo_gymnasium", {"algorithm": "promp"}),
    "popgym_repeat:Repeat-v0": Family("popgym", RL2, renders=False, by_day=True),
    "robotics_reach:Reach-v0": Family("gymnasium_robotics", PEARL, by_day=True),
}
EVERYWHERE = (
    "sampled in this process, with one slot for each task, in threads, with one worker, with two workers, with central "
    "inference"
)

pytestmark = [
    pytest.mark.others,
    pytest.mark.timeout(300),
    # Their packages warn of much that is not about this one.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def family(env_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    """The family, whose module can be imported, here and in other processes."""
    found = FAMILIES[env_id]
    with monkeypatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH")))))
        patch.setenv("SDL_VIDEODRIVER", "dummy")
        patch.setenv("MUJOCO_GL", "egl")
        # An import may draw random numbers, which is no test's own.
        states = random.getstate(), np.random.get_state()
        pytest.importorskip(found.package)
        random.setstate(states[0])
        np.random.set_state(states[1])
        yield found


@pytest.mark.parametrize("env_id", FAMILIES)
@pytest.mark.usefixtures("family")
def test_sampled_episodes_are_those_of_a_plain_loop(
    env_id: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if FAMILIES[env_id].forks:
        request.getfixturevalue("forked_workers")
    assert cli.main(["check-env", env_id, "--against-loop"]) == 0
    shown = capsys.readouterr().out
    assert EVERYWHERE in shown
    assert f"{env_id} is a task family; MultiTaskSampler('{env_id}', ...) samples it" in shown


@pytest.mark.parametrize(
    "env_id",
    [pytest.param(env_id, marks=[pytest.mark.nightly] * (not family.by_day)) for env_id, family in FAMILIES.items()],
)
def test_training_is_killed_resumed_tested_and_reported(env_id: str, family: Family, tmp_path: Path) -> None:
    settings = {
        "env-name": env_id,
        "hidden-sizes": [8],
        "fast-batch-size": 2,
        "meta-batch-size": 2,
        "num-batches": 2,
        "checkpoint-every": 1,
        "evaluation-steps": 1,
        **family.settings,
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    config = Config.from_mapping(parse_mapping(json.dumps(settings), "x.yaml"))
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "config.yaml"), str(killed)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(untimed(killed)) == 1
    train(config, undisturbed, num_workers=2)
    train(config, killed, num_workers=0, resume=True)
    assert_same_run(killed, undisturbed)
    assert len(untimed(killed)) == 2
    quick = ["--num-workers", "0", "--log-level", "error"]
    assert cli.main(["test", str(killed), "--meta-batch-size", "2", *quick]) == 0
    assert (killed / "evaluation.npz").is_file()
    assert cli.main(["report", str(killed), "--trust", "--tasks", "2", "--videos", "1", *quick]) == 0
    assert ("<video" in (killed / "report.html").read_text(encoding="utf-8")) == family.renders
