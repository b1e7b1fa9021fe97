"""The examples of evolution strategies really improve the return."""

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

NUMBER = r"(-?\d+\.\d+)"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.timeout(120)
def test_cma_es_finds_the_goal(example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cma")
    states = np.random.get_state(), random.getstate()
    options = ["--env", "2DNavigation-v0", "--task", '{"goal": [0.4, -0.3]}', "--generations", "15"]
    try:
        example("cma_es").main([*options, "--population", "8", "--horizon", "20", "--num-workers", "2"])
    finally:
        # The package `cma` seeds the global random state.
        np.random.set_state(states[0])
        random.setstate(states[1])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 16
    found = re.fullmatch(rf"2DNavigation-v0: return {NUMBER} before and {NUMBER} after the search", lines[-1])
    assert found
    before, after = map(float, found.groups())
    # Standing still costs 10. Four steps of 0.1 reach the goal, and cost at least 1.
    assert before < -5.0
    assert -3.0 < after < -1.0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_es_maml_learns_parameters_that_adapt(
    example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--iterations", "15", "--tasks", "10", "--pairs", "5", "--horizon", "20", "--inner-step", "0.02"]
    example("es_maml").main([*options, "--num-workers", "0"])
    *iterations, last = capsys.readouterr().out.splitlines()
    gains = []
    for line in iterations:
        found = re.fullmatch(rf"iteration +\d+: return +{NUMBER} before and +{NUMBER} after adaptation", line)
        assert found
        before, after = map(float, found.groups())
        gains.append(after - before)
    assert len(gains) == 15
    assert np.mean(gains[-5:]) > np.mean(gains[:5]) + 1.0
    found = re.search(rf"return {NUMBER} untrained and {NUMBER} trained", last)
    assert found
    untrained, trained = map(float, found.groups())
    assert trained > untrained + 1.0
