"""Checkpoints that are either whole or absent: tensors in safetensors, the rest in JSON, a SHA-256 for every file.

A checkpoint is a folder `iteration-000012` with three files: `tensors.safetensors`, `state.json`, and `SHA256SUMS`
(for `sha256sum -c`). It is written to a temporary folder beside its place, synced to the disk, and renamed; a
process killed at any moment leaves the earlier checkpoints as they were. Nothing is ever unpickled.
"""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import nn

from maml_rl.config import Config, SettingsModel
from maml_rl.errors import CheckpointError, NonFiniteError
from maml_rl.foreign_files import SUMS, checked, parse_json, read_regular, sum_line, sums
from maml_rl.runs.atomic_files import TEMPORARY, discard, remove_unfinished, sync_folder, write_file

TENSORS = "tensors.safetensors"
STATE = "state.json"
_FORMAT = 1
# Prefix of the names of the metalearner's tensors; those of the policy have none.
_LEARNER = "learner/"
# Prefix of the tensors of earlier iterations, with which batches are sampled ahead of time.
_EARLIER = "earlier/"
_NAME = re.compile(r"iteration-(\d{6,})")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run needs to resume bit-identically.

    Attributes:
        iteration: number of iterations that are finished.
        tensors: the policy's parameters by name.
        score: the number by which the best checkpoint is chosen, or None.
        state: everything else, as JSON values.
        learner: state of the metalearner besides its policy, under flat names: tensors and JSON values.
        evaluated: whether the score is that of an evaluation, which ranks above any of training.
        earlier: tensors of earlier iterations, by iteration and name, with which batches are sampled ahead of time.
    """

    iteration: int
    tensors: dict[str, torch.Tensor]
    score: float | None = None
    state: dict[str, Any] = field(default_factory=dict)
    learner: dict[str, Any] = field(default_factory=dict)
    evaluated: bool = False
    earlier: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def copied(self, device: str | None = None) -> "Checkpoint":
        """Return a checkpoint whose state no later update changes; tensors of earlier iterations are not copied.

        Args:
            device: of the copies of tensors; None for that of each.

        Raises:
            TypeError: If it has what a file cannot hold, except numbers of the learner that are not finite, which
                `check_finite` refuses; the message names it.
        """
        for name in self.tensors:
            if name.startswith((_LEARNER, _EARLIER)):
                raise _no_place(f"the parameter or buffer {name!r} of a policy, which must not begin so")
        learner = own_json(dict.fromkeys(self.learner), "learner")
        for name, value in self.learner.items():
            path = f"learner/{name}"
            is_tensor = isinstance(value, torch.Tensor)
            learner[name] = _own_tensor(value, path, device) if is_tensor else own_json(value, path, finite=False)
        tensors = {name: _own_tensor(tensor, name, device) for name, tensor in self.tensors.items()}
        state, score = own_json(self.state, "state"), own_json(self.score, "score")
        return replace(self, tensors=tensors, score=score, state=state, learner=learner)


def check_finite(checkpoint: Checkpoint, parameters: Collection[str]) -> None:
    """Refuse to save a state from which nothing can be learned, such as that after an update that was too large.

    Args:
        checkpoint: that is to be saved.
        parameters: names of the tensors that are trained. Buffers of a policy may hold infinity, as in a mask.

    Raises:
        NonFiniteError: If a parameter, or a tensor or number of the learner, is not finite, or the square of a
            parameter is not; the message names it.
    """
    states = (("the policy's", checkpoint.tensors), ("the learner's", checkpoint.learner))
    for whose, state in states:
        for name, value in state.items():
            numbers = value if isinstance(value, torch.Tensor) else _numbers(value)
            if not numbers.is_floating_point() or not numbers.numel():
                continue
            wrong = ~numbers.isfinite() if name in parameters or state is checkpoint.learner else numbers.isnan()
            if name in parameters:
                wrong |= ~numbers.float().square().isfinite()
            if bool(wrong.any()):
                raise NonFiniteError(
                    f"after iteration {checkpoint.iteration} {whose} {name!r} is {float(numbers[wrong][0]):g}, so this "
                    "is not saved; use smaller step sizes, or rewards of another scale (train --init continues from "
                    "the last checkpoint with other settings)"
                )


def _numbers(value: Any) -> torch.Tensor:
    if isinstance(value, float):
        return torch.tensor([value], dtype=torch.float64)
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return torch.cat([torch.zeros(0, dtype=torch.float64), *map(_numbers, entries)])


def save_checkpoint(checkpoint: Checkpoint, folder: str | Path, keep: int = 3) -> Path:
    """Write a checkpoint below `folder`; then remove all except the newest `keep` and the one with the highest score.

    Returns:
        The checkpoint's own folder.

    Raises:
        CheckpointError: If it cannot be written, say because the disk is full, or if an intact one of this iteration is
            there already. Existing ones are not changed.
        TypeError: If it has what a file cannot hold; see `Checkpoint.copied`.
    """
    folder = Path(folder)
    target = _path_of(folder, checkpoint.iteration)
    try:
        remove_unfinished(folder)
        _write(checkpoint, target)
        _prune(folder, keep)
    except OSError as error:
        with suppress(OSError):
            remove_unfinished(folder)
        raise CheckpointError(
            f"cannot write the checkpoint {target}: {error.strerror or error}; earlier checkpoints are as they were"
        ) from error
    return target


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint's folder (or a file in it), checking every byte.

    Raises:
        CheckpointError: If it is missing, truncated, altered, or not a checkpoint; the message names file and reason.
    """
    path = Path(path)
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    contents = {name: _read_listed(folder, name) for name in (STATE, TENSORS)}
    if _read(folder, SUMS) != sums(contents).encode("ascii"):
        raise CheckpointError(f"{folder / SUMS} is altered or truncated")
    return _parse(contents, folder)


