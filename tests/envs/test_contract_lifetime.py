"""Guarantees of every registered family from its creation to the end of an episode of full length."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from maml_rl.envs import FAMILIES, make_vector_env
from tests.envs.contract import TRIED, assert_same_slot, assert_same_tasks, play, random_actions, same


@pytest.mark.slow
def test_episodes_of_full_length_are_bit_identical_to_single_environments(stepping_env_id: str) -> None:
    """Each slot has a task and a seed of its own, and some are reset while the others continue."""
    batch: Any = make_vector_env(stepping_env_id, {}, 3)
    tasks = batch.sample_tasks(3, seed=1)
    batch.reset_task(tasks)
    singles: list[Any] = [gymnasium.make(stepping_env_id, task=task) for task in tasks]
    seeds = [2**40, 0, 77]
    observations, infos = batch.reset(seed=seeds)
    for slot, (single, seed) in enumerate(zip(singles, seeds, strict=True)):
        assert_same_slot(slot, (observations, infos), single.reset(seed=seed))
    running, restarted = {0, 1, 2}, False
    for actions in random_actions(batch, 2 * (batch.max_episode_steps or 1) + 2):
        results = batch.step(actions)
        for slot in sorted(running):
            result = singles[slot].step(actions[slot])
            assert_same_slot(slot, results, result)
            if result[2] or result[3]:
                running.remove(slot)
        if not running and restarted:
            break
        if 1 not in running and not restarted:
            # Without a seed: slot 1 continues its own stream, as the single environment does.
            observations, infos = batch.reset(options={"reset_mask": np.array([False, True, False])})
            assert_same_slot(1, (observations, infos), singles[1].reset())
            running.add(1)
            restarted = True
    assert restarted
    assert not running
    for env in (batch, *singles):
        env.close()


@pytest.mark.slow
def test_unseeded_environments_differ(base_env_id: str) -> None:
    one, other = make_vector_env(base_env_id, {}, 8), make_vector_env(base_env_id, {}, 8)
    # A pull of a bandit has two outcomes; hundreds of them are practically never all equal.
    times = 2 if FAMILIES[base_env_id].has_physics or FAMILIES[base_env_id].extra else 20
    plays = [[array for _ in range(times) for array in play(env, None)] for env in (one, other, one)]
    # Families whose episodes are deterministic.
    sure = ("2DNavigation-v0", "PixelNavigation-v0", "SparsePointGoal-v0", "DarkRoom-v0", "GridNavi-v0", "Wind-v0")
    chance = base_env_id not in sure and not base_env_id.startswith("MetaWorld/")
    assert same(plays[0], plays[1]) is not chance
    assert same(plays[0], plays[2]) is not chance
    with pytest.raises(AssertionError):
        assert_same_tasks(one.sample_tasks(30), other.sample_tasks(30))


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_families_print_nothing_write_no_file_and_do_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys, gymnasium, numpy as np, maml_rl\n"
        f"for env_id in {[name for name in TRIED if not FAMILIES[name].extra]}:\n"
        "    for env in (gymnasium.make(env_id), gymnasium.make_vec(env_id, num_envs=2)):\n"
        "        env.reset(seed=0)\n"
        "        env.unwrapped.sample_tasks(2)\n"
        "        env.step(env.action_space.sample())\n"
        "        env.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=50)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
