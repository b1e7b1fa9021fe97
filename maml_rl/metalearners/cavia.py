"""CAVIA: fast context adaptation. The inner loop changes only further inputs of the policy, not its weights."""

from typing import Annotated, Any

import gymnasium
import torch
from pydantic import Field
from torch import Tensor, nn

from maml_rl.adaptation import AdaptationRule
from maml_rl.config import Config
from maml_rl.config.settings import Count
from maml_rl.metalearners.adam import AdamLearner, AdamSettings, ClippedSettings
from maml_rl.policies import DistributionParams, MLPPolicy, Params, Policy, get_policy_for_env
from maml_rl.policies.layers import within
from maml_rl.policies.policy import Act

CONTEXT = "context"


class ContextPolicy(Policy):
    """An MLP with further input units, the parameter `context`: zero for every new task, and never trained.

    The seed is that of their initial weights. An inner loop may change only the parameters in `adapts_only`.
    """

    stateless = True
    adapts_only = (CONTEXT,)

    def __init__(self, inner: MLPPolicy, context_size: int, *, seed: int = 0) -> None:
        super().__init__()
        self.noise_kind, self.noise_size = inner.noise_kind, inner.noise_size
        self.inner = inner
        self.distributions = inner.distributions
        first = inner.get_parameter(inner.perceptron.layer_names[0][0])
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty((len(first), context_size), dtype=first.dtype)
        self.context_weight = nn.Parameter(nn.init.xavier_uniform_(weight, generator=generator))
        self.context = nn.Parameter(torch.zeros(context_size, dtype=first.dtype), requires_grad=False)

    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> DistributionParams:
        return self.inner.distribution_parameters(observations, self._of_inner(params))

    def actor(self, params: Params, first_task: int = 0) -> Act:
        return self.inner.actor(self._of_inner(params), first_task)

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        self.inner.check_spaces(observation_space, action_space)

    def _of_inner(self, params: Params | None) -> dict[str, Tensor]:
        """Return the parameters of an MLP without the context: constant inputs act like its first bias."""
        params = dict(self.named_parameters()) if params is None else params
        inner = within(params, "inner.")
        # Summed row by row, so that the bias of a task does not depend on the tasks beside it.
        shift = (params["context_weight"] * params[CONTEXT].unsqueeze(-2)).sum(-1)
        bias = self.inner.perceptron.layer_names[0][1]
        return inner | {bias: inner[bias] + shift}


class CAVIA(AdamLearner):
    """MAML-PPO whose inner loop adapts only the context, from zero; all weights are learned for all tasks.

    Source: Zintgraf et al. 2019, https://arxiv.org/abs/1810.03642
    """

    class Settings(ClippedSettings, AdamSettings):
        """Settings of CAVIA."""

        context_size: Annotated[Count, Field(description="inputs of the policy that are adapted to a task")] = 10

    uses = AdamLearner.uses - {"memory", "conv-layers", "image-scale"}
    settings: Settings

    @classmethod
    def make_policy(cls, env: Any, config: Config, settings: Settings) -> Policy:
        inner = get_policy_for_env(
            env, config.hidden_sizes, config.nonlinearity, seed=config.seed, output_scale=config.output_scale
        )
        if not isinstance(inner, MLPPolicy):
            raise TypeError(f"cavia has no {type(inner).__name__} with a context; for images choose another algorithm")
        # A seed of its own: weights from the stream of the first layer would repeat that layer's.
        return ContextPolicy(inner, settings.context_size, seed=config.seed + 2**32)

    @classmethod
    def make_rule(cls, policy: Policy, config: Config, settings: Settings) -> AdaptationRule:
        """Make gradient steps on the context."""
        if CONTEXT not in dict(policy.named_parameters()):
            raise config.error(
                f"cavia adapts a parameter named {CONTEXT!r}, which {type(policy).__name__} does not have; leave out "
                "the key, or choose another algorithm",
                "policy",
            )
        return AdaptationRule(config.fast_lr, parameters=[CONTEXT], inner_loss=cls.inner_loss)
