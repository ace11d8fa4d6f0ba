"""Conservative Q-learning (Kumar et al. 2020, arXiv 2006.04779), the variant CQL(H) on soft actor-critic.

Actions that were not recorded are valued down and those that were up: ``conservative_coef`` times ``log sum_a exp Q(s, a) - Q(s,
a_data)`` is added to the loss of each critic (eq. 4). For discrete actions the sum is exact; for a Box it is estimated from
uniformly random actions and the policy's own at s and at s', each divided by its density (appendix F). With a coefficient of 0 it
is SAC on recorded data.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, packed
from rljax.agents.offline import example, learn, single_steps, stats_of, view
from rljax.agents.sac import actions_of, objective
from rljax.envs import Discrete, Environment, TimeStep
from rljax.networks.torsos import ACTIVATIONS
from rljax.networks.values import FEED_FORWARD, action_bounds
from rljax.ops import normalization, replay
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(3e-4, "Adam's step size, of policy, critics and temperature", low=0)
    discount: float = traced(0.99, "discount factor gamma", low=0, high=1)
    target_tau: float = traced(0.005, "step of the target critics towards the online ones", low=0, high=1)
    conservative_coef: float = traced(5.0, "weight of the penalty on actions that were not recorded, alpha; 0: SAC", low=0)
    temperature: float | None = traced(None, "of the entropy; none: learned", low=0)
    initial_temperature: float = traced(1.0, "where a learned temperature starts", above=0)
    target_entropy: float | None = traced(
        None, "nats, of actions scaled to [-1, 1]; none: -D, or half of the log of legal actions if discrete"
    )
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    num_actions: int = static(10, "actions of each of the three kinds that estimate the penalty; for a Box alone", low=1)
    batch_size: int = static(256, "steps of a gradient step", low=1)
    num_updates: int = static(64, "gradient steps of one call of step, whose random numbers are drawn at once", low=1)
    normalize_observations: bool = static(True, "by the mean and deviation of the data")
    network: str = static("mlp", "torso; minatar_cnn for discrete actions alone", choices=FEED_FORWARD)
    hidden: tuple[int, ...] = static((256, 256), "sizes of the hidden layers")
    activation: str = static("relu", "of the hidden layers", choices=tuple(ACTIVATIONS))


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: ``{"actor", "critics", "log_temperature"}``.
      target_critics: parameters of the target critics.
      opt_state: Adam's moments, of the `packed` parameters.
      key: typed PRNG key, advanced at every step.
      observation_stats: of the data.
    """

    params: Any
    target_critics: Any
    opt_state: Any
    key: Array
    observation_stats: normalization.RunningStats


