"""What on-policy agents share: the rollout, the values of cut episodes, episode statistics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.agents.base import whole
from rljax.envs import TimeStep, Tokens, VectorEnvironment, all_ended, host
from rljax.networks import Policy
from rljax.ops import kl
from rljax.sharding import spread


class Steps(struct.PyTreeNode):
    """``T`` steps of ``B`` environments.

    Attributes:
      timesteps: ``[T + 1, B]``; step t acts on ``timesteps[t]`` and leads to ``timesteps[t + 1]``, which holds its reward,
        flags and ``next_observation``. Observations are raw: the agent applies its ``view``.
      samples: ``[T, B, ...]``, draws in the coordinates of the policy's distribution.
    """

    timesteps: TimeStep
    samples: Array

    @property
    def first(self) -> TimeStep:
        """``[B]``: what the first steps acted on."""
        return jax.tree.map(lambda x: x[0], self.timesteps)

    @property
    def starts(self) -> TimeStep:
        """``[T, B]``: what each step acted on."""
        return jax.tree.map(lambda x: x[:-1], self.timesteps)

    @property
    def transitions(self) -> TimeStep:
        """``[T, B]``: what each step led to."""
        return jax.tree.map(lambda x: x[1:], self.timesteps)


class Trajectory(Steps):
    """Steps that go on over the ends of episodes, by auto-reset.

    Attributes:
      carries: ``[T + 1, B, ...]``, the policy's carry before each step; ``()`` if it is feed-forward.
      log_prob: float32 ``[T, B]``, of each sample as it was drawn.
    """

    carries: Any
    log_prob: Array

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
        return (env_state, next_timestep, next_carry), (sample, distribution.log_prob(sample), next_timestep, next_carry)

    # Random numbers are drawn for all steps at once: inside the loop they would cost more than the policy.
    noise_key, env_key = jax.random.split(key)
    _, shapes = jax.eval_shape(policy_step, world[1], world[2])
    noise = jax.vmap(shapes.noise)(jax.random.split(noise_key, num_steps))
    env_state, first, carry = world
    start = (env_state, envs.without_statistics(first), carry)
    draws = (noise, envs.draw(env_key, num_steps))
    (env_state, _, last_carry), (samples, log_prob, timesteps, carries) = jax.lax.scan(step, start, draws)
    env_state, timesteps = envs.count_episodes(env_state, timesteps)
    world = (env_state, jax.tree.map(lambda x: x[-1], timesteps), last_carry)
    timesteps, carries = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), (first, carry), (timesteps, carries))
    return world, Trajectory(timesteps, samples, carries, log_prob)


def acting(
    policy: Policy, view: Callable[[Any, TimeStep], TimeStep] = lambda state, timestep: timestep
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``(start, act)`` of an agent that acts with ``policy`` and ``state.params``; ``view(state, timestep)`` is what it sees."""

    def start(state: Any, timestep: TimeStep, data: Any = None) -> Any:
        return policy.start(whole(state.params, data), timestep)

    def act(state: Any, carry: Any, timestep: TimeStep, key: Array, greedy: bool, data: Any = None) -> tuple[Any, Array]:
        carry = start(state, timestep, data) if carry is None else carry
        carry, output = policy.step(whole(state.params, data), carry, view(state, timestep))
        distribution = output.distribution
        return carry, distribution.to_action(distribution.mode() if greedy else distribution.sample(key))

    return start, act


