"""Puts together what the environments of several children tell beside observations and rewards."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def join_infos(infos: Sequence[dict[str, Any]], lengths: Sequence[int]) -> dict[str, Any]:
    """Put the children's infos one after the other.

    Args:
        infos: of each child, arrays over its slots or dicts of such.
        lengths: slots of each child.

    Returns:
        The same over all slots; where a child lacks an entry, zeros stand for it.
    """
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for info in infos for name in info):
        values = [info.get(name) for info in infos]
        example = next(value for value in values if value is not None)
        if isinstance(example, dict):
            joined[name] = join_infos([value or {} for value in values], lengths)
        else:
            joined[name] = np.concatenate(
                [
                    np.zeros((length, *example.shape[1:]), example.dtype) if value is None else value
                    for value, length in zip(values, lengths, strict=True)
                ]
            )
    return joined
