"""Bandits: a decision, its reward, and what the best one would have earned more, in ``info["regret"]``."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from rljax.envs.base import TimeStep, restart, transition
from rljax.envs.spaces import Box, Discrete


@dataclasses.dataclass(frozen=True)
class LinearBandit:
    """One decision an episode, whose expected reward is linear in the context: ``w_a . x / sqrt(context_size)``.

    Observation: the context x, standard normal ``[context_size]``. Action: one of ``actions`` arms. The weights w are standard
    normal too, drawn once by ``task``. ``noise`` is the deviation of the rewards, and may be traced. The state is the context.

    Raises:
      ValueError: no arm or no feature.
    """

    actions: int = 5
    context_size: int = 4
    noise: float = 0.1
    task: int = 0

    def __post_init__(self):
        if self.actions < 1 or self.context_size < 1:
            raise ValueError(f"env_params.actions and context_size must be 1 or more, got {self.actions} and {self.context_size}")

    @property
    def observation_space(self) -> Box:
        return Box(-jnp.inf, jnp.inf, (self.context_size,))

    @property
    def action_space(self) -> Discrete:
        return Discrete(self.actions)

    @property
    def weights(self) -> Array:
        """``[actions, context_size]``."""
        return jax.random.normal(jax.random.key(self.task), (self.actions, self.context_size)) / self.context_size**0.5

    def reset(self, key: Array) -> tuple[Array, TimeStep]:
        context = jax.random.normal(key, (self.context_size,))
        return context, restart(context, info={"regret": jnp.zeros(())})

    def step(self, key: Array, state: Array, action: Array) -> tuple[Array, TimeStep]:
        expected = (self.weights * state).sum(-1)
        reward = expected[action] + self.noise * jax.random.normal(key)
        info = {"regret": expected.max() - expected[action]}
        return state, transition(state, reward, terminated=True, info=info)


@dataclasses.dataclass(frozen=True)
class BernoulliBandit:
    """One decision an episode and no context: arm a earns 1 with a probability that rises evenly from ``low`` to ``high``.

    Observation: always 0. ``low`` and ``high`` may be traced.

    Raises:
      ValueError: fewer than two arms.
    """

    actions: int = 5
    low: float = 0.3
    high: float = 0.7

    observation_space = Discrete(1)

    def __post_init__(self):
        if self.actions < 2:
            raise ValueError(f"env_params.actions must be 2 or more, got {self.actions}")

    @property
    def action_space(self) -> Discrete:
        return Discrete(self.actions)

    def reset(self, key: Array) -> tuple[Array, TimeStep]:
        nothing = jnp.zeros((), jnp.int32)
        return nothing, restart(nothing, info={"regret": jnp.zeros(())})

    def step(self, key: Array, state: Array, action: Array) -> tuple[Array, TimeStep]:
        means = self.low + (self.high - self.low) * jnp.arange(self.actions) / (self.actions - 1)
        reward = jax.random.bernoulli(key, means[action])
        return state, transition(state, reward, terminated=True, info={"regret": means.max() - means[action]})


@dataclasses.dataclass(frozen=True)
class Routing:
    """Requests come one after the other, and each is sent to one of ``tools`` tools or models; the better ones cost more.

    Observation: float32 ``[1 + topics]``, how difficult the request is, uniform in [0, 1], and its topic, one-hot. Action: the
    tool. Tool k of K has the level ``(k + 1) / K`` and costs as much; topic ``k mod topics`` is its own. It answers with a
    quality of, on average,

        sigmoid(sharpness (level + specialty [its own topic] - difficulty) + walk[tool, topic])

    and the reward is the quality, measured with normal noise of deviation ``noise``, minus ``cost_weight`` times the cost.
    ``walk`` starts at 0 and takes a normal step of deviation ``drift`` with every request: after t of them quality has moved by
    ``drift sqrt(t)`` in log-odds, and what was the right tool is so no more. Nothing of it is observed.

    An episode is ``max_steps`` requests and is then cut; its walk is its own. The state is ``(walk [tools, topics], difficulty,
    topic, steps)``. Numbers with a fraction may be traced.

    Raises:
      ValueError: fewer than two tools, no topic or no request.
    """

    tools: int = 4
    topics: int = 3
    sharpness: float = 6.0
    specialty: float = 0.25
    cost_weight: float = 0.4
    noise: float = 0.2
    drift: float = 0.0
    max_steps: int = 100_000

    def __post_init__(self):
        for name, least in (("tools", 2), ("topics", 1), ("max_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"env_params.{name} must be {least} or more, got {getattr(self, name)}")

    @property
    def observation_space(self) -> Box:
        return Box(0.0, 1.0, (1 + self.topics,))

    @property
    def action_space(self) -> Discrete:
        return Discrete(self.tools)

    def expected(self, difficulty: Array, topic: Array, walk: Array | float = 0.0) -> Array:
        """Expected reward of every tool ``[tools]``; where the walk is 0, that of the start."""
        level = (jnp.arange(self.tools) + 1) / self.tools
        own = jnp.arange(self.tools) % self.topics == topic
        walk = jnp.broadcast_to(walk, (self.tools, self.topics))[:, topic]
        quality = jax.nn.sigmoid(self.sharpness * (level + self.specialty * own - difficulty) + walk)
        return quality - self.cost_weight * level

    def reset(self, key: Array) -> tuple[tuple[Array, Array, Array, Array], TimeStep]:
        state = (jnp.zeros((self.tools, self.topics)), *self._request(key), jnp.zeros((), jnp.int32))
        return state, restart(self._observe(state), info={"regret": jnp.zeros(())})

    def step(
        self, key: Array, state: tuple[Array, Array, Array, Array], action: Array
    ) -> tuple[tuple[Array, Array, Array, Array], TimeStep]:
        noise_key, walk_key, request_key = jax.random.split(key, 3)
        walk, difficulty, topic, steps = state
        expected = self.expected(difficulty, topic, walk)
        reward = expected[action] + self.noise * jax.random.normal(noise_key)
        walk = walk + self.drift * jax.random.normal(walk_key, walk.shape)
        state = (walk, *self._request(request_key), steps + 1)
        info = {"regret": expected.max() - expected[action]}
        return state, transition(self._observe(state), reward, truncated=steps + 1 >= self.max_steps, info=info)

    def _request(self, key: Array) -> tuple[Array, Array]:
        difficulty_key, topic_key = jax.random.split(key)
        return jax.random.uniform(difficulty_key), jax.random.randint(topic_key, (), 0, self.topics)

    def _observe(self, state: tuple[Array, Array, Array, Array]) -> Array:
        return jnp.concatenate([state[1][None], jax.nn.one_hot(state[2], self.topics)])
