"""Meta-World: a robot arm that must manipulate objects; training tasks and test tasks differ.

The simulation, rewards and goals are those of the package `metaworld`, which the extra `metaworld` installs.

Sources: Yu et al. 2020, Meta-World, https://arxiv.org/abs/1910.10897; McLean et al. 2025, Meta-World+,
https://arxiv.org/abs/2505.11289
"""

from __future__ import annotations

from collections import OrderedDict
from time import perf_counter
from typing import Any, Unpack

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.envs.family import BatchedFamily, FamilyOptions, one_slot
from maml_rl.envs.meta_env import RecordedInfos, Task, ValueRanges
from maml_rl.envs.metaworld.arm import Arm, Floats, Split, State, benchmark_environments
from maml_rl.envs.task_entries import TaskArrays, TaskEntry
from maml_rl.errors import TaskError
from maml_rl.seeding import SlotStreams, check_seed

# Goals of each environment of a benchmark, as in the published protocol.
_NUM_GOALS: dict[Split, int] = {"train": 50, "test": 40}
_OBSERVATION_SIZE = 39
# No environment has more numbers in a task.
_MOST_NUMBERS = 6
_NUMBERS = ("grasp_success", "grasp_reward", "near_object", "in_place_reward", "obj_to_target", "unscaled_reward")
_STARTS_KEPT = 1_024


