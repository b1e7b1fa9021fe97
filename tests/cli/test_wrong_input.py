"""Wrong command lines, configs and files: each ends in one line and exit code 2, and nothing is written."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gymnasium
import pytest

from maml_rl.cli.evaluate import run_test
from maml_rl.cli.main import main
from maml_rl.cli.train import run_train
from tests.small_runs import exit_code

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
from tests.numbered_env import NumberedEnv


def function(**kwargs):
    return 3


class Base(NumberedEnv):
    pass


class RaisesInInit(Base):
    def __init__(self):
        raise RuntimeError("no license\\nfor this host")


class Exits(Base):
    def __init__(self):
        sys.exit(5)


class RaisesLate(Base):
    @property
    def observation_space(self):
        raise LookupError("not yet")


for made in (function, *Base.__subclasses__()):
    gymnasium.register(f"Wrong{made.__name__}-v0", entry_point=made, max_episode_steps=5)
"""

FILES = {
    "small.yaml": SMALL,
    "kwargs.yaml": SMALL + "env-kwargs: {low: -1, high: 1}\n",
    "wrong_envs.py": ENVIRONMENTS,
    "wrong_syntax.py": "x = (\n",
    "wrong_name.py": "\n\nundefined\n",
    "wrong_exit.py": "import sys\nsys.exit(3)\n",
    "file": "x",
    "broken_run/config.json": "{",
    "unmade.yaml": SMALL + "env-kwargs: {high: 2, low: x}\n",
    "gaussian.yaml": "env-name: GaussianBandit-K5-v0\nfast-batch-size: 2\n",
    "wide.yaml": SMALL.replace("[4]", "[5]"),
    "ant_tasks.json": '{"env-name": "AntPos-v5", "tasks": [{"position": [1.0, 1.0]}]}',
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands below name."""
    folder = tmp_path_factory.mktemp("wrong_input")
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "fifo")
    for name in ("folder", "broken_run"):
        (folder / name).mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content)
    options = ["--config", str(folder / "small.yaml"), "--output-folder", str(folder / "run"), "--num-workers", "0"]
    assert run_train(options) == 0
    for name in ("edited", "study/seed-1"):
        shutil.copytree(folder / "run", folder / name)
    config = folder / "edited" / "config.json"
    config.write_text(config.read_text().replace('"num-batches": 1', '"num-batches": 9'))
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
    """Return all paths, without following links, with the contents of files."""
    found: dict[str, bytes | None] = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(root, name)
            plain = os.path.isfile(path) and not os.path.islink(path)
            found[path] = Path(path).read_bytes() if plain else None
    return found


def train(*options: str) -> list[str]:
    return ["train.py", "--config", "small.yaml", "--output-folder", "out", "--num-workers", "0", *options]


def evaluate(*options: str) -> list[str]:
    return ["test.py", "--config", "run", "--output", "results.npz", "--num-workers", "0", *options]


def check_env(*options: str) -> list[str]:
    return ["check-env", *options]


def run_command_line(arguments: Sequence[str]) -> int:
    scripts: dict[str, Callable[[Sequence[str]], int]] = {"train.py": run_train, "test.py": run_test}
    name, *options = arguments
    return exit_code(scripts[name], options) if name in scripts else exit_code(main, arguments)


def raised_by(code: str, kind: str, message: str = "") -> str:
    """Return the text that reports an exception raised by a line of an environment's code."""
    line = ENVIRONMENTS[: ENVIRONMENTS.index(code)].count("\n") + 1
    return f"{kind} in wrong_envs.py, line {line}{message}"


POLICY = "run/checkpoints/iteration-000001"
# Arguments, and words that the line must contain.
Case = tuple[list[str], list[str]]

ENVIRONMENT_CASES: list[Case] = [
    (train("--env-name", ".x:Foo-v0"), ["relative", "full name"]),
    *[
        (check_env(f"{module}:Foo-v0"), [module, *words])
        for module, words in (
            ("wrong_syntax", ["SyntaxError in wrong_syntax.py, line 1: '(' was never closed"]),
            ("wrong_exit", ["SystemExit in wrong_exit.py, line 2: 3"]),
            ("wrong_envs.py", ["not of its file"]),
        )
    ],
    *[
        (train("--env-name", f"wrong_envs:Wrong{name}-v0"), [f"wrong_envs:Wrong{name}-v0 cannot be made", *words])
        for name, words in (
            ("RaisesInInit", [raised_by('raise RuntimeError("no', "RuntimeError", ": no license for this host")]),
            ("Exits", [raised_by("sys.exit(5)", "SystemExit", ": 5")]),
            ("function", ["gymnasium.Env", "int"]),
        )
    ],
    (train("--env-name", "wrong_envs:WrongRaisesLate-v0"), [raised_by("raise LookupError", "LookupError", ": ")]),
    (train("--env-name", "wrong_envs:Base"), ["is not an id", "gymnasium.register('Base-v0'"]),
    (check_env("wrong_envs:function"), ["makes int, which is not a gymnasium.Env", "derive"]),
    (check_env("\x1b[31mred"), ["\\x1b[31mred"]),
    (train("--env-name", "2DNavigation"), ["in the command line", "did you mean '2DNavigation-v0'"]),
    (train("--env-name", "CartPole-v1"), ["not a task family", "sample_tasks"]),
    (train("--config", "kwargs.yaml", "--env-kwargs", "{lo: 1}"), ["command line", "did you mean 'low'"]),
    (train("--env-kwargs", "{low: 1, high: 0}"), ["command line", "low must be below high"]),
    (train("--env-kwargs", "{1: 2}"), ["must be text"]),
    (train("--env-kwargs", "{low: 2020-01-01}"), ["low must be a finite number, got '2020-01-01'"]),
    (check_env("wrong_envs:Base", "--env-kwargs", "{"), ["--env-kwargs", "not valid YAML"]),
    (check_env("wrong_envs:Base", "--env-kwargs", "{a: 1}"), ["cannot be made"]),
]


FILE_CASES: list[Case] = [
    *[
        (["train.py", "--config", config, "--output-folder", "out"], words)
        for config, words in (
            ("x" * 300, ["--config", "too long for a file system"]),
            ("null\0byte", ["--config", "expected text in UTF-8", "null\\x00byte"]),
            ("", ["--config", "an empty text"]),
            ("folder", ["not a run folder", "config.json"]),
            ("dangling", ["cannot read the config", "No such file"]),
            ("broken_run", ["broken_run/config.json", "not valid YAML"]),
            ("unmade.yaml", ["unmade.yaml, line 8", "cannot be made"]),
        )
    ],
    *[
        (train("--output-folder", folder), words)
        for folder, words in (
            ("file", ["file is a file", "--output-folder"]),
            ("dangling", ["dangling is a link to nowhere", "--output-folder"]),
            ("fifo/x", ["fifo is a device", "--output-folder"]),
            ("/proc/x", ["cannot write to /proc/x", "No such file", "--output-folder"]),
            ("run", ["holds another run", "--resume", "--overwrite"]),
        )
    ],
    (train("--seeds", "4294967296", "--dry-run"), ["'seed'", "less than 4294967296"]),
    (train("--output-folder", "run", "--seeds", "0", "--resume"), ["is the folder of a single run; choose another"]),
    (train("--output-folder", "run", "--resume", "--overwrite"), ["--resume continues the run in run, and --over"]),
    (train("--output-folder", "study", "--seeds", "0", "1"), ["seed-1 holds another run; continue it with --resume"]),
    *[
        (train("--device", device), ["device", "--device", *words])
        for device, words in (("meta", ["meta"]), ("", ["''"]))
    ],
    *[
        (evaluate("--output", output, "--overwrite"), ["--output", *words])
        for output, words in (
            ("folder", ["folder is a folder"]),
            ("file/x", ["there is no folder file"]),
            ("dangling", ["dangling is a link to nowhere"]),
            ("fifo", ["fifo is a device"]),
            ("/proc/x", ["cannot write /proc/x"]),
            ("run/config.json", ["name the same file"]),
            ("run/metrics.jsonl", ["does not end with .npz"]),
        )
    ],
    *[
        (evaluate("--save-tasks", path, "--overwrite"), ["--save-tasks", *words])
        for path, words in (
            ("folder", ["folder is a folder"]),
            ("./results.npz", ["name the same file"]),
        )
    ],
    (evaluate("--tasks", "file"), ["file cannot be read as JSON"]),
    (evaluate("--checkpoint", "lastest"), ["there is no checkpoint lastest"]),
    (evaluate("--checkpoint", "folder"), ["folder is not a checkpoint: it has no state.json"]),
    # In a worker: the number of workers is that of the machine; and in no folder of a usual name.
    (["train.py", "--config", "small.yaml", "--env-kwargs", "{hihg: 1}"], ["hihg", "did you mean 'high'"]),
    *[
        (evaluate(*options), words)
        for options, words in (
            (["--output", "file"], ["file exists", "--overwrite"]),
            (["--checkpoint", "3"], ["no checkpoint of iteration 3", "kept are: 0, 1"]),
            (["--config", "wide.yaml", "--policy", POLICY], ["another architecture", "is (4,) there and (5,)"]),
            (["--tasks", "file", "--save-tasks", "more.json"], ["--tasks", "contradicts --save-tasks"]),
            (["--tasks", "2", "--num-batches", "2"], ["--tasks", "contradicts --num-batches"]),
            *(
                (["--benchmark", "wind-v1", option, "2"], ["--benchmark decides", f"leave out {option}"])
                for option in ("--repetitions", "--num-batches")
            ),
        )
    ],
    (["test.py", "--config", "small.yaml", "--output", "results.npz"], ["small.yaml", "not a run", "--checkpoint"]),
    *[
        (["report", *arguments], words)
        for arguments, words in (
            (["run", "--output", "file"], ["file exists and is not a report"]),
            (["run", "--output", "missing/report.html"], ["there is no folder", "make it first"]),
            (["run", "--tasks", "-1"], ["--tasks", "at least 0"]),
            ([], ["RUN"]),
        )
    ],
]

ZOO_CASES: list[Case] = [
    (["zoo", "add", "run", "--name", "../mine"], ["is not a name for the zoo"]),
    (["zoo", "add", "run"], ["required: --name"]),
    (["zoo", "--name", "x"], ["unrecognized arguments: --name"]),
    (["zoo", "add", "nowhere", "--name", "mine"], ["there is no folder nowhere", "choose"]),
    # A run folder whose config has been changed.
    (["zoo", "add", "edited", "--name", "mine"], ["edited/config.json is damaged or was edited", "SHA256SUMS"]),
]

WIDE = ["--episodes", "1", "--learner-settings", "{hidden-sizes: [2000, 2000]}"]
SET, SEARCHED = ["--learner-settings"], "2d-navigation"
DARK_ROOM = ["--env-name", "DarkRoom-v0", "--env-kwargs", "{size: 5}"]
VALUE_CASES: list[Case] = [
    (train("--num-workers", "x"), ["'num-workers' in the command line", "expected an integer, got 'x'"]),
    (train("--seeds", "0,,1"), ["--seeds", "an integer"]),
    (train("--seeds", "0,1", "--seed", "1"), ["--seed 1 contradicts --seeds"]),
    (train("--seeds-at-once", "2"), ["--seeds-at-once 2 is for several seeds; name them with --seeds"]),
    *[
        (train("--hidden-sizes", *sizes), ["hidden-sizes", *words])
        for sizes, words in (
            (["x", "y"], ["entry 1", "an integer", "'x'"]),
            ([], ["at least one argument"]),
        )
    ],
    (
        train("--hidden-sizes", "[2000000, 2000000]"),
        ["hidden-sizes", "parameters would take at least", "GiB", "this machine has"],
    ),
    (train("--max-episode-steps", "2147483647"), ["would take at least", "GiB", "this machine has", "lower one of"]),
    (evaluate("--num-batches", "9" * 20), ["would take at least", "GiB", "this machine has", "lower"]),
    (evaluate("--fast-batch-size", "2147483647"), ["would take at least", "GiB", "this machine has", "lower"]),
    *[
        (train("--env-name", name, "--env-kwargs", kwargs), ["take at least", "GiB", "this machine has", "choose"])
        for name, kwargs in (("TabularMDP-v0", "{num_states: 1000000000}"), ("Bandit-K5-v0", "{k: 2000000000000}"))
    ],
    (train("--env-kwargs", "{low: -1.0e308, high: 1.0e308}"), ["high - low must be finite"]),
    *[
        (train(*options), words)
        for options, words in (
            (["--max-kl", "0"], ["'max-kl' in the command line", "more than 0"]),
            (["--algorithm", "maml-trop"], ["'algorithm' in the command line", "did you mean 'maml-trpo'"]),
            (["--algorithm-settings", "{max-lk: 1}"], ["unknown key 'max-lk'", "command line", "'max-kl'"]),
            (["--algorithm-settings", "7", "--max-kl", "1"], ["algorithm-settings", "a mapping"]),
            (["--device", "cpu", "--use-cuda"], ["--use-cuda", "contradicts"]),
        )
    ],
    *[
        (train(*options), [f"'{options[-2][2:]}' in the command line: ", *words])
        for options, words in (
            (["--slots-per-task", "3"], ["must divide fast-batch-size"]),
            (["--inference", "worker"], ["needs workers to act in"]),
        )
    ],
    *[
        (train("--evaluate-every", "1", "--evaluation-tasks", given), ["'evaluation-tasks' in the com", *words])
        for given, words in (
            ("''", ["got ''", "a file of tasks"]),
            ("nowhere.json", ["cannot read", "nowhere.json: No"]),
            ("2147483647", ["2,147,483,647 tasks", "GiB"]),
            ("ant_tasks.json", ["holds tasks of 'AntPos-v5'"]),
        )
    ],
    *[
        (train(*env, "--tasks", f"{{distribution: fixed, train: {count}, test: 10}}"), words)
        for env, count, words in (
            ([], 1, ["1 training tasks for a meta-batch-size of 2; lower meta-batch-size, or raise 'train'"]),
            (DARK_ROOM, 20, ["DarkRoom-v0 has too few different tasks for 20 training tasks and 10 test tasks"]),
        )
    ],
    (train("--init-learner"), ["name it with --init"]),
    (evaluate("--tasks", "0"), ["tasks must be at least 1, got 0"]),
    (evaluate("--num-steps", "2000", "--halve-step-size", "always"), ["num-steps is 2000", "vanishes"]),
    *[
        (train(f"--{key}", f"{module}:Any"), [key, *words])
        for key, module, words in (
            ("algorithm", "wrong_name", ["NameError in wrong_name.py, line 3"]),
            ("policy", ".relative", ["relative import"]),
            ("policy", "json", ["json"]),
        )
    ],
    (train("--fast-lr", "["), ["--fast-lr", "not valid YAML"]),
    # The value of one option may have several lines.
    (train("--gamma", "0.5\nseed: 3"), ["--gamma", "expected one value", "'seed'"]),
    (train("--gamma=# nothing"), ["--gamma", "expected a value, got an empty text"]),
    (["report", "run", "--backend", "zz"], ["'backend' in the command line", "'zz'"]),
    (train("--num-batchs", "3"), ["--num-batchs", "did you mean '--num-batches'"]),
    (train("--algorithm", "rl2", "--max-kl", "3"), ["arguments: --max-kl", "a setting of maml-trpo"]),
    (evaluate("--chekpoint=3"), ["--chekpoint", "did you mean '--checkpoint'"]),
    *[
        (["record", "--source", "run", "--output", "out", f"--{option}", value], [f"its run; leave --{option} out"])
        for option, value in (("learner", "ppo"), ("learner-settings", "{}"), ("iterations", "1"), ("seed", "0"))
    ],
    *[
        (["record", "dark-room", "--output", "out", "--num-workers", "0", "--no-minari", *options], words)
        for options, words in (
            (["--num-tasks", "3"], ["did you mean '--tasks'?"]),
            (["--learner", "psrl", "--iterations", "1"], ["psrl goes through one trial of fast-batch-size episodes"]),
            (["--tasks", "1000000000"], ["a batch of 1,000,000,000 tasks with 20 episodes"]),
            (["--tasks", "100000", *WIDE], ["100,000 learners would take"]),
        )
    ],
    *[
        (["record", "--output", "out", "--num-workers", "0", "--no-minari", "--tasks", "2", *options], words)
        for options, words in (
            (["dark-room", "--learner", "pppo"], ["there is no learner 'pppo'; did you mean 'ppo'"]),
            (["dark-room", "--learner", "thompson", *SET, "{c: 1}"], ["has no settings; leave --learner-settings out"]),
            (["dark-room", "--learner", "ucb1", *SET, "{c: -1.0}"], ["setting of the learner ucb1: c must be"]),
            (["dark-room", *SET, "{gamma: 2.0}"], ["'gamma' in the settings of the learner: expected at most 1"]),
            (["dark-room", "--learner", "q-learning", *SET, "{baseline: zero}"], ["has no setting 'baseline'"]),
            (["dark-room", *SET, "{clap: 0.1}"], ["the learner ppo has no setting 'clap'; did you mean 'clip'"]),
            (["dark-room", "--learner", "ucb1"], ["ucb1 cannot learn DarkRoom-v0", "it knows arms alone"]),
            ([SEARCHED, "--learner", "ucb1"], ["ucb1 cannot learn 2DNavigation-v0", "Discrete actions"]),
            ([SEARCHED, "--learner", "q-learning"], ["cannot learn 2DNavigation-v0", "states that can be counted"]),
            (["gaussian.yaml", "--learner", "thompson"], ["thompson counts rewards of 0 and 1, and one is"]),
        )
    ],
    (train("--num-tasks", "3"), ["did you mean '--meta-batch-size'?"]),
    *[
        (["play", "run", "--output", *options], words)
        for options, words in (
            (["film.avi"], ["film.avi", ".mp4, .gif, .webp"]),
            (["film.gif", "--task", "{gaol: [0, 0]}"], ["--task", "goal"]),
            (["film.gif", "--task", "near"], ["--task"]),
        )
    ],
    *[
        (["tune", config, "--env-steps", "900", "--runs", "out", "--search", *options], words)
        for config, options, words in (
            (SEARCHED, ["fast-lr=0.1"], ["'fast-lr' are '0.1': expected LOW:HIGH, LOW:HIGH:log or A|B|C"]),
            (SEARCHED, ["fast-lr"], ["--search expects KEY=VALUE, got 'fast-lr'"]),
            (SEARCHED, ["fast-lr=0.1:1", "fast-lr=1:2"], ["--search names a key twice: fast-lr=0.1:1 fast-lr=1:2"]),
            (
                SEARCHED,
                ["fast-lr=0.1:1", "--set", "seed=3"],
                ["--set does not take 'seed', which an option of"],
            ),
            (SEARCHED, ["fast-lrr=0.1:0.2"], ["'fast-lrr' in the settings that are searched; did you mean 'fast-lr'"]),
            (SEARCHED, ["cg-iters=0:3"], ["'cg-iters' in the settings that are searched: expected at least 1, got 0"]),
            (SEARCHED, ["fast-lr=0.1:1", "--env-steps", "nan"], ["expected a number above 0, got 'nan'"]),
            (SEARCHED, ["fast-lr=0.1:1", "--env-steps=-5"], ["expected a number above 0, got '-5'"]),
            (SEARCHED, ["fast-lr=0.1:1", "--runs", "file/x"], ["cannot keep the trials in file/x/studies.db"]),
            ("ad/dark-room", ["algorithm-settings.learning-rate=1e-4:1e-3"], ["samples nothing in training"]),
        )
    ],
    (["nosuch"], ["there is no command 'nosuch'; choose 'train', 'test', 'report'", "or 'version' (--help"]),
    (["trian"], ["there is no command 'trian'; did you mean 'train'?", "train, test, report"]),
    (["train", "halfcheetah-dri"], ["there is no config 'halfcheetah-dri'; did you mean 'halfcheetah-dir'?"]),
    (["train", "ant-dir", "--config", "ant-vel"], ["two configs", "ant-dir", "ant-vel"]),
    (["test"], ["give a run"]),
    (["configs", "halfchetah"], ["no config has 'halfchetah' in its name"]),
    (["test.py", "nosuch", "--num-workers", "0"], ["there is no run folder 'nosuch'", "no config of that name"]),
    (["test.py", "2d-navigatoin"], ["there is no run folder", "did you mean '2d-navigation'"]),
    (["test.py", "zoo:2d-navigatoin"], ["the zoo has no policy '2d-navigatoin'; did you mean '2d-navigation'"]),
    (evaluate("--benchmark", "wind-v2"), ["there is no benchmark 'wind-v2'; did you mean 'wind-v1'"]),
]


def name_of(case: Case) -> str:
    name, *options = case[0]
    return " ".join(repr(each)[1:-1] for each in (name, *options[4 if name.endswith(".py") else 0 :]))[:80]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ENVIRONMENT_CASES, *FILE_CASES, *ZOO_CASES, *VALUE_CASES], ids=name_of)
