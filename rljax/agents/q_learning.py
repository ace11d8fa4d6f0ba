"""What DQN and C51 share: everything but the network's outputs and the loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, packed
from rljax.agents.off_policy import Loop, act_and_learn, fill, fill_steps, update_target
from rljax.envs import Discrete, Environment, TimeStep, VectorEnvironment
from rljax.networks import EpsilonGreedy, Network, action_values
from rljax.networks.distributions import mask_logits
from rljax.networks.torsos import ACTIVATIONS, INITIALIZATIONS
from rljax.networks.values import FEED_FORWARD
from rljax.ops import replay, schedules
from rljax.options import config, static, traced


@config
class QLearningConfig:
    learning_rate: float = traced(5e-4, "Adam's step size", low=0)
    discount: float = traced(0.99, "discount factor gamma", low=0, high=1)
    epsilon_start: float = traced(1.0, "probability of a random action at first", low=0, high=1)
    epsilon_end: float = traced(0.05, "probability of a random action in the end", low=0, high=1)
    exploration_fraction: float = traced(0.2, "part of anneal_steps over which epsilon falls", low=0, high=1)
    target_tau: float = traced(1.0, "step of the target network towards the online one", low=0, high=1)
    priority_exponent: float = traced(0.6, "alpha of prioritised replay", low=0, high=1)
    importance_exponent: float = traced(0.4, "beta of prioritised replay at first; rises to 1 over anneal_steps", low=0, high=1)
    max_grad_norm: float = traced(10.0, "bound on the gradient's global norm", above=0)
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    anneal_steps: float | None = traced(None, "environment steps that schedules refer to; none: the run's total_steps", above=0)
    learning_rate_schedule: str = static(
        "constant", "of the learning rate, to 0 over anneal_steps", choices=("constant", "linear")
    )
    double: bool = static(True, "the online network chooses the next action, the target network values it")
    duelling: bool = static(False, "network of a state value and advantages")
    n_step: int = static(1, "rewards before the bootstrap", low=1)
    prioritized: bool = static(False, "draw transitions by their last error")
    target_every: int = static(100, "gradient steps between moves of the target network", low=1)
    buffer_size: int = static(50_000, "transitions kept, rounded down to whole steps of all environments", low=1)
    learning_starts: int = static(1_000, "environment steps of random actions before the first gradient step", low=1)
    batch_size: int = static(128, "transitions of a gradient step", low=1)
    num_envs: int = static(10, "environments side by side, N", low=1)
    num_steps: int = static(32, "steps of each environment in one call of step, whose noise is drawn at once", low=1)
    num_updates: int = static(1, "gradient steps after each step of the environments", low=1)
    network: str = static("mlp", "torso of the action values", choices=FEED_FORWARD)
    hidden: tuple[int, ...] = static((120, 84), "sizes of the hidden layers")
    activation: str = static("relu", "of the hidden layers", choices=tuple(ACTIVATIONS))
    initialization: str = static("orthogonal", "of dense layers; uniform: within 1/sqrt(inputs)", choices=INITIALIZATIONS)


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: the online network's parameters.
      target_params: the target network's.
      opt_state: Adam's moments, of the `packed` parameters.
      key: typed PRNG key, advanced at every step.
      updates: int32 ``[]``, calls of ``step`` so far.
      world: ``(environment state, time step [N])``.
      buffer: the replay.
    """

    params: Any
    target_params: Any
    opt_state: Any
    key: Array
    updates: Array
    world: Any
    buffer: replay.Replay


def value_network(config: QLearningConfig, env: Environment, atoms: int | None = None) -> Network:
    """`action_values` of a config: ``observation [M, ...] -> Q [M, A]``, or ``[M, A, atoms]``; raises what that raises."""
    return action_values(
        env.observation_space,
        env.action_space,
        config.network,
        config.hidden,
        config.activation,
        duelling=config.duelling,
        atoms=atoms,
        initialization=config.initialization,
    )


