"""Keys of configs as pytorch-maml-rl has them: settings of MAML-TRPO beside the others, options in `config.json`."""

from dataclasses import replace
from typing import Any

from maml_rl.errors import ConfigError

# Settings of maml-trpo that are allowed at the top level.
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
# Entries of config.json besides the settings.
_SAVED_OPTIONS = ("config", "output_folder", "num_workers", "use_cuda", "device")


def gathered(mapping: Any, section: str) -> Any:
    """Return a config's `Mapping` with its flat keys moved into the section of the algorithm's settings."""
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
    """Return the remedy for an option of the command line in config.json; "" for another key."""
    if key not in _SAVED_OPTIONS:
        return ""
    return (
        f"; config.json of pytorch-maml-rl holds options of its command line: remove {', '.join(_SAVED_OPTIONS)}, or "
        "give the YAML file that it was made from"
    )
