"""`MixtureVectorEnv`: slots of several families in one environment; every task carries the name of its family."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Unpack

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from maml_rl.arguments import check_positive
from maml_rl.arrays import Floats, Mask
from maml_rl.envs.family import BatchedFamily, FamilyOptions, one_slot, with_masks
from maml_rl.envs.meta_env import Task, ValueRanges
from maml_rl.envs.registration import FAMILIES, find_spec
from maml_rl.envs.tasks import TaskArrays, apportion, for_each_task, parse_task, require_one_each, stack_tasks
from maml_rl.errors import TaskError
from maml_rl.seeding import SlotStreams
from maml_rl.spaces import PaddedBox, is_image, write_flat

HALF_CHEETAHS = ("HalfCheetahVel-v5", "HalfCheetahDir-v5", "HalfCheetahRandParams-v5")
# Bounds of padded actions in which families differ, which every family's own range is mapped to.
_UNIT = 1.0


class MixtureVectorEnv(BatchedFamily):
    """Slots of several families: `reset_task` makes a slot an environment of the family that its task names.

    Families of equal spaces keep them, so that only rewards and transitions tell them apart. Otherwise observations are
    vectors: the family's own, flattened and padded with zeros, then as many numbers that are 1 where an entry is real
    and 0 where it is padding. Actions are then those of the largest family. Entries of a Box whose range differs from
    family to family are in [-1, 1], and mapped to a family's own range. A family with fewer entries ignores the further
    ones; the last numbers of an observation then say, in the same way, which entries of an action are real, and
    policies of this package leave out the others (see `PaddedBox`). A family with fewer discrete actions takes the
    remainder.

    A batch of tasks has of every family as many as its weight says, up to rounding, in random order.

    Args:
        num_envs: number of slots. Each has room for a state of every family.
        families: ids of this package's families; or a mapping of each to its weight.
        arguments: keyword arguments of the families, by id; `max_episode_steps` is a family's own time limit.
        engine: of the physics.
        num_threads: of the physics.
        **options: see `BatchedFamily`; `max_episode_steps` None is the time limit of each family, and the task is
            `{"family": id}` with the entries of that family's task.
    """

    task_description = "family: its id; and the entries of a task of that family"

    def __init__(
        self,
        num_envs: int = 1,
        *,
        families: Sequence[str] | Mapping[str, float] = HALF_CHEETAHS,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
        engine: str = "auto",
        num_threads: int = 1,
        **options: Unpack[FamilyOptions],
    ) -> None:
        weights = dict(families) if isinstance(families, Mapping) else dict.fromkeys(families, 1.0)
        if isinstance(families, str) or not all(isinstance(name, str) for name in weights):
            raise ValueError(f"families must be ids, or a mapping of each to its weight, got {families!r}")
        if len(weights) < len(families):
            twice = next(name for name in weights if list(families).count(name) > 1)
            raise ValueError(f"{twice} is named twice; name each family once, with its weight: {{{twice}: 2.0, ...}}")
        if len(weights) < 2:
            raise ValueError(f"a mixture has at least two families, got {list(weights)}")
        for name in arguments or {}:
            if name not in weights:
                raise ValueError(f"arguments of {name!r}, which is not among the families {', '.join(weights)}")
        shares = np.array([check_positive(f"the weight of {name}", weight) for name, weight in weights.items()])
        self.weights: Floats = shares / shares.sum()
        physics, limit = {"engine": engine, "num_threads": num_threads}, options.pop("max_episode_steps", None)
        self.families = {
            name: _make_family(name, num_envs, (arguments or {}).get(name, {}), limit, physics) for name in weights
        }
        members = list(self.families.values())
        self._limits = [member._time_limit for member in members]
        longest = [member.max_episode_steps for member in members]
        self._padding = _Padding.of(self.families)
        self.recorded_infos = dict(
            set.intersection(*(set(member.recorded_infos.items()) for member in members))  # what all of them have
        )
        self.value_ranges = _common_ranges(members)
        # The family of each slot, as a number.
        self._number = np.zeros(num_envs, np.int64)
        self._has_entry: dict[str, Mask] = {}
        self._has_term: dict[str, Mask] = {}
        self._seconds = np.zeros(1)
        own = self._padding
        super().__init__(
            num_envs,
            members[0].single_observation_space if own is None else own.observation_space,
            members[0].single_action_space if own is None else own.action_space,
            {},
            **options,
        )
        self.max_episode_steps = None if None in longest else max(length for length in longest if length is not None)

    def end_after(self, steps: int) -> None:
        super().end_after(steps)
        self._limits = [steps if limit is None else min(limit, steps) for limit in self._limits]

    @property
    def physics_seconds(self) -> Floats:
        """(1,) seconds that the physics of all families took."""
        return self._seconds

    @physics_seconds.setter
    def physics_seconds(self, seconds: Floats) -> None:
        self._seconds = seconds
        for family in self.families.values():
            family.physics_seconds = seconds

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        return self._draw(random, num_tasks, evaluation=False)

    def draw_test_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        return self._draw(random, num_tasks, evaluation=True)

    def _draw(self, random: np.random.Generator, num_tasks: int, *, evaluation: bool) -> list[Task]:
        counts = apportion(self.weights * num_tasks, random)
        tasks = []
        for (name, family), count in zip(self.families.items(), counts.tolist(), strict=True):
            draw = family.draw_test_tasks if evaluation else family.draw_tasks
            tasks += [{"family": name, **task} for task in draw(random, count)]
        return [tasks[index] for index in random.permutation(num_tasks)]

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Give slot i the task `tasks[i]`: from the next step on, or the next reset if the family is another."""
        tasks = list(tasks)
        require_one_each(tasks, self.num_envs)
        numbers, parsed = zip(*for_each_task(tasks, self._parse), strict=True)
        self._number = np.array(numbers)
        self.tasks, self._has_entry = {"family": np.array([task["family"] for task in tasks], object)}, {}
        for number, family in enumerate(self.families.values()):
            mine = self._number == number
            if not mine.any():
                continue
            # The other slots have any task of the family, and are never stepped.
            filler = parsed[int(mine.argmax())]
            rows = [task if here else filler for task, here in zip(parsed, mine, strict=True)]
            family.take_tasks(stack_tasks(rows, family.entries))
            _merge(self.tasks, self._has_entry, family.tasks, mine)
        limits = np.array([np.iinfo(np.int64).max if limit is None else limit for limit in self._limits])
        self._time_limit = limits[self._number]  # type: ignore[assignment]

    def _parse(self, task: Task) -> tuple[int, TaskArrays]:
        """Return the number of a task's family, and the entries of the task there."""
        name = task.get("family") if isinstance(task, Mapping) else None
        if not isinstance(name, str) or name not in self.families:
            raise TaskError(f"the entry 'family' of a task must be one of {', '.join(self.families)}, got {task!r}")
        own = {entry: value for entry, value in task.items() if entry != "family"}
        return list(self.families).index(name), parse_task(own, self.families[name].entries)

    def _reset_slots(self, mask: Mask | None, streams: SlotStreams) -> None:
        self._truncated = False if mask is None else self._truncated & ~mask
        for family, mine in self._parts(mask):
            family._reset_slots(mine, streams)

    def _step_slots(self, actions: NDArray[Any], active: Mask | None, streams: SlotStreams) -> tuple[Floats, Mask]:
        rewards, (terminated, truncated) = np.zeros(self.num_envs), np.zeros((2, self.num_envs), np.bool_)
        self._reward_terms, self._has_term = {}, {}
        for family, mine in self._parts(active):
            where = slice(None) if mine is None else mine
            own = actions if self._padding is None else self._padding.own_actions(actions, family)
            if mine is not None:
                own = np.where(mine.reshape(-1, *(1,) * (own.ndim - 1)), own, np.zeros_like(own))
            got, ended = family._step_slots(own, mine, streams)
            rewards[where] = got[where]
            terminated[where] = ended if isinstance(ended, bool) else ended[where]
            if family._truncated is not False:
                truncated[where] = family._truncated[where]
            _merge(self._reward_terms, self._has_term, family._reward_terms, mine)
        if truncated.any():
            self._truncated = self._truncated | truncated
        return rewards, terminated

    def _write_observations(self, out: NDArray[Any]) -> None:
        for family, mine in self._parts(None):
            where = slice(None) if mine is None else mine
            family._write_observations(family.buffers.observations)
            own = family.buffers.observations[where]
            if self._padding is None:
                out[where] = own
            else:
                out[where] = self._padding.padded(own, family)

    def _describe(self, stepped: Mask, told: Mask) -> dict[str, Any]:
        terms = with_masks(self._reward_terms, {name: has & stepped for name, has in self._has_term.items()})
        tasks = with_masks(self.tasks, {"family": told} | {name: has & told for name, has in self._has_entry.items()})
        return {**(terms if stepped.any() else {}), "task": tasks, "_task": told.copy()}

    def _parts(self, mask: Mask | None) -> list[tuple[BatchedFamily, Mask | None]]:
        """Return the families that have slots in the mask (None: all slots), each with its own (None: all)."""
        found: list[tuple[BatchedFamily, Mask | None]] = []
        for number, family in enumerate(self.families.values()):
            mine = self._number == number if mask is None else (self._number == number) & mask
            if mine.all():
                return [(family, None)]
            if mine.any():
                found.append((family, mine))
        return found

    def close_extras(self, **kwargs: Any) -> None:
        """Close every family."""
        for family in getattr(self, "families", {}).values():
            family.close()


