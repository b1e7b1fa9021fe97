"""Reads a YAML or JSON mapping and remembers the line of every key, so that an error can point at it."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from maml_rl.errors import ConfigError
from maml_rl.foreign_files import read_regular

KeyPath = tuple[str, ...]

# Ways to write a missing value in YAML; another is to write nothing, which in an option is a mistake.
_NULLS = "null", "~"
_MOST_BYTES = 1_000_000
# As pytorch-maml-rl has them: settings of maml-trpo at the top level, and entries of config.json besides settings.
FLAT_KEYS = (
    "inner-loss",
    "first-order",
    "max-kl",
    "cg-iters",
    "cg-damping",
    "curvature-fraction",
    "ls-max-steps",
    "ls-backtrack-ratio",
)
_SAVED_OPTIONS = ("config", "output_folder", "num_workers", "use_cuda", "device")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping as it was written.

    Attributes:
        origin: the file's path, or where else the values come from.
        values: the mapping itself.
        places: line of every key, from 1, or the source of a value that is not from `origin`; nested keys under the
            path of their parents, as in ("env-kwargs", "low").
        spare: keys whose values are dropped if nothing uses them: those of a run's recorded config, and those of
            something that an override replaces.
        foreign: whether an untrusted person may have written it; nothing that it names is imported then.
    """

    origin: str
    values: dict[str, Any]
    places: dict[KeyPath, int | str] = field(default_factory=dict)
    spare: frozenset[str] = frozenset()
    foreign: bool = False

    def place(self, *path: str) -> str:
        """Return the place of a key, or of its nearest parent that has one: "configs/x.yaml, line 3"."""
        given = self.given(*path)
        return f"{self.origin}, line {given}" if isinstance(given, int) else given or self.origin

    def given(self, *path: str) -> int | str | None:
        """Return the line or other source of a key's value, or of its nearest parent's; None if unknown."""
        return next(
            (self.places[path[:length]] for length in range(len(path), 0, -1) if path[:length] in self.places), None
        )

    def below(self, key: str, values: dict[str, Any]) -> "Mapping":
        """Return the mapping below a key, with these values."""
        places = {path[1:]: place for path, place in self.places.items() if path[:1] == (key,)}
        if isinstance(whole := places.get(()), str):
            # All of them were replaced.
            places |= {(name,): whole for name in values}
        return Mapping(self.origin, values, places)

    def merged(self, other: "Mapping", section: str, dropped: Collection[str] = ()) -> "Mapping":
        """Return this mapping without some keys, and with the values of another, those of `section` one by one."""
        rest = {key: value for key, value in self.values.items() if key not in dropped}
        values = rest | other.values
        paths: set[KeyPath] = {(key,) for key in other.values}
        settings = {} if other.values.get(section) is None else other.values[section]
        # What is not a mapping is refused when it is checked.
        if section in other.values and isinstance(settings, dict):
            values[section] = {**(rest.get(section) or {}), **settings}
            paths = (paths - {(section,)}) | {(section, key) for key in settings}
        return replace(
            self,
            values=values,
            places={path: place for path, place in self.places.items() if not {path[:1], path[:2]} & paths}
            | dict.fromkeys(paths, other.origin),
            spare=self.spare - other.values.keys(),
        )


class _Loader(yaml.SafeLoader):
    """Safe loading by the core schema of YAML 1.2, without aliases: a small file cannot expand into a large value.

    Source: YAML 1.2.2, section 10.3.2, https://yaml.org/spec/1.2.2
    """

    # Not those of YAML 1.1, in which 010 is 8, 1:30 is 90, and `no` is false.
    yaml_implicit_resolvers = {}  # noqa: RUF012 - a class attribute of the base

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases are not supported; write the value out", problem_mark=mark)
        return super().compose_node(parent, index)


def _read_integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    base = {"0o": 8, "0x": 16}.get(text[:2])
    return int(text) if base is None else int(text[2:], base)


_TAG = "tag:yaml.org,2002:"
_NUMBER = "-+.0123456789"
for _kind, _pattern, _first in (
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list(_NUMBER)),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list(_NUMBER)),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)
_Loader.add_constructor(f"{_TAG}int", _read_integer)


def read_mapping(path: str | Path) -> Mapping:
    """Read a YAML file (JSON is YAML too) whose top level is a mapping."""
    origin = str(path)
    try:
        data = read_regular(Path(path), _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the config {origin}: {error.strerror or error}") from None
    return parse_mapping(data, origin)


def parse_mapping(data: str | bytes, origin: str) -> Mapping:
    """Read a YAML document, as `read_mapping` does; `origin` names it in errors."""
    try:
        loader = _Loader(data)
        try:
            node = loader.get_single_node()
            if not isinstance(node, yaml.MappingNode):
                raise ConfigError(f"{origin} is not a mapping; a config is a list of lines `key: value`")
            places: dict[KeyPath, int | str] = {}
            _walk(node, (), places, origin)
            return Mapping(origin, loader.construct_document(node), places)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{origin}{line} is not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply for a config") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{origin} holds a value that cannot be read: {error}") from None


def parse_value(text: str, origin: str) -> Any:
    """Read one value as YAML writes it: "0.1", "[64, 64]", "{low: -1}", "true", "null", or plain text."""
    values = parse_mapping(f"value: {text}", origin).values
    if len(values) > 1:
        others = ", ".join(repr(key) for key in values if key != "value")
        raise ConfigError(f"{origin}: expected one value, got lines of {others}, too; give each an option of its own")
    value = values["value"]
    if value is None and text.strip().lower() not in _NULLS:
        raise ConfigError(f"{origin}: expected a value, got an empty text; leave the option out, or write null")
    return value


def _walk(node: yaml.Node, path: KeyPath, places: dict[KeyPath, int | str], origin: str) -> None:
    """Record the line of every key below `node`; refuse keys that are not text, or are twice in one mapping."""
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            # Entries of a list share their list's place, and may repeat each other's keys.
            _walk(entry, path, {}, origin)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag != f"{_TAG}str":
            raise ConfigError(f"key {key.value!r} in {origin}, line {line} must be text; put it in quotes")
        here = (*path, key.value)
        if here in places:
            raise ConfigError(
                f"duplicate key {key.value!r} in {origin}, line {line}; it is already on line {places[here]}"
            )
        places[here] = line
        _walk(value, here, places, origin)


def gathered(mapping: Mapping, section: str) -> Mapping:
    """Return a config with its flat keys moved into the section of the algorithm's settings."""
    flat = [key for key in FLAT_KEYS if key in mapping.values]
    settings = mapping.values.get(section) or {}
    if not flat or not isinstance(settings, dict):
        return mapping
    for key in flat:
        if key in settings:
            raise ConfigError(f"two values for {key!r} in {mapping.place(key)}; keep the one below {section!r}")
    values = {key: value for key, value in mapping.values.items() if key not in flat}
    values[section] = settings | {key: mapping.values[key] for key in flat}
    places = {(section, *path) if path[0] in flat else path: place for path, place in mapping.places.items()}
    return replace(mapping, values=values, places=places)


def explain_saved_option(key: str) -> str:
    """Return the remedy for an option of pytorch-maml-rl's command line in config.json; "" for another key."""
    if key not in _SAVED_OPTIONS:
        return ""
    return (
        f"; config.json of pytorch-maml-rl holds options of its command line: remove {', '.join(_SAVED_OPTIONS)}, or "
        "give the YAML file that it was made from"
    )
