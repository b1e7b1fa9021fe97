"""Placement groups on a real cluster of three nodes: one that a run reserves, and one that contains its process."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from cluster_on_this_machine import actor_processes, wait_until
from faulty_sampler import digests, faulty_sampler
from ray.util.placement_group import placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from maml_rl.config import load_config
from maml_rl.errors import ConfigError
from maml_rl.experiment.train import train
from maml_rl.profiling import StageTimer
from tests.samplers.work.on_ray.test_ray_cluster import ROOT, start

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

NUM_TASKS = 4


@pytest.fixture(autouse=True)
def nothing_left_behind(connected: Any) -> Iterator[None]:
    """The cluster and its idle processes may remain, but no actor."""
    yield
    wait_until(lambda: not actor_processes())


def sampled(**options: Any) -> tuple[list[str], set[str]]:
    """Return digests of two phases on two actors, and the ids of their nodes."""
    with faulty_sampler(backend="ray", num_workers=2, strict=True, **options) as sampler:
        sampler.prepare(NUM_TASKS)
        # The public interface does not show on which of several nodes of one machine an actor is.
        nodes = {actor.known.node for actor in sampler._workers.backend._pool.actors}
        return digests(sampler, NUM_TASKS), nodes


def created() -> list[str]:
    return [each["placement_group_id"] for each in placement_group_table().values() if each["state"] == "CREATED"]


def test_run_reserves_its_places_and_gives_them_back() -> None:
    expected = digests(faulty_sampler(num_workers=0), NUM_TASKS)
    before = set(created())
    reserved: list[set[str]] = []

    class Watch(StageTimer):
        def stage(self, name: str) -> Any:
            reserved.append(set(created()) - before)
            return super().stage(name)

    found, nodes = sampled(ray_placement_group="STRICT_SPREAD", timer=Watch())
    assert found == expected
    assert len(nodes) == 2
    assert len(reserved[0]) == 1
    wait_until(lambda: set(created()) == before)
    with pytest.raises(ConfigError, match=r"STRICT_PACK.*2 actors on one node.*has 1 of them; lower num_workers"):
        sampled(ray_placement_group="STRICT_PACK")


@pytest.mark.nightly
def test_actors_of_a_process_in_a_placement_group_are_on_its_nodes() -> None:
    group = ray.util.placement_group([{"CPU": 1}] * 3, strategy="SPREAD")
    try:
        strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
        trial = ray.remote(sampled).options(num_cpus=1, scheduling_strategy=strategy)
        # All CPUs of the cluster belong to the group: outside of it actors would wait forever.
        found, nodes = ray.get(trial.remote(), timeout=120)
    finally:
        remove_placement_group(group)
    assert found == digests(faulty_sampler(num_workers=0), NUM_TASKS)
    assert len(nodes) == 2


@pytest.mark.nightly
def test_tune_tries_step_sizes_with_the_actors_of_each_trial_in_its_group(
    connected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.tune")
    monkeypatch.setenv("RAY_ADDRESS", connected.address)
    options = ["--step-sizes", "0.05", "0.5", "--iterations", "1", "--tasks", "2", "--actors", "1"]
    tuning = start("examples/tune_step_size.py", *options, "--folder", str(tmp_path))
    output, errors = tuning.communicate(timeout=200)
    assert tuning.returncode == 0, errors
    found = re.findall(r"^step size (\S+): return (-\d+\.\d+) after one step$", output, re.MULTILINE)
    assert [size for size, _ in found] == ["0.05", "0.5"]
    # The same numbers as without Tune and Ray.
    expected = []
    for size, _ in found:
        config = load_config(ROOT / "configs/maml/2d-navigation.yaml")
        config = config.override({"fast-lr": float(size), "num-batches": 1, "meta-batch-size": 2})
        train(
            config,
            tmp_path / size,
            num_workers=0,
            on_iteration=lambda metrics: expected.append(metrics["return/step_1"]),
        )
    assert [value for _, value in found] == [f"{each:.2f}" for each in expected]