MixtureEnv = one_slot(MixtureVectorEnv)


def _make_family(
    name: str,
    num_envs: int,
    arguments: Mapping[str, Any],
    max_episode_steps: int | None,
    physics: Mapping[str, Any],
) -> BatchedFamily:
    # A name with a module is not looked up, which would import the module.
    spec = None if ":" in name else FAMILIES.get(find_spec(name).id)
    if spec is None:
        raise ValueError(
            f"a mixture has families of this package, and {name!r} is another environment; train on it alone, or write "
            "it as a BatchedFamily"
        )
    options: dict[str, Any] = {**spec.kwargs, **(physics if spec.has_physics else {}), **arguments}
    if max_episode_steps is not None and "max_episode_steps" in arguments:
        raise ValueError(
            f"two time limits of {name}: {max_episode_steps} of the mixture, and "
            f"{arguments['max_episode_steps']} of its own arguments; keep one"
        )
    if spec.max_episode_steps is not None:
        options.setdefault("max_episode_steps", max_episode_steps or spec.max_episode_steps)
    made = getattr(import_module(spec.module), f"{spec.name}VectorEnv")(num_envs, **options)
    assert isinstance(made, BatchedFamily)
    made.autoreset_mode = AutoresetMode.DISABLED
    return made


def _merge(
    into: dict[str, NDArray[Any]],
    has: dict[str, Mask],
    values: Mapping[str, NDArray[Any]],
    mine: Mask | None,
) -> None:
    """Write the rows `mine` (None: all) of arrays by name, and note in `has` who has them.

    Families may have entries of one name and different shapes; the later ones are then left out.
    """
    for name, array in values.items():
        everyone = np.ones(len(array), np.bool_) if mine is None else mine
        if name not in into or into[name].shape[1:] != array.shape[1:]:
            into[name], has[name] = np.zeros_like(array), np.zeros(len(array), np.bool_)
        into[name][everyone] = array[everyone]
        has[name] |= everyone


