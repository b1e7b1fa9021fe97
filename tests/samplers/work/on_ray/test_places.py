"""Places for actors on a cluster: what they request, how many fit, and groups of places, without a cluster."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("ray")

from fake_connection import connect_to

from maml_rl.config.placement import Placement
from maml_rl.errors import ConfigError
from maml_rl.samplers.work.ray.cluster import RayCluster, places_on, require_layout

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("nodes", "asked", "expected"),
    [
        ([{"CPU": 8.0}, {"CPU": 3.0}, {"memory": 1.0}], {"CPU": 1.0}, 11),
        ([{"CPU": 8.0}, {"CPU": 3.0}], {"CPU": 2}, 5),
        ([{"CPU": 1.0}, {"CPU": 1.0}], {"CPU": 0.1}, 20),
        # Each node is counted separately: spare resources of one node do not help another.
        (
            [{"CPU": 8.0, "simulator": 1.0}, {"CPU": 1.0, "simulator": 4.0}, {"CPU": 9.0}],
            {"CPU": 1, "simulator": 0.5},
            3,
        ),
    ],
)
def test_places_are_counted_on_each_node_by_the_request_of_an_actor(
    nodes: list[dict[str, float]], asked: dict[str, float], expected: int
) -> None:
    assert sum(places_on(node, asked) for node in nodes) == expected


def test_actors_request_the_given_resources_from_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_to({"one": {"CPU": 4.0, "GPU": 1.0, "memory": 4e9, "simulator": 1.0}}, monkeypatch)
    resources = {"GPU": 0.25, "memory": 1_000_000_000, "simulator": 0.5}
    env = {"env_vars": {"LICENSE": "mine"}}
    placement = Placement(backend="ray", ray_num_cpus=2, ray_resources=resources, ray_runtime_env=env)
    cluster = RayCluster(placement)
    try:
        assert cluster.count_places(placement) == 2
        asked = {"num_cpus": 2, "num_gpus": 0.25, "memory": 1_000_000_000, "resources": {"simulator": 0.5}}
        scheduling = {"scheduling_strategy": "SPREAD", "label_selector": None}
        assert cluster.actor_options() == {**asked, **scheduling, "runtime_env": env}
    finally:
        cluster.leave()


@pytest.mark.parametrize("options", [{"ray_num_cpus": 4}, {"ray_resources": {"simulator": 1}}])
def test_resource_that_no_node_has_is_refused_at_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    connect_to({"one": {"CPU": 2.0}, "other": {"CPU": 2.0}}, monkeypatch)
    with pytest.raises(
        ConfigError, match=r"no node of the Ray cluster at head:6379 has (4 CPU|1 CPU and 1 simulator),"
    ):
        RayCluster(Placement(backend="ray", **options))
    # Nodes with CPUs may still join.
    connect_to({"one": {"memory": 1.0}}, monkeypatch)
    placement = Placement(backend="ray", **options)
    waiting = RayCluster(placement)
    assert waiting.count_places(placement) == 0
    waiting.leave()


@pytest.mark.parametrize(
    ("layout", "number", "message"),
    [
        ("PACK", 5, ""),
        ("SPREAD", 6, "wants places for 6 actors, each with 1 CPU, and the Ray cluster has 5 of them"),
        ("STRICT_PACK", 3, ""),
        ("STRICT_PACK", 4, "wants places for 4 actors on one node, each with 1 CPU, and the Ray cluster has 3 of them"),
        ("STRICT_SPREAD", 2, ""),
        ("STRICT_SPREAD", 3, "wants places for 3 actors on a node each, each with 1 CPU, and the Ray cluster has 2"),
    ],
)
def test_placement_group_for_which_there_are_no_nodes_is_refused_at_once(
    layout: Any, number: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) if message else nullcontext():
        require_layout(layout, number, [3, 0, 2], {"CPU": 1.0})


class Group:
    """A fake placement group of Ray."""

    bundle_specs: ClassVar[list[dict[str, float]]] = [{"CPU": 2.0}, {"CPU": 3.0}]


@pytest.fixture
def in_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has one CPU of the first bundle of a group, and its actors must be in that group, too."""
    context = SimpleNamespace(
        get_assigned_resources=lambda: {"CPU": 1.0}, should_capture_child_tasks_in_placement_group=True
    )
    connect_to({"one": {"CPU": 64.0}}, monkeypatch, context, Group())


@pytest.mark.usefixtures("in_group")
def test_actors_of_a_process_in_a_placement_group_are_in_it_and_as_many_as_fit() -> None:
    placement = Placement(backend="ray")
    cluster = RayCluster(placement)
    assert cluster.count_places(placement) == 4
    options = cluster.actor_options()
    assert isinstance(options["scheduling_strategy"].placement_group, Group)
    assert (options["num_cpus"], options.get("label_selector")) == (1, None)
    # A group needs all of its nodes.
    message = "the placement group of this process has a node that is not of use: it has other versions; install"
    with pytest.raises(ConfigError, match=message):
        cluster.leave_out("one", "it has other versions", "install the same", ConfigError)
    with pytest.raises(
        ConfigError, match=r"no place for an actor, which asks for 4 CPU, beside the process itself; add"
    ):
        RayCluster(Placement(backend="ray", ray_num_cpus=4))


def test_autoscaler_is_asked_for_as_many_places_as_there_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connect_to({"head": {"memory": 1.0}}, monkeypatch)
    training, evaluation = (Placement(backend="ray", num_workers=number, ray_num_cpus=2) for number in (3, 2))
    cluster = RayCluster(training)
    assert [cluster.count_places(each) for each in (training, evaluation, training)] == [0, 0, 0]
    assert connection.requested == [[{"CPU": 2.0}] * 3]
    connection.resources |= {"1": {"CPU": 4.0}, "2": {"CPU": 4.0}}
    monkeypatch.setattr(cluster, "_next_count", 0.0)
    assert cluster.count_places(training) == 4
    cluster.leave()
    # Nothing is asked for any more.
    assert connection.requested[1:] == [[]]
