"""Every system does the job: its arrays hold trajectories under the policy of each task."""

import random

import mujoco
import numpy as np
import pytest

from benchmarks.hosting import Host
from benchmarks.systems.collecting import TaskPolicies, make_half_cheetah
from benchmarks.systems.layouts import Job

JOB = Job(num_tasks=4, episodes_per_task=3, horizon=4, hidden_sizes=(8,), max_slots=6, noise_scale=0.0)
SYSTEMS = {
    "gymnasium async": ("gymnasium", "gymnasium_envs:make_async", ()),
    "gymnasium sync": ("gymnasium", "gymnasium_envs:make_sync", ()),
    "stable-baselines": ("stable_baselines3", "stable_baselines:make_subproc", ()),
    "envpool": ("envpool", "envpool_envs:make_sync", ()),
    "queues": ("gymnasium", "queue_workers:make_queue_workers", (8,)),
}


# Only one of them runs for every change; the others are nightly.
@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name == "gymnasium sync" else pytest.mark.nightly, id=name) for name in SYSTEMS
    ]
)
def episodes(request):
    package, make, arguments = SYSTEMS[request.param]
    state = random.getstate()
    pytest.importorskip(package)
    random.setstate(state)  # Stable-Baselines3 draws random numbers when it is imported.
    host = Host(request.param, f"benchmarks.systems.{make}", request.param, JOB, *arguments)
    try:
        host.call("collect")
        yield host.call("collect")
    finally:
        host.close()


def test_waves_hold_whole_tasks_and_divide_them():
    assert (JOB.tasks_per_wave, JOB.slots) == (2, 6)
    assert Job(40, 20, 100).tasks_per_wave == 8
    assert Job(40, 20, 100).slots == 160
    assert Job(3, 20, 100, max_slots=10).tasks_per_wave == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_collected_arrays_are_trajectories_under_the_policy_of_their_task(episodes):
    check_policies(episodes)
    check_physics(episodes)


def check_policies(episodes):
    policies = TaskPolicies(JOB, 17, 6)
    for task in range(JOB.num_tasks):
        observations = episodes.observations[task].reshape(-1, 17)
        expected = policies.of_tasks(slice(task, task + 1)).act(
            observations, np.zeros((len(observations), 6), np.float32)
        )
        np.testing.assert_allclose(episodes.actions[task].reshape(-1, 6), expected, atol=1e-5)
    other = policies.of_tasks(slice(1, 2)).act(episodes.observations[0, 0], np.zeros((3, 6), np.float32))
    assert not np.allclose(episodes.actions[0, 0], other, atol=1e-4), (
        "the tasks' policies must differ for this to be a test"
    )


def check_physics(episodes):
    env = make_half_cheetah()
    model, data = env.model, env.data
    starts = set()
    for task in range(JOB.num_tasks):
        for episode in range(JOB.episodes_per_task):
            observations = episodes.observations[task, :, episode].astype(np.float64)
            starts.add(observations[0].tobytes())
            for step in range(JOB.horizon):
                # Observations omit the position along the track, on which nothing else depends.
                mujoco.mj_resetData(model, data)
                data.qpos[1:], data.qvel[:] = observations[step, :8], observations[step, 8:]
                env.do_simulation(episodes.actions[task, step, episode], env.frame_skip)
                reward = data.qpos[0] / env.dt - 0.1 * np.square(episodes.actions[task, step, episode]).sum()
                assert episodes.rewards[task, step, episode] == pytest.approx(reward, abs=2e-2)
                if step + 1 < JOB.horizon:
                    np.testing.assert_allclose(
                        np.concatenate([data.qpos[1:], data.qvel]), observations[step + 1], atol=2e-2
                    )
    env.close()
    assert len(starts) == JOB.num_tasks * JOB.episodes_per_task
