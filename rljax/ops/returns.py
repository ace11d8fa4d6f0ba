"""Returns and advantages over time-major trajectories ``[T, ...]``.

Every function takes the two ways in which an episode can end apart. ``terminated[t]`` says that step ``t`` led to a
terminal state: nothing follows, so the bootstrap is zero. ``truncated[t]`` says that the episode was cut there (a time
limit): the state it led to still has a value, so the bootstrap stays. Both stop the recursion, since step ``t + 1``
belongs to another episode. ``next_values[t]`` is the value of the state that step ``t`` led to *before* any reset.

The last step of the trajectory is always bootstrapped from ``next_values[-1]``, as if it were truncated.
"""

import chex
import jax
import jax.numpy as jnp
from jax import Array


def _flags(terminated: Array, truncated: Array) -> tuple[Array, Array]:
    """Returns float32 ``alive`` (bootstrap is kept) and ``same`` (step t + 1 continues the episode), both ``[T, ...]``."""
    alive = 1.0 - terminated.astype(jnp.float32)
    return alive, alive * (1.0 - truncated.astype(jnp.float32))


def _where(flag: Array, x: Array) -> Array:
    return jnp.where(flag > 0, x, 0.0)


def _scan_back(first: Array, increments: Array, factors: Array) -> Array:
    """Solves ``x[t] = increments[t] + factors[t] * x[t + 1]`` backwards from ``x[T] = first``; ``[T, ...]``."""

    def backward(following, step):
        increment, factor = step
        value = increment + jnp.where(factor == 0, 0.0, factor * following)  # nothing leaks past a factor of 0, NaN included
        return value, value

    return jax.lax.scan(backward, first, (increments, factors), reverse=True)[1]


