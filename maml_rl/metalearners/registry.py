"""The names of the algorithms, and the settings in a config for the one that it names."""

from typing import Any

from maml_rl.arguments import suggest
from maml_rl.config import Config, SettingsModel
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
    """Return the class of a registered name, or of "module:Class".

    Raises:
        ValueError: If there is none; with the nearest name.
    """
    found = _REGISTRY.get(name, name)
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        if not attribute:
            raise ValueError(f"unknown algorithm {name!r}{suggest(name, algorithms())}")
        with UsersCode(lambda error: _not_imported(name, error)):
            imported = import_named(module)
        try:
            found = getattr(imported, attribute)
        except AttributeError:
            raise ValueError(f"the module {module} has no {attribute!r}") from None
    if not (isinstance(found, type) and issubclass(found, MetaLearner)):
        raise ValueError(f"{name!r} is not a metalearner; make it a subclass of maml_rl.metalearners.MetaLearner")
    clash = [key for key in _keys(found) if key in _keys(Config)]
    if clash:
        raise ValueError(f"the setting {clash[0]!r} of {name!r} is a key of every config; choose another name")
    return found


def _not_imported(name: str, error: BaseException) -> ValueError:
    hint = "; put the folder of the module into PYTHONPATH" if isinstance(error, ImportError) else ""
    return ValueError(f"cannot import the algorithm {name!r} ({explain(error)}){hint}")


def algorithm_of(config: Config) -> tuple[type[MetaLearner], SettingsModel, Config]:
    """Return a config's algorithm, its checked settings, and the config with all of these written out.

    Raises:
        ConfigError: If there is no such algorithm, or a setting is unknown, mistyped or out of range.
    """
    try:
        learner = find_metalearner(config.algorithm)
    except ValueError as error:
        raise config.error(str(error), "algorithm") from None

    def explain_unknown(key: str) -> str:
        owners = [name for name in algorithms() if key in _keys(find_metalearner(name))]
        return f"; it is a setting of {', '.join(owners)}, and the algorithm is {config.algorithm}" if owners else ""

    settings = config.check_algorithm_settings(learner.Settings, explain_unknown)
    return learner, settings, config.with_algorithm_settings(settings)


def _keys(owner: Any) -> list[str]:
    model = owner if issubclass(owner, SettingsModel) else owner.Settings
    return [str(field.alias) for field in model.model_fields.values()]
