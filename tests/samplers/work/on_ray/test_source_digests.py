import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pytest

pytest.importorskip("ray")

import ray

import maml_rl
from maml_rl.errors import ConfigError
from maml_rl.samplers.work.ray import source_digests
from maml_rl.samplers.work.ray.actor import _from_store
from maml_rl.samplers.work.ray.backend import RayBackend
from maml_rl.samplers.work.ray.source_digests import modules_of_user, source_digest

pytestmark = pytest.mark.ray

# A family whose class is in one module of a package and imports two others outside of it.
FILES = {
    "digested/__init__.py": "",
    "digested/family.py": "import digested_beside\nfrom digested_with import shift\n\n\nclass Family:\n    pass\n",
    "digested/unused.py": "NUMBER = 1\n",
    "digested_beside.py": "NUMBER = 2\n",
    "digested_with.py": "def shift(number):\n    return number + 1\n",
}


def write(folder: Path, **changes: str) -> Path:
    for name, text in {**FILES, **{name.replace("__", "/") + ".py": text for name, text in changes.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


@pytest.fixture
def digest_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, str], str | None]]:
    """Digest a module as a process would that has it in this folder."""

    def digest(folder: Path, name: str) -> str | None:
        with monkeypatch.context() as context:
            context.syspath_prepend(str(folder))
            return source_digest.__wrapped__(name)

    yield digest
    source_digest.cache_clear()
    source_digests._is_installed.cache_clear()


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The class of the family, from files in `tmp_path`."""
    monkeypatch.syspath_prepend(str(write(tmp_path)))
    from digested.family import Family

    yield Family
    source_digest.cache_clear()
    source_digests._is_installed.cache_clear()
    for name in [name for name in sys.modules if name.startswith("digested")]:
        del sys.modules[name]


def test_digest_does_not_depend_on_place_compiled_files_or_line_ends(
    digest_at: Callable[[Path, str], str | None], tmp_path: Path
) -> None:
    here, there = write(tmp_path / "here"), write(tmp_path / "there" / "deeper")
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(there)], check=True)
    for file in there.rglob("*.py"):
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert digest_at(here, "digested") == digest_at(there, "digested") is not None
    assert digest_at(here, "digested_with") == digest_at(there, "digested_with") is not None


def test_digest_of_a_package_depends_on_every_file_of_it_and_its_name(
    digest_at: Callable[[Path, str], str | None], tmp_path: Path
) -> None:
    folders = [
        tmp_path / "renamed",
        *(tmp_path / name for name in ("digested__family", "digested__unused", "digested__deeper__new")),
    ]
    expected = digest_at(write(tmp_path / "here"), "digested")
    for folder in folders:
        write(folder, **({folder.name: "NUMBER = 3\n"} if folder.name != "renamed" else {}))
    (folders[0] / "digested" / "unused.py").rename(folders[0] / "digested" / "renamed.py")
    assert expected not in [digest_at(folder, "digested") for folder in folders]


@pytest.mark.parametrize("name", ["nowhere_at_all", "nowhere.at.all", "sys"])
def test_module_without_source_has_no_digest(name: str) -> None:
    assert source_digest.__wrapped__(name) is None


def test_package_itself_has_a_digest() -> None:
    assert source_digest("maml_rl") == source_digest.__wrapped__(maml_rl.__name__) is not None


def test_modules_of_a_pickle_are_those_of_the_user_and_their_imports(family: Any) -> None:
    expected = ["digested", "digested_beside", "digested_with"]
    assert modules_of_user([cloudpickle.dumps({"env": family, "size": 3})]) == expected
    # As in the keyword arguments of a registered id.
    assert modules_of_user([cloudpickle.dumps("digested.family:Family")]) == expected


def test_algorithm_whose_module_differs_on_a_node_ends_with_both_digests(
    family: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, stand_in in (("put", lambda value: value), ("get", lambda value: value)):
        monkeypatch.setattr(ray, name, stand_in)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    store = SimpleNamespace(_pool=SimpleNamespace(put=lambda value: value))
    stored = RayBackend.put(cast(Any, store), family(), needs_modules=True)
    assert isinstance(_from_store(stored)[0], family)
    here = source_digest("digested_with")
    # As on a node with another file.
    (tmp_path / "digested_with.py").write_text("def shift(number):\n    return number + 2\n")
    source_digest.cache_clear()
    there = source_digest("digested_with")
    with pytest.raises(ConfigError, match=f"code of digested_with {there}, this process has {here}"):
        _from_store(stored)
    # A missing module is reported by its import.
    assert modules_of_user([cloudpickle.dumps(family())])
    monkeypatch.setattr(source_digests, "_find", lambda name: None)
    source_digest.cache_clear()
    assert isinstance(_from_store(stored)[0], family)


def test_package_and_libraries_are_not_modules_of_the_user() -> None:
    from maml_rl.policies import NormalMLPPolicy

    assert (
        modules_of_user([cloudpickle.dumps(NormalMLPPolicy(2, 2, (4,))), cloudpickle.dumps(["__main__", "ray"])]) == []
    )
