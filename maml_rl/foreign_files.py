"""Files that other people may have made: regular, of a limited size, JSON without surprises, checked by a model.

Every fault is an OSError or a ValueError, whose text fits on one line. `SHA256SUMS` has the checksums of the files
beside it, as they were written; `sha256sum -c` reads it, too.
"""

import errno
import hashlib
import io
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, StringConstraints, ValidationError

from maml_rl.errors import ConfigError
from maml_rl.machine import available_memory, refuse_if_too_large

Model = TypeVar("Model", bound=BaseModel)

SUMS = "SHA256SUMS"
# Of a list of checksums, of a table of trials.
_MOST_BYTES_OF_TEXT = 100_000_000
# How many characters of a wrong value a message shows.
_SHOWN = 60


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"expected printable characters, got {ascii(text)[:_SHOWN]}")
    return text


# Text for terminals and pages: without control characters, and without those that change the direction of writing.
Printable = Annotated[str, StringConstraints(min_length=1, max_length=4000), AfterValidator(_printable)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


def read_regular(path: Path, most_bytes: int | None = None) -> bytes:
    """Return the content of a regular file; never wait for a pipe, or read from a device.

    Args:
        path: of the file, or of a link to it.
        most_bytes: that it may have; None for as many as this machine has room for.
    """
    if most_bytes is None:
        most_bytes = available_memory()
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, a pipe or a socket"
            raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
        if most_bytes is not None and status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, more than {most_bytes:,}", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            # What is appended meanwhile, as to metrics, comes next time.
            return file.read(status.st_size)
    finally:
        os.close(descriptor)


def looked_for(path: Path) -> str:
    """Return where a path that is missing was looked for, to be appended to a message; empty for any other path."""
    is_relative = not (path.is_absolute() or os.path.lexists(path))
    return "; a relative path begins in the current folder" if is_relative else ""


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text as `read_regular` reads it; what is not UTF-8 is replaced."""
    return read_regular(path, _MOST_BYTES_OF_TEXT).decode(errors="replace").splitlines()


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an `.npz` file by name, all of which are compared with their checksums."""
    data = io.BytesIO(read_regular(path))
    # zipfile, zlib and NumPy raise different errors for each kind of damage.
    try:
        num_bytes = sum(entry.file_size for entry in ZipFile(data).infolist())
        refuse_if_too_large(num_bytes, str(path), "make a smaller one")
        with np.load(data, allow_pickle=False) as arrays:
            return dict(arrays)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"it is not a whole .npz file: {reason}") from None


def parse_json(data: bytes, *, infinite: bool = False) -> Any:
    """Return the value of a JSON document in which no key is repeated, and no number is NaN.

    Args:
        data: the document.
        infinite: whether numbers may be infinite, as the bounds of spaces are.
    """

    def number(text: str) -> float:
        value = float(text)
        if math.isnan(value) or (math.isinf(value) and not infinite):
            raise ValueError(f"numbers must be finite, got {text}")
        return value

    try:
        return json.loads(
            data.decode(), object_pairs_hook=_without_repetition, parse_constant=number, parse_float=number
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def checked(model: type[Model], values: Any) -> Model:
    """Return the model of parsed values."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
    place = ".".join(str(part) for part in first["loc"]) or "the whole"
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    shown = "" if first["type"] in ("value_error", "missing") else f", got {ascii(first['input'])[:_SHOWN]}"
    more = f" (and {len(others)} more)" if others else ""
    raise ValueError(f"{ascii(place)[1:-1][:_SHOWN]}: {message}{shown}{more}")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return entries


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
    """
    file = path.parent / SUMS
    try:
        listed = read_lines(file) if os.path.lexists(file) else []
        lines = [line for line in listed if line.endswith(f"  {path.name}")]
        if not lines or sum_line(path.name, read_regular(path)) in lines:
            return bool(lines)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror or error}") from None
    raise ConfigError(
        f"{path} is damaged or was edited: its SHA-256 is not the one in {file}; put the original back, or if the "
        f"change is intended, remove the line of {path.name} from {SUMS}"
    )
