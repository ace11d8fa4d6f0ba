"""Running statistics as pytrees, and whitening.

`RunningStats` lives in an agent's ``TrainState``, so it is saved, resumed and mapped over lanes with everything else.
Statistics are updated *after* the losses that used them, or the first importance ratio would not be 1.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


class RunningStats(struct.PyTreeNode):
    """Count, mean and sum of squared deviations of all the rows seen so far.

    Attributes:
      count: float32 ``[]``.
      mean: float32, the shape of one row.
      m2: float32, the same shape; the (biased) variance is ``m2 / count``.
    """

    count: Array
    mean: Array
    m2: Array


def init_stats(shape: tuple[int, ...]) -> RunningStats:
    """Statistics of no rows: `normalize` with them is the identity."""
    return RunningStats(jnp.zeros((), jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def merge_stats(a: RunningStats, b: RunningStats) -> RunningStats:
    """Statistics of the union of two sets of rows (Chan, Golub and LeVeque 1983); either may be empty."""
    count = a.count + b.count
    weight = b.count / jnp.maximum(count, 1.0)
    delta = b.mean - a.mean
    return RunningStats(count, a.mean + weight * delta, a.m2 + b.m2 + jnp.square(delta) * a.count * weight)


def update_stats(stats: RunningStats, rows: Array) -> RunningStats:
    """Adds ``rows`` ``[..., *shape]``, all leading axes being rows."""
    rows = rows.astype(jnp.float32).reshape(-1, *stats.mean.shape)
    mean = rows.mean(0)
    batch = RunningStats(jnp.float32(rows.shape[0]), mean, jnp.square(rows - mean).sum(0))
    return merge_stats(stats, batch)


def standard_deviation(stats: RunningStats, eps: float = 1e-8) -> Array:
    """``sqrt(variance + eps)``, and exactly 1 while there are no rows."""
    variance = stats.m2 / jnp.maximum(stats.count, 1.0)
    return jnp.where(stats.count > 0, jnp.sqrt(variance + eps), 1.0)


def normalize(stats: RunningStats, rows: Array, clip: float = 10.0) -> Array:
    """``clip((rows - mean) / std, -clip, clip)``, float32 ``[..., *shape]``."""
    scaled = (rows.astype(jnp.float32) - stats.mean) / standard_deviation(stats)
    return jnp.clip(scaled, -clip, clip)


def return_trace(start: Array, rewards: Array, done: Array, discount: Array | float) -> tuple[Array, Array]:
    """The running discounted sum ``R[t] = discount R[t - 1] + r[t]`` behind reward normalisation, zero at each new episode.

    Args:
      start: ``[B]``, what the steps before these left behind.
      rewards: ``[T, B]``.
      done: ``[T, B]`` bool, whether step t ended an episode, in either way.

    Returns:
      ``(end [B], trace [T, B])``; the trace includes the last reward of an episode and leaks into no other.
    """

    def forward(running, step):
        reward, ended = step
        running = discount * running + reward
        return jnp.where(ended, jnp.zeros_like(running), running), running

    return jax.lax.scan(forward, start, (rewards, done))


def whiten(values: Array, mask: Array | None = None, eps: float = 1e-8) -> Array:
    """``(values - mean) / (std + eps)`` over all elements, with the biased variance; ``[...]``.

    With a bool ``mask`` the masked-out elements count for nothing and come back as 0. One element, or equal elements, give 0.
    """
    # Against one of the elements, so that equal ones are exactly 0 and no rounding of a mean is scaled up.
    if mask is None:
        mask, reference = jnp.ones(values.shape, bool), values.reshape(-1)[0]
    else:
        reference = jnp.max(values, where=mask, initial=jnp.finfo(values.dtype).min)
    count = jnp.maximum(mask.sum(), 1)
    shifted = jnp.where(mask, values - reference, 0.0)
    centred = jnp.where(mask, shifted - shifted.sum() / count, 0.0)
    return centred / (jnp.sqrt(jnp.square(centred).sum() / count) + eps)


def explained_variance(values: Array, targets: Array, mask: Array | None = None) -> Array:
    """``1 - Var(targets - values) / Var(targets)``, scalar, over the elements of ``mask``; 0 where the targets do not vary."""
    highest = jnp.max(targets, where=mask, initial=-jnp.inf)
    lowest = jnp.min(targets, where=mask, initial=jnp.inf)
    variance = jnp.where(highest > lowest, jnp.var(targets, where=mask), 0.0)
    return jnp.where(variance > 0, 1.0 - jnp.var(targets - values, where=mask) / jnp.where(variance > 0, variance, 1.0), 0.0)


def scale(values: Array, mask: Array, eps: float = 1e-8) -> Array:
    """``values / (std + eps)`` over the elements of a bool ``mask``, with the biased variance; ``[...]``.

    The mean is not taken off: what was positive stays so.
    """
    count = jnp.maximum(mask.sum(), 1)
    mean = jnp.where(mask, values, 0.0).sum() / count
    return values / (jnp.sqrt(jnp.where(mask, jnp.square(values - mean), 0.0).sum() / count) + eps)
