"""The protocol of metalearners.

Training, evaluation, checkpoints, saved policies and reports use only this protocol, so that an algorithm is one file:
a subclass of `MetaLearner` with its settings and its `update`, registered by name.
"""

import copy
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from maml_rl.adaptation import AdaptationRule, RuleLike, as_rule
from maml_rl.config import Config, SettingsModel
from maml_rl.config.config import OF_LEARNERS
from maml_rl.derivatives import Cache, EpisodeStore, LocalStore
from maml_rl.envs.global_generators import seeded_generators
from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.experience import Replay
from maml_rl.machine import single_threaded
from maml_rl.plan import Plan, Sampler
from maml_rl.policies import GRUPolicy, Memory, Policy, as_policy, get_policy_for_env
from maml_rl.policies.memory_policy import PolicyWithMemory
from maml_rl.policies.module_policy import unsaved
from maml_rl.seeding import NamedStreams, Purpose, StreamKey, check_seed, torch_seed

logger = logging.getLogger(__name__)

# State of a metalearner: tensors and JSON values, under flat names.
State: TypeAlias = dict[str, Any]
# The name of a learner's only optimizer, whose entries have no further name.
SINGLE = "optimizer"
# The end of the name of an optimizer's numbers that change, such as a step size.
_GROUPS = "groups"


@dataclass(frozen=True, slots=True)
class Adapted:
    """The result of adapting a policy to each of M tasks.

    Attributes:
        phases: the episodes used for adaptation, in the order in which they were sampled.
        params: parameters by name, (M, ...) of each task's policy, which may include a latent context, or of the
            policy's own shape where tasks share them; None for the policy's own. `sampler.rollout` takes them.
        memory: the policy's memory in each task, tensors (M, ...); empty for a policy without a memory.
    """

    phases: Sequence[TaskEpisodes] = ()
    params: Mapping[str, Tensor] | None = None
    memory: Memory = ()

    def policy_of(self, policy: Policy, task: int = 0) -> Policy:
        """Return a copy of the policy that was adapted, which is ready to act in the task of this number."""
        ready = copy.deepcopy(policy)
        if self.params is not None:
            shapes = dict(ready.named_parameters())
            of_task = {
                name: param if param.shape == shapes[name].shape else param[task] for name, param in self.params.items()
            }
            ready.load_state_dict(of_task, strict=False)
        return PolicyWithMemory(ready, [part[task] for part in self.memory]) if self.memory else ready


