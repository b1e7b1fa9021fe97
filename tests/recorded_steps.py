"""A stand-in for CUDA graphs on the CPU: work is logged operation by operation, and repeated without Python."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Log(TorchDispatchMode):
    """Keeps every operation with its arguments and results: numbers as they are now, tensors by their place."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.operations.append((func, args, kwargs or {}, results))
        return result


def recorded(work: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """Run work, and return what a graph of it does: the same operations on the same places, without Python."""
    log = _Log()
    with log:
        work()

    def replay() -> None:
        for func, args, kwargs, results in log.operations:
            given = {
                each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)
            }
            again = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
            for place, new in zip(results, again, strict=True):
                # A view, or what was written in place, has its values already.
                if place.untyped_storage().data_ptr() not in given:
                    place.copy_(new)

    return replay


def record_on_the_cpu(monkeypatch: Any) -> None:
    """Have loops on a device record their steps, on the CPU."""
    from maml_rl.samplers.device import backend

    class Recording(backend.DeviceLoop):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._is_ready = not self._policy.has_static_steps

    # Only operations of torch are recorded.
    monkeypatch.setattr("maml_rl.policies.layers.BY_NUMPY", ())
    monkeypatch.setattr("maml_rl.samplers.device.backend.DeviceLoop", Recording)
    monkeypatch.setattr(backend, "_recorded", recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
