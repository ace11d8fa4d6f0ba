"""A ladder to climb: an environment of a dozen lines."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from rljax.envs import Box, Discrete, TimeStep, restart, transition


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Action 1 climbs a rung, 0 goes down one; with probability ``slip`` it is the other way. Each step costs 1, the top ends it.

    Observation: float32 ``[1]``, the share of the ladder that has been climbed. The state is the rung, int32 ``[]``.
    """

    slip: float = 0.1
    rungs: int = 8

    observation_space = Box(0.0, 1.0, (1,))
    action_space = Discrete(2)

    def reset(self, key: Array) -> tuple[Array, TimeStep]:
        return jnp.int32(0), restart(jnp.zeros(1))

    def step(self, key: Array, state: Array, action: Array) -> tuple[Array, TimeStep]:
        up = (action == 1) != jax.random.bernoulli(key, self.slip)
        rung = jnp.maximum(state + jnp.where(up, 1, -1), 0)
        return rung, transition(rung[None] / self.rungs, -1.0, terminated=rung >= self.rungs)
