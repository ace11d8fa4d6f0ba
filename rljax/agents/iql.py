"""Implicit Q-learning (Kostrikov et al. 2021, arXiv 2110.06169): no action is valued that was not recorded.

A value learns a high expectile of the action values of recorded actions (eq. 5), action values learn from that value (eq. 6), and
the policy clones recorded actions, weighted by what they are better than the value (eq. 7).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, packed
from rljax.agents.offline import as_seen, distribution, example, learn, single_steps, stats_of
from rljax.agents.on_policy import acting
from rljax.agents.sac import actions_of
from rljax.envs import Environment
from rljax.networks import actor_critic, feed_forward
from rljax.networks.torsos import ACTIVATIONS
from rljax.networks.values import FEED_FORWARD
from rljax.ops import losses, normalization, replay
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(3e-4, "Adam's step size, of policy, critics and value", low=0)
    discount: float = traced(0.99, "discount factor gamma", low=0, high=1)
    target_tau: float = traced(0.005, "step of the target critics towards the online ones", low=0, high=1)
    expectile: float = traced(0.7, "of the action values that the value learns, tau; 0.5: their mean", above=0, high=1)
    beta: float = traced(3.0, "of the weights exp(beta A) of cloned actions; 0: plain cloning", low=0)
    max_weight: float = traced(100.0, "bound on these weights", above=0)
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    batch_size: int = static(256, "steps of a gradient step", low=1)
    num_updates: int = static(64, "gradient steps of one call of step, whose random numbers are drawn at once", low=1)
    normalize_observations: bool = static(True, "by the mean and deviation of the data")
    network: str = static("mlp", "torso; minatar_cnn for discrete actions alone", choices=FEED_FORWARD)
    hidden: tuple[int, ...] = static((256, 256), "sizes of the hidden layers")
    activation: str = static("relu", "of the hidden layers", choices=tuple(ACTIVATIONS))


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: the policy's parameters.
      values: ``{"critics", "value"}``.
      target_critics: parameters of the target critics.
      opt_state: Adam's moments, of policy and values, `packed`.
      key: typed PRNG key, advanced at every step.
      observation_stats: of the data.
    """

    params: Any
    values: Any
    target_critics: Any
    opt_state: Any
    key: Array
    observation_stats: normalization.RunningStats


def make(config: Config, env: Environment) -> Agent:
    """IQL for Discrete actions or a bounded Box; a step of the run is a gradient step.

    Raises:
      ValueError: one line that names the key: actions of another kind, or a network that does not fit the spaces.
    """
    spaces = (env.observation_space, env.action_space)
    actions = actions_of(config, env)
    value = feed_forward(spaces[0], 1, config.network, config.hidden, config.activation, scale=1.0)
    policy = actor_critic(*spaces, config.network, config.hidden, config.activation, has_value=False)
    optimizer = optax.scale_by_adam(eps=config.adam_eps)

    def init(key: Array, data: Any = None) -> TrainState:
        key, env_key, policy_key, critics_key, value_key = jax.random.split(key, 5)
        stats = stats_of(data, env, config.normalize_observations)
        timestep, action = example(env, env_key)
        params = policy.init(policy_key, timestep)
        critics = actions.critics.init(critics_key, *actions.inputs(timestep.observation, action))
        values = {"critics": critics, "value": value.init(value_key, timestep.observation)}
        opt_state = optimizer.init(packed((params, values))[0])
        return TrainState(params, values, critics, opt_state, key, stats)

    def loss(trained: Any, target_critics: Any, batch: replay.Batch) -> tuple[Array, dict[str, Array]]:
        """The three losses in one: each part of the parameters has a gradient from one of them only."""
        (params, values), start = trained, batch.start

        # Value: L_tau(min Q_target(s, a) - V(s)), the expectile loss.
        target_q = actions.taken(target_critics, start.observation, start.action).min(0)
        v = value.apply(values["value"], start.observation)[:, 0]
        value_loss = losses.expectile(target_q - v, config.expectile)

        # Critics: (r + gamma V(s') - Q_i(s, a))^2.
        following = jax.lax.stop_gradient(value.apply(values["value"], batch.next_observation)[:, 0])
        q = actions.taken(values["critics"], start.observation, start.action)
        critic_loss = jnp.square(replay.targets(batch, following) - q).sum(0)

        # Policy: -exp(beta (Q - V)) log pi(a|s).
        advantage = jax.lax.stop_gradient(target_q - v)
        weight = jnp.minimum(jnp.exp(config.beta * advantage), config.max_weight)
        acting = distribution(policy, params, start.observation, start.action_mask)
        policy_loss = -weight * acting.log_prob(start.action)

        metrics = {
            "loss/value": value_loss,
            "loss/critic": critic_loss,
            "loss/policy": policy_loss,
            "q": q,
            "advantage": advantage,
            "weight": weight,
            "entropy": acting.entropy(),
        }
        return (value_loss + critic_loss + policy_loss).mean(), jax.tree.map(jnp.mean, metrics)

    def step(state: TrainState, data: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key, learn_key = jax.random.split(state.key)
        trained, unpack = packed((state.params, state.values))
        gradient_of = jax.grad(lambda trained, *args: loss(unpack(trained), *args), has_aux=True)

        def update(learner: Any, batch: replay.Batch, key: Array) -> Any:
            trained, target_critics, opt_state = learner
            gradient, metrics = gradient_of(trained, target_critics, batch)
            direction, opt_state = optimizer.update(gradient, opt_state)
            trained = optax.tree.add_scale(trained, -config.learning_rate, direction)
            target_critics = optax.incremental_update(unpack(trained)[1]["critics"], target_critics, config.target_tau)
            return (trained, target_critics, opt_state), metrics

        learner = (trained, state.target_critics, state.opt_state)
        sizes = (config.num_updates, config.batch_size)
        draw = single_steps(data, state.observation_stats, config.discount)
        learner, metrics = learn(update, learner, draw, learn_key, sizes)
        trained, target_critics, opt_state = learner
        params, values = unpack(trained)
        return TrainState(params, values, target_critics, opt_state, key, state.observation_stats), metrics

    return Agent(init, step, *acting(policy, as_seen), env_steps=config.num_updates, learns_from="data")