def latest_intact(
    folder: str | Path, load: Callable[[Checkpoint], None] = lambda checkpoint: None
) -> tuple[Path, Checkpoint]:
    """Return the newest intact checkpoint below `folder`; log which it is, and why newer ones were skipped.

    Args:
        folder: where checkpoints are.
        load: reads other files that a checkpoint names; a CheckpointError means that this checkpoint is broken.

    Raises:
        CheckpointError: If there is none; the message has the error of each.
    """
    path, checkpoint = next(_intact(folder, load))
    logger.info("loading the checkpoint %s", path)
    return path, checkpoint


def best_intact(folder: str | Path) -> tuple[Path, Checkpoint]:
    """Return the intact checkpoint with the highest score below `folder`, the newest of equals; log broken ones.

    Raises:
        CheckpointError: If there is no intact checkpoint; the message has the error of each.
    """
    path, checkpoint = max(_intact(folder), key=lambda entry: _rank(entry[1]))
    logger.info("loading the checkpoint %s", path)
    return path, checkpoint


def _intact(
    folder: str | Path, load: Callable[[Checkpoint], None] = lambda checkpoint: None
) -> Iterator[tuple[Path, Checkpoint]]:
    """Yield the intact checkpoints, the newest first; warn about broken ones, and raise if there are no others."""
    reasons: list[str] = []
    any_intact = False
    for path in reversed(list_checkpoints(folder)):
        try:
            checkpoint = load_checkpoint(path)
            load(checkpoint)
        except CheckpointError as error:
            logger.warning("passing over a broken checkpoint: %s", error)
            reasons.append(str(error))
            continue
        any_intact = True
        yield path, checkpoint
    if not any_intact:
        remedy = "put one back, or train again with --overwrite"
        raise CheckpointError("; ".join([f"there is no intact checkpoint in {folder}: {remedy}", *reasons]))


