"""Plans of trainings: methods on families, each with a config of this package."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from maml_rl.arguments import suggest
from maml_rl.config import Config, SettingsModel, load_config
from maml_rl.config.catalog import find_config
from maml_rl.config.settings import Count
from maml_rl.config.yaml_source import read_mapping
from maml_rl.envs import FAMILIES
from maml_rl.envs.meta_env import ValueRanges
from maml_rl.errors import ConfigError
from maml_rl.foreign_files import checked
from maml_rl.metalearners.registry import algorithm_of
from maml_rl.results.evaluation import possible_ranges

ROOT = Path(__file__).resolve().parents[2]
# The plan whose page is docs/results/long.md.
LONG = ROOT / "benchmarks" / "learning" / "plans" / "long.yaml"
_ORIGIN = "the plan of this benchmark"
# Checkpoints of a run of a plan's file, which may be carried from machine to machine.
_KEPT = 2


@dataclass(frozen=True, slots=True)
class Family:
    """A family, and the length of its trainings.

    Attributes:
        name: of its folder in `docs/results`.
        title: for readers.
        config: file, relative to `configs/maml`; other algorithms may have one of the same name.
        steps: environment steps of a whole training, with any method.
        evaluations: their number, spread evenly over environment steps, without that of the initial policy.
        changes: of the config, for every method.
        algorithm_changes: of the config, by the name of the method or, where it is missing, of the algorithm.
        methods: the names of those that are on the page, and trained here unless others are asked for; if empty, all.
        configs: names of shipped configs, by the names of methods whose config does not have the name of `config`.
        minutes: that one training is expected to take, by the names of methods.
        keep_checkpoints: the newest of a run, and the best; None for all.
    """

    name: str
    title: str
    config: str
    steps: int
    evaluations: int = 10
    changes: Mapping[str, Any] = field(default_factory=dict)
    algorithm_changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    configs: Mapping[str, str] = field(default_factory=dict)
    minutes: Mapping[str, float] = field(default_factory=dict)
    keep_checkpoints: int | None = None

    def ranges(self) -> ValueRanges:
        """Return the ranges of returns and infos, see `Evaluation`, without making an environment."""
        config = load_config(ROOT / "configs" / "maml" / self.config).override(self.changes, _ORIGIN)
        spec = FAMILIES[config.env_name]
        declared = getattr(import_module(spec.module), f"{spec.name}VectorEnv").value_ranges
        return possible_ranges(declared, config.max_episode_steps)


@dataclass(frozen=True, slots=True)
class Method:
    """A method that is trained.

    Attributes:
        name: of its CSV file.
        configs: folder of `configs` with its configs, named as its algorithm; where the folder has none for a family,
            that of MAML-TRPO is used with this algorithm and its default settings.
        changes: of the config.
        trained: whether it is trained; a random initialization is not.
        steps: environment steps of a whole training, if it differs from the family's: learners from a replay make many
            updates per step.
    """

    name: str
    configs: str = "maml"
    changes: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = True
    steps: int | None = None

    def points(self, family: Family) -> list[int]:
        """Return the iterations that are evaluated: the last before each of equal shares of environment steps."""
        if not self.trained:
            return [0]
        whole = env_steps_of(self._changed(family)) * family.evaluations
        return [number * (self.steps or family.steps) // whole for number in range(family.evaluations + 1)]

    def config(self, family: Family, seed: int) -> Config:
        """Return the config of one training.

        It ends after the last iteration that is evaluated.
        """
        points = self.points(family)
        every = max(points[-1] // family.evaluations, 1)
        return self._changed(family).override(
            {
                "seed": seed,
                "num-batches": max(points[-1], 1),
                "checkpoint-every": every,
                "keep-checkpoints": family.keep_checkpoints or points[-1] + 1,
            },
            _ORIGIN,
        )

    def settings(self, family: Family) -> str:
        """Return a digest of what the trainings of a family have set, except for their seeds and lengths."""
        config = self._changed(family).override({"seed": 0, "num-batches": 1}, _ORIGIN)
        # Without defaults, so that a new setting of the package changes nothing here.
        content = config.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def _changed(self, family: Family) -> Config:
        of_maml = ROOT / "configs" / "maml" / family.config
        own = of_maml if self.configs == "maml" else ROOT / "configs" / self.configs / of_maml.name
        if self.name in family.configs:
            own = find_config(family.configs[self.name])
        config = load_config(own) if own.is_file() else load_config(of_maml).override({"algorithm": self.configs})
        # Some methods of a family do not use what others have in common.
        config = config.override(family.changes, _ORIGIN, spare=True).override(self.changes, _ORIGIN)
        own_changes = family.algorithm_changes.get(self.name, family.algorithm_changes.get(config.algorithm, {}))
        return config.override(dict(own_changes), _ORIGIN, spare=True)


def env_steps_of(config: Config) -> int:
    """Return the environment steps of one meta-update, if no episode ends before its horizon."""
    assert config.max_episode_steps is not None
    learner, *_ = algorithm_of(config)
    phases = 1 if learner.whole_trials else 1 + config.training_steps
    return config.meta_batch_size * config.fast_batch_size * config.max_episode_steps * phases


@dataclass(frozen=True, slots=True)
class Plan:
    """Methods on families.

    Attributes:
        page: shows the results; tasks and CSV files are in folders beside it, one a family, charts in `../images`.
        seeds: by the name of a family; the seeds of training.
        families: by name.
        methods: by name; the order is that of tables.
        timed: whether trainings are carried out one after the other, in the order of the plan, rather than all of them
            interleaved. Their minutes are then in the tables, and under a second chart.
    """

    page: Path
    families: Mapping[str, Family]
    methods: Mapping[str, Method]
    seeds: Mapping[str, tuple[int, ...]]
    timed: bool = False

    def folder(self, family: Family) -> Path:
        """Return where the tasks and the CSV files of a family are."""
        return self.page.parent / family.name

    def methods_of(self, family: Family) -> Sequence[str]:
        """Return the names of the methods that are on the page of a family and trained on it."""
        return family.methods or tuple(self.methods)


class _FamilyEntry(SettingsModel):
    """A family of a plan's file; see `Family`. Only `methods` are trained on it."""

    name: Annotated[str, Field(pattern=r"[a-z0-9][a-z0-9-]*")]
    title: str
    config: str
    methods: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    changes: dict[str, Any] = Field(default_factory=dict)
    algorithm_changes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    configs: dict[str, str] = Field(default_factory=dict)
    minutes: dict[str, Annotated[float, Field(gt=0, strict=False)]] = Field(default_factory=dict)


