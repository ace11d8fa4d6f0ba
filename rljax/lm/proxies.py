"""Rewards that can be gamed, made by hand: what an agent learns from them, and what the task's own reward says of it."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from rljax.envs import Environment, TimeStep
from rljax.envs.tokens import TokenEnvironment, TokenState
from rljax.envs.wrappers import Wrapper
from rljax.options import did_you_mean


def contains(completion: Array, length: Array, answer: Array) -> Array:
    """bool: ``answer [A]``, padded with -1, stands somewhere in the first ``length`` of ``completion [T]``, in one piece.

    An empty answer stands everywhere.
    """
    size, place = jnp.sum(answer >= 0), jnp.arange(answer.shape[0])
    start = jnp.arange(completion.shape[0] + 1)
    windows = jnp.pad(completion, (0, answer.shape[0] + 1), constant_values=-1)[start[:, None] + place]
    return jnp.any(jnp.all((windows == answer) | (place >= size), 1) & (start + size <= length))


PROXIES = {
    # Length bias: the share of the places that was used, whatever was said there.
    "length": lambda completion, length, answer: length / completion.shape[0],
    # Answer listing: the right answer was said somewhere, whatever stands around it.
    "contains": lambda completion, length, answer: contains(completion, length, answer).astype(jnp.float32),
}


class ProxyReward(Wrapper):
    """Pays a proxy in place of the task's reward, at the end of an episode; ``info["reward/<component>"]`` is still the task's.

    A tool's words are part of the completion, and the end token is not. What was cut earns 0 unless the environment has
    ``truncated_counts``. Evaluations are paid the task's own reward.
    """

    def __init__(self, env: TokenEnvironment, proxy: str):
        """
        Args:
          proxy: a name of `PROXIES`: "length" pays tokens / ``max_tokens``, and "contains" pays 1 where the answer of the
            `rljax.envs.tokens.Problem` stands anywhere in the completion, in one piece.

        Raises:
          ValueError: an unknown proxy, or a task that is graded on the host, whose answers are no tokens.
        """
        if proxy not in PROXIES:
            known = " or ".join(map(repr, PROXIES))
            raise ValueError(f"env_params.proxy must be {known}, got {proxy!r}{did_you_mean(str(proxy), list(PROXIES))}")
        if env.outcome is not None:
            raise ValueError(f"env_params.proxy {proxy!r}: a task that is graded on the host takes a grader as its proxy")
        super().__init__(env)
        self._pays = PROXIES[proxy]

    @property
    def evaluated(self) -> Environment:
        return self.env

    def step(self, key: Array, state: TokenState, action: Array) -> tuple[Any, TimeStep]:
        state, timestep = self.env.step(key, state, action)
        is_stop = state.stopped == state.length
        said = state.context[self.task.prompt_length :]
        reward = self._pays(said, state.length - is_stop, state.problem.answer)
        counts = timestep.done & (is_stop | self.truncated_counts)
        return state, timestep.replace(reward=jnp.where(counts, reward, 0.0))
