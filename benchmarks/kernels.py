"""The speedup of the hand-written kernels over policies that are plain modules, and over torch's own transforms.

    python -m benchmarks.kernels --json kernels.json --chart kernels.svg

The same network, HalfCheetah's with two hidden layers, acts and is differentiated in several ways:

- acting for 40 tasks x 20 slots, each task under its own parameters: one turn is `--steps` steps;
- the update of `--tasks` tasks, 2,000 samples each, one after the other: one turn is the gradient of the inner loss,
  and a product with Hessian, Fisher matrix and Hessian for each iteration of conjugate gradients;
- whole phases of 20 tasks x 20 episodes x 100 steps, of HalfCheetahDir with its physics and of 2D navigation;
- the whole meta-update of MAML-TRPO on 40 tasks x 20 episodes x 100 steps of HalfCheetahDir, on torch's
  number of threads. Everything else runs on one.

Ratios are taken round by round.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from torch.func import functional_call, vmap

from benchmarks.measuring import Measurements, Participant, machine, ratios, take_turns
from benchmarks.reporting import Report, Row, chosen, common_options, finish, progress
from benchmarks.systems.transforms import JVPLinearization, TracedLinearization
from maml_rl import MultiTaskSampler, functional
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.derivatives import Linearization, ParameterLayout, PolicyOnSamples, Samples
from maml_rl.envs import make_vector_env
from maml_rl.episode import TaskEpisodes
from maml_rl.machine import intra_op_threads
from maml_rl.metalearners import MAMLTRPO
from maml_rl.policies import Memory, MLPPolicy, NormalMLPPolicy, Params, Policy, as_policy, get_policy_for_env

OBSERVATION_SIZE, ACTION_SIZE = 20, 6
# Whole phases, of a family with physics and of one without.
FAMILIES = {"cheetah": "HalfCheetahDir-v5", "navigation": "2DNavigation-v0"}
PARTS = ("acting", "update", *FAMILIES, "meta-update")
UNITS = {"acting": "ms"}
BY_HAND, DEFAULT = "by hand", "plain module"

# (policy, samples) -> a linearization of the policy at parameters (k, D).
Maker = Callable[[NormalMLPPolicy, Samples], Callable[[Tensor], Linearization]]


class PlainModule(nn.Module):
    """The network of an `MLPPolicy` with a Gaussian head as a user would write it, with the same parameters."""

    def __init__(self, policy: MLPPolicy) -> None:
        super().__init__()
        for name, child in policy.named_children():
            self.add_module(name, child)
        self.sigma = policy.get_parameter("sigma")

    def forward(self, observations: Tensor) -> Distribution:
        """Return the Gaussian over actions."""
        *hidden, last = self.children()
        for layer in hidden:
            observations = torch.tanh(layer(observations))
        return Independent(Normal(last(observations), torch.exp(self.sigma)), 1)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    report = Report("kernels", machine(), chosen(options))
    for part in options.only:
        for hidden in options.hidden:
            with nullcontext() if part == "meta-update" else intra_op_threads(1):
                _measure(report, options, part, hidden)
    finish(report, options)


def _measure(report: Report, options: argparse.Namespace, part: str, hidden: int) -> None:
    policy = NormalMLPPolicy(OBSERVATION_SIZE, ACTION_SIZE, (hidden, hidden), "tanh", seed=options.seed)
    match part:
        case "acting":
            turns = _acting(policy, options)
        case "update":
            turns = _updating(policy, options)
        case "meta-update":
            turns = _meta_updating(hidden, options)
        case _:
            turns = _sampling(FAMILIES[part], hidden, options)
    with turns as works:
        participants = [Participant(name, _timed(name, work, UNITS.get(part, "s"))) for name, work in works.items()]
        rows = take_turns(participants, repeats=options.repeats, warmup=options.warmup, report=progress(options))
    for name, samples in rows.items():
        report.add(
            f"{part.capitalize()}, {hidden} units", Row(f"{part} {hidden}: {name}", samples, UNITS.get(part, "s"))
        )
    for name, samples in rows.items():
        if name != BY_HAND:
            gain = Row(f"gain {part} {hidden}: {name}", ratios(samples, rows[BY_HAND]), "times the time by hand")
            report.add("What the kernels bring", gain)


@contextmanager
def _acting(policy: NormalMLPPolicy, options: argparse.Namespace) -> Iterator[dict[str, Callable[[], None]]]:
    """Yield the ways to act for many steps."""
    tasks, slots = (2, 2) if options.quick else (40, 20)
    generator = torch.Generator().manual_seed(options.seed)
    params = _different(policy, tasks, generator)
    observations = torch.randn((tasks, slots, OBSERVATION_SIZE), generator=generator)
    noise = torch.randn((tasks, slots, ACTION_SIZE), generator=generator)
    module = PlainModule(policy)

    def through_vmap(observations: Tensor, noise: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        def act(own: Params, observations: Tensor, noise: Tensor) -> Tensor:
            distribution = functional_call(module, dict(own), (observations,)).base_dist
            action: Tensor = distribution.loc + distribution.scale * noise
            return action

        return vmap(act)(params, observations, noise), memory

    ways: dict[str, Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]] = {
        BY_HAND: policy.actor(params),
        DEFAULT: as_policy(module, (OBSERVATION_SIZE,)).actor(params),
        "vmap, rounding depends on the batch": through_vmap,
    }

    def repeated(act: Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]) -> Callable[[], None]:
        def run() -> None:
            with torch.inference_mode():
                for _ in range(options.steps):
                    act(observations, noise, ())

        return run

    yield {name: repeated(act) for name, act in ways.items()}


@contextmanager
def _updating(policy: NormalMLPPolicy, options: argparse.Namespace) -> Iterator[dict[str, Callable[[], None]]]:
    """Yield the ways to compute the derivatives of an update."""
    steps, episodes = (3, 2) if options.quick else (100, 20)
    generator = torch.Generator().manual_seed(options.seed)
    samples = _samples(steps, episodes, generator)
    layout = ParameterLayout(policy)
    start = layout.flatten(_different(policy, 1, generator))
    vectors = torch.randn((1, layout.size), generator=generator)

    def on_samples(policy: Policy, automatic: bool) -> Callable[[Tensor], Linearization]:
        prepared = PolicyOnSamples(policy, layout, samples, automatic=automatic)
        return lambda parameters: prepared.at(parameters)

    ways: dict[str, Callable[[Tensor], Linearization]] = {
        BY_HAND: on_samples(policy, False),
        "autograd of the same policy": on_samples(policy, True),
        DEFAULT: on_samples(as_policy(PlainModule(policy)), True),
        "torch.func.jvp": lambda parameters: JVPLinearization(policy, layout, samples, parameters),
        "torch.func.linearize": lambda parameters: TracedLinearization(policy, layout, samples, parameters),
    }

    def loss(log_probs: Tensor) -> Tensor:
        return functional.reinforce_loss(log_probs, samples.advantages, samples.mask)

    def repeated(at: Callable[[Tensor], Linearization]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for _ in range(options.tasks):
                    linearization = at(start)
                    linearization.differentiate(loss, twice=True)
                    for _ in range(options.products):
                        product = linearization.hessian_product(vectors)
                        product = linearization.fisher_product(product)
                        linearization.hessian_product(product)

        return run

    yield {name: repeated(at) for name, at in ways.items()}


@contextmanager
def _sampling(env_name: str, hidden: int, options: argparse.Namespace) -> Iterator[dict[str, Callable[[], None]]]:
    """Yield the ways to sample whole phases."""
    tasks, episodes, horizon = (2, 2, 5) if options.quick else (20, 20, 100)

    def phase(sampler: MultiTaskSampler) -> Callable[[], None]:
        drawn = sampler.sample_tasks(tasks)
        stacked = sampler.policy.stack_parameters(tasks)

        def run() -> None:
            sampler.rollout(drawn, stacked)

        return run

    with _samplers(env_name, hidden, episodes, horizon, options) as samplers:
        yield {name: phase(sampler) for name, sampler in samplers.items()}


@contextmanager
def _meta_updating(hidden: int, options: argparse.Namespace) -> Iterator[dict[str, Callable[[], None]]]:
    """Yield the ways to compute whole meta-updates, each time from the same parameters."""
    tasks, episodes, horizon = (2, 2, 5) if options.quick else (40, 20, 100)

    def update(sampler: MultiTaskSampler) -> Callable[[], None]:
        learner = MAMLTRPO(sampler.policy)
        batch = learner.collect(sampler, sampler.sample_tasks(tasks))
        initial = copy.deepcopy(sampler.policy.state_dict())

        def run() -> None:
            sampler.policy.load_state_dict(initial)
            learner.update(batch)

        return run

    with _samplers(FAMILIES["cheetah"], hidden, episodes, horizon, options) as samplers:
        yield {name: update(sampler) for name, sampler in samplers.items()}


@contextmanager
def _samplers(
    env_name: str, hidden: int, episodes: int, horizon: int, options: argparse.Namespace
) -> Iterator[dict[str, MultiTaskSampler]]:
    """Yield a sampler with the policy of the package, and one with a module that has the same parameters."""
    env = make_vector_env(env_name)
    policy = get_policy_for_env(env, (hidden, hidden), "tanh", seed=options.seed)
    baseline = LinearFeatureBaseline.for_space(env.single_observation_space)
    env.close()
    assert isinstance(policy, MLPPolicy)
    policies: dict[str, nn.Module] = {BY_HAND: policy, DEFAULT: PlainModule(policy)}
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                MultiTaskSampler(
                    env_name,
                    {},
                    episodes,
                    each,
                    baseline,
                    seed=options.seed,
                    num_workers=0,
                    max_episode_steps=horizon,
                )
            )
            for name, each in policies.items()
        }


def _different(policy: Policy, num_tasks: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        name: (value + 0.05 * torch.randn(value.shape, generator=generator)).detach()
        for name, value in policy.stack_parameters(num_tasks).items()
    }


def _samples(steps: int, num_episodes: int, generator: torch.Generator) -> Samples:
    grid = (1, steps, num_episodes)
    ends = torch.ones((1, num_episodes))
    episodes = TaskEpisodes(
        torch.randn((*grid, OBSERVATION_SIZE), generator=generator),
        torch.randn((*grid, ACTION_SIZE), generator=generator),
        torch.zeros(grid),
        steps * ends,
        0 * ends,
        ends,
        torch.zeros((1, num_episodes, OBSERVATION_SIZE)),
    )
    episodes.advantages = torch.randn(grid, generator=generator)
    return Samples.of(episodes, slice(None), dtype=torch.float32, device=torch.device("cpu"))


def _timed(name: str, work: Callable[[], None], unit: str) -> Callable[[], Measurements]:
    factor = {"s": 1.0, "ms": 1000.0}[unit]

    def turn() -> Measurements:
        start = perf_counter()
        work()
        return {name: factor * (perf_counter() - start)}

    return turn


def _parse(arguments: list[str] | None) -> Any:
    parser = common_options((__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256], help="units of both hidden layers")
    parser.add_argument("--steps", type=int, default=50, help="steps of a turn of acting")
    parser.add_argument("--tasks", type=int, default=4, help="tasks of a turn of the update")
    parser.add_argument("--products", type=int, default=10, help="iterations of conjugate gradients in the update")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.warmup, options.hidden = 1, 0, [4]
        options.steps, options.tasks, options.products = 2, 1, 1
    return options


if __name__ == "__main__":
    main()
