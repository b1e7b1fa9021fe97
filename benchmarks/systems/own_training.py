"""The parts of our meta-training, for benchmarks that time them or inject faults into them."""

from dataclasses import dataclass
from typing import Any

from benchmarks.systems.layouts import Workload
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.envs.make_env import make_vector_env
from maml_rl.episode import TaskEpisodes
from maml_rl.metalearners import MAMLTRPO
from maml_rl.policies import Policy, get_policy_for_env
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers import MultiTaskSampler

FAST_LR = 0.1
TRUST_REGION: dict[str, Any] = {
    "max_kl": 1e-2,
    "cg_iters": 10,
    "cg_damping": 1e-5,
    "ls_max_steps": 15,
    "ls_backtrack_ratio": 0.8,
}


@dataclass(frozen=True, slots=True)
class Training:
    """The parts of a meta-training.

    Attributes:
        workload: what is sampled in every phase.
        policy: with its initial parameters.
        sampler: to be closed.
        metalearner: updates the policy.
    """

    workload: Workload
    policy: Policy
    sampler: MultiTaskSampler
    metalearner: MAMLTRPO

    def sample(self, num_steps: int = 1) -> tuple[list[TaskEpisodes], TaskEpisodes]:
        """Draw tasks and sample them before and after each of `num_steps` inner steps."""
        tasks = self.sampler.sample_tasks(self.workload.num_tasks)
        return self.sampler.sample(tasks, num_steps=num_steps, fast_lr=FAST_LR, gamma=0.99)

    def update(self, train: list[TaskEpisodes], valid: TaskEpisodes) -> None:
        """Do the meta-update."""
        self.metalearner.step(train, valid, **TRUST_REGION)


def make_training(workload: Workload, timer: StageTimer = NULL_TIMER, **process_options: Any) -> Training:
    """Make policy, sampler and metalearner.

    Args:
        workload: what to sample in every phase.
        timer: receives the seconds of the stages.
        process_options: further arguments of `MultiTaskSampler`.
    """
    env = make_vector_env(workload.env, dict(workload.env_kwargs), num_envs=1)
    policy = get_policy_for_env(env, workload.hidden_sizes, "tanh", seed=workload.seed)
    baseline = LinearFeatureBaseline.for_space(env.single_observation_space)
    env.close()
    sampler = MultiTaskSampler(
        workload.env,
        dict(workload.env_kwargs),
        batch_size=workload.episodes_per_task,
        policy=policy,
        baseline=baseline,
        seed=workload.seed,
        num_workers=workload.num_workers,
        max_episode_steps=workload.horizon,
        timer=timer,
        **{**workload.options, **process_options},
    )
    return Training(workload, policy, sampler, MAMLTRPO(policy, FAST_LR))
