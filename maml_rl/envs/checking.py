"""Checks that report which requirements of a task family an environment does not meet."""

import copy
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import combinations, pairwise, zip_longest
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import NDArray

from maml_rl.arrays import as_array
from maml_rl.envs.calls import (
    Awaited,
    Env,
    async_methods,
    close_quietly,
    read_reset,
    read_step,
    recorded_numbers,
    seeded_reset,
)
from maml_rl.envs.global_generators import KeptGenerators, construct, seconds_of_own_generators
from maml_rl.envs.meta_env import SEED_BITS, MetaVectorEnv, Task, declarations, declared
from maml_rl.envs.tasks import TaskSpace, own_task
from maml_rl.errors import ChildEnvError, ChildLost, ConfigError, TaskError, UsersCode, explain
from maml_rl.spaces import array_layout, array_writer, parts_of, stored_actions

_DUTIES = {
    "sample_tasks": "sample_tasks(num_tasks), which draws that many tasks (dicts of numbers and arrays) from np_random",
    "reset_task": "reset_task(task), which takes effect at the next step and survives reset",
}
_REMEDIES = {
    "observation": "gymnasium.wrappers.TransformObservation maps it to one of these",
    "action": "gymnasium.wrappers.TransformAction maps one of these to it",
}
# Escape sequences and prefix of Gymnasium's warnings.
_ESCAPE = re.compile(r"\x1b\[\d+m|WARN: ")
GYMNASIUM = "gymnasium.utils.env_checker on"
# Advice of Gymnasium's checker that changes nothing for a sampler, or does not suit a family that is a wrapper.
_MATTERS_OF_TASTE = (
    "This is probably too",
    "we recommend using a symmetric",
    "is different from the unwrapped version",
)
_UNKNOWN_ENTRY = "no_task_has_this_entry"
# In some families two tasks often give the same rewards by chance, but not for this many seeds.
_SEEDS_TO_TELL_TASKS_APART = 20
# Slots and steps of batches that are compared, and how far numbers may be apart where the size of a batch changes them.
_SLOTS, _BATCH_STEPS, _ROUNDING = 3, 10, 1e-5
# Steps in which an end is looked for, where a family tells its state.
_STEPS_TO_AN_END = 500
# A family may have only two tasks, and draw the same one a few times in a row.
_DRAWS_TO_FIND_ANOTHER_TASK = 50


def require_meta_env(env: Any) -> None:
    """Raise an error unless `env` meets the requirements of sampling."""
    if not isinstance(env, gymnasium.Env):
        name = getattr(env, "__name__", type(env).__name__)
        raise TypeError(f"expected a gymnasium.Env, got {name}; derive the class from gymnasium.Env")
    missing = list(_what_is_missing(env))
    if missing:
        raise TypeError(f"{type(env.unwrapped).__name__} is not a task family: {'; '.join(missing)}")
    refuse_statistics(env)


def refuse_statistics(env: Env | VectorEnv[Any, Any, Any]) -> None:
    """Refuse wrappers whose running statistics make an episode depend on those before it in the same slot."""
    name, stateful = type(env.unwrapped).__name__, []
    while isinstance(env, gymnasium.Wrapper | VectorWrapper):
        if getattr(env, "update_running_mean", False):
            stateful.append(type(env).__name__)
        env = env.env
    if stateful:
        raise ConfigError(
            f"{name} is wrapped in {', '.join(stateful)}, whose running statistics make an "
            "episode depend on those before it in its slot; normalize within the policy, or set the wrapper's "
            "update_running_mean to False"
        )


def require_task_methods(env_class: type[Env], env_id: str = "") -> None:
    """Refuse a class of environments without the methods of a task family.

    Args:
        env_class: of the environment without wrappers.
        env_id: its registered id; "" if it has none.
    """
    missing = [f"it lacks {duty}" for name, duty in _DUTIES.items() if not hasattr(env_class, name)]
    if missing and not hasattr(env_class, "__getattr__"):
        raise TypeError(f"{env_id or env_class.__name__} is not a task family: {'; '.join(missing)}")


