"""The folder of a training run: its config, metrics, events and checkpoints, and the lock on it."""

import json
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from maml_rl.arguments import suggest
from maml_rl.config.config import RECORDED, SECTION, TASKS, Config, load_config
from maml_rl.config.placement import PLACEMENT_KEYS
from maml_rl.config.settings import SettingsModel
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.foreign_files import SUMS, Printable, check_sum, checked, parse_json, read_lines, read_regular, sum_line
from maml_rl.runs.atomic_files import (
    LOCK,
    TEMPORARY,
    check_creatable,
    discard,
    lock_folder,
    remove,
    remove_unfinished,
    replace_file,
    sync_folder,
)
from maml_rl.runs.checkpoint import (
    Checkpoint,
    Learner,
    check_finite,
    latest_intact,
    list_checkpoints,
    restore,
    save_checkpoint,
    states_of_checkpoints,
)
from maml_rl.runs.metrics import EventLog, Metrics, MetricsLog, inspect_metrics
from maml_rl.runs.segments import named_segments, remove_segments
from maml_rl.runs.system import describe_system

CONFIG = RECORDED
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
EVENTS = "tensorboard"
# A folder of segments for each replay of the learner; see `runs.segments`.
EXPERIENCE = "experience"
SYSTEM = "system.json"
# What ended a run for good, so that it would end there again.
FAILURE = "failure.json"
# The tasks of the evaluations during training, where they came from a file.
EVALUATION_TASKS = "evaluation-tasks.json"
# The fixed sets of tasks, by their purpose.
FIXED_TASKS: dict[Literal["training", "validation", "test"], str] = {
    "training": "training-tasks.json",
    "test": "test-tasks.json",
}
# Parts of the path where Ray unpacks the working directory of a job.
_RAY_JOB = {"runtime_resources", "working_dir_files"}
# Files and folders of a run besides its config. The folders may be links, say to a larger disk; the files may not.
_FILES = (METRICS, SYSTEM, EVALUATION_TASKS, *FIXED_TASKS.values(), FAILURE, SUMS)
_FOLDERS = (CHECKPOINTS, EVENTS, EXPERIENCE)
# Of the description of a system.
_MOST_BYTES = 1_000_000
# Name of an earlier config while its run is replaced: until the new one is written, there is no run to continue.
_REPLACED = f"{TEMPORARY}removed-{CONFIG}"

# A resumed run may train longer, keep more checkpoints and be evaluated differently; its results must not change.
_MAY_CHANGE = {
    "num-batches",
    "checkpoint-every",
    "keep-checkpoints",
    "evaluation-steps",
    "halve-step-size",
    "evaluate-every",
    # Only a worker that is not waited for makes a difference to the results.
    *(key for key in PLACEMENT_KEYS if key != "recv-timeout"),
}

logger = logging.getLogger(__name__)


