"""The decisions of the pool of Ray actors, tested with fake actors and a fake cluster that record their calls."""

import logging
import re
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("ray")

import ray

from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError, ConfigError
from maml_rl.samplers.work.child.messages import Failed
from maml_rl.samplers.work.ray import cluster as ray_cluster
from maml_rl.samplers.work.ray import places, pool_metrics, team
from maml_rl.samplers.work.ray import pool as ray_pool
from maml_rl.samplers.work.ray.actor import Introduction, Raised, own_versions
from maml_rl.samplers.work.ray.cluster import RayCluster
from maml_rl.samplers.work.ray.worker import Call, Unit

pytestmark = pytest.mark.ray

VERSIONS = own_versions()


class Actor:
    """A fake actor: records its calls, and counts how often they are polled."""

    def __init__(self, index: int) -> None:
        self.actor_id, self.index = f"actor-{index}", index
        self.known: Any = None
        self.looks = 0
        self.since = 0.0
        self.seconds: dict[str, float] = {}
        self._calls: deque[Call] = deque()

    @property
    def calls(self) -> deque[Call]:
        self.looks += 1
        return self._calls

    def give(self, unit: Unit) -> None:
        self._calls.append(Call(0, unit, None))
        unit.copies += 1

    def take_call(self) -> Call:
        call = self._calls.popleft()
        call.unit.copies -= 1
        return call

    def end(self) -> None:
        pass

    def abandon_done(self) -> None:
        pass


class Clusters:
    """A fake cluster: nodes by id with their CPUs, on which actors are placed one after the other."""

    address, shares, nothing_left = "head:6379", False, "no node of the Ray cluster is left"
    nodes: Any = None

    def __init__(self, cpus: dict[str, int], strict: bool = False) -> None:
        self.cpus, self.left_out, self.strict = cpus, {}, strict
        self.places: dict[str, str] = {}
        self.dead: set[str] = set()

    def count_is_due(self) -> bool:
        return False

    def actor_options(self) -> dict[str, Any]:
        return {}

    def count_places(self) -> int:
        found = sum(number for node, number in self.cpus.items() if node not in self.left_out)
        if self.strict and self.left_out:
            raise ConfigError("too few CPUs")
        return found

    def refuse(self, node: str, cause: str) -> bool:
        is_new = node not in self.left_out
        self.left_out.setdefault(node, cause)
        return is_new

    @property
    def refused(self) -> str:
        return "; ".join(self.left_out.values())

    def place_of(self, actor_id: str) -> tuple[str, str]:
        node = self.places.get(actor_id, "")
        return node, f"10.0.0.{node}" if node else ""

    def has(self, node: str) -> bool:
        return node not in self.dead

    def leave(self) -> None:
        pass


def pool_of(
    cpus: dict[str, int], monkeypatch: pytest.MonkeyPatch, num_workers: int | None = None, **options: Any
) -> tuple[Any, Clusters]:
    cluster = Clusters(cpus, **options)
    counted = iter(range(100_000))
    monkeypatch.setattr(team, "RayCluster", lambda *arguments: cluster)
    monkeypatch.setattr(team, "RayWorker", lambda *arguments, **rest: Actor(next(counted)))
    monkeypatch.setattr(ray, "put", lambda value: value)
    placement = Placement(
        backend="ray",
        num_workers=num_workers,
        step_timeout=1.0,
        max_restarts=1,
        ray_start_timeout=30.0,
        ray_head_timeout=1.0,
    )
    return ray_pool.RayPool(placement, "'env'", (b"\x80\x04N.", b"\x80\x04N."), 1), cluster


def introduce(pool: Any, actor: Any, node: str) -> None:
    actor.take_call()
    pool._team.began(actor, Introduction(1, node, f"10.0.0.{node}", VERSIONS))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


# Nodes on which actors do not start.


