"""Advantage actor-critic, the synchronous form of A3C (Mnih et al. 2016, arXiv 1602.01783): one gradient step for each rollout.

Advantages are GAE's (Schulman et al. 2016, arXiv 1506.02438); ``gae_lambda = 1`` makes them A3C's: the rewards to the end of the
rollout, and then the value.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, packed
from rljax.agents.on_policy import acting, episode_metrics, next_values, rollout
from rljax.envs import Environment, TimeStep, vectorize
from rljax.networks import actor_critic
from rljax.networks.policy import DISTRIBUTIONS, NETWORKS
from rljax.networks.torsos import ACTIVATIONS
from rljax.ops import losses, normalization, returns, schedules
from rljax.options import config, static, traced

OPTIMIZERS = {
    "adam": optax.scale_by_adam,
    "rmsprop": functools.partial(optax.scale_by_rms, decay=0.99, initial_scale=1.0),  # A3C's decay; the first step is no leap
}


@config
class Config:
    learning_rate: float = traced(7e-4, "the optimiser's step size", low=0)
    discount: float = traced(0.99, "discount factor gamma", low=0, high=1)
    gae_lambda: float = traced(1.0, "lambda of the advantage estimate; 1: n-step returns", low=0, high=1)
    entropy_coef: float = traced(0.0, "weight of the entropy bonus", low=0)
    value_coef: float = traced(0.5, "weight of the value loss", low=0)
    max_grad_norm: float = traced(0.5, "bound on the gradient's global norm", above=0)
    optimizer_eps: float = traced(1e-5, "the optimiser's epsilon", above=0)
    anneal_steps: float | None = traced(
        None, "environment steps over which a linear schedule falls to 0; none: the run's total_steps", above=0
    )
    learning_rate_schedule: str = static("constant", "of the learning rate", choices=("constant", "linear"))
    optimizer: str = static("rmsprop", "of policy and value", choices=tuple(OPTIMIZERS))
    whiten_advantages: bool = static(False, "advantages of a rollout get mean 0 and deviation 1")
    num_envs: int = static(8, "environments side by side, B", low=1)
    num_steps: int = static(5, "steps of each environment in a rollout, T", low=1)
    network: str = static("mlp", "torso of policy and value", choices=NETWORKS)
    hidden: tuple[int, ...] = static((64, 64), "sizes of the hidden layers; of a gru the last is the carry")
    activation: str = static("tanh", "of the hidden layers", choices=tuple(ACTIVATIONS))
    distribution: str = static("auto", "over actions; auto: categorical or gaussian", choices=DISTRIBUTIONS)


class TrainState(struct.PyTreeNode):
    """All that changes; ``B`` environments.

    Attributes:
      params: the policy's parameters.
      opt_state: the optimiser's moments, of the `packed` parameters.
      key: typed PRNG key, advanced at every step.
      updates: int32 ``[]``, calls of ``step`` so far.
      world: ``(environment state, time step, policy carry)``, where the last rollout stopped.
    """

    params: Any
    opt_state: Any
    key: Array
    updates: Array
    world: Any


def make(config: Config, env: Environment) -> Agent:
    """A2C on ``config.num_envs`` copies of ``env``.

    Raises:
      ValueError: one line that names the key: a network or distribution that does not fit the environment's spaces, a linear
        schedule without ``anneal_steps``.
    """
    envs = vectorize(env, config.num_envs)
    policy = actor_critic(
        env.observation_space, env.action_space, config.network, config.hidden, config.activation, config.distribution
    )
    if config.anneal_steps is None and config.learning_rate_schedule == "linear":
        raise ValueError('a "linear" schedule needs algo.anneal_steps, the environment steps it takes to reach 0')
    scale = OPTIMIZERS[config.optimizer](eps=config.optimizer_eps)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), scale)
    env_steps = config.num_envs * config.num_steps

    def init(key: Array, data: None = None) -> TrainState:
        key, env_key, params_key = jax.random.split(key, 3)
        env_state, timestep = envs.reset(env_key)
        params = policy.init(params_key, timestep)
        world = (env_state, timestep, policy.start(params, timestep))
        return TrainState(params, optimizer.init(packed(params)[0]), key, jnp.zeros((), jnp.int32), world)

    def loss(
        params: Any, carry: Any, timesteps: TimeStep, samples: Array, advantages: Array, targets: Array
    ) -> tuple[Array, dict[str, Array]]:
        """``-A log pi(a|s) + value_coef / 2 (V(s) - R)^2 - entropy_coef H(pi)``."""
        output = policy.unroll(params, carry, timesteps)
        policy_loss = -(advantages * output.distribution.log_prob(samples)).mean()
        value_loss = losses.squared_error(output.value, targets).mean()
        entropy = output.distribution.entropy().mean()
        total = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        return total, {"loss/policy": policy_loss, "loss/value": value_loss, "entropy": entropy}

    def step(state: TrainState, data: None = None) -> tuple[TrainState, dict[str, Any]]:
        key, rollout_key = jax.random.split(state.key)
        learning_rate = jnp.asarray(config.learning_rate, jnp.float32)
        if config.learning_rate_schedule == "linear" and config.anneal_steps is not None:
            learning_rate = schedules.linear(state.updates * (env_steps / config.anneal_steps), learning_rate, 0.0, 1.0)

        # Rollout.
        world, trajectory = rollout(policy, envs, state.params, state.world, rollout_key, config.num_steps)
        transitions = trajectory.transitions
        first_carry = trajectory.first_carry

        # Targets.
        values = policy.unroll(state.params, first_carry, trajectory.timesteps).value
        following = next_values(policy, state.params, trajectory, values)
        advantages, targets = returns.gae(
            transitions.reward,
            values[:-1],
            following,
            transitions.terminated,
            transitions.truncated,
            config.discount,
            config.gae_lambda,
        )
        if config.whiten_advantages:
            advantages = normalization.whiten(advantages)

        # Update.
        params, unpack = packed(state.params)
        gradient_of = jax.grad(lambda params, *args: loss(unpack(params), *args), has_aux=True)
        gradient, metrics = gradient_of(params, first_carry, trajectory.starts, trajectory.samples, advantages, targets)
        direction, opt_state = optimizer.update(gradient, state.opt_state)
        params = optax.tree.add_scale(params, -learning_rate, direction)
        metrics["grad_norm"] = optax.tree.norm(gradient)
        metrics["explained_variance"] = normalization.explained_variance(values[:-1], targets)
        metrics["learning_rate"] = learning_rate
        metrics.update(episode_metrics(transitions))
        return TrainState(unpack(params), opt_state, key, state.updates + 1, world), metrics

    return Agent(init, step, *acting(policy), env_steps)
