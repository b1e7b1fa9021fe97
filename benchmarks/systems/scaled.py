"""Our sampler, the limit for the same episodes, and whole iterations, all of them on some of this machine's cores."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.measuring import Measurements
from benchmarks.systems.layouts import Workload
from maml_rl.experiment.sampling import make_sampler
from maml_rl.machine import usable_cores

# Rows of one turn.
SAMPLER, LIMIT, THREADS = "sampler, worker processes", "replay of the same trajectories", "sampler, threads in process"
IN_THREADS = ("sampling, two phases", "update in threads", "iteration, update in threads")
IN_WORKERS = ("sampling, inner steps in workers", "update in workers", "iteration, update in workers")


class Scaled:
    """Samples, replays and trains on some cores; each iteration starts from the same parameters.

    Args:
        workload: what is sampled in every phase; its number of workers is that of the cores.
        cores: how many, spread evenly over those that this process may use.
        threads: measure threads, too, where there is more than one core.
    """

    def __init__(self, workload: Workload, cores: int, threads: bool = True) -> None:
        if hasattr(os, "sched_setaffinity"):
            usable = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, usable[:: len(usable) // cores][:cores])
        # torch counts the cores when it is imported.
        from benchmarks.systems.own_sampler import OwnSampler, SamplerAndReplay
        from maml_rl.config import Config
        from maml_rl.config.yaml_source import Mapping
        from maml_rl.experiment.build import make_experiment
        from maml_rl.profiling import StageTimer

        workers = replace(workload, num_workers=cores)
        self._pair = SamplerAndReplay(workers, SAMPLER, LIMIT)
        # With one core they are not threads.
        self._threads = OwnSampler(replace(workload, num_workers=0)) if threads and usable_cores() > 1 else None
        values = {
            "env-name": workload.env,
            "meta-batch-size": workload.num_tasks,
            "fast-batch-size": workload.episodes_per_task,
            "max-episode-steps": workload.horizon,
            "hidden-sizes": list(workload.hidden_sizes),
            "seed": workload.seed,
        }
        self._timer = StageTimer()
        self._experiment = experiment = make_experiment(Config.from_mapping(Mapping("the workload", values)))
        self._learner: Any = experiment.metalearner
        self._samplers: dict[tuple[str, str, str], Any] = {}
        # One worker computes what one thread does.
        places = [(IN_THREADS, "driver")] if threads or cores == 1 else []
        for names, update in (*places, *([(IN_WORKERS, "workers")] if cores > 1 else [])):
            config = experiment.config.override({"num-workers": cores, "update": update})
            self._samplers[names] = make_sampler(replace(experiment, config=config), timer=self._timer)
        self._tasks = next(iter(self._samplers.values())).sample_tasks(workload.num_tasks)
        self._initial = {name: value.clone() for name, value in self._learner.policy.state_dict().items()}

    def turn(self) -> Measurements:
        """Return steps per second, and the seconds of an iteration, of its halves and of its stages."""
        measured = dict(self._pair.turn())
        if self._threads is not None:
            episodes, _, seconds = self._threads.sample()
            measured[THREADS] = episodes.num_steps / seconds
        for names, sampler in self._samplers.items():
            self._learner.policy.load_state_dict(self._initial)
            sampler.seek(0)
            self._timer.take()
            start = time.perf_counter()
            batch = self._learner.collect(sampler, self._tasks)
            sampled = time.perf_counter()
            stages = self._timer.take()
            self._learner.learn(batch, 0)
            updated = time.perf_counter()
            spent = sampled - start, updated - sampled, updated - start
            measured |= zip(names, spent, strict=True)
            if names is IN_THREADS:
                measured |= {f"stage {name}": each for name, each in stages.items()}
        return measured

    def messages(self) -> tuple[int, int]:
        """Return how many messages a phase sends to worker processes, and how many bytes these have."""
        with _counted_messages() as sizes:
            self._pair.sample()
        return len(sizes), sum(sizes)

    def main_process(self, workers: int) -> dict[str, tuple[float, str]]:
        """Return what an iteration costs the main process with so many workers that compute the update: value, unit."""
        config = self._experiment.config.override({"num-workers": workers, "update": "workers"})
        with make_sampler(replace(self._experiment, config=config)) as sampler:
            for _ in range(2):  # The first time workers get the policy, and import what they need.
                self._learner.policy.load_state_dict(self._initial)
                sampler.seek(0)
                with _counted_messages() as sizes:
                    times = [time.process_time()]
                    batch = self._learner.collect(sampler, self._tasks)
                    times.append(time.process_time())
                    self._learner.learn(batch, 0)
                    times.append(time.process_time())
        return {
            "CPU time of sampling, inner steps in workers": (times[1] - times[0], "s"),
            "CPU time of an update in workers": (times[2] - times[1], "s"),
            "messages in an iteration": (len(sizes), "messages"),
            "sent in an iteration": (sum(sizes), "bytes"),
        }

    def under_the_lock(self) -> tuple[float, float]:
        """Return the seconds of an update on one core, and those outside of torch's operations, under Python's lock."""
        from torch.profiler import ProfilerActivity, profile

        self._learner.policy.load_state_dict(self._initial)
        batch = self._learner.collect(self._samplers[IN_THREADS], self._tasks)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            start = time.perf_counter()
            self._learner.learn(batch, 0)
            seconds = time.perf_counter() - start
        inside = sum(event.self_cpu_time_total for event in profiled.key_averages()) / 1e6
        return seconds, max(0.0, seconds - inside)

    def close(self) -> None:
        """End all processes."""
        for sampler in self._samplers.values():
            sampler.close()
        if self._threads is not None:
            self._threads.close()
        self._pair.close()


@contextmanager
def _counted_messages() -> Iterator[list[int]]:
    """Yield the sizes in bytes of the messages that this process sends to workers in the `with` block."""
    from maml_rl.samplers.work.child.messages import Channel

    sizes, send = list[int](), Channel.send_some

    def counting(channel: Channel, message: bytes | memoryview) -> int:
        sent = send(channel, message)
        # The rest of a message that the socket did not take at once comes as another view.
        if isinstance(message, memoryview):
            sizes[-1] += sent
        else:
            sizes.append(sent)
        return sent

    Channel.send_some = counting  # type: ignore[method-assign, assignment]
    try:
        yield sizes
    finally:
        Channel.send_some = send  # type: ignore[method-assign]
