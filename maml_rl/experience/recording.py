"""A recording of learning histories: written iteration by iteration, resumed after a kill, read as `Histories`.

The episodes are kept in segments, each with its SHA-256, in blocks of one iteration each. `recording.json` names the
segments, and is replaced atomically together with the state of the learners: a killed recording continues from there,
and ends with the same bytes. Observations that repeat, as those of grids do, are kept once in a block.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load as arrays_from_bytes
from safetensors.numpy import save as arrays_to_bytes
from torch import Tensor

from maml_rl.envs.meta_env import InfoKind
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.experience.histories import Distinct, EnvKind, Histories
from maml_rl.foreign_files import Printable, checked, parse_json, read_regular
from maml_rl.machine import refuse_if_too_large
from maml_rl.runs.atomic_files import replace_file
from maml_rl.runs.segments import Segment, check_order, read_segment, remove_segments, write_segment
from maml_rl.spaces import array_layout, own_space, read_flat, stored_actions

FOLDER, _INDEX = "recording", "recording.json"
# Its last entry, the SHA-256 of the others.
_SUM = "sha256"
# A segment is closed once it has this many bytes.
SEGMENT_BYTES = 2**24
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)
_REMEDY = "put the file back, or remove the recording and record again"
# Of an index, whose tasks may be large; and numbers of one observation or action.
_MOST_BYTES, _MOST_NUMBERS = 2**28, 2**24
_STEP_ARRAYS = ("observations", "actions", "rewards")
_ARRAYS = ("lengths", "terminated", "truncated", "final_observations", *_STEP_ARRAYS)


class About(BaseModel):
    """The description of a recording, as JSON values; a recording is only continued with the same one.

    Attributes:
        env_id: of the family.
        env_kwargs: of its environments.
        horizon: steps of the longest possible episode.
        observation_space: of one environment, without the last step; see `space_as_json`.
        action_space: of one environment.
        tasks: M, of each history.
        learner_seeds: M, of what each learner begins with.
        learner: its name.
        settings: of the learner, and of the sampling.
        num_iterations: batches of episodes that are recorded in all.
        infos: the kinds of the recorded infos, by name; see `MetaEnv.recorded_infos`. Earlier versions recorded none.
    """

    model_config = _STRICT

    env_id: Printable
    env_kwargs: dict[str, Any]
    horizon: Annotated[int, Field(ge=1)]
    observation_space: dict[str, Any]
    action_space: dict[str, Any]
    tasks: Annotated[list[dict[str, Any]], Field(min_length=1)]
    learner_seeds: list[int]
    learner: Printable
    settings: dict[str, Any]
    num_iterations: Annotated[int, Field(ge=1)]
    infos: dict[Printable, InfoKind] = {}

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if len(self.tasks) != len(self.learner_seeds):
            raise ValueError(f"{len(self.tasks)} tasks, and {len(self.learner_seeds)} learners")
        for space in (self.observation_space, self.action_space):
            made = space_from_json(space)
        if np.any(getattr(made, "start", 0)):
            raise ValueError("an earlier version recorded its actions, from where they start on; record it again")
        return self


class _Index(BaseModel):
    """The content of `recording.json`."""

    model_config = _STRICT

    about: About
    iteration: Annotated[int, Field(ge=0)]
    segments: list[Segment]
    learner: Segment | None

    @model_validator(mode="after")
    def _check_segments(self) -> Self:
        check_order(self.segments, self.iteration)
        if self.iteration > self.about.num_iterations or [each.first for each in self.segments[:1]] != [0] * bool(
            self.iteration
        ):
            raise ValueError(f"its segments do not hold {self.iteration} of {self.about.num_iterations} iterations")
        if self.learner is not None and self.learner.first != self.iteration:
            raise ValueError(f"its learners are those of iteration {self.learner.first}, not {self.iteration}")
        return self


class Recording:
    """A recording in a folder, as it grows.

    Args:
        folder: of it; made when something is written.
        about: the family, tasks and settings of the recording.
        resume: continue an existing recording.

    Attributes:
        iteration: how many are recorded.
    """

    def __init__(self, folder: Path, about: About, *, resume: bool = False) -> None:
        self.folder, self.about, self.iteration = folder, about, 0
        self._segments: list[Segment] = []
        self._learner: Segment | None = None
        self._blocks: dict[str, NDArray[Any]] = {}
        self._first = 0
        if not (folder / _INDEX).exists():
            return
        if not resume:
            raise ConfigError(
                f"{folder} holds a recording already; continue it with --resume, or choose another --output"
            )
        index = _read_index(folder)
        if not index.about.infos:
            # A recording of an earlier version goes on without infos.
            self.about = about = about.model_copy(update={"infos": {}})
        mine = _as_json(about)
        for key, there in _as_json(index.about).items():
            if there != mine[key]:
                raise ConfigError(
                    f"{folder} is a recording with other {key.replace('_', ' ')}; resume it as it was begun, or choose "
                    "another --output"
                )
        self._segments, self._learner = list(index.segments), index.learner
        self.iteration = self._first = index.iteration
        remove_segments(folder, {each.file for each in (*self._segments, self._learner) if each is not None})

    def learner_state(self) -> dict[str, Tensor] | None:
        """Return the state of the learners after the last written iteration; None if they have not started."""
        if self._learner is None:
            return None
        arrays = _arrays(read_segment(self.folder, self._learner, _REMEDY), self.folder / self._learner.file)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def append(self, episodes: TaskEpisodes) -> bool:
        """Add the episodes (M, T, B, ...) of one more iteration; return whether `save` must be called now."""
        block = _block(episodes, self.about)
        self._blocks |= {f"{self.iteration} {name}": array for name, array in block.items()}
        self.iteration += 1
        is_full = sum(array.nbytes for array in self._blocks.values()) >= SEGMENT_BYTES
        return is_full or self.iteration == self.about.num_iterations

    def save(self, learner_state: Mapping[str, Tensor]) -> None:
        """Write everything that is not on disk yet; a recording that is killed later continues from here."""
        if self._blocks:
            self._segments.append(write_segment(self.folder, self._first, arrays_to_bytes(self._blocks)))
        self._blocks, self._first = {}, self.iteration
        is_over = self.iteration == self.about.num_iterations
        # Finished learners are no longer needed, and may be larger than their recordings.
        arrays = {} if is_over else {name: tensor.detach().numpy() for name, tensor in learner_state.items()}
        before, self._learner = self._learner, None
        if arrays:
            self._learner = write_segment(self.folder, self.iteration, arrays_to_bytes(arrays))
        index = {
            "about": _as_json(self.about),
            "iteration": self.iteration,
            "segments": [segment.as_state() for segment in self._segments],
            "learner": None if self._learner is None else self._learner.as_state(),
        }
        replace_file(self.folder / _INDEX, (json.dumps({**index, _SUM: _sum(index)}) + "\n").encode())
        if before is not None and (self._learner is None or before.file != self._learner.file):
            (self.folder / before.file).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Block:
    """The episodes of one iteration, task after task, and in each its B episodes one after the other.

    Attributes:
        iteration: its number.
        lengths: (M, B) steps of each episode.
        terminated: (M, B) whether it ended in a terminal state.
        truncated: (M, B) whether it was cut off.
        observations: (S, ...) of all steps; integers where there is `distinct`.
        final_observations: (M * B, ...), likewise.
        actions: (S, ...).
        rewards: (S,) float32.
        distinct: (D, *observation shape), the different observations; None where they are kept as they are.
        infos: by name, float32, (S,) of every step or (M, B) of every episode; NaN where one is not known.
    """

    iteration: int
    lengths: NDArray[np.int32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    observations: NDArray[Any]
    final_observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]
    distinct: NDArray[Any] | None
    infos: dict[str, NDArray[np.float32]]

    def decoded(self) -> Self:
        """Return the block with its observations as they were."""
        return self if self.distinct is None else self.looked_up(self.distinct)

    def looked_up(self, table: NDArray[Any]) -> Self:
        """Return the block with the entries of a table instead of its integers."""
        seen, final = table[self.observations], table[self.final_observations]
        return replace(self, observations=seen, final_observations=final, distinct=None)


class FinishedRecording:
    """A complete recording, for reading, in a folder or below one."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = _find(Path(folder))
        index = _read_index(self.folder)
        self.about = index.about
        if index.iteration < self.about.num_iterations:
            raise ConfigError(
                f"{self.folder} is half-written, {index.iteration} of {self.about.num_iterations} iterations; finish "
                "it by the command that started it, with --resume"
            )
        self.observation_space, self.action_space = map(
            space_from_json, (self.about.observation_space, self.about.action_space)
        )
        self._segments = index.segments
        # B, that of the first iteration.
        self._num_episodes = 0

    def blocks(self) -> Iterator[Block]:
        """Yield the iterations one after the other, from one segment at a time; see `load_histories` for the errors."""
        for segment, end in zip(self._segments, [*(each.first for each in self._segments), -1][1:], strict=True):
            path = self.folder / segment.file
            arrays = _arrays(read_segment(self.folder, segment, _REMEDY), path)
            for iteration in range(segment.first, self.about.num_iterations if end < 0 else end):
                try:
                    values = {name: arrays[f"{iteration} {name}"] for name in _ARRAYS}
                    infos = {name: arrays[f"{iteration} info {name}"] for name in self.about.infos}
                    block = Block(iteration, **values, distinct=arrays.get(f"{iteration} distinct"), infos=infos)
                    self._check(block)
                except KeyError as error:
                    raise CheckpointError(f"{path} is not a segment of a recording: it lacks {error}") from error
                except ValueError as error:
                    raise CheckpointError(
                        f"{path} does not fit its recording: {error} in iteration {iteration}"
                    ) from error
                yield block

    def _check(self, block: Block) -> None:
        """Refuse, by a ValueError with the first, arrays that are not those of an iteration of this recording."""
        num_tasks, num_steps = len(self.about.tasks), int(block.lengths.sum(dtype=np.int64))
        if block.lengths.ndim != 2 or not ((block.lengths >= 1) & (block.lengths <= self.about.horizon)).all():
            raise ValueError(f"'lengths' are not of episodes of 1 to {self.about.horizon} steps")
        grid = (num_tasks, self._num_episodes or block.lengths.shape[1])
        self._num_episodes = grid[1]
        (seen, seen_type), (act, act_type) = map(array_layout, (self.observation_space, self.action_space))
        if isinstance(self.action_space, spaces.Discrete):
            act_type = _action_type(self.action_space)
        expected: dict[str, tuple[tuple[int, ...], Any]] = {
            "lengths": (grid, np.int32),
            "terminated": (grid, np.bool_),
            "truncated": (grid, np.bool_),
            "rewards": ((num_steps,), np.float32),
            "actions": ((num_steps, *act), act_type),
            "observations": ((num_steps, *seen), seen_type),
            "final_observations": ((grid[0] * grid[1], *seen), seen_type),
        }
        if block.distinct is not None:
            expected["distinct"] = ((len(block.distinct), *seen), seen_type)
            expected["observations"] = (num_steps,), np.uint16
            expected["final_observations"] = (grid[0] * grid[1],), np.uint16
        for name, (shape, dtype) in expected.items():
            values = getattr(block, name)
            _check_layout(name, values, shape, dtype)
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise ValueError(f"{name!r} has numbers that are not finite")
        for name, kind in self.about.infos.items():
            _check_layout(f"info {name}", block.infos[name], (num_steps,) if kind == "step" else grid, np.float32)
        if block.distinct is None:
            numbers = {"observations": self.observation_space, "final_observations": self.observation_space}
        else:
            numbers = {"distinct": self.observation_space}
            for name in ("observations", "final_observations"):
                if getattr(block, name).max() >= len(block.distinct):
                    raise ValueError(f"{name!r} has numbers of observations that are not there")
        for name, space in {**numbers, "actions": self.action_space}.items():
            low, high = _range(space)
            values = getattr(block, name)
            if ((values < low) | (values > high)).any():
                raise ValueError(f"{name!r} has values outside of {space}")

    def histories(self) -> Histories:
        """Return the whole recording, in memory, history after history; see `load_histories` for the errors."""
        blocks = list(self.blocks())
        distinct = self._common_numbers(blocks)
        arrays = [
            array for block in blocks for array in (*(getattr(block, name) for name in _ARRAYS), *block.infos.values())
        ]
        num_bytes = sum(array.nbytes for array in arrays)
        refuse_if_too_large(3 * num_bytes, f"the histories in {self.folder}", "record fewer of them")
        gathered = {name: np.concatenate([getattr(block, name) for block in blocks]) for name in _STEP_ARRAYS}
        # (I, M, B) episodes in the order of time; a history has those of one learner in all iterations.
        lengths = np.stack([block.lengths for block in blocks]).astype(np.int64)
        order = np.arange(lengths.size).reshape(lengths.shape).transpose(1, 0, 2).ravel()
        flat = lengths.ravel()
        starts, kept = (np.cumsum(flat) - flat)[order], flat[order]
        steps = np.repeat(starts - (np.cumsum(kept) - kept), kept) + np.arange(kept.sum())
        return Histories(
            self.about.tasks,
            [*kept.reshape(len(self.about.tasks), -1)],
            gathered["observations"][steps],
            gathered["actions"][steps],
            gathered["rewards"][steps],
            EnvKind(self.observation_space, self.action_space, self.about.env_id, self.about.env_kwargs),
            terminated=np.concatenate([block.terminated.ravel() for block in blocks])[order],
            final_observations=np.concatenate([block.final_observations for block in blocks])[order],
            distinct=distinct,
            infos={
                name: np.concatenate([block.infos[name].ravel() for block in blocks])[
                    steps if kind == "step" else order
                ]
                for name, kind in self.about.infos.items()
            },
        )

    def _common_numbers(self, blocks: list[Block]) -> NDArray[Any] | None:
        """Give the observations of all blocks numbers of one table, in place, and return it; None for none."""
        common = Distinct(self.observation_space)
        for index, block in enumerate(blocks):
            numbers = None if block.distinct is None else common.encode(block.distinct)
            if numbers is None:
                blocks[:] = [
                    each.looked_up(common.table()) if place < index else each.decoded()
                    for place, each in enumerate(blocks)
                ]
                return None
            blocks[index] = block.looked_up(numbers.astype(np.uint16))
        return common.table()


