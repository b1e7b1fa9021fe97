"""Of the current folder, commands import only the modules that a config names: others may have put files there."""

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from maml_rl import MultiTaskSampler
from maml_rl.named_modules import find_named, import_named
from maml_rl.policies import NormalMLPPolicy
from tests.report.conftest import NAVIGATION, make_run

ROOT = Path(__file__).parents[1]
SCRIPT = Path(sysconfig.get_path("scripts"), "maml-rl")
# Installed or not: commands try to import some of them.
EXTRAS = {"PIL", "imageio_ffmpeg", "mjbatch", "metaworld", "minari", "optuna", "ray", "tensorboard", "tqdm"}
PLANTED = """\
from pathlib import Path

Path(__file__).with_name(f"executed-{__name__}").touch()
"""
# Each runs in the folder of a run.
READING = {
    "report": "report . --tasks 2 --videos 1 --num-workers 1",
    "test": "test . --meta-batch-size 2 --num-workers 1",
    "resume": "train --resume --output-folder . --num-workers 0",
    "benchmarks": "benchmarks --verbose",
    "enter": "benchmarks enter metrics.jsonl",
    "zoo": "zoo",
    "envs": "envs --verbose",
    "configs": "configs",
    "check-env": "check-env 2DNavigation-v0",
}


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, with a module of every name that a command may import."""
    run = make_run(tmp_path_factory.mktemp("runs") / "theirs", {**NAVIGATION, "num-batches": 1})
    for name in {name.partition(".")[0] for name in sys.modules} | EXTRAS:
        if name.isidentifier() and name not in sys.builtin_module_names:
            (run / f"{name}.py").write_text(PLANTED)
    return run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command",
    # Lists start as `maml-rl envs --verbose` does, which imports the most.
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in ("zoo", "configs", "benchmarks"))) for name in READING],
)
def test_command_in_a_run_folder_executes_nothing_of_it(command: str, downloaded: Path, tmp_path: Path) -> None:
    run = tmp_path / "theirs"
    shutil.copytree(downloaded, run)
    ended = subprocess.run([SCRIPT, *READING[command].split()], cwd=run, capture_output=True, text=True, timeout=250)
    assert ended.returncode == (2 if command == "enter" else 0), ended.stderr
    assert not list(run.glob("executed-*"))


@pytest.fixture
def push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The family of the README in the current folder, with a neighbor that it imports when it is made."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (source,) = (block for block in blocks if "class PushEnv" in block)
    source += """
    def __init__(self):
        import neighbor_of_push
gymnasium.register("Push-v0", PushEnv, max_episode_steps=5)
"""
    (tmp_path / "push.py").write_text(source)
    (tmp_path / "neighbor_of_push.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("push", None)
    yield tmp_path
    for name in ("push", "neighbor_of_push"):
        sys.modules.pop(name, None)
    gymnasium.registry.pop("Push-v0", None)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
@pytest.mark.usefixtures("push")
def test_family_of_the_current_folder_is_sampled_by_workers(start_method: str) -> None:
    policy = NormalMLPPolicy(2, 1, (4,))
    with MultiTaskSampler(
        "push:Push-v0", {}, 2, policy, seed=0, num_workers=2, start_method=start_method, stepping="serial"
    ) as sampler:
        assert sampler.rollout(sampler.sample_tasks(2)).num_steps == 20


def test_installed_module_comes_before_that_of_the_current_folder(
    push: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    installed = tmp_path_factory.mktemp("site-packages")
    (installed / "push.py").write_text("")
    sys.path.append(str(installed))
    spec = find_named("push")
    assert spec is not None
    assert spec.origin == str(installed / "push.py")
    assert import_named("push").__file__ == str(installed / "push.py")
    assert str(push) not in sys.path


def test_removed_current_folder_has_no_modules(push: Path) -> None:
    shutil.rmtree(push)
    assert find_named("push") is None
    with pytest.raises(ModuleNotFoundError):
        import_named("push")
