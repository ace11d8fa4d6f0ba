"""Losses as free functions on arrays; each returns one value per element and leaves the averaging to the caller."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax import Array


def clipped_surrogate(
    log_prob: Array,
    old_log_prob: Array,
    advantages: Array,
    clip_low: Array | float,
    clip_high: Array | float,
    dual_clip: Array | float | None = None,
) -> Array:
    """PPO's pessimistic surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), to be minimised.

    ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`` with ``rho = exp(log_prob - old_log_prob)``. ``clip_high`` above
    ``clip_low`` is DAPO's clip-higher (arXiv 2503.14476). All arrays ``[...]``, and so is the result.

    Args:
      dual_clip: where ``A < 0`` the objective is at least ``dual_clip * A``, and has no gradient below that (Ye et al. 2020,
        arXiv 1912.09729, eq. 5; 3 there). TRL's ``delta`` is the same wherever it is above ``1 + clip_high``.
    """
    chex.assert_equal_shape([log_prob, old_log_prob, advantages])
    ratio = _ratio(log_prob - old_log_prob)
    # A select, whose gradient is one too; that of a minimum divides, to share ties out. What is clipped has none.
    surrogate = ratio * advantages
    clipped = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages)
    loss = -jnp.where(surrogate > clipped, clipped, surrogate)
    if dual_clip is None:
        return loss
    return jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)


def sequence_log_ratio(log_prob: Array, old_log_prob: Array, mask: Array, *, per_token: bool = False) -> Array:
    """GSPO's log-ratio of a whole sequence (Zheng et al. 2025, arXiv 2507.18071, eq. 7), ``[T, B]``.

    ``log s = mean over the steps that count of (log_prob - old_log_prob)``, the same for all steps of a sequence; 0 for one
    without any. With "sequence" for `aggregate` it makes the paper's loss (eq. 5)::

        log_ratio = sequence_log_ratio(log_prob, old_log_prob, mask)
        clipped_surrogate(log_ratio, jnp.zeros_like(log_ratio), advantages, 3e-4, 4e-4)

    Args:
      log_prob: ``[T, B]``, and so are the others, time first.
      per_token: the value stays, and the gradient of a step goes to its own ``log_prob`` alone, which lets advantages differ
        within a sequence: ``sg(log s) + log_prob - sg(log_prob)`` (GSPO-token, eq. 14).
    """
    chex.assert_rank(log_prob, 2)
    chex.assert_equal_shape([log_prob, old_log_prob, mask])
    log_ratio = jnp.where(mask, log_prob - old_log_prob, 0.0)
    mean = jnp.broadcast_to(log_ratio.sum(0) / jnp.maximum(mask.sum(0), 1), mask.shape)
    if not per_token:
        return mean
    return jax.lax.stop_gradient(mean) + (log_ratio - jax.lax.stop_gradient(log_ratio))


def cispo(log_prob: Array, old_log_prob: Array, advantages: Array, cap: Array | float, floor: Array | float = 0.0) -> Array:
    """CISPO: REINFORCE with clipped importance weights (MiniMax 2025, arXiv 2506.13585, eq. 4), to be minimised.

    ``-sg(clip(rho, floor, cap)) A log_prob`` with ``rho = exp(log_prob - old_log_prob)``: a clipped weight keeps its gradient.
    All arrays ``[...]``, and so is the result.

    Args:
      cap: the largest weight itself: ``1 + epsilon_high`` of the paper and of verl, ``epsilon_high`` of TRL.
      floor: the smallest: 0 in the paper's experiments and in TRL, ``1 - epsilon_low`` in verl.
    """
    chex.assert_equal_shape([log_prob, old_log_prob, advantages])
    weight = jax.lax.stop_gradient(jnp.clip(_ratio(log_prob - old_log_prob), floor, cap))
    return -weight * advantages * log_prob


def overlong_penalty(lengths: Array, max_length: Array | int, cache: Array | int) -> Array:
    """DAPO's soft punishment of long answers (Yu et al. 2025, arXiv 2503.14476, eq. 13), to be added to the reward; ``[...]``.

    0 up to ``max_length - cache``, then linear to -1 at ``max_length``, and -1 beyond.

    Args:
      lengths: int ``[...]``, in tokens.
      cache: length of the slope; with 0, only what is longer than ``max_length`` is punished.
    """
    excess = (lengths - (max_length - cache)).astype(jnp.float32)
    return -jnp.clip(excess / jnp.maximum(cache, 1), 0.0, 1.0)


def squared_error(values: Array, targets: Array) -> Array:
    """``1/2 (V - R)^2``, ``[...]``."""
    chex.assert_equal_shape([values, targets])
    return 0.5 * jnp.square(values - targets)


def clipped_value_loss(values: Array, old_values: Array, targets: Array, clip: Array | float) -> Array:
    """``1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)``, ``[...]`` (Engstrom et al. 2020, arXiv 2005.12729)."""
    chex.assert_equal_shape([values, old_values, targets])
    loss = squared_error(values, targets)
    clipped = jax.lax.stop_gradient(squared_error(jnp.clip(values, old_values - clip, old_values + clip), targets))
    return jnp.where(clipped > loss, clipped, loss)


def masked_mean(
    values: Array,
    mask: Array,
    how: Literal["token", "sequence", "sequence-sum", "constant"] = "token",
    max_length: int | None = None,
) -> Array:
    """`aggregate`, divided out, ``[]``; 0 where nothing counts."""
    numerator, denominator = aggregate(values, mask, how, max_length)
    return numerator / jnp.maximum(denominator, 1.0)


def aggregate(
    values: Array, mask: Array, how: Literal["token", "sequence", "sequence-sum", "constant"], max_length: int | None = None
) -> tuple[Array, Array]:
    """One loss out of per-step values, as ``(numerator, denominator)``, both ``[]``.

    Numerators and denominators of micro-batches and devices are added up before the division: their gradient is then that of
    one large batch.

    Args:
      values: ``[T, B]``, time first.
      mask: bool ``[T, B]``, the steps that count. A sequence without any leaves the denominator too, "constant" apart.
      how: "token", the mean over steps (DAPO, arXiv 2503.14476); "sequence", the mean over sequences of their means (GRPO,
        arXiv 2402.03300); "sequence-sum", the mean over sequences of their sums, which is the policy gradient of the return;
        "constant", the sum over ``B * max_length`` (Dr. GRPO, arXiv 2503.20783).
      max_length: of "constant"; T by default.

    Raises:
      ValueError: an unknown ``how``.
    """
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, mask])
    values = jnp.where(mask, values, 0.0)
    lengths = mask.sum(0)
    nonempty = (lengths > 0).sum().astype(jnp.float32)
    if how == "token":
        return values.sum(), lengths.sum().astype(jnp.float32)
    if how == "sequence":
        return (values.sum(0) / jnp.maximum(lengths, 1)).sum(), nonempty
    if how == "sequence-sum":
        return values.sum(), nonempty
    if how == "constant":
        return values.sum(), jnp.float32(values.shape[1] * (max_length or values.shape[0]))
    raise ValueError(f'how must be "token", "sequence", "sequence-sum" or "constant", got {how!r}')


def _ratio(log_ratio: Array) -> Array:
    """``exp``, but finite: inf would make the zero gradient of a clipped ratio NaN."""
    return jnp.exp(jnp.minimum(log_ratio, 80.0))


def dpo_loss(
    margin: Array, beta: Array | float, kind: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid", smoothing: float = 0.0
) -> Array:
    """Direct preference optimisation of pairs, ``[B]``, from ``margin = h_chosen - h_rejected`` ``[B]``.

    ``h = log pi - log pi_ref`` of a completion, summed over its tokens; for "ipo" Azar et al. sum too, and TRL takes the mean.
    ``smoothing`` is the probability that a label is wrong, below 0.5.

    - "sigmoid": ``-log s(beta D)`` (Rafailov et al. 2023, arXiv 2305.18290, eq. 7); with ``smoothing`` e it is conservative DPO,
      ``-(1 - e) log s(beta D) - e log s(-beta D)`` (Mitchell 2023).
    - "robust": ``(-(1 - e) log s(beta D) + e log s(-beta D)) / (1 - 2 e)``, unbiased under wrong labels (Chowdhury et al. 2024,
      arXiv 2403.00409, eq. 12).
    - "hinge": ``max(0, 1 - beta D)`` (Zhao et al. 2023, arXiv 2305.10425).
    - "ipo": ``(D - 1 / (2 beta))^2`` (Azar et al. 2023, arXiv 2310.12036, eq. 17).

    Raises:
      ValueError: an unknown ``kind``, or smoothing with one that has none.
    """
    if kind in ("hinge", "ipo") and smoothing:
        raise ValueError(f'smoothing is of kind "sigmoid" and "robust", got {kind!r}')
    right, wrong = -jax.nn.log_sigmoid(beta * margin), -jax.nn.log_sigmoid(-beta * margin)
    if kind == "sigmoid":
        return (1.0 - smoothing) * right + smoothing * wrong
    if kind == "robust":
        return ((1.0 - smoothing) * right - smoothing * wrong) / (1.0 - 2.0 * smoothing)
    if kind == "hinge":
        return jax.nn.relu(1.0 - beta * margin)
    if kind == "ipo":
        return jnp.square(margin - 0.5 / beta)
    raise ValueError(f'kind must be "sigmoid", "robust", "hinge" or "ipo", got {kind!r}')


def kto_loss(
    log_ratio: Array,
    is_desirable: Array,
    baseline: Array,
    beta: Array | float,
    desirable_weight: Array | float = 1.0,
    undesirable_weight: Array | float = 1.0,
) -> Array:
    """Kahneman-Tversky optimisation of single completions, ``[B]`` (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8).

    ``w_d (1 - s(beta (h - z)))`` of a desirable one, ``w_u (1 - s(beta (z - h)))`` of another.

    Args:
      log_ratio: ``h = log pi - log pi_ref``, summed over the completion, ``[B]``.
      is_desirable: bool ``[B]``.
      baseline: ``z``, scalar: the mean of ``h`` over completions that belong to other prompts, an estimate of the KL. It is taken
        at 0 or above, and no gradient passes.
    """
    chex.assert_equal_shape([log_ratio, is_desirable])
    baseline = jax.lax.stop_gradient(jnp.maximum(baseline, 0.0))
    gain = beta * (log_ratio - baseline)
    return jnp.where(is_desirable, desirable_weight * jax.nn.sigmoid(-gain), undesirable_weight * jax.nn.sigmoid(gain))


def orpo_loss(chosen: Array, rejected: Array) -> Array:
    """The odds-ratio penalty of pairs, ``[B]`` (Hong et al. 2024, arXiv 2403.07691, eq. 7).

    ``-log s(log(odds_chosen / odds_rejected))`` with ``odds = p / (1 - p)`` and ``log p`` the *mean* log-probability of a
    completion's tokens, ``[B]``. ORPO adds it, weighted, to the likelihood of the chosen completions (eq. 6).
    """
    chex.assert_equal_shape([chosen, rejected])
    log_odds = (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))
    return -jax.nn.log_sigmoid(log_odds)


def simpo_loss(chosen: Array, rejected: Array, beta: Array | float, gamma: Array | float) -> Array:
    """SimPO of pairs, ``[B]``: no reference (Meng et al. 2024, arXiv 2405.14734, eq. 6).

    ``-log s(beta (chosen - rejected) - gamma)`` of the *mean* log-probabilities of the completions' tokens, ``[B]``.
    """
    chex.assert_equal_shape([chosen, rejected])
    return -jax.nn.log_sigmoid(beta * (chosen - rejected) - gamma)


def bradley_terry_loss(chosen: Array, rejected: Array, margin: Array | float = 0.0, centring: Array | float = 0.0) -> Array:
    """A reward model's loss on pairs, ``[B]``: the negative log-likelihood of the choice (Bradley & Terry 1952).

    ``-log s(r_chosen - r_rejected - margin) + centring (r_chosen + r_rejected)^2`` of scores ``[B]``. ``margin`` says how much
    better the chosen one is (Touvron et al. 2023, arXiv 2307.09288, eq. 2); ``centring`` draws scores, which the first term knows
    up to a constant only, to a mean of 0 (Eisenstein et al. 2023, arXiv 2312.09244, section 2).
    """
    chex.assert_equal_shape([chosen, rejected])
    return -jax.nn.log_sigmoid(chosen - rejected - margin) + centring * jnp.square(chosen + rejected)


def _log1mexp(x: Array) -> Array:
    """``log(1 - exp(x))`` of ``x < 0``, accurate at both ends (Maechler 2012)."""
    near = x > -0.6931472
    return jnp.where(near, jnp.log(-jnp.expm1(jnp.where(near, x, -1.0))), jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))


def expectile(error: Array, tau: Array | float) -> Array:
    """``|tau - 1[error < 0]| error^2``, elementwise: least where ``error = target - value`` has the expectile tau of the targets.

    Newey & Powell 1987; Kostrikov et al. 2021, arXiv 2110.06169, eq. 3.
    """
    return jnp.abs(tau - (error < 0).astype(error.dtype)) * jnp.square(error)
