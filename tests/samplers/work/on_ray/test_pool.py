"""The decisions of the pool of Ray actors, with actors and nodes that only record what they are asked."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest

pytest.importorskip("ray")

import ray
from fake_connection import FakeConnection, connect_to
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, RayTaskError

from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError, ChildLost, ConfigError
from maml_rl.samplers.failures import Failed
from maml_rl.samplers.work.ray import pool as ray_pool
from maml_rl.samplers.work.ray.actor import Introduction, Look, own_versions
from maml_rl.samplers.work.ray.pool import Client, RayPool, RayWorker
from maml_rl.samplers.work.scheduler import Limits, Unit, Worker
from maml_rl.samplers.worker_progress import IN_RESET, IN_UPDATE

pytestmark = [pytest.mark.ray, pytest.mark.timeout(60)]

VERSIONS = own_versions()


class Actor(Worker):
    """A fake actor, which does nothing by itself."""

    def __init__(self, index: int, limits: Limits) -> None:
        super().__init__()
        self.actor_id, self.limits = f"actor-{index}", limits
        self.known: Any = None
        self.forgotten: list[int] = []
        self.ended = 0

    @property
    def ready(self) -> bool:
        return self.known is not None

    def _send(self, number: int, unit: Unit) -> Any:
        return object()

    def forget(self, job: Any) -> None:
        self.forgotten.append(job.number)

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RayPool, Client, FakeConnection]]:
    """Make a pool on nodes with these CPUs, and return it with its first sampler and the connection."""
    handles = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(ray_pool, "_REMOTE", handles)
    monkeypatch.setattr(ray_pool, "RayWorker", lambda index, handle, limits: Actor(index, limits))
    monkeypatch.setattr(ray, "put", lambda value: value)
    # Every place may be lost at once.
    monkeypatch.setattr("maml_rl.samplers.work.ray.cluster._COUNT_SECONDS", 0.0)

    def make(cpus: dict[str, int], **options: Any) -> tuple[RayPool, Client, FakeConnection]:
        monkeypatch.setattr(RayPool, "_pools", {})
        connection = connect_to({node: {"CPU": float(number)} for node, number in cpus.items()}, monkeypatch)
        return (*join("'env'", **options), connection)

    return make


def join(name: str, **options: Any) -> tuple[RayPool, Client]:
    placement = Placement(
        **{"backend": "ray", "step_timeout": 1.0, "max_restarts": 1, "ray_start_timeout": 30.0, **options}
    )
    return RayPool.join(name, placement, (b"\x80\x04N.", b"\x80\x04N."))


def hire(pool: RayPool, client: Client, number: int) -> list[Any]:
    """Have so many actors started, of which none is known yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_wait", lambda seconds: None)
        patch.setattr(pool, "_ready", lambda: pool.actors)
        pool.prepare(client, number)
    return list(pool.actors)


