import io
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from PIL import Image

from maml_rl.envs.mujoco import rendering
from maml_rl.report import videos
from maml_rl.report.evaluations import SampledEvaluation, evaluate_group
from maml_rl.report.runs import read_runs


def moving_square(count: int, size: int = 64) -> np.ndarray:
    frames = np.zeros((count, size, size, 3), np.uint8)
    for index in range(count):
        frames[index, 16:48, index : index + 32] = (255, 40, 40)
    return frames


@pytest.fixture(scope="module")
def cheetah_episodes(cheetah_run: Path) -> SampledEvaluation:
    (group,), _ = read_runs([cheetah_run])
    result, _ = evaluate_group(group, num_tasks=3, num_workers=0)
    assert result.sampled is not None
    return result.sampled


def test_h264_holds_every_frame_up_to_compression() -> None:
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    frames = moving_square(20)
    data = videos.encode_h264(frames, fps=20)
    assert len(data) < frames.nbytes / 20
    decode = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-loglevel",
        "error",
        "-i",
        "-",
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-",
    ]
    decoded = subprocess.run(decode, input=data, capture_output=True, check=True, timeout=60).stdout
    again = np.frombuffer(decoded, np.uint8).reshape(-1, 64, 64, 3)
    assert again.shape == frames.shape
    assert np.abs(again.astype(int) - frames.astype(int)).mean() < 8


def test_webp_holds_every_frame_at_the_right_speed() -> None:
    picture = Image.open(io.BytesIO(videos.encode_webp(moving_square(7), fps=20)))
    assert (picture.format, picture.n_frames, picture.size) == ("WEBP", 7, (64, 64))
    picture.seek(1)
    picture.load()
    assert picture.info["duration"] == 50


def test_wide_frames_are_scaled_to_the_page() -> None:
    picture = Image.open(io.BytesIO(videos.encode_webp(np.zeros((2, 100, 1000, 3), np.uint8), fps=20)))
    assert picture.size == (640, 64)


def test_shorter_film_waits_on_its_last_picture_darker() -> None:
    left, right = np.full((2, 4, 4, 3), 100, np.uint8), np.full((5, 4, 4, 3), 200, np.uint8)
    both = videos.side_by_side(left, right)
    assert both.shape == (5, 4, 8, 3)
    assert [int(frame[0, 0, 0]) for frame in both] == [100, 100, 55, 55, 55]
    assert (both[:, :, 4:] == 200).all()


def test_replay_draws_the_sampled_episode(cheetah_episodes: SampledEvaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering.Renderer, "__init__", lambda self, model: None)
    monkeypatch.setattr(rendering.Renderer, "close", lambda self: None)
    drawn: list[np.ndarray] = []

    def draw(self: object, qpos: np.ndarray) -> np.ndarray:
        drawn.append(qpos.copy())
        return np.zeros((8, 8, 3), np.uint8)

    monkeypatch.setattr(rendering.Renderer, "draw", draw)
    last = len(cheetah_episodes.phases) - 1
    frames, fps = videos.replay(cheetah_episodes, last, 1)
    episodes, episode = cheetah_episodes.phases[last], cheetah_episodes.median_episode(last, 1)
    assert (len(frames), fps) == (13, 20)
    # Observations are the joints from the second on; the last picture is the final state.
    seen = np.concatenate([episodes.observations[1, :, episode, :8], episodes.final_observations[1, episode, None, :8]])
    np.testing.assert_array_equal(np.array(drawn)[:, 1:].astype(np.float32), seen)


@pytest.fixture
def cheap_pictures(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Draw empty pictures without OpenGL; returns a function that counts them."""
    count = 0

    def draw(self: object, qpos: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        return np.zeros((8, 8, 3), np.uint8)

    monkeypatch.setattr(rendering.Renderer, "__init__", lambda self, model: None)
    monkeypatch.setattr(rendering.Renderer, "close", lambda self: None)
    monkeypatch.setattr(rendering.Renderer, "draw", draw)
    return lambda: count


def test_long_episode_is_drawn_in_fewer_pictures_and_takes_as_long(
    cheetah_episodes: SampledEvaluation, cheap_pictures: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "_MOST_PICTURES", 5)
    frames, fps = videos.replay(cheetah_episodes, 0, 0)
    assert len(frames) == cheap_pictures() == 5
    assert fps == 7


def test_environment_that_is_not_reproducible_has_no_video(
    cheetah_episodes: SampledEvaluation, cheap_pictures: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SampledEvaluation, "episode_seed", lambda self, phase, task, episode: 0)
    picture, (notice,) = videos.videos(cheetah_episodes, 1)
    assert picture is None
    assert "does not repeat an episode" in notice


def test_machine_that_cannot_draw_gets_a_sentence(
    cheetah_episodes: SampledEvaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_opengl(self: object, model: Any) -> None:
        raise gymnasium.error.DependencyNotInstalled("cannot draw: no usable OpenGL; set MUJOCO_GL")

    monkeypatch.setattr(rendering.Renderer, "__init__", no_opengl)
    monkeypatch.setattr(rendering.Renderer, "close", lambda self: None)
    picture, notices = videos.videos(cheetah_episodes, 2)
    assert picture is None
    assert notices == ["There are no videos: cannot draw: no usable OpenGL; set MUJOCO_GL."]


def test_without_an_encoder_the_videos_are_animated_pictures(
    cheetah_episodes: SampledEvaluation, cheap_pictures: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "_has_encoder", lambda: False)
    picture, (notice,) = videos.videos(cheetah_episodes, 1)
    assert picture is not None
    assert 'src="data:image/webp;base64,' in picture
    assert "pip install 'maml-rl[report]'" in notice


def test_no_video_is_made_without_request_or_where_the_family_has_paths(
    navigation_runs: Path, cheetah_episodes: SampledEvaluation
) -> None:
    (group,), _ = read_runs([navigation_runs / "seed-0"])
    result, _ = evaluate_group(group, num_tasks=1, num_workers=0)
    assert result.sampled is not None
    assert videos.videos(result.sampled, 2) == (None, [])
    assert videos.videos(cheetah_episodes, 0) == (None, [])