class MetaLearner(ABC):
    """One algorithm: its collection, its update of the meta-policy, its adaptation at test time, and its state.

    A subclass implements `update`. There are three kinds: this class is the base of learners whose inner loop takes
    gradient steps, `TrialLearner` of those whose policy adapts by its memory, in a trial, and `RecordedLearner` of
    those that never sample. One that adapts in another way also implements `adapt`.

    A learner draws from `generator` and `torch_generator`: its own streams, keyed by its seed and the number of the
    update, so that a resumed run needs only the checkpoint's iteration. torch's global state is neither read nor
    changed. For code that uses no other generator, such as the constructors of `torch.nn`, `learn` and
    `make_experiment` seed the global generators.

    Args:
        policy: a policy, or a module that `as_policy` takes; `update` changes its parameters in place.
        rule: the inner loop; a step size means plain gradient steps. None for a learner that does not adapt by it.
        settings: of the class's own `Settings`; its defaults if left out.
        plan: how many inner steps are collected in training, and how advantages are estimated.
        device: where the update is computed.
        seed: of what the learner draws, in [0, 2**32).

    Attributes:
        Settings: the algorithm's settings; in a config they are the section `algorithm-settings`.
        uses: the general settings of `OF_LEARNERS` that it uses, by their keys; a config that gives another one is
            refused. The default is all of them; with a policy of the user's own, its settings are not used either.
        instead: for settings that it does not use, the key that does their job, where there is one; besides those of
            its base classes.
        columns: a noun for what the columns of `returns` count, in metrics, tables and reports: "step" for gradient
            steps, where the first column is before any; or another unit of a test, such as "episode" of a trial.
        whole_trials: whether the episodes of a task are one trial; see `TrialLearner`.
        tasks_per_chunk: how many tasks the update computes at once, at most; see `Plan`.
        tests_without_noise: whether the policy acts without noise after training, as soft actor-critics do, whose noise
            is there to explore.
        samples: whether training samples episodes; see `RecordedLearner`.
        record_log_probs: whether the sampler records the log-probability of every action.
        rule: the inner loop. `update` may replace it (by one with newly learned step sizes, say), but never changes it
            in place: with `prefetch` another thread is using it; see `acting_state`.
        experience: replays of trials by name, if the learner has any; the run folder keeps them. `update` appends to
            them, never `collect`: with `prefetch` that runs ahead, in another thread.
        maps_over_tasks: whether `update` maps functions over the batch (`batch.map`), so that it can run where the
            episodes are; otherwise they move to it. The episodes of a test always stay there.
        optimizer: an optimizer from `torch.optim`, if the learner has one; its state is kept in checkpoints.
        optimizers: those of a learner with several, by name; their state is kept, too.
        networks: the learner's networks besides the policy, if any; they are saved under the names of their parameters.
        training_state: prefixes of those names in `state_dict` that only further training needs. The zoo omits them,
            and `load_state_dict` then keeps the current values.
    """

    Settings: ClassVar[type[SettingsModel]] = SettingsModel
    uses: ClassVar[frozenset[str]] = frozenset(OF_LEARNERS)
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({})
    columns: ClassVar[str] = "step"
    whole_trials: ClassVar[bool] = False
    tasks_per_chunk: int | None = None
    tests_without_noise: bool = False
    samples: ClassVar[bool] = True
    record_log_probs: ClassVar[bool] = False
    maps_over_tasks: ClassVar[bool] = False
    experience: Mapping[str, Replay] = MappingProxyType({})
    source_returns: NDArray[np.float32] | None = None
    learned_tasks: Container[Task] = ()
    optimizer: torch.optim.Optimizer | None = None
    optimizers: Mapping[str, torch.optim.Optimizer] = MappingProxyType({})
    networks: nn.Module | None = None
    training_state: ClassVar[tuple[str, ...]] = (SINGLE,)
    # What of the policy a warning has named.
    _named: frozenset[str] = frozenset()
    # The numbers of the optimizers as the constructor has left them.
    _first_numbers: Mapping[str, list[dict[str, Any]]] | None = None

    def __init__(
        self,
        policy: nn.Module,
        rule: RuleLike | None = 0.1,
        *,
        settings: SettingsModel | None = None,
        plan: Plan | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.seed = check_seed(seed)
        self._streams = NamedStreams(StreamKey(self.seed, Purpose.LEARNER_DRAWS))
        self.policy = as_policy(policy)
        _check_memory(type(self), self.policy)
        self.rule = None if rule is None else as_rule(rule)
        self.settings = self.Settings() if settings is None else settings
        self.plan = plan or Plan()
        self.device = torch.device(device)

    @classmethod
    def complete(cls, settings: Any, config: Config) -> Any:
        """Return the settings as a run records them, with values that depend on the rest of its config."""
        return settings

    @classmethod
    def make_policy(cls, env: Any, config: Config, settings: Any) -> Policy:
        """Make the initial policy for the spaces of `env`: a perceptron, or with `memory` a recurrent layer.

        Raises:
            TypeError: If a space is not supported.
            ConfigError: If the settings do not fit each other, or the environment.
        """
        if config.memory is not None:
            if len(config.hidden_sizes) != 1:
                raise config.error("a policy with a memory has one layer; give one number", "hidden-sizes")
            return GRUPolicy(
                env.single_observation_space,
                env.single_action_space,
                config.hidden_sizes[0],
                cell=config.memory,
                value="none",
                conv_layers=config.conv_layers,
                image_scale=config.image_scale,
                seed=config.seed,
            )
        return get_policy_for_env(
            env,
            config.hidden_sizes,
            config.nonlinearity,
            seed=config.seed,
            output_scale=config.output_scale,
            conv_layers=config.conv_layers,
            image_scale=config.image_scale,
        )

    @classmethod
    def make_rule(cls, policy: Policy, config: Config, settings: Any) -> AdaptationRule | None:
        """Make the inner loop; None for a learner of whole trials."""
        return None if cls.whole_trials else AdaptationRule(config.fast_lr)

    @classmethod
    def from_config(cls, policy: Policy, config: Config, settings: Any, device: torch.device | str = "cpu") -> Self:
        """Make the metalearner that a config describes.

        Raises:
            ConfigError: If there are no inner steps that the config's method could leave out, a trial is to be in
                several slots, or the settings do not fit to the rest; see `SettingsModel.check_with`.
        """
        settings.check_with(config)
        if cls.whole_trials and config.slots_per_task not in (None, 1):
            raise config.error("the episodes of a trial follow each other in one slot; leave it out", "slots-per-task")
        rule = cls.make_rule(policy, config, settings)
        if rule is None and config.method != "maml":
            raise config.error(
                f"{config.algorithm} adapts without gradient steps, in training as afterwards; leave it out", "method"
            )
        return cls(policy, rule, settings=settings, plan=Plan.of(config), device=device, seed=config.seed)

    def open_data(self, config: Config, env: MetaVectorEnv) -> None:
        """Open recorded data for environments like `env`, before a training; a ConfigError if they do not fit."""
        return

    def begin_schedules(self) -> None:
        """Restart schedules, such as falling step sizes: this run begins with another run's learner."""
        return

    @property
    def takes_steps(self) -> bool:
        """Whether `adapt` and `test` use `num_steps`: adaptation is that many steps, each with episodes."""
        return self.rule is not None

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the learner's NumPy generator for a purpose, any name; every `learn` starts a new stream."""
        return self._streams.numpy(purpose)

    def torch_generator(self, purpose: str) -> torch.Generator:
        """Return the learner's torch generator for a purpose, on the CPU."""
        return self._streams.torch(purpose)

    def learn(self, batch: EpisodeStore, number: int) -> dict[str, Any]:
        """Do meta-update `number` of a run, from 0: `update`, with the random streams of that number.

        The seed and the number determine what is drawn, however often the run was interrupted. They also seed torch's
        global generators, for code that draws from these, which are restored afterward. torch computes every operation
        on one core, so that the number of cores does not change the result; what is computed in chunks uses all.

        What it changes in the policy besides parameters and persistent buffers is named once, in a warning.
        """
        self._note_first_numbers()
        before = unsaved(self.policy)
        self._streams.move_to(StreamKey(self.seed, Purpose.LEARNER_DRAWS, number, 1))
        seed = torch_seed(StreamKey(self.seed, Purpose.LEARNER_UPDATE, number))
        with seeded_generators(seed, self.device), single_threaded():
            metrics = self.update(batch)
        check_metrics(metrics, f"{type(self).__name__}.update")
        changed = {name for name, value in unsaved(self.policy).items() if before.get(name, value) != value}
        if changed - self._named:
            logger.warning(
                "%s.update changes %s of the policy, and its copies in workers or ahead of time, and checkpoints, get "
                "parameters and persistent buffers alone; call register_buffer for it, unless it is a cache",
                type(self).__name__,
                " and ".join(map(repr, sorted(changed - self._named))),
            )
            self._named |= changed
        return metrics

    def collect(self, sampler: Sampler, tasks: Sequence[Task]) -> EpisodeStore:
        """Collect the batch of one update, where the update runs."""
        return sampler.collect(tasks, self.planned(self.plan.num_steps, in_this_process=not self.maps_over_tasks))

    def planned(self, num_steps: int, rule: AdaptationRule | None = None, **changes: Any) -> Plan:
        """Return the plan for this many inner steps by a rule, None for the learner's own."""
        return self.plan.replace(
            num_steps=num_steps,
            rule=rule or self.rule,
            whole_trials=self.whole_trials,
            tasks_per_chunk=self.tasks_per_chunk,
            device=self.device,
            **changes,
        )

    def store_of(self, phases: Sequence[TaskEpisodes]) -> EpisodeStore:
        """Return the batch of episodes in this process, before each inner step and after the last, for `update`."""
        return LocalStore(phases, self.policy, self.device, tasks_per_chunk=self.tasks_per_chunk)

    def acting_state(self) -> dict[str, Tensor]:
        """Return copies, under flat names, of the state that `collect` reads and updates change, besides the policy.

        With `prefetch` a batch is collected while updates continue, by a `collector` that gets these copies.
        """
        return {}

    def collector(self, state: Mapping[str, Tensor]) -> Self:
        """Return a learner that collects with the result of `acting_state`, in another thread, while this one learns.

        It is a copy of this learner: it must not share what an update changes in place, but may share what it replaces.
        """
        return copy.copy(self)

    @abstractmethod
    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Improve the policy's parameters.

        Args:
            batch: from `collect`: `batch.phases` are the episodes, and `batch.map` computes on chunks of tasks, where
                these are.

        Returns:
            Metrics by name: numbers and booleans.

        Raises:
            NonFiniteError: If the loss or its gradient is not finite.
        """

    def adapt(
        self, sampler: Sampler, tasks: Sequence[Task], num_steps: int = 1, rule: AdaptationRule | None = None
    ) -> Adapted:
        """Adapt the sampler's policy to tasks, as after training; neither policy nor learner changes.

        Random numbers for it come from `sampler.generator`.

        Args:
            sampler: samples the episodes.
            tasks: M tasks.
            num_steps: of adaptation; a learner that does not adapt in steps ignores it.
            rule: another inner loop than the learner's own, for one that adapts by gradient steps.
        """
        if not self._adapts_by_plan(rule):
            return Adapted()
        return adapt(sampler, tasks, self.planned(num_steps, rule, deterministic=self.tests_without_noise))

    def _adapts_by_plan(self, rule: AdaptationRule | None) -> bool:
        """Whether a sampler adapts the policy: in a trial, or by gradient steps."""
        return self.whole_trials or (rule or self.rule) is not None

    def test(
        self, sampler: Sampler, tasks: Sequence[Task], num_steps: int = 1, rule: AdaptationRule | None = None
    ) -> EpisodeStore:
        """Adapt to tasks, and sample what `returns` reads; nothing is learned. See `adapt` for the arguments."""
        deterministic = self.tests_without_noise
        if self._adapts_by_plan(rule) and type(self).adapt is MetaLearner.adapt:
            plan = self.planned(num_steps, rule, deterministic=deterministic, for_update=False)
            return sampler.collect(tasks, plan)
        adapted = self.adapt(sampler, tasks, num_steps, rule)
        return self.store_of([*adapted.phases, sampler.rollout(tasks, adapted.params, deterministic=deterministic)])

    def returns(self, batch: EpisodeStore) -> Tensor:
        """Return the undiscounted returns of the episodes, (M, columns, B): one column for each phase.

        A learner of whole trials has one for each episode of the trial.
        """
        returns = torch.cat(batch.map(_returns_of))
        return returns.mT if self.whole_trials else returns

    def infos(self, batch: EpisodeStore) -> dict[str, Tensor]:
        """Return one number of each recorded info for every episode, (M, columns, B) by name."""
        of_chunks = batch.map(_infos_of)
        infos = {name: torch.cat([chunk[name] for chunk in of_chunks]) for name in of_chunks[0]}
        return {name: info.mT for name, info in infos.items()} if self.whole_trials else infos

    def state_dict(self) -> State:
        """Return the learner's state besides its policy, under flat names: tensors and JSON values.

        The state of `optimizer`, of `optimizers` and of `networks` is part of it. A resumed run is bit-identical if
        everything that `update` reads is here. A tuple comes back as a list.
        """
        states: State = {}
        first = self._note_first_numbers()
        for prefix, optimizer in _by_prefix(self.optimizer, self.optimizers).items():
            for index, entries in optimizer.state_dict()["state"].items():
                states |= {f"{prefix}.{index}.{entry}": value for entry, value in entries.items()}
            now = _numbers(optimizer)
            # A learner may add groups of parameters.
            then = [*first.get(prefix, []), *[{} for _ in now]]
            changed = [
                {name: value for name, value in numbers.items() if name not in before or before[name] != value}
                for numbers, before in zip(now, then, strict=False)
            ]
            if any(changed):
                states[f"{prefix}.{_GROUPS}"] = changed
        return states | ({} if self.networks is None else self.networks.state_dict())

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` returned; a ValueError if it does not fit."""
        self._note_first_numbers()
        for prefix, optimizer in _by_prefix(self.optimizer, self.optimizers).items():
            _load_optimizer(optimizer, state, prefix)
        if self.networks is not None:
            _load_networks(self.networks, state, self.training_state)

    def _note_first_numbers(self) -> Mapping[str, list[dict[str, Any]]]:
        """Return the numbers of the optimizers before the first update, which every construction gives again."""
        if self._first_numbers is None:
            optimizers = _by_prefix(self.optimizer, self.optimizers)
            self._first_numbers = {prefix: _numbers(optimizer) for prefix, optimizer in optimizers.items()}
        return self._first_numbers


def adapt(sampler: Sampler, tasks: Sequence[Task], plan: Plan) -> Adapted:
    """Adapt the sampler's policy to tasks: by the gradient steps of a plan, new episodes before each, or by a trial.

    In a trial the policy's memory adapts while it acts; what it remembers at the end is the result.
    """
    adapted = sampler.collect(tasks, plan.replace(adapt_only=True))
    return Adapted(adapted.phases, adapted.params, adapted.memory)


def _returns_of(phases: Sequence[TaskEpisodes], cache: Cache) -> Tensor:
    """Return the undiscounted return of every episode, (k, phases, B)."""
    return torch.stack([episodes.episode_returns() for episodes in phases], dim=1)


def _infos_of(phases: Sequence[TaskEpisodes], cache: Cache) -> dict[str, Tensor]:
    """Return one number of each recorded info for every episode, (k, phases, B) by name."""
    of_phases = [episodes.episode_infos() for episodes in phases]
    return {name: torch.stack([infos[name] for infos in of_phases], dim=1) for name in of_phases[0]}


def check_metrics(metrics: Any, method: str) -> None:
    """Refuse, by a TypeError, metrics of a method of users that are not numbers, booleans or None by name."""
    if not isinstance(metrics, dict):
        raise TypeError(f"{method} returned {metrics!r:.80}; return a dict of metrics by name, {{}} for none")
    for name, value in metrics.items():
        is_array = isinstance(value, np.ndarray | Tensor) and value.ndim > 0
        single = value.item() if hasattr(value, "item") and not is_array else value
        if not isinstance(name, str) or not isinstance(single, bool | int | float | None):
            raise TypeError(f"{method} returned the metric {name!r} as {value!r:.80}; return a number by name")


def _check_memory(learner: type[MetaLearner], policy: Policy) -> None:
    """Refuse, by a TypeError, a memory that is not differentiable where adaptation takes gradient steps."""
    if policy.has_memory and not learner.whole_trials and type(policy).unroll is Policy.unroll:
        raise TypeError(
            f"{learner.__name__} adapts by gradient steps, and {policy.class_name}, which has a memory, does not "
            "say how to go through sequences differentiably; write its method unroll, or use a policy without a memory"
        )


def _by_prefix(
    single: torch.optim.Optimizer | None, others: Mapping[str, torch.optim.Optimizer]
) -> dict[str, torch.optim.Optimizer]:
    """Return all optimizers of a learner by what the names of their state begin with."""
    for name in others:
        if name == SINGLE or not name.isidentifier():
            raise ValueError(f"an optimizer's name is a word other than {SINGLE!r}, got {name!r}")
    return {
        **({} if single is None else {SINGLE: single}),
        **{f"{SINGLE}.{name}": each for name, each in others.items()},
    }


def without_numbers(state: Mapping[str, Any]) -> State:
    """Return a learner's state without the numbers of its optimizers."""
    of_optimizers = re.compile(rf"{SINGLE}(\.\w+)?\.{_GROUPS}")
    return {name: value for name, value in state.items() if not of_optimizers.fullmatch(name)}


def _numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the numbers of each group of parameters by name, such as its step size."""

    def number(value: Any) -> Any:
        is_array = isinstance(value, Tensor | np.generic)
        return value.item() if is_array and math.prod(value.shape) == 1 else value

    groups = [{name: number(value) for name, value in group.items()} for group in optimizer.param_groups]
    return [{name: value for name, value in group.items() if _is_number(value)} for group in groups]


def _is_number(value: Any) -> bool:
    """Return whether a value of an optimizer is a number, or several."""
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(map(_is_number, value)))


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], prefix: str) -> None:
    """Give an optimizer its state, {"PREFIX.0.exp_avg": tensor, ...}; a ValueError for other parameters."""
    whole = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if match := re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.(\w+)", key):
            entries.setdefault(int(match[1]), {})[match[2]] = value.clone() if isinstance(value, Tensor) else value
    known = {index for group in whole["param_groups"] for index in group["params"]}
    _, _, name = prefix.partition(".")
    whose = f"the state of the optimizer {name!r}" if name else "the optimizer's state"
    if not entries.keys() <= known:
        raise ValueError(f"{whose} is for {len(entries)} parameters, and there are {len(known)}")
    groups, changed = optimizer.param_groups, state.get(f"{prefix}.{_GROUPS}", [{}] * len(optimizer.param_groups))
    if not isinstance(changed, list) or len(changed) != len(groups) or not all(map(_fits, changed, groups)):
        raise ValueError(f"{whose} has other numbers than its {len(groups)} groups of parameters: {changed!r:.80}")
    optimizer.load_state_dict({**whole, "state": entries})
    for group, numbers in zip(optimizer.param_groups, changed, strict=True):
        for entry, value in numbers.items():
            if isinstance(group[entry], Tensor):
                group[entry].fill_(value)
            else:
                group[entry] = tuple(value) if isinstance(value, list) else value


def _fits(numbers: Any, group: Mapping[str, Any]) -> bool:
    """Return whether these are numbers of a group of parameters, by name."""
    if not isinstance(numbers, dict) or not numbers.keys() <= group.keys() - {"params"}:
        return False
    return all(_is_number(tuple(value) if isinstance(value, list) else value) for value in numbers.values())


def _load_networks(networks: nn.Module, state: Mapping[str, Any], optional: Collection[str]) -> None:
    """Give networks what their `state_dict` returned; other names in `state` are ignored.

    If no name begins with one of the `optional` words, the current values of these stay. A ValueError if it is for
    others.
    """
    current = networks.state_dict()
    kinds = {name.partition(".")[0] for name in current}
    mine = {name: value for name, value in state.items() if name.partition(".")[0] in kinds}
    left_out = {*optional} - {name.partition(".")[0] for name in mine}
    mine |= {name: value for name, value in current.items() if name.partition(".")[0] in left_out}
    try:
        networks.load_state_dict(mine)
    except RuntimeError as error:
        what = " ".join(str(error).split())
        raise ValueError(f"the state of {', '.join(sorted(kinds))} does not fit: {what}") from None
