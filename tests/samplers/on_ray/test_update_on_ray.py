"""Updates in the actors of a real cluster of three nodes: the bytes of an update in this process, whatever dies."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import psutil
from cluster_on_this_machine import actor_processes, cluster_of, connected_to

from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.derivatives import samples
from maml_rl.experiment.train import train
from maml_rl.runs.metrics import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of(1, 1, 1) as running, connected_to(running):
        yield running


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, cluster: Any) -> Iterator[None]:
    """Several chunks of few tasks; and no actor that stays."""
    monkeypatch.setattr(samples, "_CPU_CHUNK", (1 << 10, 1 << 12))
    yield
    _, alive = psutil.wait_procs(actor_processes(), timeout=60)
    assert not alive


def trained(folder: Path, algorithm: str, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return metrics without times, and the parameters."""
    values = {
        "env-name": "2DNavigation-v0",
        "algorithm": algorithm,
        "max-episode-steps": 24,
        "fast-batch-size": 4,
        "meta-batch-size": 9,
        "hidden-sizes": [16],
        "num-batches": 6,
        **settings,
    }
    policy = train(Config.from_mapping(Mapping("the test", values)), folder)
    rows = [
        {key: value for key, value in row.items() if not key.startswith("time/")}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
    return rows, {name: tensor.numpy().tobytes() for name, tensor in policy.state_dict().items()}


IN_WORKERS = {"backend": "ray", "update": "workers", "num-workers": 3, "max-restarts": 100}


@pytest.mark.parametrize("algorithm", ["maml-trpo", "promp", "meta-sgd", "reptile"])
def test_parameters_and_metrics_are_those_of_an_update_in_this_process(algorithm: str, tmp_path: Path) -> None:
    expected = trained(tmp_path / "here", algorithm, **{"num-workers": 0})
    assert trained(tmp_path / "workers", algorithm, **IN_WORKERS) == expected


def test_actors_that_are_killed_in_all_stages_change_no_byte(tmp_path: Path) -> None:
    settings = {"num-batches": 12}
    expected = trained(tmp_path / "here", "maml-trpo", **{"num-workers": 0}, **settings)
    over, killed = threading.Event(), []

    def kill_now_and_then() -> None:
        choice = random.Random(0)
        while not over.wait(choice.uniform(0.5, 2.0)):
            actors = [process for process in actor_processes() if process.pid not in killed]
            # One stays, so that there is progress.
            if len(actors) > 1:
                victim = choice.choice(actors).pid
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed.append(victim)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        found = trained(tmp_path / "workers", "maml-trpo", **IN_WORKERS, **settings)
    finally:
        over.set()
        killer.join()
    assert killed
    assert found == expected