def test_node_where_actors_die_as_they_start_is_left_out_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, cluster = pool_of({"1": 1, "2": 2}, monkeypatch)
    pool._team.hire(9)
    healthy = pool._team.actors[0]
    introduce(pool, healthy, "1")
    failures = 0
    while len(pool._team.actors) > 1:
        actor = next(each for each in pool._team.actors if each.known is None)
        cluster.places[actor.actor_id] = "2"
        pool._lose(actor, "was lost: no torch")
        failures += 1
    # Two CPUs: two actors were starting on them; max_restarts=1 allows the first failure.
    assert failures == 3
    assert list(cluster.left_out) == ["2"]
    (warning,) = warnings_of(caplog)
    assert "2 Ray actors died while they started on the node 10.0.0.2; the last was lost: no torch" in warning
    assert "it continues without that node" in warning


def test_failed_starts_of_one_node_do_not_count_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cluster = pool_of({str(number): 1 for number in range(6)}, monkeypatch)
    pool._team.hire(6)
    # Six failures in all; one is allowed per node.
    for number, actor in enumerate(list(pool._team.actors)):
        cluster.places[actor.actor_id] = str(number)
        pool._lose(actor, "was lost")
    assert cluster.left_out == {}
    assert len(pool._team.actors) == 6


def test_starts_that_end_with_their_node_do_not_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, cluster = pool_of({"1": 1, "2": 4}, monkeypatch)
    pool._team.hire(5)
    cluster.dead.add("2")
    for actor in pool._team.actors[1:]:
        cluster.places[actor.actor_id] = "2"
        pool._lose(actor, "was lost: its node was terminated")
    assert (cluster.left_out, warnings_of(caplog)) == ({}, [])


def test_no_node_left_is_one_error_with_all_causes_and_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, cluster = pool_of({"1": 1, "2": 1}, monkeypatch)
    pool._team.hire(2)
    one, two = list(pool._team.actors)
    one.take_call()
    pool._team.began(one, Introduction(1, "1", "10.0.0.1", {**VERSIONS, "gymnasium": "9.9.9"}))
    cluster.places[two.actor_id] = "2"
    two.take_call()
    with pytest.raises(ChildEnvError) as raised:
        pool._team.cannot_load(two, "no module my_family")
    assert str(raised.value) == (
        "no node of the Ray cluster is left: the Ray node 10.0.0.1 has gymnasium 9.9.9, this process has "
        f"{VERSIONS['gymnasium']}; Ray actors cannot load 'env' or the policy on the node 10.0.0.2: no module "
        "my_family; install what is missing on all nodes, or send it along with a runtime_env (docs/scaling.md)"
    )
    assert warnings_of(caplog) == []


def test_strict_run_ends_when_a_node_has_to_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cluster = pool_of({"1": 1, "2": 1}, monkeypatch, strict=True)
    pool._team.hire(2)
    actor = pool._team.actors[1]
    actor.take_call()
    with pytest.raises(ConfigError, match="too few CPUs"):
        pool._team.began(actor, Introduction(1, "2", "10.0.0.2", {**VERSIONS, "code of maml_rl": "0123"}))
    assert list(cluster.left_out) == ["2"]


def test_node_with_other_code_of_the_same_version_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, cluster = pool_of({"1": 1, "2": 1}, monkeypatch)
    pool._team.hire(2)
    one, two = list(pool._team.actors)
    introduce(pool, one, "1")
    two.take_call()
    pool._team.began(two, Introduction(1, "2", "10.0.0.2", {**VERSIONS, "code of maml_rl": "0123"}))
    (warning,) = warnings_of(caplog)
    assert f"10.0.0.2 has code of maml_rl 0123, this process has {VERSIONS['code of maml_rl']}; it" in warning
    assert list(cluster.left_out) == ["2"]


# Metrics for the monitoring of a cluster.


