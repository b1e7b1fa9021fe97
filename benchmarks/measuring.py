"""Fair measurements on a machine that is not quite idle: systems are interleaved, ratios are taken round by round."""

import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maml_rl.machine import usable_cores

PACKAGES = ("gymnasium", "mujoco", "mjbatch", "numpy", "torch", "stable_baselines3", "envpool")

Measurements = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Participant:
    """A system, or another participant of interleaved rounds.

    Attributes:
        name: for progress messages.
        turn: does the work once and returns its measurements by table row; one turn may measure several rows.
        close: frees the participant's resources.
    """

    name: str
    turn: Callable[[], Measurements]
    close: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Samples:
    """The values of one row, one per round.

    Attributes:
        values: in the order of the rounds.
    """

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median over rounds."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """Smallest value of a round."""
        return min(self.values)

    @property
    def high(self) -> float:
        """Largest value of a round."""
        return max(self.values)

    def as_dict(self) -> dict[str, Any]:
        """Return median, minimum, maximum and the values of all rounds, ready for JSON."""
        return {"median": self.median, "min": self.low, "max": self.high, "values": self.values}


def of_cpu_time(name: str) -> str:
    """Return the name of the row with steps per second of CPU time, of all processes together."""
    return f"{name}, per second of CPU time"


def take_turns(
    participants: Sequence[Participant],
    *,
    repeats: int,
    warmup: int = 1,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Samples]:
    """Run one turn of every participant in each of `warmup + repeats` rounds; warm-up rounds do not count.

    The participant that starts changes from round to round, so that the order favors none.

    Args:
        participants: at least one.
        repeats: rounds that count, at least 1.
        warmup: rounds before them.
        report: gets a line about every turn.

    Returns:
        Values by row name, in order of first appearance in the order of `participants`.

    Raises:
        ValueError: If `repeats` or `warmup` is too small, or two participants measure the same row.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}")
    rows: dict[int, dict[str, Samples]] = {index: {} for index in range(len(participants))}
    for number in range(-warmup, repeats):
        shift = number % max(1, len(participants))
        order = [*range(shift, len(participants)), *range(shift)]
        for index in order:
            measured = participants[index].turn()
            told = ", ".join(f"{name} {value:,.4g}" for name, value in measured.items())
            report(f"{'warm-up' if number < 0 else f'round {number + 1}/{repeats}'}  {told}")
            if number >= 0:
                for name, value in measured.items():
                    rows[index].setdefault(name, Samples()).values.append(value)
    names = [name for measured in rows.values() for name in measured]
    if len(set(names)) < len(names):
        raise ValueError(f"every row may be measured by one participant only, got {names}")
    return {name: samples for measured in rows.values() for name, samples in measured.items()}


def ratios(numerator: Samples, denominator: Samples) -> Samples:
    """Return the ratio of every round; a slowdown of a whole round cancels out."""
    return Samples([above / below for above, below in zip(numerator.values, denominator.values, strict=True)])


def machine(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, load before the run, versions (None if not installed)."""
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "command": " ".join(["python -m", _module_name(), *_without_paths(sys.argv[1:])]),
    }


def describe(machine_facts: Mapping[str, Any]) -> str:
    """Return one line about the machine, and a warning if others were using it."""
    versions = ", ".join(f"{name} {version}" for name, version in machine_facts["versions"].items() if version)
    line = f"{machine_facts['cpu']}, {machine_facts['cores']} cores, Python {machine_facts['python']}, {versions}"
    load = machine_facts["load_before"]
    if load is not None and load > 0.5:
        line += f"\nThe load average was {load:.1f} before the first turn: other work shares the cores, expect noise."
    return line


def _module_name() -> str:
    """Return the dotted name under which the running script was started."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name


def _without_paths(arguments: Sequence[str]) -> list[str]:
    """Return arguments without the paths of results."""
    kept = [argument for argument in arguments if not argument.startswith(("--json=", "--chart="))]
    for option in ("--json", "--chart"):
        if option in kept:
            start = kept.index(option)
            del kept[start : start + 2]
    return kept


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
