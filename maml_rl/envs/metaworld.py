"""Meta-World: a robot arm that must manipulate objects; training tasks and test tasks differ.

The simulation, rewards and goals are those of the package `metaworld`, which the extra `metaworld` installs. The whole
state of one of its environments can be saved and loaded here: no episode depends on earlier ones.

Sources: Yu et al. 2020, Meta-World, https://arxiv.org/abs/1910.10897; McLean et al. 2025, Meta-World+,
https://arxiv.org/abs/2505.11289
"""

from __future__ import annotations

import copy
import math
import re
import sys
from collections import OrderedDict
from functools import cache, cached_property
from importlib.metadata import requires
from time import perf_counter
from typing import Any, Literal, NamedTuple, Unpack

import mujoco
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from maml_rl.arrays import Floats, Mask
from maml_rl.envs.family import BatchedFamily, FamilyOptions, one_slot
from maml_rl.envs.meta_env import RecordedInfos, Task, ValueRanges
from maml_rl.envs.mujoco.rendering import Renderer
from maml_rl.envs.tasks import TaskArrays, TaskEntry
from maml_rl.errors import TaskError
from maml_rl.seeding import SlotStreams, check_seed

Split = Literal["train", "test"]


def benchmark_environments(benchmark: str) -> dict[Split, tuple[str, ...]]:
    """Return the names of the environments of a benchmark, by split."""
    known = import_environments()
    if benchmark.startswith("ML1-") and benchmark.removeprefix("ML1-") in known.ALL_V3_ENVIRONMENTS:
        name = (benchmark.removeprefix("ML1-"),)
        return {"train": name, "test": name}
    if benchmark not in ("ML10", "ML25", "ML45"):
        raise ValueError(
            f"there is no benchmark {benchmark!r}; expected ML10, ML25, ML45, or ML1-<environment> with one of "
            f"{', '.join(known.ALL_V3_ENVIRONMENTS)}"
        )
    classes = getattr(known, f"{benchmark}_V3")
    return {"train": tuple(classes["train"]), "test": tuple(classes["test"])}


def import_environments() -> Any:
    """Import the list of Meta-World's environments."""
    remedy = (
        "run pip install 'maml-rl[metaworld]' in a virtual environment of its own, without the extra fast, which needs "
        "another MuJoCo"
    )
    try:
        needed = [re.match(r"mujoco *== *([\w.]+)", line) for line in requires("metaworld") or ()]
        from metaworld import env_dict
    except ImportError as error:
        raise DependencyNotInstalled(f"the Meta-World families need the package metaworld; {remedy}") from error
    for match in filter(None, needed):
        if match[1] != mujoco.__version__:
            raise DependencyNotInstalled(
                f"Meta-World needs MuJoCo {match[1]}, and {mujoco.__version__} is installed; {remedy}"
            )
    return env_dict


