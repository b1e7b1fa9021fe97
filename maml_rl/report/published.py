"""Figures from the literature, drawn only beside a run of the same protocol."""

from maml_rl.config.config import Config
from maml_rl.results.evaluation import Evaluation

# Mean return over 40 test tasks of 2D navigation after 0 ... 3 gradient steps of MAML, decoded from the authors' result
# files. Their locomotion has other physics than the bodies of the same name here: those figures compare with nothing.
# Source: Finn et al. 2017, figure 4, https://arxiv.org/abs/1703.03400
_MAML = (-40.4, -11.7, -3.3, -3.2)
_STEP_SIZES = (0.5, 0.25, 0.25)
_EPISODES_BEFORE_A_STEP = 40
_PROTOCOL = {
    "env-name": "2DNavigation-v0",
    "tasks": None,
    "env-kwargs": {"low": -0.5, "high": 0.5, "normalization_scale": 1.0},
    "algorithm": "maml-trpo",
    "method": "maml",
    "max-episode-steps": 100,
    "gamma": 0.99,
    "bootstrap": False,
    "hidden-sizes": [100, 100],
    "nonlinearity": "relu",
    "fast-batch-size": 20,
    "num-steps": 1,
    "fast-lr": 0.5,
}
_MOST_ITERATIONS = 100


def published_returns(config: Config, evaluation: Evaluation) -> tuple[float, ...] | None:
    """Return the published mean returns of the same protocol, or None where a run has another one.

    Returns:
        The return after 0, 1, ... gradient steps, as far as the evaluation takes steps of the published sizes.
    """
    settings = config.model_dump(mode="json", by_alias=True)
    trained_alike = all(settings[key] == value for key, value in _PROTOCOL.items())
    if not trained_alike or config.algorithm_settings.get("first-order") or config.num_batches > _MOST_ITERATIONS:
        return None
    if evaluation.returns.shape[2] != _EPISODES_BEFORE_A_STEP * evaluation.repetitions:
        return None
    steps = 0
    while steps < len(_STEP_SIZES) and evaluation.step_sizes[steps : steps + 1] == _STEP_SIZES[steps : steps + 1]:
        steps += 1
    return _MAML[: steps + 1]
