"""A learner from outside of the package, which is a loss; and its parameters after some updates in any placement."""

from pathlib import Path
from typing import Any

from torch import Tensor

from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.metalearners import MetaLearner as MetaLearner

PAGE = Path(__file__).parents[2] / "docs" / "adding-an-algorithm.md"
# The learner with which the page begins, `ReturnsToGo`; and as it was written before there was a `TrialLearner`.
_CODE = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
exec(_CODE)
_KIND = "class AsBefore(MetaLearner):\n    columns, whole_trials = 'episode', True\n"
exec(_CODE.replace("class ReturnsToGo(TrialLearner):\n", _KIND))


def make_learner(name: str = "ReturnsToGo", **placement: Any) -> Any:
    """Return an experiment with this learner."""
    settings = {
        "env-name": "2DNavigation-v0",
        "max-episode-steps": 5,
        "algorithm": f"{__name__}:{name}",
        "memory": "gru",
        "hidden-sizes": [4],
        "observe-last": True,
        "fast-batch-size": 2,
        "meta-batch-size": 6,
        "num-batches": 2,
    }
    return make_experiment(Config.from_mapping(Mapping("the test", settings | placement)))


def learned(experiment: Any, num_workers: int) -> dict[str, Tensor]:
    """Return the parameters after two updates."""
    learner = experiment.metalearner
    with make_sampler(experiment, num_workers=num_workers) as sampler:
        for number in range(2):
            learner.learn(learner.collect(sampler, sampler.sample_tasks(6)), number)
    found: dict[str, Tensor] = learner.policy.state_dict()
    return found
