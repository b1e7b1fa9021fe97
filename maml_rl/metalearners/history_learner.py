"""Learners of recorded histories, whose policies predict actions, and adapt by their memory: their base, AD and DPT."""

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from maml_rl.config import Config, SettingsModel
from maml_rl.config.settings import Count, Positive, StepSize
from maml_rl.derivatives import EpisodeStore, cut
from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.envs.observing import LastStepParts, LastStepVectorEnv
from maml_rl.envs.tasks import task_key
from maml_rl.episode.steps import Steps
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.experience.histories import EnvKind, Histories
from maml_rl.experience.minari_data_set import read_data_set
from maml_rl.experience.recording import load_histories
from maml_rl.metalearners.metalearner import State
from maml_rl.metalearners.stepper import Input, Stepper, set_step_size
from maml_rl.metalearners.trial_learner import (
    CellKind,
    MemorySettings,
    RecordedLearner,
    refuse_hidden_rewards,
    refuse_idle_updates,
)
from maml_rl.policies import GRUPolicy, Policy, SequencePolicy, TransformerPolicy
from maml_rl.policies.heads import CategoricalHead
from maml_rl.policies.recurrent import Cell
from maml_rl.policies.transformer import Attention
from maml_rl.spaces import require_vectors

_TASKS, _RETURNS, _UPDATES, _CONTEXT = (f"histories.{name}" for name in ("tasks", "returns", "updates", "context"))
# What the name of a data set of Minari begins with.
_MINARI = "minari:"
# Bits of a task's digest beyond those that number the tasks: fewer than 4 in a million of other tasks look like one.
_SPARE_BITS = 19


class HistorySettings(SettingsModel, MemorySettings):
    """Settings of all learners of histories."""

    # The context is also how long sequences are.
    sizes: ClassVar = ("num_layers", "num_heads")
    cell: CellKind = "transformer"
    num_layers: Annotated[Count, Field(description="blocks of a transformer")] = 4

    histories: Annotated[
        str | None,
        Field(
            description="data set to learn from: a folder that `maml-rl record` has written, or `minari:NAME`, one of "
            "Minari; null: only tests"
        ),
    ] = None
    hidden_size: Annotated[Count, Field(description="width of a token, or units of the recurrent layer")] = 64
    context: Annotated[Count, Field(description="steps that a transformer attends to")] = 200
    sequence_length: Annotated[
        Count | None,
        Field(description="steps of a sequence in training, where trials are longer than the context; null: `context`"),
    ] = None
    num_updates: Annotated[Count, Field(description="gradient steps in each iteration")] = 100
    batch_size: Annotated[Count, Field(description="sequences in each gradient step")] = 64
    learning_rate: Annotated[StepSize, Field(description="step size of AdamW")] = 1e-3
    weight_decay: Annotated[float, Field(ge=0, description="decay of the weights, as AdamW has it")] = 1e-4
    warmup: Annotated[int, Field(ge=0, description="gradient steps in which the step size rises evenly")] = 200
    anneal_over: Annotated[
        Count | None, Field(description="iterations in which the step size falls evenly to zero; null: never")
    ] = None
    max_grad_norm: Annotated[Positive, Field(description="maximum norm of a gradient; longer ones are clipped")] = 1.0
    squash: Annotated[
        bool | None,
        Field(
            description="squash Gaussians into the bounds of a Box, where it has some; null: yes, except in runs of "
            "earlier versions"
        ),
    ] = None
    acts: Annotated[
        Literal["sampled", "likeliest"],
        Field(
            description="in a test: sample the predicted distribution, which explores, or take its most likely action"
        ),
    ] = "sampled"

    def refuse(self, config: Config, env: Any) -> None:
        """Refuse, by a ConfigError, a config whose policy would not observe its last step."""
        refuse_hidden_rewards(config)

    @property
    def body(self) -> Cell | Attention:
        """As of others, and a transformer does not share keys and values between heads."""
        body = super().body
        return replace(body, num_key_value_heads=self.num_heads) if isinstance(body, Attention) else body


