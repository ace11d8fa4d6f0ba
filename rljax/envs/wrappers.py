"""Wrappers: an environment around an environment."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.envs.base import Environment, TimeStep
from rljax.envs.spaces import Box, Space
from rljax.options import is_number


def as_evaluated(env: Environment) -> Environment:
    """The environment that an evaluation plays: with the task's own reward, where ``env`` has another to learn from.

    An environment that changes its reward for learning has itself, without the change, as its attribute ``evaluated``.
    """
    return getattr(env, "evaluated", env)


class Wrapper:
    """Passes everything on to ``env``, its own attributes too; a subclass changes what it is about."""

    def __init__(self, env: Environment):
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet: this is a copy in the making
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def observation_space(self) -> Space:
        return self.env.observation_space

    @property
    def action_space(self) -> Space:
        return self.env.action_space

    @property
    def evaluated(self) -> Environment:
        """See `as_evaluated`: the same wrapper around the inner one's."""
        inner = as_evaluated(self.env)
        if inner is self.env:
            return self
        twin = copy.copy(self)
        twin.env = inner
        return twin

    def inner_state(self, state: Any) -> Any:
        """The state of ``env`` in one of this wrapper; a subclass that keeps more in its own takes it out."""
        return state

    def reset(self, key: Array) -> tuple[Any, TimeStep]:
        return self.env.reset(key)

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        return self.env.step(key, state, action)


class TimeLimit(Wrapper):
    """Truncates an episode after ``max_steps`` steps; a termination at the very last step stays a termination."""

    def __init__(self, env: Environment, max_steps: Any):
        super().__init__(env)
        self.max_steps = max_steps

    def inner_state(self, state: Any) -> Any:
        return state[0]

    def reset(self, key: Array) -> tuple[Any, TimeStep]:
        state, timestep = self.env.reset(key)
        return (state, jnp.zeros((), jnp.int32)), timestep

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        inner, elapsed = state
        inner, timestep = self.env.step(key, inner, action)
        elapsed = elapsed + 1
        cut = (elapsed >= self.max_steps) & ~timestep.terminated
        return (inner, elapsed), timestep.replace(truncated=timestep.truncated | cut)

    @property
    def outcome(self) -> Any:
        """See `rljax.envs.tokens.TokenEnvironment`; None where the environment has none."""
        inner = getattr(self.env, "outcome", None)
        return None if inner is None else lambda states, lengths: inner(states[0], lengths)


def is_range(value: Any) -> bool:
    """Whether a parameter is ``{"low": x, "high": y}``: drawn anew for each episode, see `Randomized`."""
    return isinstance(value, Mapping) and set(value) == {"low", "high"}


def check_range(key: str, value: Mapping[str, Any]) -> None:
    """
    Args:
      key: its name in the message.
      value: a table in the place of a number.

    Raises:
      ValueError: it is no range that can be drawn from; one line that names the key.
    """
    wanted = f"{key} must be a number or a range, as {{ low = 0.5, high = 1.5 }}"
    if missing := [end for end in ("low", "high") if end not in value]:
        raise ValueError(f"{wanted}; {dict(value)!r} lacks {' and '.join(missing)}")
    if extra := [end for end in value if end not in ("low", "high")]:
        raise ValueError(f"{wanted}; {extra[0]!r} is no key of one")
    low, high = (x.tolist() if hasattr(x, "tolist") else x for x in (value["low"], value["high"]))
    for end, number in (("low", low), ("high", high)):
        if not is_number(number):
            raise ValueError(f"{key}.{end} must be a number, got {number!r}")
        if abs(number) > float(np.finfo(np.float32).max):
            raise ValueError(f"{key}.{end} must be a number that float32 can hold, got {number!r}")
    if not np.float32(low) < np.float32(high):  # as which they are drawn
        raise ValueError(f"{key}: low must be below high, got {dict(value)}{' (the same in float32)' * (low < high)}")


