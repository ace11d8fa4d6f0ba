"""Replay of past steps as a pytree of arrays: uniform or prioritised, with n-step returns.

Rows are vector steps, columns are environments, and every entry is a whole transition with the observation that the step led
to, so that no entry joins two episodes. An n-step return starts at an entry and walks down its column to the end of the
episode or to the n-th step.

flashbax is not used: its trajectory buffers pair each observation with the next one stored, which after an auto-reset belongs to
another episode, and its prioritised sampling has no such windows.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


class Transition(struct.PyTreeNode):
    """One step of an environment, ``[...]``; the masks are None where every action is always legal.

    Attributes:
      observation: acted on.
      action_mask: of ``observation``.
      action: as the agent stores it.
      reward: float32.
      terminated: bool.
      truncated: bool.
      next_observation: that the step led to, before any reset.
      next_action_mask: of ``next_observation``.
    """

    observation: Any
    action_mask: Array | None
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    next_observation: Any
    next_action_mask: Array | None


class Batch(struct.PyTreeNode):
    """Sampled entries ``[M]``.

    Attributes:
      start: the transition that a return starts with: its observation, mask and action.
      returns: float32, the discounted sum of the up to n rewards.
      bootstrap: float32, what the value of ``next_observation`` counts: ``discount^k`` after k rewards, 0 after a termination.
      next_observation: that the last of these steps led to.
      next_action_mask: of ``next_observation``.
      index: int32, of the entry.
      probability: float32, with which the entry was drawn.
    """

    start: Transition
    returns: Array
    bootstrap: Array
    next_observation: Any
    next_action_mask: Array | None
    index: Array
    probability: Array


class Priorities(struct.PyTreeNode):
    """A sum tree of two levels: ``weights [blocks, width]`` of the entries, and ``sums [blocks]`` over each row of them.

    An entry from which no full window can start yet has weight 0. ``highest`` is the largest weight given so far: new
    entries get it.
    """

    weights: Array
    sums: Array
    highest: Array


class Replay(struct.PyTreeNode):
    """A ring of ``R`` rows of ``N`` environments.

    Attributes:
      transitions: ``[R, N, ...]``.
      row: int32 ``[]``, written next.
      filled: int32 ``[]``, rows that hold something.
      priorities: None if all entries are equal.
    """

    transitions: Transition
    row: Array
    filled: Array
    priorities: Priorities | None


def init(example: Transition, capacity: int, prioritized: bool = False) -> Replay:
    """An empty buffer for transitions like ``example [N, ...]``, of ``capacity`` entries in all (rounded down to whole rows).

    Raises:
      ValueError: less than one row.
    """
    num_envs = example.reward.shape[0]
    rows = capacity // num_envs
    if rows < 1:
        raise ValueError(f"algo.buffer_size ({capacity}) must hold at least one step of all {num_envs} environments")
    transitions = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), example)
    priorities = None
    if prioritized:
        width = math.isqrt(rows * num_envs - 1) + 1
        blocks = -(-rows * num_envs // width)
        priorities = Priorities(jnp.zeros((blocks, width)), jnp.zeros(blocks), jnp.ones(()))
    zero = jnp.zeros((), jnp.int32)
    return Replay(transitions, zero, zero, priorities)


def add(buffer: Replay, transitions: Transition, n_step: int = 1) -> Replay:
    """Writes one row, ``[N, ...]``, over the oldest."""
    rows, num_envs = buffer.transitions.reward.shape
    stored = jax.tree.map(
        lambda ring, x: jax.lax.dynamic_update_index_in_dim(ring, x.astype(ring.dtype), buffer.row, 0),
        buffer.transitions,
        transitions,
    )
    filled = jnp.minimum(buffer.filled + 1, rows)
    priorities = buffer.priorities
    if priorities is not None:
        # The row written has no window yet, and that of the row n - 1 before it is now complete.
        columns = jnp.arange(num_envs)
        ready = (buffer.row - (n_step - 1)) % rows * num_envs + columns
        if n_step > 1:
            priorities = _set(priorities, buffer.row * num_envs + columns, jnp.zeros(num_envs))
        weight = jnp.where(filled >= n_step, priorities.highest, 0.0)
        priorities = _set(priorities, ready, jnp.full(num_envs, weight))
    return Replay(stored, (buffer.row + 1) % rows, filled, priorities)


def sample(buffer: Replay, uniforms: Array, discount: Array | float, n_step: int = 1) -> Batch:
    """Draws entries that start full windows.

    Args:
      buffer: with at least ``n_step`` rows filled.
      uniforms: ``[M, 2]`` in [0, 1). Prioritised draws use the first column, one draw in each of M equal parts of the total
        weight (Schaul et al. 2016, arXiv 1511.05952, appendix B.2.1); uniform ones use both, for row and environment.
      discount: scalar.
      n_step: static.
    """
    rows, num_envs = buffer.transitions.reward.shape
    if buffer.priorities is None:
        starts = buffer.filled - (n_step - 1)
        oldest = buffer.row - buffer.filled
        row = (oldest + _index(uniforms[:, 0], starts)) % rows
        column = _index(uniforms[:, 1], num_envs)
        index = row * num_envs + column
        probability = jnp.full(index.shape, 1.0 / (starts * num_envs))
    else:
        index, probability = _draw(buffer.priorities, uniforms[:, 0])
        row, column = index // num_envs, index % num_envs

    window = (row + jnp.arange(n_step)[:, None]) % rows  # [n, M]
    reward, terminated, truncated = (
        x[window, column] for x in (buffer.transitions.reward, buffer.transitions.terminated, buffer.transitions.truncated)
    )
    ended = jnp.cumsum(terminated | truncated, axis=0)
    within = jnp.concatenate([jnp.ones_like(ended[:1], bool), ended[:-1] == 0])  # step k belongs to the first one's episode
    returns = jnp.where(within, jnp.power(discount, jnp.arange(n_step))[:, None] * reward, 0.0).sum(0)
    steps = within.sum(0)
    last = (row + steps - 1) % rows
    is_terminal = jnp.any(within & terminated, axis=0)
    next_observation, next_action_mask = jax.tree.map(
        lambda x: x[last, column], (buffer.transitions.next_observation, buffer.transitions.next_action_mask)
    )
    return Batch(
        start=jax.tree.map(lambda x: x[row, column], buffer.transitions),
        returns=returns,
        bootstrap=jnp.where(is_terminal, 0.0, jnp.power(discount, steps)),
        next_observation=next_observation,
        next_action_mask=next_action_mask,
        index=index,
        probability=probability,
    )


def targets(batch: Batch, values: Array) -> Array:
    """``R + bootstrap V(s')``, ``[M]``; where the bootstrap is 0, whatever V is there, NaN included, does not matter."""
    return batch.returns + jnp.where(batch.bootstrap > 0, batch.bootstrap * values, 0.0)


def prioritize(buffer: Replay, index: Array, priority: Array, exponent: Array | float) -> Replay:
    """Sets the weight of the entries ``index [M]`` to ``priority ** exponent`` (Schaul et al. 2016, eq. 1).

    Without priorities it does nothing. An entry that was overwritten or has lost its window since keeps its weight of 0.
    """
    if buffer.priorities is None:
        return buffer
    current = buffer.priorities.weights.reshape(-1)[index]
    weights = jnp.where(current > 0, jnp.power(priority, exponent), 0.0)
    return buffer.replace(priorities=_set(buffer.priorities, index, weights))


def importance_weights(batch: Batch, buffer: Replay, exponent: Array | float) -> Array:
    """``(1 / (size * probability)) ** exponent``, divided by the largest of the batch, ``[M]`` (Schaul et al. 2016, 3.4)."""
    size = buffer.filled * buffer.transitions.reward.shape[1]
    weights = jnp.power(size * batch.probability, -exponent)
    return weights / weights.max()


def _index(uniform: Array, size: Array | int) -> Array:
    """A uniform number in [0, 1) as an index below ``size``."""
    return jnp.minimum((uniform * size).astype(jnp.int32), size - 1)


def _set(priorities: Priorities, index: Array, weights: Array) -> Priorities:
    width = priorities.weights.shape[1]
    changed = priorities.weights.at[index // width, index % width].set(weights)
    # Sums are taken anew, and not moved by the difference: no rounding adds up.
    sums = priorities.sums.at[index // width].set(changed[index // width].sum(1))
    return Priorities(changed, sums, jnp.maximum(priorities.highest, weights.max()))


def _draw(priorities: Priorities, uniforms: Array) -> tuple[Array, Array]:
    """``(index, probability)`` of one entry for each of the M strata."""
    almost = 1.0 - 1e-6  # a number rounded up to the whole sum would fall behind the last entry
    count = uniforms.shape[0]
    upto = jnp.cumsum(priorities.sums)
    total = upto[-1]
    target = jnp.minimum((jnp.arange(count) + uniforms) / count, almost) * total
    # A compiled cumulative sum may rise by a rounding across a zero: what has no weight is left out in so many words.
    block = jnp.argmax((upto > target[:, None]) & (priorities.sums > 0), axis=1)
    weights = priorities.weights[block]  # [M, width]
    within = jnp.cumsum(weights, axis=1)
    rest = jnp.clip(target - (upto[block] - priorities.sums[block]), 0.0, almost * within[:, -1])  # rounding may leave less
    column = jnp.argmax((within > rest[:, None]) & (weights > 0), axis=1)
    index = block * weights.shape[1] + column
    return index, jnp.take_along_axis(weights, column[:, None], 1)[:, 0] / total
