"""Losses as free functions on arrays; each returns one value per element and leaves the averaging to the caller."""

import chex
import jax.numpy as jnp
from jax import Array


def clipped_surrogate(
    log_prob: Array, old_log_prob: Array, advantages: Array, clip_low: Array | float, clip_high: Array | float
) -> Array:
    """PPO's pessimistic surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), to be minimised.

    ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`` with ``rho = exp(log_prob - old_log_prob)``. ``clip_high`` above
    ``clip_low`` is DAPO's clip-higher (arXiv 2503.14476). All arrays ``[...]``, and so is the result.
    """
    chex.assert_equal_shape([log_prob, old_log_prob, advantages])
    ratio = jnp.exp(jnp.minimum(log_prob - old_log_prob, 80.0))  # inf would make the clipped side's zero gradient NaN
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio * advantages, clipped * advantages)


def squared_error(values: Array, targets: Array) -> Array:
    """``1/2 (V - R)^2``, ``[...]``."""
    chex.assert_equal_shape([values, targets])
    return 0.5 * jnp.square(values - targets)


def clipped_value_loss(values: Array, old_values: Array, targets: Array, clip: Array | float) -> Array:
    """``1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)``, ``[...]`` (Engstrom et al. 2020, arXiv 2005.12729)."""
    chex.assert_equal_shape([values, old_values, targets])
    clipped = old_values + jnp.clip(values - old_values, -clip, clip)
    return jnp.maximum(squared_error(values, targets), squared_error(clipped, targets))
