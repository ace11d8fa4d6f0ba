"""Wrappers: an environment around an environment."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.envs.base import Environment, TimeStep
from rljax.envs.spaces import Box, Space


class TimeLimit:
    """Truncates an episode after ``max_steps`` steps; a termination at the very last step stays a termination."""

    def __init__(self, env: Environment, max_steps: Any):
        self.env = env
        self.max_steps = max_steps
        self.reset_pool = getattr(env, "reset_pool", 0)

    @property
    def observation_space(self) -> Space:
        return self.env.observation_space

    @property
    def action_space(self) -> Space:
        return self.env.action_space

    def reset(self, key: Array) -> tuple[Any, TimeStep]:
        state, timestep = self.env.reset(key)
        return (state, jnp.zeros((), jnp.int32)), timestep

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        inner, elapsed = state
        inner, timestep = self.env.step(key, inner, action)
        elapsed = elapsed + 1
        cut = (elapsed >= self.max_steps) & ~timestep.terminated
        return (inner, elapsed), timestep.replace(truncated=timestep.truncated | cut)


class SelectObservation:
    """Shows only some entries of a flat observation, so that the rest must be remembered or inferred."""

    def __init__(self, env: Environment, indices: tuple[int, ...]):
        space = env.observation_space
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise ValueError(f"SelectObservation takes flat Box observations, the environment has {space}")
        self.env = env
        self.reset_pool = getattr(env, "reset_pool", 0)
        self._indices = np.asarray(indices)
        low, high = (jnp.broadcast_to(jnp.asarray(x), space.shape)[self._indices] for x in (space.low, space.high))
        self.observation_space = Box(low, high, (len(indices),), space.dtype)

    @property
    def action_space(self) -> Space:
        return self.env.action_space

    def reset(self, key: Array) -> tuple[Any, TimeStep]:
        state, timestep = self.env.reset(key)
        return state, self._select(timestep)

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        state, timestep = self.env.step(key, state, action)
        return state, self._select(timestep)

    def _select(self, timestep: TimeStep) -> TimeStep:
        return timestep.replace(
            observation=timestep.observation[self._indices], next_observation=timestep.next_observation[self._indices]
        )


class ScaleReward:
    """Multiplies every reward by ``scale``."""

    def __init__(self, env: Environment, scale: Any):
        self.env = env
        self.scale = scale
        self.reset_pool = getattr(env, "reset_pool", 0)

    @property
    def observation_space(self) -> Space:
        return self.env.observation_space

    @property
    def action_space(self) -> Space:
        return self.env.action_space

    def reset(self, key: Array) -> tuple[Any, TimeStep]:
        return self.env.reset(key)

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        state, timestep = self.env.step(key, state, action)
        return state, timestep.replace(reward=timestep.reward * self.scale)
