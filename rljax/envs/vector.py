"""Many copies of one environment side by side, with auto-reset, groups and episode statistics."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.envs import host
from rljax.envs.base import Environment, TimeStep
from rljax.envs.spaces import Space
from rljax.ops.normalization import return_trace
from rljax.sharding import spread


class VectorState(struct.PyTreeNode):
    """State of `VectorEnvironment`; every leaf but ``pool`` starts with the axis ``[N]``.

    Attributes:
      env: the copies' own states.
      episode_return: float32, undiscounted sum of the rewards since the last reset.
      episode_length: int32, steps since the last reset.
      pool: ``(env state, TimeStep)`` ``[K, ...]`` to reset from, of an environment on the host keys to reset with, or None.
    """

    env: Any
    episode_return: Array
    episode_length: Array
    pool: Any


class Draw(struct.PyTreeNode):
    """All the randomness of one step, drawn beforehand; ``[N]``, or ``[T, N]`` for many steps.

    Attributes:
      keys: the copies' step keys.
      start: where a copy begins anew if its episode ends at this step: ``(env state, TimeStep)``, the key of a reset on the host,
        or an index into the pool.
    """

    keys: Array
    start: Any


def _where(condition: Array, a: Any, b: Any) -> Any:
    """``a`` where ``condition`` ``[N]``, else ``b``, leaf by leaf ``[N, ...]``; typed keys included."""
    return jax.tree.map(lambda x, y: jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - 1)), x, y), a, b)


class VectorEnvironment:
    """``num_envs`` copies of ``env``; made by `vectorize` and `group`.

    A copy whose episode ended is reset within the same step: the returned ``observation`` and ``action_mask`` are the new
    episode's, and the flags, ``reward``, ``next_observation`` and ``next_action_mask`` the old one's.
    ``info["episode_return"]`` and ``info["episode_length"]`` cover the episode up to and with this step; where
    ``timestep.done`` they are final, and each finished episode shows up there exactly once.
    """

    def __init__(self, env: Environment, num_envs: int, group_size: int, reset_pool: int):
        self.env = env
        self.num_envs = num_envs
        self._group_size = group_size
        self._reset_pool = reset_pool
        self._is_on_host = host.is_on_host(env)

    @property
    def observation_space(self) -> Space:
        """Space of one copy."""
        return self.env.observation_space

    @property
    def action_space(self) -> Space:
        """Space of one copy."""
        return self.env.action_space

    def reset(self, key: Array) -> tuple[VectorState, TimeStep]:
        """Starts every copy; ``(state, timestep [N])``."""
        pool_key, env_key = jax.random.split(key)
        pool = None
        if self._reset_pool:
            pool = self._starts(jax.random.split(pool_key, self._reset_pool))
        start = self._start(pool, jax.tree.map(lambda x: x[0], self._draw_starts(env_key, 1)))
        env_state, timestep = jax.vmap(self.env.reset)(start) if self._is_on_host else start
        state = VectorState(env_state, jnp.zeros(self.num_envs), jnp.zeros(self.num_envs, jnp.int32), pool)
        info = {"episode_return": state.episode_return, "episode_length": state.episode_length}
        timestep = timestep.replace(info={**timestep.info, **info}, next_action_mask=timestep.action_mask)
        return state.replace(env=spread(env_state)), spread(timestep)

    def step(self, key: Array, state: VectorState, action: Array) -> tuple[VectorState, TimeStep]:
        """One step of every copy, ``action [N, ...]``; ``(state, timestep [N])``."""
        state, timestep = self.step_drawn(jax.tree.map(lambda x: x[0], self.draw(key, 1)), state, action)
        state, timesteps = self.count_episodes(state, jax.tree.map(lambda x: x[None], timestep))
        return state, jax.tree.map(lambda x: x[0], timesteps)

    def draw(self, key: Array, num_steps: int) -> Draw:
        """The randomness of ``num_steps`` steps, ``[T, N]``: one large batch of draws is far cheaper than T small ones."""
        keys_key, start_key = jax.random.split(key)
        keys = jax.random.split(keys_key, (num_steps, self.num_envs))
        return spread(Draw(keys, self._draw_starts(start_key, num_steps)), axis=1)

    def step_drawn(self, draw: Draw, state: VectorState, action: Array) -> tuple[VectorState, TimeStep]:
        """`step` with its randomness given, ``draw [N]``, and without the episode statistics: see `count_episodes`."""
        env_state, timestep = jax.vmap(self.env.step)(draw.keys, state.env, action)
        done = timestep.done
        start = self._start(state.pool, draw.start)
        if self._is_on_host:
            start = host.restart_ended(self.env, start, done, env_state, timestep)
        new_state, new = start
        timestep = timestep.replace(
            observation=_where(done, new.observation, timestep.observation),
            action_mask=_where(done, new.action_mask, timestep.action_mask),
            next_action_mask=timestep.action_mask,
        )
        return state.replace(env=_where(done, new_state, env_state)), timestep

    @staticmethod
    def without_statistics(timestep: TimeStep) -> TimeStep:
        """A time step as `step_drawn` returns it."""
        own = ("episode_return", "episode_length")
        return timestep.replace(info={key: value for key, value in timestep.info.items() if key not in own})

    @staticmethod
    def count_episodes(state: VectorState, timesteps: TimeStep) -> tuple[VectorState, TimeStep]:
        """Adds the episode statistics to ``timesteps [T, N]`` of `step_drawn`: one pass after a rollout, not a step in it."""
        done = timesteps.done
        episode_return, returns = return_trace(state.episode_return, timesteps.reward, done, 1.0)
        episode_length, lengths = return_trace(state.episode_length, jnp.ones_like(done, jnp.int32), done, 1)
        info = {**timesteps.info, "episode_return": returns, "episode_length": lengths}
        return state.replace(episode_return=episode_return, episode_length=episode_length), timesteps.replace(info=info)

    def _draw_starts(self, key: Array, num_steps: int) -> Any:
        """One start for every step and copy, ``[T, N]``, the same for all members of a group."""
        shape = (num_steps, self.num_envs // self._group_size)
        if self._reset_pool:
            starts = jax.random.randint(key, shape, 0, self._reset_pool)
        else:
            starts = self._starts(jax.random.split(key, shape))
        return jax.tree.map(lambda x: jnp.repeat(x, self._group_size, axis=1), starts) if self._group_size > 1 else starts

    def _starts(self, keys: Array) -> Any:
        """Of keys ``[...]``; resets on the host wait until they are needed."""
        if self._is_on_host:
            return keys
        reset = jax.vmap(self.env.reset)
        if keys.ndim == 1:
            return reset(keys)
        # In two halves: XLA on CPU hands what is a little larger to other threads, and waking them up takes longer than it does.
        return jax.lax.map(reset, keys, batch_size=max(keys.shape[0] // 2, 1))

    def _start(self, pool: Any, start: Any) -> Any:
        return start if pool is None else jax.tree.map(lambda x: x[start], pool)


def vectorize(env: Environment, num_envs: int, reset_pool: int | None = None) -> VectorEnvironment:
    """``num_envs`` independent copies of ``env`` with auto-reset.

    Args:
      env: one environment.
      num_envs: how many copies.
      reset_pool: draw this many start states once and pick from them at random, which pays where a reset costs as much as
        many steps; 0 draws each start state afresh; None takes the environment's own ``reset_pool``, or 0.

    Raises:
      ValueError: ``num_envs`` below 1, or rewards that are only known when an episode has ended, which a step cannot give;
        whoever plays whole episodes and asks ``env.outcome`` takes `group`.
    """
    if getattr(env, "outcome", None) is not None:
        raise ValueError(
            "algo.name: a grader or a reward model pays whole episodes, which grpo, reinforce, and ppo with a [model] play"
        )
    return group(env, num_envs, 1, reset_pool)


def group(env: Environment, n_groups: int, group_size: int, reset_pool: int | None = None) -> VectorEnvironment:
    """``n_groups * group_size`` copies; the members of a group start from the same state, and so they do after each reset that
    falls on the same step.

    Members are adjacent, so ``x.reshape(n_groups, group_size, ...)`` splits a batch into groups. They share the start, not
    what happens next: each copy steps with a key of its own.

    Raises:
      ValueError: a size below 1, or copies on the host that cannot be started alike.
    """
    for name, size in (("num_envs", n_groups), ("group_size", group_size)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if group_size > 1 and host.is_on_host(env) and not env.copies.seeds_each:  # type: ignore[attr-defined]
        raise ValueError(
            f"algo.group_size: the members of a group start alike, and {env.copies.name} takes one seed for all its copies"  # type: ignore
        )
    if reset_pool is None:
        reset_pool = getattr(env, "reset_pool", 0)
    return VectorEnvironment(env, n_groups * group_size, group_size, int(reset_pool or 0))
