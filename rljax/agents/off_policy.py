"""What agents with a replay buffer share: the loop of acting, storing and learning, and target networks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.on_policy import episode_metrics
from rljax.envs import TimeStep, VectorEnvironment
from rljax.ops import replay


class Loop(struct.PyTreeNode):
    """What the loop carries.

    Attributes:
      learner: whatever the agent learns with: parameters, targets, optimiser.
      world: ``(environment state, time step [N])``.
      buffer: the replay.
    """

    learner: Any
    world: tuple[Any, TimeStep]
    buffer: replay.Replay


def act_and_learn(
    envs: VectorEnvironment,
    loop: Loop,
    key: Array,
    num_steps: int,
    n_step: int,
    noise: Callable[[Array], Any],
    behave: Callable[[Any, TimeStep, Any], Array],
    learn: Callable[[Any, replay.Replay, Any], tuple[Any, replay.Replay, dict[str, Array]]],
) -> tuple[Loop, dict[str, Any]]:
    """``num_steps`` times: one step of all environments, stored, and then some learning.

    Args:
      noise: ``key -> noise``, all random numbers of ``behave`` and ``learn`` for one step. They are drawn for all steps at
        once: inside the loop each draw would cost as much as a layer of the network.
      behave: ``(learner, time step [N], noise) -> action [N, ...]``.
      learn: ``(learner, buffer, noise) -> (learner, buffer, metrics)``; the metrics are averaged over the steps.

    Returns:
      ``(Loop, metrics)``.
    """

    def step(loop, draws):
        env_draw, step_noise = draws
        env_state, timestep = loop.world
        action = behave(loop.learner, timestep, step_noise)
        env_state, after = envs.step_drawn(env_draw, env_state, action)
        buffer = replay.add(loop.buffer, transition(timestep, action, after), n_step)
        learner, buffer, metrics = learn(loop.learner, buffer, step_noise)
        return Loop(learner, (env_state, after), buffer), (metrics, after)

    env_key, noise_key = jax.random.split(key)
    env_state, first = loop.world
    loop = loop.replace(world=(env_state, envs.without_statistics(first)))
    draws = (envs.draw(env_key, num_steps), jax.vmap(noise)(jax.random.split(noise_key, num_steps)))
    loop, (metrics, timesteps) = jax.lax.scan(step, loop, draws)
    env_state, timesteps = envs.count_episodes(loop.world[0], timesteps)
    loop = loop.replace(world=(env_state, jax.tree.map(lambda x: x[-1], timesteps)))
    return loop, {**jax.tree.map(jnp.mean, metrics), **episode_metrics(timesteps)}


def fill_steps(buffer_size: int, learning_starts: int, num_envs: int, n_step: int = 1) -> int:
    """Steps of all environments that hold ``learning_starts`` environment steps, and at least one window.

    Raises:
      ValueError: the buffer cannot hold them; names the key.
    """
    steps = max(-(-learning_starts // num_envs), n_step)
    if buffer_size < steps * num_envs:
        why = "algo.n_step" if n_step == steps else "algo.learning_starts"
        raise ValueError(
            f"algo.buffer_size ({buffer_size}) must be at least {steps * num_envs}, "
            f"{steps} steps of all {num_envs} environments for {why}"
        )
    return steps


def fill(envs: VectorEnvironment, key: Array, capacity: int, num_steps: int, n_step: int = 1, prioritized: bool = False) -> Loop:
    """``num_steps`` steps of all environments under uniformly random legal actions; the learner is empty.

    An agent's ``init`` calls this, since learning that starts with an empty buffer would need a condition in every step.
    """
    reset_key, run_key = jax.random.split(key)
    world = envs.reset(reset_key)
    mask = world[1].action_mask

    def noise(key: Array) -> Array:
        if mask is not None:
            return jax.random.uniform(key, mask.shape)
        return jax.vmap(envs.action_space.sample)(jax.random.split(key, envs.num_envs))

    def behave(learner: Any, timestep: TimeStep, noise: Array) -> Array:
        mask = timestep.action_mask
        return noise if mask is None else jnp.argmax(jnp.where(mask, noise, -1.0), -1).astype(jnp.int32)

    def one_step(world, key):
        action = behave((), world[1], noise(key))
        return transition(world[1], action, envs.step(key, world[0], action)[1])

    example = jax.eval_shape(one_step, world, run_key)
    loop = Loop((), world, replay.init(example, capacity, prioritized))
    loop, _ = act_and_learn(
        envs, loop, run_key, num_steps, n_step, noise, behave, lambda learner, buffer, noise: (learner, buffer, {})
    )
    return loop


def update_target(target: Any, params: Any, gradient_steps: Array, tau: Array | float, every: int) -> Any:
    """``tau * params + (1 - tau) * target`` at every ``every``-th gradient step, else ``target``."""
    moved = optax.incremental_update(params, target, tau)
    if every == 1:
        return moved
    due = gradient_steps % every == 0
    return jax.tree.map(lambda new, old: jnp.where(due, new, old), moved, target)


def transition(timestep: TimeStep, action: Array, after: TimeStep) -> replay.Transition:
    """What a step from ``timestep`` with ``action`` led to."""
    return replay.Transition(
        observation=timestep.observation,
        action_mask=timestep.action_mask,
        action=action,
        reward=after.reward,
        terminated=after.terminated,
        truncated=after.truncated,
        next_observation=after.next_observation,
        next_action_mask=after.next_action_mask,
    )
