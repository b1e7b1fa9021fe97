"""maml_rl: meta-reinforcement learning with parallel multi-task sampling. Importing it registers the task families.

Public names are loaded on first use, so that worker processes, which only step environments, never load torch.
"""

import importlib as _importlib
import os as _os
import signal as _signal
import sys as _sys
import typing as _typing

# The program: a script, or what follows -m. It is another one in child processes.
_program = _os.path.basename("".join(_sys.orig_argv[-len(_sys.argv) :][:1]))
# While libraries load there is nothing to clean up, and not all of them take a KeyboardInterrupt for what it is: until
# its work begins, Ctrl-C ends the command at once. An ignored signal, as in a background job, stays ignored.
if _program in ("maml-rl", "maml_rl") and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

try:
    from maml_rl import envs as envs
# A package that is older than this one needs lacks a name, or has another under it.
except (AttributeError, ImportError, TypeError) as _error:
    from maml_rl.dependencies import explain_outdated as _explain_outdated

    if (_reason := _explain_outdated()) is None:
        raise
    raise ImportError(_reason) from _error

if _typing.TYPE_CHECKING:
    from maml_rl.adaptation import AdaptationRule as AdaptationRule
    from maml_rl.adaptation import adapt as adapt
    from maml_rl.baseline import LinearFeatureBaseline as LinearFeatureBaseline
    from maml_rl.episode.task_episodes import BatchEpisodes as BatchEpisodes
    from maml_rl.episode.task_episodes import TaskEpisodes as TaskEpisodes
    from maml_rl.experiment.load_policy import adapt_to_task as adapt_to_task
    from maml_rl.experiment.load_policy import load_policy as load_policy
    from maml_rl.metalearners import MAMLTRPO as MAMLTRPO
    from maml_rl.policies import get_policy_for_env as get_policy_for_env
    from maml_rl.samplers import MultiTaskSampler as MultiTaskSampler
    from maml_rl.samplers.population import PopulationEvaluator as PopulationEvaluator

__version__ = "0.3.0"

_HOMES = {
    "AdaptationRule": "maml_rl.adaptation",
    "BatchEpisodes": "maml_rl.episode.task_episodes",
    "LinearFeatureBaseline": "maml_rl.baseline",
    "MAMLTRPO": "maml_rl.metalearners",
    "MultiTaskSampler": "maml_rl.samplers",
    "PopulationEvaluator": "maml_rl.samplers.population",
    "TaskEpisodes": "maml_rl.episode.task_episodes",
    "adapt": "maml_rl.adaptation",
    "adapt_to_task": "maml_rl.experiment.load_policy",
    "get_policy_for_env": "maml_rl.policies",
    "load_policy": "maml_rl.experiment.load_policy",
}

__all__ = [
    "MAMLTRPO",
    "AdaptationRule",
    "BatchEpisodes",
    "LinearFeatureBaseline",
    "MultiTaskSampler",
    "PopulationEvaluator",
    "TaskEpisodes",
    "adapt",
    "adapt_to_task",
    "envs",
    "get_policy_for_env",
    "load_policy",
]


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'maml_rl' has no attribute {name!r}")
    return getattr(_importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
