import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from PIL import Image

from maml_rl.cli.main import main
from maml_rl.envs.mujoco import rendering
from maml_rl.report import videos
from maml_rl.results.evaluation import SampledEvaluation
from tests.lamp_env import LampEnv
from tests.report.conftest import NAVIGATION, make_run, measured


def moving_square(count: int, size: int = 64) -> np.ndarray:
    frames = np.zeros((count, size, size, 3), np.uint8)
    for index in range(count):
        frames[index, 16:48, index : index + 32] = (255, 40, 40)
    return frames


@pytest.fixture(scope="module")
def cheetah_episodes(cheetah_run: Path) -> SampledEvaluation:
    (result,), _ = measured([cheetah_run], 3)
    assert result.sampled is not None
    return result.sampled


def test_h264_holds_every_frame_up_to_compression() -> None:
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    frames = moving_square(20)
    data = videos.encode_h264(frames, fps=20)
    assert len(data) < frames.nbytes / 20
    decode = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        *["-loglevel", "error", "-i", "-", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
    ]
    decoded = subprocess.run(decode, input=data, capture_output=True, check=True, timeout=60).stdout
    again = np.frombuffer(decoded, np.uint8).reshape(-1, 64, 64, 3)
    assert again.shape == frames.shape
    assert np.abs(again.astype(int) - frames.astype(int)).mean() < 8


def test_webp_holds_every_frame_at_the_right_speed() -> None:
    picture = Image.open(io.BytesIO(videos.encode_animation(moving_square(7), fps=20)))
    assert (picture.format, picture.n_frames, picture.size) == ("WEBP", 7, (64, 64))
    picture.seek(1)
    picture.load()
    assert picture.info["duration"] == 50
    wide = Image.open(io.BytesIO(videos.encode_animation(np.zeros((2, 100, 1000, 3), np.uint8), fps=20)))
    assert wide.size == (640, 64), "scaled to the page"


def test_shorter_film_waits_on_its_last_picture() -> None:
    left, right = np.full((2, 4, 4, 3), 100, np.uint8), np.full((5, 4, 4, 3), 200, np.uint8)
    both = videos.side_by_side(left, right)
    assert both.shape == (5, 4, 8, 3)
    assert [int(frame[0, 0, 0]) for frame in both] == [100] * 5
    assert (both[:, :, 4:] == 200).all()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Draw empty pictures without OpenGL; returns the joints of each."""
    joints: list[np.ndarray] = []

    def draw(self: object, qpos: np.ndarray) -> np.ndarray:
        joints.append(qpos.copy())
        return np.zeros((8, 8, 3), np.uint8)

    monkeypatch.setattr(rendering.Renderer, "__init__", lambda self, model: None)
    monkeypatch.setattr(rendering.Renderer, "close", lambda self: None)
    monkeypatch.setattr(rendering.Renderer, "draw", draw)
    return joints


def test_replay_draws_the_sampled_episode(cheetah_episodes: SampledEvaluation, drawn: list[np.ndarray]) -> None:
    last = len(cheetah_episodes.phases) - 1
    frames, fps = videos.replay(cheetah_episodes, last, 1)
    episodes, episode = cheetah_episodes.phases[last], cheetah_episodes.median_episode(last, 1)
    assert (len(frames), fps) == (13, 20)
    # Observations are the joints from the second on; the last picture is the final state.
    seen = np.concatenate([episodes.observations[1, :, episode, :8], episodes.final_observations[1, episode, None, :8]])
    np.testing.assert_array_equal(np.array(drawn)[:, 1:].astype(np.float32), seen)


def test_long_episode_is_drawn_in_fewer_pictures_and_takes_as_long(
    cheetah_episodes: SampledEvaluation, drawn: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "_MOST_PICTURES", 5)
    frames, fps = videos.replay(cheetah_episodes, 0, 0)
    assert len(frames) == len(drawn) == 5
    assert fps == 7


@pytest.mark.usefixtures("drawn")
def test_environment_that_is_not_reproducible_has_no_video(
    cheetah_episodes: SampledEvaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SampledEvaluation, "episode_seed", lambda self, phase, task, episode: 0)
    picture, (notice,) = videos.videos(cheetah_episodes, 1)
    assert picture is None
    assert "does not repeat an episode" in notice


HORIZON = 5
PIXELS = np.arange(8 * 6 * 3).reshape(8, 6, 3).astype(np.uint8)


def fail(error: BaseException) -> Any:
    raise error


# By name: what rendering returns at a call, of which there have been so many before.
RENDERED: dict[str, Callable[[int], Any]] = {
    "rgb": lambda calls: PIXELS,
    "nothing": lambda calls: None,
    "exit": lambda calls: sys.exit(0),
    "error": lambda calls: fail(RuntimeError("no\ndisplay")),
    "text": lambda calls: "a picture",
    "empty": lambda calls: PIXELS[:0],
    "list": lambda calls: [PIXELS],
    "channels": lambda calls: PIXELS.repeat(2, 2),
    "NaN": lambda calls: PIXELS * np.nan,
    "floats beyond 1": lambda calls: PIXELS.astype(float),
    "negative": lambda calls: PIXELS.astype(int) - 9,
    "huge": lambda calls: np.broadcast_to(np.uint8(1), (2**13, 2**13, 3)),
    "growing": lambda calls: PIXELS[: calls + 1],
    "late": lambda calls: PIXELS if calls < 3 else fail(OSError("lost the display")),
}


class PaintedEnv(LampEnv):
    """Draws itself, well or not; `wrong` may also be a fault elsewhere than in `render`."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, wrong: str = "rgb", render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode, self.wrong, self.calls = render_mode, wrong, 0
        if render_mode is not None and wrong == "constructor":
            sys.exit("no display")
        if wrong == "fps":
            self.metadata = {**self.metadata, "render_fps": "fast"}
        if wrong == "slow":
            self.metadata = {**self.metadata, "render_fps": 0}
        if wrong == "metadata":
            self.metadata = {"render_modes": 3}

    def render(self) -> Any:
        self.calls += 1
        return RENDERED.get(self.wrong, RENDERED["rgb"])(self.calls - 1)

    def close(self) -> None:
        if self.render_mode is not None and self.wrong == "close":
            raise OSError("cannot close the window")


