"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477).

A deterministic policy with Gaussian exploration; two critics, of which targets take the smaller; noise on the target action; and
one policy step for every ``policy_delay`` critic steps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, packed
from rljax.agents.off_policy import Loop, act_and_learn, fill, fill_steps
from rljax.envs import Environment, Space, TimeStep, vectorize
from rljax.networks import Network, continuous_critics, feed_forward
from rljax.networks.torsos import ACTIVATIONS
from rljax.networks.values import action_bounds
from rljax.ops import replay
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(1e-3, "Adam's step size, of policy and critics", low=0)
    discount: float = traced(0.99, "discount factor gamma", low=0, high=1)
    target_tau: float = traced(0.005, "step of the target networks towards the online ones, at each policy step", low=0, high=1)
    exploration_noise: float = traced(0.1, "deviation of the noise on actions, in half widths of their range", low=0)
    target_noise: float = traced(0.2, "deviation of the noise on target actions, in half widths of their range", low=0)
    target_noise_clip: float = traced(0.5, "bound on the noise on target actions", low=0)
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    policy_delay: int = static(2, "critic steps for each policy step", low=1)
    buffer_size: int = static(100_000, "transitions kept, rounded down to whole steps of all environments", low=1)
    learning_starts: int = static(1_000, "environment steps of random actions before the first gradient step", low=1)
    batch_size: int = static(256, "transitions of a gradient step", low=1)
    num_envs: int = static(2, "environments side by side, N", low=1)
    num_steps: int = static(32, "steps of each environment in one call of step, whose noise is drawn at once", low=1)
    num_updates: int = static(2, "critic steps after each step of the environments, a multiple of policy_delay", low=1)
    hidden: tuple[int, ...] = static((256, 256), "sizes of the hidden layers")
    activation: str = static("relu", "of the hidden layers", choices=tuple(ACTIVATIONS))


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: ``{"actor", "critics"}``.
      target_params: the same of the target networks.
      opt_states: Adam's moments of each of the two, `packed`.
      key: typed PRNG key, advanced at every step.
      world: ``(environment state, time step [N])``.
      buffer: the replay.
    """

    params: Any
    target_params: Any
    opt_states: Any
    key: Array
    world: Any
    buffer: replay.Replay


def networks(config: Any, observation_space: Space, action_space: Space) -> tuple[Network, Network, Any, Any]:
    """``(actor, critics, policy, critic_loss)`` of a config with ``hidden``, ``activation`` and the noise on target actions.

    Raises:
      ValueError: actions that are no bounded Box; names the key.
    """
    low, high = action_bounds(action_space)
    center, half_width = 0.5 * (high + low), 0.5 * (high - low)
    actor = feed_forward(observation_space, low.size, "mlp", config.hidden, config.activation)
    critics = continuous_critics(observation_space, action_space, config.hidden, config.activation, num=2)

    def policy(params: Any, observation: Any, noise: Array | float = 0.0) -> Array:
        """The action, with noise in half widths of its range, ``[M, D]``."""
        unit = jnp.tanh(actor.apply(params, observation)) + noise
        return jnp.clip(center + half_width * unit, low, high)

    def critic_loss(params: Any, target_params: Any, batch: replay.Batch, noise: Array) -> tuple[Array, dict[str, Array]]:
        """``sum over i of 1/2 (Q_i(s, a) - y)^2`` with ``y = r + gamma min Q_target(s', pi_target(s') + clipped noise)``."""
        noise = jnp.clip(config.target_noise * noise, -config.target_noise_clip, config.target_noise_clip)
        action = policy(target_params["actor"], batch.next_observation, noise)
        value = critics.apply(target_params["critics"], batch.next_observation, action).min(0)
        target = replay.targets(batch, value)
        q = critics.apply(params, batch.start.observation, batch.start.action)
        losses = 0.5 * jnp.square(q - target).sum(0)
        return losses.mean(), {"loss/critic": losses.mean(), "q": q.mean()}

    return actor, critics, policy, critic_loss


def adam_step(config: Any, params: Any, gradient: Any, opt_state: Any) -> tuple[Any, Any]:
    """``(params, opt_state)`` after a step of Adam."""
    trained, unpack = packed(params)
    direction, opt_state = optax.scale_by_adam(eps=config.adam_eps).update(packed(gradient)[0], opt_state)
    return unpack(optax.tree.add_scale(trained, -config.learning_rate, direction)), opt_state


def make(config: Config, env: Environment) -> Agent:
    """TD3 on ``config.num_envs`` copies of ``env``.

    Raises:
      ValueError: one line that names the key: actions that are no bounded Box, a buffer smaller than ``learning_starts``,
        ``num_updates`` that are no multiple of ``policy_delay``.
    """
    envs = vectorize(env, config.num_envs)
    spaces = (env.observation_space, env.action_space)
    low, _ = action_bounds(env.action_space)
    if config.num_updates % config.policy_delay:
        raise ValueError(
            f"algo.num_updates ({config.num_updates}) must be a multiple of algo.policy_delay ({config.policy_delay}); "
            "as many algo.num_envs as num_updates make it one critic step for each environment step"
        )
    actor, critics, policy, critic_loss = networks(config, *spaces)
    optimizer = optax.scale_by_adam(eps=config.adam_eps)
    env_steps = config.num_envs * config.num_steps
    random_steps = fill_steps(config.buffer_size, config.learning_starts, config.num_envs)

    def init(key: Array, data: None = None) -> TrainState:
        key, fill_key, actor_key, critics_key = jax.random.split(key, 4)
        filled = fill(envs, fill_key, config.buffer_size, random_steps)
        observation, action = filled.world[1].observation, filled.buffer.transitions.action[0]
        params = {"actor": actor.init(actor_key, observation), "critics": critics.init(critics_key, observation, action)}
        return TrainState(
            params=params,
            target_params=params,
            opt_states={name: optimizer.init(packed(part)[0]) for name, part in params.items()},
            key=key,
            world=filled.world,
            buffer=filled.buffer,
        )

    def policy_loss(params: Any, critic_params: Any, batch: replay.Batch) -> Array:
        """``-Q_1(s, pi(s))``."""
        return -critics.apply(critic_params, batch.start.observation, policy(params, batch.start.observation))[0].mean()

    descend = functools.partial(adam_step, config)

    def step(state: TrainState, data: None = None) -> tuple[TrainState, dict[str, Any]]:
        key, loop_key = jax.random.split(state.key)
        policy_steps = config.num_updates // config.policy_delay

        def noise(key: Array) -> Any:
            behave_key, target_key, sample_key = jax.random.split(key, 3)
            size = (policy_steps, config.policy_delay, config.batch_size)
            target_noise = jax.random.normal(target_key, (*size, low.size))
            behave_noise = jax.random.normal(behave_key, (config.num_envs, low.size))
            return behave_noise, (target_noise, jax.random.uniform(sample_key, (*size, 2)))

        def behave(learner: Any, timestep: TimeStep, noise: Any) -> Array:
            return policy(learner[0]["actor"], timestep.observation, config.exploration_noise * noise[0])

        def learn(learner: Any, buffer: replay.Replay, noise: Any) -> Any:
            def critic_step(learner: Any, noise: Any) -> Any:
                params, target_params, opt_states = learner
                target_noise, uniforms = noise
                batch = replay.sample(buffer, uniforms, config.discount)
                gradient, metrics = jax.grad(critic_loss, has_aux=True)(params["critics"], target_params, batch, target_noise)
                new, opt_state = descend(params["critics"], gradient, opt_states["critics"])
                learner = ({**params, "critics": new}, target_params, {**opt_states, "critics": opt_state})
                return learner, (metrics, uniforms)

            def policy_step(learner: Any, noise: Any) -> Any:
                learner, (metrics, uniforms) = jax.lax.scan(critic_step, learner, noise)
                params, target_params, opt_states = learner
                batch = replay.sample(buffer, uniforms[-1], config.discount)
                value, gradient = jax.value_and_grad(policy_loss)(params["actor"], params["critics"], batch)
                new, opt_state = descend(params["actor"], gradient, opt_states["actor"])
                params, opt_states = {**params, "actor": new}, {**opt_states, "actor": opt_state}
                target_params = optax.incremental_update(params, target_params, config.target_tau)
                return (params, target_params, opt_states), {**metrics, "loss/policy": value}

            learner, metrics = jax.lax.scan(policy_step, learner, noise[1])
            return learner, buffer, jax.tree.map(jnp.mean, metrics)

        loop = Loop((state.params, state.target_params, state.opt_states), state.world, state.buffer)
        loop, metrics = act_and_learn(envs, loop, loop_key, config.num_steps, 1, noise, behave, learn)
        params, target_params, opt_states = loop.learner
        return TrainState(params, target_params, opt_states, key, loop.world, loop.buffer), metrics

    def start(state: TrainState, timestep: TimeStep) -> tuple[()]:
        return ()

    def act(state: TrainState, carry: Any, timestep: TimeStep, key: Array, greedy: bool) -> tuple[tuple[()], Array]:
        shape = (timestep.reward.shape[0], low.size)
        noise = 0.0 if greedy else config.exploration_noise * jax.random.normal(key, shape)
        return (), policy(state.params["actor"], timestep.observation, noise)

    return Agent(init, step, start, act, env_steps, init_steps=random_steps * config.num_envs)
