"""Worker inference for a backend: parameters to the workers, episodes back."""

import copy
import pickle
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from maml_rl.envs.meta_env import MetaVectorEnv
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.episode_arrays import Layout
from maml_rl.samplers.importing import find_unimportable
from maml_rl.samplers.phase import WORKER_STAGES, Phase
from maml_rl.samplers.processes.shared_phase import PhasePlan
from maml_rl.samplers.processes.vector_env import ParallelVectorEnv
from maml_rl.samplers.rollout.actor import phase_parameters
from maml_rl.samplers.rollout.loop import WORKERS_PER_INFERENCE


def sample_in_children(
    vector_env: MetaVectorEnv, phase: Phase, timer: StageTimer = NULL_TIMER, units: Sequence[slice] | None = None
) -> tuple[TaskEpisodes, list[tuple[slice, float]]]:
    """Have each worker sample the episodes of its tasks, or of units of tasks.

    Args:
        vector_env: a `ParallelVectorEnv`, whose slots already have their tasks, or expect units.
        phase: its policy's parameters are sent every time, the rest of the policy only the first time.
        timer: gets the seconds of the stages.
        units: see `WorkerPhases.run`.

    Returns:
        Episodes (M, T, B, ...), the caller's own, T cut to the longest episode; and ranges of tasks, each with the
        seconds that its environments took.

    Raises:
        ValueError: If there are no workers, or the slots of one divide a task.
        TypeError: If the policy cannot be pickled.
        NonFiniteError: If an observation, an action or a reward is NaN or infinite.
    """
    if not isinstance(vector_env, ParallelVectorEnv):
        raise ValueError('inference="worker" needs workers; use a ParallelVectorEnv, or inference="central"')
    policy, num_tasks = phase.policy, len(phase.tasks)
    with torch.no_grad():
        of_phase, is_stacked = phase_parameters(policy, num_tasks, phase.params)
    constants = dict(policy.named_buffers())
    layouts = _layout(of_phase), _layout(constants)
    plan = PhasePlan(phase.sizes, vector_env.num_envs // num_tasks, *layouts, is_stacked=is_stacked)
    shared = vector_env.phases.load(policy, plan, pickle_policy)
    for tensors, arrays in ((of_phase, shared.parameters), (constants, shared.constants)):
        for name, tensor in tensors.items():
            arrays[name][...] = tensor.detach().cpu().numpy()
    shared.version[0] += 1
    timer.observe(WORKERS_PER_INFERENCE, 1)
    timed = timer is not NULL_TIMER
    shared.stage_seconds[:] = 0.0
    with timer.stage("waiting"):
        seconds_of = vector_env.phases.run(phase, timed=timed, units=units)
    if timed:
        # Workers run in parallel: the parent has waited for the busiest.
        of_busiest = shared.stage_seconds[shared.stage_seconds.sum(axis=1).argmax()]
        for stage, seconds in zip(WORKER_STAGES, of_busiest.tolist(), strict=True):
            timer.move("waiting", stage, seconds)
    with timer.stage("assembly"):
        # The workers write the next phase into the same memory.
        episodes = shared.episodes.copy()
    return TaskEpisodes(**episodes.by_name(), tasks=phase.tasks), seconds_of


def require_loadable(policy: Policy, start_method: str | None) -> None:
    """Refuse a policy that a worker could not load.

    Raises:
        TypeError: If it cannot be pickled, or needs a class or function that a worker cannot import.
    """
    pickle_policy(policy)
    # Workers that are forked inherit it.
    name = "" if start_method == "fork" else find_unimportable(policy)
    if name:
        raise TypeError(
            f"the policy {type(policy).__name__} needs {name}, which workers cannot import, since it is defined in a "
            "notebook, an interactive session, `python -c` or a script from standard input; move it to a module and "
            'import it from there, or use inference="central"'
        )


def pickle_policy(policy: object) -> bytes:
    """Return a policy as bytes for a worker, which computes on the CPU.

    Raises:
        TypeError: If it cannot be pickled.
    """
    assert isinstance(policy, Policy)
    try:
        return pickle.dumps(copy.deepcopy(policy).to("cpu"), pickle.HIGHEST_PROTOCOL)
    # A part of the policy may raise anything.
    except Exception as error:
        raise TypeError(
            f"the policy {type(policy).__name__} cannot be pickled for a child process ({type(error).__name__}: "
            f'{error}); use functions and classes that a module defines at its top level, or inference="central"'
        ) from error


def _layout(tensors: Mapping[str, Tensor]) -> Layout:
    return {name: (tuple(tensor.shape), _numpy_type(tensor)) for name, tensor in tensors.items()}


def _numpy_type(tensor: Tensor) -> "np.dtype[np.generic]":
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype
