"""Reward models: transformers that say how good a completion is, one or an ensemble of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rljax.envs.base import restart
from rljax.envs.spaces import Tokens
from rljax.networks.transformer import Transformer, reading, transformer


class RewardModel(NamedTuple):
    """Pure functions; ``K`` is the ensemble, ``N`` completions of ``T`` tokens.

    Attributes:
      init: ``(key) -> params``, each leaf ``[K, ...]``.
      scores: ``(params, context [N, S], lengths [N]) -> [K, N]``; with a reward for each token, the sum of them.
      pays: ``(params, context [N, S], lengths [N]) ->`` what an agent is paid: ``[N]``, or of tokens ``[T, N]``. The ensemble's
        mean, or its lowest score of each completion.
    """

    init: Callable[[Array], Any]
    scores: Callable[[Any, Array, Array], Array]
    pays: Callable[[Any, Array, Array], Array]


def reward_model(
    model: Transformer, space: Tokens, ensemble: int = 1, of_tokens: bool = False, pessimistic: bool = False
) -> RewardModel:
    """A linear head on a transformer's last hidden state at the last token that was said, found from the lengths.

    Args:
      of_tokens: every token said has a reward of its own, and a completion's score is the sum of them.
      pessimistic: pays the lowest of the ensemble's scores (Coste et al. 2023, arXiv 2310.02743, "worst-case"), not their mean.
    """
    network = transformer(model, space, has_value=True)

    def init(key: Array) -> Any:
        """Heads are small and random, so that the members of an ensemble differ."""

        def one(key: Array) -> Any:
            params_key, head_key = jax.random.split(key)
            params = network.init(params_key, jax.vmap(restart)(jnp.zeros((1, space.length), jnp.int32)))
            kernel = jax.random.normal(head_key, (model.width, 1)) / model.width
            return {**params, "value": {**params["value"], "kernel": kernel}}

        return jax.vmap(one)(jax.random.split(key, ensemble))

    def of_each_token(params: Any, context: Array, lengths: Array) -> Array:
        """``[T, N]`` of one member: the head after each token that was said, 0 after the end."""
        steps = space.length - space.prompt
        timesteps = reading(context, steps)
        first = jax.tree.map(lambda x: x[0], timesteps)
        values = network.unroll(params, network.start(params, first), timesteps).value[1:]
        return jnp.where(jnp.arange(steps)[:, None] < lengths, values, 0.0)

    def at_end(values: Array, lengths: Array) -> Array:
        return jnp.take_along_axis(values, jnp.maximum(lengths - 1, 0)[None], 0)[0]

    def score(params: Any, context: Array, lengths: Array) -> Array:
        values = of_each_token(params, context, lengths)
        return values.sum(0) if of_tokens else at_end(values, lengths)

    def scores(params: Any, context: Array, lengths: Array) -> Array:
        return jax.vmap(lambda params: score(params, context, lengths))(params)

    def pays(params: Any, context: Array, lengths: Array) -> Array:
        values = jax.vmap(lambda params: of_each_token(params, context, lengths))(params)  # [K, T, N]
        totals = values.sum(1) if of_tokens else jax.vmap(lambda x: at_end(x, lengths))(values)
        if not pessimistic:
            return values.mean(0) if of_tokens else totals.mean(0)
        lowest = jnp.argmin(totals, 0)
        return jnp.take_along_axis(values if of_tokens else totals, lowest[None, None] if of_tokens else lowest[None], 0)[0]

    return RewardModel(init, scores, pays)