def _block(episodes: TaskEpisodes, about: About) -> dict[str, NDArray[Any]]:
    """Return the arrays that are kept of one iteration, by name."""
    observation_space, action_space = map(space_from_json, (about.observation_space, about.action_space))
    real = episodes.mask.mT.bool()
    shape, dtype = array_layout(observation_space)

    def own(observations: Tensor) -> NDArray[Any]:
        # Those of policies with a memory show the last step, too, as vectors of float32.
        rows: NDArray[Any] = observations.numpy()
        if rows.shape[1:] == shape and rows.dtype == dtype:
            return np.ascontiguousarray(rows)
        return read_flat(observation_space, rows[:, : spaces.flatdim(observation_space)])

    seen = own(episodes.observations.transpose(1, 2)[real])
    final = own(episodes.final_observations.flatten(0, 1))
    table = Distinct(observation_space)
    numbers = table.encode(np.concatenate((seen, final)))
    block: dict[str, NDArray[Any]] = {}
    # Where few observations repeat, numbers and table would take more than the observations.
    if numbers is not None and len(table.table()) * 4 <= len(numbers):
        block["distinct"] = table.table()
        seen, final = np.split(numbers.astype(np.uint16), [len(seen)])
    actions = episodes.actions.transpose(1, 2)[real].numpy()
    if isinstance(action_space, spaces.Discrete):
        actions = actions.astype(_action_type(action_space))
    return block | {
        "lengths": episodes.lengths.numpy().astype(np.int32),
        "terminated": episodes.terminated.numpy(),
        "truncated": episodes.truncated.numpy(),
        "observations": seen,
        "final_observations": final,
        "actions": np.ascontiguousarray(actions),
        "rewards": np.ascontiguousarray(episodes.rewards.mT[real].numpy()),
        **{
            f"info {name}": (episodes.infos[name].mT[real] if kind == "step" else episodes.infos[name]).numpy()
            for name, kind in about.infos.items()
        },
    }


