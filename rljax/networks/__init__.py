"""Networks bound to spaces, and the distributions they output."""

from rljax.networks.distributions import (
    Categorical,
    Distribution,
    EpsilonGreedy,
    Gaussian,
    MultiCategorical,
    TanhGaussian,
    TokenCategorical,
)
from rljax.networks.policy import Policy, PolicyOutput, actor_critic
from rljax.networks.transformer import Transformer, transformer
from rljax.networks.values import Network, action_values, continuous_critics, feed_forward

__all__ = [
    "Categorical",
    "Distribution",
    "EpsilonGreedy",
    "Gaussian",
    "MultiCategorical",
    "Network",
    "Policy",
    "PolicyOutput",
    "TanhGaussian",
    "TokenCategorical",
    "Transformer",
    "action_values",
    "actor_critic",
    "continuous_critics",
    "feed_forward",
    "transformer",
]
