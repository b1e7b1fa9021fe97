"""The settings of an experiment: strict and typed, read from YAML, written to `config.json`."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as AbstractMapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails

from maml_rl.arguments import suggest
from maml_rl.config.placement import PLACEMENT_KEYS, RAY_KEYS, Placement
from maml_rl.config.settings import MOST, AnySettings, Count, Fraction, Positive, SettingsModel, finite, none_is_empty
from maml_rl.config.yaml_source import FLAT_KEYS, KeyPath, Mapping, explain_saved_option, gathered, read_mapping
from maml_rl.errors import ConfigError
from maml_rl.foreign_files import check_sum
from maml_rl.named_modules import would_import

# Number of characters of a wrong value that an error shows.
_SHOWN = 80
# Characters that JSON may hold as they are, but that YAML refuses or folds into spaces.
_NOT_YAML = re.compile("[^\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")

# The expected value, by pydantic's names of errors; other errors have words of pydantic's own.
_WANTED = {
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "more than {gt}",
    "less_than": "less than {lt}",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_pattern_mismatch": "text that matches {pattern}",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "invalid-json-value": "plain data: text, numbers, true, false, null, lists or mappings",
    "value_error": "finite numbers",
}

# Where the comments of a listed config begin, unless a value is longer.
_WIDEST = 50

ConvLayer = Annotated[tuple[Count, Count, Count], Field(strict=False)]
Halving = Literal["never", "once", "always"]

SECTION = "algorithm-settings"
# Id of the environment that mixes families.
MIXTURE = "Mixture-v0"
TASKS = "tasks"
# What the section of tasks has besides the settings of its distribution.
_NAME = (TASKS, "distribution")
_PLACEMENT = "placement"
# Settings of what acts, which a policy of the user's own has instead.
OF_POLICIES = ("hidden-sizes", "memory", "conv-layers", "image-scale", "nonlinearity", "output-scale")
# Settings that some algorithms use and others do not; see `MetaLearner.uses`.
OF_LEARNERS = (
    *("gamma", "gae-lambda", "bootstrap", "baseline"),
    *OF_POLICIES,
    *("num-steps", "fast-lr", "meta-batch-size", "evaluation-steps", "halve-step-size"),
)
# Settings of one environment, which another does not inherit.
_OF_ENVIRONMENT = ("env-kwargs", "max-episode-steps")
# Keys that decide which other settings are used.
_DECIDING = ("algorithm", "policy", "memory")
# Where the name of a module belongs, as "module:name"; other texts may have a colon there, too.
NAMING_CODE = {("env-name",), ("algorithm",), ("policy",), _NAME}
# Endings of configs that are the user's own choice, not another's run.
_OWN = (".yaml", ".yml")
# The name of a config that a run has written.
RECORDED = "config.json"


def _lower(value: object) -> object:
    """Earlier code writes 'Tanh' for 'tanh'."""
    return value.lower() if isinstance(value, str) else value


def _distribution_of_text(value: object) -> object:
    """Accept the name of a distribution, or of a file of tasks, and use its defaults."""
    if not isinstance(value, str):
        return value
    is_name = re.fullmatch(r"[\w.]+:\w+|[\w-]+", value)
    return {"distribution": value} if is_name else {"distribution": "list", "file": value}


def _path_to_infinity(value: Any) -> list[str] | None:
    """Return the keys and numbers of entries that lead to a number that is not finite; None if there is none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else []
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next(([str(key), *path] for key, entry in entries if (path := _path_to_infinity(entry)) is not None), None)


