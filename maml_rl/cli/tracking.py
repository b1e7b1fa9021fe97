"""Experiment trackers: Weights & Biases, MLflow and TensorBoard get the config, metrics, report and checkpoints."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from maml_rl.config.config import Config
from maml_rl.errors import ConfigError, MamlRLError, UsersCode, explain
from maml_rl.runs.metrics import Metrics
from maml_rl.runs.run_folder import CHECKPOINTS, CONFIG, EVENTS

_PROJECT = "maml-rl"
# One call logs at most as many parameters as MLflow takes at once.
_MOST_PARAMETERS = 100


class Tracker(Protocol):
    """One run in a tracker, from its first iteration on."""

    def log(self, metrics: dict[str, float], iteration: int) -> None:
        """Log the numbers of an iteration."""

    def keep(self, folder: Path, report: Path) -> None:
        """Keep the files of the run."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """End the run, which has failed if there is an error."""


class _WandB:
    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        name, settings = str(folder), config.model_dump(mode="json", by_alias=True)
        self._run: Any = wandb.init(project=_PROJECT, name=name, dir=str(folder), config=settings)

    def log(self, metrics: dict[str, float], iteration: int) -> None:
        self._run.log(metrics, step=iteration)

    def keep(self, folder: Path, report: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"run-{self._run.id}", type="model")
        artifact.add_file(str(folder / CONFIG))
        artifact.add_file(str(report))
        artifact.add_dir(str(folder / CHECKPOINTS), name=CHECKPOINTS)
        self._run.log_artifact(artifact)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._run.finish(exit_code=int(kind is not None))


class _MLflow:
    def __init__(self, config: Config, folder: Path) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.set_experiment(_PROJECT)
        mlflow.start_run(run_name=str(folder))
        settings = list(config.flat().items())
        for first in range(0, len(settings), _MOST_PARAMETERS):
            mlflow.log_params(dict(settings[first : first + _MOST_PARAMETERS]))

    def log(self, metrics: dict[str, float], iteration: int) -> None:
        self._mlflow.log_metrics(metrics, step=iteration)

    def keep(self, folder: Path, report: Path) -> None:
        self._mlflow.log_artifact(str(folder / CONFIG))
        self._mlflow.log_artifact(str(report))
        self._mlflow.log_artifacts(str(folder / CHECKPOINTS), CHECKPOINTS)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._mlflow.end_run("FINISHED" if kind is None else "FAILED")


class _TensorBoard:
    """Every run writes its numbers for TensorBoard; this adds the config and the paths of the files."""

    def __init__(self, config: Config, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / EVENTS), filename_suffix=".config")
        self._writer.add_text("config", f"```\n{config.to_json()}```")

    def log(self, metrics: dict[str, float], iteration: int) -> None:
        """The run itself writes them."""

    def keep(self, folder: Path, report: Path) -> None:
        self._writer.add_text("files", f"{report}, {folder / CHECKPOINTS}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._writer.close()


TRACKERS: dict[str, Callable[[Config, Path], Tracker]] = {
    "wandb": _WandB,
    "mlflow": _MLflow,
    "tensorboard": _TensorBoard,
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
                for name in names:
                    trackers.append(TRACKERS[name](config, folder))
                    ends.push(trackers[-1].__exit__)
            numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
            for tracker in trackers:
                tracker.log(numbers, metrics["iteration"])

    with ExitStack() as ends:
        yield log
        if trackers:
            from maml_rl.report import write_report

            report = write_report([folder], num_videos=0)
            with _guard(names):
                for tracker in trackers:
                    tracker.keep(folder, report)


def _guard(names: Sequence[str]) -> UsersCode:
    return UsersCode(lambda error: MamlRLError(f"--track {' '.join(names)}: {explain(error)}"))
