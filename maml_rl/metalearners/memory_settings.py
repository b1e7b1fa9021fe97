"""The settings of a memory, which are the same for all learners whose policies have one."""

from typing import Annotated, Literal

from pydantic import Field

from maml_rl.config import SettingsModel
from maml_rl.config.settings import Count
from maml_rl.policies.recurrent import Cell
from maml_rl.policies.transformer import Attention


class MemorySettings(SettingsModel):
    """The kind of a memory, and the sizes of a transformer besides its width."""

    cell: Annotated[
        Literal["gru", "lstm", "transformer"],
        Field(description="kind of memory: a recurrent layer, or attention to the last steps"),
    ] = "gru"
    context: Annotated[Count, Field(description="steps that a transformer attends to")] = 128
    num_layers: Annotated[Count, Field(description="blocks of a transformer")] = 2
    num_heads: Annotated[Count, Field(description="heads of a transformer's attention")] = 4

    @property
    def body(self) -> Cell | Attention:
        """The cell of a recurrent layer, or the sizes of a transformer."""
        return Attention(self.context, self.num_layers, self.num_heads) if self.cell == "transformer" else self.cell
