"""Learning histories as a data set of Minari, for `minari.load_dataset`; and data sets of Minari as histories.

A Minari episode is an episode. Its attributes identify it: `task`, the number of the task; `learner_seed`;
`iteration`, after how many updates of its learner it was sampled; `trial`, the number of the history; and `episode`,
its number within the history. Recorded infos are Minari's infos, one number after the reset and after every step; NaN
where there is none, as after the reset, and before the end for those of an episode. Tasks themselves are in the
metadata of the data set, as JSON.

Minari's own writer would take 95 s of CPU time and 765 MB for a million steps in episodes of 20, as of dark rooms, and
more in its other formats, which have a folder for each episode. The same layout, written here with compact data sets
and newer headers, takes 21 s and 132 MB.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib.metadata import version
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from maml_rl.envs.registration import find_spec
from maml_rl.envs.tasks import task_key
from maml_rl.episode.steps import INFO
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.experience.histories import Block, Distinct, EnvKind, Histories
from maml_rl.experience.recording import FinishedRecording, looked_up
from maml_rl.runs.atomic_files import TEMPORARY, remove, sync_folder
from maml_rl.runs.trust import check_family
from maml_rl.spaces import own_actions, own_space, stored_actions, to_stored

DATA = "data"
_FILE = "main_data.hdf5"
# HDF5 keeps smaller data sets in the header of their object.
_COMPACT_BYTES = 60_000


def require_minari() -> None:
    """Refuse, by a ConfigError in one line, a recording for Minari where Minari is not installed."""
    try:
        import h5py
        import minari
    except ImportError as error:
        raise ConfigError(
            f"a data set of Minari needs the extra 'data' ({error}); install it with pip install 'maml-rl[data]', or "
            "leave it out with --no-minari: maml_rl reads its recordings without"
        ) from error
    assert h5py
    assert minari


def require_describable(env_id: str, env_kwargs: Mapping[str, Any]) -> None:
    """Refuse, by a ConfigError in one line, a family whose registration a data set of Minari cannot hold."""
    try:
        _spec(env_id, env_kwargs, 1).to_json()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a data set of Minari keeps the registration of {env_id} as JSON, which has no place for a function or an "
            f"object ({error}); register a class of a module, with plain arguments, or leave it out with --no-minari"
        ) from error


def dataset_id(env_id: str, learner: str) -> str:
    """Return the id by Minari's conventions: namespace, family, and who learned, with a version."""
    name, _, number = env_id.rpartition(":")[2].replace("/", "-").rpartition("-v")
    return f"maml_rl/{(name or number).lower()}/{learner}-v0"


def write_data_set(folder: Path, identifier: str) -> Path:
    """Write the recording in a folder as a data set of Minari beside it, whole or not at all.

    Args:
        folder: that has a finished recording in it; the data set goes into its folder `data`.
        identifier: of the data set.

    Returns:
        The folder of the data set.
    """
    require_minari()
    from minari.dataset.minari_storage import MinariStorage

    # Minari measures the size of a folder by paths that have to be absolute.
    folder = folder.absolute()
    recording = FinishedRecording(folder)
    check_family(recording.about.env_id, recording.about.env_kwargs, str(folder))
    unfinished, finished = folder / f"{TEMPORARY}{DATA}", folder / DATA
    remove(unfinished)
    try:
        unfinished.mkdir(parents=True)
        storage = MinariStorage.new(
            unfinished,
            observation_space=recording.observation_space,
            action_space=own_space(recording.action_space),
            env_spec=_spec(recording.about.env_id, recording.about.env_kwargs, recording.about.horizon),
            data_format="hdf5",
            jpeg_encoding=False,
        )
        num_episodes, num_steps = _write_episodes(unfinished / _FILE, recording)
        metadata = _metadata(recording, identifier)
        storage.update_metadata(metadata | {"total_episodes": num_episodes, "total_steps": num_steps})
        storage.update_metadata({"dataset_size": float(storage.get_size())})
        remove(finished)
        unfinished.rename(finished)
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the data set {finished}: {error.strerror or error}; the recording is complete: make room, "
            "and write it with the same command and --resume"
        ) from error
    return finished


