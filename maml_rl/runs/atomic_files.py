"""Files and folders that are written atomically, even when the process is killed or the disk is full.

Names of new ones do not collide: `runs/maml/2d-navigation`, then `runs/maml/2d-navigation-2`, and so on.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from maml_rl.errors import ConfigError

TEMPORARY = ".unfinished-"
# Empty; held while a process writes into its folder.
LOCK = ".lock"

logger = logging.getLogger(__name__)


def write_file(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data to an open file; the operating system may take it in parts."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader, also after a crash, finds either the old content or the new one, complete."""
    temporary = _temporary(path)
    try:
        temporary.unlink(missing_ok=True)
        write_file(temporary, data)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """Return where this process writes a file before it is renamed; two processes may write the same file at once."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")


def check_writable(path: Path, option: str) -> None:
    """Make sure that a file can be written, before the work for it is done; do not change an existing file.

    Args:
        path: of the file.
        option: the command's, with which to choose another one.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; give {option} the name of a file")
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent} for {option} {path}; make it first")
        if (path.exists() or path.is_symlink()) and not path.is_file():
            raise ConfigError(
                f"{path} is {'a device' if path.exists() else 'a link to nowhere'}; choose another {option}"
            )
        probe = _temporary(path)
        probe.unlink(missing_ok=True)
        write_file(probe, b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another {option}") from error


def check_output(path: Path, option: str) -> None:
    """Make sure that a file, and its folder where that is missing, can be written; see `check_writable`."""
    if path.parent.is_dir():
        check_writable(path, option)
    else:
        check_creatable(path.parent, option)


def check_creatable(folder: Path, option: str) -> None:
    """Make sure that a folder can be made and written to, before the work for it is done; leave no folder behind."""
    try:
        above = next(path for path in (folder, *folder.parents) if path.is_symlink() or path.exists())
        if not above.is_dir():
            kind = "a file" if above.is_file() else "a device" if above.exists() else "a link to nowhere"
            raise ConfigError(f"{above} is {kind}; choose another {option}")
        probe = folder / f"{TEMPORARY}probe-{os.getpid()}"
        with made_folder(folder):
            try:
                write_file(probe, b"")
            finally:
                probe.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another {option}") from error


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder, and those above it that are missing; at the end, remove those of them that are empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        os.makedirs(folder, exist_ok=True)
        yield
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def lock_folder(folder: Path, doing: str) -> int:
    """Open a folder's lock, which lasts until it is closed: two processes in one folder would mix their files."""
    descriptor = locked(folder / LOCK)
    if descriptor is None:
        raise ConfigError(f"another process is {doing} in {folder}; end it, or choose another folder")
    return descriptor


def locked(path: Path) -> int | None:
    """Open a file that this process alone has locked until it is closed; None if another process has."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # Windows has no fcntl.
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        logger.debug("the file system of %s has no locks: %s", path.parent, error)
    return descriptor


def discard(path: Path) -> None:
    """Remove a file or a folder; if the process is killed meanwhile, the rest no longer looks like one.

    Of a link only the link is removed.
    """
    if path.is_symlink():
        path.unlink()
        return
    doomed = path.with_name(f"{TEMPORARY}removed-{path.name}")
    remove(doomed)
    os.rename(path, doomed)
    remove(doomed)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content, if it is there; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove half-written and half-removed files of killed processes in `folder`."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name.startswith(TEMPORARY):
            remove(path)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has a folder's entries; Windows neither can nor needs to."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    return _reserved(path, partial(Path.touch, exist_ok=False), number=number)


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
