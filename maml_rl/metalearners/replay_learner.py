"""Learners that take steps on what they draw from a replay: its settings, and the common update of those of trials."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from maml_rl.config import Config
from maml_rl.config.settings import Count
from maml_rl.derivatives import EpisodeStore
from maml_rl.metalearners.memory_settings import refuse_hidden_rewards
from maml_rl.metalearners.metalearner import TrialLearner
from maml_rl.metalearners.stepper import Input, Stepper

NumUpdates = Annotated[Count, Field(description="updates after each batch that is sampled")]
NumTrials = Annotated[Count, Field(description="trials in each update")]


class ReplaySettings(BaseModel):
    """The replay, and how often it is learned from: a part of the settings of a learner."""

    num_updates: NumUpdates = 100
    buffer_steps: Annotated[Count, Field(description="capacity of the replay buffer, in steps")] = 1_000_000
    mapped_bytes: Annotated[
        Count | None, Field(description="beyond this size the replay buffer is memory-mapped from a file; null: never")
    ] = None


class TrialReplaySettings(ReplaySettings):
    """The same for a learner of whole trials, or of sequences of them."""

    batch_size: NumTrials = 64
    warmup_trials: Annotated[
        Count, Field(description="trials that the untrained policy samples before the first update")
    ] = 100
    sequence_length: Annotated[
        Count | None, Field(description="steps of a trial that an update uses, from anywhere in it; null: all")
    ] = None

    def refuse(self, config: Config, env: Any) -> None:
        """Refuse a config whose trials cannot be learned from."""
        refuse_hidden_rewards(config)
        refuse_small_replay(config, env, "buffer-steps", self.buffer_steps, config.fast_batch_size)


class TrialReplayLearner(TrialLearner):
    """Base of the learners that take steps on trials from the replay `trials`, which keeps all that are sampled.

    Attributes:
        measured: names of the statistics of a step.
        stepper: takes the steps.
    """

    measured: tuple[str, ...]
    stepper: Stepper
    settings: Any

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Store the trials in the replay buffer, and take steps on batches from it once there are enough.

        Returns:
            `replay/trials`, `replay/steps`, `updates`; and what is `measured`, means over the updates.
        """
        replay = self.experience["trials"]
        replay.append(batch.phases[0])
        known = {"replay/trials": replay.num_trials, "replay/steps": replay.num_steps, "updates": 0}
        if replay.num_appended < self.settings.warmup_trials:
            return known
        return known | self.stepper.take(self.settings.num_updates, self.draw_inputs, self.measured)

    @abstractmethod
    def draw_inputs(self) -> Sequence[Input]:
        """Draw a batch from the replay: the inputs of a step."""


def refuse_small_replay(config: Config, env: Any, setting: str, num_steps: int, num_episodes: int = 1) -> None:
    """Refuse a config whose `setting`, of so many steps, makes a replay smaller than a trial of `num_episodes`."""
    steps = (config.max_episode_steps or env.max_episode_steps or 1) * num_episodes
    if num_steps < steps:
        raise config.error(
            f"a replay buffer of {num_steps:,} steps has no room for {'a trial' if num_episodes > 1 else 'an episode'} "
            f"of {steps:,}; use at least {steps}, better a hundred times as many",
            "algorithm-settings",
            setting,
        )
