"""A check of what a CUDA graph could record, without a GPU: by tensors of the device `meta`, which have no values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")


class _NoTensorOfTheCPU(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, result)):
            assert not isinstance(each, Tensor) or each.device.type == "meta", f"{func} of a tensor of the CPU"
        return result


class _NoNumberToBeCopied(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            assert isinstance(args[0], Tensor), f"{func.__name__} of {args[0]!r} copies it to the device"
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            integers = [each for each in tree_leaves(args[1]) if isinstance(each, Tensor) and each.dtype != torch.bool]
            assert not integers, "a number that is written by an index is copied to the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def device_alone() -> Iterator[None]:
    """Refuse, by an AssertionError, what a device could not do alone: copies from the CPU.

    Whatever waits for the device, to read a value as for a branch, raises on the device `meta` anyway.
    """
    with _NoNumberToBeCopied(), _NoTensorOfTheCPU():
        yield
