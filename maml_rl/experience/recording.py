"""A recording of learning histories: written iteration by iteration, resumed after a kill, read as `Histories`.

The episodes are kept in segments, each with its SHA-256, in blocks of one iteration each. `recording.json` names the
segments, and is replaced atomically together with the state of the learners: a killed recording continues from there,
and ends with the same bytes. Observations that repeat, as those of grids do, are kept once in a block.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as arrays_from_bytes
from safetensors.numpy import save as arrays_to_bytes
from torch import Tensor

from maml_rl.envs.meta_env import Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.experience.histories import Distinct, Histories
from maml_rl.machine import refuse_if_too_large
from maml_rl.runs.atomic_files import replace_file
from maml_rl.runs.segments import Segment, read_segment, remove_segments, write_segment
from maml_rl.spaces import array_layout

FOLDER, _INDEX = "recording", "recording.json"
# A segment is closed once it has this many bytes.
SEGMENT_BYTES = 2**24
_ARRAYS = ("lengths", "terminated", "truncated", "observations", "final_observations", "actions", "rewards")


@dataclass(frozen=True, slots=True)
class About:
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
    """

    env_id: str
    env_kwargs: Mapping[str, Any]
    horizon: int
    observation_space: Mapping[str, Any]
    action_space: Mapping[str, Any]
    tasks: Sequence[Task]
    learner_seeds: Sequence[int]
    learner: str
    settings: Mapping[str, Any]
    num_iterations: int


