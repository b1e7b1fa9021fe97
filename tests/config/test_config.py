import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maml_rl.config import Config, load_config
from maml_rl.config.placement import Placement
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.errors import ConfigError


def config_of(text: str) -> Config:
    return Config.from_mapping(parse_mapping(text, "x.yaml"))


def message_of(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(parse_mapping(text, "x.yaml"))
    message = str(caught.value)
    assert "\n" not in message
    assert "x.yaml" in message
    return message


def test_algorithm_settings_of_an_override_are_merged_even_if_there_are_none() -> None:
    config = config_of("env-name: a\nalgorithm-settings: {tau: 0.03}")
    for empty in ({}, None):
        assert config.override({"algorithm-settings": empty}).algorithm_settings == {"tau": 0.03}
    assert config.override({"algorithm-settings": {"cell": "lstm"}}).algorithm_settings == {"tau": 0.03, "cell": "lstm"}


def test_suggestion_for_a_misspelled_key_is_never_a_key_that_is_already_used() -> None:
    assert "did you mean 'num-steps'" in message_of("env-name: a\nnum-step: 2\n")
    assert "did you mean 'num-steps'" not in message_of("env-name: a\nnum-steps: 1\nnum-step: 2\n")


@pytest.mark.parametrize(
    ("line", "wanted", "got"),
    [
        ("num-batches: ten", "an integer", "'ten'"),
        ("num-batches: -1", "at least 1", "-1"),
        ("num-batches: 9999999999", "at most", "9999999999"),
        ("fast-lr: fast", "a number", "'fast'"),
        ("fast-lr: .inf", "a finite number", "inf"),
        ("fast-lr: 1e39", "at most", "1e+39"),
        ("evaluate-every: 0", "at least 1", "0"),
        ("prefetch: -1", "at least 0", "-1"),
        ("recv-timeout: -0.1", "at least 0", "-0.1"),
        ("inference: both", "'auto', 'central' or 'worker'", "'both'"),
        ("method: magic", "'maml', 'pretrain' or 'oracle'", "'magic'"),
        ("memory: elman", "'gru' or 'lstm'", "'elman'"),
        ("gamma: 1.5", "at most 1", "1.5"),
        ("bootstrap: 1", "true or false", "1"),
        ("hidden-sizes: 64", "a list", "64"),
        ("hidden-sizes: [64, -1]", "entry 2: expected at least 1", "-1"),
        ("nonlinearity: sigmoid", "'relu' or 'tanh'", "'sigmoid'"),
        ("env-kwargs: [1]", "a mapping", "[1]"),
        ("env-kwargs: {when: !!timestamp 2001-01-01}", "plain data", "datetime.date(2001, 1, 1)"),
        ("seed: 4294967296", "less than 4294967296", "4294967296"),
    ],
)
def test_wrong_value_is_refused_with_line_expected_and_actual_value(line: str, wanted: str, got: str) -> None:
    message = message_of(f"env-name: a\n{line}\n")
    key = line.split(":")[0]
    assert message.startswith(f"'{key}")
    assert "x.yaml, line 2" in message
    assert wanted in message
    assert got in message


OF_PYTORCH_MAML_RL = '{"env-name": "a", "num-steps": 1, "output_folder": "maml", "seed": 1, "use_cuda": false}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env-name: a\n\n# step size\nfast_lr: 0.1", "^unknown key 'fast_lr' in x.yaml, line 4; .* mean 'fast-lr'\\?$"),
        ("gamma: 0.9", "^missing key 'env-name' in x.yaml; add a line `env-name: ...`$"),
        (
            "env-name: a\nmax-episode-steps: 100\nenv-kwargs:\n  max_episode_steps: 50",
            "line 4: two time limits; keep the key 'max-episode-steps'",
        ),
        (
            "env-name: a\nalgorithm-settings:\n  clip: 0.2\n  tau: .nan",
            "^'algorithm-settings.tau' in x.yaml, line 4: expected finite numbers",
        ),
        ("env-name: a\nenv-kwargs: {low: [0, .inf]}", "^'env-kwargs.low.1' in x.yaml, line 2"),
        ("env-name: a\npolicy: MyPolicy", "^'policy' in x.yaml, line 2: expected"),
        (
            OF_PYTORCH_MAML_RL,
            "^unknown key 'output_folder' in x.yaml, line 1; config.json of pytorch-maml-rl holds options.*"
            "remove config, output_folder, num_workers, use_cuda, device",
        ),
    ],
)
def test_wrong_config_is_refused_in_one_line_with_key_place_and_remedy(text: str, message: str) -> None:
    assert re.search(message, message_of(text))


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("", "env_kwargs", {}),
        ("env-kwargs:", "env_kwargs", {}),
        ("env-kwargs: {}", "env_kwargs", {}),
        # Of earlier versions.
        ("nonlinearity: Tanh", "nonlinearity", "tanh"),
        ("seed: 0", "seed", 0),
        ("policy: my.module:MyPolicy", "policy", "my.module:MyPolicy"),
    ],
)
def test_value_that_could_be_misread_is_taken_as_it_is_meant(text: str, name: str, value: object) -> None:
    assert getattr(config_of(f"env-name: a\n{text}"), name) == value


