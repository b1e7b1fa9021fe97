"""What was not recorded in a phase, computed afterward from its episodes: memories and log-probabilities."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from maml_rl.derivatives import ParameterLayout, chunks_of
from maml_rl.episode.steps import Steps
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.machine import single_threaded
from maml_rl.policies import Memory, Policy, as_policy
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.actor import Actor, phase_parameters

# Trials whose log-probabilities are computed at once.
_TRIALS_PER_PASS = 128


def memory_of(phase: Phase, episodes: TaskEpisodes, device: torch.device | str = "cpu") -> Memory:
    """Return the policy's memory before every action, tensors (M, T, B, *one slot's), zero on padding.

    Args:
        phase: that was sampled, with the parameters that the policy had.
        episodes: of the phase.
        device: where the policy acted.
    """
    num_tasks, steps, num_episodes = episodes.rewards.shape
    recorded: Memory = ()
    there, episodes = episodes.device, episodes.to("cpu")

    def record(actor: Actor, step: int, wave: slice) -> None:
        nonlocal recorded
        if not recorded:
            recorded = tuple(
                torch.zeros(num_tasks, steps, num_episodes, *kept.shape[2:], dtype=kept.dtype) for kept in actor.memory
            )
        real = episodes.lengths[:, wave] > step
        for kept, now in zip(recorded, actor.memory, strict=True):
            kept[:, step, wave][real] = now.cpu()[real]

    memory_after(phase, episodes, device, before_step=record)
    return tuple(kept.to(there) for kept in recorded)


def memory_after(
    phase: Phase,
    episodes: TaskEpisodes,
    device: torch.device | str = "cpu",
    before_step: Callable[[Actor, int, slice], None] | None = None,
) -> Memory:
    """Return the policy's memory after the last step of each slot, by acting once more in that step.

    Noise is keyed, and rows are computed in the same shape wherever they are, so that this is what was remembered in
    the phase itself, bit for bit. Nothing has to be kept or sent meanwhile.

    Args:
        phase: see `memory_of`.
        episodes: of the phase.
        device: where the policy acted.
        before_step: is given what acts, the number of the step, and the wave's range of episodes.

    Returns:
        Tensors (M, S, *one slot's).
    """
    num_tasks, per_task, episodes = len(phase.tasks), phase.per_task, episodes.to("cpu")
    rows = np.zeros((num_tasks * per_task, *episodes.observations.shape[3:]), episodes.observations.numpy().dtype)
    slots, running = slice(0, len(rows)), np.ones(len(rows), np.bool_)
    with torch.inference_mode(False), torch.no_grad(), single_threaded():
        actor = Actor(phase, device)
        actor.observe(rows)
        for number, first in enumerate(range(0, phase.episodes_per_task, per_task)):
            if first == 0 or phase.reset_memory:
                actor.begin_trial()
            wave = slice(first, first + per_task)
            for step in range(int(episodes.lengths[:, wave].max())):
                if before_step is not None:
                    before_step(actor, step, wave)
                rows[...] = episodes.observations[:, step, wave].flatten(0, 1).numpy()
                np.copyto(running, (episodes.lengths[:, wave] > step).flatten().numpy())
                actor.act(slots, number, step, running)
    return actor.memory


def log_probs_of(
    policy: Policy, params: Mapping[str, Tensor] | None, episodes: TaskEpisodes, slots_per_task: int | None = None
) -> Tensor:
    """Return the log-probability of every action under the parameters that it was chosen with.

    These are the same for all steps of a phase: in one pass afterwards it costs less than step by step.

    Args:
        policy: has chosen the actions.
        params: as the policy had them.
        episodes: of M tasks.
        slots_per_task: S, where the policy's memory was kept from episode to episode of a slot; None for none kept.

    Returns:
        (M, T, B) float32, zero on padding.
    """
    policy = as_policy(policy, episodes.observations.shape[3:])
    device = next(policy.parameters()).device
    if policy.has_memory:
        trials = Steps.of_trials(episodes, slots_per_task or episodes.rewards.shape[2])
        with torch.no_grad(), single_threaded():
            of_phase, is_stacked = phase_parameters(policy, len(episodes), params)
            per_task = trials.mask.shape[1] // len(episodes)
            columns = torch.arange(trials.mask.shape[1]).split(per_task if is_stacked else _TRIALS_PER_PASS)
            of_columns = []
            for index, chosen in enumerate(columns):
                own = {name: (value[index] if is_stacked else value).to(device) for name, value in of_phase.items()}
                unrolled = policy.unroll(trials.observations[:, chosen].to(device), params=own)
                log_probs = policy.distributions.log_prob(unrolled.distribution, trials.actions[:, chosen].to(device))
                of_columns.append(log_probs.float().to(episodes.device))
        return trials.as_episodes(torch.cat(of_columns, 1), episodes)
    log_probs = torch.zeros_like(episodes.rewards)
    with torch.no_grad(), single_threaded():
        stacked = policy.stack_parameters(len(episodes), params)
        for tasks in chunks_of([episodes], ParameterLayout(policy).width, device):
            of_chunk = {name: value[tasks].to(device) for name, value in stacked.items()}
            chunk = episodes.part(tasks)
            found = policy.log_prob(chunk.observations.to(device), chunk.actions.to(device), of_chunk)
            log_probs[tasks, : found.shape[1]] = found.float().to(episodes.device) * chunk.mask
    return log_probs
