"""Experiment trackers: Weights & Biases, MLflow and TensorBoard get the config, metrics, report and checkpoints."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from maml_rl.config.config import Config
from maml_rl.errors import ConfigError, MamlRLError, UsersCode, explain
from maml_rl.runs.metrics import Metrics
from maml_rl.runs.run_folder import CHECKPOINTS, CONFIG, EVENTS

_PROJECT = "maml-rl"
# One call logs at most as many parameters as MLflow takes at once.
_MOST_PARAMETERS = 100


class Tracker(NamedTuple):
    """What a tracker does with a run, from its first iteration on: log an iteration's numbers, keep the files, end."""

    log: Callable[[dict[str, float], int], object]
    keep: Callable[[Path, Path], object]
    end: Callable[[bool], object]


def _wandb(config: Config, folder: Path) -> Tracker:
    import wandb

    settings = config.model_dump(mode="json", by_alias=True)
    run: Any = wandb.init(project=_PROJECT, name=str(folder), dir=str(folder), config=settings)

    def keep(folder: Path, report: Path) -> None:
        artifact = wandb.Artifact(f"run-{run.id}", type="model")
        artifact.add_file(str(folder / CONFIG))
        artifact.add_file(str(report))
        artifact.add_dir(str(folder / CHECKPOINTS), name=CHECKPOINTS)
        run.log_artifact(artifact)

    return Tracker(
        lambda metrics, iteration: run.log(metrics, step=iteration),
        keep,
        lambda failed: run.finish(exit_code=int(failed)),
    )


def _mlflow(config: Config, folder: Path) -> Tracker:
    import mlflow

    mlflow.set_experiment(_PROJECT)
    mlflow.start_run(run_name=str(folder))
    settings = list(config.flat().items())
    for first in range(0, len(settings), _MOST_PARAMETERS):
        mlflow.log_params(dict(settings[first : first + _MOST_PARAMETERS]))

    def keep(folder: Path, report: Path) -> None:
        mlflow.log_artifact(str(folder / CONFIG))
        mlflow.log_artifact(str(report))
        mlflow.log_artifacts(str(folder / CHECKPOINTS), CHECKPOINTS)

    return Tracker(mlflow.log_metrics, keep, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"))


def _tensorboard(config: Config, folder: Path) -> Tracker:
    """Every run writes its numbers for TensorBoard; this adds the config and the paths of the files."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / EVENTS), filename_suffix=".config")
    writer.add_text("config", f"```\n{config.to_json()}```")
    return Tracker(
        lambda metrics, iteration: None,
        lambda folder, report: writer.add_text("files", f"{report}, {folder / CHECKPOINTS}"),
        lambda failed: writer.close(),
    )


TRACKERS: dict[str, Callable[[Config, Path], Tracker]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed, before anything is trained."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"--track {name} needs {name}; run pip install 'maml-rl[{name}]'")
        with _guard([name]):
            import_module(name)


@contextmanager
def tracked(names: Sequence[str], config: Config, folder: Path) -> Iterator[Callable[[Metrics], None]]:
    """Yield a function that logs every iteration; a run begins with the first one, and ends with its files."""
    trackers: list[Tracker] = []

    def log(metrics: Metrics) -> None:
        with _guard(names):
            if not trackers:
                trackers.extend(TRACKERS[name](config, folder) for name in names)
            numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
            for tracker in trackers:
                tracker.log(numbers, metrics["iteration"])

    failed = True
    try:
        yield log
        if trackers:
            from maml_rl.report import write_report

            report = write_report([folder], num_videos=0)
            with _guard(names):
                for tracker in trackers:
                    tracker.keep(folder, report)
        failed = False
    finally:
        for tracker in trackers:
            tracker.end(failed)


def _guard(names: Sequence[str]) -> UsersCode:
    return UsersCode(lambda error: MamlRLError(f"--track {' '.join(names)}: {explain(error)}"))
