import json
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from maml_rl.runs import system


def repository(folder: Path) -> str:
    """Make a repository with the package in it, and return its commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    (folder / "maml_rl").mkdir(parents=True)
    (folder / "maml_rl" / "__init__.py").write_text("")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    return git("rev-parse", "HEAD")


def test_system_is_plain_data_with_the_processor_and_the_versions() -> None:
    found = system.describe_system()
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == {"commit", "cpu", "cores", "platform", "python", "packages", "command"}
    assert found["cpu"]
    assert found["cores"] >= 1
    assert {"torch", "numpy", "gymnasium"} <= found["packages"].keys()


@pytest.mark.parametrize(
    ("module", "arguments", "command"),
    [
        (None, ["/usr/bin/maml-rl", "train", "a b"], "maml-rl train 'a b'"),
        ("maml_rl.__main__", ["/x/maml_rl/__main__.py", "train", "nav"], "python -m maml_rl train nav"),
        ("benchmarks.suite", ["/x/benchmarks/suite.py", "--train"], "python -m benchmarks.suite --train"),
        (None, ["/x/train.py", "--seed", "3"], "python train.py --seed 3"),
        (None, ["-c"], None),
        (None, [""], None),
    ],
)
def test_recorded_command_can_be_typed_again(
    module: str | None, arguments: list[str], command: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = None if module is None else ModuleSpec(module, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr("sys.argv", arguments)
    assert system.describe_system()["command"] == command


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_is_that_of_the_code_with_a_mark_of_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = repository(tmp_path / "clone")
    monkeypatch.setattr(system, "_PACKAGE_FOLDER", tmp_path / "clone" / "maml_rl")
    assert system.describe_system()["commit"] == commit[:12]
    (tmp_path / "clone" / "maml_rl" / "__init__.py").write_text("changed = True")
    assert system.describe_system()["commit"] == f"{commit[:12]}-dirty"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_package_that_is_installed_below_another_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(tmp_path / "other")
    installed = tmp_path / "other" / ".venv" / "maml_rl"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    monkeypatch.setattr(system, "_PACKAGE_FOLDER", installed)
    assert system.describe_system()["commit"] is None
    # Nor has one on a machine without git.
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    assert system.describe_system()["commit"] is None
