"""A slow environment behind HTTP: its slots wait concurrently, and an episode restarts when the service is busy.

The service here is a small server on this machine, which takes its time and now and then answers 503. Yours may be a
simulator, a robot or a language model; only `HeaterEnv` has to know how to talk to it.

    python examples/slow_service.py
"""

import argparse
import json
import random
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import gymnasium
import numpy as np

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.envs import MetaEnv, Retry, Task


class HeaterEnv(MetaEnv):
    """Keep a room at a temperature, which is the task; the room is at the other end of a connection."""

    stepping = "threads"  # The slots of a worker wait concurrently, unless a sampler is told otherwise.
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, url: str) -> None:
        self._url, self._target = url, 0.0

    def sample_tasks(self, num_tasks: int) -> list[Task]:
        """Draw target temperatures."""
        return [{"target": float(target)} for target in self.np_random.uniform(-2.0, 2.0, num_tasks)]

    def reset_task(self, task: Task) -> None:
        """Take a target temperature."""
        self._target = float(task["target"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Ask for a room that is determined by the seed, so that a restarted episode is the same episode."""
        super().reset(seed=seed)
        self._room = self._ask("open", {"seed": int(self.np_random.integers(2**32))})
        return np.array([self._room["temperature"]], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Heat or cool."""
        self._room = self._ask("heat", {**self._room, "power": float(action[0])})
        temperature = self._room["temperature"]
        return np.array([temperature], np.float32), -abs(temperature - self._target), False, False, {}

    def _ask(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self._url}/{what}", json.dumps(body).encode(), timeout=30) as answer:
                reply: dict[str, Any] = json.load(answer)
                return reply
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            # Only for temporary errors: any other error ends the sampling, and is shown.
            raise Retry(after=float(error.headers["Retry-After"]), reason="the service is busy") from error


class Service(BaseHTTPRequestHandler):
    """Rooms whose state travels with each request, so that the service can forget it."""

    latency, trouble = 0.1, 0.01
    chance = random.SystemRandom()

    def do_POST(self) -> None:
        """Answer after a while, or say that it is busy."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.latency * self.chance.uniform(0.5, 1.5))
        busy = self.chance.random() < self.trouble
        self.send_response(503 if busy else 200)
        if busy:
            self.send_header("Retry-After", "0.1")
        self.end_headers()
        if not busy:
            draws = np.random.default_rng([request["seed"], request.get("time", -1) + 1])
            warmed = request.get("temperature", 0.0) + 0.5 * request.get("power", 0.0) + 0.1 * draws.normal()
            room = {"seed": request["seed"], "time": request.get("time", -1) + 1, "temperature": warmed}
            self.wfile.write(json.dumps(room).encode())

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Takes many connections at once."""

    daemon_threads = True
    request_queue_size = 512


def main(arguments: list[str] | None = None) -> None:
    """Sample with and without concurrent waiting, and compare the times and the episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=4, help="of a batch (default: 4)")
    parser.add_argument("--episodes", type=int, default=4, help="of each task (default: 4)")
    parser.add_argument("--steps", type=int, default=10, help="of an episode (default: 10)")
    parser.add_argument("--latency", type=float, default=0.1, help="mean seconds of an answer (default: 0.1)")
    parser.add_argument("--trouble", type=float, default=0.01, help="share of requests refused (default: 0.01)")
    parser.add_argument("--num-workers", type=int, default=0, help="processes besides this one (default: 0)")
    options = parser.parse_args(arguments)
    Service.latency, Service.trouble = options.latency, options.trouble
    with Server(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        policy = get_policy_for_env(HeaterEnv(url), (16,))
        digests = set()
        for stepping in ("serial", "threads"):
            with MultiTaskSampler(
                partial(HeaterEnv, url),
                batch_size=options.episodes,
                policy=policy,
                seed=0,
                num_workers=options.num_workers,
                max_episode_steps=options.steps,
                stepping=stepping,
                max_retries=10,
            ) as sampler:
                tasks = sampler.sample_tasks(options.tasks)
                started = time.perf_counter()
                episodes = sampler.rollout(tasks)
                seconds = time.perf_counter() - started
                print(
                    f"{stepping:>7}: {episodes.num_steps} steps in {seconds:6.2f} s, {sampler.retries} episodes began "
                    f"anew, return {float(episodes.rewards.sum(1).mean()):.2f}, digest {episodes.digest()[:12]}"
                )
                digests.add(episodes.digest())
        server.shutdown()
    print("the same episodes" if len(digests) == 1 else "the episodes differ")


if __name__ == "__main__":
    main()
