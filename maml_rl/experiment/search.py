"""Searches settings of a config with Optuna, for `maml-rl tune`.

The first trial has the config's own values; Optuna's tree of Parzen estimators draws the others. All train up to the
same number of environment steps. After a ninth of it, and after a third, the best third of the trials continues and
the others end (successive halving). Optuna keeps the trials, in a SQLite file beside the runs, under the identity of
the config, its seed and the length of a trial: the same command continues the search, and several processes may share
it. A trial whose process was killed is trained again, with the same result. Trials have a seed of their own, and hence
other tasks than reported trainings.

Source: Akiba et al. 2019, https://arxiv.org/abs/1907.10902; Li et al. 2020, https://arxiv.org/abs/1810.05934
"""

import csv
import fcntl
import io
import math
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from maml_rl.config import Config
from maml_rl.config.config import TASKS
from maml_rl.config.yaml_source import parse_value
from maml_rl.errors import AlgorithmError, ConfigError, NonFiniteError, explain
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.train import train
from maml_rl.foreign_files import read_regular
from maml_rl.metalearners.registry import algorithm_of
from maml_rl.results.identity import identity
from maml_rl.runs.atomic_files import locked, replace_file
from maml_rl.runs.metrics import Metrics, return_keys
from maml_rl.runs.system import package_versions

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

# A third of the trials continues at each of the rungs 1, 3 and 9 of a budget that is cut into nine.
_REDUCTION, _PARTS = 3, 9
_METRIC = "return after adaptation"
_FIRST = ("trial", "state", "value", "env_steps", "seconds", "seed", "version", "rungs")
# In a folder of searches: the trials of all of them; in that of one search: the table of its trials.
STUDIES, TABLE = "studies.db", "trials.csv"
# (number of a rung, return at it, environment steps so far) -> whether the trial ends there.
Ends = Callable[[int, float, int], bool]


