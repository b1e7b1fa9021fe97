"""Learners of whole trials: their bases, and the settings of a memory and of a replay."""

from abc import abstractmethod
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from maml_rl.config import Config
from maml_rl.config.config import SECTION
from maml_rl.config.settings import Count
from maml_rl.derivatives import EpisodeStore
from maml_rl.metalearners.metalearner import MetaLearner
from maml_rl.metalearners.stepper import Input, Stepper
from maml_rl.policies import GRUPolicy, SequencePolicy, TransformerPolicy
from maml_rl.policies.recurrent import Cell
from maml_rl.policies.transformer import Attention

CellKind = Annotated[
    Literal["gru", "lstm", "transformer"],
    Field(description="kind of memory: a recurrent layer, or attention to the last steps"),
]
NumUpdates = Annotated[Count, Field(description="updates after each batch that is sampled")]
NumTrials = Annotated[Count, Field(description="trials in each update")]


class TrialLearner(MetaLearner):
    """Base of the learners of whole trials: all episodes of a task follow each other in one slot.

    Only the policy's memory adapts: there is no inner loop, a test is one trial of every task, and its returns are
    those of the trial's episodes.
    """

    instead = MappingProxyType({"num-steps": "fast-batch-size", "evaluation-steps": "fast-batch-size"})
    columns = "episode"
    whole_trials = True


class RecordedLearner(TrialLearner):
    """Base of the learners of recorded data, which never sample in training: `update` gets a batch without phases.

    Returns are known from evaluations alone, in which the policy adapts by its memory.

    Attributes:
        learned_tasks: the tasks of the data, which a test must not have.
        source_returns: (episodes,) mean return, in each episode, of the learners in the data, for comparison; None
            where there are none.
    """

    samples = False


class MemorySettings(BaseModel):
    """The kind of a memory, and the sizes of a transformer besides its width: a part of the settings of a learner."""

    cell: CellKind = "gru"
    context: Annotated[Count, Field(description="steps that a transformer attends to")] = 128
    num_layers: Annotated[Count, Field(description="blocks of a transformer")] = 2
    num_heads: Annotated[Count, Field(description="heads of a transformer's attention")] = 4

    # Settings of one kind: sizes of a transformer, and further arguments of its policy, or of one with a cell.
    sizes: ClassVar[Sequence[str]] = ("context", "num_layers", "num_heads")
    of_transformers: ClassVar[Sequence[str]] = ()
    of_cells: ClassVar[Sequence[str]] = ()

    @property
    def body(self) -> Cell | Attention:
        """The cell of a recurrent layer, or the sizes of a transformer."""
        return Attention(self.context, self.num_layers, self.num_heads) if self.cell == "transformer" else self.cell

    def body_of(self, width: int, config: Config) -> Cell | Attention:
        """Return the same.

        Raises:
            ConfigError: If heads do not divide the width, or settings of another kind were given.
        """
        body = self.body
        names, kind = self.of_cells, "a gru or lstm"
        if not isinstance(body, Attention):
            names, kind = (*self.sizes, *self.of_transformers), "a transformer"
        # Not those beside a kind that an option has replaced, or that a run has recorded.
        is_replaced = config.is_recorded or config.replaces(SECTION, "cell")
        for name in names:
            path = SECTION, name.replace("_", "-")
            is_given = getattr(self, name) != type(self).model_fields[name].default
            if is_given and (config.replaces(*path) or not is_replaced):
                raise config.error(f"it is for {kind}, and 'cell' is {self.cell!r}; leave it out", *path)
        if isinstance(body, Attention):
            try:
                body.head_size(width)
            except ValueError as error:
                raise config.error(f"no transformer of these sizes: {error}", SECTION) from None
        return body

    def make_policy(self, env: Any, config: Config, **options: Any) -> SequencePolicy:
        """Make a policy of this memory for the spaces of `env`; the settings must have a `hidden_size`."""
        observations, actions = env.single_observation_space, env.single_action_space
        hidden_size: int = vars(self)["hidden_size"]
        options |= {"conv_layers": config.conv_layers, "image_scale": config.image_scale, "seed": config.seed}
        body = self.body_of(hidden_size, config)
        if isinstance(body, Attention):
            options |= {name: getattr(self, name) for name in self.of_transformers}
            return TransformerPolicy(observations, actions, hidden_size, body, **options)
        options |= {name: getattr(self, name) for name in self.of_cells}
        return GRUPolicy(observations, actions, hidden_size, cell=body, **options)


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


def refuse_hidden_rewards(config: Config) -> None:
    """Refuse a config whose policy would not observe its last action and reward."""
    if not config.observe_last:
        raise config.error(
            f"{config.algorithm} learns from the last action and reward; add 'observe-last: true'", "algorithm"
        )


def refuse_idle_updates(config: Config, anneal_over: int | None) -> None:
    """Refuse a training that continues after the step size has fallen to zero, in `anneal_over` meta-updates."""
    if anneal_over is not None and anneal_over < config.num_batches:
        raise config.error(
            f"{config.algorithm} learns nothing after meta-update {anneal_over}, when its step size is zero; use at "
            f"most {anneal_over}, or a longer anneal-over",
            "num-batches",
        )


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