def find_checkpoint(choice: str | Path | int, folder: str | Path) -> tuple[Path, Checkpoint]:
    """Return the checkpoint that a user names.

    Args:
        choice: "last"; "best", by the evaluations of the run if it has any, otherwise by its returns in training; a
            number of iterations; or the folder of a checkpoint.
        folder: where the run's checkpoints are.

    Raises:
        CheckpointError: If it is missing or broken.
    """
    if choice in ("last", "latest"):
        return latest_intact(folder)
    if choice == "best":
        return best_intact(folder)
    path = Path(str(choice))
    if str(choice).isdecimal():
        path = _path_of(Path(folder), int(str(choice)))
        if not path.is_dir():
            kept = ", ".join(str(number) for number in _numbered(folder)) or "none"
            raise CheckpointError(f"{folder} has no checkpoint of iteration {choice}; those that were kept are: {kept}")
    elif path.is_dir() and not (path / STATE).exists():
        raise CheckpointError(f"{path} is not a checkpoint: it has no {STATE}")
    return path, load_checkpoint(path)


def states_of_checkpoints(folder: str | Path) -> list[dict[str, Any]]:
    """Return `Checkpoint.state` of the checkpoints below `folder` that have a readable one, without their tensors."""
    states = []
    for path in list_checkpoints(folder):
        with suppress(CheckpointError):
            states.append(_parse_state(_read(path, STATE), path).state)
    return states


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints below `folder`, intact or not, oldest first."""
    return list(_numbered(folder).values())


def _numbered(folder: str | Path) -> dict[int, Path]:
    paths = list(Path(folder).iterdir()) if Path(folder).is_dir() else []
    by_number = [(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return dict(sorted(by_number))


def _path_of(folder: Path, iteration: int) -> Path:
    return folder / f"iteration-{iteration:06d}"


class Experience(Protocol):
    """Data that grow during a run, and are written in segments beside the checkpoints."""

    def attach(self, folder: Path) -> None:
        """Keep the segments in a folder, which need not exist yet."""

    def mark(self) -> Any:
        """Return the current extent, for `save`."""

    def save(self, mark: Any) -> dict[str, Any]:
        """Write everything that is not in a segment yet; return the state for a checkpoint: see `runs.segments`."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `save` returned; raise CheckpointError if a segment is missing or damaged."""


class Learner(Protocol):
    """The object that a checkpoint saves and restores; see `MetaLearner`."""

    @property
    def policy(self) -> nn.Module:
        """Its policy."""

    @property
    def networks(self) -> nn.Module | None:
        """Its networks besides the policy, if any, whose parameters are in the state under their names."""

    @property
    def Settings(self) -> type[SettingsModel]:  # noqa: N802
        """Its settings in a config."""

    @property
    def experience(self) -> Mapping[str, Experience]:
        """Its stored samples, by name."""

    def complete(self, settings: Any, config: Config) -> Any:
        """Return settings with what depends on the config written out."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state besides the policy."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it; raises ValueError if it does not fit."""


def restore(
    checkpoint: Checkpoint, learner: Learner, algorithm: str, origin: Path, *, policy_alone: bool = False
) -> None:
    """Give a metalearner the policy and the state of a checkpoint.

    Args:
        checkpoint: loaded from `origin`.
        learner: of the same architecture.
        algorithm: its name in the config.
        origin: the checkpoint's folder.
        policy_alone: leave the learner's state as it is; the checkpoint may then be of another algorithm.

    Raises:
        CheckpointError: If the checkpoint is of another algorithm or architecture.
    """
    if policy_alone:
        check_architecture(checkpoint.tensors, learner.policy.state_dict(), origin)
        learner.policy.load_state_dict(checkpoint.tensors)
        return
    # Version 0.1 had one algorithm, and did not write its name.
    saved_by = checkpoint.state.get("algorithm", "maml-trpo")
    if saved_by != algorithm:
        raise CheckpointError(
            f"the checkpoint {origin} is of the algorithm {saved_by!r}, not {algorithm!r}; "
            "use the config.json of its own run"
        )
    check_architecture(checkpoint.tensors, learner.policy.state_dict(), origin)
    try:
        learner.load_state_dict(checkpoint.learner)
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"what {algorithm!r} keeps does not fit the checkpoint {origin}: {error}") from error
    learner.policy.load_state_dict(checkpoint.tensors)


