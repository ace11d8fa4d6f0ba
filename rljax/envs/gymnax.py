"""Adapter for gymnax 1.x: classic control, MinAtar, bsuite and its small tasks.

Left out, with the reason: ``MNISTBandit-bsuite`` downloads its data when it is made.
"""

import dataclasses
import inspect
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
from gymnax.environments import spaces as gymnax_spaces
from jax import Array

from rljax.envs.base import TimeStep, like, restart, strong, transition
from rljax.envs.spaces import Box, Discrete, Space

EXCLUDED = {"MNISTBandit-bsuite": "downloads its data"}


def names() -> list[str]:
    """The environments that this adapter makes."""
    return [name for name in gymnax.registered_envs if name not in EXCLUDED]


def parameters(name: str) -> dict[str, Any]:
    """Keyword arguments of `make` and their defaults: the environment's own parameters, then its constructor's."""
    env, params = gymnax.make(name)
    constructor = inspect.signature(type(env).__init__).parameters.values()
    arguments = {p.name: p.default for p in constructor if p.default is not inspect.Parameter.empty}
    return {**{f.name: getattr(params, f.name) for f in dataclasses.fields(params)}, **arguments}


def make(name: str, **kwargs: Any) -> "GymnaxEnvironment":
    """Makes ``name``; ``kwargs`` are fields of its parameters (which may be traced) or arguments of its constructor."""
    env, params = gymnax.make(name)
    fields = {f.name for f in dataclasses.fields(params)}
    constructor = {k: v for k, v in kwargs.items() if k not in fields}
    if constructor:
        env, params = gymnax.make(name, **constructor)
    return GymnaxEnvironment(env, params.replace(**{k: v for k, v in kwargs.items() if k in fields}))


class GymnaxEnvironment:
    """A gymnax environment as an `rljax.envs.Environment`.

    gymnax tells termination (``step_env``) from the time limit (``is_truncated``); both arrive here apart. What its resets
    return as Python numbers or in another dtype than its steps is brought to the step's dtype.
    """

    def __init__(self, env: Any, params: Any):
        self.env = env
        self.params = params
        self.observation_space = _convert(env.observation_space(params))
        self.action_space = _convert(env.action_space(params))
        key = jax.random.key(0)
        action = jnp.zeros(self.action_space.shape, self.action_space.dtype)

        def types(state):
            return jax.eval_shape(lambda s: strong(env.step_env(key, s, action, params)[1]), state)

        self._state_type = types(jax.eval_shape(lambda: strong(env.reset_env(key, params)[1])))

    def reset(self, key: Array) -> tuple[Any, TimeStep]:
        observation, state = self.env.reset_env(key, self.params)
        return like(self._state_type, state), restart(self._observation(observation))

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        observation, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        truncated = self.env.is_truncated(state, self.params)
        timestep = transition(self._observation(observation), reward, terminated, truncated)
        return like(self._state_type, state), timestep

    def _observation(self, observation: Any) -> Array:
        return jnp.asarray(observation, self.observation_space.dtype).reshape(self.observation_space.shape)


def _convert(space: Any) -> Space:
    if isinstance(space, gymnax_spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, gymnax_spaces.Box):
        return Box(space.low, space.high, tuple(space.shape), jnp.dtype(space.dtype))
    raise TypeError(f"gymnax space {type(space).__name__} is not supported")
