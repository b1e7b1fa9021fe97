"""References of families: `python -m benchmarks.references` writes maml_rl/certified/references.json.

Random actions are uniform over the space, in 5 episodes of each of 200 tasks. The oracle observes its task, and was
trained by TRPO: its return is the mean of the last row of each run in docs/results, or of the CSV that a family has for
this alone, docs/results/references/FAMILY.csv, which --train makes.
"""

import csv
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maml_rl.cli.console import Parser
from maml_rl.config.catalog import find_config
from maml_rl.config.config import load_config
from maml_rl.envs.make_env import make_vector_env
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import FREE, REFERENCES, evaluate, evaluate_trials
from maml_rl.experiment.train import train

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
# The folder of the oracle's CSV below docs/results, steps of an episode, and the default arguments.
FAMILIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "2DNavigation-v0": ("2d-navigation", 100, {"low": -0.5, "high": 0.5}),
    "SparsePointGoal-v0": ("sparse-point-goal", 20, {}),
    "HalfCheetahDir-v5": ("halfcheetah-dir", 100, {}),
    "HalfCheetahVel-v5": ("halfcheetah-vel", 100, {"low": 0.0, "high": 2.0}),
    "HalfCheetahRandParams-v5": ("references", 100, {"log_scale_limit": 3.0}),
    "AntDir-v5": ("ant-dir", 100, {}),
}
# Of a training for this alone; then as many tasks and episodes as a random one has.
CONFIG = "maml/halfcheetah-rand-params"
TRAINED = {
    "method": "oracle",
    "max-episode-steps": 100,
    "meta-batch-size": 20,
    "fast-batch-size": 10,
    "num-batches": 200,
    "algorithm-settings": {"max-kl": 0.03},
}
TASKS, EPISODES = 200, 5


class Uniform:
    """Draws actions of a space uniformly."""

    def __init__(self, space: Any) -> None:
        self._space, self._num = space, 0
        space.seed(0)

    def reset(self, num_tasks: int) -> None:
        """Begin trials."""
        self._num = num_tasks

    def act(self, observations: Any, rewards: Any, dones: Any) -> Any:
        """Return actions of all tasks."""
        return np.stack([self._space.sample() for _ in range(self._num)])


def random_return(env_name: str, steps: int) -> float:
    """Return the mean return of random actions."""
    env = make_vector_env(env_name, {})
    found = evaluate_trials(Uniform(env.single_action_space), env_name, TASKS, EPISODES, max_episode_steps=steps)
    return float(found.returns.mean(dtype=np.float64))


def oracle_return(path: Path) -> float:
    """Return the mean, over seeds, of the last return in a CSV."""
    with path.open() as file:
        last = {row["seed"]: float(row["return_0"]) for row in csv.DictReader(file)}
    return float(np.mean(list(last.values())))


def train_oracle(path: Path) -> None:
    """Train an oracle, and write the mean of its returns on new tasks."""
    config = load_config(find_config(CONFIG)).override(TRAINED)
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run")
        experiment = make_experiment(config)
        experiment.restore("last", Path(folder) / "run")
        found = evaluate(experiment, TASKS)
    steps = config.num_batches * config.meta_batch_size * config.fast_batch_size * 100
    row = f"{config.seed},{config.num_batches},{steps},{found.returns.mean(dtype=np.float64):.3f}"
    path.write_text(f"seed,iteration,env_steps,return_0\n{row}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all families."""
    parser = Parser(description=__doc__)
    parser.add_argument("--train", action="store_true", help="train the oracles that have no run in the suite")
    options = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    for name, (folder, steps, env_kwargs) in FAMILIES.items():
        path = RESULTS / folder / ("oracle.csv" if folder != "references" else f"{name}.csv")
        if folder == "references" and options.train:
            train_oracle(path)
        if not path.is_file():
            print(f"{name} has no oracle; --train trains it")
            continue
        known: dict[str, Any] = {"env-name": name, "env-kwargs": env_kwargs, "max-episode-steps": steps}
        returns = {"random": random_return(name, steps), "oracle": oracle_return(path)}
        found.append(known | {key: round(value, 3) for key, value in returns.items()})
        print(found[-1])
    assert not any(key in FREE for each in found for key in each["env-kwargs"])
    REFERENCES.write_text("[\n" + ",\n".join(f"  {json.dumps(each)}" for each in found) + "\n]\n")


if __name__ == "__main__":
    main()
