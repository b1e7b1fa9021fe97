"""What one meta-update learns from: a batch of tasks, their episodes, and how they were collected."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from maml_rl.config.config import Config
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.samplers import MultiTaskSampler


@dataclass(frozen=True, slots=True)
class Batch:
    """The episodes of a batch of tasks.

    Attributes:
        version: how many meta-updates the parameters had behind them under which it was collected.
        train_episodes: before each inner step.
        valid_episodes: after the last.
        seconds: that it took to collect.
        stages: seconds of each stage, if they are measured.
        means: of quantities, if they are measured.
    """

    version: int
    train_episodes: Sequence[TaskEpisodes]
    valid_episodes: TaskEpisodes
    seconds: float
    stages: dict[str, float]
    means: dict[str, float]

    @property
    def phases(self) -> list[TaskEpisodes]:
        """All episodes, phase by phase."""
        return [*self.train_episodes, self.valid_episodes]


class PublishedParameters:
    """The newest finished parameters of a policy: one thread publishes them, another loads them into a policy.

    Args:
        policy: whose parameters are the first.
        version: number of those.
    """

    def __init__(self, policy: Policy, version: int) -> None:
        self._newest: tuple[int, dict[str, Tensor]]
        self.publish(policy, version)

    def publish(self, policy: Policy, version: int) -> None:
        """Copy the policy's parameters; until then, those before remain the newest."""
        # One assignment: whoever reads sees the old pair or the new one.
        self._newest = version, {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}

    def load_into(self, policy: Policy) -> int:
        """Give `policy` the newest parameters, and return their number."""
        version, tensors = self._newest
        policy.load_state_dict(tensors)
        return version


def collect_batch(sampler: MultiTaskSampler, config: Config, version: int) -> Batch:
    """Begin the sampler's next iteration, and collect its batch of tasks under the parameters of its policy.

    Args:
        sampler: its policy acts.
        config: sizes and inner loop.
        version: number of the policy's parameters.
    """
    started = perf_counter()
    train_episodes, valid_episodes = sampler.sample(
        sampler.sample_tasks(config.meta_batch_size),
        num_steps=config.training_steps,
        fast_lr=config.fast_lr,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        device=next(sampler.policy.parameters()).device,
        bootstrap=config.bootstrap,
    )
    seconds = perf_counter() - started
    timer = sampler.timer
    return Batch(version, train_episodes, valid_episodes, seconds, timer.take(), timer.take_means())
