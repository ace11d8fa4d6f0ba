"""Recorded experience as a pytree of arrays: whole episodes, one after the other, which all lanes share and none changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from rljax.ops import normalization, replay


class Dataset(struct.PyTreeNode):
    """``N`` steps.

    Attributes:
      transitions: `replay.Transition` ``[N, ...]``.
      step: int32 ``[N]``, steps of the same episode before this one.
      left: int32 ``[N]``, steps of the same episode after this one.
      to_go: float32 ``[N]``, the undiscounted sum of rewards from this step to the end of its episode.
      returns: float32 ``[N]``, the return of the episode that the step is from.
      best_first: int32 ``[N]``, rows by the return of their episode, the highest first.
      log_prob: float32 ``[N]``, of the action under the policy that was recorded; NaN where nobody knows.
      observation_stats: of all observations.
    """

    transitions: replay.Transition
    step: Array
    left: Array
    to_go: Array
    returns: Array
    best_first: Array
    log_prob: Array
    observation_stats: normalization.RunningStats

    @property
    def size(self) -> int:
        """N."""
        return self.step.shape[0]


def make_dataset(transitions: replay.Transition, log_prob: Any = None) -> Dataset:
    """The steps ``[N, ...]`` of whole episodes in the order in which they were taken, as numpy arrays.

    An episode ends with a step that is terminated or truncated, and with the last of all, whose flags may say nothing: it counts
    as truncated then, and none of its steps is lost.
    """
    reward = np.asarray(transitions.reward, np.float32)
    size = len(reward)
    done = np.asarray(transitions.terminated) | np.asarray(transitions.truncated)
    truncated = np.array(transitions.truncated)
    truncated[-1] |= not done[-1]
    ends = np.flatnonzero(done | (np.arange(size) == size - 1))
    lengths = np.diff(ends, prepend=-1)
    first, last = np.repeat(ends - lengths + 1, lengths), np.repeat(ends, lengths)
    place = np.arange(size)
    upto = np.concatenate([[0.0], np.cumsum(reward, dtype=np.float64)])  # a difference of float32 sums would lose small rewards
    to_go = upto[last + 1] - upto[place]
    returns = upto[last + 1] - upto[first]
    seen: Any = np.asarray(transitions.observation)
    rows = seen.astype(np.float64) if np.issubdtype(seen.dtype, np.floating) else np.zeros((0, *seen.shape[1:]))
    mean = rows.mean(0) if len(rows) else np.zeros(seen.shape[1:])
    stats: list[Any] = [np.asarray(x, np.float32) for x in (len(rows), mean, np.square(rows - mean).sum(0))]
    columns: dict[str, Any] = {
        "transitions": transitions.replace(reward=reward, truncated=truncated),
        "step": (place - first).astype(np.int32),
        "left": (last - place).astype(np.int32),
        "to_go": to_go.astype(np.float32),
        "returns": returns.astype(np.float32),
        "best_first": np.argsort(-returns, kind="stable").astype(np.int32),
        "log_prob": np.full(size, np.nan, np.float32) if log_prob is None else np.asarray(log_prob, np.float32),
        "observation_stats": normalization.RunningStats(*stats),
    }
    return Dataset(**columns)


def among_best(data: Dataset, share: Array | float) -> Array:
    """How many rows of ``best_first`` are from the ``share`` of episodes with the highest returns; of at least one episode."""
    is_first = data.step == 0
    order = data.best_first
    episodes = jnp.cumsum(is_first[order])  # so far, by return; the rows of equal returns are mixed only among themselves
    wanted = jnp.clip(jnp.ceil(share * is_first.sum() - 1e-4), 1, is_first.sum())
    worst = jnp.where(is_first[order] & (episodes == wanted), data.returns[order], -jnp.inf).max()
    return (data.returns >= worst).sum()


def sample(data: Dataset, uniforms: Array, discount: Array | float, among: Array | int | None = None) -> replay.Batch:
    """Draws single steps, as `replay.sample` does: from ``uniforms [M]`` in [0, 1).

    Args:
      discount: scalar.
      among: draw from so many of the first rows of ``best_first``; None: from all.
    """
    size = data.size if among is None else among
    index = jnp.minimum((uniforms * size).astype(jnp.int32), size - 1)
    index = index if among is None else data.best_first[index]
    start = jax.tree.map(lambda x: x[index], data.transitions)
    return replay.Batch(
        start=start,
        returns=start.reward,
        bootstrap=jnp.where(start.terminated, 0.0, discount),
        next_observation=start.next_observation,
        next_action_mask=start.next_action_mask,
        index=index,
        probability=jnp.full(index.shape, 1.0 / size),
    )


def windows(data: Dataset, uniforms: Array, length: int) -> tuple[Array, Array]:
    """``(rows, is_real)``, both ``[M, length]``: stretches that start at steps drawn from ``uniforms [M]`` in [0, 1).

    Each row of the data is as likely a start as any other. A stretch ends with its episode: what comes after is not real.
    """
    start = jnp.minimum((uniforms * data.size).astype(jnp.int32), data.size - 1)[:, None]
    ahead = jnp.arange(length)
    return jnp.minimum(start + ahead, data.size - 1), ahead <= data.left[start]
