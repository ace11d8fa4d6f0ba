"""What on-policy agents share: the rollout, the values of cut episodes, episode statistics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.envs import TimeStep, VectorEnvironment
from rljax.networks import Policy


class Trajectory(struct.PyTreeNode):
    """``T`` steps of ``B`` environments.

    Attributes:
      timesteps: ``[T + 1, B]``; step t acts on ``timesteps[t]`` and leads to ``timesteps[t + 1]``, which holds its reward,
        flags and ``next_observation``. Observations are raw: the agent applies its ``view``.
      samples: ``[T, B, ...]``, draws in the coordinates of the policy's distribution.
      carries: ``[T + 1, B, ...]``, the policy's carry before each step; ``()`` if it is feed-forward.
    """

    timesteps: TimeStep
    samples: Array
    carries: Any

    @property
    def transitions(self) -> TimeStep:
        """``[T, B]``: what each step led to."""
        return jax.tree.map(lambda x: x[1:], self.timesteps)

    @property
    def starts(self) -> TimeStep:
        """``[T, B]``: what each step acted on."""
        return jax.tree.map(lambda x: x[:-1], self.timesteps)

    @property
    def first_carry(self) -> Any:
        """``[B, ...]``: the policy's carry before the first step."""
        return jax.tree.map(lambda x: x[0], self.carries)


def rollout(
    policy: Policy,
    envs: VectorEnvironment,
    params: Any,
    world: tuple[Any, TimeStep, Any],
    key: Array,
    num_steps: int,
    view: Callable[[TimeStep], TimeStep] = lambda timestep: timestep,
) -> tuple[tuple[Any, TimeStep, Any], Trajectory]:
    """Samples ``num_steps`` steps of every environment with a fixed policy.

    Args:
      world: ``(environment state, time step, carry)``, where the last rollout stopped.
      view: what the policy sees of a time step (normalised observations).

    Returns:
      ``(world, Trajectory)``.
    """

    def policy_step(timestep, carry):
        carry, output = policy.step(params, carry, view(timestep))
        return carry, output.distribution

    def step(world, draws):
        env_state, timestep, carry = world
        noise, draw = draws
        next_carry, distribution = policy_step(timestep, carry)
        sample = distribution.from_noise(noise)
        env_state, next_timestep = envs.step_drawn(draw, env_state, distribution.to_action(sample))
        return (env_state, next_timestep, next_carry), (sample, next_timestep, next_carry)

    # Random numbers are drawn for all steps at once: inside the loop they would cost more than the policy.
    noise_key, env_key = jax.random.split(key)
    _, shapes = jax.eval_shape(policy_step, world[1], world[2])
    noise = jax.vmap(shapes.noise)(jax.random.split(noise_key, num_steps))
    env_state, first, carry = world
    start = (env_state, envs.without_statistics(first), carry)
    draws = (noise, envs.draw(env_key, num_steps))
    (env_state, _, last_carry), (samples, timesteps, carries) = jax.lax.scan(step, start, draws)
    env_state, timesteps = envs.count_episodes(env_state, timesteps)
    world = (env_state, jax.tree.map(lambda x: x[-1], timesteps), last_carry)
    timesteps, carries = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), (first, carry), (timesteps, carries))
    return world, Trajectory(timesteps, samples, carries)


