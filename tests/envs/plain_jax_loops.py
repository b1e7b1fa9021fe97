"""The environments of each package in plain loops of JAX, which know nothing of maml_rl: what families must equal.

A loop gets seeds, tasks and actions, and steps one environment after the other. Each environment is two functions of
a package's own calls: `reset(key, task) -> state, observation`, `step(key, state, action, task) -> state, observation,
reward, over`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Plain(NamedTuple):
    reset: Callable[..., Any]
    step: Callable[..., Any]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one environment, compiled as a batch of one.

    Compiled without a batch, XLA may round the last bit otherwise, as it does for the pendulum.
    """
    batch = jax.jit(jax.vmap(function))

    def call(key: Any, *arguments: Any) -> Any:
        rows = jax.tree.map(lambda value: jnp.asarray(value)[None], (key, *arguments))
        return jax.tree.map(lambda value: value[0], batch(*rows))

    return call


@cache
def compiled_once(name: str) -> Plain:
    """Return the functions of an environment of this file, compiled once a process."""
    plain: Plain = globals()[name]()
    return plain if name == "maze" else Plain(*map(compiled, plain))


def cart_pole() -> Plain:
    import gymnax

    env, params = gymnax.make("CartPole-v1")

    def own(task: Any) -> Any:
        mass, length = task["masspole"], task["length"]
        more = {"total_mass": params.masscart + mass, "polemass_length": mass * length, "max_steps_in_episode": 10**9}
        return params.replace(gravity=task["gravity"], masspole=mass, length=length, **more)

    def reset(key: Any, task: Any) -> Any:
        observation, state = env.reset_env(key, own(task))
        return state, observation

    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        observation, state, reward, over, _ = env.step_env(key, state, action, own(task))
        return state, observation, reward, over

    return Plain(reset, step)


def pendulum() -> Plain:
    import gymnax

    env, params = gymnax.make("Pendulum-v1")

    def reset(key: Any, task: Any) -> Any:
        observation, state = env.reset_env(key, params.replace(**task))
        return state, observation

    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        observation, state, reward, *_ = env.step_env(key, state, jnp.clip(action, -2, 2), params.replace(**task))
        return state, observation, reward, False

    return Plain(reset, step)


def xland() -> Plain:
    import xminigrid
    from xminigrid.types import RuleSet

    env, params = xminigrid.make("XLand-MiniGrid-R1-9x9", height=7, width=7, view_size=5)

    def own(task: Any) -> Any:
        rules = {name: jnp.asarray(array, jnp.uint8) for name, array in task.items()}
        return params.replace(ruleset=RuleSet(**rules), max_steps=50)

    def reset(key: Any, task: Any) -> Any:
        first = env.reset(own(task), key)
        return first, first.observation.reshape(-1)

    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        following = env.step(own(task), state, action)
        return following, following.observation.reshape(-1), following.reward, following.last()

    return Plain(reset, step)


def maze() -> Plain:
    from jumanji.environments.routing.maze import Maze
    from jumanji.environments.routing.maze.generator import RandomGenerator

    env = Maze(RandomGenerator(6, 6))

    def see(timestep: Any) -> Any:
        at = timestep.observation.agent_position
        own = np.zeros((6, 6), np.float32)
        own[int(at.row), int(at.col)] = 1
        return np.concatenate([np.asarray(timestep.observation.walls, np.float32).ravel(), own.ravel()])

    reset, step = jax.jit(env.reset), jax.jit(env.step)

    def begin(key: Any, task: Any) -> Any:
        state, timestep = reset(jax.random.key(np.uint32(task["maze"])))
        return state, see(timestep)

    def go(key: Any, state: Any, action: Any, task: Any) -> Any:
        state, timestep = step(state, action)
        return state, see(timestep), timestep.reward, timestep.last()

    return Plain(begin, go)


def craftax() -> Plain:
    from craftax.craftax_env import make_craftax_env_from_name

    env: Any = make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=False)

    def reset(key: Any, task: Any) -> Any:
        observation, state = env.reset_env(jax.random.key(jnp.uint32(task["world"])), env.default_params)
        return state, observation

    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        observation, state, reward, over, _ = env.step_env(key, state, action, env.default_params)
        return state, observation, reward, over

    return Plain(reset, step)


def half_cheetah() -> Plain:
    from brax import envs

    env = envs.get_environment("halfcheetah", backend="spring")

    def reset(key: Any, task: Any) -> Any:
        state = env.reset(key)
        return state, state.obs

    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        action = jnp.clip(action, -1.0, 1.0)
        state = env.step(state, action)
        reward = -jnp.abs(state.metrics["x_velocity"] - task["velocity"]) - 0.05 * jnp.sum(jnp.square(action))
        return state, state.obs, reward, state.done > 0

    return Plain(reset, step)


def episode(plain: Plain, seed: int, task: dict[str, Any], actions: Any) -> tuple[list[Any], list[float], bool]:
    """Return the observations of an episode, its rewards, and whether it ended by itself.

    Args:
        plain: the environment, compiled or not.
        seed: below 2**63.
        task: numbers are float32 or uint32 in JAX.
        actions: as many as the longest episode may have.
    """
    kinds: dict[type, Any] = {float: np.float32, int: np.uint32}
    numbers = {name: kinds.get(type(value), np.asarray)(value) for name, value in task.items()}
    data = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(data, impl="threefry2x32"), 0)
    state, observation = plain.reset(jax.random.fold_in(key, 0), numbers)
    observations, rewards, over = [np.asarray(observation)], [], False
    for number, action in enumerate(actions, 1):
        state, observation, reward, over = plain.step(jax.random.fold_in(key, number), state, action, numbers)
        observations.append(np.asarray(observation))
        rewards.append(float(reward))
        if over:
            break
    return observations, rewards, bool(over)
