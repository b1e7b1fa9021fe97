"""One phase of sampling: a policy, with parameters of its own for every task, acts until all episodes are over."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.episode import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.acting import Actor, EpisodeNoise
from maml_rl.samplers.recording import EpisodeRecorder
from maml_rl.seeding import PhaseStreams
from maml_rl.threads import intra_op_threads


def rollout(
    vector_env: MetaVectorEnv,
    policy: Policy,
    params: Mapping[str, Tensor] | None = None,
    *,
    streams: PhaseStreams,
    num_tasks: int,
    episodes_per_task: int,
    horizon: int,
    tasks: Sequence[Task] = (),
    device: torch.device | str = "cpu",
    recv_timeout: float | None = None,
    num_groups: int = 1,
    timer: StageTimer = NULL_TIMER,
) -> TaskEpisodes:
    """Sample one episode per slot and wave under fixed parameters.

    Slot m * S + s belongs to task m. With S = B slots per task all episodes run at once; with fewer they run in waves.

    Args:
        vector_env: M * S slots which already have their tasks.
        policy: chooses the actions.
        params: parameters by name, (M, ...) per task or as the policy's own; None for the policy's own.
        streams: the random streams of this phase.
        num_tasks: M.
        episodes_per_task: B, a multiple of S.
        horizon: T; an episode still running after T steps is truncated there.
        tasks: the M tasks, kept with the episodes.
        device: where the policy runs; the episodes stay on the CPU.
        recv_timeout: seconds to wait for the children that have not answered; at least one always has. None: for all.
        num_groups: groups of children that take turns: while one steps, the policy acts for another.
        timer: gets the seconds of the stages.

    Returns:
        Episodes (M, T, B, ...), T cut to the longest episode.

    Raises:
        NonFiniteError: If an observation, an action or a reward is NaN or infinite.
    """
    recorder = EpisodeRecorder(
        vector_env.single_observation_space,
        vector_env.single_action_space,
        num_tasks,
        episodes_per_task,
        horizon,
    )
    slots_per_task = vector_env.num_envs // num_tasks
    # One thread: the products are small, and waiting OpenMP threads would spin on the cores that the physics needs.
    with torch.inference_mode(), intra_op_threads(1):
        actor = Actor(policy, params, vector_env.buffers.observations, num_tasks, device)
        for first in range(0, episodes_per_task, slots_per_task):
            episodes = range(first, first + slots_per_task)
            noise = EpisodeNoise(policy, streams, num_tasks, episodes)
            recorder.start_wave(episodes)
            with timer.stage("reset"):
                vector_env.reset_buffers(streams.episode_seeds(num_tasks, episodes).ravel())
            _run_wave(vector_env, actor, noise, recorder, recv_timeout, num_groups, timer)
    with timer.stage("assembly"):
        return recorder.finish(tasks)


def _run_wave(
    vector_env: MetaVectorEnv,
    actor: Actor,
    noise: EpisodeNoise,
    recorder: EpisodeRecorder,
    recv_timeout: float | None,
    num_groups: int,
    timer: StageTimer,
) -> None:
    """Step the parts of the vector environment, group by group, until all their episodes are over."""
    parts, buffers = vector_env.parts, vector_env.buffers

    def choose_and_send(indices: list[int]) -> None:
        for slots, members in _adjacent(parts, indices):
            with timer.stage("inference"):
                actions = actor.act(slots, noise.rows(slots, recorder.steps(slots)))
            with timer.stage("assembly"):
                recorder.write_choice(slots, buffers.observations[slots], actions)
            for index in members:
                vector_env.step_send(index, actions[parts[index].start - slots.start : parts[index].stop - slots.start])

    groups = [group.tolist() for group in np.array_split(np.arange(len(parts)), num_groups)]
    for group in groups:
        choose_and_send(group)
    while any(groups):
        for group in groups:
            with timer.stage("waiting"):
                answered = vector_env.step_recv(recv_timeout, group) if group else []
            with timer.stage("assembly"):
                going_on = [index for index in answered if recorder.write_outcome(parts[index], buffers)]
            for index in set(answered) - set(going_on):
                group.remove(index)
            choose_and_send(going_on)


def _adjacent(parts: Sequence[slice], indices: Sequence[int]) -> Iterator[tuple[slice, list[int]]]:
    """Yield the ranges of slots that `indices` cover without a gap, each with its members."""
    members: list[int] = []
    for index in sorted(indices):
        if members and parts[members[-1]].stop != parts[index].start:
            yield slice(parts[members[0]].start, parts[members[-1]].stop), members
            members = []
        members.append(index)
    if members:
        yield slice(parts[members[0]].start, parts[members[-1]].stop), members
