"""The identity of a run: a hash of everything that decides its episodes and updates, except for the seed.

What is kept of a run, as its checkpoints, an evaluation or a comparison, is used again only under the identity that it
was made with. A name of a folder or of a config says nothing about that. Nor is it compared with runs of another
problem.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maml_rl.config.config import SECTION, Config
from maml_rl.config.placement import PLACEMENT_KEYS
from maml_rl.envs import FAMILIES
from maml_rl.errors import ConfigError
from maml_rl.foreign_files import read_regular
from maml_rl.named_modules import find_named
from maml_rl.results.scales import readable_value
from maml_rl.runs.system import package_versions

if TYPE_CHECKING:
    # Lists of configs do not wait for it.
    from torch import Tensor

# What does not decide a single run's episodes: the seed tells runs apart, and the length how far they went. Where
# workers are is of no importance, unless they are not waited for.
NOT_THE_EXPERIMENT = {
    "seed",
    "num-batches",
    "checkpoint-every",
    "keep-checkpoints",
    "evaluate-every",
    *(key for key in PLACEMENT_KEYS if key != "recv-timeout"),
}
# Of a folder of recorded histories, the file that has the hashes of all others.
_INDEX = Path("recording", "recording.json")
_PACKAGE = "maml-rl"
# Files that only training reads, of which a policy, and an evaluation of it, know nothing.
_OF_TRAINING = {"evaluation-tasks", "histories"}


def identity(config: Config, system: Mapping[str, Any] | None = None) -> str:
    """Return the identity of a run of a config.

    Args:
        config: of the run, as its folder has it; see `Experiment.config`.
        system: what the run's folder says of where it was trained; None for a run that begins now.
    """
    if system is None:
        system = {"packages": package_versions(), "sources": sources(config)}
    values = config.model_dump(mode="json", by_alias=True)
    # Runs of earlier versions may have recorded tasks of no evaluations.
    without = NOT_THE_EXPERIMENT | ({"evaluation-tasks"} if config.evaluate_every is None else set())
    usual = Config.model_validate({"env-name": config.env_name}).model_dump(mode="json", by_alias=True)
    facts = {
        # What a config does not use has its default, or is not recorded; all of the algorithm's settings are.
        "config": {
            key: value
            for key, value in values.items()
            if key not in without and (key in ("env-name", SECTION) or value != usual[key])
        },
        "version": (system.get("packages") or {}).get(_PACKAGE),
        "sources": system.get("sources") or {},
        # The parameters that it began with, if those are another run's.
        "init": system.get("init"),
    }
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def identity_now(config: Config, system: Mapping[str, Any]) -> str:
    """Return the identity of what a run's policy does now: that of the run, unless a file that it uses has changed."""
    return identity(config, {**system, "sources": sources_now(config, system)})


def sources_now(config: Config, system: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of a run as its policy uses them now; those of its training, or missing, are as it began."""
    began, now = system.get("sources") or {}, sources(config)
    return {key: digest if key in _OF_TRAINING else now.get(key, digest) for key, digest in began.items()}


def sources(config: Config) -> dict[str, str]:
    """Return the SHA-256 of the files that a config names, by what names them: code, tasks and recorded histories."""
    files: dict[str, Path] = {}
    for place, name in config.named_code():
        module = name.partition(":")[0]
        try:
            spec = find_named(module.partition(".")[0])
        except (ImportError, ValueError):
            continue
        if spec is None or spec.origin is None:
            continue
        package, inner = Path(spec.origin), module.split(".")[1:]
        # Of a module in a package, its own file.
        files[".".join(place)] = package.parent.joinpath(*inner).with_suffix(".py") if inner else package
    for key, value in _texts(config.flat()):
        path = Path(value)
        files[key] = path / _INDEX if path.is_dir() else path
    digests = {}
    for key, path in files.items():
        with suppress(OSError, ValueError):
            digests[key] = sha256(read_regular(path)).hexdigest()
    return digests


def parameters_digest(tensors: Mapping[str, "Tensor"]) -> str:
    """Return the SHA-256 of parameters by name, whatever their order."""
    digest = sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _texts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the texts among some values, and among mappings in them, that could be paths, by their keys."""
    paths = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            paths += [(f"{key}.{inner}", text) for inner, text in _texts(value)]
        elif isinstance(value, str) and ("/" in value or "." in value):
            paths.append((key, value))
    return paths


def problem_of(config: Config) -> dict[str, Any]:
    """Return the family, its arguments and its time limit, by their keys; the family's own limit where it is known."""
    steps, family = config.max_episode_steps, FAMILIES.get(config.env_name)
    if steps is None and family is not None and "max_episode_steps" not in config.env_kwargs:
        steps = family.max_episode_steps
    return {"env-name": config.env_name, "env-kwargs": config.env_kwargs, "max-episode-steps": steps}


def refuse_different_problems(configs: Sequence[Config]) -> None:
    """Refuse configs whose tasks differ, and name the settings that make them one problem."""
    differing: dict[str, list[str]] = {}
    for key in problem_of(configs[0]):
        values = list(dict.fromkeys(readable_value(problem_of(config)[key]) for config in configs))
        if len(values) > 1:
            differing[key] = values
    if differing:
        what = ", ".join(f"{key!r} is {' and '.join(each)}" for key, each in differing.items())
        settings = {key: json.dumps(problem_of(configs[0])[key]) for key in differing}
        given = " ".join(shlex.quote(f"{key}={value}") for key, value in settings.items())
        raise ConfigError(
            f"{what}: these are different problems; compare runs of one, or train all configs on that of the first: "
            f"--set {given}"
        )
