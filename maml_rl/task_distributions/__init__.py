"""Which tasks training draws, and which its evaluations: instead of the family's own distribution."""

from maml_rl.task_distributions.built_in import Curriculum, FixedTasks, Grid, Split, Stratified, TaskList
from maml_rl.task_distributions.task_distribution import (
    FamilyTasks,
    TaskDistribution,
    find_task_distribution,
    register_task_distribution,
    task_distributions,
)

__all__ = [
    "Curriculum",
    "FamilyTasks",
    "FixedTasks",
    "Grid",
    "Split",
    "Stratified",
    "TaskDistribution",
    "TaskList",
    "find_task_distribution",
    "register_task_distribution",
    "task_distributions",
]

register_task_distribution("list", TaskList)
register_task_distribution("grid", Grid)
register_task_distribution("stratified", Stratified)
register_task_distribution("split", Split)
register_task_distribution("curriculum", Curriculum)
register_task_distribution("fixed", FixedTasks)


def __dir__() -> list[str]:
    return sorted(__all__)
