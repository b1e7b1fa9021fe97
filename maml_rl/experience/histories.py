"""Learning histories: all episodes of learners of single tasks, from the first to the last, as training data.

A learner draws sequences of steps, as a policy with a memory would have seen them. The draws depend only on the
histories and on the generator that is passed in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from maml_rl.arguments import check_count
from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.make_env import make_vector_env
from maml_rl.envs.meta_env import Task
from maml_rl.envs.observing import LastStepParts
from maml_rl.envs.tasks import family_of
from maml_rl.episode.steps import INFO, Steps
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError
from maml_rl.experience.replay import reward_scales
from maml_rl.runs.trust import check_family
from maml_rl.spaces import own_actions, own_space, read_flat, write_flat

# If observations repeat, each different one is kept once, with an index for each step.
_MOST_DIFFERENT = 2**16


class _Subsampled(NamedTuple):
    """Histories with every k-th episode, in k ways: from the first on, from the second on, ...

    Attributes:
        order: (E,) the episodes, one history after the other, k times each.
        bounds: (E + 1,) at which step of the subsampled steps each of these episodes begins.
        starts: (K + 1,) at which step each of the K parts begins.
    """

    order: NDArray[np.int64]
    bounds: NDArray[np.int64]
    starts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EnvKind:
    """The environment of histories.

    Attributes:
        observation_space: of one environment, without the last step; None where it is not known.
        action_space: of one environment.
        env_id: of the family; empty for one that is not registered.
        env_kwargs: of its environments.
    """

    observation_space: gymnasium.Space[Any] | None
    action_space: gymnasium.Space[Any]
    env_id: str = ""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)


# The episodes of M tasks, as arrays by name; see `block_of`.
Block: TypeAlias = dict[str, NDArray[Any]]


def block_of(episodes: TaskEpisodes) -> Block:
    """Return episodes (M, T, B, ...) without padding, task after task, and in each its B episodes one after the other.

    Observations, actions, rewards and infos of steps are those of all S steps, (S, ...); lengths, terminated, truncated
    and infos of episodes (M, B); final_observations (M * B, ...).
    """
    real = episodes.mask.mT.bool()

    def of_steps(grid: Tensor) -> Tensor:
        return grid.transpose(1, 2)[real]

    block = {name: getattr(episodes, name) for name in ("lengths", "terminated", "truncated")}
    block |= {name: of_steps(getattr(episodes, name)) for name in ("observations", "actions", "rewards")}
    block |= {"final_observations": episodes.final_observations.flatten(0, 1)}
    block |= {f"{INFO}{name}": of_steps(info) if info.dim() == 3 else info for name, info in episodes.infos.items()}
    return {name: tensor.detach().cpu().numpy() for name, tensor in block.items()}


class Histories:
    """Learning histories of tasks of one family, in memory.

    Arrays are those of all E episodes one after the other, history after history, S steps in all.

    Args:
        tasks: H, of each history.
        lengths: for each history the steps of each of its episodes.
        observations: (S, *observation shape), seen before each action; or (S,) integers, which of `distinct`.
        actions: (S, *action shape); those of a Box are clipped to its bounds, as the environment got them.
        rewards: (S,).
        env: the environments.
        terminated: (E,) whether an episode ended in a terminal state; None if all were cut off.
        final_observations: (E, *observation shape), seen after the last action of each episode; or integers, likewise.
            None if they are not known.
        distinct: (D, *observation shape), the different observations, where the others are integers.
        infos: numbers from the environments' infos by name, (S,) of every step or (E,) of every episode, kept as
            float32; NaN where one is not known.

    Raises:
        ValueError: If the shapes do not fit each other, or there is no step.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        lengths: Sequence[ArrayLike],
        observations: ArrayLike,
        actions: ArrayLike,
        rewards: ArrayLike,
        env: EnvKind,
        *,
        terminated: ArrayLike | None = None,
        final_observations: ArrayLike | None = None,
        distinct: NDArray[Any] | None = None,
        infos: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        if env.observation_space is None:
            raise ValueError("histories need the observation space of their environments")
        self.tasks, self.env, self.observation_space = list(tasks), env, env.observation_space
        of_histories = [np.asarray(of_history, np.int64) for of_history in lengths]
        self.num_episodes, self.lengths = (
            np.array([len(of_history) for of_history in of_histories]),
            np.concatenate([np.zeros(0, np.int64), *of_histories]),
        )
        self.rewards, self.actions = np.asarray(rewards, np.float32), np.asarray(actions, env.action_space.dtype)
        if isinstance(env.action_space, spaces.Box):
            self.actions = own_actions(env.action_space, self.actions)
        self._seen, self._distinct = np.asarray(observations), distinct
        self._final = None if final_observations is None else np.asarray(final_observations)
        self.terminated = np.zeros(len(self.lengths), np.bool_)
        if terminated is not None:
            self.terminated = np.asarray(terminated, np.bool_)
        self.infos = {name: np.asarray(values, np.float32) for name, values in (infos or {}).items()}
        self._check_shapes()
        self._subsampled = lru_cache(maxsize=4)(self._subsample)
        self._family: BatchedFamily | None = None
        self._starts = np.cumsum(self.lengths) - self.lengths

    def _check_shapes(self) -> None:
        num_steps, num_episodes = int(self.lengths.sum()), len(self.lengths)
        if len(self.num_episodes) != len(self.tasks):
            raise ValueError(f"expected the lengths of {len(self.tasks)} histories, got {len(self.num_episodes)}")
        if not num_steps or self.lengths.min() < 1 or self.num_episodes.min() < 1:
            raise ValueError("expected at least one history, one episode in each and one step in every episode")
        of_observation = () if self._distinct is not None else self.observation_space.shape or ()
        expected = {
            "observations": (self._seen, (num_steps, *of_observation)),
            "actions": (self.actions, (num_steps, *(self.env.action_space.shape or ()))),
            "rewards": (self.rewards, (num_steps,)),
            "terminated": (self.terminated, (num_episodes,)),
        }
        if self._final is not None:
            expected["final_observations"] = self._final, (num_episodes, *of_observation)
        for name, (array, shape) in expected.items():
            if array.shape != shape:
                raise ValueError(f"{name} must have the shape {shape}, got {array.shape}")
        for name, array in self.infos.items():
            if array.shape not in ((num_steps,), (num_episodes,)):
                raise ValueError(
                    f"the info {name!r} must have the shape {(num_steps,)} or {(num_episodes,)}, got {array.shape}"
                )

    @classmethod
    def of(cls, iterations: Sequence[TaskEpisodes], env: EnvKind) -> Self:
        """Return the histories of learners whose episodes were sampled together, iteration by iteration.

        Args:
            iterations: (M, T, B, ...) of the same M tasks each, in the order of time.
            env: the environments.
        """
        return cls.of_blocks([block_of(episodes) for episodes in iterations], iterations[0].tasks, env)

    @classmethod
    def of_blocks(
        cls, blocks: Sequence[Block], tasks: Sequence[Task], env: EnvKind, distinct: NDArray[Any] | None = None
    ) -> Self:
        """Return the histories of M tasks whose iterations are blocks, in the order of time; see `block_of`."""
        grids = [block["lengths"] for block in blocks]
        lengths = np.concatenate([grid.ravel() for grid in grids]).astype(np.int64)
        # Of the episodes in the order of time, those of each task, and the steps of these.
        firsts = np.cumsum([0, *(grid.size for grid in grids)])
        numbers = [first + np.arange(grid.size).reshape(grid.shape) for first, grid in zip(firsts, grids, strict=False)]
        order = np.concatenate(numbers, 1)
        sizes = lengths[order.ravel()]
        starts = (np.cumsum(lengths) - lengths)[order.ravel()]
        steps = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())

        def joined(name: str) -> NDArray[Any]:
            parts = [block[name] for block in blocks]
            of_steps = name in ("observations", "actions", "rewards") or (name.startswith(INFO) and parts[0].ndim == 1)
            is_grid = not of_steps and name != "final_observations"
            whole = np.concatenate([part.ravel() if is_grid else part for part in parts])
            rows: NDArray[Any] = whole[steps if of_steps else order.ravel()]
            return rows

        return cls(
            tasks,
            [*lengths[order]],
            joined("observations"),
            joined("actions"),
            joined("rewards"),
            env,
            terminated=joined("terminated"),
            final_observations=joined("final_observations"),
            distinct=distinct,
            infos={name.removeprefix(INFO): joined(name) for name in blocks[0] if name.startswith(INFO)},
        )

    def __len__(self) -> int:
        return len(self.tasks)

    def __repr__(self) -> str:
        name = self.env.env_id or "a family of one's own"
        return f"{len(self):,} Histories({name}, {len(self.lengths):,} episodes, {self.num_steps:,} steps)"

    @property
    def num_steps(self) -> int:
        """S, steps of all histories."""
        return len(self.rewards)

    def returns(self) -> list[NDArray[np.float64]]:
        """Return the undiscounted return of every episode, for each history."""
        of_episodes = np.add.reduceat(self.rewards.astype(np.float64), self._starts)
        return np.split(of_episodes, np.cumsum(self.num_episodes)[:-1])

    @cached_property
    def _scales(self) -> NDArray[np.float32]:
        """(N,) root mean square of the rewards of each history's family."""
        firsts = np.cumsum(self.num_episodes) - self.num_episodes
        squares = np.add.reduceat(self.rewards.astype(np.float64) ** 2, self._starts[firsts])
        families = [family_of(task) for task in self.tasks]
        return reward_scales(families, squares, np.add.reduceat(self.lengths, firsts))

    def sequences(
        self, rng: np.random.Generator, batch_size: int, length: int, *, keep: int = 1, normalize: bool = False
    ) -> Steps:
        """Draw sequences that begin anywhere in histories, uniformly over histories, with replacement.

        Args:
            rng: the source of randomness.
            batch_size: N.
            length: L, steps of a sequence.
            keep: leave out all except every keep-th episode, so that a sequence shows more progress; with which one to
                begin is drawn, too. Of a learner with B episodes in an iteration, `keep=B` takes one of each.
            normalize: divide rewards by their root mean square over all histories of the family that the task names.

        Returns:
            Steps (L, N), with observations as with `observe_last`, see `LastStepParts`: they show what comes before the
            first step of a sequence, too, and zeros before that of a history. What follows an episode is the first
            observation of the next one, and after a history its final observation; `mask` is 0 there if that is not
            known. `episodes` are counted in their history, and `tasks` are the numbers of histories.

        Raises:
            ValueError: If a number is not positive, or a history is shorter than `length`.

        Source: Laskin et al. 2022, section 4, https://arxiv.org/abs/2210.14215
        """
        check_count("batch_size", batch_size)
        subsampled = self._subsampled(check_count("keep", keep))
        room = np.diff(subsampled.starts) - check_count("length", length)
        if (room < 0).any():
            raise ValueError(
                f"a history with every {keep}th episode has {length + int(room.min())} steps, fewer than length="
                f"{length}; lower length or keep, or record longer histories"
            )
        histories = rng.integers(len(self), size=batch_size)
        chosen = histories * keep + rng.integers(keep, size=batch_size)
        firsts = subsampled.starts[chosen] + rng.integers(room[chosen] + 1)
        # One more than the steps, for what is shown after the last; where the history is over, its last step again.
        places = firsts + np.arange(length + 1)[:, None]
        over = places[-1] == subsampled.starts[chosen + 1]
        steps, episodes, ends = self._locate(subsampled, places - (places == subsampled.starts[chosen + 1]))
        # The step before; for the first step of a history the step itself, which is then set to zero.
        has_past = places > subsampled.starts[chosen]
        past, _, past_ends = self._locate(subsampled, places - has_past)
        seen = self._seen[steps]
        mask = np.ones((length, batch_size), np.float32)
        if self._final is None:
            mask[-1, over] = 0.0
        else:
            seen[-1, over] = self._final[episodes[-1, over]]
        parts = LastStepParts.of(self.observation_space, self.env.action_space)
        shown = np.zeros((places.size, parts.size), np.float32)
        seen = seen.reshape(places.size, *seen.shape[2:])
        seen = seen if self._distinct is None else self._distinct[seen]
        write_flat(self.observation_space, seen, shown[:, parts.observation])
        write_flat(self.env.action_space, self.actions[past.ravel()], shown[:, parts.last_action])
        shown[:, parts.last_reward] = self.rewards[past].reshape(-1, 1)
        shown[:, parts.last_termination] = past_ends.reshape(-1, 1)
        shown[~has_past.ravel(), parts.last_action.start :] = 0.0
        steps, episodes, ends = steps[:-1], episodes[:-1], ends[:-1]
        first_episodes = np.concatenate(([0], np.cumsum(self.num_episodes)))[histories]
        observations = torch.from_numpy(shown).unflatten(0, (length + 1, batch_size))
        rewards = self.rewards[steps] / self._scales[histories] if normalize else self.rewards[steps]
        return Steps(
            observations=observations[:-1],
            actions=torch.from_numpy(self.actions[steps]),
            rewards=torch.from_numpy(rewards),
            next_observations=observations[1:],
            terminations=torch.from_numpy(ends & self.terminated[episodes]),
            truncations=torch.from_numpy(ends & ~self.terminated[episodes]),
            mask=torch.from_numpy(mask),
            episodes=torch.from_numpy(episodes - first_episodes),
            tasks=torch.from_numpy(histories),
        )

    def optimal_actions(self, sequences: Steps) -> Tensor:
        """Return the best actions (L, N, *action shape) at every step of sequences that were drawn here.

        Raises:
            ValueError: If the family cannot compute them.

        Source: Lee et al. 2023, section 3, https://arxiv.org/abs/2306.14892
        """
        if self._family is None:
            of = self.env
            check_family(of.env_id or "none", of.env_kwargs, "the recording of these histories")
            env = make_vector_env(of.env_id, of.env_kwargs, len(self)).unwrapped if of.env_id else None
            if not isinstance(env, BatchedFamily) or type(env).optimal_actions is BatchedFamily.optimal_actions:
                raise ValueError(
                    f"{of.env_id or 'the family'} does not know its best actions, which are the targets; a family "
                    "that does has a method optimal_actions"
                )
            env.reset_task(self.tasks)
            self._family = env
        of_observation = LastStepParts.of(self.observation_space, self.env.action_space).observation
        seen = read_flat(self.observation_space, sequences.observations[..., of_observation].flatten(0, 1).numpy())
        # One slot for each history.
        slots = sequences.tasks.repeat(len(sequences.observations)).numpy()
        best = self._family.optimal_actions(seen, slots).astype(self.env.action_space.dtype)
        return torch.from_numpy(best.reshape(*sequences.rewards.shape, *best.shape[1:]))

    def check_fits(self, env: EnvKind) -> None:
        """Refuse, by a ConfigError in one line, to learn from these histories for environments of another kind.

        An observation space that is not known is not compared.
        """
        own = self.env
        pairs: dict[str, tuple[Any, Any]] = {
            "the family": (own.env_id, env.env_id),
            "the arguments": (own.env_kwargs, env.env_kwargs),
            "observations": (own.observation_space, env.observation_space),
            "actions": (own_space(own.action_space), own_space(env.action_space)),
        }
        for name, (mine, theirs) in pairs.items():
            # Data sets of others do not say their family.
            is_known = own.env_id or name in ("observations", "actions")
            if is_known and theirs is not None and mine != theirs:
                raise ConfigError(
                    f"these histories are of {name} {mine}, and the learner is for {theirs}; record histories of its "
                    "own environments with maml-rl record"
                )

    def _subsample(self, keep: int) -> _Subsampled:
        if (self.num_episodes < keep).any():
            raise ValueError(
                f"a history has {self.num_episodes.min()} episodes, of which keep={keep} leaves none; lower keep"
            )
        firsts = np.cumsum(self.num_episodes) - self.num_episodes
        subsampled = [
            np.arange(first + offset, first + count, keep)
            for first, count in zip(firsts, self.num_episodes, strict=True)
            for offset in range(keep)
        ]
        order = np.concatenate(subsampled)
        bounds = np.concatenate(([0], np.cumsum(self.lengths[order])))
        ends = np.cumsum([len(part) for part in subsampled])
        return _Subsampled(order, bounds, bounds[np.concatenate(([0], ends))])

    def _locate(
        self, subsampled: _Subsampled, places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return where subsampled steps are among all steps, their episodes, and whether they end these."""
        position = np.searchsorted(subsampled.bounds, places, side="right") - 1
        episodes, within = subsampled.order[position], places - subsampled.bounds[position]
        ends = subsampled.bounds[position + 1] == places + 1
        return self._starts[episodes] + within, episodes, ends


class Distinct:
    """Numbers repeated observations, such as those of grids, so that each is stored once."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        self._shape, self._dtype = space.shape or (), np.dtype(space.dtype)
        self._numbers: dict[bytes, int] = {}

    def encode(self, observations: NDArray[Any]) -> NDArray[np.int64] | None:
        """Return which observation each of (n, *shape) is; None as soon as there are too many different ones."""
        rows = np.ascontiguousarray(observations, self._dtype).reshape(len(observations), -1)
        as_bytes: list[Any] = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel().tolist()
        numbers = self._numbers
        indices = np.fromiter((numbers.setdefault(row, len(numbers)) for row in as_bytes), np.int64, len(rows))
        return None if len(numbers) > _MOST_DIFFERENT else indices

    def table(self) -> NDArray[Any]:
        """Return the different observations, (D, *shape)."""
        rows = np.frombuffer(b"".join(self._numbers), self._dtype)
        return rows.reshape(len(self._numbers), *self._shape)
