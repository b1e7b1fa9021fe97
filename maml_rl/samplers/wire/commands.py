"""What parent and child say to each other: small frozen dataclasses, pickled over one socket per child.

Every command and every reply carries a generation number: the parent counts it up whenever it abandons work, and drops
replies of an earlier generation. Observations, actions, rewards and seeds do not pass here: they are in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gymnasium import spaces

from maml_rl.envs.meta_env import RecordedInfos, Task
from maml_rl.samplers.wire.shared_phase import PhasePlan
from maml_rl.seeding import PhaseStreams


@dataclass(frozen=True, slots=True)
class Load:
    """Prepare the interpreter and import what the environment is made of; answered by `Done`.

    Attributes:
        interpreter: import path, working folder and main module of the parent (see `launching.interpreter_state`).
        recipe: pickle of (id or callable, keyword arguments).
    """

    generation: int
    interpreter: dict[str, Any]
    recipe: bytes


@dataclass(frozen=True, slots=True)
class Make:
    """Make the environment of `num_envs` slots, the first of which is `first_slot` of all; answered by `Ready`."""

    generation: int
    num_envs: int
    first_slot: int


@dataclass(frozen=True, slots=True)
class Bind:
    """From now on work on the shared memory, as child `index` of `num_children` with `num_envs` slots in all."""

    generation: int
    index: int
    num_children: int
    num_envs: int


@dataclass(frozen=True, slots=True)
class ResetTask:
    """Give slot i of the child the task tasks[i]."""

    generation: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class ResetBuffers:
    """Reset all slots with the seeds in the shared memory."""

    generation: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset as Gymnasium does; `seeds` holds one entry per slot of the child, `options["reset_mask"]` likewise."""

    generation: int
    seeds: tuple[int | None, ...]
    options: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Step:
    """Step all slots with the actions in the shared memory."""

    generation: int


@dataclass(frozen=True, slots=True)
class BindPhase:
    """Get ready to sample whole phases with a policy of your own.

    Attributes:
        plan: the size of the phases.
        policy: pickled.
        interpreter: as in `Load`; None if the policy can do without.
    """

    generation: int
    plan: PhasePlan
    policy: bytes
    interpreter: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class RunPhase:
    """Sample a phase of your tasks, under the parameters in the shared memory, into the episodes there.

    Attributes:
        version: number of the parameters.
        streams: of the whole phase, all tasks.
        timed: whether to measure where the time goes.
    """

    generation: int
    version: int
    streams: PhaseStreams
    timed: bool = False


@dataclass(frozen=True, slots=True)
class GiveInfos:
    """Tell what the last reset or step brought beside the buffers; answered by `Infos`."""

    generation: int


@dataclass(frozen=True, slots=True)
class SampleTasks:
    """Draw tasks; answered by `Tasks`."""

    generation: int
    num_tasks: int
    seed: int | None


@dataclass(frozen=True, slots=True)
class Close:
    """Close the environment and end; not answered."""

    generation: int


Command = (
    Load
    | Make
    | Bind
    | ResetTask
    | ResetBuffers
    | Reset
    | Step
    | BindPhase
    | RunPhase
    | GiveInfos
    | SampleTasks
    | Close
)


@dataclass(frozen=True, slots=True)
class Done:
    """The command is carried out; its results, if any, are in the shared memory."""

    generation: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The environment is made, and looks like this."""

    generation: int
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    max_episode_steps: int | None
    recorded_infos: RecordedInfos = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Infos:
    """The infos of the child's slots."""

    generation: int
    infos: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks drawn by the child's environment."""

    generation: int
    tasks: list[Task]


@dataclass(frozen=True, slots=True)
class Failed:
    """The command raised. Only text crosses: an exception may be unpicklable, huge, or of a class the parent lacks.

    Attributes:
        error: name of the exception's class.
        message: the exception as text, cut to a bound.
        traceback: its traceback, cut to a bound.
        summary: what it is, where in the environment's code, and why, on one line.
        slot: slot that raised, counted over all children; None if the child cannot tell.
        task: that slot's task as text, cut to a bound.
    """

    generation: int
    error: str
    message: str
    traceback: str
    summary: str
    slot: int | None
    task: str | None


Reply = Done | Ready | Infos | Tasks | Failed
