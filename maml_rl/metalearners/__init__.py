"""Metalearners: they turn the episodes of a batch of tasks into better initial parameters."""

from maml_rl.config import SettingsModel
from maml_rl.derivatives import EpisodeStore
from maml_rl.metalearners.maml_trpo import MAMLTRPO
from maml_rl.metalearners.metalearner import Adapted, MetaLearner
from maml_rl.metalearners.registry import algorithms, find_metalearner, register
from maml_rl.metalearners.stepper import Stepper
from maml_rl.metalearners.trial_learner import RecordedLearner, TrialLearner
from maml_rl.plan import Plan

register("maml-trpo", MAMLTRPO)
register("maml-vpg", "maml_rl.metalearners.adam:MAMLVPG")
register("maml-ppo", "maml_rl.metalearners.adam:MAMLPPO")
register("promp", "maml_rl.metalearners.promp:ProMP")
register("e-maml", "maml_rl.metalearners.e_maml:EMAML")
register("dice-maml", "maml_rl.metalearners.adam:DiceMAML")
register("reptile", "maml_rl.metalearners.reptile:Reptile")
register("anil", "maml_rl.metalearners.adam:ANIL")
register("meta-sgd", "maml_rl.metalearners.meta_sgd:MetaSGD")
register("cavia", "maml_rl.metalearners.cavia:CAVIA")
register("rl2", "maml_rl.metalearners.rl2:RL2")
register("varibad", "maml_rl.metalearners.varibad:VariBAD")
register("rsac", "maml_rl.metalearners.rsac:RSAC")
register("pearl", "maml_rl.metalearners.pearl:PEARL")
register("amago", "maml_rl.metalearners.amago:AMAGO")
register("amago-offline", "maml_rl.metalearners.amago:OfflineAMAGO")
register("ad", "maml_rl.metalearners.history_learner:AD")
register("dpt", "maml_rl.metalearners.history_learner:DPT")

__all__ = [
    "MAMLTRPO",
    "Adapted",
    "EpisodeStore",
    "MetaLearner",
    "Plan",
    "RecordedLearner",
    "SettingsModel",
    "Stepper",
    "TrialLearner",
    "algorithms",
    "find_metalearner",
    "register",
]


def __dir__() -> list[str]:
    return sorted(__all__)
