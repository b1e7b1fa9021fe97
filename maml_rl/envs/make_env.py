"""Makes slots from an id or a callable, in the process that will step them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import ArrayLike, NDArray

from maml_rl.arguments import check_count
from maml_rl.envs.adapted_batch import AdaptedVectorEnv, has_tasks
from maml_rl.envs.calls import CallRules, async_methods, awaits_steps, is_async, needs_loop, not_awaited
from maml_rl.envs.checking import require_task_methods
from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.global_generators import SharedGenerators, construct
from maml_rl.envs.last_step import LastStepVectorEnv
from maml_rl.envs.meta_env import MetaVectorEnv, Task, declared, own_task
from maml_rl.envs.registration import FAMILIES, find_spec
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.envs.task_observation import TaskObservationVectorEnv
from maml_rl.envs.threaded import ThreadedVectorEnv, not_thread_safe
from maml_rl.spaces import ArrayElements

EnvMaker = str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Observed:
    """Can be used wherever `env` can: the same slots, which show more.

    Attributes:
        env: a registered id, "module:id", a callable that makes a `gymnasium.Env`, or another `Observed`.
    """

    env: EnvMaker
    wrapper: ClassVar[Any]

    def __call__(self, **env_kwargs: Any) -> MetaVectorEnv:
        """Make one slot."""
        return make_vector_env(self, env_kwargs)


class ObservedTask(Observed):
    """Slots whose observations include their tasks; see `Observed`."""

    wrapper = TaskObservationVectorEnv


class ObservedLastStep(Observed):
    """Slots that show the last step; see `LastStepParts`, and `Observed`."""

    wrapper = LastStepVectorEnv


def observed_env(env: EnvMaker) -> EnvMaker:
    """Return the environment inside of `ObservedTask` and `ObservedLastStep`."""
    while isinstance(env, Observed):
        env = env.env
    return env


def env_id(env: EnvMaker) -> str:
    """Return the id of the environment; empty for a callable."""
    env = observed_env(env)
    return env if isinstance(env, str) else ""


def require_tasks(env: EnvMaker) -> None:
    """Refuse what certainly has no tasks, before anything is made: a class without their methods, or its id.

    The result of a function or wrapper is known only once it is made; `SerialVectorEnv` checks it then.

    Raises:
        TypeError: If it has none.
    """
    name = env_id(env)
    if name and ((spec := find_spec(name)).id in FAMILIES or spec.additional_wrappers or _may_be_meta(spec)):
        return
    made = _maker_of(env)
    if isinstance(made, type) and issubclass(made, gymnasium.Env) and not issubclass(made, gymnasium.Wrapper):
        require_task_methods(made, name)


def _maker_of(env: EnvMaker) -> Any:
    """Return the class or function that makes the environment objects; None if that is not known."""
    made = observed_env(env)
    if isinstance(made, str):
        entry_point = find_spec(made).entry_point
        try:
            made = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point  # type: ignore[assignment]
        except (ImportError, AttributeError):
            return None  # Making the environment reports the error.
    while isinstance(made, partial):
        made = made.func
    return made


def check_stepping(env: EnvMaker, rules: CallRules) -> None:
    """Refuse threads, before anything is made, for what certainly cannot be stepped in them.

    Raises:
        ValueError: If its slots are one batch.
        TypeError: If it says that it is not safe in threads, or must be awaited and threads are not wanted.
    """
    if rules.want_threads:
        name = env_id(env)
        if name and _may_be_meta(find_spec(name)):
            raise _one_batch(name)
        made = _maker_of(env)
        if isinstance(made, type) and not getattr(made, "thread_safe", True):
            raise not_thread_safe(made.__name__)
    elif rules.stepping == "serial" and is_async(made := _maker_of(env)):
        raise not_awaited(made.__name__, made)


def _one_batch(name: str) -> ValueError:
    return ValueError(
        f"stepping='threads' is for environments that wait, and {name} steps all its slots as one batch; leave "
        "stepping and stepping_threads out"
    )


def steps_in_threads(env: Any, rules: CallRules) -> bool:
    """Return whether an environment object is stepped concurrently with others: as the rules say, else as it says."""
    if rules.want_threads or rules.stepping == "serial" or not isinstance(env, gymnasium.Env):
        return rules.want_threads
    return declared(env, "stepping") == "threads" or is_async(env)


def _adapted(
    env: EnvMaker,
    make_env: Callable[..., Any],
    env_kwargs: Mapping[str, Any],
    num_envs: int,
    current_slots: NDArray[np.int64] | None,
    rules: CallRules,
) -> SerialVectorEnv:
    """Return an adapter around environment objects, of the kind that they need.

    Args:
        env: the id or callable, which may tell the kind; otherwise the first environment that is made does.
        make_env: what makes one of it.
        env_kwargs: its keyword arguments.
        num_envs: see `make_vector_env`, as for the others.
        current_slots: see there.
        rules: see there.
    """
    check_count("num_envs", num_envs)
    if current_slots is not None:
        current_slots[0] = 0
    make, made = partial(_constructed, make_env, **env_kwargs), _maker_of(env)
    known = isinstance(made, type) and not issubclass(made, gymnasium.Wrapper)

    def threaded(awaited: bool) -> ThreadedVectorEnv:
        return ThreadedVectorEnv(make, {}, num_envs, current_slots, rules, awaited=awaited)

    first: list[Any] = []
    try:
        if known and rules.stepping != "serial" and (is_async(made) or rules.want_threads):
            return threaded(awaits_steps(made))
        first.append(make())
        if not steps_in_threads(first[0], rules):
            return SerialVectorEnv(lambda: first.pop() if first else make(), {}, num_envs, current_slots, rules)
        # It must be made where it will be called.
        awaited = awaits_steps(first[0])
        _discard(first.pop())
        return threaded(awaited)
    except RuntimeError as error:
        if not needs_loop(error) or rules.stepping == "serial":
            raise
    return threaded(awaited=True)


def _discard(env: gymnasium.Env[Any, Any]) -> None:
    """Close an environment that was only looked at, whatever its `close` raises."""
    with suppress(Exception):
        close: Callable[[], Any] = env.close
        if isinstance(closing := close(), Coroutine):
            asyncio.run(closing)


def _constructed(make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what a constructor makes; all of them draw the same from the process's generators."""
    return construct(partial(make, *args, **kwargs))[0]


