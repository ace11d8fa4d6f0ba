"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905), and its discrete variant (Christodoulou 2019, arXiv 1910.07207).

The policy maximises ``E[sum r + alpha H(pi)]``. Two critics, of which targets and policy take the smaller; a temperature alpha
that is learned so that the policy's entropy stays at a target. For discrete actions every expectation over the policy is a sum.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, packed
from rljax.agents.off_policy import Loop, act_and_learn, fill, fill_steps, update_target
from rljax.envs import Discrete, Environment, Space, TimeStep, vectorize
from rljax.networks import Categorical, Network, TanhGaussian, action_values, continuous_critics, feed_forward
from rljax.networks.distributions import mask_logits, pick
from rljax.networks.torsos import ACTIVATIONS
from rljax.networks.values import FEED_FORWARD, action_bounds
from rljax.ops import replay
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(3e-4, "Adam's step size, of policy, critics and temperature", low=0)
    discount: float = traced(0.99, "discount factor gamma", low=0, high=1)
    target_tau: float = traced(0.005, "step of the target critics towards the online ones", low=0, high=1)
    temperature: float | None = traced(None, "alpha; none: learned", low=0)
    initial_temperature: float = traced(1.0, "where a learned alpha starts", above=0)
    target_entropy: float | None = traced(
        None, "nats, of actions scaled to [-1, 1]; none: -D, or half of the log of legal actions if discrete"
    )
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    target_every: int = static(1, "gradient steps between moves of the target critics", low=1)
    buffer_size: int = static(100_000, "transitions kept, rounded down to whole steps of all environments", low=1)
    learning_starts: int = static(1_000, "environment steps of random actions before the first gradient step", low=1)
    batch_size: int = static(256, "transitions of a gradient step", low=1)
    num_envs: int = static(1, "environments side by side, N", low=1)
    num_steps: int = static(32, "steps of each environment in one call of step, whose noise is drawn at once", low=1)
    num_updates: int = static(1, "gradient steps after each step of the environments", low=1)
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
      updates: int32 ``[]``, calls of ``step`` so far.
      world: ``(environment state, time step [N])``.
      buffer: the replay.
    """

    params: Any
    target_critics: Any
    opt_state: Any
    key: Array
    updates: Array
    world: Any
    buffer: replay.Replay


class Actions(NamedTuple):
    """What depends on whether actions are Discrete or a Box.

    Attributes:
      actor: network of the policy.
      critics: two action values; of every action if discrete.
      policy: ``(actor outputs, action mask) -> Distribution``.
      soft_value: ``(distribution, critic params, observation, alpha, noise) -> (E[min Q(s, a) - alpha log pi(a|s)], E[log pi])``
        over the policy's actions, each ``[M]``.
      taken: ``(critic params, observation, action) -> Q [2, M]``.
      inputs: ``(observation, action) ->`` arguments of the critics.
      noise: ``(key, batch shape) ->`` noise of the policy.
      auto_entropy: ``action mask ->`` target of the entropy where none is given.
    """

    actor: Network
    critics: Network
    policy: Callable[[Array, Any], Any]
    soft_value: Callable[[Any, Any, Any, Array, Array], tuple[Array, Array]]
    taken: Callable[[Any, Any, Array], Array]
    inputs: Callable[[Any, Array], tuple[Any, ...]]
    noise: Callable[[Array, tuple[int, ...]], Array]
    auto_entropy: Callable[[Array | None], Array | float]


def box_actions(config: Any, observation_space: Space, action_space: Space) -> Actions:
    """A tanh-Gaussian policy, whose expectations are taken from one sample."""
    low, high = action_bounds(action_space)
    if config.network != "mlp":
        raise ValueError(f'algo.network {config.network!r} has no critic for Box actions; use "mlp"')
    critics = continuous_critics(observation_space, action_space, config.hidden, config.activation, num=2)

    def policy(outputs: Array, mask: Array | None) -> TanhGaussian:
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        bounds = (jnp.broadcast_to(x, mean.shape) for x in (low, high))
        return TanhGaussian(mean, jnp.clip(log_std, -20.0, 2.0), *bounds)

    def soft_value(distribution: TanhGaussian, params: Any, observation: Any, alpha: Array, noise: Array) -> tuple[Array, Array]:
        sample = distribution.from_noise(noise)
        # The density of the action scaled to [-1, 1], so that entropies do not depend on the environment's units.
        log_prob = distribution.log_prob(sample) + jnp.log(0.5 * (high - low)).sum()
        q = critics.apply(params, observation, distribution.to_action(sample)).min(0)
        return q - alpha * log_prob, log_prob

    return Actions(
        actor=feed_forward(observation_space, 2 * low.size, config.network, config.hidden, config.activation),
        critics=critics,
        policy=policy,
        soft_value=soft_value,
        taken=critics.apply,
        inputs=lambda observation, action: (observation, action),
        noise=lambda key, shape: jax.random.normal(key, (*shape, low.size)),
        auto_entropy=lambda mask: -float(low.size),
    )


def discrete_actions(config: Any, observation_space: Space, action_space: Discrete) -> Actions:
    """A categorical policy, whose expectations are sums over the actions."""
    one = action_values(observation_space, action_space, config.network, config.hidden, config.activation)
    critics = Network(
        lambda key, observation: [one.init(k, observation) for k in jax.random.split(key)],
        lambda params, observation: jnp.stack([one.apply(p, observation) for p in params]),
    )

    def soft_value(distribution: Categorical, params: Any, observation: Any, alpha: Array, noise: Array) -> tuple[Array, Array]:
        log_probs = jax.nn.log_softmax(distribution.logits)
        probs = jnp.exp(log_probs)
        log_probs = jnp.where(probs > 0, log_probs, 0.0)
        q = critics.apply(params, observation).min(0)
        return (probs * (q - alpha * log_probs)).sum(-1), (probs * log_probs).sum(-1)

    return Actions(
        actor=feed_forward(observation_space, action_space.n, config.network, config.hidden, config.activation),
        critics=critics,
        policy=lambda outputs, mask: Categorical(mask_logits(outputs, mask)),
        soft_value=soft_value,
        taken=lambda params, observation, action: jax.vmap(pick, (0, None))(critics.apply(params, observation), action),
        inputs=lambda observation, action: (observation,),
        noise=lambda key, shape: jax.random.gumbel(key, (*shape, action_space.n)),
        # Of the legal actions: a target that no policy can reach would drive the temperature up for ever.
        auto_entropy=lambda mask: 0.5 * jnp.log(action_space.n if mask is None else mask.sum(-1)),
    )


def actions_of(config: Any, env: Environment) -> Actions:
    """`Actions` of an environment for a config with ``network``, ``hidden`` and ``activation``.

    Raises:
      ValueError: actions that are neither Discrete nor a bounded Box, or a network that does not fit them; names the key.
    """
    if isinstance(env.action_space, Discrete):
        return discrete_actions(config, env.observation_space, env.action_space)
    return box_actions(config, env.observation_space, env.action_space)


def objective(config: Any, actions: Actions) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``(policy, loss)`` of a config with ``temperature`` and ``target_entropy``: what SAC minimises, wherever batches are from.

    ``policy`` is ``(actor params, observation, action mask) -> Distribution``; ``loss`` is ``(params, target critics, batch,
    noise [2, M] of two draws) -> (scalar, metrics)``.
    """

    def policy(params: Any, observation: Any, mask: Array | None) -> Any:
        return actions.policy(actions.actor.apply(params, observation), mask)

    def loss(params: Any, target_critics: Any, batch: replay.Batch, noise: Array) -> tuple[Array, dict[str, Array]]:
        """The three losses in one: each part of the parameters has a gradient from one of them only."""
        start, fixed = batch.start, jax.lax.stop_gradient(params)
        alpha = jnp.exp(fixed["log_temperature"]) if config.temperature is None else jnp.asarray(config.temperature)

        # Critics: 1/2 (Q_i(s, a) - y)^2, y = r + gamma E[min Q_target(s', a') - alpha log pi(a'|s')].
        following = policy(fixed["actor"], batch.next_observation, batch.next_action_mask)
        value, _ = actions.soft_value(following, target_critics, batch.next_observation, alpha, noise[0])
        target = replay.targets(batch, value)
        q = actions.taken(params["critics"], start.observation, start.action)
        critic_loss = 0.5 * jnp.square(q - target).sum(0)

        # Policy: -E[min Q(s, a) - alpha log pi(a|s)].
        current = policy(params["actor"], start.observation, start.action_mask)
        value, log_prob = actions.soft_value(current, fixed["critics"], start.observation, alpha, noise[1])
        policy_loss = -value

        # Temperature: -log alpha (E[log pi] + target entropy); it rises while the entropy is below its target.
        target_entropy = actions.auto_entropy(start.action_mask) if config.target_entropy is None else config.target_entropy
        gap = jax.lax.stop_gradient(log_prob) + target_entropy
        temperature_loss = -params["log_temperature"] * gap if config.temperature is None else jnp.zeros_like(gap)

        total = (critic_loss + policy_loss + temperature_loss).mean()
        metrics = {"loss/critic": critic_loss, "loss/policy": policy_loss, "q": q, "entropy": -log_prob, "temperature": alpha}
        return total, jax.tree.map(jnp.mean, metrics)

    return policy, loss


