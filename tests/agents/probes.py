"""Probe environments: each isolates one thing that a learner must get right, and has its answer known by hand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rljax.envs import Box, Discrete, restart, transition


def observe(*values: Any) -> jax.Array:
    return jnp.stack([jnp.asarray(v, jnp.float32) for v in values])


@dataclasses.dataclass(frozen=True)
class ConstantReward:
    """One step, one action, observation 0, reward 1: V = 1."""

    observation_space = Box(-1.0, 1.0, (1,))
    action_space = Discrete(1)

    def reset(self, key):
        return jnp.int32(0), restart(observe(0.0))

    def step(self, key, state, action):
        return state, transition(observe(0.0), 1.0, terminated=True)


@dataclasses.dataclass(frozen=True)
class RewardFromObservation:
    """One step, one action, observation and reward are the same random sign: V(o) = o."""

    observation_space = Box(-1.0, 1.0, (1,))
    action_space = Discrete(1)

    def reset(self, key):
        sign = jax.random.rademacher(key, (), jnp.float32)
        return sign, restart(observe(sign))

    def step(self, key, state, action):
        return state, transition(observe(state), state, terminated=True)


@dataclasses.dataclass(frozen=True)
class TwoStepCredit:
    """Two steps, one action, reward 1 at the end: V(first) = discount, V(second) = 1."""

    observation_space = Box(-1.0, 1.0, (1,))
    action_space = Discrete(1)

    def reset(self, key):
        return jnp.int32(0), restart(observe(0.0))

    def step(self, key, state, action):
        last = state == 1
        return state + 1, transition(observe(1.0), last, terminated=last)


@dataclasses.dataclass(frozen=True)
class ActionReward:
    """One step, two actions, observation 0, reward +1 for action 1 and -1 for action 0."""

    observation_space = Box(-1.0, 1.0, (1,))
    action_space = Discrete(2)

    def reset(self, key):
        return jnp.int32(0), restart(observe(0.0))

    def step(self, key, state, action):
        return state, transition(observe(0.0), 2.0 * action - 1.0, terminated=True)


@dataclasses.dataclass(frozen=True)
class ActionMatchesObservation:
    """One step, two actions, reward +1 where the action is the sign that was observed, else -1."""

    observation_space = Box(-1.0, 1.0, (1,))
    action_space = Discrete(2)

    def reset(self, key):
        sign = jax.random.rademacher(key, (), jnp.float32)
        return sign, restart(observe(sign))

    def step(self, key, state, action):
        return state, transition(observe(state), state * (2.0 * action - 1.0), terminated=True)


@dataclasses.dataclass(frozen=True)
class EndlessReward:
    """Reward 1 for ever, cut every three steps: V = 1 / (1 - discount) only if a cut keeps its bootstrap."""

    observation_space = Box(-1.0, 1.0, (1,))
    action_space = Discrete(1)

    def reset(self, key):
        return jnp.int32(0), restart(observe(0.0))

    def step(self, key, state, action):
        return state + 1, transition(observe(0.0), 1.0, truncated=state == 2)


@dataclasses.dataclass(frozen=True)
class MaskedBandit:
    """Three actions with rewards 0, 1, 2; the best is illegal half of the time, at random, and the observation does not tell."""

    observation_space = Box(-1.0, 1.0, (1,))
    action_space = Discrete(3)

    def _mask(self, key):
        return jnp.array([True, True, False]) | (jnp.arange(3) == 2) & jax.random.bernoulli(key)

    def reset(self, key):
        mask = self._mask(key)
        return mask, restart(observe(0.0), mask)

    def step(self, key, state, action):
        reward = jnp.where(state[action], action.astype(jnp.float32), -100.0)
        return state, transition(observe(0.0), reward, terminated=True, action_mask=state)


@dataclasses.dataclass(frozen=True)
class ContinuousTarget:
    """One step, one action in [-2, 3], reward -(action - 1.5)^2."""

    observation_space = Box(-1.0, 1.0, (1,))
    action_space = Box(-2.0, 3.0, (1,))

    def reset(self, key):
        return jnp.int32(0), restart(observe(0.0))

    def step(self, key, state, action):
        return state, transition(observe(0.0), -jnp.square(action[0] - 1.5), terminated=True)


@dataclasses.dataclass(frozen=True)
class RecallFirst:
    """The first observation shows a sign, two blanks follow, then the action must match it: unsolvable without memory."""

    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Discrete(2)

    def reset(self, key):
        sign = jax.random.rademacher(key, (), jnp.float32)
        return (sign, jnp.int32(0)), restart(observe(sign, 0.0))

    def step(self, key, state, action):
        sign, time = state
        last = time == 2
        reward = jnp.where(last, sign * (2.0 * action - 1.0), 0.0)
        return (sign, time + 1), transition(observe(0.0, time == 1), reward, terminated=last)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The probe of number ``which``, which may be traced, among several over the same spaces."""

    probes: tuple[Any, ...]
    which: Any

    @property
    def observation_space(self):
        return self.probes[0].observation_space

    @property
    def action_space(self):
        return self.probes[0].action_space

    def reset(self, key):
        return self._chosen([probe.reset(key) for probe in self.probes])

    def step(self, key, state, action):
        return self._chosen([probe.step(key, own, action) for probe, own in zip(self.probes, state, strict=True)])

    def _chosen(self, outcomes):
        states, timesteps = zip(*outcomes, strict=True)
        return states, jax.tree.map(lambda *xs: jnp.stack([jnp.asarray(x) for x in xs])[self.which], *timesteps)
