"""Draw the tasks of certified benchmarks: `python -m scripts.certify_tasks NAME ...` writes file and SHA-256.

A benchmark that is published never changes; give its successor a new version.
"""

import argparse
import hashlib
import json
import pickle
from typing import Any

import numpy as np

from maml_rl.envs.make_env import make_vector_env
from maml_rl.envs.tasks import task_key
from maml_rl.errors import ConfigError
from maml_rl.experiment.certified import FOLDER, REGISTRY
from maml_rl.task_distributions.task_files import save_tasks

_NAVIGATION = {"low": -0.5, "high": 0.5, "normalization_scale": 1.0}
_CHEETAH = {"normalization_scale": 10.0}
# By name: description, family, arguments, length of an episode, episodes before, number of tasks ("all" where there are
# few, "protocol" for Meta-World's own), repetitions.
_BENCHMARKS: dict[str, tuple[str, str, dict[str, Any], int, int, int | str, int]] = {
    "2d-navigation-v1": (
        "Goals in a square, after 20 episodes of 100 steps.",
        "2DNavigation-v0",
        _NAVIGATION,
        100,
        20,
        100,
        3,
    ),
    "sparse-point-goal-v1": (
        "Sparse goals on a half-circle, after 20 episodes of 20 steps.",
        "SparsePointGoal-v0",
        {"normalization_scale": 1.0},
        20,
        20,
        100,
        3,
    ),
    "tabular-mdp-v1": (
        "Processes of ten states and five actions, after up to 20 episodes of 10 steps.",
        "TabularMDP-v0",
        {"num_states": 10, "num_actions": 5},
        10,
        20,
        40,
        5,
    ),
    "bandit-k5-n10-v1": ("Ten pulls of five arms, which all count.", "Bandit-K5-v0", {"pulls": 10}, 10, 0, 500, 3),
    "gridnavi-v1": ("All 21 goals of the grid, the last of four episodes.", "GridNavi-v0", {}, 15, 3, "all", 10),
    "wind-v1": ("Winds that push a point, within an episode of 75 steps.", "Wind-v0", {}, 75, 0, 100, 3),
    "semicircle-v1": ("Goals on a half-circle, the second of two episodes.", "SemiCircle-v0", {}, 60, 1, 100, 3),
    "halfcheetah-dir-v1": (
        "Forward and backward, after 20 episodes of 100 steps.",
        "HalfCheetahDir-v5",
        _CHEETAH,
        100,
        20,
        "all",
        10,
    ),
    "halfcheetah-vel-v1": (
        "Velocities of 0 to 2, after 20 episodes of 100 steps.",
        "HalfCheetahVel-v5",
        {"low": 0.0, "high": 2.0, **_CHEETAH},
        100,
        20,
        40,
        3,
    ),
    "halfcheetah-vel-2x200-v1": (
        "Velocities of 0 to 3, the second of two episodes of 200 steps.",
        "HalfCheetahVel-v5",
        {"low": 0.0, "high": 3.0},
        200,
        1,
        40,
        3,
    ),
    "halfcheetah-dir-2x200-v1": (
        "Forward and backward, the second of two episodes of 200 steps.",
        "HalfCheetahDir-v5",
        {},
        200,
        1,
        "all",
        10,
    ),
    "ant-dir-v1": (
        "Forward and backward, after 20 episodes of 100 steps.",
        "AntDir-v5",
        _CHEETAH,
        100,
        20,
        "all",
        10,
    ),
    "walker2d-rand-params-v1": (
        "Dynamics parameters of a walker, after 20 episodes of 200 steps.",
        "Walker2DRandParams-v5",
        {"log_scale_limit": 3.0, **_CHEETAH},
        200,
        20,
        40,
        3,
    ),
}
_BENCHMARKS["half-cheetahs-2x100-v1"] = (
    "Velocities, directions and dynamics parameters of half-cheetahs, the second of two episodes of 100 steps.",
    "Mixture-v0",
    {"families": ["HalfCheetahVel-v5", "HalfCheetahDir-v5", "HalfCheetahRandParams-v5"]},
    100,
    1,
    60,
    3,
)
_BENCHMARKS |= {
    f"ml1-{name}-v1": (
        f"All 40 test goals of {name}-v3, after ten episodes of 500 steps.",
        f"MetaWorld/ML1-{name}-v3",
        {},
        500,
        10,
        40,
        3,
    )
    for name in ("reach", "push", "pick-place")
}
_BENCHMARKS["ml10-v1"] = (
    "All 40 goals of each of the five test environments, after ten episodes of 500 steps.",
    "MetaWorld/ML10-v3",
    {},
    500,
    10,
    "protocol",
    1,
)
# Number of draws that finds all tasks of a family that has few.
_MANY = 5_000


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="+", choices=list(_BENCHMARKS), help="of the benchmarks")
    registry = json.loads(REGISTRY.read_text(encoding="utf-8")) if REGISTRY.exists() else {}
    for name in parser.parse_args(arguments).names:
        if name in registry:
            raise ConfigError(f"{name} is certified already and must not change; add a new version")
        description, env_name, env_kwargs, steps, before, count, repetitions = _BENCHMARKS[name]
        env = make_vector_env(env_name, env_kwargs, max_episode_steps=steps)
        # The name keys the stream, so that no training draws from it.
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        if count == "protocol":
            tasks = _tasks_of_ml10()
        else:
            tasks = env.sample_tasks(_MANY if count == "all" else int(count), seed=seed, evaluation=True)
        env.close()
        if count == "all":
            different = {task_key(task): task for task in tasks}
            tasks = [different[key] for key in sorted(different)]
        path = FOLDER / f"{name}.json"
        save_tasks(path, env_name, tasks)
        registry[name] = {
            "description": description,
            "env_name": env_name,
            "env_kwargs": env_kwargs,
            "max_episode_steps": steps,
            "episodes_before": before,
            "repetitions": repetitions,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        print(f"{name}: {len(tasks)} tasks")
    REGISTRY.write_text(json.dumps(dict(sorted(registry.items())), indent=2) + "\n", encoding="utf-8")


def _tasks_of_ml10() -> list[dict[str, Any]]:
    """Return the first 40 test goals of each environment of `metaworld.ML10(seed=0)`, as in the protocol."""
    import metaworld

    goals: dict[str, list[Any]] = {}
    for task in metaworld.ML10(seed=0).test_tasks:
        goals.setdefault(task.env_name, []).append(pickle.loads(task.data)["rand_vec"])
    return [
        {"env_name": name, "rand_vec": np.concatenate([vector, np.zeros(6 - len(vector))])}
        for name, vectors in goals.items()
        for vector in vectors[:40]
    ]


if __name__ == "__main__":
    main()
