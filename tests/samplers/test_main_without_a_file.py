"""Classes that no worker can import: of `python -c`, a script from standard input, or a notebook."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

POLICY = """
import torch
from maml_rl import MultiTaskSampler

class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def forward(self, observations):
        return torch.distributions.Independent(torch.distributions.Normal(self.layer(observations), 0.1), 1)

def sample(**options):
    torch.manual_seed(0)
    with MultiTaskSampler("2DNavigation-v0", {}, 2, Head(), seed=0, max_episode_steps=4, **options) as sampler:
        return sampler.rollout(sampler.sample_tasks(2)).digest()
"""
ENV = """
import gymnasium
from maml_rl import MultiTaskSampler
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.work.child import launcher
from tests.envs.third_party import WalkEnv

class Own(WalkEnv):
    pass

def launch(*_):
    raise AssertionError("a process is started")

launcher.Launcher.launch = launch
"""


def run(code: str, folder: Path, how: str) -> "subprocess.CompletedProcess[str]":
    """Run Python on code that has no file, or a file with the guard that a main script needs."""
    command, text = [sys.executable, "-"], code
    if how == "-c":
        command, text = [sys.executable, "-c", code], ""
    elif how == "file":
        script = folder / "script.py"
        script.write_text(code)
        command, text = [sys.executable, str(script)], ""
    return subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "", "HOME": str(folder)},
    )


@pytest.mark.parametrize("how", ["stdin", "file"])
def test_policy_class_works_with_default_workers_wherever_it_is_defined(how: str, tmp_path: Path) -> None:
    guarded = 'if __name__ == "__main__":\n    print(sample(num_workers=2) == sample(num_workers=0))\n'
    if how == "stdin":
        guarded += '    sample(num_workers=2, inference="worker")\n'
    ended = run(POLICY + guarded, tmp_path, how)
    assert ended.stdout == "True\n", ended.stderr
    if how == "file":
        assert ended.returncode == 0
        return
    # Workers cannot import it, which is noticed before any starts.
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("TypeError: the policy ")
    assert "needs Head, which workers cannot import" in line
    assert 'import it from there, or use inference="central"' in line


def test_environment_class_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    code = 'gymnasium.register("Own-v0", Own)\nMultiTaskSampler("Own-v0", {}, 2, NormalMLPPolicy(2, 1, (4,), "tanh"))'
    ended = run(ENV + code, tmp_path, "-c")
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("TypeError: the environment ")
    assert "needs Own, which workers cannot import" in line
    assert "pass num_workers=0 or start_method='fork'" in line
