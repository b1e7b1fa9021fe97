"""The benchmark of the returns of meta-updates on new episodes."""

import pytest

from benchmarks import stale_episodes
from benchmarks.learning.plan import ROOT
from maml_rl.config import load_config
from tests.benchmarks.test_directions import TINY


def test_both_inner_losses_take_a_step_and_the_training_continues_undisturbed() -> None:
    config = load_config(ROOT / "configs" / "maml" / "2d-navigation.yaml").override(TINY)
    looked = list(stale_episodes.outcomes(config, [0, 2]))
    assert [(one.update, one.inner_loss) for one in looked] == [
        (update, name) for update in (0, 2) for name in ("log-probability", "likelihood-ratio")
    ]
    assert all(one.kl > 0.0 and one.stale != one.fresh for one in looked)
    assert list(stale_episodes.outcomes(config, [2])) == looked[2:]


def test_algorithm_without_a_choice_of_the_inner_loss_is_refused() -> None:
    config = load_config(ROOT / "configs" / "promp" / "2d-navigation.yaml")
    with pytest.raises(TypeError, match="promp has no choice of an inner loss; use maml-trpo"):
        next(stale_episodes.outcomes(config, [0]))


def test_the_table_has_a_row_for_each_loss(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load = stale_episodes.load_config
    monkeypatch.setattr(stale_episodes, "load_config", lambda path: load(path).override(TINY))
    stale_episodes.main(["--updates", "1", "--seed", "3", "--num-workers", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["log-probability", "likelihood-ratio"]
    assert all(line.count("|") == 7 for line in lines)
