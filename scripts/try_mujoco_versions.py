"""Print which versions of MuJoCo and of packages with environments work together, as a table; needs uv.

`python scripts/try_mujoco_versions.py 3.14.0 3.17.0` makes an environment for each version, installs the newest
release of each package that allows it, and steps environments of the package. The table is in
docs/environments-of-others.md.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

_VERSIONS = ("3.3.7", "3.6.0", "3.8.1", "3.9.0", "3.10.0", "3.11.0", "3.12.0", "3.13.0", "3.14.0", "3.17.0", "4.0.0")
# By package: what is installed, the module that registers its environments, and those of each column.
_PACKAGES = {
    "gymnasium": ("gymnasium[mujoco]", "gymnasium", {"Gymnasium": ("HalfCheetah-v5",)}),
    # Shimmy imports packaging, which it does not ask for.
    "dm-control": ("shimmy[dm-control] packaging", "shimmy", {"dm_control": ("dm_control/cartpole-swingup-v0",)}),
    "gymnasium-robotics": (
        "gymnasium-robotics",
        "gymnasium_robotics",
        {
            "Gymnasium-Robotics: Fetch, hands, kitchen": ("FetchReach-v4", "HandReach-v3", "FrankaKitchen-v1"),
            "Gymnasium-Robotics: mazes, Adroit": ("PointMaze_UMaze-v3", "AdroitHandDoor-v1"),
        },
    ),
}
_STEPS = """
import gymnasium, {module}
for env_id in {env_ids}:
    env = gymnasium.make(env_id)
    env.reset(seed=0)
    for _ in range(5):
        env.step(env.action_space.sample())
    env.close()
"""


def _run(*command: str) -> str:
    """Run a command; return the last line of its error, or "" if it succeeds."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    return lines[-1] if ended.returncode else ""


def _try(version: str, package: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Install a package beside a version of MuJoCo; return the package's version, and the error of each column."""
    required, module, columns = _PACKAGES[package]
    python = str(folder / "bin" / "python")
    _run("uv", "venv", "--quiet", "--clear", "--python", "3.11", str(folder))
    if error := _run("uv", "pip", "install", "--quiet", "--python", python, *required.split(), f"mujoco=={version}"):
        return "", dict.fromkeys(columns, error)
    asked = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    return found, {
        column: _run(python, "-W", "ignore", "-c", _STEPS.format(module=module, env_ids=env_ids))
        for column, env_ids in columns.items()
    }


def main(versions: tuple[str, ...]) -> None:
    """Print a row for each version: the package's version, or that it fails; the errors go to standard error."""
    columns = [column for *_, columns in _PACKAGES.values() for column in columns]
    print(f"| MuJoCo | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for version in versions:
            cells = []
            for package in _PACKAGES:
                found, errors = _try(version, package, Path(folder))
                for column, error in errors.items():
                    cells.append(f"{found} fails" if error else found)
                    if error:
                        print(f"MuJoCo {version}, {package} {found}, {column}: {error}", file=sys.stderr, flush=True)
            print(f"| {version} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or _VERSIONS)
