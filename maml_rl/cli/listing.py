"""Output of `maml-rl configs`, `envs` and `zoo`: groups with full names and whole sentences, more with --verbose."""

import json
import textwrap
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import groupby, takewhile
from pathlib import Path

from maml_rl.config.catalog import full_name, shipped_configs, zoo
from maml_rl.config.config import load_config

_WIDTH = 120
# Without --verbose, at most this many families with the same tasks are named.
_NAMED = 4
_KINDS = {
    "bandit": "Bandits",
    "tabular_mdp": "Markov decision processes",
    "navigation": "Navigation",
    "point": "Navigation",
    "dark_room": "Navigation",
    "grid_navi": "Navigation",
    "mujoco": "MuJoCo",
    "metaworld": "Meta-World (needs the extra metaworld)",
}


def list_configs(*, verbose: bool) -> Iterable[str]:
    """Yield lines about the configs in the package."""
    paths = {full_name(path): path for path in shipped_configs().values()}
    for folder, names in groupby(paths, lambda name: name.partition("/")[0]):
        yield f"{folder}/"
        group = list(names)
        width = max(map(len, group))
        for name in group:
            lines = paths[name].read_text(encoding="utf-8").splitlines()
            # The first comment of a config describes its purpose.
            purpose = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
            yield from _entry(name.ljust(width), purpose)
            if verbose:
                config = load_config(paths[name])
                yield from _entry(
                    " " * width,
                    f"{config.env_name}, {config.algorithm}: {config.num_batches:,} meta-updates of "
                    f"{config.meta_batch_size} tasks, {config.fast_batch_size} episodes each.",
                )
        yield ""
    yield "`maml-rl train NAME` trains with one. The last part of a name is enough, and prefers maml/."
    if not verbose:
        yield "--verbose adds the family, the algorithm and the sizes of each."


def list_envs(*, verbose: bool) -> Iterable[str]:
    """Yield lines about the task families."""
    from maml_rl.envs import FAMILIES

    kinds: dict[str, dict[str, list[str]]] = {}
    for env_id, family in FAMILIES.items():
        description = getattr(import_module(family.module), f"{family.name}VectorEnv").task_description
        steps = "one step" if family.max_episode_steps is None else f"{family.max_episode_steps} steps"
        kind = _KINDS[family.module.removeprefix("maml_rl.envs.").removeprefix("families.").partition(".")[0]]
        text = f"{description.rstrip('.')}. Episodes have {steps}."
        kinds.setdefault(kind, {}).setdefault(text, []).append(env_id)
    for kind, tasks in kinds.items():
        yield kind
        for text, ids in tasks.items():
            named = ids if verbose or len(ids) <= _NAMED else ids[: _NAMED - 1]
            more = "" if named == ids else f", and {len(ids) - len(named)} more"
            yield from _wrapped(", ".join(named) + more, "  ", "  ")
            yield from _wrapped(text, "      ", "      ")
        yield ""
    if not verbose:
        yield "--verbose names all families."
    yield "Any gymnasium.Env with sample_tasks and reset_task is a family, too, as module:Id-v0; see maml-rl check-env."


def list_zoo(*, verbose: bool) -> Iterable[str]:
    """Yield lines about the trained policies that come with the package."""
    policies = zoo()
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
                text = f"{config.num_batches:,} meta-updates. Returns {when}, with 95 % intervals: {each}."
                yield from _entry(" " * width, text)
        yield ""
    yield "maml_rl.load_policy('zoo:NAME') loads one, maml-rl test zoo:NAME tests it. Returns are those on new tasks."
    if not verbose:
        yield "--verbose adds the returns after every step, with their intervals."


def list_benchmarks(*, verbose: bool) -> Iterable[str]:
    """Yield lines about the certified benchmarks."""
    from maml_rl.experiment.certified import benchmarks

    known = benchmarks()
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
    yield "`maml-rl test RUN --benchmark NAME --submit FILE` measures a policy."
    yield "`maml-rl benchmarks enter FILE` shows the result in the table of its benchmark."
    if not verbose:
        yield "--verbose adds the rules of each and the SHA-256 of its tasks."


def list_entries(files: Sequence[Path]) -> Iterable[str]:
    """Yield the tables of the benchmarks of the given results, with the entries that come with the package.

    Raises:
        ConfigError: If one is not a submission.
    """
    from maml_rl.experiment.standings import ENTERED, as_markdown, read_submissions, standings

    mine, entered = read_submissions(files), read_submissions(sorted(ENTERED.glob("*.json")))
    for name, submissions in mine.items():
        yield f"{name}\n"
        yield as_markdown(standings({**entered.get(name, {}), **submissions}))
        yield ""
    yield "To enter the documentation's table, open a pull request that adds the file to docs/results/submissions/."


def _entry(start: str, text: str) -> list[str]:
    """Return lines that begin with a name in a separate column."""
    return _wrapped(text, f"  {start}  ", " " * (len(start) + 4))


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )
