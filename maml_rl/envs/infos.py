"""Infos of single slots as the infos of a vector environment, whatever is in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ARRAYS = np.number | np.bool_ | np.ndarray


def collect_infos(infos: Mapping[int, Any], num_envs: int) -> dict[str, Any]:
    """Return the infos of slots as Gymnasium's vector environments do: an array (N, ...) for each name, and its mask.

    Values that do not fit into one array of numbers, such as arrays of different shapes, are objects in an array (N,),
    with None where a slot has none. Gymnasium would raise, or store another number.

    Args:
        infos: of some slots, by their numbers; what is not a mapping counts as no info.
        num_envs: N.
    """
    collected: dict[str, Any] = {}
    mappings = {slot: info for slot, info in infos.items() if isinstance(info, Mapping)}
    for name in dict.fromkeys(name for info in mappings.values() for name in info):
        values = {slot: info[name] for slot, info in mappings.items() if name in info}
        if all(isinstance(value, dict) for value in values.values()):
            collected[name] = collect_infos(values, num_envs)
        else:
            # Gymnasium keeps final observations as objects, too.
            alike = None if name == "final_obs" else _alike(values.values())
            collected[name] = array = (
                np.full(num_envs, None, object)
                if alike is None
                else np.zeros((num_envs, *alike[0].shape), alike[0].dtype)
            )
            for slot, value in zip(values, alike or values.values(), strict=True):
                array[slot] = value
        collected[f"_{name}"] = mask = np.zeros(num_envs, np.bool_)
        mask[list(values)] = True
    return collected


def _alike(values: Collection[Any]) -> list[NDArray[Any]] | None:
    """Return numbers, or arrays of one shape, as arrays of one type that holds them all; None if that is impossible."""
    if not all(type(value) in (int, float, bool) or isinstance(value, _ARRAYS) for value in values):
        return None
    arrays = [np.asarray(value) for value in values]
    dtypes = {array.dtype for array in arrays}
    if len({array.shape for array in arrays}) > 1 or any(dtype.kind == "O" for dtype in dtypes):
        return None
    if len(dtypes) == 1:
        return arrays
    if any(dtype.kind not in "biufc" for dtype in dtypes):
        return None
    common = [array.astype(np.result_type(*dtypes)) for array in arrays]
    # Large integers, for example, are not exact as floats.
    exact = all(
        np.array_equal(converted.astype(array.dtype), array, equal_nan=array.dtype.kind in "fc")
        for converted, array in zip(common, arrays, strict=True)
    )
    return common if exact else None