def _common_ranges(members: Sequence[BatchedFamily]) -> ValueRanges:
    """Return the ranges that hold for all families."""
    names = set.intersection(*(set(member.value_ranges) for member in members))
    return {
        name: (
            min(member.value_ranges[name][0] for member in members),
            max(member.value_ranges[name][1] for member in members),
        )
        for name in names
    }


class _Padding:
    """Observations and actions of families whose spaces differ, as those of one space."""

    def __init__(self, families: Mapping[str, BatchedFamily]) -> None:
        members = list(families.values())
        for name, family in families.items():
            if is_image(family.single_observation_space):
                raise TypeError(f"images, as of {name}, cannot be padded; mix families whose observations are vectors")
        flat = [batch_space(spaces.flatten_space(member.single_observation_space), 1) for member in members]
        self._size = max(space.shape[1] for space in flat if space.shape is not None)
        actions = [member.single_action_space for member in members]
        # How many numbers say which entries of an action are real.
        self._entries = 0
        if all(isinstance(space, spaces.Discrete) for space in actions):
            self.action_space: spaces.Space[Any] = spaces.Discrete(
                max(int(space.n) for space in actions if isinstance(space, spaces.Discrete))
            )
        elif all(isinstance(space, spaces.Box) and space.is_bounded() for space in actions):
            sizes = {spaces.flatdim(space) for space in actions}
            low, high = np.array([_common_range(actions, entry) for entry in range(max(sizes))], np.float32).T
            self.action_space = spaces.Box(low, high)
            if len(sizes) > 1:
                self._entries = max(sizes)
                self.action_space = PaddedBox(low, high, slice(2 * self._size, 2 * self._size + self._entries))
        else:
            listed = ", ".join(f"{space} of {name}" for space, name in zip(actions, families, strict=True))
            raise TypeError(
                f"a mixture has discrete actions only, or those of bounded Boxes; these differ in kind: {listed}"
            )
        unbounded = np.full(2 * self._size, np.inf, np.float32)
        of_actions = np.ones(self._entries, np.float32)
        self.observation_space = spaces.Box(np.append(-unbounded, 0.0 * of_actions), np.append(unbounded, of_actions))

    @classmethod
    def of(cls, families: Mapping[str, BatchedFamily]) -> "_Padding | None":
        """Return the padding; None where all families have the same spaces."""
        first, *others = families.values()
        if all(
            other.single_observation_space == first.single_observation_space
            and other.single_action_space == first.single_action_space
            for other in others
        ):
            return None
        return cls(families)

    def padded(self, observations: NDArray[Any], family: BatchedFamily) -> NDArray[np.float32]:
        """Return observations (n, *obs) of a family as vectors: padded, which entries are real, and which of actions.

        The last are there only where families have different numbers of them.
        """
        size = spaces.flatdim(family.single_observation_space)
        rows = np.zeros((len(observations), 2 * self._size + self._entries), np.float32)
        write_flat(family.single_observation_space, observations, rows[:, :size])
        rows[:, self._size : self._size + size] = 1.0
        if self._entries:
            rows[:, 2 * self._size :][:, : spaces.flatdim(family.single_action_space)] = 1.0
        return rows

    def own_actions(self, actions: NDArray[Any], family: BatchedFamily) -> NDArray[Any]:
        """Return actions (N, *act) as actions of a family: mapped to its range, where that is not the common one."""
        space = family.single_action_space
        if isinstance(space, spaces.Discrete):
            remainder: NDArray[Any] = actions % space.n
            return remainder
        assert isinstance(space, spaces.Box)
        assert isinstance(self.action_space, spaces.Box)
        size = spaces.flatdim(space)
        own = actions[:, :size].reshape(-1, *space.shape)
        low, high = (bound[:size].reshape(space.shape) for bound in (self.action_space.low, self.action_space.high))
        mapped = space.low + (own + _UNIT) * (space.high - space.low) / (2.0 * _UNIT)
        return np.where((space.low == low) & (space.high == high), own, mapped).astype(actions.dtype)


def _common_range(actions: Sequence[spaces.Space[Any]], entry: int) -> tuple[float, float]:
    """Return the range of an entry of actions in all families that have it; [-1, 1] where it differs."""
    ranges = {
        (float(space.low.flat[entry]), float(space.high.flat[entry]))
        for space in actions
        if isinstance(space, spaces.Box) and entry < space.low.size
    }
    return ranges.pop() if len(ranges) == 1 else (-_UNIT, _UNIT)
