import argparse
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import gymnasium
import pytest

import maml_rl
from maml_rl.cli import console, listing
from maml_rl.cli import main as cli
from maml_rl.cli.run_options import run_path
from maml_rl.config.catalog import find_config, full_name, shipped_configs, zoo
from maml_rl.config.config import load_config
from maml_rl.config.settings import MEASURED
from maml_rl.envs import FAMILIES
from maml_rl.errors import ConfigError
from maml_rl.results.identity import refuse_different_problems
from tests.small_runs import exit_code

Command = Callable[..., str]
ROOT = Path(__file__).resolve().parents[2]

FAMILY = """
import gymnasium
from tests.numbered_env import NumberedEnv


class CoinEnv(NumberedEnv):
    def step(self, action):
        return self._look(), float(action == self.start + self.paid), False, False, {}


class ForgetfulEnv(CoinEnv):
    def reset(self, *, seed=None, options=None):
        self.paid = 0
        return super().reset(seed=seed, options=options)


gymnasium.register("Coin-v0", CoinEnv, max_episode_steps=5)
"""


@pytest.fixture
def coins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's module in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "coins.py").write_text(FAMILY)
    yield "coins"
    for name in ("coins", "waits", "doors"):
        sys.modules.pop(name, None)
    gymnasium.registry.pop("Coin-v0", None)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module", autouse=True)