def _what_is_missing(env: Env) -> Iterator[str]:
    for name, duty in _DUTIES.items():
        if not has_method(env, name):
            yield f"it lacks {duty}"
    for kind in ("observation", "action"):
        space = getattr(env, f"{kind}_space", None)
        if space is None:
            yield f"it lacks the attribute {kind}_space, a Box or Discrete of gymnasium.spaces, for example"
            continue
        try:
            array_writer(space) if kind == "observation" else stored_actions(space)
        except TypeError as error:
            yield f"as its {kind} space it has an {error}; {_REMEDIES[kind]}"


def find_method(env: Env, name: str) -> Callable[..., Any]:
    """Return a method of `env`, even if wrappers hide it."""
    if not has_method(env, name):
        raise TypeError(f"{type(env.unwrapped).__name__} is not a task family: it lacks {_DUTIES.get(name, name)}")
    method: Callable[..., Any] = declared(env, name)
    return method


def has_method(env: Env, name: str) -> bool:
    """Return whether `env` has a method, even if wrappers hide it."""
    return callable(declared(env, name))


def seed_draws(env: Env | VectorEnv[Any, Any, Any], seed: int) -> None:
    """Give `sample_tasks` a generator: the one that `reset(seed=...)` gives to an environment that hands the seed on.

    A reset alone would not do. A family whose task is the seed of a level resets with that, and an environment may have
    drawn from its generator since.
    """
    env.np_random = seeding.np_random(seed)[0]


class DrawsBySeed:
    """Refuses a family that draws the same tasks for two seeds, unless it has only a few tasks."""

    def __init__(self) -> None:
        # The first draw, with its seed, until a second seed has drawn other tasks.
        self._first: tuple[int, Sequence[Task]] | None = None
        self._differ = False

    def check(self, seed: int, tasks: Sequence[Task], draw: Callable[[int, int], Sequence[Task]]) -> None:
        """Compare tasks with those of the first seed; draw more where they are the same.

        Args:
            seed: the generator was seeded with.
            tasks: that were drawn.
            draw: draws a number of tasks after seeding with its second argument.
        """
        if self._differ:
            return
        first_seed, first = self._first = self._first or (seed, tasks)
        if seed == first_seed:
            return
        shared = min(len(first), len(tasks))
        if _same(list(first[:shared]), list(tasks[:shared])):
            self._refuse_same(draw, first_seed, seed)
        self._first, self._differ = None, True

    def _refuse_same(self, draw: Callable[[int, int], Sequence[Task]], *seeds: int) -> None:
        try:
            first, other = (list(draw(_DRAWS_TO_FIND_ANOTHER_TASK, seed)) for seed in seeds)
        except (ChildEnvError, TaskError) as error:
            if isinstance(error, ChildLost):
                raise
            # It has fewer tasks than that.
            return
        if _same(first, other) and not any(_same(*pair) for pair in combinations(first, 2)):
            raise TaskError(
                f"sample_tasks draws the same {len(first)} tasks for two seeds, such as {first[0]}: draw from "
                "self.np_random, which is seeded before each call, or from a generator of your own, which "
                "reset(seed=...) seeds (docs/task-distributions.md#tasks-that-are-levels)"
            )


def check_meta_env(
    env: Env,
    num_tasks: int = 3,
    seed: int = 0,
    *,
    make_another: Callable[[], Env] | None = None,
) -> None:
    """Check that `env` fulfills the contract of a task family.

    It steps the environment a few times. It warns of breaches of Gymnasium's own rules, which
    `gymnasium.utils.env_checker.check_env` finds in the family, without the wrappers around it. It warns where
    `reset_task` does not refuse malformed tasks by a ValueError or changes a task that it was given, where the
    environment or its constructor draws from generators of the process, and where no reward differs between tasks,
    which may be right where rewards are sparse.

    Args:
        env: one environment, not a vector.
        num_tasks: how many tasks to try, at least 1.
        seed: for resets.
        make_another: makes another such environment, which gets a task before its first reset, as in the sampler; by
            default made from `env.spec`, if there is one.

    Raises:
        TypeError: If something is missing; the message lists all that is.
        AssertionError: If something violates the contract; the message says what was expected.
    """
    require_meta_env(env)
    if async_methods(env) and not isinstance(env, Awaited):
        awaited = Awaited(env)
        with closing(awaited.loop):
            check_meta_env(awaited, num_tasks, seed, make_another=make_another)
        return
    # Even SystemExit: an environment that calls sys.exit fails in the sampler.
    with UsersCode(lambda error: AssertionError(explain(error)), Warning), KeptGenerators() as generators:
        _check_contract(env, generators, num_tasks, seed, make_another)
        if drawn := generators.drawn():
            warnings.warn(
                f"the environment draws from {' and '.join(drawn)}; a sampler gives each slot such generators of its "
                f"own, seeded with its episode, for {1e6 * seconds_of_own_generators():.0f} microseconds a step (but "
                "not where slots run in threads); draw from self.np_random instead, which costs nothing",
                stacklevel=2,
            )
        _check_rules_of_gymnasium(env)


