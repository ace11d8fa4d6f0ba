"""What agents share that learn from recorded data: batches of it, and how observations are seen."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rljax.envs import Box, Environment, TimeStep
from rljax.envs.base import restart
from rljax.networks import Policy
from rljax.ops import dataset, normalization, replay
from rljax.sharding import spread


def data_of(data: Any) -> dataset.Dataset:
    """The data set among what lanes share.

    Raises:
      ValueError: there is none.
    """
    if not isinstance(data, dict) or "dataset" not in data:
        raise ValueError("this agent learns from recorded data: set data in the config, or pass data={'dataset': ...}")
    return data["dataset"]


def stats_of(data: Any, env: Environment, normalize: bool) -> normalization.RunningStats:
    """Statistics by which observations are seen; of no rows, which change nothing, where they are not normalised.

    Raises:
      ValueError: there is no data set, or observations are categories.
    """
    space, found = env.observation_space, data_of(data).observation_stats
    if not normalize:
        return normalization.init_stats(space.shape)
    if not isinstance(space, Box):
        raise ValueError("algo.normalize_observations takes Box observations, the environment's are categories; set it to false")
    return jax.tree.map(jnp.asarray, found)


def example(env: Environment, key: Array) -> tuple[TimeStep, Array]:
    """A first time step and an action, ``[1, ...]``, to make networks for."""
    reset_key, action_key = jax.random.split(key)
    return jax.vmap(env.reset)(reset_key[None])[1], env.action_space.sample(action_key)[None]


def view(stats: normalization.RunningStats, observation: Any) -> Any:
    """An observation as the networks see it; that of no statistics as it is."""
    if not jnp.issubdtype(observation.dtype, jnp.floating):
        return observation
    return jnp.where(stats.count > 0, normalization.normalize(stats, observation), observation)


def as_seen(state: Any, timestep: TimeStep) -> TimeStep:
    """A time step by the statistics of a train state, for `on_policy.acting`."""
    return timestep.replace(observation=view(state.observation_stats, timestep.observation))


def distribution(policy: Policy, params: Any, observation: Any, mask: Array | None) -> Any:
    """Over actions after observations ``[M, ...]`` as they are seen; of a feed-forward policy."""
    timestep = jax.vmap(restart)(observation) if mask is None else jax.vmap(restart)(observation, mask)
    return policy.step(params, (), timestep)[1].distribution


def single_steps(
    data: Any, stats: normalization.RunningStats, discount: Array | float = 1.0, among: Array | None = None
) -> Callable[[Array], replay.Batch]:
    """How `learn` draws batches of single steps, observations as the networks see them; ``discount``, ``among`` as in
    `dataset.sample`."""

    def draw(uniforms: Array) -> replay.Batch:
        batch = dataset.sample(data_of(data), uniforms, discount, among)
        start = batch.start.replace(observation=view(stats, batch.start.observation))
        return batch.replace(start=start, next_observation=view(stats, batch.next_observation))

    return draw


def learn(
    update: Callable[[Any, Any, Array], tuple[Any, dict[str, Array]]],
    learner: Any,
    draw: Callable[[Array], Any],
    key: Array,
    sizes: tuple[int, int],
) -> tuple[Any, dict[str, Array]]:
    """Gradient steps, each on a fresh batch: ``(learner, metrics averaged over them)``.

    Args:
      update: ``(learner, batch, key) -> (learner, metrics)``.
      draw: ``(uniforms [M]) -> batch``.
      sizes: how many steps, and M.
    """
    number, size = sizes
    uniform_key, noise_key = jax.random.split(key)
    draws = (spread(jax.random.uniform(uniform_key, (number, size)), axis=1), jax.random.split(noise_key, number))
    learner, metrics = jax.lax.scan(lambda learner, x: update(learner, draw(x[0]), x[1]), learner, draws)
    return learner, jax.tree.map(jnp.mean, metrics)
