"""Logits into tokens: temperature, the usual cuts, and a draw from one uniform number. Float32 logits ``[..., V]``.

The order is Hugging Face's: temperature, top-k, top-p, min-p; vLLM cuts by min-p before the other two. What is cut gets `LOWEST`,
whose probability is exactly 0, and stays cut in whatever follows.
"""

import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

LOWEST = float(np.finfo(np.float32).min)  # and not -inf, whose differences and products are NaN


def apply_temperature(logits: Array, temperature: Array | float) -> Array:
    """``logits / temperature``, at least `LOWEST`; ``[..., V]``.

    Args:
      temperature: above 0; it broadcasts against the logits.
    """
    chex.assert_type(logits, jnp.float32)
    return jnp.maximum(logits / temperature, LOWEST)


def filter_logits(logits: Array, top_k: int = 0, top_p: Array | float = 1.0, min_p: Array | float = 0.0) -> Array:
    """`top_k_mask`, `top_p_mask` and `min_p_mask`, each of what the one before has left; ``[..., V]``, cut tokens at `LOWEST`.

    Args:
      logits: after the temperature.
      top_k: 0 cuts nothing.
      top_p: 1 cuts nothing, and costs nothing unless it is traced.
      min_p: 0 cuts nothing.
    """
    if top_k:
        logits = jnp.where(top_k_mask(logits, top_k), logits, LOWEST)
    if not (isinstance(top_p, int | float) and top_p >= 1.0):
        logits = jnp.where(top_p_mask(logits, top_p), logits, LOWEST)
    if not (isinstance(min_p, int | float) and min_p <= 0.0):
        logits = jnp.where(min_p_mask(logits, min_p), logits, LOWEST)
    return logits


def top_k_mask(logits: Array, top_k: int) -> Array:
    """The ``top_k`` likeliest tokens, and all that tie with the last of them; bool ``[..., V]``.

    A token is kept where fewer than ``top_k`` are strictly likelier.
    """
    chex.assert_type(logits, jnp.float32)
    logits = jax.lax.stop_gradient(logits)
    if top_k >= logits.shape[-1]:
        return jnp.ones(logits.shape, bool)
    highest = logits.max(-1, keepdims=True)

    def above(threshold: Array) -> Array:
        return (logits > threshold).astype(jnp.float32).sum(-1, keepdims=True)

    return logits >= _lowest_below(above, jnp.float32(top_k), jnp.full_like(highest, -jnp.inf), highest)


def top_p_mask(logits: Array, top_p: Array | float) -> Array:
    """The fewest likeliest tokens of probability ``top_p`` or more together; bool ``[..., V]``.

    (Holtzman et al. 2020, arXiv 1904.09751.) A token is kept where those that are strictly likelier have less than ``top_p``
    together: of tokens that tie, all are kept or none, where other codebases keep some, in an order that sorting decides.

    Args:
      top_p: 1 or more cuts nothing; 0 leaves the likeliest token, which is never cut.
    """
    chex.assert_type(logits, jnp.float32)
    logits = jax.lax.stop_gradient(logits)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))  # the largest is exactly 1
    total = weights.sum(-1, keepdims=True)

    def above(threshold: Array) -> Array:
        return jnp.where(weights > threshold, weights, 0.0).sum(-1, keepdims=True)

    threshold = _lowest_below(above, top_p * total, jnp.zeros_like(total), jnp.ones_like(total))
    return (weights >= threshold) | (jnp.asarray(top_p) >= 1.0)


def min_p_mask(logits: Array, min_p: Array | float) -> Array:
    """Tokens at least ``min_p`` times as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082); bool ``[..., V]``."""
    chex.assert_type(logits, jnp.float32)
    logits = jax.lax.stop_gradient(logits)
    return logits >= logits.max(-1, keepdims=True) + jnp.log(jnp.minimum(min_p, 1.0))


