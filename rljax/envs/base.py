"""The contract between an agent and its world: a Markov decision process as two pure functions."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.envs.spaces import Discrete, MultiDiscrete, Space


class TimeStep(struct.PyTreeNode):
    """What an agent sees after a reset or a step.

    The flags, the reward and ``next_observation`` describe the transition that led here. In a vectorised environment an
    ended episode is replaced by a new one at once: ``observation`` is then the first of the new episode, and
    ``next_observation`` still the last of the old.

    Attributes:
      observation: the one to act on; an array of the observation space.
      action_mask: bool ``[A]``, True where the action is legal; None where every action always is.
      reward: float32 ``[]``.
      terminated: bool ``[]``, the transition led to a terminal state, whose value is zero.
      truncated: bool ``[]``, the episode was cut there by a limit that is no part of the MDP; its state still has a value.
      next_observation: the observation that the transition led to, before any reset.
      info: dict of arrays, with the same keys and shapes after every step and reset.
      next_action_mask: the mask that goes with ``next_observation``; a vectorised environment fills it in.
    """

    observation: Any
    action_mask: Array | None
    reward: Array
    terminated: Array
    truncated: Array
    next_observation: Any
    info: dict[str, Array]
    next_action_mask: Array | None = None

    @property
    def done(self) -> Array:
        """bool: the transition was the last one of its episode, in either way."""
        return self.terminated | self.truncated


def restart(observation: Any, action_mask: Array | None = None, info: dict[str, Array] | None = None) -> TimeStep:
    """The first time step of an episode: no reward, no flag."""
    no = jnp.zeros((), bool)
    return TimeStep(observation, action_mask, jnp.zeros((), jnp.float32), no, no, observation, info or {})


def transition(
    observation: Any,
    reward: Any,
    terminated: Any = False,
    truncated: Any = False,
    action_mask: Array | None = None,
    info: dict[str, Array] | None = None,
) -> TimeStep:
    """The time step that a transition led to; fixes the dtypes of reward and flags."""
    return TimeStep(
        observation,
        action_mask,
        jnp.asarray(reward, jnp.float32).reshape(()),
        jnp.asarray(terminated, bool).reshape(()),
        jnp.asarray(truncated, bool).reshape(()),
        observation,
        info or {},
    )


class Environment(Protocol):
    """One Markov decision process; both functions are pure and can be traced.

    ``reset`` and ``step`` return the same pytree structure with the same shapes and dtypes (`check` says where not).
    A time limit sets ``truncated``, never ``terminated``. Neither function resets by itself: `vectorize` does.
    """

    @property
    def observation_space(self) -> Space: ...

    @property
    def action_space(self) -> Space: ...

    def reset(self, key: Array) -> tuple[Any, TimeStep]: ...

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]: ...


def strong(tree: Any) -> Any:
    """Python scalars and weakly typed arrays as plain arrays, so that a scan's carry keeps its type."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.asarray(x).dtype), tree)


def like(template: Any, tree: Any) -> Any:
    """``tree`` with each leaf's dtype and shape as in ``template`` (a tree of ShapeDtypeStruct)."""
    return jax.tree.map(lambda t, x: jnp.asarray(x, t.dtype).reshape(t.shape), template, tree)


def check(env: Environment, name: str = "environment") -> None:
    """Traces ``reset`` and ``step`` without running them and compares what they return.

    Raises:
      TypeError: one line that names the first leaf whose structure, shape or dtype differs, or breaks the contract.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    action = jax.ShapeDtypeStruct(env.action_space.shape, env.action_space.dtype)
    after_reset = jax.eval_shape(env.reset, key)
    after_step = jax.eval_shape(env.step, key, after_reset[0], action)
    if not isinstance(after_reset[1], TimeStep) or not isinstance(after_step[1], TimeStep):
        raise TypeError(f"{name}: reset and step must return (state, TimeStep); see rljax.envs.restart and transition")
    leaves = [jax.tree_util.tree_leaves_with_path(tree) for tree in (after_reset, after_step)]
    paths = [[jax.tree_util.keystr(path) for path, _ in side] for side in leaves]
    if paths[0] != paths[1]:
        odd = sorted(set(paths[0]) ^ set(paths[1])) or paths[0]
        raise TypeError(f"{name}: reset and step return different structures, first at (state, timestep){odd[0]}")
    for (path, a), (_, b) in zip(*leaves, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            where = "(state, timestep)" + jax.tree_util.keystr(path)
            raise TypeError(f"{name}: {where} is {a.dtype}{list(a.shape)} after reset, {b.dtype}{list(b.shape)} after step")
    timestep = after_step[1]
    for field, dtype in (("reward", jnp.float32), ("terminated", jnp.bool_), ("truncated", jnp.bool_)):
        leaf = getattr(timestep, field)
        if leaf.shape != () or leaf.dtype != dtype:
            raise TypeError(f"{name}: {field} must be {jnp.dtype(dtype)}[], is {leaf.dtype}{list(leaf.shape)}")
    if timestep.action_mask is not None:
        space = env.action_space
        size = space.n if isinstance(space, Discrete) else sum(space.nvec) if isinstance(space, MultiDiscrete) else None
        if size is None or timestep.action_mask.shape != (size,) or timestep.action_mask.dtype != jnp.bool_:
            raise TypeError(f"{name}: action_mask must be bool[{size}], with discrete actions only")


@jax.custom_batching.custom_vmap
def all_ended(ended: Array) -> Array:
    """bool ``[]``, all of ``ended``, over every lane that is mapped too: a ``while_loop`` whose condition it is stops for all at
    once.

    A condition of each lane's own would have ``vmap`` select between the old and the new of everything that the loop carries.
    """
    return jnp.all(ended)


@all_ended.def_vmap
def _all_ended_lanes(axis_size: int, in_batched: Any, ended: Array) -> tuple[Array, bool]:
    del axis_size, in_batched
    return all_ended(ended), False
