"""Learning speed of memories: `python -m benchmarks.recall` prints the tables of docs/notes/recurrent-memory.md.

A layer sees trials of tabular processes in which every action is random, and predicts each step's reward from what it
has seen and the action. There is no policy to learn: the remaining error is due to the memory. Of a reward's variance
of 2, 1 is noise, so at most 0.5 of it can be explained.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import torch

from maml_rl import MultiTaskSampler
from maml_rl.cli.console import Parser
from maml_rl.envs import ObservedLastStep, make_vector_env
from maml_rl.episode.trials import Trials
from maml_rl.policies import GRUPolicy, TransformerPolicy
from maml_rl.policies.classical import RandomPolicy
from maml_rl.policies.sequence_policy import SequencePolicy

FAMILY, EPISODES, SPAN = "TabularMDP-v0", 10, 100
Layer = Literal["gru", "lstm", "transformer", "transformer, token shift"]
TITLES = {"gru": "GRU", "lstm": "LSTM"}
LAYERS: tuple[tuple[Layer, int, float], ...] = (
    ("gru", 64, 4e-3),
    ("gru", 64, 1e-2),
    ("gru", 128, 4e-3),
    ("lstm", 64, 4e-3),
    ("lstm", 64, 1e-2),
    ("lstm", 128, 1e-2),
    ("transformer", 64, 3e-3),
    ("transformer, token shift", 64, 3e-3),
)


def explained(
    name: Layer, hidden_size: int, learning_rate: float, *, batches: int, trials: int, seed: int
) -> list[float]:
    """Return the share of the rewards' variance that a layer explains in each batch, before it learns from it."""
    space = make_vector_env(ObservedLastStep(FAMILY))
    shapes = space.single_observation_space, space.single_action_space, hidden_size
    layer: SequencePolicy
    if name == "gru" or name == "lstm":
        layer = GRUPolicy(*shapes, cell=name, value="none", memory_span=SPAN, predict_rewards=True, seed=seed)
    else:
        shift = name == "transformer, token shift"
        layer = TransformerPolicy(
            *shapes, context=SPAN, token_shift=shift, value="none", predict_rewards=True, seed=seed
        )
    optimizer = torch.optim.Adam(layer.parameters(), lr=learning_rate)
    shares = []
    options: dict[str, Any] = {"slots_per_task": 1, "observe_last": True, "num_workers": 0}
    with MultiTaskSampler(
        FAMILY, batch_size=EPISODES, policy=RandomPolicy(layer.head.out_features), seed=seed, **options
    ) as sampler:
        for _ in range(batches):
            of_batch = Trials.of(sampler.rollout_trials(sampler.sample_tasks(trials)))
            predicted = layer.predict_rewards(layer.unroll(of_batch.observations), of_batch.actions)
            # All trials are equally long: there is no padding.
            error = (predicted - of_batch.rewards).square().mean()
            shares.append(1.0 - float(error.detach() / of_batch.rewards.var(correction=0)))
            optimizer.zero_grad()
            error.backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
            optimizer.step()
    return shares


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = Parser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[200, 400, 600], help="when to say what is explained")
    parser.add_argument("--trials", type=int, default=64, help="trials of a batch, 100 steps each")
    parser.add_argument("--last", type=int, default=50, help="batches before that whose mean is shown")
    parser.add_argument("--seed", type=int, default=0, help="of weights and trials")
    options = parser.parse_args(arguments)
    print("| layer | units | step size | " + " | ".join(f"after {count} batches" for count in options.batches) + " |")
    print("|---|---:|---:|" + "---:|" * len(options.batches))
    for name, hidden_size, learning_rate in LAYERS:
        shares = explained(
            name,
            hidden_size,
            learning_rate,
            batches=max(options.batches),
            trials=options.trials,
            seed=options.seed,
        )
        means = [statistics.fmean(shares[max(0, count - options.last) : count]) for count in options.batches]
        cells = [TITLES.get(name, name), str(hidden_size), f"{learning_rate:g}", *(f"{mean:.3f}" for mean in means)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
