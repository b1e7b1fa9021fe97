"""The task families and the contract that they fulfill. Importing it registers the families, and loads none of them."""

from maml_rl.envs.calls import Retry
from maml_rl.envs.checking import check_meta_env
from maml_rl.envs.make_env import ObservedLastStep, ObservedTask, make_vector_env
from maml_rl.envs.meta_env import MetaEnv, MetaVectorEnv, StepBuffers, Task
from maml_rl.envs.observing import LastStepParts
from maml_rl.envs.registration import FAMILIES, FamilySpec, register_families
from maml_rl.envs.sample_task_on_reset import SampleTaskOnReset, SampleTaskOnResetVector
from maml_rl.envs.tasks import PolarTaskSpace, TaskParameter, TaskSpace

__all__ = [
    "FAMILIES",
    "FamilySpec",
    "LastStepParts",
    "MetaEnv",
    "MetaVectorEnv",
    "ObservedLastStep",
    "ObservedTask",
    "PolarTaskSpace",
    "Retry",
    "SampleTaskOnReset",
    "SampleTaskOnResetVector",
    "StepBuffers",
    "Task",
    "TaskParameter",
    "TaskSpace",
    "check_meta_env",
    "make_vector_env",
]

register_families()


def __dir__() -> list[str]:
    return sorted(__all__)
