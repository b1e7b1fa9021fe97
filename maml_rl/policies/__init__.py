"""Policies: modules that map observations to distributions of actions, with optional parameters for each task."""

from maml_rl.policies.belief_policy import BeliefPolicy
from maml_rl.policies.cnn import CNNPolicy, MultiInputPolicy
from maml_rl.policies.distributions import DistributionParams, Distributions, MultiCategorical
from maml_rl.policies.external_policy import ExternalPolicy, ForeignPolicy
from maml_rl.policies.get_policy import get_policy_for_env
from maml_rl.policies.heads import BernoulliHead, CategoricalHead, GaussianHead, Head, MultiCategoricalHead, Params
from maml_rl.policies.memory_policy import MemoryPolicy
from maml_rl.policies.mlp import (
    BernoulliMLPPolicy,
    CategoricalMLPPolicy,
    MLPPolicy,
    MultiCategoricalMLPPolicy,
    NormalMLPPolicy,
)
from maml_rl.policies.module_policy import ModulePolicy, as_policy
from maml_rl.policies.policy import Memory, Policy, Unrolled, performed
from maml_rl.policies.sequence_policy import GRUPolicy, SequencePolicy, TransformerPolicy
from maml_rl.policies.transformer import Attention
from maml_rl.policies.trial_encoder import EncoderSizes

__all__ = [
    "Attention",
    "BeliefPolicy",
    "BernoulliHead",
    "BernoulliMLPPolicy",
    "CNNPolicy",
    "CategoricalHead",
    "CategoricalMLPPolicy",
    "DistributionParams",
    "Distributions",
    "EncoderSizes",
    "ExternalPolicy",
    "ForeignPolicy",
    "GRUPolicy",
    "GaussianHead",
    "Head",
    "MLPPolicy",
    "Memory",
    "MemoryPolicy",
    "ModulePolicy",
    "MultiCategorical",
    "MultiCategoricalHead",
    "MultiCategoricalMLPPolicy",
    "MultiInputPolicy",
    "NormalMLPPolicy",
    "Params",
    "Policy",
    "SequencePolicy",
    "TransformerPolicy",
    "Unrolled",
    "as_policy",
    "get_policy_for_env",
    "performed",
]


def __dir__() -> list[str]:
    return sorted(__all__)
