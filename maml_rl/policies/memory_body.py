"""The bodies of policies with a memory: what a GRU, an LSTM and a transformer have in common."""

from abc import abstractmethod
from typing import ClassVar, Protocol

from torch import Tensor, nn

from maml_rl.policies.heads import Params
from maml_rl.policies.policy import Memory
from maml_rl.policies.slot_rows import SlotRows


class MemoryStep(Protocol):
    """The next step of M x S slots under fixed parameters, without gradients; its arrays are created once.

    The bits of a row do not depend on the rows beside it. Rows are those of `SlotRows`, and perhaps more.

    Attributes:
        inputs: (rows, I), or (M, rows, I) under stacked parameters, for the caller to fill.
        units: (rows, H), likewise; each call overwrites them.
    """

    inputs: Tensor
    units: Tensor

    def __call__(self, memory: Memory) -> Memory:
        """Take the step, and return the memory after it; tensors are (M, S, ...)."""


class MemoryBody(nn.Module):
    """A layer with a memory, or several of them, whose units heads interpret.

    Attributes:
        hidden_size: H, its units.
        runs_tasks: whether `run` takes the sequences of all tasks at once.
        writes_memory: whether a step writes into the first tensor of the memory that it gets, in a place that nothing
            before it reads; see `Policy.actor`.
    """

    hidden_size: int
    runs_tasks: ClassVar[bool] = False
    writes_memory: ClassVar[bool] = False

    @abstractmethod
    def initial_memory(self, num: int, like: Tensor) -> Memory:
        """Return the memory (num, ...) where trials begin, of the type and on the device of `like`."""

    @abstractmethod
    def run(self, inputs: Tensor, memory: Memory | None, params: Params) -> tuple[Tensor, Memory]:
        """Go through sequences, differentiably.

        Args:
            inputs: (L, N, I); or (M, L, N, I) under stacked parameters, if `runs_tasks`.
            memory: (N, ...) before the first step, or (M, N, ...); None where trials begin.
            params: by the body's own names.

        Returns:
            Units (L, N, H) or (M, L, N, H), and the memory after the last step.
        """

    @abstractmethod
    def step(self, params: Params, rows: SlotRows) -> MemoryStep:
        """Return the next step of slots under fixed parameters, shared or stacked (M, ...)."""
