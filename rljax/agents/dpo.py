"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) and its relatives: from pairs, without a reward.

The pairs come from a file, or from the policy that training starts from, labelled by the environment's reward. They are fixed, so
the reference's log-probabilities are computed once. Each loss is a function of `rljax.ops.losses`, where its paper is named:
DPO, conservative DPO (``smoothing``), robust, IPO and hinge in `dpo_loss`; KTO, ORPO and SimPO.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent, whole
from rljax.agents.on_policy import acting
from rljax.agents.preferences import Completions, Pairs, check_pairs, collect_pairs, log_probs
from rljax.envs import Environment, Tokens
from rljax.networks import Transformer, transformer
from rljax.ops import losses
from rljax.options import config, static, traced

LOSSES = ("sigmoid", "robust", "hinge", "ipo", "kto", "orpo", "simpo")


@config
class Config:
    learning_rate: float = traced(3e-4, "Adam's step size", low=0)
    beta: float = traced(0.1, "strength of the leash to the reference: of the margin in every loss but orpo", above=0)
    smoothing: float = traced(
        0.0, "probability that a label is wrong, of sigmoid (conservative DPO) and robust", low=0, high=0.49
    )
    gamma: float = traced(0.5, "the margin that simpo asks for", low=0)
    desirable_weight: float = traced(1.0, "of chosen completions in kto", low=0)
    undesirable_weight: float = traced(1.0, "of rejected completions in kto", low=0)
    odds_coef: float = traced(0.1, "weight of the odds ratio in orpo, lambda", low=0)
    likelihood_coef: float = traced(0.0, "adds the mean negative log-likelihood of chosen completions, so weighted", low=0)
    label_noise: float = traced(0.0, "share of the labels that are turned around", low=0, high=1)
    max_grad_norm: float = traced(1.0, "bound on the gradient's global norm", above=0)
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    loss: str = static("sigmoid", "which of the family", choices=LOSSES)
    ipo_over: str = static("mean", "log-ratios of ipo: per token, as in TRL, or summed, as in its paper", choices=("mean", "sum"))
    num_pairs: int = static(1024, "preference pairs, N", low=2)
    answers: int = static(2, "completions of a prompt, of which the best and the worst are a pair; of a file always 2", low=2)
    batch_size: int = static(64, "pairs of a gradient step, B", low=1)
    model: Transformer = static(Transformer(), "the transformer of [model]")


class TrainState(struct.PyTreeNode):
    """All that changes, and the pairs.

    Attributes:
      params: the policy's parameters.
      opt_state: Adam's moments.
      key: typed PRNG key, advanced at every step; it decides which pairs come next.
      pairs: see `Pairs`.
      reference: log-probabilities of the policy that training started from, see `Sums`.
    """

    params: Any
    opt_state: Any
    key: Array
    pairs: Pairs
    reference: "Sums"


class Sums(struct.PyTreeNode):
    """Log-probabilities of completions, summed over their words; float32 ``[N]``.

    Attributes:
      chosen, rejected: of the pairs.
      mismatched: of the next pair's chosen completion after a pair's prompt, for the baseline of kto; else zeros.
    """

    chosen: Array
    rejected: Array
    mismatched: Array


