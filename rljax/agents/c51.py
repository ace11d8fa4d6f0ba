"""Categorical DQN, "C51" (Bellemare et al. 2017, arXiv 1707.06887): the distribution of returns on a fixed support.

``Z(s, a)`` is a categorical over ``num_atoms`` returns from ``value_min`` to ``value_max``. The target distribution is that of
``R + gamma^n z``, projected onto the support, and the loss its cross-entropy. Everything else is DQN's, options included.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from rljax.agents.base import Agent
from rljax.agents.q_learning import QLearningConfig, q_learning, value_network
from rljax.envs import Environment, vectorize
from rljax.networks.distributions import mask_logits
from rljax.ops import replay
from rljax.options import config, static, traced


@config
class Config(QLearningConfig):
    value_min: float = traced(0.0, "lowest return of the support")
    value_max: float = traced(100.0, "highest return of the support, above value_min")
    num_atoms: int = static(51, "returns of the support", low=2)


def project(returns: Array, probabilities: Array, support: Array) -> Array:
    """Moves each return's probability to its two neighbours on the support (Bellemare et al. 2017, algorithm 1).

    Args:
      returns: ``[M, K]``; clipped to the support.
      probabilities: ``[M, K]``.
      support: ``[K]``, evenly spaced.

    Returns:
      ``[M, K]``; sums and, inside the support, means are kept.
    """
    spacing = support[1] - support[0]
    distance = jnp.abs(jnp.clip(returns, support[0], support[-1])[:, None, :] - support[:, None]) / spacing  # [M, atom, K]
    return (jnp.clip(1.0 - distance, 0.0, 1.0) * probabilities[:, None, :]).sum(-1)


def make(config: Config, env: Environment) -> Agent:
    """C51 on ``config.num_envs`` copies of ``env``.

    Raises:
      ValueError: one line that names the key: actions that are not Discrete, observations that the network cannot take, an
        empty support, and what `q_learning` raises.
    """
    network = value_network(config, env, config.num_atoms)
    bounds = (config.value_min, config.value_max)
    if not any(isinstance(x, Tracer) for x in bounds) and not config.value_min < config.value_max:
        raise ValueError(f"algo.value_max ({config.value_max}) must be above algo.value_min ({config.value_min})")
    support = config.value_min + (config.value_max - config.value_min) * jnp.asarray(np.linspace(0.0, 1.0, config.num_atoms))

    def q_values(logits: Array) -> Array:
        """The mean of each distribution: ``[M, A, K] -> [M, A]``."""
        return jax.nn.softmax(logits) @ support

    def of_action(logits: Array, action: Array) -> Array:
        """``[M, A, K] -> [M, K]``."""
        chosen = action[:, None] == jnp.arange(logits.shape[1])
        return jnp.where(chosen[..., None], logits, 0.0).sum(1)

    def targets(params: Any, target_params: Any, batch: replay.Batch) -> Array:
        """The projected distribution of ``R + gamma^n z`` with ``z ~ Z_target(s', a*)``, ``[M, K]``."""
        logits = network.apply(target_params, batch.next_observation)
        q_select = q_values(network.apply(params, batch.next_observation) if config.double else logits)
        action = jnp.argmax(mask_logits(q_select, batch.next_action_mask), -1)
        returns = batch.returns[:, None] + batch.bootstrap[:, None] * support
        return project(returns, jax.nn.softmax(of_action(logits, action)), support)

    def loss(params: Any, target_params: Any, batch: replay.Batch) -> tuple[Array, Array, Array]:
        target = jax.lax.stop_gradient(targets(params, target_params, batch))
        logits = of_action(network.apply(params, batch.start.observation), batch.start.action)
        q = jax.nn.softmax(logits) @ support
        cross_entropy = -(target * jax.nn.log_softmax(logits)).sum(-1)
        return cross_entropy, target @ support - q, q

    return q_learning(config, vectorize(env, config.num_envs), network, q_values, loss)
