"""The errors that tell a user what went wrong in children: who, where, in which task, and what was on the stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from maml_rl.envs.meta_env import Task
from maml_rl.errors import ChildEnvError, ChildEnvTimeout, NonFiniteError, TaskError
from maml_rl.samplers.parent.worker import Child
from maml_rl.samplers.wire.commands import Failed
from maml_rl.samplers.wire.describing import describe_failure, describe_stack

_CAUSES_SHOWN = 3


def failure(failed: Sequence[tuple[Child, Failed]], env_name: str) -> ChildEnvError | TaskError | NonFiniteError:
    """Return the error for children that raised."""
    if all(reply.error == TaskError.__name__ for _, reply in failed):
        return TaskError("; ".join(f"{reply.message} (counted within {child})" for child, reply in failed))
    if all(reply.error == NonFiniteError.__name__ for _, reply in failed):
        return NonFiniteError("; ".join(reply.message for _, reply in failed))
    error = ChildEnvError("\n\n".join(describe_failure(reply, f"{child} of {env_name}") for child, reply in failed))
    error.summary = "; ".join(dict.fromkeys(reply.summary for _, reply in failed))
    return error


def hang(
    hung: Sequence[Child], env_name: str, tasks: Sequence[Task] | None, current_slots: NDArray[Any] | None
) -> ChildEnvTimeout:
    """Kill children that hang, and return the error that shows their stacks.

    Args:
        hung: the children.
        env_name: what they host.
        tasks: of all slots; None for none yet.
        current_slots: which slot each child works on, counted within the child; None if nobody knows.
    """
    for child in hung:
        child.process.ask_for_stack()
    texts = []
    for child in hung:
        stack, state = child.process.read_stack(), child.process.state()
        child.process.kill()
        shown = describe_stack(stack) if stack else f"It showed no stack; it was {state or 'in an unknown state'}."
        slot = -1 if current_slots is None or not child.ready else int(current_slots[child.index])
        work = child.describe_work(tasks, slot)
        texts.append(f"{child} of {env_name} hangs {child.doing}{work}; it was killed. {shown}")
    return ChildEnvTimeout("\n\n".join(texts) + "\nIf it only needs longer, raise step_timeout.")


def repeated_death(index: int, env_name: str, causes: Sequence[str], max_restarts: int) -> ChildEnvError:
    """Return the error for a child that died too often, with its last causes of death."""
    last = "\n".join(causes[-_CAUSES_SHOWN:])
    return ChildEnvError(
        f"child {index} of {env_name} died {len(causes)} times in one phase, more often than "
        f"max_restarts={max_restarts} allows; the last causes:\n{last}"
    )