def make(config: Config, env: Environment) -> Agent:
    """DPO on ``batch_size`` pairs a step; steps are counted as if each of their completions took all of its ``T`` tokens.

    Raises:
      ValueError: an environment that is not one of tokens, smoothing with a loss that has none, or too few pairs in the file.
    """
    space = env.observation_space
    if not isinstance(space, Tokens):
        raise ValueError("algo.name dpo needs an environment of tokens, such as tokens/addition")
    if isinstance(config.smoothing, float) and config.smoothing and config.loss not in ("sigmoid", "robust"):
        raise ValueError(f'algo.smoothing is of the losses "sigmoid" and "robust"; with "{config.loss}" leave it at 0')
    check_pairs(env, config.num_pairs, "algo.num_pairs")
    policy = transformer(config.model, space)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))

    def begins_with(key: Array) -> Any:
        return policy.init(key, jax.vmap(env.reset)(key[None])[1])

    def init(key: Array, data: Any = None, params: Any = None) -> TrainState:
        key, params_key, pairs_key = jax.random.split(key, 3)
        if params is None:
            params = begins_with(params_key)
        reference = whole(params, data)
        pairs = collect_pairs(env, config.model, reference, pairs_key, config.num_pairs, config.answers, config.label_noise)
        sums = jax.lax.map(
            lambda pair: sums_of(reference, *pair),
            (pairs, mismatched(pairs, jnp.arange(config.num_pairs))),
            batch_size=config.batch_size,
        )
        return TrainState(params, optimizer.init(params), key, pairs, sums)

    def mismatched(pairs: Pairs, rows: Array) -> Completions:
        """The next pair's chosen completion after the prompt of each of some pairs."""
        prompt = pairs.chosen.context[rows, : space.prompt]
        following = jax.tree.map(lambda x: x[(rows + 1) % config.num_pairs], pairs.chosen)
        return Completions(jnp.concatenate([prompt, following.said], 1), following.mask)

    def sums_of(params: Any, pair: Pairs, other: Completions) -> Sums:
        """Of one pair."""

        def total(completions: Completions) -> Array:
            return log_probs(policy, params, jax.tree.map(lambda x: x[None], completions))[0].sum()

        return Sums(total(pair.chosen), total(pair.rejected), total(other) if config.loss == "kto" else jnp.zeros(()))

    def loss(trained: Any, pairs: Pairs, others: Completions, reference: Sums, data: Any) -> tuple[Array, dict[str, Any]]:
        sides = [pairs.chosen, pairs.rejected, *([others] if config.loss == "kto" else [])]
        together = jax.tree.map(lambda *xs: jnp.concatenate(xs), *sides)
        words, entropy = log_probs(policy, whole(trained, data), together)
        sums = jnp.split(words.sum(0), len(sides))
        sizes = [jnp.maximum(side.mask.sum(-1), 1) for side in sides]
        chosen, rejected = sums[0], sums[1]
        gain, pain = chosen - reference.chosen, rejected - reference.rejected  # h of the two sides
        nll = -chosen / sizes[0]

        def total(x: Array) -> tuple[Array, Array]:
            return jnp.where(pairs.counts, x, 0.0).sum(), pairs.counts.sum()

        def mean(x: Array) -> Array:
            numerator, count = total(x)
            return numerator / jnp.maximum(count, 1)

        if config.loss == "kto":
            baseline = mean(sums[2] - reference.mismatched)
            weights = (config.desirable_weight, config.undesirable_weight)
            is_chosen = jnp.ones(gain.shape, bool)
            value = losses.kto_loss(gain, is_chosen, baseline, config.beta, *weights)
            value += losses.kto_loss(pain, ~is_chosen, baseline, config.beta, *weights)
        elif config.loss == "orpo":
            value = nll + config.odds_coef * losses.orpo_loss(chosen / sizes[0], rejected / sizes[1])
        elif config.loss == "simpo":
            value = losses.simpo_loss(chosen / sizes[0], rejected / sizes[1], config.beta, config.gamma)
        elif config.loss == "ipo":
            per_word = config.ipo_over == "mean"
            margin = gain / sizes[0] - pain / sizes[1] if per_word else gain - pain
            value = losses.dpo_loss(margin, config.beta, "ipo")
        else:
            smoothing = config.smoothing if config.loss in ("sigmoid", "robust") else 0.0
            value = losses.dpo_loss(gain - pain, config.beta, config.loss, smoothing)  # type: ignore[arg-type]

        # What the loss takes for a reward: the log-ratio to the reference, or without one the mean log-probability of a word.
        better, worse = (chosen / sizes[0], rejected / sizes[1]) if config.loss in ("orpo", "simpo") else (gain, pain)
        metrics = {
            "loss/preference": total(value),
            "implicit_reward/chosen": total(config.beta * better),
            "implicit_reward/rejected": total(config.beta * worse),
            "implicit_reward/margin": total(config.beta * (better - worse)),
            "implicit_reward/accuracy": total((better > worse).astype(jnp.float32)),
            "log_prob/chosen": total(chosen),
            "log_prob/rejected": total(rejected),
            "entropy": losses.masked_mean(entropy, together.mask.T),
            "counted": pairs.counts.mean(),
        }
        return mean(value + config.likelihood_coef * nll), metrics

    def step(state: TrainState, data: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key, batch_key = jax.random.split(state.key)
        rows = jax.random.randint(batch_key, (config.batch_size,), 0, config.num_pairs)
        batch, reference = jax.tree.map(lambda x: x[rows], (state.pairs, state.reference))
        others = mismatched(state.pairs, rows)
        gradient, metrics = jax.grad(loss, has_aux=True)(state.params, batch, others, reference, data)
        direction, opt_state = optimizer.update(gradient, state.opt_state)
        params = jax.tree.map(lambda p, d: p - config.learning_rate * d, state.params, direction)
        return state.replace(params=params, opt_state=opt_state, key=key), {**metrics, "grad_norm": optax.tree.norm(gradient)}

    env_steps = 2 * config.batch_size * (space.length - space.prompt)
    return Agent(init, step, *acting(policy), env_steps, policy=policy, begins_with=begins_with, learns_from="examples")
