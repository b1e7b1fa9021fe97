"""Updates where the episodes are: the same bytes for threads of this process and for any number of hosts."""

import importlib
import pickle
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hosted_learning import NUM_TASKS, Learned, config_of, learn, learned_here, learned_once
from hosts_in_memory import Hosts, put_on_hosts

from maml_rl.derivatives import ROOM, EpisodeStore, LocalStore
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.sampling import evaluation_update, make_sampler, refuse_too_large_evaluations, training_update
from maml_rl.metalearners.metalearner import MetaLearner
from maml_rl.plan import Plan
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.remote_store import WORKER_ROOM, RemoteBatch, RemoteStore, Request, pickle_tensors
from maml_rl.seeding import PhaseStreams
from tests.metalearners.small_algorithms import once_a_kind

pytestmark = pytest.mark.usefixtures("small_chunks")
ALGORITHMS = ("maml-trpo", "promp", "meta-sgd", "cavia", "reptile", "anil", "e-maml", "dice-maml", "rl2", "varibad")


def on_hosts(
    algorithm: str, num_hosts: int, losses: float = 0.0, iterations: int = 2, **settings: Any
) -> tuple[Learned, Hosts]:
    experiment = make_experiment(config_of(algorithm, **settings))
    with make_sampler(experiment) as sampler:
        hosts = put_on_hosts(sampler, num_hosts, losses)
        return learn(experiment, sampler, iterations, on_hosts=True), hosts


def test_slots_of_blocks_reach_from_first_to_last_with_the_tasks_of_the_blocks() -> None:
    tasks = tuple({"goal": [number, 0.0]} for number in range(6))
    policy = NormalMLPPolicy(2, 2, (4,))
    phase = Phase(tasks, policy, None, PhaseStreams(0, 0, 0), 2, 4)
    batch = RemoteBatch.of(phase, Plan(num_steps=0, tasks_per_chunk=1), None, record_log_probs=False)
    batch = replace(batch, blocks=(range(2), range(2, 3), range(3, 6)))
    assert batch.slots_of((1,)) == (slice(4, 6), (tasks[2], tasks[2]))
    assert batch.slots_of((0, 2)) == (slice(0, 12), tuple(tasks[number] for number in (0, 0, 1, 1, 3, 3, 4, 4, 5, 5)))


@pytest.mark.parametrize("algorithm", once_a_kind(ALGORITHMS))
def test_hosts_that_are_lost_in_all_stages_change_no_byte(algorithm: str) -> None:
    expected = learned_once(algorithm)
    assert len({each["digest"] for each in expected.metrics}) == 2
    found, hosts = on_hosts(algorithm, 3, losses=0.08)
    assert hosts.lost > (0 if algorithm == "reptile" else 5)
    assert found == expected


def test_parameters_and_metrics_have_the_same_bytes_on_more_hosts_than_blocks() -> None:
    assert on_hosts("maml-trpo", 5)[0] == learned_once("maml-trpo")


@pytest.mark.parametrize("algorithm", ["maml-trpo", "promp", "rl2", "varibad"])
def test_answers_are_the_same_with_empty_memos(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, usual, emptied = learned_once(algorithm), LocalStore._map_blocks, []

    def without_memory(self: LocalStore, *question: Any) -> Any:
        emptied.append(sum(len(cache.keys() - {ROOM}) for _, cache in self._chunks))
        for _, cache in self._chunks:
            cache.clear()
        return usual(self, *question)

    monkeypatch.setattr(LocalStore, "_map_blocks", without_memory)
    assert learned_here(algorithm) == expected
    assert sum(emptied) > NUM_TASKS


def test_episodes_that_end_early_have_the_same_bytes() -> None:
    # Bodies that fall end their episodes early.
    settings = {"env-name": "HopperRandParams-v5", "max-episode-steps": 40}
    expected = learned_here("maml-trpo", 1, **settings)
    assert expected.metrics[0]["steps"] < 2 * NUM_TASKS * 4 * 40
    assert on_hosts("maml-trpo", 2, iterations=1, **settings)[0] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm-settings": {"inner-loss": "likelihood-ratio", "differentiate-divisor": True}, "num-steps": 2},
        {
            "baseline": "zero",
            "bootstrap": False,
            "slots-per-task": 2,
            "algorithm-settings": {"curvature-fraction": 0.5},
        },
        {"num-steps": 2, "algorithm-settings": {"first-order": True}},
    ],
)
def test_update_on_hosts_has_the_same_bytes_for_other_settings(settings: dict[str, Any]) -> None:
    assert on_hosts("maml-trpo", 2, iterations=1, **settings)[0] == learned_here("maml-trpo", 1, **settings)


