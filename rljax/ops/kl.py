"""Estimates of KL(pi || pi_ref) from samples of pi (Schulman 2020, "Approximating KL divergence")."""

from typing import Literal

import chex
import jax.numpy as jnp
from jax import Array


def kl_estimate(log_prob: Array, ref_log_prob: Array, kind: Literal["k1", "k2", "k3"]) -> Array:
    """One estimate per sample of ``KL(pi || pi_ref)``, with ``d = log_prob - ref_log_prob``; ``[...]``.

    ``k1 = d`` is unbiased and may be negative; ``k2 = d^2 / 2`` is biased with low variance; ``k3 = exp(-d) - 1 + d`` is
    unbiased and never negative. At ``pi = pi_ref`` each is exactly 0.

    Raises:
      ValueError: an unknown ``kind``.
    """
    chex.assert_equal_shape([log_prob, ref_log_prob])
    difference = log_prob - ref_log_prob
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * jnp.square(difference)
    if kind == "k3":
        return jnp.expm1(jnp.minimum(-difference, 80.0)) + difference  # inf would make the gradient NaN
    raise ValueError(f'kind must be "k1", "k2" or "k3", got {kind!r}')
