"""AMAGO in mixtures: points whose rewards have several scales, and what a mixture learns beside each part of it alone.

`maml-rl train amago/point-goal --env-name benchmarks.amago:ScaledPointGoal-v0 --env-kwargs '{}'` trains on all scales,
with `'{scales: [1.0]}'` on one. Then, and likewise for a mixture of families and each of them:

    python -m benchmarks.amago runs/scales runs/scale-1
    python -m benchmarks.amago runs/half-cheetahs runs/vel runs/dir runs/rand-params
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from benchmarks.in_context import load
from maml_rl.cli.console import Parser
from maml_rl.config import load_config
from maml_rl.envs.family import BatchedFamily, one_slot
from maml_rl.envs.meta_env import Task
from maml_rl.envs.tasks import TaskEntry
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.runs.run_folder import CONFIG
from maml_rl.seeding import SlotStreams

# Of one step along each axis, as of PointGoal-v0.
_MOVE = 0.1
_ID, _SCALES = "benchmarks.amago:ScaledPointGoal-v0", (0.01, 1.0, 100.0)
# The last reward is observed as asinh(reward / unit), on which small differences of small ones are visible, too.
_UNIT = 1e-3


class ScaledPointGoalVectorEnv(BatchedFamily):
    """PointGoal-v0 whose rewards are multiplied by a number of the task, which is not observed.

    The observation is the position, the last reward of the episode on a logarithmic scale, and its change in the last
    step, which is the same on all scales; actions are in [-1, 1].

    Args:
        num_envs: number of slots.
        scales: of the rewards, equally likely.
        max_episode_steps: steps after which an episode is truncated.
        **options: see `BatchedFamily`.
    """

    task_description = "goal (2,): where to go, each coordinate uniform in [-1, 1]; scale: of the rewards"

    def __init__(
        self,
        num_envs: int = 1,
        *,
        scales: Sequence[float] = _SCALES,
        max_episode_steps: int | None = 20,
        **options: Any,
    ) -> None:
        self._scales = tuple(scales)
        self._position, self._rewards = np.zeros((num_envs, 2)), np.zeros((num_envs, 2))
        super().__init__(
            num_envs,
            spaces.Box(-np.inf, np.inf, (4,), np.float32),
            spaces.Box(-1.0, 1.0, (2,), np.float32),
            {"goal": TaskEntry((2,)), "scale": TaskEntry()},
            max_episode_steps=max_episode_steps,
            **options,
        )

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw goals from the square, and as many of each scale, up to rounding."""
        numbers = random.permutation(np.arange(num_tasks) + random.integers(len(self._scales))) % len(self._scales)
        goals = random.uniform(-1.0, 1.0, (num_tasks, 2))
        return [{"goal": goal, "scale": self._scales[number]} for goal, number in zip(goals, numbers, strict=True)]

    def _reset_slots(self, mask: NDArray[np.bool_] | None, streams: SlotStreams) -> None:
        where = slice(None) if mask is None else mask
        self._position[where] = 2.0 * streams.uniform(2, mask) - 1.0
        self._rewards[where] = 0.0

    def _step_slots(
        self, actions: NDArray[Any], active: NDArray[np.bool_] | None, streams: SlotStreams
    ) -> tuple[NDArray[np.float64], bool]:
        self._position += _MOVE * np.clip(actions.astype(np.float64), -1.0, 1.0)
        rewards = -self.tasks["scale"] * np.linalg.norm(self._position - self.tasks["goal"], axis=1)
        shown = np.arcsinh(rewards / _UNIT)
        before = np.where(self._rewards[:, 0] == 0.0, shown, self._rewards[:, 0])
        stepped = np.stack((shown, shown - before), 1)
        self._rewards = stepped if active is None else np.where(active[:, None], stepped, self._rewards)
        return rewards, False

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:, :2], out[:, 2:] = self._position, self._rewards


ScaledPointGoalEnv = one_slot(ScaledPointGoalVectorEnv)

if "ScaledPointGoal-v0" not in gymnasium.registry:
    gymnasium.register(
        "ScaledPointGoal-v0",
        entry_point="benchmarks.amago:ScaledPointGoalEnv",
        vector_entry_point="benchmarks.amago:ScaledPointGoalVectorEnv",
        max_episode_steps=20,
    )


def returns_of(run: Path, tasks: Sequence[Task] | int, *, trained: bool = True) -> tuple[NDArray[Any], Sequence[Task]]:
    """Return the returns (N, episodes) of a run's last checkpoint, or of its untrained policy, and the N tasks."""
    experiment = load(run) if trained else make_experiment(load_config(run / CONFIG), num_workers=0)
    evaluation = evaluate(experiment, tasks=tasks)
    return evaluation.repetition_returns()[:, 0], evaluation.tasks


def compare(mixed: Path, alone: Path, num_tasks: int) -> None:
    """Print the returns of a run on a mixture, and of one on a part of it alone, on the same held-out tasks.

    The last column is the share of what the second run learned, its last return above that of the untrained policy,
    that the first one learned, too, and its interval of 95 %, by resampling tasks.
    """
    before, tasks = returns_of(alone, num_tasks, trained=False)
    own, _ = returns_of(alone, tasks)
    name = load_config(alone / CONFIG).env_name
    parts: list[dict[str, Any]] = [{"scale": scale} for scale in _SCALES] if name == _ID else [{"family": name}]
    for part in parts:
        theirs, _ = returns_of(mixed, [{**task, **part} for task in tasks])
        theirs = theirs / part.get("scale", 1.0)
        last = np.stack([each[:, -1] for each in (theirs, own, before)])
        drawn = last[:, np.random.default_rng(0).integers(len(tasks), size=(2000, len(tasks)))].mean(2)
        shares = (drawn[0] - drawn[2]) / (drawn[1] - drawn[2])
        share = (last[0] - last[2]).mean() / (last[1] - last[2]).mean()
        low, high = np.quantile(shares, (0.025, 0.975))
        means = "  ".join(
            f"{name} {' -> '.join(f'{mean:.2f}' for mean in each.mean(0))}"
            for name, each in (("untrained", before), ("alone", own), ("in the mixture", theirs))
        )
        print(f"{next(iter(part.values()))!s:<24} {means}  share {share:.2f} [{low:.2f}, {high:.2f}]", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mixed", type=Path, help="folder of a run on several scales or families")
    parser.add_argument("alone", type=Path, nargs="+", help="folders of runs on scale 1, or on each family")
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks of each part (default: 200)")
    options = parser.parse_args(arguments)
    for alone in options.alone:
        compare(options.mixed, alone, options.tasks)


if __name__ == "__main__":
    main()