def check_architecture(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], origin: Path) -> None:
    """Refuse tensors that do not fit a policy.

    Raises:
        CheckpointError: If a name is missing or too many, or if a shape or type differs; the message has both shapes.
    """
    for name in sorted({*tensors, *expected}):
        if name not in tensors or name not in expected:
            where = "the policy" if name in tensors else "the checkpoint"
            detail = f"{where} has no {name!r}"
        elif tensors[name].shape != expected[name].shape:
            detail = f"{name!r} is {tuple(tensors[name].shape)} there and {tuple(expected[name].shape)} in the policy"
        elif tensors[name].dtype != expected[name].dtype:
            detail = f"{name!r} is {tensors[name].dtype} there and {expected[name].dtype} in the policy"
        else:
            continue
        raise CheckpointError(
            f"the checkpoint {origin} is of another architecture: {detail}; use the config.json of its own run"
        )


def _write(checkpoint: Checkpoint, target: Path) -> None:
    """Write a checkpoint beside its place, and move it there."""
    if target.exists():
        with suppress(CheckpointError):
            load_checkpoint(target)
            raise FileExistsError("an intact one exists already")
        discard(target)
    temporary = target.with_name(f"{TEMPORARY}{target.name}")
    os.makedirs(temporary)
    contents = _contents(checkpoint)
    for name, data in contents.items():
        write_file(temporary / name, data)
    write_file(temporary / SUMS, sums(contents).encode("ascii"))
    sync_folder(temporary)
    os.rename(temporary, target)
    sync_folder(target.parent)


def _contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    # Copies, since safetensors refuses tensors that share memory; on the CPU, where there is room for them.
    checkpoint = checkpoint.copied("cpu")
    of_learner = {name: value for name, value in checkpoint.learner.items() if isinstance(value, torch.Tensor)}
    tensors = checkpoint.tensors | {f"{_LEARNER}{name}": tensor for name, tensor in of_learner.items()}
    for iteration, acting in checkpoint.earlier.items():
        tensors |= {
            f"{_EARLIER}{iteration}/{name}": _own_tensor(tensor, name, "cpu") for name, tensor in acting.items()
        }
    state = {
        "format": _FORMAT,
        "iteration": checkpoint.iteration,
        "score": checkpoint.score,
        "evaluated": checkpoint.evaluated,
        "state": checkpoint.state,
        # The names of tensors keep the order, in which code may go through its state.
        "learner": {
            name: None if name in of_learner else own_json(value, f"learner/{name}")
            for name, value in checkpoint.learner.items()
        },
    }
    text = json.dumps(state, indent=2, allow_nan=False) + "\n"
    return {STATE: text.encode(), TENSORS: tensors_to_bytes(tensors)}


def own_json(value: Any, path: str, *, finite: bool = True) -> Any:
    """Return a copy of a JSON value at the place `path` of a state; a TypeError if a part of it is none.

    JSON has no NaN and no infinity; unless `finite`, the copy may have them.
    """
    try:
        if isinstance(value, dict):
            if wrong := [name for name in value if not isinstance(name, str)]:
                raise _no_place(f"the name {wrong[0]!r:.80} in {path}")
            return {name: own_json(entry, f"{path}/{name}", finite=finite) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [own_json(entry, path, finite=finite) for entry in value]
    except RecursionError:
        raise _no_place(f"{path:.80}, which is in itself, or nested too deeply") from None
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, str | int | float | None) or (finite and not is_finite):
        raise _no_place(f"{path} = {value!r:.80}")
    return value


def _own_tensor(tensor: Any, path: str, device: str | None) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise _no_place(f"{path} = {tensor!r:.80}")
    if tensor.layout != torch.strided:
        raise _no_place(f"{path} of the layout {tensor.layout}")
    return tensor.detach().to(device or tensor.device, copy=True, memory_format=torch.contiguous_format)


