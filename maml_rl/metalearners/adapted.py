"""The result of adaptation in each task, and the two ways to adapt that algorithms share."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule
from maml_rl.envs.meta_env import Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.metalearners.collection import Collection, Sampler
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
            own = dict(ready.named_parameters())
            of_task = {
                name: param if param.shape == own[name].shape else param[task] for name, param in self.params.items()
            }
            ready.load_state_dict(of_task, strict=False)
        return PolicyWithMemory(ready, [kept[task] for kept in self.memory]) if self.memory else ready


def adapt_by_steps(
    sampler: Sampler,
    tasks: Sequence[Task],
    num_steps: int,
    rule: AdaptationRule | None,
    collection: Collection | None = None,
    device: torch.device | str = "cpu",
) -> Adapted:
    """Adapt the sampler's policy by `num_steps` gradient steps, new episodes before each; without a rule by none.

    Gradients are computed on `device`, of advantages that are estimated as `collection` says.
    """
    if rule is None:
        return Adapted()
    how = (collection or Collection()).estimation
    phases, params = sampler.adapt(tasks, num_steps, rule, device=device, **how)
    return Adapted(phases, params)


def adapt_by_memory(sampler: Sampler, tasks: Sequence[Task], *, deterministic: bool = False) -> Adapted:
    """Adapt by a trial in each task, in which the sampler's policy acts: its memory after the trial is the result."""
    trials, memory = sampler.remember_trials(tasks, deterministic=deterministic)
    return Adapted([trials], memory=memory)
