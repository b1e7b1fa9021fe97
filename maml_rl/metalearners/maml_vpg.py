"""MAML with a plain policy gradient as the outer objective."""

from maml_rl.metalearners.adam import AdamLearner, AdamSettings


class MAMLVPG(AdamLearner):
    """MAML whose meta-policy takes one step of Adam down the policy gradient after adaptation.

    Source: Finn et al. 2017, https://arxiv.org/abs/1703.03400; with Adam as in the code of Rothfuss et al. 2019,
    https://arxiv.org/abs/1810.06784
    """

    class Settings(AdamSettings):
        """Settings of MAML-VPG."""
