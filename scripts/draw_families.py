"""Draws one member of every family for the documentation.

    python scripts/draw_families.py

Families with a renderer show a state as it is rendered; bandits and Markov decision processes show their tasks. Where
Meta-World is installed, only its pictures are drawn: it needs another version of MuJoCo.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import maml_rl  # Registers the families.  # noqa: F401

matplotlib.use("Agg")

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images" / "families"
_ARROW = {"arrowstyle": "-|>,head_width=0.5,head_length=0.9", "color": "#c83c32", "linewidth": 4}


def main() -> None:
    """Draw all pictures."""
    if find_spec("metaworld"):
        for name, seed in (("MetaWorld/ML1-reach-v3", 1), ("MetaWorld/ML10-v3", 5)):
            task = _task(name, seed)
            _save(name, _frame, _walk(name, task, 15), task.get("env_name", "reach-v3"))
        return
    _save("Bandit-K10-v0", _arms, _task("Bandit-K10-v0", 4))
    _save("GaussianBandit-K10-v0", _arms, _task("GaussianBandit-K10-v0", 5), 1.0)
    _save("TabularMDP-v0", _rewards, _task("TabularMDP-v0", 4))
    _save("2DNavigation-v0", _frame, _walk("2DNavigation-v0", {"goal": [0.3, -0.2]}, 9), "goal: (0.3, -0.2)")
    _save("PixelNavigation-v0", _frame, _walk("PixelNavigation-v0", {"goal": [0.3, -0.4]}, 9), "goal: (0.3, -0.4)")
    for name, task, num_steps, label, arrow in (
        ("HalfCheetahVel-v5", {"velocity": 1.3}, 8, "velocity: 1.3 m/s", (0.5, 0)),
        ("HalfCheetahDir-v5", {"direction": -1}, 16, "direction: -1", (-0.5, 0)),
        ("HalfCheetahVel-finn2017-v0", {"velocity": 1.3}, 40, "velocity: 1.3 m/s", (0.5, 0)),
        ("HalfCheetahDir-finn2017-v0", {"direction": -1}, 60, "direction: -1", (-0.5, 0)),
        ("AntVel-finn2017-v0", {"velocity": 2.1}, 14, "velocity: 2.1 m/s", (0.5, 0)),
        ("AntDir-finn2017-v0", {"direction": -1}, 30, "direction: -1", (-0.5, 0)),
        ("AntPos-finn2017-v0", {"position": [2.0, 1.0]}, 22, "position: (2, 1)", (0.5, 0.25)),
        ("AntVel-v5", {"velocity": 2.1}, 8, "velocity: 2.1 m/s", (0.5, 0)),
        ("AntDir-v5", {"direction": -1}, 20, "direction: -1", (-0.5, 0)),
        ("AntPos-v5", {"position": [2.0, 1.0]}, 14, "position: (2, 1)", (0.5, 0.25)),
    ):
        _save(name, _frame, _walk(name, task, num_steps), label, arrow)
    for name, task, num_steps, label, arrow in (
        ("Walker2DDir-v5", {"direction": -1}, 15, "direction: -1", (-0.5, 0)),
        ("Walker2DVel-v5", {"velocity": 1.5}, 15, "velocity: 1.5 m/s", (0.5, 0)),
        ("HopperVel-v5", {"velocity": 0.8}, 15, "velocity: 0.8 m/s", (0.5, 0)),
        ("SwimmerVel-v5", {"velocity": 0.15}, 30, "velocity: 0.15 m/s", (0.5, 0)),
        ("HumanoidDir-v5", {"angle": 0.6}, 12, "angle: 0.6", (0.41, 0.28)),
        ("AntDir2D-v5", {"angle": 0.6}, 14, "angle: 0.6", (0.41, 0.28)),
        ("AntGoal-v5", {"goal": np.array([2.0, 1.0])}, 14, "goal: (2, 1)", (0.5, 0.25)),
    ):
        _save(name, _frame, _walk(name, task, num_steps), label, arrow)
    points = ("PointGoal-v0", "SparsePointGoal-v0", "PointCorner-v0", "SemiCircle-v0", "Wind-v0")
    for name in (*points, "GridNavi-v0", "DarkRoom-v0", "DarkKeyDoor-v0"):
        task = _task(name, 2)
        label = ", ".join(f"{key}: ({value[0]:.3g}, {value[1]:.3g})" for key, value in task.items())
        _save(name, _frame, _walk(name, task, 6), label)
    for name in ("Walker2DRandParams-v5", "HopperRandParams-v5", "HalfCheetahRandParams-v5", "AntRandParams-v5"):
        task = _task(name, 1)
        factors = task["body_mass"][1:]
        label = f"masses x {factors.min():.2f} ... {factors.max():.2f}"
        _save(name, _frame, _walk(name, task, 15), label, (0.5, 0))


def _task(name: str, seed: int) -> dict[str, Any]:
    env = gymnasium.make(name)
    env.reset(seed=seed)
    (task,) = env.get_wrapper_attr("sample_tasks")(1)
    env.close()
    return task


def _walk(name: str, task: dict[str, Any], num_steps: int) -> np.ndarray:
    """Return the picture of the state after some steps: toward the goal, or at random."""
    env = gymnasium.make(name, task=task, render_mode="rgb_array")
    observation, _ = env.reset(seed=3)
    env.action_space.seed(3)
    for _ in range(num_steps):
        action = env.action_space.sample()
        if name == "2DNavigation-v0":
            action = 0.3 * action + 0.2 * (np.asarray(task["goal"], np.float32) - observation)
        observation, *_ = env.step(action)
    frame = env.render()
    env.close()
    return frame


def _save(name: str, draw: Any, *arguments: Any) -> None:
    figure, axes = plt.subplots(figsize=(3.2, 3.2), dpi=100, layout="constrained")
    draw(axes, *arguments)
    path = FOLDER / f"{name}.webp"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, pil_kwargs={"quality": 80})
    plt.close(figure)
    print(path.relative_to(FOLDER.parent.parent.parent))


def _frame(axes: Axes, frame: np.ndarray, label: str, arrow: tuple[float, float] | None = None) -> None:
    axes.imshow(frame)
    axes.set_axis_off()
    axes.set_title(label, fontsize=11)
    if arrow is not None:
        start = (0.5 - arrow[0] / 2, 0.16 - arrow[1] / 2)
        stop = (start[0] + arrow[0], start[1] + arrow[1])
        axes.annotate("", stop, start, xycoords="axes fraction", textcoords="axes fraction", arrowprops=_ARROW)


def _arms(axes: Axes, task: dict[str, Any], deviation: float = 0.0) -> None:
    bars = {"yerr": deviation, "capsize": 2} if deviation else {}
    axes.bar(np.arange(len(task["mean"])), task["mean"], color="#2859b4", **bars)
    axes.set(xlabel="arm", ylabel="mean reward", ylim=(-deviation, 1 + deviation))


def _rewards(axes: Axes, task: dict[str, Any]) -> None:
    image = axes.imshow(task["rewards_mean"].T, cmap="viridis", aspect="auto", origin="lower")
    axes.set(xlabel="state", ylabel="action")
    axes.figure.colorbar(image, ax=axes, label="mean reward", location="top")


if __name__ == "__main__":
    main()