class Noted:
    """A fake metric of Ray."""

    values: ClassVar[dict[str, list[float]]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._values = self.values.setdefault(name, [])
        assert description

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert tags == {"environment": "'env'"}

    def set(self, value: float) -> None:
        self._values.append(value)

    def inc(self) -> None:
        self._values.append(1)


def test_actors_and_losses_are_reported_to_the_monitoring_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(pool_metrics, kind, Noted)
    pool, cluster = pool_of({"1": 2}, monkeypatch)
    pool._team.hire(2)
    for actor in list(pool._team.actors):
        introduce(pool, actor, "1")
    actor = pool._team.actors[0]
    actor.give(Unit("run", ()))
    pool._lose(actor, "was lost")
    assert Noted.values["maml_rl_actors"] == [1, 2, 1]
    assert len(Noted.values["maml_rl_actors_lost"]) == 1
    page = (Path(__file__).resolve().parents[4] / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in Noted.values)
    assert cluster.left_out == {}


def test_node_that_cannot_import_the_engine_in_a_phase_is_left_out_and_others_take_its_tasks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, cluster = pool_of({"1": 1, "2": 1}, monkeypatch)
    pool._team.hire(2)
    good, bad = list(pool._team.actors)
    for actor, node in ((good, "1"), (bad, "2")):
        introduce(pool, actor, node)
        cluster.places[actor.actor_id] = node
    units = [Unit("run", ()) for _ in range(4)]
    pool._units.begin(units)
    pool._units.assign(pool._team.actors)
    assert len(bad.calls) == 2
    failure = Failed(0, "ImportError", "no libGL", "", "ImportError: no libGL", None, None)
    monkeypatch.setattr(ray, "get", lambda *arguments, **options: Raised(failure, None, "actor", True))
    assert pool._receive(bad)[1] is None
    assert set(pool._units.waiting) == {units[1], units[3]}
    assert pool._team.actors == [good]
    (warning,) = warnings_of(caplog)
    assert warning.startswith("Ray actors cannot load 'env' or the policy on the node 10.0.0.2: ImportError: no libGL")


@pytest.mark.parametrize("number", [1, 2])
def test_blocks_are_counted_in_words(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, _ = pool_of({"1": 3}, monkeypatch)
    pool.warn_of_unused_places(number, "block")
    assert f"a phase has {['1 block', '2 blocks'][number - 1]}, and" in warnings_of(caplog)[0]


# CPUs and tasks.


def test_workers_beyond_the_number_of_tasks_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, _ = pool_of({"1": 64}, monkeypatch, num_workers=48)
    for num_tasks in (48, 20, 20):
        pool.warn_of_unused_places(num_tasks)
    (warning,) = warnings_of(caplog)
    assert "a phase has 20 tasks, and one actor samples each, so that 28 of the 48 actors" in warning


@pytest.mark.parametrize("idle", [0.0, 0.5])
def test_assigning_units_polls_each_actor_a_few_times_for_any_number_of_units(
    idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks(size: int) -> float:
        pool, _ = pool_of({"1": size}, monkeypatch)
        pool._team.hire(size)
        for actor in pool._team.actors:
            introduce(pool, actor, "1")
        units = [Unit("run", ()) for _ in range(round(size * (1.0 - idle)))]
        pool._units.begin(units)
        for actor in pool._team.actors:
            actor.looks = 0
        # Units that an actor has had for long are given to idle actors.
        pool._units.seconds = [0.0]
        pool._units.assign(pool._team.actors)
        assert sum(unit.copies for unit in units) == size
        return sum(actor.looks for actor in pool._team.actors) / size

    assert looks(800) <= 1.2 * looks(100)
    assert looks(800) < 12


def test_unit_whose_reply_was_lost_with_an_actor_is_not_taken_for_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = pool_of({"1": 1}, monkeypatch)
    pool._team.hire(1)
    harmless, deadly = Unit("harmless", ()), Unit("deadly", ())
    pool._units.begin([harmless, deadly])

    def assign() -> list[Unit]:
        (actor,) = pool._team.actors
        introduce(pool, actor, "1")
        pool._units.assign(pool._team.actors)
        return [call.unit for call in actor.calls]

    assert assign() == [harmless, deadly]
    pool._lose(pool._team.actors[0], "was lost, with its reply to the call before")
    assert assign() == [harmless]
    pool._team.actors[0].take_call()
    pool._units.open.discard(harmless)
    pool._units.assign(pool._team.actors)
    pool._lose(pool._team.actors[0], "was lost")
    assert assign() == [deadly]
    with pytest.raises(ChildEnvError, match="2 Ray actors were lost in deadly"):
        pool._lose(pool._team.actors[0], "was lost")


# The choice of the cluster.


def test_cluster_of_this_machine_is_found_where_ray_records_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ray._common.utils import get_ray_address_file

    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for variable in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
        file = Path(get_ray_address_file(None))
        file.parent.mkdir(parents=True)
        file.write_text(f"{variable.lower()}:6379\n")
        assert ray_cluster._last_cluster() == f"{variable.lower()}:6379"


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake clusters on this machine that record connections: those that answer, and the one last started."""
    known = SimpleNamespace(answering={"one:1", "two:2"}, last="one:1", made=[])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(RayCluster, "_found", None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def init(**options: Any) -> None:
        known.made.append(options["address"])
        known.options = options

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_answers", lambda address, seconds: address in known.answering)
    monkeypatch.setattr(ray_cluster, "_is_node_of", lambda address, seconds: True)
    monkeypatch.setattr(ray_cluster, "_last_cluster", lambda: known.last)
    return known


def connect(address: str | None = None, **options: Any) -> None:
    ray_cluster._connect(Placement(backend="ray", ray_address=address, ray_head_timeout=1.0, **options))


def test_connection_is_quiet_by_default_and_has_the_runtime_env(connections: Any) -> None:
    connect()
    assert connections.options["log_to_driver"] is False
    assert "runtime_env" not in connections.options
    env = {"env_vars": {"LICENSE": "mine"}}
    connect(ray_log_to_driver=True, ray_runtime_env=env)
    assert connections.options["log_to_driver"] is True
    assert connections.options["runtime_env"] == env


def test_program_without_an_address_stays_with_its_cluster_when_another_is_started(connections: Any) -> None:
    connect()
    connections.last = "two:2"
    connect()
    assert connections.made == ["one:1", "one:1"]
    connect("auto")
    assert connections.made[-1] == "two:2"
    connections.answering.remove("one:1")
    with pytest.raises(ConfigError, match=r"one:1, which this process has used so far, does not answer.*ray_address"):
        connect()


def test_program_that_began_with_a_cluster_of_its_own_stays_with_its_own(connections: Any) -> None:
    connections.last = None
    connect()
    connections.last = "two:2"
    connect()
    assert connections.made == ["local", "local"]


def test_machine_that_is_not_a_node_is_refused_with_the_remedy(
    connections: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_is_node_of", lambda address, seconds: False)
    with pytest.raises(
        ConfigError, match=r"not a node of the Ray cluster at one:1; have it join with `ray start --add"
    ):
        connect("one:1")
    assert connections.made == []


@pytest.mark.parametrize(("here", "is_node"), [({"aa"}, True), ({"bb"}, False), ({"cc"}, False), (set(), False)])
def test_node_of_the_cluster_that_is_alive_on_this_machine_makes_it_part_of_it(
    here: set[str], is_node: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, dead = (SimpleNamespace(state=state, ALIVE=0) for state in (0, 1))
    nodes = {bytes.fromhex("aa"): alive, bytes.fromhex("bb"): dead}
    client = SimpleNamespace(get_all_node_info=lambda timeout: nodes)
    monkeypatch.setattr(ray._raylet, "GcsClient", lambda address: client)
    monkeypatch.setattr(ray._private.services, "find_node_ids", lambda: here)
    monkeypatch.setattr(ray_cluster, "_speaks_grpc", lambda address: True)
    started = time.monotonic()
    assert ray_cluster._is_node_of("one:1", 0.3) is is_node
    assert (time.monotonic() - started >= 0.3) is not is_node


# Nodes for actors that request no CPU.


def connect_to(nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this process is connected to a cluster with these nodes."""
    monkeypatch.setattr(ray_cluster, "_connect", lambda placement: False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="head:6379"))
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(places, "get_current_placement_group", lambda: None)


def nodes_with(*resources: dict[str, float]) -> list[dict[str, Any]]:
    return [{"NodeID": str(index), "Alive": True, "Resources": each} for index, each in enumerate(resources)]


def test_actors_that_request_no_cpu_stay_off_nodes_without_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": "head", "Alive": True, "Resources": {"memory": 1.0}},
        {"NodeID": "worker", "Alive": True, "Resources": {"CPU": 2.0}},
        {"NodeID": "other", "Alive": True, "Resources": {"CPU": 1.0}},
        {"NodeID": "gone", "Alive": False, "Resources": {"CPU": 8.0}},
    ]
    connect_to(nodes, monkeypatch)
    training, evaluating = (RayCluster(Placement(backend="ray", ray_head_timeout=1.0)) for _ in range(2))
    try:
        assert (training.count_places(), training.nodes) == (3, None)
        assert training.actor_options()["num_cpus"] == 1
        assert evaluating.count_places() == 3
        assert evaluating.actor_options()["num_cpus"] == 0
        assert evaluating.nodes == {"ray.io/node-id": "in(other,worker)"}
        assert evaluating.refuse("other", "it has other versions")
        assert (evaluating.count_places(), evaluating.nodes) == (2, {"ray.io/node-id": "in(worker)"})
    finally:
        evaluating.leave()
        training.leave()


@pytest.mark.parametrize("name", ["ray_start_timeout", "ray_head_timeout"])
def test_limits_that_are_not_positive_are_refused_before_anything_starts(name: str) -> None:
    from maml_rl import MultiTaskSampler
    from maml_rl.policies import NormalMLPPolicy

    with pytest.raises(ValueError, match=f"{name} must be greater than 0, got 0"):
        MultiTaskSampler("2DNavigation-v0", {}, 2, NormalMLPPolicy(2, 2, (4,)), backend="ray", **{name: 0.0})
    assert not ray.is_initialized()


def test_start_limit_ends_with_the_name_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cluster = pool_of({"1": 1}, monkeypatch)
    cluster.describe_cpus = lambda: "the cluster is full"  # type: ignore[attr-defined]
    pool._team.hire(1)
    pool._team.look_after_starts(29.0)
    with pytest.raises(ConfigError, match=r"0 of 1 Ray actors have started after 30 s.*raise ray_start_timeout=30$"):
        pool._team.look_after_starts(30.0)


def test_actors_that_wait_for_nodes_that_have_left_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cluster = pool_of({"1": 1}, monkeypatch)
    cluster.describe_cpus = lambda: "the cluster has 0 CPUs"  # type: ignore[attr-defined]
    pool._team.hire(1)
    (waiting,) = pool._team.actors
    pool._team.look_after_starts(11.0)
    assert pool._team.actors == [waiting]

    def count() -> int:
        cluster.nodes = {"ray.io/node-id": "in(2)"}
        return 1

    monkeypatch.setattr(cluster, "count_places", count)
    pool._team.look_after_starts(22.0)
    (other,) = pool._team.actors
    assert other is not waiting


def test_head_limit_ends_with_the_name_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cluster = pool_of({"1": 1}, monkeypatch)
    cluster.is_there = lambda interrupted: False  # type: ignore[attr-defined]
    with pytest.raises(ChildEnvError, match=r"is gone: it does not answer for ray_head_timeout=1 s; start a cluster"):
        pool._team.require_cluster()


# Requests of actors, and their places.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray_num_cpus": 0}, "ray_num_cpus must be greater than 0, got 0"),
        ({"ray_num_cpus": "2"}, "ray_num_cpus must be a valid number, got '2'"),
        ({"ray_num_cpus": 1.5}, "ray_num_cpus must be whole or less than 1, as Ray shares single units alone, got 1.5"),
        ({"ray_resources": {"simulator": -1}}, "ray_resources['simulator'] must be greater than 0, got -1"),
        ({"ray_resources": {"CPU": 2}}, "ray_resources names CPU; give ray_num_cpus instead"),
        (
            {"ray_placement_group": "pack"},
            "must be 'PACK', 'SPREAD', 'STRICT_PACK' or 'STRICT_SPREAD', got 'pack'",
        ),
        ({"ray_placement_group": "PACK"}, "reserves all actors at once; say how many by num_workers"),
    ],
)
def test_inconsistent_requests_are_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Placement(backend="ray", **options)


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
    assert sum(places.places_on(node, asked) for node in nodes) == expected