def test_bytes_from_hosts_do_not_grow_with_the_length_of_episodes() -> None:
    def received(horizon: int) -> int:
        settings = {"env-name": "HalfCheetahDir-v5", "max-episode-steps": horizon}
        return sum(on_hosts("maml-trpo", 2, iterations=1, **settings)[1].received)

    short, long = received(10), received(40)
    assert long < 1.1 * short


def test_evaluation_gets_returns_and_infos_from_hosts_and_episodes_only_on_request() -> None:
    experiment = make_experiment(config_of("meta-sgd", **{"num-steps": 2}))
    digests: list[list[str]] = []

    def fetch(batch: EpisodeStore) -> None:
        digests.append([episodes.digest() for episodes in batch.phases])

    def evaluated(num_hosts: int, **options: Any) -> tuple[Any, int]:
        with make_sampler(experiment, evaluation=True) as sampler:
            hosts = put_on_hosts(sampler, num_hosts)
            if not num_hosts:
                sampler.placement = sampler.placement.replace(update="driver")
            found = evaluate(experiment, tasks=NUM_TASKS, repetitions=2, sampler=sampler, **options)
            return found, sum(hosts.received)

    expected, _ = evaluated(0, on_batch=fetch)
    found, received = evaluated(2)
    assert found.returns.tobytes() == expected.returns.tobytes()
    assert {name: info.tobytes() for name, info in found.infos.items()} == {
        name: info.tobytes() for name, info in expected.infos.items()
    }
    # Two repetitions of three phases; only their returns are sent.
    assert received < 2 * found.returns.nbytes + 6000
    with_episodes, received = evaluated(2, on_batch=fetch)
    assert with_episodes.returns.tobytes() == expected.returns.tobytes()
    assert received > 10 * found.returns.nbytes
    assert digests[:2] == digests[2:]


@pytest.mark.parametrize("algorithm", ["rl2", "rsac"])
def test_evaluation_of_trials_gets_returns_from_hosts_alone(algorithm: str) -> None:
    experiment = make_experiment(config_of(algorithm, **{"observe-last": True, "max-episode-steps": 12}))
    found, received = [], []
    for num_hosts in (0, 3):
        with make_sampler(experiment, evaluation=True) as sampler:
            hosts = put_on_hosts(sampler, num_hosts) if num_hosts else None
            found.append(evaluate(experiment, tasks=NUM_TASKS, sampler=sampler))
            received += [] if hosts is None else [sum(hosts.received)]
    assert found[0].columns == "episode"
    assert found[1].returns.tobytes() == found[0].returns.tobytes()
    # One number per episode.
    assert 0 < received[0] < found[0].returns.nbytes + 3000


