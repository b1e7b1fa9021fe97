"""A replay compared with a list of trials: in memory, in a mapped file, and after loading segments from disk."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save as tensors_to_bytes

from maml_rl.config import Config
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.episode import TaskEpisodes
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.experience import Replay, Steps, replay_segments
from maml_rl.experience.replay_segments import Mark
from maml_rl.experiment.build import make_experiment
from maml_rl.runs.segments import write_segment


class Trial(NamedTuple):
    """A trial, step by step, and its task."""

    task: Any
    steps: list[Any]


def make_batch(rng: np.random.Generator, num_tasks: int = 3, num_episodes: int = 2) -> TaskEpisodes:
    """Episodes of different lengths, with no number twice; tasks repeat from batch to batch."""
    lengths = rng.integers(1, 6, size=(num_tasks, num_episodes))
    steps = int(lengths.max())
    terminated = rng.random((num_tasks, num_episodes)) < 0.5
    grid = num_tasks, steps, num_episodes
    return TaskEpisodes(
        rng.standard_normal((*grid, 2)).astype(np.float32),
        rng.integers(4, size=grid),
        rng.standard_normal(grid).astype(np.float32),
        lengths,
        terminated,
        ~terminated,
        rng.standard_normal((num_tasks, num_episodes, 2)).astype(np.float32),
        infos={"sparse": rng.standard_normal(grid), "success": rng.standard_normal((num_tasks, num_episodes))},
        tasks=[{"goal": np.array([int(number), 1.5])} for number in rng.integers(5, size=num_tasks)],
    )


def attached(capacity: int, folder: Path) -> Replay:
    """Return a replay that writes to a folder."""
    replay = Replay(capacity)
    replay.attach(folder)
    return replay


def trials_of(episodes: TaskEpisodes) -> list[Trial]:
    """Return the trials of each task, found by plain loops over the episodes."""
    trials = []
    for each in episodes:
        assert each.task is not None
        steps = []
        for episode in range(each.batch_size):
            length = int(each.lengths[episode])
            for step in range(length):
                is_last = step == length - 1
                following = each.final_observations[episode] if is_last else each.observations[step + 1, episode]
                steps.append(
                    (
                        *each.observations[step, episode].tolist(),
                        int(each.actions[step, episode]),
                        float(each.rewards[step, episode]),
                        *following.tolist(),
                        bool(each.terminated[episode]) and is_last,
                        bool(each.truncated[episode]) and is_last,
                        float(each.infos["sparse"][step, episode]),
                    )
                )
        trials.append(Trial({"goal": each.task["goal"].tolist()}, steps))
    return trials


def newest(trials: list[Trial], capacity: int) -> list[Trial]:
    """Return the newest trials that fit."""
    total, kept = 0, []
    for trial in reversed(trials):
        total += len(trial.steps)
        if total > capacity:
            break
        kept.append(trial)
    return kept[::-1]


def steps_of(steps: Steps) -> list[tuple[Any, ...]]:
    """Return the real steps, sequence by sequence."""
    lead = steps.mask.dim()
    fields = (
        steps.observations,
        steps.actions.unsqueeze(-1),
        steps.rewards.unsqueeze(-1),
        steps.next_observations,
        steps.terminations.unsqueeze(-1),
        steps.truncations.unsqueeze(-1),
        steps.infos["sparse"].unsqueeze(-1),
    )
    rows = zip(*(field.transpose(0, lead - 1).flatten(0, lead - 1).tolist() for field in fields), strict=True)
    real = steps.mask.transpose(0, lead - 1).flatten().bool().tolist()
    return [
        tuple(number for part in row for number in part) for row, is_real in zip(rows, real, strict=True) if is_real
    ]


def all_steps(replay: Replay, tasks: list[dict[str, Any]] | None = None) -> set[tuple[Any, ...]]:
    """Return the steps that many draws find."""
    return set(steps_of(replay.sample_transitions(np.random.default_rng(0), 700, tasks=tasks)))


def content(replay: Replay) -> list[Any]:
    """Return the results of the same draws."""
    rng = np.random.default_rng(5)
    drawn = [replay.sample_sequences(rng, 20), replay.sample_sequences(rng, 5, length=3, tasks=replay.tasks)]
    drawn.append(replay.sample_transitions(rng, 30))
    drawn.append(replay.sample_transitions(rng, 7, tasks=replay.tasks[::-1], newest=2))
    return [steps_of(each) for each in drawn]


@pytest.mark.parametrize("memory_bytes", [None, 1])
def test_replay_keeps_the_newest_whole_trials_that_fit(memory_bytes: int | None) -> None:
    rng, replay, trials = np.random.default_rng(1), Replay(60, memory_bytes=memory_bytes), []
    for number in range(12):
        episodes = make_batch(rng)
        replay.append(episodes)
        trials += trials_of(episodes)
        kept = newest(trials, 60)
        assert (replay.num_trials, replay.num_steps) == (len(kept), sum(len(trial.steps) for trial in kept))
        assert replay.num_appended == len(trials)
        assert all_steps(replay) == {step for trial in kept for step in trial.steps}
        assert replay.tasks == list({trial.task["goal"][0]: trial.task for trial in kept}.values())
        # One of the tasks, a different one each time, and all in the end.
        for task in replay.tasks if number == 11 else replay.tasks[number % len(replay.tasks) :][:1]:
            of_task = [trial for trial in kept if trial.task == task]
            assert all_steps(replay, [task]) == {step for trial in of_task for step in trial.steps}
    assert replay._steps.is_mapped is (memory_bytes is not None)


def test_sequences_are_whole_trials_and_padding_is_zero() -> None:
    rng, replay = np.random.default_rng(2), Replay(10_000)
    episodes = make_batch(rng, num_tasks=40)
    replay.append(episodes)
    sequences = replay.sample_sequences(np.random.default_rng(0), 500)
    assert sequences.mask.shape == (max(len(trial.steps) for trial in trials_of(episodes)), 500)
    whole = {tuple(trial.steps) for trial in trials_of(episodes)}
    drawn = set()
    for number in range(500):
        one = sequences.map(lambda values, number=number: values[:, number : number + 1])
        drawn.add(tuple(steps_of(one)))
        padding = one.mask == 0.0
        assert (one.mask[1:] <= one.mask[:-1]).all()
        padded = one.observations, one.actions, one.rewards, one.next_observations, one.infos["sparse"], one.truncations
        assert not any(values[padding].any() for values in padded)
    assert drawn == whole


def test_normalized_rewards_are_those_over_the_mean_square_of_the_family(tmp_path: Path) -> None:
    """Of the kept trials alone, also after a resume; a family without a reward keeps its zeros."""
    rng, replay, trials = np.random.default_rng(3), attached(60, tmp_path), []
    scales = {"small": 1.0, "large": 1000.0, "none": 0.0}
    for number in range(7):
        episodes = make_batch(rng, num_tasks=2, num_episodes=3)
        names = [("small", "large", "none")[each] for each in rng.integers(3, size=2)] if number else ["none"] * 2
        rewards = episodes.rewards.mul_(torch.tensor([scales[name] for name in names])[:, None, None])
        for name, task in zip(names, episodes.tasks, strict=True):
            task["family"] = name
        replay.append(episodes)
        trials += [
            Trial(name, rewards[index].mT[episodes.mask[index].mT.bool()].tolist()) for index, name in enumerate(names)
        ]
    kept = newest(trials, 60)
    assert len({trial.task for trial in kept}) >= 2
    expected = set()
    for name, own in kept:
        all_own = [reward for other, others in kept if other == name for reward in others]
        scale = math.sqrt(sum(reward**2 for reward in all_own) / len(all_own)) or 1.0
        expected |= {tuple(round(reward / scale, 4) + 0.0 for reward in own)}
    drawn, again = (
        each.sample_sequences(np.random.default_rng(0), 200, normalize=True)
        for each in (replay, save_and_load(replay, replay.mark(), tmp_path))
    )
    lengths = drawn.mask.sum(0).int().tolist()
    rewards = [own[:length] for own, length in zip(drawn.rewards.mT.tolist(), lengths, strict=True)]
    assert {tuple(round(reward, 4) + 0.0 for reward in own) for own in rewards} == expected
    assert torch.equal(drawn.rewards, again.rewards)


def test_windows_begin_at_every_step_where_they_fit() -> None:
    rng, replay = np.random.default_rng(2), Replay(10_000)
    episodes = make_batch(rng, num_tasks=2)
    replay.append(episodes)
    windows = replay.sample_sequences(np.random.default_rng(0), 800, length=3)
    assert windows.mask.shape == (3, 800)
    lengths = windows.mask.sum(0).int().tolist()
    found = {tuple(own[:length]) for own, length in zip(windows.rewards.mT.tolist(), lengths, strict=True)}
    expected = set()
    for trial in trials_of(episodes):
        rewards = [step[3] for step in trial.steps]
        expected |= {tuple(rewards[first : first + 3]) for first in range(max(1, len(rewards) - 2))}
    assert found == expected


@pytest.mark.parametrize("length", [1, 3, 6])
def test_window_of_a_trial_ends_where_the_trial_goes_on(length: int) -> None:
    """Through the ends of episodes: what follows a window is what the trial shows next."""
    rng, replay = np.random.default_rng(4), Replay(60)
    # The last batch wraps around the end of the arrays.
    for _ in range(7):
        episodes = make_batch(rng, num_episodes=3)
        replay.append(episodes)
    whole = replay.sample_sequences(rng, 200)
    places, ends = {}, {}
    shown, terminal = whole.with_end(), whole.terminal_ends()
    for trial, steps in enumerate(whole.mask.sum(0).long().tolist()):
        for step in range(steps):
            places[whole.rewards[step, trial].item()] = shown[step + 1, trial].tolist()
            ends[whole.rewards[step, trial].item()] = terminal[step, trial].item()
    windows = replay.sample_sequences(rng, 400, length=length)
    seen, cut = windows.with_end(), windows.terminal_ends()
    assert 0 < sum(ends.values()) < len(ends)
    for number, steps in enumerate(windows.mask.sum(0).long().tolist()):
        for step in range(steps):
            reward = windows.rewards[step, number].item()
            assert seen[step + 1, number].tolist() == places[reward]
            assert cut[step, number] == ends[reward]


def test_rewarded_sequences_hold_the_first_reward_of_a_trial() -> None:
    """Trial k of 5 steps has rewards k from step k on, trial 0 none; some trials are dropped, and the others move."""
    replay, ends = Replay(25), np.ones((1, 1), bool)
    numbers = np.arange(5, dtype=np.float32).reshape(1, 5, 1)
    for trial in (2, 4, 0, 0, 3, 1, 0):
        rewards = np.where((numbers >= trial) & (trial > 0), np.float32(trial), np.float32(0.0))
        replay.append(TaskEpisodes(numbers, numbers, rewards, np.full((1, 1), 5), ends, ~ends, numbers[:, 0]))
    whole = replay.sample_sequences(np.random.default_rng(0), 90, rewarded=60)
    assert set(whole.rewards[:, :60].amax(0).tolist()) == {1.0, 3.0}
    assert 0.0 in whole.rewards[:, 60:].amax(0).tolist()
    windows = replay.sample_sequences(np.random.default_rng(0), 90, length=2, rewarded=60)
    drawn = list(zip(windows.observations[0].tolist(), *windows.rewards.tolist(), strict=True))
    found, others = set(drawn[:60]), set(drawn[60:])
    assert found == {(0, 0.0, 1.0), (1, 1.0, 1.0), (2, 0.0, 3.0), (3, 3.0, 3.0)}
    assert (0.0, 0.0, 0.0) in others
    empty = Replay(5)
    empty.append(TaskEpisodes(numbers, numbers, 0.0 * numbers, np.full((1, 1), 5), ends, ~ends, numbers[:, 0]))
    assert not empty.sample_sequences(np.random.default_rng(0), 3, rewarded=3).rewards.any()


def test_transitions_are_uniform_over_steps_not_trials() -> None:
    replay, counts = Replay(1000), {1: 0, 9: 0}
    for length in counts:
        shape = 1, length, 1
        values = np.full(shape, length, np.float32)
        ends = np.ones((1, 1), bool)
        replay.append(TaskEpisodes(values, values, values, np.full((1, 1), length), ends, ~ends, values[:, 0]))
    rewards = replay.sample_transitions(np.random.default_rng(0), 20_000).rewards
    assert abs(float((rewards == 9).double().mean()) - 0.9) < 0.01


def test_context_is_drawn_from_the_newest_trials_of_each_task() -> None:
    rng, replay, trials = np.random.default_rng(3), Replay(10_000), []
    for _ in range(6):
        episodes = make_batch(rng)
        replay.append(episodes)
        trials += trials_of(episodes)
    of_slots = Replay(1000)
    of_slots.append(episodes, slots_per_task=2)
    assert (of_slots.num_trials, of_slots.num_steps) == (6, episodes.num_steps)
    context = replay.sample_transitions(np.random.default_rng(0), 500, tasks=replay.tasks, newest=2)
    assert context.observations.shape == (len(replay.tasks), 500, 2)
    for task, rewards in zip(replay.tasks, context.rewards, strict=True):
        last = [trial for trial in trials if trial.task == task][-2:]
        assert set(rewards.tolist()) == {step[3] for trial in last for step in trial.steps}


def test_batch_larger_than_the_replay_leaves_its_newest_trials(tmp_path: Path) -> None:
    rng, replay, trials = np.random.default_rng(4), attached(20, tmp_path), []
    for num_tasks in (2, 20, 1, 30):
        episodes = make_batch(rng, num_tasks=num_tasks)
        replay.append(episodes)
        trials += trials_of(episodes)
        assert all_steps(replay) == {step for trial in newest(trials, 20) for step in trial.steps}
        assert content(save_and_load(replay, replay.mark(), tmp_path)) == content(replay)


def save_and_load(replay: Replay, mark: Mark, folder: Path) -> Replay:
    other = attached(replay.capacity, folder)
    other.load(json.loads(json.dumps(replay.save(mark))))
    return other


@pytest.mark.parametrize(("segment_bytes", "capacity"), [(1, 40), (700, 150), (2**20, 150)])
def test_replay_killed_and_resumed_at_any_time_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int, capacity: int
) -> None:
    monkeypatch.setattr(replay_segments, "SEGMENT_BYTES", segment_bytes)
    batches = [make_batch(np.random.default_rng(number)) for number in range(24)]
    undisturbed = attached(capacity, tmp_path / "undisturbed")
    disturbed = attached(capacity, tmp_path / "disturbed")
    chance = np.random.default_rng(7)
    mark = disturbed.mark()
    assert disturbed.save(mark)["segments"] == []
    for number, batch in enumerate(batches):
        # Interrupted during the iteration: files written after the checkpoint do not belong to it.
        if number == 0 or chance.random() < 0.3:
            disturbed.append(batch)
            disturbed = save_and_load(disturbed, mark, tmp_path / "disturbed")
        undisturbed.append(batch)
        disturbed.append(batch)
        mark = disturbed.mark()
        if chance.random() < 0.3:
            disturbed = save_and_load(disturbed, mark, tmp_path / "disturbed")
        assert content(disturbed) == content(undisturbed)
    # Even the division into segments does not depend on when they were written.
    assert disturbed.save(mark) == undisturbed.save(undisturbed.mark())


def test_checkpoint_writes_only_new_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_segments, "SEGMENT_BYTES", 2_000)
    replay, rng, written = attached(100_000, tmp_path), np.random.default_rng(0), []
    known: set[str] = set()
    for _ in range(200):
        replay.append(make_batch(rng))
        state = replay.save(replay.mark())
        files = {segment["file"] for segment in state["segments"]}
        written.append(sum((tmp_path / name).stat().st_size for name in files - known))
        known |= files
    assert max(written[-20:]) <= max(written[:40]), "later checkpoints cost more than early ones"
    assert len(state["segments"]) > 20


def test_damaged_segment_is_found_and_named(tmp_path: Path) -> None:
    replay = attached(100, tmp_path)
    replay.append(make_batch(np.random.default_rng(0)))
    state = replay.save(replay.mark())
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"the experience {path}.*; put the file back, or train again") as error:
        save_and_load(replay, Mark(state["first"], state["next"]), tmp_path)
    assert "\n" not in str(error.value)


def refuse(*arguments: Any) -> int:
    raise OSError(28, os.strerror(28))


def append_many(replay: Replay) -> None:
    for number in range(9):
        replay.append(make_batch(np.random.default_rng(number)))


def test_full_disk_is_an_error_before_a_trial_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = attached(30, tmp_path / "experience")
    replay.append(make_batch(np.random.default_rng(0)))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        with pytest.raises(CheckpointError, match=r"No space left on device; checkpoints are as they were: make room"):
            replay.save(replay.mark())
        with pytest.raises(CheckpointError, match=r"No space left on device"):
            append_many(replay)
    assert not [path for path in (tmp_path / "experience").rglob("*") if path.is_file()]
    assert content(save_and_load(replay, replay.mark(), tmp_path / "experience")) == content(replay)


def test_wrong_use_is_one_clear_error() -> None:
    replay, rng = Replay(100), np.random.default_rng(0)
    with pytest.raises(ValueError, match="the replay buffer is empty; append trials before drawing from it"):
        replay.sample_transitions(rng, 1)
    with pytest.raises(ValueError, match="capacity must be an integer of at least 1, got 0"):
        Replay(0)
    episodes = make_batch(rng)
    longest = max(len(trial.steps) for trial in trials_of(episodes))
    small = Replay(longest - 1)
    told = rf"the replay buffer holds {longest - 1} steps, and a trial has {longest}; give it"
    with pytest.raises(ValueError, match=told):
        small.append(episodes)
    assert small.num_trials == 0
    replay.append(episodes)
    with pytest.raises(ValueError, match=r'the replay buffer has no trials of the task \{"goal": 3\}; append some'):
        replay.sample_sequences(rng, 1, tasks=[{"goal": 3}])
    del episodes.infos["sparse"]
    with pytest.raises(
        ValueError, match=r"the replay buffer keeps 'info sparse' as float32 .*, and these episodes .* nothing"
    ):
        replay.append(episodes)


def test_mapped_file_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    replay = Replay(1_000_000, memory_bytes=1)
    replay.attach(tmp_path)
    with pytest.raises(ConfigError, match=rf"needs a file of 0.0 GiB in {tmp_path}: No space left on device; keep"):
        replay.append(make_batch(np.random.default_rng(0)))


def forged_states(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield states that no replay buffer has returned, by what is wrong with them."""
    segment = state["segments"][0]
    values: list[Any] = [None, -5, 1.5, "x", [], {}, [[]], 10**30]
    for value in values:
        if value != {}:
            yield f"{value!r}", value
        for key in state:
            yield f"{key}: {value!r}", {**state, key: value}
        for key in segment:
            # Earlier versions wrote no size.
            if (key, value) not in (("size", None), ("size", 10**30)):
                yield f"segment.{key}: {value!r}", {**state, "segments": [{**segment, key: value}]}
    for key in state:
        yield f"without {key}", {name: value for name, value in state.items() if name != key}
    for name in ("/dev/zero", "../../etc/passwd", "..", "", "x.safetensors", f"../{segment['file']}"):
        yield f"file {name}", {**state, "segments": [{**segment, "file": name}]}
    yield "twice", {**state, "segments": [segment, segment]}
    yield "later", {**state, "next": state["next"] + 1}
    yield "unknown", {**state, "env_steps": 3}


