"""Searches settings of a config with Optuna, for `maml-rl tune`.

The first trial has the config's own values; Optuna's tree of Parzen estimators draws the others. All train up to the
same number of environment steps. At a ninth and at a third of it, the best third of the trials continues and the others
end (successive halving). The CSV has a row for every trial and is written after each; the same command continues from
it. Trials have a seed of their own, and hence other tasks than reported trainings.

Source: Akiba et al. 2019, https://arxiv.org/abs/1907.10902; Li et al. 2020, https://arxiv.org/abs/1810.05934
"""

import csv
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from maml_rl import __version__
from maml_rl.config import Config
from maml_rl.config.yaml_source import parse_value
from maml_rl.errors import ConfigError, NonFiniteError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.train import train
from maml_rl.foreign_files import read_lines
from maml_rl.metalearners.registry import algorithm_of
from maml_rl.runs.atomic_files import replace_file
from maml_rl.runs.metrics import Metrics, return_keys

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

# A third of the trials continues at each of the rungs 1, 3 and 9 of a budget that is cut into nine.
_REDUCTION, _PARTS = 3, 9
_FIRST = ("trial", "state", "value", "env_steps", "seconds", "config", "seed", "version", "rungs")


def search(
    config: Config,
    texts: Mapping[str, str],
    csv_file: Path,
    *,
    name: str,
    num_trials: int,
    env_steps: float,
    runs: Path,
    minutes: float = math.inf,
) -> Iterator[str]:
    """Run the trials that a CSV file lacks, and write them; yield a sentence about each, and one about the best.

    `texts` are the values that are searched, by key, as `distribution_of` reads them; `name` is the config's, for the
    file. A whole trial has `env_steps` environment steps, and none begins after `minutes`.

    Raises:
        ConfigError: If the config, or a value that is searched, is wrong.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {key: distribution_of(key, text) for key, text in texts.items()}
    # All values are checked before anything is trained.
    for key, distribution in space.items():
        for value in _extremes(distribution):
            make_experiment(changed(config, {key: value}))
    study = optuna.create_study(
        direction="maximize",
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=_REDUCTION),
    )
    study.add_trials(read_trials(csv_file, space))
    begun = len(study.trials)
    # Optuna counts a trial that waits, too.
    remaining = num_trials - len(study.trials)
    own = own_values(config, space)
    if own and not begun:
        study.enqueue_trial(own)
    deadline = monotonic() + 60.0 * minutes
    for _ in range(remaining):
        if monotonic() >= deadline:
            break
        # A stream for each trial, so that a search that is continued does not draw its first trials again.
        finished = sum(each.state.is_finished() for each in study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=_seed_of(config.seed, finished))
        trial = study.ask(space)
        began = monotonic()

        def ends(rung: int, value: float, trial: "Trial" = trial) -> bool:
            trial.report(value, rung)
            return bool(trial.should_prune())

        values = {key: parse_value(x, key) if isinstance(x, str) else x for key, x in trial.params.items()}
        folder, state = runs / str(trial.number), optuna.trial.TrialState.PRUNED
        try:
            value, steps = train_trial(changed(config, values), folder, env_steps, ends)
        except NonFiniteError:
            value, steps, state = None, 0, optuna.trial.TrialState.FAIL
        trial.set_user_attr("env_steps", steps)
        trial.set_user_attr("seconds", round(monotonic() - began))
        study.tell(trial, value, state if value is None else None)
        write_trials(csv_file, study.trials, name, config.seed)
        last = study.trials[-1]
        yield f"trial {last.number}, {last.state.name.lower()}: {last.value} with {last.params}"
    if any(trial.state.name == "COMPLETE" for trial in study.trials):
        yield f"best: {study.best_value:.2f} with {study.best_params}"


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a config with some keys replaced; `section.key` replaces one key of a section."""
    replaced: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name:
            present = config.env_kwargs if section == "env-kwargs" else {}
            replaced[section] = {**present, **replaced.get(section, {}), name: value}
        else:
            replaced[key] = value
    return config.override(replaced, "the settings that are searched")


def _seed_of(seed: int, trial: int) -> int:
    """Return the seed of the draws of one trial of a search."""
    return int(np.random.SeedSequence((seed, trial)).generate_state(1)[0])


def own_values(config: Config, space: Mapping[str, "BaseDistribution"]) -> dict[str, Any]:
    """Return what a config itself has for the settings of a space, without those that are outside of it."""
    whole = algorithm_of(config)[-1].model_dump(mode="json", by_alias=True)
    flat = {**whole["algorithm-settings"], **whole}
    found = {}
    for key, distribution in space.items():
        section, _, name = key.partition(".")
        value = whole[section].get(name) if name else flat[key]
        within = _extremes(distribution)
        if choices := getattr(distribution, "choices", None):
            value = choices[within.index(value)] if value in within else None
        elif value is not None and not within[0] <= value <= within[-1]:
            value = None
        if value is not None:
            found[key] = value
    return found


