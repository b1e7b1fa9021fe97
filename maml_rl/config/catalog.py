"""The configs and the trained policies that come with the package, found by name."""

from pathlib import Path

from maml_rl.arguments import suggest
from maml_rl.errors import ConfigError

# A link to `configs/` of the repository; where the package is installed, a copy of it.
SHIPPED = Path(__file__).parent / "shipped"
# If several configs share a name, it means the one in this folder.
_USUAL = "maml"
# Trained policies, each in a folder like that of a run.
ZOO = Path(__file__).resolve().parents[1] / "zoo"
_IN_ZOO = "zoo:"


def shipped_configs() -> dict[str, Path]:
    """Return the file of every config that comes with the package, by its shortest unique name.

    That is the name of the file, or its path below `configs/` where a config of `configs/maml/` has the same name; both
    without the ending.
    """
    paths = sorted(SHIPPED.glob("**/*.yaml"), key=lambda path: (full_name(path).split("/")[0] != _USUAL, path))
    configs: dict[str, Path] = {}
    for path in paths:
        configs[path.stem if path.stem not in configs else full_name(path)] = path
    return configs


def find_config(name: str) -> Path:
    """Return the file of a config that comes with the package.

    Args:
        name: a key of `shipped_configs`, or a path below `configs/`, with or without `.yaml`.
    """
    known = shipped_configs()
    names = known | {full_name(path): path for path in known.values()}
    wanted = name.removesuffix(".yaml")
    if wanted not in names:
        raise ConfigError(f"there is no config {name!r}{suggest(wanted, list(names))} (`maml-rl configs` lists them)")
    return names[wanted]


def zoo() -> dict[str, Path]:
    """Return the folder of every trained policy that comes with the package, by its name."""
    folders = sorted(path.parent for path in ZOO.glob("**/config.json"))
    return {name: folder for folder in folders if not (name := folder.relative_to(ZOO).as_posix()).startswith(".")}


def find_run(run: str | Path) -> Path:
    """Return the folder of a run, or of the policy NAME in the zoo for "zoo:NAME"."""
    if not str(run).startswith(_IN_ZOO):
        return Path(run)
    known, name = zoo(), str(run).removeprefix(_IN_ZOO)
    if name not in known:
        raise ConfigError(f"the zoo has no policy {name!r}{suggest(name, list(known))} (`maml-rl zoo` lists them)")
    return known[name]


def name_of(path: Path) -> str:
    """Return the name for runs of a config: its path below `configs/`, or the name of the user's own file."""
    file = path.resolve()
    if file.is_relative_to(ZOO):
        return f"zoo/{file.parent.relative_to(ZOO).as_posix()}"
    shipped = SHIPPED.resolve()
    return full_name(SHIPPED / file.relative_to(shipped)) if file.is_relative_to(shipped) else path.stem


def full_name(path: Path) -> str:
    """Return the path below `configs/` of a file that `shipped_configs` has, without the ending."""
    return path.relative_to(SHIPPED).with_suffix("").as_posix()
