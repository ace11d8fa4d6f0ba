"""Wrappers: an environment around an environment."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from rljax.envs.base import Environment, TimeStep
from rljax.envs.spaces import Space


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
