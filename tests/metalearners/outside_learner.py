"""A learner from outside of the package, which is a loss; and its parameters after some updates in any placement."""

from typing import Any

import torch
from torch import Tensor

from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.episode.trials import Trials
from maml_rl.experiment.build import make_experiment
from maml_rl.metalearners import EpisodeStore, MetaLearner, Stepper


class ReturnsToGo(MetaLearner):
    """The policy gradient of whole trials, compared with the other trials at each step."""

    columns, whole_trials = "episode", True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)
        self.stepper = Stepper(self.loss, self.optimizer, device=self.device, name="returns-to-go", max_norm=1.0)

    def loss(self, observations: Tensor, actions: Tensor, gains: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss on trials (L, N, ...), and the statistics of a step."""
        unrolled = self.policy.unroll(observations)
        log_probs = self.policy.distributions.log_prob(unrolled.distribution, actions)
        loss = -(log_probs * gains * mask).sum() / mask.sum()
        return loss, torch.stack([loss])

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Take steps on all trials of a batch."""
        trials = Trials.of(batch.phases[0])
        returns = trials.returns(self.plan.gamma)
        inputs = trials.observations, trials.actions, returns - returns.mean(1, keepdim=True), trials.mask
        return self.stepper.take(6, lambda: self.stepper.padded(len(trials.mask), *inputs), ["loss"])


def make_learner(**placement: Any) -> Any:
    """Return an experiment with this learner."""
    settings = {
        "env-name": "2DNavigation-v0",
        "max-episode-steps": 5,
        "algorithm": f"{__name__}:ReturnsToGo",
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
    with experiment.make_sampler(num_workers=num_workers) as sampler:
        for number in range(2):
            learner.learn(learner.collect(sampler, sampler.sample_tasks(6)), number)
    found: dict[str, Tensor] = learner.policy.state_dict()
    return found
