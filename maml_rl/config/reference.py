"""What every setting means, allows and defaults to, read from the models: for `--help` and the documentation."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

# Larger bounds only keep numbers within 32 bits.
_NO_REAL_BOUND = 2**31 - 1
_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "a mapping",
    "null": "null",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a config.

    Attributes:
        key: as in a config file.
        meaning: in a phrase, with units.
        allowed: type and range, in words.
        default: as it would be written in a config; None where the key is required.
    """

    key: str
    meaning: str
    allowed: str
    default: str | None


def describe_settings(model: type[BaseModel]) -> list[Setting]:
    """Return the settings of a model of a config, or of a section of one, in the model's order."""
    schema = model.model_json_schema(by_alias=True)
    required = schema.get("required", ())
    return [
        Setting(
            key,
            value.get("description", ""),
            _allowed(value),
            None if key in required else json.dumps(value.get("default"), ensure_ascii=False),
        )
        for key, value in schema.get("properties", {}).items()
    ]


def _allowed(schema: Mapping[str, Any]) -> str:
    """Say in words what a JSON schema allows."""
    if "anyOf" in schema:
        return ", or ".join(_allowed(choice) for choice in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        *others, last = map(str, schema["enum"])
        return f"{', '.join(others)} or {last}" if others else last
    if schema.get("type") == "array":
        return f"a list, each entry {_allowed(schema.get('items', {}))}"
    bounds = [
        f"{words} {schema[bound]}" for bound, words in _BOUNDS.items() if abs(schema.get(bound, 2**63)) < _NO_REAL_BOUND
    ]
    return ", ".join([_KINDS.get(schema.get("type", ""), "any value"), *bounds])
