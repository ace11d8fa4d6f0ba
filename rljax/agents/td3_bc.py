"""TD3+BC (Fujimoto & Gu 2021, arXiv 2106.06860): TD3 on recorded data, whose policy also clones the recorded actions.

The policy maximises ``lambda Q_1(s, pi(s)) - (pi(s) - a)^2`` with ``lambda = alpha / mean |Q_1|`` (eqs. 3 to 5).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, packed
from rljax.agents.offline import example, learn, single_steps, stats_of, view
from rljax.agents.td3 import adam_step, networks
from rljax.envs import Environment, TimeStep
from rljax.networks.torsos import ACTIVATIONS
from rljax.networks.values import action_bounds
from rljax.ops import normalization, replay
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(3e-4, "Adam's step size, of policy and critics", low=0)
    discount: float = traced(0.99, "discount factor gamma", low=0, high=1)
    target_tau: float = traced(0.005, "step of the target networks towards the online ones, at each policy step", low=0, high=1)
    alpha: float = traced(2.5, "weight of the action values beside cloning; 0: cloning", low=0)
    target_noise: float = traced(0.2, "deviation of the noise on target actions, in half widths of their range", low=0)
    target_noise_clip: float = traced(0.5, "bound on the noise on target actions", low=0)
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    policy_delay: int = static(2, "critic steps for each policy step", low=1)
    batch_size: int = static(256, "steps of a gradient step", low=1)
    num_updates: int = static(64, "critic steps of one call of step, a multiple of policy_delay", low=1)
    normalize_observations: bool = static(True, "by the mean and deviation of the data")
    hidden: tuple[int, ...] = static((256, 256), "sizes of the hidden layers")
    activation: str = static("relu", "of the hidden layers", choices=tuple(ACTIVATIONS))


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: ``{"actor", "critics"}``.
      target_params: the same of the target networks.
      opt_states: Adam's moments of each of the two, `packed`.
      key: typed PRNG key, advanced at every step.
      observation_stats: of the data.
    """

    params: Any
    target_params: Any
    opt_states: Any
    key: Array
    observation_stats: normalization.RunningStats


def make(config: Config, env: Environment) -> Agent:
    """TD3+BC for a bounded Box of actions; a step of the run is a gradient step of the critics.

    Raises:
      ValueError: one line that names the key: actions of another kind, ``num_updates`` that are no multiple of ``policy_delay``.
    """
    spaces = (env.observation_space, env.action_space)
    low, high = action_bounds(env.action_space)
    if config.num_updates % config.policy_delay:
        raise ValueError(
            f"algo.num_updates ({config.num_updates}) must be a multiple of algo.policy_delay ({config.policy_delay})"
        )
    actor, critics, policy, critic_loss = networks(config, *spaces)
    optimizer = optax.scale_by_adam(eps=config.adam_eps)

    def init(key: Array, data: Any = None) -> TrainState:
        key, env_key, actor_key, critics_key = jax.random.split(key, 4)
        stats = stats_of(data, env, config.normalize_observations)
        timestep, action = example(env, env_key)
        observation = timestep.observation
        params = {"actor": actor.init(actor_key, observation), "critics": critics.init(critics_key, observation, action)}
        opt_states = {name: optimizer.init(packed(part)[0]) for name, part in params.items()}
        return TrainState(params, params, opt_states, key, stats)

    def policy_loss(params: Any, critic_params: Any, batch: replay.Batch) -> tuple[Array, dict[str, Array]]:
        """``-lambda Q_1(s, pi(s)) + (pi(s) - a)^2``, of actions scaled to [-1, 1]."""
        action = policy(params, batch.start.observation)
        q = critics.apply(critic_params, batch.start.observation, action)[0]
        weight = config.alpha / jnp.maximum(jnp.abs(jax.lax.stop_gradient(q)).mean(), 1e-8)
        distance = jnp.square((action - batch.start.action) / (0.5 * (high - low))).mean()
        return -weight * q.mean() + distance, {"loss/policy": -weight * q.mean() + distance, "loss/cloning": distance}

    descend = functools.partial(adam_step, config)

    def step(state: TrainState, data: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key, learn_key = jax.random.split(state.key)

        def critic_step(learner: Any, draw: tuple[replay.Batch, Array]) -> Any:
            (params, target_params, opt_states), (batch, noise) = learner, draw
            gradient, metrics = jax.grad(critic_loss, has_aux=True)(params["critics"], target_params, batch, noise)
            new, opt_state = descend(params["critics"], gradient, opt_states["critics"])
            return ({**params, "critics": new}, target_params, {**opt_states, "critics": opt_state}), metrics

        def update(learner: Any, batch: replay.Batch, key: Array) -> Any:
            """``policy_delay`` critic steps, each on its part of the batch, and a policy step on the last part."""
            parts = jax.tree.map(lambda x: x.reshape(config.policy_delay, config.batch_size, *x.shape[1:]), batch)
            learner, metrics = jax.lax.scan(critic_step, learner, (parts, jax.random.normal(key, parts.start.action.shape)))
            params, target_params, opt_states = learner
            last = jax.tree.map(lambda x: x[-1], parts)
            gradient, more = jax.grad(policy_loss, has_aux=True)(params["actor"], params["critics"], last)
            new, opt_state = descend(params["actor"], gradient, opt_states["actor"])
            params, opt_states = {**params, "actor": new}, {**opt_states, "actor": opt_state}
            target_params = optax.incremental_update(params, target_params, config.target_tau)
            return (params, target_params, opt_states), {**jax.tree.map(jnp.mean, metrics), **more}

        learner = (state.params, state.target_params, state.opt_states)
        sizes = (config.num_updates // config.policy_delay, config.policy_delay * config.batch_size)
        draw = single_steps(data, state.observation_stats, config.discount)
        learner, metrics = learn(update, learner, draw, learn_key, sizes)
        return TrainState(*learner, key=key, observation_stats=state.observation_stats), metrics

    def start(state: TrainState, timestep: TimeStep, data: Any = None) -> tuple[()]:
        return ()

    def act(state: TrainState, carry: Any, timestep: TimeStep, key: Array, greedy: bool, data: Any = None) -> Any:
        return (), policy(state.params["actor"], view(state.observation_stats, timestep.observation))

    return Agent(init, step, start, act, env_steps=config.num_updates, learns_from="data")
