"""MAML with the clipped objective of PPO as the outer objective."""

from maml_rl.metalearners.adam import AdamLearner, AdamSettings, ClippedSettings


class MAMLPPO(AdamLearner):
    """MAML whose meta-policy takes several steps of Adam down the clipped objective after adaptation.

    Source: Finn et al. 2017, https://arxiv.org/abs/1703.03400; Schulman et al. 2017, https://arxiv.org/abs/1707.06347;
    together in the code of Rothfuss et al. 2019, https://arxiv.org/abs/1810.06784
    """

    class Settings(ClippedSettings, AdamSettings):
        """Settings of MAML-PPO."""
