"""`make train` and `make test` on machines of all kinds, with a fake Python that only records its calls."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Copies itself instead of making an environment. $refused has words of commands that fail.
PYTHON = """#!/bin/sh
echo "$*" >> "$log"
for word in $refused; do
    case "$*" in *"$word"*) exit 1 ;; esac
done
case "$*" in
    '-m venv'*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
esac
"""

pytestmark = [
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make; on Debian: sudo apt-get install make"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for the NVIDIA driver of Linux"),
]
Make = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Runs make; returns its exit code, the calls of the Python, and the lines of standard error."""
    python = tmp_path / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(target: str, refused: str = "", **variables: str) -> tuple[int, list[str], list[str]]:
        log = tmp_path / "log"
        log.write_text("")
        environment = {**os.environ, "log": str(log), "refused": refused}
        # The options of a make that runs these tests are not for this one.
        for name in ("MAKEFLAGS", "ARGS", "EXTRAS", "VENV"):
            environment.pop(name, None)
        command = ["make", target, f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
        command += [f"{name}={value}" for name, value in variables.items()]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        errors = [line for line in ended.stderr.splitlines() if not line.startswith("make")]
        return ended.returncode, log.read_text().splitlines(), errors

    return run


def has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def test_training_installs_what_it_needs_and_tests_add_the_rest(make: Make) -> None:
    code, told, errors = make("train")
    assert (code, errors) == (0, [])
    assert told[-1] == "train.py"
    assert told[-2].endswith("--editable .[fast,report,tensorboard]")
    code, told, _ = make("test")
    assert code == 0
    assert not any("-m venv" in line for line in told)
    assert told[-2].endswith("--editable .[fast,report,tensorboard,docs,dev,gpu]")
    assert told[-1].startswith("-m pytest")
    code, told, _ = make("train")
    assert told == ["train.py"]


def test_ray_is_added_to_the_environment_of_the_other_tests(make: Make) -> None:
    code, told, errors = make("test-ray")
    assert (code, errors) == (0, [])
    assert sum(line.startswith("-m venv --clear") for line in told) == 1
    assert told[-3].endswith("--editable .[tune]")
    assert told[-2:] == ["-c import ray", told[-1]]
    assert "-m ray and not nightly" in told[-1]
    code, told, _ = make("test")
    assert code == 0
    assert [line.partition(" --")[0] for line in told] == ["-m pytest"]


def test_packages_of_others_have_an_environment_and_a_lock_of_their_own(make: Make, tmp_path: Path) -> None:
    code, told, errors = make("test-others", OTHERS_VENV=str(tmp_path / "others"))
    assert (code, errors) == (0, [])
    assert told[-3].startswith("-m pip install --quiet --constraint constraints-others.txt --editable .[report,test]")
    assert told[-3].endswith("--requirement tests/others/requirements.txt")
    assert told[-2:] == ["-c import minigrid", told[-1]]
    assert "-m others and not nightly" in told[-1]
    assert not (tmp_path / "venv").exists()
    _, told, _ = make("test-others", OTHERS_VENV=str(tmp_path / "others"))
    assert [line.partition(" --")[0] for line in told] == ["-c import minigrid", "-m pytest"]


@pytest.mark.parametrize("refused", ["torch==", "--editable"])
def test_interrupted_set_up_starts_again(make: Make, refused: str) -> None:
    code, told, _ = make("train", refused)
    assert code != 0
    assert "train.py" not in told
    code, told, _ = make("train")
    assert code == 0
    assert any(line.startswith("-m venv --clear") for line in told)


@pytest.mark.parametrize(
    ("refused", "words"),
    [("version_info", "needs Python 3.11 to 3.14"), ("ensurepip", "sudo apt-get install python3-venv")],
)
def test_unsuitable_python_is_one_line_with_the_remedy(make: Make, refused: str, words: str) -> None:
    code, told, errors = make("train", refused)
    assert code == 2
    assert len(errors) == 1
    assert words in errors[0]
    assert not any("pip" in line for line in told if "ensurepip" not in line)


@pytest.mark.skipif(has_driver(), reason="needs a machine without an NVIDIA driver")
@pytest.mark.parametrize("offered", [True, False])
def test_torch_for_cpus_is_installed_without_a_driver_or_the_download_announced(make: Make, offered: bool) -> None:
    code, told, errors = make("train", "" if offered else "--dry-run")
    assert code == 0
    (torch,) = (line for line in told if "torch==" in line and "--dry-run" not in line)
    assert torch.endswith("+cpu") == offered
    assert len(errors) == (0 if offered else 1)
    if not offered:
        assert "4.6 GB" in errors[0]
        assert "PIP_EXTRA_INDEX_URL" in errors[0]


def test_help_lists_every_target() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    tests = ("test", "test-fast", "test-metaworld", "test-others", "test-jax", "test-ray", "test-nightly")
    installs = ("install", "install-metaworld", "install-others", "install-jax")
    for target in (*installs, "train", *tests, "lint", "types", "docs", "format", "lock", "clean"):
        assert f"  make {target} " in shown


def test_compiled_modules_are_kept(tmp_path: Path) -> None:
    rule = tmp_path / "shown.mk"
    rule.write_text("include Makefile\nshown:\n\t@env\n")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["make", "--file", str(rule), "shown"]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60).stdout
    assert "PATH=" in shown
    assert "PYTHONDONTWRITEBYTECODE" not in shown
