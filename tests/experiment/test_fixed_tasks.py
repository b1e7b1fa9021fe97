"""Sets of training and test tasks that are drawn once: stored in the run folder, disjoint, and never changed."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.cli.evaluate import run_test
from maml_rl.cli.main import run_report
from maml_rl.cli.train import run_train
from maml_rl.config import load_config
from maml_rl.envs import make_vector_env
from maml_rl.envs.tasks import task_key
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.task_distributions import FixedTasks
from maml_rl.task_distributions.task_files import read_tasks, save_tasks
from tests.small_runs import config_of, untimed

NAVIGATION = "2DNavigation-v0"


def fixed(**values: Any) -> dict[str, Any]:
    return {"distribution": "fixed", "train": 5, "test": 4, **values}


def texts(tasks: Any) -> set[str]:
    return {task_key(task) for task in tasks}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixed") / "run"
    train(config_of(tasks=fixed(), num_batches=4), folder, num_workers=0)
    return folder


def test_batches_are_distinct_tasks_of_the_set_and_tests_use_their_whole_set(run: Path) -> None:
    training, test = (read_tasks(run / f"{side}-tasks.json", NAVIGATION) for side in ("training", "test"))
    assert (len(texts(training)), len(texts(test)), len(texts([*training, *test]))) == (5, 4, 9)
    assert load_config(run / "config.json").tasks == fixed(seed=0)
    experiment = make_experiment(load_config(run / "config.json").override({"seed": 8}))
    experiment.restore("last", run)
    with make_sampler(experiment, num_workers=0) as sampler:
        for _ in range(3):
            batch = texts(sampler.sample_tasks(3))
            assert len(batch) == 3
            assert batch <= texts(training)
    for options, expected in (({}, test), ({"split": "training"}, training)):
        evaluation = evaluate(experiment, tasks=3, num_workers=0, **options)
        assert [task_key(task) for task in evaluation.tasks] == [task_key(task) for task in expected]
        assert not evaluation.fixed_tasks, "the set is a sample of the family"
    during = evaluate(experiment, tasks=3, num_workers=0, split="validation")
    assert texts(during.tasks) <= texts(training)


def test_resumed_run_keeps_its_tasks(run: Path, tmp_path: Path) -> None:
    train(config_of(tasks=fixed(), num_batches=2), tmp_path / "run", num_workers=0)
    train(config_of(tasks=fixed(), num_batches=4), tmp_path / "run", num_workers=0, resume=True)
    assert untimed(tmp_path / "run") == untimed(run)
    altered = read_tasks(tmp_path / "run" / "training-tasks.json", NAVIGATION)
    save_tasks(tmp_path / "run" / "training-tasks.json", NAVIGATION, altered[::-1])
    with pytest.raises(ConfigError, match=r"training-tasks.json is damaged or was edited"):
        train(config_of(tasks=fixed(), num_batches=6), tmp_path / "run", num_workers=0, resume=True)
    unlist(tmp_path / "run", "training-tasks.json")
    with pytest.raises(CheckpointError, match="the tasks are not those with which the run began; put the earlier"):
        train(config_of(tasks=fixed(), num_batches=6), tmp_path / "run", num_workers=0, resume=True)


def unlist(run: Path, *names: str) -> None:
    """Remove checksums, which earlier versions did not write."""
    lines = (run / "SHA256SUMS").read_text().splitlines(True)
    (run / "SHA256SUMS").write_text("".join(line for line in lines if not line.strip().endswith(names)))


READERS: dict[str, Callable[[Path], object]] = {
    "test": lambda run: run_test([str(run), "--num-workers", "0"]),
    "report": lambda run: run_report([str(run), "--tasks", "2", "--num-workers", "0", "--videos", "0"]),
    "resume": lambda run: run_train(["--resume", "--output-folder", str(run), "--num-workers", "0"]),
}


@pytest.mark.parametrize(
    ("name", "command"), [*(("training-tasks.json", command) for command in READERS), ("test-tasks.json", "test")]
)
def test_altered_or_missing_tasks_are_noticed_by_every_reader(
    run: Path, tmp_path: Path, command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training tasks in the place of the test tasks would change the result of a test."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    other = {"training-tasks.json": "test-tasks.json", "test-tasks.json": "training-tasks.json"}[name]
    for words in (f"{name} is damaged or was edited", f"cannot read {copied / name}: No such file"):
        if "damaged" in words:
            shutil.copy(copied / other, copied / name)
            # Also where only this file is named.
            with pytest.raises(ConfigError, match=words):
                read_tasks(copied / name, NAVIGATION)
        else:
            (copied / name).unlink()
        # A report shows the rest.
        assert READERS[command](copied) == (0 if command == "report" else 2)
        assert words in capsys.readouterr().err


def test_run_of_an_earlier_version_is_tested_with_a_warning_and_gets_checksums(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    unlist(copied, "-tasks.json")
    assert READERS["test"](copied) == 0
    assert "training-tasks.json and test-tasks.json in" in caplog.text
    assert "without checksums, as in runs of earlier versions" in caplog.text
    assert READERS["resume"](copied) == 0
    caplog.clear()
    assert READERS["test"](copied) == 0
    assert "checksum" not in caplog.text


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_all_files_of_tasks_are_listed_with_their_checksums(tmp_path: Path) -> None:
    save_tasks(tmp_path / "given.json", NAVIGATION, [{"goal": [0.1, 0.2]}])
    config = config_of(tasks=fixed(), num_batches=1, evaluate_every=1, evaluation_tasks=str(tmp_path / "given.json"))
    for batches in (1, 2):
        train(config.override({"num-batches": batches}), tmp_path / "run", num_workers=0, resume=batches > 1)
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "run", check=True)
        listed = [line.split()[1] for line in (tmp_path / "run" / "SHA256SUMS").read_text().splitlines()]
        tasks = ["evaluation-tasks.json", "test-tasks.json", "training-tasks.json"]
        assert sorted(listed) == ["config.json", *tasks[:1], "system.json", *tasks[1:]]


def test_sampler_without_a_run_draws_the_same_training_and_test_sets() -> None:
    policy = get_policy_for_env(make_vector_env(NAVIGATION), (4,))
    drawn = []
    for evaluation in (False, True):
        distribution = FixedTasks(3, 2)
        with MultiTaskSampler(
            NAVIGATION, policy=policy, num_workers=0, seed=4, evaluation=evaluation, task_distribution=distribution
        ) as sampler:
            drawn.append(texts(sampler.sample_tasks(2)))
        drawn.append(texts(distribution.fixed_tasks()["training"]))
    assert drawn[1] == drawn[3]
    assert drawn[0] < drawn[1]
    assert not drawn[2] & drawn[1]


def test_test_tasks_among_those_of_training_are_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    experiment = make_experiment(load_config(run / "config.json"))
    content = json.loads((run / "test-tasks.json").read_text())
    content["tasks"].append(json.loads((run / "training-tasks.json").read_text())["tasks"][2])
    (tmp_path / "tasks.json").write_text(json.dumps(content))
    assert len(experiment.load_tasks(run / "test-tasks.json")) == 4
    with pytest.raises(
        ConfigError, match=r"task 5 in .*tasks\.json is among the training tasks of the run; leave"
    ) as e:
        experiment.load_tasks(tmp_path / "tasks.json")
    assert "\n" not in str(e.value)
