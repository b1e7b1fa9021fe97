"""Digests of source code: two machines compare them to find out whether they would run the same code."""

import hashlib
import pickletools
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# The standard library, packages whose versions are compared, and main modules, whose code is in the pickles.
_NOT_OF_USER = sys.stdlib_module_names | {
    "__main__",
    "__mp_main__",
    "cloudpickle",
    "gymnasium",
    "maml_rl",
    "mjbatch",
    "mujoco",
    "numpy",
    "ray",
    "torch",
}
_INSTALLED = {"site-packages", "dist-packages"}
_CHARACTERS = 12


@cache
def source_digest(name: str) -> str | None:
    """Return a digest of the source of a module, or of all modules of a package.

    It is read once in a process. Neither the place of the files, nor compiled files, nor line ends change it.

    Returns:
        Hexadecimal digits; None if there is no such module here, or none with a source file.
    """
    spec = _find(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = {file.relative_to(folder).as_posix(): file for folder in folders for file in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for path, file in sorted((files or {"": Path(spec.origin)}).items()):
        try:
            source = file.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        # A link that leads nowhere, or a zip archive.
        except OSError:
            continue
        digest.update(f"{path}\0{len(source)}\0".encode())
        digest.update(source)
    return digest.hexdigest()[:_CHARACTERS]


def digests_of(modules: Iterable[str]) -> dict[str, str]:
    """Return the digests of modules and packages by name, of those that are here."""
    digests = {name: source_digest(name) for name in modules}
    return {name: digest for name, digest in digests.items() if digest is not None}


def modules_of_user(pickles: Iterable[bytes]) -> list[str]:
    """Return the user's modules and packages that pickled objects need.

    Those that these import in their turn belong to them, unless they are installed packages.

    Args:
        pickles: of the objects, which must be loaded in this process.
    """
    found: set[str] = set()
    waiting = {root for pickled in pickles for name in _named_modules(pickled) if (root := _root(name)) is not None}
    while waiting:
        root = waiting.pop()
        found.add(root)
        if not _is_installed(root):
            imported = {_root(name) for name in _imported_by(root)}
            waiting |= {each for each in imported if each is not None and not _is_installed(each)} - found
    return sorted(found)


def _find(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    # A parent package is imported, which may raise anything; a module without a spec raises ValueError.
    except Exception:
        return None


def _root(name: str) -> str | None:
    """Return the outermost package of a module, namespaces left aside; None for code of others, or without a source."""
    parts = name.split(".")
    if parts[0] in _NOT_OF_USER:
        return None
    for depth in range(1, len(parts) + 1):
        root = ".".join(parts[:depth])
        spec = _find(root)
        if spec is None:
            return None
        if spec.origin is not None:
            return root if source_digest(root) is not None else None
    return None


@cache
def _is_installed(root: str) -> bool:
    spec = _find(root)
    return spec is None or spec.origin is None or not _INSTALLED.isdisjoint(Path(spec.origin).parts)


def _named_modules(pickled: bytes) -> Iterator[str]:
    """Yield the loaded modules whose names are in a pickle, also as in "module:name"."""
    for operation, argument, _ in pickletools.genops(pickled):
        if isinstance(argument, str):
            # The operation GLOBAL has module and name in one argument.
            name = argument.partition(" " if operation.name == "GLOBAL" else ":")[0]
            if name in sys.modules:
                yield name


def _imported_by(root: str) -> Iterator[str]:
    """Yield the modules of the objects in the modules of a package."""
    for name, module in list(sys.modules.items()):
        if name == root or name.startswith(f"{root}."):
            for value in list(vars(module).values()):
                owner = None
                # A lazy object may raise anything.
                with suppress(Exception):
                    owner = value.__name__ if isinstance(value, ModuleType) else value.__module__
                if isinstance(owner, str):
                    yield owner