def _check_layout(name: str, values: NDArray[Any], shape: tuple[int, ...], dtype: Any) -> None:
    if values.shape != shape or values.dtype != np.dtype(dtype):
        raise ValueError(f"{name!r} is {values.dtype} {values.shape} instead of {np.dtype(dtype)} {shape}")


def space_as_json(space: gymnasium.Space[Any]) -> dict[str, Any]:
    """Return a space of numbers as JSON holds it; a ConfigError for one of another kind."""
    if isinstance(space, spaces.Box):
        bounds = {name: np.unique(getattr(space, name)) for name in ("low", "high")}
        ends = {
            name: found[0].item() if len(found) == 1 else getattr(space, name).tolist()
            for name, found in bounds.items()
        }
        return {"kind": "Box", **ends, "shape": list(space.shape), "dtype": str(space.dtype)}
    own = {} if own_space(space) is space else {"own_start": np.asarray(own_space(space).start).tolist()}  # type: ignore[attr-defined]
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), **own}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist(), **own}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": np.asarray(space.n).tolist()}
    raise ConfigError(f"histories of {space} cannot be recorded; expected Box, Discrete, MultiDiscrete or MultiBinary")


def space_from_json(saved: Mapping[str, Any]) -> gymnasium.Space[Any]:
    """Return the space that `space_as_json` has written; a ValueError if it is not one."""
    try:
        return _space(saved)
    # Each kind of space raises its own errors, assertions among them.
    except Exception as error:
        raise ValueError(f"{ascii(saved)[:80]} is not a space ({type(error).__name__})") from None