def sample_inverse_cdf(logits: Array, uniform: Array) -> Array:
    """One token for each row, drawn from ``softmax(logits)`` by inverting the cumulative distribution; int32 ``[...]``.

    The first token whose cumulative probability is above ``uniform``. A large vocabulary is searched in two levels: the block of
    tokens by the sums of all blocks, then the token within its block. Against Gumbel noise, which takes a random number and two
    logarithms for every token, this takes one random number for every row.

    A token of probability 0 (in float32, which is 104 below the largest logit) is never drawn, whatever rounding does. A uniform
    number of float32 is a multiple of 2^-23, and so is, nearly, the frequency of each token.

    Args:
      logits: ``[..., V]``, at least one above `LOWEST` in each row.
      uniform: ``[...]``, in [0, 1): of ``jax.random.uniform``.
    """
    chex.assert_type(logits, jnp.float32)
    chex.assert_equal_shape_prefix([logits, uniform], uniform.ndim)
    chex.assert_rank(logits, uniform.ndim + 1)
    logits, uniform = jax.lax.stop_gradient((logits, uniform))
    batch, size = logits.shape[:-1], logits.shape[-1]
    logits, uniform = logits.reshape(-1, size), uniform.reshape(-1, 1)
    highest = logits.max(-1, keepdims=True)
    length = _block_length(size)
    if length == size:
        weights = jnp.exp(logits - highest)
        cumulative = jnp.cumsum(weights, -1)
        token, _ = _first_above(cumulative, uniform * cumulative[:, -1:], weights)
        return token.reshape(batch)
    whole = size // length * length
    sums = jnp.exp(logits[:, :whole].reshape(len(logits), -1, length) - highest[..., None]).sum(-1)
    if whole < size:
        sums = jnp.concatenate([sums, jnp.exp(logits[:, whole:] - highest).sum(-1, keepdims=True)], -1)
    cumulative = jnp.cumsum(sums, -1)
    target = uniform * cumulative[:, -1:]
    block, before = _first_above(cumulative, target, sums)
    # Where the last block is short, its tokens are the last of those that are read.
    start = jnp.minimum(block * length, size - length)
    read = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, at, (length,)))(logits, start)
    in_block = start + jnp.arange(length) >= block * length
    weights = jnp.where(in_block, jnp.exp(read - highest), 0.0)
    token, _ = _first_above(jnp.cumsum(weights, -1), target - before, weights)
    return (start + token).reshape(batch)


def _block_length(size: int) -> int:
    """A power of two near the root of the size that divides it, if there is one; the size itself where it is small."""
    if size <= 64:
        return size
    root = 2 ** round(math.log2(size) / 2)
    return next((length for length in (root, 2 * root, root // 2, 4 * root, root // 4) if size % length == 0), root)


def _first_above(cumulative: Array, target: Array, weights: Array) -> tuple[Array, Array]:
    """The first index with a weight whose cumulative sum is above the target, and the sum before it; both ``[N, 1]``.

    Sums of floats in another order may differ and may even fall: an index without weight is never taken, and where no sum is
    above the target, the last index with a weight is.
    """
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    last = jnp.where(weights > 0, index, 0).max(-1, keepdims=True)
    first = jnp.where((weights > 0) & (cumulative > target), index, last).min(-1, keepdims=True)
    before = jnp.take_along_axis(cumulative, jnp.maximum(first - 1, 0), -1)
    return first, jnp.where(first > 0, before, 0.0)


def _lowest_below(above: Callable[[Array], Array], limit: Array, low: Array, high: Array) -> Array:
    """The lowest float32 of ``[low, high]`` where the falling function ``above`` is below ``limit``, or ``high``; ``[..., 1]``.

    Bisection over the bits, by which floats are ordered: on a CPU 32 sums over a large vocabulary take a tenth of the time of
    sorting it.
    """
    low, high = _order(low), _order(high)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean rounded down, without the overflow of a sum
        is_below = above(_from_order(middle)) < limit
        return jnp.where(is_below, low, middle), jnp.where(is_below, middle, high)

    return _from_order(jax.lax.fori_loop(0, 32, halve, (low, high))[1])


def _order(x: Array) -> Array:
    """Integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_order(order: Array) -> Array:
    return jax.lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)