def test_actors_request_the_given_resources_from_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_to(nodes_with({"CPU": 4.0, "GPU": 1.0, "memory": 4e9, "simulator": 1.0}), monkeypatch)
    resources = {"GPU": 0.25, "memory": 1_000_000_000, "simulator": 0.5}
    env = {"env_vars": {"LICENSE": "mine"}}
    cluster = RayCluster(Placement(backend="ray", ray_num_cpus=2, ray_resources=resources, ray_runtime_env=env))
    try:
        assert cluster.count_places() == 2
        asked = {"num_cpus": 2, "num_gpus": 0.25, "memory": 1_000_000_000, "resources": {"simulator": 0.5}}
        scheduling = {"scheduling_strategy": "SPREAD", "label_selector": None}
        assert cluster.actor_options() == {**asked, **scheduling, "runtime_env": env}
    finally:
        cluster.leave()


@pytest.mark.parametrize("options", [{"ray_num_cpus": 4}, {"ray_resources": {"simulator": 1}}])
def test_resource_that_no_node_has_is_refused_at_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    connect_to(nodes_with({"CPU": 2.0}, {"CPU": 2.0}), monkeypatch)
    with pytest.raises(
        ConfigError, match=r"no node of the Ray cluster at head:6379 has (4 CPU|1 CPU and 1 simulator),"
    ):
        RayCluster(Placement(backend="ray", **options))
    # Nodes with CPUs may still join.
    connect_to(nodes_with({"memory": 1.0}), monkeypatch)
    waiting = RayCluster(Placement(backend="ray", **options))
    assert waiting.count_places() == 0
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
        places.require_layout(layout, number, [3, 0, 2], {"CPU": 1.0})


