"""Evaluation: the return of the first episode of each of many environments."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.agents import Agent
from rljax.envs import Environment, MultiDiscrete, TimeStep, all_ended
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
    env_state, timestep = jax.vmap(env.reset)(spread(jax.random.split(reset_key, episodes)))
    extra = () if data is None else (data,)
    zeros = Evaluation(jnp.zeros(episodes), jnp.zeros(episodes, jnp.int32), jnp.zeros(episodes, bool))

    def running(loop):
        step, _, _, _, result = loop
        return (step < max_steps) & ~all_ended(result.finished)

    def play(loop):
        step, env_state, timestep, carry, result = loop
        act_key, env_key = jax.random.split(jax.random.fold_in(play_key, step))
        carry, action = agent.act(state, carry, timestep, act_key, greedy, *extra)
        env_state, timestep = jax.vmap(env.step)(jax.random.split(env_key, episodes), env_state, action)
        result = Evaluation(
            returns=result.returns + jnp.where(result.finished, 0.0, timestep.reward),
            lengths=result.lengths + ~result.finished,
            finished=result.finished | timestep.done,
        )
        return step + 1, env_state, timestep, carry, result

    start = (jnp.zeros((), jnp.int32), env_state, timestep, agent.start(state, timestep, *extra), zeros)
    _, env_state, _, _, result = jax.lax.while_loop(running, play, start)
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
