"""Videos of a policy before and after adaptation: episodes of an evaluation, rendered while they are stepped again."""

import base64
import io
import logging
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import Any, Literal

import gymnasium
import numpy as np
from numpy.typing import ArrayLike, NDArray

from maml_rl.config.config import Config
from maml_rl.envs.make_env import make_vector_env
from maml_rl.envs.meta_env import MetaVectorEnv
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.errors import MamlRLError, UsersCode, explain
from maml_rl.report.curves import after
from maml_rl.report.figures import figure
from maml_rl.report.markup import Markup, element
from maml_rl.report.task_charts import NAVIGATION, describe, spread_out
from maml_rl.results.evaluation import SampledEvaluation
from maml_rl.results.scales import readable

Frames = NDArray[np.uint8]

_DEFAULT_FPS = 20
_WIDTH = 640
# A picture takes 50 ms to draw where there is no graphics card: of longer episodes only every second one is drawn.
_MOST_PICTURES = 101
# Pictures are shown at most 640 pixels wide.
_MOST_PIXELS = 2**24
# Of captions: their height, and the width from which on a picture is not enlarged.
_CAPTION, _LEAST_WIDTH = 24, 240

logger = logging.getLogger(__name__)


def videos(
    sampled: SampledEvaluation, count: int, on_video: Callable[[], object] = lambda: None
) -> tuple[Markup | None, list[str]]:
    """Draw some tasks of an evaluation.

    Returns:
        The videos, None where the family draws no pictures or nothing is adapted, and sentences about what could not
        be drawn.
    """
    if not count or len(sampled.phases) < 2:
        return None, []
    try:
        # The environment is someone else's code, and so are the drivers of a graphics card.
        with UsersCode(_reason, MamlRLError):
            return _videos(sampled, count, on_video)
    except MamlRLError as error:
        return None, [f"There are no videos: {' '.join(str(error).split())}."]


def _reason(error: BaseException) -> MamlRLError:
    # Gymnasium's own errors say what is missing; where they are raised does not matter.
    return MamlRLError(str(error) if isinstance(error, gymnasium.error.Error) else explain(error))


def _videos(sampled: SampledEvaluation, count: int, on_video: Callable[[], object]) -> tuple[Markup | None, list[str]]:
    # Paths of navigation show more.
    if sampled.config.env_name == NAVIGATION or not _draws(sampled.config):
        return None, []
    last = len(sampled.phases) - 1
    cards = []
    for task in spread_out(sampled.evaluation.tasks, count):
        on_video()
        description = describe(sampled.evaluation.tasks[task])
        logger.info("drawing a video of the task %s", description)
        before, fps = replay(sampled, 0, task)
        later, _ = replay(sampled, last, task)
        picture = _picture(side_by_side(before, later), fps, f"The policy before and after adaptation: {description}")
        returns = [sampled.evaluation.returns[task, phase, sampled.median_episode(phase, task)] for phase in (0, last)]
        cards.append(
            element(
                "div",
                element("h4", description),
                picture,
                element(
                    "div",
                    [
                        element("span", f"{after(steps)}: ", element("b", readable(value)))
                        for steps, value in zip((0, last), returns, strict=True)
                    ],
                    class_="sides",
                ),
            )
        )
    note = "For each task the episode of median return, drawn step by step as it was sampled; below, its return."
    notices = (
        []
        if _has_encoder()
        else [
            "The videos are animated pictures, because imageio-ffmpeg is not installed; "
            "`pip install 'maml-rl[report]'` makes them smaller."
        ]
    )
    return figure("Before and after adaptation", note, element("div", cards, class_="videos"), css="wide"), notices


