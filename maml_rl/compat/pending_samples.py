"""Sampling in two calls, as pytorch-maml-rl does it; what collects while the last update runs is `prefetch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


class PendingSample:
    """Episodes that are sampled at their first access: by `result`, or by unpacking the two."""

    def __init__(self, sample: Callable[[], tuple[Any, Any]]) -> None:
        self._sample = sample
        self._sampled: tuple[Any, Any] | None = None

    def result(self) -> tuple[Any, Any]:
        """Return `(train_episodes, valid_episodes)`, the same ones each time."""
        if self._sampled is None:
            self._sampled = self._sample()
        return self._sampled

    def __iter__(self) -> Iterator[Any]:
        return iter(self.result())


class SamplesInTwoCalls:
    """Gives a sampler `sample_async` and `sample_wait`."""

    sample: Callable[..., tuple[Any, Any]]

    def sample_async(self, tasks: Any, **options: Any) -> PendingSample:
        """Return a value that becomes `(train_episodes, valid_episodes)` at its first access.

        `metalearner.step(*futures)` and `sample_wait(futures)` access it; nothing is sampled before.
        """
        return PendingSample(partial(self.sample, tasks, **options))

    def sample_wait(self, futures: PendingSample) -> tuple[Any, Any]:
        """Return the results of `sample` for values from `sample_async`."""
        return futures.result()
