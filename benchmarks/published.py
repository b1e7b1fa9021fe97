"""HalfCheetahDir by the published protocol with the authors' baseline: `python -m benchmarks.published --train`.

The trainings run like those of `benchmarks.learning`; the table is in docs/results.md.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning.command import run
from benchmarks.learning.plan import ROOT, Family, Method, Plan, named
from maml_rl.envs.meta_env import Task
from maml_rl.episode import TaskEpisodes
from maml_rl.metalearners import MAMLTRPO
from maml_rl.metalearners.collection import Batch, Sampler
from maml_rl.metalearners.metalearner import State
from maml_rl.samplers import MultiTaskSampler

# Of the authors' features: observations are clipped to this, and the ridge acts on them as they are.
_MOST = 10.0
_RIDGE = 1e-5


class PreviousFit:
    """The baseline of the authors' code: one for all tasks of a batch, which predicts before it is fitted.

    The values of a task come from the fit to the task before it, those of the first from the fit to all tasks of the
    phase before, and are zero in the first phase of all.

    Attributes:
        of_all: (1, F) the weights that were fitted to all tasks of the last phase; None before the first.
    """

    def __init__(self) -> None:
        self.of_all: Tensor | None = None
        self._values: Tensor | None = None

    def fit(self, episodes: TaskEpisodes) -> "PreviousFit":
        """Predict, and fit afterwards."""
        mask = episodes.mask.double().flatten(1)
        features = _features(episodes) * mask.unsqueeze(-1)
        returns = (episodes.returns.double() * episodes.mask).flatten(1)
        products, moments = features.mT @ features, (features.mT @ returns.unsqueeze(-1)).squeeze(-1)
        fits = _solved(products, moments)
        first = torch.zeros_like(fits[:1]) if self.of_all is None else self.of_all
        weights = torch.cat([first, fits[:-1]])
        self.of_all = _solved(products.sum(0, keepdim=True), moments.sum(0, keepdim=True))
        self._values = (features @ weights.unsqueeze(-1)).reshape(episodes.mask.shape).to(episodes.rewards.dtype)
        return self

    def __call__(self, episodes: TaskEpisodes) -> Tensor:
        """Return the values (M, T, B) of the episodes that `fit` was called with."""
        assert self._values is not None
        return self._values

    def final_values(self, episodes: TaskEpisodes) -> Tensor:
        """Return zeros (M, B): the authors' code does not bootstrap."""
        return torch.zeros_like(episodes.rewards[:, 0])


def _features(episodes: TaskEpisodes) -> Tensor:
    """Return features (M, T * B, F) float64, not scaled."""
    clipped = episodes.observations.double().clamp(-_MOST, _MOST)
    steps = torch.arange(clipped.shape[1], dtype=torch.float64)[:, None, None] / 100.0
    time = steps.expand(*clipped.shape[:3], 1)
    return torch.cat([clipped, clipped.square(), time, time**2, time**3, torch.ones_like(time)], -1).flatten(1, 2)


def _solved(products: Tensor, moments: Tensor) -> Tensor:
    ridge = _RIDGE * torch.eye(products.shape[-1], dtype=products.dtype)
    solution: Tensor = torch.linalg.lstsq(products + ridge, moments.unsqueeze(-1), driver="gelsd").solution
    return solution.squeeze(-1)


class WithPreviousFit(MAMLTRPO):
    """MAML-TRPO trained with the authors' baseline. Tests have the package's own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._baseline = PreviousFit()

    def collect(self, sampler: Sampler, tasks: Sequence[Task]) -> Batch:
        """Sample a batch with this baseline."""
        assert isinstance(sampler, MultiTaskSampler)
        sampler.baseline = self._baseline
        return super().collect(sampler, tasks)

    def state_dict(self) -> State:
        """Return the learner's state, with the fit that the next phase begins with."""
        return super().state_dict() | ({} if self._baseline.of_all is None else {"of_all": self._baseline.of_all})

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict({name: value for name, value in state.items() if name != "of_all"})
        of_all = state.get("of_all")
        self._baseline.of_all = of_all if isinstance(of_all, Tensor) else None


FAMILY = Family(
    "finn2017-halfcheetah-dir",
    "HalfCheetahDir, the published protocol",
    "../finn2017/halfcheetah-dir.yaml",
    32_000_000,
    evaluations=5,
)
PLAN = Plan(
    ROOT / "docs" / "results.md",
    named(FAMILY),
    named(
        Method("own-fit"),
        Method("previous-fit", changes={"algorithm": "benchmarks.published:WithPreviousFit"}),
    ),
    {FAMILY.name: (0, 1, 2)},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run(PLAN, arguments)


if __name__ == "__main__":
    main()
