"""Metalearners: what turns the episodes of a batch of tasks into better initial parameters."""

from maml_rl.metalearners.maml_trpo import MAMLTRPO

__all__ = ["MAMLTRPO"]
