"""How to make the slots of a family: its recipe, resolved once, and followed where the slots are stepped."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.envs.adapted_batch import AdaptedVectorEnv, CheckedVectorEnv, has_tasks
from maml_rl.envs.calls import (
    CallRules,
    async_methods,
    awaits_steps,
    close_quietly,
    needs_loop,
    not_awaited,
)
from maml_rl.envs.checking import require_task_methods
from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.global_generators import construct
from maml_rl.envs.meta_env import MetaVectorEnv, declared
from maml_rl.envs.observing import LastStepVectorEnv, TaskObservationVectorEnv
from maml_rl.envs.registration import FAMILIES, FamilySpec, find_spec
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.envs.threaded import ThreadedVectorEnv, not_thread_safe
from maml_rl.named_modules import import_named, is_of_this_package

EnvMaker = str | Callable[..., Any]
# Torch's default type: where a recipe has it while it is pickled, and what a process begins with.
_DEFAULT_TYPE, _USUAL_TYPE = "torch's default type", "float32"


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


def steps_in_threads(env: Any, rules: CallRules) -> bool:
    """Return whether an environment object is stepped concurrently with others: as the rules say, else as it says."""
    if rules.want_threads or rules.stepping == "serial" or not isinstance(env, gymnasium.Env):
        return rules.want_threads
    return declared(env, "stepping") == "threads" or bool(async_methods(env))


@dataclass(frozen=True)
class Recipe:
    """How to make the slots of a family, any number of them. It can be pickled, for where the slots are stepped.

    Attributes:
        env: a registered id, "module:id", a callable, or an `Observed` of one.
        env_kwargs: keyword arguments of the environment.
        max_episode_steps: time limit; None for the environment's own.
        rules: how the calls of environment objects are carried out.
        spec: what the id is registered with, which another process may lack; None for a callable.
    """

    env: EnvMaker
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    rules: CallRules = CallRules()  # noqa: RUF009 - frozen
    spec: EnvSpec | None = None

    @classmethod
    def of(
        cls,
        env: EnvMaker | None,
        env_kwargs: Mapping[str, Any] | None = None,
        max_episode_steps: int | None = None,
        rules: CallRules = CallRules(),  # noqa: B008 - frozen
    ) -> Recipe:
        """Return the recipe for a user's arguments, after importing the module of an id."""
        if isinstance(env, gymnasium.Env | VectorEnv):
            raise TypeError(
                f"expected a registered id or a callable that makes the environment, got the environment {env} itself, "
                "which cannot cross to a child process; pass its id, its class, or a function that makes it"
            )
        if not isinstance(env, str) and not callable(env):
            raise TypeError(f"expected a registered id or a callable that makes the environment, got {env!r}")
        if max_episode_steps is not None:
            check_count("max_episode_steps", max_episode_steps)
        recipe = cls(env, dict(env_kwargs or {}), max_episode_steps, rules)
        spec = find_spec(recipe.id) if recipe.id else None
        if spec is not None and isinstance(env, str) and not env.endswith(spec.id):
            # The id of an earlier version: one warning here is enough.
            env = spec.id
        return replace(recipe, env=env, spec=spec)

    def __getstate__(self) -> dict[str, Any]:
        # Without what has been looked up here; with torch's default type, in which an environment may make tensors.
        torch: Any = sys.modules.get("torch")
        default = None if torch is None else str(torch.get_default_dtype()).removeprefix("torch.")
        return {field.name: getattr(self, field.name) for field in fields(self)} | {_DEFAULT_TYPE: default}

    def __setstate__(self, state: dict[str, Any]) -> None:
        default = state.pop(_DEFAULT_TYPE)
        vars(self).update(state)
        if default not in (None, _USUAL_TYPE):
            import torch

            torch.set_default_dtype(getattr(torch, default))

    @property
    def maker(self) -> str | Callable[..., Any]:
        """The id or the callable, of which more may be shown."""
        env = self.env
        while isinstance(env, Observed):
            env = env.env
        return env

    @property
    def id(self) -> str:
        """The id; empty for a callable."""
        return self.maker if isinstance(self.maker, str) else ""

    @property
    def family(self) -> FamilySpec | None:
        """What this package knows about the family; None if it is another's."""
        return None if self.spec is None else FAMILIES.get(self.spec.id)

    @cached_property
    def one(self) -> Any:
        """The class or function that makes an environment object; None if that is not known."""
        made: Any = self.maker if self.spec is None else self.spec.entry_point
        try:
            made = _loaded(made)
        except (ImportError, AttributeError):
            return None  # Making the environment reports the error.
        while isinstance(made, partial):
            made = made.func
        return made

    @cached_property
    def batch(self) -> Any:
        """What makes all slots as one batch, if anything does; a function of an id may turn out to make another one."""
        if self.spec is None:
            is_class = isinstance(self.one, type)
            is_batch = issubclass(self.one, VectorEnv) if is_class else "num_envs" in _parameters(self.one)
            return self.maker if is_batch else None
        if self.spec.vector_entry_point is None:
            return None
        creator = _loaded(self.spec.vector_entry_point)
        # A class of another kind need not even be made.
        is_meta = not isinstance(creator, type) or issubclass(creator, MetaVectorEnv) or has_tasks(creator)
        return creator if is_meta else None

    @property
    def is_vector_family(self) -> bool:
        """Whether its slots are one batch of somebody else's vector environment."""
        return self.family is None and self.batch is not None

    def require_tasks(self) -> None:
        """Refuse what certainly has no tasks, before anything is made: a class without their methods, or its id.

        The result of a function or wrapper is known only once it is made; `SerialVectorEnv` checks it then.
        """
        spec = self.spec
        if spec is not None and (self.family is not None or spec.additional_wrappers or self.batch is not None):
            return
        made = self.one
        if isinstance(made, type) and issubclass(made, gymnasium.Env) and not issubclass(made, gymnasium.Wrapper):
            require_task_methods(made, self.id)

    def check_stepping(self, rules: CallRules) -> None:
        """Refuse threads, before anything is made, for what certainly cannot be stepped in them."""
        if rules.want_threads:
            if self.batch is not None:
                raise _one_batch(self.id or self.one.__name__)
            if isinstance(self.one, type) and not getattr(self.one, "thread_safe", True):
                raise not_thread_safe(self.one.__name__)
        elif rules.stepping == "serial" and async_methods(self.one):
            raise not_awaited(self.one.__name__, self.one)

    def make(
        self, num_envs: int, num_threads: int = 1, current_slots: NDArray[np.int64] | None = None
    ) -> MetaVectorEnv:
        """Return `num_envs` slots; see `make_vector_env` for the other arguments."""
        if self.spec is not None and self.spec.id not in gymnasium.registry:
            # Modules register their ids themselves, and Gymnasium would warn about an existing registration.
            for place in (self.id, self.spec.entry_point):
                if isinstance(place, str) and ":" in place:
                    import_named(place.partition(":")[0])
            gymnasium.registry.setdefault(self.spec.id, self.spec)
        if "autoreset_mode" in self.env_kwargs:
            raise ValueError(
                "the sampler resets the slots itself; leave autoreset_mode out of the environment's arguments"
            )
        check_count("num_envs", num_envs)
        slots = None
        if self.batch is not None:
            made = self._make_batch(num_envs, num_threads)
            try:
                slots = None if made is None else self._as_slots(made, current_slots)
            except BaseException:
                close_quietly(lambda: made.close())
                raise
        if slots is None:
            slots = self._make_objects(num_envs, current_slots)
        try:
            return self._shown(self.env, slots)
        except BaseException:
            slots.close()
            raise

    def _shown(self, env: EnvMaker, slots: MetaVectorEnv) -> MetaVectorEnv:
        """Return slots that show what an `Observed` shows, from the inside out."""
        if not isinstance(env, Observed):
            return slots
        shown: MetaVectorEnv = env.wrapper(self._shown(env.env, slots))
        return shown

    def _make_batch(self, num_envs: int, num_threads: int) -> Any:
        """Return all slots as one batch; None if a function of an id has made one without tasks."""
        if self.spec is None:
            made = _constructed(self.batch, num_envs=num_envs, **self.env_kwargs)
        else:
            options: dict[str, Any] = {}
            if self.family is not None and self.family.has_physics:
                options["num_threads"] = num_threads
            options |= self.env_kwargs
            # A limit may be longer than that of the id; what does not take it is given it below, or by the adapter.
            if self.max_episode_steps is not None and _takes(self.batch, "max_episode_steps"):
                options["max_episode_steps"] = self.max_episode_steps
            made = _constructed(
                gymnasium.make_vec, self.spec.id, num_envs, vectorization_mode="vector_entry_point", **options
            )
        if isinstance(made, BatchedFamily):
            made.autoreset_mode = AutoresetMode.DISABLED
            if self.max_episode_steps is not None:
                made.end_after(self.max_episode_steps)
        if self.spec is None or isinstance(made, MetaVectorEnv) or has_tasks(made):
            return made
        close_quietly(lambda: made.close())
        return None

    def _as_slots(self, made: Any, current_slots: NDArray[np.int64] | None) -> MetaVectorEnv:
        """Return a vector environment as slots."""
        name = type(made).__name__
        if self.rules.want_threads:
            raise _one_batch(name)
        if names := async_methods(made):
            raise TypeError(
                f"{name} has an async {' and '.join(names)}; a vector environment waits for its slots itself: make "
                "these plain methods, or give the class of one environment, whose slots are awaited side by side"
            )
        if isinstance(made, MetaVectorEnv):
            # A batched family keeps the limit itself.
            limit = None if isinstance(made, BatchedFamily) else self.max_episode_steps
            return made if is_of_this_package(type(made)) else CheckedVectorEnv(made, limit, current_slots)
        if not isinstance(made, VectorEnv) or not has_tasks(made):
            raise TypeError(
                f"{name} is not a task family of vector environments; a VectorEnv needs sample_tasks(num_tasks), and "
                "reset_task(tasks) with one task for each slot"
            )
        return AdaptedVectorEnv(made, self.max_episode_steps, current_slots)

    def _make_one(self) -> Any:
        """Return one environment object."""
        limit = self.max_episode_steps
        if self.spec is None:
            make: Any = self.maker
            env = make(**self.env_kwargs)
            if limit is not None and isinstance(env, gymnasium.Env):
                env = gymnasium.wrappers.TimeLimit(env, limit)
            return env
        # Gymnasium's checker costs time at every step, and would warn once for every slot.
        options = {"disable_env_checker": True, **self.env_kwargs}
        return gymnasium.make(self.spec.id, **options | ({} if limit is None else {"max_episode_steps": limit}))

    def _make_objects(self, num_envs: int, current_slots: NDArray[np.int64] | None) -> SerialVectorEnv:
        """Return slots of environment objects, run in the way that they need.

        Their class may tell that; otherwise the first that is made does.
        """
        if current_slots is not None:
            current_slots[0] = 0
        make, rules = self._make_one, self.rules
        known = isinstance(self.one, type) and not issubclass(self.one, gymnasium.Wrapper)

        def threaded(awaited: bool) -> ThreadedVectorEnv:
            return ThreadedVectorEnv(make, num_envs, current_slots, rules, awaited=awaited)

        first: list[Any] = []
        try:
            if known and rules.stepping != "serial" and (rules.want_threads or async_methods(self.one)):
                return threaded(awaits_steps(self.one))
            first.append(_constructed(make))
            if not steps_in_threads(first[0], rules):
                return SerialVectorEnv(lambda: first.pop() if first else make(), num_envs, current_slots, rules)
            # It must be made where it will be called.
            awaited = awaits_steps(first[0])
            close_quietly(lambda: first.pop().close())
            return threaded(awaited)
        except RuntimeError as error:
            if not needs_loop(error) or rules.stepping == "serial":
                raise
        return threaded(awaited=True)


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
    return Recipe.of(env, env_kwargs, max_episode_steps, rules).make(num_envs, num_threads, current_slots)


def _one_batch(name: str) -> ValueError:
    return ValueError(
        f"stepping='threads' is for environments that wait, and {name} steps all its slots as one batch; leave "
        "stepping and stepping_threads out"
    )


def _loaded(entry_point: Any) -> Any:
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
    return name in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _constructed(make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what a constructor makes; all of them draw the same from the process's generators."""
    return construct(partial(make, *args, **kwargs))[0]
