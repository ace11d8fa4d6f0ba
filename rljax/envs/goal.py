"""A grid with a goal in the far corner, and two ways to shape its reward: one that is farmed and one that is not."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from rljax.envs.base import Environment, TimeStep, restart, transition
from rljax.envs.spaces import Discrete

MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # up, right, down, left


@dataclasses.dataclass(frozen=True)
class GoalGrid:
    """From one corner of an open square to the opposite one: 1 for the step that reaches the goal, which ends the episode.

    Observation: the cell, ``row * size + column``. Action: up, right, down or left; a step off the grid stays where it is. d
    is the distance to the goal in steps. Two terms can be added to the reward; `evaluated` has neither:

    - ``approach_bonus`` for every step that lowers d. A step away costs nothing, so that going back and forth earns it for ever.
    - F = ``discount`` Phi(s') - Phi(s) with Phi(s) = -``potential`` d(s): potential-based shaping (Ng, Harada & Russell 1999,
      "Policy invariance under reward transformations", whose grid has this potential too). Over any T steps it telescopes,
      sum_t discount^t F_t = discount^T Phi(s_T) - Phi(s_0), so that a loop earns nothing.

    Under F the best policies are those of the bare reward if ``discount`` is the agent's own and Phi is 0 in the terminal state,
    as it is here, where d is 0. A truncated state is not terminal and keeps its Phi: the shaped value of a state is V - Phi, so
    the agent's bootstrap adds discount^T (V(s_T) - Phi(s_T)) to the sum above, and what is left of F is -Phi(s_0), whatever the
    policy did. With a Phi of 0 there, or without a bootstrap, a limit would pay or charge for where it found the agent.

    The state is ``(place int32 [2], steps int32 [])``. The two weights and ``discount`` may be traced.

    Raises:
      ValueError: ``size`` below 2.
    """

    size: int = 9
    max_steps: int = 100
    approach_bonus: float = 0.0
    potential: float = 0.0
    discount: float = 0.99

    action_space = Discrete(4)

    def __post_init__(self):
        if self.size < 2:
            raise ValueError(f"env_params.size must be 2 or more, got {self.size}: the start would be the goal")

    @property
    def observation_space(self) -> Discrete:
        return Discrete(self.size**2)

    @property
    def evaluated(self) -> Environment:
        """Without shaping: the return is 1 if the goal was reached, else 0. See `rljax.envs.wrappers.as_evaluated`."""
        return dataclasses.replace(self, approach_bonus=0.0, potential=0.0)

    def reset(self, key: Array) -> tuple[tuple[Array, Array], TimeStep]:
        place = jnp.zeros(2, jnp.int32)
        return (place, jnp.zeros((), jnp.int32)), restart(self._cell(place))

    def step(self, key: Array, state: tuple[Array, Array], action: Array) -> tuple[tuple[Array, Array], TimeStep]:
        place, steps = state
        before = self._distance(place)
        place = jnp.clip(place + jnp.asarray(MOVES)[action], 0, self.size - 1)
        after, steps = self._distance(place), steps + 1
        at_goal = after == 0
        shaping = self.approach_bonus * (after < before) + self.potential * (before - self.discount * after)
        truncated = (steps >= self.max_steps) & ~at_goal
        return (place, steps), transition(self._cell(place), at_goal + shaping, at_goal, truncated)

    def _distance(self, place: Array) -> Array:
        return 2 * (self.size - 1) - place.sum()

    def _cell(self, place: Array) -> Array:
        return place[0] * self.size + place[1]
