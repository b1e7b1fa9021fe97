"""`evaluate-every`: the results of evaluations, and their independence of the training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl import load_policy
from maml_rl.config import Config
from maml_rl.derivatives import EpisodeStore
from maml_rl.errors import CheckpointError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.results.evaluation import Evaluation
from maml_rl.runs.checkpoint import find_checkpoint, latest_intact, list_checkpoints
from maml_rl.runs.metrics import Metrics, return_keys
from maml_rl.task_distributions.task_files import save_tasks
from tests import small_runs
from tests.small_runs import assert_same_run, untimed

TASKS = [{"goal": [0.3, -0.2]}, {"goal": [0.1, 0.4]}]


def config_of(**values: Any) -> Config:
    defaults = {
        "num_batches": 6,
        "evaluate_every": 2,
        "evaluation_tasks": 4,
        "evaluation_steps": 2,
        "keep_checkpoints": 1,
    }
    if values.get("evaluate_every", 2) is None:
        del defaults["evaluation_tasks"]
    return small_runs.config_of(**{**defaults, **values})


def without_evaluations(folder: Path) -> list[Metrics]:
    return [{key: value for key, value in row.items() if not key.startswith("evaluation/")} for row in untimed(folder)]


def evaluations(folder: Path) -> dict[int, list[float]]:
    """Returns after 0, 1, ... inner steps by the number of finished iterations."""
    return {
        row["iteration"] + 1: [row[key] for key in keys]
        for row in untimed(folder)
        if (keys := return_keys(row, evaluated=True))
    }


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return latest_intact(folder / "checkpoints")[1].tensors


def evaluated_afterward(config: Config, run: Path, checkpoint: int) -> Evaluation:
    experiment = make_experiment(config)
    experiment.restore(str(checkpoint), run)
    return evaluate(experiment, tasks=4, split="validation", num_workers=0)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    train(config_of(keep_checkpoints=9), folder, num_workers=0)
    return folder


def test_training_is_bit_identical_with_and_without_evaluations(tmp_path: Path, evaluated: Path) -> None:
    train(config_of(evaluate_every=None), tmp_path, num_workers=0)
    assert evaluations(tmp_path) == {}
    assert without_evaluations(evaluated) == untimed(tmp_path)
    assert all(torch.equal(parameters(evaluated)[name], tensor) for name, tensor in parameters(tmp_path).items())


def test_evaluation_is_of_the_parameters_of_its_checkpoint_on_all_tasks_and_steps(evaluated: Path) -> None:
    found = evaluations(evaluated)
    assert list(found) == [2, 4, 6]
    for iteration, returns in found.items():
        afterward = evaluated_afterward(config_of(), evaluated, iteration)
        assert returns == afterward.returns.mean(axis=(0, 2), dtype=np.float64).tolist()
        assert len(returns) == 3


def test_tasks_are_neither_those_of_training_nor_those_of_a_later_test(evaluated: Path) -> None:
    experiment = make_experiment(config_of())
    with make_sampler(experiment, num_workers=0) as sampler:
        drawn = [sampler.sample_tasks(4) for _ in range(6)]
    drawn.append(evaluate(experiment, 40, meta_batch_size=4, num_workers=0).tasks)
    others = {task["goal"].tobytes() for tasks in drawn for task in tasks}
    mine = {task["goal"].tobytes() for task in evaluated_afterward(config_of(), evaluated, 6).tasks}
    assert len(mine) == 4
    assert not mine & others


class Killed(CheckpointError):
    """Stands for SIGKILL: nothing more is saved, as where a checkpoint cannot be written."""


def interrupting(monkeypatch: pytest.MonkeyPatch, number: int, error: type[BaseException]) -> None:
    """Raise an error during the evaluation with this number, counted from 1."""
    begun: list[None] = []

    def fail(batch: EpisodeStore) -> None:
        if len(begun) == number:
            raise error

    def evaluate_and_fail(*arguments: Any, **options: Any) -> Evaluation:
        begun.append(None)
        return evaluate(*arguments, **options, on_batch=fail)

    monkeypatch.setattr("maml_rl.experiment.train.evaluate", evaluate_and_fail)


@pytest.mark.parametrize(("number", "error"), [(2, KeyboardInterrupt), (3, Killed)])
def test_run_interrupted_during_an_evaluation_makes_each_once(
    tmp_path: Path, evaluated: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[BaseException]
) -> None:
    with monkeypatch.context() as patched:
        interrupting(patched, number, error)
        with pytest.raises(error):
            train(config_of(), tmp_path, num_workers=0)
    train(config_of(), tmp_path, num_workers=0, resume=True)
    assert_same_run(tmp_path, evaluated)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("forked_workers")
def test_evaluations_and_prefetched_batches_do_not_affect_each_other(tmp_path: Path) -> None:
    config = config_of(prefetch=2, keep_checkpoints=9)
    train(config, tmp_path, num_workers=2)
    found = evaluations(tmp_path)
    assert list(found) == [2, 4, 6]
    for iteration, returns in found.items():
        afterward = evaluated_afterward(config, tmp_path, iteration)
        assert returns == afterward.returns.mean(axis=(0, 2), dtype=np.float64).tolist()


def test_evaluation_has_a_baseline_and_a_collector_ahead_of_time_a_policy_of_its_own() -> None:
    experiment = make_experiment(config_of(prefetch=1))
    with make_sampler(experiment, num_workers=0) as sampler:
        for mine, theirs in zip(sampler.policy.parameters(), experiment.policy.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr()
    with make_sampler(experiment, num_workers=0, evaluation=True) as sampler:
        assert sampler.baseline is not experiment.baseline


def scripted(monkeypatch: pytest.MonkeyPatch, returns: list[float]) -> None:
    """Make the evaluations return these returns after adaptation, and equal ones before."""
    left = iter(returns)

    def find(*arguments: Any, **options: Any) -> Evaluation:
        values = np.array([[[0.0], [next(left)]]], np.float32)
        return Evaluation("2DNavigation-v0", 0, [{}], (0.1,), values)

    monkeypatch.setattr("maml_rl.experiment.train.evaluate", find)


def test_best_checkpoint_is_that_of_the_best_evaluation_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [-900.0, -700.0, -800.0])
    train(config_of(checkpoint_every=100), tmp_path, num_workers=0)
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    # Training returns, which are far higher, are ignored once there are evaluations.
    assert names == ["iteration-000004", "iteration-000006"]
    assert find_checkpoint("best", tmp_path / "checkpoints")[1].score == -700.0
    best = load_policy(tmp_path, "best").state_dict()
    assert all(torch.equal(best[name], tensor) for name, tensor in load_policy(tmp_path, 4).state_dict().items())
    assert not torch.equal(best["mu.weight"], load_policy(tmp_path, "last").state_dict()["mu.weight"])


def test_best_checkpoint_follows_evaluations_that_begin_in_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [-900.0, -700.0, -800.0])
    train(config_of(num_batches=3, evaluate_every=None), tmp_path, num_workers=0)
    train(config_of(num_batches=7), tmp_path, num_workers=0, resume=True)
    assert list(evaluations(tmp_path)) == [4, 6]
    assert find_checkpoint("best", tmp_path / "checkpoints")[1].iteration == 6


def test_tasks_of_a_file_are_stored_in_the_run(tmp_path: Path) -> None:
    path = tmp_path / "held-out.json"
    save_tasks(path, "2DNavigation-v0", TASKS)
    config = config_of(evaluation_tasks=str(path))
    train(config, tmp_path / "whole", num_workers=0)
    train(config.override({"num-batches": 3}), tmp_path / "run", num_workers=0)
    path.write_text("")
    train(config, tmp_path / "run", num_workers=0, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    kept = json.loads((tmp_path / "run" / "evaluation-tasks.json").read_text())
    assert kept == {"env-name": "2DNavigation-v0", "tasks": TASKS}
    train(config_of(num_batches=1), tmp_path / "run", num_workers=0, overwrite=True)
    assert not (tmp_path / "run" / "evaluation-tasks.json").exists()


def test_evaluations_that_begin_again_have_the_tasks_that_the_config_names(tmp_path: Path) -> None:
    run, configs = tmp_path / "run", []
    for name, task in zip("ab", TASKS, strict=True):
        save_tasks(tmp_path / name, "2DNavigation-v0", [task])
        configs.append(config_of(num_batches=1, evaluate_every=1, evaluation_tasks=str(tmp_path / name)))
    train(configs[0], run, num_workers=0)
    train(configs[0].override({"evaluate-every": None}), run, num_workers=0, resume=True)
    train(configs[1], run, num_workers=0, resume=True)
    assert json.loads((run / "evaluation-tasks.json").read_text())["tasks"] == TASKS[1:]


def test_means_of_recorded_infos_are_metrics_and_part_of_an_evaluation(tmp_path: Path) -> None:
    train(config_of(env_name="tests.lamp_env:Lamp-v0", num_batches=2), tmp_path / "run", num_workers=0)
    row = untimed(tmp_path / "run")[-1]
    for name in ("power/step_0", "power/step_1", "success/step_0", "success/step_1"):
        assert 0.0 < row[f"info/{name}"] < 1.0
    for step in (0, 1, 2):
        assert 0.0 < row[f"evaluation/info/power/step_{step}"] < 1.0
