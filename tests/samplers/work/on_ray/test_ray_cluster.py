"""Runs on a real Ray cluster whose driver or head node dies, or whose nodes have other code."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest

pytest.importorskip("ray")

import ray
from cluster_on_this_machine import FINDS_TESTS, STORE, actor_processes, cluster_of, connected_to, wait_until
from faulty_env import HORIZON, LargeEnv

from maml_rl import MultiTaskSampler
from maml_rl.cli.evaluate import run_test
from maml_rl.cli.train import run_train
from maml_rl.errors import ChildEnvError, ConfigError
from maml_rl.policies import NormalMLPPolicy
from maml_rl.profiling import StageTimer
from tests.small_runs import untimed

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[4]
SMALL = ["--meta-batch-size", "4", "--fast-batch-size", "4", "--hidden-sizes", "8", "--max-episode-steps", "10"]


@pytest.fixture(autouse=True)
def nothing_left_behind(cluster: Any) -> Iterator[None]:
    """The cluster stays; no actor may."""
    yield
    if ray.is_initialized():
        ray.shutdown()
    wait_until(lambda: not actor_processes(), 20.0)


def sample(env: Any, **options: Any) -> int:
    """Sample a phase of two tasks, and return its number of steps."""
    policy, settings = NormalMLPPolicy(2, 2, (4,)), {"backend": "ray", "max_episode_steps": 3, **options}
    with MultiTaskSampler(env, {}, 2, policy, seed=0, num_workers=1, **settings) as sampler:
        return sampler.rollout(sampler.sample_tasks(2)).num_steps


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the line with which a run at an address is refused before it begins."""

    def refuse(address: str, *options: str, within: float = 15.0) -> str:
        started, run = time.monotonic(), tmp_path / "run"
        where = "--backend", "ray", "--ray-address", address, "--output-folder", str(run)
        assert run_train([*SMALL, *where, *options]) == 2
        # Ray's own client asks for 40 s.
        assert time.monotonic() - started < within
        assert not run.exists()
        (line,) = capsys.readouterr().err.splitlines()
        program, _, message = line.partition(": error: ")
        assert program == "train.py"
        return message

    return refuse


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", "")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Training.


def test_training_begun_in_child_processes_and_resumed_on_ray_equals_one_process(cluster: Any, tmp_path: Path) -> None:
    evaluating = ["--evaluate-every", "6", "--evaluation-tasks", "3"]
    settings = [*SMALL, *evaluating, "--checkpoint-every", "6", "--output-folder"]
    assert run_train([*settings, str(tmp_path / "plain"), "--num-workers", "0", "--num-batches", "18"]) == 0
    run = str(tmp_path / "mixed")
    assert run_train([*settings, run, "--num-workers", "2", "--num-batches", "6"]) == 0
    # The evaluations' actors request no CPU: they share those of the training's actors, which wait meanwhile.
    on_ray = ["--backend", "ray", "--ray-address", cluster.address, "--num-workers"]
    metrics, over = tmp_path / "mixed" / "metrics.jsonl", threading.Event()
    moments = [9]

    def kill_now_and_then() -> None:
        while moments and not over.wait(0.05):
            victims = actor_processes() if metrics.read_text().count("\n") >= moments[0] else []
            if victims:
                victims[0].kill()
                moments.pop(0)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        assert run_train([*settings, run, *on_ray, "2", "--num-batches", "18", "--resume"]) == 0
    finally:
        over.set()
        killer.join()
    assert not moments
    assert untimed(tmp_path / "mixed") == untimed(tmp_path / "plain")
    assert any("evaluation/return/step_0" in row for row in untimed(tmp_path / "mixed")[6:])
    last = "checkpoints/iteration-000018/tensors.safetensors"
    parameters = [(tmp_path / name / last).read_bytes() for name in ("plain", "mixed")]
    assert parameters[0] == parameters[1]
    tested = []
    for options in (["--num-workers", "0"], [*on_ray, "1"]):
        output = tmp_path / f"{len(tested)}.npz"
        assert run_test([run, "--meta-batch-size", "6", "--output", str(output), *options]) == 0
        tested.append(output.read_bytes())
    assert tested[0] == tested[1]


# Ends.


