"""What an accelerator does for this package, most valuable first: for a machine that is lent for minutes.

    python -m benchmarks.accelerator --minutes 5 --json accelerator.json

Every row is printed, and written to the file, as soon as it is known. A section that fails is a row with its error, and
the next one begins. With `--device cpu` everything is small, and shows that it works.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from benchmarks.device_updates import all_updates
from benchmarks.measuring import PACKAGES, machine
from maml_rl.cli.console import Parser
from maml_rl.config.catalog import find_config, find_run
from maml_rl.config.config import Config, load_config
from maml_rl.config.placement import Placement
from maml_rl.envs.make_env import Recipe
from maml_rl.envs.mujoco.mujoco_family import load_model
from maml_rl.envs.mujoco.physics import make_physics
from maml_rl.envs.mujoco.planar import HalfCheetahFamily, Walker2DFamily
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.in_processes import in_processes
from maml_rl.experiment.sampling import make_sampler
from maml_rl.policies import Policy, get_policy_for_env
from maml_rl.profiling import NULL_TIMER
from maml_rl.samplers.device.backend import DeviceBackend
from maml_rl.samplers.phase import Phase
from maml_rl.seeding import PhaseStreams

# Families of physics, with the numbers of worlds; and of array code.
PHYSICS = {
    "HalfCheetahDir-v5": (800, 32_000, 131_072, 8_000),
    "AntDir-v5": (800, 32_000),
    "Walker2DRandParams-v5": (800, 32_000, 131_072),
}
ARRAYS = {"GridNavi-v0": 131_072, "2DNavigation-v0": 131_072}
# Policies whose returns on the device are compared with those on the CPU.
POLICIES = ("halfcheetah-dir", "rl2/halfcheetah-dir-2x200", "ant-dir", "2d-navigation", "varibad/gridnavi")
_TEST_SECONDS = 240
# Of learning with each number of trials.
_LEARNING_SECONDS = 60.0
# Iterations of each of several seeds before those that are timed.
_UNTIMED, _TIMED = 3, 4
_SUBSTEP_STATES = 200


@dataclass
class Session:
    """One run of this benchmark.

    Attributes:
        device: that is measured.
        small: whether sizes are those of a test.
        path: of the file that gets the rows; None for none.
        ends: when no further section begins.
        rows: so far.
    """

    device: torch.device
    small: bool
    path: Path | None
    ends: float
    started: float = field(default_factory=time.monotonic)
    section: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)

    def row(self, name: str, value: float | str, unit: str = "", **more: Any) -> None:
        """Print a row, and write it."""
        row = {"section": self.section, "name": name, "value": value, "unit": unit, **more}
        row["at_seconds"] = round(time.monotonic() - self.started, 1)
        self.rows.append(row)
        shown = f"{value:,.4g}" if isinstance(value, float) else value
        further = " ".join(
            f"{key}={each:,.4g}" if isinstance(each, float) else f"{key}={each}" for key, each in more.items()
        )
        print(f"[{row['at_seconds']:6.1f} s] {self.section}: {name}: {shown} {unit} {further}".rstrip(), flush=True)
        self.write()

    def write(self) -> None:
        """Write the file anew, whole."""
        if self.path is not None:
            facts = machine((*PACKAGES, "warp-lang", "mujoco-warp"))
            facts["device"] = _device_name(self.device)
            self.path.write_text(json.dumps({"machine": facts, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")

    @property
    def left(self) -> float:
        """Seconds until no further section begins."""
        return self.ends - time.monotonic()

    def wait(self) -> float:
        """Wait for the device, and return the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def agreement(session: Session) -> None:
    """One substep of MuJoCo Warp from visited states, against MuJoCo itself."""
    models = {
        "HalfCheetah": HalfCheetahFamily.body_model(),
        "Ant": load_model("ant.xml", contact_forces=True),
        "Walker2D": Walker2DFamily.body_model(),
    }
    for name, model in models.items():
        random, sims = np.random.default_rng(0), 4 if session.small else 20
        plain = make_physics(model, sims, "mujoco")
        qpos, qvel = plain.bind("qpos"), plain.bind("qvel")
        starts = model.qpos0 + random.uniform(-0.1, 0.1, (sims, model.nq))
        plain.set_state(starts, 0.1 * random.standard_normal((sims, model.nv)))
        states = []
        for step in range(_SUBSTEP_STATES // 2 if not session.small else 20):
            controls = np.clip(random.standard_normal((sims, model.nu)), -1.0, 1.0)
            if step % 10 == 5:
                states.append((qpos.copy(), qvel.copy(), controls))
            plain.step(controls, 5)
        before, speed, controls = (np.concatenate(parts) for parts in zip(*states, strict=True))
        ours = make_physics(model, len(before), "warp", device=str(session.device))
        theirs = make_physics(model, len(before), "mujoco")
        found = {}
        for physics in (ours, theirs):
            physics.set_state(before, speed)
            physics.step(controls, 1)
            found[physics.engine] = [np.array(_host(physics.bind(each))) for each in ("qpos", "qvel")]
        for index, what in enumerate(("qpos", "qvel")):
            one, other = found["warp"][index], found["mujoco"][index]
            error = np.linalg.norm(one - other, axis=1) / np.linalg.norm(other, axis=1)
            session.row(
                f"{name}, {what} after one substep",
                float(np.median(error)),
                "relative, median",
                largest=float(error.max()),
                states=len(error),
            )


def _host(array: Any) -> Any:
    return array.cpu().numpy() if isinstance(array, Tensor) else array


def physics(session: Session) -> None:
    """Whole phases with a policy for each task, and the replay of their controls by the physics alone."""
    order = sorted(((size, env_id) for env_id, sizes in PHYSICS.items() for size in sizes), key=_importance)
    if session.small:
        order = [(8, env_id) for env_id in PHYSICS]
    for worlds, env_id in order:
        if session.left < 15:
            session.row(f"{env_id}, {worlds:,} worlds", "left out: no time")
            continue
        with _reported(session, f"{env_id}, {worlds:,} worlds"):
            _phases(session, env_id, worlds, 100 if not session.small else 2, replayed=True)


def _importance(entry: tuple[int, str]) -> tuple[bool, bool, int]:
    worlds, env_id = entry
    return worlds == 8_000, env_id != "HalfCheetahDir-v5" and worlds > 800, worlds


def arrays(session: Session) -> None:
    """Phases of the families that are array code."""
    for env_id, slots in ARRAYS.items():
        with _reported(session, env_id):
            _phases(
                session, env_id, slots if not session.small else 64, None if not session.small else 5, replayed=False
            )


def _phases(session: Session, env_id: str, worlds: int, horizon: int | None, *, replayed: bool) -> None:
    tasks = next(each for each in (40, 32, 4, 1) if worlds % each == 0)
    with _Sampling(session, env_id, tasks, worlds // tasks, horizon) as sampling:
        started = session.wait()
        sampling.run()
        first = session.wait() - started
        seconds = []
        for _ in range(1 if session.small else 3):
            started = session.wait()
            episodes = sampling.run()
            seconds.append(session.wait() - started)
        steps = worlds * sampling.horizon
        found = {"seconds": min(seconds), "first_phase_seconds": first, "steps_counted": float(episodes.lengths.sum())}
        if session.device.type == "cuda":
            found["memory_gib"] = torch.cuda.max_memory_allocated(session.device) / 2**30
        share = {}
        if replayed:
            raw = sampling.replay(episodes.actions)
            share = {"share": raw / min(seconds)}
            session.row(f"{env_id}, {worlds:,} worlds, physics alone", steps / raw, "steps/s")
        session.row(f"{env_id}, {worlds:,} worlds, whole phase", steps / min(seconds), "steps/s", **share, **found)


class _Sampling:
    """Phases of one family on the device, under random parameters of each task.

    Args:
        session: of the benchmark.
        env_id: the family.
        num_tasks: M.
        per_task: slots and episodes of each.
        horizon: T; None for the family's.
    """

    def __init__(self, session: Session, env_id: str, num_tasks: int, per_task: int, horizon: int | None) -> None:
        self._session, self._sizes = session, (num_tasks, per_task)
        placement = Placement(backend="device", device=str(session.device))
        self._backend = DeviceBackend(placement, Recipe.of(env_id, {}, horizon), per_task)
        described = self._backend.describe()
        self.horizon = horizon or described.max_episode_steps or 1
        env = gymnasium.make_vec(env_id, 1, vectorization_mode="vector_entry_point")
        policy = get_policy_for_env(env, hidden_sizes=(64, 64), nonlinearity="tanh")
        env.close()
        assert isinstance(policy, Policy)
        self._policy = policy.to(session.device)
        with torch.no_grad():
            stacked = policy.stack_parameters(num_tasks)
            random = torch.Generator(session.device).manual_seed(0)
            self._params = {
                name: value + 0.05 * torch.randn(value.shape, generator=random, device=session.device)
                for name, value in stacked.items()
            }
        self._tasks = tuple(self._backend.sample_tasks(num_tasks, 0))
        self._number = 0

    def run(self) -> Any:
        """Sample the next phase."""
        self._number += 1
        streams = PhaseStreams(0, self._number, 0)
        phase = Phase(self._tasks, self._policy, self._params, streams, self._sizes[1], self.horizon)
        return self._backend.run(phase, NULL_TIMER)

    def replay(self, actions: Tensor) -> float:
        """Return the seconds in which the physics alone repeats the last phase's controls from its start states."""
        slots = self._backend.slots
        family: Any = slots.family
        num_tasks, per_task = self._sizes
        seeds = PhaseStreams(0, self._number, 0).episode_seeds(num_tasks, range(per_task)).reshape(-1)
        slots.begin(torch.from_numpy(seeds).to(self._session.device))
        controls = [family.controls(actions[:, step].flatten(0, 1)) for step in range(actions.shape[1])]
        started = self._session.wait()
        for each in controls:
            slots.physics.step(each, family.substeps)
        seconds = self._session.wait() - started
        return seconds * self.horizon / max(1, len(controls))

    def __enter__(self) -> "_Sampling":
        return self

    def __exit__(self, *error: object) -> None:
        self._backend.close()
        if self._session.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def copies(session: Session) -> None:
    """Copies between host and device in one phase, as a profiler counts them."""
    for env_id in ("2DNavigation-v0", "HalfCheetahDir-v5"):
        with _reported(session, env_id), _Sampling(session, env_id, 4, 2, 3) as sampling:
            sampling.run()
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities[: 1 + (session.device.type == "cuda")]) as profile:
                sampling.run()
                session.wait()
            names = [event.name for event in profile.events()]
            for way in ("HtoD", "DtoH"):
                count = sum(f"Memcpy {way}" in name for name in names)
                session.row(f"{env_id}, copies {way} in a phase", float(count))


def iterations(session: Session) -> None:
    """Iterations of MAML-TRPO on HalfCheetahDir, 40 x 20 x 100: all of it on the device, and the update alone there."""
    changes = {"meta-batch-size": 40, "fast-batch-size": 20, "max-episode-steps": 100}
    if session.small:
        changes = {"meta-batch-size": 2, "fast-batch-size": 2, "max-episode-steps": 3}
    for name, own in (("on the device", {"engine": "warp"}), ("environments on the CPU", {"engine": "mujoco"})):
        with _reported(session, name):
            config = _config("maml/halfcheetah-dir", {**changes, **own, "num-workers": 0 if session.small else None})
            collecting, updating = _iterate(session, make_experiment(config, session.device), 2 if session.small else 6)
            session.row(
                f"MAML-TRPO, HalfCheetahDir, {name}",
                median(collecting) + median(updating),
                "s an iteration",
                sampling=median(collecting),
                update=median(updating),
            )


def trials(session: Session) -> None:
    """RL2 on HalfCheetahDir, 2 x 200 steps, by the trials of a batch: seconds, and what it learns in equal time."""
    for num_tasks in (16, 100, 1_000, 4_000) if not session.small else (2, 4):
        sizes = {"meta-batch-size": num_tasks}
        if session.small:
            sizes |= {"max-episode-steps": 3, "num-workers": 0}
        with _reported(session, f"RL2, {num_tasks:,} trials"):
            config = _config("rl2/halfcheetah-dir-2x200", {**sizes, "engine": "warp"})
            experiment, returns = make_experiment(config, session.device), list[float]()
            learning = 0.0 if session.small else _LEARNING_SECONDS
            collecting, updating = _iterate(session, experiment, 3, learning, returns)
            seconds, minutes = median(collecting) + median(updating), sum(collecting + updating) / 60.0
            steps = num_tasks * config.fast_batch_size * (config.max_episode_steps or 1)
            newest = returns[-max(1, len(returns) // 10) :]
            session.row(
                f"RL2, HalfCheetahDir 2 x 200, {num_tasks:,} trials",
                seconds,
                "s an iteration",
                sampling=median(collecting),
                update=median(updating),
                minutes_of_100_million_steps=1e8 / steps * seconds / 60.0,
                iterations=len(returns),
                first_return=returns[0],
                newest_return=sum(newest) / len(newest),
                return_per_minute=(sum(newest) / len(newest) - returns[0]) / minutes,
            )


def _iterate(
    session: Session, experiment: Experiment, count: int, seconds: float = 0.0, returns: list[float] | None = None
) -> tuple[list[float], list[float]]:
    """Return the seconds of collecting and of updating, of all iterations except the first.

    Args:
        session: of the benchmark.
        experiment: that learns.
        count: iterations at least.
        seconds: of those that count, at least.
        returns: gets the mean return after adaptation of each iteration.
    """
    learner, collecting, updating = experiment.metalearner, list[float](), list[float]()
    with make_sampler(experiment) as sampler:
        while len(collecting) < count or sum(collecting[1:] + updating[1:]) < seconds:
            started = session.wait()
            batch = learner.collect(sampler, sampler.sample_tasks(experiment.config.meta_batch_size))
            between = session.wait()
            learner.learn(batch, len(collecting))
            ended = session.wait()
            collecting.append(between - started)
            updating.append(ended - between)
            if returns is not None:
                returns.append(float(learner.returns(batch)[:, -1].double().mean()))
    return collecting[1:], updating[1:]


def seeds(session: Session) -> None:
    """Iterations of several seeds on one device, in three ways; which is fastest decides how `train --seeds` runs them.

    Processes share the device. Threads of one process have a stream each. In one batch a phase has the tasks of all
    seeds, and their updates follow one another: only the times of such a training, and those of its sampling are a
    bound, since all tasks have the parameters of one seed; learners with an axis of seeds are not built.
    """
    for name in ("rl2/halfcheetah-vel-2x200", "maml/halfcheetah-vel"):
        own: dict[str, Any] = {"engine": "warp"}
        if session.small:
            own = {"meta-batch-size": 2, "fast-batch-size": 2, "max-episode-steps": 3, "num-workers": 0}
        config, one = _config(name, own), 0.0
        for count in (1, 2, 4, 8) if not session.small else (1, 2):
            for way, measure in (("processes", _in_processes), ("threads", _in_threads), ("one batch", _in_one_batch)):
                if session.left < 0:
                    session.row(f"{name}, {count} seeds, {way}", "left out: no time")
                    continue
                with _reported(session, f"{name}, {count} seeds, {way}"):
                    seconds = measure(session, config, count)
                    one = one or seconds
                    session.row(
                        f"{name}, {count} seeds, {way}", seconds, "s for an iteration of each", times_one=seconds / one
                    )


def _in_processes(session: Session, config: Config, count: int) -> float:
    barrier = multiprocessing.get_context("spawn").Barrier(count, timeout=_TEST_SECONDS)
    calls = [(f"seed {seed}", (config.override({"seed": seed}), session.device, barrier)) for seed in range(count)]
    return max(float(seconds) for _, seconds in in_processes(_send_seconds, calls, count))


def _send_seconds(send: Callable[[float], None], config: Config, device: torch.device, barrier: Any) -> None:
    send(_iterate_together(Session(device, small=False, path=None, ends=0.0), config, barrier, nullcontext()))


def _in_threads(session: Session, config: Config, count: int) -> float:
    barrier, alone = threading.Barrier(count, timeout=_TEST_SECONDS), threading.Lock()

    def iterate(seed: int) -> float:
        stream = torch.cuda.stream(torch.cuda.Stream(session.device)) if session.device.type == "cuda" else None
        with stream or nullcontext():
            return _iterate_together(session, config.override({"seed": seed}), barrier, alone)

    with ThreadPoolExecutor(count) as threads:
        return max(threads.map(iterate, range(count)))


def _iterate_together(session: Session, config: Config, barrier: Any, alone: Any) -> float:
    """Return the seconds of an iteration while others iterate; they begin together.

    Graphs are recorded in the first iterations, `alone` where others would record theirs in the same process.
    """
    with alone:
        experiment = make_experiment(config, session.device)
        learner, tasks = experiment.metalearner, config.meta_batch_size
    with make_sampler(experiment) as sampler:
        with alone:
            for _ in range(_UNTIMED):
                learner.learn(learner.collect(sampler, sampler.sample_tasks(tasks)), 0)
            session.wait()
        barrier.wait()
        started = time.perf_counter()
        for _ in range(_TIMED):
            learner.learn(learner.collect(sampler, sampler.sample_tasks(tasks)), 0)
        seconds: float = (session.wait() - started) / _TIMED
        barrier.wait()
    return seconds


def _in_one_batch(session: Session, config: Config, count: int) -> float:
    batch = config.override({"meta-batch-size": count * config.meta_batch_size})
    collecting, _ = _iterate(session, make_experiment(batch, session.device), 1 + _TIMED)
    _, updating = _iterate(session, make_experiment(config, session.device), 1 + _UNTIMED + _TIMED)
    return median(collecting) + count * median(updating[-_TIMED:])


def _config(name: str, changes: dict[str, Any]) -> Config:
    return load_config(find_config(name)).override(changes)


def updates(session: Session) -> None:
    """Updates of the learners with their networks on the device, and on the CPU beside it."""
    found: dict[str, float] = {}
    for device in dict.fromkeys((session.device, torch.device("cpu"))):
        for row in all_updates(device, small=session.small, repeats=1 if session.small else 3, seconds=session.left):
            if row.seconds is None:
                session.row(f"{row.name}, {device}", "failed", "", error=row.error)
                continue
            more: dict[str, Any] = {"graphs": row.graphs, "refusal": row.refusal}
            if device != session.device and row.name in found:
                more = {"share": found[row.name] / row.seconds}
            found.setdefault(row.name, row.seconds)
            session.row(f"{row.name}, {device}", row.seconds, "s an update", first=row.first_seconds, **more)


def returns(session: Session) -> None:
    """Mean returns of trained policies, on the device and on the CPU, each with its interval."""
    for name in POLICIES[3:] if session.small else POLICIES:
        if session.left < 20:
            session.row(name, "left out: no time")
            continue
        with _reported(session, name):
            found = {}
            on_cpu = {"backend": "in-process" if session.small else "processes"}
            for place, own in (("device", {"backend": "device"}), ("cpu", on_cpu)):
                run = find_run(f"zoo:{name}")
                device = session.device if place == "device" else "cpu"
                experiment = make_experiment(load_config(run / "config.json").override(own), device)
                experiment.restore("last", run)
                evaluation = evaluate(experiment, 4 if session.small else 40)
                means = evaluation.task_returns()[:, -1]
                half = 1.96 * means.std(ddof=1) / len(means) ** 0.5
                found[place] = means.mean(), means.mean() - half, means.mean() + half
            (ours, *_), (theirs, low, high) = found["device"], found["cpu"]
            inside = bool(found["device"][1] <= theirs <= found["device"][2] and low <= ours <= high)
            session.row(
                f"{name}, mean return on the device",
                float(ours),
                "",
                low=float(found["device"][1]),
                high=float(found["device"][2]),
                cpu=float(theirs),
                cpu_low=float(low),
                cpu_high=float(high),
                within_both=inside,
            )


def tests(session: Session) -> None:
    """The tests that need CUDA."""
    if session.device.type != "cuda":
        session.row("tests marked cuda", "left out: no such device")
        return
    marked = [str(path) for path in sorted(Path("tests").rglob("test_*.py")) if "mark.cuda" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-m", "cuda", "-p", "no:cacheprovider", *marked]
    limited = ["timeout", str(_TEST_SECONDS), *command]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.strip().splitlines() if line.startswith(("E  ", "FAILED", "ERROR"))]
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    session.row("tests marked cuda", "".join(last), "", code=done.returncode, failed=lines[-30:])


# Most valuable first.
SECTIONS: dict[str, Callable[[Session], None]] = {
    "agreement": agreement,
    "physics": physics,
    "arrays": arrays,
    "iterations": iterations,
    "trials": trials,
    "seeds": seeds,
    "copies": copies,
    "updates": updates,
    "returns": returns,
    "tests": tests,
}


class _reported:  # noqa: N801 - a function that is a context
    """Turns an exception in the block into a row."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        lines = "".join(traceback.format_exception(error)).strip().splitlines()
        self._session.row(self._name, "failed", "", error=" | ".join(line.strip() for line in lines[-30:]))
        return True


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the command, and return the rows."""
    options = _parse(arguments)
    device = torch.device(options.device)
    session = Session(device, device.type == "cpu", options.json, time.monotonic() + 60.0 * options.minutes)
    for name in options.only:
        session.section = name
        if session.left < 0:
            session.row(name, "left out: no time")
            continue
        with _reported(session, name):
            SECTIONS[name](session)
    session.section = "end"
    session.row("failed rows", float(sum(row["value"] == "failed" for row in session.rows)))
    for line in _table(session.rows):
        print(line)
    return session.rows


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of one table of all rows with numbers."""
    for row in rows:
        if isinstance(row["value"], float):
            yield f"{row['section']:>11}  {row['name']:<60}  {row['value']:>16,.6g} {row['unit']}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--minutes", type=float, default=5.0, help="after which no further section begins")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections, in order")
    parser.add_argument("--json", type=Path, help="the file that gets the rows")
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


if __name__ == "__main__":
    sys.exit(any(row["value"] == "failed" for row in main()))
