"""A learner with a replay in one file: a recurrent policy imitates past trials, the better ones more."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.experience import Replay, Steps
from maml_rl.experiment.train import train
from maml_rl.metalearners import EpisodeStore, SettingsModel, Stepper, TrialLearner


class RewardWeighted(TrialLearner):
    """Reward-weighted regression on whole trials.

    Source: Peters and Schaal 2007, https://doi.org/10.1145/1273496.1273590
    """

    class Settings(SettingsModel):
        """The section `algorithm-settings` of a config."""

        learning_rate: Annotated[float, Field(gt=0, description="step size of Adam")] = 1e-2
        buffer_steps: Annotated[int, Field(ge=1, description="steps of trials that are kept")] = 20_000
        batch_size: Annotated[int, Field(ge=2, description="trials in each step of Adam")] = 64
        num_updates: Annotated[int, Field(ge=1, description="steps of Adam for each batch of new trials")] = 20
        temperature: Annotated[float, Field(gt=0, description="the lower, the more the best trials count")] = 0.5

    settings: Settings

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.settings.learning_rate)
        self.stepper = Stepper(self.loss, self.optimizer, name="reward-weighted")
        # The run folder has the attribute `experience`, so that a resumed run is bit-identical.
        self.experience = {"trials": Replay(self.settings.buffer_steps)}

    def loss(self, steps: Steps) -> tuple[Tensor, Tensor]:
        """Return the loss on trials (L, N, ...), and the statistics of a step."""
        # The remaining return of a trial, compared at each step with the other trials.
        left = (steps.rewards * steps.mask).flip(0).cumsum(0).flip(0)
        scores = (left - left.mean(1, keepdim=True)) / (left.std(1, keepdim=True) + 1e-6)
        weights = torch.softmax(scores / self.settings.temperature, 1) * steps.mask
        unrolled = self.policy.unroll(steps.observations)
        log_probs = self.policy.distributions.log_prob(unrolled.distribution, steps.actions)
        loss = -(weights * log_probs).sum() / len(weights)
        return loss, torch.stack([loss])

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Keep the new trials, and imitate the better ones of all that are kept."""
        replay, rng, size = self.experience["trials"], self.generator("replay"), self.settings.batch_size
        replay.append(batch.phases[0])
        return self.stepper.take(self.settings.num_updates, lambda: [replay.sample_sequences(rng, size)], ["loss"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on 2D navigation, and print the returns of both episodes of a trial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--output-folder", type=Path, default=Path("runs/reward-weighted"))
    parser.add_argument("--num-workers", type=int)
    options = parser.parse_args(arguments)
    settings = {
        "env-name": "2DNavigation-v0",
        "max-episode-steps": 20,
        # In a YAML file: `algorithm: learner_of_experience:RewardWeighted`.
        "algorithm": f"{__name__}:RewardWeighted",
        "memory": "gru",
        "hidden-sizes": [32],
        "observe-last": True,
        # A trial is two episodes.
        "fast-batch-size": 2,
        "meta-batch-size": 40,
        "num-batches": options.iterations,
    }
    train(
        Config.from_mapping(Mapping("the example", settings)),
        options.output_folder,
        num_workers=options.num_workers,
        on_iteration=lambda metrics: print(
            f"iteration {metrics['iteration']:>3}: return {metrics['return/episode_0']:8.2f} in the first episode and "
            f"{metrics['return/episode_1']:8.2f} in the second"
        ),
    )


if __name__ == "__main__":
    main()
