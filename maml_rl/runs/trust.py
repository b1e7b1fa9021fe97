"""Trust in a run's code: modules that are not installed are imported only for a run that the user trusts.

Another user's run may name any module, and importing a module executes it. Two kinds of code are trusted without
asking: installed code, and code that this user has trained with before. Training records such a module and its file
below the user's home folder, where no run can write. So a module of the same name in a folder that came with the run
counts as different code.
"""

import hashlib
import json
import logging
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from maml_rl.config.config import NAMING_CODE, Config
from maml_rl.config.yaml_source import Mapping as Source
from maml_rl.errors import ConfigError
from maml_rl.named_modules import find_named, would_import
from maml_rl.runs.atomic_files import replace_file

_PACKAGE = "maml_rl"
# Settings of the place where a run samples: a cluster, and the code that its actors execute first.
_CLUSTER, _RUNTIME_ENV = "ray-address", "ray-runtime-env"
_SITE_NAMES = "site-packages", "dist-packages"

logger = logging.getLogger(__name__)


def unknown_code(config: Config, *, samples: bool = False, known: bool = True) -> list[tuple[tuple[str, ...], str]]:
    """Return, with its place, what a foreign config names that is neither installed nor known from own training.

    Values that `Config.override` has replaced come from the caller, and do not count.

    Args:
        config: of a run.
        samples: see `check_code`.
        known: whether code that is installed or known may be left out where it is the value of a key for code.
    """
    if not config.foreign:
        return []
    return [
        (path, value)
        for path, value in (_named(config) if samples else config.named_code())
        if not config.replaces(*path) and not ((known or path not in NAMING_CODE) and _is_known(path[0], value))
    ]


def check_code(config: Config, remedy: str, *, samples: bool = False) -> None:
    """Refuse a config that names code which `unknown_code` returns.

    Args:
        config: of the run.
        remedy: how the caller declares the run as trusted.
        samples: whether the run's own cluster will sample: a Ray cluster executes code in all its clients.
    """
    if unknown := unknown_code(config, samples=samples):
        refuse_missing(config, unknown)
        path, value = unknown[0]
        also = "".join(f" and {other!r}" for _, other in unknown[1:])
        what = {_CLUSTER: "a cluster", _RUNTIME_ENV: "a runtime_env"}.get(path[0], "code that is not installed, and")
        raise config.error(
            f"{value!r}{also} is {what} that you have not trained with; {remedy} if you trust who made the run, as "
            "this executes it",
            *path,
        )


def refuse_missing(config: Config, unknown: Sequence[tuple[tuple[str, ...], str]]) -> None:
    """Refuse what `unknown_code` returns if its first module is not found, which trust would not help."""
    for path, value in unknown[:1]:
        if path[0] not in (_CLUSTER, _RUNTIME_ENV) and not would_import(value):
            raise config.error(
                f"the module of {value!r} is not found; go to its folder, or put that into PYTHONPATH", *path
            )


def check_family(env_id: str, env_kwargs: Mapping[str, Any], origin: str) -> None:
    """Refuse the family of somebody's recording that names code which is neither installed, known nor imported already.

    Args:
        env_id: of the family.
        env_kwargs: its arguments.
        origin: where they come from, for the error.
    """
    recorded = Source(origin, {"env-name": env_id, "env-kwargs": dict(env_kwargs)}, foreign=True)
    for path, value in Config.from_mapping(recorded).named_code():
        module = value.rpartition(":")[0]
        if module not in sys.modules and not _is_known(path[0], value):
            raise ConfigError(
                f"{origin} names {value!r}, code that is not installed, and that you have not trained with; import the "
                f"module before, as `import {module}`, if you trust who made this, as importing executes it"
            )


def remember_code(config: Config) -> None:
    """Record that this user trains with the code that a config names: from now on it is trusted."""
    for (key, *_), value in _named(config):
        entry = _entry(key, value)
        if entry is None or _is_known(key, value):
            continue
        file = _file(entry)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, entry.encode())
        except OSError as error:
            logger.warning(
                "cannot write %s (%s), so this run can be loaded, tested and resumed only with --trust",
                file,
                error.strerror,
            )


def _named(config: Config) -> list[tuple[tuple[str, ...], str]]:
    """Return, with its place, what a config names: code, the cluster that samples, the runtime_env of its actors."""
    named = config.named_code()
    placement = config.placement
    if placement.backend == "ray":
        env = placement.ray_runtime_env
        sampled = {_CLUSTER: placement.ray_address, _RUNTIME_ENV: json.dumps(env, sort_keys=True) if env else None}
        named += [((key,), value) for key, value in sampled.items() if value is not None]
    return named


def _is_known(key: str, value: str) -> bool:
    if key not in (_CLUSTER, _RUNTIME_ENV) and _is_installed(value.partition(":")[0].partition(".")[0]):
        return True
    entry = _entry(key, value)
    return entry is not None and _file(entry).is_file()


def _entry(key: str, value: str) -> str | None:
    """Return the record of a module, a cluster or a runtime_env; None for a module that is not found."""
    if key in (_CLUSTER, _RUNTIME_ENV):
        return json.dumps({key: value})
    module = value.partition(":")[0]
    places = _places(module.partition(".")[0])
    return json.dumps({"module": module, "from": list(map(str, places))}) if places else None


def _file(entry: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "maml-rl", "trained-with", f"{hashlib.sha256(entry.encode()).hexdigest()}.json")


def _places(package: str) -> list[Path]:
    """Return where a module without dots is, or would be, imported from: its file, or its folders; never import it."""
    loaded = sys.modules.get(package)
    if loaded is not None:
        folders, file = getattr(loaded, "__path__", None), getattr(loaded, "__file__", None)
    else:
        try:
            spec = find_named(package) if package else None
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            return []
        folders, file = spec.submodule_search_locations, spec.origin if spec.has_location else None
    return [Path(place).resolve() for place in (folders if folders is not None else [file]) if place]


def _is_installed(package: str) -> bool:
    """Return whether a module without dots is where packages are installed; Python's own modules do not."""
    if package == _PACKAGE:
        return True
    # The program itself is not installed, even where its file is.
    places, sites = [] if package == "__main__" else _places(package), _sites()
    return bool(places) and (
        all(any(place.is_relative_to(folder) for folder in sites) for place in places)
        or any(all(place.is_relative_to(folder) for place in places) for folder in _editable(package, sites))
    )


def _sites() -> list[Path]:
    """Return the folders of installed packages: this interpreter's, and those of other installations on its path."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    # A run may come in a folder of such a name, which is on the path while it is the current one.
    here = Path.cwd()
    others = [folder for folder in map(Path, sys.path) if folder.name in _SITE_NAMES and folder.resolve() != here]
    return list({folder.resolve(): None for folder in [*map(Path, folders), *others]})


def _editable(package: str, sites: list[Path]) -> Iterator[Path]:
    """Yield the folders of the editable installs that claim to have a package, found only in `sites`."""
    for distribution in distributions(path=list(map(str, sites))):
        if package not in (distribution.read_text("top_level.txt") or "").split():
            continue
        with suppress(ValueError, KeyError, TypeError):
            origin = json.loads(distribution.read_text("direct_url.json") or "{}")
            if origin["dir_info"]["editable"] and origin["url"].startswith("file:"):
                yield Path(unquote(urlsplit(origin["url"]).path)).resolve()
