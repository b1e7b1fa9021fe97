"""Updates of recurrent SAC per second: ours, and a plain torch loop of the published networks.

    python -m benchmarks.recurrent_sac --json recurrent-sac.json

Batches of 64 trials of 75 steps of Wind, the published networks (a recurrent layer of 64 units, embeddings of 32 and 8,
two hidden layers of 128), for a GRU, as published, and for an LSTM. One turn is `--updates` updates, on one thread,
measured in processor time. Ratios are taken round by round.
"""

import argparse
from collections.abc import Callable
from time import process_time
from typing import get_args

import numpy as np
import torch
from gymnasium import spaces

from benchmarks.measuring import Measurements, Participant, machine, ratios, take_turns
from benchmarks.reporting import Report, Row, chosen, common_options, finish, progress
from benchmarks.systems.plain_recurrent_sac import PlainRecurrentSAC
from maml_rl.experience import Steps
from maml_rl.machine import intra_op_threads
from maml_rl.metalearners.collection import Collection
from maml_rl.metalearners.rsac import RSAC
from maml_rl.policies.recurrent import Cell
from maml_rl.policies.soft_actors import RecurrentActor

CELLS: tuple[Cell, ...] = get_args(Cell)
# Observation in Wind: two coordinates, the last action, its reward, and whether an episode has ended.
_OBSERVATION = spaces.Box(-np.inf, np.inf, (6,), np.float32)
_ACTION = spaces.Box(-0.1, 0.1, (2,), np.float32)
_LENGTH, _TRIALS, _GAMMA = 75, 64, 0.9


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    report = Report("recurrent-sac", machine(), chosen(options))
    with intra_op_threads(1):
        for cell in options.cells:
            _measure(report, options, cell)
    finish(report, options)


def _measure(report: Report, options: argparse.Namespace, cell: Cell) -> None:
    length, num = (5, 4) if options.quick else (_LENGTH, _TRIALS)
    trials = _trials(length, num, options.seed)
    policy = RecurrentActor(_OBSERVATION, _ACTION, cell=cell, seed=options.seed)
    learner = RSAC(policy, None, collection=Collection(gamma=_GAMMA), seed=options.seed)
    parts = policy.encoder.parts
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        plain = PlainRecurrentSAC(2, 2, cell=cell, gamma=_GAMMA)
        ways = {
            f"ours, {cell}": lambda: learner.step(trials),
            f"plain loop, {cell}": lambda: plain.update(trials, parts.observation, parts.last_action),
        }
        turns = [Participant(name, _timed(name, update, options.updates)) for name, update in ways.items()]
        rows = take_turns(turns, repeats=options.repeats, warmup=options.warmup, report=progress(options))
    for name, samples in rows.items():
        report.add("Updates of recurrent SAC", Row(name, samples, "updates per second of CPU time"))
    ours, other = rows.values()
    report.add("What sharing brings", Row(f"ours by the plain loop, {cell}", ratios(ours, other), "times"))


def _timed(name: str, update: Callable[[], object], count: int) -> Callable[[], Measurements]:
    def turn() -> Measurements:
        start = process_time()
        for _ in range(count):
            update()
        return {name: count / (process_time() - start)}

    return turn


def _trials(length: int, num: int, seed: int) -> Steps:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn((length, num, *shape), generator=generator)

    none = torch.zeros((length, num), dtype=torch.bool)
    actions = 0.1 * draw(2).tanh()
    return Steps(draw(6), actions, (draw() > 2.0).float(), draw(6), none, none, torch.ones((length, num)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_options((__doc__ or "").split("\n")[0])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="recurrent layers")
    parser.add_argument("--updates", type=int, default=5, help="updates in a turn")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.warmup, options.updates = 1, 0, 1
    return options


if __name__ == "__main__":
    main()