def training(run: Path, address: str, *options: str) -> subprocess.Popen[str]:
    """Return a process that trains, and has finished an iteration or two."""
    options = "--num-batches", "100000", "--output-folder", str(run), "--num-workers", "1", *options
    driver = start("train.py", *SMALL, *options, "--backend", "ray", "--ray-address", address)
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 1)
    return driver


def test_no_actor_is_left_when_the_driver_is_killed(cluster: Any, tmp_path: Path) -> None:
    driver = training(tmp_path / "run", cluster.address)
    assert actor_processes()
    driver.kill()
    driver.communicate()
    wait_until(lambda: not actor_processes(), 30.0)


def test_ctrl_c_ends_a_run_in_order(cluster: Any, tmp_path: Path) -> None:
    driver = training(tmp_path / "run", cluster.address)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert "train.py: interrupted; finished iterations are saved" in errors
    assert "Traceback" not in errors


# `test_connection.py` has one that is killed, and a node that ends.
def test_head_that_freezes_ends_the_run_with_the_remedy(tmp_path: Path) -> None:
    with cluster_of(1) as lost:
        driver = training(tmp_path / "run", address := lost.address, "--ray-head-timeout", "3")
        head = lost.head_node.all_processes["gcs_server"][0].process
        head.send_signal(signal.SIGSTOP)
        try:
            _, errors = driver.communicate(timeout=90)
        finally:
            head.send_signal(signal.SIGCONT)
        assert driver.returncode == 1
        gone = f"the head node of the Ray cluster at {address} is gone: it does not answer for ray_head_timeout=3 s"
        assert gone in errors
        assert "Traceback" not in errors
        wait_until(lambda: not actor_processes(), 20.0)
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.nightly
def test_submitted_job_trains_with_the_gpu_that_it_requested(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "my.yaml").write_text("env-name: 2DNavigation-v0\n")
    train = [sys.executable, "-m", "maml_rl", "train", "my.yaml", "--backend", "ray", *SMALL, "--num-batches", "2"]
    words = [*train, "--num-workers", "1", "--output-folder", str(tmp_path / "run")]
    (tmp_path / "sent" / "job.sh").write_text(f'echo "GPU $CUDA_VISIBLE_DEVICES"; exec {shlex.join(words)}\n')
    # A GPU that is only declared: Ray assigns it to the job like a real one.
    with cluster_of(2, include_dashboard=True, dashboard_port=0, num_gpus=1, dashboard_agent_listen_port=0) as running:
        to = ["--address", f"http://{running.head_node.webui_url}", "--working-dir", str(tmp_path / "sent")]
        submit = ["-m", "ray.scripts.scripts", "job", "submit", *to, "--entrypoint-num-gpus", "1", "--", "sh", "job.sh"]
        output, errors = start(*submit).communicate(timeout=300)
        while "No available agent" in errors:
            # The node has just been started.
            time.sleep(1.0)
            output, errors = start(*submit).communicate(timeout=300)
    assert "GPU 0\n" in output, errors
    assert "iteration     1: return" in output
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2


# Code and versions.


