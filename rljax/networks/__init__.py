"""Networks bound to spaces, and the distributions they output."""

from rljax.networks.distributions import Categorical, Distribution, Gaussian, MultiCategorical, TanhGaussian
from rljax.networks.policy import Policy, PolicyOutput, actor_critic

__all__ = [
    "Categorical",
    "Distribution",
    "Gaussian",
    "MultiCategorical",
    "Policy",
    "PolicyOutput",
    "TanhGaussian",
    "actor_critic",
]
