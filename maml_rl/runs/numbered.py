"""Names that do not collide: `runs/maml/2d-navigation`, then `runs/maml/2d-navigation-2`, and so on."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from maml_rl.runs.atomic_files import made_folder


def numbered(path: Path) -> dict[int, Path]:
    """Return which of `path`, `path`-2, `path`-3 ... exist, by number; the number precedes a file's ending."""
    name = re.compile(rf"{re.escape(path.stem)}(?:-(\d+))?{re.escape(path.suffix)}")
    siblings = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    return {int(match[1] or 1): sibling for sibling in siblings if (match := name.fullmatch(sibling.name))}


def next_path(path: Path) -> Path:
    """Return `path`, or the first of `path`-2, `path`-3 ... after all that exist."""
    number = max(numbered(path), default=0) + 1
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def newest_path(path: Path) -> Path | None:
    """Return the highest of `path`, `path`-2, ... that is there and not empty; None if there is none.

    An empty file or folder is a name that another process has reserved.
    """
    entries = sorted(numbered(path).items(), reverse=True)
    return next((entry for _, entry in entries if not _is_empty(entry)), None)


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size == 0


def new_folder(path: Path) -> AbstractContextManager[Path]:
    """Make a folder `path`, `path`-2, ... that no other process gets; remove it if nothing was written to it."""
    return _reserved(path, lambda folder: folder.mkdir(), number=True)


def new_file(path: Path, *, number: bool) -> AbstractContextManager[Path]:
    """Reserve a file that no other process gets, by an empty one; remove that if nothing was written to it.

    Args:
        path: of the file; its folder is made where it is missing, and removed again if it stays empty.
        number: take `path`-2, `path`-3 ... where there is one already.
    """
    return _reserved(path, lambda file: file.touch(exist_ok=False), number=number)


@contextmanager
def _reserved(path: Path, make: Callable[[Path], None], *, number: bool) -> Iterator[Path]:
    with made_folder(path.parent):
        while True:
            place = next_path(path) if number else path
            try:
                make(place)
                break
            except FileExistsError:
                # With numbers, another process has just made it.
                if not number:
                    raise
        try:
            yield place
        finally:
            with suppress(OSError):
                if place.is_dir():
                    place.rmdir()
                elif _is_empty(place):
                    place.unlink()