def test_family_of_the_user_travels_with_the_runtime_env(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own" / "travelling_family"
    package.mkdir(parents=True)
    code = "from maml_rl.envs.families.navigation import Navigation2DEnv\n\n\nclass Still(Navigation2DEnv):\n    pass\n"
    (package / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(package.parent))
    from travelling_family import Still

    connect = partial(ray.init, address=cluster.address, logging_level="ERROR", log_to_driver=False)
    paths = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    connect(runtime_env=paths)
    with pytest.raises(ChildEnvError, match=r"cannot load travelling_family.Still .*No module named.*runtime_env"):
        sample(Still)
    ray.shutdown()
    connect(runtime_env={**paths, "py_modules": [str(package)]})
    assert sample(Still) == 12


def test_actors_search_the_current_folder_only_for_a_family_that_it_has(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself puts the current folder first on the search path of all actors."""
    planted = "from pathlib import Path\nPath(__file__).with_suffix('.executed').touch()\n"
    for name in ("torch", "numpy", "gymnasium", "mujoco", "scipy", "pydantic", "psutil"):
        (tmp_path / f"{name}.py").write_text(planted)
    own = tmp_path / "own"
    own.mkdir()
    (own / "nearby_family.py").write_text(
        "import gymnasium\nfrom maml_rl.envs.families.navigation import Navigation2DEnv\n"
        "gymnasium.register('Nearby-v0', Navigation2DEnv, max_episode_steps=3)\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))

    monkeypatch.chdir(tmp_path)
    assert sample("2DNavigation-v0", ray_address=cluster.address) == 12
    assert not list(tmp_path.glob("*.executed"))
    monkeypatch.chdir(own)
    try:
        assert sample("nearby_family:Nearby-v0", ray_address=cluster.address) == 12
    finally:
        sys.modules.pop("nearby_family", None)
        gymnasium.registry.pop("Nearby-v0", None)


# Memory.


def make_large(batch_size: int = 2, **options: Any) -> MultiTaskSampler:
    """Return a sampler of episodes of 600 kB."""
    policy = NormalMLPPolicy(25_000, 1, (2,))
    return MultiTaskSampler(LargeEnv, {}, batch_size, policy, seed=0, max_episode_steps=HORIZON, **options)


def large_digest(num_tasks: int, **options: Any) -> str:
    with make_large(**options) as sampler:
        return sampler.rollout(sampler.sample_tasks(num_tasks)).digest()


@pytest.mark.nightly
def test_episodes_too_large_for_the_object_store_go_through_the_disk() -> None:
    # 120 MB in one unit; the smallest store that Ray allows has 75 MiB.
    with cluster_of(1, object_store_memory=78 * 2**20) as small, connected_to(small):
        found = large_digest(100, backend="ray", num_workers=1)
    assert found == large_digest(100, num_workers=0)


@pytest.mark.nightly
def test_full_object_store_on_a_full_disk_ends_with_the_remedy() -> None:
    settings = {"object_store_memory": 78 * 2**20, "_system_config": {"local_fs_capacity_threshold": 1e-6}}
    with (
        cluster_of(1, **settings) as full,
        connected_to(full),
        pytest.raises(ChildEnvError, match=r"could not put the episodes into the object store") as raised,
    ):
        # A unit that is lost twice is cut into tasks; here a single one is too large.
        large_digest(1, batch_size=200, backend="ray", num_workers=1)
    assert "start Ray with a larger --object-store-memory" in str(raised.value)


class Losing(StageTimer):
    """Removes a node while its episodes are only on it.

    Args:
        cluster: that has the node.
    """

    def __init__(self, cluster: Any) -> None:
        super().__init__()
        self._cluster = cluster
        self.sampler: Any = None

    def stage(self, name: str) -> Any:
        """Before the driver asks for the replies, wait until they are there, without fetching them."""
        if name == "waiting" and self.sampler is not None:
            calls = [actor.calls[0].reply for actor in self.sampler._workers.backend._pool.actors]
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=60.0, fetch_local=False)
            assert len(ready) == len(calls)
            (node,) = self._cluster.worker_nodes
            self._cluster.remove_node(node, allow_graceful=False)
            self.sampler = None
        return super().stage(name)


def test_episodes_lost_with_their_node_before_they_were_fetched_are_sampled_again() -> None:
    with cluster_of(1, 1) as running, connected_to(running):
        timer = Losing(running)
        with make_large(backend="ray", num_workers=2, timer=timer) as sampler:
            wait_until(lambda: (sampler.prepare(4), len(sampler.pids) == 2)[-1])
            tasks = sampler.sample_tasks(4)
            timer.sampler = sampler
            found = sampler.rollout(tasks).digest()
    assert timer.sampler is None
    assert found == large_digest(4, num_workers=0)


class Rejoining(Losing):
    """Adds another node once the run has warned that it waits.

    Args:
        cluster: that has the node.
        stalled: returns the warnings.
    """

    def __init__(self, cluster: Any, stalled: Callable[[], list[str]]) -> None:
        super().__init__(cluster)
        self._stalled, self._joined = stalled, False

    def stage(self, name: str) -> Any:
        """Add the node between two waits."""
        if self._stalled() and not self._joined:
            self._joined = True
            self._cluster.add_node(num_cpus=1, object_store_memory=STORE, env_vars=FINDS_TESTS)
        return super().stage(name)


def test_run_that_loses_its_last_node_warns_and_waits_for_another_up_to_its_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("maml_rl.samplers.work.ray.pool._STALLED_SECONDS", 0.5)

    def stalled() -> list[str]:
        return [message for message in caplog.messages if "0 of 1 Ray actors have started" in message]

    with cluster_of(0, 1) as running:
        timer = Rejoining(running, stalled)
        options = {"backend": "ray", "num_workers": 1}
        # Another sampler of the process, as an evaluation has it, names the cluster in another way.
        address = f"localhost:{running.address.rpartition(':')[2]}"
        with (
            make_large(ray_address=address, **options) as first,
            make_large(timer=timer, ray_address=running.address, **options) as sampler,
        ):
            assert first.rollout(first.sample_tasks(4)).digest() == large_digest(4, num_workers=0)
            tasks = sampler.sample_tasks(4)
            caplog.clear()
            backend: Any = sampler._workers.backend
            # The first start, which takes as long as the machine is busy, has no such limit.
            backend._client.placement = sampler.placement.replace(ray_start_timeout=60.0)
            timer.sampler = sampler
            found = sampler.rollout(tasks).digest()
            warnings = stalled()
            # This time none joins.
            backend._client.placement = sampler.placement.replace(ray_start_timeout=2.0)
            timer.sampler = sampler
            with pytest.raises(ConfigError, match=r"0 of 1 Ray actors have started .*raise ray_start_timeout=2$"):
                sampler.rollout(tasks)
    # Ray's own words about the nodes.
    assert "raylet" not in capfd.readouterr().out
    assert re.search(r"started after \d s; the cluster at .* has 0 CPUs", warnings[0])
    assert found == large_digest(4, num_workers=0)


# Tokens.

OWN_CLUSTER = """
from maml_rl import MultiTaskSampler
from maml_rl.policies import NormalMLPPolicy

with MultiTaskSampler("2DNavigation-v0", {}, 2, NormalMLPPolicy(2, 2, (4,)), backend="ray", ray_address="local") as own:
    print(own._workers.backend._pool.cluster.address, flush=True)
    input()
"""


def test_cluster_of_its_own_has_a_token_and_leaves_none_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWN_CLUSTER],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        address = owner.stdout.readline().strip()
        for mode, told in (
            (None, f"the Ray cluster at {address} accepts only requests with its token; set RAY_AUTH_MODE=token, and"),
            ("token", f"RAY_AUTH_MODE=token, but there is no token for the Ray cluster at {address}; give this"),
        ):
            if mode is not None:
                monkeypatch.setenv("RAY_AUTH_MODE", mode)
            assert refusal(address).startswith(told)
        assert not (tmp_path / ".ray").exists()
    finally:
        owner.communicate("\n", timeout=60.0)
    assert owner.returncode == 0


# The command line.


def test_cluster_that_cannot_be_reached_ends_in_one_line(refusal: Callable[..., str]) -> None:
    for address, message in (
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9; start one with `ray start --head`"),
        ("ray://127.0.0.1:10001", "expected the address of a Ray cluster as host:port"),
    ):
        assert refusal(address).startswith(message)
    # A server of another kind.
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert refusal(address, within=25.0).startswith(f"no Ray cluster answers at {address}")


def test_machine_outside_of_the_cluster_ends_in_one_line(cluster: Any, tmp_path: Path) -> None:
    # In a process namespace of its own, it cannot find this machine's nodes.
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a process namespace")
    options = ["--backend", "ray", "--ray-address", cluster.address, "--output-folder", str(tmp_path / "run")]
    done = subprocess.run(
        [*apart, sys.executable, "train.py", *SMALL, *options, "--ray-head-timeout", "0.5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"error: this machine is not a node of the Ray cluster at {cluster.address}; have it join with" in line
    assert not (tmp_path / "run").exists()


def test_strict_number_of_workers_is_refused_by_the_command(cluster: Any, refusal: Callable[..., str]) -> None:
    message = f"num_workers=99, but the Ray cluster at {cluster.address} has places for "
    assert refusal(cluster.address, "--num-workers", "99", "--strict", within=30.0).startswith(message)
