"""Names in `__all__`: each exists, and is of the kind, class, function or module, that its name implies."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass, isfunction, ismodule
from types import GenericAlias

import pytest

import maml_rl

# Names of modules; all other names in lower case are functions.
MODULES = {("maml_rl", "envs")}
# Modules that import packages of an extra.
_OF_RAY = ("actor", "backend", "cluster", "connection", "pool")
OF_EXTRAS = {f"maml_rl.samplers.work.ray.{name}": "ray" for name in _OF_RAY}
OF_EXTRAS["maml_rl.envs.jax"] = "jax"


def module_names() -> list[str]:
    # A room of an extra that is missing is listed without its modules.
    found = pkgutil.walk_packages(maml_rl.__path__, "maml_rl.", onerror=lambda name: None)
    return ["maml_rl", *(module.name for module in found)]


def public_names() -> Iterator[tuple[str, str]]:
    for module in module_names():
        installed = module not in OF_EXTRAS or find_spec(OF_EXTRAS[module]) is not None
        if installed and not module.endswith("__main__"):
            # All modules are imported: a submodule hides an equal name of its package.
            for name in getattr(import_module(module), "__all__", ()):
                yield module, name


def is_of_its_kind(module: str, name: str) -> bool:
    value = getattr(import_module(module), name)
    if name.isupper():
        # A constant, or a class whose name is an acronym.
        return isclass(value) or not (isfunction(value) or ismodule(value))
    if name[0].isupper():
        return isclass(value) or isinstance(value, GenericAlias) or hasattr(value, "__origin__")
    return ismodule(value) if (module, name) in MODULES else isfunction(value)


def test_public_names_are_of_the_kind_that_they_imply() -> None:
    names = list(public_names())
    assert len(names) > 100
    assert not [each for each in names if not is_of_its_kind(*each)]


@pytest.mark.parametrize(
    "module",
    [
        "maml_rl",
        *(f"maml_rl.{name}" for name in ["samplers", "envs", "policies", "metalearners", "episode", "baseline"]),
    ],
)
def test_completion_shows_only_the_interface(module: str) -> None:
    found = import_module(module)
    shown = {name for name in dir(found) if not name.startswith("__")}
    assert shown == set(found.__all__)
    assert all(hasattr(found, name) for name in shown)


@pytest.mark.parametrize("module", ["maml_rl", "maml_rl.samplers"])
@pytest.mark.parametrize("stray", ["Any", "TYPE_CHECKING", "import_module"])
def test_lazy_packages_have_no_stray_names(module: str, stray: str) -> None:
    assert not hasattr(import_module(module), stray)
