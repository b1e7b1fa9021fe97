import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from maml_rl.cli.evaluate import run_test
from maml_rl.cli.train import run_train
from maml_rl.config import load_config
from maml_rl.experiment import evaluate as evaluation_module
from maml_rl.runs import metrics as metrics_module
from maml_rl.runs.checkpoint import latest_intact
from maml_rl.runs.metrics import read_metrics
from tests import small_runs
from tests.small_runs import assert_same_run, exit_code, snapshot, untimed

ROOT = Path(__file__).resolve().parents[2]

SMALL = json.dumps(small_runs.SMALL | {"num-batches": 4})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests must not write to it."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "small.yaml").write_text(SMALL)
    options = ["--config", str(folder / "small.yaml"), "--output-folder", str(folder / "run"), "--num-workers", "0"]
    assert run_train(options) == 0
    return folder / "run"


@pytest.mark.parametrize("checkpoint", [None, "latest", "best", "2", "initial"])
def test_trained_policy_is_tested_from_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_folder: Path, checkpoint: str | None
) -> None:
    output = tmp_path / "results.npz"
    options = ["--config", str(run_folder / "config.json"), "--output", str(output), "--num-workers", "0"]
    options += ["--meta-batch-size", "5", "--num-batches", "2", "--num-steps", "2"]
    assert run_test(options + ([] if checkpoint is None else ["--checkpoint", checkpoint])) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "95 % interval" in rows[1]
    assert [row.split()[0] for row in rows[2:5]] == ["0", "1", "2"]
    with np.load(output, allow_pickle=False) as saved:
        assert saved["returns"].shape == (10, 3, 4)
        assert len(json.loads(str(saved["tasks"]))) == 10


def test_tasks_are_counted_and_drawn_in_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_folder: Path
) -> None:
    drawn = {}
    for name, sizes in (("counted", ["--tasks", "3"]), ("batches", ["--num-batches", "2"])):
        output = tmp_path / f"{name}.npz"
        options = [str(run_folder), *sizes, "--meta-batch-size", "2", "--num-steps", "0", "--num-workers", "0"]
        assert run_test([*options, "--output", str(output)]) == 0
        with np.load(output, allow_pickle=False) as saved:
            drawn[name] = json.loads(str(saved["tasks"]))
    assert "3 new tasks" in capsys.readouterr().out
    assert len(drawn["counted"]) == 3
    assert drawn["counted"][:2] == drawn["batches"][:2]


@pytest.mark.slow
def test_policies_are_measured_on_the_tasks_of_a_file_again_and_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_folder: Path
) -> None:
    tasks, saved = tmp_path / "tasks.json", {}
    common = ["--config", str(run_folder / "config.json"), "--num-workers", "0", "--meta-batch-size", "4"]
    for name, options in {
        "kept": ["--save-tasks", str(tasks), "--num-batches", "2"],
        "given": ["--tasks", str(tasks)],
        "given once": ["--tasks", str(tasks), "--repetitions", "1"],
    }.items():
        assert run_test([*common, "--output", str(tmp_path / f"{name}.npz"), *options]) == 0
        with np.load(tmp_path / f"{name}.npz", allow_pickle=False) as arrays:
            saved[name] = {**arrays, "printed": capsys.readouterr().out}
    assert np.array_equal(saved["given once"]["returns"], saved["kept"]["returns"])
    assert "--repetitions 3" in saved["given once"]["printed"]
    assert saved["given"]["returns"].shape == (8, 4, 12)
    assert np.array_equal(saved["given"]["returns"][..., :4], saved["kept"]["returns"])
    assert "this policy on these very tasks, and include the adaptation" in saved["given"]["printed"]
    assert f"8 tasks of {tasks}, 4 episodes of each before each step, 3 times" in saved["given"]["printed"]


