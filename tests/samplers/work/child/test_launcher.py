"""Children as processes: their start, their end, their helper processes, and their imports."""

import gc
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import psutil
import pytest
from faulty_env import HelpedEnv
from phases import NUM_SLOTS, child_processes, make_parallel, play, play_in_process, play_until_through
from script_runs import Run, are_gone, finish

from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError
from maml_rl.samplers.work import scheduler
from maml_rl.samplers.work.child import child_env, launcher
from maml_rl.samplers.work.child.launcher import ChildProcess, Launcher, ParentEnds
from maml_rl.samplers.work.child.shared_buffers import create_shared_file
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv

pytestmark = pytest.mark.timeout(60)


def test_forgotten_vector_env_takes_its_children_with_it() -> None:
    before = child_processes()
    vector_env = make_parallel()
    assert len(child_processes() - before) == 2
    del vector_env
    assert child_processes() == before


def test_close_is_idempotent_and_ends_children_and_fork_server() -> None:
    before = child_processes()
    vector_env = make_parallel(options={"start_method": "forkserver"})
    assert len(child_processes() - before) == 3
    vector_env.close()
    vector_env.close()
    assert child_processes() == before
    with pytest.raises(RuntimeError, match="is closed"):
        vector_env.reset(seed=0)


def test_close_that_is_interrupted_ends_the_children_when_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    before = child_processes()
    vector_env = make_parallel()
    with monkeypatch.context() as patch:
        patch.setattr("maml_rl.samplers.work.child.worker_pool.wait_for_ends", interrupt)
        with pytest.raises(KeyboardInterrupt):
            vector_env.close()
    vector_env.close()
    assert vector_env.pids == []
    assert child_processes() == before


def test_close_lets_environments_close(tmp_path: Path) -> None:
    vector_env = make_parallel(fault="raise", place="close", marker=str(tmp_path / "closed"))
    vector_env.close()
    assert (tmp_path / "closed").exists()


def test_helpers_of_an_environment_end_with_it(tmp_path: Path) -> None:
    before = child_processes()
    pid_file = tmp_path / "pids"
    make_env = partial(HelpedEnv, pid_file=str(pid_file), fault="kill", place=2, marker=str(tmp_path / "marker"))
    with ParallelVectorEnv(make_env, None, NUM_SLOTS, 2, start_method="fork") as vector_env:
        np.testing.assert_array_equal(play_until_through(vector_env), play_in_process())
        # One slot for each child, and again those of the child that was killed.
        assert len(pid_file.read_text().split()) > NUM_SLOTS
        helpers = [process for process in child_processes() - before if process.pid not in vector_env.pids]
        assert len(helpers) == NUM_SLOTS
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert are_gone([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], seconds=2.0)


def test_garbage_of_the_parent_is_not_collected_in_a_forked_child(tmp_path: Path) -> None:
    class Unreachable:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    gc.disable()
    try:
        Unreachable()
        with make_parallel(fault="collect", place=1, marker=str(tmp_path / "collected")) as vector_env:
            play(vector_env)
    finally:
        gc.enable()
    assert (tmp_path / "collected").exists()
    gc.collect()
    assert {path.name for path in tmp_path.iterdir()} == {"collected", str(os.getpid())}


@pytest.mark.slow
def test_fork_server_may_die_like_any_process() -> None:
    before = child_processes()
    with make_parallel(options={"start_method": "forkserver"}) as vector_env:
        (server,) = (process for process in child_processes() - before if process.pid not in vector_env.pids)
        server.kill()
        np.testing.assert_array_equal(play_until_through(vector_env), play_in_process())
        os.kill(vector_env.pids[1], signal.SIGKILL)
        np.testing.assert_array_equal(play_until_through(vector_env), play_in_process())
    assert child_processes() <= before


def test_children_outlive_the_thread_that_started_them() -> None:
    made: list[ParallelVectorEnv] = []
    thread = threading.Thread(target=lambda: made.append(make_parallel()))
    thread.start()
    thread.join()
    with made[0] as vector_env:
        np.testing.assert_array_equal(play(vector_env), play_in_process())


# What children import.


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_children_import_neither_torch_nor_the_main_script(start_method: str, run: Run, tmp_path: Path) -> None:
    # A fake torch, before the real one on the path, which takes long to load.
    (tmp_path / "torch.py").write_text("def get_default_dtype(): return 'torch.float32'")
    code = f"""
        import torch
        from faulty_env import WatchingEnv
        # No guard, on purpose: the children need nothing of this script.
        vector_env = ParallelVectorEnv(WatchingEnv, num_envs=2, num_workers=2, start_method={start_method!r})
        vector_env.reset(seed=0)
        vector_env.step(np.zeros((2, 1), np.float32))
        print(vector_env.buffers.infos["torch"].tolist())
        vector_env.close()
    """
    assert finish(run(code)) == (0, "[0.0, 0.0]\n", "")