def replay(sampled: SampledEvaluation, phase: int, task: int, episode: int | None = None) -> tuple[Frames, int]:
    """Step an episode again, and return pictures (n, height, width, 3) and how many make a second.

    Without a number of the episode it is that of median return.
    """
    episode = sampled.median_episode(phase, task) if episode is None else episode
    episodes = sampled.phases[phase]
    actions = episodes.actions[task, : episodes.lengths[task, episode], episode].cpu().numpy()
    config = sampled.config
    kwargs = {**config.env_kwargs, "render_mode": "rgb_array"}
    env = make_vector_env(config.env_name, kwargs, 1, max_episode_steps=config.max_episode_steps)
    try:
        env.reset_task([sampled.evaluation.tasks[task]])
        env.reset_buffers([sampled.episode_seed(phase, task, episode)])
        every = -(-sampled.phases[phase].rewards.shape[1] // (_MOST_PICTURES - 1))
        frames, total = [_draw(env)], 0.0
        for step, action in enumerate(actions, start=1):
            env.step_send(0, action[None])
            env.step_recv()
            total += float(env.buffers.rewards[0])
            if step % every == 0 or step == len(actions):
                frames.append(_draw(env))
        fps = max(1, round(_metadata(env).get("render_fps", _DEFAULT_FPS) / every))
    finally:
        env.close()
    expected = float(episodes.episode_returns()[task, episode])
    if not np.isclose(total, expected, rtol=1e-3, atol=1e-3):
        raise MamlRLError(
            f"{config.env_name} does not repeat an episode that is stepped again (return {total:.3f} instead "
            f"of {expected:.3f}); it must draw only from its own np_random"
        )
    return np.stack(frames), fps


def side_by_side(left: Frames, right: Frames) -> Frames:
    """Put two films (T, height, width, 3) beside each other; the shorter one waits on its last picture."""
    count = max(len(left), len(right))
    prolonged = [np.concatenate([film, np.repeat(film[-1:], count - len(film), axis=0)]) for film in (left, right)]
    return np.concatenate(prolonged, axis=2)


def _draws(config: Config) -> bool:
    with closing(make_vector_env(config.env_name, config.env_kwargs, 1)) as env:
        return "rgb_array" in _metadata(env).get("render_modes", ())


def _metadata(env: MetaVectorEnv) -> dict[str, Any]:
    """Return the metadata of a family, or of the first environment of a third party."""
    return env.envs[0].metadata if isinstance(env, SerialVectorEnv) else env.metadata


def _draw(env: MetaVectorEnv) -> Frames:
    pictures = env.render()
    if pictures is None or not len(pictures) or pictures[0] is None:
        raise MamlRLError("the environment has the render mode rgb_array, but renders nothing")
    return as_rgb(pictures[0])


def as_rgb(picture: ArrayLike) -> Frames:
    """Return a picture as (height, width, 3) bytes: from RGB, RGBA or gray, of bytes, or of floats from 0 to 1."""
    values = np.asarray(picture)
    if values.ndim == 2:
        values = values[..., None]
    if values.dtype.kind not in "biuf" or values.ndim != 3 or values.shape[2] not in (1, 3, 4) or not values.size:
        raise MamlRLError(
            f"the environment renders {values.dtype} {values.shape} instead of a picture (height, width, 3)"
        )
    if values.shape[0] * values.shape[1] > _MOST_PIXELS:
        raise MamlRLError(f"the environment renders pictures of {values.shape[0]} x {values.shape[1]} pixels")
    most = 255 if values.dtype.kind in "iu" else 1
    # Not so for NaN, either.
    if not (values.min() >= 0 and values.max() <= most):
        raise MamlRLError(f"the environment renders {values.dtype} outside of 0 to {most}")
    shares = values.astype(np.float32) / most
    if values.shape[2] == 4:
        # On white, as the page is.
        shares = shares[..., :3] * shares[..., 3:] + 1.0 - shares[..., 3:]
    return np.rint(255 * np.broadcast_to(shares, (*shares.shape[:2], 3))).astype(np.uint8)


def _picture(frames: Frames, fps: int, words: str) -> Markup:
    """Return an element that plays the frames: H.264 where there is an encoder, or animated WebP."""
    if _has_encoder():
        source = _data_url("video/mp4", encode_h264(frames, fps))
        return element(
            "video", src=source, aria_label=words, autoplay=True, loop=True, muted=True, playsinline=True, controls=True
        )
    return element("img", src=_data_url("image/webp", encode_animation(frames, fps)), alt=words)


def encode_h264(frames: Frames, fps: int) -> bytes:
    """Return an MP4 file of frames (T, height, width, 3)."""
    import imageio_ffmpeg

    height, width = frames.shape[1:3]
    # Browsers play only 4:2:0, which needs even numbers of pixels.
    options = (
        f"-loglevel error -f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {fps} -i - "
        f"-vf scale={min(_WIDTH, width) // 2 * 2}:-2:flags=lanczos -c:v libx264 -pix_fmt yuv420p -crf 26 "
        "-preset medium -threads 1 -map_metadata -1 -fflags +bitexact "
        "-movflags frag_keyframe+empty_moov+default_base_moof -f mp4 -"
    )
    command = [imageio_ffmpeg.get_ffmpeg_exe(), *options.split()]
    result = subprocess.run(command, input=frames.tobytes(), capture_output=True, check=False, timeout=300)
    if result.returncode:
        raise subprocess.SubprocessError(f"ffmpeg failed: {result.stderr.decode(errors='replace').strip()}")
    return result.stdout


def encode_animation(frames: Sequence[Frames] | Frames, fps: int, kind: Literal["WEBP", "GIF"] = "WEBP") -> bytes:
    """Return an animated picture of frames (T, height, width, 3)."""
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in frames]
    width, height = pictures[0].size
    if width > _WIDTH:
        pictures = [picture.resize((_WIDTH, height * _WIDTH // width)) for picture in pictures]
    file, more = io.BytesIO(), pictures[1:]
    pictures[0].save(file, kind, save_all=True, append_images=more, duration=round(1000 / fps), loop=0, quality=60)
    return file.getvalue()


def film(sampled: SampledEvaluation) -> tuple[Frames, int]:
    """Return pictures of the first task before and after adaptation, side by side with captions, and how many a second.

    A learner with a memory shows the first and the last episode of its trial.
    """
    with UsersCode(_reason, MamlRLError):
        if not _draws(sampled.config):
            raise MamlRLError(f"{sampled.config.env_name} draws no pictures; it needs the render mode rgb_array")
        last = len(sampled.phases) - 1
        if last:
            places = [(phase, sampled.median_episode(phase, 0)) for phase in (0, last)]
            counted = sampled.evaluation.columns
            names = ["before adaptation", after(last) if counted == "step" else f"in {counted} {last + 1}"]
        else:
            count = sampled.phases[0].rewards.shape[2]
            places = [(0, episode) for episode in dict.fromkeys((0, count - 1))]
            names = [f"episode {episode + 1}" for _, episode in places]
        films = []
        for (phase, episode), name in zip(places, names, strict=True):
            frames, fps = replay(sampled, phase, 0, episode)
            value = float(sampled.phases[phase].episode_returns()[0, episode])
            films.append(_captioned(frames, f"{name}: return {readable(value)}"))
        return (side_by_side(*films) if len(films) > 1 else films[0]), fps


def _captioned(frames: Frames, text: str) -> Frames:
    if find_spec("PIL") is None:
        raise MamlRLError("captions need Pillow; run pip install 'maml-rl[report]'")
    from PIL import Image, ImageDraw

    # Small pictures are enlarged by whole numbers, so that the text fits.
    frames = frames.repeat(scale := max(1, _LEAST_WIDTH // frames.shape[2]), 1).repeat(scale, 2)
    strip = Image.new("RGB", (frames.shape[2], _CAPTION), "white")
    ImageDraw.Draw(strip).text((6, 4), text.replace("\N{MINUS SIGN}", "-"), fill="black", font_size=14)
    caption = np.repeat(np.asarray(strip)[None], len(frames), 0)
    return np.concatenate([caption, frames], axis=1)


def _data_url(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _has_encoder() -> bool:
    return find_spec("imageio_ffmpeg") is not None
