"""Every example runs in short form; its output or learning is checked where that takes seconds."""

import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import maml_rl
from maml_rl.cli.main import main
from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.experiment.train import train
from maml_rl.policies import GRUPolicy
from tests.small_runs import assert_same_run, untimed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUMBER = r"(-?\d+\.\d+)"


@pytest.fixture(scope="module")
def navigation_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests must not write to it."""
    folder = tmp_path_factory.mktemp("examples") / "run"
    settings = {
        "env-name": "2DNavigation-v0",
        "max-episode-steps": 20,
        "hidden-sizes": [8],
        "fast-batch-size": 5,
        "meta-batch-size": 2,
        "num-batches": 1,
    }
    train(Config.from_mapping(Mapping("the test", settings)), folder, num_workers=0)
    return folder


def test_custom_family_takes_about_forty_lines_and_custom_algorithm_about_sixty() -> None:
    text = (EXAMPLES / "custom_family.py").read_text()
    family = text[text.index("class TramEnv") : text.index("# The entry point")].strip().splitlines()
    assert len(family) <= 44
    text = (EXAMPLES / "custom_algorithm.py").read_text()
    assert len(text[: text.index("def main")].strip().splitlines()) <= 60


def test_custom_family_can_be_named_in_a_config(
    example: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from maml_rl.cli.train import run_train

    config = tmp_path / "tram.yaml"
    config.write_text(
        "env-name: 'custom_family:Tram-v0'\nhidden-sizes: [4]\nfast-batch-size: 2\nmeta-batch-size: 2\nnum-batches: 1\n"
        "max-episode-steps: 5\n"
    )
    arguments = ["--config", str(config), "--output-folder", str(tmp_path / "run"), "--num-workers", "0"]
    assert run_train(arguments) == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_custom_family_runs_as_a_script_with_children(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "custom_family.py"), "--iterations", "2", "--num-workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    line = rf"iteration +\d: return +{NUMBER} before and +{NUMBER} after adaptation\n"
    assert re.fullmatch(f"({line}){{2}}", ended.stdout)


def test_saved_policy_is_adapted_to_the_given_task(
    example: Callable[[str], Any], navigation_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = '{"goal": [0.3, -0.2]}'
    example("adapt_saved_policy").main([str(navigation_run), task, "--num-steps", "2", "--num-episodes", "1"])
    found = re.findall(rf"after (0 steps|1 step|[2-9] steps): return +{NUMBER}", capsys.readouterr().out)
    assert [steps for steps, _ in found] == ["0 steps", "1 step", "2 steps"]
    assert len({value for _, value in found}) == 3


def test_saved_policy_acts_with_its_memory_on_actions_of_the_space(
    example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = gymnasium.make("tests.numbered_env:Numbered-v0", start=5, max_episode_steps=4)
    policy, memories = GRUPolicy(env.observation_space, env.action_space, 4), []
    choose = policy.choose

    def watched(observation: Any, memory: Any = None) -> Any:
        memories.append(memory)
        return choose(observation, memory)

    monkeypatch.setattr(policy, "choose", watched)
    monkeypatch.setattr(env.unwrapped, "paid", 7)  # No action ends the episode.
    example("adapt_saved_policy")._run_episode(env, policy, 0)
    assert [memory is None for memory in memories] == [True, False, False, False]


@pytest.mark.slow
def test_single_task_ppo_trains(example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    options = ["--env", "2DNavigation-v0", "--task", '{"goal": [0.4, 0.3]}', "--steps", "64", "--horizon", "64"]
    try:
        example("single_task_ppo").main(options)
    finally:
        # Stable-Baselines3 seeds the global random states.
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
    assert "after 64 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_rl2_reports_rewards_early_and_late_in_a_trial(
    example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--iterations", "2", "--tasks", "4", "--episodes", "5", "--hidden-size", "8"]
    example("rl2").main(["--env", "Bandit-K5-v0", *options])
    line = rf"iteration +\d+: mean reward +{NUMBER} early and +{NUMBER} late in a trial"
    found = re.findall(line, capsys.readouterr().out)
    assert len(found) == 2
    assert all(0.0 <= float(reward) <= 1.0 for row in found for reward in row)


@pytest.mark.slow
def test_quickstart_runs_from_top_to_bottom() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in code), "the notebook is stored without outputs"
    (settings,) = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    names: dict[str, Any] = {}
    for cell in code:
        exec("".join(cell["source"]), names)
        if cell is settings:
            names |= {"iterations": 2, "num_tasks": 3, "num_episodes": 4}
    assert len(names["history"]) == 2
    assert names["after"].rewards.shape[0] == 3


def test_every_example_is_run_by_a_test() -> None:
    here = Path(__file__).parent
    on_ray = here.parent / "samplers" / "work" / "on_ray" / "test_placement_groups.py"
    text = "".join(path.read_text() for path in [*here.glob("test_*.py"), on_ray])
    for path in EXAMPLES.iterdir():
        if path.suffix in {".py", ".ipynb"}:
            assert f'"{path.stem}"' in text or path.name in text, f"{path.name} has no test"


def adam_maml(**values: Any) -> Config:
    settings = {
        "env-name": "2DNavigation-v0",
        "algorithm": "custom_algorithm:AdamMAML",
        "algorithm-settings": {"epochs": 2},
        "max-episode-steps": 10,
        "hidden-sizes": [8],
        "fast-batch-size": 4,
        "meta-batch-size": 2,
        "num-batches": 3,
        "checkpoint-every": 1,
        **values,
    }
    return Config.from_mapping(Mapping("the test", settings))


@pytest.mark.slow
def test_custom_algorithm_trains_from_the_command_line_of_the_example(
    example: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--iterations", "1", "--num-workers", "0", "--output-folder", str(tmp_path / "run")]
    example("custom_algorithm").main(options)
    assert re.fullmatch(
        rf"iteration +0: return +{NUMBER} before and +{NUMBER} after adaptation\n", capsys.readouterr().out
    )


@pytest.mark.timeout(60)
@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_custom_algorithm_resumes_bit_identically_on_any_number_of_workers(
    example: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example("custom_algorithm")
    train(adam_maml(), tmp_path / "whole", num_workers=0)
    train(adam_maml(**{"num-batches": 2}), tmp_path / "half", num_workers=2)
    train(adam_maml(), tmp_path / "half", num_workers=0, resume=True)
    assert_same_run(tmp_path / "half", tmp_path / "whole")
    rows = untimed(tmp_path / "whole")
    assert rows[0]["loss/last"] < rows[0]["loss/before"], "the first step of Adam is down the gradient"


def test_run_of_a_custom_algorithm_is_tested_adapted_and_reported_like_every_other(
    example: Callable[[str], Any], tmp_path: Path
) -> None:
    example("custom_algorithm")
    run = tmp_path / "run"
    train(adam_maml(**{"num-batches": 1}), run, num_workers=0)
    assert main(["test", str(run), "--num-workers", "0", "--meta-batch-size", "2"]) == 0
    policy = maml_rl.load_policy(run)
    task = {"goal": np.array([0.3, 0.1], np.float32)}
    adapted = maml_rl.adapt_to_task(policy, "2DNavigation-v0", task, num_episodes=3)
    assert any(
        not torch.equal(mine, theirs) for mine, theirs in zip(adapted.parameters(), policy.parameters(), strict=True)
    )
    assert main(["report", str(run), "--tasks", "2", "--num-workers", "0"]) == 0


@pytest.mark.slow
def test_learner_of_experience_improves_and_resumes_bit_identically(
    example: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("learner_of_experience")
    arguments = ["--num-workers", "0", "--output-folder"]
    module.main(["--iterations", "16", *arguments, str(tmp_path / "whole")])
    lines = capsys.readouterr().out.splitlines()
    means = [float(number) for line in lines for number in re.findall(NUMBER, line)]
    assert np.mean(means[-8:]) > np.mean(means[:8]) + 0.5
    module.main(["--iterations", "2", *arguments, str(tmp_path / "parts")])
    config = maml_rl.config.load_config(tmp_path / "parts" / "config.json").override({"num-batches": 4})
    train(config, tmp_path / "parts", num_workers=0, resume=True)
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "whole")[:4]


def test_slots_of_the_slow_service_wait_concurrently_for_the_same_episodes(
    example: Callable[[str], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example("slow_service")
    answer, waiting, lock, counts = module.Service.do_POST, [], threading.Lock(), []

    def count(service: Any) -> None:
        with lock:
            waiting.append(service)
            counts.append(len(waiting))
        try:
            answer(service)
        finally:
            with lock:
                waiting.remove(service)

    monkeypatch.setattr(module.Service, "do_POST", count)
    small = ["--tasks", "2", "--episodes", "4", "--steps", "4", "--latency", "0.02", "--trouble", "0.05"]
    module.main(small)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "the same episodes"
    ways = [re.fullmatch(rf" *(serial|threads): 32 steps in +{NUMBER} s, \d+ episodes .*", line) for line in lines]
    assert [match[1] for match in ways if match] == ["serial", "threads"]
    # Serially there would be at least 8 resets and 32 steps; a request may arrive before the last has ended.
    assert max(counts[:40]) <= 2
    assert max(counts[40:]) > 4
