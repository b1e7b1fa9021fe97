"""The folder of a training run: its config, metrics, events and checkpoints, and the lock on it."""

import copy
import json
import logging
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from maml_rl.config.config import TASKS, Config, load_config
from maml_rl.errors import ConfigError
from maml_rl.runs.atomic_files import check_creatable, discard, replace_file, sync_folder
from maml_rl.runs.checkpoint import Checkpoint, Learner, latest_intact, restore, save_checkpoint
from maml_rl.runs.metrics import EventLog, Metrics, MetricsLog
from maml_rl.runs.system import describe_system

CONFIG = "config.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
EVENTS = "tensorboard"
SYSTEM = "system.json"
# The tasks of the evaluations during training, where they came from a file.
EVALUATION_TASKS = "evaluation-tasks.json"
_LOCK = ".lock"
# Parts of the path where Ray unpacks the working directory of a job.
_RAY_JOB = {"runtime_resources", "working_dir_files"}

# A resumed run may train longer, keep more checkpoints and be evaluated differently; what it computes must not change.
_MAY_CHANGE = {
    "num-batches",
    "checkpoint-every",
    "keep-checkpoints",
    "evaluation-steps",
    "halve-step-size",
    "evaluate-every",
    "backend",
    "num-workers",
    "ray-address",
    "strict",
    "ray-start-timeout",
    "ray-head-timeout",
    "inference",
    "num-groups",
    "step-timeout",
    "max-restarts",
}

logger = logging.getLogger(__name__)