def read_data_set(identifier: str) -> Histories:
    """Read a data set of Minari as learning histories, in memory.

    Those that `write_data_set` has written are what they were, without infos. The episodes of another data set are one
    history of one task, in their order, which says neither family nor arguments.

    Args:
        identifier: of the data set, below the folder that `MINARI_DATASETS_PATH` names.
    """
    require_minari()
    import minari
    from minari.storage import get_dataset_path

    try:
        for path in get_dataset_path(identifier).rglob("*"):
            if not (path.is_file() or path.is_dir()):
                raise OSError(f"{path} is a device, a pipe or a socket, not a file")
        data = minari.load_dataset(identifier)
    # Minari raises many kinds.
    except Exception as error:
        raise ConfigError(
            f"Minari cannot load the data set {identifier!r} ({error}); `minari list local` shows those in the folder "
            "that MINARI_DATASETS_PATH names"
        ) from error
    observation_space = data.observation_space
    for space in (observation_space, data.action_space):
        if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            raise ConfigError(f"a history has arrays, and the data set {identifier!r} has {space}")
    action_space = stored_actions(data.action_space)
    known_tasks = json.loads(data.storage.metadata.get("tasks", "null"))
    trials: dict[int, list[tuple[int, Any]]] = {}
    tasks = {}
    attributes = data.storage.get_episode_metadata(data.episode_indices)
    for number, (episode, known) in enumerate(zip(data.iterate_episodes(), attributes, strict=True)):
        trial, place = (0, number) if known_tasks is None else (int(known["trial"]), int(known["episode"]))
        trials.setdefault(trial, []).append((place, episode))
        tasks[trial] = {} if known_tasks is None else known_tasks[int(known["task"])]
    histories = [[episode for _, episode in sorted(trials[trial], key=itemgetter(0))] for trial in sorted(trials)]
    ordered = list(chain.from_iterable(histories))
    parts = [each.observations[:-1] for each in ordered], [each.observations[-1:] for each in ordered]
    seen, final = map(np.concatenate, parts)
    distinct = Distinct(observation_space)
    numbers = distinct.encode(np.concatenate((seen, final)))
    if numbers is not None:
        seen, final = np.split(numbers, [len(seen)])
    if known_tasks is not None:
        check_family(data.env_spec.id, data.env_spec.kwargs, f"the data set {identifier!r}")
    own_env = () if known_tasks is None else (data.env_spec.id, _own_kwargs(data.env_spec))
    return Histories(
        [tasks[trial] for trial in sorted(trials)],
        [[len(each.rewards) for each in history] for history in histories],
        seen,
        to_stored(action_space, np.concatenate([each.actions for each in ordered])),
        np.concatenate([each.rewards for each in ordered]),
        EnvKind(observation_space, action_space, *own_env),
        terminated=[each.terminations[-1] for each in ordered],
        final_observations=final,
        distinct=None if numbers is None else distinct.table(),
    )


def _own_kwargs(spec: EnvSpec) -> dict[str, Any]:
    """Return the arguments that are not those of the registration."""
    registered = find_spec(spec.id).kwargs
    return {name: value for name, value in spec.kwargs.items() if name not in registered or registered[name] != value}


def _metadata(recording: FinishedRecording, identifier: str) -> dict[str, Any]:
    about = recording.about
    described = (
        f"Learning histories of {about.learner} in {len(about.tasks)} tasks of {about.env_id}: what a learner of each "
        f"task did from its first to its last episode, {about.num_iterations} iterations. The attributes of an episode "
        "are task, learner_seed, iteration, trial (the number of the history) and episode (within it)."
    )
    return {
        "description": described,
        "algorithm_name": about.learner,
        "author": {"maml_rl"},
        "dataset_id": identifier,
        "minari_version": version("minari"),
        "requirements": [f"maml-rl=={version('maml-rl')}"],
        "tasks": json.dumps(list({task_key(task): task for task in about.tasks}.values())),
        "learner_settings": json.dumps(about.settings),
    }


def _spec(env_id: str, env_kwargs: Mapping[str, Any], horizon: int) -> EnvSpec:
    spec = deepcopy(find_spec(env_id))
    spec.kwargs = {**spec.kwargs, **env_kwargs}
    spec.max_episode_steps = horizon
    # As text, which JSON can hold.
    spec.entry_point, spec.vector_entry_point = _name(spec.entry_point), _name(spec.vector_entry_point)
    return spec


def _name(entry_point: Any) -> Any:
    """Return a class or function of a module as "module:name"; anything else as it is."""
    module, name = getattr(entry_point, "__module__", ""), getattr(entry_point, "__qualname__", "")
    is_there = module != "__main__" and getattr(sys.modules.get(module), name, None) is entry_point
    return f"{module}:{name}" if is_there and name else entry_point


