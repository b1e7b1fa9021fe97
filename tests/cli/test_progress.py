import fcntl
import logging
import os
import re
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any

import pytest

from maml_rl.cli import progress as progress_of_commands
from maml_rl.cli.progress import StepProgress, TrainingProgress
from maml_rl.envs.meta_env import SlotCounts


def metrics_of(iteration: int, before: float, *after: float, **times: float) -> dict[str, Any]:
    returns = {f"return/step_{step}": value for step, value in enumerate((before, *after))}
    seconds = {"time/sample_s": 0.5, "time/update_s": 1.0, "time/steps_per_s": 20_000.0}
    return {
        "iteration": iteration,
        **returns,
        **seconds,
        **{f"time/share/{name}": share for name, share in times.items()},
    }


@contextmanager
def terminal_of(columns: int) -> Iterator[Callable[[], str]]:
    """Make standard error a terminal; yield a function that returns its output."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.set_blocking(reader, False)

    def read() -> str:
        parts = []
        with suppress(BlockingIOError):
            while True:
                parts.append(os.read(reader, 1 << 16))
        return b"".join(parts).decode()

    with os.fdopen(writer, "w") as terminal, os.fdopen(reader, "rb", buffering=0), redirect_stderr(terminal):
        yield read


def test_bar_on_a_terminal_has_returns_and_speed_on_one_line_and_logs_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with terminal_of(80) as read, TrainingProgress(500, "seed 3", seconds_between_lines=0.0) as progress:
        progress(metrics_of(122, -171.26, -158.04))
        progress._bar.refresh()
        lines = [line for line in re.split(r"[\r\n]", read()) if line.strip()]
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1].startswith("seed 3:  25%")
    assert "123/500" in lines[-1]
    assert lines[-1].rstrip().endswith(", return -171.3 -> -158.0, 20,000 steps/s]")
    assert caplog.messages == []


def test_bar_shows_the_slots_of_slow_environments() -> None:
    with terminal_of(80) as read, TrainingProgress(500) as progress:
        progress.show_slots(SlotCounts(48, 3, 13, 17, 3.21))
        line = [line for line in re.split(r"[\r\n]", read()) if line.strip()][-1]
    assert len(line) <= 80
    assert line.rstrip().endswith(", 48 slots wait, slot 17 for 3.2 s, 3 act, 13 done]")


def test_line_shows_the_slots_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), TrainingProgress(500, "seed 3", seconds_between_lines=0.0) as progress:
        progress.show_slots(SlotCounts(2, 1, 0))
    assert caplog.messages == ["seed 3, iteration 1 of 500: 2 slots wait, 1 act, 0 done"]


def test_summary_has_the_first_and_the_last_iteration_and_their_times() -> None:
    with TrainingProgress(3) as progress:
        for iteration in range(3):
            progress(metrics_of(iteration, -9.0 + iteration, -8.0, -7.0 + iteration))
    assert progress.summary().splitlines() == [
        "iteration     0: return -9.0 before and -7.0 after adaptation",
        "iteration     2: return -7.0 before and -5.0 after adaptation",
        "each iteration took 0.50 s of sampling, at 20,000 steps/s, and 1.00 s of updating",
    ]
    with TrainingProgress(1) as progress:
        progress(metrics_of(0, -9.0))
    assert progress.summary().splitlines()[:-1] == ["iteration     0: return -9.0"], "a method without adaptation"


def test_run_with_nothing_left_to_do_is_reported() -> None:
    with TrainingProgress(3) as progress:
        pass
    assert progress.summary() == "no iteration was left to do"
    assert progress.profile() == ""


@pytest.mark.parametrize("name", ["loss", "loss/actor"])
def test_training_without_sampling_shows_its_loss_instead_of_returns_and_speed(name: str) -> None:
    progress = TrainingProgress(2)
    for iteration, loss in enumerate((1.5, 0.25)):
        progress({"iteration": iteration, "env_steps": 0, name: loss, "time/sample_s": 0.0, "time/update_s": 3.0})
    first, last, times = progress.summary().splitlines()
    assert first.endswith("0: loss 1.500")
    assert last.endswith("1: loss 0.250")
    assert times == "each iteration took 3.00 s of updating"


def test_profile_ranks_the_stages() -> None:
    with TrainingProgress(2) as progress:
        for iteration in range(2):
            progress(metrics_of(iteration, -9.0, -8.0, inner=0.25, outer=0.5))
    assert [line.split() for line in progress.profile().splitlines()] == [["outer", "50.0%"], ["inner", "25.0%"]]


def test_lines_are_logged_at_intervals_and_nothing_is_drawn_without_a_terminal(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")
    with TrainingProgress(500, "seed 3", seconds_between_lines=0.0) as progress:
        progress(metrics_of(122, -171.26, -158.04))
    (line,) = caplog.messages
    assert line.startswith("seed 3, iteration 123 of 500: return -171.3 -> -158.0, 20,000 steps/s, ")
    assert re.fullmatch(r".* \d\d:\d\d left", line)
    caplog.clear()
    capsys.readouterr()
    with TrainingProgress(500, seconds_between_lines=1e9) as progress:
        progress(metrics_of(0, -171.26, -158.04))
    assert caplog.messages == []
    assert capsys.readouterr() == ("", "")


def test_summary_names_the_best_evaluation() -> None:
    with TrainingProgress(3) as progress:
        for iteration, evaluated in enumerate((-9.0, -4.0, -6.0)):
            progress({**metrics_of(iteration, -20.0, -10.0), "evaluation/return/step_3": evaluated})
        progress(metrics_of(3, -20.0, -1.0))
    (line,) = (line for line in progress.summary().splitlines() if "evaluation" in line)
    assert "after 2 iterations: return -4.0 after adaptation (--checkpoint best)" in line


def test_lines_of_a_report_have_the_time_left_without_a_terminal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    clock = iter([100.0, 105.0, 120.0, 160.0, 161.0])
    monkeypatch.setattr(progress_of_commands, "monotonic", lambda: next(clock))
    with StepProgress("run") as progress:
        # Two were measured by an earlier command.
        for done in (2, 3, 4, 5):
            progress(f"measuring run-{done}", done, 10)
    # Two have taken 60 s since, and six are left.
    (line,) = (record.getMessage() for record in caplog.records if "left" in record.getMessage())
    assert line == "measuring run-4: run 4 of 10 is done, 03:00 left"


def test_bar_of_a_report_shows_what_is_done() -> None:
    with terminal_of(80) as shown, StepProgress() as progress:
        progress("trying policies", 1, 4)
        progress("drawing videos", 3, 4)
        screen = shown()
    assert "trying policies:  25%" in screen
    assert re.search(r"drawing videos:  75%.*3/4", screen)


@pytest.mark.parametrize(
    ("column", "words"), [("step", "after 0 to 2 gradient steps"), ("episode", "in the episodes 0 to 2")]
)
def test_summary_has_the_returns_of_the_last_evaluation_column_by_column(column: str, words: str) -> None:
    with TrainingProgress(2) as progress:
        for iteration, shift in enumerate((0.0, -1.0)):
            evaluated = {f"evaluation/return/{column}_{index}": -9.0 + 4.0 * index + shift for index in range(3)}
            progress({**metrics_of(iteration, -20.0, -10.0), **evaluated})
    assert f"evaluated after 2 iterations: return -10.0, -6.0, -2.0 {words}" in progress.summary().splitlines()
