"""The arrays of all steps that a replay keeps."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.arrays import to_device
from maml_rl.episode.steps import Steps
from maml_rl.errors import ConfigError
from maml_rl.machine import refuse_if_too_large
from maml_rl.runs.atomic_files import TEMPORARY

# Of the free memory of an accelerator, the largest share that a copy of the arrays takes.
DEVICE_SHARE = 0.25
# Other kinds of devices that have such a copy.
_COPIED_TO: tuple[str, ...] = ()


def reward_scales(families: Sequence[str], squares: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.float32]:
    """Return the root mean square (n,) of the rewards of each trial's family; 1 where all are 0.

    Args:
        families: n names.
        squares: (n,) sums of squared rewards.
        lengths: (n,) steps.
    """
    _, which = np.unique(np.array(families), return_inverse=True)
    scales = np.sqrt(np.bincount(which, squares) / np.bincount(which, lengths))
    return np.where(scales > 0.0, scales, 1.0)[which].astype(np.float32)


class StepArrays:
    """The fields of steps as arrays of `capacity` rows, a ring; see `Replay` for the other arguments.

    Attributes:
        is_mapped: whether the arrays are memory-mapped.
        copies: of the fields on the device, by name; empty where steps are copied there when they are drawn.
    """

    def __init__(self, capacity: int, memory_bytes: int | None, device: torch.device) -> None:
        self._capacity, self._memory_bytes, self._device = capacity, memory_bytes, device
        self._fields: dict[str, NDArray[Any]] = {}
        self.copies: dict[str, Tensor] = {}
        self.is_mapped = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a step; 0 before there is one."""
        return sum(prod(values.shape[1:]) * values.itemsize for values in self._fields.values())

    def check(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Refuse, by a ValueError, steps of other fields, shapes or types than those that are kept already."""
        for name in sorted({*rows, *self._fields}) if self._fields else ():
            one, other = (layout(arrays.get(name)) for arrays in (self._fields, rows))
            if one != other:
                raise ValueError(
                    f"the replay buffer keeps {name!r} as {one}, and these episodes have it as {other}; append "
                    "episodes of one family, with the same infos"
                )

    def write(self, start: int, rows: Mapping[str, NDArray[Any]], folder: Path | None) -> None:
        """Write steps from row `start` on; files for mapped arrays are made in `folder`, or among temporary ones."""
        if not self._fields:
            self._fields = self._allocate(rows, folder or Path(tempfile.gettempdir()))
            if _copies_fit(self._fields, self._device) and not self.is_mapped:
                self.copies = {
                    name: torch.zeros(values.shape, dtype=torch.from_numpy(values[:0]).dtype, device=self._device)
                    for name, values in self._fields.items()
                }
        for name, values in rows.items():
            before_wrap = min(len(values), self._capacity - start)
            targets: list[Any] = [(self._fields[name], values)]
            if self.copies:
                targets.append(
                    (self.copies[name], to_device(torch.from_numpy(np.ascontiguousarray(values)), self._device))
                )
            for into, given in targets:
                into[start : start + before_wrap] = given[:before_wrap]
                into[: len(values) - before_wrap] = given[before_wrap:]

    def read(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return copies of rows, by the fields' names."""
        return {name: values.take(rows, axis=0) for name, values in self._fields.items()}

    def take(self, rows: NDArray[np.int64], real: NDArray[np.bool_] | None = None) -> Steps:
        """Return copies of rows on the device, zero where they are not real."""
        flat = rows.ravel()
        fields = {}
        mask = torch.from_numpy(np.ones(rows.shape, np.float32) if real is None else real.astype(np.float32))
        mask = to_device(mask, self._device)
        places = to_device(torch.from_numpy(flat), self._device) if self.copies else None
        for name, values in self._fields.items():
            shape = *rows.shape, *values.shape[1:]
            if places is not None:
                fields[name] = self.copies[name].index_select(0, places).reshape(shape)
                if real is not None:
                    padding = (mask == 0).reshape(*rows.shape, *(1,) * (values.ndim - 1))
                    fields[name] = fields[name].masked_fill(padding, 0)
                continue
            taken = values.take(flat, axis=0).reshape(shape)
            if real is not None:
                taken[~real] = 0
            fields[name] = to_device(torch.from_numpy(taken), self._device)
        return Steps.of({**fields, "mask": mask})

    def _allocate(self, rows: Mapping[str, NDArray[Any]], folder: Path) -> dict[str, NDArray[Any]]:
        sizes = {name: self._capacity * prod(values.shape[1:]) * values.itemsize for name, values in rows.items()}
        total, what = sum(sizes.values()), f"a replay buffer of {self._capacity:,} steps"
        if self._memory_bytes is None or total <= self._memory_bytes:
            refuse_if_too_large(total, what, "keep fewer steps, or have it memory-mapped")
            return {name: np.zeros((self._capacity, *values.shape[1:]), values.dtype) for name, values in rows.items()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.is_mapped = True
            return {
                name: _mapped(folder, sizes[name], (self._capacity, *values.shape[1:]), values.dtype)
                for name, values in rows.items()
            }
        except OSError as error:
            raise ConfigError(
                f"{what} needs a file of {total / 2**30:,.1f} GiB in {folder}: {error.strerror or error}; keep fewer "
                "steps, or make room"
            ) from error


def _mapped(folder: Path, size: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros in a file without a name, which ends with the process."""
    with tempfile.TemporaryFile(dir=folder, prefix=TEMPORARY) as file:
        # Allocated at once: writing to a mapped page for which there is no space would kill the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        return np.asarray(np.memmap(file, dtype, "r+", shape=shape))


def _copies_fit(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> bool:
    """Return whether arrays have a copy on a device beside the CPU."""
    if device.type != "cuda":
        return device.type in _COPIED_TO
    free, _ = torch.cuda.mem_get_info(device)
    return sum(values.nbytes for values in arrays.values()) <= DEVICE_SHARE * free


def layout(values: NDArray[Any] | None) -> str:
    """Describe type and shape of an entry of an array; None is nothing."""
    return "nothing" if values is None else f"{values.dtype} {values.shape[1:]}"