class _Faster:
    """Mixin that replaces the slowest parts of a Meta-World step by bit-identical code that creates fewer objects.

    It is put before the class of an environment; the parts that it replaces are the same in all of them.
    """

    model: Any
    data: Any
    _get_pos_objects: Any
    _get_quat_objects: Any

    @cached_property
    def _rows(self) -> tuple[int, ...]:
        """Indices of the bodies of the hand and the two fingers, and of the geoms of the two pads."""
        bodies = [self.model.body(name).id for name in ("hand", "rightclaw", "leftclaw")]
        return (*bodies, *(self.model.geom(name).id for name in ("leftpad_geom", "rightpad_geom")))

    def _get_curr_obs_combined_no_goal(self) -> Floats:
        """Return the observation (18,) of one step: hand, opening of gripper, positions and rotations of objects."""
        hand, right, left, _, _ = self._rows
        positions, observation = self.data.xpos, np.zeros(18)
        observation[:3] = positions[hand]
        apart = positions[right] - positions[left]
        observation[3] = min(max(math.sqrt(apart.dot(apart)) / 0.1, 0.0), 1.0)
        places, rotations = self._get_pos_objects(), self._get_quat_objects()
        for index in range(len(places) // 3):
            start = 4 + 7 * index
            observation[start : start + 3] = places[3 * index : 3 * index + 3]
            observation[start + 3 : start + 7] = rotations[4 * index : 4 * index + 4]
        return observation

    def touching_object(self, object_geom_id: int) -> bool:
        """Return whether both pads press on an object."""
        contacts, forces = self.data.contact, self.data.efc_force
        first, second, addresses = contacts.geom1, contacts.geom2, contacts.efc_address
        of_object = (first == object_geom_id) | (second == object_geom_id)
        return all(
            sum(forces[address] for address in addresses[of_object & ((first == pad) | (second == pad))]) > 0
            for pad in self._rows[3:]
        )


@cache
def _faster(env_class: type) -> type:
    """Return the class of an environment that is bit-identical to Meta-World's, and faster."""
    return type(env_class.__name__, (_Faster, env_class), {})


_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
# Fields of a model that a reset changes, and fields that attributes of an environment may be live views of.
_MODEL_FIELDS = ("body_pos", "site_pos")
_LIVE_FIELDS = ("xpos", "site_xpos")
# Attributes of an environment that never change or are saved separately.
_NOT_KEPT = {"model", "data", "mujoco_renderer", "_np_random", "_np_random_seed"}
# A reset draws a goal twice, and some environments redraw until it is far enough; a fixed goal never would be.
_MOST_DRAWS = 1_000
_CAMERA = "corner"


class _Live(NamedTuple):
    """Placeholder for an attribute that is a live view of a row of one of MuJoCo's arrays."""

    field: str
    row: int


class State(NamedTuple):
    """The whole state of an environment between two steps.

    Attributes:
        physics: MuJoCo's integration state.
        model: fields of the model, by name.
        attributes: of the environment's object, by name.
        observation: (39,).
    """

    physics: Floats
    model: dict[str, Floats]
    attributes: dict[str, Any]
    observation: Floats


class Arm:
    """A Meta-World environment whose state can be saved, and loaded into any environment of the same name.

    Its behavior depends only on the state, and so never on earlier episodes.

    Attributes:
        env: the environment itself.
        low: (3,) or (6,) lowest numbers of a task.
        high: the highest.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.env: Any = _faster(import_environments().ALL_V3_ENVIRONMENTS[name])()
        # As `set_task` leaves it; the family has its own time limit.
        self.env._set_task_called = self.env.seeded_rand_vec = True
        self.env.max_path_length = sys.maxsize
        self.low: Floats = self.env._random_reset_space.low
        self.high: Floats = self.env._random_reset_space.high
        self._unused = self.save(np.zeros(0))
        self._renderer: Renderer | None = None

    def draw_goals(self, random: np.random.RandomState, num_goals: int) -> Floats:
        """Return the goals that `num_goals` resets draw from this generator, as in Meta-World.

        The numbers that a reset accepts do not depend on the arm's motion, so the physics is not stepped.
        """
        env = self.env
        self.load(self._unused)
        env._np_random, env._freeze_rand_vec = random, False
        env.do_simulation = lambda *arguments: mujoco.mj_forward(env.model, env.data)
        goals = []
        for _ in range(num_goals):
            env.reset()
            goals.append(env._last_rand_vec.copy())
        env._np_random = None
        return np.array(goals)

    def start(self, vector: Floats) -> State:
        """Return the start state of a task's episodes: the one that Meta-World's own reset reaches."""
        size = self.low.size
        given, rest = vector[:size], vector[size:]
        if rest.any() or (given < self.low).any() or (given > self.high).any():
            zeros = f", and {rest.size} zeros after them" if rest.size else ""
            raise TaskError(
                f"entry 'rand_vec' of a task of {self.name} must be between {self.low.tolist()} and "
                f"{self.high.tolist()}{zeros}, got {vector.tolist()}"
            )
        env, draws = self.env, 0
        self.load(self._unused)

        def draw() -> Floats:
            nonlocal draws
            draws += 1
            if draws > _MOST_DRAWS:
                raise TaskError(
                    f"entry 'rand_vec' of a task of {self.name} puts goal and object too close to each other, got "
                    f"{given.tolist()}"
                )
            return given.copy()

        env._last_rand_vec = given.copy()
        env._get_state_rand_vec = draw
        observation, _ = env.reset()
        del env._get_state_rand_vec
        return self.save(observation)

    def save(self, observation: Floats) -> State:
        """Return the current state, whose observation is this one."""
        env = self.env
        physics = np.empty(mujoco.mj_stateSize(env.model, _STATE))
        mujoco.mj_getState(env.model, env.data, physics, _STATE)
        attributes = {
            name: self._kept(value)
            for name, value in env.__dict__.items()
            if name not in _NOT_KEPT and not isinstance(value, spaces.Space)
        }
        return State(
            physics, {name: getattr(env.model, name).copy() for name in _MODEL_FIELDS}, attributes, observation.copy()
        )

    def load(self, state: State) -> None:
        """Return to a saved state."""
        env = self.env
        for name in [name for name in env.__dict__ if name not in _NOT_KEPT and name not in state.attributes]:
            if not isinstance(env.__dict__[name], spaces.Space):
                del env.__dict__[name]
        for name, value in state.attributes.items():
            if isinstance(value, _Live):
                env.__dict__[name] = getattr(env.data, value.field)[value.row]
            else:
                env.__dict__[name] = copy.deepcopy(value)
        for name, values in state.model.items():
            getattr(env.model, name)[...] = values
        mujoco.mj_setState(env.model, env.data, state.physics, _STATE)
        mujoco.mj_forward(env.model, env.data)
        # The forward pass has changed the solver's warm start.
        mujoco.mj_setState(env.model, env.data, state.physics, _STATE)

    def _kept(self, value: Any) -> Any:
        """Return an attribute in the form that `State` stores."""
        if isinstance(value, np.ndarray) and not value.flags.owndata:
            for field in _LIVE_FIELDS:
                array = getattr(self.env.data, field)
                if np.shares_memory(array, value):
                    offset = value.__array_interface__["data"][0] - array.__array_interface__["data"][0]
                    return _Live(field, offset // array.strides[0])
        return copy.deepcopy(value)

    def draw(self) -> NDArray[np.uint8]:
        """Return a picture (480, 480, 3)."""
        if self._renderer is None:
            self._renderer = Renderer(self.env.model, _CAMERA)
        # The camera is mounted upside down.
        return self._renderer.draw(self.env.data.qpos)[::-1, ::-1].copy()

    def close(self) -> None:
        """Free the environment's resources."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self.env.close()


# Goals of each environment of a benchmark, as in the published protocol.
_NUM_GOALS: dict[Split, int] = {"train": 50, "test": 40}
_OBSERVATION_SIZE = 39
# No environment has more numbers in a task.
_MOST_NUMBERS = 6
_NUMBERS = ("grasp_success", "grasp_reward", "near_object", "in_place_reward", "obj_to_target", "unscaled_reward")
_STARTS_KEPT = 1_024
# By the environments of a split, and seed: the goals of the first ones, and the generator's state after them.
_GOALS: dict[tuple[tuple[str, ...], int], list[tuple[Floats, Any]]] = {}


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

    def _reset_slots(self, mask: Mask | None, streams: SlotStreams) -> None:
        start = perf_counter()
        for slot in range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist():
            self._place(slot)
            self._succeeded[slot] = 0.0
        self.physics_seconds[0] += perf_counter() - start

    def _step_slots(self, actions: NDArray[Any], active: Mask | None, streams: SlotStreams) -> tuple[Floats, bool]:
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
