"""Learners of whole trials: a memory is what adapts, and the episodes of a trial are what is tested."""

from collections.abc import Sequence
from typing import Any, ClassVar

from maml_rl.adaptation import AdaptationRule
from maml_rl.config import Config
from maml_rl.derivatives import Hosts, ThreadHosts
from maml_rl.envs.meta_env import Task
from maml_rl.metalearners.adapted import Adapted, adapt_by_memory
from maml_rl.metalearners.collection import Batch, Sampler
from maml_rl.metalearners.metalearner import MetaLearner
from maml_rl.policies import Policy


class TrialLearner(MetaLearner):
    """Base of the learners that train a policy with a memory on trials: all episodes of a task, in one slot.

    A subclass writes `make_policy` and `update`.

    Attributes:
        trials_per_chunk: how many trials the update computes side by side at most, for a learner with
            `updates_on_hosts`.
        tests_without_noise: whether the policy acts without noise after training, as soft actor-critics do, whose noise
            is there to explore.
    """

    columns = "episode"
    whole_trials = True
    trials_per_chunk: int | None = None
    tests_without_noise: ClassVar[bool] = False

    @classmethod
    def make_rule(cls, policy: Policy, config: Config, settings: Any) -> None:
        """Return None: the memory is what adapts."""
        return

    def collect(self, sampler: Sampler, tasks: Sequence[Task]) -> Batch:
        """Sample one trial of every task, where the update is to be."""
        if self.trials_per_chunk is not None and sampler.has_hosts(len(tasks), trials_per_chunk=self.trials_per_chunk):
            return Batch.on(sampler.sample_trials_on_hosts(tasks, self.trials_per_chunk))
        return Batch([sampler.rollout_trials(tasks)])

    def hosts_of(self, batch: Batch) -> Hosts:
        """Return where the chunks of trials are; see `MetaLearner.hosts_of`."""
        return batch.hosts or ThreadHosts(batch.phases, self.policy, self.device, tasks_per_chunk=self.trials_per_chunk)

    def adapt(
        self, sampler: Sampler, tasks: Sequence[Task], num_steps: int = 0, rule: AdaptationRule | None = None
    ) -> Adapted:
        """Let the policy act through a trial of every task, and return what it remembers; see `MetaLearner.adapt`."""
        return adapt_by_memory(sampler, tasks, deterministic=self.tests_without_noise)

    def test(
        self, sampler: Sampler, tasks: Sequence[Task], num_steps: int = 0, rule: AdaptationRule | None = None
    ) -> Batch:
        """Sample one trial of every task, which adapts while it is sampled; see `MetaLearner.test`."""
        return Batch([sampler.rollout_trials(tasks, deterministic=self.tests_without_noise)])


def refuse_hidden_rewards(config: Config) -> None:
    """Refuse a config whose policy would not observe what its memory is to learn from.

    Raises:
        ConfigError: If the last action and reward are not observed.
    """
    if not config.observe_last:
        raise config.error(
            f"{config.algorithm} learns from the last action and reward; add 'observe-last: true'", "algorithm"
        )