class HistoryLearner(RecordedLearner):
    """Base of the learners that never sample: supervised learning on sequences of histories, tested in context.

    In training a policy with a memory, usually a transformer, predicts an action at every step of a sequence, from what
    the sequence shows until then. In a test it takes the actions that it predicts, and remembers the outcome: it adapts
    without a change of its parameters. A subclass implements `draw`.

    Attributes:
        histories: the data; None until `learn_from`, and in a test.
    """

    Settings: ClassVar[type[HistorySettings]] = HistorySettings
    uses = frozenset()
    instead = MappingProxyType({"hidden-sizes": "hidden-size", "meta-batch-size": "batch-size"})
    settings: HistorySettings
    policy: SequencePolicy
    learned_tasks: "LearnedTasks"
    optimizer: torch.optim.Optimizer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not isinstance(self.policy, GRUPolicy | TransformerPolicy):
            raise TypeError(
                f"a TransformerPolicy or GRUPolicy learns from histories, and {type(self.policy).__name__} is neither; "
                "leave out the policy of the config, or pass one of these"
            )
        # A recurrent layer has no ring that could be too short.
        self._ring = (
            self.policy.body.sizes.context if isinstance(self.policy, TransformerPolicy) else self.settings.context
        )
        if self.settings.context > self._ring:
            raise TypeError(
                f"a context of {self.settings.context} steps is longer than the ring of the policy, which has "
                f"{self._ring}; lower context, or make the policy with a longer one"
            )
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self.settings.learning_rate,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )
        self.stepper = Stepper(
            self.loss,
            self.optimizer,
            name=type(self).__name__.lower(),
            max_norm=self.settings.max_grad_norm,
            chunks=lambda seen, _: cut(seen.shape[1], len(seen), self.settings.hidden_size, self.device),
            axis=1,
        )
        self._has_one_choice = isinstance(self.policy.distributions, CategoricalHead)
        require_vectors("a learner of histories", self.policy.observation_space)
        self._last_step = slice(
            LastStepParts.within(self.policy.observation_space, self.policy.action_space).last_action.start, None
        )
        self._sequence_length = self.settings.sequence_length or self.settings.context
        self.histories: Histories | None = None
        self._steps_taken = 0
        self.learned_tasks = LearnedTasks(())
        self.source_returns = None
        self.tests_without_noise = self.settings.acts == "likeliest"

    @classmethod
    def complete(cls, settings: Any, config: Config) -> Any:
        """Decide whether Gaussians are squashed; in runs of earlier versions they never were."""
        if settings.squash is not None:
            return settings
        return settings.model_copy(update={"squash": not config.is_recorded})

    @classmethod
    def make_policy(cls, env: Any, config: Config, settings: Any) -> Policy:
        """Make a transformer, or a recurrent policy."""
        settings.refuse(config, env)
        policy: Policy = settings.make_policy(env, config, value="none", squash=bool(settings.squash))
        return policy

    def open_data(self, config: Config, env: MetaVectorEnv) -> None:
        refuse_idle_updates(config, self.settings.anneal_over)
        if self.settings.histories is None:
            raise config.error(
                f"{config.algorithm} learns from recorded histories; add a line `histories: FOLDER` with what "
                "`maml-rl record` has written",
                "algorithm-settings",
            )
        try:
            of_minari = self.settings.histories.startswith(_MINARI)
            read = read_data_set if of_minari else load_histories
            histories = read(self.settings.histories.removeprefix(_MINARI))
            # Outside of this process, the observation without the last step is unknown.
            space = env.env.single_observation_space if isinstance(env, LastStepVectorEnv) else None
            histories.check_fits(EnvKind(space, env.single_action_space, config.env_name, config.env_kwargs))
            self.learn_from(histories)
        except (ConfigError, CheckpointError, ValueError) as error:
            raise config.error(str(error), "algorithm-settings", "histories") from error

    def learn_from(self, histories: Histories) -> None:
        """Have `update` learn from histories."""
        if self._sequence_length < self.settings.context:
            raise ValueError(
                f"sequence-length, {self._sequence_length}, is shorter than the context, {self.settings.context}, of "
                "which a part would never be learned; raise it, or lower context"
            )
        self.histories = histories
        self.learned_tasks = LearnedTasks(histories.tasks)
        curves = histories.returns()
        longest = max(map(len, curves))
        padded = np.full((len(curves), longest), np.nan)
        for row, curve in zip(padded, curves, strict=True):
            row[: len(curve)] = curve
        self.source_returns = np.nanmean(padded, axis=0).astype(np.float32)
        # These draws are not for learning: they raise if something cannot be drawn.
        self.draw(np.random.default_rng(0))

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draw observations (L, N, size) of sequences, and the actions (L, N, *action shape) to predict there."""

    def sequences(self, rng: np.random.Generator, *, keep: int = 1, normalize: bool = False) -> Steps:
        """Draw sequences of every keep-th episode; see `Histories.sequences`.

        A sequence begins like a trial, without a last step. One that is longer than the
        context is like a longer trial: its steps have no more context than the later steps of the trial.
        """
        if self.histories is None:
            raise RuntimeError("there is nothing to learn from; call learn_from with histories first")
        size, length = self.settings.batch_size, self._sequence_length
        drawn = self.histories.sequences(rng, size, length, keep=keep, normalize=normalize)
        drawn.observations[0, :, self._last_step] = 0.0
        return drawn

    def imitation(self, outputs: tuple[Tensor, ...], actions: Tensor) -> Tensor:
        """Return the mean negative log-probability of the actions (L, N, ...) under the predicted distribution."""
        head = self.policy.distributions
        return -head.log_prob(outputs, head.recorded(actions)).mean()

    def loss(self, observations: Tensor, actions: Tensor, *, share: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the loss on sequences (L, N, size) and the actions to predict there; and it with the accuracy (2,).

        Each is the mean over the sequences times their share in those of the step.
        """
        outputs = self.policy.unroll(observations).distribution
        loss = right = share * self.imitation(outputs, actions)
        if self._has_one_choice:
            right = (outputs[0].argmax(-1) == actions).float().mean() * share
        return loss, torch.stack((loss, right))

    def draw_inputs(self) -> Sequence[Input]:
        """Draw the inputs of a step, and set its size."""
        self._set_step_size()
        return self.draw(self.generator("histories"))

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Take gradient steps on batches of the histories.

        Returns:
            `loss`, the mean; `accuracy`, the share of discrete actions whose prediction was right; `updates`, gradient
            steps so far.
        """
        measured = ("loss", "accuracy") if self._has_one_choice else ("loss",)
        means = self.stepper.take(self.settings.num_updates, self.draw_inputs, measured)
        return means | {"updates": self._steps_taken}

    def _set_step_size(self) -> None:
        """Set the step size of the next gradient step, and count it."""
        settings, step = self.settings, self._steps_taken
        share = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
        if settings.anneal_over is not None:
            share *= max(0.0, 1.0 - step / (settings.anneal_over * settings.num_updates))
        set_step_size(self.optimizer, settings.learning_rate * share)
        self._steps_taken += 1

    def state_dict(self) -> State:
        returns = np.zeros(0, np.float32) if self.source_returns is None else self.source_returns
        known = {_TASKS: self.learned_tasks.packed(), _RETURNS: torch.from_numpy(returns), _UPDATES: self._steps_taken}
        return super().state_dict() | known | {_CONTEXT: self._ring}

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        if isinstance(self.policy, TransformerPolicy) and self._ring > state[_CONTEXT]:
            raise ValueError(
                f"a context of {self._ring} steps is longer than the ring of the saved policy, "
                f"{state[_CONTEXT]}, beyond which it has not learned to attend; lower context"
            )
        returns, tasks = state[_RETURNS].cpu().numpy(), state[_TASKS].cpu()
        mine = self.source_returns
        if mine is not None and not (torch.equal(tasks, self.learned_tasks.packed()) and np.array_equal(returns, mine)):
            raise ValueError("the histories are not those with which the training began; put the earlier ones back")
        self.learned_tasks, self.source_returns = LearnedTasks.unpacked(tasks), returns if len(returns) else None
        self._steps_taken = int(state[_UPDATES])

    def begin_schedules(self) -> None:
        self._steps_taken = 0


class AD(HistoryLearner):
    """Predicts the next action of a learner from its observations and actions in many of its episodes.

    To predict a learner that improves from episode to episode, the transformer must notice the progress, and reproduce
    in its context the effect of the learner's updates. It sees only every `keep`-th episode of a history, so that it
    improves faster than the learner did.

    Source: Laskin et al. 2022, https://arxiv.org/abs/2210.14215
    """

    class Settings(HistorySettings):
        """Settings of algorithm distillation."""

        keep: Annotated[Count, Field(description="use only every keep-th episode of a history; 1: all")] = 1
        label_smoothing: Annotated[
            float, Field(ge=0, lt=1, description="label smoothing: probability spread evenly over all discrete actions")
        ] = 0.1

    settings: Settings

    def draw(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        drawn = self.sequences(rng, keep=self.settings.keep)
        return drawn.observations, drawn.actions

    def imitation(self, outputs: tuple[Tensor, ...], actions: Tensor) -> Tensor:
        """Return the cross-entropy of the actions; the targets of discrete ones are smoothed."""
        if not self._has_one_choice:
            return super().imitation(outputs, actions)
        smoothing = self.settings.label_smoothing
        return F.cross_entropy(outputs[0].flatten(0, 1), actions.flatten(), label_smoothing=smoothing)


class DPT(HistoryLearner):
    """Predicts the best action of the task that a sequence is from, independently of the actions in it.

    The prediction after some steps is the posterior of the best action. Acting by a draw from it is posterior sampling,
    like Thompson sampling, without a model of the tasks. The family computes which action is best.

    Source: Lee et al. 2023, https://arxiv.org/abs/2306.14892
    """

    def draw(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        drawn = self.sequences(rng)
        assert self.histories is not None
        return drawn.observations, self.histories.optimal_actions(drawn)


class LearnedTasks:
    """The tasks of the data, which a test must not have: three bytes of each.

    A digest has as many bits as number N tasks, and 19 more. The mean distance of sorted ones is then at most 2**19,
    and the differences that are kept fit into three bytes: one is too large with a probability of N * exp(-32).
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        hashes = {_hash(task) for task in tasks}
        self._digests = np.array(sorted(digest >> _surplus(len(hashes)) for digest in hashes), np.int64)

    def __contains__(self, task: object) -> bool:
        if not isinstance(task, dict):
            return False
        return bool((self._digests == np.int64(_hash(task) >> _surplus(len(self._digests)))).any())

    def packed(self) -> Tensor:
        """Return the differences of the sorted digests, (N, 3) uint8, the lowest byte first."""
        differences = np.diff(self._digests, prepend=0).astype("<u4")
        return torch.from_numpy(differences.view(np.uint8).reshape(-1, 4)[:, :3].copy())

    @classmethod
    def unpacked(cls, packed: Tensor) -> Self:
        """Return the tasks that `packed` is of."""
        tasks = cls(())
        tasks._digests = (packed.numpy().astype(np.int64) << np.array([0, 8, 16])).sum(1).cumsum()
        return tasks


def _hash(task: Task) -> int:
    """Return the first 64 bits of the SHA-256 of a task; lists may replace arrays."""
    return int.from_bytes(hashlib.sha256(task_key(task).encode()).digest()[:8], "big")


def _surplus(num_tasks: int) -> int:
    """Return the number of bits of a hash that are not kept for this number of tasks."""
    return 64 - _SPARE_BITS - max(num_tasks.bit_length() - 1, 0)