class RunFolder(AbstractContextManager["RunFolder"]):
    """A run that is being written.

    Args:
        folder: the run's own.
        config: of the run.
        learner: saved in checkpoints, and restored by a resumed run.
        resume: continue from the newest intact checkpoint; start the run if there is none yet.
        overwrite: remove the run that is there.
        origin: what a new run comes from, as JSON values, which is kept with its system.

    Attributes:
        path: the folder.
        iteration: number of finished iterations.
        env_steps: environment steps taken in them.
        task_state: state of the task distribution after them; None where it has none.
        earlier: tensors of earlier iterations, with which batches are sampled ahead of time; see `Checkpoint`.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Config,
        learner: Learner,
        *,
        resume: bool = False,
        overwrite: bool = False,
        origin: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.path = Path(folder)
        self._origin = origin
        self._config, self._learner = config, learner
        self.iteration, self.env_steps = 0, 0
        self.task_state: dict[str, Any] | None = None
        self.earlier: dict[int, dict[str, Tensor]] = {}
        self._kept: Checkpoint | None = None
        self._marks: dict[str, Any] = {}
        for name, replay in learner.experience.items():
            replay.attach(self.path / EXPERIENCE / name)
        self._saved = 0
        check_run_folder(self.path, resume=resume, overwrite=overwrite)
        is_new = not (self.path / CONFIG).exists()
        _warn_of_ray_job(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.path, "training")
        try:
            _remove_half_written(self.path)
            if resume and has_begun(self.path):
                self._resume()
            else:
                if resume:
                    logger.warning("there is nothing to continue in %s yet: the run starts from the beginning", folder)
                self._create()
            self._metrics = MetricsLog(self.path / METRICS, self.iteration)
            self._events = EventLog(self.path / EVENTS, self.iteration)
        except BaseException as error:
            if is_new:
                with suppress(OSError):
                    _clear(self.path)
                    (self.path / LOCK).unlink()
                    self.path.rmdir()
            os.close(self._lock)
            if isinstance(error, OSError):
                place = "" if error.filename is None else f" ({os.fsdecode(error.filename)})"
                raise ConfigError(
                    f"cannot write the run in {self.path}: {error.strerror or error}{place}; "
                    "choose another --output-folder"
                ) from error
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._metrics.close()
        try:
            self._events.close()
        except CheckpointError:
            # The error that ended the run is more informative.
            if error is None:
                raise
        finally:
            os.close(self._lock)

    def settle(self) -> None:
        """Record the settings of a resumed run, which nothing has refused; one that was meant to be longer still is.

        What ended it before no longer counts.
        """
        length = max(self._config.num_batches, load_config(self.path / CONFIG).num_batches)
        self.write(CONFIG, self._config.model_copy(update={"num_batches": length}).to_json().encode())
        sums = self.path / SUMS
        listed = read_lines(sums) if sums.is_file() else []
        if (left := [line for line in listed if not line.endswith(f"  {FAILURE}")]) != listed:
            replace_file(sums, _text(left))
        (self.path / FAILURE).unlink(missing_ok=True)

    def record(self, metrics: Metrics) -> None:
        """Record one more finished iteration."""
        self._metrics.write(metrics)
        self._events.write(metrics)
        self.iteration, self.env_steps = metrics["iteration"] + 1, metrics["env_steps"]

    def keep(
        self,
        score: float | None,
        *,
        evaluated: bool = False,
        task_state: dict[str, Any] | None = None,
        earlier: Mapping[int, dict[str, Tensor]] = MappingProxyType({}),
    ) -> None:
        """Copy the state after the finished iterations, so that `save` can write it in the middle of the next one.

        `Checkpoint` and `task_state` say what the arguments are; the tensors of earlier iterations are not copied.
        """
        self.task_state = task_state
        self._kept = replace(self._checkpoint(score, evaluated).copied(), earlier=dict(earlier))
        # Experience is too large for a copy; its extent is enough to write it later.
        self._marks = {name: replay.mark() for name, replay in self._learner.experience.items()}

    def fail(self, reason: str) -> None:
        """Record what ended the run for good: "diverged", for example."""
        self.write(FAILURE, (json.dumps({"iteration": self.iteration, "reason": reason}) + "\n").encode())

    def save(self) -> None:
        """Write a checkpoint of the state that was kept last, unless that is written already."""
        if self._kept is None or self._kept.iteration == self._saved:
            return
        networks = self._learner.networks
        trained = [self._learner.policy, *([] if networks is None else [networks])]
        check_finite(self._kept, {name for module in trained for name, _ in module.named_parameters()})
        # A checkpoint guarantees that the metrics of its iterations, and their experience, are on disk.
        self._metrics.sync()
        self._save_checkpoint(self._kept, self._marks)
        self._saved = self._kept.iteration

    def _save_checkpoint(self, checkpoint: Checkpoint, marks: dict[str, Any]) -> None:
        """Write the experience that a checkpoint needs, then the checkpoint; remove what no checkpoint needs now."""
        if marks:
            checkpoint.state[EXPERIENCE] = {
                name: replay.save(marks[name]) for name, replay in self._learner.experience.items()
            }
        save_checkpoint(checkpoint, self.path / CHECKPOINTS, self._config.keep_checkpoints)
        states = states_of_checkpoints(self.path / CHECKPOINTS) if marks else []
        for name in marks:
            needed = [file for state in states for file in named_segments(state.get(EXPERIENCE), name)]
            remove_segments(self.path / EXPERIENCE / name, needed)

    def _checkpoint(self, score: float | None, evaluated: bool = False) -> Checkpoint:
        state: dict[str, Any] = {"env_steps": self.env_steps, "algorithm": self._config.algorithm}
        if self.task_state:
            state[TASKS] = self.task_state
        tensors = dict(self._learner.policy.state_dict())
        return Checkpoint(self.iteration, tensors, score, state, self._learner.state_dict(), evaluated)

    def _create(self) -> None:
        """Clear the folder of an earlier run, and begin with a checkpoint of the initial parameters.

        The config is written last: a folder that has one holds a run that can be continued.
        """
        _clear(self.path)
        config = self._config.to_json().encode()
        system = (json.dumps({**describe_system(), **self._origin}, indent=2) + "\n").encode()
        marks = {name: replay.mark() for name, replay in self._learner.experience.items()}
        self._save_checkpoint(self._checkpoint(None), marks)
        replace_file(self.path / SYSTEM, system)
        replace_file(self.path / SUMS, _text([sum_line(CONFIG, config), sum_line(SYSTEM, system)]))
        replace_file(self.path / CONFIG, config)

    def write(self, name: str, data: bytes) -> None:
        """Write one of the files of the run, and its checksum; killed in between, it leaves a file that loads.

        A file that has these bytes already is left as it is.
        """
        path, line = self.path / name, sum_line(name, data)
        if (self.path / SUMS).is_file():
            lines = read_lines(self.path / SUMS)
        else:
            # Earlier versions wrote none.
            files = [self.path / each for each in (CONFIG, SYSTEM) if (self.path / each).is_file()]
            lines = [sum_line(file.name, read_regular(file)) for file in files]
        if path.is_file() and read_regular(path) == data and line in lines:
            return
        replaced = [each for each in lines if not each.endswith(f"  {name}")] + [line]
        if path.is_file():
            # Until it is replaced, both are listed.
            replace_file(self.path / SUMS, _text([*lines, line]))
        replace_file(path, data)
        replace_file(self.path / SUMS, _text(replaced))

    def _resume(self) -> None:
        check_resumable(self.path, self._config, self._learner)
        warn_of_changed_files(self.path, load_system(self.path), self._origin)
        path, checkpoint = latest_intact(self.path / CHECKPOINTS, self._load_experience)
        if self._learner.experience:
            # Newer checkpoints are intact, but need experience that is damaged; they are written again.
            checkpoints = list_checkpoints(self.path / CHECKPOINTS)
            for newer in checkpoints[checkpoints.index(path) + 1 :]:
                discard(newer)
        restore(checkpoint, self._learner, self._config.algorithm, path)
        self.iteration, self.env_steps = checkpoint.iteration, int(checkpoint.state["env_steps"])
        self.task_state, self.earlier = checkpoint.state.get(TASKS), checkpoint.earlier
        self._saved = self.iteration

    def _load_experience(self, checkpoint: Checkpoint) -> None:
        """Give the learner the experience that a checkpoint names."""
        if "env_steps" not in checkpoint.state:
            raise CheckpointError(
                f"the checkpoint of iteration {checkpoint.iteration} in {self.path / CHECKPOINTS} has no 'env_steps'"
            )
        for name, replay in self._learner.experience.items():
            try:
                state = checkpoint.state[EXPERIENCE][name]
            except (KeyError, TypeError):
                raise CheckpointError(
                    f"the checkpoint of iteration {checkpoint.iteration} in {self.path / CHECKPOINTS} has no "
                    f"experience {name!r}; train again with --overwrite"
                ) from None
            replay.load(state)


def check_resumable(path: Path, config: Config, learner: Learner) -> None:
    """Refuse to continue a run with a config that would change its results."""
    before = load_config(path / CONFIG)
    if before.algorithm == config.algorithm:
        settings = learner.complete(before.check_section(SECTION, learner.Settings), before)
        before = before.with_section(SECTION, settings)
    evaluated = before.evaluate_every is not None and config.evaluate_every is not None
    may_change = _MAY_CHANGE | (set() if evaluated else {"evaluation-tasks"})
    changed = [key for key in config.differences(before) if key not in may_change]
    if changed:
        raise ConfigError(
            f"the run in {path} was made with another {' and '.join(map(repr, changed))}; "
            "resume it with its own config, or begin another run with its policy: "
            f"--init {shlex.quote(str(path))} and another --output-folder"
        )


def load_run_config(folder: Path) -> Config:
    """Return the config of a run."""
    if not (folder / CONFIG).is_file():
        remedy = "; give the --output-folder of a training run"
        if folder.exists():
            raise ConfigError(f"{folder} is not a run folder, it has no {CONFIG}{remedy}")
        raise ConfigError(f"there is no folder {folder}{suggest_run(folder) or remedy}")
    return load_config(folder / CONFIG)


def suggest_run(folder: Path) -> str:
    """Return which run beside `folder` may have been meant, to be appended to a message; see `suggest`."""
    above, pattern = folder.parent, f"*/{CONFIG}"
    if not above.is_dir():
        above, pattern = above.parent, f"*/{pattern}"
    known = sorted(str(config.parent) for config in above.glob(pattern)) if above.is_dir() else []
    return suggest(str(folder), known) if known else ""


def load_system(folder: Path) -> dict[str, Any]:
    """Return the system on which a run was started; see `describe_system`. Empty if that was not recorded."""
    path = folder / SYSTEM
    check_sum(path)
    try:
        system = parse_json(read_regular(path, _MOST_BYTES))
    except (OSError, ValueError):
        system = {}
    return system if isinstance(system, dict) else {}


def read_failure(folder: Path) -> str:
    """Return what ended a run for good, as "diverged at iteration 37"; empty where nothing did."""
    path = folder / FAILURE
    if not path.is_file():
        return ""
    check_sum(path)
    try:
        failure = checked(_Failure, parse_json(read_regular(path, _MOST_BYTES)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not what a run writes ({error}); move it away") from None
    return f"{failure.reason} at iteration {failure.iteration}"


class _Failure(SettingsModel):
    """What ended a run for good, and how many iterations had ended before."""

    iteration: int
    reason: Printable


def check_run_folder(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse to change an existing folder without permission."""
    if resume and overwrite:
        raise ConfigError(
            f"--resume continues the run in {path}, and --overwrite replaces it with a new one; give one of them"
        )
    try:
        str(path).encode()
        is_run = (path / CONFIG).is_file()
        is_free = is_run or not path.is_dir() or _is_unfinished_start(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name is not in UTF-8"
        raise ConfigError(f"cannot write the run in {str(path)!r}: {reason}; choose another --output-folder") from error
    if is_run and not (resume or overwrite):
        raise ConfigError(
            f"{path} holds another run; continue it with --resume, replace it with --overwrite, "
            "or choose another --output-folder"
        )
    if not is_free:
        raise ConfigError(f"{path} is not empty and is not a run folder; choose another --output-folder")
    _check_links(path)
    check_creatable(path, "--output-folder")


def _warn_of_ray_job(folder: Path) -> None:
    """Warn that a folder is in a Ray job's copy of the working directory, which Ray removes."""
    if _RAY_JOB.issubset(folder.resolve().parts):
        logger.warning(
            "the run folder %s is in the temporary working directory of a Ray job, and is lost with it; give an "
            "absolute path on storage that outlives the job as --output-folder",
            folder.resolve(),
        )


def warn_of_changed_files(folder: Path, *systems: Mapping[str, Any]) -> None:
    """Warn of files that a run names and that have changed since it began; of tasks of evaluations it has a copy."""
    began, now = (system.get("sources") or {} for system in systems)
    changed = [key for key in began if key in now and began[key] != now[key] and key != "evaluation-tasks"]
    if changed:
        logger.warning(
            "the file of %s has changed since the run in %s began: from here on the new one is used",
            " and of ".join(map(repr, changed)),
            folder,
        )


def has_begun(path: Path) -> bool:
    """Return whether there is anything to continue: a checkpoint, or the metrics of an iteration."""
    if not (path / CONFIG).is_file():
        return False
    metrics = path / METRICS
    return bool(list_checkpoints(path / CHECKPOINTS)) or (metrics.is_file() and any(inspect_metrics(metrics)))


def _is_unfinished_start(path: Path) -> bool:
    """Return whether a folder without a config is empty, or has only files of a run that was killed at its start."""
    names = set(os.listdir(path))
    if _REPLACED in names:
        return True
    written = {name for name in names if not name.startswith(TEMPORARY)} - {LOCK}
    trained = [folder.name for folder in list_checkpoints(path / CHECKPOINTS)] not in ([], ["iteration-000000"])
    events = EVENTS in written and not (path / EVENTS).is_symlink()
    return written <= {*_FOLDERS, SYSTEM, SUMS} and not trained and not events


def _check_links(path: Path) -> None:
    """Refuse links of files, through which a run would write somewhere else, and links of folders to nowhere."""
    for link in (path / name for name in (CONFIG, *_FILES, LOCK)):
        if link.is_symlink():
            raise ConfigError(
                f"{link} is a link to {os.readlink(link)}, and a run writes its files in place: put the file itself "
                f"there, or link the folders {', '.join(_FOLDERS)} only"
            )
    for folder in (path / name for name in _FOLDERS):
        if (folder.is_symlink() or folder.exists()) and not folder.is_dir():
            kind = f"a link to {os.readlink(folder)}, where there is none" if folder.is_symlink() else "not one"
            raise ConfigError(f"{folder} must be a folder, and is {kind}; make it, or remove this")
        above = folder.resolve().parent
        if folder.is_symlink() and above != path.resolve() and (above / CONFIG).is_file():
            raise ConfigError(f"{folder} is a link into another run, {above}; link a folder of its own")


def _clear(path: Path) -> None:
    """Remove the files of a run; if this is interrupted, the rest is not a run folder, and can be removed again."""
    with suppress(FileNotFoundError):
        os.replace(path / CONFIG, path / _REPLACED)
        sync_folder(path)
    checkpoints, events, experience = path / CHECKPOINTS, path / EVENTS, path / EXPERIENCE
    for folder, entries in (
        (checkpoints, list_checkpoints(checkpoints)),
        (events, list(events.glob("*tfevents*"))),
        (experience, [folder for folder in experience.glob("*") if folder.is_dir()]),
    ):
        if folder.is_symlink():
            # Others may have files there, too.
            for file in entries:
                discard(file)
            remove_unfinished(folder)
        elif folder.exists():
            discard(folder)
    for name in _FILES:
        (path / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        remove(path / f"{TEMPORARY}removed-{name}")
    (path / _REPLACED).unlink(missing_ok=True)


def _remove_half_written(path: Path) -> None:
    """Remove the files that a killed process was writing; other commands may be writing theirs."""
    for pattern in ("probe-*", *(f"[0-9]*-{name}" for name in (CONFIG, *_FILES))):
        for file in path.glob(f"{TEMPORARY}{pattern}"):
            file.unlink(missing_ok=True)


def _text(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
