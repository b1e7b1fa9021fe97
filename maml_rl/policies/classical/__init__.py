"""Classical algorithms for bandits and tabular processes, as policies whose memory consists of counts.

A sampler made with `slots_per_task=1` and `observe_last=True` runs any of them through trials, thousands at once. They
are baselines for meta-learned policies: some are optimal, or nearly so, for the given distribution of tasks.

Arms have rewards of 1 or 0, with means that are uniform a priori. The processes are those of `TabularMDP-v0`; their
algorithms know the number of states, the number of actions and the horizon.

Source: Duan et al. 2016, appendix A, https://arxiv.org/abs/1611.02779
"""

from maml_rl.policies.classical.bandits import (
    UCB1,
    BanditEpsilonGreedy,
    BanditPolicy,
    GittinsIndex,
    ThompsonSampling,
    gittins_indices,
)
from maml_rl.policies.classical.counting import CountingPolicy, RandomPolicy
from maml_rl.policies.classical.tabular import BEB, PSRL, UCRL2, TabularEpsilonGreedy, TabularPolicy, value_iteration

__all__ = [
    "BEB",
    "PSRL",
    "UCB1",
    "UCRL2",
    "BanditEpsilonGreedy",
    "BanditPolicy",
    "CountingPolicy",
    "GittinsIndex",
    "RandomPolicy",
    "TabularEpsilonGreedy",
    "TabularPolicy",
    "ThompsonSampling",
    "gittins_indices",
    "value_iteration",
]
