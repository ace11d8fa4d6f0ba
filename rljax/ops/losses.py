"""Losses as free functions on arrays; each returns one value per element and leaves the averaging to the caller."""

from typing import Literal

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


def masked_mean(values: Array, mask: Array, how: Literal["token", "sequence", "sequence-sum", "constant"] = "token") -> Array:
    """`aggregate`, divided out, ``[]``; 0 where nothing counts."""
    numerator, denominator = aggregate(values, mask, how)
    return numerator / jnp.maximum(denominator, 1.0)


def aggregate(
    values: Array, mask: Array, how: Literal["token", "sequence", "sequence-sum", "constant"], max_length: int | None = None
) -> tuple[Array, Array]:
    """One loss out of per-step values, as ``(numerator, denominator)``, both ``[]``.

    Numerators and denominators of micro-batches and devices are added up before the division: their gradient is then that of
    one large batch.

    Args:
      values: ``[T, B]``, time first.
      mask: bool ``[T, B]``, the steps that count. A sequence without any leaves the denominator too, "constant" apart.
      how: "token", the mean over steps (DAPO, arXiv 2503.14476); "sequence", the mean over sequences of their means (GRPO,
        arXiv 2402.03300); "sequence-sum", the mean over sequences of their sums, which is the policy gradient of the return;
        "constant", the sum over ``B * max_length`` (Dr. GRPO, arXiv 2503.20783).
      max_length: of "constant"; T by default.

    Raises:
      ValueError: an unknown ``how``.
    """
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, mask])
    values = jnp.where(mask, values, 0.0)
    lengths = mask.sum(0)
    nonempty = (lengths > 0).sum().astype(jnp.float32)
    if how == "token":
        return values.sum(), lengths.sum().astype(jnp.float32)
    if how == "sequence":
        return (values.sum(0) / jnp.maximum(lengths, 1)).sum(), nonempty
    if how == "sequence-sum":
        return values.sum(), nonempty
    if how == "constant":
        return values.sum(), jnp.float32(values.shape[1] * (max_length or values.shape[0]))
    raise ValueError(f'how must be "token", "sequence", "sequence-sum" or "constant", got {how!r}')
