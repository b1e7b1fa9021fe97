"""Meta-SGD: a learned step size for every parameter."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule
from maml_rl.derivatives import EpisodeStore
from maml_rl.metalearners.adam import AdamLearner, AdamSettings, ClippedSettings
from maml_rl.metalearners.metalearner import State

_SIZES = "step_sizes."


class MetaSGD(AdamLearner):
    """MAML-PPO that learns, with the initial parameters, a step size of the inner loop for every number in them.

    The step size of the rule's first step is the first value of all.

    Source: Li et al. 2017, https://arxiv.org/abs/1707.09835
    """

    class Settings(ClippedSettings, AdamSettings):
        """Settings of Meta-SGD."""

    settings: Settings

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        first = self.rule.step_size(0)
        self._sizes: dict[str, Tensor] = {
            name: (torch.zeros_like(param) + (first[name] if isinstance(first, Mapping) else first))
            .detach()
            .requires_grad_()
            for name, param in self.policy.named_parameters()
            if not isinstance(first, Mapping) or name in first
        }
        self.optimizer.add_param_group({"params": list(self._sizes.values())})
        self.rule = self._present_rule()

    def learning_rule(self) -> AdaptationRule:
        return AdaptationRule(self._sizes, inner_loss=self.rule.inner_loss)

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Take steps of Adam; `step_size/mean` is that of all learned step sizes. See `AdamLearner.update`."""
        metrics = super().update(batch)
        self.rule = self._present_rule()
        sizes = torch.cat([size.detach().flatten() for size in self._sizes.values()])
        return metrics | {"step_size/mean": sizes.mean().item()}

    def acting_state(self) -> dict[str, Tensor]:
        return {_SIZES + name: size.detach().clone() for name, size in self._sizes.items()}

    def collector(self, state: Mapping[str, Tensor]) -> Self:
        collector = super().collector(state)
        collector.rule = self._rule_with({name: state[_SIZES + name].to(self.device) for name in self._sizes})
        return collector

    def state_dict(self) -> State:
        return super().state_dict() | self.acting_state()

    def load_state_dict(self, state: State) -> None:
        sizes = {key.removeprefix(_SIZES): value for key, value in state.items() if key.startswith(_SIZES)}
        shapes = {name: size.shape for name, size in self._sizes.items()}
        if {name: size.shape for name, size in sizes.items()} != shapes:
            raise ValueError(f"it has step sizes of {', '.join(sizes)}, and the policy's parameters are others")
        super().load_state_dict(state)
        with torch.no_grad():
            for name, size in self._sizes.items():
                size.copy_(sizes[name])
        self.rule = self._present_rule()

    def _present_rule(self) -> AdaptationRule:
        # Copies: while Adam changes the step sizes, another thread may sample with the rule.
        return self._rule_with({name: size.detach().clone() for name, size in self._sizes.items()})

    def _rule_with(self, sizes: Mapping[str, Tensor]) -> AdaptationRule:
        return AdaptationRule(sizes, inner_loss=self.rule.inner_loss)
