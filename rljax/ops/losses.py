"""Losses as free functions on arrays; each returns one value per element and leaves the averaging to the caller."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax import Array


def clipped_surrogate(
    log_prob: Array,
    old_log_prob: Array,
    advantages: Array,
    clip_low: Array | float,
    clip_high: Array | float,
    dual_clip: Array | float | None = None,
) -> Array:
    """PPO's pessimistic surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), to be minimised.

    ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`` with ``rho = exp(log_prob - old_log_prob)``. ``clip_high`` above
    ``clip_low`` is DAPO's clip-higher (arXiv 2503.14476). All arrays ``[...]``, and so is the result.

    Args:
      dual_clip: where ``A < 0`` the objective is at least ``dual_clip * A``, and has no gradient below that (Ye et al. 2020,
        arXiv 1912.09729, eq. 5; 3 there). TRL's ``delta`` is the same wherever it is above ``1 + clip_high``.
    """
    chex.assert_equal_shape([log_prob, old_log_prob, advantages])
    ratio = _ratio(log_prob - old_log_prob)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = -jnp.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return loss
    return jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)


def sequence_log_ratio(log_prob: Array, old_log_prob: Array, mask: Array, *, per_token: bool = False) -> Array:
    """GSPO's log-ratio of a whole sequence (Zheng et al. 2025, arXiv 2507.18071, eq. 7), ``[T, B]``.

    ``log s = mean over the steps that count of (log_prob - old_log_prob)``, the same for all steps of a sequence; 0 for one
    without any. With "sequence" for `aggregate` it makes the paper's loss (eq. 5)::

        log_ratio = sequence_log_ratio(log_prob, old_log_prob, mask)
        clipped_surrogate(log_ratio, jnp.zeros_like(log_ratio), advantages, 3e-4, 4e-4)

    Args:
      log_prob: ``[T, B]``, and so are the others, time first.
      per_token: the value stays, and the gradient of a step goes to its own ``log_prob`` alone, which lets advantages differ
        within a sequence: ``sg(log s) + log_prob - sg(log_prob)`` (GSPO-token, eq. 14).
    """
    chex.assert_rank(log_prob, 2)
    chex.assert_equal_shape([log_prob, old_log_prob, mask])
    log_ratio = jnp.where(mask, log_prob - old_log_prob, 0.0)
    mean = jnp.broadcast_to(log_ratio.sum(0) / jnp.maximum(mask.sum(0), 1), mask.shape)
    if not per_token:
        return mean
    return jax.lax.stop_gradient(mean) + (log_ratio - jax.lax.stop_gradient(log_ratio))


def cispo(log_prob: Array, old_log_prob: Array, advantages: Array, cap: Array | float, floor: Array | float = 0.0) -> Array:
    """CISPO: REINFORCE with clipped importance weights (MiniMax 2025, arXiv 2506.13585, eq. 4), to be minimised.

    ``-sg(clip(rho, floor, cap)) A log_prob`` with ``rho = exp(log_prob - old_log_prob)``: a clipped weight keeps its gradient.
    All arrays ``[...]``, and so is the result.

    Args:
      cap: the largest weight itself: ``1 + epsilon_high`` of the paper and of verl, ``epsilon_high`` of TRL.
      floor: the smallest: 0 in the paper's experiments and in TRL, ``1 - epsilon_low`` in verl.
    """
    chex.assert_equal_shape([log_prob, old_log_prob, advantages])
    weight = jax.lax.stop_gradient(jnp.clip(_ratio(log_prob - old_log_prob), floor, cap))
    return -weight * advantages * log_prob


def overlong_penalty(lengths: Array, max_length: Array | int, cache: Array | int) -> Array:
    """DAPO's soft punishment of long answers (Yu et al. 2025, arXiv 2503.14476, eq. 13), to be added to the reward; ``[...]``.

    0 up to ``max_length - cache``, then linear to -1 at ``max_length``, and -1 beyond.

    Args:
      lengths: int ``[...]``, in tokens.
      cache: length of the slope; with 0, only what is longer than ``max_length`` is punished.
    """
    excess = (lengths - (max_length - cache)).astype(jnp.float32)
    return -jnp.clip(excess / jnp.maximum(cache, 1), 0.0, 1.0)


def squared_error(values: Array, targets: Array) -> Array:
    """``1/2 (V - R)^2``, ``[...]``."""
    chex.assert_equal_shape([values, targets])
    return 0.5 * jnp.square(values - targets)


def clipped_value_loss(values: Array, old_values: Array, targets: Array, clip: Array | float) -> Array:
    """``1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)``, ``[...]`` (Engstrom et al. 2020, arXiv 2005.12729)."""
    chex.assert_equal_shape([values, old_values, targets])
    clipped = old_values + jnp.clip(values - old_values, -clip, clip)
    return jnp.maximum(squared_error(values, targets), squared_error(clipped, targets))


def masked_mean(
    values: Array,
    mask: Array,
    how: Literal["token", "sequence", "sequence-sum", "constant"] = "token",
    max_length: int | None = None,
) -> Array:
    """`aggregate`, divided out, ``[]``; 0 where nothing counts."""
    numerator, denominator = aggregate(values, mask, how, max_length)
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


def _ratio(log_ratio: Array) -> Array:
    """``exp``, but finite: inf would make the zero gradient of a clipped ratio NaN."""
    return jnp.exp(jnp.minimum(log_ratio, 80.0))