def forged_trials(tensors: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield tensors that no segment holds, by what is wrong with them."""
    for name, values in tensors.items():
        if name != "info sparse":
            yield f"without {name}", {key: value for key, value in tensors.items() if key != name}
        for changed in (values[1:], torch.cat([values, values[:1]]), values[..., None], values[:0]):
            if changed.dim() == values.dim() or name not in ("actions",):
                yield f"{name} {tuple(changed.shape)}", {**tensors, name: changed.contiguous()}
        if values.dtype is torch.float32:
            yield f"{name} of NaN", {**tensors, name: torch.full_like(values, torch.nan)}
        if name not in ("actions", "observations", "next_observations"):
            yield f"{name} of another type", {**tensors, name: values.to(torch.float16)}
    for name in ("lengths of trials", "tasks of trials"):
        for value in (-1, 0, 2**62):
            if (name, value) != ("tasks of trials", 0):
                yield f"{name} of {value}", {**tensors, name: torch.full_like(tensors[name], value)}
    yield "an unknown field", {**tensors, "secret": tensors["rewards"].clone()}


def test_every_forged_state_and_segment_is_one_line(tmp_path: Path) -> None:
    """Sizes and hashes are right: the forger has computed them."""
    replay = attached(100, tmp_path)
    replay.append(make_batch(np.random.default_rng(0)))
    state = replay.save(replay.mark())
    earlier = attached(100, tmp_path)
    # An earlier version wrote no sizes.
    earlier.load({**state, "segments": [{k: v for k, v in each.items() if k != "size"} for each in state["segments"]]})
    assert str(content(earlier)) == str(content(replay))
    (path,) = tmp_path.iterdir()
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    texts = ["[", "{}", "[1]", '["{"]', "[]", json.dumps(["[" * 100_000] * 9)]
    metadatas = [None, {}, *({"tasks of trials": text} for text in texts)]
    segments = [*forged_trials(tensors), *((f"{each}"[:80], tensors) for each in metadatas)]
    known = [metadata] * (len(segments) - len(metadatas)) + metadatas
    forged = list(forged_states(state))
    for (name, changed), about in zip(segments, known, strict=True):
        segment = write_segment(tmp_path, 0, tensors_to_bytes(changed, about))
        forged.append((name, {**state, "segments": [segment.model_dump()]}))
    assert len(forged) > 100
    for name, changed in forged:
        loaded = attached(100, tmp_path)
        with pytest.raises(CheckpointError) as caught:
            loaded.load(changed)
        assert str(caught.value).isprintable(), name
        assert len(str(caught.value)) < 500, name


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("rsac", {"buffer-steps": 2**25, "mapped-bytes": 2**31 - 1}), ("varibad", {"replay-steps": 2**26})],
)
def test_replay_that_does_not_fit_into_memory_is_refused_before_anything_is_sampled(
    algorithm: str, settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maml_rl.machine.total_memory", lambda: 2**30)
    values: dict[str, Any] = {"env-name": "SemiCircle-v0", "observe-last": algorithm != "pearl", "algorithm": algorithm}
    config = Config.from_mapping(parse_mapping(json.dumps({**values, "algorithm-settings": settings}), "x.yaml"))
    with pytest.raises(ConfigError, match=rf"'algorithm' in x.yaml.*the replay buffers of {algorithm}, of .* steps,"):
        make_experiment(config)


def test_steps_drawn_from_a_copy_on_a_device_are_those_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, rng = Replay(40), np.random.default_rng(0)
    batches = [make_batch(rng) for _ in range(8)]
    plain.append(batches[0])
    monkeypatch.setattr("maml_rl.experience.replay._COPIED_TO", ("cpu",))
    copied = Replay(40)
    # Past the end of the buffer, too.
    for number, batch in enumerate(batches):
        if number:
            plain.append(batch)
        copied.append(batch)
        for draw in (Replay.sample_sequences, Replay.sample_transitions):
            one, other = (draw(replay, np.random.default_rng(1), 9).tensors().values() for replay in (plain, copied))
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    assert copied._steps.copies
    assert not plain._steps.copies
