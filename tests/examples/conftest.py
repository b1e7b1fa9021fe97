"""Fixtures of the tests of examples."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports an example by its name, as from its own folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    known, registered = set(sys.modules), set(gymnasium.registry)

    def load(name: str) -> Any:
        return __import__(name)

    yield load
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__ or "").parent == EXAMPLES:
            del sys.modules[name]
    for env_id in set(gymnasium.registry) - registered:
        del gymnasium.registry[env_id]
