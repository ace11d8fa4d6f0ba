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


def learn(
    update: Callable[[Any, replay.Batch, Array], tuple[Any, dict[str, Array]]],
    learner: Any,
    data: Any,
    stats: normalization.RunningStats,
    key: Array,
    sizes: tuple[int, int],
    discount: Array | float = 1.0,
    among: Array | None = None,
) -> tuple[Any, dict[str, Array]]:
    """Gradient steps, each on a fresh batch: ``(learner, metrics averaged over them)``.

    Args:
      update: ``(learner, batch, key) -> (learner, metrics)``.
      sizes: how many, and of how many steps each.
      discount, among: see `dataset.sample`.
    """
    number, size = sizes
    uniform_key, noise_key = jax.random.split(key)
    draws = (jax.random.uniform(uniform_key, (number, size)), jax.random.split(noise_key, number))

    def one(learner: Any, draw: tuple[Array, Array]) -> tuple[Any, dict[str, Array]]:
        uniforms, key = draw
        batch = dataset.sample(data_of(data), uniforms, discount, among)
        start = batch.start.replace(observation=view(stats, batch.start.observation))
        seen = batch.replace(start=start, next_observation=view(stats, batch.next_observation))
        return update(learner, seen, key)

    learner, metrics = jax.lax.scan(one, learner, draws)
    return learner, jax.tree.map(jnp.mean, metrics)
