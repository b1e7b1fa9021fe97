"""The contents of an installation: versions for every supported Python, configs, and types."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import maml_rl

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
METAWORLD_LOCK = "constraints-metaworld.txt"
SUPPORTED = SpecifierSet(PROJECT["requires-python"])
# Releases in use: the first of each minor version, those of Debian and Ubuntu, and a late one.
PYTHONS = [
    version
    for minor, patches in {
        10: (0, 19),
        11: (0, 2, 4, 5, 15),
        12: (0, 3, 12),
        13: (0, 5, 13),
        14: (0, 3),
        15: (0,),
    }.items()
    for version in (f"3.{minor}.{patch}" for patch in patches)
    if version in SUPPORTED
]


def pins(lock: str = "constraints.txt") -> list[Requirement]:
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.lstrip().startswith("#")]


def applies(pin: Requirement, python: str) -> bool:
    environment = {"python_version": ".".join(python.split(".")[:2]), "python_full_version": python}
    return pin.marker is None or pin.marker.evaluate(environment)


def test_no_pin_excludes_a_supported_python() -> None:
    checked = dict.fromkeys(PYTHONS, 0)
    for pin in pins():
        try:
            installed = metadata(pin.name)
        except PackageNotFoundError:
            continue  # A requirement of an extra, or for another Python or system.
        if not pin.specifier.contains(installed["Version"], prereleases=True):
            continue
        for python in [python for python in PYTHONS if applies(pin, python)]:
            checked[python] += 1
            assert python in SpecifierSet(installed["Requires-Python"] or ""), f"{pin} excludes {python}"
    assert min(checked.values()) > 30


def test_every_pinned_package_has_one_version_for_each_supported_python() -> None:
    for name in {pin.name for pin in pins()}:
        same = [pin for pin in pins() if pin.name == name]
        if not any(pin.marker and "python" not in str(pin.marker) for pin in same):
            counts = {sum(applies(pin, python) for pin in same) for python in PYTHONS}
            assert counts in ({1}, {0}), name


def test_environment_of_metaworld_differs_only_in_what_metaworld_needs() -> None:
    usual, with_metaworld = ({pin.name: pin for pin in pins(lock)} for lock in ("constraints.txt", METAWORLD_LOCK))
    others = {name for name, pin in with_metaworld.items() if name in usual and pin.specifier != usual[name].specifier}
    assert others == {"mujoco"}
    assert set(with_metaworld) - set(usual) == {"metaworld"}
    (needed,) = (Requirement(line) for line in PROJECT["optional-dependencies"]["metaworld"])
    assert needed.specifier == with_metaworld["metaworld"].specifier


def test_supported_pythons_are_the_same_wherever_they_are_named() -> None:
    lowest, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    newest = int(end) - 1
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"(3, {lowest}) <= sys.version_info < (3, {end})" in makefile
    assert f"Python 3.{lowest} to 3.{newest}" in makefile
    assert f"Python 3.{lowest} to 3.{newest}" in (ROOT / "README.md").read_text(encoding="utf-8")
    classifiers = {name for name in PROJECT["classifiers"] if re.search(r":: 3\.\d", name)}
    assert classifiers == {f"Programming Language :: Python :: 3.{minor}" for minor in range(int(lowest), newest + 1)}
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert tools["mypy"]["python_version"] == f"3.{lowest}"


@pytest.mark.parametrize("script", ["train.py", "test.py"])
def test_script_without_its_dependencies_ends_in_one_line(script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", script]  # No site-packages, like the Python of a system.
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(rf"{script}: error: .*No module named.*make install.*\.venv/bin/activate.*\n", ended.stderr)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ZipFile, ZipFile]:
    """A copy of the sources, installed by `pip install .` and by `pip install -e .`."""
    pytest.importorskip("setuptools", minversion="77")
    sources = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for name in ("maml_rl", "configs"):
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    wheels = []
    for build in ("build_wheel", "build_editable"):
        command = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.{build}('{build}')"]
        ended = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=100)
        assert ended.returncode == 0, ended.stderr
        wheels.append(ZipFile(next((sources / build).glob("*.whl"))))
    return sources, wheels[0], wheels[1]


@pytest.mark.slow
def test_wheel_holds_the_whole_package_and_every_config(built: tuple[Path, ZipFile, ZipFile]) -> None:
    sources, wheel, _ = built
    names = set(wheel.namelist())
    modules = {path.relative_to(sources).as_posix() for path in (sources / "maml_rl").rglob("*.py")}
    configs = {
        f"maml_rl/config/shipped/{path.relative_to(ROOT / 'configs')}" for path in ROOT.glob("configs/**/*.yaml")
    }
    policies = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("maml_rl/zoo/**/*") if path.is_file()}
    assert len(policies) >= 10
    assert names >= modules | configs | policies | {
        "maml_rl/py.typed",
        "maml_rl/report/style.css",
        "maml_rl/report/charts.css",
        "maml_rl/report/page.js",
    }
    assert not any(name.startswith(("tests/", "benchmarks/", "configs/")) for name in names)
    assert f"maml_rl-{maml_rl.__version__}.dist-info/entry_points.txt" in names


@pytest.mark.slow
def test_editable_install_is_a_path_for_type_checkers(built: tuple[Path, ZipFile, ZipFile]) -> None:
    sources, _, editable = built
    (path_file,) = (name for name in editable.namelist() if name.endswith(".pth"))
    assert editable.read(path_file).decode().strip() == str(sources)
    assert not any(name.endswith(".py") for name in editable.namelist())


def test_tensorboard_is_an_extra_that_training_and_tests_install() -> None:
    assert "tensorboard" not in {Requirement(line).name for line in PROJECT["dependencies"]}
    extras = PROJECT["optional-dependencies"]
    assert all("tensorboard" in {Requirement(line).name for line in extras[name]} for name in ("tensorboard", "dev"))
    assert "tensorboard" in {pin.name for pin in pins()}


def test_changelog_has_the_form_of_keep_a_changelog_and_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[:2] == ["Unreleased", maml_rl.__version__]
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }
    for target in re.findall(r"\]\((docs/[\w./-]+)", text):
        assert (ROOT / target).is_file(), target


def test_address_of_the_repository_is_put_into_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    repository = import_module("repository")
    committed = {name: (ROOT / name).read_text(encoding="utf-8") for name in repository.PLACES}
    for name, text in committed.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    repository.write(repository.ADDRESS, tmp_path)
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in committed} == committed
    for address in ("https://example.org/one/maml_rl", "https://example.org/two/maml_rl"):
        repository.write(address, tmp_path)
        assert all((tmp_path / name).read_text(encoding="utf-8").count(address) == 1 for name in committed)
        assert f"```\ngit clone {address}\n```" in (tmp_path / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"] == {"Repository": address}
    assert yaml.safe_load((tmp_path / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"] == address
    repository.write("", tmp_path)
    assert all("example.org" not in (tmp_path / name).read_text(encoding="utf-8") for name in committed)
