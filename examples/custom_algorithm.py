"""Your own algorithm, in one file: MAML whose meta-policy takes steps of Adam, trained from a config."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.derivatives import Cache
from maml_rl.episode import TaskEpisodes
from maml_rl.experiment.train import train
from maml_rl.metalearners import EpisodeStore, MetaLearner, SettingsModel
from maml_rl.metalearners.autograd_objective import AutogradObjective, PhaseOutcome
from maml_rl.metalearners.losses import surrogate


def after_adaptation(new: Sequence[PhaseOutcome], old: Sequence[PhaseOutcome]) -> Tensor:
    """Return the loss of each adapted policy, (M,), on the episodes that it was sampled in."""
    *_, last = new
    return surrogate(last.log_probs, old[-1].log_probs, last.samples)


def mean_returns(phases: Sequence[TaskEpisodes], cache: Cache, phase: int) -> Tensor:
    """Return the mean return of each task in one phase, (k,)."""
    return phases[phase].episode_returns().mean(1)


class AdamMAML(MetaLearner):
    """MAML with Adam as the outer optimizer."""

    class Settings(SettingsModel):
        """The section `algorithm-settings` of a config."""

        learning_rate: Annotated[float, Field(gt=0, description="step size of Adam")] = 1e-2
        epochs: Annotated[int, Field(ge=1, description="steps of Adam on each batch")] = 1

    maps_over_tasks = True
    settings: Settings
    optimizer: torch.optim.Optimizer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Checkpoints save the attribute `optimizer`, so that a resumed run is bit-identical.
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.settings.learning_rate)

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Take steps of Adam down the gradient through the inner loop."""
        losses = []
        objective = AutogradObjective(self.policy, batch, rule=self.rule, objective=after_adaptation)
        for _ in range(self.settings.epochs):
            losses.append(objective.backward())
            self.optimizer.step()
        first, last = (torch.cat(batch.map(mean_returns, phase)).mean() for phase in (0, -1))
        return {"loss/before": losses[0], "loss/last": losses[-1], "return/gain": float(last - first)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on 2D navigation, and print the returns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--output-folder", type=Path, default=Path("runs/adam-maml"))
    parser.add_argument("--num-workers", type=int)
    options = parser.parse_args(arguments)
    settings = {
        "env-name": "2DNavigation-v0",
        # In a YAML file: `algorithm: custom_algorithm:AdamMAML`, with this file in a folder that Python finds.
        "algorithm": f"{__name__}:AdamMAML",
        "algorithm-settings": {"learning-rate": 0.01, "epochs": 3},
        "max-episode-steps": 50,
        "num-batches": options.iterations,
    }
    train(
        Config.from_mapping(Mapping("the example", settings)),
        options.output_folder,
        num_workers=options.num_workers,
        on_iteration=lambda metrics: print(
            f"iteration {metrics['iteration']:>3}: return {metrics['return/step_0']:8.2f} before and "
            f"{metrics['return/step_1']:8.2f} after adaptation"
        ),
    )


if __name__ == "__main__":
    main()
