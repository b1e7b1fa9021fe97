"""Print which versions of MuJoCo and of packages with environments work together, as a table; needs uv.

`python scripts/try_mujoco_versions.py 3.14.0 3.17.0` makes an environment for each version, installs the newest
release of each package that allows it, and steps environments of the package. The table is in
docs/environments-of-others.md.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

_VERSIONS = ("3.3.7", "3.6.0", "3.9.0", "3.14.0", "3.17.0", "4.0.0")
# By package: what is installed, and the code that makes each of its environments.
_PACKAGES = {
    "gymnasium": ("gymnasium[mujoco]", {"HalfCheetah": "import gymnasium; env = gymnasium.make('HalfCheetah-v5')"}),
    # Shimmy imports packaging, which it does not ask for.
    "dm-control": (
        "shimmy[dm-control] packaging",
        {
            "suite": "import gymnasium, shimmy; env = gymnasium.make('dm_control/cartpole-swingup-v0')",
        },
    ),
    "gymnasium-robotics": (
        "gymnasium-robotics",
        {
            name: f"import gymnasium, gymnasium_robotics; env = gymnasium.make('{env_id}')"
            for name, env_id in {
                "Fetch": "FetchReach-v4",
                "hands": "HandReach-v3",
                "mazes": "PointMaze_UMaze-v3",
                "Adroit": "AdroitHandDoor-v1",
                "kitchen": "FrankaKitchen-v1",
            }.items()
        },
    ),
}
_STEPS = "\nenv.reset(seed=0)\nfor _ in range(5):\n    env.step(env.action_space.sample())\nenv.close()\n"


def _run(*command: str) -> str:
    """Run a command; return the last line of its error, or "" if it succeeds."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    lines = ended.stderr.strip().splitlines() or [""]
    return lines[-1] if ended.returncode else ""


def _try(version: str, package: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Install a package beside a version of MuJoCo; return the package's version, and each environment's error."""
    requirement, environments = _PACKAGES[package]
    python = str(folder / "bin" / "python")
    _run("uv", "venv", "--quiet", "--clear", "--python", "3.11", str(folder))
    if error := _run("uv", "pip", "install", "--quiet", "--python", python, *requirement.split(), f"mujoco=={version}"):
        return "", dict.fromkeys(environments, error)
    asked = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    return found, {name: _run(python, "-W", "ignore", "-c", code + _STEPS) for name, code in environments.items()}


def main(versions: tuple[str, ...]) -> None:
    """Print a row for each version; "no" where an environment fails, with the errors below."""
    names = [(package, name) for package, (_, environments) in _PACKAGES.items() for name in environments]
    print("| mujoco | " + " | ".join(f"{package}: {name}" for package, name in names) + " |")
    print("|---" * (len(names) + 1) + "|")
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for version in versions:
            cells = []
            for package in _PACKAGES:
                found, errors = _try(version, package, Path(folder))
                for name, error in errors.items():
                    cells.append(f"no, {found}" if error else found)
                    failures += [f"mujoco {version}, {package} {found}, {name}: {error}"] if error else []
            print(f"| {version} | {' | '.join(cells)} |", flush=True)
    print(*failures, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or _VERSIONS)
