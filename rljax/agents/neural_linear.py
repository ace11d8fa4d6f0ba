"""Neural-linear (Riquelme, Tucker & Snoek 2018, arXiv 1802.09127): Thompson sampling on what a network has learnt to see.

A network predicts the reward of every arm. Its last hidden layer, with a constant, is the context of a Bayesian linear regression
of each arm, from which Thompson sampling draws. After every ``num_steps`` decisions the network is trained on those that are
kept, and the regressions are computed anew from them. The noise has a known variance here, not a posterior of its own.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.bandits import Bandit, bandit_agent, with_intercept
from rljax.agents.base import Agent, packed
from rljax.envs import Environment
from rljax.networks.distributions import pick
from rljax.networks.torsos import ACTIVATIONS, MLP, dense
from rljax.ops import bandits
from rljax.options import config, static, traced


@config
class Config:
    prior_variance: float = traced(1.0, "of the weights of the last layer", above=0)
    noise_variance: float = traced(0.25, "of the rewards around their mean", above=0)
    discount: float = traced(1.0, "what a decision counts after one more; below 1 forgets", above=0, high=1)
    learning_rate: float = traced(3e-3, "Adam's step size", low=0)
    buffer_size: int = static(4096, "decisions kept, the latest", low=1)
    batch_size: int = static(64, "decisions of a gradient step", low=1)
    num_updates: int = static(50, "gradient steps after every num_steps decisions", low=1)
    num_envs: int = static(1, "environments side by side, that decide at once", low=1)
    num_steps: int = static(100, "decisions of each environment in one call of step, between trainings of the network", low=1)
    hidden: tuple[int, ...] = static((32, 16), "sizes of the hidden layers; the last is what the regression sees")
    activation: str = static("tanh", "of the hidden layers", choices=tuple(ACTIVATIONS))


class Learner(struct.PyTreeNode):
    """All that is learned; ``C`` decisions are kept.

    Attributes:
      network: parameters, of the layers and of the rewards that they predict.
      opt_state: Adam's moments, of the `packed` parameters.
      stats: of the last hidden layer, with a constant as its last feature.
      contexts, actions, rewards: ``[C, size]``, ``[C]``, ``[C]``, of the latest decisions, the oldest overwritten first.
      decisions: int32 ``[]``, those learned from.
    """

    network: Any
    opt_state: Any
    stats: bandits.LinearStats
    contexts: Array
    actions: Array
    rewards: Array
    decisions: Array


class Network(nn.Module):
    """``context [M, size] -> (last hidden layer [M, hidden[-1]], rewards [M, K])``."""

    hidden: tuple[int, ...]
    activation: str
    num_actions: int

    @nn.compact
    def __call__(self, context: Array) -> tuple[Array, Array]:
        x = MLP(self.hidden, self.activation)(context)
        return x, dense(self.num_actions, 0.01)(x)


def bandit(config: Config, num_actions: int, context_size: int) -> Bandit:
    """Neural-linear as pure functions.

    Raises:
      ValueError: no hidden layer, or a buffer that is smaller than the decisions of all environments at once.
    """
    if not config.hidden:
        raise ValueError("algo.hidden must have a layer or more: epsilon_greedy, linucb and thompson are linear in the context")
    if config.buffer_size < config.num_envs:
        raise ValueError(f"algo.buffer_size must be at least algo.num_envs ({config.num_envs}), got {config.buffer_size}")
    network = Network(config.hidden, config.activation, num_actions)
    optimizer = optax.scale_by_adam()
    size, capacity = config.hidden[-1] + 1, config.buffer_size

    def features(params: Any, context: Array) -> Array:
        apply: Any = network.apply
        return with_intercept(apply(params, with_intercept(context))[0])

    def init(key: Array) -> Learner:
        params = network.init(key, jnp.zeros((1, context_size + 1)))
        return Learner(
            network=params,
            opt_state=optimizer.init(packed(params)[0]),
            stats=bandits.LinearStats(jnp.zeros((num_actions, size, size)), jnp.zeros((num_actions, size))),
            contexts=jnp.zeros((capacity, context_size)),
            actions=jnp.zeros(capacity, jnp.int32),
            rewards=jnp.zeros(capacity),
            decisions=jnp.zeros((), jnp.int32),
        )

    def noise(key: Array, number: int) -> Array:
        return jax.random.normal(key, (number, num_actions))

    def scores(learner: Learner, context: Array, noise: Array) -> tuple[Array, Array]:
        ridge = config.noise_variance / config.prior_variance
        mean, square = bandits.linear_posterior(learner.stats, features(learner.network, context), ridge)
        return mean, mean + jnp.sqrt(config.noise_variance * square) * noise

    def update(learner: Learner, context: Array, action: Array, reward: Array) -> Learner:
        place = (learner.decisions + jnp.arange(action.shape[0])) % capacity
        return learner.replace(
            stats=bandits.linear_update(learner.stats, features(learner.network, context), action, reward, config.discount),
            contexts=learner.contexts.at[place].set(context),
            actions=learner.actions.at[place].set(action),
            rewards=learner.rewards.at[place].set(reward),
            decisions=learner.decisions + action.shape[0],
        )

    def refresh(learner: Learner, key: Array) -> tuple[Learner, dict[str, Array]]:
        kept = jnp.minimum(learner.decisions, capacity)
        age = (learner.decisions - 1 - jnp.arange(capacity)) % capacity
        weights = jnp.where(jnp.arange(capacity) < kept, jnp.power(config.discount, age), 0.0)
        params, unpack = packed(learner.network)

        def loss(params: Array, rows: Array) -> Array:
            """``w (f(x)_a - r)^2``, summed and divided by the sum of w."""
            apply: Any = network.apply
            predicted = pick(apply(unpack(params), with_intercept(learner.contexts[rows]))[1], learner.actions[rows])
            errors = weights[rows] * jnp.square(predicted - learner.rewards[rows])
            return errors.sum() / jnp.maximum(weights[rows].sum(), 1e-6)

        def gradient_step(carry: Any, uniforms: Array) -> Any:
            params, opt_state = carry
            rows = jnp.minimum((uniforms * kept).astype(jnp.int32), capacity - 1)
            value, gradient = jax.value_and_grad(loss)(params, rows)
            direction, opt_state = optimizer.update(gradient, opt_state)
            return (optax.tree.add_scale(params, -config.learning_rate, direction), opt_state), value

        uniforms = jax.random.uniform(key, (config.num_updates, config.batch_size))
        (params, opt_state), values = jax.lax.scan(gradient_step, (params, learner.opt_state), uniforms)
        network_params = unpack(params)
        x = features(network_params, learner.contexts)
        stats = bandits.linear_sums(x, learner.actions, learner.rewards, weights, num_actions)
        return learner.replace(network=network_params, opt_state=opt_state, stats=stats), {"loss/network": values.mean()}

    return Bandit(init, noise, scores, update, refresh)


def make(config: Config, env: Environment) -> Agent:
    """Neural-linear on ``env``, a reward at a time. Raises as `bandit_agent`, and as `bandit`."""
    return bandit_agent(bandit, config, env)
