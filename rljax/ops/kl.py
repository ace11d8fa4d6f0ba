"""Estimates of KL(pi || pi_ref) from samples of pi (Schulman 2020, "Approximating KL divergence"), and its use in the reward."""

from typing import Literal

import chex
import jax
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


def kl_reward(
    rewards: Array,
    log_prob: Array,
    ref_log_prob: Array,
    mask: Array,
    coef: Array | float,
    how: Literal["token", "sequence"] = "token",
) -> Array:
    """Rewards with the KL to the reference taken off, ``[T, B]`` (Ziegler et al. 2019, arXiv 1909.08593, eq. 2).

    Of ``k1 = log_prob - ref_log_prob``: its sample mean is the KL, and no gradient passes. Rewards of masked steps stay as they
    are.

    Args:
      rewards: ``[T, B]``, and so are the others, time first.
      mask: bool, the steps that count.
      how: "token", ``r_t - coef * k1_t`` at each step that counts; "sequence", ``r_t - coef * sum of k1`` at the last one.

    Raises:
      ValueError: an unknown ``how``.
    """
    chex.assert_rank(rewards, 2)
    chex.assert_equal_shape([rewards, log_prob, ref_log_prob, mask])
    estimate = jnp.where(mask, kl_estimate(*jax.lax.stop_gradient((log_prob, ref_log_prob)), "k1"), 0.0)
    if how == "token":
        return rewards - coef * estimate
    if how == "sequence":
        later = jnp.flip(jnp.cumsum(jnp.flip(mask, 0), 0), 0)  # steps from this one on that count
        return jnp.where(mask & (later == 1), rewards - coef * estimate.sum(0), rewards)
    raise ValueError(f'how must be "token" or "sequence", got {how!r}')


def adaptive_coefficient(
    coef: Array | float, kl: Array, target: Array | float, horizon: Array | float, n: Array | float
) -> Array:
    """The next KL coefficient, which drifts to where the KL is ``target`` (Ziegler et al. 2019, section 2.2); ``[...]``.

    ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon)``.

    Args:
      kl: what was measured: summed over a sequence, mean over sequences.
      horizon: how many samples it takes to change by a fifth, roughly.
      n: samples (sequences) since the last call; below ``5 * horizon``, or the coefficient would change its sign.
    """
    error = jnp.clip(kl / target - 1.0, -0.2, 0.2)
    return coef * (1.0 + error * n / horizon)
