"""The seconds of an update of every learner on one device: what `benchmarks.updates --device` runs.

Each learner samples one batch on the CPU and learns from it again and again, as the first updates record the graphs of
its gradient steps. A row is written as soon as it is known; a learner that fails has the error in its row.
"""

import dataclasses
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measuring import machine
from maml_rl.config.catalog import find_config
from maml_rl.config.config import load_config
from maml_rl.experience.recording import About, Recording, load_histories, space_as_json
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.metalearners import EpisodeStore
from maml_rl.metalearners.history_learner import HistoryLearner
from maml_rl.policies.classical import RandomPolicy
from maml_rl.samplers import MultiTaskSampler

# Configs of the learners, the most valuable first, with changes.
LEARNERS: dict[str, dict[str, Any]] = {
    "rl2/halfcheetah-dir-2x200": {},
    "rsac/semicircle": {"algorithm-settings": {"warmup-trials": 1, "num-updates": 100}},
    "varibad/gridnavi": {},
    "rl2/tabular-mdp-n10-transformer": {},
    "amago/half-cheetahs": {"algorithm-settings": {"warmup-trials": 1, "num-updates": 20}},
    "pearl/halfcheetah-dir": {"algorithm-settings": {"warmup-steps": 1, "num-updates": 100}},
    "dpt/bandit-k5-n100": {"algorithm-settings": {"histories": None}},
    "ad/dark-room": {"algorithm-settings": {"histories": None, "keep": 1}},
    "amago-offline/dark-room": {"algorithm-settings": {"histories": None, "keep": 1}},
    "maml/halfcheetah-dir": {},
    "promp/halfcheetah-dir": {},
}
SMALL = {"meta-batch-size": 3, "fast-batch-size": 2, "max-episode-steps": 5, "num-workers": 0}
# Histories that learners of them learn from: as many, of so many episodes.
_HISTORIES, _EPISODES = 64, 40


@dataclasses.dataclass(slots=True)
class UpdateTime:
    """The time of a learner's update.

    Attributes:
        name: of its config.
        device: where it learned.
        seconds: the median of the updates that count; None if it failed.
        first_seconds: of the first update, in which graphs are recorded.
        gradient_steps: in an update, where a learner counts them.
        graphs: that were recorded, of all shapes; None where steps are not recorded on this device.
        refusal: why they are not recorded.
        error: of the learner.
    """

    name: str
    device: str
    seconds: float | None = None
    first_seconds: float | None = None
    gradient_steps: int | None = None
    graphs: int | None = None
    refusal: str | None = None
    error: str | None = None


def measure(name: str, device: torch.device, *, repeats: int = 3, seed: int = 0, small: bool = False) -> UpdateTime:
    """Return the time of one learner's update; whatever it raises is in the result."""
    row = UpdateTime(name, str(device))
    try:
        _measure(row, device, repeats, seed, small)
    except Exception as error:
        row.error = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return row


def all_updates(
    device: torch.device,
    *,
    names: list[str] | None = None,
    repeats: int = 3,
    seed: int = 0,
    small: bool = False,
    seconds: float = float("inf"),
) -> Iterator[UpdateTime]:
    """Yield the time of every learner's update, in the order of `LEARNERS`, until there are no seconds left."""
    ends = time.monotonic() + seconds
    for name in LEARNERS if names is None else names:
        if time.monotonic() < ends:
            yield measure(name, device, repeats=repeats, seed=seed, small=small)


def run(device: str, path: Path | None, names: list[str], repeats: int, seed: int, *, small: bool) -> None:
    """Measure learners; print each row, and write all of them to a file, as soon as it is known."""
    rows: list[dict[str, Any]] = []
    for row in all_updates(torch.device(device), names=names, repeats=repeats, seed=seed, small=small):
        rows.append(dataclasses.asdict(row))
        print(json.dumps(rows[-1]), flush=True)
        if path is not None:
            path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _measure(row: UpdateTime, device: torch.device, repeats: int, seed: int, small: bool) -> None:
    config = load_config(find_config(row.name)).override({"seed": seed, "num-batches": 1000, **LEARNERS[row.name]})
    if small:
        few = {"algorithm-settings": {"num-updates": 5}} if "num-updates" in config.algorithm_settings else {}
        sizes = {} if "histories" in config.algorithm_settings else SMALL
        config = config.override({**sizes, **few})
    annealed = {"anneal-over": None} if "anneal-over" in config.algorithm_settings else {}
    config = config.override({"algorithm-settings": annealed})
    batch = _batch_of(make_experiment(config), small)
    experiment = make_experiment(config, device)
    learner = experiment.metalearner
    if isinstance(learner, HistoryLearner):
        _let_learn(experiment, learner, small)

    def update(number: int) -> float:
        started = _wait(device)
        metrics = learner.learn(batch, number)
        row.gradient_steps = metrics.get("updates")
        return _wait(device) - started

    with warnings.catch_warnings():
        # The reason is in the row.
        warnings.filterwarnings("ignore", "gradient steps are not recorded")
        row.first_seconds = update(0)
        steps = _steppers(learner)
        # Until a learner of a few steps in an update has recorded them, too.
        number = 1
        while number < 4 and any(each.refusal is None and not each.num_recorded for each in steps):
            update(number)
            number += 1
        row.seconds = median(update(number + repeat) for repeat in range(repeats))
    if steps:
        row.graphs = sum(each.num_recorded for each in steps)
        row.refusal = next((each.refusal for each in steps if each.refusal is not None), None)


def _batch_of(experiment: Experiment, small: bool) -> EpisodeStore:
    learner = experiment.metalearner
    if isinstance(learner, HistoryLearner):
        return learner.store_of([])
    with make_sampler(experiment, num_workers=0 if small else None) as sampler:
        return learner.collect(sampler, sampler.sample_tasks(experiment.config.meta_batch_size))


def _let_learn(experiment: Experiment, learner: HistoryLearner, small: bool) -> None:
    """Have it learn from histories of random actions, which take as long as others."""
    config, space = experiment.config, learner.policy.action_space
    num, length = (4, 12) if small else (_HISTORIES, _EPISODES)
    policy = RandomPolicy(int(space.n))  # type: ignore[attr-defined]
    kwargs = config.env_kwargs
    with (
        MultiTaskSampler(config.env_name, kwargs, 1, policy, num_workers=0, seed=0) as sampler,
        tempfile.TemporaryDirectory() as folder,
    ):
        tasks = sampler.sample_tasks(num)
        phases = [sampler.rollout(tasks) for _ in range(length)]
        described = [space_as_json(space) for space in (sampler.env.observation_space, sampler.env.action_space)]
        about = About(
            env_id=config.env_name,
            env_kwargs=kwargs,
            horizon=phases[0].rewards.shape[1],
            observation_space=described[0],
            action_space=described[1],
            tasks=list(phases[0].tasks),
            learner_seeds=[0] * num,
            learner="random",
            settings={},
            num_iterations=length,
        )
        recording = Recording(Path(folder) / "histories", about)
        for episodes in phases:
            recording.append(episodes)
        recording.save({})
        learner.learn_from(load_histories(Path(folder) / "histories"))


def _steppers(learner: Any) -> list[Any]:
    found = [getattr(learner, name, None) for name in ("stepper", "belief_stepper")]
    return [each for each in found if each is not None and each.is_recorded]


def _wait(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    wait: Callable[[torch.device], None] | None = torch.cuda.synchronize if device.type == "cuda" else None
    if wait is not None:
        wait(device)
    return time.perf_counter()