def make(config: Config, env: Environment) -> Agent:
    """SAC on ``config.num_envs`` copies of ``env``.

    Raises:
      ValueError: one line that names the key: actions that are neither Discrete nor a bounded Box, observations that the
        network cannot take, a buffer smaller than ``learning_starts``.
    """
    envs = vectorize(env, config.num_envs)
    actions = actions_of(config, env)
    policy, loss = objective(config, actions)
    optimizer = optax.scale_by_adam(eps=config.adam_eps)
    env_steps = config.num_envs * config.num_steps
    random_steps = fill_steps(config.buffer_size, config.learning_starts, config.num_envs)

    def init(key: Array, data: None = None) -> TrainState:
        key, fill_key, actor_key, critics_key = jax.random.split(key, 4)
        filled = fill(envs, fill_key, config.buffer_size, random_steps)
        observation, action = filled.world[1].observation, filled.buffer.transitions.action[0]
        params = {
            "actor": actions.actor.init(actor_key, observation),
            "critics": actions.critics.init(critics_key, *actions.inputs(observation, action)),
            "log_temperature": jnp.log(jnp.asarray(config.initial_temperature, jnp.float32)),
        }
        return TrainState(
            params=params,
            target_critics=params["critics"],
            opt_state=optimizer.init(packed(params)[0]),
            key=key,
            updates=jnp.zeros((), jnp.int32),
            world=filled.world,
            buffer=filled.buffer,
        )

    def step(state: TrainState, data: None = None) -> tuple[TrainState, dict[str, Any]]:
        key, loop_key = jax.random.split(state.key)
        params, unpack = packed(state.params)
        gradient_of = jax.grad(lambda params, *args: loss(unpack(params), *args), has_aux=True)

        def noise(key: Array) -> tuple[Array, tuple[Array, Array]]:
            behave_key, learn_key, sample_key = jax.random.split(key, 3)
            size = (config.num_updates, config.batch_size)
            learn_noise = actions.noise(learn_key, (size[0], 2, size[1]))
            return actions.noise(behave_key, (config.num_envs,)), (learn_noise, jax.random.uniform(sample_key, (*size, 2)))

        def behave(learner: Any, timestep: TimeStep, noise: Any) -> Array:
            distribution = policy(unpack(learner[0])["actor"], timestep.observation, timestep.action_mask)
            return distribution.to_action(distribution.from_noise(noise[0]))

        def learn(learner: Any, buffer: replay.Replay, noise: Any) -> Any:
            def gradient_step(learner: Any, noise: Any) -> Any:
                params, target_critics, opt_state, count = learner
                policy_noise, uniforms = noise
                batch = replay.sample(buffer, uniforms, config.discount)
                gradient, metrics = gradient_of(params, target_critics, batch, policy_noise)
                direction, opt_state = optimizer.update(gradient, opt_state)
                params = optax.tree.add_scale(params, -config.learning_rate, direction)
                count = count + 1
                critics = unpack(params)["critics"]
                target_critics = update_target(target_critics, critics, count, config.target_tau, config.target_every)
                return (params, target_critics, opt_state, count), metrics

            learner, metrics = jax.lax.scan(gradient_step, learner, noise[1])
            return learner, buffer, jax.tree.map(jnp.mean, metrics)

        count = state.updates * (config.num_steps * config.num_updates)
        loop = Loop((params, state.target_critics, state.opt_state, count), state.world, state.buffer)
        loop, metrics = act_and_learn(envs, loop, loop_key, config.num_steps, 1, noise, behave, learn)
        params, target_critics, opt_state, _ = loop.learner
        return TrainState(unpack(params), target_critics, opt_state, key, state.updates + 1, loop.world, loop.buffer), metrics

    def start(state: TrainState, timestep: TimeStep) -> tuple[()]:
        return ()

    def act(state: TrainState, carry: Any, timestep: TimeStep, key: Array, greedy: bool) -> tuple[tuple[()], Array]:
        distribution = policy(state.params["actor"], timestep.observation, timestep.action_mask)
        return (), distribution.to_action(distribution.mode() if greedy else distribution.sample(key))

    return Agent(init, step, start, act, env_steps, init_steps=random_steps * config.num_envs)
