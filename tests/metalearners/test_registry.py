"""The registered algorithms: their base classes."""

from importlib import import_module
from pkgutil import iter_modules

import pytest

from maml_rl import metalearners
from maml_rl.metalearners import MetaLearner, RecordedLearner, SettingsModel, TrialLearner, algorithms, find_metalearner


def depth_below(base: type, kind: type) -> int:
    """Return the length of the longest path from `kind` up to `base`; 0 for `base` itself, and for its three kinds."""
    if kind in (base, TrialLearner, RecordedLearner):
        return 0
    return 1 + max(depth_below(base, each) for each in kind.__bases__ if issubclass(each, base))


def classes_below(base: type) -> list[type]:
    for module in iter_modules(metalearners.__path__):
        import_module(f"{metalearners.__name__}.{module.name}")
    found, left = [], [base]
    while left:
        found.append(left.pop())
        left.extend(kind for kind in found[-1].__subclasses__() if kind.__module__.startswith(metalearners.__name__))
    return found


@pytest.mark.parametrize("base", [MetaLearner, SettingsModel])
def test_algorithms_and_settings_derive_at_most_two_deep_from_their_protocol(base: type) -> None:
    found = classes_below(base)
    assert len(found) > len(algorithms())
    assert [kind.__qualname__ for kind in found if depth_below(base, kind) > 2] == []


def test_no_algorithm_derives_from_another() -> None:
    learners = {find_metalearner(name) for name in algorithms()}
    assert len(learners) == len(algorithms())
    assert [kind.__qualname__ for kind in learners if learners & set(kind.__mro__[1:])] == []
