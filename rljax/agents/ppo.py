"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), the clipped variant with GAE.

One file for discrete, masked and continuous actions, and for feed-forward and recurrent policies: a feed-forward policy has an
empty carry, so each transition is a sequence of length one and minibatches are drawn from all ``T * B`` of them; a recurrent
policy replays whole sequences, and minibatches are drawn from the ``B`` environments.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jax.flatten_util import ravel_pytree

from rljax.agents.base import Agent
from rljax.agents.on_policy import acting, episode_metrics, next_values, rollout, shuffled_minibatches
from rljax.envs import Box, Environment, TimeStep, vectorize
from rljax.networks import actor_critic
from rljax.networks.policy import DISTRIBUTIONS, NETWORKS
from rljax.networks.torsos import ACTIVATIONS
from rljax.ops import kl, losses, normalization, returns, schedules
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(3e-4, "Adam's step size", low=0)
    discount: float = traced(0.99, "discount factor gamma", low=0, high=1)
    gae_lambda: float = traced(0.95, "lambda of the advantage estimate", low=0, high=1)
    clip: float = traced(0.2, "half-width of the ratio's trust region, epsilon", above=0)
    clip_value: float | None = traced(0.2, "half-width of the value's trust region; none: unclipped", above=0)
    entropy_coef: float = traced(0.01, "weight of the entropy bonus", low=0)
    value_coef: float = traced(0.5, "weight of the value loss", low=0)
    max_grad_norm: float = traced(0.5, "bound on the gradient's global norm", above=0)
    adam_eps: float = traced(1e-5, "Adam's epsilon", above=0)
    target_kl: float | None = traced(None, "skip the rest of an update once the KL estimate passes this; none: never", above=0)
    anneal_steps: float | None = traced(
        None, "environment steps over which linear schedules fall to 0; none: the run's total_steps", above=0
    )
    learning_rate_schedule: str = static("constant", "of the learning rate", choices=("constant", "linear"))
    clip_schedule: str = static("constant", "of clip and clip_value", choices=("constant", "linear"))
    num_envs: int = static(64, "environments side by side, B", low=1)
    num_steps: int = static(128, "steps of each environment in a rollout, T", low=1)
    num_epochs: int = static(4, "passes over each rollout", low=1)
    num_minibatches: int = static(4, "gradient steps of each pass", low=1)
    whiten_advantages: str = static("minibatch", "over what advantages are whitened", choices=("minibatch", "batch", "none"))
    normalize_observations: bool = static(False, "by their running mean and deviation, clipped at 10")
    normalize_rewards: bool = static(False, "by the running deviation of the discounted return, clipped at 10")
    network: str = static("mlp", "torso of policy and value", choices=NETWORKS)
    hidden: tuple[int, ...] = static((64, 64), "sizes of the hidden layers; of a gru the last is the carry")
    activation: str = static("tanh", "of the hidden layers", choices=tuple(ACTIVATIONS))
    distribution: str = static("auto", "over actions; auto: categorical or gaussian", choices=DISTRIBUTIONS)


class TrainState(struct.PyTreeNode):
    """All that changes; ``B`` environments.

    Attributes:
      params: the policy's parameters.
      opt_state: Adam's moments, of the parameters as one flat vector.
      key: typed PRNG key, advanced at every step.
      updates: int32 ``[]``, calls of ``step`` so far.
      world: ``(environment state, time step, policy carry)``, where the last rollout stopped.
      observation_stats: running statistics of raw observations.
      return_stats: running statistics of discounted returns.
      running_return: float32 ``[B]``, the discounted return behind reward normalisation.
    """

    params: Any
    opt_state: Any
    key: Array
    updates: Array
    world: Any
    observation_stats: normalization.RunningStats
    return_stats: normalization.RunningStats
    running_return: Array


class Batch(struct.PyTreeNode):
    """What the loss sees of a rollout; ``[T, B]``, or ``[1, T * B]`` for a feed-forward policy."""

    timesteps: TimeStep
    samples: Array
    log_prob: Array
    values: Array
    advantages: Array
    targets: Array


