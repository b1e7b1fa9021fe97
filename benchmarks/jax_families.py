"""Sampling of families in JAX against a loop that is written by hand for one of them, and against JAX alone.

    python -m benchmarks.jax_families --steps 50 --repeats 7 --json jax.json
    python -m benchmarks.jax_families --device cuda --families xland --slots 8192 65536 --json jax-gpu.json

All participants step the same functions of the same environments, compiled once; they are interleaved, and ratios are
taken round by round, of CPU time where everything is on the CPU. The loop by hand knows nothing of maml_rl: NumPy views
go into the compiled step and come out of it, and are recorded in torch tensors. With `--device cuda`, the sampler's
device backend is measured against the environments alone, by the clock; that needs JAX's build for GPUs, as from `pip
install 'jax[cuda12]'`. The first phase, compilation included, is timed in this process and in a worker.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from benchmarks.measuring import Participant, describe, machine, ratios, take_turns
from maml_rl import MultiTaskSampler
from maml_rl.cli.console import Parser
from maml_rl.policies import GRUPolicy, Policy, get_policy_for_env

SIZES = {"pendulum": (64, 1024, 8192), "maze": (64, 1024, 8192), "xland": (64, 1024)}
# Tasks and environments of each.
GRIDS = {8: (2, 4), 64: (8, 8), 1024: (32, 32), 8192: (128, 64), 65536: (1024, 64)}
UNITS = 64


def family(name: str) -> Any:
    """Return a family whose observations are a vector of numbers, as the loop by hand takes them."""
    import jax.numpy as jnp

    from maml_rl.envs.jax import JaxFamily
    from maml_rl.envs.jax.gymnax_control import GymnaxVectorEnv
    from maml_rl.envs.jax.jumanji_maze import MazeVectorEnv
    from maml_rl.envs.jax.xland import XLandVectorEnv

    if name == "pendulum":
        return GymnaxVectorEnv.family_of("Pendulum-v1")
    if name == "maze":
        return MazeVectorEnv.family_of(10)
    tiles = XLandVectorEnv.make(colors=11, tiles=8, rules=4, steps=10_000)

    def numbers(result: Any) -> Any:
        state, observation, *more = result
        return state, observation.reshape(-1).astype(jnp.float32), *more

    return JaxFamily(
        lambda key, task: numbers(tiles.reset(key, task)),
        lambda key, state, action, task: numbers(tiles.step(key, state, action, task)),
        tiles.draw_tasks,
        tiles.action_space,
    )


class _Net(nn.Module):
    """A policy by hand: two tanh layers, or a GRU, and a head."""

    def __init__(self, num_inputs: int, num_units: int, kind: str) -> None:
        super().__init__()
        hidden = [nn.Linear(num_inputs, UNITS), nn.Tanh(), nn.Linear(UNITS, UNITS), nn.Tanh()]
        self.body = nn.GRUCell(num_inputs, UNITS) if kind == "gru" else nn.Sequential(*hidden)
        self.head, self.is_gru = nn.Linear(UNITS, num_units), kind == "gru"

    def forward(self, observations: Tensor, memory: Tensor, *, is_discrete: bool) -> tuple[Tensor, Tensor]:
        memory = self.body(observations, memory) if self.is_gru else self.body(observations)
        units = self.head(memory)
        if is_discrete:
            return (units - torch.log(-torch.log(torch.rand_like(units)))).argmax(-1).to(torch.int32), memory
        return units + torch.randn_like(units), memory


def _view(array: Any) -> Tensor:
    return torch.from_numpy(np.asarray(array))


class ByHand:
    """A loop for one family, and its environments alone."""

    def __init__(self, made: Any, num_slots: int, steps: int) -> None:
        import jax
        import jax.numpy as jnp

        self.num_slots, self.steps = num_slots, steps
        self.is_discrete = isinstance(made.action_space, spaces.Discrete)
        drawn = made.draw_tasks(np.random.default_rng(0), num_slots)
        tasks = {name: jnp.asarray(array) for name, array in drawn.items()}
        box = made.action_space

        def keys(seeds: Any, step: Any) -> Any:
            wrap = lambda data: jax.random.fold_in(jax.random.wrap_key_data(data, impl="threefry2x32"), step)  # noqa: E731
            return jax.vmap(wrap)(seeds)

        def begin(seeds: Any) -> Any:
            state, seen = jax.vmap(made.reset)(keys(seeds, 0), tasks)
            return (seeds, jnp.int32(0), jnp.zeros(num_slots, bool), state), seen

        def advance(carry: Any, seen: Any, actions: Any, tasks: Any) -> Any:
            seeds, step, over, state = carry
            step += 1
            actions = actions if self.is_discrete else jnp.clip(actions, box.low, box.high)
            stepped = jax.vmap(made.step)(keys(seeds, step), state, actions, tasks)
            new, observations, rewards, terminated, *_ = stepped
            terminated = jnp.broadcast_to(jnp.asarray(terminated), (num_slots,))

            def choose(one: Any, other: Any) -> Any:
                return jnp.where(over.reshape(over.shape + (1,) * (one.ndim - 1)), other, one)

            state, observations = jax.tree.map(choose, (new, observations), (state, seen))
            return (seeds, step, over | terminated, state), observations, jnp.where(over, 0.0, rewards), terminated

        self.begin, self.advance, self.tasks = jax.jit(begin), jax.jit(advance), tasks
        self.seeds = np.random.default_rng(1).integers(2**32, size=(num_slots, 2), dtype=np.uint32)
        _, seen = self.begin(self.seeds)
        shape = (num_slots,) if self.is_discrete else (num_slots, *made.action_space.shape)
        kind = torch.int32 if self.is_discrete else torch.float32
        self.actions, self.rewards = torch.zeros((steps, *shape), dtype=kind), torch.zeros(steps, num_slots)
        self.seen, self.over = torch.zeros(steps, *seen.shape), torch.zeros(steps, num_slots, dtype=torch.bool)
        self.num_units = int(made.action_space.n) if self.is_discrete else int(np.prod(made.action_space.shape))

    def net(self, kind: str) -> _Net:
        """Return a policy."""
        return _Net(self.seen.shape[-1], self.num_units, kind)

    def run(self, net: _Net) -> None:
        """Sample one episode in every slot."""
        with torch.inference_mode():
            memory = torch.zeros(self.num_slots, UNITS)
            carry, observations = self.begin(self.seeds)
            seen = _view(observations)
            for step in range(self.steps):
                self.seen[step] = seen
                actions, memory = net(seen, memory, is_discrete=self.is_discrete)
                self.actions[step] = actions
                carry, observations, rewards, over = self.advance(carry, observations, actions.numpy(), self.tasks)
                seen, self.rewards[step], self.over[step] = _view(observations), _view(rewards), _view(over)

    def alone(self) -> None:
        """Step the environments alone, with actions that were drawn before."""
        import jax

        carry, observations = self.begin(self.seeds)
        for actions in self.actions:
            carry, observations, _, _ = self.advance(carry, observations, actions.numpy(), self.tasks)
        jax.block_until_ready(observations)


def _policy(made: Any, kind: str) -> Policy:
    one = made(1)
    if kind == "gru":
        return GRUPolicy(one.single_observation_space, one.single_action_space, UNITS)
    return get_policy_for_env(one, (UNITS, UNITS), "tanh")


def measure(name: str, num_slots: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a family and a number of slots."""
    made, (num_tasks, per_task) = family(name), GRIDS[num_slots]
    started = time.perf_counter()
    hand = ByHand(made, num_slots, options.steps)
    on_cpu, clock = options.device == "cpu", time.process_time if options.device == "cpu" else time.perf_counter
    if on_cpu:
        hand.run(hand.net("mlp"))
    else:
        hand.alone()
    seconds = {"JAX alone": time.perf_counter() - started}
    samplers: list[Any] = []
    systems: dict[str, Callable[[], Any]] = {"alone": hand.alone}
    for kind in ("mlp", "gru"):
        place: dict[str, Any] = {"num_workers": 0} if on_cpu else {"backend": "device", "device": options.device}
        limits = {"seed": 0, "max_episode_steps": options.steps, **place}
        sampler = MultiTaskSampler(made, {}, per_task, _policy(made, kind).to(options.device), **limits)
        samplers.append(sampler)
        tasks = sampler.sample_tasks(num_tasks)
        started = time.perf_counter()
        sampler.rollout(tasks)
        seconds.setdefault("maml_rl", time.perf_counter() - started)
        systems[f"maml_rl {kind}"] = partial(sampler.rollout, tasks)
        if on_cpu and kind == "mlp" and name != "xland":
            # The policy acts in a worker process; the functions of xland are not those of a module.
            started = time.perf_counter()
            with MultiTaskSampler(made, {}, per_task, sampler.policy, **{**limits, "num_workers": 1}) as in_worker:
                in_worker.rollout(tasks)
            seconds["maml_rl, one worker"] = time.perf_counter() - started
        if on_cpu:
            systems[f"by hand {kind}"] = partial(hand.run, hand.net(kind))

    def turn(system: str, work: Callable[[], Any]) -> dict[str, float]:
        before = clock()
        work()
        if not on_cpu:
            torch.cuda.synchronize()
        return {system: num_slots * options.steps / (clock() - before)}

    participants = [Participant(system, partial(turn, system, work)) for system, work in systems.items()]
    found = take_turns(participants, repeats=options.repeats)
    for sampler in samplers:
        sampler.close()
    title = f"{name}, {num_slots:,} slots"
    rows = [{"name": f"{title}: {system}, steps/s", **values.as_dict()} for system, values in found.items()]
    for kind in ("mlp", "gru"):
        other = f"by hand {kind}" if on_cpu else "alone"
        share = ratios(found[f"maml_rl {kind}"], found[other])
        rows.append({"name": f"{title}: maml_rl {kind} / {other}", **share.as_dict()})
    rows.append({"name": f"{title}: first phase, seconds", **seconds})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(SIZES), default=list(SIZES), help="which families")
    parser.add_argument("--slots", nargs="+", type=int, choices=list(GRIDS), help="numbers of environments")
    parser.add_argument("--steps", type=int, default=100, help="steps of an episode")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, help="file that gets the rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # torch warns of views that must not be written to.
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    facts = machine(("gymnasium", "numpy", "torch", "jax", "gymnax", "jumanji", "xminigrid"))
    print(describe(facts), flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.families:
        for num_slots in options.slots or SIZES[name]:
            for row in measure(name, num_slots, options):
                rows.append(row)
                numbers = row if "median" not in row else {key: row[key] for key in ("median", "min", "max")}
                shown = ", ".join(f"{key} {value:,.3g}" for key, value in numbers.items() if key != "name")
                print(f"{row['name']}: {shown}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
