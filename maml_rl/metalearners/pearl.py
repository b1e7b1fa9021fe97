"""PEARL: soft actor-critic conditioned on a latent context, whose posterior is inferred from experience."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import softplus

from maml_rl.adaptation import AdaptationRule
from maml_rl.config import Config
from maml_rl.config.settings import Count, Positive
from maml_rl.derivatives import EpisodeStore, cut
from maml_rl.envs.meta_env import Task
from maml_rl.envs.registration import FAMILIES
from maml_rl.envs.tasks import task_key
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.experience import Replay, Steps
from maml_rl.machine import single_threaded
from maml_rl.metalearners.metalearner import SINGLE, Adapted, MetaLearner
from maml_rl.metalearners.soft_actor_critic import (
    EnsembleMLP,
    SACSettings,
    SoftCritics,
    soft_targets,
    soft_values,
)
from maml_rl.metalearners.stepper import Input, Stepper
from maml_rl.metalearners.trial_learner import NumUpdates, refuse_small_replay
from maml_rl.plan import Sampler
from maml_rl.policies import Policy
from maml_rl.policies.soft_actors import CONTEXT, ContextActor
from maml_rl.policies.trial_encoder import action_unit, make_linear

# The lowest variance of one factor of the posterior.
_LEAST_VARIANCE = 1e-7


@dataclass(frozen=True, slots=True)
class Posterior:
    """A Gaussian over the context of each of M tasks.

    Attributes:
        mean: (M, Z).
        variance: (M, Z).
    """

    mean: Tensor
    variance: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """Return contexts (M, Z), differentiable, as a function of noise (M, Z) from N(0, 1)."""
        return self.mean + self.variance.sqrt() * noise

    def divergence(self) -> Tensor:
        """Return KL(posterior, N(0, I)) of each task, (M,)."""
        return 0.5 * (self.mean.square() + self.variance - 1.0 - self.variance.log()).sum(-1)


def product_of_gaussians(means: Tensor, variances: Tensor, mask: Tensor) -> Posterior:
    """Return the product of Gaussian factors, which does not depend on their order.

    1 / v = sum_n 1 / v_n, m = v sum_n m_n / v_n, over the real n.

    Args:
        means: (M, C, Z).
        variances: (M, C, Z).
        mask: (M, C) 1 for real factors, at least one of each task.
    """
    precisions = mask.unsqueeze(-1) / variances
    variance = 1.0 / precisions.sum(1)
    return Posterior(variance * (precisions * means).sum(1), variance)


class ContextEncoder(nn.Module):
    """Turns each transition of a context set into a Gaussian factor of the posterior over the context, by ReLU layers.

    Its inputs are the numbers in observation, action and reward, and in the next observation if it is one of them.
    """

    def __init__(self, inputs: int, hidden_sizes: Sequence[int], context_size: int, generator: torch.Generator) -> None:
        super().__init__()
        sizes = [inputs, *hidden_sizes, 2 * context_size]
        self.layers = nn.ModuleList([make_linear(before, after, generator) for before, after in pairwise(sizes)])

    def forward(self, transitions: Tensor, mask: Tensor) -> Posterior:
        """Return the posterior for transitions (M, C, inputs); mask (M, C) is 1 for real ones."""
        *hidden, last = self.layers
        for layer in hidden:
            transitions = layer(transitions).relu()
        means, variances = last(transitions).chunk(2, -1)
        return product_of_gaussians(means, softplus(variances).clamp(min=_LEAST_VARIANCE), mask)


class PEARL(MetaLearner):
    """Off-policy meta-RL by posterior sampling: act as if a context drawn from the posterior were the task.

    Adaptation takes rounds of `fast-batch-size` episodes. Each of the first `prior-rounds` has a context drawn from the
    prior, every later one a context drawn from the posterior of all rounds before it. Contexts for learning are drawn
    from the transitions of the first rounds alone, as the prior samples them; actor and critics learn from those of all
    rounds. Unlike the published code, the critics have target networks of their own instead of a value network, and the
    temperature is learned.

    Source: Rakelly et al. 2019, https://arxiv.org/abs/1903.08254
    """

    class Settings(SACSettings):
        """Settings of PEARL."""

        context_size: Annotated[Count, Field(description="numbers in the latent context")] = 5
        encoder_sizes: Annotated[
            tuple[Count, ...], Field(strict=False, min_length=1, description="units of each layer of the encoder")
        ] = (200, 200, 200)
        context_batch: Annotated[
            Count, Field(description="transitions of a task from which its posterior is inferred")
        ] = 100
        context_trials: Annotated[
            Count, Field(description="newest episodes of a task that these transitions are drawn from")
        ] = 2
        prior_rounds: Annotated[
            Count, Field(description="rounds whose contexts are drawn from the prior, before the posterior is known")
        ] = 1
        kl_weight: Annotated[float, Field(ge=0, description="weight of the posterior's divergence from N(0, I)")] = 0.1
        tasks_per_update: Annotated[Count, Field(description="tasks in each update")] = 16
        batch_size: Annotated[Count, Field(description="transitions of each task in an update")] = 256
        num_updates: NumUpdates = 500
        warmup_steps: Annotated[Count, Field(description="steps that are sampled before the first update")] = 2000
        reward_scale: Annotated[Positive, Field(description="factor of the rewards for the critics")] = 5.0
        context_reward: Annotated[
            str | None,
            Field(description="info of every step that the encoder sees instead of the reward; null: the reward"),
        ] = None
        next_observations: Annotated[
            bool | None,
            Field(
                description="whether the encoder sees the next observation, too; null: where it is known that the "
                "family's tasks differ in their dynamics"
            ),
        ] = None

    uses = frozenset({"gamma", "hidden-sizes", "num-steps", "meta-batch-size", "evaluation-steps"})
    # A step of adaptation is a round of episodes.
    columns = "round"
    takes_steps = True
    training_state = (SINGLE, "critic", "target")
    tests_without_noise = True
    settings: Settings
    policy: ContextActor
    networks: SoftCritics[EnsembleMLP]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        actor, settings = self.policy, self.settings
        if not isinstance(actor, ContextActor):
            raise TypeError(
                f"pearl trains a ContextActor, and {type(actor).__name__} is not one; leave out the policy of the "
                "config, or pass a ContextActor"
            )
        (seen,), done, known = actor.observation_shape, actor.noise_size, len(actor.context)
        generator = self.torch_generator("networks")
        sizes = seen + done + 1 + (seen if settings.next_observations else 0)
        self.encoder = ContextEncoder(sizes, settings.encoder_sizes, known, generator).to(self.device)
        inputs = seen + known + done
        self.critics = EnsembleMLP(inputs, actor.hidden_sizes, 1, generator)
        self.networks = SoftCritics(self.critics, actor.action_space, settings).to(self.device)
        self.networks.add_module("encoder", self.encoder)
        self.targets = self.networks.target
        self._unit = action_unit(actor.action_space).to(self.device)
        acting = [param for param in actor.parameters() if param.requires_grad]
        trained: dict[str, tuple[Iterable[nn.Parameter], float]] = {
            "actor": (acting, settings.learning_rate),
            "critics": (self.critics.parameters(), settings.learning_rate),
            "encoder": (self.encoder.parameters(), settings.learning_rate),
            "temperature": ([self.networks.log_temperature], settings.temperature_learning_rate),
        }
        self.optimizers = {name: torch.optim.Adam(params, lr=size) for name, (params, size) in trained.items()}
        self.stepper = Stepper(
            self.loss, *self.optimizers.values(), name="pearl", after=self.networks.update_targets, chunks=self._cut
        )
        storage: dict[str, Any] = {"memory_bytes": settings.mapped_bytes, "device": self.device}
        self.experience = {
            "all": Replay(settings.buffer_steps, **storage),
            "from_prior": Replay(settings.buffer_steps, **storage),
        }

    def _cut(self, context: Steps, steps: Steps, *noise: Tensor) -> list[slice]:
        num_tasks, num_steps = steps.rewards.shape
        return cut(num_tasks, num_steps, max(self.policy.hidden_sizes, default=1), self.device)

    @classmethod
    def complete(cls, settings: Any, config: Config) -> Any:
        """Decide whether the encoder sees next observations; in runs of earlier versions it never did."""
        if settings.next_observations is not None:
            return settings
        family = None if config.is_recorded else FAMILIES.get(config.env_name)
        return settings.model_copy(update={"next_observations": family is not None and family.dynamics})

    @classmethod
    def make_policy(cls, env: Any, config: Config, settings: Any) -> Policy:
        """Make an actor with a context."""
        refuse_small_replay(config, env, "buffer-steps", settings.buffer_steps)
        if config.num_steps < settings.prior_rounds:
            raise config.error(
                f"num-steps {config.num_steps} and one more round leave none to the posterior after "
                f"{settings.prior_rounds} from the prior; raise num-steps, or lower prior-rounds",
                "num-steps",
            )
        name = settings.context_reward
        if name is not None and env.recorded_infos.get(name) != "step":
            known = [repr(info) for info, kind in env.recorded_infos.items() if kind == "step"]
            raise config.error(
                f"{config.env_name} does not record {name!r} at every step; choose {' or '.join([*known, 'null'])}",
                "algorithm-settings",
                "context-reward",
            )
        spaces = env.single_observation_space, env.single_action_space
        try:
            return ContextActor(*spaces, settings.context_size, config.hidden_sizes, seed=config.seed)
        except TypeError as error:
            raise config.error(f"pearl needs vectors and actions in a bounded Box: {error}", "algorithm") from None

    @classmethod
    def make_rule(cls, policy: Policy, config: Config, settings: Any) -> None:
        return

    def acting_state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.encoder.state_dict().items()}

    def collector(self, state: Mapping[str, Tensor]) -> Self:
        collector = super().collector(state)
        collector.encoder = copy.deepcopy(self.encoder)
        collector.encoder.load_state_dict(state)
        return collector

    def collect(self, sampler: Sampler, tasks: Sequence[Task]) -> EpisodeStore:
        """Sample as many rounds as there are inner steps, and one more."""
        adapted = self._adapt(sampler, tasks, self.plan.num_steps, deterministic=False)
        return self.store_of([*adapted.phases, sampler.rollout(tasks, adapted.params)])

    def adapt(
        self, sampler: Sampler, tasks: Sequence[Task], num_steps: int = 1, rule: AdaptationRule | None = None
    ) -> Adapted:
        """Sample `num_steps` rounds without noise in the actions, and draw contexts from the posterior of them all."""
        return self._adapt(sampler, tasks, num_steps, deterministic=True)

    def _adapt(self, sampler: Sampler, tasks: Sequence[Task], num_steps: int, *, deterministic: bool) -> Adapted:
        theta: dict[str, Tensor] = {name: param.detach() for name, param in sampler.policy.named_parameters()}
        phases: list[TaskEpisodes] = []
        for step in range(num_steps + 1):
            seen = phases if step >= self.settings.prior_rounds else ()
            contexts = self._draw_contexts(sampler, seen, (len(tasks), len(theta[CONTEXT]))).to(theta[CONTEXT])
            params = {**theta, CONTEXT: contexts}
            if step < num_steps:
                phases.append(sampler.rollout(tasks, params, deterministic=deterministic))
        return Adapted(phases, params)

    @single_threaded()
    def _draw_contexts(self, sampler: Sampler, phases: Sequence[TaskEpisodes], shape: tuple[int, int]) -> Tensor:
        """Draw a context for each task from the posterior of all phases, from the prior if there are none, (M, Z)."""
        noise = torch.from_numpy(sampler.generator("context").standard_normal(shape, "float32")).to(self.device)
        if not phases:
            return noise
        with torch.no_grad():
            parts = [
                (self._transitions(phase).flatten(1, 2), phase.mask.to(self.device).flatten(1, 2)) for phase in phases
            ]
            transitions, mask = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
            posterior: Posterior = self.encoder(transitions, mask)
            return posterior.sample(noise)

    def _transitions(self, seen: Steps | TaskEpisodes) -> Tensor:
        """Return the encoder's inputs for transitions, (..., inputs), with actions in units of half of their range."""
        name = self.settings.context_reward
        rewards = seen.rewards if name is None else seen.infos[name]
        parts = [seen.observations.float(), self._squashed(seen.actions), rewards.unsqueeze(-1).float()]
        if self.settings.next_observations:
            parts.append(seen.next_observations.float())
        return torch.cat([part.to(self.device) for part in parts], -1)

    def _squashed(self, actions: Tensor) -> Tensor:
        """Return actions (..., *action shape) of the environment as vectors (..., A) in (-1, 1)."""
        head, actions = self.policy.distributions, actions.to(self.device).float()
        return (head.entries(actions) - head.bounds(actions)[0]) * self._unit

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Store the episodes in the replay buffer, and take steps on batches from it once there are enough.

        Returns:
            `replay/steps`, `updates`; and of the updates `loss/critics`, `loss/actor`, `kl`, `temperature`, `entropy`,
            the means.
        """
        everything, from_prior = self.experience["all"], self.experience["from_prior"]
        for index, episodes in enumerate(batch.phases):
            for replay in (everything, from_prior)[: 2 if index < self.settings.prior_rounds else 1]:
                replay.append(episodes, slots_per_task=episodes.rewards.shape[2])
        known = {"replay/steps": everything.num_steps, "updates": 0}
        if everything.num_steps < min(self.settings.warmup_steps, everything.capacity // 2):
            return known
        # Trials that one replay has dropped may still be in the other.
        keys = {task_key(task) for task in everything.tasks}
        tasks = [task for task in from_prior.tasks if task_key(task) in keys]
        rng, newest, size = self.generator("replay"), self.settings.context_trials, self.settings.context_batch

        def draw() -> Sequence[Input]:
            chosen = rng.choice(len(tasks), min(len(tasks), self.settings.tasks_per_update), replace=False)
            of_tasks = [tasks[index] for index in chosen]
            context = from_prior.sample_transitions(rng, size, tasks=of_tasks, newest=newest)
            steps = everything.sample_transitions(rng, self.settings.batch_size, tasks=of_tasks)
            return self.inputs_of(context, steps)

        names = "loss/critics", "loss/actor", "kl", "temperature", "entropy"
        return known | self.stepper.take(self.settings.num_updates, draw, names)

    def inputs_of(self, context: Steps, steps: Steps) -> Sequence[Input]:
        """Return the inputs of a step on contexts (M, C, ...) and transitions (M, N, ...); noise is drawn."""
        num_tasks, num_steps = steps.rewards.shape
        noise = torch.randn((num_tasks, len(self.policy.context)), generator=self.torch_generator("contexts"))
        sizes = 2, num_tasks, num_steps, self.policy.noise_size
        drawn = torch.randn(sizes, generator=self.torch_generator("actions"))
        return context, steps, noise, drawn.transpose(0, 1)

    def loss(
        self, context: Steps, steps: Steps, noise: Tensor, drawn: Tensor, *, share: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of M tasks, and the metrics of `update`; sums over chunks of tasks are those of all.

        Args:
            context: (M, C, ...) the context set of each task.
            steps: (M, N, ...) transitions of the same tasks to learn from.
            noise: (M, Z) from N(0, 1), of the contexts that are drawn from the posteriors.
            drawn: (M, 2, N, A) from N(0, 1), of the actions before and after each transition.
            share: of the tasks in those of the step.
        """
        posterior: Posterior = self.encoder(self._transitions(context), context.mask)
        of_tasks = posterior.sample(noise)
        contexts = of_tasks.unsqueeze(1).expand(-1, steps.rewards.shape[1], -1).flatten(0, 1)
        before, after = (seen.flatten(0, 1).float() for seen in (steps.observations, steps.next_observations))
        rewards, terminal = steps.rewards.flatten(), steps.terminations.flatten().float()
        head, temperature = self.policy.distributions, self.networks.log_temperature.exp()
        alpha = temperature.detach()
        done = self._squashed(steps.actions.flatten(0, 1))
        # The encoder receives no gradient of actor or targets, only that of the critics.
        fixed = contexts.detach()
        parameters = self.policy.under(torch.cat((before, after)), torch.cat((fixed, fixed)))
        actions, log_probs = head.sample(parameters, drawn.transpose(0, 1).flatten(0, 2))
        (proposed, following), (log_prob, log_prob_after) = actions.chunk(2), log_probs.chunk(2)
        with torch.no_grad():
            values = self._values(self.targets, after, fixed, following)
            reached = soft_values(values, log_prob_after, alpha)
            targets = soft_targets(self.settings.reward_scale * rewards, terminal, reached, self.plan.gamma)
        errors = self._values(self.critics, before, contexts, done) - targets
        critic_loss = errors.square().mean(1).sum()
        kl = posterior.divergence()
        of_proposed = self._values(self.critics, before, fixed, proposed, fixed=True)
        actor_loss = -soft_values(of_proposed, log_prob, alpha).mean()
        entropy = -log_prob.detach().mean()
        loss = critic_loss + self.settings.kl_weight * kl.sum() / share + actor_loss
        of_steps = tuple(parameter.chunk(2)[0] for parameter in parameters)
        target_entropy = self.networks.target_entropy_of(of_steps, torch.ones_like(rewards))
        loss = loss + temperature * (entropy - target_entropy)
        return share * loss, share * torch.stack((critic_loss, actor_loss, kl.mean(), alpha, entropy))

    @staticmethod
    def _values(
        critics: EnsembleMLP, seen: Tensor, contexts: Tensor, actions: Tensor, *, fixed: bool = False
    ) -> Tensor:
        """Return the values (2, R) of actions (R, A) in (-1, 1)."""
        inputs = torch.cat((seen, contexts, actions), -1)
        return critics.rest(critics.first_layer(inputs, fixed=fixed), fixed=fixed).squeeze(-1)
