"""Deep Q-learning (Mnih et al. 2015) with its usual extensions, each an option.

Double (van Hasselt et al. 2016, arXiv 1509.06461), duelling (Wang et al. 2016, arXiv 1511.06581), n-step returns (Sutton and
Barto 2018, eq. 7.1) and prioritised replay (Schaul et al. 2016, arXiv 1511.05952). ``num_envs`` environments take a step
together; after each such step come ``num_updates`` gradient steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from rljax.agents.base import Agent
from rljax.agents.q_learning import QLearningConfig, q_learning, value_network
from rljax.envs import Environment, vectorize
from rljax.networks.distributions import mask_logits, pick
from rljax.ops import replay
from rljax.options import config, traced


@config
class Config(QLearningConfig):
    huber_delta: float | None = traced(1.0, "error beyond which the loss is linear; none: squared error", above=0)


def targets(batch: replay.Batch, q_select: Array, q_target: Array) -> Array:
    """``R + gamma^k Q_target(s', argmax_a Q_select(s', a))`` over the legal actions of s', ``[M]``; R alone after a termination.

    Args:
      batch: returns ``R`` over k rewards, and what the value of s' counts.
      q_select: ``[M, A]``, of the online network if double (van Hasselt et al. 2016, eq. 4), else of the target network.
      q_target: ``[M, A]``.
    """
    action = jnp.argmax(mask_logits(q_select, batch.next_action_mask), -1)
    return replay.targets(batch, pick(q_target, action))


def make(config: Config, env: Environment) -> Agent:
    """DQN on ``config.num_envs`` copies of ``env``.

    Raises:
      ValueError: one line that names the key: actions that are not Discrete, observations that the network cannot take, and
        what `q_learning` raises.
    """
    network = value_network(config, env)

    def loss(params: Any, target_params: Any, batch: replay.Batch) -> tuple[Array, Array, Array]:
        q_target = network.apply(target_params, batch.next_observation)
        q_select = network.apply(params, batch.next_observation) if config.double else q_target
        target = jax.lax.stop_gradient(targets(batch, q_select, q_target))
        q = pick(network.apply(params, batch.start.observation), batch.start.action)
        if config.huber_delta is None:
            return optax.l2_loss(q, target), target - q, q
        return optax.huber_loss(q, target, delta=config.huber_delta), target - q, q

    return q_learning(config, vectorize(env, config.num_envs), network, lambda q: q, loss)