def _space(saved: Mapping[str, Any]) -> gymnasium.Space[Any]:
    match saved["kind"]:
        case "Box":
            shape, dtype = tuple(saved["shape"]), np.dtype(saved["dtype"])
            if prod(shape) > _MOST_NUMBERS or dtype.kind not in "biuf":
                raise ValueError(dtype)
            low, high = (np.broadcast_to(np.array(saved[name], dtype), shape).copy() for name in ("low", "high"))
            return spaces.Box(low, high, dtype=dtype.type)
        case "Discrete" if "own_start" in saved:
            return stored_actions(spaces.Discrete(saved["n"], start=saved["own_start"]))
        case "Discrete":
            return spaces.Discrete(saved["n"], start=saved["start"])
        case "MultiDiscrete" if "own_start" in saved:
            return stored_actions(spaces.MultiDiscrete(saved["nvec"], start=saved["own_start"]))
        case "MultiDiscrete":
            return spaces.MultiDiscrete(saved["nvec"])
        case "MultiBinary":
            if np.prod(saved["n"]) > _MOST_NUMBERS:
                raise ValueError(saved["n"])
            return spaces.MultiBinary(saved["n"])
        case kind:
            raise ValueError(kind)


def _range(space: gymnasium.Space[Any]) -> tuple[Any, Any]:
    """Return the least and the largest values of numbers that must be exact; Gaussian actions may leave a Box."""
    match space:
        case spaces.Discrete():
            return space.start, space.start + space.n - 1
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
        case spaces.MultiBinary():
            return 0, 1
        case _:
            return -np.inf, np.inf