class MetaWorldVectorEnv(BatchedFamily):
    """Slots of a benchmark of Meta-World: ML1 of one environment, or ML10, ML25 or ML45.

    The goal is not in the observation (39,): hand, gripper and objects, now and a step before, and zeros for the goal.
    Reward, observation and start state are bit-identical to Meta-World's; all episodes of a task start from the same
    state. Episodes never terminate. `success` in the infos is 1 from the step on in which an episode has solved its
    task.

    Args:
        num_envs: number of slots. Each has a Meta-World environment of its own; as many more may be kept for later
            tasks.
        benchmark: "ML1-<environment>", as "ML1-reach-v3", "ML10", "ML25" or "ML45".
        benchmark_seed: of the goals, which are those of `metaworld.ML1(environment, seed=benchmark_seed)`, or of
            `metaworld.ML10(seed=benchmark_seed)` and so on: 50 of each environment for training, and the first 40 of
            its test goals for tests. Only an evaluation draws test tasks.
        **options: see `BatchedFamily`; the task is `{"rand_vec": (3,) or (6,)}`, the positions of goal and object;
            where the benchmark has several environments also `"env_name"`, and `rand_vec` always has 6 numbers, padded
            with zeros.
    """

    metadata = {**BatchedFamily.metadata, "render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012
    recorded_infos: RecordedInfos = {"success": "episode"}  # noqa: RUF012 - read-only by its type
    value_ranges: ValueRanges = {"reward": (0.0, 10.0)}  # noqa: RUF012 - read-only by its type
    default_steps = 500
    task_description = (
        "rand_vec (3,) or (6,): where goal and object are; ML10, ML25, ML45 also env_name. Needs the extra metaworld"
    )

    def __init__(
        self, num_envs: int = 1, *, benchmark: str, benchmark_seed: int = 0, **options: Unpack[FamilyOptions]
    ) -> None:
        self._environments, self._benchmark_seed = benchmark_environments(benchmark), check_seed(benchmark_seed)
        choices = tuple(dict.fromkeys(name for names in self._environments.values() for name in names))
        self._arms: list[Arm | None] = []
        self._idle: list[Arm] = []
        self._starts: OrderedDict[tuple[str, bytes], State] = OrderedDict()
        first = self._take(choices[0])
        size = first.low.size if len(choices) == 1 else _MOST_NUMBERS
        entries = {"rand_vec": TaskEntry((size,))}
        if len(choices) > 1:
            entries = {"env_name": TaskEntry(choices=choices), **entries}
        self._release(first)
        super().__init__(
            num_envs,
            spaces.Box(-np.inf, np.inf, (_OBSERVATION_SIZE,), np.float32),
            spaces.Box(-1.0, 1.0, (4,), np.float32),
            entries,
            **options,
        )
        self._arms = [None] * num_envs
        # Slots whose arm is neither at the start state of their task nor in an episode that began there.
        self._moved = np.ones(num_envs, np.bool_)
        self._observations = np.zeros((num_envs, _OBSERVATION_SIZE))
        self._succeeded = np.zeros(num_envs)

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw training tasks: equally many of each environment, and its goals without repetition.

        Where `num_tasks` is not a multiple of the number of environments, randomly chosen ones have one task more.
        """
        return self._draw("train", random, num_tasks)

    def draw_test_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        return self._draw("test", random, num_tasks)

    def _draw(self, split: Split, random: np.random.Generator, num_tasks: int) -> list[Task]:
        names = self._environments[split]
        rounds, rest = divmod(num_tasks, len(names))
        chosen = [*range(len(names))] * rounds + sorted(random.permutation(len(names))[:rest].tolist())
        orders = [random.permutation(_NUM_GOALS[split]) for _ in names]
        return [
            self._task(split, names[index], orders[index][number // len(names) % _NUM_GOALS[split]])
            for number, index in enumerate(chosen)
        ]

    def sample_default_task(self) -> Task:
        return self._task("train", self._environments["train"][0], 0)

    def _task(self, split: Split, name: str, number: int) -> Task:
        goal = self._goals(split, name)[number]
        vector = np.zeros(self.entries["rand_vec"].shape)
        vector[: len(goal)] = goal
        return {"env_name": name, "rand_vec": vector} if "env_name" in self.entries else {"rand_vec": vector}

    def _goals(self, split: Split, name: str) -> Floats:
        """Return the goals of an environment, (50, 3 or 6).

        Meta-World draws those of all environments of a split one after the other, from one generator.
        """
        names = self._environments[split]
        # The test goals of ML1 have a seed of their own; the other benchmarks have other environments for tests.
        seed = self._benchmark_seed + (split == "test" and "env_name" not in self.entries)
        drawn = _GOALS.setdefault((names, seed), [])
        for other in names[len(drawn) : names.index(name) + 1]:
            random = np.random.RandomState(seed)
            if drawn:
                random.set_state(drawn[-1][1])
            arm = self._take(other)
            drawn.append((arm.draw_goals(random, max(_NUM_GOALS.values())), random.get_state()))
            self._release(arm)
        return drawn[names.index(name)][0]

    def take_tasks(self, tasks: TaskArrays) -> None:
        """Give every slot its task; one whose task changes continues from the start state of the new one."""
        names = tasks.get("env_name", self._environments["train"] * self.num_envs)
        keys = [(str(name), vector.tobytes()) for name, vector in zip(names, tasks["rand_vec"], strict=True)]
        for slot, key in enumerate(keys):
            if key not in keys[:slot]:
                try:
                    self._start(key)
                except TaskError as error:
                    raise TaskError.of_slot(slot, error) from None
        before = getattr(self, "_keys", None)
        self.tasks, self._keys = tasks, keys
        if before is not None:
            self._moved |= [key != old for key, old in zip(keys, before, strict=True)]

    def _start(self, key: tuple[str, bytes]) -> State:
        """Return the start state of a task's episodes."""
        state = self._starts.pop(key, None)
        if state is None:
            arm = self._take(key[0])
            try:
                state = arm.start(np.frombuffer(key[1]))
            finally:
                self._release(arm)
        self._starts[key] = state
        if len(self._starts) > _STARTS_KEPT:
            self._starts.popitem(last=False)
        return state

    def _take(self, name: str) -> Arm:
        """Return an arm of an environment that no slot uses."""
        for arm in self._idle:
            if arm.name == name:
                self._idle.remove(arm)
                return arm
        return Arm(name)

    def _release(self, arm: Arm) -> None:
        """Keep an arm for later tasks; if more are kept than there are slots, close the oldest."""
        self._idle.append(arm)
        if len(self._idle) > max(1, len(self._arms)):
            self._idle.pop(0).close()

    def _place(self, slot: int) -> None:
        """Load the start state of a slot's task into its arm."""
        name, arm = self._keys[slot][0], self._arms[slot]
        state = self._start(self._keys[slot])
        if arm is None or arm.name != name:
            if arm is not None:
                self._release(arm)
            arm = self._arms[slot] = self._take(name)
        arm.load(state)
        self._observations[slot] = state.observation
        self._moved[slot] = False

    def _reset_slots(self, mask: NDArray[np.bool_] | None, streams: SlotStreams) -> None:
        start = perf_counter()
        for slot in range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist():
            self._place(slot)
            self._succeeded[slot] = 0.0
        self.physics_seconds[0] += perf_counter() - start

    def _step_slots(
        self, actions: NDArray[Any], active: NDArray[np.bool_] | None, streams: SlotStreams
    ) -> tuple[Floats, bool]:
        start = perf_counter()
        rewards = np.zeros(self.num_envs)
        terms = {name: np.zeros(self.num_envs) for name in _NUMBERS}
        actions = np.minimum(np.maximum(actions, -1.0), 1.0).astype(np.float32)
        for slot in range(self.num_envs) if active is None else np.flatnonzero(active).tolist():
            if self._moved[slot]:
                self._place(slot)
            arm = self._arms[slot]
            assert arm is not None
            self._observations[slot], rewards[slot], _, _, info = arm.env.step(actions[slot])
            for name, values in terms.items():
                values[slot] = info[name]
            self._succeeded[slot] = max(self._succeeded[slot], info["success"])
        self._reward_terms = {"reward_task": rewards, "success": self._succeeded.copy(), **terms}
        self.physics_seconds[0] += perf_counter() - start
        return rewards, False

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:] = self._observations

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        if self._moved[slot]:
            self._place(slot)
        arm = self._arms[slot]
        assert arm is not None
        return arm.draw()

    def close_extras(self, **kwargs: Any) -> None:
        """Free the environments; a later reset creates new ones."""
        for arm in (*getattr(self, "_arms", ()), *getattr(self, "_idle", ())):
            if arm is not None:
                arm.close()
        self._arms, self._idle = [None] * len(getattr(self, "_arms", ())), []
        self._moved = np.ones(len(self._arms), np.bool_)

    def __getstate__(self) -> dict[str, Any]:
        saved = [
            None if arm is None else (arm.name, arm.save(observation))
            for arm, observation in zip(self._arms, self._observations, strict=True)
        ]
        return {**self.__dict__, "_arms": saved, "_idle": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._arms = [None] * self.num_envs
        for slot, saved in enumerate(state["_arms"]):
            if saved is not None:
                arm = self._arms[slot] = Arm(saved[0])
                arm.load(saved[1])


MetaWorldEnv = one_slot(MetaWorldVectorEnv)


# By the environments of a split, and seed: the goals of the first ones, and the generator's state after them.
_GOALS: dict[tuple[tuple[str, ...], int], list[tuple[Floats, Any]]] = {}
