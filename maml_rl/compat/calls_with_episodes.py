"""A metalearner that is called with episodes, `metalearner.step(train_episodes, valid_episodes)`."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from maml_rl.compat.appended_episodes import AppendedEpisodes


class CalledWithEpisodes:
    """Gives MAML-TRPO `step`, and `adapt` for episodes."""

    settings: Any
    num_steps: int | None = None

    def step(
        self,
        train_episodes: Sequence[Any],
        valid_episodes: Any,
        max_kl: float | None = None,
        cg_iters: int | None = None,
        cg_damping: float | None = None,
        ls_max_steps: int | None = None,
        ls_backtrack_ratio: float | None = None,
    ) -> dict[str, Any]:
        """Update the policy's parameters by one trust-region step; an argument of None means the setting.

        Args:
            train_episodes: for each inner step the episodes of all tasks before it, with advantages; none for plain
                TRPO on all tasks at once.
            valid_episodes: the episodes of all tasks after the last inner step, with advantages.
            max_kl: bound of KL(old, new), averaged over the real valid steps of a task, then over tasks.
            cg_iters: iterations of conjugate gradients.
            cg_damping: added to the diagonal of the curvature.
            ls_max_steps: step lengths to try; if none is accepted, the parameters do not change.
            ls_backtrack_ratio: of one step length to the one before.

        Returns:
            `kl`, `loss/before`, `loss/after`, `line_search_steps`, `accepted`, `grad_norm`.
        """
        if self.num_steps is not None and len(train_episodes) != self.num_steps:
            raise ValueError(f"the learner has num_steps={self.num_steps}, and these are {len(train_episodes)} steps")
        given = {
            "max_kl": max_kl,
            "cg_iters": cg_iters,
            "cg_damping": cg_damping,
            "ls_max_steps": ls_max_steps,
            "ls_backtrack_ratio": ls_backtrack_ratio,
        }
        changed = {name: value for name, value in given.items() if value is not None}
        learner = copy.copy(self)
        learner.settings = self.settings.replace(**changed)
        return learner.update(self.batch_of(train_episodes, valid_episodes))

    def adapt(
        self, sampler: Any, tasks: Any = None, num_steps: int = 1, rule: Any = None, *, first_order: bool | None = None
    ) -> Any:
        """Adapt the policy to tasks, see `MetaLearner.adapt`; or to episodes.

        Args:
            sampler: samples the episodes; or, for each inner step, the episodes before it, with advantages, of one task
                or of all.
            tasks: M tasks; with episodes, `first_order`.
            num_steps: see `MetaLearner.adapt`.
            rule: see `MetaLearner.adapt`.
            first_order: with episodes: treat the inner gradients as constants; None for the setting.

        Returns:
            An `Adapted`; with episodes {name: tensor} of the policy's own shapes for one task, (M, ...) for M of them,
            differentiable with respect to the policy's parameters.
        """
        if not isinstance(sampler, Sequence):
            adapt: Any = super().adapt  # type: ignore[misc]
            return adapt(sampler, tasks, num_steps, rule)
        given = tasks if first_order is None else first_order
        single = any(isinstance(episodes, AppendedEpisodes) for episodes in sampler)
        train = [[each] if isinstance(each, AppendedEpisodes) else each for each in sampler]
        adapted = self.adapted_to(train, first_order=self.settings.first_order if given is None else given)
        return {name: value.squeeze(0) for name, value in adapted.items()} if single else adapted

    @abstractmethod
    def update(self, batch: Any) -> dict[str, Any]:
        """Update the policy's parameters by one trust-region step."""

    @abstractmethod
    def batch_of(self, train_episodes: Sequence[Any], valid_episodes: Any) -> Any:
        """Return the batch of episodes that have advantages."""

    @abstractmethod
    def adapted_to(self, train_episodes: Sequence[Any], *, first_order: bool) -> dict[str, Tensor]:
        """Return the parameters (M, ...) after inner steps on the episodes of all tasks."""
