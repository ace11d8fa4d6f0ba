"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300) and its relatives: no value network.

The members of a group start from the same reset, and an episode's advantage is its return against those of its group. The same
file trains CartPole and language models: an episode of tokens differs from others in its environment and its network alone.

The family, and where each member is defined: GRPO; Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): ``advantage`` "unscaled" and
``aggregate`` "constant"; RLOO (Ahmadian et al. 2024, arXiv 2402.14740): "leave-one-out"; REINFORCE++ (Hu et al. 2025, arXiv
2501.03262); DAPO (Yu et al. 2025, arXiv 2503.14476): ``clip_high``, ``aggregate`` "token", ``oversample``, ``overlong_steps``;
GSPO (Zheng et al. 2025, arXiv 2507.18071) and CISPO (MiniMax 2025, arXiv 2506.13585): ``policy_loss``.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, whole
from rljax.agents.on_policy import Episodes, acting, check_leash, first_episodes, leash_metrics, shuffled_minibatches
from rljax.envs import Environment, TimeStep, Tokens, group, host
from rljax.networks import Policy, Transformer, actor_critic, transformer
from rljax.networks.distributions import log_prob_and_entropy
from rljax.networks.policy import DISTRIBUTIONS, NETWORKS
from rljax.networks.torsos import ACTIVATIONS
from rljax.ops import groups, kl, losses
from rljax.options import config, static, traced

ADVANTAGES = ("group", "batch-scaled", "unscaled", "leave-one-out", "reinforce++", "reinforce++-baseline")
AGGREGATES = ("token", "sequence", "sequence-sum", "constant")
POLICY_LOSSES = ("clip", "gspo", "cispo")


