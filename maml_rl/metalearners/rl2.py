"""RL2: a recurrent policy that learns to learn, trained by PPO on whole trials."""

from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from maml_rl.config import Config
from maml_rl.config.config import SECTION
from maml_rl.config.settings import Count
from maml_rl.metalearners.trial_learner import MemorySettings, refuse_hidden_rewards
from maml_rl.metalearners.trial_ppo import TrialPPOLearner, TrialPPOSettings
from maml_rl.policies import Policy


class RL2(TrialPPOLearner):
    """A policy whose memory is the learning algorithm: it sees its rewards, and PPO trains it on whole trials.

    A trial is all episodes of a task, one after the other in one slot. Returns are discounted through it, across the
    ends of episodes, so that early exploration is credited with later rewards. Values are learned in units of the
    running root mean square of the returns, or by classification, which needs none.

    Source: Duan et al. 2016, https://arxiv.org/abs/1611.02779; Schulman et al. 2017, https://arxiv.org/abs/1707.06347
    """

    class Settings(TrialPPOSettings, MemorySettings):
        """Settings of RL2."""

        of_transformers: ClassVar = ("token_shift",)
        of_cells: ClassVar = ("memory_span", "layers", "products")
        hidden_size: Annotated[Count, Field(description="units of the recurrent layer, or width of a token")] = 256
        token_shift: Annotated[
            bool, Field(description="add the previous observation to each token of a transformer")
        ] = False
        value: Annotated[
            Literal["head", "network", "two-hot", "none"],
            Field(
                description="values from a head of the policy, a recurrent network of their own, a head whose loss is "
                "a classification, or none"
            ),
        ] = "head"
        memory_span: Annotated[
            Count | None, Field(description="steps for which units initially hold what they remember; null: one or two")
        ] = None
        layers: Annotated[
            tuple[Count, ...],
            Field(
                strict=False,
                description="units of layers of tanh between a recurrent memory and the actions, and of as many for "
                "the values, which see the observation, too; []: none",
            ),
        ] = ()
        products: Annotated[
            int,
            Field(
                ge=0, description="products of linear functions of the observation and of the memory, which layers see"
            ),
        ] = 0
        embedding_size: Annotated[
            Count | None, Field(description="units of a linear layer between observations and all else; null: none")
        ] = None
        reward_prediction_coefficient: Annotated[
            float,
            Field(
                ge=0, description="weight of the predicted rewards' squared error, in units of the rewards' variance"
            ),
        ] = 0.0

    uses = frozenset({"gamma", "gae-lambda", "meta-batch-size", "conv-layers", "image-scale"})
    instead = MappingProxyType(
        {"hidden-sizes": "hidden-size", "memory": "cell", "baseline": "value", "bootstrap": "bootstrap-trials"}
    )
    settings: Settings

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self.policy.has_memory:
            raise TypeError(
                f"rl2 trains a policy with a memory, and {self.policy.class_name} has none; use GRUPolicy, or a "
                "policy with initial_memory, act and unroll"
            )
        predicts = getattr(self.policy, "predicts_rewards", False) and hasattr(self.policy, "predict_rewards")
        if self.settings.reward_prediction_coefficient > 0.0 and not predicts:
            raise TypeError(
                f"reward-prediction-coefficient is {self.settings.reward_prediction_coefficient:g}, but this "
                f"{self.policy.class_name} predicts no rewards; make a GRUPolicy with predict_rewards=True, or set "
                "the coefficient to 0"
            )
        if self.settings.normalize_observations and getattr(self.policy, "observation_mean", None) is None:
            raise TypeError(
                f"normalize-observations is true, but this {self.policy.class_name} sees observations as they are; "
                "make a GRUPolicy with normalize_observations=True, or set it to false"
            )
        # The statistics that normalize observations are not trained.
        trained = [param for param in self.policy.parameters() if param.requires_grad]
        self._train_by_ppo(trained, reward_prediction=self.settings.reward_prediction_coefficient)

    @classmethod
    def make_policy(cls, env: Any, config: Config, settings: Any) -> Policy:
        refuse_hidden_rewards(config)
        if settings.cell != "transformer" and settings.products and not settings.layers:
            raise config.error("only layers see products; set layers, or leave it out", SECTION, "products")
        policy: Policy = settings.make_policy(
            env,
            config,
            value=settings.value,
            predict_rewards=settings.reward_prediction_coefficient > 0.0,
            normalize_observations=settings.normalize_observations,
            embedding_size=settings.embedding_size,
        )
        return policy
