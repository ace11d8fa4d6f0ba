"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), the clipped variant with GAE.

One file for discrete, masked and continuous actions, and for feed-forward and recurrent policies: a feed-forward policy has an
empty carry, so each transition is a sequence of length one and minibatches are drawn from all ``T * B`` of them; a recurrent
policy replays whole sequences, and minibatches are drawn from the ``B`` environments. A language model (``[model]``) plays whole
episodes, one in each environment and update, and a penalty for its KL to the policy that training started from, the leash, is
part of the reward (Ziegler et al. 2019, arXiv 1909.08593; Ouyang et al. 2022, arXiv 2203.02155).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, packed, whole
from rljax.agents.on_policy import (
    Episodes,
    acting,
    check_leash,
    episode_metrics,
    first_episodes,
    leash_metrics,
    next_values,
    rollout,
    shuffled_minibatches,
)
from rljax.envs import Box, Environment, TimeStep, Tokens, group, vectorize
from rljax.networks import Policy, Transformer, actor_critic, transformer
from rljax.networks.distributions import log_prob_and_entropy
from rljax.networks.policy import DISTRIBUTIONS, NETWORKS, with_critic
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
    kl_coef: float | None = traced(
        None,
        "of a language model, weight of its KL to the policy that training started from, taken off the rewards; none: 0",
        low=0,
    )
    kl_target: float | None = traced(
        None, "KL of an episode that kl_coef is steered to (Ziegler 2019); none: it is fixed", above=0
    )
    kl_horizon: float = traced(1e4, "episodes in which a steered kl_coef moves by a fifth", above=0)
    temperature: float = traced(1.0, "of the logits of a language model, in sampling and in every loss", above=0)
    learning_rate_schedule: str = static("constant", "of the learning rate", choices=("constant", "linear"))
    clip_schedule: str = static("constant", "of clip and clip_value", choices=("constant", "linear"))
    num_envs: int = static(64, "environments side by side, B", low=1)
    num_steps: int = static(128, "steps of each environment in a rollout, T; of tokens, at most the environment's limit", low=1)
    num_epochs: int = static(4, "passes over each rollout", low=1)
    num_minibatches: int = static(4, "gradient steps of each pass", low=1)
    whiten_advantages: str = static("minibatch", "over what advantages are whitened", choices=("minibatch", "batch", "none"))
    normalize_observations: bool = static(False, "by their running mean and deviation, clipped at 10")
    normalize_rewards: bool = static(False, "by the running deviation of the discounted return, clipped at 10")
    scale_rewards: bool = static(False, "of a language model, by their deviation over the rollout, the penalty for KL included")
    mask_truncated: bool = static(False, "of a language model, leave episodes that were cut out of the loss")
    network: str = static("mlp", "torso of policy and value, where there is no [model]", choices=NETWORKS)
    hidden: tuple[int, ...] = static((64, 64), "sizes of the hidden layers; of a gru the last is the carry")
    activation: str = static("tanh", "of the hidden layers", choices=tuple(ACTIVATIONS))
    distribution: str = static("auto", "over actions; auto: categorical or gaussian", choices=DISTRIBUTIONS)
    value_network: str = static(
        "shared",
        "of a language model, its value: a head on the policy's transformer, or another one",
        choices=("shared", "separate"),
    )
    model: Transformer | None = static(None, "the transformer of [model]; none: the network above")


class TrainState(struct.PyTreeNode):
    """All that changes; ``B`` environments.

    Attributes:
      params: the policy's parameters.
      opt_state: Adam's moments, of the `packed` parameters.
      key: typed PRNG key, advanced at every step.
      updates: int32 ``[]``, calls of ``step`` so far.
      world: ``(environment state, time step, policy carry)``, where the last rollout stopped; None of a language model.
      observation_stats: running statistics of raw observations.
      return_stats: running statistics of discounted returns.
      running_return: float32 ``[B]``, the discounted return behind reward normalisation.
      reference: parameters of the policy that training started from; None without a leash.
      kl_coef: float32, the weight of the leash; None without one.
    """

    params: Any
    opt_state: Any
    key: Array
    updates: Array
    world: Any
    observation_stats: normalization.RunningStats
    return_stats: normalization.RunningStats
    running_return: Array
    reference: Any = None
    kl_coef: Array | None = None


