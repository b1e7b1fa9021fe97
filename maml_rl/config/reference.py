"""Meaning, range and default of every setting, read from the models: for `--help` and the documentation."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

# Larger bounds only keep numbers within 32 bits.
_NO_REAL_BOUND = 2**31 - 1
FLAG, LIST = "true or false", "LIST"
_KINDS = {
    "integer": "INT",
    "number": "NUMBER",
    "string": "TEXT",
    "boolean": FLAG,
    "object": "MAPPING",
    "null": "null",
}
_LOWER = {"minimum": ">=", "exclusiveMinimum": ">"}
_UPPER = {"maximum": "<=", "exclusiveMaximum": "<"}
CATALOG = Path(__file__).with_name("algorithms.json")
# Environment steps, minutes and returns of the shipped configs, as `python -m scripts.time_configs` has measured them.
MEASURED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a config.

    Attributes:
        key: as in a config file.
        meaning: a phrase, with units.
        allowed: type and range, as in `INT>=1 or null`.
        default: as it would be written in a config; None where the key is required.
    """

    key: str
    meaning: str
    allowed: str
    default: str | None


def describe_settings(model: type[BaseModel]) -> list[Setting]:
    """Return the settings of a model of a config, or of a section of one, in order, those of a model inside, too."""
    schema = model.model_json_schema(by_alias=True)
    settings: list[Setting] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            settings += describe_settings(field.annotation)
        elif not field.exclude:
            key = field.alias or name
            value = schema["properties"][key]
            default = None if field.is_required() else json.dumps(value.get("default"), ensure_ascii=False)
            settings.append(Setting(key, value.get("description", ""), _allowed(value), default))
    return settings


def algorithm_settings() -> dict[str, list[Setting]]:
    """Return the settings of the package's algorithms by name, from a catalog that is read without importing torch.

    `python -m scripts.describe_algorithms` writes the catalog from the classes themselves.
    """
    return {name: [Setting(**setting) for setting in entry["settings"]] for name, entry in _catalog().items()}


def settings_in_use() -> dict[str, list[str]]:
    """Return which of the settings in `OF_LEARNERS` the package's algorithms use, by name, from the same catalog."""
    return {name: entry["uses"] for name, entry in _catalog().items()}


def _catalog() -> dict[str, Any]:
    catalog: dict[str, Any] = json.loads(CATALOG.read_text(encoding="utf-8"))
    return catalog


def _allowed(schema: Mapping[str, Any]) -> str:
    """Describe briefly the values that a JSON schema allows: INT>=1 or null."""
    if "anyOf" in schema:
        return " or ".join(_allowed(choice) for choice in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        *others, last = map(str, schema["enum"])
        return f"{', '.join(others)} or {last}" if others else last
    if schema.get("type") == "array":
        return f"{LIST} of {_allowed(schema.get('items', {}))}"
    lower, upper = (
        next(
            (f"{sign}{schema[name]}" for name, sign in signs.items() if abs(schema.get(name, 2**63)) < _NO_REAL_BOUND),
            "",
        )
        for signs in (_LOWER, _UPPER)
    )
    kind = _KINDS.get(schema.get("type", ""), "any value")
    if lower and upper:
        # 0<NUMBER<=1
        return f"{lower.lstrip('>=')}{lower.rstrip('-0123456789.e').replace('>', '<')}{kind}{upper}"
    return f"{kind}{lower}{upper}"