def acting(
    policy: Policy, view: Callable[[Any, TimeStep], TimeStep] = lambda state, timestep: timestep
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``(start, act)`` of an agent that acts with ``policy`` and ``state.params``; ``view(state, timestep)`` is what it sees."""

    def start(state: Any, timestep: TimeStep) -> Any:
        return policy.start(state.params, timestep)

    def act(state: Any, carry: Any, timestep: TimeStep, key: Array, greedy: bool) -> tuple[Any, Array]:
        carry = start(state, timestep) if carry is None else carry
        carry, output = policy.step(state.params, carry, view(state, timestep))
        distribution = output.distribution
        return carry, distribution.to_action(distribution.mode() if greedy else distribution.sample(key))

    return start, act


def first_episodes(policy: Policy, envs: VectorEnvironment, params: Any, key: Array, num_steps: int) -> tuple[Trajectory, Array]:
    """One episode of each environment, from a fresh reset, cut after ``num_steps`` steps.

    Every environment plays exactly one, so that short episodes count no more than long ones; what follows an episode that ended
    early is masked.

    Returns:
      ``(Trajectory, mask)``, the mask bool ``[T, B]``, True up to and with each episode's last step.
    """
    reset_key, rollout_key = jax.random.split(key)
    env_state, timestep = envs.reset(reset_key)
    world = (env_state, timestep, policy.start(params, timestep))
    _, trajectory = rollout(policy, envs, params, world, rollout_key, num_steps)
    ended = jnp.cumsum(trajectory.transitions.done, axis=0)
    return trajectory, jnp.concatenate([jnp.ones_like(ended[:1], bool), ended[:-1] == 0])


def next_values(policy: Policy, params: Any, trajectory: Trajectory, values: Array) -> Array:
    """V of the state that each step led to, before any reset: ``[T, B]``, from ``values`` ``[T + 1, B]`` of ``timesteps``.

    Inside an episode that is ``values[t + 1]``. Where the episode was truncated, ``timesteps[t + 1]`` belongs to the next one,
    so ``next_observation`` is evaluated: one batch of ``B`` for the first cut of every environment, one for the second, and so
    on, which is none at all for most rollouts. Where it terminated, the entry has no meaning (its bootstrap is zero).
    """
    transitions = trajectory.transitions
    columns = jnp.arange(values.shape[1])

    def evaluate(loop):
        result, pending = loop
        row = jnp.argmax(pending, axis=0)
        cut, carry = jax.tree.map(lambda x: x[row, columns], (transitions, trajectory_carries))
        no = jnp.zeros_like(cut.terminated)
        cut = cut.replace(observation=cut.next_observation, action_mask=cut.next_action_mask, terminated=no, truncated=no)
        value = policy.step(params, carry, cut)[1].value
        value = jnp.where(pending[row, columns], value, result[row, columns])
        return result.at[row, columns].set(value), pending.at[row, columns].set(False)

    trajectory_carries = jax.tree.map(lambda x: x[1:], trajectory.carries)
    pending = transitions.truncated & ~transitions.terminated
    return jax.lax.while_loop(lambda loop: jnp.any(loop[1]), evaluate, (values[1:], pending))[0]


def shuffled_minibatches(key: Array, size: int, num_epochs: int, num_minibatches: int) -> Array:
    """A fresh random split of ``0 .. size - 1`` into minibatches for every epoch.

    Returns int32 ``[num_epochs * num_minibatches, size / num_minibatches]``.

    Each index sits in the low bits of one random word, and the words are sorted: twice as fast as sorting words and indices.
    Equal random parts come out in index order, which changes nothing inside a minibatch.
    """
    low_bits = jnp.uint32((1 << (size - 1).bit_length()) - 1)
    words = jax.random.bits(key, (num_epochs, size), jnp.uint32)
    order = jnp.sort((words & ~low_bits) | jnp.arange(size, dtype=jnp.uint32)) & low_bits
    return order.astype(jnp.int32).reshape(num_epochs * num_minibatches, -1)


def episode_metrics(transitions: TimeStep, mask: Array | None = None) -> dict[str, Any]:
    """``(sum, count)`` pairs over the episodes that ended in ``transitions`` ``[T, B]``, each counted once.

    Where ``mask`` ``[T, B]`` is given, steps outside it do not count.
    """
    done = transitions.done if mask is None else transitions.done & mask
    count = done.sum()

    def over_ended(x):
        return jnp.where(done, x.astype(jnp.float32), 0.0).sum(), count

    returns = transitions.info["episode_return"]
    return {
        "episode/return": over_ended(returns),
        "episode/return_square": over_ended(jnp.square(returns)),
        "episode/length": over_ended(transitions.info["episode_length"]),
        "episode/truncated": over_ended(transitions.truncated & ~transitions.terminated),
    }
