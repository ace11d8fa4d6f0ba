"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300): no value network.

The members of a group start from the same reset, and an episode's advantage is its return against those of its group. The policy
loss is PPO's clipped one; ``kl_coef`` adds the KL to the reference, the policy that training started from, as a leash.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jax.flatten_util import ravel_pytree

from rljax.agents.base import Agent, config, static, traced
from rljax.agents.on_policy import acting, episode_metrics, first_episodes, shuffled_minibatches
from rljax.envs import Environment, TimeStep, group
from rljax.networks import actor_critic
from rljax.networks.policy import DISTRIBUTIONS, NETWORKS
from rljax.networks.torsos import ACTIVATIONS
from rljax.ops import groups, kl, losses

AGGREGATES = ("token", "sequence", "sequence-sum", "constant")


@config
class Config:
    learning_rate: float = traced(1e-3, "Adam's step size", low=0)
    clip_low: float = traced(0.2, "the ratio counts down to 1 - clip_low", above=0)
    clip_high: float = traced(0.2, "the ratio counts up to 1 + clip_high; above clip_low it is DAPO's clip-higher", above=0)
    kl_coef: float | None = traced(
        None, "weight of the KL penalty to the policy that training started from; none: no penalty", low=0
    )
    entropy_coef: float = traced(0.0, "weight of the entropy bonus", low=0)
    max_grad_norm: float = traced(0.5, "bound on the gradient's global norm", above=0)
    advantage_eps: float = traced(1e-4, "added to the deviation that advantages are divided by", low=0)
    adam_eps: float = traced(1e-5, "Adam's epsilon", above=0)
    advantage_scale: str = static("group", "deviation that advantages are divided by", choices=("group", "batch", "none"))
    aggregate: str = static("token", "how steps become one loss", choices=AGGREGATES)
    kl_estimator: str = static("k3", "of the KL penalty; k1 is left out: its gradient is zero on average", choices=("k2", "k3"))
    num_groups: int = static(8, "groups of an update, P", low=1)
    group_size: int = static(8, "episodes of a group, G", low=2)
    num_steps: int = static(500, "longest episode, T: later steps are cut off", low=1)
    num_epochs: int = static(2, "passes over the episodes", low=1)
    num_minibatches: int = static(4, "gradient steps of each pass; each takes some of the P * G episodes", low=1)
    network: str = static("mlp", "torso of the policy", choices=NETWORKS)
    hidden: tuple[int, ...] = static((64, 64), "sizes of the hidden layers; of a gru the last is the carry")
    activation: str = static("tanh", "of the hidden layers", choices=tuple(ACTIVATIONS))
    distribution: str = static("auto", "over actions; auto: categorical or gaussian", choices=DISTRIBUTIONS)


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: the policy's parameters.
      reference: the reference policy's; None without a leash.
      opt_state: Adam's moments, of the parameters as one flat vector.
      key: typed PRNG key, advanced at every step.
    """

    params: Any
    reference: Any
    opt_state: Any
    key: Array


class Batch(struct.PyTreeNode):
    """What the loss sees of the episodes, ``[T, B]`` with ``B = P * G``, the members of a group side by side."""

    timesteps: TimeStep
    samples: Array
    mask: Array
    log_prob: Array
    ref_log_prob: Array
    advantages: Array


def make(config: Config, env: Environment) -> Agent:
    """GRPO on ``num_groups`` groups of ``group_size`` episodes of ``env``; all ``B * T`` simulated steps count, masked or not.

    Raises:
      ValueError: one line that names the key: minibatches that do not divide the episodes, a network or distribution that does
        not fit the environment's spaces.
    """
    envs = group(env, config.num_groups, config.group_size)
    policy = actor_critic(
        env.observation_space,
        env.action_space,
        config.network,
        config.hidden,
        config.activation,
        config.distribution,
        has_value=False,
    )
    num_episodes = config.num_groups * config.group_size
    if num_episodes % config.num_minibatches:
        raise ValueError(f"algo.num_minibatches ({config.num_minibatches}) must divide num_groups * group_size ({num_episodes})")
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))

    def init(key: Array, data: None = None) -> TrainState:
        key, env_key, params_key = jax.random.split(key, 3)
        params = policy.init(params_key, envs.reset(env_key)[1])
        reference = None if config.kl_coef is None else params
        return TrainState(params, reference, optimizer.init(ravel_pytree(params)[0]), key)

    def log_probs(params: Any, carry: Any, batch: Batch) -> tuple[Array, Array]:
        """``(log pi(a|s), entropy)``, ``[T, B]``."""
        distribution = policy.unroll(params, carry, batch.timesteps).distribution
        return distribution.log_prob(batch.samples), distribution.entropy()

    def loss(params: Any, carry: Any, batch: Batch) -> tuple[Array, dict[str, Array]]:
        log_prob, entropy = log_probs(params, carry, batch)

        def mean(values: Array, how: Any = "token") -> Array:
            return losses.masked_mean(values, batch.mask, how)

        # Where a step is masked, its ratio may be anything: it must not reach a product.
        log_prob = jnp.where(batch.mask, log_prob, 0.0)
        policy_loss = losses.clipped_surrogate(log_prob, batch.log_prob, batch.advantages, config.clip_low, config.clip_high)
        per_step = policy_loss - config.entropy_coef * entropy
        log_ratio = log_prob - batch.log_prob
        clipped = (log_ratio < jnp.log1p(-config.clip_low)) | (log_ratio > jnp.log1p(config.clip_high))
        metrics = {
            "loss/policy": mean(policy_loss),
            "entropy": mean(entropy),
            "kl": mean(kl.kl_estimate(-log_ratio, jnp.zeros_like(log_ratio), "k3")),
            "clip_fraction": mean(clipped.astype(jnp.float32)),
            "ratio_error": jnp.where(batch.mask, jnp.abs(jnp.expm1(log_ratio)), 0.0).max(),
        }
        if config.kl_coef is not None:
            leash = kl.kl_estimate(log_prob, batch.ref_log_prob, config.kl_estimator)  # type: ignore[arg-type]
            metrics["kl_reference"] = mean(leash)
            per_step = per_step + config.kl_coef * leash
        return mean(per_step, config.aggregate), metrics

    def step(state: TrainState, data: None = None) -> tuple[TrainState, dict[str, Any]]:
        key, episode_key, shuffle_key = jax.random.split(state.key, 3)

        # Episodes.
        trajectory, mask = first_episodes(policy, envs, state.params, episode_key, config.num_steps)
        transitions = trajectory.transitions
        first_carry = trajectory.first_carry

        # Targets: the return of an episode against its group's.
        episode_returns = jnp.where(mask, transitions.reward, 0.0).sum(0).reshape(config.num_groups, config.group_size)
        advantages = groups.group_advantages(
            episode_returns,
            scale=config.advantage_scale,  # type: ignore[arg-type]
            eps=config.advantage_eps,
        )
        is_flat = episode_returns.max(1) == episode_returns.min(1)

        # Update.
        zeros = jnp.zeros_like(transitions.reward)
        batch = Batch(
            trajectory.starts, trajectory.samples, mask, zeros, zeros, jnp.broadcast_to(advantages.reshape(-1), mask.shape)
        )
        log_prob, _ = log_probs(state.params, first_carry, batch)
        ref_log_prob = log_prob if state.reference is None else log_probs(state.reference, first_carry, batch)[0]
        batch = batch.replace(log_prob=jnp.where(mask, log_prob, 0.0), ref_log_prob=jnp.where(mask, ref_log_prob, 0.0))
        params, unravel = ravel_pytree(state.params)
        gradient_of = jax.grad(lambda params, *args: loss(unravel(params), *args), has_aux=True)

        def minibatch_step(learner, columns):
            params, opt_state = learner
            minibatch = jax.tree.map(lambda x: x[:, columns], batch)
            carry = jax.tree.map(lambda x: x[columns], first_carry)
            gradient, metrics = gradient_of(params, carry, minibatch)
            direction, opt_state = optimizer.update(gradient, opt_state)
            metrics["grad_norm"] = optax.tree.norm(gradient)
            return (params - config.learning_rate * jnp.asarray(direction), opt_state), metrics

        order = shuffled_minibatches(shuffle_key, num_episodes, config.num_epochs, config.num_minibatches)
        (params, opt_state), per_minibatch = jax.lax.scan(minibatch_step, (params, state.opt_state), order)
        ratio_error = per_minibatch.pop("ratio_error")[0]  # of the first minibatch: 0 up to rounding
        metrics: dict[str, Any] = {**jax.tree.map(jnp.mean, per_minibatch), "ratio_error": ratio_error}
        metrics["flat_groups"] = is_flat.mean()
        metrics["unfinished"] = 1.0 - (transitions.done & mask).any(0).mean()
        metrics.update(episode_metrics(transitions, mask))
        return TrainState(unravel(params), state.reference, opt_state, key), metrics

    return Agent(init, step, *acting(policy), env_steps=num_episodes * config.num_steps)
