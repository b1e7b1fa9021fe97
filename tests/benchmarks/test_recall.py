"""The benchmark of the memory of recurrent layers."""

import pytest

from benchmarks import recall


@pytest.mark.slow
def test_a_layer_learns_to_predict_the_rewards_of_random_actions() -> None:
    shares = recall.explained("lstm", 16, 1e-2, batches=40, trials=32, seed=0)
    assert len(shares) == 40
    # At first worse than predicting the mean, then better; at most the share that is not noise.
    assert shares[0] < shares[-1] < 0.5
    assert shares[-1] > -0.05


@pytest.mark.slow
def test_the_table_has_a_row_for_every_layer(capsys: pytest.CaptureFixture[str]) -> None:
    recall.main(["--batches", "1", "2", "--trials", "2", "--last", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(recall.LAYERS)
    assert all(line.count("|") == 6 for line in lines)
