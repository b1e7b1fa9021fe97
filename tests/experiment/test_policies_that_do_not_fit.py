"""Policies that do not fit into the memory of the machine are refused before their weights are there."""

import re
from typing import Any

import pytest

from maml_rl import machine
from maml_rl.config import Config
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment

SMALL = {
    "env-name": "2DNavigation-v0",
    "max-episode-steps": 5,
    "fast-batch-size": 2,
    "meta-batch-size": 3,
    "observe-last": True,
}
TRANSFORMER = {"cell": "transformer"}


def config_of(algorithm: str, settings: dict[str, Any], **general: Any) -> Config:
    hyphenated = {name.replace("_", "-"): value for name, value in general.items()}
    small = {key: value for key, value in SMALL.items() if key != "meta-batch-size" or algorithm != "dpt"}
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
        make_experiment(config_of(algorithm, settings, **general))
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
    config = config_of(algorithm, settings, **general)
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