def make_vector_env(
    env: EnvMaker,
    env_kwargs: Mapping[str, Any] | None = None,
    num_envs: int = 1,
    *,
    max_episode_steps: int | None = None,
    num_threads: int = 1,
    current_slots: NDArray[np.int64] | None = None,
    rules: CallRules = CallRules(),  # noqa: B008 - frozen
) -> MetaVectorEnv:
    """Make N slots of a family.

    Args:
        env: a registered id, "module:id", or a callable that makes a `gymnasium.Env`, or, given `num_envs`, a
            `gymnasium.vector.VectorEnv`; or an `ObservedTask` or `ObservedLastStep` of one.
        env_kwargs: keyword arguments of the environment.
        num_envs: N, at least 1.
        max_episode_steps: time limit; None for the environment's own.
        num_threads: threads for families whose physics can use several.
        current_slots: (1,) where an adapter writes the slot that it works on; see `SerialVectorEnv`.
        rules: how an adapter carries out the calls of its slots.

    Returns:
        The batched family of an id or callable that has one; otherwise an adapter around N environment objects.

    Raises:
        ValueError: If no such id is registered, an argument is out of range, or `autoreset_mode` is given: these slots
            stay as they are until they are reset.
        TypeError: If the environment is not a task family, or does not take an argument.
    """
    if isinstance(env, Observed):
        shown: MetaVectorEnv = env.wrapper(
            make_vector_env(
                env.env,
                env_kwargs,
                num_envs,
                max_episode_steps=max_episode_steps,
                num_threads=num_threads,
                current_slots=current_slots,
                rules=rules,
            )
        )
        return shown
    kwargs = dict(env_kwargs or {})
    if "autoreset_mode" in kwargs:
        raise ValueError("the sampler resets the slots itself; leave autoreset_mode out of the environment's arguments")
    if makes_vector(env):
        assert callable(env)
        made = _constructed(env, num_envs=check_count("num_envs", num_envs), **kwargs)
        return _adapted_batch(made, max_episode_steps, current_slots, rules)
    if not isinstance(env, str):
        make_limited = partial(_make_limited, env, max_episode_steps)
        return _adapted(env, make_limited, kwargs, num_envs, current_slots, rules)
    spec = find_spec(env)
    limit = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
    if _may_be_meta(spec):
        threads = {"num_threads": num_threads} if spec.id in FAMILIES and FAMILIES[spec.id].has_physics else {}
        # Vector environments of other code need not know of a limit: the sampler ends episodes there, too.
        own_limit = limit if _takes(_creator_of(spec.vector_entry_point), "max_episode_steps") else {}
        vector_env = _constructed(
            gymnasium.make_vec,
            spec.id,
            num_envs,
            vectorization_mode="vector_entry_point",
            **{**threads, **kwargs, **own_limit},
        )
        if isinstance(vector_env, BatchedFamily):
            vector_env.autoreset_mode = AutoresetMode.DISABLED
        if isinstance(vector_env, MetaVectorEnv) or has_tasks(vector_env):
            return _adapted_batch(vector_env, max_episode_steps, current_slots, rules)
        vector_env.close()
    # Gymnasium's checker costs time at every step, and would warn once for every slot.
    make_env = partial(gymnasium.make, spec.id, **{"disable_env_checker": True, **kwargs, **limit})
    return _adapted(env, make_env, {}, num_envs, current_slots, rules)


