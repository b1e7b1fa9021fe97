"""MAML with the inner objective of DiCE."""

from maml_rl.metalearners.adam import AdamLearner, AdamSettings
from maml_rl.metalearners.losses import dice


class DiceMAML(AdamLearner):
    """MAML-VPG whose inner loss has the Hessian of the expected return, in expectation.

    Source: Foerster et al. 2018, https://arxiv.org/abs/1802.05098; as an inner objective in Rothfuss et al. 2019,
    https://arxiv.org/abs/1810.06784
    """

    class Settings(AdamSettings):
        """Settings of DiCE-MAML."""

    inner_loss = staticmethod(dice)
