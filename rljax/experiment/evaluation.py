"""Evaluation: the return of the first episode of each of many environments."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.agents import Agent
from rljax.envs import Environment, MultiDiscrete, TimeStep, all_ended, host
from rljax.networks.distributions import Categorical, MultiCategorical, mask_logits
from rljax.sharding import spread


class Evaluation(struct.PyTreeNode):
    """Episodes ``[E]``.

    Attributes:
      returns: float32, undiscounted; of an unfinished episode, what it had earned so far. NaN where a grader on the host could
        not say.
      lengths: int32, steps.
      finished: bool, False where ``max_steps`` came first.
    """

    returns: Array
    lengths: Array
    finished: Array


class Playing(struct.PyTreeNode):
    """Episodes ``[E]`` that are being played.

    Attributes:
      step: int32 ``[]``, of all of them.
      env_state, timestep, carry: the environments', and the agent's memory.
      result: so far. The play of an episode that has finished goes on, and counts no more.
    """

    step: Array
    env_state: Any
    timestep: TimeStep
    carry: Any
    result: Evaluation


def begin(agent: Agent, env: Environment, state: Any, key: Array, episodes: int, data: Any = None) -> Playing:
    """The episodes at their start. The first ones are the same however many there are."""
    env_state, timestep = jax.vmap(env.reset)(spread(jax.random.split(key, episodes)))
    carry = agent.start(state, timestep, *_extra(data))
    result = Evaluation(jnp.zeros(episodes), jnp.zeros(episodes, jnp.int32), jnp.zeros(episodes, bool))
    return Playing(jnp.zeros((), jnp.int32), env_state, timestep, carry, result)


def advance(
    agent: Agent, env: Environment, state: Any, key: Array, playing: Playing, greedy: bool = True, data: Any = None
) -> Playing:
    """One step of every episode; ``key`` is the same for all steps."""
    result = playing.result
    act_key, env_key = jax.random.split(jax.random.fold_in(key, playing.step))
    carry, action = agent.act(state, playing.carry, playing.timestep, act_key, greedy, *_extra(data))
    env_keys = jax.random.split(env_key, result.returns.shape[0])
    env_state, timestep = jax.vmap(env.step)(env_keys, playing.env_state, action)
    result = Evaluation(
        returns=result.returns + jnp.where(result.finished, 0.0, timestep.reward),
        lengths=result.lengths + ~result.finished,
        finished=result.finished | timestep.done,
    )
    return Playing(playing.step + 1, env_state, timestep, carry, result)


def _extra(data: Any) -> tuple[Any, ...]:
    return () if data is None else (data,)


def evaluate_agent(
    agent: Agent, env: Environment, state: Any, key: Array, episodes: int, max_steps: int, greedy: bool = True, data: Any = None
) -> Evaluation:
    """Plays ``episodes`` episodes side by side, exactly one in each environment, so that short ones count no more than long ones.

    Pure and traceable. The same ``key`` gives the same start states and the same environment noise. An agent that has a
    `Agent.measure` is asked for that in place of episodes.
    """
    if agent.measure is not None:
        values = agent.measure(state, key, episodes, data)
        return Evaluation(values, jnp.zeros(episodes, jnp.int32), jnp.ones(episodes, bool))
    reset_key, play_key = jax.random.split(key)

    def running(playing: Playing) -> Array:
        return (playing.step < max_steps) & ~all_ended(playing.result.finished)

    def play(playing: Playing) -> Playing:
        return advance(agent, env, state, play_key, playing, greedy, data)

    playing = jax.lax.while_loop(running, play, begin(agent, env, state, reset_key, episodes, data))
    env_state, result = playing.env_state, playing.result
    host.release(env, env_state)
    outcome = getattr(env, "outcome", None)
    if outcome is None:
        return result
    rewards, info = outcome(env_state, result.lengths)
    returns = result.returns + jnp.where(result.finished, rewards, 0.0)
    return result.replace(returns=jnp.where(info["valid"], returns, jnp.nan))


def random_agent(env: Environment) -> Agent:
    """Acts uniformly at random among the legal actions (a finite box uniformly, an infinite one from a clipped normal)."""

    def act(state: Any, carry: Any, timestep: TimeStep, key: Array, greedy: bool) -> tuple[Any, Array]:
        batch = timestep.reward.shape[0]
        if timestep.action_mask is not None:
            logits = mask_logits(jnp.zeros(timestep.action_mask.shape), timestep.action_mask)
            space = env.action_space
            return (), (MultiCategorical(logits, space.nvec) if isinstance(space, MultiDiscrete) else Categorical(logits)).sample(
                key
            )
        return (), jax.vmap(env.action_space.sample)(jax.random.split(key, batch))

    return Agent(
        init=lambda key, data=None: (),
        step=lambda state, data=None: (state, {}),
        start=lambda state, timestep: (),
        act=act,
        env_steps=0,
    )
