"""The cross-entropy method over a linear policy: no gradients.

Each update draws ``population`` weight matrices from a Gaussian, plays one episode with each, and fits the Gaussian to the best.

Source: Szita and Lorincz 2006, "Learning Tetris Using the Noisy Cross-Entropy Method", Neural Computation 18(12), algorithm 1
with their decreasing noise.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.agents import Agent
from rljax.envs import Box, Discrete, Environment, TimeStep
from rljax.options import config, static, traced


@config
class Config:
    """Options; ``traced`` ones can be swept within one program."""

    initial_std: float = traced(1.0, "standard deviation of each weight at first", above=0)
    noise: float = traced(0.2, "variance added to each weight's at first, so that the search does not close too early", low=0)
    noise_updates: float = traced(20.0, "updates after which no variance is added any more", above=0)
    population: int = static(32, "weight matrices that an update tries", low=2)
    num_elites: int = static(8, "the best of them, which the Gaussian is fitted to", low=1)
    num_steps: int = static(500, "steps after which an episode is cut", low=1)


class TrainState(struct.PyTreeNode):
    """``params`` are what acts: the mean of the Gaussian, float32 ``[observation + 1, actions]``, the last row a bias."""

    params: Array
    std: Array
    updates: Array
    key: Array


def make(config: Config, env: Environment) -> Agent:
    """CEM on ``env``, whose observations are a `Box`, taken as a vector, and whose actions are `Discrete`.

    Raises:
      ValueError: other spaces, or more elites than the population has.
    """
    observations, actions = env.observation_space, env.action_space
    if not isinstance(observations, Box) or not isinstance(actions, Discrete):
        raise ValueError("algo.name cem takes Box observations and Discrete actions")
    if config.num_elites > config.population:
        raise ValueError(f"algo.num_elites must be at most algo.population, {config.population}, got {config.num_elites}")
    shape = (math.prod(observations.shape) + 1, actions.n)

    def best_action(weights: Array, timestep: TimeStep) -> Array:
        """Of one time step."""
        scores = jnp.append(timestep.observation.reshape(-1), 1.0) @ weights
        legal = timestep.action_mask
        return jnp.argmax(scores if legal is None else jnp.where(legal, scores, -jnp.inf))

    def episode(weights: Array, key: Array) -> tuple[Array, Array, Array]:
        """``(return, length, whether it ended)`` of one episode."""
        reset_key, step_key = jax.random.split(key)
        state, first = env.reset(reset_key)

        def play(carry: Any, key: Array) -> tuple[Any, None]:
            state, timestep, alive, total, length = carry
            state, timestep = env.step(key, state, best_action(weights, timestep))
            total = total + jnp.where(alive, timestep.reward, 0.0)
            return (state, timestep, alive & ~timestep.done, total, length + alive), None

        start = (state, first, jnp.bool_(True), jnp.float32(0), jnp.int32(0))
        keys = jax.random.split(step_key, config.num_steps)
        (_, _, alive, total, length), _ = jax.lax.scan(play, start, keys)
        return total, length, ~alive

    def init(key: Array, data: None = None) -> TrainState:
        return TrainState(jnp.zeros(shape), jnp.full(shape, 1.0) * config.initial_std, jnp.int32(0), key)

    def step(state: TrainState, data: None = None) -> tuple[TrainState, dict[str, Any]]:
        key, draw_key, play_key = jax.random.split(state.key, 3)
        weights = state.params + state.std * jax.random.normal(draw_key, (config.population, *shape))
        returns, lengths, ended = jax.vmap(episode)(weights, jax.random.split(play_key, config.population))
        elites = weights[jnp.argsort(-returns)[: config.num_elites]]
        added = config.noise * jnp.maximum(1.0 - state.updates / config.noise_updates, 0.0)
        metrics = {
            "std": state.std.mean(),
            "elite/return": jnp.sort(returns)[-config.num_elites :].mean(),
            "episode/return": (jnp.where(ended, returns, 0.0).sum(), ended.sum()),
            "episode/return_square": (jnp.where(ended, returns**2, 0.0).sum(), ended.sum()),
            "episode/length": (jnp.where(ended, lengths, 0).sum(), ended.sum()),
        }
        return TrainState(elites.mean(0), jnp.sqrt(elites.var(0) + added), state.updates + 1, key), metrics

    def start(state: TrainState, timestep: TimeStep, data: None = None) -> tuple[()]:
        return ()

    def act(state: TrainState, carry: Any, timestep: TimeStep, key: Array, greedy: bool, data: None = None) -> tuple[Any, Array]:
        return (), jax.vmap(best_action, (None, 0))(state.params, timestep)

    return Agent(init, step, start, act, env_steps=config.population * config.num_steps)
