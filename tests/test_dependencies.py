"""An import that fails because a package is too old names the version that is needed, and who wants the old one."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import maml_rl
from maml_rl.dependencies import _CLAUSE, _excludes, explain_outdated


def install(folder: Path, name: str, version: str, *requirements: str) -> None:
    """Write what pip writes about an installed distribution."""
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (place / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {each}" for each in requirements), ""]))


def test_installed_packages_are_new_enough() -> None:
    assert explain_outdated() is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("pins", "told"),
    [
        ([], "; pip install 'gymnasium>=1.1'"),
        (
            [("carl-bench", "gymnasium (<1.0,>=0.27)")],
            ", because carl-bench 1.0 requires gymnasium (<1.0,>=0.27); use an environment without it, or "
            "pip install 'gymnasium>=1.1', which may break it",
        ),
        (
            [("memory_gym", "Gymnasium==0.29.1"), ("other", "gymnasium[all]~=0.29"), ("new", "gymnasium>=0.28")],
            ", because memory_gym 1.0 requires Gymnasium==0.29.1 and other 1.0 requires gymnasium[all]~=0.29; use an "
            "environment without them, or pip install 'gymnasium>=1.1', which may break them",
        ),
        ([("extra", "gymnasium<1.0; extra == 'old'")], "; pip install 'gymnasium>=1.1'"),
    ],
    ids=["nobody", "one", "two", "extra"],
)
def test_import_with_an_old_gymnasium_says_who_requires_it(
    tmp_path: Path, pins: list[tuple[str, str]], told: str
) -> None:
    (tmp_path / "gymnasium").mkdir()
    # With a name that is imported first, or without.
    content = "class Wrapper:\n    pass\nclass Env:\n    pass\n" if pins else ""
    (tmp_path / "gymnasium" / "__init__.py").write_text(content)
    install(tmp_path, "gymnasium", "0.29.1")
    install(tmp_path, "maml-rl", maml_rl.__version__, "gymnasium[mujoco]>=1.1", "numpy>=1.26")
    for name, requirement in pins:
        install(tmp_path, name, "1.0", "numpy", requirement)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(maml_rl.__file__).parents[1])!r}]; import maml_rl"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: maml-rl needs gymnasium 1.1 or newer, but 0.29.1 is installed{told}"


OPERATORS, VERSIONS = (
    ("==", "~=", "<=", "<", ">="),
    ("0.29", "0.29.1", "1.0", "1.0.0", "1.1", "1.1.0", "1.2", "2.0", "2.3.4"),
)


@pytest.mark.parametrize("needed", ["1.1", "1.2.3"])
def test_clauses_exclude_versions_as_in_the_specification(needed: str) -> None:
    later = [needed, *(f"{major}.{minor}.{patch}" for major, minor, patch in product(range(4), range(5), range(5)))]
    later = [version for version in later if Version(version) >= Version(needed)]
    for text in [*map("".join, product(OPERATORS, VERSIONS)), "==0.29.*", "==1.*", "==1.0.*", "==1.2.*"]:
        allowed = any(SpecifierSet(text).contains(version) for version in later)
        assert any(_excludes(clause, needed) for clause in _CLAUSE.findall(text)) != allowed, text