def test_another_environment_brings_its_own_arguments_and_time_limit() -> None:
    config = config_of("env-name: a\nenv-kwargs: {low: 0}\nmax-episode-steps: 100\nnum-batches: 5")
    same = config.override({"env-name": "a", "num-batches": 6})
    assert (same.env_kwargs, same.max_episode_steps) == ({"low": 0}, 100)
    other = config.override({"env-name": "b"})
    assert (config.env_name, config.env_kwargs) == ("a", {"low": 0})
    assert (other.env_kwargs, other.max_episode_steps, other.num_batches) == ({}, None, 5)
    given = config.override({"env-name": "b", "env-kwargs": {"size": 3}, "max-episode-steps": 7})
    assert (given.env_kwargs, given.max_episode_steps) == ({"size": 3}, 7)


def test_error_in_an_override_names_the_command_line() -> None:
    with pytest.raises(ConfigError, match="'num-batches' in the command line: expected at least 1, got -1"):
        config_of("env-name: a\nnum-batches: 5").override({"num-batches": -1})
    for values, message in (
        ({"algorithm-settings": [1]}, r"'algorithm-settings' in the command line: expected a mapping, got \[1\]"),
        ({"placement": 3}, "unknown key 'placement' in the command line; its settings are keys of their own"),
        ({"num-step": 2}, "unknown key 'num-step' in the command line; did you mean 'num-steps'"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_of("env-name: a\nnum-steps: 5").override(values)


@pytest.mark.slow
@given(
    fast_lr=st.floats(min_value=1e-300, max_value=3e38),
    cg_damping=st.floats(min_value=0, max_value=1e300),
    sizes=st.lists(st.integers(1, 2**31 - 1), max_size=4),
    kwargs=st.dictionaries(
        st.text(),
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    ),
)
def test_config_json_reads_back_as_the_same_config(
    fast_lr: float, cg_damping: float, sizes: list[int], kwargs: dict[str, object]
) -> None:
    values = {"fast-lr": fast_lr, "cg-damping": cg_damping, "hidden-sizes": sizes, "env-kwargs": kwargs}
    config = config_of("env-name: a").override(values)
    assert config_of(config.to_json()).differences(config) == []
    assert json.loads(config.to_json())["fast-lr"] == fast_lr


@pytest.mark.parametrize("families", [["2DNavigation-v0", "PointGoal-v0"], {"2DNavigation-v0": 1, "PointGoal-v0": 3}])
def test_several_families_are_those_of_a_mixture(tmp_path: Path, families: object) -> None:
    (tmp_path / "mixed.yaml").write_text(json.dumps({"env-name": families, "env-kwargs": {"PointGoal-v0": {}}}))
    config = load_config(tmp_path / "mixed.yaml")
    assert config.env_name == "Mixture-v0"
    assert config.env_kwargs == {"families": families, "arguments": {"PointGoal-v0": {}}}
    assert Config(**json.loads(config.to_json())).to_json() == config.to_json()
    assert config.override({"env-name": ["Wind-v0", "PointGoal-v0"]}).env_kwargs["families"] == [
        "Wind-v0",
        "PointGoal-v0",
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"env-name": "a"},
        {"env-name": "a", "num-workers": 3, "algorithm-settings": {"tau": 0.1}, "env-kwargs": {"low": 1}},
        {"env-name": "a", "cg-iters": 4},
        {"env-name": ["a", "b"], "env-kwargs": {"a": {"low": 1}}},
        {"env-name": {"a": 2.0, "b": 1.0}},
    ],
)
def test_config_of_a_mapping_is_that_of_a_file_and_is_overridden_like_it(values: dict[str, object]) -> None:
    """As a configuration library passes it."""
    of_file, of_mapping = config_of(json.dumps(values)), Config.model_validate(values)
    assert of_mapping.to_json() == of_file.to_json()
    changes: list[dict[str, object]] = [{"seed": 3}, {"num-workers": 2}, {"algorithm-settings": {"cell": "gru"}}]
    for change in changes:
        assert of_mapping.override(change).to_json() == of_file.override(change).to_json()
    assert of_mapping.override({"seed": 3}).override({"seed": 1}).seed == 1
    config = Config(env_name="a", seed=3, placement=Placement(num_workers=2)).override({"num-batches": 7})
    assert (config.env_name, config.seed, config.placement.num_workers, config.num_batches) == ("a", 3, 2, 7)
