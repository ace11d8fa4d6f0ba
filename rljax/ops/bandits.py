"""Arithmetic of contextual bandits: discounted sums of what each arm earned, and what they say of a context.

Sums are kept and not their inverse. A rank-one update of an inverse (Sherman-Morrison) drifts in float32, and forgetting would
take the prior away with the evidence, so that the inverse of an arm that is not chosen grows without bound. Here the prior is
added when the system is solved, and the solution is that of ridge regression whatever came before.

``K`` arms, ``N`` decisions, contexts of ``d`` features.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


class LinearStats(struct.PyTreeNode):
    """What regression of each arm needs of the past.

    Attributes:
      gram: float32 ``[K, d, d]``, ``sum_i w_i x_i x_i^T`` over the decisions for that arm.
      moment: float32 ``[K, d]``, ``sum_i w_i r_i x_i``.
    """

    gram: Array
    moment: Array


def linear_sums(x: Array, action: Array, reward: Array, weight: Array, num_actions: int) -> LinearStats:
    """Sums over ``N`` decisions, of ``x [N, d]`` and ``action``, ``reward``, ``weight`` ``[N]``."""
    weights = jax.nn.one_hot(action, num_actions) * weight[:, None]
    weighted = weights.T[:, :, None] * x  # [K, N, d]
    moment = jnp.einsum("knd,n->kd", weighted, reward, precision="highest")
    return LinearStats(jnp.einsum("knd,ne->kde", weighted, x, precision="highest"), moment)


def linear_update(stats: LinearStats, x: Array, action: Array, reward: Array, discount: Array | float) -> LinearStats:
    """The sums after ``N`` more decisions, as if they came one by one: each multiplies what is before it by ``discount``.

    All arms forget at every decision, chosen or not (Russac et al. 2019, arXiv 1909.09146, eq. 4, without its second matrix).
    """
    old, weight = _forgetting(x.shape[0], discount)
    new = linear_sums(x, action, reward, weight, stats.gram.shape[0])
    return jax.tree.map(lambda before, sums: old * before + sums, stats, new)


def linear_posterior(stats: LinearStats, x: Array, ridge: Array | float) -> tuple[Array, Array]:
    """``(x^T A^-1 b, x^T A^-1 x)`` of every arm with ``A = ridge I + gram`` and ``b = moment``; both ``[N, K]``.

    The first is the prediction of ridge regression, the second the square of LinUCB's width (Li et al. 2010, arXiv 1003.0146,
    algorithm 1). With noise of variance s and a prior N(0, v I) of the weights, ``ridge = s / v`` makes the first the mean of the
    posterior of the expected reward, and s times the second its variance.

    By Cholesky and forward substitution, so that a square is one in float32 too. Written out, since calls of LAPACK from several
    CPU devices at once can wait for each other for ever.
    """
    size = x.shape[-1]

    def solve(gram: Array, moment: Array) -> tuple[Array, Array]:
        table = jnp.concatenate([gram + ridge * jnp.eye(size), moment[:, None], x.T], axis=1)

        def add_row(j: Array, rows: Array) -> Array:
            row = table[j] - (rows[:, j][:, None] * rows).sum(0)
            # No pivot is below the smallest eigenvalue of A, which is no less than the ridge: only rounding could have it there.
            return rows.at[j].set(row * jax.lax.rsqrt(jnp.maximum(row[j], ridge)))

        # Row by row L^-1 [A, b, x_1, ..., x_N] with A = L L^T: L^T, and the right-hand sides that are solved for on the way.
        half = jax.lax.fori_loop(0, size, add_row, jnp.zeros_like(table))[:, size:]
        return half[:, 0] @ half[:, 1:], jnp.square(half[:, 1:]).sum(0)

    mean, square = jax.vmap(solve)(stats.gram, stats.moment)
    return mean.T, square.T


class BetaStats(struct.PyTreeNode):
    """What each arm of a bandit without context earned; float32 ``[K]``, without the prior."""

    successes: Array
    failures: Array


def beta_update(stats: BetaStats, action: Array, reward: Array, discount: Array | float) -> BetaStats:
    """The counts after ``N`` more decisions with rewards of 0 to 1: a reward of 0.3 is three tenths of a success."""
    old, weight = _forgetting(action.shape[0], discount)
    chosen = jax.nn.one_hot(action, stats.successes.shape[0]) * weight[:, None]
    return BetaStats(old * stats.successes + reward @ chosen, old * stats.failures + (1.0 - reward) @ chosen)


def _forgetting(number: int, discount: Array | float) -> tuple[Array, Array]:
    """``(discount^N, discount^(N - 1 - i) [N])``: what remains of the past, and of each of N decisions after the last."""
    return jnp.power(discount, number), jnp.power(discount, jnp.arange(number - 1, -1, -1, dtype=jnp.float32))