def test_wrong_input_ends_in_one_line(place: Path, capfd: pytest.CaptureFixture[str], case: Case) -> None:
    arguments, words = case
    before = snapshot(place)
    code = run_command_line(arguments)
    output = capfd.readouterr()
    assert output.out == ""
    line = output.err.splitlines()[-1]
    assert ": error: " in line
    # Before it, the log may report the files that were read.
    assert all(": loading " in earlier for earlier in output.err.splitlines()[:-1]), output.err
    for word in words:
        assert word in line
    assert code == 2
    assert snapshot(place) == before


@pytest.mark.parametrize("sizes", [["3", "5"], ["3,5"], ["[3,", "5]"]])
def test_hidden_sizes_may_be_several_words(place: Path, sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(train("--print-config", "--hidden-sizes", *sizes)) == 0
    assert "hidden-sizes: [3, 5] " in capsys.readouterr().out


def test_seeds_may_be_separated_by_commas(place: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert run_command_line(train("--output-folder", str(runs), "--seeds", "2,0", "1")) == 0
    assert sorted(run.name for run in runs.iterdir()) == ["seed-0", "seed-1", "seed-2"]


def test_task_that_overflows_is_named_without_warnings(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tasks = '{"env-name": "2DNavigation-v0", "tasks": [{"goal": [1e308, 1e308]}]}'
    (place / "tasks.json").write_text(tasks)
    assert run_command_line(evaluate("--tasks", "tasks.json")) == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert "the reward of task 0, episode 0, step 0 is not finite" in line
    (place / "tasks.json").unlink()