class UnpaintedEnv(LampEnv):
    """Says that it draws itself, but takes no render_mode."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012


gymnasium.register("Painted-v0", entry_point=f"{__name__}:PaintedEnv", max_episode_steps=HORIZON)
gymnasium.register("Unpainted-v0", entry_point=f"{__name__}:UnpaintedEnv", max_episode_steps=HORIZON)


@pytest.fixture(scope="module")
def painted_episodes(tmp_path_factory: pytest.TempPathFactory) -> SampledEvaluation:
    values = {**NAVIGATION, "env-name": "Painted-v0", "max-episode-steps": HORIZON, "num-batches": 1}
    (result,), _ = measured([make_run(tmp_path_factory.mktemp("runs") / "painted", values)], 3)
    assert result.sampled is not None
    return result.sampled


def drawn_with(sampled: SampledEvaluation, wrong: str) -> tuple[Any, list[str]]:
    return videos.videos(replace(sampled, config=sampled.config.override({"env-kwargs": {"wrong": wrong}})), 1)


@pytest.mark.parametrize("wrong", [*list(RENDERED)[1:], "constructor", "fps", "metadata"])
def test_whatever_drawing_raises_is_a_sentence(painted_episodes: SampledEvaluation, wrong: str) -> None:
    picture, notices = drawn_with(painted_episodes, wrong)
    assert picture is None
    (notice,) = notices
    assert notice.startswith("There are no videos: ")
    assert "\n" not in notice


@pytest.mark.parametrize("wrong", ["rgb", "slow", "close"])
def test_family_that_draws_itself_has_videos(painted_episodes: SampledEvaluation, wrong: str) -> None:
    picture, _ = drawn_with(painted_episodes, wrong)
    assert picture is not None
    # Not so one whose constructor takes no render_mode.
    config = painted_episodes.config.override({"env-name": "Unpainted-v0"})
    picture, (notice,) = videos.videos(replace(painted_episodes, config=config), 1)
    assert picture is None
    assert "render_mode" in notice


def test_pictures_of_other_kinds_are_converted() -> None:
    white, alpha = np.full((2, 2, 3), 255, np.uint8), np.zeros((2, 2, 4), np.uint8)
    for picture, expected in (
        (PIXELS, PIXELS),
        (PIXELS[..., 0], PIXELS[..., :1].repeat(3, 2)),
        (PIXELS[..., :1], PIXELS[..., :1].repeat(3, 2)),
        (PIXELS.astype(np.int64), PIXELS),
        (PIXELS / 255, PIXELS),
        ((PIXELS / 255).astype(np.float32), PIXELS),
        (PIXELS.tolist(), PIXELS),
        (np.dstack([PIXELS, np.full((8, 6), 255, np.uint8)]), PIXELS),
        (alpha, white),
        (np.ones((2, 2), bool), white),
    ):
        found = videos.as_rgb(picture)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, expected)


def test_failed_opengl_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second try of GLFW without a screen aborts Python."""
    tries = 0

    class Broken:
        def __init__(self, width: int, height: int) -> None:
            nonlocal tries
            tries += 1
            raise RuntimeError("there is no screen")

    monkeypatch.setattr(rendering, "_context_class", lambda: Broken)
    monkeypatch.setattr(rendering, "_unusable", {})
    messages = set()
    for _ in range(3):
        with pytest.raises(gymnasium.error.DependencyNotInstalled, match="RuntimeError: there is no screen") as caught:
            rendering.Renderer(None)
        messages.add(str(caught.value))
    assert (tries, len(messages)) == (1, 1)


