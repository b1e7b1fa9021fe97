"""Explains an import that fails because a package is older than this one needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import metadata

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?")
_CLAUSE = re.compile(r"(===|==|~=|<=|<|>=)\s*(\d+(?:\.\d+)*(?:\.\*)?)")


def explain_outdated(name: str = "maml-rl") -> str | None:
    """Return which requirement of an installed distribution is not met, and whose requirement excludes it.

    Returns:
        A line for each package that is too old, or None if none is.
    """
    try:
        required = metadata.requires(name)
    except metadata.PackageNotFoundError:
        return None
    lines = []
    for package, clauses, _ in requirements(required):
        needed = next((version for operator, version in clauses if operator == ">="), None)
        if needed is None:
            continue
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if _numbers(installed) < _numbers(needed):
            lines.append(
                f"{name} needs {package} {needed} or newer, but {installed} is installed{_cause(package, needed)}"
            )
    return "\n".join(lines) or None


def _cause(package: str, needed: str) -> str:
    """Return why a package is older than needed, as far as that is known, and the remedy."""
    pins = [f"{who} requires {what}" for who, what in _who_excludes(package, needed)]
    install = f"pip install '{package}>={needed}'"
    if not pins:
        return f"; {install}"
    it = "it" if len(pins) == 1 else "them"
    return f", because {' and '.join(pins)}; use an environment without {it}, or {install}, which may break {it}"


def _who_excludes(package: str, needed: str) -> Iterator[tuple[str, str]]:
    """Yield the installed distributions whose requirements allow no version from `needed` on, with the requirement."""
    seen = set()
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name not in seen:
            seen.add(name)
            for other, clauses, text in requirements(distribution.requires):
                if _normal(other) == _normal(package) and any(_excludes(clause, needed) for clause in clauses):
                    yield f"{name} {distribution.version}", text


def requirements(texts: Sequence[str] | None) -> Iterator[tuple[str, list[tuple[str, str]], str]]:
    """Yield the requirements of a distribution without its extras: package, clauses, and the text."""
    for text in texts or ():
        match = _REQUIREMENT.match(text)
        if match is not None and "extra" not in (match[3] or ""):
            yield match[1], _CLAUSE.findall(match[2]), text


def _excludes(clause: tuple[str, str], needed: str) -> bool:
    """Return whether a clause allows no version from `needed` on."""
    operator, text = clause
    version, least = _numbers(text), _numbers(needed)
    if operator == "~=" or text.endswith(".*"):
        # Of what is compatible only the last number is free, and so are those after it.
        version = version[:-1] if operator == "~=" else version
        return operator in ("~=", "==") and version < least[: len(version)]
    length = max(len(version), len(least))
    version, least = (numbers + (0,) * (length - len(numbers)) for numbers in (version, least))
    return version < least if operator in ("==", "===", "<=") else operator == "<" and version <= least


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
