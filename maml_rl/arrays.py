"""Array code written once for NumPy arrays and for tensors on any device.

A family takes its functions from `namespace`, or from its own `xp`: NumPy itself on the CPU, so that nothing there
changes or gets slower, and on a device the same names on tensors. Both have indexing and operators of their own.
"""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
# Attributes of these types, and no others, are looked into for state.
CONTAINERS = (dict, list)
# Attributes whose arrays stay on the host, or are results of one step.
NO_STATE = frozenset(("physics_seconds", "_reward_terms"))


def namespace(array: Any) -> Any:
    """Return the functions for an array: the module numpy, or a `TorchArrays` for its device."""
    return np if isinstance(array, np.ndarray) else torch_arrays(array.device)


@cache
def torch_arrays(device: torch.device) -> TorchArrays:
    """Return the functions for tensors on a device."""
    return TorchArrays(device)


def as_array(value: Any) -> NDArray[Any] | None:
    """Return a value from other code as a NumPy array; None if that is impossible."""
    try:
        return np.asarray(value)
    # An object's own methods may raise anything.
    except Exception:
        return None


def as_floats(array: Any) -> Any:
    """Return numbers or flags as float64, without a copy if they are float64."""
    return array.astype(np.float64, copy=False) if isinstance(array, np.ndarray) else array.double()


def as_singles(array: Any) -> Any:
    """Return numbers as float32."""
    return array.astype(np.float32) if isinstance(array, np.ndarray) else array.float()


def as_integers(array: Any) -> Any:
    """Return numbers as int64, rounded toward zero."""
    return array.astype(np.int64) if isinstance(array, np.ndarray) else array.long()


def as_bytes(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return numbers (N, numbers) of a type as bytes (N, bytes)."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array, dtype).view(np.uint8)
    xp = torch_arrays(array.device)
    return array.to(getattr(xp, dtype.name)).contiguous().view(xp.uint8)


def copied(array: Any) -> Any:
    """Return a copy."""
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def write_one_hot(rows: Any, numbers: Any) -> None:
    """Write the one-hot vectors of numbers (N,) into rows (N, K)."""
    rows[:] = 0
    if isinstance(rows, np.ndarray):
        rows[np.arange(len(rows)), numbers] = 1
    else:
        # By an index, the 1 would be copied to the device, for which a graph cannot be recorded.
        rows.scatter_(1, numbers.long().unsqueeze(1), 1)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; the host does not wait for what the device does before."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # What is expanded cannot be pinned.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def state_of(holder: object, kind: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Return where the state of slots is: in attributes that are arrays, or dicts and lists of arrays.

    Args:
        holder: whose attributes.
        kind: of arrays.

    Returns:
        What holds each array, and its key there, by name.
    """
    state = {name: value for name, value in vars(holder).items() if name not in NO_STATE}
    places: dict[str, tuple[Any, Any]] = {name: (vars(holder), name) for name in state if isinstance(state[name], kind)}
    for name, value in state.items():
        if type(value) in CONTAINERS:
            entries = value.items() if type(value) is dict else enumerate(value)
            places |= {f"{name}[{key!r}]": (value, key) for key, entry in entries if isinstance(entry, kind)}
    return places


def move_state(holder: object, device: torch.device, *, single: bool = False) -> None:
    """Make the state of slots tensors on a device, where `single` float64 as float32; views of others stay views."""
    import torch

    # Other slots may have the same containers.
    vars(holder).update({name: copy(value) for name, value in vars(holder).items() if type(value) in CONTAINERS})
    arrays = [(owner[key], owner, key) for owner, key in state_of(holder, np.ndarray).values()]
    moved: dict[int, torch.Tensor] = {}
    for array, _, _ in arrays:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        dtype = torch.float32 if single and tensor.dtype is torch.float64 else tensor.dtype
        moved[id(array)] = tensor.to(device, dtype, copy=True)
    for array, owner, key in arrays:
        base, owner[key] = array.base, moved[id(array)]
        if isinstance(base, np.ndarray) and id(base) in moved and base.dtype == array.dtype and base.flags.c_contiguous:
            start = (array.ctypes.data - base.ctypes.data) // array.itemsize
            strides = [stride // array.itemsize for stride in array.strides]
            owner[key] = moved[id(base)].as_strided(array.shape, strides, start)


class TorchArrays:
    """The functions of NumPy that families use, for tensors on one device.

    Those that torch has by the same name and with the same arguments, such as `abs`, `sqrt`, `cos`, `where` and
    `einsum`, are torch's.

    Args:
        device: where new tensors are made.
    """

    def __init__(self, device: torch.device) -> None:
        # Workers that do not act never load torch.
        import torch

        self._torch, self.device = torch, device

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._torch, name)
        setattr(self, name, function)
        return function

    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float64) -> torch.Tensor:
        """Return zeros of a NumPy type."""
        like = self._torch.from_numpy(np.empty(0, dtype)).dtype
        return self._torch.zeros(shape, dtype=like, device=self.device)

    def full(self, shape: tuple[int, ...], value: float) -> torch.Tensor:
        """Return float64 numbers of one value."""
        return self._torch.full(shape, value, dtype=self._torch.float64, device=self.device)

    def subtract(self, number: float, array: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a number minus others."""
        difference = self._torch.rsub(array, number)
        return difference if out is None else out.copy_(difference)

    def minimum(self, array: torch.Tensor, other: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the smaller of two numbers, entry by entry."""
        if isinstance(other, self._torch.Tensor):
            return self._torch.minimum(array, other, out=out)
        return self._torch.clamp(array, max=other, out=out)

    def maximum(self, array: torch.Tensor, other: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the larger of two numbers, entry by entry."""
        if isinstance(other, self._torch.Tensor):
            return self._torch.maximum(array, other, out=out)
        return self._torch.clamp(array, min=other, out=out)

    def clip(
        self, array: torch.Tensor, low: Any, high: Any, out: torch.Tensor | None = None, casting: str = ""
    ) -> torch.Tensor:
        """Return numbers within bounds."""
        clipped = self._torch.clamp(array, low, high)
        return clipped if out is None else out.copy_(clipped)

    def multiply(
        self, array: torch.Tensor, other: Any, out: torch.Tensor | None = None, casting: str = ""
    ) -> torch.Tensor:
        """Return products; those that do not have the type of `out` are rounded toward zero."""
        product = self._torch.mul(array, other)
        return product if out is None else out.copy_(product)
