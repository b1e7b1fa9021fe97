"""The choice of the Ray cluster that this process connects to, tested with clusters that only record connections."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError, ConfigError
from maml_rl.samplers.work.ray import connection as ray_connection
from maml_rl.samplers.work.ray.connection import Connection

pytestmark = [pytest.mark.ray, pytest.mark.timeout(60)]


def test_cluster_of_this_machine_is_found_where_ray_records_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ray._common.utils import get_ray_address_file

    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for variable in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
        file = Path(get_ray_address_file(None))
        file.parent.mkdir(parents=True)
        file.write_text(f"{variable.lower()}:6379\n")
        assert ray_connection._last_cluster() == f"{variable.lower()}:6379"


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake clusters on this machine that record connections: those that answer, and the one last started."""
    known = SimpleNamespace(answering={"one:1", "two:2"}, last="one:1", made=[])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(Connection, "_found", None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def init(**options: Any) -> None:
        known.made.append(options["address"])
        known.options = options

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_connection, "_answers", lambda address, seconds: address in known.answering)
    monkeypatch.setattr(ray_connection, "_is_node_of", lambda address, seconds: True)
    monkeypatch.setattr(ray_connection, "_last_cluster", lambda: known.last)
    return known


def connect(address: str | None = None, **options: Any) -> None:
    ray_connection._connect(Placement(backend="ray", ray_address=address, ray_head_timeout=1.0, **options))


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
    monkeypatch.setattr(ray_connection, "_is_node_of", lambda address, seconds: False)
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
    monkeypatch.setattr(ray_connection, "_speaks_grpc", lambda address: True)
    started = time.monotonic()
    assert ray_connection._is_node_of("one:1", 0.3) is is_node
    assert (time.monotonic() - started >= 0.3) is not is_node


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"pips": ["numpy"]}, "ray_runtime_env has 'pips', which Ray does not know; did you mean 'pip'?"),
        ({"env_vars": {"A": 1}}, "ray_runtime_env is not one of Ray's: "),
    ],
)
def test_runtime_env_that_ray_does_not_know_is_refused_before_anything_starts(env: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Connection.join(Placement(backend="ray", ray_runtime_env=env))
    assert not ray.is_initialized()


def test_address_in_the_environment_that_is_none_is_named(connections: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    with pytest.raises(ConfigError, match=r"host:port in RAY_ADDRESS, got 'http://head:8265'; unset it, run this on"):
        connect()
    connect("two:2")
    assert connections.made == ["two:2"]


def test_token_with_a_line_break_is_refused(connections: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret\n")
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN has a space or a line break in it; give the token alone"):
        connect()
    assert connections.made == []


@pytest.fixture
def joined(connections: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Connections are only recorded, and begin with a call of `ray.init`; jobs are numbered."""
    state = SimpleNamespace(job=0, ended=0, initialized=False)
    init = ray.init

    def begin(**options: Any) -> None:
        init(**options)
        state.job, state.initialized = state.job + 1, True

    def shutdown() -> None:
        state.ended, state.initialized = state.ended + 1, False

    context = SimpleNamespace(gcs_address="192.0.2.2:1", get_job_id=lambda: str(state.job), get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "init", begin)
    monkeypatch.setattr(ray, "shutdown", shutdown)
    monkeypatch.setattr(ray, "is_initialized", lambda: state.initialized)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.2")
    monkeypatch.setattr(ray_connection, "_replace_skipped", lambda pattern: None)
    monkeypatch.setattr(Connection, "_current", None)
    connections.answering.add("localhost:1")
    return state


def join(address: str | None = None) -> Connection:
    return Connection.join(Placement(backend="ray", ray_address=address, ray_head_timeout=0.5))


@pytest.mark.parametrize("second", ["localhost:1", "127.0.0.1:1", "192.0.2.2:1", "auto", None])
def test_second_sampler_names_the_same_cluster_in_any_way(joined: Any, second: str | None) -> None:
    first, other = join("localhost:1"), join(second)
    assert first is other
    first.leave()
    assert joined.ended == 0
    other.leave()
    assert (joined.job, joined.ended) == (1, 1)


def test_second_sampler_on_another_cluster_is_refused(joined: Any) -> None:
    first = join("localhost:1")
    for address in ("localhost:2", "192.0.2.9:1"):
        with pytest.raises(ConfigError, match=f"connected to the Ray cluster at 192.0.2.2:1, not to {address}"):
            join(address)
    first.leave()
    assert joined.ended == 1


def test_samplers_of_several_threads_connect_once(joined: Any) -> None:
    found: list[Connection] = []
    threads = [threading.Thread(target=lambda: found.append(join("localhost:1"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found)), joined.job) == (8, 1, 1)
    for connection in found:
        connection.leave()
    assert joined.ended == 1


def test_connection_that_other_code_has_ended_is_one_line_and_is_made_anew(joined: Any) -> None:
    first = join("localhost:1")
    ray.shutdown()
    with pytest.raises(ConfigError, match=r"ray.shutdown\(\) was called while a sampler was open"):
        first.require_open()
    second = join("localhost:1")
    second.require_open()
    assert joined.job == 2
    first.leave()
    second.leave()
    assert joined.ended == 2


# A head node that does not answer.


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was registered for the end of the process, instead of being registered."""
    registered: list[Any] = []
    functions = SimpleNamespace(register=registered.append, unregister=lambda function: None)
    monkeypatch.setattr(ray_connection, "atexit", functions)
    return registered


def test_frozen_head_node_has_the_time_of_its_setting_and_the_caller_is_not_stuck(
    joined: Any, monkeypatch: pytest.MonkeyPatch, at_exit: list[Any]
) -> None:
    connection, over = join("localhost:1"), threading.Event()
    # It accepts connections, and answers nothing.
    monkeypatch.setattr(ray_connection, "_answers", lambda address, seconds: True)
    monkeypatch.setattr(ray, "nodes", lambda: over.wait(30.0))
    message = r"head node of the Ray cluster at 192.0.2.2:1 is gone: .*ray_head_timeout=0.2 s; start a cluster"
    with pytest.raises(ChildEnvError, match=message):
        connection.nodes(0.2)
    # From now on nobody asks it.
    monkeypatch.setattr(ray, "nodes", lambda: pytest.fail("asked again"))
    with pytest.raises(ChildEnvError, match="is gone"):
        connection.nodes(0.2)
    assert connection.gone
    # Ray would wait for it at the end of the process.
    assert at_exit == [ray_connection._leave_at_once]
    over.set()
    connection.leave()


@pytest.mark.parametrize("comes_back", [True, False])
def test_head_node_that_refuses_connections_may_come_back(
    comes_back: bool, joined: Any, monkeypatch: pytest.MonkeyPatch, at_exit: list[Any]
) -> None:
    connection = join("localhost:1")
    answers = iter([False, False, *([comes_back] * 1000)])
    monkeypatch.setattr(ray_connection, "_answers", lambda address, seconds: next(answers))
    monkeypatch.setattr(ray_connection, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "here", "Alive": True}, {"NodeID": "gone", "Alive": False}])
    if comes_back:
        assert [node["NodeID"] for node in connection.nodes(30.0)] == ["here"]
    else:
        with pytest.raises(ChildEnvError, match=r"does not answer for ray_head_timeout=0.05 s"):
            connection.nodes(0.05)
    connection.leave()


@pytest.mark.parametrize("seen", ["by the head node", "by its process"])
def test_end_of_the_node_of_this_machine_is_one_line(
    seen: str, joined: Any, monkeypatch: pytest.MonkeyPatch, at_exit: list[Any], tmp_path: Path
) -> None:
    connection, message = join("localhost:1"), r"the Ray node of this machine has ended, .* continue the run from"
    path = str(tmp_path / "raylet")
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({path!r}); s.listen(); print(flush=True); input()"
    node = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert node.stdout is not None
    node.stdout.readline()
    alive = [{"NodeID": "here", "Alive": True, "RayletSocketName": path}, {"NodeID": "there", "Alive": True}]
    monkeypatch.setattr(ray_connection, "_answers", lambda address, seconds: True)
    monkeypatch.setattr(ray, "nodes", lambda: alive)
    assert len(connection.nodes(1.0)) == 2
    connection.require_open()
    node.kill()
    node.communicate()
    if seen == "by the head node":
        alive[0]["Alive"] = False
        with pytest.raises(ChildEnvError, match=message):
            connection.nodes(1.0)
    else:
        with pytest.raises(ChildEnvError, match=message):
            connection.require_open()
    assert connection.node_ended
    connection.leave()
    # Ray would end this process in the middle of it.
    assert joined.ended == 0
