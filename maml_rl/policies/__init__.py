"""Policies: modules that map observations to distributions of actions, with optional parameters for each task."""

from maml_rl.policies.bernoulli_mlp import BernoulliMLPPolicy
from maml_rl.policies.categorical_mlp import CategoricalMLPPolicy
from maml_rl.policies.cnn import CNNPolicy
from maml_rl.policies.distributions import MultiCategorical
from maml_rl.policies.gru_policy import GRUPolicy
from maml_rl.policies.making import get_policy_for_env
from maml_rl.policies.memory_policy import MemoryPolicy
from maml_rl.policies.mlp import MLPPolicy
from maml_rl.policies.module_policy import ModulePolicy, as_policy
from maml_rl.policies.multi_categorical_mlp import MultiCategoricalMLPPolicy
from maml_rl.policies.normal_mlp import NormalMLPPolicy
from maml_rl.policies.policy import DistributionParams, Memory, Params, Policy, Unrolled

__all__ = [
    "BernoulliMLPPolicy",
    "CNNPolicy",
    "CategoricalMLPPolicy",
    "DistributionParams",
    "GRUPolicy",
    "MLPPolicy",
    "Memory",
    "MemoryPolicy",
    "ModulePolicy",
    "MultiCategorical",
    "MultiCategoricalMLPPolicy",
    "NormalMLPPolicy",
    "Params",
    "Policy",
    "Unrolled",
    "as_policy",
    "get_policy_for_env",
]


def __dir__() -> list[str]:
    return sorted(__all__)
