"""Wrong command lines, configs and files: each ends in one line and exit code 2, and nothing is written."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gymnasium
import pytest

from maml_rl.cli.main import main
from maml_rl.cli.train_test import run_test, run_train

SMALL = """\
env-name: 2DNavigation-v0
max-episode-steps: 10
hidden-sizes: [4]
fast-batch-size: 2
meta-batch-size: 2
num-batches: 1
cg-iters: 1
"""

ENVIRONMENTS = """\
import sys

import gymnasium
import numpy as np


def function(**kwargs):
    return 3


def needs_an_argument(size):
    return None


class NoEnv:
    pass


class Base(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def sample_tasks(self, num_tasks):
        return [{"side": int(side)} for side in self.np_random.integers(2, size=num_tasks)]

    def reset_task(self, task):
        if task.keys() != {"side"}:
            raise ValueError(f"a task has one entry, side; got {task}")
        self.side = task["side"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action == self.side), False, False, {}


class RaisesInInit(Base):
    def __init__(self):
        raise RuntimeError("no license\\nfor this host")


class RaisesNothingToRead(Base):
    def __init__(self):
        raise RuntimeError


class Exits(Base):
    def __init__(self):
        sys.exit(5)


class RaisesBaseException(Base):
    def __init__(self):
        raise BaseException("stop")


class TakesAllMemory(Base):
    def __init__(self):
        np.zeros(10**17)


class Recursive(Base):
    def __init__(self):
        Recursive()


class RaisesLate(Base):
    @property
    def observation_space(self):
        raise LookupError("not yet")


for made in (function, needs_an_argument, NoEnv, *Base.__subclasses__()):
    gymnasium.register(f"Wrong{made.__name__}-v0", entry_point=made, max_episode_steps=5)
gymnasium.register("WrongAttribute-v0", entry_point="wrong_envs:Missing", max_episode_steps=5)
gymnasium.register("WrongModule-v0", entry_point="gone.away:Missing", max_episode_steps=5)
gymnasium.register("WrongEntryPoint-v0", entry_point="no_colon", max_episode_steps=5)
"""

FILES: dict[str, str | bytes] = {
    "small.yaml": SMALL,
    "kwargs.yaml": SMALL + "env-kwargs: {low: -1, high: 1}\n",
    "wrong_envs.py": ENVIRONMENTS,
    "wrong_syntax.py": "x = (\n",
    "wrong_name.py": "\n\nundefined\n",
    "wrong_import.py": "import not_there_at_all\n",
    "wrong_exit.py": "import sys\nsys.exit(3)\n",
    "wrong_base.py": "raise BaseException('stop')\n",
    "wrong_deeply.py": "import wrong_name\n",
    "wrong_null.py": "x\0",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands below name."""
    folder = tmp_path_factory.mktemp("wrong_input")
    for name, content in FILES.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    options = ["--config", str(folder / "small.yaml"), "--output-folder", str(folder / "run"), "--num-workers", "0"]
    assert run_train(options) == 0
    return folder


@pytest.fixture
def place(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, whose modules are imported anew by every command."""
    monkeypatch.chdir(prepared)
    monkeypatch.setattr(sys, "path", [str(prepared), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    registered, imported = set(gymnasium.registry), set(sys.modules)
    yield prepared
    for env_id in set(gymnasium.registry) - registered:
        del gymnasium.registry[env_id]
    for name in set(sys.modules) - imported:
        if name.startswith("wrong_"):
            del sys.modules[name]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything that is there, links unfollowed, with the contents of files."""
    found: dict[str, bytes | None] = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(root, name)
            plain = os.path.isfile(path) and not os.path.islink(path)
            found[path] = Path(path).read_bytes() if plain else None
    return found


def train(*options: str) -> list[str]:
    return ["train.py", "--config", "small.yaml", "--output-folder", "out", "--num-workers", "0", *options]


def check_env(*options: str) -> list[str]:
    return ["check-env", *options]


def run_command_line(arguments: Sequence[str]) -> int:
    scripts: dict[str, Callable[[Sequence[str]], int]] = {"train.py": run_train, "test.py": run_test}
    name, *options = arguments
    try:
        return scripts[name](options) if name in scripts else main(arguments)
    except SystemExit as exit_:
        return int(exit_.code or 0)


def raised_by(code: str, kind: str, message: str = "") -> str:
    """How a line tells of an exception that some code of the environments raises."""
    line = ENVIRONMENTS[: ENVIRONMENTS.index(code)].count("\n") + 1
    return f"{kind} in wrong_envs.py, line {line}{message}"


# Arguments, and words that the line has to hold.
Case = tuple[list[str], list[str]]

ENVIRONMENT_CASES: list[Case] = [
    *[
        (command(name), ["relative", "full name"])
        for name in (".x:Foo-v0", "..:Foo", "..wrong_envs:Foo", "./wrong_envs.py:WrongExits-v0")
        for command in (lambda name: train("--env-name", name), check_env)
    ],
    *[
        (command(f"{module}:Foo-v0"), [module, *words])
        for module, words in (
            ("wrong_syntax", ["SyntaxError in wrong_syntax.py, line 1: '(' was never closed"]),
            ("wrong_name", ["NameError in wrong_name.py, line 3: name 'undefined' is not defined"]),
            ("wrong_import", ["ModuleNotFoundError in wrong_import.py, line 1: No module named 'not_there_at_all'"]),
            ("wrong_exit", ["SystemExit in wrong_exit.py, line 2: 3"]),
            ("wrong_base", ["BaseException in wrong_base.py, line 1: stop"]),
            ("wrong_deeply", ["NameError in wrong_name.py, line 3: name 'undefined' is not defined"]),
            ("wrong_null", ["null bytes"]),
            ("a b", ["No module named 'a b'"]),
            ("os/path", ["not of its file"]),
            ("wrong_envs.py", ["not of its file"]),
            ("/etc/passwd", ["not of its file"]),
        )
        for command in (lambda name: train("--env-name", name), check_env)
    ],
    *[
        (command(f"wrong_envs:Wrong{name}-v0"), [f"wrong_envs:Wrong{name}-v0 cannot be made", *words])
        for name, words in (
            ("RaisesInInit", [raised_by('raise RuntimeError("no', "RuntimeError", ": no license for this host")]),
            ("RaisesNothingToRead", [raised_by("raise RuntimeError\n", "RuntimeError")]),
            ("Exits", [raised_by("sys.exit(5)", "SystemExit", ": 5")]),
            ("RaisesBaseException", [raised_by('raise BaseException("stop', "BaseException", ": stop")]),
            ("TakesAllMemory", [raised_by("np.zeros(10**17", "MemoryError"), "allocate"]),
            ("Recursive", [raised_by("        Recursive()", "RecursionError")]),
            ("function", ["gymnasium.Env", "int"]),
            ("needs_an_argument", ["size"]),
            ("NoEnv", ["gymnasium.Env", "NoEnv"]),
            ("Attribute", ["Missing"]),
            ("Module", ["No module named 'gone'"]),
            ("EntryPoint", ["ValueError"]),
        )
        for command in (lambda name: train("--env-name", name), check_env)
    ],
    (
        train("--env-name", "wrong_envs:WrongRaisesLate-v0"),
        [raised_by("raise LookupError", "LookupError", ": ")],
    ),
    (train("--env-name", "wrong_envs:Base"), ["is no id", "gymnasium.register('Base-v0'"]),
    (check_env("wrong_envs:function"), ["makes int, which is no gymnasium.Env", "derive"]),
    (check_env("wrong_envs:NoEnv"), ["makes NoEnv, which is no gymnasium.Env", "derive"]),
    (check_env("wrong_envs:needs_an_argument"), ["cannot be made", "size"]),
    (
        check_env("wrong_envs:RaisesInInit"),
        [raised_by('raise RuntimeError("no', "RuntimeError", ": no license for this host")],
    ),
    (check_env("wrong_envs:Exits"), [raised_by("sys.exit(5)", "SystemExit", ": 5")]),
    (check_env("builtins:exit"), ["cannot be made: SystemExit"]),
    (check_env("two\nlines"), ["two\\nlines"]),
    (check_env("\x1b[31mred"), ["\\x1b[31mred"]),
    (train("--env-name", "json:Foo-v0"), ["unknown family 'Foo-v0'"]),
    (train("--env-name", ""), ["expected text"]),
    (train("--env-name", "2DNavigation"), ["in the command line", "did you mean '2DNavigation-v0'"]),
    (train("--env-name", "CartPole-v1"), ["no task family", "sample_tasks"]),
    # Arguments that the config has for its own family.
    *[
        (train("--config", "kwargs.yaml", "--env-name", name), ["kwargs.yaml, line 8", "give --env-kwargs, too"])
        for name in ("AntDir-v5", "Bandit-K5-v0", "TabularMDP-v0")
    ],
    (train("--config", "kwargs.yaml", "--env-kwargs", "{lo: 1}"), ["command line", "did you mean 'low'"]),
    (train("--env-kwargs", "{low: 1, high: 0}"), ["command line", "low must be below high"]),
    *[(train("--env-kwargs", value), ["a mapping"]) for value in ("[1]", "x", "3", "true")],
    *[(train("--env-kwargs", value), ["finite"]) for value in ("{low: .nan}", "{low: 1e400}", "{low: [-.inf]}")],
    (train("--env-kwargs", "{1: 2}"), ["must be text"]),
    (train("--env-kwargs", "{low: 2020-01-01}"), ["plain data"]),
    (check_env("wrong_envs:Base", "--env-kwargs", "{"), ["--env-kwargs", "no valid YAML"]),
    (check_env("wrong_envs:Base", "--env-kwargs", "[]"), ["must be a mapping"]),
    (check_env("wrong_envs:Base", "--env-kwargs", "{a: 1}"), ["cannot be made"]),
]


def name_of(case: Case) -> str:
    name, *options = case[0]
    return " ".join(repr(each)[1:-1] for each in (name, *options[6 if name == "train.py" else 0 :]))[:80]


@pytest.mark.parametrize("case", ENVIRONMENT_CASES, ids=name_of)
def test_wrong_input_ends_in_one_line(place: Path, capfd: pytest.CaptureFixture[str], case: Case) -> None:
    arguments, words = case
    before = snapshot(place)
    code = run_command_line(arguments)
    output = capfd.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1, output.err
    assert ": error: " in output.err
    for word in words:
        assert word in output.err
    assert code == 2
    assert snapshot(place) == before