def check_vector_family(make: Callable[[int], MetaVectorEnv], seed: int = 0) -> None:
    """Check that a family of vector environments fulfills the contract: no slot depends on another.

    It steps batches of three slots, of one, and of three in another order, with the same tasks, seeds and actions.

    Args:
        make: makes so many slots, as the sampler does.
        seed: of tasks and episodes.
    """
    with (
        UsersCode(lambda error: AssertionError(explain(error)), Warning),
        closing(make(_SLOTS)) as many,
        closing(make(1)) as one,
    ):
        tasks = many.sample_tasks(_SLOTS, seed=seed)
        _expect(_same(tasks, many.sample_tasks(_SLOTS, seed=seed)), "sample_tasks must repeat: draw from np_random")
        DrawsBySeed().check(seed, tasks, lambda count, other: many.sample_tasks(count, seed=other))
        tasks = _with_another(tasks, many.sample_tasks)[-_SLOTS:]
        draw_test_tasks = partial(many.sample_tasks, seed=seed, evaluation=True)
        _check_declared_tasks(
            many.task_space, draw_test_tasks, lambda task: many.reset_task([task] * _SLOTS), tasks, _SLOTS
        )
        # All bits of a seed are tried.
        seeds = np.array([seed, seed + 1, SEED_BITS])
        actions = _actions_of(many, seed)
        first = _batch(many, tasks, seeds, actions)
        _expect_equal_batches(
            first, _batch(many, tasks, seeds, actions), "the same seeds, tasks and actions are repeated"
        )
        _expect_equal_batches(first, _batch(many, None, seeds, actions), "the tasks are kept over a reset")
        order = [*range(1, _SLOTS), 0]
        permuted = _batch(many, [tasks[slot] for slot in order], seeds[order], actions[:, order])
        _expect_equal_batches([part[:, order] for part in first], permuted, "slots change places")
        for slot in range(_SLOTS):
            alone = _batch(one, tasks[slot : slot + 1], seeds[slot : slot + 1], actions[:, slot : slot + 1])
            _expect_equal_batches([part[:, [slot]] for part in first], alone, f"slot {slot} is a batch of one")
        others = [tasks[slot] for slot in order]
        if not _same(tasks, others) and _same(first, _batch(many, others, seeds, actions)):
            warnings.warn(
                "other tasks gave the same episodes; with sparse rewards that may be right, otherwise reset_task has "
                "no effect",
                stacklevel=2,
            )
        if (state := getattr(many.unwrapped, "state_numbers", None)) and _begins_anew(many, state, tasks, seeds, seed):
            warnings.warn(
                "where an episode ends, its state is as at a start: step seems to begin another episode by itself, so "
                "that final observations are lost; step without automatic resets, as by step_env or auto_reset=False",
                stacklevel=2,
            )


def _begins_anew(
    env: MetaVectorEnv, state: Callable[[], NDArray[Any]], tasks: Sequence[Task], seeds: NDArray[Any], seed: int
) -> bool:
    """Return whether, at the end of an episode, all numbers of the state that begin alike are as at the start again."""
    env.reset_task(tasks)
    env.reset_buffers(seeds)
    start, over = state(), np.zeros(env.num_envs, np.bool_)
    alike = (start == start[0]).all(0)
    for step in range(_STEPS_TO_AN_END):
        before = state()
        env.step_send(0, _actions_of(env, seed + step)[0])
        env.step_recv()
        ended, now = env.buffers.over & ~over, state()
        over |= ended
        for slot in np.flatnonzero(ended):
            moved = alike & (before[slot] != start[slot])
            if moved.any() and (now[slot] == start[slot])[moved].all():
                return True
        if over.all():
            break
    return False


