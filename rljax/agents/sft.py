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
from rljax.ops import losses
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(3e-3, "Adam's step size", low=0)
    max_grad_norm: float = traced(1.0, "bound on the gradient's global norm", above=0)
    weight_decay: float = traced(0.0, "decoupled, of all parameters (AdamW)", low=0)
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    aggregate: str = static("token", "how steps become one loss", choices=("token", "sequence"))
    batch_size: int = static(64, "demonstrations of a gradient step, B", low=1)
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
    policy = transformer(config.model, space)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))

    def init(key: Array, data: Any = None, params: Any = None) -> TrainState:
        key, params_key = jax.random.split(key)
        if params is None:
            params = policy.init(params_key, jax.vmap(env.reset)(key[None])[1])
        return TrainState(params, optimizer.init(params), key)

    def loss(trained: Any, timesteps: Any, actions: Array, mask: Array, data: Any) -> tuple[Array, dict[str, Any]]:
        params = whole(trained, data)
        first, starts = jax.tree.map(lambda x: x[0], timesteps), jax.tree.map(lambda x: x[:-1], timesteps)
        distribution = policy.unroll(params, policy.start(params, first), starts).distribution
        log_prob, entropy = log_prob_and_entropy(distribution, actions)
        log_prob = jnp.where(mask, log_prob, 0.0)
        nll = losses.masked_mean(-log_prob, mask, config.aggregate)  # type: ignore[arg-type]
        is_likely = (log_prob > jnp.log(0.5)) | ~mask
        metrics = {
            "loss/nll": nll,
            "entropy": losses.masked_mean(entropy, mask),
            "sure": jnp.all(is_likely, 0).mean(),
            "length": mask.sum(0).mean(),
        }
        return nll, metrics

    def step(state: TrainState, data: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key, batch_key = jax.random.split(state.key)
        demonstrations = jax.vmap(demonstration)(jax.random.split(batch_key, config.batch_size))
        timesteps, actions, mask = jax.tree.map(lambda x: x.swapaxes(0, 1), demonstrations)
        gradient, metrics = jax.grad(loss, has_aux=True)(state.params, timesteps, actions, mask, data)
        direction, opt_state = optimizer.update(gradient, state.opt_state)
        params = jax.tree.map(lambda p, d: p - config.learning_rate * (d + config.weight_decay * p), state.params, direction)
        return TrainState(params, opt_state, key), {**metrics, "grad_norm": optax.tree.norm(gradient)}

    return Agent(init, step, *acting(policy), env_steps=config.batch_size * (space.length - space.prompt), policy=policy)
