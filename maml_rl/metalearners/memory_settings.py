"""The settings of a memory, which are the same for all learners whose policies have one, and what they refuse."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from maml_rl.config import Config
from maml_rl.config.settings import Count
from maml_rl.policies import GRUPolicy, SequencePolicy, TransformerPolicy
from maml_rl.policies.recurrent import Cell
from maml_rl.policies.transformer import Attention

CellKind = Annotated[
    Literal["gru", "lstm", "transformer"],
    Field(description="kind of memory: a recurrent layer, or attention to the last steps"),
]


class MemorySettings(BaseModel):
    """The kind of a memory, and the sizes of a transformer besides its width: a part of the settings of a learner."""

    cell: CellKind = "gru"
    context: Annotated[Count, Field(description="steps that a transformer attends to")] = 128
    num_layers: Annotated[Count, Field(description="blocks of a transformer")] = 2
    num_heads: Annotated[Count, Field(description="heads of a transformer's attention")] = 4

    @property
    def body(self) -> Cell | Attention:
        """The cell of a recurrent layer, or the sizes of a transformer."""
        return Attention(self.context, self.num_layers, self.num_heads) if self.cell == "transformer" else self.cell

    def body_of(self, width: int, config: Config) -> Cell | Attention:
        """Return the same; refuse, by a ConfigError, a transformer whose heads do not divide its width."""
        body = self.body
        if isinstance(body, Attention):
            try:
                body.head_size(width)
            except ValueError as error:
                raise config.error(f"no transformer of these sizes: {error}", "algorithm-settings") from None
        return body

    def make_policy(self, env: Any, config: Config, **options: Any) -> SequencePolicy:
        """Make a policy of this memory for the spaces of `env`; the settings must have a `hidden_size`."""
        observations, actions = env.single_observation_space, env.single_action_space
        hidden_size: int = vars(self)["hidden_size"]
        options |= {"conv_layers": config.conv_layers, "image_scale": config.image_scale, "seed": config.seed}
        body = self.body_of(hidden_size, config)
        if isinstance(body, Attention):
            return TransformerPolicy(observations, actions, hidden_size, body, **options)
        return GRUPolicy(observations, actions, hidden_size, cell=body, **options)


def refuse_hidden_rewards(config: Config) -> None:
    """Refuse a config whose policy would not observe its last action and reward."""
    if not config.observe_last:
        raise config.error(
            f"{config.algorithm} learns from the last action and reward; add 'observe-last: true'", "algorithm"
        )