def _actions_of(env: MetaVectorEnv, seed: int) -> NDArray[Any]:
    """Return random actions (T, N, *act), as the sampler stores them."""
    space = copy.deepcopy(env.single_action_space)
    space.seed(seed)
    return np.stack([np.stack([space.sample() for _ in range(env.num_envs)]) for _ in range(_BATCH_STEPS)])


def _batch(
    env: MetaVectorEnv, tasks: Sequence[Task] | None, seeds: NDArray[Any], actions: NDArray[Any]
) -> list[NDArray[Any]]:
    """Return observations, rewards, terminations and truncations (T, N, ...) of episodes; None: of the same tasks."""
    if tasks is not None:
        env.reset_task(tasks)
    env.reset_buffers(seeds)
    buffers = env.buffers
    found = []
    for step, chosen in enumerate(actions):
        results = buffers.observations, buffers.rewards, buffers.terminated, buffers.truncated
        found.append([part.copy() for part in results])
        for name in ("observations", "rewards"):
            _expect_finite(name, getattr(buffers, name), f"at step {step}")
        env.step_send(0, chosen)
        env.step_recv()
    return [np.stack(part) for part in zip(*found, strict=True)]


def _expect_equal_batches(first: Sequence[NDArray[Any]], other: Sequence[NDArray[Any]], when: str) -> None:
    for name, one, two in zip(("observation", "reward", "termination", "truncation"), first, other, strict=True):
        if np.array_equal(one, two):
            continue
        step = int(np.argwhere(one != two)[0][0])
        if one.dtype.kind == "f" and np.allclose(one, two, rtol=_ROUNDING, atol=_ROUNDING):
            warnings.warn(
                f"the {name} at step {step} differs by rounding where {when}: results depend, in their last digits, on "
                "how many slots a worker has",
                stacklevel=3,
            )
            return
        raise AssertionError(
            f"the {name} at step {step} differs where {when}; what a slot does must depend on its task, seed and "
            "actions alone: give every slot a generator of its own, made from its own seed, and set in reset all that "
            "steps change, except tasks"
        )


