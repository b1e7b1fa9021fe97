"""Learning histories are recorded: the same bytes for any number of workers and after any kill, read back as Minari."""

import errno
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from safetensors.numpy import load_file as arrays_from_file
from safetensors.numpy import save as arrays_to_bytes

from maml_rl import MultiTaskSampler, load_policy
from maml_rl.cli import main as cli
from maml_rl.config import Config
from maml_rl.episode import TaskEpisodes
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.experience import Histories, load_histories, minari_data_set
from maml_rl.experience import recording as recording_module
from maml_rl.experience.histories import EnvKind
from maml_rl.experiment import record as record_module
from maml_rl.experiment.record import Recorded, record, record_run
from maml_rl.experiment.train import train
from maml_rl.metalearners.single_task import SingleTaskPPO
from maml_rl.runs.atomic_files import LOCK, check_creatable, lock_folder
from maml_rl.runs.segments import write_segment
from tests.numbered_env import NumberedEnv
from tests.small_runs import config_of, untimed

DARK_ROOM = {"env_name": "DarkRoom-v0", "fast_batch_size": 3, "max_episode_steps": 6, "num_workers": 0}
HERE = {"num-workers": 0}
OF_CONFIG = ("tasks", "backend", "num_workers", "seed", "num_batches")


def record_small(folder: Path, **options: Any) -> Recorded:
    config = {name: options.pop(name) for name in list(options) if name in OF_CONFIG}
    options = {"num_tasks": 5, "minari": False} | options
    return record(config_of(**DARK_ROOM | {"num_batches": 4} | config), folder, **options)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def interrupt_recording(folder: Path, after: int = 1) -> None:
    """Record, and interrupt it after so many iterations."""

    def interrupt(what: str, done: int, total: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_small(folder, on_iteration=interrupt)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "SEGMENT_BYTES", 1)


@pytest.fixture
def minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, whose data sets are in the folder of the test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return pytest.importorskip("minari")


def read_both(recorded: Recorded) -> tuple[Histories, Histories]:
    """Return the recorded histories from their folder and from the data set of Minari."""
    assert recorded.identifier is not None
    return load_histories(recorded.folder), minari_data_set.read_data_set(recorded.identifier)


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, *(pytest.param(few, marks=pytest.mark.nightly) for few in (1, 2))])
@pytest.mark.usefixtures("forked_workers")
def test_recording_has_the_same_bytes_for_any_number_of_workers(number: int, tmp_path: Path) -> None:
    for workers in (0, number):
        record_small(tmp_path / str(workers), num_workers=workers, num_batches=2)
    found = content(tmp_path / "0")
    assert len(found) == 2
    assert content(tmp_path / str(number)) == found


@pytest.mark.parametrize("learner", ["ppo", "q-learning"])
@pytest.mark.usefixtures("small_segments")
def test_interrupted_recording_ends_with_the_same_bytes(learner: str, tmp_path: Path) -> None:
    record_small(tmp_path / "whole", learner=learner)

    def interrupt(what: str, done: int, total: int) -> None:
        if done % 2:
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            record_small(tmp_path / "parts", learner=learner, resume=True, on_iteration=interrupt)
    record_small(tmp_path / "parts", learner=learner, resume=True)
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert len(content(tmp_path / "whole")) == 5


SCRIPT = """
import os, signal, sys
from pathlib import Path
import maml_rl.experience.recording as recording
import maml_rl.runs.atomic_files as files
from maml_rl.experience import minari_data_set
from tests.experiment.test_recorded_histories import record_small
recording.SEGMENT_BYTES, place = 1, int(sys.argv[2])
def kill(number, original):
    def counted(*arguments, **options):
        global place
        place -= 1
        if place == 0 or place == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)
    return counted
# Before a file is written, before it gets its name, and before an episode of the data set is written.
for module, name in ((files.os, "fsync"), (files.os, "replace"), (minari_data_set.np, "concatenate")):
    setattr(module, name, kill(-1, getattr(module, name)))
record_small(Path(sys.argv[1]), resume=True, minari=True)
"""


def killed_at(folder: Path, place: int) -> int:
    return subprocess.run([sys.executable, "-c", SCRIPT, str(folder), str(place)], check=False).returncode