def make(config: Config, env: Environment) -> Agent:
    """CQL for Discrete actions or a bounded Box; a step of the run is a gradient step.

    Raises:
      ValueError: one line that names the key: actions of another kind, or a network that does not fit the spaces.
    """
    actions = actions_of(config, env)
    policy, soft_loss = objective(config, actions)
    optimizer = optax.scale_by_adam(eps=config.adam_eps)
    is_discrete = isinstance(env.action_space, Discrete)

    def init(key: Array, data: Any = None) -> TrainState:
        key, env_key, actor_key, critics_key = jax.random.split(key, 4)
        stats = stats_of(data, env, config.normalize_observations)
        timestep, action = example(env, env_key)
        observation = timestep.observation
        params = {
            "actor": actions.actor.init(actor_key, observation),
            "critics": actions.critics.init(critics_key, *actions.inputs(observation, action)),
            "log_temperature": jnp.log(jnp.asarray(config.initial_temperature, jnp.float32)),
        }
        return TrainState(params, params["critics"], optimizer.init(packed(params)[0]), key, stats)

    def log_sum_exp(params: Any, batch: replay.Batch, key: Array) -> Array:
        """``log sum_a exp Q_i(s, a)``, or the log of the integral over actions scaled to [-1, 1]; ``[2, M]``."""
        start = batch.start
        if is_discrete:
            q = actions.critics.apply(params["critics"], start.observation)  # [2, M, A]
            q = q if start.action_mask is None else jnp.where(start.action_mask, q, -jnp.inf)
            return jax.nn.logsumexp(q, -1)
        low, high = action_bounds(env.action_space)
        keys = jax.random.split(key, 3)
        size = (config.num_actions, start.reward.shape[0])
        uniform = low + (high - low) * jax.random.uniform(keys[0], (*size, low.size))
        proposals = [(uniform, jnp.full(size, -low.size * jnp.log(2.0)))]
        for seen, mask, key in (
            (start.observation, start.action_mask, keys[1]),
            (batch.next_observation, batch.next_action_mask, keys[2]),
        ):
            acting = policy(jax.lax.stop_gradient(params["actor"]), seen, mask)
            drawn = jax.vmap(acting.from_noise)(actions.noise(key, size))
            scale = jnp.log(0.5 * (high - low)).sum()
            proposals.append((jax.vmap(acting.to_action)(drawn), jax.vmap(acting.log_prob)(drawn) + scale))
        drawn, density = (jnp.concatenate(x) for x in zip(*proposals, strict=True))  # [3K, M, D], [3K, M]
        # Flat rows: XLA on CPU multiplies matrices much faster than three-dimensional arrays.
        seen = jnp.broadcast_to(start.observation, (len(drawn), *start.observation.shape))
        rows = (x.reshape(-1, *x.shape[2:]) for x in (seen, drawn))
        q = actions.taken(params["critics"], *rows).reshape(-1, *density.shape)  # [2, 3K, M]
        return jax.nn.logsumexp(q - density, 1) - jnp.log(len(drawn))

    def loss(params: Any, target_critics: Any, batch: replay.Batch, key: Array) -> tuple[Array, dict[str, Array]]:
        noise_key, penalty_key = jax.random.split(key)
        noise = actions.noise(noise_key, (2, batch.returns.shape[0]))
        total, metrics = soft_loss(params, target_critics, batch, noise)
        q = actions.taken(params["critics"], batch.start.observation, batch.start.action)
        gap = (log_sum_exp(params, batch, penalty_key) - q).sum(0).mean()
        return total + config.conservative_coef * gap, {**metrics, "gap": gap}

    def step(state: TrainState, data: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key, learn_key = jax.random.split(state.key)
        trained, unpack = packed(state.params)
        gradient_of = jax.grad(lambda trained, *args: loss(unpack(trained), *args), has_aux=True)

        def update(learner: Any, batch: replay.Batch, key: Array) -> Any:
            trained, target_critics, opt_state = learner
            gradient, metrics = gradient_of(trained, target_critics, batch, key)
            direction, opt_state = optimizer.update(gradient, opt_state)
            trained = optax.tree.add_scale(trained, -config.learning_rate, direction)
            target_critics = optax.incremental_update(unpack(trained)["critics"], target_critics, config.target_tau)
            return (trained, target_critics, opt_state), metrics

        learner = (trained, state.target_critics, state.opt_state)
        sizes = (config.num_updates, config.batch_size)
        draw = single_steps(data, state.observation_stats, config.discount)
        learner, metrics = learn(update, learner, draw, learn_key, sizes)
        trained, target_critics, opt_state = learner
        return TrainState(unpack(trained), target_critics, opt_state, key, state.observation_stats), metrics

    def start(state: TrainState, timestep: TimeStep, data: Any = None) -> tuple[()]:
        return ()

    def act(state: TrainState, carry: Any, timestep: TimeStep, key: Array, greedy: bool, data: Any = None) -> Any:
        acting = policy(state.params["actor"], view(state.observation_stats, timestep.observation), timestep.action_mask)
        return (), acting.to_action(acting.mode() if greedy else acting.sample(key))

    return Agent(init, step, start, act, env_steps=config.num_updates, learns_from="data")
