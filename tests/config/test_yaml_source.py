"""YAML as mappings that know the line of every key."""

from pathlib import Path

import pytest

from maml_rl.config.yaml_source import Mapping, parse_mapping, parse_value, read_mapping
from maml_rl.errors import ConfigError


def message_of(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_mapping(text, "x.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert "x.yaml" in message
    return message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("env-name: a\ngamma: 0.9\ngamma: 0.8\n", ["duplicate key 'gamma'", "line 3", "line 2"]),
        ("env-name: a\nenv-kwargs:\n  low: 1\n  low: 2\n", ["duplicate key 'low'"]),
        *((text, ["is not a mapping"]) for text in ("", "just text", "- a\n- b\n", "3", "null")),
    ],
)
def test_duplicate_keys_and_files_without_a_mapping_are_refused(text: str, words: list[str]) -> None:
    message = message_of(text)
    assert all(word in message for word in words)
    # Mappings in a list may share keys.
    assert parse_mapping("x: [{y: 1}, {y: 2}]", "x.yaml").values == {"x": [{"y": 1}, {"y": 2}]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "env-name: !!python/object/apply:os.system ['touch hacked']",
        "env-kwargs: {x: &a [1], y: *a}",
        *("env-name: {", "env-name: a\n---\nenv-name: b", b"\xff\xfe\x00", "[" * 5000, "1: 2", "? [a]\n: 1"),
        *("env-name: " + "9" * 5000, "env-name: !!timestamp 2001-99-99"),
    ],
)
def test_hostile_or_broken_yaml_is_refused_in_one_line(
    text: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message_of(text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "message"), [("nowhere.yaml", r"nowhere\.yaml: No such file"), (".", "cannot read")])
def test_missing_file_or_folder_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_mapping(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "value"),
    # The examples of YAML 1.2.2, section 10.3.2, and what YAML 1.1 reads otherwise.
    [
        *(("null", None), ("~", None), ("true", True), ("False", False), ("0", 0), ("0o17", 15), ("0x3A", 58)),
        *(("-19", -19), ("0.", 0.0), ("-0.0", 0.0), (".5", 0.5), ("+12e03", 12000.0), ("-2E+05", -200000.0)),
        *((".inf", float("inf")), ("-.Inf", float("-inf")), ("010", 10), ("-08", -8), ("1e3", 1000.0)),
        *(
            (each, each)
            for each in ("1:30", "yes", "No", "on", "OFF", "1_000", "0b11", "2026-01-02", "<<", "e3", "0O7")
        ),
    ],
)
def test_value_is_that_of_the_core_schema_of_yaml_1_2_in_files_and_options(text: str, value: object) -> None:
    read = (
        parse_value(text, "--option"),
        parse_mapping(f"key: {text}", "x.yaml").values["key"],
        parse_value(f"[{text}]", "--option")[0],
    )
    for each in read:
        assert each == value
        assert type(each) is type(value)


def test_every_value_knows_where_it_is_from() -> None:
    read = parse_mapping("a: 1\nb:\n  c: 2\n  d: [{e: 1}]\n", "x.yaml")
    assert [read.place(*path) for path in (("a",), ("b", "c"), ("b", "d", "e"), ("z",))] == [
        *("x.yaml, line 1", "x.yaml, line 3", "x.yaml, line 4", "x.yaml")
    ]
    merged = read.merged(Mapping("--b", {"b": {"c": 5}}), "b", ["a"])
    assert merged.values == {"b": {"c": 5, "d": [{"e": 1}]}}
    assert [merged.given(*path) for path in (("b", "c"), ("b", "d"), ("b",))] == ["--b", 4, 2]
    assert merged.below("b", merged.values["b"]).place("c") == "--b"
    assert merged.below("b", merged.values["b"]).place("d") == "x.yaml, line 4"
    whole = read.merged(Mapping("--b", {"b": {"c": 5}}), "algorithm-settings")
    assert whole.below("b", {"c": 5}).given("c") == "--b"
