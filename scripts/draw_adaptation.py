"""Draws a policy before and after adaptation: `python -m scripts.draw_adaptation docs/images/adaptation.svg`.

The zoo's policy for 2D navigation walks to goals that it does not observe. Draw the picture again after that policy has
been replaced.
"""

import argparse
from pathlib import Path

import gymnasium
import numpy as np

import maml_rl
from benchmarks.charts import write_panels
from maml_rl.policies import Policy
from maml_rl.report.curves import after
from maml_rl.report.plot import Plot
from maml_rl.report.scales import Span

FAMILY = "2DNavigation-v0"
GOALS = ((0.4, 0.3), (-0.4, 0.3), (-0.3, -0.4), (0.3, -0.4))
STEPS = (0, 1, 3)


def main() -> None:
    """Draw one panel for each number of gradient steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the file to write")
    parser.add_argument("--policy", default="zoo:2d-navigation", help="default: %(default)s")
    options = parser.parse_args()
    policy = maml_rl.load_policy(options.policy)
    panels = []
    for num_steps in STEPS:
        plane = Span(-0.6, 0.6)
        plot = Plot(plane, plane, f"Paths to four goals {after(num_steps)}", equal=True, width=340)
        for index, goal in enumerate(GOALS):
            adapted = maml_rl.adapt_to_task(policy, FAMILY, {"goal": list(goal)}, num_steps=num_steps)
            path = walk(adapted, goal)
            plot.line(*path.T, f"group{index}")
            plot.dots(*path[-1:].T, f"group{index}")
            plot.label(goal[0] + 0.04, goal[1] - 0.03, "\N{BLACK STAR}", f"goal group{index}")
        plot.dots([0.0], [0.0], "start")
        panels.append(("run", after(num_steps), plot))
    write_panels(options.picture, panels)
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
    """Return the arguments of the environment that the policy was trained in, such as normalized actions."""
    return dict(policy.trained_with.env_kwargs)


if __name__ == "__main__":
    main()
