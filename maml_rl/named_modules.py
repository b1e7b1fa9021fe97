"""Modules that a config names are searched in the current folder, too, after everything that is installed."""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType


def find_named(package: str) -> ModuleSpec | None:
    """Return where a module without dots would be imported from by `import_named`; import nothing."""
    return find_spec(package) or _find_here(package)


def import_named(module: str) -> ModuleType:
    """Import a module that a config names.

    If only the current folder has it, that folder becomes the end of the search path of this process and its workers:
    the module may import its neighbors at any time.
    """
    if ":" in module:
        # A file may have such a name, whose first part is that of another module.
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    package = module.partition(".")[0]
    if package and package not in sys.modules and find_spec(package) is None and _find_here(package) is not None:
        sys.path.append(os.getcwd())
    return import_module(module)


def is_of_this_package(kind: type) -> bool:
    """Return whether a class is this package's, and not of code that a config names."""
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def would_import(text: str) -> bool:
    """Return whether a text like "module:name" names a module that would be found, wherever it is; import nothing.

    Addresses, as in "http://host", are no modules of Python's own.
    """
    package, colon, rest = text.partition(":")
    package = package.partition(".")[0]
    if not (package and colon) or (rest.startswith("//") and package in sys.stdlib_module_names):
        return False
    try:
        return package in sys.modules or find_named(package) is not None
    except (ImportError, ValueError):
        return True


def _find_here(package: str) -> ModuleSpec | None:
    try:
        return PathFinder.find_spec(package, [os.getcwd()])
    except OSError:
        # The current folder has been removed.
        return None
