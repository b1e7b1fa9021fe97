"""The code of the README is run as it is, or with smaller numbers where it would take long."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.cli import main as cli
from maml_rl.config.catalog import ZOO
from maml_rl.experiment.zoo import EVALUATION
from tests.shown_commands import fenced_blocks

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_block(phrase: str) -> str:
    """Return the only block of Python that contains `phrase`."""
    (block,) = (code for language, code in fenced_blocks(README) if language == "python" and phrase in code)
    return block


def command_lines() -> list[str]:
    blocks = [code for language, code in fenced_blocks(README) if language == ""]
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(("python train.py", "python test.py", "maml-rl"))]


def test_policy_is_tested_with_as_many_steps_as_it_is_best_after() -> None:
    (command,) = (line for line in command_lines() if line.startswith("python test.py"))
    steps = int(command.rpartition("--num-steps ")[2])
    # Of a training with the same config.
    found = json.loads((ZOO / "halfcheetah-dir" / EVALUATION).read_text(encoding="utf-8"))
    returns = [value for value, _, _ in found["intervals"]]
    assert returns.index(max(returns)) == steps


def test_policy_is_adapted_to_a_task_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(python_block("adapt_to_task"), names)
    assert isinstance(names["env"], gymnasium.Env)
    before, after = map(float, capsys.readouterr().out.split())
    # The goal is 0.36 away from the start: staying there for all steps costs 36.
    assert before < -25.0
    assert after > -6.0, "the adapted policy does not find the goal"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sampler_is_imported_as_shown(tmp_path: Path) -> None:
    text = python_block("with MultiTaskSampler(")
    for large, small in (("sample_tasks(40)", "sample_tasks(10)"),):
        assert large in text
        text = text.replace(large, small)
    (tmp_path / "script.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    shown = re.fullmatch(r"tensor\((-[\d.]+)\) tensor\((-[\d.]+)\)\n", ended.stdout)
    assert shown is not None
    assert float(shown[2]) > float(shown[1]) + 10.0, "the return after adaptation is not much higher than before"


@pytest.mark.timeout(60)
def test_family_passes_the_check_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "push.py").write_text(python_block("class PushEnv("))
    assert "`maml-rl check-env push:PushEnv`" in README
    assert cli.main(["check-env", "push:PushEnv"]) == 0
    assert "ok: tasks are drawn, set, and kept over resets" in capsys.readouterr().out
    sampler = MultiTaskSampler(
        import_module("push").PushEnv,
        batch_size=2,
        policy=get_policy_for_env(import_module("push").PushEnv()),
        max_episode_steps=100,
        num_workers=0,
    )
    with sampler:
        assert sampler.rollout(sampler.sample_tasks(3)).rewards.shape == (3, 100, 2)
    # Other tests have a module of this name.
    sys.modules.pop("push")


def test_examples_that_need_an_extra_name_it() -> None:
    extras = "cma|matplotlib|stable_baselines3"
    rows = [line for line in README.splitlines() if re.match(r"\| \[[\w.]+\]\(examples/", line)]
    assert len(rows) > 5
    for row in rows:
        path = re.findall(r"\((examples/[\w.]+)\)", row)[0]
        text = (ROOT / path).read_text(encoding="utf-8")
        needed = bool(re.search(rf'^[ "]*(?:import|from) (?:{extras})\b', text, re.MULTILINE))
        assert needed == ("'.[examples]'" in row), row
        assert not needed or "examples]" in text, path


def test_pictures_come_first_and_exist() -> None:
    before, _, _ = README.partition("## Install")
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", before)
    assert len(pictures) == 2
    assert all((ROOT / picture).is_file() for picture in pictures)
    assert len(re.findall("^- ", before, re.MULTILINE)) == 3
