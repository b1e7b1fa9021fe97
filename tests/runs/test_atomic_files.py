from pathlib import Path
from typing import Any

import pytest

from maml_rl.runs.atomic_files import new_file, new_folder, newest_path, next_path


def test_first_name_is_plain_and_later_ones_are_numbered(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        with new_folder(tmp_path / "family" / "run") as folder:
            (folder / "config.json").touch()
        names.append(folder.name)
    assert names == ["run", "run-2", "run-3"]
    assert newest_path(tmp_path / "nowhere" / "run") is None
    for name in ("run-7", "run-10", "run-x", "run-12-old", "other-20"):
        (tmp_path / "family" / name).mkdir()
    assert next_path(tmp_path / "family" / "run").name == "run-11"
    # Empty folders are skipped.
    assert newest_path(tmp_path / "family" / "run") == tmp_path / "family" / "run-3"
    (tmp_path / "family" / "run-10" / "config.json").touch()
    assert newest_path(tmp_path / "family" / "run") == tmp_path / "family" / "run-10"


def test_file_is_numbered_before_its_ending(tmp_path: Path) -> None:
    assert next_path(tmp_path / "evaluation.npz").name == "evaluation.npz"
    (tmp_path / "evaluation.npz").write_bytes(b"x")
    (tmp_path / "evaluation-2.npz").write_bytes(b"x")
    assert next_path(tmp_path / "evaluation.npz").name == "evaluation-3.npz"
    assert newest_path(tmp_path / "evaluation.npz") == tmp_path / "evaluation-2.npz"


def test_folder_of_another_process_is_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Path.mkdir

    def make_after_the_other(path: Path, *arguments: object, **options: object) -> None:
        monkeypatch.undo()
        make(path, parents=True)  # The other process is slightly faster.
        make(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", make_after_the_other)
    with new_folder(tmp_path / "run") as folder:
        assert folder == tmp_path / "run-2"


def test_reserved_file_is_never_shared_and_skipped_until_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "results.npz"
    with new_file(path, number=True) as first, new_file(path, number=True) as second:
        assert [file.name for file in (first, second)] == ["results.npz", "results-2.npz"]
        first.write_bytes(b"x")
        assert newest_path(path) == first
        with pytest.raises(FileExistsError), new_file(path, number=False):
            pass
    # Nothing was written to the second.
    assert [file.name for file in path.parent.iterdir()] == ["results.npz"]


@pytest.mark.parametrize("new", [new_folder, lambda path: new_file(path, number=True)], ids=["folder", "file"])
def test_path_to_which_nothing_was_written_is_removed_with_the_folders_made_for_it(new: Any, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="bad input"), new(tmp_path / "there" / "a" / "b" / "x"):
        raise ValueError("bad input")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["there"]
