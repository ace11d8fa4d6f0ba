"""Reward models: what is preferred, learned from pairs (Bradley & Terry 1952; Stiennon et al. 2020, arXiv 2009.01325).

The pairs come from a file, or from the policy that training starts from, labelled by the environment's own reward: what is
learned is then a proxy of it. Another experiment is paid by the model with ``reward_from``. An evaluation measures, on pairs that
are held out, how often the preferred completion has the higher score.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, whole
from rljax.agents.on_policy import acting
from rljax.agents.preferences import Pairs, check_pairs, collect_pairs
from rljax.envs import Environment, Tokens
from rljax.networks import Transformer, transformer
from rljax.networks.reward import RewardModel, reward_model
from rljax.ops import losses
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(1e-3, "Adam's step size", low=0)
    margin_coef: float = traced(0.0, "the scores of a pair should differ by its margin times this", low=0)
    centring: float = traced(0.01, "weight of the square of a pair's summed scores, which draws their mean to 0", low=0)
    label_noise: float = traced(0.0, "share of the labels that are turned around", low=0, high=1)
    weight_decay: float = traced(0.0, "decoupled, of all parameters (AdamW)", low=0)
    max_grad_norm: float = traced(1.0, "bound on the gradient's global norm", above=0)
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    level: str = static(
        "sequence", "a score at the last token, or a reward for each token, summed to the score", choices=("sequence", "token")
    )
    ensemble: int = static(1, "models, each with a head and an order of the pairs of its own, K", low=1)
    pays: str = static("mean", "of an ensemble's scores, what an agent is paid", choices=("mean", "lowest"))
    num_pairs: int = static(1024, "preference pairs to learn from, N", low=2)
    num_heldout: int = static(256, "further pairs, to measure on", low=1)
    answers: int = static(2, "completions of a prompt, of which the best and the worst are a pair; of a file always 2", low=2)
    batch_size: int = static(64, "pairs of a gradient step, B", low=1)
    model: Transformer = static(Transformer(), "the transformer of [model]")


class TrainState(struct.PyTreeNode):
    """All that changes, and the pairs.

    Attributes:
      params: of the models, each leaf ``[K, ...]``.
      opt_state: Adam's moments.
      key: typed PRNG key, advanced at every step; it decides which pairs come next.
      pairs: ``N`` to learn from, and the held-out ones after them.
      origin: parameters of the policy that sampled the pairs.
    """

    params: Any
    opt_state: Any
    key: Array
    pairs: Pairs
    origin: Any


def make(config: Config, env: Environment) -> Agent:
    """A reward model on ``batch_size`` pairs a step; steps are counted as if each completion took all of its ``T`` tokens.

    It acts as the policy that its pairs came from.

    Raises:
      ValueError: an environment that is not one of tokens, or too few pairs in the file.
    """
    space = env.observation_space
    if not isinstance(space, Tokens):
        raise ValueError("algo.name reward_model needs an environment of tokens, such as tokens/addition")
    check_pairs(env, config.num_pairs + config.num_heldout, "algo.num_pairs + algo.num_heldout")
    network = of_config(config, space)
    policy = transformer(config.model, space)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))
    num_pairs, batch_size = config.num_pairs, config.batch_size

    def begins_with(key: Array) -> Any:
        return policy.init(key, jax.vmap(env.reset)(key[None])[1])

    def init(key: Array, data: Any = None, params: Any = None) -> TrainState:
        key, origin_key, params_key, pairs_key = jax.random.split(key, 4)
        origin = begins_with(origin_key) if params is None else params
        # The members begin as the policy does, each with a head of its own.
        own = network.init(params_key)
        trained = {**jax.tree.map(lambda x: jnp.broadcast_to(x, (config.ensemble, *x.shape)), origin), "value": own["value"]}
        total, noise = num_pairs + config.num_heldout, config.label_noise
        pairs = collect_pairs(env, config.model, whole(origin, data), pairs_key, total, config.answers, noise)
        return TrainState(trained, optimizer.init(trained), key, pairs, origin)

    def scores(trained: Any, pairs: Pairs, data: Any) -> tuple[Array, Array]:
        """Of the chosen and the rejected completions, ``[K, N]`` each."""
        params = jax.vmap(lambda member: whole(member, data))(trained)
        return tuple(network.scores(params, side.context, side.lengths) for side in (pairs.chosen, pairs.rejected))  # type: ignore

    def loss(trained: Any, pairs: Pairs, data: Any) -> tuple[Array, dict[str, Any]]:
        """``pairs [K, B]``: each member has a batch of its own; summed over members, whose gradients do not mix."""
        chosen, rejected = jax.vmap(lambda member, own: scores(jax.tree.map(lambda x: x[None], member), own, data))(
            trained, pairs
        )
        chosen, rejected = chosen[:, 0], rejected[:, 0]
        value = losses.bradley_terry_loss(chosen, rejected, config.margin_coef * pairs.margin, config.centring)
        count = jnp.maximum(pairs.counts.sum(-1), 1)
        value = (jnp.where(pairs.counts, value, 0.0).sum(-1) / count).sum()
        return value, {"loss/preference": value / config.ensemble, "counted": pairs.counts.mean()}

    def step(state: TrainState, data: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key, batch_key, heldout_key = jax.random.split(state.key, 3)
        rows = jax.random.randint(batch_key, (config.ensemble, batch_size), 0, num_pairs)
        heldout = num_pairs + jax.random.randint(heldout_key, (batch_size,), 0, config.num_heldout)
        batch, others = (jax.tree.map(lambda x, r=r: x[r], state.pairs) for r in (rows, heldout))
        metrics = {f"heldout/{name}": x for name, x in quality(*scores(state.params, others, data), others.counts).items()}
        gradient, more = jax.grad(loss, has_aux=True)(state.params, batch, data)
        direction, opt_state = optimizer.update(gradient, state.opt_state)
        params = jax.tree.map(lambda p, d: p - config.learning_rate * (d + config.weight_decay * p), state.params, direction)
        metrics |= {**more, "grad_norm": optax.tree.norm(gradient)}
        return state.replace(params=params, opt_state=opt_state, key=key), metrics

    def measure(state: TrainState, key: Array, number: int, data: Any = None) -> Array:
        """1 for each of ``number`` held-out pairs, drawn with ``key``, whose chosen completion scores higher; NaN for a tie of
        labels."""
        rows = num_pairs + jax.random.randint(key, (number,), 0, config.num_heldout)
        pairs = jax.tree.map(lambda x: x[rows], state.pairs)
        chosen, rejected = (x.mean(0) for x in scores(state.params, pairs, data))
        return jnp.where(pairs.counts, (chosen > rejected).astype(jnp.float32), jnp.nan)

    start, act = acting(policy)

    def as_origin(function: Any) -> Any:
        return lambda state, *rest, **named: function(state.replace(params=state.origin), *rest, **named)

    env_steps = 2 * batch_size * (space.length - space.prompt)
    does = (as_origin(start), as_origin(act))
    return Agent(init, step, *does, env_steps, begins_with=begins_with, measure=measure, learns_from="examples")


def of_config(config: Config, space: Tokens) -> RewardModel:
    """The network of a config, for completions in ``space``."""
    return reward_model(config.model, space, config.ensemble, config.level == "token", config.pays == "lowest")


BINS = 10  # of the calibration error


def quality(chosen: Array, rejected: Array, counts: Array) -> dict[str, Any]:
    """How good scores ``[K, N]`` are on pairs, as ``(sum, count)`` over those that count; of the ensemble's mean.

    ``accuracy``; ``nll``, of the choices; ``calibration_error``, the expected one (Guo et al. 2017, arXiv 1706.04599, eq. 3), of
    the probability ``s(|r_chosen - r_rejected|)`` that the pair is ranked right; ``disagreement``, the deviation of the
    members' differences; ``score``, of all completions.
    """
    difference = (chosen - rejected).mean(0)
    right = difference > 0

    def total(x: Array) -> tuple[Array, Array]:
        return jnp.where(counts, x, 0.0).sum(), counts.sum()

    confidence = jax.nn.sigmoid(jnp.abs(difference))
    bins = jnp.clip(((confidence - 0.5) * 2 * BINS).astype(jnp.int32), 0, BINS - 1)
    gap = jnp.zeros(BINS).at[bins].add(jnp.where(counts, right - confidence, 0.0))
    return {
        "accuracy": total(right.astype(jnp.float32)),
        "nll": total(-jax.nn.log_sigmoid(difference)),
        "calibration_error": (jnp.abs(gap).sum(), counts.sum()),
        "disagreement": total((chosen - rejected).std(0)),
        "score": total(0.5 * (chosen + rejected).mean(0)),
    }
