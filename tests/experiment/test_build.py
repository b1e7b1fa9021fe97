"""What a config makes: a policy of the user's, and policies that fit into the memory of the machine."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maml_rl
from maml_rl import machine
from maml_rl.baseline import ZeroBaseline
from maml_rl.config import Config
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


def test_own_policy_that_cannot_be_made_is_refused_in_one_line() -> None:
    for policy, message in (
        ("tests.experiment.own_policy:Unfit", "the distribution Categorical of Unfit has integer"),
        ("tests.experiment.own_policy:Missing", ".*Missing"),
        ("tests.experiment.no_such_module:Policy", ".*no_such_module"),
    ):
        place = f"^'policy' in x.yaml, line 1: {policy} does not make a policy for 2DNavigation-v0: "
        with pytest.raises(ConfigError, match=place + message) as caught:
            make_experiment(config_of(policy=policy))
        assert "\n" not in str(caught.value)


OF_SIZES = {
    "env-name": "2DNavigation-v0",
    "max-episode-steps": 5,
    "fast-batch-size": 2,
    "meta-batch-size": 3,
    "observe-last": True,
}
TRANSFORMER = {"cell": "transformer"}


def config_for(algorithm: str, settings: dict[str, Any], **general: Any) -> Config:
    hyphenated = {name.replace("_", "-"): value for name, value in general.items()}
    small = {key: value for key, value in OF_SIZES.items() if key != "meta-batch-size" or algorithm != "dpt"}
    return Config.model_validate(small | {"algorithm": algorithm, "algorithm-settings": settings} | hyphenated)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("algorithm", "settings", "general", "culprit"),
    [
        ("rl2", {"hidden-size": 200_000}, {}, "algorithm-settings.hidden-size"),
        ("rl2", {"layers": [200_000, 200_000]}, {}, "algorithm-settings.layers"),
        ("rl2", TRANSFORMER | {"context": 2**30}, {}, "algorithm-settings.context"),
        ("varibad", {"encoder-size": 200_000}, {}, "algorithm-settings.encoder-size"),
        ("varibad", {}, {"hidden_sizes": [200_000, 200_000]}, "hidden-sizes"),
        ("rsac", {"hidden-size": 200_000}, {}, "algorithm-settings.hidden-size"),
        ("dpt", {"hidden-size": 200_000}, {}, "algorithm-settings.hidden-size"),
        ("cavia", {"context-size": 2**31 - 1}, {}, "algorithm-settings.context-size"),
        ("maml-trpo", {}, {"hidden_sizes": [200_000], "memory": "gru"}, "hidden-sizes"),
        # More than fit into 64 bits.
        ("maml-trpo", {}, {"hidden_sizes": [2_000_000_000, 2_000_000_000]}, "hidden-sizes"),
    ],
)
def test_policy_that_does_not_fit_is_refused_by_the_setting_that_makes_it_large(
    algorithm: str, settings: dict[str, Any], general: dict[str, Any], culprit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "total_memory", lambda: 16 * 2**30)
    with pytest.raises(ConfigError, match=r"would take at least [\d,]+\.\d GiB .* has 16\.0; lower it") as raised:
        make_experiment(config_for(algorithm, settings, **general))
    assert str(raised.value).startswith(f"'{culprit}' in ")


@pytest.mark.parametrize(
    ("algorithm", "settings", "general"),
    [
        ("rl2", {"hidden-size": 12, "layers": [5]}, {}),
        ("rl2", {"cell": "lstm", "hidden-size": 12}, {}),
        ("rl2", TRANSFORMER | {"hidden-size": 16, "context": 7}, {}),
        ("varibad", {"encoder-size": 12}, {}),
        ("maml-trpo", {}, {"hidden_sizes": [9, 7]}),
        ("maml-trpo", {}, {"env_name": "PixelNavigation-v0", "hidden_sizes": [9]}),
    ],
)
def test_size_in_the_message_is_that_of_the_policy(
    algorithm: str, settings: dict[str, Any], general: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(algorithm, settings, **general)
    policy = make_experiment(config).policy
    wanted = sum(2 * param.nbytes for param in policy.parameters()) + sum(each.nbytes for each in policy.buffers())
    # One memory for each task of a batch.
    wanted += sum(each.nbytes for each in policy.initial_memory(3))
    number = sum(param.numel() for param in policy.parameters())
    monkeypatch.setattr(machine, "total_memory", lambda: wanted)
    try:
        make_experiment(config)
    except ConfigError as error:
        assert "the replay buffers of" in str(error)  # noqa: PT017
    monkeypatch.setattr(machine, "total_memory", lambda: wanted - 1)
    with pytest.raises(ConfigError, match=re.escape(f"a policy of {number:,} parameters")):
        make_experiment(config)