def search(
    config: Config,
    texts: Mapping[str, str],
    folder: Path,
    *,
    num_trials: int,
    env_steps: float,
    minutes: float = math.inf,
) -> Iterator[str]:
    """Run the trials that a search still lacks; yield a sentence about each, and one about the best.

    Args:
        config: of the first trial.
        texts: the values that are searched, by key, as `distribution_of` reads them.
        folder: of all searches; each has its runs and its table in a folder of its own there.
        num_trials: trials in all.
        env_steps: environment steps of a complete trial.
        minutes: after which no trial begins.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {key: distribution_of(key, text) for key, text in texts.items()}
    if not make_experiment(config).metalearner.samples:
        raise config.error("it samples nothing in training, and the value of a trial is its return there", "algorithm")
    # All values are checked before anything is trained.
    for key, distribution in space.items():
        for value in _extremes(distribution):
            make_experiment(changed(config, {key: value}))
    of_config, initial = identity(config), own_values(config, space)
    runs = folder / f"{of_config[:12]}-seed-{config.seed}-steps-{env_steps:g}"
    study = open_study(folder / STUDIES, f"{of_config} seed {config.seed} {env_steps:g} steps, {_METRIC}")
    _refuse_other_kinds(study, space, texts)
    yield f"trials of this search: {runs}"
    began, done = monotonic(), 0
    try:
        while monotonic() < began + 60.0 * minutes:
            with _next_trial(study, runs, num_trials, initial) as trial:
                if trial is None:
                    break
                yield _try(study, trial, config, space, runs / str(trial.number), env_steps)
            done += 1
            left = num_trials - sum(each.state.is_finished() for each in study.get_trials(deepcopy=False))
            if left > 0:
                each = (monotonic() - began) / done
                yield f"{left} of {num_trials} trials left, about {left * each / 60.0:.1f} minutes"
    finally:
        _write_table(runs / TABLE, study.trials, config.seed)
    if any(trial.state.name == "COMPLETE" for trial in study.trials):
        yield f"best: {study.best_value:.2f} in trial {study.best_trial.number}, with {study.best_params}"


def _refuse_other_kinds(study: "Study", space: Mapping[str, "BaseDistribution"], texts: Mapping[str, str]) -> None:
    """Refuse values that Optuna cannot draw in a study that had others of the same setting."""
    from optuna.distributions import check_distribution_compatibility

    for trial in study.get_trials(deepcopy=False):
        for key in space.keys() & trial.distributions.keys():
            before = trial.distributions[key]
            try:
                check_distribution_compatibility(before, space[key])
            except ValueError:
                raise ConfigError(
                    f"the values of {key!r} are {texts[key]!r}, and earlier trials of this search had "
                    f"{_text_of(before)!r}: give a range of the same kind or the same choices, or another folder for a "
                    "new search"
                ) from None


def open_study(path: Path, name: str) -> "Study":
    """Return the study of this name, with the trials of before, if there are any."""
    import optuna

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            read_regular(path)
        with closing(sqlite3.connect(path)) as file:
            file.execute("BEGIN IMMEDIATE")
            (report,) = file.execute("PRAGMA integrity_check").fetchone()
            if report != "ok":
                raise sqlite3.DatabaseError(report)
        study = optuna.create_study(
            storage=optuna.storages.RDBStorage(f"sqlite:///{path.absolute()}"),
            study_name=name,
            load_if_exists=True,
            direction="maximize",
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=_REDUCTION),
        )
        study.get_trials()
    # Whatever Optuna raises about a file that is none of its own.
    except Exception as error:
        raise ConfigError(f"cannot keep the trials in {path}: {explain(error)}; give another folder") from None
    return study


@contextmanager
def _next_trial(study: "Study", runs: Path, num_trials: int, initial: Mapping[str, Any]) -> Iterator["Trial | None"]:
    """Yield a trial that is this process's until the end: one whose process was killed, or the next; None if all began.

    A lock on a file says that the process of a trial lives: the operating system releases it when the process ends.
    """
    from optuna.trial import Trial, TrialState

    runs.mkdir(parents=True, exist_ok=True)
    trial, held = None, None
    with (runs / "lock").open("w") as choosing:
        fcntl.flock(choosing, fcntl.LOCK_EX)
        known = study.get_trials(deepcopy=False)
        if not known and initial:
            study.enqueue_trial(dict(initial))
        for each in known:
            if each.state == TrialState.RUNNING and (held := locked(runs / f"{each.number}.lock")) is not None:
                trial = Trial(study, each._trial_id)
                break
        waiting = not known or any(each.state == TrialState.WAITING for each in known)
        if trial is None and (waiting or len(known) < num_trials):
            trial = study.ask()
            held = locked(runs / f"{trial.number}.lock")
    try:
        yield trial
    finally:
        if held is not None:
            os.close(held)


def _try(
    study: "Study", trial: "Trial", config: Config, space: Mapping[str, "BaseDistribution"], run: Path, env_steps: float
) -> str:
    """Train a trial, tell the study, and return a sentence about it."""
    from optuna.trial import TrialState

    drawn = {key: _draw(study, trial, key, setting, config.seed) for key, setting in space.items()}
    values = {key: parse_value(x, key) if isinstance(x, str) else x for key, x in drawn.items()}
    began, reported = monotonic(), set(study.get_trials(deepcopy=False)[trial.number].intermediate_values)

    def tell(state: TrialState, steps: int, value: float | None = None) -> None:
        trial.set_user_attr("env_steps", steps)
        trial.set_user_attr("seconds", round(monotonic() - began))
        study.tell(trial, value, None if value is not None else state)

    def ends(rung: int, value: float, steps: int) -> bool:
        if rung not in reported:
            trial.report(value, rung)
        # Told at once: the pruner remembers which rungs it has decided.
        if pruned := rung < _PARTS and bool(trial.should_prune()):
            tell(TrialState.PRUNED, steps)
        return pruned

    try:
        value, steps = train_trial(changed(config, values), run, env_steps, ends)
    except (NonFiniteError, AlgorithmError) as error:
        tell(TrialState.FAIL, 0)
        outcome = f"failed: {explain(error)}"
    else:
        if value is not None:
            tell(TrialState.COMPLETE, steps, value)
        outcome = "ended early" if value is None else f"{value:.2f}"
    return f"trial {trial.number}, {(monotonic() - began) / 60.0:.1f} minutes: {outcome}, with {drawn}"


def _draw(study: "Study", trial: "Trial", key: str, among: "BaseDistribution", seed: int) -> Any:
    """Return a trial's value of a setting: a stream for each, so that a search that was killed draws the same."""
    import optuna

    words = np.random.SeedSequence((seed, trial.number, zlib.crc32(key.encode()))).generate_state(1)
    study.sampler = optuna.samplers.TPESampler(seed=int(words[0]))
    if isinstance(among, optuna.distributions.CategoricalDistribution):
        return trial.suggest_categorical(key, among.choices)
    if isinstance(among, optuna.distributions.IntDistribution):
        return trial.suggest_int(key, among.low, among.high, log=among.log)
    assert isinstance(among, optuna.distributions.FloatDistribution)
    return trial.suggest_float(key, among.low, among.high, log=among.log)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a config with some keys replaced; `section.key` replaces one key of a section."""
    replaced: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name:
            # Settings of the algorithm are replaced one by one anyway.
            present = {"env-kwargs": config.env_kwargs, TASKS: config.tasks or {}}.get(section, {})
            replaced[section] = {**present, **replaced.get(section, {}), name: value}
        else:
            replaced[key] = value
    return config.override(replaced, "the settings that are searched")


def own_values(config: Config, space: Mapping[str, "BaseDistribution"]) -> dict[str, Any]:
    """Return what a config itself has for the settings of a space, without those that are outside of it."""
    whole = algorithm_of(config)[-1].model_dump(mode="json", by_alias=True)
    flat = {**whole["algorithm-settings"], **whole}
    values = {}
    for key, distribution in space.items():
        section, _, name = key.partition(".")
        value = whole[section].get(name) if name else flat[key]
        within = _extremes(distribution)
        if choices := getattr(distribution, "choices", None):
            value = choices[within.index(value)] if value in within else None
        elif value is not None and not within[0] <= value <= within[-1]:
            value = None
        if value is not None:
            values[key] = value
    return values


def train_trial(config: Config, folder: Path, env_steps: float, ends: Ends) -> tuple[float | None, int]:
    """Train one trial up to a number of environment steps.

    Args:
        config: of the trial.
        folder: of its run, which is replaced.
        env_steps: environment steps of a complete trial.
        ends: see `Ends`.

    Returns:
        The mean return after adaptation in the last ninth of the environment steps, None if the trial was ended
        earlier; and the environment steps that it took.
    """
    stop, returns, values = Event(), list[tuple[int, float]](), list[float]()
    span = env_steps / _PARTS

    def look(metrics: Metrics) -> None:
        returns.append((metrics["env_steps"], metrics[return_keys(metrics)[-1]]))
        while len(values) < _PARTS and metrics["env_steps"] >= (len(values) + 1) * span and not stop.is_set():
            recent = [value for steps, value in returns if steps > metrics["env_steps"] - span]
            values.append(float(np.mean(recent)))
            if ends(len(values), values[-1], metrics["env_steps"]) or len(values) == _PARTS:
                stop.set()

    train(config, folder, overwrite=True, on_iteration=look, stop=stop)
    steps = returns[-1][0]
    if not stop.is_set():
        raise config.error(
            f"a trial ends after {steps:,} of {env_steps:,.0f} environment steps: set more than {config.num_batches} "
            "(--set num-batches=N), or search with fewer --env-steps",
            "num-batches",
        )
    return values[-1] if len(values) == _PARTS else None, steps


def _write_table(path: Path, trials: Sequence["FrozenTrial"], seed: int) -> None:
    """Write a row for each finished trial; one that failed or was ended early has no value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys, version = sorted({key for trial in trials for key in trial.params}), package_versions().get("maml-rl", "")
    writer.writerow([*_FIRST, *keys])
    for trial in trials:
        if trial.state.is_finished():
            value = trial.value if trial.state.name == "COMPLETE" else ""
            spent = (trial.user_attrs.get(key, "") for key in ("env_steps", "seconds"))
            rungs = " ".join(str(trial.intermediate_values[rung]) for rung in sorted(trial.intermediate_values))
            row = [trial.number, trial.state.name.lower(), value, *spent, seed, version, rungs]
            writer.writerow([*row, *(trial.params.get(key, "") for key in keys)])
    # The trials are in the study: a table that cannot be written must not hide why a search ended.
    with suppress(OSError):
        replace_file(path, text.getvalue().encode())


def distribution_of(key: str, text: str) -> "BaseDistribution":
    """Return the distribution that `LOW:HIGH`, `LOW:HIGH:log` or `A|B|C` denotes."""
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


def _text_of(distribution: "BaseDistribution") -> str:
    """Return the text that denotes a distribution; see `distribution_of`."""
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return "|".join(choices)
    return ":".join([*map(str, _extremes(distribution)), *["log"] * getattr(distribution, "log", False)])


def _extremes(distribution: "BaseDistribution") -> list[Any]:
    """Return all choices, or the lowest and the highest number."""
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return [parse_value(choice, "--search") for choice in choices]
    return [getattr(distribution, bound) for bound in ("low", "high")]
