"""Supervised fine-tuning: cross-entropy on what a demonstration says, and on nothing else (the completion-only loss).

Demonstrations are episodes of the environment: a prompt, good words, and whatever a tool said in between. The loss is the
negative log-likelihood of the words that were the policy's to choose, so that fine-tuning is cloning on tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, whole
from rljax.agents.on_policy import acting
from rljax.envs import Environment, Tokens
from rljax.networks import Transformer, transformer
from rljax.networks.distributions import log_prob_and_entropy
from rljax.networks.transformer import forward, read_out
from rljax.ops import losses
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(3e-3, "Adam's step size", low=0)
    max_grad_norm: float = traced(1.0, "bound on the gradient's global norm", above=0)
    weight_decay: float = traced(0.0, "decoupled, of all parameters (AdamW)", low=0)
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    aggregate: str = static("token", "how steps become one loss", choices=("token", "sequence"))
    batch_size: int = static(64, "demonstrations of a gradient step, B; of packed rows, rows", low=1)
    pack: int = static(0, "tokens of a row that holds several examples of a file; 0: each has a row of its own", low=0)
    model: Transformer = static(Transformer(), "the transformer of [model]")


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: the policy's parameters.
      opt_state: Adam's moments.
      key: typed PRNG key, advanced at every step; it decides which demonstrations come next.
    """

    params: Any
    opt_state: Any
    key: Array


def make(config: Config, env: Environment) -> Agent:
    """SFT on ``batch_size`` fresh demonstrations a step; steps are counted as if each took all of its ``T`` tokens.

    Raises:
      ValueError: an environment without demonstrations.
    """
    demonstration: Any = getattr(env, "demonstration", None)
    space = env.observation_space
    if demonstration is None or not isinstance(space, Tokens):
        raise ValueError("algo.name sft needs an environment of tokens that has demonstrations, such as tokens/addition")
    task: Any = getattr(env, "task", None)
    if config.pack and not hasattr(task, "packed"):
        raise ValueError("algo.pack packs the examples of a file; the environment makes its own: leave algo.pack at 0")
    packed = task.packed(config.pack) if config.pack else None
    policy = transformer(config.model, space)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))

    def begins_with(key: Array) -> Any:
        return policy.init(key, jax.vmap(env.reset)(key[None])[1])

    def init(key: Array, data: Any = None, params: Any = None) -> TrainState:
        key, params_key = jax.random.split(key)
        if params is None:
            params = begins_with(params_key)
        return TrainState(params, optimizer.init(params), key)

    def demonstrations(key: Array) -> tuple[Any, Array, Array]:
        """``(what is needed to predict them, words, mask)``, the last two ``[T, B]``."""
        if packed is None:
            batch = jax.vmap(demonstration)(jax.random.split(key, config.batch_size))
            return jax.tree.map(lambda x: x.swapaxes(0, 1), batch)
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
        gradient, metrics = jax.grad(loss, has_aux=True)(state.params, *demonstrations(batch_key), data)
        direction, opt_state = optimizer.update(gradient, state.opt_state)
        params = jax.tree.map(lambda p, d: p - config.learning_rate * (d + config.weight_decay * p), state.params, direction)
        return TrainState(params, opt_state, key), {**metrics, "grad_norm": optax.tree.norm(gradient)}

    tokens = config.pack or space.length - space.prompt
    return Agent(init, step, *acting(policy), env_steps=config.batch_size * tokens, policy=policy, begins_with=begins_with)