class Config(SettingsModel):
    """The settings of one experiment; the algorithm checks its section, `algorithm-settings`."""

    env_name: Annotated[
        str,
        Field(min_length=1, description="id of the task family; to mix several, their list, or their weights by id"),
    ]
    env_kwargs: Annotated[
        dict[str, JsonValue],
        BeforeValidator(finite),
        BeforeValidator(none_is_empty),
        Field(description="arguments of the environment"),
    ] = {}  # noqa: RUF012 - pydantic copies it
    algorithm: Annotated[
        str, Field(min_length=1, description="metalearner: a registered name, or your own class as module:Class")
    ] = "maml-trpo"
    algorithm_settings: Annotated[
        dict[str, JsonValue],
        BeforeValidator(finite),
        BeforeValidator(none_is_empty),
        Field(description="settings of the algorithm"),
    ] = {}  # noqa: RUF012 - pydantic copies it
    method: Annotated[
        Literal["maml", "pretrain", "oracle"],
        Field(description="maml, or a baseline: pretrain (adapts only after training), oracle (observes its task)"),
    ] = "maml"
    tasks: Annotated[
        Annotated[dict[str, JsonValue], BeforeValidator(finite)] | None,
        BeforeValidator(_distribution_of_text),
        Field(description="which tasks training draws: `distribution` and its settings; null: as the family does"),
    ] = None
    max_episode_steps: Annotated[Count | None, Field(description="time limit; null for the family's own")] = None
    gamma: Annotated[Fraction, Field(description="discount factor")] = 0.99
    gae_lambda: Annotated[Fraction, Field(description="lambda of generalized advantage estimation")] = 1.0
    bootstrap: Annotated[
        bool, Field(description="add the value of the final observation where a time limit ends an episode")
    ] = True
    baseline: Annotated[
        Literal["linear", "zero"],
        Field(description="estimates values for the advantages: linear in features of observation and time, or zero"),
    ] = "linear"
    policy: Annotated[
        Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None,
        Field(description="your own policy: module:name of a class or function of both spaces; null: an MLP"),
    ] = None
    hidden_sizes: Annotated[tuple[Count, ...], Field(strict=False, description="units of each hidden layer")] = (64, 64)
    memory: Annotated[
        Literal["gru", "lstm"] | None,
        Field(description="a recurrent layer as the policy, through which inner steps go, too; null: none"),
    ] = None
    conv_layers: Annotated[
        Annotated[tuple[ConvLayer, ...], Field(strict=False)] | None,
        Field(description="for images: filters, kernel size and stride of each convolution; null: 4 x 4, then 2 x 2"),
    ] = None
    image_scale: Annotated[
        Positive | None,
        Field(description="divisor of images, 10 for MiniGrid; null: the largest number of their space"),
    ] = None
    nonlinearity: Annotated[
        Literal["relu", "tanh"], BeforeValidator(_lower), Field(description="activation after each hidden layer")
    ] = "tanh"
    output_scale: Annotated[
        Positive,
        Field(description="size of the initial weights of the output layer, relative to the usual"),
    ] = 1.0
    fast_batch_size: Annotated[Count, Field(description="episodes for each task and phase")] = 20
    num_steps: Annotated[Count, Field(description="inner steps (gradient steps on one task) in training")] = 1
    fast_lr: Annotated[Positive, Field(description="inner step size")] = 0.1
    num_batches: Annotated[Count, Field(description="iterations; each ends in one meta-update")] = 500
    meta_batch_size: Annotated[Count, Field(description="tasks for each meta-update")] = 20
    seed: Annotated[int, Field(ge=0, lt=2**32, description="seed of every random stream")] = 0
    observe_last: Annotated[
        bool, Field(description="show the policy the last action, reward and termination beside the observation")
    ] = False
    slots_per_task: Annotated[
        Count | None,
        Field(description="environments for each task; null: one for each episode, or the family's own default"),
    ] = None
    placement: Annotated[Placement, Field(description="where and how environments are stepped")] = Placement()
    prefetch: Annotated[
        int,
        Field(
            ge=0, le=MOST, description="batches collected ahead of time, by parameters that many updates old; 0: none"
        ),
    ] = 0
    checkpoint_every: Annotated[Count, Field(description="iterations between checkpoints")] = 10
    keep_checkpoints: Annotated[Count, Field(description="newest checkpoints to keep, besides the best")] = 3
    evaluation_steps: Annotated[Count, Field(description="inner steps in evaluation")] = 3
    halve_step_size: Annotated[
        Halving, Field(description="in evaluation, halve the step size after the first step (once) or every (always)")
    ] = "never"
    evaluate_every: Annotated[
        Count | None, Field(description="iterations between evaluations on held-out tasks while training; null: none")
    ] = None
    evaluation_tasks: Annotated[
        Count | Annotated[str, Field(min_length=1)],
        Field(description="held-out tasks of these evaluations: how many to draw, or a file of tasks"),
    ] = 40

    _source: Mapping = PrivateAttr(default_factory=lambda: Mapping("the config", {}))
    # Keys that nothing uses.
    _unused: frozenset[str] = PrivateAttr(default=frozenset())

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, values: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """Accept every spelling of a file, gather the placement, and remember what was given."""
        if not isinstance(values, dict):
            return check(values)
        placement = values.get(_PLACEMENT)
        flat = placement.model_dump(by_alias=True, exclude_unset=True) if isinstance(placement, Placement) else {}
        given = {key: value for key, value in values.items() if key != _PLACEMENT or not flat} | flat
        mapping = _mixed(gathered(Mapping("the config", given), SECTION))
        nested = {key: value for key, value in mapping.values.items() if key in PLACEMENT_KEYS}
        others = {key: value for key, value in mapping.values.items() if key not in nested}
        config = check(others | ({_PLACEMENT: nested} if _PLACEMENT not in others else {}))
        config._source = mapping
        return config

    @model_serializer(mode="wrap")
    def _flatten(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write the keys of the placement beside the others."""
        written: dict[str, Any] = {}
        for key, value in write(self).items():
            written |= value if key == _PLACEMENT else {key: value}
        return written

    @classmethod
    def from_mapping(cls, mapping: Mapping) -> Self:
        """Check a mapping with hyphenated keys.

        Raises:
            ConfigError: If a key is unknown or missing, or a value has the wrong type or range; in one line, for the
                first such key.
        """
        mapping = _mixed(gathered(mapping, SECTION))
        if _PLACEMENT in mapping.values:
            raise ConfigError(
                f"unknown key {_PLACEMENT!r} in {mapping.place(_PLACEMENT)}; its settings are keys of their own"
            )
        config = _checked(cls, mapping, FLAT_KEYS, explain_saved_option)
        config._source = mapping
        if config.max_episode_steps is not None and "max_episode_steps" in config.env_kwargs:
            raise config.error("two time limits; keep the key 'max-episode-steps'", "env-kwargs", "max_episode_steps")
        return config

    def check_section(
        self, section: str, model: type[AnySettings], explain_unknown: Callable[[str], str] = lambda key: ""
    ) -> AnySettings:
        """Check the section `algorithm-settings`, or `tasks` without the distribution's name, as `from_mapping` does.

        Args:
            section: its key.
            model: of its settings.
            explain_unknown: returns a message about a key that the model does not have, if there is one.
        """
        values = (self.tasks or {}) if section == TASKS else self.algorithm_settings
        settings = {key: value for key, value in values.items() if (section, key) != _NAME}
        return _checked(model, self._source.below(section, settings), (), explain_unknown)

    def with_section(self, section: str, settings: SettingsModel) -> Self:
        """Return this config with every setting of one of these sections written out."""
        values = settings.model_dump(mode="json", by_alias=True)
        if section == TASKS:
            return self.model_copy(update={"tasks": {"distribution": (self.tasks or {})["distribution"], **values}})
        return self.model_copy(update={"algorithm_settings": values})

    def without(self, unused: AbstractMapping[str, str]) -> Self:
        """Return this config without the settings that nothing uses: they have their defaults, and are not recorded.

        Args:
            unused: why, by hyphenated key.

        Raises:
            ConfigError: If one was given, in the file or by an override, and is neither null nor spare.
        """
        asked = [
            key for key, value in self._source.values.items() if key not in self._source.spare and value is not None
        ]
        for key in asked:
            if key in unused:
                raise self.error(unused[key], key)
        names = {str(field.alias): name for name, field in type(self).model_fields.items()}
        config = self.model_copy(update={names[key]: type(self).model_fields[names[key]].default for key in unused})
        config._unused |= unused.keys()
        return config

    @property
    def training_steps(self) -> int:
        """Number of inner steps in training."""
        return self.num_steps if self.method == "maml" else 0

    @property
    def test_steps(self) -> int:
        """Number of inner steps in an evaluation; zero for an oracle, which observes its task."""
        return 0 if self.method == "oracle" else self.evaluation_steps

    def override(
        self, values: AbstractMapping[str, Any], origin: str = "the command line", *, spare: bool = False
    ) -> Self:
        """Return this config with some hyphenated keys replaced, those of `algorithm-settings` one by one.

        Another algorithm starts with its own defaults: the settings of the previous one are dropped, and so are those
        of the other settings that the new one does not use. Another environment starts with its own arguments and time
        limit, and a backend other than Ray without the settings of Ray.

        Args:
            values: by key.
            origin: for errors, where they come from.
            spare: drop those of them that the algorithm does not use, instead of refusing them; see `without`.

        Raises:
            ConfigError: As `from_mapping`; an error in a replaced key names `origin`.
        """
        replaced = _mixed(gathered(Mapping(origin, dict(values)), SECTION))
        dropped: list[str] = []
        if replaced.values.get("algorithm", self.algorithm) != self.algorithm:
            dropped.append(SECTION)
        if replaced.values.get("env-name", self.env_name) != self.env_name:
            dropped += _OF_ENVIRONMENT
        if replaced.values.get("backend", "ray") != "ray":
            dropped += RAY_KEYS
        before, merged = self._source.values, self._source.merged(replaced, SECTION, dropped)
        droppable = merged.spare
        if any(merged.values.get(key) != before.get(key) for key in _DECIDING):
            droppable |= before.keys() - replaced.values.keys()
        elif "evaluate-every" in replaced.values:
            droppable |= {"evaluation-tasks"} - replaced.values.keys()
        if spare:
            droppable |= replaced.values.keys()
        return self.from_mapping(replace(merged, spare=frozenset(droppable)))

    def error(self, message: str, *path: str) -> ConfigError:
        """Return an error about the value of a key, with its place: for checks that the config cannot make itself."""
        return ConfigError(f"{'.'.join(path)!r} in {self._source.place(*path)}: {message}")

    @property
    def is_recorded(self) -> bool:
        """Whether a run has recorded this config, possibly with some settings replaced since; not its algorithm."""
        return "algorithm" in self._source.spare

    @property
    def foreign(self) -> bool:
        """Whether somebody else may have written this config: it is from a file other than YAML, such as a run's."""
        return self._source.foreign

    def trusted(self) -> Self:
        """Return this config as trusted: modules that it names may be imported, which executes them."""
        config = self.model_copy()
        config._source = replace(self._source, foreign=False)
        return config

    def replaces(self, *path: str) -> bool:
        """Return whether `override` has replaced a key, or one of its parents."""
        return any(isinstance(self._source.places.get(path[:length]), str) for length in range(1, len(path) + 1))

    def named_code(self) -> list[tuple[KeyPath, str]]:
        """Return every text, with its place, that names a module that something might import, as "module:name".

        That is any text with a colon where such a name belongs; and elsewhere, as in the arguments of an environment,
        in lists and among the keys of mappings, each that names a module which is there.
        """
        values = self.model_dump(mode="json", by_alias=True, exclude={_PLACEMENT})
        return [
            (path, text)
            for path, text in _texts(values, ())
            if ":" in text and (path in NAMING_CODE or would_import(text))
        ]

    def to_json(self) -> str:
        """Write every setting that is used, defaults included, as JSON that `load_config` reads."""
        values = self.model_dump(mode="json", by_alias=True)
        values = {key: value for key, value in values.items() if key not in self._unused}
        text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        return _NOT_YAML.sub(lambda match: f"\\u{ord(match.group()):04x}", text)

    def with_sources(self) -> list[str]:
        """Return lines of YAML with every setting that is used, and a comment on where it is from.

        The first line names the file; after a value is its line there, an option, or that it is a default.
        """
        rows: list[tuple[str, tuple[str, ...]]] = []
        for key, value in json.loads(self.to_json()).items():
            if isinstance(value, dict) and value:
                rows.append((f"{key}:", ()))
                rows += [
                    (f"  {name}: {json.dumps(entry, ensure_ascii=False)}", (key, name)) for name, entry in value.items()
                ]
            else:
                rows.append((f"{key}: {json.dumps(value, ensure_ascii=False)}", (key,)))
        width = min(max(len(text) for text, _ in rows), _WIDEST)
        lines = [f"# {self._source.origin}"]
        for text, path in rows:
            section = self._source.values.get(path[0]) if path[1:] else None
            given = None if isinstance(section, dict) and path[1] not in section else self._source.given(*path)
            source = f"line {given}" if isinstance(given, int) else given or "default"
            lines.append(f"{text:<{width}}  # {source}" if path else text)
        return lines

    def flat(self) -> dict[str, Any]:
        """Return all values as in JSON, the algorithm's settings beside the others."""
        values = self.model_dump(mode="json", by_alias=True)
        settings: dict[str, Any] = values.pop(SECTION)
        return values | settings

    def differences(self, other: "Config") -> list[str]:
        """Return the used keys whose values differ; those of `algorithm-settings` one by one."""
        mine, theirs, unused = self.flat(), other.flat(), self._unused | other._unused
        return [key for key in mine | theirs if key not in unused and mine.get(key) != theirs.get(key)]


def load_config(path: str | Path) -> Config:
    """Read a config from YAML, or from a run's `config.json`, in which settings that nothing uses are ignored.

    Raises:
        ConfigError: If the file cannot be read, is not a valid config, or is not as its run wrote it; the message names
            file, line and key.
    """
    path = Path(path)
    check_sum(path)
    mapping = read_mapping(path)
    # Earlier versions recorded all settings.
    spare = mapping.values if path.name == RECORDED else ()
    return Config.from_mapping(replace(mapping, spare=frozenset(spare), foreign=path.suffix not in _OWN))


def _texts(values: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text in values, keys of mappings included, with its place."""
    if isinstance(values, str):
        yield path, values
    elif isinstance(values, dict):
        for key, value in values.items():
            if path:
                yield path, key
            yield from _texts(value, (*path, key))
    elif isinstance(values, list):
        for value in values:
            yield from _texts(value, path)


def _mixed(mapping: Mapping) -> Mapping:
    """Write several families as what they are, arguments of the environment that mixes them."""
    families, arguments = mapping.values.get("env-name"), mapping.values.get("env-kwargs")
    if not isinstance(families, list | dict):
        return mapping
    mixed = {"families": families} | ({"arguments": arguments} if arguments else {})
    return replace(mapping, values=mapping.values | {"env-name": MIXTURE, "env-kwargs": mixed})


def _checked(
    model: type[AnySettings], mapping: Mapping, more_keys: Sequence[str], explain_unknown: Callable[[str], str]
) -> AnySettings:
    """Return the settings in a mapping; `more_keys` are those that it may have had besides, for suggestions."""
    try:
        return model.model_validate(mapping.values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    raise ConfigError(_explain(errors, mapping, model, more_keys, explain_unknown))


def _explain(
    errors: list[ErrorDetails],
    mapping: Mapping,
    model: type[SettingsModel],
    more_keys: Sequence[str],
    explain_unknown: Callable[[str], str],
) -> str:
    """Describe the first error in the file in one line; unknown keys come before others."""
    for error in errors:
        if error["loc"][0] == _PLACEMENT:
            error["loc"] = error["loc"][1:]
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    lines = {path[0]: place for path, place in mapping.places.items() if isinstance(place, int) and len(path) == 1}
    error = unknown[0] if unknown else min(errors, key=lambda error: lines.get(str(error["loc"][0]), 0))
    path = [str(part) for part in error["loc"]]
    key, name = path[0], path[0]
    if error["type"] == "value_error":
        path += _path_to_infinity(error["input"]) or []
        name = ".".join(path)
    if error["type"] == "extra_forbidden":
        known = [*model.fields_by_key(), *more_keys]
        # A key that is given elsewhere may have been meant.
        where = type(mapping.given(key))
        free = [name for name in known if name not in mapping.values or type(mapping.given(name)) is not where]
        remedy = explain_unknown(key) or suggest(key, free or known)
        return f"unknown key {key!r} in {mapping.place(key)}{remedy}"
    if error["type"] == "missing":
        return f"missing key {key!r} in {mapping.origin}; add a line `{key}: ...`"
    field = model.fields_by_key()[key]
    inner = f", entry {int(path[1]) + 1}" if path[1:] and path[1].isdigit() else ""
    meaning = f" ({field.description})" if field.description else ""
    got = repr(error["input"])
    got = got if len(got) <= _SHOWN else got[:_SHOWN] + "..."
    words = _WANTED.get(error["type"])
    wanted = words.format(**error.get("ctx", {})) if words else error["msg"].removeprefix("Input should be ")
    return f"{name!r} in {mapping.place(*path)}{inner}: expected {wanted}, got {got}{meaning}"
