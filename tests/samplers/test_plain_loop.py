"""Sampled episodes are those of a plain loop; what makes them differ is found, and its place named."""

import multiprocessing
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from script_runs import are_gone
from text_env import GuessingEnv

from maml_rl.cli import main as cli
from maml_rl.envs.calls import ResultWriter
from maml_rl.envs.meta_env import StepBuffers
from maml_rl.errors import MamlRLError
from maml_rl.samplers import plain_loop
from maml_rl.samplers.plain_loop import compare_with_loop
from tests.envs.third_party import CellEnv, DictEnv, PixelEnv, SwitchesEnv, WalkEnv
from tests.numbered_env import NumberedEnv

pytestmark = [pytest.mark.usefixtures("forked_workers"), pytest.mark.timeout(120)]
EVERYWHERE = (
    "sampled in this process, with one slot for each task, in threads, with one worker, with two workers, with central "
    "inference"
)
NOT_IN_THREADS = EVERYWHERE.replace("in threads, ", "")


class InfoEnv(WalkEnv):
    """Records the place at every step, and at the end how often it is on the left."""

    recorded_infos = {"place": "step", "left": "episode"}  # noqa: RUF012

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, **({"left": 3.5} if terminated else {})}


class LeakyEnv(WalkEnv):
    """Its reward depends on the episodes before."""

    age = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.age += 1
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(self.age), terminated, truncated, info


class CountedEnv(WalkEnv):
    """An object knows how many there were before it in its process."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.number = CountedEnv.made = CountedEnv.made + 1

    def observe(self) -> Any:
        return np.array([self.place, 0.01 * self.number])


class QuitsEnv(WalkEnv):
    """Ends at `close` what all environments of its process need, as games quit pygame; must not be in threads."""

    display, thread_safe = 0, False

    def __init__(self) -> None:
        super().__init__()
        QuitsEnv.display = 1

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not QuitsEnv.display:
            raise RuntimeError("display Surface quit")
        return super().step(action)

    def close(self) -> None:
        QuitsEnv.display = 0


class DiesEnv(WalkEnv):
    """Ends its process, as a fault of a library would."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        os._exit(3)


class DrawingEnv(WalkEnv):
    """Draws its tasks without a seed."""

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        draws = random.SystemRandom()
        return [{"slope": draws.uniform(-1.0, 1.0)} for _ in range(num_tasks)]


