"""Output of `maml-rl configs`, `envs` and `zoo`: groups with full names and whole sentences, more with --verbose."""

import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from importlib import import_module
from itertools import groupby, takewhile
from typing import Any, TypeVar

from maml_rl.arguments import suggest
from maml_rl.config.catalog import full_name, shipped_configs, zoo
from maml_rl.config.config import Config, load_config
from maml_rl.config.settings import MEASURED
from maml_rl.errors import ConfigError
from maml_rl.results.identity import problem_of

_Entry = TypeVar("_Entry")

_WIDTH = 120
# Without --verbose, at most this many families with the same tasks are named.
_NAMED = 4
_KINDS = {
    "bandit": "Bandits",
    "tabular_mdp": "Markov decision processes",
    "navigation": "Navigation",
    "point": "Navigation",
    "grids": "Navigation",
    "mujoco": "MuJoCo",
    "mixture": "Mixtures",
    "metaworld": "Meta-World (needs the extra metaworld)",
    "jax": "In JAX (need the extra jax)",
}


def list_configs(text: str, *, verbose: bool) -> Iterable[str]:
    """Yield lines about the configs in the package whose names have this text."""
    paths = _matching({full_name(path): path for path in shipped_configs().values()}, text, "config")
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    for folder, names in groupby(paths, lambda name: name.partition("/")[0]):
        yield f"{folder}/"
        group = list(names)
        width = max(map(len, group))
        for name in group:
            lines = paths[name].read_text(encoding="utf-8").splitlines()
            # The first comment of a config describes its purpose.
            purpose = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
            config = load_config(paths[name])
            about = [purpose, _another_problem(name, config), _what_it_takes(measured.get(name, {}), config)]
            yield from _entry(name.ljust(width), " ".join(filter(None, about)))
            if verbose:
                yield from _entry(
                    " " * width,
                    f"{config.env_name}, {config.algorithm}: {config.num_batches:,} meta-updates of "
                    f"{config.meta_batch_size} tasks, {config.fast_batch_size} episodes each.",
                )
        yield ""
    yield from _wrapped(
        "`maml-rl train NAME` trains with one. The last part of a name is enough, and prefers maml/. Times are those "
        "of two cores, from two timed iterations each; `maml-rl train NAME --dry-run` times any one. Returns are those "
        "of the zoo's policies on new tasks."
    )
    if not verbose:
        yield from _wrapped("--verbose adds the family, the algorithm and the sizes of each.")


def _another_problem(name: str, config: Config) -> str:
    """Return a sentence about what differs from the problem of the config that the last part of the name means."""
    usual = shipped_configs()[name.rpartition("/")[2]]
    reference = problem_of(load_config(usual))
    keys = [key for key, value in problem_of(config).items() if value != reference[key]]
    return f"Another problem than {full_name(usual)}: {' and '.join(keys)}." if keys else ""


def _what_it_takes(measured: Mapping[str, Any], config: Config) -> str:
    """Return a sentence about steps, minutes and the return to expect, as far as they were measured."""
    known = []
    if measured.get("env-steps"):
        known.append(f"{_two_digits(measured['env-steps'] / 1e6)} M steps")
    if "minutes" in measured:
        known.append(f"{readable_minutes(measured['minutes'])} on two cores")
    else:
        known.append("time not measured")
    if "last" in measured:
        number = measured["iterations"]
        when = "" if number == config.num_batches else f" after {number:,} iterations"
        first, last = measured["first"], measured["last"]
        noun, several = measured["columns"], measured["number"] > 1
        if noun == "step":
            known.append(f"return {first} before adaptation and {last} at its end{when}")
        elif several:
            known.append(f"return {first} in the first {noun} and {last} in the last {noun} of a trial{when}")
        else:
            known.append(f"return {last} in the only {noun} of a trial{when}")
    text = ", ".join(known)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _two_digits(value: float) -> str:
    """Return a number with two digits, without an exponent: 160, 1.6, 0.16."""
    return f"{float(f'{value:.2g}'):,.6g}"


def readable_minutes(minutes: float) -> str:
    """Return a time in the unit that suits it."""
    if minutes < 1.0:
        return f"{60.0 * minutes:.0f} s"
    return f"{minutes:.2g} minutes" if minutes < 100.0 else f"{minutes / 60.0:.2g} hours"


def _matching(entries: Mapping[str, _Entry], text: str, noun: str) -> dict[str, _Entry]:
    """Return the entries whose names have a text in them."""
    matching = {name: entry for name, entry in entries.items() if text.lower() in name.lower()}
    if not matching:
        raise ConfigError(f"no {noun} has {text!r} in its name{suggest(text, list(entries))}")
    return matching


