"""The result of adaptation in each task, and the way to adapt that algorithms share."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from maml_rl.envs.meta_env import Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.plan import Plan, Sampler
from maml_rl.policies import Memory, Policy
from maml_rl.policies.memory_policy import PolicyWithMemory


@dataclass(frozen=True, slots=True)
class Adapted:
    """The result of adapting a policy to each of M tasks.

    Attributes:
        phases: the episodes used for adaptation, in the order in which they were sampled.
        params: parameters by name, (M, ...) of each task's policy, which may include a latent context, or of the
            policy's own shape where tasks share them; None for the policy's own. `sampler.rollout` takes them.
        memory: the policy's memory in each task, tensors (M, ...); empty for a policy without a memory.
    """

    phases: Sequence[TaskEpisodes] = ()
    params: Mapping[str, Tensor] | None = None
    memory: Memory = ()

    def policy_of(self, policy: Policy, task: int = 0) -> Policy:
        """Return a copy of the policy that was adapted, which is ready to act in the task of this number."""
        ready = copy.deepcopy(policy)
        if self.params is not None:
            shapes = dict(ready.named_parameters())
            of_task = {
                name: param if param.shape == shapes[name].shape else param[task] for name, param in self.params.items()
            }
            ready.load_state_dict(of_task, strict=False)
        return PolicyWithMemory(ready, [part[task] for part in self.memory]) if self.memory else ready


def adapt(sampler: Sampler, tasks: Sequence[Task], plan: Plan) -> Adapted:
    """Adapt the sampler's policy to tasks: by the gradient steps of a plan, new episodes before each, or by a trial.

    In a trial the policy's memory adapts while it acts; what it remembers at the end is the result.
    """
    adapted = sampler.collect(tasks, plan.replace(adapt_only=True))
    return Adapted(adapted.phases, adapted.params, adapted.memory)
