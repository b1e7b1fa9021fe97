"""Every benchmark command runs from end to end with tiny sizes, and writes its table, its JSON and its chart.

Only the cheapest of them run for every change; the others are nightly.
"""

import json
import random
import warnings

import numpy as np
import pytest
import torch

from benchmarks import (
    accelerator,
    device_updates,
    kernels,
    metaworld,
    population,
    sampling,
    scaling,
    single_task,
    slow_environments,
    supervision,
    trials,
    updates,
    waiting,
)
from benchmarks.systems.transforms import JVPLinearization, TracedLinearization
from maml_rl.derivatives import ParameterLayout, PolicyOnSamples, Samples
from maml_rl.functional import reinforce_loss
from maml_rl.machine import usable_cores
from tests.synthetic import make_episodes, make_policy


@pytest.fixture
def files(tmp_path):
    return tmp_path / "result.json", tmp_path / "result.svg"


@pytest.fixture
def restored_generators():
    """The global generators, which learners of other packages seed, have their state back after the test."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def run(main, files, *arguments, positive=True):
    pytest.importorskip("matplotlib")
    main(["--quick", "--quiet", "--json", str(files[0]), "--chart", str(files[1]), *arguments])
    assert files[1].stat().st_size > 1000
    result = json.loads(files[0].read_text())
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["versions"]["mujoco"]
    rows = {row["name"]: row for table in result["tables"].values() for row in table}
    assert all(row["min"] <= row["median"] <= row["max"] for row in rows.values())
    assert not positive or all(row["median"] > 0.0 for row in rows.values())
    return result, rows


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sampling_measures_ours_the_limits_and_installed_systems(files, capsys):
    result, rows = run(sampling.main, files)

    learners = [f"HalfCheetahDir-v5 2 x 2 x 5, {name}" for name in sampling.LEARNERS]
    for workload in ("HalfCheetahDir-v5 2 x 2 x 5", "Walker2DRandParams-v5 2 x 2 x 5", *learners):
        share = rows[f"maml_rl, {workload}"]["median"] / rows[f"replay, {workload}"]["median"]
        assert rows[workload]["median"] == pytest.approx(share)
    names = set(rows) | {remark.split(" was left out")[0] for remark in result["remarks"]}
    assert {other.name for other in sampling.OTHERS} <= names
    assert "How many times as fast as others" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_system_that_is_not_installed_is_left_out_with_a_sentence(files, monkeypatch):
    monkeypatch.setattr(sampling, "OTHERS", (sampling.Other("nobody's", "nobody:make", "nothing", "nobody_s_package"),))

    result, _ = run(sampling.main, files, "--only", "others")

    (remark,) = result["remarks"]
    assert remark.startswith("nobody's was left out, because nobody_s_package is not installed; try: pip install")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_learners_in_parallel_are_compared_with_learners_one_after_another(
    files, stable_baselines3, restored_generators
):
    result, rows = run(single_task.main, files)

    (ratio,) = result["tables"][single_task.RATIOS]
    first, second = (row["median"] for row in result["tables"][single_task.STEPS])
    assert ratio["median"] == pytest.approx(first / second)
    assert len(rows) == 3


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_scaling_measures_cores_environments_and_counts(files):
    cores = ["2", "1"][usable_cores() == 1 :]
    result, rows = run(scaling.main, files, "--cores", *cores, "--environments", "4", "40", "--minutes", "1")

    tables = result["tables"]
    assert [row["median"] <= 1.05 for row in tables[scaling.BUSIEST]] == [True] * len(scaling.CASES)
    seconds = [row["median"] for row in tables[scaling.SECONDS]]
    # In threads and in workers, and on one core once.
    assert len(seconds) == 3 * (2 * len(cores) - 1)
    for sampled, update, whole in zip(seconds[::3], seconds[1::3], seconds[2::3], strict=True):
        assert sampled + update == pytest.approx(whole)
    counts = {row["name"]: row["median"] for row in tables[scaling.COUNTS]}
    assert counts["1 core, messages to workers in a phase"] == 1.0
    # Two phases in both workers, adaptation, a gradient and an evaluation.
    assert counts["2 workers, main process, messages in an iteration"] >= 2 * 2 + 1 + 2
    assert counts["2 workers, main process, CPU time of an update in workers"] > 0.0
    assert counts["of these under Python's lock"] < counts["update on one core, profiled"]
    assert {"physics", "inference", "assembly"} <= {row["name"].split(", ")[1] for row in tables[scaling.STAGES]}
    assert [row["name"] for row in tables[scaling.MEMORY]] == ["4 environments", "40 environments"]
    assert all(0.05 < row["median"] < 5.0 for row in tables[scaling.MEMORY])
    share = rows["40 environments, share"]["median"]
    ours, limit = (rows[f"40 environments, {name}"]["median"] for name in (scaling.SAMPLER, scaling.LIMIT))
    assert share == pytest.approx(ours / limit)


def test_size_that_does_not_make_whole_tasks_is_refused(capsys):
    with pytest.raises(SystemExit):
        scaling.main(["--environments", "50"])

    assert "must be a multiple" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_waiting_measures_every_mode(files):
    result, _ = run(waiting.main, files, "--only", "steps", positive=False)

    assert list(result["tables"]) == [title for title, _ in waiting.QUANTITIES.values()]
    for title, _ in waiting.QUANTITIES.values():
        names = [row["name"] for row in result["tables"][title]]
        assert {name.rpartition(", ")[2] for name in names} == set(waiting.modes_here())
    _, workers, shares = (
        [row["median"] for row in result["tables"][title]] for title, _ in waiting.QUANTITIES.values()
    )
    # The parent acts for both workers, for those that have answered, or for a group of one; or a worker acts itself.
    assert workers[0] == 2.0
    assert workers[3:5] == [1.0, 1.0]
    assert all(1.0 <= mean <= 2.0 for mean in workers)
    assert all(0.0 < share <= 1.0 for share in shares)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_waiting_measures_the_gain_of_prefetch_in_training(files):
    result, _ = run(waiting.main, files, "--only", "training", positive=False)

    assert list(result["tables"]) == [*(title for title, _ in waiting.TRAINING.values()), waiting.GAIN]
    for title, _ in waiting.TRAINING.values():
        assert [row["name"] for row in result["tables"][title]] == list(waiting.PREFETCH)
    rates, waits = ([row["median"] for row in result["tables"][title]] for title, _ in waiting.TRAINING.values())
    assert all(rate > 0.0 for rate in rates)
    assert all(0.0 <= share <= 1.0 for share in waits)
    (gain,) = result["tables"][waiting.GAIN]
    assert gain["median"] == pytest.approx(rates[1] / rates[0])


@pytest.mark.slow
def test_updates_on_a_device_are_written_row_by_row_with_the_errors_of_learners(tmp_path, capsys):
    path = tmp_path / "updates.json"
    names = ["varibad/gridnavi", "dpt/bandit-k5-n100", "maml/no-such-config"]
    device_updates.LEARNERS["maml/no-such-config"] = {}
    try:
        device_updates.run("cpu", path, names, 1, 0, small=True)
    finally:
        del device_updates.LEARNERS["maml/no-such-config"]
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == names
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert all(row["seconds"] > 0.0 and row["error"] is None for row in rows[:2])
    assert rows[2]["seconds"] is None
    assert "there is no config 'maml/no-such-config'" in rows[2]["error"]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.nightly
def test_updates_compares_every_algorithm_with_maml_trpo(files):
    _, rows = run(updates.main, files)

    for name in (*updates.ALGORITHMS, "quarter-curvature", "five-iterations", "five-iterations-of-a-quarter"):
        share = rows[name]["median"] / rows["maml-trpo"]["median"]
        assert rows[f"{name} / maml-trpo"]["median"] == pytest.approx(share)


@pytest.mark.parametrize("present", [False, True])
def test_accelerator_is_a_mode_where_there_is_one(present, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: present)

    assert list(waiting.modes_here()) == [*waiting.MODES, *(waiting.ACCELERATOR if present else ())]


def test_sizes_that_the_workers_cannot_share_equally_are_refused(capsys):
    with pytest.raises(SystemExit):
        waiting.main(["--sizes", "10"])

    assert "multiple of --num-workers" in capsys.readouterr().err


def test_wrong_number_of_horizons_is_refused(capsys):
    with pytest.raises(SystemExit):
        waiting.main(["--sizes", "160", "--horizons", "5", "6"])

    assert "one number for each of the 1 sizes" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_supervision_compares_workers_with_unsupervised_processes(files):
    _, rows = run(supervision.main, files)

    share = rows[supervision.SUPERVISED]["median"] / rows[supervision.ALONE]["median"]
    assert rows["supervised / unwatched"]["median"] == pytest.approx(share)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_population_compares_the_evaluator_with_the_sampler_in_two_shapes(files):
    result, rows = run(population.main, files)

    names = ["MultiTaskSampler, HalfCheetahDir-v5 2 x 2 x 5", "MultiTaskSampler, HalfCheetahDir-v5 4 x 1 x 5"]
    assert [row["name"] for row in result["tables"][population.RATES]] == [population.EVALUATOR, *names]
    for name in names:
        share = rows[population.EVALUATOR]["median"] / rows[name]["median"]
        assert rows[f"{population.EVALUATOR} / {name}"]["median"] == pytest.approx(share)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_trials_compare_a_memory_with_none_and_with_its_plain_cell(files):
    _, rows = run(trials.main, files)

    assert {row for row in rows if " / " in row} == {
        "GRU of 64 / MLP of 64, 64",
        "GRU of 64, in trials / GRUCell of 64, bare",
        "transformer of 64, context 500, in trials / GRU of 64, in trials",
    }


def test_members_that_do_not_make_whole_tasks_are_refused(capsys):
    with pytest.raises(SystemExit):
        population.main(["--members", "20"])

    assert "must be a multiple of --task-size" in capsys.readouterr().err


# torch warns about its own tracing and scripting.
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.timeout(180)
def test_kernels_compares_every_way_with_the_hand_written_one(files):
    _, rows = run(kernels.main, files)

    ways = {part: [name for name in rows if name.startswith(f"{part} 4: ")] for part in kernels.PARTS}
    assert [len(ways[part]) for part in kernels.PARTS] == [3, 5, 2, 2, 2]
    for part, names in ways.items():
        for name in names[1:]:
            share = rows[name]["median"] / rows[f"{part} 4: {kernels.BY_HAND}"]["median"]
            assert rows[f"gain {name}"]["median"] == pytest.approx(share)


def test_torch_transforms_compute_the_same_derivatives_as_the_kernels():
    policy = make_policy("normal")
    samples = Samples.of(
        make_episodes(policy, ((4, 2), (3, 3))), slice(None), dtype=torch.float64, device=torch.device("cpu")
    )
    layout = ParameterLayout(policy)
    start = layout.flatten(policy.stack_parameters(2)).detach()
    vectors = torch.randn(start.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def derivatives(linearization):
        losses, gradient = linearization.differentiate(
            lambda x: reinforce_loss(x, samples.advantages, samples.mask), twice=True
        )
        products = linearization.hessian_product(vectors), linearization.fisher_product(vectors)
        return losses, gradient, *(product.clone() for product in products)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = derivatives(PolicyOnSamples(policy, layout, samples).at(start))
        for kind in (JVPLinearization, TracedLinearization):
            for value, reference in zip(derivatives(kind(policy, layout, samples, start)), expected, strict=True):
                torch.testing.assert_close(value, reference)


@pytest.mark.metaworld
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_metaworld_steps_the_same_episodes_on_both_sides(files):
    pytest.importorskip("metaworld")

    _, rows = run(metaworld.main, files)

    share = rows["maml_rl"]["median"] / rows["plain Meta-World"]["median"]
    assert rows["maml_rl / plain Meta-World"]["median"] == pytest.approx(share)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("faults", ["0", "2"])
def test_slow_environments_are_compared_with_the_longest_wait_of_a_slot(files, faults):
    _, rows = run(slow_environments.main, files, "--faults", faults)

    if faults == "0":
        assert rows["threads, in process, 4 slots"]["median"] >= 0.99
    else:
        assert rows["kills"]["median"] >= 2
        assert rows["retries"]["median"] >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sections", [["arrays", "copies"], pytest.param(list(accelerator.SECTIONS), marks=pytest.mark.nightly)]
)
def test_accelerator_shows_that_every_section_works(files, sections):
    pytest.importorskip("mujoco_warp")
    rows = accelerator.main(["--device", "cpu", "--json", str(files[0]), "--only", *sections])

    assert json.loads(files[0].read_text())["rows"] == rows
    assert {row["section"] for row in rows} == {*sections, "end"}
    assert [row for row in rows if row["value"] == "failed"] == []