def q_learning(
    config: QLearningConfig,
    envs: VectorEnvironment,
    network: Network,
    q_values: Callable[[Array], Array],
    loss: Callable[[Any, Any, replay.Batch], tuple[Array, Array, Array]],
) -> Agent:
    """The agent around a loss.

    Args:
      network: ``observation [M, ...] -> outputs``.
      q_values: ``outputs -> Q [M, A]``.
      loss: ``(params, target_params, batch [M]) -> (losses, errors, q)``, each ``[M]``; the size of the errors is what
        prioritised replay draws by, and q is of the actions taken.

    Raises:
      ValueError: one line that names the key: a buffer smaller than ``learning_starts``, no ``anneal_steps``.
    """
    if config.anneal_steps is None:
        raise ValueError("the schedule of epsilon needs algo.anneal_steps, the environment steps of the run")
    anneal_steps = config.anneal_steps
    assert isinstance(envs.action_space, Discrete)  # `action_values` has checked
    num_actions = envs.action_space.n
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))
    env_steps = config.num_envs * config.num_steps
    random_steps = fill_steps(config.buffer_size, config.learning_starts, config.num_envs, config.n_step)
    init_steps = random_steps * config.num_envs

    def init(key: Array, data: None = None) -> TrainState:
        key, fill_key, params_key = jax.random.split(key, 3)
        filled = fill(envs, fill_key, config.buffer_size, random_steps, config.n_step, config.prioritized)
        params = network.init(params_key, filled.world[1].observation)
        return TrainState(
            params=params,
            target_params=params,
            opt_state=optimizer.init(packed(params)[0]),
            key=key,
            updates=jnp.zeros((), jnp.int32),
            world=filled.world,
            buffer=filled.buffer,
        )

    def policy(params: Any, timestep: TimeStep, epsilon: Array | float) -> EpsilonGreedy:
        q = q_values(network.apply(params, timestep.observation))
        return EpsilonGreedy(mask_logits(q, timestep.action_mask), jnp.asarray(epsilon))

    def step(state: TrainState, data: None = None) -> tuple[TrainState, dict[str, Any]]:
        key, loop_key = jax.random.split(state.key)
        progress = (init_steps + state.updates * float(env_steps)) / anneal_steps
        epsilon = schedules.linear(progress, config.epsilon_start, config.epsilon_end, config.exploration_fraction)
        importance_exponent = schedules.linear(progress, config.importance_exponent, 1.0, 1.0)
        learning_rate = config.learning_rate
        if config.learning_rate_schedule == "linear":
            learning_rate = schedules.linear(progress, learning_rate, 0.0, 1.0)
        params, unpack = packed(state.params)

        def mean_loss(params, target_params, batch, weights):
            losses, error, q = loss(unpack(params), target_params, batch)
            return (weights * losses).mean(), (error, q)

        gradient_of = jax.grad(mean_loss, has_aux=True)

        def noise(key: Array) -> tuple[Array, Array]:
            explore_key, sample_key = jax.random.split(key)
            shapes = EpsilonGreedy(jnp.zeros((config.num_envs, num_actions)), epsilon)
            return shapes.noise(explore_key), jax.random.uniform(sample_key, (config.num_updates, config.batch_size, 2))

        def behave(learner: Any, timestep: TimeStep, noise: Any) -> Array:
            return policy(unpack(learner[0]), timestep, epsilon).from_noise(noise[0])

        def gradient_step(carry: Any, uniforms: Array) -> Any:
            (params, target_params, opt_state, count), buffer = carry
            batch = replay.sample(buffer, uniforms, config.discount, config.n_step)
            weights = jnp.ones(config.batch_size)
            if config.prioritized:
                weights = replay.importance_weights(batch, buffer, importance_exponent)
            gradient, (error, q) = gradient_of(params, unpack(target_params), batch, weights)
            direction, opt_state = optimizer.update(gradient, opt_state)
            params = optax.tree.add_scale(params, -learning_rate, direction)
            count = count + 1
            target_params = update_target(target_params, params, count, config.target_tau, config.target_every)
            buffer = replay.prioritize(buffer, batch.index, jnp.abs(error) + 1e-6, config.priority_exponent)
            metrics = {"td_error": jnp.abs(error).mean(), "q": q.mean(), "grad_norm": optax.tree.norm(gradient)}
            return ((params, target_params, opt_state, count), buffer), metrics

        def learn(learner: Any, buffer: replay.Replay, noise: Any) -> Any:
            (learner, buffer), metrics = jax.lax.scan(gradient_step, (learner, buffer), noise[1])
            return learner, buffer, jax.tree.map(jnp.mean, metrics)

        count = state.updates * (config.num_steps * config.num_updates)
        learner = (params, packed(state.target_params)[0], state.opt_state, count)
        loop = Loop(learner, state.world, state.buffer)
        loop, metrics = act_and_learn(envs, loop, loop_key, config.num_steps, config.n_step, noise, behave, learn)
        params, target_params, opt_state, _ = loop.learner
        metrics["epsilon"] = epsilon
        state = TrainState(unpack(params), unpack(target_params), opt_state, key, state.updates + 1, loop.world, loop.buffer)
        return state, metrics

    def start(state: TrainState, timestep: TimeStep) -> tuple[()]:
        return ()

    def act(state: TrainState, carry: Any, timestep: TimeStep, key: Array, greedy: bool) -> tuple[tuple[()], Array]:
        distribution = policy(state.params, timestep, 0.0 if greedy else config.epsilon_end)
        return (), distribution.sample(key)

    return Agent(init, step, start, act, env_steps, init_steps)