class Batch(struct.PyTreeNode):
    """What the loss sees of a rollout; ``[T, B]``, or ``[1, T * B]`` for a feed-forward policy.

    ``mask`` has the steps that count; None where all do, as they do but for a language model.
    """

    timesteps: TimeStep
    samples: Array
    log_prob: Array
    values: Array
    advantages: Array
    targets: Array
    mask: Array | None = None


def make(config: Config, env: Environment) -> Agent:
    """PPO on ``config.num_envs`` copies of ``env``.

    Raises:
      ValueError: one line that names the key: minibatches that do not divide the batch, a network or distribution that does
        not fit the environment's spaces, a linear schedule without ``anneal_steps``, an option that only language models have
        for another network, and the reverse.
    """
    envs = vectorize(env, config.num_envs) if config.model is None else group(env, config.num_envs, 1)
    policy = make_policy(config, env)
    space, model = env.observation_space, config.model
    is_language = model is not None
    _check(config)
    num_steps = min(config.num_steps, space.length - space.prompt) if isinstance(space, Tokens) else config.num_steps
    in_sequence = config.network == "gru" or is_language
    sequences = config.num_envs if in_sequence else config.num_envs * config.num_steps
    if sequences % config.num_minibatches:
        what = "num_envs" if in_sequence else "num_envs * num_steps"
        raise ValueError(f"algo.num_minibatches ({config.num_minibatches}) must divide {what} ({sequences})")
    if config.anneal_steps is None and "linear" in (config.learning_rate_schedule, config.clip_schedule):
        raise ValueError('a "linear" schedule needs algo.anneal_steps, the environment steps it takes to reach 0')
    if config.normalize_observations and not isinstance(space, Box):
        raise ValueError("algo.normalize_observations takes Box observations, the environment's are categories; set it to false")
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))
    env_steps = config.num_envs * num_steps

    def init(key: Array, data: Any = None, params: Any = None) -> TrainState:
        """``params`` of a language model that was trained before; it gets a value of zero."""
        key, env_key, params_key = jax.random.split(key, 3)
        env_state, timestep = envs.reset(env_key)
        own = policy.init(params_key, timestep)
        if params is not None:
            own = {**own, **params, **({"critic": {**params, "value": own["critic"]["value"]}} if "critic" in own else {})}
        has_leash = config.kl_coef is not None
        return TrainState(
            params=own,
            opt_state=optimizer.init(packed(own)[0]),
            key=key,
            updates=jnp.zeros((), jnp.int32),
            world=None if is_language else (env_state, timestep, policy.start(own, timestep)),
            observation_stats=normalization.init_stats(space.shape),
            return_stats=normalization.init_stats(()),
            running_return=jnp.zeros(config.num_envs),
            reference=own if has_leash else None,
            kl_coef=jnp.asarray(config.kl_coef, jnp.float32) if has_leash else None,
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

    def loss(trained: Any, carry: Any, batch: Batch, clip_factor: Array | float, data: Any) -> tuple[Array, dict[str, Array]]:
        params = whole(trained, data)
        if is_language:  # what the prompt leaves in the cache depends on the parameters
            carry = policy.start(params, jax.tree.map(lambda x: x[0], batch.timesteps))
        output = policy.unroll(params, carry, batch.timesteps)
        log_prob, entropy = log_prob_and_entropy(output.distribution, batch.samples)

        def counted(x: Array) -> Array:
            return x if batch.mask is None else jnp.where(batch.mask, x, 0.0)

        def mean(x: Array) -> Array:
            return x.mean() if batch.mask is None else losses.masked_mean(x, batch.mask)

        log_prob, entropy = counted(log_prob), counted(entropy)
        advantages = batch.advantages
        if config.whiten_advantages == "minibatch":
            advantages = normalization.whiten(advantages, batch.mask)
        clip = config.clip * clip_factor
        policy_loss = losses.clipped_surrogate(log_prob, batch.log_prob, advantages, clip, clip)
        if config.clip_value is None:
            value_loss = losses.squared_error(output.value, batch.targets)
        else:
            value_loss = losses.clipped_value_loss(output.value, batch.values, batch.targets, config.clip_value * clip_factor)
        total = mean(policy_loss) + config.value_coef * mean(value_loss) - config.entropy_coef * mean(entropy)
        each = {"loss/policy": policy_loss, "loss/value": value_loss, "entropy": entropy, "log_ratio": log_prob - batch.log_prob}
        return total, {name: counted(x) for name, x in each.items()}

    def leashed(
        state: TrainState, data: Any, episodes: Episodes, log_prob: Array, rewards: Array
    ) -> tuple[Array, dict[str, Any]]:
        """Rewards less the penalty for the KL to the reference, and that KL; scaled, if they are."""
        choices, metrics = episodes.choices, {}
        if state.reference is not None:
            params = whole(state.reference, data)
            reference = policy.unroll(params, policy.start(params, episodes.first), episodes.starts).distribution
            log_prob, ref_log_prob = (jnp.where(choices, x, 0.0) for x in (log_prob, reference.log_prob(episodes.samples)))
            rewards = kl.kl_reward(rewards, log_prob, ref_log_prob, choices, state.kl_coef)  # type: ignore[arg-type]
            metrics = leash_metrics(log_prob, ref_log_prob, lambda x, how="token": losses.masked_mean(x, choices, how))  # type: ignore
            metrics["kl_coef"] = jnp.asarray(state.kl_coef)
        return normalization.scale(rewards, choices) if config.scale_rewards else rewards, metrics

    def step(state: TrainState, data: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key, rollout_key, shuffle_key = jax.random.split(state.key, 3)
        acting_params = whole(state.params, data)
        mask, share, world, stats = None, 1.0, state.world, state.observation_stats
        metrics: dict[str, Any] = {}
        trajectory: Any

        # Rollout, with statistics frozen, so that the ratio of the first minibatch is 1.
        if is_language:
            trajectory = first_episodes(policy, envs, acting_params, rollout_key, num_steps)
            mask, first_carry = trajectory.choices, ()
            if config.mask_truncated:
                mask = mask & (trajectory.last & trajectory.transitions.terminated).any(0)
            metrics |= trajectory.metrics()
        else:
            world, raw = rollout(
                policy, envs, state.params, state.world, rollout_key, config.num_steps, lambda timestep: view(stats, timestep)
            )
            raw_observations, trajectory = raw.timesteps.observation, raw.replace(timesteps=view(stats, raw.timesteps))
            first_carry = trajectory.first_carry
            metrics |= episode_metrics(trajectory.transitions)
        transitions = trajectory.transitions

        # Targets.
        carry = policy.start(acting_params, trajectory.first) if is_language else first_carry
        output = policy.unroll(acting_params, carry, trajectory.timesteps)
        values = output.value[:-1]
        if is_language or isinstance(env.action_space, Box):
            # Computed as minibatches will: a narrow Gaussian magnifies how a rollout rounds its mean, and ratios would not be 1.
            samples = jnp.concatenate([trajectory.samples, trajectory.samples[-1:]])  # the last of them is nobody's
            log_prob = output.distribution.log_prob(samples)[:-1]
        else:
            log_prob = trajectory.log_prob
        rewards, return_stats, running_return = transitions.reward, state.return_stats, state.running_return
        if config.normalize_rewards:
            running_return, trace = normalization.return_trace(running_return, rewards, transitions.done, config.discount)
            return_stats = normalization.update_stats(return_stats, trace)
            rewards = jnp.clip(rewards / normalization.standard_deviation(return_stats), -10.0, 10.0)
        terminated = transitions.terminated
        if is_language:
            following = output.value[1:]
            # What is paid for as it stands is over: its state has no value beside that.
            terminated = terminated | (transitions.truncated & getattr(env, "truncated_counts", False))
            rewards, of_leash = leashed(state, data, trajectory, log_prob, rewards)
            metrics |= of_leash
        else:
            following = next_values(policy, state.params, trajectory, output.value)
        advantages, targets = returns.gae(
            rewards,
            values,
            following,
            terminated,
            transitions.truncated,
            config.discount,
            config.gae_lambda,
            acts=trajectory.choices if is_language else None,
        )
        if config.whiten_advantages == "batch":
            advantages = normalization.whiten(advantages, mask)

        # Update.
        if mask is not None:
            log_prob, share = jnp.where(mask, log_prob, 0.0), jnp.maximum(mask.mean(), 1.0 / mask.size)
        batch = Batch(trajectory.starts, trajectory.samples, log_prob, values, advantages, targets, mask)
        if not in_sequence:
            batch = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), batch)
        learning_rate = config.learning_rate * schedule(config.learning_rate_schedule, state.updates)
        clip_factor = schedule(config.clip_schedule, state.updates)

        params, unpack = packed(state.params)
        gradient_of = jax.grad(lambda params, *args: loss(unpack(params), *args), has_aux=True)

        def minibatch_step(learner, columns):
            params, opt_state, stopped = learner
            minibatch = jax.tree.map(lambda x: x[:, columns], batch)
            carry = jax.tree.map(lambda x: x[columns], first_carry)
            gradient, metrics = gradient_of(params, carry, minibatch, clip_factor, data)
            metrics["grad_norm"] = optax.tree.norm(gradient)
            direction, new_opt_state = optimizer.update(gradient, opt_state)
            learner = (optax.tree.add_scale(params, -learning_rate, direction), new_opt_state, stopped)
            if config.target_kl is not None:
                stopped = stopped | (kl_to_old(metrics["log_ratio"]).mean() / share > config.target_kl)
                learner = jax.tree.map(lambda old, new: jnp.where(stopped, old, new), (params, opt_state, stopped), learner)
                learner = (*learner[:2], stopped)
                metrics["skipped"] = stopped
            return learner, metrics

        order = shuffled_minibatches(shuffle_key, sequences, config.num_epochs, config.num_minibatches)
        learner = (params, state.opt_state, jnp.zeros((), bool))
        (params, opt_state, _), per_minibatch = jax.lax.scan(minibatch_step, learner, order)

        # Metrics, averaged once and not within the loop, over the steps that count.
        log_ratio = per_minibatch.pop("log_ratio")
        ratio_error = jnp.abs(jnp.exp(log_ratio) - 1.0)
        for name in ("loss/policy", "loss/value", "entropy"):
            metrics[name] = per_minibatch.pop(name).mean() / share
        metrics |= jax.tree.map(jnp.mean, per_minibatch)
        metrics["kl"] = kl_to_old(log_ratio).mean() / share
        metrics["clip_fraction"] = (ratio_error > config.clip * clip_factor).mean() / share
        metrics["ratio_error"] = ratio_error[0].max()  # of the first minibatch: 0 up to rounding
        metrics["explained_variance"] = normalization.explained_variance(values, targets, mask)
        metrics["learning_rate"] = jnp.asarray(learning_rate, jnp.float32)
        if config.normalize_observations:
            stats = normalization.update_stats(stats, raw_observations[1:])
        kl_coef = state.kl_coef
        if kl_coef is not None and config.kl_target is not None:
            measured = metrics["kl_reference/episode"]
            kl_coef = kl.adaptive_coefficient(kl_coef, measured, config.kl_target, config.kl_horizon, config.num_envs)
        learned = (unpack(params), opt_state, key, state.updates + 1)
        return TrainState(*learned, world, stats, return_stats, running_return, state.reference, kl_coef), metrics

    start, act = acting(policy, lambda state, timestep: view(state.observation_stats, timestep))
    if model is None:
        return Agent(init, step, start, act, env_steps)
    speaks = transformer(model, space, temperature=config.temperature)

    def begins_with(key: Array) -> Any:
        return speaks.init(key, envs.reset(key)[1])

    return Agent(init, step, *acting(speaks), env_steps, policy=speaks, begins_with=begins_with)


def make_policy(config: Config, env: Environment) -> Policy:
    """Policy and value of a config."""
    if config.model is None:
        spaces = (env.observation_space, env.action_space)
        return actor_critic(*spaces, config.network, config.hidden, config.activation, config.distribution)
    shared = config.value_network == "shared"
    policy = transformer(config.model, env.observation_space, temperature=config.temperature, has_value=shared)
    return policy if shared else with_critic(policy, transformer(config.model, env.observation_space, has_value=True))


def _check(config: Config) -> None:
    others = ("normalize_observations", "normalize_rewards")
    own = ("kl_coef", "kl_target", "scale_rewards", "mask_truncated")
    for name in others if config.model is not None else own:
        if getattr(config, name):
            has = "without" if config.model is not None else "with"
            raise ValueError(f"algo.{name} is of policies {has} a [model]; leave it out")
    check_leash(config, config.num_envs)
    if config.value_network == "separate" and (config.model is None or config.model.lora_rank):
        raise ValueError('algo.value_network "separate" is a second whole transformer: it takes a [model], without lora_rank')