def _checked(env: MetaVectorEnv, current_slots: NDArray[np.int64] | None) -> MetaVectorEnv:
    """Return a vector environment; one of somebody else's gets copies, and what it observes is checked by value."""
    made: Any = type(env)
    if made.__module__.partition(".")[0] == "maml_rl" or made.__dict__.get("is_checked"):
        return env
    elements = ArrayElements(env.single_observation_space)
    generators = SharedGenerators(env.num_envs, (), f"the streams of its slots in {made.__name__}")

    def check(env: MetaVectorEnv) -> None:
        observations = env.buffers.observations
        for slot in [] if elements.contain(observations) else range(len(observations)):
            if current_slots is not None:
                current_slots[0] = slot
            try:
                elements.array(observations[slot])
            except ValueError as error:
                raise ValueError(f"{made.__name__} wrote {error}") from None

    class _Checked(made):
        is_checked = True

        def sample_tasks(self, num_tasks: int, **options: Any) -> list[Task]:
            return [own_task(task) for task in super().sample_tasks(num_tasks, **options)]

        def reset_task(self, tasks: Sequence[Task]) -> None:
            super().reset_task([own_task(task) for task in tasks])

        def reset_buffers(self, seeds: ArrayLike) -> None:
            generators.step(0, partial(super().reset_buffers, seeds))
            check(self)

        def first_slots(self, num: int) -> MetaVectorEnv:
            return _checked(super().first_slots(num), current_slots)

        def step_send(self, index: int, actions: NDArray[Any]) -> None:
            super().step_send(index, np.array(actions))

        def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
            received: list[int] = generators.step(0, partial(super().step_recv, timeout, indices))
            check(self)
            return received

    _Checked.__name__, _Checked.__qualname__, _Checked.__module__ = made.__name__, made.__qualname__, made.__module__
    # Still the same object, of a class of its own: other code may look for what its class has.
    env.__class__ = _Checked
    return env


def _may_be_meta(spec: EnvSpec) -> bool:
    """Return whether an id may have a batched family; a class of another kind need not even be made."""
    if spec.vector_entry_point is None:
        return False
    creator = _creator_of(spec.vector_entry_point)
    return not isinstance(creator, type) or issubclass(creator, MetaVectorEnv) or has_tasks(creator)


def makes_vector(env: EnvMaker) -> bool:
    """Return whether a callable makes vector environments: a class of them, or a function of `num_envs`."""
    made = _maker_of(env) if not isinstance(env, str) else None
    if isinstance(made, type):
        return issubclass(made, VectorEnv)
    return made is not None and "num_envs" in _parameters(made)


def is_vector_family(env: EnvMaker) -> bool:
    """Return whether the slots of an environment are one batch of somebody else's vector environment."""
    if not isinstance(env, str):
        return makes_vector(env)
    spec = find_spec(env)
    return spec.id not in FAMILIES and _may_be_meta(spec)


def _creator_of(entry_point: Any) -> Any:
    return load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point


def _parameters(made: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable; none where they are not known."""
    try:
        return inspect.signature(made).parameters
    except (TypeError, ValueError):
        return {}


def _takes(made: Any, name: str) -> bool:
    """Return whether a callable takes an argument of this name."""
    parameters = _parameters(made)
    return name in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def _adapted_batch(
    made: Any, max_episode_steps: int | None, current_slots: NDArray[np.int64] | None, rules: CallRules
) -> MetaVectorEnv:
    """Return a vector environment as slots.

    Raises:
        ValueError: If it should be stepped in threads.
        TypeError: If it is not one of a task family.
    """
    name = type(made).__name__
    if rules.want_threads:
        made.close()
        raise _one_batch(name)
    if names := async_methods(made):
        raise TypeError(
            f"{name} has an async {' and '.join(names)}; a vector environment waits for its slots itself: make these "
            "plain methods, or give the class of one environment, whose slots are awaited side by side"
        )
    if isinstance(made, MetaVectorEnv):
        return _checked(made, current_slots)
    if not isinstance(made, VectorEnv) or not has_tasks(made):
        raise TypeError(
            f"{name} is not a task family of vector environments; a VectorEnv needs sample_tasks(num_tasks), and "
            "reset_task(tasks) with one task for each slot"
        )
    return AdaptedVectorEnv(made, max_episode_steps)


def _make_limited(make_env: Callable[..., Any], max_episode_steps: int | None, **kwargs: Any) -> Any:
    env = make_env(**kwargs)
    if max_episode_steps is None or not isinstance(env, gymnasium.Env):
        return env
    return gymnasium.wrappers.TimeLimit(env, max_episode_steps)