@config
class Config:
    learning_rate: float = traced(1e-3, "Adam's step size", low=0)
    clip_low: float = traced(0.2, "the ratio counts down to 1 - clip_low", above=0)
    clip_high: float = traced(0.2, "the ratio counts up to 1 + clip_high; above clip_low it is DAPO's clip-higher", above=0)
    dual_clip: float | None = traced(None, "bounds the loss of a negative advantage A at -dual_clip A; none: no bound", above=1)
    kl_coef: float | None = traced(
        None, "weight of the KL penalty to the policy that training started from; 0: only measured; none: not even that", low=0
    )
    kl_target: float | None = traced(
        None, "KL of an episode that kl_coef is steered to (Ziegler 2019); none: it is fixed", above=0
    )
    kl_horizon: float = traced(1e4, "episodes in which a steered kl_coef moves by a fifth", above=0)
    entropy_coef: float | None = traced(None, "weight of the entropy bonus; none: no bonus", low=0)
    temperature: float = traced(1.0, "of the logits of a transformer, in sampling and in every loss", above=0)
    top_p: float | None = traced(
        None, "samples from the likeliest tokens of this much probability; none: from all", above=0, high=1
    )
    min_p: float | None = traced(None, "samples no token less likely than this times the likeliest; none: any", low=0, high=1)
    max_grad_norm: float = traced(0.5, "bound on the gradient's global norm", above=0)
    advantage_eps: float = traced(1e-4, "added to the deviation that advantages are divided by", low=0)
    adam_eps: float = traced(1e-5, "Adam's epsilon", above=0)
    advantage: str = static("group", "against which mean and over which deviation", choices=ADVANTAGES)
    policy_loss: str = static(
        "clip", "PPO's clipped ratio of each step, of the whole episode (gspo), or clipped weights (cispo)", choices=POLICY_LOSSES
    )
    aggregate: str = static("token", "how steps become one loss", choices=AGGREGATES)
    kl_in: str = static("loss", "where the KL penalty enters", choices=("loss", "reward"))
    kl_level: str = static(
        "token", "of a KL in the reward: each step has its own, or the episode the sum", choices=("token", "sequence")
    )
    kl_estimator: str = static("k3", "of a KL in the loss; in the reward it is k1", choices=("k1", "k2", "k3"))
    num_groups: int = static(8, "groups of an update, P", low=1)
    group_size: int = static(8, "episodes of a group, G", low=2)
    oversample: int = static(
        1, "plays this many times num_groups and keeps those whose returns differ, as far as there are (DAPO)", low=1
    )
    num_steps: int = static(500, "longest episode, T: later steps are cut off; of tokens, at most the environment's limit", low=1)
    overlong_steps: int = static(
        0, "an episode of tokens pays up to 1 for its last steps before T, so many (DAPO); 0: nothing", low=0
    )
    mask_truncated: bool = static(False, "leave episodes that were cut out of the loss")
    num_epochs: int = static(2, "passes over the episodes", low=1)
    num_minibatches: int = static(4, "gradient steps of each pass; each takes some of the groups", low=1)
    num_microbatches: int = static(1, "parts of a minibatch, one in memory at a time; the gradient is that of the whole", low=1)
    top_k: int = static(0, "samples from the top_k likeliest tokens; 0: from all", low=0)
    network: str = static("mlp", "torso of the policy, where there is no [model]", choices=NETWORKS)
    hidden: tuple[int, ...] = static((64, 64), "sizes of the hidden layers; of a gru the last is the carry")
    activation: str = static("tanh", "of the hidden layers", choices=tuple(ACTIVATIONS))
    distribution: str = static("auto", "over actions; auto: categorical or gaussian", choices=DISTRIBUTIONS)
    model: Transformer | None = static(None, "the transformer of [model]; none: the network above")


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: the policy's parameters.
      reference: the reference policy's; None without a leash.
      kl_coef: float32, the weight of the leash; None without one.
      opt_state: Adam's moments.
      key: typed PRNG key, advanced at every step.
    """

    params: Any
    reference: Any
    kl_coef: Any
    opt_state: Any
    key: Array


class Batch(struct.PyTreeNode):
    """What the loss sees of the episodes, ``[T, B]``, the members of a group side by side; ``first`` is ``[B]``."""

    first: TimeStep
    starts: TimeStep
    samples: Array
    mask: Array
    log_prob: Array | None
    ref_log_prob: Array | None
    advantages: Array


def make(config: Config, env: Environment) -> Agent:
    """GRPO on ``num_groups`` groups of ``group_size`` episodes of ``env``.

    Steps are counted as if every episode took all of its ``T``, whether it ended before or not.

    Raises:
      ValueError: one line that names the key: sizes that do not divide each other, a KL in the loss by k1, a network or
        distribution that does not fit the environment's spaces.
    """
    num_groups, group_size = config.num_groups, config.group_size
    envs = group(env, num_groups * config.oversample, group_size)
    space = env.observation_space
    num_steps = min(config.num_steps, space.length - space.prompt) if isinstance(space, Tokens) else config.num_steps
    _check(config)
    policy = make_policy(config, env, group_size)
    has_kl, kl_in_loss = config.kl_coef is not None, config.kl_coef is not None and config.kl_in == "loss"
    is_one_step = config.num_epochs * config.num_minibatches == 1
    # In a single gradient step the loss itself sees the policy that played: no other pass over the episodes is needed.
    needs_log_prob = not is_one_step or (has_kl and not kl_in_loss)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))

    def begins_with(key: Array) -> Any:
        env_state, timestep = envs.reset(key)
        host.release(env, env_state)
        return policy.init(key, timestep)

    def init(key: Array, data: Any = None, params: Any = None) -> TrainState:
        key, _, params_key = jax.random.split(key, 3)
        if params is None:
            params = begins_with(params_key)
        kl_coef = jnp.asarray(config.kl_coef, jnp.float32) if has_kl else None
        return TrainState(params, params if has_kl else None, kl_coef, optimizer.init(params), key)

    def log_probs(params: Any, batch: Batch) -> tuple[Array, Array]:
        """``(log pi(a|s), entropy)``, ``[T, B]``; 0 where a step is masked: what stands there must not reach a product.

        ``params`` are `whole`.
        """
        output = policy.unroll(params, policy.start(params, batch.first), batch.starts)
        log_prob, entropy = log_prob_and_entropy(output.distribution, batch.samples)
        return jnp.where(batch.mask, log_prob, 0.0), jnp.where(batch.mask, entropy, 0.0)

    def members(chosen: Array) -> Array:
        """The columns of the episodes of some groups."""
        return (chosen[:, None] * group_size + jnp.arange(group_size)).reshape(-1)

    def scores(episodes: Episodes) -> tuple[Array, Array]:
        """``(return, valid)`` of each episode, ``[P, G]``; shaped for its length, and invalid where its reward could not be
        had."""
        returns, transitions = episodes.returns, episodes.transitions
        if config.overlong_steps:
            returns = returns + losses.overlong_penalty(episodes.mask.sum(0), num_steps, config.overlong_steps)
        valid = jnp.ones(returns.shape, bool)
        if "valid" in transitions.info:
            valid = jnp.all(jnp.where(episodes.last, transitions.info["valid"], True), 0)
        return returns.reshape(-1, group_size), valid.reshape(-1, group_size)

    def advantages_of(rewards: Array, valid: Array) -> Array:
        """``[P, G]``."""
        if config.advantage == "leave-one-out":
            return groups.leave_one_out_advantages(rewards, valid)
        if config.advantage == "reinforce++":
            return groups.reinforce_plus_plus_advantages(rewards, valid, centre="batch")
        if config.advantage == "reinforce++-baseline":
            return groups.reinforce_plus_plus_advantages(rewards, valid, centre="group")
        scale = {"group": "group", "batch-scaled": "batch", "unscaled": "none"}[config.advantage]
        return groups.group_advantages(rewards, valid, scale=scale, eps=config.advantage_eps)  # type: ignore[arg-type]

    def loss(trained: Any, batch: Batch, kl_coef: Any, all_of: Array, data: Any) -> tuple[Array, dict[str, Array]]:
        """Of one micro-batch of the minibatch whose mask is ``all_of``; summed over them it is the minibatch's own."""

        def mean(values: Array, how: Any = "token") -> Array:
            return losses.aggregate(values, batch.mask, how)[0] / jnp.maximum(losses.aggregate(all_of, all_of, how)[1], 1.0)

        log_prob, entropy = log_probs(whole(trained, data), batch)
        old_log_prob = jax.lax.stop_gradient(log_prob) if batch.log_prob is None else batch.log_prob
        log_ratio = log_prob - old_log_prob
        if config.policy_loss == "cispo":
            policy_loss = losses.cispo(log_prob, old_log_prob, batch.advantages, 1.0 + config.clip_high)
        else:
            if config.policy_loss == "gspo":
                log_ratio = losses.sequence_log_ratio(log_prob, old_log_prob, batch.mask, per_token=True)
            policy_loss = losses.clipped_surrogate(
                log_ratio, jnp.zeros_like(log_ratio), batch.advantages, config.clip_low, config.clip_high, config.dual_clip
            )
        per_step = policy_loss if config.entropy_coef is None else policy_loss - config.entropy_coef * entropy
        clipped = (log_ratio < jnp.log1p(-config.clip_low)) | (log_ratio > jnp.log1p(config.clip_high))
        metrics = {
            "loss/policy": mean(policy_loss, config.aggregate),
            "entropy": mean(entropy),
            "kl": mean(kl.kl_estimate(old_log_prob, log_prob, "k3")),
            "clip_fraction": mean(clipped.astype(jnp.float32)),
            "ratio_error": jnp.abs(jnp.expm1(log_ratio)).max(),
        }
        if kl_in_loss and not needs_log_prob:
            metrics |= leash_metrics(log_prob, batch.ref_log_prob, mean)  # type: ignore[arg-type]
        if kl_in_loss:
            leash = kl.kl_estimate(log_prob, batch.ref_log_prob, config.kl_estimator)  # type: ignore[arg-type]
            per_step = per_step + kl_coef * leash
        return mean(per_step, config.aggregate), metrics

    def minibatch_gradient(params: Any, batch: Batch, kl_coef: Any, data: Any) -> tuple[Any, dict[str, Array]]:
        gradient_of = jax.grad(loss, has_aux=True)
        if config.num_microbatches == 1:
            return gradient_of(params, batch, kl_coef, batch.mask, data)

        def add(total, micro):
            gradient, metrics = gradient_of(params, micro, kl_coef, batch.mask, data)
            return jax.tree.map(jnp.add, total, gradient), metrics

        def split(x, axis):
            parts = x.reshape(*x.shape[:axis], config.num_microbatches, -1, *x.shape[axis + 1 :])
            return jnp.moveaxis(parts, axis, 0)

        micros = jax.tree.map(lambda x: split(x, 1), batch.replace(first=None))
        micros = micros.replace(first=jax.tree.map(lambda x: split(x, 0), batch.first))
        gradient, metrics = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), micros)
        return gradient, {name: x.max() if name == "ratio_error" else x.sum() for name, x in metrics.items()}

    def step(state: TrainState, data: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key, episode_key, shuffle_key = jax.random.split(state.key, 3)

        # Episodes.
        episodes = first_episodes(policy, envs, whole(state.params, data), episode_key, num_steps)
        rewards, valid = scores(episodes)
        is_flat = jnp.max(rewards, 1, where=valid, initial=-jnp.inf) <= jnp.min(rewards, 1, where=valid, initial=jnp.inf)
        metrics: dict[str, Any] = {"flat_groups": is_flat.mean(), "invalid": 1.0 - valid.mean(), **episodes.metrics()}
        if config.oversample > 1:
            # Of the groups that were played, first those whose rewards differ, then as many others as are missing.
            chosen = jnp.argsort(is_flat, stable=True)[:num_groups]
            rewards, valid = rewards[chosen], valid[chosen]
            columns = members(chosen)
            episodes = jax.tree.map(lambda x: x[:, columns], episodes)

        # What counts.
        starts, mask = episodes.starts, episodes.choices
        if config.mask_truncated:
            mask = mask & (episodes.last & episodes.transitions.terminated).any(0)
        mask = mask & valid.reshape(-1)

        # Targets: the return of an episode against its group's.
        batch = Batch(episodes.first, starts, episodes.samples, mask, None, None, jnp.zeros(mask.shape))
        log_prob: Any = log_probs(whole(state.params, data), batch)[0] if needs_log_prob else None
        ref_log_prob: Any = log_probs(whole(state.reference, data), batch)[0] if has_kl else None
        if has_kl and needs_log_prob:
            metrics |= leash_metrics(log_prob, ref_log_prob, lambda x, how="token": losses.masked_mean(x, mask, how))  # type: ignore
        if has_kl and config.kl_in == "reward":
            # Each step answers for what is still to come; in "sequence", for all of it.
            penalty = state.kl_coef * (log_prob - ref_log_prob)
            still_to_come = jnp.flip(jnp.cumsum(jnp.flip(penalty, 0), 0), 0)
            penalty = still_to_come if config.kl_level == "token" else jnp.broadcast_to(penalty.sum(0), penalty.shape)
            advantages = jax.vmap(lambda p: advantages_of(rewards - p.reshape(rewards.shape), valid).reshape(-1))(penalty)
        else:
            advantages = jnp.broadcast_to(advantages_of(rewards, valid).reshape(-1), mask.shape)
        batch = batch.replace(
            advantages=advantages,
            log_prob=None if is_one_step else log_prob,
            ref_log_prob=ref_log_prob if kl_in_loss else None,
        )

        # Update.
        def minibatch_step(learner, chosen):
            params, opt_state = learner
            columns = members(chosen)
            minibatch = jax.tree.map(lambda x: x[:, columns], batch.replace(first=None))
            minibatch = minibatch.replace(first=jax.tree.map(lambda x: x[columns], batch.first))
            gradient, metrics = minibatch_gradient(params, minibatch, state.kl_coef, data)
            direction, opt_state = optimizer.update(gradient, opt_state)
            metrics["grad_norm"] = optax.tree.norm(gradient)
            return (jax.tree.map(lambda p, d: p - config.learning_rate * d, params, direction), opt_state), metrics

        order = shuffled_minibatches(shuffle_key, num_groups, config.num_epochs, config.num_minibatches)
        (params, opt_state), per_minibatch = jax.lax.scan(minibatch_step, (state.params, state.opt_state), order)
        metrics["ratio_error"] = per_minibatch.pop("ratio_error")[0]  # of the first minibatch: 0 up to rounding
        metrics |= jax.tree.map(jnp.mean, per_minibatch)
        kl_coef = state.kl_coef
        if has_kl:
            metrics["kl_coef"] = kl_coef
        if config.kl_target is not None:
            measured = metrics["kl_reference/episode"]
            kl_coef = kl.adaptive_coefficient(kl_coef, measured, config.kl_target, config.kl_horizon, num_groups * group_size)
        return TrainState(params, state.reference, kl_coef, opt_state, key), metrics

    num_episodes = num_groups * config.oversample * group_size
    alone = make_policy(config, env, 1)
    return Agent(init, step, *acting(alone), env_steps=num_episodes * num_steps, policy=alone, begins_with=begins_with)


def make_policy(config: Config, env: Environment, group_size: int) -> Policy:
    """The policy of a config, for rows of which each ``group_size`` neighbours start alike."""
    if config.model is not None:
        return transformer(
            config.model,
            env.observation_space,
            group_size=group_size,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=1.0 if config.top_p is None else config.top_p,
            min_p=0.0 if config.min_p is None else config.min_p,
        )
    spaces = (env.observation_space, env.action_space)
    return actor_critic(*spaces, config.network, config.hidden, config.activation, config.distribution, has_value=False)


def _check(config: Config) -> None:
    size = config.num_groups
    for name in ("num_minibatches", "num_microbatches"):
        if size % getattr(config, name):
            raise ValueError(f"algo.{name} ({getattr(config, name)}) must divide the {size} groups that it splits")
        size //= getattr(config, name)
    if config.kl_coef is not None and config.kl_in == "loss" and config.kl_estimator == "k1":
        raise ValueError(
            'algo.kl_estimator "k1" in the loss has a gradient of zero on average, so it holds nothing; use "k2" or "k3", '
            'or algo.kl_in = "reward"'
        )
    check_leash(config, config.num_groups * config.group_size)