def gae(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    discount: Array | float,
    lambda_: Array | float,
    acts: Array | None = None,
) -> tuple[Array, Array]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 11-16).

    ``delta[t] = r[t] + discount (1 - terminated[t]) V(next[t]) - V[t]`` and
    ``A[t] = delta[t] + discount lambda (1 - terminated[t]) (1 - truncated[t]) A[t + 1]``.

    Args:
      rewards: ``[T, ...]``.
      values: ``[T, ...]``, V of the state that step t started from.
      next_values: ``[T, ...]``, V of the state that step t led to, before any reset.
      terminated: ``[T, ...]`` bool.
      truncated: ``[T, ...]`` bool.
      discount: scalar in [0, 1].
      lambda_: scalar in [0, 1]; 0 gives the one-step advantage, 1 the Monte-Carlo one.
      acts: ``[T, ...]`` bool, False where the step was not the policy's to choose. Such steps are part of the transition that the
        last choice before them began: their rewards are its own, and neither discount nor lambda counts them. Their own results
        mean nothing.

    Returns:
      ``(advantages, targets)``, both ``[T, ...]``, with ``targets = advantages + values``.

    Raises:
      AssertionError: the arrays differ in shape.
    """
    chex.assert_equal_shape([rewards, values, next_values, terminated, truncated])
    if acts is not None:
        chex.assert_equal_shape([rewards, acts])
        rewards, next_values, terminated, truncated = _between_choices(acts, rewards, next_values, terminated, truncated)
    alive, same = _flags(terminated, truncated)
    delta = rewards + _where(alive, discount * next_values) - values
    decay = discount * lambda_ * same
    if acts is not None:
        delta, decay = jnp.where(acts, delta, 0.0), jnp.where(acts, decay, 1.0)
    advantages = _scan_back(jnp.zeros_like(delta[0]), delta, decay)
    return advantages, advantages + values


def _between_choices(acts: Array, *transitions: Array) -> tuple[Array, Array, Array, Array]:
    """``(rewards, next values, terminated, truncated)`` of the transitions from each choice to the next one, ``[T, ...]``."""

    def backward(following, step):
        next_acts, reward, next_value, terminated, truncated = step
        goes_on = ~next_acts & ~(terminated | truncated)  # what follows belongs to this transition
        until = (next_value, terminated, truncated)
        until = jax.tree.map(lambda now, later: jnp.where(goes_on, later, now), until, following[1])
        merged = (reward + jnp.where(goes_on, following[0], 0.0), until)
        return merged, merged

    next_acts = jnp.concatenate([acts[1:], jnp.ones_like(acts[:1])])
    rewards, *until = jax.tree.map(lambda x: jnp.zeros_like(x[0]), transitions)
    rewards, until = jax.lax.scan(backward, (rewards, tuple(until)), (next_acts, *transitions), reverse=True)[1]
    return rewards, *until


def lambda_returns(
    rewards: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    discount: Array | float,
    lambda_: Array | float,
) -> Array:
    """TD(lambda) returns (Sutton and Barto 2018, eq. 12.2), ``[T, ...]``.

    ``G[t] = r[t] + discount (1 - terminated[t]) ((1 - l) V(next[t]) + l G[t + 1])`` with ``l = lambda`` inside an episode
    and 0 at its last step. Arguments as in `gae`.
    """
    chex.assert_equal_shape([rewards, next_values, terminated, truncated])
    alive, same = _flags(terminated, truncated)
    mixing = lambda_ * same.at[-1].set(0.0)
    increments = rewards + _where(alive, discount * (1.0 - mixing) * next_values)
    return _scan_back(jnp.zeros_like(increments[0]), increments, discount * alive * mixing)


def discounted_returns(rewards: Array, next_values: Array, terminated: Array, truncated: Array, discount: Array | float) -> Array:
    """Discounted returns to the end of each episode, bootstrapped where it was cut (`lambda_returns` at 1), ``[T, ...]``."""
    return lambda_returns(rewards, next_values, terminated, truncated, discount, 1.0)


def n_step_returns(
    rewards: Array, next_values: Array, terminated: Array, truncated: Array, discount: Array | float, n: int
) -> Array:
    """Returns over at most ``n`` rewards, then a bootstrap (Sutton and Barto 2018, eq. 7.1), ``[T, ...]``.

    The sum ends earlier where the episode does, and at the end of the trajectory. Arguments as in `gae`; ``n`` is static.

    Raises:
      ValueError: ``n`` is below 1.
    """
    chex.assert_equal_shape([rewards, next_values, terminated, truncated])
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    alive, same = _flags(terminated, truncated)
    one_step = rewards + _where(alive, discount * next_values)
    extend = same.at[-1].set(0.0)
    result = one_step
    for _ in range(min(n, rewards.shape[0]) - 1):
        following = jnp.concatenate([result[1:], result[-1:]])
        result = jnp.where(extend > 0, rewards + discount * following, one_step)
    return result


def vtrace(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    log_ratio: Array,
    discount: Array | float,
    lambda_: Array | float = 1.0,
    clip_rho: Array | float = 1.0,
    clip_c: Array | float = 1.0,
) -> tuple[Array, Array]:
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, arXiv 1802.01561, eq. 1 and section 4.2).

    Args:
      log_ratio: ``[T, ...]``, ``log pi(a|s) - log mu(a|s)`` of the learner over the behaviour policy.
      clip_rho: upper bound of the importance weight of a temporal difference.
      clip_c: upper bound of the trace coefficient.
      The others as in `gae`.

    Returns:
      ``(advantages, targets)``, both ``[T, ...]``: ``advantages[t] = rho[t] (r[t] + discount v[t + 1] - V[t])``, where
      ``v[t + 1]`` is the next target inside an episode and ``V(next[t])`` at its end.
    """
    chex.assert_equal_shape([rewards, values, next_values, terminated, truncated, log_ratio])
    alive, same = _flags(terminated, truncated)
    rho = jnp.exp(jnp.minimum(log_ratio, jnp.log(clip_rho)))
    trace = lambda_ * jnp.exp(jnp.minimum(log_ratio, jnp.log(clip_c)))
    delta = rho * (rewards + _where(alive, discount * next_values) - values)
    corrections = _scan_back(jnp.zeros_like(delta[0]), delta, discount * same * trace)
    targets = values + corrections
    following = jnp.where(same.at[-1].set(0.0) > 0, jnp.concatenate([targets[1:], targets[-1:]]), next_values)
    return rho * (rewards + _where(alive, discount * following) - values), targets