def train_trial(
    config: Config, folder: Path, env_steps: float, ends: Callable[[int, float], bool]
) -> tuple[float | None, int]:
    """Train one trial up to a number of environment steps.

    Args:
        config: of the trial.
        folder: of its run, which is replaced.
        env_steps: environment steps of a complete trial.
        ends: receives the number of each rung and the return at it; returns whether the trial ends.

    Returns:
        The mean return after adaptation in the last ninth of the environment steps, None if the trial was ended
        earlier; and the environment steps that it took.

    Raises:
        ConfigError: If `num-batches` is too small for so many environment steps.
    """
    stop, returns, values = Event(), list[tuple[int, float]](), list[float]()
    span = env_steps / _PARTS

    def look(metrics: Metrics) -> None:
        returns.append((metrics["env_steps"], metrics[return_keys(metrics)[-1]]))
        while len(values) < _PARTS and metrics["env_steps"] >= (len(values) + 1) * span and not stop.is_set():
            values.append(_recent(returns, span))
            if ends(len(values), values[-1]) or len(values) == _PARTS:
                stop.set()

    train(config, folder, overwrite=True, on_iteration=look, stop=stop)
    steps = returns[-1][0]
    if not stop.is_set():
        raise config.error(f"a trial ends after {steps:,} of {env_steps:,.0f} environment steps", "num-batches")
    return values[-1] if len(values) == _PARTS else None, steps


def _recent(returns: Sequence[tuple[int, float]], span: float) -> float:
    """Return the mean of the returns within the last `span` environment steps."""
    return float(np.mean([value for steps, value in returns if steps > returns[-1][0] - span]))


def read_trials(path: Path, space: Mapping[str, "BaseDistribution"]) -> list["FrozenTrial"]:
    """Return the finished trials of a CSV file, in the order of their numbers; none where there is no file.

    Raises:
        ConfigError: If other settings were searched.
    """
    if not os.path.lexists(path):
        return []
    try:
        lines = read_lines(path)
    except OSError as error:
        raise ConfigError(f"cannot read the trials in {path}: {error.strerror or error}") from None

    import optuna

    trials = []
    for row in csv.DictReader(lines):
        if set(row) - set(_FIRST) != set(space):
            raise ConfigError(f"{path} has trials of {sorted(set(row) - set(_FIRST))}, not {sorted(space)}")
        state = optuna.trial.TrialState[row["state"].upper()]
        # Choices are kept as text.
        params = {
            key: row[key]
            if isinstance(each, optuna.distributions.CategoricalDistribution)
            else parse_value(row[key], str(path))
            for key, each in space.items()
        }
        trials.append(
            optuna.trial.create_trial(
                state=state,
                value=float(row["value"]) if state.name == "COMPLETE" else None,
                intermediate_values={rung: float(text) for rung, text in enumerate(row["rungs"].split(), 1)},
                params=params,
                distributions=dict(space),
                user_attrs={key: int(row[key]) for key in ("env_steps", "seconds")},
            )
        )
    return trials


def write_trials(path: Path, trials: Sequence["FrozenTrial"], config: str, seed: int) -> None:
    """Write all trials; the file is replaced atomically. A trial that was ended early has no value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = sorted({key for trial in trials for key in trial.params})
    writer.writerow([*_FIRST, *keys])
    for trial in trials:
        value = f"{trial.value:.3f}" if trial.state.name == "COMPLETE" else ""
        spent = (trial.user_attrs[key] for key in ("env_steps", "seconds"))
        rungs = " ".join(f"{trial.intermediate_values[rung]:.3f}" for rung in sorted(trial.intermediate_values))
        row = [trial.number, trial.state.name.lower(), value, *spent, config, seed, __version__, rungs]
        writer.writerow([*row, *(trial.params[key] for key in keys)])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.getvalue().encode())


def distribution_of(key: str, text: str) -> "BaseDistribution":
    """Return the distribution that `LOW:HIGH`, `LOW:HIGH:log` or `A|B|C` denotes.

    Raises:
        ConfigError: If the text is none of these.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if "|" in text:
        return CategoricalDistribution(text.split("|"))
    low, *rest = text.split(":")
    try:
        if len(rest) not in (1, 2) or rest[1:] not in ([], ["log"]):
            raise ValueError("expected LOW:HIGH, LOW:HIGH:log or A|B|C")
        is_log = len(rest) == 2
        make: Callable[..., BaseDistribution] = IntDistribution
        bounds: list[float] = []
        try:
            bounds = [int(low), int(rest[0])]
        except ValueError:
            make, bounds = FloatDistribution, [float(low), float(rest[0])]
        return make(*bounds, log=is_log)
    except ValueError as error:
        raise ConfigError(f"the values of {key!r} are {text!r}: {error}") from None


def _extremes(distribution: "BaseDistribution") -> list[Any]:
    """Return all choices, or the lowest and the highest number."""
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return [parse_value(choice, "--search") for choice in choices]
    return [getattr(distribution, bound) for bound in ("low", "high")]