@pytest.mark.parametrize(
    ("settings", "in_training", "in_evaluation"),
    [
        ({}, "driver", "driver"),
        ({"backend": "ray"}, "auto", "auto"),
        ({"backend": "ray", "update": "workers"}, "workers", "workers"),
        ({"backend": "ray", "update": "driver"}, "driver", "driver"),
        # It collects in another thread, and evaluates while that thread waits.
        ({"backend": "ray", "prefetch": 1}, "driver", "auto"),
        ({"backend": "ray", "memory": "gru"}, "driver", "driver"),
        # Its update needs a replay, and its trials adapt by themselves.
        ({"backend": "ray", "algorithm": "rsac", "observe-last": True}, "driver", "auto"),
        ({"backend": "ray", "algorithm": "rl2", "observe-last": True}, "auto", "auto"),
        ({"backend": "ray", "algorithm": "pearl"}, "driver", "driver"),
    ],
)
def test_update_and_evaluation_are_in_the_workers_of_a_cluster_where_they_can_be(
    settings: dict[str, Any], in_training: str, in_evaluation: str
) -> None:
    experiment = make_experiment(config_of(**{"algorithm": "maml-trpo", **settings}))
    assert (training_update(experiment), evaluation_update(experiment)) == (in_training, in_evaluation)
    with pytest.raises(ConfigError, match="lower one of these") if in_evaluation == "driver" else nullcontext():
        refuse_too_large_evaluations(experiment, 10**9, 1)


class Whole(MetaLearner):
    """A learner that needs whole episodes."""

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        return {"mean": float(batch.valid_episodes.rewards.mean()), "digests": [each.digest() for each in batch.phases]}


@pytest.fixture
def hosted() -> Iterator[tuple[MetaLearner, Any]]:
    experiment = make_experiment(config_of("maml-trpo"))
    with make_sampler(experiment) as sampler:
        yield experiment.metalearner, sampler


def test_learner_that_needs_whole_episodes_gets_them(hosted: tuple[MetaLearner, Any]) -> None:
    learner, sampler = hosted
    tasks = sampler.sample_tasks(NUM_TASKS)
    whole = Whole(learner.policy, learner.rule, plan=learner.plan)
    expected = whole.collect(sampler, tasks)
    put_on_hosts(sampler, 2)
    sampler.seek(sampler.iteration)
    assert not isinstance(whole.collect(sampler, tasks), RemoteStore)
    sampler.seek(sampler.iteration)
    batch = learner.collect(sampler, tasks)
    assert isinstance(batch, RemoteStore)
    assert len(batch.phases) == 2
    assert whole.update(batch) == whole.update(expected)
    for found, other in zip(batch.phases, expected.phases, strict=True):
        assert torch.equal(found.advantages, other.advantages)
        assert (found.horizon, found.gamma, found.rule) == (other.horizon, other.gamma, other.rule)
        assert str(found.tasks) == str(other.tasks)


def test_update_in_the_workers_is_refused_where_it_is_impossible() -> None:
    for settings, message in (
        (
            {"algorithm": "rsac", "observe-last": True},
            "'update' in the test: rsac needs whole episodes in the main process",
        ),
        ({"memory": "gru"}, "the memory of .* needs whole episodes; use `update: driver`"),
        ({"prefetch": 1}, "prefetch collects a batch while the workers would compute the update"),
        ({"algorithm": f"{__name__}:Whole"}, "needs whole episodes in the main process; use `update: driver`"),
    ):
        config = config_of(**{"algorithm": "maml-trpo", "backend": "ray", "update": "workers", **settings})
        experiment = make_experiment(config)
        with pytest.raises(ConfigError, match=message):
            make_sampler(experiment)
    experiment = make_experiment(config_of("maml-trpo", update="workers"))
    with pytest.raises(ConfigError, match="update='workers' needs workers in which the policy acts"):
        make_sampler(experiment)
    # A run trained this way can be evaluated in any placement.
    make_sampler(experiment, evaluation=True).close()


def test_auto_uses_hosts_only_if_each_gets_a_share(hosted: tuple[MetaLearner, Any]) -> None:
    learner, sampler = hosted
    for num_hosts, expected in ((4, True), (5, False)):
        put_on_hosts(sampler, num_hosts)
        for update, on_hosts in (("workers", True), ("auto", expected), ("driver", False)):
            sampler.placement = sampler.placement.replace(update=update)
            batch = learner.collect(sampler, sampler.sample_tasks(NUM_TASKS))
            assert isinstance(batch, RemoteStore) is on_hosts


