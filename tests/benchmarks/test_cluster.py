"""The benchmark of clusters runs from end to end with tiny sizes, and writes its tables."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from benchmarks import cluster

pytestmark = [pytest.mark.nightly, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def global_generator_is_put_back() -> Iterator[None]:
    """Ray draws the ports of the nodes that the benchmark starts from Python's global generator."""
    drawn = random.getstate()
    yield
    random.setstate(drawn)


def test_kills_of_actors_and_nodes_change_no_episode(tmp_path: Path) -> None:
    cluster.main(["--quick", "--quiet", "--json", str(tmp_path / "result.json")])
    tables = json.loads((tmp_path / "result.json").read_text())["tables"]
    found = {row["name"]: row["median"] for row in tables[cluster.FOUND]}
    assert found["actors killed"] + found["nodes killed"] >= 2
    assert (found["changed digests"], found["hangs"], found["actors left over"]) == (0, 0, 0)