class Recording:
    """A recording in a folder, as it grows.

    Args:
        folder: of it; made when something is written.
        about: the family, tasks and settings of the recording.
        resume: continue an existing recording.

    Attributes:
        iteration: how many are recorded.

    Raises:
        ConfigError: If the folder has other contents, or a recording that must not be resumed.
        CheckpointError: If the existing recording is damaged.
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
        mine = _as_json(about)
        for key, there in index["about"].items():
            if there != mine[key]:
                raise ConfigError(
                    f"{folder} is a recording with other {key.replace('_', ' ')}; resume it as it was begun, or choose "
                    "another --output"
                )
        self._segments = [Segment.from_state(each) for each in index["segments"]]
        self._learner = None if index["learner"] is None else Segment.from_state(index["learner"])
        self.iteration = self._first = int(index["iteration"])
        remove_segments(folder, {each.file for each in (*self._segments, self._learner) if each is not None})

    def learner_state(self) -> dict[str, Tensor] | None:
        """Return the state of the learners after the last written iteration; None if they have not started.

        Raises:
            CheckpointError: If it is damaged.
        """
        if self._learner is None:
            return None
        arrays = _arrays(read_segment(self.folder, self._learner), self.folder / self._learner.file)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def append(self, episodes: TaskEpisodes) -> bool:
        """Add the episodes (M, T, B, ...) of one more iteration.

        Returns:
            Whether `save` must be called now, with the state of the learners after this iteration.
        """
        block = _block(episodes, self.about)
        self._blocks |= {f"{self.iteration} {name}": array for name, array in block.items()}
        self.iteration += 1
        is_full = sum(array.nbytes for array in self._blocks.values()) >= SEGMENT_BYTES
        return is_full or self.iteration == self.about.num_iterations

    def save(self, learner_state: Mapping[str, Tensor]) -> None:
        """Write everything that is not on disk yet; a recording that is killed later continues from here.

        Raises:
            CheckpointError: If it cannot be written, say because the disk is full.
        """
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
        replace_file(self.folder / _INDEX, (json.dumps(index) + "\n").encode())
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

    def decoded(self) -> Self:
        """Return the block with its observations as they were."""
        return self if self.distinct is None else self.looked_up(self.distinct)

    def looked_up(self, table: NDArray[Any]) -> Self:
        """Return the block with the entries of a table instead of its integers."""
        seen, final = table[self.observations], table[self.final_observations]
        return replace(self, observations=seen, final_observations=final, distinct=None)


class FinishedRecording:
    """A complete recording, for reading.

    Args:
        folder: of the recording, or above one.

    Raises:
        ConfigError: If there is none, more than one, or one that is half-written; in one line.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = _find(Path(folder))
        index = _read_index(self.folder)
        about = index["about"]
        if index["iteration"] < about["num_iterations"]:
            raise ConfigError(
                f"{self.folder} is half-written, {index['iteration']} of {about['num_iterations']} iterations; finish "
                "it by the command that started it, with --resume"
            )
        self.about = About(**about)
        self.observation_space, self.action_space = map(
            space_from_json, (self.about.observation_space, self.about.action_space)
        )
        self._segments = [Segment.from_state(each) for each in index["segments"]]

    def blocks(self) -> Iterator[Block]:
        """Yield the iterations one after the other, from one segment at a time.

        Raises:
            CheckpointError: If a segment is missing or damaged.
        """
        for segment, end in zip(self._segments, [*(each.first for each in self._segments), -1][1:], strict=True):
            path = self.folder / segment.file
            arrays = _arrays(read_segment(self.folder, segment), path)
            for iteration in range(segment.first, self.about.num_iterations if end < 0 else end):
                try:
                    values = {name: arrays[f"{iteration} {name}"] for name in _ARRAYS}
                except KeyError as error:
                    raise CheckpointError(f"{path} is not a segment of a recording: it lacks {error}") from error
                yield Block(iteration, **values, distinct=arrays.get(f"{iteration} distinct"))

    def histories(self) -> Histories:
        """Return the whole recording, in memory, history after history.

        Raises:
            CheckpointError: If a segment is missing or damaged.
            ConfigError: If there is less memory than it needs.
        """
        blocks = list(self.blocks())
        distinct = self._common_numbers(blocks)
        num_bytes = sum(getattr(block, name).nbytes for block in blocks for name in _ARRAYS)
        refuse_if_too_large(3 * num_bytes, f"the histories in {self.folder}", "record fewer of them")
        gathered = {name: np.concatenate([getattr(block, name) for block in blocks]) for name in _ARRAYS[3:]}
        # (I, M, B) episodes in the order of time; a history has those of one learner in all iterations.
        lengths = np.stack([block.lengths for block in blocks]).astype(np.int64)
        order = np.arange(lengths.size).reshape(lengths.shape).transpose(1, 0, 2).ravel()
        flat = lengths.ravel()
        starts, kept = (np.cumsum(flat) - flat)[order], flat[order]
        steps = np.repeat(starts - (np.cumsum(kept) - kept), kept) + np.arange(kept.sum())
        return Histories(
            self.about.tasks,
            [len(blocks) * lengths.shape[2]] * lengths.shape[1],
            kept,
            gathered["observations"][steps],
            gathered["final_observations"][order],
            gathered["actions"][steps],
            gathered["rewards"][steps],
            observation_space=self.observation_space,
            action_space=self.action_space,
            env_id=self.about.env_id,
            env_kwargs=self.about.env_kwargs,
            horizon=self.about.horizon,
            distinct=distinct,
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
        flat = rows[:, : spaces.flatdim(observation_space)]
        if isinstance(observation_space, spaces.Discrete):
            flat = flat.argmax(1) + observation_space.start
        shaped: NDArray[Any] = flat.reshape(len(flat), *shape).astype(dtype)
        return shaped

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
        actions = actions.astype(np.min_scalar_type(int(action_space.start + action_space.n)))
    return block | {
        "lengths": episodes.lengths.numpy().astype(np.int32),
        "terminated": episodes.terminated.numpy(),
        "truncated": episodes.truncated.numpy(),
        "observations": seen,
        "final_observations": final,
        "actions": np.ascontiguousarray(actions),
        "rewards": np.ascontiguousarray(episodes.rewards.mT[real].numpy()),
    }


def space_as_json(space: gymnasium.Space[Any]) -> dict[str, Any]:
    """Return a Box or Discrete space as JSON holds it.

    Raises:
        ConfigError: If it is another one.
    """
    if isinstance(space, spaces.Box):
        bounds = {name: np.unique(getattr(space, name)) for name in ("low", "high")}
        ends = {
            name: found[0].item() if len(found) == 1 else getattr(space, name).tolist()
            for name, found in bounds.items()
        }
        return {"kind": "Box", **ends, "shape": list(space.shape), "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": np.asarray(space.n).tolist()}
    raise ConfigError(f"histories of {space} cannot be recorded; expected Box, Discrete, MultiDiscrete or MultiBinary")


def space_from_json(saved: Mapping[str, Any]) -> gymnasium.Space[Any]:
    """Return the space that `space_as_json` has written."""
    match saved["kind"]:
        case "Box":
            shape, dtype = tuple(saved["shape"]), np.dtype(saved["dtype"]).type
            low, high = (np.broadcast_to(np.array(saved[name], dtype), shape).copy() for name in ("low", "high"))
            return spaces.Box(low, high, dtype=dtype)
        case "Discrete":
            return spaces.Discrete(saved["n"], start=saved["start"])
        case "MultiDiscrete":
            return spaces.MultiDiscrete(saved["nvec"])
        case _:
            return spaces.MultiBinary(saved["n"])


def _as_json(about: About) -> dict[str, Any]:
    values = {name: getattr(about, name) for name in About.__slots__}
    as_read: dict[str, Any] = json.loads(json.dumps(values, default=lambda value: value.tolist()))
    return as_read


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the recording {folder / _INDEX}: {error}; record again") from error
    return index


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
