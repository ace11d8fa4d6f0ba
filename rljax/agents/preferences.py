"""Pairs of completions of which one is preferred: read from a file, or sampled from a policy and labelled by the reward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.agents.on_policy import contexts, first_episodes
from rljax.envs import Environment, Tokens, group
from rljax.envs.wrappers import as_evaluated
from rljax.networks import Policy, Transformer, transformer
from rljax.networks.distributions import log_prob_and_entropy
from rljax.networks.transformer import reading

BLOCK = 256  # completions that are sampled at once


class Completions(struct.PyTreeNode):
    """``N`` prompts and what was said after each.

    Attributes:
      context: int32 ``[N, S]``: the prompt, padded at its left with -1, and the completion, -1 after its end.
      mask: bool ``[N, T]``, the words of the completion that were the policy's to choose.
    """

    context: Array
    mask: Array

    @property
    def said(self) -> Array:
        """int32 ``[N, T]``, the completions."""
        return self.context[:, -self.mask.shape[1] :]

    @property
    def lengths(self) -> Array:
        """int32 ``[N]``, tokens of each, the end token and what a tool said included."""
        return (self.said >= 0).sum(-1)


class Pairs(struct.PyTreeNode):
    """``N`` pairs of completions of the same prompt.

    Attributes:
      chosen, rejected: see `Completions`.
      margin: float32 ``[N]``, how much better the chosen one is, in the units of the reward, or as the file says.
      counts: bool ``[N]``, False where both are as good: no preference, and nothing to learn from.
    """

    chosen: Completions
    rejected: Completions
    margin: Array
    counts: Array


def check_pairs(env: Environment, number: int, keys: str) -> None:
    """Raises ValueError, naming ``keys``, where the environment's file of preferences has fewer than ``number`` pairs."""
    recorded = getattr(getattr(env, "task", None), "preferences", None)
    if recorded is not None and len(recorded[0]) < number:
        raise ValueError(f"{keys} ({number}) is more than the {len(recorded[0])} pairs of env_params.preferences")


def collect_pairs(
    env: Environment, model: Transformer, params: Any, key: Array, num_pairs: int, answers: int, label_noise: Array | float
) -> Pairs:
    """``num_pairs`` pairs: the first of the environment's file of preferences, where it has one, else a labelled sample.

    A sample has ``answers`` completions of each prompt, drawn from the model with ``params``; the best and the worst of them by
    the environment's own reward (`as_evaluated`) are a pair. The labels are wrong with probability ``label_noise``.
    """
    space = env.observation_space
    assert isinstance(space, Tokens)
    recorded = getattr(getattr(env, "task", None), "preferences", None)
    sample_key, noise_key = jax.random.split(key)
    if recorded is not None:
        chosen, rejected, margin = (jnp.asarray(x[:num_pairs]) for x in recorded)
        chosen, rejected = (Completions(x, x[:, space.prompt :] >= 0) for x in (chosen, rejected))
        pairs = Pairs(chosen, rejected, margin, jnp.ones(num_pairs, bool))
    else:
        policy = transformer(model, space, group_size=answers)

        def block(key: Array, prompts: int) -> Pairs:
            return _label(as_evaluated(env), policy, params, key, prompts, answers)

        pairs = _in_blocks(block, sample_key, num_pairs, BLOCK // answers)
    wrong = jax.random.bernoulli(noise_key, label_noise, (num_pairs,))
    chosen, rejected = (
        jax.tree.map(lambda x, y: jnp.where(wrong.reshape(-1, *(1,) * (x.ndim - 1)), y, x), *sides)
        for sides in ((pairs.chosen, pairs.rejected), (pairs.rejected, pairs.chosen))
    )
    return pairs.replace(chosen=chosen, rejected=rejected)


def collect_samples(
    env: Environment, model: Transformer, params: Any, key: Array, number: int
) -> tuple[Completions, Array, Array]:
    """One completion each of ``number`` prompts, drawn from the model with ``params``: `sample`, judged by the environment's own
    reward (`as_evaluated`); rewards and validity are ``[number]``."""
    policy = transformer(model, env.observation_space)

    def block(key: Array, prompts: int) -> tuple[Completions, Array, Array]:
        completions, rewards, valid = sample(as_evaluated(env), policy, params, key, prompts, 1)
        return completions, rewards[:, 0], valid[:, 0]

    return _in_blocks(block, key, number, BLOCK)


def _in_blocks(block: Callable[[Array, int], Any], key: Array, number: int, size: int) -> Any:
    """``number`` rows of what ``block(key, rows)`` makes, at most ``size`` of them at once."""
    size = max(1, min(number, size))
    rows = jax.lax.map(lambda key: block(key, size), jax.random.split(key, -(-number // size)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:number], rows)


def _label(env: Environment, policy: Policy, params: Any, key: Array, prompts: int, answers: int) -> Pairs:
    completions, rewards, valid = sample(env, policy, params, key, prompts, answers)
    best = jnp.argmax(jnp.where(valid, rewards, -jnp.inf), 1)
    worst = jnp.argmin(jnp.where(valid, rewards, jnp.inf), 1)
    row = jnp.arange(prompts)
    margin = rewards[row, best] - rewards[row, worst]
    chosen, rejected = (jax.tree.map(lambda x, i=i: x[row * answers + i], completions) for i in (best, worst))
    return Pairs(chosen, rejected, margin, (margin > 0) & valid[row, best] & valid[row, worst])


def sample(
    env: Environment, policy: Policy, params: Any, key: Array, prompts: int, answers: int
) -> tuple[Completions, Array, Array]:
    """``answers`` completions of each of ``prompts`` prompts: ``(Completions [P * G], rewards [P, G], valid [P, G])``.

    ``policy`` is one for groups of ``answers``; a reward is not valid where it could not be had, and where the episode did not
    end.
    """
    space: Any = env.observation_space
    episodes = first_episodes(policy, group(env, prompts, answers), params, key, space.length - space.prompt)
    info = episodes.transitions.info
    valid = (episodes.last & info["valid"] if "valid" in info else episodes.last).any(0)
    completions = Completions(contexts(episodes, space), episodes.choices.T)
    return completions, episodes.returns.reshape(prompts, answers), valid.reshape(prompts, answers)


def log_probs(policy: Policy, params: Any, completions: Completions) -> tuple[Array, Array]:
    """``(log pi of each word, entropy there)``, float32 ``[T, N]``; 0 where the mask is False.

    They are the model's own, at its temperature, over all tokens: what a grammar would forbid is not taken out.
    """
    timesteps = reading(completions.context, completions.mask.shape[1])
    first = jax.tree.map(lambda x: x[0], timesteps)
    starts = jax.tree.map(lambda x: x[:-1], timesteps)
    output = policy.unroll(params, policy.start(params, first), starts)
    mask = completions.mask.T
    log_prob, entropy = log_prob_and_entropy(output.distribution, jnp.maximum(completions.said.T, 0))
    return jnp.where(mask, log_prob, 0.0), jnp.where(mask, entropy, 0.0)
