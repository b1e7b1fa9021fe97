"""The metrics of an iteration's batch, computed where its episodes are."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from maml_rl.derivatives import Cache, EpisodeStore
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy


def count_steps(batch: EpisodeStore) -> int:
    """Return the number of real steps, all phases together."""
    return sum(batch.map(_steps))


def policy_spread(policy: Policy, batch: EpisodeStore) -> dict[str, float]:
    """Return the mean entropy and standard deviation of a policy's actions: how much it still explores.

    Args:
        policy: as it is, before any adaptation.
        batch: the episodes; the metrics use the first episode of each task before adaptation.

    Returns:
        "policy/entropy", in nats, and "policy/std", the mean over the entries of an action; without what the policy's
        distribution does not have, and empty for a policy with a memory.
    """
    if not policy.stateless or policy.has_memory:
        return {}
    of_chunks = batch.map(_spread, policy)
    names = [name for name in of_chunks[0] if all(name in chunk for chunk in of_chunks)]
    totals = {name: torch.stack([chunk[name] for chunk in of_chunks]).sum(0) for name in names}
    spread = {f"policy/{name}": float(total[0] / total[1]) for name, total in totals.items()}
    return {name: value for name, value in spread.items() if math.isfinite(value)}


def share_without_signal(batch: EpisodeStore) -> dict[str, float]:
    """Return "no_signal", the share of tasks whose rewards gave no signal, over all phases; {} without advantages."""
    of_chunks = batch.map(_without_signal)
    known = [flags for flags in of_chunks if len(flags)]
    return {"no_signal": float(torch.cat(known).double().mean())} if known else {}


def digest_of(batch: EpisodeStore) -> str:
    """Return one SHA-256 for the episodes of all phases, from those of each task, phase by phase."""
    of_chunks = batch.map(_digests)
    in_order = [digest for of_phase in zip(*of_chunks, strict=True) for of_chunk in of_phase for digest in of_chunk]
    return hashlib.sha256("".join(in_order).encode()).hexdigest()


def _steps(phases: Sequence[TaskEpisodes], cache: Cache) -> int:
    return sum(episodes.num_steps for episodes in phases)


def _without_signal(phases: Sequence[TaskEpisodes], cache: Cache) -> Tensor:
    """Return for each phase with advantages and each task whether all of them are zero."""
    flags = [(episodes.advantages == 0.0).all(2).all(1).cpu() for episodes in phases if episodes.has_advantages]
    return torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool)


def _digests(phases: Sequence[TaskEpisodes], cache: Cache) -> list[list[str]]:
    return [[episodes.part(slice(task, task + 1)).digest() for task in range(len(episodes))] for episodes in phases]


def _spread(phases: Sequence[TaskEpisodes], cache: Cache, policy: Policy) -> dict[str, Tensor]:
    """Return sum and number of the averaged values, (2,) float64 by name."""
    episodes = phases[0]
    real = episodes.mask[:, :, 0].bool()
    observations = episodes.observations[:, :, 0][real].to(next(policy.parameters()).device)
    with torch.no_grad():
        distribution = policy(observations)
    spread = {}
    for name, measure in (("entropy", distribution.entropy), ("std", lambda: distribution.stddev)):
        try:
            values = measure().double()
        except (NotImplementedError, AttributeError):
            continue
        spread[name] = torch.stack([values.sum(), values.new_tensor(float(values.numel()))]).cpu()
    return spread