class Episodes(Steps):
    """One episode of each environment, from a reset on; what follows an episode's end is masked.

    Attributes:
      mask: bool ``[T, B]``, True up to and with each episode's last step.
    """

    mask: Array

    @property
    def choices(self) -> Array:
        """bool ``[T, B]``, the steps that were the policy's: one with one legal action says nothing about it."""
        legal = self.starts.action_mask
        return self.mask if legal is None else self.mask & (legal.sum(-1) > 1)

    @property
    def last(self) -> Array:
        """bool ``[T, B]``, True at the last step of each episode that ended within T steps."""
        return self.transitions.done & self.mask

    @property
    def returns(self) -> Array:
        """float32 ``[B]``, undiscounted."""
        return jnp.where(self.mask, self.transitions.reward, 0.0).sum(0)

    def metrics(self) -> dict[str, Any]:
        """``(sum, count)`` pairs over the episodes that ended, each counted once, and the share that did not.

        An episode whose reward could not be had (``info["valid"]``) counts as little as one that did not end.
        """
        ended, transitions = self.last.any(0), self.transitions
        counts = ended & ~(self.last & ~transitions.info["valid"]).any(0) if "valid" in transitions.info else ended

        def over_ended(x: Array) -> tuple[Array, Array]:
            return jnp.where(counts, x.astype(jnp.float32), 0.0).sum(), counts.sum()

        def at_last(x: Array) -> Array:
            return jnp.where(self.last, x.astype(jnp.float32), 0.0).sum(0)

        components = {name: at_last(x) for name, x in transitions.info.items() if name.startswith("reward/")}
        return {
            "episode/return": over_ended(self.returns),
            "episode/return_square": over_ended(jnp.square(self.returns)),
            "episode/length": over_ended(self.mask.sum(0)),
            "episode/truncated": over_ended(at_last(transitions.truncated & ~transitions.terminated)),
            **{name: over_ended(x) for name, x in components.items()},
            "unfinished": 1.0 - ended.mean(),
        }


def first_episodes(
    policy: Policy, envs: VectorEnvironment, params: Any, key: Array, num_steps: int, greedy: bool = False
) -> Episodes:
    """One episode of each environment, from a fresh reset, cut after ``num_steps`` steps.

    Every environment plays exactly one, so that short episodes count no more than long ones. Playing stops when all have ended;
    the steps that are left repeat the last time step.
    """
    reset_key, noise_key, env_key = jax.random.split(key, 3)
    state, first = envs.reset(reset_key)
    first = envs.without_statistics(first)
    carry = policy.start(params, first)

    # Random numbers are drawn for all steps at once: inside the loop they would cost more than the policy.
    shapes = jax.eval_shape(lambda: policy.step(params, carry, first)[1].distribution)
    noise = jax.vmap(shapes.noise)(jax.random.split(noise_key, num_steps))
    env_keys = jax.random.split(env_key, (num_steps, envs.num_envs))
    sample = jax.eval_shape(lambda d: d.from_noise(jax.tree.map(lambda x: x[0], noise)), shapes)

    def running(loop):
        step, _, _, _, alive, _ = loop
        return (step < num_steps) & ~all_ended(~alive)

    def play(loop):
        step, env_state, timestep, carry, alive, episodes = loop
        carry, output = policy.step(params, carry, timestep)
        distribution = output.distribution
        sample = distribution.mode() if greedy else distribution.from_noise(jax.tree.map(lambda x: x[step], noise))
        env_state, timestep = jax.vmap(envs.env.step)(spread(env_keys[step]), env_state, distribution.to_action(sample))
        timestep = timestep.replace(next_action_mask=timestep.action_mask)
        episodes = Episodes(
            jax.tree.map(lambda xs, x: xs.at[step + 1].set(x), episodes.timesteps, timestep),
            episodes.samples.at[step].set(sample),
            episodes.mask.at[step].set(alive),
        )
        return step + 1, env_state, timestep, carry, alive & ~timestep.done, episodes

    alive = jnp.ones(envs.num_envs, bool)
    episodes = Episodes(
        jax.tree.map(lambda x: jnp.zeros((num_steps + 1, *x.shape), x.dtype).at[0].set(x), first),
        jnp.zeros((num_steps, *sample.shape), sample.dtype),
        jnp.zeros((num_steps, envs.num_envs), bool),
    )
    loop = (jnp.zeros((), jnp.int32), state.env, first, carry, alive, episodes)
    step, env_state, last, _, _, episodes = jax.lax.while_loop(running, play, loop)
    host.release(envs.env, env_state)

    def fill(xs, x):
        is_left = jnp.arange(num_steps + 1) > step
        return jnp.where(is_left.reshape(-1, *(1,) * x.ndim), x, xs)

    timesteps = jax.tree.map(fill, episodes.timesteps, last)
    # An environment whose episode has ended may give anything, and NaN times a masked gradient of 0 would be NaN.
    is_played = jnp.concatenate([episodes.mask, jnp.ones((1, envs.num_envs), bool)])

    def of_episode(xs, x):
        keep = is_played.reshape(is_played.shape + (1,) * (xs.ndim - 2))
        return jnp.where(keep, xs, x) if jnp.issubdtype(xs.dtype, jnp.floating) else xs

    reward = jnp.concatenate([timesteps.reward[:1], jnp.where(episodes.mask, timesteps.reward[1:], 0.0)])
    observation = jax.tree.map(of_episode, timesteps.observation, first.observation)
    episodes = episodes.replace(timesteps=timesteps.replace(reward=reward, observation=observation))
    outcome = getattr(envs.env, "outcome", None)
    if outcome is None:
        return episodes
    # What is only known when an episode has ended, such as a grader's word: the reward of its last step, or of all.
    rewards, info = outcome(env_state, episodes.mask.sum(0))
    timesteps = episodes.timesteps
    none = jnp.zeros((1, envs.num_envs), bool)
    is_last = jnp.concatenate([none, episodes.last])
    info = {**timesteps.info, **{name: jnp.where(is_last, x, timesteps.info[name]) for name, x in info.items()}}
    if rewards.ndim == 2:
        is_paid = jnp.concatenate([none, episodes.mask])
        rewards = jnp.concatenate([rewards[:1], rewards[:num_steps]])  # step t is paid in time step t + 1
        return episodes.replace(timesteps=timesteps.replace(reward=jnp.where(is_paid, rewards, timesteps.reward), info=info))
    return episodes.replace(timesteps=timesteps.replace(reward=jnp.where(is_last, rewards, timesteps.reward), info=info))


