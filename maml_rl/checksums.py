"""`SHA256SUMS`: the checksums of the files beside it, as they were written; `sha256sum -c` reads it, too."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from maml_rl.errors import ConfigError
from maml_rl.foreign_files import read_regular

SUMS = "SHA256SUMS"


def sum_line(name: str, data: bytes) -> str:
    """Return the line of a file."""
    return f"{hashlib.sha256(data).hexdigest()}  {name}"


def sums(contents: Mapping[str, bytes]) -> str:
    """Return the lines of several files, as `SHA256SUMS` holds them."""
    return "".join(f"{sum_line(name, data)}\n" for name, data in contents.items())


def check_sum(path: Path) -> bool:
    """Refuse a file that has changed since it was written, or is missing; one that is not listed passes.

    A process that replaces a file lists it twice for a moment, with the old and the new checksum: either is accepted.

    Returns:
        Whether `SHA256SUMS` beside the file lists it.

    Raises:
        ConfigError: If the file has changed; the message has the remedy.
    """
    file = path.parent / SUMS
    try:
        listed = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        lines = [line for line in listed if line.endswith(f"  {path.name}")]
        if not lines or sum_line(path.name, read_regular(path)) in lines:
            return bool(lines)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror or error}") from None
    raise ConfigError(
        f"{path} is damaged or was edited: its SHA-256 is not the one in {file}; put the original back, or if the "
        f"change is intended, remove the line of {path.name} from {SUMS}"
    )