def test_oracle_is_trained_and_tested_without_adaptation(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    common = ["--num-workers", "0"]
    assert run_train(["--config", str(config), "--output-folder", str(run), "--method", "oracle", *common]) == 0
    printed = capsys.readouterr().out
    assert "iteration     3: return -" in printed
    assert "adaptation" not in printed
    options = ["--config", str(run / "config.json"), "--output", str(tmp_path / "results.npz"), *common]
    assert exit_code(run_test, [*options, "--num-steps", "2"]) == 2
    assert "an oracle knows its task and is not adapted; leave out --num-steps 2" in capsys.readouterr().err
    assert run_test(options) == 0
    with np.load(tmp_path / "results.npz", allow_pickle=False) as saved:
        assert saved["returns"].shape == (40, 1, 4)


@pytest.mark.slow
def test_seeds_are_trained_one_after_the_other_and_resumed(
    tmp_path: Path, config: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study"
    seeds = ["--config", str(config), "--num-workers", "0", "--output-folder", str(study), "--seeds"]
    assert run_train([*seeds, "2", "0", "--num-batches", "2"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    lines = output.out.splitlines()
    assert [line for line in lines if line.startswith("seed ")] == ["seed 2, 1 of 2:", "seed 0, 2 of 2:"]
    assert lines[-1].endswith(f"maml-rl report {study}")
    assert sorted(path.name for path in study.iterdir()) == ["seed-0", "seed-2"]
    # One of them has not been started.
    assert run_train([*seeds, "0", "1", "2", "--resume"]) == 0
    assert {seed: lines_in(study / f"seed-{seed}" / "metrics.jsonl") for seed in range(3)} == {0: 4, 1: 4, 2: 4}
    assert untimed(study / "seed-0") == untimed(run_folder)
    # Finished runs have nothing left to do.
    capsys.readouterr()
    assert run_train(["--output-folder", str(study), "--seeds", "0", "1", "2", "--resume", "--num-workers", "0"]) == 0
    assert capsys.readouterr().out.count("no iteration was left to do") == 3


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_seeds_side_by_side_have_the_bytes_of_each_alone(
    tmp_path: Path, config: Path, run_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = ["--config", str(config), "--num-workers", "0", "--output-folder"]
    assert run_train([*common, str(tmp_path / "beside"), "--seeds", "2", "0", "--seeds-at-once", "2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    heads = {line.split(",")[0] for line in lines if line.endswith(("1 of 2:", "2 of 2:"))}
    assert heads == {"seed 0", "seed 2"}
    assert run_train([*common, str(tmp_path / "alone"), "--seed", "2"]) == 0
    for seed, alone in ((0, run_folder), (2, tmp_path / "alone")):
        run = tmp_path / "beside" / f"seed-{seed}"
        assert untimed(run) == untimed(alone)
        files = [sorted(path.relative_to(each) for path in each.glob("checkpoints/*/*")) for each in (run, alone)]
        assert files[0] == files[1] != []
        assert all((run / name).read_bytes() == (alone / name).read_bytes() for name in files[0])


@pytest.mark.parametrize("seeds", [[], ["--seeds", "0", "1"]], ids=["one-run", "seeds"])
def test_requeued_command_with_resume_needs_no_user(
    tmp_path: Path, config: Path, caplog: pytest.LogCaptureFixture, seeds: list[str]
) -> None:
    folder = tmp_path / "run"
    command = ["--config", str(config), "--num-workers", "0", "--output-folder", str(folder), "--resume", *seeds]
    runs = [folder / f"seed-{seed}" for seed in (0, 1)] if seeds else [folder]
    # The first of several was killed by an earlier version before its first checkpoint; others do not exist yet.
    if seeds:
        (runs[0] / "checkpoints").mkdir(parents=True)
        (runs[0] / "config.json").write_text("{}")
    assert run_train([*command, "--num-batches", "1"]) == 0
    assert caplog.text.count("there is nothing to continue") == len(runs)
    assert run_train([*command, "--num-batches", "2"]) == 0
    assert [lines_in(run / "metrics.jsonl") for run in runs] == [2] * len(runs)


def test_two_tests_of_one_run_at_once_write_two_files(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    options = [str(tmp_path / "run"), "--num-workers", "0", "--meta-batch-size", "2", "--num-steps", "1"]
    measure, codes = evaluation_module.evaluate, []

    def measure_while_another_test_runs(*arguments: Any, **settings: Any) -> Any:
        monkeypatch.setattr(evaluation_module, "evaluate", measure)
        codes.append(run_test([*options, "--seed", "5"]))
        codes.append(exit_code(run_test, [*options, "--output", str(tmp_path / "run" / "evaluation.npz")]))
        return measure(*arguments, **settings)

    monkeypatch.setattr(evaluation_module, "evaluate", measure_while_another_test_runs)
    assert run_test([*options, "--seed", "6"]) == 0
    assert codes == [0, 2]
    assert "evaluation.npz exists; replace it with --overwrite" in capsys.readouterr().err
    seeds = {path.name: int(np.load(path)["seed"]) for path in (tmp_path / "run").glob("*.npz")}
    assert seeds == {"evaluation.npz": 6, "evaluation-2.npz": 5}


@pytest.mark.parametrize("how", [["--output", "{}/new.npz"], []], ids=["named", "numbered"])
def test_full_disk_while_results_are_written_names_the_file(
    tmp_path: Path,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: list[str],
) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    before = snapshot(tmp_path)

    def fail(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = [str(tmp_path / "run"), *(word.format(tmp_path) for word in how), "--meta-batch-size", "2"]
    monkeypatch.setattr(os, "write", fail)
    assert run_test([*options, "--num-workers", "0"]) == 1
    monkeypatch.undo()
    last = capsys.readouterr().err.splitlines()[-1]
    file = tmp_path / "new.npz" if how else tmp_path / "run" / "evaluation.npz"
    assert last == f"test.py: error: No space left on device ({file}); make room there, and try again"
    assert snapshot(tmp_path) == before


def test_full_disk_while_metrics_are_written_names_the_file_and_how_to_continue(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = ["--config", str(config), "--output-folder", str(folder), "--num-workers", "0"]
    written = metrics_module.write_all

    def write_two_lines(descriptor: int, data: bytes) -> None:
        if lines_in(folder / "metrics.jsonl") == 2:
            os.write(descriptor, data[:20])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(descriptor, data)

    monkeypatch.setattr(metrics_module, "write_all", write_two_lines)
    assert exit_code(run_train, command) == 2
    monkeypatch.undo()
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"cannot write {folder / 'metrics.jsonl'}: No space left on device" in last
    assert "continue with --resume" in last
    assert run_train([*command, "--resume"]) == 0
    assert [row["iteration"] for row in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2, 3]


def test_default_folder_is_named_after_the_config(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--num-batches", "1", "--seed", "7", "--profile"]
    assert run_train(["--config", str(config), "--num-workers", "0", *options]) == 0
    assert load_config("runs/small/config.json").seed == 7
    output = capsys.readouterr()
    assert output.out.startswith("this run is runs/small\n")
    for word in ("the results are in runs/small", "inference", "inner", "outer"):
        assert word in output.out
    # No terminal, no progress bar.
    assert "\r" not in output.err
    command = ["--config", str(config), "--num-workers", "0", "--num-batches", "1", "--seeds", "3"]
    assert run_train(command) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "runs/small exists; these runs are in runs/small-2\n--seeds 3 trains seed 3 alone; --seeds 0,1,2"
    )
    assert load_config("runs/small-2/seed-3/config.json").seed == 3
    # The newest is resumed.
    assert run_train([*command[:4], "--num-batches", "2", "--seeds", "3", "--resume"]) == 0
    assert lines_in(Path("runs/small-2/seed-3/metrics.jsonl")) == 2


@pytest.mark.slow
def test_runs_and_results_without_a_folder_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--meta-batch-size", "2", "--fast-batch-size", "2"]
    small = [*sizes, "--num-batches", "1", "--hidden-sizes", "[4]", "--max-episode-steps", "4", "--num-workers", "0"]
    for arguments in (
        ["2d-navigation"],
        ["finn2017/2d-navigation"],
        ["2d-navigation", "--method", "pretrain"],
        ["--config", "runs/maml/2d-navigation"],
    ):
        assert run_train([*arguments, *small]) == 0
    runs = {path.parent.relative_to("runs").as_posix() for path in Path("runs").rglob("config.json")}
    assert runs == {
        "maml/2d-navigation",
        "finn2017/2d-navigation",
        "maml/2d-navigation-pretrain",
        "maml/2d-navigation-2",
    }
    assert run_test(["finn2017/2d-navigation", "--policy", "initial", *sizes, "--num-workers", "0"]) == 0
    results = {path.relative_to("runs").as_posix() for path in Path("runs").rglob("*.npz")}
    assert results == {"finn2017/2d-navigation.npz"}


# From here on, the scripts run as a user runs them, and are really killed.


class Script:
    """A running script, in a process group of its own, as a shell starts it."""

    def __init__(self, name: str, *options: str, folder: Path, variables: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, name if name == "-m" else str(ROOT / name), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), **variables},
        )
        self.pid = self._process.pid

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline, pause = monotonic() + seconds, Event()
        while not condition():
            assert self._process.poll() is None, self._process.communicate()
            assert monotonic() < deadline, "the script did not get that far"
            pause.wait(0.005)

    def end(self, signal_number: int | None = None, *, group: bool = False) -> tuple[int, str, str]:
        """Send a signal, if any; return the exit code, the output and the errors."""
        if signal_number is not None:
            (os.killpg if group else os.kill)(self.pid, signal_number)
        output, errors = self._process.communicate(timeout=60)
        return self._process.returncode, output, errors

    def survivors(self) -> list[psutil.Process]:
        """Processes of the script's session that are still there after two seconds."""
        members = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.pid:
                    members.append(process)
            except ProcessLookupError:
                continue
        return psutil.wait_procs(members, timeout=2.0)[1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    scripts: list[Script] = []

    def start_script(name: str, *options: str, **variables: str) -> Script:
        scripts.append(Script(name, *options, folder=tmp_path, variables=variables))
        return scripts[-1]

    yield start_script
    for script in scripts:
        for process in script.survivors():
            process.kill()


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("signals", "codes", "options"),
    [
        ([signal.SIGINT], {130}, []),
        pytest.param([signal.SIGINT], {130}, ["--prefetch", "2"], marks=pytest.mark.nightly),
        pytest.param([signal.SIGTERM], {143}, [], marks=pytest.mark.nightly),
        # The system and the shell each send one when a terminal is closed.
        pytest.param([signal.SIGHUP, signal.SIGHUP], {129}, [], marks=pytest.mark.nightly),
        pytest.param([signal.SIGTERM, signal.SIGTERM], {143, -signal.SIGTERM}, [], marks=pytest.mark.nightly),
        # They arrive together, and threads may take them in either order.
        pytest.param([signal.SIGINT, signal.SIGTERM], {130, 143, -signal.SIGTERM}, [], marks=pytest.mark.nightly),
    ],
)
def test_interrupted_run_resumes_bit_identically_from_its_last_finished_iteration(
    tmp_path: Path,
    config: Path,
    start: Callable[..., Script],
    signals: list[signal.Signals],
    codes: set[int],
    options: list[str],
) -> None:
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    # A worker without a policy starts faster.
    settings = ["--config", str(config), "--checkpoint-every", "100000", *options]
    if not options:
        settings += ["--inference", "central"]
    many = ["--num-batches", "100000", "--output-folder", str(run)]
    script = start("train.py", *settings, *many, "--num-workers", "2")
    script.wait_until(lambda: lines_in(run / "metrics.jsonl") >= 4)
    for number in signals[:-1]:
        os.kill(script.pid, number)
    pressed = monotonic()
    code, output, errors = script.end(signals[-1], group=True)
    took = monotonic() - pressed
    assert code in codes
    assert output == f"this run is {run}\n"
    assert script.survivors() == []
    if signals == [signal.SIGINT]:
        assert took < 5.0
        advice = "finished iterations are saved, and the same command with --resume continues the run"
        assert errors.splitlines() == [f"train.py: interrupted; {advice}"]
    saved = latest_intact(run / "checkpoints")[1].iteration
    if code > 0:
        assert "the same command with --resume continues" in errors
        assert saved >= 3
        # At most the iteration that was being recorded is missing.
        assert lines_in(run / "metrics.jsonl") - saved in (0, 1)
    last = ["--num-batches", str(saved + 2), "--num-workers", "0"]
    assert run_train([*settings, *last, "--output-folder", str(run), "--resume"]) == 0
    assert run_train([*settings, *last, "--output-folder", str(undisturbed)]) == 0
    assert_same_run(run, undisturbed)


# Makes its standard input the terminal of its session, and becomes the command.
IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="has another way to get a terminal")
@pytest.mark.timeout(120)
def test_run_whose_terminal_is_closed_is_saved(tmp_path: Path, config: Path) -> None:
    metrics = tmp_path / "runs" / "small" / "metrics.jsonl"
    options = ["--config", str(config), "--num-workers", "1", "--num-batches", "100000", "--checkpoint-every", "100000"]
    terminal, inside = os.openpty()
    command = [sys.executable, str(ROOT / "train.py"), *options]
    # Python keeps what the terminal did not take, and tries again to write it at the end.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *command],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        cwd=tmp_path,
        env=buffered,
        start_new_session=True,
    ) as process:
        os.close(inside)
        os.set_blocking(terminal, False)
        pause = Event()
        while lines_in(metrics) < 4:
            assert process.poll() is None
            # The output must be read, as a terminal would.
            with suppress(BlockingIOError):
                os.read(terminal, 100_000)
            pause.wait(0.01)
        os.close(terminal)
        assert process.wait(timeout=60) == 129
    assert latest_intact(metrics.parent / "checkpoints")[1].iteration >= 3


# Python imports a module of this name at its start; the whole process group is interrupted as it looks for a module.
INTERRUPT_AT = """\
import os, signal, sys

class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(Interrupt)
            os.killpg(0, signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
"""


# In the order in which they are loaded: from the first that the package imports to the last before the work.
MOMENTS = (
    *("numpy", "numpy._core._multiarray_umath", "gymnasium.core", "pydantic._internal._generate_schema"),
    *("maml_rl.cli.console", "torch", "torch._C", "maml_rl.metalearners.metalearner"),
)
COMMAND = Path(sys.executable).with_name("maml-rl")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("way", "moments"),
    [
        # Nightly at the moments between, too.
        (["train.py"], (MOMENTS[0], MOMENTS[6], MOMENTS[-1])),
        pytest.param(["train.py"], MOMENTS, marks=pytest.mark.nightly),
        # It imports the same modules; whose signal it is has to be known as early.
        ([str(COMMAND), "train"], MOMENTS[:1]),
        pytest.param([str(COMMAND), "train"], MOMENTS[1:], marks=pytest.mark.nightly),
        pytest.param(["-m", "maml_rl", "train"], MOMENTS, marks=pytest.mark.nightly),
        pytest.param(["test.py"], MOMENTS, marks=pytest.mark.nightly),
    ],
)
def test_start_that_is_interrupted_at_any_moment_ends_at_once_without_a_traceback(
    tmp_path: Path,
    config: Path,
    run_folder: Path,
    start: Callable[..., Script],
    way: list[str],
    moments: tuple[str, ...],
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT_AT)
    training = ["--config", str(config), "--num-workers", "2", "--num-batches", "100000"]
    options = [str(run_folder)] if way == ["test.py"] else training
    for module in moments:
        script = start(*way, *options, PYTHONPATH=str(tmp_path), INTERRUPT_AT=module)
        # A shell calls this 130.
        assert (module, *script.end()) == (module, -signal.SIGINT, "", "")
        assert script.survivors() == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_signals_of_other_programs_and_those_that_are_ignored_are_left_alone(tmp_path: Path) -> None:
    show = "import maml_rl, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    (tmp_path / "own.py").write_text(show)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(show)
    (tmp_path / "package" / "__main__.py").touch()
    for program in (["own.py", "maml-rl"], ["-c", show, "maml_rl"], ["-m", "package"]):
        shown = subprocess.run([sys.executable, *program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert shown.stdout == "True\n", shown.stderr
    # As a shell starts a background job.
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT_AT)
    variables = os.environ | {"PYTHONPATH": str(tmp_path), "INTERRUPT_AT": "gymnasium.core"}
    for command in ([str(COMMAND), "configs"], [sys.executable, str(ROOT / "train.py"), "--help"]):
        ended = subprocess.run(
            [*ignoring, *command], env=variables, timeout=60, capture_output=True, start_new_session=True
        )
        assert ended.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
# The second keeps moments of Adam, and step sizes, beside its policy.
@pytest.mark.parametrize("algorithm", [pytest.param("maml-trpo", marks=pytest.mark.nightly), "meta-sgd"])
def test_killed_run_leaves_no_process_and_resumes_bit_identically(
    algorithm: str, tmp_path: Path, config: Path, start: Callable[..., Script]
) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    settings = ["--config", str(config), "--num-batches", "20", "--algorithm", algorithm]
    settings += ["--evaluate-every", "3", "--evaluation-tasks", "2", "--inference", "central"]
    assert run_train([*settings, "--output-folder", str(undisturbed), "--num-workers", "0"]) == 0
    script = start("train.py", *settings, "--output-folder", str(killed), "--num-workers", "2")
    script.wait_until(lambda: lines_in(killed / "metrics.jsonl") >= 5)
    code, _, _ = script.end(signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert script.survivors() == []
    assert lines_in(killed / "metrics.jsonl") < 20, "the run was over before it was killed"
    assert run_train(["--resume", "--output-folder", str(killed), "--num-workers", "0"]) == 0
    assert_same_run(killed, undisturbed)
    last = latest_intact(killed / "checkpoints")[1]
    assert (last.iteration, bool(last.learner)) == (20, algorithm == "meta-sgd")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_script_runs_from_any_folder_with_processes_of_its_own(run_folder: Path, start: Callable[..., Script]) -> None:
    options = ["--config", str(run_folder / "config.json"), "--output", "results.npz", "--meta-batch-size", "4"]
    script = start("test.py", *options, "--num-workers", "1")
    code, output, errors = script.end()
    assert code == 0, errors
    assert "iteration-000004" in errors
    assert "95 % interval" in output
    assert script.survivors() == []


def test_settings_of_the_algorithm_are_options(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--config", str(config), "--output-folder", str(folder), "--num-workers", "0", "--num-batches", "1"]
    assert run_train([*options, "--ls-max-steps", "2", "--max-kl=0.5", "--algorithm-settings", "{cg-damping: 1}"]) == 0
    settings = json.loads((folder / "config.json").read_text())["algorithm-settings"]
    assert settings["cg-iters"] == 3, "the config's"
    assert (settings["ls-max-steps"], settings["max-kl"], settings["cg-damping"]) == (2, 0.5, 1)


def test_policy_is_tested_on_either_side_of_a_split(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = "{distribution: split, train: {goal_0: [-0.5, 0]}, test: {goal_0: [0, 0.5]}}"
    run = tmp_path / "run"
    common = ["--num-workers", "0", "--config"]
    options = ["--output-folder", str(run), "--num-batches", "1", "--tasks", split]
    assert run_train([*common, str(config), *options]) == 0
    for more in ([], ["--training-tasks"]):
        assert run_test([*common, str(run / "config.json"), "--meta-batch-size", "5", *more]) == 0
    assert "5 new tasks as in training" in capsys.readouterr().out
    for name, sign in (("evaluation", 1.0), ("training-tasks", -1.0)):
        with np.load(run / f"{name}.npz", allow_pickle=False) as arrays:
            assert all(sign * task["goal"][0] >= 0.0 for task in json.loads(str(arrays["tasks"])))


def test_test_on_fixed_tasks_says_which_they_are(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, common = tmp_path / "run", ["--num-workers", "0", "--config"]
    fixed = "{distribution: fixed, train: 4, test: 3}"
    options = ["--output-folder", str(run), "--num-batches", "1", "--meta-batch-size", "2", "--tasks", fixed]
    assert run_train([*common, str(config), *options]) == 0
    for more, said in (([], ": 3 test tasks, "), (["--training-tasks"], ": 4 training tasks, ")):
        assert run_test([*common, str(run / "config.json"), *more]) == 0
        assert said in capsys.readouterr().out
    assert run_test([*common, str(run / "config.json"), "--tasks", "5"]) == 2
    assert "the run has 3 such tasks, and all of them are used; leave out --tasks 5" in capsys.readouterr().err
