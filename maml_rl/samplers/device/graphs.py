"""A step as CUDA graphs: recorded once, launched without Python in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


class Graphs:
    """Work without arguments, always on the same tensors, as one or more CUDA graphs.

    Work of another library, which has a graph of its own, is launched between two of them.

    Args:
        work: is run once here, and recorded; it has been run before, so that its kernels are loaded.
        physics: launches work of its own through its attribute `launch`; None for none.
        pool: of the memory that the graphs use.
    """

    def __init__(self, work: Callable[[], None], physics: Any, pool: Any) -> None:
        self._launches: list[Callable[[], object]] = []
        self._pool = pool
        torch.cuda.synchronize()
        graph = self._begin()

        def between(launch: Callable[[], None]) -> None:
            nonlocal graph
            self._end(graph)
            self._launches.append(launch)
            graph = self._begin()

        launched_by = None if physics is None else physics.launch
        if physics is not None:
            physics.launch = between
        try:
            work()
        except BaseException:
            # The error of the work says more than the one about what was recorded of it.
            with suppress(RuntimeError):
                self._end(graph)
            raise
        finally:
            if physics is not None:
                physics.launch = launched_by
        self._end(graph)

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        with warnings.catch_warnings():
            # There may be nothing to do between two launches of the physics.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            graph.capture_end()
        self._launches.append(graph.replay)

    def __call__(self) -> None:
        """Launch the work on the current stream."""
        for launch in self._launches:
            launch()
