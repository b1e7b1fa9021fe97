"""Figures from the literature, to be drawn beside a run that keeps their protocol."""

from maml_rl.config.config import Config

# Mean return over 40 test tasks after 0 ... 3 gradient steps of MAML, decoded from the authors' result files.
# Source: Finn et al. 2017, figures 4 and 5, https://arxiv.org/abs/1703.03400
_MAML = {
    ("2DNavigation-v0", 100): (-40.4, -11.7, -3.3, -3.2),
    ("HalfCheetahDir-v5", 200): (-50.7, 293.2, 313.5, 315.7),
}
_DEFAULT_HORIZON = {"2DNavigation-v0": 100, "HalfCheetahDir-v5": 200}
_EPISODES = 20


def published_returns(config: Config) -> tuple[float, ...] | None:
    """Return the published mean returns after 0 ... 3 gradient steps, or None where a run keeps another protocol."""
    horizon = config.max_episode_steps or _DEFAULT_HORIZON.get(config.env_name, 0)
    goals = (config.env_kwargs.get("low", -0.5), config.env_kwargs.get("high", 0.5))
    if config.fast_batch_size != _EPISODES or goals != (-0.5, 0.5):
        return None
    return _MAML.get((config.env_name, horizon))
