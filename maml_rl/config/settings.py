"""What all settings have in common: strict, typed models, whose keys in a file are their fields' names with hyphens.

Meaning, range and default of every setting are read from the models, for `--help` and the documentation.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from maml_rl.arguments import suggest

# A value above this is a mistake; the random streams count tasks, episodes and iterations in 32 bits.
MOST = 2**31 - 1

Count = Annotated[int, Field(ge=1, le=MOST)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# Parameters are float32, in which larger numbers are infinite.
Positive = Annotated[float, Field(gt=0, le=3.4e38)]
# Adam divides its step size by 0.1 in the first step.
StepSize = Annotated[float, Field(gt=0, le=3e37)]

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


def none_is_empty(value: object) -> object:
    """A key without a value is null in YAML, and means no arguments here."""
    return {} if value is None else value


def finite(value: Any) -> Any:
    """Refuse numbers that JSON cannot write."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("numbers must be finite")
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            finite(entry)
    return value


class SettingsModel(BaseModel):
    """Strict, typed settings. In files a field has hyphens in its name; --help shows its description.

    The constructor takes the fields' names or their keys.

    Raises:
        ValueError: If one is out of range, or two exclude each other; the message names it as an argument.
        TypeError: If there is no such setting, or a required one is missing.
    """

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        alias_generator=lambda name: name.replace("_", "-"),
    )

    def __init__(self, **values: Any) -> None:
        given = {name.replace("_", "-"): value for name, value in values.items()}
        try:
            super().__init__(
                **{key: value.item() if isinstance(value, np.generic) else value for key, value in given.items()}
            )
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            name, *entries = (str(part).replace("-", "_") for part in wrong["loc"])
            if wrong["type"] == "extra_forbidden":
                known = [key.replace("-", "_") for key in self.fields_by_key()]
                raise TypeError(f"{type(self).__name__} has no argument {name!r}{suggest(name, known)}") from None
            if wrong["type"] == "missing":
                raise TypeError(f"{type(self).__name__} needs the argument {name!r}") from None
            if isinstance(given.get(str(wrong["loc"][0])), dict):
                name += "".join(f"[{entry!r}]" for entry in entries)
            message = wrong["msg"].replace("Input should be ", "")
            raise ValueError(f"{name} must be {message}, got {wrong['input']!r}") from None
        self.check_together()

    # So that only calls go through `__init__`: a mapping, as from a file, has the keys alone.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def fields_by_key(cls) -> dict[str, FieldInfo]:
        """Return the fields by their keys in a file, in order; those of a model inside beside the others."""
        fields: dict[str, FieldInfo] = {}
        for name, field in cls.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, SettingsModel):
                fields |= field.annotation.fields_by_key()
            elif not field.exclude:
                fields[field.alias or name] = field
        return fields

    def replace(self, **changes: Any) -> Self:
        """Return these settings with some changed, by the fields' names.

        Raises:
            ValueError: If a value is out of range, or two exclude each other.
        """
        return type(self)(**(dict(self) | changes))

    def check_together(self) -> None:
        """Refuse values that exclude each other, where they are given by a call; this base refuses nothing.

        Raises:
            ValueError: If some do.
        """

    def check_with(self, config: Any) -> None:
        """Refuse these settings of an algorithm if the rest of its `Config` excludes them; this base refuses nothing.

        Raises:
            ConfigError: If something does not fit.
        """


AnySettings = TypeVar("AnySettings", bound=SettingsModel)


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
            (f"{sign}{schema[name]}" for name, sign in signs.items() if abs(schema.get(name, 2**63)) < MOST),
            "",
        )
        for signs in (_LOWER, _UPPER)
    )
    kind = _KINDS.get(schema.get("type", ""), "any value")
    if lower and upper:
        # 0<NUMBER<=1
        return f"{lower.lstrip('>=')}{lower.rstrip('-0123456789.e').replace('>', '<')}{kind}{upper}"
    return f"{kind}{lower}{upper}"
