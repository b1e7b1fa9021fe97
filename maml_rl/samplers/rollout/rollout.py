"""One phase of sampling: a policy, with parameters of its own for every task, acts until all episodes are over."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.rollout.loop import collect
from maml_rl.samplers.rollout.recorder import EpisodeRecorder
from maml_rl.seeding import PhaseStreams


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
    reset_memory: bool = False,
    timer: StageTimer = NULL_TIMER,
) -> TaskEpisodes:
    """Sample one episode per slot and wave under fixed parameters.

    Slot m * S + s belongs to task m. With S = B slots per task all episodes run at once; with fewer they run in waves.

    Args:
        vector_env: M * S slots which already have their tasks.
        policy: chooses the actions.
        params: parameters by name, (M, ...) per task or as the policy's own; None for the policy's own.
        streams: the random streams of this phase; `streams.first_task` is the number of the first task.
        num_tasks: M.
        episodes_per_task: B, a multiple of S.
        horizon: T; an episode still running after T steps is truncated there.
        tasks: the M tasks, kept with the episodes.
        device: where the policy runs; the episodes stay on the CPU.
        recv_timeout: seconds to wait for workers that have not replied, and longer until one has; None: wait for all.
        num_groups: groups of workers that take turns: while one steps, the policy acts for another.
        reset_memory: have the policy's memory begin anew with every episode, not only with every phase.
        timer: gets the seconds of the stages.

    Returns:
        Episodes (M, T, B, ...), T cut to the longest episode.

    Raises:
        NonFiniteError: If an observation, an action or a reward is NaN or infinite.
    """
    layout = EpisodeArrays.layout(EnvDescription.of(vector_env), num_tasks, episodes_per_task, horizon)
    arrays = EpisodeArrays.allocate(layout)
    collect(
        vector_env,
        policy,
        params,
        EpisodeRecorder(arrays, streams.first_task),
        streams=streams,
        device=device,
        recv_timeout=recv_timeout,
        num_groups=num_groups,
        reset_memory=reset_memory,
        timer=timer,
    )
    return TaskEpisodes(**arrays.by_name(), tasks=tasks)
