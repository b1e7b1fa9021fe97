"""Metalearners: what turns the episodes of a batch of tasks into better initial parameters."""

from maml_rl.config import SettingsModel
from maml_rl.metalearners.maml_trpo import MAMLTRPO
from maml_rl.metalearners.metalearner import Batch, Collection, MetaLearner, algorithms, find_metalearner, register

register("maml-trpo", MAMLTRPO)

__all__ = [
    "MAMLTRPO",
    "Batch",
    "Collection",
    "MetaLearner",
    "SettingsModel",
    "algorithms",
    "find_metalearner",
    "register",
]