def make(config: Config, env: Environment) -> Agent:
    """PPO on ``config.num_envs`` copies of ``env``.

    Raises:
      ValueError: one line that names the key: minibatches that do not divide the batch, a network or distribution that does
        not fit the environment's spaces, a linear schedule without ``anneal_steps``.
    """
    envs = vectorize(env, config.num_envs)
    policy = actor_critic(
        env.observation_space, env.action_space, config.network, config.hidden, config.activation, config.distribution
    )
    recurrent = config.network == "gru"
    sequences = config.num_envs if recurrent else config.num_envs * config.num_steps
    if sequences % config.num_minibatches:
        what = "num_envs" if recurrent else "num_envs * num_steps"
        raise ValueError(f"algo.num_minibatches ({config.num_minibatches}) must divide {what} ({sequences})")
    if config.anneal_steps is None and "linear" in (config.learning_rate_schedule, config.clip_schedule):
        raise ValueError('a "linear" schedule needs algo.anneal_steps, the environment steps it takes to reach 0')
    if config.normalize_observations and not isinstance(env.observation_space, Box):
        raise ValueError("algo.normalize_observations takes Box observations, the environment's are categories; set it to false")
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))
    env_steps = config.num_envs * config.num_steps

    def init(key: Array, data: None = None) -> TrainState:
        key, env_key, params_key = jax.random.split(key, 3)
        env_state, timestep = envs.reset(env_key)
        params = policy.init(params_key, timestep)
        return TrainState(
            params=params,
            opt_state=optimizer.init(ravel_pytree(params)[0]),
            key=key,
            updates=jnp.zeros((), jnp.int32),
            world=(env_state, timestep, policy.start(params, timestep)),
            observation_stats=normalization.init_stats(env.observation_space.shape),
            return_stats=normalization.init_stats(()),
            running_return=jnp.zeros(config.num_envs),
        )

    def view(stats: normalization.RunningStats, timestep: TimeStep) -> TimeStep:
        """The time step as the policy sees it."""
        if not config.normalize_observations:
            return timestep
        return timestep.replace(
            observation=normalization.normalize(stats, timestep.observation),
            next_observation=normalization.normalize(stats, timestep.next_observation),
        )

    def schedule(kind: str, updates: Array) -> Array | float:
        """The factor of a scheduled hyper-parameter, from 1 to 0."""
        if kind == "constant" or config.anneal_steps is None:
            return 1.0
        return schedules.linear(updates * (env_steps / config.anneal_steps), 1.0, 0.0, 1.0)

    def kl_to_old(log_ratio: Array) -> Array:
        """Samples are the old policy's, so this estimates KL(old || new)."""
        return kl.kl_estimate(-log_ratio, jnp.zeros_like(log_ratio), "k3")

    def loss(params: Any, carry: Any, batch: Batch, clip_factor: Array | float) -> tuple[Array, dict[str, Array]]:
        output = policy.unroll(params, carry, batch.timesteps)
        log_prob = output.distribution.log_prob(batch.samples)
        advantages = batch.advantages
        if config.whiten_advantages == "minibatch":
            advantages = normalization.whiten(advantages)
        clip = config.clip * clip_factor
        policy_loss = losses.clipped_surrogate(log_prob, batch.log_prob, advantages, clip, clip)
        if config.clip_value is None:
            value_loss = losses.squared_error(output.value, batch.targets)
        else:
            value_loss = losses.clipped_value_loss(output.value, batch.values, batch.targets, config.clip_value * clip_factor)
        entropy = output.distribution.entropy()
        total = policy_loss.mean() + config.value_coef * value_loss.mean() - config.entropy_coef * entropy.mean()
        log_ratio = log_prob - batch.log_prob
        return total, {"loss/policy": policy_loss, "loss/value": value_loss, "entropy": entropy, "log_ratio": log_ratio}

    def step(state: TrainState, data: None = None) -> tuple[TrainState, dict[str, Any]]:
        key, rollout_key, shuffle_key = jax.random.split(state.key, 3)

        # Rollout, with statistics frozen, so that the ratio of the first minibatch is 1.
        stats = state.observation_stats
        world, raw = rollout(
            policy, envs, state.params, state.world, rollout_key, config.num_steps, lambda timestep: view(stats, timestep)
        )
        trajectory = raw.replace(timesteps=view(stats, raw.timesteps))
        transitions = trajectory.transitions

        # Targets.
        rewards, return_stats, running_return = transitions.reward, state.return_stats, state.running_return
        if config.normalize_rewards:
            running_return, trace = normalization.return_trace(running_return, rewards, transitions.done, config.discount)
            return_stats = normalization.update_stats(return_stats, trace)
            rewards = jnp.clip(rewards / normalization.standard_deviation(return_stats), -10.0, 10.0)
        first_carry = trajectory.first_carry
        output = policy.unroll(state.params, first_carry, trajectory.timesteps)
        values = output.value[:-1]
        following = next_values(policy, state.params, trajectory, output.value)
        advantages, targets = returns.gae(
            rewards, values, following, transitions.terminated, transitions.truncated, config.discount, config.gae_lambda
        )
        if config.whiten_advantages == "batch":
            advantages = normalization.whiten(advantages)

        # Update.
        distribution = jax.tree.map(lambda x: x[:-1], output.distribution)
        log_prob = distribution.log_prob(trajectory.samples)
        batch = Batch(trajectory.starts, trajectory.samples, log_prob, values, advantages, targets)
        if not recurrent:
            batch = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), batch)
        learning_rate = config.learning_rate * schedule(config.learning_rate_schedule, state.updates)
        clip_factor = schedule(config.clip_schedule, state.updates)

        # The optimiser works on one flat vector: a few operations on one array instead of on a dozen small ones.
        params, unravel = ravel_pytree(state.params)
        gradient_of = jax.grad(lambda params, *args: loss(unravel(params), *args), has_aux=True)

        def minibatch_step(learner, columns):
            params, opt_state, stopped = learner
            minibatch = jax.tree.map(lambda x: x[:, columns], batch)
            carry = jax.tree.map(lambda x: x[columns], first_carry)
            gradient, metrics = gradient_of(params, carry, minibatch, clip_factor)
            metrics["grad_norm"] = optax.tree.norm(gradient)
            direction, new_opt_state = optimizer.update(gradient, opt_state)
            learner = (params - learning_rate * jnp.asarray(direction), new_opt_state, stopped)
            if config.target_kl is not None:
                stopped = stopped | (kl_to_old(metrics["log_ratio"]).mean() > config.target_kl)
                learner = jax.tree.map(lambda old, new: jnp.where(stopped, old, new), (params, opt_state, stopped), learner)
                learner = (*learner[:2], stopped)
                metrics["skipped"] = stopped
            return learner, metrics

        order = shuffled_minibatches(shuffle_key, sequences, config.num_epochs, config.num_minibatches)
        learner = (params, state.opt_state, jnp.zeros((), bool))
        (params, opt_state, _), per_minibatch = jax.lax.scan(minibatch_step, learner, order)

        # Metrics, averaged once and not within the loop.
        log_ratio = per_minibatch.pop("log_ratio")
        ratio_error = jnp.abs(jnp.exp(log_ratio) - 1.0)
        metrics: dict[str, Any] = jax.tree.map(jnp.mean, per_minibatch)
        metrics["kl"] = kl_to_old(log_ratio).mean()
        metrics["clip_fraction"] = (ratio_error > config.clip * clip_factor).mean()
        metrics["ratio_error"] = ratio_error[0].max()  # of the first minibatch: 0 up to rounding
        metrics["explained_variance"] = normalization.explained_variance(values, targets)
        metrics["learning_rate"] = jnp.asarray(learning_rate, jnp.float32)
        metrics.update(episode_metrics(transitions))
        if config.normalize_observations:
            stats = normalization.update_stats(stats, raw.timesteps.observation[1:])
        return TrainState(unravel(params), opt_state, key, state.updates + 1, world, stats, return_stats, running_return), metrics

    return Agent(init, step, *acting(policy, lambda state, timestep: view(state.observation_stats, timestep)), env_steps)
