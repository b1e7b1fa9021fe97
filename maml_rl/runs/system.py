"""The system of a run: the commit of the code, the processor, the versions of the packages."""

import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from maml_rl.machine import usable_cores

_PACKAGES = ("maml-rl", "torch", "numpy", "gymnasium", "mujoco", "mjbatch")
_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]


def describe_system() -> dict[str, Any]:
    """Return the facts that may explain a result or a time, as JSON values.

    Returns:
        "commit" of the package's own repository, with "-dirty" where it was changed, None outside of one; "cpu" and
        the number of its usable "cores"; "platform"; "python"; the versions of the "packages"; and the "command" of
        this process, None for code that was typed in.
    """
    return {
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": usable_cores(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": package_versions(),
        "command": _command(),
    }


def without_folders(command: str) -> str:
    """Return a command with only the last part of every absolute path, since other machines have other folders."""
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in shlex.split(command))


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that results may depend on, of those that are installed."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _command() -> str | None:
    program = Path(sys.argv[0])
    # Python sets it where a module was run by `python -m`.
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        words = ["python", "-m", spec.name.removesuffix(".__main__")]
    elif program.suffix == ".py":
        words = ["python", program.name]
    else:
        words = [program.name]
    return None if words[0] in ("", "-c") else shlex.join([*words, *sys.argv[1:]])


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_PACKAGE_FOLDER), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # A package below another repository, in its virtual environment say, is not of that repository's commit.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in reversed([line.partition(":") for line in lines])}
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    # In a virtual machine the name may be only that of the maker.
    numbers = [f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    return facts["model name"] + (f" ({', '.join(numbers)})" if numbers else "")
