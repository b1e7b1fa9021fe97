"""A policy class that no worker can import, of a script from standard input; `test_env_recipe.py` has environments."""

import subprocess
import sys
from pathlib import Path

import pytest

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

if __name__ == "__main__":
    print(sample(num_workers=2) == sample(num_workers=0))
    sample(num_workers=2, inference="worker")
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_policy_class_of_standard_input_works_with_default_workers(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "", "HOME": str(tmp_path)}
    options = {"capture_output": True, "text": True, "timeout": 150, "check": False, "env": env}
    ended = subprocess.run([sys.executable, "-"], input=POLICY, **options)  # type: ignore[call-overload]
    assert ended.stdout == "True\n", ended.stderr
    # Workers cannot import it, which is noticed before any starts.
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("TypeError: the policy ")
    assert "needs Head, which workers cannot import" in line
    assert 'import it from there, or use inference="central"' in line