@pytest.mark.slow
@pytest.mark.timeout(1200)
# Nightly 20 kills, in parts that take less than the limit for hangs.
@pytest.mark.parametrize(
    "places",
    [(20,), *(pytest.param(tuple(range(first, 60, 12)), marks=pytest.mark.nightly) for first in (2, 5, 8, 11))],
)
@pytest.mark.usefixtures("small_segments")
def test_killed_recording_ends_with_the_same_bytes(places: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("minari")
    record_small(tmp_path / "whole", minari=True)
    kills = sum(killed_at(tmp_path / "killed", place) == -signal.SIGKILL for place in places)
    assert kills == len(places)
    record_small(tmp_path / "killed", minari=True, resume=True)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


@pytest.mark.usefixtures("small_segments")
def test_histories_are_the_episodes_of_the_learners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, append = [], recording_module.Recording.append

    def noted(self: recording_module.Recording, episodes: Any) -> Any:
        seen.append(episodes)
        return append(self, episodes)

    monkeypatch.setattr(recording_module.Recording, "append", noted)
    recorded = record_small(tmp_path)
    found = load_histories(tmp_path)
    direct = Histories.of(seen, found.env)
    one, other = (source.sequences(np.random.default_rng(3), 20, 60) for source in (found, direct))
    for name in ("observations", "actions", "rewards", "truncations", "episodes"):
        assert bool((getattr(one, name) == getattr(other, name)).all()), name
    assert (found.env.env_id, len(found)) == ("DarkRoom-v0", 5)
    assert load_histories(recorded.folder).num_steps == 5 * 4 * 3 * 6


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A recording that is a data set of Minari, too."""
    pytest.importorskip("minari")
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(folder))
        yield record_small(folder, minari=True, tasks={"distribution": "fixed", "train": 2, "test": 3})


def test_learner_learns_the_same_from_the_data_set_of_minari(written: Recorded, tmp_path: Path) -> None:
    recorded = written
    one, other = read_both(recorded)
    assert (one.tasks, one.env) == (other.tasks, other.env)
    settings = {"context": 10, "hidden-size": 8, "num-heads": 2, "num-layers": 1, "num-updates": 2, "batch-size": 4}
    for name, source in {"folder": str(recorded.folder), "minari": f"minari:{recorded.identifier}"}.items():
        given = settings | {"histories": source, "num-bins": 9, "critic-layers": [6]}
        values = {"env-name": "DarkRoom-v0", "algorithm": "amago-offline", "observe-last": True, "num-workers": 0}
        values |= {"max-episode-steps": 6, "num-batches": 2, "algorithm-settings": given}
        train(Config.model_validate(values), tmp_path / name)
    assert untimed(tmp_path / "folder") == untimed(tmp_path / "minari")


@pytest.mark.parametrize("pairs", [False, True])
def test_data_set_of_minari_has_the_actions_of_the_environment(pairs: bool, tmp_path: Path, minari: Any) -> None:
    kwargs = {"start": 2, "pairs": pairs}
    family = {"env_name": "Numbered-v0", "env_kwargs": kwargs, "num_batches": 2, "num_workers": 0}
    recorded = record(config_of(**family), tmp_path, num_tasks=3, minari=True)
    data = minari.load_dataset(recorded.identifier)
    assert data.action_space == NumberedEnv(**kwargs).action_space
    tasks = json.loads(data.storage.metadata["tasks"])
    for episode, known in zip(
        data.iterate_episodes(), data.storage.get_episode_metadata(data.episode_indices), strict=True
    ):
        env = NumberedEnv(**kwargs)
        env.reset_task(tasks[known["task"]])
        env.reset(seed=0)
        assert [env.step(action)[1] for action in episode.actions] == episode.rewards.tolist()
    one, other = read_both(recorded)
    assert one.actions.min() == 0
    assert np.array_equal(one.actions, other.actions)
    other.check_fits(one.env)
    with pytest.raises(ConfigError, match="these histories are of actions"):
        other.check_fits(replace(one.env, action_space=NumberedEnv(pairs=pairs).action_space))


def test_actions_in_a_data_set_of_minari_lead_from_its_observations_to_the_next(tmp_path: Path, minari: Any) -> None:
    family = {"env_name": "2DNavigation-v0", "num_batches": 2, "num_workers": 0}
    recorded = record(config_of(**family), tmp_path, num_tasks=2, minari=True)
    data = minari.load_dataset(recorded.identifier)
    at_bounds = []
    for episode in data.iterate_episodes():
        assert all(data.action_space.contains(action) for action in episode.actions)
        at_bounds.append(np.abs(episode.actions) == data.action_space.high)
        # The point moves by the action, in an environment that trusts its space.
        np.testing.assert_allclose(np.diff(episode.observations, axis=0), episode.actions, atol=1e-6)
    # A Gaussian of deviation 1 around 0, and moves of at most 0.1.
    assert np.concatenate(at_bounds).mean() > 0.8
    one, other = read_both(recorded)
    assert np.array_equal(one.actions, other.actions)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_episodes_of_another_data_set_are_one_history(tmp_path: Path, minari: Any) -> None:
    buffers = [
        minari.data_collector.EpisodeBuffer(
            observations=[np.array([10.0 * number + step]) for step in range(length + 1)],
            actions=[step % 3 for step in range(length)],
            rewards=[float(10 * number + step) for step in range(length)],
            terminations=[step == length - 1 and length > 1 for step in range(length)],
            truncations=[length == 1] * length,
        )
        for number, length in enumerate((3, 1, 4))
    ]
    seen = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    minari.create_dataset_from_buffers(
        "others/walks-v0", buffers, observation_space=seen, action_space=spaces.Discrete(3)
    )
    histories = minari_data_set.read_data_set("others/walks-v0")
    histories.check_fits(EnvKind(seen, spaces.Discrete(3), "Any-v0", {"size": 3}))
    with pytest.raises(ConfigError, match="these histories are of actions"):
        histories.check_fits(EnvKind(seen, spaces.Discrete(4), "Any-v0"))
    drawn = histories.sequences(np.random.default_rng(0), 1, 8)
    assert drawn.observations[:, 0, 0].tolist() == drawn.rewards[:, 0].tolist() == [0, 1, 2, 10, 20, 21, 22, 23]
    assert drawn.actions[:, 0].tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
    ends = drawn.terminations | drawn.truncations
    assert ends[:, 0].tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert drawn.terminations[:, 0].tolist() == [False, False, True, False, False, False, False, True]
    assert drawn.next_observations[-1][0].tolist() == [24, 1, 0, 0, 23, 1]
    with pytest.raises(ConfigError, match=r"Minari cannot load the data set 'others/none-v0' .*MINARI_DATASETS_PATH"):
        minari_data_set.read_data_set("others/none-v0")


def test_minari_reads_the_recording(written: Recorded) -> None:
    minari = importlib.import_module("minari")
    data = minari.load_dataset(written.identifier)
    assert list(minari.list_local_datasets()) == ["maml_rl/darkroom/ppo-v0"]
    assert (data.total_episodes, data.total_steps) == (60, 360)
    assert (data.env_spec.id, data.env_spec.max_episode_steps) == ("DarkRoom-v0", 6)
    assert data.observation_space.shape == (81,)
    metadata = data.storage.metadata
    assert (metadata["algorithm_name"], metadata["author"]) == ("ppo", {"maml_rl"})
    histories = load_histories(written.folder)
    of_episodes = list(data.storage.get_episode_metadata(range(60)))
    assert [each["task"] for each in of_episodes[:15:3]] == [0, 1, 0, 1, 0]
    assert [each["iteration"] for each in of_episodes[::15]] == [0, 1, 2, 3]
    assert len({each["learner_seed"] for each in of_episodes}) == 5
    assert len(json.loads(metadata["tasks"])) == 2
    for trial, returns in enumerate(histories.returns()):
        mine = [number for number, each in enumerate(of_episodes) if each["trial"] == trial]
        assert [of_episodes[number]["episode"] for number in mine] == list(range(12))
        episodes = list(data.iterate_episodes(mine))
        assert [episode.rewards.sum() for episode in episodes] == list(returns)
        assert all(episode.truncations.tolist() == [False] * 5 + [True] for episode in episodes)
        assert not any(episode.terminations.any() for episode in episodes)
        actions = np.concatenate([episode.actions for episode in episodes])
        whole = histories.sequences(np.random.default_rng(0), 30, 72)
        column = int((whole.tasks == trial).nonzero()[0, 0])
        assert actions.tolist() == whole.actions[:, column].tolist()
        observations = np.concatenate([episode.observations[:-1] for episode in episodes])
        assert (observations == whole.observations[:, column, :81].numpy()).all()


@pytest.mark.parametrize("entry_point", [NumberedEnv, lambda: NumberedEnv()])
def test_minari_has_a_family_that_a_class_registers_and_not_that_of_a_lambda(
    entry_point: Any, tmp_path: Path, minari: Any
) -> None:
    gymnasium.register("ByClass-v0", entry_point=entry_point, max_episode_steps=4)
    try:
        config = config_of(**DARK_ROOM | {"env_name": "ByClass-v0", "num_batches": 1})
        if entry_point is not NumberedEnv:
            with pytest.raises(ConfigError, match=r"keeps the registration of ByClass-v0 as JSON, .*--no-minari"):
                record(config, tmp_path, num_tasks=2)
            assert not list(tmp_path.iterdir())
            return
        recorded = record(config, tmp_path, num_tasks=2)
        spec = minari.load_dataset(recorded.identifier).env_spec
        assert spec.entry_point == "tests.numbered_env:NumberedEnv"
        one, other = read_both(recorded)
        assert one.rewards.tolist() == other.rewards.tolist()
    finally:
        del gymnasium.registry["ByClass-v0"]


@pytest.mark.parametrize(("learner", "env_name"), [("thompson", "Bandit-K5-v0"), ("psrl", "TabularMDP-v0")])
def test_classical_algorithms_are_recorded_through_a_trial(learner: str, env_name: str, tmp_path: Path) -> None:
    config = config_of(env_name=env_name, fast_batch_size=30, num_workers=0, max_episode_steps=None)
    record(config, tmp_path, num_tasks=40, learner=learner, minari=False)
    histories = load_histories(tmp_path)
    assert histories.observation_space.shape == ((1,) if learner == "thompson" else (10,))
    returns = np.stack(histories.returns())
    assert returns.shape == (40, 30)
    assert returns[:, 20:].mean() > returns[:, :5].mean()


def sampled_by(run: Path, tasks: list[Any], env_name: str, **options: Any) -> list[TaskEpisodes]:
    """Return the episodes of the policy of each checkpoint of a run."""
    episodes = []
    for iteration, checkpoint in enumerate(sorted((run / "checkpoints").iterdir())):
        policy = load_policy(run, checkpoint, trust=True)
        with MultiTaskSampler(env_name, {}, 3, policy, num_workers=0, seed=0, **options) as sampler:
            sampler.seek(iteration)
            episodes.append(sampler.rollout(tasks))
    return episodes


@pytest.mark.parametrize("memory", [False, True])
def test_meta_training_is_recorded_checkpoint_by_checkpoint(memory: bool, tmp_path: Path) -> None:
    learner: dict[str, Any] = {"algorithm": "maml-vpg", "hidden_sizes": (4,)}
    if memory:
        learner = {"algorithm": "rl2", "observe_last": True}
    sizes = {"num_batches": 2, "checkpoint_every": 1, "meta_batch_size": 2}
    settings = {key.replace("_", "-"): value for key, value in (DARK_ROOM | sizes | learner).items()}
    config = Config.model_validate(settings)
    train(config, tmp_path / "run", num_workers=0)
    words = ["record", "--source", str(tmp_path / "run"), "--tasks", "4", "--output", str(tmp_path / "histories")]
    assert cli.main([*words, "--no-minari", "--num-workers", "0"]) == 0
    histories = load_histories(tmp_path / "histories")
    assert histories.observation_space.shape == (81,)
    options = {"max_episode_steps": 6, "observe_last": memory} | ({"slots_per_task": 1} if memory else {})
    sampled = sampled_by(tmp_path / "run", histories.tasks, "DarkRoom-v0", **options)
    wanted = [episodes.actions.transpose(1, 2).flatten(1) for episodes in sampled]
    drawn = histories.sequences(np.random.default_rng(0), 20, histories.num_steps // 4)
    for column, history in enumerate(drawn.tasks):
        assert drawn.actions[:, column].tolist() == [int(each) for part in wanted for each in part[history]]


@pytest.mark.usefixtures("small_segments")
def test_infos_that_a_family_declares_are_those_of_a_plain_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = "tests.lamp_env:Flickering-v0"
    sizes = {"num_batches": 2, "checkpoint_every": 1, "meta_batch_size": 2, "max_episode_steps": None}
    train(config_of(**DARK_ROOM | sizes | {"env_name": family}), tmp_path / "run", num_workers=0)
    minari = find_spec("minari") is not None
    recorded = record_run(tmp_path / "run", tmp_path, num_tasks=4, placement=HERE, minari=minari, trust=True)
    histories = load_histories(recorded.folder)
    sampled = sampled_by(tmp_path / "run", histories.tasks, family)
    powers, successes = [], []
    for task in range(4):
        for episodes in sampled:
            for column, length in enumerate(episodes.lengths[task].tolist()):
                powers.append(episodes.infos["power"][task, :length, column].tolist())
                successes.append(float(episodes.infos["success"][task, column]))
    assert len({len(each) for each in powers}) > 1, "episodes have different lengths"
    assert histories.infos["power"].tolist() == [power for each in powers for power in each]
    assert histories.infos["success"].tolist() == successes == [each[-1] for each in powers]
    direct = Histories.of(sampled, histories.env)
    assert all(direct.infos[name].tolist() == values.tolist() for name, values in histories.infos.items())
    if minari:
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
        data = importlib.import_module("minari").load_dataset(recorded.identifier)
        found = list(zip(data.storage.get_episode_metadata(range(data.total_episodes)), data, strict=True))
        found.sort(key=lambda each: (each[0]["trial"], each[0]["episode"]))
        for (_, episode), power, success in zip(found, powers, successes, strict=True):
            unknown = [np.nan] * len(power)
            np.testing.assert_array_equal(episode.infos["power"], np.array([np.nan, *power], np.float32))
            np.testing.assert_array_equal(episode.infos["success"], np.array([*unknown, success], np.float32))


@pytest.mark.usefixtures("small_segments")
def test_recording_of_an_earlier_version_is_read_and_continued_without_infos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = record_module.About
    with monkeypatch.context() as patch:
        patch.setattr(record_module, "About", lambda **values: about(**values | {"infos": {}}))
        interrupt_recording(tmp_path)
    (path,) = tmp_path.rglob("recording.json")
    index = json.loads(path.read_text())
    del index["about"]["infos"]
    path.write_text(rewritten(index))
    record_small(tmp_path, resume=True)
    assert load_histories(tmp_path).infos == {}
    assert load_histories(tmp_path).num_steps == 5 * 4 * 3 * 6


def test_command_prints_the_path_of_the_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["record", "dark-room", "--tasks", "3", "--iterations", "2", "--episodes", "2", "--num-workers", "0"]
    words += ["--learner-settings", "{clip: 0.1}", "--no-minari", "--output", str(tmp_path)]
    assert cli.main(words) == 0
    assert "maml_rl/darkroom/ppo-v0" in capsys.readouterr().out
    assert load_histories(tmp_path).num_steps == 3 * 2 * 2 * 20
    assert cli.main(words) == 2
    assert "holds a recording already; continue it with --resume" in capsys.readouterr().err


def test_settings_of_the_learner_replace_those_of_the_config_that_it_uses(tmp_path: Path) -> None:
    record(config_of(**DARK_ROOM, gamma=0.5, num_batches=4), tmp_path / "1", num_tasks=5, minari=False)
    record_small(tmp_path / "2", settings={"gamma": 0.5})
    assert content(tmp_path / "1") == content(tmp_path / "2")
    record_small(tmp_path / "3")
    assert content(tmp_path / "1") != content(tmp_path / "3")


def test_width_of_the_bounds_of_ucb1_is_a_setting(tmp_path: Path) -> None:
    bandit = config_of(env_name="Bandit-K5-v0", max_episode_steps=None, fast_batch_size=40, num_workers=0)
    for c in (0.2, 5.0):
        record(bandit, tmp_path / str(c), num_tasks=30, learner="ucb1", settings={"c": c}, minari=False)
    narrow, wide = (load_histories(tmp_path / str(c)).returns() for c in (0.2, 5.0))
    assert np.concatenate(narrow).mean() > np.concatenate(wide).mean() + 0.05


def test_missing_minari_is_one_line_before_anything_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ConfigError, match=r"needs the extra 'data' .*pip install 'maml-rl\[data\]'"):
        record_small(tmp_path, minari=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_segments")
def test_half_written_missing_and_several_data_sets_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no learning histories"):
        load_histories(tmp_path)
    interrupt_recording(tmp_path)
    with pytest.raises(ConfigError, match="is half-written, 1 of 4 iterations; finish it"):
        load_histories(tmp_path)
    with pytest.raises(ConfigError, match="is a recording with other tasks; resume it as it was begun"):
        record_small(tmp_path, resume=True, num_tasks=4)
    record_small(tmp_path, resume=True)
    record_small(tmp_path, learner="q-learning")
    with pytest.raises(ConfigError, match="holds 2 data sets of histories"):
        load_histories(tmp_path)


def rewritten(index: dict[str, Any]) -> str:
    """Return an index with its checksum, as a person who forges it would write it."""
    index = {key: value for key, value in index.items() if key != "sha256"}
    return json.dumps({**index, "sha256": hashlib.sha256(json.dumps(index).encode()).hexdigest()}) + "\n"


def forged_indexes(index: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield contents of `recording.json` that a recording never wrote, by what is wrong with them."""
    about, segments = index["about"], index["segments"]
    values: list[Any] = [None, -1, 1.5, True, "x", [], {}, [[]], "\x1b[2J", 10**30]
    for key in index:
        if key != "sha256":
            for value in values:
                if (key, value) != ("learner", None):
                    yield f"{key}: {value!r}", rewritten({**index, key: value})
            yield f"without {key}", rewritten({name: entry for name, entry in index.items() if name != key})
    harmless = [
        ("infos", {}),
        ("env_id", "x"),
        ("learner", "x"),
        ("env_kwargs", {}),
        ("settings", {}),
        ("horizon", 10**30),
    ]
    for key in about:
        for value in values:
            # More iterations than there are is a recording that is not finished; longer episodes may be.
            if (key, value) not in harmless:
                yield f"about.{key}: {value!r}", rewritten({**index, "about": {**about, key: value}})
        # Earlier versions recorded no infos.
        if key != "infos":
            yield f"without about.{key}", rewritten({**index, "about": {k: v for k, v in about.items() if k != key}})
    for infos in ({"success": "never"}, {"": "step"}, {"\x1b[2J": "step"}, {"success": "step"}, {"power": "episode"}):
        yield f"infos: {infos}", rewritten({**index, "about": {**about, "infos": infos}})
    for key in ("observation_space", "action_space"):
        for entry in about[key]:
            for value in [*values, 2**40, [10**9, 10**9]]:
                # Other bounds are another space.
                if entry not in ("low", "high") or not isinstance(value, int | float):
                    space = {**about[key], entry: value}
                    yield f"{key}.{entry}: {value!r}", rewritten({**index, "about": {**about, key: space}})
    for name in ("/dev/zero", "../../../etc/passwd", "..", "", "x.safetensors", f"../recording/{segments[0]['file']}"):
        yield f"file {name}", rewritten({**index, "segments": [{**segments[0], "file": name}, *segments[1:]]})
    for key, value in (("first", -1), ("first", 3), ("first", "0"), ("sha256", "0" * 64), ("size", 3), ("size", -1)):
        yield f"{key} {value}", rewritten({**index, "segments": [{**segments[0], key: value}, *segments[1:]]})
    yield "reversed", rewritten({**index, "segments": segments[::-1]})
    firsts = [segment["first"] for segment in segments[::-1]]
    relabeled = [{**segment, "first": first} for segment, first in zip(segments, firsts, strict=True)]
    yield "reversed labels", rewritten({**index, "segments": relabeled})
    yield "one twice", rewritten({**index, "segments": [segments[0], *segments]})
    yield "one too few", rewritten({**index, "segments": segments[1:]})
    yield "last missing", rewritten({**index, "segments": segments[:-1]})
    yield "more tasks", rewritten({**index, "about": {**about, "tasks": [*about["tasks"], about["tasks"][0]]}})
    text = json.dumps(index)
    yield "edited", text.replace('"horizon": 6', '"horizon": 7')
    yield "key twice", text[:-1] + ', "iteration": 4}'
    yield "NaN", text.replace('"horizon": 6', '"horizon": NaN')
    for name, other in (("nothing", ""), ("list", "[]"), ("deep", "[" * 100_000), ("truncated", text[:-9])):
        yield name, other


def one_line(folder: Path, name: str) -> None:
    """Expect that histories are refused in a printable line, which is as long as a line may be."""
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load_histories(folder)
    assert str(caught.value).isprintable(), name
    assert len(str(caught.value)) < 600, name


@pytest.mark.usefixtures("small_segments")
def test_every_forged_index_of_a_recording_is_one_line(tmp_path: Path) -> None:
    record_small(tmp_path)
    (path,) = tmp_path.rglob("recording.json")
    index = json.loads(path.read_text())
    assert path.read_text() == rewritten(index)
    assert len(load_histories(tmp_path)) == 5
    count = 0
    for name, text in forged_indexes(index):
        path.write_text(text)
        one_line(tmp_path, name)
        count += 1
    assert count > 200
    # Recordings of earlier versions have neither checksum nor sizes.
    earlier = {**index, "segments": [{k: v for k, v in each.items() if k != "size"} for each in index["segments"]]}
    path.write_text(json.dumps({key: value for key, value in earlier.items() if key != "sha256"}))
    assert len(load_histories(tmp_path)) == 5


def forged_arrays(arrays: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield arrays that no segment of the recording holds, by what is wrong with them."""
    for name, values in arrays.items():
        yield f"without {name}", {key: value for key, value in arrays.items() if key != name}
        for changed in (values[1:], np.concatenate([values, values[:1]]), values[..., None], np.float64(values)):
            # An observation that never occurs is harmless.
            if changed.dtype != values.dtype or changed.shape[0] <= len(values) or not name.endswith("distinct"):
                yield f"{name} {changed.dtype} {changed.shape}", {**arrays, name: np.ascontiguousarray(changed)}
    for name, value in (
        ("0 lengths", 0),
        ("0 lengths", -5),
        ("0 lengths", 7),
        ("0 actions", 5),
        ("0 rewards", np.nan),
        ("0 rewards", np.inf),
        ("0 observations", 60_000),
        ("0 final_observations", 60_000),
    ):
        changed = arrays[name].copy()
        changed.flat[0] = value
        yield f"{name} of {value}", {**arrays, name: changed}


def test_every_segment_that_does_not_fit_its_recording_is_one_line(tmp_path: Path) -> None:
    """Its size and its hash are right: the forger has computed them."""
    folder = record_small(tmp_path).folder / "recording"
    index = json.loads((folder / "recording.json").read_text())
    (path,) = folder.glob("*.safetensors")
    arrays = arrays_from_file(path)
    assert "0 distinct" in arrays
    count = 0
    for name, forged in forged_arrays(arrays):
        segment = write_segment(folder, 0, arrays_to_bytes(forged))
        (folder / "recording.json").write_text(rewritten({**index, "segments": [segment.model_dump()]}))
        one_line(tmp_path, name)
        count += 1
    assert count > 100


@pytest.mark.usefixtures("small_segments")
def test_resumed_recording_refuses_learners_of_another_recording(tmp_path: Path) -> None:
    interrupt_recording(tmp_path, after=2)
    (path,) = tmp_path.rglob("recording.json")
    index = json.loads(path.read_text())
    state = arrays_from_file(path.parent / index["learner"]["file"])
    for name in state:
        forged = {key: value for key, value in state.items() if key != name}
        for arrays in (forged, {**state, name: np.zeros((3, 3, 3), np.float32)}):
            segment = write_segment(path.parent, 2, arrays_to_bytes(arrays))
            path.write_text(rewritten({**index, "learner": segment.model_dump()}))
            with pytest.raises(CheckpointError, match="do not fit"):
                record_small(tmp_path, resume=True)


RECORD = ["record", "dark-room", "--episodes", "2", "--iterations", "1", "--num-workers", "0", "--no-minari"]


def test_update_that_fails_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SingleTaskPPO, "update", lambda *_: sys.exit(0))
    assert cli.main([*RECORD, "--tasks", "2", "--output", str(tmp_path / "h")]) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error:" in line)
    assert "the update of ppo in iteration 0 fails" in line
    assert not list(tmp_path.iterdir())


def test_two_processes_never_record_into_one_folder(tmp_path: Path) -> None:
    folder = record_small(tmp_path).folder / "recording"
    before = content(tmp_path)
    lock = lock_folder(folder, "recording")
    try:
        with pytest.raises(ConfigError, match=f"another process is recording in {folder}; end it"):
            record_small(tmp_path, resume=True)
    finally:
        os.close(lock)
    assert content(tmp_path) == before
    # What a recording that was killed before it had an index has left is removed.
    (folder / "recording.json").rename(folder / ".unfinished-7-recording.json")
    record_small(tmp_path, resume=True)
    assert content(tmp_path) == before


def test_probe_is_removed_even_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        check_creatable(tmp_path / "new" / "folder", "--output")
    assert not list(tmp_path.iterdir())