class GlobalEnv(WalkEnv):
    """Draws from the generators of the process in every call."""

    def reset_task(self, task: dict[str, Any]) -> None:
        super().reset_task(task)
        self.slope += random.random()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        info = super().reset(seed=seed)[1]
        self.place += 0.1 * np.random.uniform()
        return self.observe(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        return observation, reward + np.random.standard_normal(), *rest


class ShiftedEnv(NumberedEnv):
    def __init__(self) -> None:
        super().__init__(start=-5, pairs=True)


def compared(env: Any, **options: Any) -> str:
    return compare_with_loop(env, env, max_episode_steps=6, **options)


@pytest.mark.parametrize("env", [InfoEnv, DictEnv, PixelEnv, CellEnv, SwitchesEnv, GuessingEnv, ShiftedEnv, QuitsEnv])
def test_environments_of_every_kind_have_the_values_of_a_loop_in_every_placement(env: Any) -> None:
    assert compared(env).endswith(EVERYWHERE if env is not QuitsEnv else NOT_IN_THREADS)


def test_family_of_the_package_has_the_values_of_a_loop() -> None:
    told = compare_with_loop("2DNavigation-v0", partial(gymnasium.make, "2DNavigation-v0"), max_episode_steps=5)
    assert told.startswith("6 episodes of 3 tasks, 30 steps in all")
    assert "in threads" not in told


def test_environment_that_ends_its_process_is_an_error() -> None:
    with pytest.raises(MamlRLError, match="the process in which the environment was tried has died"):
        compared(DiesEnv)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            LeakyEnv,
            r"in this process, the reward of slot 1 \(task 0, episode 1, step 0\) is 1.0, but.*"
            "the order of a set of texts, which changes with PYTHONHASHSEED",
        ),
        (CountedEnv, r"the observation of slot 0 .* at \[1\], but 0.02 in a plain loop"),
        (DrawingEnv, r"one slot for each task are not those .* in this process.*PYTHONHASHSEED"),
    ],
)
def test_state_that_outlives_a_reset_is_shared_or_unseeded_is_found(env: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        compared(env)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("reward", lambda buffers: buffers.rewards.__setitem__(2, 0.125)),
        ("observation", lambda buffers: buffers.observations.__setitem__((2, 1), 0.25)),
        ("flag terminated", lambda buffers: buffers.terminated.__setitem__(2, True)),
        ("end of the episode", lambda buffers: buffers.truncated.__setitem__(2, True)),
        ("info 'place'", lambda buffers: buffers.infos["place"].__setitem__(2, 7.0)),
    ],
)
def test_value_that_the_sampler_would_record_wrongly_is_found(
    what: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ResultWriter.write_step

    def wrong(self: ResultWriter, buffers: StepBuffers, slot: int, env: Any, result: Any) -> None:
        own(self, buffers, slot, env, result)
        if slot == 2:
            change(buffers)

    monkeypatch.setattr(ResultWriter, "write_step", wrong)
    with pytest.raises(AssertionError, match=rf"the {what} of slot 2 \(task 1, episode 0, step [01]\) is"):
        compared(InfoEnv)


def test_command_says_what_was_compared_or_where_a_value_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "walks.py").write_text(
        "import gymnasium\n"
        "from tests.envs.third_party import WalkEnv\n"
        "from tests.samplers.test_plain_loop import CountedEnv\n"
        "gymnasium.register('Counted-v0', f'{__name__}:CountedEnv', max_episode_steps=7)\n"
        "gymnasium.register('Lambda-v0', lambda: WalkEnv())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["check-env", "walks:WalkEnv", "--env-kwargs", "{scale: 2.0}", "--against-loop"]) == 0
    shown = capsys.readouterr().out
    assert "ok: 6 episodes of 3 tasks, " in shown
    assert EVERYWHERE in shown
    assert cli.main(["check-env", "walks:Counted-v0", "--against-loop"]) == 1
    assert "walks:Counted-v0: sampled in this process, the observation of slot 0" in capsys.readouterr().err
    # As a run refuses it.
    assert cli.main(["check-env", "walks:Lambda-v0"]) == 1
    assert "the environment 'walks:Lambda-v0'.spec.entry_point cannot be pickled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_ended_command_leaves_no_process_and_shows_no_traceback_even_of_a_hang(
    number: signal.Signals,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "hangs.py").write_text(
        "import os, pathlib, threading\n"
        "from tests.envs.third_party import WalkEnv\n"
        "class HangingEnv(WalkEnv):\n"
        "    def step(self, action):\n"
        "        if os.getpid() != int(os.environ['COMMAND']):\n"
        "            pathlib.Path(__file__).with_suffix(f'.{os.getpid()}').touch()\n"
        "            threading.Event().wait()\n"
        "        return super().step(action)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def check() -> None:
        os.setsid()
        os.environ["COMMAND"] = str(os.getpid())
        sys.exit(cli.main(["check-env", "hangs:HangingEnv", "--against-loop"]))

    command = multiprocessing.get_context("fork").Process(target=check)
    command.start()
    while not (notes := [path.suffix for path in tmp_path.glob("hangs.*") if path.suffix != ".py"]):
        assert command.is_alive()
        time.sleep(0.01)
    child = psutil.Process(int(notes[0][1:]))
    # A terminal sends Ctrl-C to all processes of its group.
    (os.killpg if number == signal.SIGINT else os.kill)(command.pid, number)
    command.join(10.0)
    assert command.exitcode == code
    assert are_gone([child], 10.0)
    shown = capfd.readouterr()
    assert shown.err == ("" if number == signal.SIGKILL else "maml-rl check-env: interrupted\n")
    assert all(line.startswith("ok: ") for line in shown.out.splitlines())


def test_process_whose_start_was_interrupted_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    calls, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=plain_loop._carry_out, args=(theirs,))
    calls.close()
    process.start()
    theirs.close()
    process.join(20.0)
    assert (process.exitcode, capfd.readouterr().err) == (0, "")


def test_environment_with_generators_of_the_process_equals_a_loop_that_seeds_them() -> None:
    # Threads share them.
    assert compared(GlobalEnv).endswith(NOT_IN_THREADS)