class Randomized(Wrapper):
    """Domain randomisation: parameters are drawn for each episode, and not shown (Tobin et al. 2017, arXiv 1703.06907).

    A value is uniform in ``[low, high)``, and stays for the episode. The spaces are those at the middle of every range.
    """

    def __init__(self, make: Callable[..., Environment], ranges: Mapping[str, Mapping[str, Any]]):
        """
        Args:
          make: ``(**values) ->`` the environment, whose ``reset`` and ``step`` must take traced values.
          ranges: ``{"low": x, "high": y}`` of each parameter.
        """
        super().__init__(make(**{name: (span["low"] + span["high"]) / 2 for name, span in ranges.items()}))
        self._make, self._ranges = make, ranges

    def inner_state(self, state: Any) -> Any:
        return state[0]

    def reset(self, key: Array) -> tuple[Any, TimeStep]:
        reset_key, draw_key = jax.random.split(key)
        keys = jax.random.split(draw_key, len(self._ranges))
        values = {
            name: jax.random.uniform(k, (), jnp.float32, span["low"], span["high"])
            for k, (name, span) in zip(keys, self._ranges.items(), strict=True)
        }
        state, timestep = self._make(**values).reset(reset_key)
        return (state, values), timestep

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        inner, values = state
        inner, timestep = self._make(**values).step(key, inner, action)
        return (inner, values), timestep

    @property
    def outcome(self) -> Any:
        """See `TimeLimit.outcome`."""
        inner = getattr(self.env, "outcome", None)
        return None if inner is None else lambda states, lengths: inner(states[0], lengths)


class SelectObservation(Wrapper):
    """Shows only some entries of a flat observation, so that the rest must be remembered or inferred."""

    def __init__(self, env: Environment, indices: tuple[int, ...]):
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise ValueError(f"SelectObservation takes flat Box observations, the environment has {space}")
        self._indices = np.asarray(indices)
        low, high = (jnp.broadcast_to(jnp.asarray(x), space.shape)[self._indices] for x in (space.low, space.high))
        self._space = Box(low, high, (len(indices),), space.dtype)

    @property
    def observation_space(self) -> Space:
        return self._space

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


class LearnedReward(Wrapper):
    """Pays what a reward model says of a completion, when the episode has ended.

    ``info`` keeps the parts of the environment's own reward, which is what an evaluation plays for.
    """

    def __init__(self, env: Environment, pays: Callable[[Array, Array], Array]):
        """
        Args:
          env: of tokens.
          pays: ``(context int32 [B, S], lengths int32 [B]) ->`` the rewards of whole episodes ``[B]``, or of each of their steps
            ``[T, B]``; see `rljax.networks.reward.RewardModel`.
        """
        super().__init__(env)
        self.pays = pays
        self.truncated_counts = True  # a model scores what was cut as well

    @property
    def evaluated(self) -> Environment:
        return as_evaluated(self.env)

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        state, timestep = self.env.step(key, state, action)
        return state, timestep.replace(reward=jnp.zeros_like(timestep.reward))

    def outcome(self, states: Any, lengths: Array) -> tuple[Array, dict[str, Array]]:
        """See `rljax.envs.tokens.TokenEnvironment`. The model can always say, so no episode is invalid."""
        inner, space = getattr(self.env, "outcome", None), self.observation_space
        parts = {} if inner is None else inner(states, lengths)[1]
        while isinstance(states, tuple):  # of a time limit: the environment's own state comes first
            states = states[0]
        is_said = jnp.arange(space.length) - space.prompt < lengths[:, None]  # type: ignore[attr-defined]
        context = jnp.where(is_said, states.context, -1)
        return self.pays(context, lengths), {name: x for name, x in parts.items() if name != "valid"}


class ScaleReward(Wrapper):
    """Multiplies every reward by ``scale``. Evaluations leave it out: they compare returns in the environment's own units."""

    def __init__(self, env: Environment, scale: Any):
        super().__init__(env)
        self.scale = scale

    @property
    def evaluated(self) -> Environment:
        return as_evaluated(self.env)

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        state, timestep = self.env.step(key, state, action)
        return state, timestep.replace(reward=timestep.reward * self.scale)

    @property
    def outcome(self) -> Any:
        """See `rljax.envs.tokens.TokenEnvironment`; None where the environment has none."""
        inner = getattr(self.env, "outcome", None)
        if inner is None:
            return None

        def scaled(states: Any, lengths: Array) -> Any:
            reward, info = inner(states, lengths)
            return reward * self.scale, info

        return scaled
