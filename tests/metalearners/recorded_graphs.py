"""A stand-in for CUDA graphs of gradient steps, on the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from maml_rl.metalearners import Stepper


class Graphs:
    """What CUDA's graphs do, with tensors of the CPU: a step is recorded without being taken, and launched later.

    Args:
        steps: that are recorded.
        patch: of the functions of torch.
        targets: what steps change besides.
        error: of every recording; None for none.
    """

    def __init__(
        self, steps: Stepper, patch: pytest.MonkeyPatch, targets: Sequence[Tensor] = (), error: Exception | None = None
    ) -> None:
        self.num_launched, self.num_refused, self._error = 0, 0, error
        graphs, take, latest = self, steps._take, list[Any]()

        class Graph:
            def replay(self) -> None:
                graphs.num_launched += 1
                inputs, result = self.recorded
                result.copy_(take(inputs))

        @contextmanager
        def recording(graph: Any, **_: Any) -> Iterator[None]:
            changed = [*steps._changed(), *targets]
            before = [tensor.clone() for tensor in changed]
            try:
                if graphs._error is not None:
                    graphs.num_refused += 1
                    raise graphs._error
                yield
            finally:
                with torch.no_grad():
                    for tensor, old in zip(changed, before, strict=True):
                        tensor.copy_(old)
            graph.recorded = latest.pop()

        def noted(inputs: Any) -> Tensor:
            result = take(inputs)
            latest[:] = [(inputs, result)]
            return result

        steps.refusal, steps._take = None, noted  # type: ignore[method-assign]
        self.devices: list[Any] = []
        patch.setattr("torch.cuda.Stream", lambda device: self.devices.append(device))
        patch.setattr("torch.cuda.CUDAGraph", Graph)
        patch.setattr("torch.cuda.graph", recording)
        patch.setattr("torch.cuda.synchronize", lambda device: None)
