"""Draws a policy before and after adaptation: `python -m scripts.draw_adaptation docs/images/adaptation.png`.

The policy of the zoo that navigates in the plane walks to goals that it does not observe. Draw the picture again after
that policy has been replaced.
"""

import argparse
from pathlib import Path

import gymnasium
import numpy as np

import maml_rl
from maml_rl.policies import Policy

FAMILY = "2DNavigation-v0"
GOALS = ((0.4, 0.3), (-0.4, 0.3), (-0.3, -0.4), (0.3, -0.4))
STEPS = (0, 1, 3)
_COLORS = ("#1f6fb2", "#c2571a", "#2c8a57", "#8b4fa0")


def main() -> None:
    """Draw one panel for each number of gradient steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the file to write")
    parser.add_argument("--policy", default="zoo:2d-navigation", help="default: %(default)s")
    options = parser.parse_args()
    policy = maml_rl.load_policy(options.policy)
    figure, panels = pyplot.subplots(1, len(STEPS), figsize=(10.5, 3.7), sharex=True, sharey=True, layout="constrained")
    for panel, num_steps in zip(panels, STEPS, strict=True):
        for goal, color in zip(GOALS, _COLORS, strict=True):
            adapted = maml_rl.adapt_to_task(policy, FAMILY, {"goal": list(goal)}, num_steps=num_steps)
            path = walk(adapted, goal)
            panel.plot(*path.T, color=color, lw=1.6)
            panel.plot(*path[-1], "o", color=color, ms=4)
            panel.plot(*goal, "*", color=color, ms=13, mec="white", mew=0.6)
        panel.plot(0.0, 0.0, "o", color="0.2", ms=4)
        words = "before adaptation" if num_steps == 0 else f"after {num_steps} gradient step" + "s" * (num_steps > 1)
        panel.set(title=words, aspect="equal", xlim=(-0.6, 0.6), ylim=(-0.6, 0.6))
        panel.spines[["top", "right"]].set_visible(False)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=110)
    print(f"the picture is {options.picture}")


def walk(policy: Policy, goal: tuple[float, float], num_steps: int = 100) -> np.ndarray:
    """Return the positions (T + 1, 2) of an episode in which the policy takes its most probable action."""
    env = gymnasium.make(FAMILY, task={"goal": list(goal)}, max_episode_steps=num_steps, **_kwargs_of(policy))
    observation, _ = env.reset(seed=0)
    positions, over = [observation], False
    while not over:
        action, _ = policy.choose(observation)
        observation, _, terminated, truncated, _ = env.step(action)
        positions.append(observation)
        over = terminated or truncated
    env.close()
    return np.array(positions)


def _kwargs_of(policy: Policy) -> dict:
    """Return the arguments of the environment that the policy was trained in: with normalized actions, for example."""
    return dict(policy.trained_with.env_kwargs)


if __name__ == "__main__":
    main()
