"""The zoo: trained policies in the package, each a small run folder with its last checkpoint and evaluation.

`zoo/NAME` holds `config.json`, one checkpoint without what only training needs, and `evaluation.json`: what
`maml-rl test zoo:NAME` measures, with as many tasks.
"""

import hashlib
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from maml_rl.config.catalog import ZOO, find_run, zoo
from maml_rl.config.config import Config
from maml_rl.config.placement import RAY_KEYS
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.results.evaluation import Evaluation
from maml_rl.runs.atomic_files import TEMPORARY, discard, replace_file
from maml_rl.runs.checkpoint import find_checkpoint, restore, save_checkpoint
from maml_rl.runs.run_folder import CHECKPOINTS, CONFIG, EXPERIENCE, load_run_config, load_system
from maml_rl.runs.system import describe_system, without_folders

EVALUATION = "evaluation.json"
# Of all policies together, since they are part of every installation.
MOST_BYTES = 4_500_000
_NOT_KEPT = {"evaluate-every", "evaluation-tasks", "num-workers", "backend", "engine", "update", *RAY_KEYS}
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
# Names inside a policy's folder, which no policy can have.
_HELD = {CHECKPOINTS, CONFIG, EVALUATION}


def add_to_zoo(
    run: str | Path,
    name: str,
    checkpoint: str | Path | int = "last",
    *,
    num_tasks: int = 40,
    overwrite: bool = False,
    num_workers: int | None = None,
) -> Path:
    """Evaluate the policy of a run, and put both into the zoo.

    Returns:
        The policy's folder in the zoo.
    """
    _check_name(name, overwrite=overwrite)
    folder = find_run(run)
    config = load_run_config(folder)
    for place, value in config.named_code():
        key = ".".join(place)
        raise ConfigError(f"{key} {value!r} of {folder} is not part of the package, so others could not load it")
    # The placement of the run and its evaluations are of no use here, and may name resources that others lack.
    defaults = {key: field.default for key, field in Config.fields_by_key().items() if key in _NOT_KEPT}
    trained_with = load_system(folder)
    if trained_with.get("command"):
        trained_with["command"] = without_folders(trained_with["command"])
    path, saved = find_checkpoint(checkpoint, folder / CHECKPOINTS)
    # Training with the config reproduces this policy.
    config = config.override({**defaults, "num-batches": max(1, saved.iteration)})
    experiment = make_experiment(config, num_workers=num_workers)
    restore(saved, experiment.metalearner, config.algorithm, path)
    evaluation = evaluate(experiment, num_tasks, num_workers=num_workers)
    training_state = experiment.metalearner.training_state
    remaining = {key: value for key, value in saved.learner.items() if key.partition(".")[0] not in training_state}
    made = ZOO / f"{TEMPORARY}{name.replace('/', '-')}"
    shutil.rmtree(made, ignore_errors=True)
    try:
        state = {key: value for key, value in saved.state.items() if key != EXPERIENCE}
        save_checkpoint(replace(saved, score=None, evaluated=False, learner=remaining, state=state), made / CHECKPOINTS)
        replace_file(made / CONFIG, experiment.config.to_json().encode())
        text = json.dumps(_results(evaluation, experiment, trained_with), indent=1, allow_nan=False)
        replace_file(made / EVALUATION, f"{text}\n".encode())
        others = {other: path for other, path in zoo().items() if other != name}
        size = folder_size(made) + sum(map(folder_size, others.values()))
        if size > MOST_BYTES:
            raise ConfigError(
                f"with {name!r} the zoo would have {size:,} bytes, at most {MOST_BYTES:,} are allowed; remove another"
            )
        (ZOO / name).parent.mkdir(parents=True, exist_ok=True)
        if (ZOO / name).exists():
            discard(ZOO / name)
        made.rename(ZOO / name)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return ZOO / name


def _check_name(name: str, *, overwrite: bool) -> None:
    """Refuse invalid names, and those under which other files would be lost."""
    parts = name.split("/")
    if not _NAME.fullmatch(name) or ".." in name or _HELD & set(parts):
        raise ConfigError(f"{name!r} is not a name for the zoo; take letters, digits, '-' and '.', and at most one '/'")
    for other in zoo():
        if other == name and not overwrite:
            raise ConfigError(f"the zoo has a policy {name!r}; replace it with --overwrite, or choose another --name")
        if other != name and other.split("/")[: len(parts)] == parts[: other.count("/") + 1]:
            relation = "below" if len(parts) > other.count("/") + 1 else "above"
            raise ConfigError(f"{name!r} is {relation} the policy {other!r} of the zoo; choose another --name")
    if name not in zoo() and ((ZOO / name).exists() or (ZOO / name).is_symlink()):
        raise ConfigError(f"{ZOO / name} exists and is not a policy; move it, or choose another --name")


def returns_digest(evaluation: Evaluation) -> str:
    """Return a SHA-256 of the returns of all episodes."""
    return hashlib.sha256(evaluation.returns.tobytes()).hexdigest()


def folder_size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _finite(value: float) -> float | None:
    """Return the number, or None for nan, which JSON does not have."""
    return None if math.isnan(value) else value


def _results(evaluation: Evaluation, experiment: Experiment, trained_with: dict[str, Any]) -> dict[str, Any]:
    return {
        # Meaning of the columns: steps of adaptation, or episodes of a trial.
        "columns": experiment.metalearner.columns,
        "tasks": len(evaluation.tasks),
        "episodes": evaluation.returns.shape[2],
        "seed": evaluation.seed,
        "step-sizes": [_finite(size) for size in evaluation.step_sizes],
        # Of each column the mean, lower and upper bound; where there is no interval, no bounds.
        "intervals": [[_finite(value) for value in interval] for interval in evaluation.intervals().tolist()],
        "task-returns": evaluation.task_returns().tolist(),
        "digest": returns_digest(evaluation),
        "evaluated-with": {key: value for key, value in describe_system().items() if key not in ("commit", "command")},
        "trained-with": trained_with,
    }
