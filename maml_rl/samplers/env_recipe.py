"""The recipe of a worker's environment: an id or a callable and its arguments, never an environment object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.envs.calls import CallRules
from maml_rl.envs.make_env import EnvMaker, EnvSource, make_vector_env, resolve
from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.envs.registration import FAMILIES, FamilySpec
from maml_rl.errors import ConfigError
from maml_rl.machine import uses_jax
from maml_rl.named_modules import import_named
from maml_rl.samplers.failures import describe_env, describe_task
from maml_rl.samplers.importing import pickled, pickled_for_workers

if TYPE_CHECKING:
    # Workers need no settings, nor the time that their models take.
    from maml_rl.config.placement import Placement


def maker_of(env_name: EnvMaker | None, env: Any) -> EnvMaker | None:
    """Return what makes the environments: `env`, or `env_name` where `env` is an environment of this id."""
    if env_name is None or not isinstance(env, gymnasium.Env):
        return env_name if env is None else env
    expected = resolve(env_name).spec
    if env.spec is None or expected is None or env.spec.id != expected.id:
        raise ValueError(f"env is {env}, which env_name={env_name!r} does not make; leave one of them out")
    return env_name


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make the environment of any number of slots.

    Attributes:
        env: id or callable.
        env_kwargs: keyword arguments.
        max_episode_steps: time limit; None for the environment's own.
        spec: registration of the id in the parent, which a worker may lack; None for a callable.
        rules: how the calls of environment objects are carried out.
    """

    env: str | Callable[..., Any]
    env_kwargs: Mapping[str, Any]
    max_episode_steps: int | None
    spec: EnvSpec | None
    rules: CallRules = CallRules()  # noqa: RUF009 - frozen

    @classmethod
    def of(cls, env: EnvMaker | None, env_kwargs: Mapping[str, Any] | None, max_episode_steps: int | None) -> Recipe:
        """Return the recipe for a user's argument."""
        if isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv):
            raise TypeError(
                f"expected a registered id or a callable that makes the environment, got the environment {env} itself, "
                "which cannot cross to a child process; pass its id, its class, or a function that makes it"
            )
        if not isinstance(env, str) and not callable(env):
            raise TypeError(f"expected a registered id or a callable that makes the environment, got {env!r}")
        if max_episode_steps is not None:
            check_count("max_episode_steps", max_episode_steps)
        spec = resolve(env).spec
        if spec is not None and isinstance(env, str) and not env.endswith(spec.id):
            # The id of an earlier version: one warning here is enough.
            env = spec.id
        return cls(env, dict(env_kwargs or {}), max_episode_steps, spec)

    def placed(self, placement: Placement) -> Recipe:
        """Return the recipe with a placement's engine, and its rules for the calls of environment objects."""
        rules = CallRules(
            stepping=placement.stepping,
            threads=placement.stepping_threads,
            timeout=placement.step_timeout,
            max_retries=placement.max_retries,
        )
        self.source.check_stepping(rules)
        return replace(self._with_engine(placement.engine), rules=rules)

    def _with_engine(self, engine: str) -> Recipe:
        if engine == "auto":
            return self
        family = self.family
        if family is None or not family.has_physics:
            raise ValueError(f"engine={engine!r} is for the MuJoCo families of this package, not for {self.env}")
        if self.env_kwargs.get("engine", engine) != engine:
            raise ValueError(
                f"engine={engine!r} contradicts env_kwargs={self.env_kwargs['engine']!r}; give one of both"
            )
        return replace(self, env_kwargs={**self.env_kwargs, "engine": engine})

    @property
    def source(self) -> EnvSource:
        """What makes the slots."""
        return resolve(self.env)

    @property
    def family(self) -> FamilySpec | None:
        """What this package knows about the family; None if it is another's."""
        return None if self.spec is None else FAMILIES.get(self.spec.id)

    @property
    def slots_per_task(self) -> int | None:
        """How many environments of each task the family has by default; None for one per episode."""
        return None if self.family is None else self.family.slots_per_task

    def make(
        self, num_envs: int, num_threads: int = 1, current_slots: NDArray[np.int64] | None = None
    ) -> MetaVectorEnv:
        """Return the environment with `num_envs` slots; see `make_vector_env` for the other arguments."""
        if self.spec is not None and self.spec.id not in gymnasium.registry:
            # Modules register their ids themselves, and Gymnasium would warn about an existing registration.
            for place in (self.source.id, self.spec.entry_point):
                if isinstance(place, str) and ":" in place:
                    import_named(place.partition(":")[0])
            gymnasium.registry.setdefault(self.spec.id, self.spec)
        return make_vector_env(
            self.env,
            self.env_kwargs,
            num_envs,
            max_episode_steps=self.max_episode_steps,
            num_threads=num_threads,
            current_slots=current_slots,
            rules=self.rules,
        )

    def pickled(self, start_method: str | None = None) -> bytes:
        """Return the recipe as bytes for workers; refuse one that they could not make."""
        if start_method == "fork" and uses_jax():
            raise ConfigError(
                "start_method='fork' copies a process that has used JAX, whose threads the workers would lack; use "
                "'forkserver' or 'spawn'"
            )
        return pickled_for_workers(
            self,
            f"the environment {describe_env(self.env)}",
            "pass plain data, and functions or classes that a module defines at its top level (functools.partial adds "
            "arguments), or an id",
            "pass num_workers=0 or start_method='fork'",
            start_method,
        )


def require_picklable_tasks(tasks: Sequence[Task]) -> None:
    """Refuse tasks that cannot be sent to a worker."""
    for slot, task in enumerate(tasks):
        for name, value in task.items() if isinstance(task, Mapping) else [("", task)]:
            pickled(
                value,
                f"entry {name!r} of the task of slot {slot}, {describe_task(task)},",
                "a task holds numbers and arrays",
            )
