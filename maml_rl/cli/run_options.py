"""Options that the command lines of train.py and test.py share: the config, the code to trust, the device."""

import argparse
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maml_rl.arguments import suggest
from maml_rl.cli.console import add_trust, file_path
from maml_rl.config.catalog import ZOO, find_config, find_run, shipped_configs, zoo
from maml_rl.config.config import Config
from maml_rl.config.yaml_source import parse_value
from maml_rl.errors import ConfigError
from maml_rl.runs.trust import check_code

if TYPE_CHECKING:
    from maml_rl.experiment.build import Experiment

# torch is imported inside the functions: a spawned worker imports this module again, and must stay light.


def add_config(parser: argparse.ArgumentParser, meaning: str, default: str | None = None) -> None:
    """Add the two ways to name a config."""
    suffix = f" (default: {default})" if default else ""
    named = parser.add_argument("name", nargs="?", type=path_or_name, metavar="CONFIG", help=meaning + suffix)
    named.completer = lambda **_: [*shipped_configs()]  # type: ignore[attr-defined]
    parser.add_argument("--config", type=path_or_name, help="the same as CONFIG")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options for trust and the device."""
    add_trust(parser)
    parser.add_argument("--device", help="where the policy and the update run (default: cpu)")
    parser.add_argument("--use-cuda", action="store_true", help="the same as --device cuda")


def path_or_name(text: str) -> str:
    """Return `text`, if it may be a path; for argparse."""
    return str(file_path(text))


def run_path(text: str) -> Path:
    """Read an argument that names the folder of a run; `last` is the most recently written run below `runs`."""
    path = file_path(text)
    if text != "last" or path.exists():
        return path
    written = [file for file in Path("runs").rglob("metrics.jsonl") if file.is_file()]
    if not written:
        raise argparse.ArgumentTypeError("there is no run in the folder runs yet")
    return max(written, key=lambda file: file.stat().st_mtime_ns).parent


def chosen_config(options: argparse.Namespace, *, of_run: bool = False) -> Path | None:
    """Return the file of the given config: a path, the config of a run folder, or a shipped config.

    Args:
        options: of the command.
        of_run: whether a run is expected rather than a config.
    """
    if options.config is not None and options.name is not None:
        raise ConfigError(f"two configs are given, {options.name} and --config {options.config}; give one of them")
    given = options.config or options.name
    if given is None:
        return None
    path = find_run(given)
    if (path / "config.json").is_file():
        return path / "config.json"
    if path.suffix or path.is_symlink() or (path.exists() and not path.is_dir()):
        return path
    try:
        return find_config(given)
    except ConfigError as error:
        if path.is_dir():
            raise ConfigError(
                f"{path} is not a run folder, it has no config.json; give a run, or a YAML file"
            ) from None
        if of_run:
            from maml_rl.runs.run_folder import suggest_run

            names = [*shipped_configs(), *(f"zoo:{name}" for name in zoo())]
            hint = (suggest_run(path) if path.parent != Path() else "") or suggest(given, names)
            raise ConfigError(
                f"there is no run folder {given!r}, and no config of that name{hint} (`maml-rl zoo` lists trained "
                "policies, and `maml-rl configs` lists configs)"
            ) from error
        raise


def is_run(config_path: Path) -> bool:
    """Return whether a config is in the folder of a run that may be written to; the zoo may not."""
    return config_path.name == "config.json" and not config_path.resolve().is_relative_to(ZOO)


def refuse_untrusted_code(config: Config, options: argparse.Namespace) -> Config:
    """Return a config whose code may be imported; refuse that of another's run, unless --trust is given."""
    if options.trust:
        return config.trusted()
    check_code(config, "add --trust", samples=True)
    return config


def refuse_unused_steps(num_steps: int | None, experiment: "Experiment") -> None:
    """Refuse gradient steps on a policy that takes none."""
    if num_steps and experiment.config.method == "oracle":
        raise ConfigError(f"an oracle knows its task and is not adapted; leave out --num-steps {num_steps}")
    if num_steps is not None and not experiment.metalearner.takes_steps:
        raise ConfigError(f"{experiment.config.algorithm} does not adapt in steps; leave out --num-steps")


def overridden(config: Config, values: dict[str, Any]) -> Config:
    """Replace the settings that the command line gives, written as in a config."""
    given = {name.replace("_", "-"): value for name, value in values.items() if value is not None}
    return config.override({key: _parsed(value, f"--{key}") for key, value in given.items()})


def _parsed(value: Any, option: str) -> Any:
    """Return what an option means as YAML; a list may be written as one or as several words."""
    if isinstance(value, list):
        words = ",".join(re.split(r"[\s,]+", " ".join(value).strip()))
        value = words if words.startswith("[") else f"[{words}]"
    return parse_value(value, option) if isinstance(value, str) else value


def mapping_option(text: str, option: str, example: str) -> dict[str, Any]:
    """Read an option that must be a mapping in YAML, as the example is."""
    values = parse_value(text, option)
    if not isinstance(values, dict):
        raise ConfigError(f"{option} must be a mapping as {example!r}, got {text!r}")
    return values


def key_values(entries: Sequence[str], option: str) -> dict[str, str]:
    """Read the entries of an option, which must be KEY=VALUE, once for each key; seeds have an option of their own."""
    pairs = [entry.partition("=") for entry in entries]
    for entry, (_, equals, value) in zip(entries, pairs, strict=True):
        if not equals or not value:
            raise ConfigError(f"{option} expects KEY=VALUE, got {entry!r}")
    values = {key: value for key, _, value in pairs}
    if len(values) < len(pairs):
        raise ConfigError(f"{option} names a key twice: {' '.join(entries)}")
    if "seed" in values:
        raise ConfigError(f"{option} does not take 'seed', which an option of its own decides; leave it out")
    return values


def torch_device(options: argparse.Namespace) -> Any:
    """Return the torch device after checking that it is available."""
    if options.device is not None and options.use_cuda and not options.device.startswith("cuda"):
        raise ConfigError(f"--use-cuda contradicts --device {options.device}; give one of them")
    name = options.device if options.device is not None else "cuda" if options.use_cuda else "cpu"

    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            device = torch.device(name)
            # Some devices, such as `meta`, hold tensors but no numbers.
            torch.ones(1, device=device).sum().item()
    # Each missing backend raises a different error.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"the device {name!r} cannot be used ({reason}); leave --device out for the CPU") from None
    return device