def contexts(episodes: Episodes, space: Tokens) -> Array:
    """Prompt and completion of each episode of tokens, int32 ``[B, S]``, -1 where there is nothing and after the end."""
    place = jnp.arange(space.length) - space.prompt
    # What every episode had said when it ended is still there at the end of the last one.
    return jnp.where(place < episodes.mask.sum(0)[:, None], episodes.timesteps.observation[-1], -1)


def leash_metrics(log_prob: Array, ref_log_prob: Array, mean: Callable[..., Array]) -> dict[str, Array]:
    """All three estimates of the KL to the reference, per step, and the KL of an episode.

    Args:
      log_prob, ref_log_prob: ``[T, B]``, 0 where a step does not count.
      mean: ``(values [T, B], how="token") -> []``, over the steps that count, `rljax.ops.losses.masked_mean` of them.
    """
    log_prob = jax.lax.stop_gradient(log_prob)
    metrics = {f"kl_reference/{k}": mean(kl.kl_estimate(log_prob, ref_log_prob, k)) for k in ("k1", "k2", "k3")}
    return {**metrics, "kl_reference/episode": mean(log_prob - ref_log_prob, "sequence-sum")}


def check_leash(config: Any, episodes: int) -> None:
    """Raises ValueError, naming the key, where ``kl_target`` cannot steer ``kl_coef`` in updates of so many episodes."""

    def is_number(value: Any) -> bool:  # a traced one cannot be judged
        return isinstance(value, int | float)

    if config.kl_target is None:
        return
    if config.kl_coef is None or (is_number(config.kl_coef) and config.kl_coef == 0):
        raise ValueError("algo.kl_target steers algo.kl_coef: set that too, above 0, to where it starts")
    if is_number(config.kl_horizon) and 5 * config.kl_horizon <= episodes:
        raise ValueError(
            f"algo.kl_horizon must be above a fifth of the {episodes} episodes of an update, got {config.kl_horizon}"
        )


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
    # Drawn in two halves, as `VectorEnvironment` draws starts, and for its reason.
    shapes = [(num_epochs // 2, size), (num_epochs - num_epochs // 2, size)]
    words = jnp.concatenate([jax.random.bits(*drawn, jnp.uint32) for drawn in zip(jax.random.split(key), shapes, strict=True)])
    order = jnp.sort((words & ~low_bits) | jnp.arange(size, dtype=jnp.uint32)) & low_bits
    return spread(order.astype(jnp.int32).reshape(num_epochs * num_minibatches, -1), axis=1)


def episode_metrics(transitions: TimeStep) -> dict[str, Any]:
    """``(sum, count)`` pairs over the episodes that ended in ``transitions`` ``[T, B]``, each counted once."""
    done = transitions.done
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
