"""Parallel Q-network (Gallici et al. 2024, arXiv 2407.04811): Q-learning on fresh rollouts.

Neither replay nor target network: many environments, layer normalisation in the network, and Q(lambda) targets that are fixed for
one rollout.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, packed
from rljax.agents.on_policy import episode_metrics, next_values, rollout, shuffled_minibatches
from rljax.envs import Environment, TimeStep, vectorize
from rljax.networks import EpsilonGreedy, Policy, PolicyOutput, action_values
from rljax.networks.distributions import mask_logits, pick
from rljax.networks.torsos import ACTIVATIONS
from rljax.networks.values import FEED_FORWARD
from rljax.ops import returns, schedules
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(5e-4, "RAdam's step size", low=0)
    discount: float = traced(0.99, "discount factor gamma", low=0, high=1)
    trace_lambda: float = traced(0.65, "lambda of the Q(lambda) targets", low=0, high=1)
    epsilon_start: float = traced(1.0, "probability of a random action at first", low=0, high=1)
    epsilon_end: float = traced(0.05, "probability of a random action in the end", low=0, high=1)
    exploration_fraction: float = traced(0.1, "part of anneal_steps over which epsilon falls", low=0, high=1)
    max_grad_norm: float = traced(10.0, "bound on the gradient's global norm", above=0)
    anneal_steps: float | None = traced(None, "environment steps that schedules refer to; none: the run's total_steps", above=0)
    learning_rate_schedule: str = static("linear", "of the learning rate, to 0 over anneal_steps", choices=("constant", "linear"))
    num_envs: int = static(128, "environments side by side, B", low=1)
    num_steps: int = static(32, "steps of each environment in a rollout, T", low=1)
    num_epochs: int = static(2, "passes over each rollout", low=1)
    num_minibatches: int = static(32, "gradient steps of each pass", low=1)
    layer_norm: bool = static(True, "normalise every hidden layer; what makes learning without a target network stable")
    network: str = static("mlp", "torso of the action values", choices=FEED_FORWARD)
    hidden: tuple[int, ...] = static((128, 128), "sizes of the hidden layers")
    activation: str = static("relu", "of the hidden layers", choices=tuple(ACTIVATIONS))


class TrainState(struct.PyTreeNode):
    """All that changes; ``B`` environments.

    Attributes:
      params: the network's parameters.
      opt_state: RAdam's moments, of the `packed` parameters.
      key: typed PRNG key, advanced at every step.
      updates: int32 ``[]``, calls of ``step`` so far.
      world: ``(environment state, time step, ())``, where the last rollout stopped.
    """

    params: Any
    opt_state: Any
    key: Array
    updates: Array
    world: Any


def make(config: Config, env: Environment) -> Agent:
    """PQN on ``config.num_envs`` copies of ``env``.

    Raises:
      ValueError: one line that names the key: actions that are not Discrete, observations that the network cannot take,
        minibatches that do not divide the batch, no ``anneal_steps``.
    """
    envs = vectorize(env, config.num_envs)
    network = action_values(
        env.observation_space, env.action_space, config.network, config.hidden, config.activation, layer_norm=config.layer_norm
    )
    batch_size = config.num_envs * config.num_steps
    if batch_size % config.num_minibatches:
        raise ValueError(f"algo.num_minibatches ({config.num_minibatches}) must divide num_envs * num_steps ({batch_size})")
    if config.anneal_steps is None:
        raise ValueError("the schedule of epsilon needs algo.anneal_steps, the environment steps of the run")
    anneal_steps = config.anneal_steps
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_radam())

    def apply(params: Any, observation: Array, mask: Array | None) -> Array:
        """Q of every action, the lowest number where it is illegal, ``[..., A]``."""
        lead = observation.shape[: observation.ndim - len(env.observation_space.shape)]
        q = network.apply(params, observation.reshape(-1, *env.observation_space.shape))
        return mask_logits(q.reshape(*lead, -1), mask)

    def policy_step(params: Any, carry: tuple[()], timestep: TimeStep) -> tuple[tuple[()], PolicyOutput]:
        """Epsilon-greedy, ``params = (network, epsilon)``; its value is that of the best action."""
        q = apply(params[0], timestep.observation, timestep.action_mask)
        return (), PolicyOutput(EpsilonGreedy(q, params[1]), q.max(-1))

    policy = Policy(
        init=lambda key, timestep: network.init(key, timestep.observation),
        start=lambda params, timestep: (),
        step=policy_step,
        unroll=lambda params, carry, timesteps: policy_step(params, (), timesteps)[1],
    )

    def init(key: Array, data: None = None) -> TrainState:
        key, env_key, params_key = jax.random.split(key, 3)
        env_state, timestep = envs.reset(env_key)
        params = policy.init(params_key, timestep)
        opt_state = optimizer.init(packed(params)[0])
        return TrainState(params, opt_state, key, jnp.zeros((), jnp.int32), (env_state, timestep, ()))

    def loss(params: Any, timesteps: TimeStep, actions: Array, targets: Array) -> tuple[Array, dict[str, Array]]:
        """``1/2 (Q(s, a) - G)^2``."""
        q = pick(apply(params, timesteps.observation, None), actions)
        losses = optax.l2_loss(q, targets)
        return losses.mean(), {"loss/value": losses.mean(), "q": q.mean()}

    def step(state: TrainState, data: None = None) -> tuple[TrainState, dict[str, Any]]:
        key, rollout_key, shuffle_key = jax.random.split(state.key, 3)
        progress = state.updates * (batch_size / anneal_steps)
        epsilon = schedules.linear(progress, config.epsilon_start, config.epsilon_end, config.exploration_fraction)
        learning_rate = jnp.asarray(config.learning_rate, jnp.float32)
        if config.learning_rate_schedule == "linear":
            learning_rate = schedules.linear(progress, learning_rate, 0.0, 1.0)

        # Rollout.
        behaviour = (state.params, epsilon)
        world, trajectory = rollout(policy, envs, behaviour, state.world, rollout_key, config.num_steps)
        transitions = trajectory.transitions

        # Targets: G[t] = r + gamma ((1 - lambda) max Q(s[t + 1]) + lambda G[t + 1]).
        values = policy.unroll(behaviour, (), trajectory.timesteps).value
        following = next_values(policy, behaviour, trajectory, values)
        targets = returns.lambda_returns(
            transitions.reward, following, transitions.terminated, transitions.truncated, config.discount, config.trace_lambda
        )

        # Update.
        batch = jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:]), (trajectory.starts, trajectory.samples, targets))
        params, unpack = packed(state.params)
        gradient_of = jax.grad(lambda params, *args: loss(unpack(params), *args), has_aux=True)

        def minibatch_step(learner, rows):
            params, opt_state = learner
            gradient, metrics = gradient_of(params, *jax.tree.map(lambda x: x[rows], batch))
            direction, opt_state = optimizer.update(gradient, opt_state)
            metrics["grad_norm"] = optax.tree.norm(gradient)
            return (optax.tree.add_scale(params, -learning_rate, direction), opt_state), metrics

        order = shuffled_minibatches(shuffle_key, batch_size, config.num_epochs, config.num_minibatches)
        (params, opt_state), per_minibatch = jax.lax.scan(minibatch_step, (params, state.opt_state), order)
        metrics: dict[str, Any] = jax.tree.map(jnp.mean, per_minibatch)
        metrics.update(epsilon=epsilon, learning_rate=learning_rate, **episode_metrics(transitions))
        return TrainState(unpack(params), opt_state, key, state.updates + 1, world), metrics

    def start(state: TrainState, timestep: TimeStep) -> tuple[()]:
        return ()

    def act(state: TrainState, carry: Any, timestep: TimeStep, key: Array, greedy: bool) -> tuple[tuple[()], Array]:
        epsilon = jnp.asarray(0.0 if greedy else config.epsilon_end)
        return (), policy_step((state.params, epsilon), (), timestep)[1].distribution.sample(key)

    return Agent(init, step, start, act, env_steps=batch_size)