def list_envs(text: str, *, verbose: bool) -> Iterable[str]:
    """Yield lines about the task families whose ids have this text."""
    from maml_rl.envs import FAMILIES

    kinds: dict[str, dict[str, list[str]]] = {}
    for env_id, family in _matching(FAMILIES, text, "family").items():
        description = family.task_description
        if not description:
            description = getattr(import_module(family.module), f"{family.name}VectorEnv").task_description
        steps = family.max_episode_steps
        kind = _KINDS[family.module.removeprefix("maml_rl.envs.").removeprefix("families.").partition(".")[0]]
        about = f"{description.rstrip('.')}." + (f" Episodes have {steps} steps." if steps else "")
        kinds.setdefault(kind, {}).setdefault(about, []).append(env_id)
    for kind, tasks in kinds.items():
        yield kind
        for about, ids in tasks.items():
            named = ids if verbose or len(ids) <= _NAMED else ids[: _NAMED - 1]
            more = "" if named == ids else f", and {len(ids) - len(named)} more"
            yield from _wrapped(", ".join(named) + more, "  ", "  ")
            yield from _wrapped(about, "      ", "      ")
        yield ""
    if not verbose:
        yield from _wrapped("--verbose names all families.")
    yield from _wrapped(
        "Any gymnasium.Env with sample_tasks and reset_task is a family, too, as module:Id-v0; see maml-rl check-env."
    )


def list_zoo(text: str, *, verbose: bool) -> Iterable[str]:
    """Yield lines about the trained policies that come with the package and whose names have this text."""
    policies = _matching(zoo(), text, "policy of the zoo")
    width = max(map(len, policies))
    configs = {name: load_config(folder / "config.json") for name, folder in policies.items()}
    for algorithm in dict.fromkeys(config.algorithm for config in configs.values()):
        yield algorithm
        for name, config in configs.items():
            if config.algorithm != algorithm:
                continue
            evaluation = json.loads((policies[name] / "evaluation.json").read_text(encoding="utf-8"))
            intervals = evaluation["intervals"]
            counted, last = evaluation["columns"], len(intervals) - 1
            first, final = (f"{intervals[column][0]:.1f}" for column in (0, last))
            if counted != "step":
                returns = f"{first} in the first {counted}" + (f", {final} in {counted} {last + 1}" if last else "")
            else:
                returns = f"{first} before adaptation, {final} after {last} step{'s' * (last > 1)}"
            yield from _entry(name.ljust(width), f"{config.env_name}: mean return {returns}.")
            if verbose:
                each = ", ".join(
                    f"{value:.1f}" + (f" [{low:.1f}, {high:.1f}]" if low is not None else " (no interval)")
                    for value, low, high in intervals
                )
                when = "after 0, 1, ... inner steps" if counted == "step" else f"in each {counted}"
                about = f"{config.num_batches:,} meta-updates. Returns {when}, with 95 % intervals: {each}."
                yield from _entry(" " * width, about)
        yield ""
    yield from _wrapped(
        "maml_rl.load_policy('zoo:NAME') loads one, maml-rl test zoo:NAME tests it. Returns are those on new tasks."
    )
    if not verbose:
        yield from _wrapped("--verbose adds the returns after every step, with their intervals.")


def list_benchmarks(text: str, *, verbose: bool) -> Iterable[str]:
    """Yield lines about the certified benchmarks whose names have this text."""
    from maml_rl.experiment.certified import benchmarks

    known = _matching(benchmarks(), text, "benchmark")
    width = max(map(len, known))
    for name, rules in known.items():
        tasks = rules.tasks()
        yield from _entry(name.ljust(width), f"{rules.env_name}, {len(tasks)} tasks. {rules.description}")
        if verbose:
            yield from _entry(
                " " * width,
                f"Episodes before those that count: at most {rules.episodes_before}. Adaptations to each task: "
                f"{rules.repetitions}. Arguments: {json.dumps(dict(rules.env_kwargs))}. SHA-256 of the tasks: "
                f"{rules.sha256}.",
            )
    yield ""
    yield from _wrapped("`maml-rl test RUN --benchmark NAME` measures a policy.")
    if not verbose:
        yield from _wrapped("--verbose adds the rules of each and the SHA-256 of its tasks.")


def _entry(start: str, text: str) -> list[str]:
    """Return lines that begin with a name in a separate column; in a narrow terminal, on a line of its own."""
    if 2 * len(start) > _width():
        return [*([f"  {start.rstrip()}"] if start.strip() else []), *_wrapped(text, " " * 6, " " * 6)]
    return _wrapped(text, f"  {start}  ", " " * (len(start) + 4))


def _wrapped(text: str, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(
        text, _width(), initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )


def _width() -> int:
    """Return how wide a line may be: as the terminal; in a pipe, as usual."""
    return min(shutil.get_terminal_size((_WIDTH, 0)).columns, _WIDTH)