class _MethodEntry(SettingsModel):
    """A method of a plan's file; see `Method`."""

    name: Annotated[str, Field(pattern=r"[a-z0-9][a-z0-9-]*")]
    configs: str
    changes: dict[str, Any] = Field(default_factory=dict)
    steps: Count | None = None


class _PlanFile(SettingsModel):
    """A plan's file: trainings in the order of families, and in each of its methods; see `Plan`."""

    page: str
    seeds: Annotated[tuple[int, ...], Field(strict=False, min_length=1)]
    steps: Count
    evaluations: Count = 10
    methods: list[_MethodEntry]
    families: list[_FamilyEntry]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        methods = [method.name for method in self.methods]
        for names in (methods, [family.name for family in self.families]):
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{twice[0]!r} is given twice")
        for family in self.families:
            for name in (*family.methods, *family.configs, *family.minutes, *family.algorithm_changes):
                if name not in methods:
                    raise ValueError(f"{family.name} names the method {name!r}{suggest(name, methods)}")
        return self


def read_plan(path: Path) -> Plan:
    """Return the plan in a YAML file; its page is relative to the file.

    Raises:
        ConfigError: If the file is not a plan, or a training's config is wrong; the message names the place.
    """
    try:
        content = checked(_PlanFile, read_mapping(path).values)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{path} is not a plan: {error}") from None
    methods = named(*(Method(**dict(entry)) for entry in content.methods))
    common: dict[str, Any] = {"steps": content.steps, "evaluations": content.evaluations, "keep_checkpoints": _KEPT}
    families = named(*(Family(**dict(entry), **common) for entry in content.families))
    plan = Plan((path.parent / content.page).resolve(), families, methods, dict.fromkeys(families, content.seeds), True)
    if not plan.page.is_file():
        raise ConfigError(f"{path}: there is no page {plan.page}")
    for family in plan.families.values():
        for name in family.methods:
            try:
                algorithm_of(plan.methods[name].config(family, content.seeds[0]))
            except ConfigError as error:
                raise ConfigError(f"{path}, {family.name}, {name}: {error}") from None
    return plan


def named(*entries: Any) -> dict[str, Any]:
    """Return families or methods by their names."""
    return {entry.name: entry for entry in entries}


# MAML-TRPO has the default experiment, whose file this is. The actions of all others are the moves themselves, with
# step sizes that suit them.
_GOALS = {"low": -0.5, "high": 0.5}
_STEPS_OF_MOVES = {"fast-lr": 0.1, "halve-step-size": "never"}
_REFERENCES_OF_MOVES = {**_STEPS_OF_MOVES, "inner-loss": "log-probability"}
NAVIGATION = Family(
    "2d-navigation",
    "2D navigation",
    "2d-navigation.yaml",
    5_000_000,
    changes={"env-kwargs": _GOALS, "output-scale": 1.0, "evaluate-every": None},
    algorithm_changes={
        "maml-trpo": {"env-kwargs": {**_GOALS, "normalization_scale": 1.0}, "output-scale": 0.01},
        **dict.fromkeys(("pretrain", "oracle", "random"), _REFERENCES_OF_MOVES),
        "rl2": _STEPS_OF_MOVES,
    },
)
# Trials of two episodes: as many episodes in all as 20 tasks with 10 before and 10 after a step.
RL2_OF_400_EPISODES = {"meta-batch-size": 200}
HALFCHEETAH_DIR = Family(
    "halfcheetah-dir",
    "HalfCheetahDir, horizon 100",
    "halfcheetah-dir.yaml",
    4_000_000,
    algorithm_changes={"rl2": RL2_OF_400_EPISODES, "rl2-control": {}},
)

TRPO = Method("maml-trpo")
PRETRAIN = Method("pretrain", changes={"method": "pretrain"})
ORACLE = Method("oracle", changes={"method": "oracle"})
RANDOM = Method("random", trained=False)
ALGORITHMS = (
    "promp",
    "maml-ppo",
    "maml-vpg",
    "e-maml",
    "dice-maml",
    "reptile",
    "anil",
    "meta-sgd",
    "cavia",
)

COMPARISON = Plan(
    ROOT / "docs" / "results" / "comparison.md",
    named(NAVIGATION, HALFCHEETAH_DIR),
    named(TRPO, *(Method(name, name) for name in ALGORITHMS), PRETRAIN, ORACLE, RANDOM),
    {NAVIGATION.name: (0, 1, 2), HALFCHEETAH_DIR.name: (0, 1, 2)},
)