@pytest.mark.slow
def test_environment_may_be_defined_in_the_main_script(run: Run) -> None:
    code = """
        import gymnasium

        class MyEnv(FaultyEnv):
            pass

        gymnasium.register("Mine-v0", MyEnv, max_episode_steps=4)

        if __name__ == "__main__":
            for env in (MyEnv, "Mine-v0"):
                with ParallelVectorEnv(env, num_envs=2, num_workers=2) as vector_env:
                    print(vector_env.reset(seed=0)[0].shape, vector_env.max_episode_steps)
    """
    assert finish(run(code)) == (0, "(2, 2) None\n(2, 2) 4\n", "")


@pytest.mark.slow
def test_script_without_guard_whose_environment_needs_it_fails_with_the_remedy(run: Run) -> None:
    code = """
        class MyEnv(FaultyEnv):
            pass

        vector_env = ParallelVectorEnv(MyEnv, num_envs=2, num_workers=2)
    """
    code_, _, errors = finish(run(code))
    assert code_ == 1
    assert 'put what it does under `if __name__ == "__main__":`' in errors


def test_nothing_is_left_in_dev_shm() -> None:
    def files() -> set[Path]:
        return {path for path in Path("/dev/shm").glob("*") if path.stat().st_uid == os.getuid()}

    before = files()
    with make_parallel() as vector_env:
        play(vector_env)
        assert files() <= before


def test_lack_of_shared_memory_or_descriptors_is_a_clear_error(run: Run) -> None:
    code = """
        import resource
        from maml_rl.errors import ChildEnvError

        def lack(what, number, slots, workers):
            resource.setrlimit(what, (number, resource.getrlimit(what)[1]))
            try:
                ParallelVectorEnv(FaultyEnv, num_envs=slots, num_workers=workers, start_method="fork")
            except ChildEnvError as error:
                print(error)

        # The same system call fails on a full memory file system, which not every machine lets a test mount.
        lack(resource.RLIMIT_FSIZE, 4096, 1000, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1:] * 2)
        lack(resource.RLIMIT_NOFILE, 40, 100, 100)
        with ParallelVectorEnv(FaultyEnv, num_envs=2, num_workers=2, start_method="fork") as vector_env:
            print(len(vector_env.pids))
    """
    _, output, errors = finish(run(code))
    memory, descriptors, number = output.splitlines()
    assert memory.startswith("cannot get 0.0 MiB of shared memory for 1000 slots of Box("), errors
    assert "File too large" in memory
    assert descriptors.startswith("no child process could be started: [Errno 24] Too many open files"), errors
    assert number == "2"


def test_fork_server_that_dies_again_and_again_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []

    def spawn(self: Launcher, ends: ParentEnds, statements: str) -> ChildProcess:
        starts.append(statements)
        return start(self, ends, "import os; os._exit(1)")

    start = Launcher._spawn
    monkeypatch.setattr(Launcher, "_spawn", spawn)
    message = (
        r"was lost 2 times in a row, more often than max_restarts=1 allows; "
        r"the last one exited with status 1; look for what ends it .*raise max_restarts, or use start_method='spawn'"
    )
    with pytest.raises(ChildEnvError, match=message) as caught:
        make_parallel(options={"start_method": "forkserver", "max_restarts": 1})
    assert "\n" not in str(caught.value)
    assert len(starts) == 2