class RunFolder:
    """A run that is being written.

    Args:
        folder: the run's own.
        config: what is run.
        learner: checkpoints are taken of it, and a resumed run restores it.
        resume: continue from the newest intact checkpoint.
        overwrite: remove the run that is there.

    Attributes:
        path: the folder.
        iteration: number of finished iterations.
        env_steps: environment steps taken in them.
        task_state: what the task distribution kept after them; None where it keeps nothing.

    Raises:
        ConfigError: If another run is there and neither `resume` nor `overwrite` says what to do with it, if something
            else is there, if there is nothing to resume, or if a resumed run's config differs.
        CheckpointError: If a run cannot be resumed because no checkpoint is intact.
    """

    def __init__(
        self, folder: str | Path, config: Config, learner: Learner, *, resume: bool = False, overwrite: bool = False
    ) -> None:
        self.path = Path(folder)
        self._config, self._learner = config, learner
        self.iteration, self.env_steps = 0, 0
        self.task_state: dict[str, Any] | None = None
        self._kept: Checkpoint | None = None
        self._saved = 0
        check_run_folder(self.path, resume=resume, overwrite=overwrite)
        is_new = not (self.path / CONFIG).exists()
        _warn_of_ray_job(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        try:
            if resume:
                self._resume()
            else:
                self._create()
            self._metrics = MetricsLog(self.path / METRICS, self.iteration)
            if resume:
                replace_file(self.path / CONFIG, self._config.to_json().encode())
            self._events = EventLog(self.path / EVENTS, self.iteration)
        except BaseException as error:
            os.close(self._lock)
            if is_new:
                shutil.rmtree(self.path, ignore_errors=True)
            if isinstance(error, OSError):
                raise ConfigError(
                    f"cannot write the run in {self.path}: {error.strerror} ({error.filename}); "
                    "choose another --output-folder"
                ) from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._metrics.close()
        self._events.close()
        os.close(self._lock)

    def record(self, metrics: Metrics) -> None:
        """Write down one more finished iteration."""
        self._metrics.write(metrics)
        self._events.write(metrics)
        self.iteration, self.env_steps = metrics["iteration"] + 1, metrics["env_steps"]

    def keep(self, score: float | None, *, evaluated: bool = False, task_state: dict[str, Any] | None = None) -> None:
        """Copy the state after the finished iterations, so that `save` can write it in the middle of the next one.

        Args:
            score: what the best checkpoint is best in.
            evaluated: whether the score is that of an evaluation.
            task_state: what the task distribution keeps after these iterations.
        """
        self.task_state = task_state
        self._kept = copy.deepcopy(self._checkpoint(score, evaluated))

    def save(self) -> None:
        """Write a checkpoint of the state that was kept last, unless that is written already.

        Raises:
            CheckpointError: If it cannot be written.
        """
        if self._kept is None or self._kept.iteration == self._saved:
            return
        # A checkpoint promises that the metrics of its iterations are on disk.
        self._metrics.sync()
        save_checkpoint(self._kept, self.path / CHECKPOINTS, self._config.keep_checkpoints)
        self._saved = self._kept.iteration

    def _checkpoint(self, score: float | None, evaluated: bool = False) -> Checkpoint:
        state: dict[str, Any] = {"env_steps": self.env_steps, "algorithm": self._config.algorithm}
        if self.task_state:
            state[TASKS] = self.task_state
        tensors = dict(self._learner.policy.state_dict())
        return Checkpoint(self.iteration, tensors, score, state, self._learner.state_dict(), evaluated)

    def _create(self) -> None:
        """Clear the folder of an earlier run, and begin with a checkpoint of the initial parameters."""
        for name in (CHECKPOINTS, EVENTS):
            if (self.path / name).exists():
                discard(self.path / name)
        for name in (METRICS, EVALUATION_TASKS):
            (self.path / name).unlink(missing_ok=True)
        replace_file(self.path / CONFIG, self._config.to_json().encode())
        replace_file(self.path / SYSTEM, (json.dumps(describe_system(), indent=2) + "\n").encode())
        save_checkpoint(self._checkpoint(None), self.path / CHECKPOINTS, self._config.keep_checkpoints)
        sync_folder(self.path)

    def _resume(self) -> None:
        before = load_config(self.path / CONFIG)
        if before.algorithm == self._config.algorithm:
            before = before.with_algorithm_settings(before.check_algorithm_settings(self._learner.Settings))
        changed = [key for key in self._config.differences(before) if key not in _MAY_CHANGE]
        if changed:
            raise ConfigError(
                f"the run in {self.path} was made with another {' and '.join(map(repr, changed))}; "
                "resume it with its own config, or choose another --output-folder"
            )
        path, checkpoint = latest_intact(self.path / CHECKPOINTS)
        restore(checkpoint, self._learner, self._config.algorithm, path)
        self.iteration, self.env_steps = checkpoint.iteration, int(checkpoint.state["env_steps"])
        self.task_state = checkpoint.state.get(TASKS)
        self._saved = self.iteration


def check_run_folder(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse to touch what is in a folder unless told to.

    Raises:
        ConfigError: If another run is there and neither `resume` nor `overwrite` says what to do with it, if something
            else is there, or if there is nothing to resume.
    """
    if resume and overwrite:
        raise ConfigError(
            f"--resume continues the run in {path}, and --overwrite replaces it with a new one; give one of them"
        )
    try:
        str(path).encode()
        is_run, is_empty = (path / CONFIG).is_file(), not path.is_dir() or not set(os.listdir(path)) - {_LOCK}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name is not in UTF-8"
        raise ConfigError(f"cannot write the run in {str(path)!r}: {reason}; choose another --output-folder") from error
    if resume and not is_run:
        raise ConfigError(f"there is no run to resume in {path}; start one without --resume")
    if is_run and not (resume or overwrite):
        raise ConfigError(
            f"{path} holds another run; continue it with --resume, replace it with --overwrite, "
            "or choose another --output-folder"
        )
    if not is_run and not is_empty:
        raise ConfigError(f"{path} is not empty and holds no run; choose another --output-folder")
    check_creatable(path, "--output-folder")


def _warn_of_ray_job(folder: Path) -> None:
    """Say that a folder is in the copy of the working directory that a Ray job runs in, which Ray removes."""
    if _RAY_JOB.issubset(folder.resolve().parts):
        logger.warning(
            "the run folder %s is in the temporary working directory of a Ray job, and is lost with it; give an "
            "absolute path on storage that outlives the job as --output-folder",
            folder.resolve(),
        )


def _lock(folder: Path) -> int:
    """Open a folder's lock, which lasts as long as this process; two runs in one folder would mix their files."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # Windows has no fcntl.
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"another process is training in {folder}; end it, or choose another folder") from None
    except OSError as error:
        logger.debug("the file system of %s has no locks: %s", folder, error)
    return descriptor