class _SeedsGenerators(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Seeds the process's generators with every episode, as in a slot whose environment draws from them."""

    def __init__(self, env: Env, generators: KeptGenerators) -> None:
        super().__init__(env)
        self._generators = generators

    def __str__(self) -> str:
        return str(self.env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            return self.env.reset()
        self._generators.seed(seed)
        return self.env.reset(seed=seed, options=options)


def _check_contract(
    env: Env,
    generators: KeptGenerators,
    num_tasks: int,
    seed: int,
    make_another: Callable[[], Env] | None,
) -> None:
    spec, env = env.spec, _SeedsGenerators(env, generators)
    sample_tasks, given_to = find_method(env, "sample_tasks"), find_method(env, "reset_task")

    def reset_task(task: Task) -> None:
        # As in the sampler: the environment may change its task.
        given_to(own_task(task))

    try:
        _episode(env, seed)
    except Exception as error:
        if _works_with_a_task(env, sample_tasks, reset_task, seed):
            raise AssertionError(
                f"reset and step must work before any reset_task, as other code calls them: {explain(error)}"
            ) from error
        raise
    largest = declarations(env).seed_mask
    with UsersCode(lambda error: AssertionError(f"reset(seed={largest}) must work: {explain(error)}")):
        seeded_reset(env, largest)
    tasks = _check_sample_tasks(env, sample_tasks, num_tasks, seed)
    draw_test_tasks = find_method(env, "sample_test_tasks") if has_method(env, "sample_test_tasks") else None
    _check_declared_tasks(declarations(env).task_space, draw_test_tasks, reset_task, tasks, num_tasks)
    of_environment = _spaces(env)
    for task in tasks:
        reset_task(task)
        first = _episode(env, seed)
        _expect(
            _spaces(env) == of_environment,
            "observation_space and action_space must be the same for all tasks, the largest that one needs; got "
            f"{env.observation_space} and {env.action_space} with {task}, others before",
        )
        _expect(_same(first, _episode(env, seed)), "the same seed, task and actions must repeat an episode")
        # Other steps, and not as many.
        deque(_steps(env, seed + 1, num_steps=3))
        _expect(
            _same(first, _episode(env, seed)),
            "the same seed, task and actions must repeat an episode after another one: reset must set again all that "
            "steps change",
        )
        env.reset()
        _expect(_same(first, _episode(env, seed)), "a task must survive reset: only reset_task may change it")
    # Gymnasium cannot repeat wrappers that do not record their arguments.
    if (
        make_another is None
        and spec is not None
        and all(wrapper.kwargs is not None for wrapper in spec.additional_wrappers)
    ):
        make_another = partial(gymnasium.make, spec)
    if make_another is not None:
        another, drawn = construct(make_another)
        if async_methods(another) and not isinstance(another, Awaited):
            another = Awaited(another)
        try:
            _check_task_before_reset(another, own_task(tasks[0]))
            # Which of two draws from a generator of both depends on their order.
            if not generators.drawn():
                reset_task(tasks[0])
                _check_stands_alone(env, another, next(task for task in tasks if not _same(task, tasks[0])), seed)
        finally:
            close_quietly(another.close)
        if drawn:
            warnings.warn(
                f"its constructor draws from {' and '.join(drawn)}; a sampler gives it the same numbers in every slot "
                "and for every seed, so that all environments are those of one family; what must differ, such as a "
                "port, can come from random.SystemRandom()",
                stacklevel=3,
            )
    _check_leaves_task_unchanged(env, given_to, own_task(tasks[0]), seed)
    _check_tasks_differ(env, reset_task, tasks, seed)
    _check_refuses_malformed(env, reset_task, tasks[0], seed)


def family_of(env: Env) -> Env:
    """Return the outermost layer of an environment that has `reset_task` itself: the family, below other wrappers."""
    while isinstance(env, gymnasium.Wrapper) and not (hasattr(type(env), "reset_task") or "reset_task" in vars(env)):
        env = env.env
    return env


def _works_with_a_task(
    env: Env, sample_tasks: Callable[..., Any], reset_task: Callable[[Task], None], seed: int
) -> bool:
    """Return whether an episode works once the environment has a task."""
    with suppress(Exception):
        (task,) = sample_tasks(1)
        reset_task(task)
        _episode(env, seed)
        return True
    return False


def _check_rules_of_gymnasium(env: Env) -> None:
    """Warn of what Gymnasium's own checker finds in the family: a sampler may do without it, other code may not."""
    layer = env if isinstance(env, Awaited) else family_of(env)
    finding = ""
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        try:
            # A wrapper cannot be made again.
            check_env(layer, skip_render_check=True, skip_close_check=isinstance(layer, gymnasium.Wrapper))
        except KeyboardInterrupt:
            raise
        # Its comparisons do not work with arrays of every library, for example.
        except BaseException as error:
            finding = explain(error)
    found = [_ESCAPE.sub("", str(remark.message)) for remark in remarks]
    for remark in dict.fromkeys([*found, finding]):
        if remark and not any(taste in remark for taste in _MATTERS_OF_TASTE):
            warnings.warn(f"{GYMNASIUM} {type(layer).__name__}: {remark}", stacklevel=4)


def _check_task_before_reset(env: Env, task: dict[str, Any]) -> None:
    try:
        find_method(env, "reset_task")(task)
    except Exception as error:
        raise AssertionError(
            f"reset_task must work before the first reset, as the sampler calls it: {explain(error)}"
        ) from error


def _check_stands_alone(env: Env, another: Env, task: Task, seed: int) -> None:
    """Refuse an environment whose episode changes where another one, which gets a task, steps beside it."""
    alone = _episode(env, seed)
    find_method(another, "reset_task")(own_task(task))
    both: Iterator[tuple[list[Any], list[Any]]] = zip_longest(
        _steps(env, seed), _steps(another, seed + 1), fillvalue=[]
    )
    _expect(
        _same(alone, [part for results, _ in both for part in results]),
        "an episode must not change where another environment steps beside it: keep the task and all that changes in "
        "self, not in the class or the module",
    )


def _spaces(env: Env) -> tuple[Any, Any]:
    """Return what a policy and the arrays of episodes depend on: bounds of actions, but not of observations."""
    return parts_of(array_writer(env.observation_space).flat_space), stored_actions(env.action_space)


def _check_sample_tasks(env: Env, sample_tasks: Callable[..., Any], num_tasks: int, seed: int) -> list[dict[str, Any]]:
    def draw(count: int, seed: int) -> list[dict[str, Any]]:
        env.reset(seed=seed)
        seed_draws(env, seed)
        return [own_task(task) if isinstance(task, dict) else task for task in sample_tasks(count)]

    def draw_after_reset(count: int, seed: int) -> list[dict[str, Any]]:
        env.reset(seed=seed)
        return list(sample_tasks(count))

    tasks = draw(num_tasks, seed)
    _expect(len(tasks) == num_tasks, f"sample_tasks({num_tasks}) must return {num_tasks} tasks, got {len(tasks)}")
    for task in tasks:
        _expect(isinstance(task, dict), f"a task must be a dict, got {type(task).__name__}")
        for name, value in task.items():
            _expect(isinstance(name, str), f"the entries of a task must have strings as names, got {name!r}")
            _expect(
                _is_plain(value),
                f"a task holds numbers and arrays, so that it can be stored; entry {name!r} is {value!r}",
            )
    _expect(
        _same(tasks, draw(num_tasks, seed)),
        "sample_tasks must repeat after reset(seed=...): call super().reset(seed=seed), and draw from self.np_random",
    )
    if (fault := _fault_of_draws(draw, num_tasks, seed)) is not None:
        raise AssertionError(fault)
    if _fault_of_draws(draw_after_reset, num_tasks, seed) is not None:
        warnings.warn(
            "reset(seed=...) does not seed the generator from which sample_tasks draws; the sampler seeds np_random "
            "itself, but other code gets the same tasks for every seed: draw them from a generator of your own "
            "(docs/task-distributions.md#tasks-that-are-levels)",
            stacklevel=3,
        )
    return _with_another(tasks, sample_tasks)


def _with_another(tasks: list[Task], sample_tasks: Callable[[int], Sequence[Task]]) -> list[Task]:
    """Return tasks that are not all the same, with another one where they are."""
    if any(not _same(first, other) for first, other in pairwise(tasks)):
        return tasks
    # One dict that is filled again and again is the last of the tasks, as often as they are many.
    many = sample_tasks(_DRAWS_TO_FIND_ANOTHER_TASK)
    different = [task for task in many if not _same(many[0], task)]
    _expect(bool(different), "sample_tasks must draw different tasks, got the same each time")
    return [*tasks, next(task for task in (many[0], different[0]) if not _same(tasks[0], task))]


def _fault_of_draws(draw: Callable[[int, int], list[dict[str, Any]]], num_tasks: int, seed: int) -> str | None:
    """Return why the tasks that are drawn for two seeds are not as the sampler needs them; None if they are."""

    def many(count: int, seed: int) -> list[dict[str, Any]]:
        with UsersCode(lambda error: ChildEnvError(explain(error))):
            return draw(count, seed)

    draws = DrawsBySeed()
    try:
        for each in (seed, seed + 1):
            draws.check(each, draw(num_tasks, each), many)
    except TaskError as error:
        return str(error)
    return None


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, or an array of these, and not a list of lists of other lengths."""
    array = as_array(value)
    return array is not None and array.dtype.kind in "biufU"


def _check_declared_tasks(
    space: TaskSpace | None,
    draw_test_tasks: Callable[[int], Sequence[Task]] | None,
    reset_task: Callable[[Task], None],
    tasks: Sequence[Task],
    num_tasks: int,
) -> None:
    """Check the optional parts of a family: test tasks and the space of tasks."""
    others: dict[str, Sequence[Task]] = {}
    if draw_test_tasks is not None:
        drawn = others["a task of sample_test_tasks"] = list(draw_test_tasks(num_tasks))
        _expect(
            len(drawn) == num_tasks, f"sample_test_tasks({num_tasks}) must return {num_tasks} tasks, got {len(drawn)}"
        )
    if space is not None:
        try:
            for task in tasks:
                space.values_of(task)
            quantiles = np.linspace(0.05, 0.95, num_tasks)[:, None]
            others["a task within task_space"] = space.tasks_at(quantiles.repeat(len(space.parameters), axis=1))
        except Exception as error:
            raise AssertionError(f"task_space must be that of the tasks of sample_tasks: {explain(error)}") from error
    for what, made in others.items():
        for task in made:
            try:
                reset_task(task)
            except Exception as error:
                raise AssertionError(f"reset_task must take {what}, as {task}: {explain(error)}") from error


def _check_tasks_differ(env: Env, reset_task: Callable[..., Any], tasks: list[dict[str, Any]], seed: int) -> None:
    seen: list[list[Any]] = []
    for offset in range(_SEEDS_TO_TELL_TASKS_APART):
        episodes = []
        for task in tasks:
            reset_task(task)
            episodes.append(_episode(env, seed + offset))
        seen += episodes
        if any(not _same(first, other) for first, other in pairwise(episodes)):
            return
    if len({reward for episode in seen for reward in episode[2::4]}) == 1:
        warnings.warn(
            f"every task gave the reward {seen[0][2]} at each step of {len(seen)} episodes of random actions; with "
            "sparse rewards that may be right, otherwise reset_task has no effect",
            stacklevel=3,
        )
        return
    raise AssertionError(
        "every task gave the same episodes: reset_task must change rewards or dynamics, and reset must not undo that"
    )


def _check_leaves_task_unchanged(env: Env, reset_task: Callable[..., Any], task: Task, seed: int) -> None:
    """Warn where an environment changes the task that it was given, which other environments may have, too."""
    before = own_task(task)
    reset_task(task)
    _episode(env, seed)
    if changed := sorted(name for name in before if name not in task or not _same(before[name], task[name])):
        warnings.warn(
            f"the environment changes the entry {changed[0]!r} of the task that it was given; the sampler gives every "
            "slot a copy of its own, but in other code all environments with this task change: copy it in reset_task, "
            f"as in self.{changed[0]} = np.array(task[{changed[0]!r}])",
            stacklevel=3,
        )


def _check_refuses_malformed(env: Env, reset_task: Callable[..., Any], task: dict[str, Any], seed: int) -> None:
    """Warn where a misspelled entry goes unnoticed; refusing a task must leave the previous one unchanged."""
    reset_task(task)
    first = _episode(env, seed)
    for malformed in ({**task, _UNKNOWN_ENTRY: 0.0}, {}):
        reset_task(task)
        try:
            reset_task(malformed)
        except ValueError:
            unchanged = _same(first, _episode(env, seed))
            _expect(unchanged, "reset_task must leave the task as it was when it refuses another")
            continue
        except Exception as error:
            outcome = f"raised {error!r}"
        else:
            outcome = "took it"
        warnings.warn(
            f"reset_task was given the task {malformed} and {outcome}; a ValueError that names the entry would tell "
            "users of a misspelled task",
            stacklevel=3,
        )


def _episode(env: Env, seed: int) -> list[Any]:
    return [part for results in _steps(env, seed) for part in results]


def _steps(env: Env, seed: int, num_steps: int = 5) -> Iterator[list[Any]]:
    """Yield what reset and steps of an episode return, as the sampler calls and reads them."""
    observation = as_sampled(env, read_reset(env, env.reset(seed=seed, options=None))[0])
    # Environments may share a space, which draws.
    actions = copy.deepcopy(env.action_space)
    actions.seed(seed)
    _expect_finite("observations", observation, "after reset")
    yield [observation]
    for step in range(1, num_steps + 1):
        observation, reward, terminated, truncated, info = read_step(env, env.step(actions.sample()))
        observation = as_sampled(env, observation)
        _expect_finite("observations", observation, f"at step {step}")
        _expect_finite("rewards", reward, f"at step {step}")
        recorded_numbers(env, declarations(env).recorded_infos, info, terminated=terminated, truncated=truncated)
        yield [observation, reward, terminated, truncated]
        if terminated or truncated:
            return


def as_sampled(env: Env, observation: Any) -> Any:
    """Return a copy of an observation as the sampler sees it."""
    writer = array_writer(env.observation_space)
    array = np.empty(*array_layout(writer.flat_space))
    try:
        writer.write(observation, array)
    except ValueError as error:
        raise AssertionError(f"{type(env.unwrapped).__name__} returned {error}") from error
    return array


def _expect_finite(what: str, numbers: Any, when: str) -> None:
    array = np.asarray(numbers)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        kind = "NaN" if np.isnan(array).any() else "infinity"
        raise AssertionError(f"{what} must be finite, got {kind} {when}: {numbers}")


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Mapping):
        same_names = isinstance(second, Mapping) and first.keys() == second.keys()
        return same_names and all(_same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    return bool(np.array_equal(first, second))


def _expect(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise AssertionError(message)
