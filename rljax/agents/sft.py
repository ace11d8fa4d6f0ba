"""Supervised fine-tuning: cross-entropy on what a demonstration says, and on nothing else (the completion-only loss).

Demonstrations are episodes of the environment: a prompt, good words, and whatever a tool said in between. The loss is the
negative log-likelihood of the words that were the policy's to choose, so that fine-tuning is cloning on tokens. Where nobody
demonstrates, the policy's own answers serve, those that are paid enough: rejection sampling, as one round of expert iteration
(Zelikman et al. 2022, arXiv 2203.14465; Yuan et al. 2023, arXiv 2308.01825).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, whole
from rljax.agents.on_policy import acting
from rljax.agents.preferences import Completions, collect_samples
from rljax.envs import Environment, Tokens
from rljax.networks import Transformer, transformer
from rljax.networks.distributions import log_prob_and_entropy
from rljax.networks.transformer import forward, read_out, reading
from rljax.ops import losses
from rljax.options import config, static, traced
from rljax.sharding import spread


@config
class Config:
    learning_rate: float = traced(3e-3, "Adam's step size", low=0)
    max_grad_norm: float = traced(1.0, "bound on the gradient's global norm", above=0)
    weight_decay: float = traced(0.0, "decoupled, of all parameters (AdamW)", low=0)
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    aggregate: str = static("token", "how steps become one loss", choices=("token", "sequence"))
    batch_size: int = static(64, "demonstrations of a gradient step, B; of packed rows, rows", low=1)
    demonstrations: str = static(
        "task", "the task's, or the policy's own answers at its start that are paid min_reward", choices=("task", "own")
    )
    num_examples: int = static(0, "how many there are, right or wrong; 0, of the task's alone: fresh ones in every step", low=0)
    min_reward: float = static(1.0, "own answers that are paid less are left out")
    pack: int = static(0, "tokens of a row that holds several examples of a file; 0: each has a row of its own", low=0)
    model: Transformer = static(Transformer(), "the transformer of [model]")


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: the policy's parameters.
      opt_state: Adam's moments.
      key: typed PRNG key, advanced at every step; it decides which demonstrations come next.
      examples: own answers, and which of them are paid enough; of a limited number of the task's the key that all are made of;
        else None.
    """

    params: Any
    opt_state: Any
    key: Array
    examples: Any = None


class OwnAnswers(struct.PyTreeNode):
    """What the policy said before training.

    Attributes:
      completions: see `Completions`, ``N`` of them.
      counts: bool ``[N]``, those that are paid enough.
    """

    completions: Completions
    counts: Array


def make(config: Config, env: Environment) -> Agent:
    """SFT on ``batch_size`` fresh demonstrations a step; steps are counted as if each took all of its ``T`` tokens.

    Raises:
      ValueError: an environment without demonstrations, own answers without their number, or a number of what is packed.
    """
    demonstration: Any = getattr(env, "demonstration", None)
    space = env.observation_space
    is_own = config.demonstrations == "own"
    if not isinstance(space, Tokens) or (demonstration is None and not is_own):
        raise ValueError("algo.name sft needs an environment of tokens that has demonstrations, such as tokens/addition")
    if is_own and not config.num_examples:
        raise ValueError('algo.demonstrations "own" needs algo.num_examples, how many answers are drawn before training')
    task: Any = getattr(env, "task", None)
    if config.pack and config.num_examples:
        raise ValueError("algo.pack takes all examples of a file: leave algo.num_examples at 0, or do not pack")
    if config.pack and not hasattr(task, "packed"):
        raise ValueError("algo.pack packs the examples of a file; the environment makes its own: leave algo.pack at 0")
    packed = task.packed(config.pack) if config.pack else None
    policy = transformer(config.model, space)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))

    def begins_with(key: Array) -> Any:
        return policy.init(key, jax.vmap(env.reset)(key[None])[1])

    def init(key: Array, data: Any = None, params: Any = None) -> TrainState:
        key, params_key, examples_key = jax.random.split(key, 3)
        if params is None:
            params = begins_with(params_key)
        examples: Any = examples_key if config.num_examples else None
        if is_own:
            samples = collect_samples(env, config.model, whole(params, data), examples_key, config.num_examples)
            completions, rewards, valid = samples
            examples = OwnAnswers(completions, valid & (rewards >= config.min_reward))
        return TrainState(params, optimizer.init(params), key, examples)

    def demonstrations(key: Array, examples: Any) -> tuple[Any, Array, Array]:
        """``(what is needed to predict them, words, mask)``, the last two ``[T, B]``."""
        if is_own:
            share = examples.counts / jnp.maximum(examples.counts.sum(), 1)
            rows = jax.random.choice(key, config.num_examples, (config.batch_size,), p=share)
            chosen, counts = jax.tree.map(lambda x: x[rows], (examples.completions, examples.counts))
            return reading(chosen.context, chosen.mask.shape[1]), chosen.said.T, chosen.mask.T & counts
        if packed is None:
            keys = spread(jax.random.split(key, config.batch_size))
            if config.num_examples:
                rows = jax.random.randint(key, (config.batch_size,), 0, config.num_examples)
                keys = jax.vmap(lambda row: jax.random.fold_in(examples, row))(rows)
            return jax.tree.map(lambda x: x.swapaxes(0, 1), jax.vmap(demonstration)(keys))  # type: ignore[arg-type]
        rows = jax.random.randint(key, (config.batch_size,), 0, packed.tokens.shape[0])
        tokens, segments, mask = (jnp.asarray(x)[rows] for x in packed)
        return (tokens, segments), tokens[:, 1:].T, mask[:, 1:].T

    def predict(params: Any, given: Any) -> Any:
        """The distributions of the words, ``[T, B]``."""
        if packed is None:
            first, starts = jax.tree.map(lambda x: x[0], given), jax.tree.map(lambda x: x[:-1], given)
            return policy.unroll(params, policy.start(params, first), starts).distribution
        hidden = forward(config.model, params, *given)[:, :-1]
        return read_out(config.model, params, hidden.swapaxes(0, 1), space.n)

    def loss(trained: Any, given: Any, words: Array, mask: Array, data: Any) -> tuple[Array, dict[str, Any]]:
        log_prob, entropy = log_prob_and_entropy(predict(whole(trained, data), given), jnp.maximum(words, 0))
        log_prob = jnp.where(mask, log_prob, 0.0)
        nll = losses.masked_mean(-log_prob, mask, config.aggregate)  # type: ignore[arg-type]
        metrics = {
            "loss/nll": nll,
            "entropy": losses.masked_mean(entropy, mask),
            "sure": losses.masked_mean((log_prob > jnp.log(0.5)).astype(jnp.float32), mask),
            "length": mask.sum(0).mean(),
        }
        return nll, metrics

    def step(state: TrainState, data: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key, batch_key = jax.random.split(state.key)
        gradient, metrics = jax.grad(loss, has_aux=True)(state.params, *demonstrations(batch_key, state.examples), data)
        direction, opt_state = optimizer.update(gradient, state.opt_state)
        params = jax.tree.map(lambda p, d: p - config.learning_rate * (d + config.weight_decay * p), state.params, direction)
        metrics = {**metrics, "grad_norm": optax.tree.norm(gradient)}
        if is_own:
            metrics["kept"] = state.examples.counts.mean()
        return state.replace(params=params, opt_state=opt_state, key=key), metrics

    tokens = config.pack or space.length - space.prompt
    env_steps = config.batch_size * tokens
    return Agent(init, step, *acting(policy), env_steps, policy=policy, begins_with=begins_with, learns_from="examples")