def introduce(pool: Any, actor: Any, node: str) -> None:
    actor.take_call()
    pool._began(actor, Introduction(1, node, f"10.0.0.{node}", VERSIONS))


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the warnings so far."""
    return lambda: [record.message for record in caplog.records if record.levelno == logging.WARNING]


# Nodes on which actors do not start.


def test_node_where_actors_die_as_they_start_is_left_out_with_one_warning(pool_of: Any, warned: Any) -> None:
    pool, client, nodes = pool_of({"1": 1, "2": 2})
    hire(pool, client, 9)
    healthy = pool.actors[0]
    introduce(pool, healthy, "1")
    failures = 0
    while len(pool.actors) > 1:
        actor = next(each for each in pool.actors if each.known is None)
        nodes.places[actor.actor_id] = "2"
        pool._lose(actor, "was lost: no torch")
        failures += 1
    # Two CPUs: two actors were starting on them; max_restarts=1 allows the first failure.
    assert failures == 3
    assert list(pool.cluster._refused) == ["2"]
    (warning,) = warned()
    assert "2 Ray actors died while they started on the node 10.0.0.2; the last was lost: no torch" in warning
    assert "it continues without that node" in warning


def test_failed_starts_count_for_their_own_node_and_not_if_it_has_left(pool_of: Any, warned: Any) -> None:
    pool, client, nodes = pool_of({str(number): 1 for number in range(6)})
    hire(pool, client, 6)
    # Six failures in all; one is allowed per node.
    for number, actor in enumerate(list(pool.actors)):
        nodes.places[actor.actor_id] = str(number)
        pool._lose(actor, "was lost")
    assert len(pool.actors) == 6
    del nodes.resources["5"]
    for actor in pool.actors[1:]:
        nodes.places[actor.actor_id] = "5"
        pool._lose(actor, "was lost: its node was terminated")
    assert (pool.cluster._refused, warned()) == ({}, [])


def test_no_node_left_is_one_error_with_all_causes_and_no_warning(pool_of: Any, warned: Any) -> None:
    pool, client, nodes = pool_of({"1": 1, "2": 1})
    one, two = hire(pool, client, 2)
    one.take_call()
    pool._began(one, Introduction(1, "1", "10.0.0.1", {**VERSIONS, "gymnasium": "9.9.9"}))
    nodes.places[two.actor_id] = "2"
    two.take_call()
    with pytest.raises(ChildEnvError) as raised:
        pool._cannot_load(two, "no module my_family")
    assert str(raised.value) == (
        "no node of the Ray cluster is left: the Ray node 10.0.0.1 has gymnasium 9.9.9, this process has "
        f"{VERSIONS['gymnasium']}; Ray actors cannot load 'env' or the policy on the node 10.0.0.2: no module "
        "my_family; install what is missing on all nodes, or send it along with a runtime_env (docs/scaling.md)"
    )
    assert warned() == []


@pytest.mark.parametrize("strict", [False, True])
def test_node_with_other_code_of_the_same_version_is_left_out_or_ends_a_strict_run(
    strict: bool, pool_of: Any, warned: Any
) -> None:
    pool, client, _ = pool_of({"1": 1, "2": 1}, num_workers=2 if strict else None, strict=strict)
    one, two = hire(pool, client, 2)
    introduce(pool, one, "1")
    two.take_call()
    ended = pytest.raises(ConfigError, match=r"num_workers=2, .* for 1 actors .* without .* that are left out \(the")
    with ended if strict else nullcontext():
        pool._began(two, Introduction(1, "2", "10.0.0.2", {**VERSIONS, "code of maml_rl": "0123"}))
    told = f"10.0.0.2 has code of maml_rl 0123, this process has {VERSIONS['code of maml_rl']}; it"
    assert [told in warning for warning in warned()] == [True] * (not strict)
    assert list(pool.cluster._refused) == ["2"]


# Metrics for the monitoring of a cluster.


class Noted:
    """A fake metric of Ray."""

    values: ClassVar[dict[str, list[float]]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._values = self.values.setdefault(name, [])
        assert description

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tags == {"environment": "'env'"}
        self._values.append(value)

    inc = set


def test_actors_and_losses_are_reported_to_the_monitoring_of_the_cluster(
    pool_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(ray_pool, kind, Noted)
    pool, client, _ = pool_of({"1": 2})
    hire(pool, client, 2)
    for actor in list(pool.actors):
        introduce(pool, actor, "1")
    actor = pool.actors[0]
    actor.give(Unit("run", ()))
    pool._lose(actor, "was lost")
    assert Noted.values["maml_rl_actors"] == [1, 2, 1]
    assert len(Noted.values["maml_rl_actors_lost"]) == 1
    page = (Path(__file__).resolve().parents[4] / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in Noted.values)
    assert pool.cluster._refused == {}


def test_node_that_cannot_import_the_engine_is_left_out_and_others_take_its_tasks(pool_of: Any, warned: Any) -> None:
    pool, client, nodes = pool_of({"1": 1, "2": 1})
    good, bad = hire(pool, client, 2)
    for actor, node in ((good, "1"), (bad, "2")):
        introduce(pool, actor, node)
        nodes.places[actor.actor_id] = node
    units = [Unit("run", ()) for _ in range(4)]
    pool._scheduler.begin(units)
    pool._scheduler.assign(pool.actors)
    assert len(bad.calls) == 2
    failure = Failed(0, "ImportError", "no libGL", "", "ImportError: no libGL", None, None, "while loading")
    assert received(pool, bad, replace(failure, cannot_load=True)) is None
    assert set(pool._scheduler.waiting) == {units[1], units[3]}
    assert pool.actors == [good]
    (warning,) = warned()
    assert warning.startswith("Ray actors cannot load 'env' or the policy on the node 10.0.0.2: ImportError: no libGL")


# CPUs and tasks.


def test_workers_beyond_the_number_of_tasks_are_reported_once(pool_of: Any, warned: Any) -> None:
    pool, client, _ = pool_of({"1": 64}, num_workers=48)
    # Of several samplers, the first one.
    pool.warn_of_unused_places(join("'env'", num_workers=48)[1], 20)
    for num_tasks in (48, 20, 20):
        pool.warn_of_unused_places(client, num_tasks)
    (warning,) = warned()
    assert "a phase has 20 tasks, and one actor samples each, so that 28 of the 48 actors" in warning
    pool, client, _ = pool_of({"1": 3})
    pool.warn_of_unused_places(client, 1, "block")
    assert "a phase has 1 block, and" in warned()[-1]


def test_slow_starts_are_reported_every_ten_seconds_and_end_at_their_limit(
    pool_of: Any, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, client, _ = pool_of({"1": 1})
    monkeypatch.setattr(pool.cluster, "describe_cpus", lambda: "the cluster is full")
    hire(pool, client, 1)
    for waited in (9.0, 10.0, 15.0, 20.0, 29.0):
        pool._look_after_starts(waited)
    assert len(warned()) == 2
    with pytest.raises(ConfigError, match=r"0 of 1 Ray actors have started after 30 s.*raise ray_start_timeout=30$"):
        pool._look_after_starts(30.0)


# Several samplers of a process.


def started(pool: RayPool, client: Client, number: int) -> list[Any]:
    actors = hire(pool, client, number)
    for actor in actors:
        introduce(pool, actor, "1")
        actor.known = Introduction(1, "1", "10.0.0.1", VERSIONS)
    return actors


def test_samplers_share_actors_and_use_no_more_of_them_than_they_have_workers(pool_of: Any) -> None:
    pool, training, _ = pool_of({"1": 8}, num_workers=3)
    same, evaluation = join("'env'", num_workers=1)
    other, _ = join("'env'", num_workers=1, ray_num_cpus=2)
    assert same is pool
    assert other is not pool
    assert (pool.cluster.actor_options()["num_cpus"], other.cluster.actor_options()["num_cpus"]) == (1, 2)
    actors = started(pool, training, 8)
    assert (len(actors), len(pool.actors_of(training)), len(pool.actors_of(evaluation))) == (3, 3, 1)
    assert hire(pool, evaluation, 8) == actors
    units = [Unit("run", ()) for _ in range(4)]
    pool._scheduler.begin(units)
    pool._scheduler.assign(pool.actors_of(evaluation))
    assert [len(actor.calls) for actor in actors] == [2, 0, 0]


def test_last_sampler_that_leaves_ends_the_actors_but_none_that_is_killed(
    pool_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, one, _ = pool_of({"1": 2})
    _, other = join("'other'")
    actors = started(pool, one, 2)
    one.killed = True
    with pytest.raises(ChildLost, match="were killed"):
        next(pool.results(one, [Unit("run", ())]))
    assert hire(pool, other, 2) == actors
    pool.leave(one)
    assert [(actor.forgotten, actor.ended) for actor in actors] == [([one.job.number], 0)] * 2
    monkeypatch.setattr(ray, "wait", lambda *arguments, **options: ([], []))
    pool.leave(other)
    pool.leave(other)
    assert [actor.ended for actor in actors] == [1, 1]
    again, _ = join("'env'")
    assert again is not pool


def test_driver_lists_as_many_actors_for_a_reply_of_many_as_of_few(
    pool_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(size: int) -> float:
        pool, client, _ = pool_of({"1": size})
        started(pool, client, size)
        ready: list[Any] = []
        listings = []

        def wait(references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
            """Replies come one after the other: a wait lasts until there are as many as it is for."""
            listings.append(len(references))
            missing = [each for each in references if each not in ready]
            if timeout:
                ready.extend(missing[: max(0, num_returns - len([each for each in references if each in ready]))])
            found = [each for each in references if each in ready][:num_returns]
            return found, []

        monkeypatch.setattr(ray, "wait", wait)
        monkeypatch.setattr(ray, "get", lambda reference, timeout: "reply")
        monkeypatch.setattr(Actor, "next_look", float("inf"), raising=False)
        assert len(list(pool.results(client, [Unit("run", ()) for _ in range(2 * size)]))) == 2 * size
        # An idle actor repeats the unit of a slow one, which depends on the clock: there are more replies than units.
        return sum(listings) / len(ready)

    assert listed(320) <= 1.5 * listed(80)
    assert listed(320) < 60


# What is left over.


def test_waiting_actors_stay_for_whoever_wants_most_and_leave_with_their_nodes(
    pool_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, training, nodes = pool_of({"1": 1, "2": 2})
    _, evaluation = join("'env'")
    one, *others = hire(pool, training, 3)
    introduce(pool, one, "1")
    monkeypatch.setattr(pool, "_wait", lambda seconds: None)
    pool.prepare(evaluation, 1)
    assert pool.actors == [one, *others]
    del nodes.resources["2"]
    pool.prepare(training, 3)
    assert pool.actors == [one]
    assert [actor.ended for actor in (one, *others)] == [0, 1, 1]


def test_sampler_whose_code_cannot_be_put_has_no_place_in_the_pool(
    pool_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, one, nodes = pool_of({"1": 1})

    def put(value: Any) -> Any:
        raise ObjectStoreFullError

    monkeypatch.setattr(ray, "put", put)
    with pytest.raises(ObjectStoreFullError):
        join("'other'")
    assert pool._clients == [one]
    monkeypatch.setattr(ray, "put", lambda value: value)
    nodes.is_open = False
    assert join("'env'")[0] is not pool


def test_results_take_the_samplers_limits_and_abandon_what_is_not_taken(
    pool_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, one, _ = pool_of({"1": 2})
    _, client = join("'env'", step_timeout=77.0)
    actors = started(pool, one, 2)
    units = [Unit("run", ()) for _ in range(3)]
    monkeypatch.setattr(pool, "_wait", lambda seconds: [(units[0], "reply")])
    results = pool.results(client, units)
    assert next(results) == (units[0], "reply")
    results.close()
    assert {actor.limits.call for actor in actors} == {77.0}
    assert not pool._scheduler.open
    assert all(unit.done for unit in units)


def answering(reply: Any) -> Any:
    """Have Ray answer with a reply, or raise an error, while this is a context."""
    answers: Any = {"side_effect": reply} if isinstance(reply, Exception) else {"return_value": reply}
    return patch.object(ray, "get", **answers)


def received(pool: RayPool, actor: Any, reply: Any) -> Any:
    """Return what the pool makes of a reply, or an error, of Ray."""
    with answering(reply):
        return pool._receive(actor)[1]


def test_full_object_store_counts_as_a_loss_of_the_unit_and_not_of_the_actor(pool_of: Any) -> None:
    pool, client, _ = pool_of({"1": 1})
    (actor,) = started(pool, client, 1)
    unit = Unit("run", ())
    pool._scheduler.begin([unit])
    error = RayTaskError("run", "traceback", ObjectStoreFullError())
    pool._scheduler.assign([actor])
    assert received(pool, actor, error) is None
    assert (list(pool._scheduler.waiting), len(unit.losses), pool.actors) == ([unit], 1, [actor])
    pool._scheduler.assign([actor])
    with pytest.raises(ChildEnvError, match="larger --object-store-memory"):
        received(pool, actor, error)


def test_only_the_first_result_of_a_unit_counts_and_a_loss_after_it_does_not(pool_of: Any, warned: Any) -> None:
    pool, client, _ = pool_of({"1": 3})
    actors = started(pool, client, 3)
    unit = Unit("run", ())
    pool._scheduler.begin([unit, Unit("run", ())])
    for actor in actors:
        actor.give(unit)
        actor.since = 0.0
    replies = "reply", "reply", GetTimeoutError()
    found = [received(pool, actor, reply) for actor, reply in zip(actors, replies, strict=True)]
    assert found == ["reply", None, None]
    assert all(actor.since > 0.0 for actor in actors[:2])
    assert (unit.losses, warned()) == ([], [])
    assert actors[2] not in pool.actors


# One actor.


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An actor of Ray that records what it is told, and whose answers are looks of its own."""
    told: list[Any] = []

    def method(name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: told.append((name, *arguments)) or name)

    handle = SimpleNamespace(**{name: method(name) for name in ("carry_out", "look", "abandon")})
    monkeypatch.setattr("maml_rl.samplers.work.scheduler.monotonic", lambda: 0.0)
    worker: Any = RayWorker(0, handle, Limits(Placement(step_timeout=1.0)))
    worker.told = told
    return worker


