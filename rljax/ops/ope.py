"""Off-policy evaluation: what a policy would earn, from episodes of another one.

Episodes are ``[B, T]``, with False in ``mask`` after their end. ``log_ratio`` is ``log pi(a|s) - log mu(a|s)`` of each step: the
evaluated policy over the one that played. Every estimator gives one number an episode, whose mean is the estimate, so that
`rljax.experiment.statistics.bootstrap_interval` of them is its interval.
"""

import jax
import jax.numpy as jnp
from jax import Array


def ordinary(rewards: Array, log_ratio: Array, mask: Array, discount: Array | float) -> Array:
    """``prod_t rho_t * sum_t gamma^t r_t``, ``[B]``: unbiased; its variance grows exponentially with T (Precup et al. 2000)."""
    return jnp.exp(jnp.where(mask, log_ratio, 0.0).sum(1)) * _returns(rewards, mask, discount)


def per_decision(rewards: Array, log_ratio: Array, mask: Array, discount: Array | float) -> Array:
    """``sum_t gamma^t rho_{0:t} r_t``, ``[B]``: unbiased; a reward is weighted by what led to it alone (Precup et al. 2000)."""
    weights = jnp.exp(jnp.cumsum(jnp.where(mask, log_ratio, 0.0), 1))
    return _returns(rewards * weights, mask, discount)


def weighted(rewards: Array, log_ratio: Array, mask: Array, discount: Array | float) -> Array:
    """`ordinary`, with weights divided by their mean over episodes, ``[B]``: biased, consistent, and within the returns.

    The mean of these numbers is ``sum_i w_i G_i / sum_i w_i``. They depend on one another: a bootstrap draws episodes and
    computes them anew, see `weighted_interval`.
    """
    weights = jax.nn.softmax(jnp.where(mask, log_ratio, 0.0).sum(1)) * rewards.shape[0]
    return weights * _returns(rewards, mask, discount)


def doubly_robust(rewards: Array, log_ratio: Array, mask: Array, discount: Array | float, q: Array, v: Array) -> Array:
    """``V_t = v_t + rho_t (r_t + gamma V_{t+1} - q_t)`` from the last step back, ``[B]``.

    Jiang & Li 2016, arXiv 1511.03722, eq. 10. Unbiased whatever ``q`` and ``v`` are, and of a smaller variance the nearer they
    are to the truth.

    Args:
      q: ``[B, T]``, a guess of the evaluated policy's value of the actions taken, such as fitted Q evaluation gives.
      v: ``[B, T]``, of the states; ``sum_a pi(a|s) q(s, a)``.
    """

    def back(following: Array, step: tuple[Array, ...]) -> tuple[Array, None]:
        reward, log_rho, is_played, q, v = step
        value = v + jnp.exp(log_rho) * (reward + discount * following - q)
        return jnp.where(is_played, value, 0.0), None

    steps = jax.tree.map(lambda x: x.T, (rewards, log_ratio, mask, q, v))
    return jax.lax.scan(back, jnp.zeros(rewards.shape[0]), steps, reverse=True)[0]


def weighted_interval(
    rewards: Array, log_ratio: Array, mask: Array, discount: Array | float, key: Array, resamples: int = 1000, level: float = 0.95
) -> tuple[Array, Array]:
    """Percentile interval of the mean of `weighted`, by drawing episodes with replacement."""
    weights = jax.nn.softmax(jnp.where(mask, log_ratio, 0.0).sum(1))
    returns = _returns(rewards, mask, discount)
    rows = jax.random.randint(key, (resamples, rewards.shape[0]), 0, rewards.shape[0])
    drawn = weights[rows]
    means = (drawn * returns[rows]).sum(1) / drawn.sum(1)
    low, high = jnp.quantile(means, jnp.asarray([(1 - level) / 2, (1 + level) / 2]))
    return low, high


def _returns(rewards: Array, mask: Array, discount: Array | float) -> Array:
    """``sum_t gamma^t r_t`` over what was played, ``[B]``."""
    powers = jnp.power(discount, jnp.arange(rewards.shape[1]))
    return (jnp.where(mask, rewards, 0.0) * powers).sum(1)
