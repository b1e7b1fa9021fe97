"""What a message suggests for a name that there is not."""

import pytest

from maml_rl.arguments import suggest
from maml_rl.metalearners import algorithms
from maml_rl.metalearners.rsac import RSAC


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("MAML-TRPO", algorithms(), "; did you mean 'maml-trpo'?"),
        ("maml-trop", algorithms(), "; did you mean 'maml-trpo'?"),
        ("halfcheetahdir-V5", ["AntDir-v5", "HalfCheetahDir-v5"], "; did you mean 'HalfCheetahDir-v5'?"),
        ("nope", ["hopper-vel", "ant-dir"], "; choose 'hopper-vel' or 'ant-dir'"),
        ("nope", ["ant-dir"], "; choose 'ant-dir'"),
        ("nope", [f"family-{number}" for number in range(21)], ""),
        ("nope", [], ""),
    ],
)
def test_suggestion_is_near_regardless_of_case_or_else_a_list(word: str, known: list[str], hint: str) -> None:
    assert suggest(word, known) == hint


def test_settings_are_called_by_their_names_as_functions_are() -> None:
    assert RSAC.Settings(hidden_size=32) == RSAC.Settings.model_validate({"hidden-size": 32})
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        RSAC.Settings.model_validate({"hidden_size": 32})