def _action_type(space: spaces.Discrete) -> np.dtype[Any]:
    return np.min_scalar_type(int(space.start + space.n))


def _as_json(about: About) -> dict[str, Any]:
    as_read: dict[str, Any] = json.loads(json.dumps(dict(about), default=lambda value: value.tolist()))
    return as_read


def _sum(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index).encode()).hexdigest()


def _read_index(folder: Path) -> _Index:
    path = folder / _INDEX
    try:
        index = parse_json(read_regular(path, _MOST_BYTES), infinite=True)
        if not isinstance(index, dict):
            raise ValueError("it is not a mapping")
        # Earlier versions wrote none.
        if _SUM in index and index.pop(_SUM) != _sum(index):
            raise ValueError("its SHA-256 is not the one with which it was written")
        return checked(_Index, index)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"cannot read the recording {path}: {reason}; {_REMEDY}") from None


def _arrays(data: bytes, path: Path) -> dict[str, NDArray[Any]]:
    try:
        return dict(arrays_from_bytes(data))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is not a segment of a recording: {error}") from error


def _find(path: Path) -> Path:
    """Return the folder of the only recording in or below a folder."""
    found = sorted({each.parent for pattern in (_INDEX, f"**/{_INDEX}") for each in path.glob(pattern)})
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(str(each.parent) for each in found)
        raise ConfigError(f"{path} holds {len(found)} data sets of histories ({names}); name one of them")
    raise ConfigError(f"{path} holds no learning histories; record some with maml-rl record")


def load_histories(folder: str | Path) -> Histories:
    """Read the learning histories that `maml-rl record` has written.

    Args:
        folder: of one data set, or above the only one.

    Raises:
        ConfigError: If there is none, more than one, or one that is half-written.
        CheckpointError: If it is damaged.
    """
    return FinishedRecording(folder).histories()