def test_fork_server_that_starts_slowly_may_take_as_long_as_step_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    # Any start takes longer than these.
    monkeypatch.setattr(scheduler, "_LEAST_LOAD_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "_LOOK_SECONDS", 0.01)
    message = r"the last one did not answer within 0.02 s; raise step_timeout, which starts have, too, if"
    with pytest.raises(ChildEnvError, match=message):
        make_parallel(options={"start_method": "forkserver", "max_restarts": 0, "step_timeout": 0.02})
    with make_parallel(options={"start_method": "forkserver", "max_restarts": 0, "step_timeout": 30}) as vector_env:
        np.testing.assert_array_equal(play(vector_env), play_in_process())


@pytest.mark.slow
def test_children_close_what_they_open_also_where_the_caller_ignores_sigchld(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error::ResourceWarning")
    code = """
        import signal
        if __name__ == "__main__":
            for handler, other in ((signal.SIG_DFL, "spawn"), (signal.SIG_IGN, "fork")):
                signal.signal(signal.SIGCHLD, handler)
                for start_method in (other, "forkserver"):
                    with ParallelVectorEnv(FaultyEnv, {}, 2, num_workers=2, start_method=start_method) as envs:
                        envs.reset(seed=0)
    """
    assert finish(run(code)) == (0, "", "")


# One process.


@pytest.fixture
def memory() -> Iterator[int]:
    memory = create_shared_file()
    yield memory
    os.close(memory)


def descriptors() -> set[str]:
    """Return what is open in this process, except what lists it."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def test_launch_leaves_nothing_open_and_the_signals_as_they_were(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Launcher("fork", memory, "", limits=scheduler.Limits(Placement()))
    before = descriptors()
    process = starts.launch()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}
    process.kill()
    assert process.wait(10.0)
    assert process.reap() == -signal.SIGKILL
    assert descriptors() == before

    def fail(self: Launcher, ends: ParentEnds) -> ChildProcess:
        raise OSError("no more processes")

    monkeypatch.setattr(Launcher, "_fork", fail)
    # The error keeps the frames, and with them all that is in them.
    with pytest.raises(ChildEnvError, match="no more processes") as caught:
        starts.launch()
    assert descriptors() == before
    assert caught.value is not None


@pytest.fixture
def ends() -> Iterator[ParentEnds]:
    ends = ParentEnds()
    yield ends
    ends.close_child_ends()
    ends.close()


def test_process_without_a_group_of_its_own_is_killed_alone_and_its_long_stack_cut(ends: ParentEnds) -> None:
    with subprocess.Popen(["sleep", "50"]) as popen:
        process = ChildProcess(popen.pid, ends, lambda: popen.wait(10.0))
        os.write(ends.for_child(0).stacks, b"x" * 10_000)
        assert process.read_stack(0.0) == "x" * 6_000
        process.kill()
        assert process.wait(10.0)
        assert process.reap() == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_process_forked_by_other_code_keeps_no_child_alive(ends: ParentEnds) -> None:
    pid = os.fork()
    if not pid:
        os._exit(not ends.lifeline.closed)
    assert os.waitpid(pid, 0)[1] == 0


def test_state_is_read_whatever_the_process_is_called(ends: ParentEnds) -> None:
    comm = Path("/proc/self/comm")
    name = comm.read_text()
    process = ChildProcess(os.getpid(), ends, lambda: None)
    try:
        comm.write_text("x) T (y")
        assert process.state() in ("running", "sleeping")
    finally:
        comm.write_text(name)
        os.close(process.sentinel[0])


# The fork server, forked instead of started, which saves the imports.


@pytest.fixture
def server(memory: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    def spawn(self: Launcher, ends: ParentEnds, statements: str) -> ChildProcess:
        with monkeypatch.context() as patch:

            def run(child_ends: object) -> None:
                patch.undo()
                try:
                    exec(statements, {"ends": child_ends, "run_child": child_env.run_child})
                finally:
                    os._exit(1)

            patch.setattr(launcher, "run_child", run)
            return self._fork(ends)

    monkeypatch.setattr(Launcher, "_spawn", spawn)
    starts = Launcher("forkserver", memory, "", limits=scheduler.Limits(Placement()))
    yield starts
    starts.close()


def test_server_is_not_asked_for_children_of_the_one_before(server: Launcher) -> None:
    one = server.launch()
    assert server.close() == -signal.SIGKILL
    other = server.launch()
    for process, code in ((one, None), (other, -signal.SIGKILL)):
        process.kill()
        assert process.wait(10.0)
        assert process.reap() == code


def test_stopped_server_is_replaced_before_its_time_is_over(server: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_STOPPED_SECONDS", 0.2)
    monkeypatch.setattr(launcher, "_LOOK_SECONDS", 0.01)
    processes = [server.launch()]
    stopped = server._server
    assert stopped is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    processes.append(server.launch())
    assert server._server is not stopped
    for process in processes:
        process.kill()
        assert process.wait(10.0)
        process.reap()


def test_server_whose_reply_was_not_awaited_is_ended(server: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Launcher, process: ChildProcess, seconds: float) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Launcher, "_answer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            server.launch()
    assert server._server is None


def test_server_imports_the_modules_that_are_to_be_loaded_ahead(
    server: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ahead_of_children.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_suffix('.done').touch()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    server._ahead = "", ("ahead_of_children",)
    process = server.launch()
    process.kill()
    process.wait(10.0)
    process.reap()
    assert (tmp_path / "ahead_of_children.done").exists()


def test_only_families_of_the_package_without_jax_are_imported_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    points = ["maml_rl.envs.families.one:Make", "maml_rl.envs.jax.two:Make", "other.three:Make", len, None]
    specs = {str(number): SimpleNamespace(vector_entry_point=point) for number, point in enumerate(points)}
    imported: list[str] = []
    monkeypatch.setattr(gymnasium, "registry", specs)
    monkeypatch.setattr(launcher, "import_module", imported.append)
    for env_id in (*specs, "unknown", ""):
        launcher._import_ahead(env_id)
    assert imported == ["maml_rl.envs.families.one"]