@pytest.mark.usefixtures("drawn")
def test_without_an_encoder_the_videos_are_animated_pictures(
    cheetah_episodes: SampledEvaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "_has_encoder", lambda: False)
    picture, (notice,) = videos.videos(cheetah_episodes, 1)
    assert picture is not None
    assert 'src="data:image/webp;base64,' in picture
    assert "pip install 'maml-rl[report]'" in notice


def test_no_video_is_made_without_request_or_where_the_family_has_paths(
    navigation_runs: Path, cheetah_episodes: SampledEvaluation
) -> None:
    (result,), _ = measured([navigation_runs / "seed-0"], 1)
    assert result.sampled is not None
    assert videos.videos(result.sampled, 2) == (None, [])
    assert videos.videos(cheetah_episodes, 0) == (None, [])


def play(*arguments: str) -> int:
    return main(["play", *arguments, "--log-level", "warning"])


def test_film_shows_the_chosen_task_before_and_after_adaptation(
    navigation_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "film.gif"
    assert play(str(navigation_runs / "seed-0"), "--task", "{goal: [0.3, -0.2]}", "--output", str(path)) == 0
    assert capsys.readouterr().out.startswith("goal (0.3, \N{MINUS SIGN}0.2): wrote")
    picture = Image.open(io.BytesIO(path.read_bytes()))
    assert picture.format == "GIF"
    # Two pictures of 256 x 256 pixels with a caption.
    assert picture.size == (512, 256 + 24)
    picture.seek(picture.n_frames - 1)
    last = np.asarray(picture.convert("RGB")).astype(int)
    sides = last[24:, :256], last[24:, 256:]
    # A goal at a third of the way to the right and below the middle, in both.
    for side in sides:
        rows, columns = np.nonzero((side[..., 0] > 2 * side[..., 1]) & (side[..., 0] > 2 * side[..., 2]))
        assert rows.mean() > 128
        assert columns.mean() > 128
    assert (sides[0] != sides[1]).any()
    assert (last[:24, :256] != last[:24, 256:]).any()


def test_film_of_a_memory_shows_the_first_and_the_last_episode_of_its_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"env-name": "GridNavi-v0", "algorithm": "rl2", "observe-last": True, "fast-batch-size": 3}
    sizes = {"meta-batch-size": 2, "num-batches": 1, "algorithm-settings": {"hidden-size": 8}}
    run = make_run(tmp_path / "run", settings | sizes)
    path = tmp_path / "film.webp"
    assert play(str(run), "--output", str(path)) == 0
    picture = Image.open(io.BytesIO(path.read_bytes()))
    # A picture for each of at most 15 steps, and for the start.
    assert 2 <= picture.n_frames <= 16
    assert picture.size[0] > 1.5 * (picture.size[1] - 24)
    capsys.readouterr()
    assert play(str(run), "--output", str(path), "--num-steps", "2") == 2
    assert "rl2 does not adapt in steps; leave out --num-steps" in capsys.readouterr().err


def test_family_without_pictures_has_no_film(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert play("zoo:tabular-mdp", "--output", str(tmp_path / "film.gif")) == 1
    assert "TabularMDP-v0 draws no pictures" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