class Group:
    """A fake placement group of Ray."""

    bundle_specs: ClassVar[list[dict[str, float]]] = [{"CPU": 2.0}, {"CPU": 3.0}]


@pytest.fixture
def in_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has one CPU of the first bundle of a group, and its actors must be in that group, too."""
    connect_to(nodes_with({"CPU": 64.0}), monkeypatch)
    context = SimpleNamespace(
        gcs_address="head:6379",
        get_assigned_resources=lambda: {"CPU": 1.0},
        should_capture_child_tasks_in_placement_group=True,
    )
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(places, "get_current_placement_group", Group)


@pytest.mark.usefixtures("in_group")
def test_actors_of_a_process_in_a_placement_group_are_in_it_and_as_many_as_fit() -> None:
    training, evaluating = (RayCluster(Placement(backend="ray")) for _ in range(2))
    try:
        assert training.count_places() == evaluating.count_places() == 4
        for cluster, cpus in ((training, 1), (evaluating, 0)):
            options = cluster.actor_options()
            assert isinstance(options["scheduling_strategy"].placement_group, Group)
            assert (options["num_cpus"], options.get("label_selector")) == (cpus, None)
        # A group needs all of its nodes.
        assert training.refuse("0", "it has other versions")
        assert training.count_places() == 0
        assert training.nothing_left == "the placement group of this process has a node that is not of use"
    finally:
        evaluating.leave()
        training.leave()
    with pytest.raises(
        ConfigError, match=r"no place for an actor, which asks for 4 CPU, beside the process itself; add"
    ):
        RayCluster(Placement(backend="ray", ray_num_cpus=4))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"pips": ["numpy"]}, "ray_runtime_env has 'pips', which Ray does not know; did you mean 'pip'?"),
        ({"env_vars": {"A": 1}}, "ray_runtime_env is not one of Ray's: "),
    ],
)
def test_runtime_env_that_ray_does_not_know_is_refused_before_anything_starts(env: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RayCluster(Placement(backend="ray", ray_runtime_env=env))
