"""Advantages of group members against each other: ``rewards [P, G]``, P groups of G members that started alike."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax import Array


def group_advantages(
    rewards: Array,
    valid: Array | None = None,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 1,
    eps: Array | float = 1e-4,
) -> Array:
    """Group-relative advantages (Shao et al. 2024, arXiv 2402.03300, section 4.1.1), ``[P, G]``.

    ``(r - mean of the group) / (std + eps)``. Invalid members get 0 and leave mean and deviation alone; the members of a flat
    group, whose rewards are all equal, get exactly 0.

    Args:
      rewards: float32 ``[P, G]``.
      valid: bool ``[P, G]``; None: all are.
      scale: the deviation is the group's, that of all valid rewards of the batch, or 1 ("none": Dr. GRPO, Liu et al. 2025,
        arXiv 2503.20783).
      ddof: 1 divides the squares by ``n - 1`` (TRL, verl), 0 by ``n``.
      eps: added to the deviation: 1e-4 in TRL, 1e-6 in verl.

    Raises:
      ValueError: an unknown ``scale``.
    """
    chex.assert_rank(rewards, 2)
    valid = jnp.ones(rewards.shape, bool) if valid is None else valid
    chex.assert_equal_shape([rewards, valid])
    rewards = jnp.where(valid, rewards, 0.0)
    mean, deviation = _moments(rewards, valid, 1, ddof)
    if scale == "batch":
        _, deviation = _moments(rewards, valid, (0, 1), ddof)
    elif scale == "none":
        deviation, eps = jnp.ones_like(deviation), 0.0
    elif scale != "group":
        raise ValueError(f'scale must be "group", "batch" or "none", got {scale!r}')
    counts = valid & _uneven(rewards, valid, 1)
    return jnp.where(counts, (rewards - mean) / jnp.where(counts, deviation + eps, 1.0), 0.0)


def pass_at_k(correct: Array, k: int) -> Array:
    """Probability that one of ``k`` answers is right, ``[P]``, from ``n >= k`` that were drawn for each of ``P`` prompts.

    ``1 - C(n - c, k) / C(n, k)`` with ``c`` right ones (Chen et al. 2021, arXiv 2107.03374, eq. 1): unbiased, unlike
    ``1 - (1 - c / n)^k``.

    Args:
      correct: bool ``[P, n]``.

    Raises:
      ValueError: ``k`` below 1 or above n.
    """
    chex.assert_rank(correct, 2)
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k must be from 1 to the {n} answers of a prompt, got {k}")
    wrong = n - correct.sum(1, keepdims=True)
    # As a product of k factors, (wrong - i) / (n - i), no binomial can overflow.
    i = jnp.arange(k)
    return 1.0 - jnp.prod(jnp.maximum(wrong - i, 0) / (n - i), axis=1)


def leave_one_out_advantages(rewards: Array, valid: Array | None = None) -> Array:
    """Reward minus the mean of the other valid members (RLOO, Ahmadian et al. 2024, arXiv 2402.14740, eq. 8), ``[P, G]``.

    Equal to ``n / (n - 1) (r - mean)`` with n valid members. Invalid members get 0, and so does one that is alone.
    """
    chex.assert_rank(rewards, 2)
    valid = jnp.ones(rewards.shape, bool) if valid is None else valid
    chex.assert_equal_shape([rewards, valid])
    rewards = jnp.where(valid, rewards, 0.0)
    others = valid.sum(1, keepdims=True) - 1
    mean = (rewards.sum(1, keepdims=True) - rewards) / jnp.maximum(others, 1)
    return jnp.where(valid & (others > 0), rewards - mean, 0.0)


def reinforce_plus_plus_advantages(
    rewards: Array,
    valid: Array | None = None,
    *,
    centre: Literal["batch", "group"] = "batch",
    ddof: int = 1,
    eps: Array | float = 1e-8,
) -> Array:
    """Advantages scaled by the whole batch (REINFORCE++, Hu et al. 2025, arXiv 2501.03262), ``[P, G]``.

    ``(r - mean) / sqrt(variance + eps)``. The members of a batch, or with "group" of a group, whose rewards are all equal get
    exactly 0, and so do invalid ones.

    Args:
      rewards: float32 ``[P, G]``.
      valid: bool ``[P, G]``; None: all are.
      centre: whose mean is subtracted. "batch" is REINFORCE++, `whiten`; "group" is REINFORCE++-baseline, whose variance is that
        of the rewards around the means of their groups.
      ddof: as of `whiten`, and so is ``eps``.

    Raises:
      ValueError: an unknown ``centre``.
    """
    chex.assert_rank(rewards, 2)
    valid = jnp.ones(rewards.shape, bool) if valid is None else valid
    chex.assert_equal_shape([rewards, valid])
    if centre == "batch":
        return whiten(rewards, valid, ddof=ddof, eps=eps)
    if centre != "group":
        raise ValueError(f'centre must be "batch" or "group", got {centre!r}')
    rewards = jnp.where(valid, rewards, 0.0)
    mean, _ = _moments(rewards, valid, 1, ddof)
    centred = jnp.where(valid & _uneven(rewards, valid, 1), rewards - mean, 0.0)  # of mean 0 in each group, and so in the batch
    variance = jnp.square(centred).sum() / jnp.maximum(valid.sum() - ddof, 1)
    return jnp.where(variance > 0, centred * jax.lax.rsqrt(jnp.where(variance > 0, variance + eps, 1.0)), 0.0)


def whiten(values: Array, mask: Array | None = None, *, ddof: int = 1, eps: Array | float = 1e-8) -> Array:
    """``(x - mean) / sqrt(variance + eps)`` over all values that count, ``[...]``; the others get 0.

    Where all are equal, or there is but one, they get exactly 0.

    Args:
      values: float32 ``[...]``: rewards of members, or advantages of steps.
      mask: bool ``[...]``, the values that count; None: all do.
      ddof: 1 divides the squares by ``n - 1`` (verl and other codebases for language models), 0 by ``n``.
    """
    mask = jnp.ones(values.shape, bool) if mask is None else mask
    chex.assert_equal_shape([values, mask])
    values = jnp.where(mask, values, 0.0)
    axes = tuple(range(values.ndim))
    mean, deviation = _moments(values, mask, axes, ddof)
    counts = mask & _uneven(values, mask, axes)
    return jnp.where(counts, (values - mean) * jax.lax.rsqrt(jnp.where(counts, jnp.square(deviation) + eps, 1.0)), 0.0)


def _uneven(rewards: Array, valid: Array, axis: int | tuple[int, ...]) -> Array:
    """Whether the valid rewards differ, with the reduced axes kept: what rounding leaves of equal ones must not be scaled up."""
    highest = jnp.max(jnp.where(valid, rewards, -jnp.inf), axis, keepdims=True)
    lowest = jnp.min(jnp.where(valid, rewards, jnp.inf), axis, keepdims=True)
    return highest > lowest


def _moments(rewards: Array, valid: Array, axis: int | tuple[int, ...], ddof: int) -> tuple[Array, Array]:
    """Mean and deviation of the valid rewards, with the reduced axes kept; finite where there are none."""
    count = valid.sum(axis, keepdims=True)
    mean = rewards.sum(axis, keepdims=True) / jnp.maximum(count, 1)
    squares = jnp.where(valid, jnp.square(rewards - mean), 0.0).sum(axis, keepdims=True)
    variance = squares / jnp.maximum(count - ddof, 1)
    # The root's derivative at 0 is infinite, and times the zero that follows it NaN.
    return mean, jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
