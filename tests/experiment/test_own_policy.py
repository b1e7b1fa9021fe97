"""A policy that a config names: trained, resumed, evaluated, loaded, adapted, reported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maml_rl
from maml_rl.baseline import ZeroBaseline
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.train import train
from maml_rl.report import write_report
from tests.small_runs import config_of, untimed

SQUASHED = "tests.experiment.own_policy:Squashed"
GOAL = {"goal": [0.3, -0.2]}


def own(**values: Any) -> Any:
    return config_of(**{"policy": SQUASHED, "num_batches": 3, "baseline": "zero", "checkpoint_every": 1, **values})


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_own_policy_is_trained_resumed_evaluated_loaded_adapted_and_reported(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(own(num_batches=2), folder, num_workers=0)
    train(own(), folder, num_workers=0, resume=True)
    train(own(), tmp_path / "undisturbed", num_workers=0)
    assert untimed(folder) == untimed(tmp_path / "undisturbed")
    experiment = make_experiment(own())
    assert isinstance(experiment.baseline, ZeroBaseline)
    before = {name: value.clone() for name, value in experiment.policy.named_parameters()}
    experiment.restore("latest", folder)
    assert any(not torch.equal(value, before[name]) for name, value in experiment.policy.named_parameters())
    assert evaluate(experiment, tasks=2, num_steps=1, num_workers=0).returns.shape[:2] == (2, 2)
    policy = maml_rl.load_policy(folder)
    adapted = maml_rl.adapt_to_task(policy, "2DNavigation-v0", GOAL)
    assert (np.abs(adapted.choose(np.zeros(2, np.float32))[0]) < 1.0).all()
    page = write_report([folder], tasks=2, num_videos=0, placement={"num-workers": 0})
    assert page.stat().st_size > 10_000
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["accepted"] for row in rows)


def test_own_policy_is_initialized_from_the_seed_without_the_global_random_state() -> None:
    first, again, other = (make_experiment(own(seed=seed)).policy.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["body.0.weight"], other["body.0.weight"])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("tests.experiment.own_policy:Unfit", "Categorical of Unfit has integer actions"),
        ("tests.experiment.own_policy:Missing", "Missing"),
        ("tests.experiment.no_such_module:Policy", "no_such_module"),
    ],
)
def test_own_policy_that_cannot_be_made_is_refused_in_one_line(policy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_experiment(config_of(policy=policy))
    assert str(caught.value).startswith(
        f"'policy' in x.yaml, line 1: {policy} does not make a policy for 2DNavigation-v0: "
    )
    assert "\n" not in str(caught.value)
