"""Runs that begin with the policy of another run, and the states that are not saved."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from maml_rl.cli import main as cli
from maml_rl.config import Config
from maml_rl.derivatives import EpisodeStore
from maml_rl.errors import CheckpointError, ConfigError, NonFiniteError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.train import train
from maml_rl.metalearners import find_metalearner
from maml_rl.metalearners.promp import ProMP
from maml_rl.runs.checkpoint import Checkpoint, check_finite, latest_intact, load_checkpoint
from tests.metalearners.small_algorithms import OF_HISTORIES, small
from tests.small_runs import config_of, train_until, untimed


def vpg(**values: Any) -> Config:
    return config_of(**{"num_batches": 2, **values}).override({"algorithm": "maml-vpg"})


def first_of(run: Path) -> Checkpoint:
    return load_checkpoint(run / "checkpoints" / "iteration-000000")


def test_run_begins_with_the_policy_of_another_and_optionally_with_its_learner(tmp_path: Path) -> None:
    train(vpg(), tmp_path / "run", num_workers=0)
    last = latest_intact(tmp_path / "run" / "checkpoints")[1]
    changed = vpg(gamma=0.5, keep_checkpoints=9)
    train(changed, tmp_path / "policy", num_workers=0, init=tmp_path / "run")
    train(changed, tmp_path / "both", num_workers=0, init=tmp_path / "run", init_learner=True)
    policy, both = first_of(tmp_path / "policy"), first_of(tmp_path / "both")
    for begun in (policy, both):
        assert all(torch.equal(tensor, last.tensors[name]) for name, tensor in begun.tensors.items())
    assert not policy.learner
    assert both.learner.keys() == last.learner.keys() != set()
    # Of the checkpoint's own folder, and by another algorithm.
    path = latest_intact(tmp_path / "run" / "checkpoints")[0]
    train(config_of(num_batches=1, keep_checkpoints=9), tmp_path / "other", num_workers=0, init=path)
    assert torch.equal(first_of(tmp_path / "other").tensors["sigma"], last.tensors["sigma"])
    with pytest.raises(CheckpointError, match="is of the algorithm 'maml-vpg', not 'maml-trpo'"):
        train(config_of(), tmp_path / "third", num_workers=0, init=path, init_learner=True)
    with pytest.raises(CheckpointError, match="is of another architecture"):
        train(config_of(hidden_sizes=[9]), tmp_path / "third", num_workers=0, init=path)
    with pytest.raises(ConfigError, match="name it with init"):
        train(config_of(), tmp_path / "third", num_workers=0, init_learner=True)


@pytest.mark.usefixtures("histories")
@pytest.mark.parametrize("algorithm", ["rl2", "ad"])
def test_step_size_falls_anew_in_a_run_that_begins_with_another_learner(algorithm: str, tmp_path: Path) -> None:
    config = small(algorithm).override({"num-batches": 2, "evaluate-every": None, "keep-checkpoints": 9})
    config = config.override({"algorithm-settings": {"anneal-over": 2}})
    train(config, tmp_path / "run", num_workers=0)
    train(config, tmp_path / "again", num_workers=0, init=tmp_path / "run", init_learner=True)
    first, last = first_of(tmp_path / "again"), latest_intact(tmp_path / "again" / "checkpoints")[1]
    assert not torch.equal(first.tensors["head.weight"], last.tensors["head.weight"])


def test_resumed_run_that_began_with_another_continues_as_if_undisturbed(tmp_path: Path) -> None:
    train(vpg(), tmp_path / "run", num_workers=0)
    changed = vpg(num_batches=3, gamma=0.5)
    train(changed, tmp_path / "whole", num_workers=0, init=tmp_path / "run")
    train_until(1, changed, tmp_path / "parts", init=tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    train(changed, tmp_path / "parts", num_workers=0, init=tmp_path / "run", resume=True)
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "whole")


def test_command_begins_with_another_run_and_names_it_where_settings_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "my run"
    train(config_of(num_batches=1), run, num_workers=0)
    words = ["train", str(run), "--num-workers", "0", "--gamma", "0.5"]
    assert cli.main([*words, "--output-folder", str(run), "--resume"]) == 2
    advice = f"begin another run with its policy: --init '{run}' and another --output-folder"
    assert advice in capsys.readouterr().err
    new = tmp_path / "new run"
    assert cli.main([*words, "--output-folder", str(new), "--init", str(run)]) == 0
    assert f"test '{new}'" in capsys.readouterr().out
    tensors = latest_intact(run / "checkpoints")[1].tensors
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in first_of(new).tensors.items())


def test_resume_with_fewer_batches_leaves_the_config_as_it_is(tmp_path: Path) -> None:
    train(config_of(num_batches=3), tmp_path / "run", num_workers=0)
    files = [tmp_path / "run" / name for name in ("config.json", "SHA256SUMS")]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    for number in (2, 3):
        train(config_of(num_batches=number), tmp_path / "run", num_workers=0, resume=True)
        assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in files] == before
    train(config_of(num_batches=2, keep_checkpoints=7), tmp_path / "run", num_workers=0, resume=True)
    assert '"num-batches": 3' in files[0].read_text()
    assert '"keep-checkpoints": 7' in files[0].read_text()


@pytest.mark.usefixtures("histories")
@pytest.mark.parametrize("algorithm", ["maml-ppo", "rl2", "pearl", "ad"])
def test_last_update_that_leaves_nothing_to_train_is_one_line_and_is_not_saved(algorithm: str, tmp_path: Path) -> None:
    key = "learning-rate"
    settings: dict[str, Any] = {key: 3e37} | ({"warmup": 0} if algorithm in OF_HISTORIES else {})
    assert key in {field.alias for field in find_metalearner(algorithm).Settings.model_fields.values()}
    config = small(algorithm).override({"num-batches": 1, "algorithm-settings": settings, "evaluate-every": None})
    if algorithm == "pearl":
        # The first batch is learned from.
        config = config.override({"algorithm-settings": {"warmup-steps": 1}})
    with pytest.raises(NonFiniteError) as caught:
        train(config, tmp_path / "run", num_workers=0)
    assert "\n" not in str(caught.value)
    # A larger step size is out of range.
    with pytest.raises(ConfigError, match="'learning-rate' in the command line: expected at most 3e\\+37, got 1e\\+38"):
        make_experiment(config.override({"algorithm-settings": {key: 1e38}}))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["iteration-000000"]


def test_last_update_that_leaves_an_infinite_number_diverges_and_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = ProMP.update

    def diverge(self: ProMP, batch: EpisodeStore) -> dict[str, Any]:
        metrics = update(self, batch)
        self._coefficients = [math.inf]
        return metrics

    monkeypatch.setattr(ProMP, "update", diverge)
    config = small("promp").override({"num-batches": 1, "evaluate-every": None})
    with pytest.raises(NonFiniteError, match="after iteration 1 the learner's 'inner_kl_coefficients' is inf, so this"):
        train(config, tmp_path, num_workers=0)
    assert json.loads((tmp_path / "failure.json").read_text())["reason"] == "diverged"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iteration-000000"]


def test_state_that_is_saved_is_finite_and_an_error_names_what_is_not() -> None:
    fine = {"weight": torch.ones(2), "mask": torch.tensor([-torch.inf]), "count": torch.tensor([2**62])}
    learner = {"optimizer.0.exp_avg_sq": torch.tensor(3e38), "n": [1, [2.0]]}
    check_finite(Checkpoint(3, fine, learner=learner), {"weight"})
    for tensors, learner, named in (
        ({"weight": torch.tensor([0.0, 1e20])}, {}, "after iteration 3 the policy's 'weight' is 1e\\+20"),
        ({"weight": torch.tensor([torch.nan])}, {}, "'weight' is nan"),
        ({"mask": torch.tensor([torch.nan])}, {}, "'mask' is nan"),
        ({}, {"optimizer.0.exp_avg_sq": torch.tensor(torch.inf)}, "the learner's 'optimizer.0.exp_avg_sq' is inf"),
        ({}, {"scales": {"a": [1.0, float("inf")]}}, "the learner's 'scales' is inf"),
    ):
        with pytest.raises(NonFiniteError, match=named):
            check_finite(Checkpoint(3, fine | tensors, learner=learner), {"weight"})