def _no_place(what: str) -> TypeError:
    return TypeError(
        f"a checkpoint cannot hold {what}; state_dict returns tensors and JSON values by name, of a task distribution "
        "JSON values alone"
    )


class _RunState(BaseModel):
    """What a run keeps besides tensors, as far as it is common to all algorithms; see `RunFolder`."""

    model_config = ConfigDict(strict=True, extra="allow")

    env_steps: Annotated[int, Field(ge=0)] = 0
    algorithm: str = ""


class _State(BaseModel):
    """The content of `state.json`; version 0.1 wrote neither `learner` nor `evaluated`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: int
    iteration: Annotated[int, Field(ge=0)]
    score: float | None
    evaluated: bool = False
    state: _RunState
    learner: dict[str, Any] = Field(default_factory=dict)


def _parse(contents: dict[str, bytes], folder: Path) -> Checkpoint:
    """Make a checkpoint of bytes whose checksums are right; another program may still have written them."""
    checkpoint = _parse_state(contents[STATE], folder)
    try:
        tensors = tensors_from_bytes(contents[TENSORS])
        earlier: dict[int, dict[str, torch.Tensor]] = {}
        for name in [name for name in tensors if name.startswith(_EARLIER)]:
            version, _, entry = name.removeprefix(_EARLIER).partition("/")
            earlier.setdefault(int(version), {})[entry] = tensors.pop(name)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / TENSORS} is not a safetensors file: {error}") from error
    of_learner = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_LEARNER)}
    learner = checkpoint.learner | {name.removeprefix(_LEARNER): tensor for name, tensor in of_learner.items()}
    return replace(checkpoint, tensors=tensors, learner=learner, earlier=earlier)


def _parse_state(data: bytes, folder: Path) -> Checkpoint:
    """Make a checkpoint without its tensors."""
    try:
        content = parse_json(data)
        if isinstance(content, dict) and content.get("format", _FORMAT) != _FORMAT:
            raise ValueError(f"its format is {ascii(content['format'])[:20]}, and only {_FORMAT} is known")
        checked(_State, content)
        labeled = _NAME.fullmatch(folder.name)
        if labeled is not None and int(labeled[1]) != content["iteration"]:
            raise ValueError(f"it is of iteration {content['iteration']}, and its folder is {folder.name}")
    except ValueError as error:
        raise CheckpointError(f"{folder / STATE} is not the state of a checkpoint: {error}") from error
    learner, evaluated = content.get("learner", {}), content.get("evaluated", False)
    return Checkpoint(content["iteration"], {}, content["score"], content["state"], learner, evaluated)


def _read_listed(folder: Path, name: str) -> bytes:
    """Return the content of a file that `SHA256SUMS` beside it lists."""
    data = _read(folder, name)
    if sum_line(name, data) not in _read(folder, SUMS).decode("ascii", errors="replace").splitlines():
        raise CheckpointError(f"{folder / name} is altered or truncated: its SHA-256 is not the one in {SUMS}")
    return data


def _read(folder: Path, name: str) -> bytes:
    try:
        return read_regular(folder / name)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / name}: {error.strerror or error}") from error


def _prune(folder: Path, keep: int) -> None:
    """Remove the checkpoints that are neither the newest `keep` nor the best; those with a damaged state are kept."""
    intact = {}
    for path in list_checkpoints(folder):
        with suppress(CheckpointError):
            # Their tensors may be large.
            intact[path] = _parse_state(_read_listed(path, STATE), path)
    remaining = list(intact)[-keep:]
    remaining.extend(sorted(intact, key=lambda path: _rank(intact[path]))[-1:])
    for path in intact:
        if path not in remaining:
            discard(path)


def _rank(checkpoint: Checkpoint) -> tuple[bool, float, int]:
    """Order checkpoints by score, then age; those that were evaluated come last, and one without a score first."""
    score = -math.inf if checkpoint.score is None else checkpoint.score
    return (checkpoint.evaluated, score, checkpoint.iteration)