def seen(worker: Any, look: Any, now: float) -> str | None:
    """Have the pool look at an actor twice: the first time it asks, and the second time the answer is there."""
    with answering(look), patch.object(ray, "wait", lambda references, timeout: (references, [])):
        return worker.look(now) or worker.look(now)


def test_actor_is_told_once_that_results_are_no_longer_needed(worker: Any) -> None:
    units = [Unit("run", ()) for _ in range(2)]
    for unit in units:
        worker.give(unit)
    units[1].done = True
    for _ in range(2):
        worker.abandon_done()
    assert [each for each in worker.told if each[0] == "abandon"] == [("abandon", (1,))]


# A start, and an environment that is made, have 10 seconds; a step has one here.
@pytest.mark.parametrize(("steps", "seconds"), [(IN_RESET, 10.0), (3, 1.0)])
def test_actor_hangs_after_the_time_of_what_it_does(steps: int, seconds: float, worker: Any) -> None:
    worker.give(Unit("run", ()))
    look = Look((0, 1, 2.0), steps, 1, "{}", "")
    assert seen(worker, look, 5.0) is None
    assert seen(worker, look, 4.9 + seconds) is None
    updating = Look((0, 1, 2.0), IN_UPDATE, 1, "{}", "")
    assert seen(worker, updating, 4.95 + seconds) is None
    assert seen(worker, look, 14.9 + seconds) is None
    where = "in reset" if steps == IN_RESET else "in step 3"
    hang = seen(worker, look, 15.0 + seconds)
    assert hang is not None
    assert hang.startswith(f"hangs {where} of slot 1 with the task {{}}, for more than 1 s")


def test_actor_that_never_answers_in_a_call_says_nothing_of_the_call_before(worker: Any) -> None:
    worker.give(Unit("run", ()))
    assert seen(worker, Look((0, 1, 2.0), 3, 1, "{}", ""), 0.5) is None
    worker.take_call()
    worker.give(Unit("run", ()))
    hang = seen(worker, GetTimeoutError(), 10.0)
    assert hang == "did not answer for more than 1 s, and was killed"


def test_actor_is_not_killed_after_the_process_has_disconnected(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: killed.append(no_restart))
    for connected in (False, True):
        monkeypatch.setattr(ray, "is_initialized", lambda connected=connected: connected)
        worker.end()
    assert killed == [True]
