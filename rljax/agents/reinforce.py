"""REINFORCE (Williams 1992) on whole episodes, with three baselines.

The gradient is the mean over episodes of ``sum over t of grad log pi(a_t|s_t) (G_t - b_t)``: unbiased for the expected return of
an episode of at most ``num_steps`` steps, where the discount is 1. (With a smaller one each term would need a further
``discount^t``, which is left out, as everywhere.) No baseline adds a bias: the mean is over the other episodes, and the value is
fitted on earlier ones.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jax.flatten_util import ravel_pytree

from rljax.agents.base import Agent, packed
from rljax.agents.on_policy import Episodes, acting, first_episodes
from rljax.envs import Environment, group, host
from rljax.networks import PolicyOutput, actor_critic
from rljax.networks.policy import DISTRIBUTIONS, NETWORKS
from rljax.networks.torsos import ACTIVATIONS
from rljax.ops import losses, returns
from rljax.options import config, static, traced

BASELINES = ("none", "mean", "value")


@config
class Config:
    learning_rate: float = traced(3e-3, "Adam's step size", low=0)
    discount: float = traced(1.0, "discount factor gamma", low=0, high=1)
    entropy_coef: float = traced(0.0, "weight of the entropy bonus", low=0)
    value_coef: float = traced(0.5, "weight of the value loss, of the value baseline", low=0)
    max_grad_norm: float = traced(0.5, "bound on the gradient's global norm", above=0)
    baseline: str = static("value", "none; mean: of the other episodes at that step; value: a learned V(s)", choices=BASELINES)
    num_envs: int = static(32, "episodes of an update, B", low=1)
    num_steps: int = static(500, "longest episode, T: later steps are cut off", low=1)
    gradient_variance: bool = static(False, "measure the variance of the gradient, at the cost of a gradient for each episode")
    network: str = static("mlp", "torso of policy and value", choices=NETWORKS)
    hidden: tuple[int, ...] = static((64, 64), "sizes of the hidden layers; of a gru the last is the carry")
    activation: str = static("tanh", "of the hidden layers", choices=tuple(ACTIVATIONS))
    distribution: str = static("auto", "over actions; auto: categorical or gaussian", choices=DISTRIBUTIONS)


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: the policy's parameters, the value's among them.
      opt_state: Adam's moments, of the `packed` parameters.
      key: typed PRNG key, advanced at every step.
    """

    params: Any
    opt_state: Any
    key: Array


def make(config: Config, env: Environment) -> Agent:
    """REINFORCE on ``config.num_envs`` episodes of ``env`` at a time; all ``B * T`` simulated steps count, masked or not.

    Raises:
      ValueError: one line that names the key: a mean baseline of a single episode, a network or distribution that does not fit
        the environment's spaces.
    """
    envs = group(env, config.num_envs, 1)
    policy = actor_critic(
        env.observation_space,
        env.action_space,
        config.network,
        config.hidden,
        config.activation,
        config.distribution,
        has_value=config.baseline == "value",
    )
    if config.num_envs < 2 and (config.baseline == "mean" or config.gradient_variance):
        raise ValueError('algo.num_envs must be at least 2 for algo.baseline "mean" and for algo.gradient_variance')
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam())

    def init(key: Array, data: None = None) -> TrainState:
        key, env_key, params_key = jax.random.split(key, 3)
        env_state, timestep = envs.reset(env_key)
        host.release(env, env_state)
        params = policy.init(params_key, timestep)
        return TrainState(params, optimizer.init(packed(params)[0]), key)

    def baseline(targets: Array, values: Array, mask: Array) -> Array:
        """``b_t``, ``[T, B]``."""
        if config.baseline == "none":
            return jnp.zeros_like(targets)
        if config.baseline == "value":
            return values
        # The mean over the other episodes that are still going: with its own return it would not be independent of the action.
        others = mask.sum(1, keepdims=True) - 1
        total = jnp.where(mask, targets, 0.0).sum(1, keepdims=True) - targets
        return jnp.where(others > 0, total / jnp.maximum(others, 1), 0.0)

    def unroll(params: Any, episodes: Episodes) -> PolicyOutput:
        return policy.unroll(params, policy.start(params, episodes.first), episodes.starts)

    def policy_loss(output: PolicyOutput, episodes: Episodes, advantages: Array) -> Array:
        """``-mean over episodes of sum over t of A_t log pi(a_t|s_t)``."""
        log_prob = output.distribution.log_prob(episodes.samples)
        return losses.masked_mean(-advantages * log_prob, episodes.mask, "sequence-sum")

    def loss(params: Any, episodes: Episodes, advantages: Array, targets: Array) -> tuple[Array, dict[str, Array]]:
        output = unroll(params, episodes)
        value_loss = losses.masked_mean(losses.squared_error(output.value, targets), episodes.mask, "token")
        entropy = losses.masked_mean(output.distribution.entropy(), episodes.mask, "token")
        metrics = {"loss/policy": policy_loss(output, episodes, advantages), "entropy": entropy}
        total = metrics["loss/policy"] - config.entropy_coef * entropy
        if config.baseline == "value":
            metrics["loss/value"] = value_loss
            total = total + config.value_coef * value_loss
        return total, metrics

    def gradient_variance(params: Any, episodes: Episodes, advantages: Array) -> Array:
        """Trace of the covariance of the policy gradient, estimated from the gradient of each episode."""

        def gradient(params: Any, *episode: Any) -> Array:
            one = jax.tree.map(lambda x: x[:, None], episode)
            return ravel_pytree(jax.grad(lambda params: policy_loss(unroll(params, one[0]), *one))(params))[0]

        each = jax.vmap(gradient, (None, 1, 1))(params, episodes, advantages)  # [B, parameters]
        return jnp.var(each, axis=0, ddof=1).sum() / config.num_envs

    def step(state: TrainState, data: None = None) -> tuple[TrainState, dict[str, Any]]:
        key, episode_key = jax.random.split(state.key)
        episodes = first_episodes(policy, envs, state.params, episode_key, config.num_steps)
        transitions = episodes.transitions

        # Targets: the discounted sum of what the episode still earns.
        nothing = jnp.zeros_like(transitions.reward)
        targets = returns.discounted_returns(
            transitions.reward, nothing, transitions.terminated, transitions.truncated, config.discount
        )
        advantages = targets - baseline(targets, unroll(state.params, episodes).value, episodes.mask)

        # Update.
        params, unpack = packed(state.params)
        gradient_of = jax.grad(lambda params, *args: loss(unpack(params), *args), has_aux=True)
        gradient, metrics = gradient_of(params, episodes, advantages, targets)
        metrics["grad_norm"] = optax.tree.norm(gradient)
        if config.gradient_variance:
            metrics["gradient_variance"] = gradient_variance(state.params, episodes, advantages)
        direction, opt_state = optimizer.update(gradient, state.opt_state)
        params = unpack(optax.tree.add_scale(params, -config.learning_rate, direction))
        return TrainState(params, opt_state, key), {**metrics, **episodes.metrics()}

    return Agent(init, step, *acting(policy), env_steps=config.num_envs * config.num_steps)
