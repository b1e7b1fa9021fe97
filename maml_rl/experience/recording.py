"""A recording of learning histories: written iteration by iteration, resumed after a kill, read as `Histories`.

The episodes are kept in segments, each with its SHA-256, in blocks of one iteration each. `recording.json` names the
segments, and is replaced atomically together with the state of the learners: a killed recording continues from there,
and ends with the same bytes. Observations that repeat, as those of grids do, are kept once in a block.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from maml_rl.envs.meta_env import InfoKind
from maml_rl.episode.steps import INFO
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.experience.histories import Block, Distinct, EnvKind, Histories, block_of
from maml_rl.foreign_files import Printable, checked, looked_for, parse_json, read_regular
from maml_rl.machine import refuse_if_too_large
from maml_rl.runs.atomic_files import replace_file
from maml_rl.runs.segments import (
    Segment,
    check_arrays,
    check_order,
    read_arrays,
    remove_segments,
    segment_of,
    write_arrays,
)
from maml_rl.spaces import array_layout, own_space, read_flat, stored_actions

FOLDER, _INDEX = "recording", "recording.json"
# Its last entry, the SHA-256 of the others.
_SUM = "sha256"
# A segment is closed once it has this many bytes.
SEGMENT_BYTES = 2**24
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)
_KIND = "a recording"
_REMEDY = "put the file back, or remove the recording and record again"
# Of an index, whose tasks may be large; and numbers of one observation or action.
_MOST_BYTES, _MOST_NUMBERS = 2**28, 2**24
_ARRAYS = ("lengths", "terminated", "truncated", "observations", "final_observations", "actions", "rewards")


class About(BaseModel):
    """The description of a recording, as JSON values; a recording is only continued with the same one.

    Attributes:
        horizon: steps of the longest possible episode.
        observation_space: without the last step; see `space_as_json`.
        tasks: M, of each history.
        learner_seeds: M, of what each learner begins with.
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
        if self.iteration > self.about.num_iterations or [segment.first for segment in self.segments[:1]] != [0] * bool(
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
        for key, recorded in _as_json(index.about).items():
            if recorded != mine[key]:
                raise ConfigError(
                    f"{folder} is a recording with other {key.replace('_', ' ')}; resume it as it was begun, or choose "
                    "another --output"
                )
        self._segments, self._learner = list(index.segments), index.learner
        self.iteration = self._first = index.iteration
        remove_segments(folder, {segment.file for segment in (*self._segments, self._learner) if segment is not None})

    def learner_state(self) -> dict[str, Tensor] | None:
        """Return the state of the learners after the last written iteration; None if they have not started."""
        if self._learner is None:
            return None
        arrays, _ = read_arrays(self.folder, self._learner, _REMEDY, _KIND)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def append(self, episodes: TaskEpisodes) -> bool:
        """Add the episodes (M, T, B, ...) of one more iteration; return whether `save` must be called now."""
        block = _recorded(block_of(episodes), self.about)
        self._blocks |= {f"{self.iteration} {name}": array for name, array in block.items()}
        self.iteration += 1
        is_full = sum(array.nbytes for array in self._blocks.values()) >= SEGMENT_BYTES
        return is_full or self.iteration == self.about.num_iterations

    def save(self, learner_state: Mapping[str, Tensor]) -> None:
        """Write everything that is not on disk yet; a recording that is killed later continues from here."""
        if self._blocks:
            self._segments.append(write_arrays(self.folder, self._first, self._blocks))
        self._blocks, self._first = {}, self.iteration
        is_over = self.iteration == self.about.num_iterations
        # Finished learners are no longer needed, and may be larger than their recordings.
        arrays = {} if is_over else {name: tensor.detach().numpy() for name, tensor in learner_state.items()}
        before, self._learner = self._learner, None
        if arrays:
            self._learner = write_arrays(self.folder, self.iteration, arrays)
        index = {
            "about": _as_json(self.about),
            "iteration": self.iteration,
            "segments": [segment.model_dump() for segment in self._segments],
            "learner": None if self._learner is None else self._learner.model_dump(),
        }
        replace_file(self.folder / _INDEX, (json.dumps({**index, _SUM: _sum(index)}) + "\n").encode())
        if before is not None and (self._learner is None or before.file != self._learner.file):
            (self.folder / before.file).unlink(missing_ok=True)


def looked_up(block: Block, table: NDArray[Any] | None = None) -> Block:
    """Return a block with entries of a table instead of integers; by default its observations as they were."""
    table = block.get("distinct") if table is None else table
    if table is None:
        return block
    seen = {name: table[block[name]] for name in ("observations", "final_observations")}
    return {name: array for name, array in block.items() if name != "distinct"} | seen


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
        """Yield the iterations one after the other, from one segment at a time; see `load_histories` for the errors.

        Where observations repeat, those of a block are integers, numbers of rows of its array `distinct`.
        """
        names = [*_ARRAYS, *(f"{INFO}{name}" for name in self.about.infos)]
        for segment, end in zip(self._segments, [*(each.first for each in self._segments), -1][1:], strict=True):
            arrays, _ = read_arrays(self.folder, segment, _REMEDY, _KIND)
            for iteration in range(segment.first, self.about.num_iterations if end < 0 else end):
                with segment_of(self.folder / segment.file, f"iteration {iteration} of {_KIND}"):
                    known = [*names, "distinct"] if f"{iteration} distinct" in arrays else names
                    block = {name: arrays[f"{iteration} {name}"] for name in known}
                    self._check(block)
                yield block

    def _check(self, block: Block) -> None:
        """Refuse, by a ValueError with the first, arrays that are not those of an iteration of this recording."""
        lengths, distinct = block["lengths"], block.get("distinct")
        num_tasks, num_steps = len(self.about.tasks), int(lengths.sum(dtype=np.int64))
        if lengths.ndim != 2 or not ((lengths >= 1) & (lengths <= self.about.horizon)).all():
            raise ValueError(f"'lengths' are not of episodes of 1 to {self.about.horizon} steps")
        grid = (num_tasks, self._num_episodes or lengths.shape[1])
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
        numbers = dict.fromkeys(("observations", "final_observations"), self.observation_space)
        if distinct is not None:
            expected |= {name: (expected[name][0][:1], np.uint16) for name in numbers}
            expected["distinct"] = (len(distinct), *seen), seen_type
        check_arrays(block, expected)
        kinds = {f"{INFO}{name}": kind for name, kind in self.about.infos.items()}
        of_infos = {name: ((num_steps,) if kind == "step" else grid, np.float32) for name, kind in kinds.items()}
        check_arrays(block, of_infos, finite=False)
        if distinct is not None:
            if any(block[name].max() >= len(distinct) for name in numbers):
                raise ValueError("there are numbers of observations that are not there")
            numbers = {"distinct": self.observation_space}
        for name, space in {**numbers, "actions": self.action_space}.items():
            low, high = _range(space)
            if ((block[name] < low) | (block[name] > high)).any():
                raise ValueError(f"{name!r} has values outside of {space}")

    def histories(self) -> Histories:
        """Return the whole recording, in memory, history after history; see `load_histories` for the errors."""
        blocks = list(self.blocks())
        distinct = self._common_numbers(blocks)
        num_bytes = sum(array.nbytes for block in blocks for array in block.values())
        refuse_if_too_large(3 * num_bytes, f"the histories in {self.folder}", "record fewer of them")
        env = EnvKind(self.observation_space, self.action_space, self.about.env_id, self.about.env_kwargs)
        return Histories.of_blocks(blocks, self.about.tasks, env, distinct)

    def _common_numbers(self, blocks: list[Block]) -> NDArray[Any] | None:
        """Give the observations of all blocks numbers of one table, in place, and return it; None for none."""
        common = Distinct(self.observation_space)
        for index, block in enumerate(blocks):
            numbers = common.encode(block["distinct"]) if "distinct" in block else None
            if numbers is None:
                blocks[:] = [
                    looked_up(each, common.table() if place < index else None) for place, each in enumerate(blocks)
                ]
                return None
            blocks[index] = looked_up(block, numbers.astype(np.uint16))
        return common.table()


def _recorded(block: Block, about: About) -> Block:
    """Return a block as it is kept: with observations of the environment's own, once each where they repeat."""
    observation_space, action_space = map(space_from_json, (about.observation_space, about.action_space))
    shape, dtype = array_layout(observation_space)

    def own(rows: NDArray[Any]) -> NDArray[Any]:
        # Those of policies with a memory show the last step, too, as vectors of float32.
        if rows.shape[1:] == shape and rows.dtype == dtype:
            return rows
        return read_flat(observation_space, rows[:, : spaces.flatdim(observation_space)])

    block = {name: block[name] for name in (*_ARRAYS, *(f"{INFO}{name}" for name in about.infos))}
    block |= {name: own(block[name]) for name in ("observations", "final_observations")}
    block["lengths"] = block["lengths"].astype(np.int32)
    if isinstance(action_space, spaces.Discrete):
        block["actions"] = block["actions"].astype(_action_type(action_space))
    table = Distinct(observation_space)
    numbers = table.encode(np.concatenate((block["observations"], block["final_observations"])))
    # Where few observations repeat, numbers and table would take more than the observations.
    if numbers is not None and len(table.table()) * 4 <= len(numbers):
        seen, final = np.split(numbers.astype(np.uint16), [len(block["observations"])])
        block |= {"distinct": table.table(), "observations": seen, "final_observations": final}
    return {name: np.ascontiguousarray(array) for name, array in block.items()}


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
    # Each kind of space raises its own errors, assertions among them.
    except Exception as error:
        raise ValueError(f"{ascii(saved)[:80]} is not a space ({type(error).__name__})") from None


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


def _find(path: Path) -> Path:
    """Return the folder of the only recording in or below a folder."""
    folders = sorted({file.parent for pattern in (_INDEX, f"**/{_INDEX}") for file in path.glob(pattern)})
    if len(folders) == 1:
        return folders[0]
    if folders:
        names = ", ".join(str(index.parent) for index in folders)
        raise ConfigError(f"{path} holds {len(folders)} data sets of histories ({names}); name one of them")
    raise ConfigError(f"{path} holds no learning histories; record some with maml-rl record{looked_for(path)}")


def load_histories(folder: str | Path) -> Histories:
    """Read the learning histories that `maml-rl record` has written.

    Args:
        folder: of one data set, or above the only one.

    Raises:
        ConfigError: If there is none, more than one, or one that is half-written.
        CheckpointError: If it is damaged.
    """
    return FinishedRecording(folder).histories()
