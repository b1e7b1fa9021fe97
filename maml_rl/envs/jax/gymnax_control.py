"""The classic control of gymnax, whose physical parameters are the task."""

from typing import Any

import numpy as np
from gymnasium import spaces

from maml_rl.envs.family import one_slot
from maml_rl.envs.jax import JaxFamily, ReadyMade, drawn_evenly, of_the_extra

with of_the_extra():
    import gymnax

# Lowest and highest value of each parameter, by gymnax's names of environments and parameters.
RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "Pendulum-v1": {"g": (7.0, 13.0), "m": (0.8, 1.2), "l": (0.8, 1.2)},
    "CartPole-v1": {"gravity": (7.0, 13.0), "masspole": (0.05, 0.5), "length": (0.25, 1.0)},
    "Acrobot-v1": {"link_length_1": (0.8, 1.2), "link_mass_1": (0.8, 1.2), "link_mass_2": (0.8, 1.2)},
    "MountainCar-v0": {"force": (0.0008, 0.0014), "gravity": (0.002, 0.003)},
}


class GymnaxVectorEnv(ReadyMade):
    """An environment of gymnax's classic control, by its `name` there; the task is its parameters of `RANGES`."""

    @staticmethod
    def make(name: str = "Pendulum-v1") -> JaxFamily:
        """Return the family, whose tasks are drawn evenly from `RANGES`."""
        if name not in RANGES:
            raise ValueError(f"gymnax has no classic control {name!r}; expected {', '.join(RANGES)}")
        (env, params), (draw, own) = gymnax.make(name), drawn_evenly(RANGES[name])

        def at(task: Any) -> Any:
            # The time limit is the package's, and no end of an episode by itself.
            changed = params.replace(max_steps_in_episode=np.iinfo(np.int32).max, **task)
            if name == "CartPole-v1":
                mass, length = changed.masspole, changed.length
                changed = changed.replace(total_mass=changed.masscart + mass, polemass_length=mass * length)
            return changed

        def reset(key: Any, task: Any) -> Any:
            return env.reset_env(key, at(task))[::-1]

        def step(key: Any, state: Any, action: Any, task: Any) -> Any:
            observation, state, reward, done, _ = env.step_env(key, state, action, at(task))
            # A pendulum never ends by itself.
            return state, observation, reward, name != "Pendulum-v1" and done, False, {}

        seen, acts = env.observation_space(params), env.action_space(params)
        space = spaces.Box(np.broadcast_to(seen.low, seen.shape), np.broadcast_to(seen.high, seen.shape))
        box = (
            spaces.Discrete(int(acts.n)) if hasattr(acts, "n") else spaces.Box(float(acts.low), float(acts.high), (1,))
        )
        return JaxFamily(reset, step, draw, box, space, params.max_steps_in_episode, task_space=own)


GymnaxEnv = one_slot(GymnaxVectorEnv)
