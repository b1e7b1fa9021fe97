"""The names of the algorithms, and the settings in a config for the one that it names."""

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from maml_rl.arguments import suggest
from maml_rl.config import Config, SettingsModel
from maml_rl.config.config import OF_LEARNERS, OF_POLICIES, SECTION
from maml_rl.errors import UsersCode, explain
from maml_rl.metalearners.metalearner import MetaLearner
from maml_rl.named_modules import import_named

# By name: a class, or its "module:Class", so that an algorithm is imported when it is used.
_REGISTRY: dict[str, type[MetaLearner] | str] = {}


def register(name: str, learner: type[MetaLearner] | str) -> None:
    """Give an algorithm a name for configs.

    Args:
        name: as in `algorithm: name`.
        learner: the class, or "module:Class".

    Raises:
        ValueError: If the name is taken by another class, or holds a colon.
    """
    if ":" in name:
        raise ValueError(f"the name of an algorithm must not contain a colon, got {name!r}")
    if _REGISTRY.get(name, learner) is not learner:
        raise ValueError(f"the name {name!r} is taken by {_REGISTRY[name]}; choose another")
    _REGISTRY[name] = learner


def algorithms() -> list[str]:
    """Return the registered names."""
    return list(_REGISTRY)


def find_metalearner(name: str) -> type[MetaLearner]:
    """Return the class of a registered name, or of "module:Class"; a ValueError if there is none."""
    learner = _REGISTRY.get(name, name)
    if isinstance(learner, str):
        module, _, attribute = learner.partition(":")
        if not attribute:
            raise ValueError(f"unknown algorithm {name!r}{suggest(name, algorithms())}")

        def not_imported(error: BaseException) -> ValueError:
            hint = "; put the folder of the module into PYTHONPATH" if isinstance(error, ImportError) else ""
            return ValueError(f"cannot import the algorithm {name!r} ({explain(error)}){hint}")

        with UsersCode(not_imported):
            imported = import_named(module)
        try:
            learner = getattr(imported, attribute)
        except AttributeError:
            raise ValueError(f"the module {module} has no {attribute!r}") from None
    if not (isinstance(learner, type) and issubclass(learner, MetaLearner)):
        raise ValueError(f"{name!r} is not a metalearner; make it a subclass of maml_rl.metalearners.MetaLearner")
    clash = [key for key in _keys(learner) if key in _keys(Config)]
    if clash:
        raise ValueError(f"the setting {clash[0]!r} of {name!r} is a key of every config; choose another name")
    return learner


def algorithm_of(config: Config) -> tuple[type[MetaLearner], SettingsModel, Config]:
    """Return a config's algorithm, its checked settings, and the config with exactly those settings that it uses."""
    try:
        learner = find_metalearner(config.algorithm)
    except ValueError as error:
        raise config.error(str(error), "algorithm") from None

    def explain_unknown(key: str) -> str:
        owners = [name for name in algorithms() if key in _keys(find_metalearner(name))]
        return f"; it is a setting of {', '.join(owners)}, and the algorithm is {config.algorithm}" if owners else ""

    settings = learner.complete(config.check_section(SECTION, learner.Settings, explain_unknown), config)
    return learner, settings, config.with_section(SECTION, settings).without(_unused(learner, config))


def replacements(learner: type[MetaLearner]) -> Mapping[str, str]:
    """Return the settings that replace general ones that a learner does not use, by the general ones."""
    return ChainMap(*(dict(vars(base).get("instead", {})) for base in learner.__mro__))


def _unused(learner: type[MetaLearner], config: Config) -> dict[str, str]:
    """Return the settings that a config's learner, policy or evaluations do not use, and why."""
    unused = {}
    instead = replacements(learner)
    for key in (key for key in OF_LEARNERS if key not in learner.uses):
        remedy = f"use {instead[key]!r} instead" if key in instead else "leave it out"
        unused[key] = f"{config.algorithm} does not use it; {remedy}"
    # The default is no choice.
    if config.evaluate_every is None and config.evaluation_tasks != Config.model_fields["evaluation_tasks"].default:
        unused["evaluation-tasks"] = "without 'evaluate-every' nothing is evaluated; add that, or leave this out"
    if config.policy is not None:
        return unused | dict.fromkeys(OF_POLICIES, "'policy' makes a policy of its own; leave it out")
    if config.memory is None or "memory" in unused:
        return unused
    if "make_policy" in vars(learner):
        return unused | {"memory": f"the algorithm {config.algorithm!r} makes a policy of its own; leave it out"}
    of_layers = "nonlinearity", "output-scale"
    return unused | dict.fromkeys(of_layers, "a policy with a 'memory' does not use it; leave it out")


def _keys(owner: Any) -> list[str]:
    model = owner if issubclass(owner, SettingsModel) else owner.Settings
    return list(model.fields_by_key())
