"""A worker's side of worker inference, run in this process."""

import os
import pickle

from maml_rl.envs.meta_env import EnvDescription
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.work.body import Body
from maml_rl.samplers.work.child.messages import LoadPolicy, RunPhase
from maml_rl.samplers.work.child.phase_runner import PhaseRunner
from maml_rl.samplers.work.child.shared_buffers import PhasePlan, SharedPhase, SharedProgress, create_shared_file
from maml_rl.seeding import PhaseStreams


def test_abandoned_unit_samples_nothing() -> None:
    policy = NormalMLPPolicy(2, 2, (4,), "tanh")
    stacked = {name: value.detach().numpy() for name, value in policy.stack_parameters(1).items()}
    plan = PhasePlan((1, 2, 3), {name: (value.shape, value.dtype) for name, value in stacked.items()}, {})
    memory = create_shared_file()
    progress = SharedProgress(memory, 1)
    body = Body(Recipe.of("2DNavigation-v0", {}, None), progress, 0)
    env = EnvDescription.of(body.slots(2))
    shared = SharedPhase(memory, progress.size, plan, env)
    command = LoadPolicy(0, plan, pickle.dumps(policy), None)
    runner = PhaseRunner(command, env, memory, progress.size, 0, body)
    phase = Phase(({"goal": [0.1, 0.3]},), policy, None, PhaseStreams(0, 0, 0), 2, 3).without_policy()
    progress.generation[0] = 1
    assert runner.run(RunPhase(0, 0, phase, timed=True)) == {}
    assert not shared.episodes[0].lengths.any()
    assert min(runner.run(RunPhase(1, 0, phase, timed=True)).values()) > 0.0
    assert shared.episodes[0].lengths.tolist() == [[3, 3]]
    body.close()
    os.close(memory)