def _write_episodes(path: Path, recording: FinishedRecording) -> tuple[int, int]:
    """Write all episodes, in the order of sampling, as groups `episode_0`, ...; return how many, and their steps."""
    import h5py

    about = recording.about
    num_episodes = num_steps = 0
    # Several learners may have had the same task.
    keys = [task_key(task) for task in about.tasks]
    task_numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    path.unlink(missing_ok=True)
    with h5py.File(path, "w", libver="latest", track_order=True) as file:
        write = _Writer(h5py)
        for iteration, block in enumerate(recording.blocks()):
            per_task = block["lengths"].shape[1]
            for row, arrays in enumerate(_episodes(looked_up(block), recording.action_space)):
                trial, column = divmod(row, per_task)
                numbers = {
                    "id": num_episodes,
                    "total_steps": len(arrays["rewards"]),
                    "task": task_numbers[keys[trial]],
                    "learner_seed": about.learner_seeds[trial],
                    "iteration": iteration,
                    "trial": trial,
                    "episode": iteration * per_task + column,
                }
                write(file, f"episode_{num_episodes}", arrays, numbers)
                num_episodes, num_steps = num_episodes + 1, num_steps + len(arrays["rewards"])
    return num_episodes, num_steps


def _episodes(block: Block, action_space: spaces.Space[Any]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the arrays of every episode by the names that Minari has for them."""
    lengths, terminated, truncated = (block[name].ravel() for name in ("lengths", "terminated", "truncated"))
    actions, rewards = own_actions(action_space, block["actions"]), block["rewards"].astype(np.float64)
    of_infos = {name.removeprefix(INFO): values for name, values in block.items() if name.startswith(INFO)}
    begin = 0
    for row, length in enumerate(lengths.tolist()):
        steps = slice(begin, begin + length)
        begin += length
        last = np.zeros((2, length), np.bool_)
        last[:, -1] = terminated[row], truncated[row]
        infos = {name: np.full(length + 1, np.nan, np.float32) for name in of_infos}
        for name, values in of_infos.items():
            if values.ndim == 1:
                infos[name][1:] = values[steps]
            else:
                infos[name][-1] = values.flat[row]
        yield {
            "observations": np.concatenate((block["observations"][steps], block["final_observations"][row][None])),
            "actions": actions[steps],
            "rewards": rewards[steps],
            "terminations": last[0],
            "truncations": last[1],
            # A slash would make a group.
            **{f"infos/{name.replace('/', '.')}": values for name, values in infos.items()},
        }


class _Writer:
    """Writes groups by HDF5's own functions: those of h5py's objects take twice as long."""

    def __init__(self, h5py: Any) -> None:
        self._h5 = h5py
        self._types: dict[np.dtype[Any], Any] = {}
        self._compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        self._compact.set_layout(h5py.h5d.COMPACT)
        self._contiguous = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        self._contiguous.set_layout(h5py.h5d.CONTIGUOUS)
        for each in (self._compact, self._contiguous):
            each.set_obj_track_times(False)
        self._group = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
        self._group.set_obj_track_times(False)
        self._scalar = h5py.h5s.create(h5py.h5s.SCALAR)

    def __call__(self, file: Any, name: str, arrays: Mapping[str, NDArray[Any]], numbers: Mapping[str, int]) -> None:
        """Write one group."""
        h5 = self._h5
        group = h5.h5g.create(file.id, name.encode(), gcpl=self._group)
        # Minari prints an episode by its infos, of which there may be none.
        h5.h5g.create(group, b"infos", gcpl=self._group)
        for key, values in arrays.items():
            if values.dtype not in self._types:
                self._types[values.dtype] = h5.h5t.py_create(values.dtype, logical=True)
            kind = self._types[values.dtype]
            layout = self._compact if values.nbytes < _COMPACT_BYTES else self._contiguous
            data = h5.h5d.create(group, key.encode(), kind, h5.h5s.create_simple(values.shape), layout)
            data.write(h5.h5s.ALL, h5.h5s.ALL, np.ascontiguousarray(values), mtype=kind)
        for key, number in numbers.items():
            attribute = h5.h5a.create(group, key.encode(), h5.h5t.NATIVE_INT64, self._scalar)
            attribute.write(np.asarray(number, np.int64))