def configs_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "load_config", cache(load_config))
        yield


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command, and returns what it prints, or its errors where it ends with another code than 0."""

    def run(*arguments: str, code: int = 0) -> str:
        assert exit_code(cli.main, arguments) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return run


def test_installed_command_is_the_main_function() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["maml-rl"].partition(":")
    assert getattr(import_module(module), name) is cli.main


def test_command_alone_shows_the_help_and_another_that_of_each(command: Command) -> None:
    assert command() == command("--help") == command("help")
    assert command("help", "zoo") == command("zoo", "--help")


@pytest.mark.parametrize("options", [[], ["--verbose"]])
def test_configs_are_listed_by_full_names_with_whole_sentences(
    options: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = command("configs", *options)
    assert all(len(line) <= 120 for line in shown.splitlines())
    names = re.findall(r"^  (\S+/\S+)  ", shown, re.MULTILINE)
    assert {find_config(name) for name in names} == set(shipped_configs().values())
    assert len(names) == len(shipped_configs())
    # Every entry ends like a sentence.
    entries = re.split(r"\n(?=  \S)|\n\n", shown.rpartition("\n\n")[0])
    assert [entry for entry in entries if not entry.rstrip().endswith((".", "/"))] == []
    assert re.search(r"maml/ant-goal +Ant that must find out where to go\.", shown)
    assert ("AntPos-v5, maml-trpo: 500 meta-updates" in shown) == bool(options)


def test_envs_describes_the_tasks_of_every_family(command: Command) -> None:
    shown = command("envs", "--verbose")
    listed = re.findall(r"[\w/.-]+-v\d+(?=,|\n)", shown)
    assert sorted(listed) == sorted(FAMILIES)
    assert "goal (2,): where to go" in shown
    assert all(len(line) <= 120 for line in shown.splitlines())


def test_envs_with_the_same_tasks_are_one_entry(command: Command) -> None:
    shown = command("envs")
    assert "as above" not in shown
    assert "in episodes of `pulls` steps (default: 1).\n" in shown
    assert re.search(r"MetaWorld/ML1-assembly-v3, .* and 50 more\n +rand_vec", shown)
    assert len(shown.splitlines()) < 100
    # A text may continue on further lines.
    assert max(Counter(re.findall(r"(?:^      .*\n)+", shown, re.MULTILINE)).values()) == 1


def test_zoo_lists_returns_in_words_and_their_intervals_on_request(command: Command) -> None:
    brief = command("zoo")
    whole = command("zoo", "--verbose")
    assert set(re.findall(r"^  (\S+)", brief, re.MULTILINE)) == set(zoo())
    assert re.search(r"ant-dir +AntDir-v5: mean return .* before adaptation, .* after 3 steps\.", brief)
    assert "[" not in brief
    assert "with 95 % intervals" in whole
    assert all(len(line) <= 120 for line in (brief + whole).splitlines())


@pytest.mark.parametrize(
    ("name", "argument"), [("coins:Coin-v0", "'coins:Coin-v0'"), ("coins:CoinEnv", "CoinEnv, max_episode_steps=...")]
)
def test_own_family_is_checked_from_the_current_folder(coins: str, name: str, argument: str, command: Command) -> None:
    assert f"{name} is a task family; MultiTaskSampler({argument}, ...)" in command(
        "check-env", name, "--env-kwargs", "{start: 2}"
    )
    assert sys.path[-1] == os.getcwd(), "after all that is installed"


@pytest.mark.timeout(120)
def test_own_environment_trains_without_a_config_under_its_own_time_limit(coins: str, tmp_path: Path) -> None:
    sizes = ["--num-batches", "1", "--meta-batch-size", "2", "--fast-batch-size", "3", "--evaluation-steps", "1"]
    quick = ["--num-workers", "0", "--log-level", "error", "--output-folder", "run"]
    assert cli.main(["train", "--env-name", "coins:Coin-v0", *sizes, *quick]) == 0
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded.get("env-kwargs", {}) == {}
    assert recorded.get("max-episode-steps") is None
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    limit = gymnasium.spec("Coin-v0").max_episode_steps
    assert row["env_steps"] == 2 * 2 * 3 * limit


def test_own_families_pass_the_check_and_one_that_forgets_its_task_does_not(coins: str, command: Command) -> None:
    error = command("check-env", "coins:ForgetfulEnv", code=1)
    assert "coins:ForgetfulEnv:" in error
    assert "reset" in error
    shown = command("check-env", "2DNavigation-v0")
    assert shown.count("ok: ") == 2
    assert "\x1b" not in shown


def test_every_command_has_its_name_in_its_help_and_takes_a_log_level(command: Command) -> None:
    for name in [name for name in cli.COMMANDS if name != "help"]:
        shown = command(name, "--help")
        assert f"usage: maml-rl {name}" in shown
        assert "--log-level {debug,info,warning,error}" in shown, name
        assert "invalid choice: 'chatty'" in command(name, "--log-level", "chatty", code=2), name


@pytest.mark.parametrize(("level", "heard"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_log_level_selects_the_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, heard: int
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])

    def speak(options: object) -> None:
        logger = logging.getLogger("maml_rl.anything")
        for say in (logger.error, logger.warning, logger.info, logger.debug):
            say("spoken")

    parser = console.Parser(prog="this")
    assert console.run_command(parser, ["--log-level", level], speak) == 0
    assert capsys.readouterr().err.splitlines() == ["this: spoken"] * heard


@pytest.mark.parametrize("level", ["debug", "info"])
def test_log_level_debug_shows_where_an_error_was_raised(
    coins: str, level: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    Path("broken.py").write_text(
        "import json\nfrom coins import CoinEnv\nclass BrokenEnv(CoinEnv):\n    def step(self, action):\n"
        "        return json.loads('{')\n"
    )
    error = command("check-env", "broken:BrokenEnv", "--log-level", level, code=1)
    sys.modules.pop("broken")
    place = r"JSONDecodeError in broken.py, line 5 \(raised in json/decoder.py, line \d+\): Expecting property name"
    assert re.search(rf"^maml-rl check-env: error: broken:BrokenEnv: {place}", error, re.MULTILINE)
    assert ("Traceback (most recent call last):" in error) == (level == "debug")
    assert ("in raw_decode" in error) == (level == "debug")


def test_commands_do_not_change_the_logging_of_the_process(command: Command) -> None:
    root, package = logging.getLogger(), logging.getLogger("maml_rl")
    before = (package.level, list(root.handlers), list(package.handlers))
    arguments = ["--config", "nowhere.yaml", "--log-level", "error"]
    assert "nowhere.yaml" in command("train", *arguments, code=console.BAD_INPUT)
    assert (package.level, root.handlers, package.handlers) == before


def test_version_names_what_results_depend_on(command: Command) -> None:
    assert command("--version") == f"maml-rl {maml_rl.__version__}\n"
    shown = command("version")
    assert shown.startswith(f"maml-rl {maml_rl.__version__}\n")
    assert f"torch {version('torch')}" in shown


@pytest.mark.parametrize(("name", "columns"), [("configs", 60), ("envs", 60), ("zoo", 60), ("benchmarks", 60)])
def test_lists_fit_the_terminal_and_take_a_part_of_a_name(
    name: str, columns: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    everything = command(name)
    part = {"benchmarks": "navigation"}.get(name, "cheetah")
    lines = command(name, part.upper()).splitlines()
    assert 1 < len(lines) < len(everything.splitlines())
    names = [line.split()[0] for line in lines if re.match(r"  \S", line)]
    assert names
    assert all(part in each.lower() for each in names), names
    # Names and words that are longer than the line stay whole.
    assert all(len(line) <= min(columns, 120) or len(line.split()) <= 2 for line in lines)


def test_last_is_the_run_that_was_written_to_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no run in the folder runs yet" in command("diagnose", "last", code=2)
    for name, written in (("new", 5), ("deep/newest", 9), ("old", 1)):
        file = tmp_path / "runs" / name / "metrics.jsonl"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (0, written))
    assert run_path("last") == Path("runs/deep/newest")
    # A folder of this name is what it is.
    Path("last").mkdir()
    assert run_path("last") == Path("last")


def test_configs_of_one_name_are_one_problem_or_list_and_refusal_say_what_differs() -> None:
    configs = {full_name(path): load_config(path) for path in shipped_configs().values()}
    problems = {}
    for name, config in configs.items():
        problems[name] = {"env-name": config.env_name, "env-kwargs": config.env_kwargs}
        # What a config leaves to its family is the same as if it named it.
        problems[name]["max-episode-steps"] = config.max_episode_steps or FAMILIES[config.env_name].max_episode_steps
    several = 0
    for name, problem in problems.items():
        usual = full_name(find_config(name.rpartition("/")[2]))
        keys = [key for key in problem if problem[key] != problems[usual][key]]
        several += bool(keys)
        wanted = f"Another problem than {usual}: {' and '.join(keys)}." if keys else ""
        config, reference = configs[name], configs[usual]
        assert listing._another_problem(name, config) == wanted
        if not keys:
            refuse_different_problems([config, reference])
            continue
        with pytest.raises(ConfigError, match="--set") as refused:
            refuse_different_problems([config, reference])
        remedy = str(refused.value).partition("--set ")[2]
        assert all(f"{key}=" in remedy for key in keys), refused.value
    assert several > 10


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("maml/2d-navigation", "{env-steps} M steps, {minutes} s on two cores"),
        ("maml/2d-navigation", "return {first} before adaptation and {last} at its end"),
        ("amago/point-goal", "Time not measured."),
        ("rl2/halfcheetah-vel-2x100", "in the first episode and -19.9 in the last episode of a trial"),
        ("rl2/bandit-k5-n10", "6.7 in the only episode of a trial"),
        ("maml/ant-dir-2d", "160 M steps"),
        ("promp/2d-navigation", "learned by ProMP. Another problem than maml/2d-navigation: env-kwargs."),
    ],
)
def test_configs_name_episodes_of_a_memory_and_steps_without_exponent(
    name: str, sentence: str, command: Command
) -> None:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    assert set(measured) <= {full_name(path) for path in shipped_configs().values()}
    entry = {"env-steps": 0, "minutes": 0} | measured.get(name, {})
    entry |= {"env-steps": f"{entry['env-steps'] / 1e6:.2g}", "minutes": f"{60.0 * entry['minutes']:.0f}"}
    assert sentence.format_map(entry) in " ".join(command("configs", name).split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("maml-rl tr", {"train"}),
        ("maml-rl train dark-k", {"dark-key-door"}),
        ("maml-rl train promp/2d-navigation --clip", {"--clip"}),
        ("maml-rl report --ti", {"--title"}),
    ],
)
def test_shell_completes_commands_configs_and_options(line: str, expected: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    # The shell's function reads the completions from the file descriptor 8.
    found = subprocess.run(
        ["bash", "-c", f"exec 8> found; exec {sys.executable} -P -m maml_rl"],
        cwd=tmp_path,
        env={**os.environ, "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_TYPE": "9"}
        | {"COMP_POINT": str(len(line)), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    assert {each.strip() for each in (tmp_path / "found").read_text().split("\n") if each.strip()} == expected


WAIT, THREADS = "time.sleep(0.01)", "    stepping = 'threads'\n"


@pytest.mark.parametrize(
    ("head", "step", "wait", "told"),
    [
        ("", "def", WAIT, "note: a step takes .* waiting; with 'stepping: threads' slots wait concurrently"),
        (THREADS, "def", WAIT, "ok: .* concurrently, which suits it"),
        ("", "def", "None", "ok: .* one after the other, which suits it"),
        (THREADS, "def", "None", "note: .* threads do not help with that"),
        ("    thread_safe = False\n", "def", WAIT, "ok: .* it declares that it is not thread-safe"),
        ("", "async def", "await asyncio.sleep(0.01)", "ok: .* its slots are awaited concurrently"),
    ],
)
def test_check_env_reports_whether_threads_would_be_faster(
    head: str, step: str, wait: str, told: str, command: Command, coins: str
) -> None:
    Path("waits.py").write_text(
        "import asyncio, time\nfrom coins import CoinEnv\n"
        "class WaitEnv(CoinEnv):\n"
        f"{head}"
        f"    {step} reset(self, **given):\n"
        "        return CoinEnv.reset(self, **given)\n"
        f"    {step} step(self, action):\n"
        f"        {wait}\n"
        "        return CoinEnv.step(self, action)\n"
    )
    assert re.search(told, command("check-env", "waits:WaitEnv"))


def test_check_env_looks_for_how_a_family_is_stepped_where_the_sampler_does(command: Command, coins: str) -> None:
    Path("waits.py").write_text(
        "import time, gymnasium\nfrom coins import CoinEnv\n"
        "class SlowCoins(CoinEnv):\n"
        "    def step(self, action):\n"
        "        time.sleep(0.01)\n"
        "        return super().step(action)\n"
        "class Family(gymnasium.Wrapper):\n"
        "    def reset_task(self, task):\n"
        "        self.env.reset_task(task)\n"
        "class Told(Family):\n"
        "    stepping = 'threads'\n"
        "class Unsafe(Family):\n"
        "    thread_safe = False\n"
        "def make():\n"
        "    return gymnasium.wrappers.TimeLimit(Family(SlowCoins()), 9)\n"
        "def make_told():\n"
        "    return gymnasium.wrappers.TimeLimit(Told(SlowCoins()), 9)\n"
        "def make_unsafe():\n"
        "    return Unsafe(SlowCoins())\n"
    )
    for made, told in (
        ("make", 'note: .* set stepping = "threads" in Family'),
        ("make_told", "ok: .* concurrently, which suits it"),
        ("make_unsafe", "ok: .* declares that it is not thread-safe"),
    ):
        assert re.search(told, command("check-env", f"waits:{made}"))


def test_check_env_reports_further_requirements_of_the_sampler(command: Command, coins: str) -> None:
    Path("doors.py").write_text(
        "import gymnasium\nfrom coins import CoinEnv\n"
        "class DoorEnv(CoinEnv):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.action_space = gymnasium.spaces.Text(3)\n"
    )
    last = command("check-env", "doors:DoorEnv").splitlines()[-1]
    assert "MultiTaskSampler(DoorEnv, max_episode_steps=..., policy=..., ...) samples it" in last
    assert "it has no time limit of its own" in last
    assert "no policy for the action space Text(1, 3, charset=" in last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_ends_the_work_and_a_second_one_the_process(number: int) -> None:
    ends = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(each) for each in ends]
    with console.ending_in_order():
        with pytest.raises(KeyboardInterrupt) as raised:
            signal.raise_signal(number)
        assert raised.value.args == (number,)
        # SIGHUP may arrive twice.
        ignored = [signal.SIGHUP] if number == signal.SIGHUP else []
        assert [signal.getsignal(each) for each in ends] == [
            signal.SIG_IGN if each in ignored else signal.SIG_DFL for each in ends
        ]
    assert [signal.getsignal(each) for each in ends] == before


@pytest.mark.parametrize(("raised", "code"), [((), 130), ((5,), 130), ((signal.SIGTERM,), 143)])
def test_exit_code_of_an_interrupt_is_that_of_a_signal(raised: tuple[int, ...], code: int) -> None:
    def work(options: argparse.Namespace) -> None:
        raise KeyboardInterrupt(*raised)

    assert console.run_command(console.Parser(prog="x"), [], work) == code


def test_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with console.ending_in_order():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(60)
def test_renderer_that_mujoco_cannot_load_is_named_with_the_remedy(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MUJOCO_GL": "nonsense"}
    command = [sys.executable, "-m", "maml_rl", "check-env", "AntDir-v5"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "MUJOCO_GL is 'nonsense': unset it" in line


@pytest.mark.slow
def test_list_ends_silently_when_its_reader_has_closed_the_pipe() -> None:
    command = [sys.executable, "-m", "maml_rl", "configs"]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, text=True, timeout=60)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