class Elsewhere:
    """A question whose module the hosts do not have."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("module_of_nobody",)


def test_host_without_the_module_of_the_learner_is_a_clear_error(hosted: tuple[MetaLearner, Any]) -> None:
    learner, sampler = hosted
    put_on_hosts(sampler, 1)
    batch = learner.collect(sampler, sampler.sample_tasks(NUM_TASKS))
    with pytest.raises(ConfigError, match=r"No module named 'module_of_nobody'.*use update: driver"):
        batch.map(cast(Any, Elsewhere()))


# What a host keeps.


def scaled(phases: Any, cache: Any, factor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the returns of a chunk, times a factor."""
    return factor * phases[0].rewards.sum()


@pytest.fixture
def kept(hosted: tuple[MetaLearner, Any]) -> Any:
    """A batch on one host, and that host."""
    learner, sampler = hosted
    hosts = put_on_hosts(sampler, 1)
    batch: Any = learner.collect(sampler, sampler.sample_tasks(NUM_TASKS))
    assert len(batch._blocks) > 1
    return batch, hosts


def test_host_gets_what_is_shared_once_and_forgets_what_it_computed(kept: Any) -> None:
    batch, hosts = kept
    (host,) = hosts.hosts
    factor = torch.tensor(2.0)
    batch.share(factor)
    alive, requests, beats = weakref.ref(factor), [], []
    host._beat = lambda: beats.append(len(requests))
    carry_out = batch._carry_out
    batch._carry_out = lambda request: requests.append(request) or carry_out(request)
    assert len({tuple(map(float, batch.map(scaled, factor))) for _ in range(3)}) == 1
    (reference,) = requests[0].shared
    assert pickle.loads(hosts.objects[reference.held]) == factor
    assert list(host._received) == [batch._reference.number, reference.number]
    # A sign of life after each block.
    assert beats == [number for number in (1, 2, 3) for _ in batch._blocks]
    del factor
    # Another object could have its identity otherwise.
    assert alive() is not None


def test_caches_of_a_host_share_its_room_over_all_blocks(kept: Any) -> None:
    batch, hosts = kept
    (host,) = hosts.hosts
    rooms = [cache[ROOM] for block in host._stores.values() for _, cache in block._chunks]
    assert rooms == [WORKER_ROOM // number for number in range(1, len(rooms) + 1)]
    assert host._begun == {}
    for block, kept_there in host._stores.items():
        assert {each.first_task for each in kept_there.fetch()} == {batch._batch.tasks_of(block).start}


def test_request_for_fewer_phases_returns_the_parameters_of_the_next(kept: Any) -> None:
    batch, hosts = kept
    hosts.replace(0)
    (host,) = hosts.hosts
    (params,) = host.carry_out(Request(batch._reference, (1,), sampled=1)).values()
    assert len(host._begun[1].phases) == 1
    assert {name: value.shape[0] for name, value in params.items()} == dict.fromkeys(
        params, len(range(NUM_TASKS)[batch._batch.tasks_of(1)])
    )
    assert host.carry_out(Request(batch._reference, (1,))) == {1: None}


@pytest.mark.parametrize(("whole_trials", "recorded"), [(True, False), (True, True), (False, False)])
def test_only_trials_as_they_were_sampled_are_fetched_from_shared_memory(
    whole_trials: bool, recorded: bool, kept: Any
) -> None:
    batch, _ = kept
    batch._batch = SimpleNamespace(plan=SimpleNamespace(whole_trials=whole_trials), record_log_probs=recorded)
    batch._as_sampled = lambda: "trials"
    assert (batch.fetch() == ["trials"]) == (whole_trials and not recorded)


def test_tensors_are_the_same_on_the_other_side() -> None:
    plain = torch.arange(12.0).reshape(3, 4)
    for tensor in (plain, plain.T, plain[:, ::2], plain.clone().requires_grad_(), plain.bfloat16(), plain > 3):
        other = pickle.loads(pickle_tensors(tensor))
        assert torch.equal(other, tensor)
        assert (other.stride(), other.dtype) == (tensor.stride(), tensor.dtype)
        assert other.requires_grad == tensor.requires_grad
