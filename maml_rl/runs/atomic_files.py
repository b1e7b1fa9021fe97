"""Files and folders that are written whole or not at all, whenever the process is killed or the disk is full."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".unfinished-"


def write_file(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or whoever looks after a crash, finds the old content or the new, whole."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    temporary.unlink(missing_ok=True)
    try:
        write_file(temporary, data)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def discard(path: Path) -> None:
    """Remove a folder; killed half way, what is left does not look like the folder any more."""
    doomed = path.with_name(f"{TEMPORARY}removed-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left half written or half removed in `folder`."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name.startswith(TEMPORARY):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def sync_folder(folder: Path) -> None:
    """Wait until the disk has a folder's entries; Windows cannot, and needs not."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
