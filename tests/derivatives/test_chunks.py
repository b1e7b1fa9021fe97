"""Work is cut into chunks, taken from the episodes, and distributed among threads."""

import threading
from collections.abc import Callable

import pytest
import torch

from maml_rl.derivatives import ChunkWorkers, LocalStore, ParameterLayout, Workspace, cut, every_nth
from maml_rl.derivatives.chunks import set_gradients
from maml_rl.episode.steps import Steps
from maml_rl.machine import chunk_threads, single_threaded
from tests.synthetic import make_episodes, make_policy

CPU = torch.device("cpu")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_chunks_cover_every_task_once_in_order_small_ones_together() -> None:
    for num_tasks, samples, width in ((40, 2000, 64), (7, 200, 64), (1, 10, 1), (5, 10**7, 64)):
        chunks = cut(num_tasks, samples, width, CPU)
        assert [task for chunk in chunks for task in range(num_tasks)[chunk]] == list(range(num_tasks))
    assert len(cut(40, 20_000, 64, CPU)) == 40
    assert cut(40, 200, 64, CPU)[0] == slice(0, 10)


@pytest.mark.parametrize(("num_tasks", "samples"), [(40, 2000), (40, 500), (20, 1000), (20, 2000), (160, 100)])
def test_chunks_are_enough_for_eight_cores_and_of_almost_equal_size(num_tasks: int, samples: int) -> None:
    sizes = [chunk.stop - chunk.start for chunk in cut(num_tasks, samples, 64, CPU)]
    assert len(sizes) >= 8
    assert len(sizes) % 4 == 0
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, None), (0.5, [0, 2, 4, 6]), (0.25, [0, 4]), (0.01, [0])])
def test_every_nth_spreads_the_episodes_evenly(fraction: float, expected: list[int] | None) -> None:
    indices = every_nth(8, fraction)
    assert (indices if indices is None else indices.tolist()) == expected


def test_samples_of_some_tasks_and_episodes_are_theirs_with_zero_padding() -> None:
    episodes = make_episodes(make_policy("normal"), ((4, 2, 1), (1, 3, 3), (2, 1, 2)))
    observations, advantages = episodes.observations.clone(), episodes.advantages.clone()
    padding = episodes.mask == 0
    episodes.observations[padding] = torch.nan
    episodes.advantages[padding] = torch.inf
    samples = Steps.of_tasks(episodes, slice(1, 3), columns=torch.tensor([0, 2]), dtype=torch.float64, device=CPU)
    torch.testing.assert_close(samples.observations, observations[1:3, :3][:, :, [0, 2]], rtol=0.0, atol=0.0)
    torch.testing.assert_close(samples.advantages, advantages[1:3, :3][:, :, [0, 2]], rtol=0.0, atol=0.0)
    assert samples.weights.sum((1, 2)).tolist() == [1.0, 1.0]
    assert bool(episodes.observations[padding].isnan().all())


def test_layout_views_are_the_parameters_and_share_memory() -> None:
    policy = make_policy("normal")
    layout = ParameterLayout(policy)
    params = {name: param.detach() for name, param in policy.named_parameters()}
    flat = layout.flatten(params)
    assert torch.equal(flat, torch.nn.utils.parameters_to_vector(policy.parameters()))
    views = layout.views(flat)
    assert all(torch.equal(views[name], param) for name, param in params.items())
    views["sigma"].fill_(5.0)
    assert int((flat == 5.0).sum()) == 2
    stacked = policy.stack_parameters(3)
    assert torch.equal(layout.flatten(stacked), layout.flatten(dict(policy.named_parameters())).expand(3, -1))


def test_workspace_reuses_its_memory() -> None:
    workspace, like = Workspace(), torch.zeros(1)
    first = workspace.take("a", (4, 5), like)
    assert workspace.take("a", (2, 3), like).data_ptr() == first.data_ptr()
    assert workspace.take("b", (4, 5), like).data_ptr() != first.data_ptr()
    assert workspace.take("a", (2, 3), torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.usefixtures("two_threads")
def test_workers_use_two_threads_of_one_core_each_and_restore_the_number() -> None:
    both = threading.Barrier(2, timeout=20)

    def work(item: int) -> tuple[int, int, bool]:
        both.wait()
        return item, torch.get_num_threads(), torch.is_grad_enabled()

    with ChunkWorkers(CPU) as workers:
        assert torch.get_num_threads() == 1
        assert workers.map(work, [3, 1]) == [(3, 1, False), (1, 1, False)]
    assert torch.get_num_threads() == 2


def in_another_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.usefixtures("two_threads")
def test_other_threads_that_set_their_number_change_nothing_for_the_workers() -> None:
    both = threading.Barrier(2, timeout=20)

    def work(item: int) -> int:
        both.wait()
        in_another_thread(lambda: torch.set_num_threads(2))
        return torch.get_num_threads()

    with ChunkWorkers(CPU) as workers:
        # New threads take the number that was set last, in any thread.
        in_another_thread(lambda: torch.set_num_threads(2))
        assert workers.map(work, [3, 1]) == [1, 1]
        assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("two_threads")
def test_workers_in_a_block_of_single_threads_are_as_many_as_outside_of_it() -> None:
    both = threading.Barrier(2, timeout=20)
    with single_threaded(), single_threaded():
        assert (torch.get_num_threads(), chunk_threads()) == (1, 2)
        with ChunkWorkers(CPU) as workers:
            workers.map(lambda item: both.wait(), [0, 1])
        with ChunkWorkers(CPU, most=1) as workers:
            assert {*workers.map(lambda item: threading.get_ident(), [0, 1])} == {threading.get_ident()}
    assert (torch.get_num_threads(), chunk_threads()) == (2, 2)
    with single_threaded(3):
        assert chunk_threads() == 3


def test_gradients_of_chunks_are_added_in_their_order() -> None:
    first, second, unused = (torch.zeros((), requires_grad=True) for _ in range(3))
    # The 1 is lost beside 1e8.
    of_chunks = [[torch.tensor(1e8), None, None], [torch.tensor(1.0), torch.tensor(2.0), None]]
    set_gradients([first, second, unused], [*of_chunks, [torch.tensor(-1e8), torch.tensor(3.0), None]])
    assert [first.grad, second.grad, unused.grad] == [0.0, 5.0, None]


@pytest.mark.usefixtures("two_threads")
def test_workers_raise_an_error_restore_the_threads_and_leave_none() -> None:
    before = threading.active_count()

    def work(item: int) -> None:
        raise ArithmeticError(f"item {item}")

    with pytest.raises(ArithmeticError, match="item 5"), ChunkWorkers(CPU) as workers:
        workers.map(work, [5, 6, 7])
    assert torch.get_num_threads() == 2
    assert threading.active_count() == before


def test_store_tells_the_episodes_before_each_inner_step_from_those_after_the_last() -> None:
    policy = make_policy("normal")
    phases = [make_episodes(policy, [[2], [1]], seed=seed) for seed in range(3)]
    store = LocalStore(phases, policy)
    assert all(kept is given for kept, given in zip(store.train_episodes, phases[:2], strict=True))
    assert store.valid_episodes is phases[2]
