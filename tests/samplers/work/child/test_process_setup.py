"""Children end with their parent, however it ends, and print nothing."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from script_runs import Run, are_gone, family_of, finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

HANG = """
if __name__ == "__main__":
    vector_env = ParallelVectorEnv(
        partial(HelpedEnv, pid_file={pid_file!r}, fault={fault!r}, place=0, slot_task=1.0),
        num_envs=3, num_workers=3, start_method={start_method!r},
    )
    vector_env.reset_task([{{"goal": 0.0}}, {{"goal": 1.0}}, {{"goal": 2.0}}])
    vector_env.reset_buffers(np.zeros(3))
    for index in range(3):
        vector_env.step_send(index, np.zeros((1, 1), np.float32))
    vector_env.step_recv(0.0)
    print("hangs", flush=True)
    vector_env.step_recv()
"""


@pytest.mark.parametrize(
    ("start_method", "fault"), [("fork", "hang"), ("spawn", "hang_with_gil"), ("forkserver", "hang_with_gil")]
)
def test_killed_parent_takes_every_process_with_it(start_method: str, fault: str, run: Run, tmp_path: Path) -> None:
    code = HANG.format(start_method=start_method, fault=fault, pid_file=str(tmp_path / "pids"))
    script = run(code)
    family = family_of(script)
    # Three children and a helper of each, and the fork server.
    assert len(family) == 6 + (start_method == "forkserver")
    script.kill()
    assert are_gone(family, 2.0)


def test_ctrl_c_brings_one_keyboard_interrupt_and_silent_children(run: Run, tmp_path: Path) -> None:
    code = HANG.format(start_method="forkserver", fault="hang_with_gil", pid_file=str(tmp_path / "pids"))
    script = run(code)
    family = family_of(script)
    # A terminal signals the foreground group; a batch system may signal everybody.
    for process in family:
        if process.name() != "sleep":
            process.send_signal(signal.SIGINT)
    os.killpg(script.pid, signal.SIGINT)
    start = time.monotonic()
    code_, _, errors = finish(script)
    assert time.monotonic() - start < 5
    assert code_ != 0
    assert errors.count("KeyboardInterrupt") == 1
    assert errors.count("Traceback") == 1
    assert are_gone(family, 1.0)


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_ctrl_c_while_children_start_brings_one_keyboard_interrupt(delay: float, run: Run) -> None:
    code = """
        if __name__ == "__main__":
            print("starts", flush=True)
            ParallelVectorEnv(partial(FaultyEnv, fault="hang", place="make"), num_envs=3, num_workers=3)
    """
    script = run(code)
    assert script.stdout is not None
    script.stdout.readline()
    # Any moment will do.
    time.sleep(delay)
    family = psutil.Process(script.pid).children(recursive=True)
    for process in family:
        process.send_signal(signal.SIGINT)
    os.killpg(script.pid, signal.SIGINT)
    _, _, errors = finish(script)
    assert errors.count("Traceback") == 1, errors
    assert errors.count("KeyboardInterrupt") == 1, errors
    assert are_gone(family, 1.0)


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_parent_that_forgets_to_close_leaves_no_child(end: str, run: Run) -> None:
    code = f"""
        if __name__ == "__main__":
            vector_env = ParallelVectorEnv(FaultyEnv, num_envs=2, num_workers=2)
            print("made", flush=True)
            sys.stdin.readline()
            {end}
    """
    script = run(code)
    family = family_of(script)
    assert len(family) == 3
    finish(script)
    assert are_gone(family, 2.0)
