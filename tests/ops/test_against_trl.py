"""Losses composed of our functions against those of TRL, which `benchmarks/golden/trl_losses.py` recorded.

Where the definitions differ, the test says how:

- TRL counts an empty completion as a sequence in "grpo"; here it leaves the denominator.
- TRL divides "dapo" and "cispo" by the tokens of the whole optimiser step: one batch here.
- TRL's ``delta`` bounds the ratio, `dual_clip` the objective where the advantage is negative: the same above ``1 + clip_high``.
- TRL multiplies the leash by the ratio unless ``use_bias_correction_kl`` is off, which turns k3's gradient into that of the
  reverse KL (DeepSeek-V3.2, arXiv 2512.02556).
- TRL's ``epsilon_high`` of CISPO is the cap itself.
- TRL has no per-token form of GSPO. Its value, and its gradient where advantages are the sequence's, are those of GSPO.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.ops import groups, kl, losses

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "trl_losses.json").read_text())
GRPO = GOLDEN["grpo"]
HOW = {"grpo": "sequence", "bnpo": "token", "dr_grpo": "constant", "dapo": "token", "cispo": "token"}
TOLERANCE = dict(rtol=1e-5, atol=1e-6)


def time_major(rows):
    return jnp.asarray(rows, jnp.float32).T


def mask_of(lengths, steps):
    return jnp.arange(steps)[:, None] < jnp.asarray(lengths)


def grpo_loss(log_prob, variant, per_token=False):
    """The loss of TRL's options."""
    options = variant["options"]
    loss_type = options["loss_type"]
    old, ref = time_major(GRPO["old_log_prob"]), time_major(GRPO["ref_log_prob"])
    mask = mask_of(variant["lengths"], len(old))
    advantages = jnp.broadcast_to(jnp.asarray(GRPO["advantages"]), old.shape)
    low = options.get("epsilon", 0.2)
    high = options.get("epsilon_high", low)
    log_ratio = log_prob - old
    if loss_type == "cispo":
        per_step = losses.cispo(log_prob, old, advantages, cap=high)
    elif options.get("importance_sampling_level") == "sequence":
        log_ratio = losses.sequence_log_ratio(log_prob, old, mask, per_token=per_token)
        per_step = losses.clipped_surrogate(log_ratio, jnp.zeros_like(log_ratio), advantages, low, high)
    else:
        per_step = losses.clipped_surrogate(log_prob, old, advantages, low, high, options.get("delta"))
    if beta := options.get("beta"):
        weight = jnp.exp(log_ratio) if options.get("use_bias_correction_kl", True) else 1.0
        per_step = per_step + beta * weight * kl.kl_estimate(log_prob, ref, "k3")
    return losses.masked_mean(per_step, mask, HOW[loss_type], GRPO["max_length"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GRPO["variants"])
def test_policy_losses_and_gradients(name):
    variant = GRPO["variants"][name]
    loss, gradient = jax.value_and_grad(grpo_loss)(time_major(GRPO["log_prob"]), variant)
    expected, expected_gradient = variant["loss"], np.array(variant["gradient"]).T
    if name == "grpo with an empty completion":  # a mean of 8 means, one of them of nothing
        expected, expected_gradient = expected * 8 / 7, expected_gradient * 8 / 7
    np.testing.assert_allclose(loss, expected, **TOLERANCE)
    np.testing.assert_allclose(gradient, expected_gradient, **TOLERANCE)


def test_gspo_per_token_is_gspo_where_advantages_are_the_sequences():
    variant = GRPO["variants"]["gspo"]
    loss, gradient = jax.value_and_grad(grpo_loss)(time_major(GRPO["log_prob"]), variant, per_token=True)
    np.testing.assert_allclose(loss, variant["loss"], **TOLERANCE)
    np.testing.assert_allclose(gradient, np.array(variant["gradient"]).T, **TOLERANCE)


def test_what_masked_steps_hold_is_ignored():
    log_prob = time_major(GRPO["log_prob"])
    for name, variant in GRPO["variants"].items():
        mask = mask_of(variant["lengths"], len(log_prob))
        gradient = jax.grad(grpo_loss)(log_prob, variant)
        np.testing.assert_array_equal(jnp.where(mask, 0.0, gradient), jnp.zeros(mask.shape), err_msg=name)
        with_garbage = jnp.where(mask, log_prob, -1e3)
        np.testing.assert_array_equal(grpo_loss(with_garbage, variant), grpo_loss(log_prob, variant), err_msg=name)


def test_likelihood():
    golden = GOLDEN["sft"]
    log_prob = time_major(golden["log_prob"])
    mask = mask_of(golden["lengths"], len(log_prob))
    loss, gradient = jax.value_and_grad(lambda x: losses.masked_mean(-x, mask, "token"))(log_prob)
    np.testing.assert_allclose(loss, golden["loss"], **TOLERANCE)
    np.testing.assert_allclose(gradient, np.array(golden["gradient"]).T, **TOLERANCE)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(scale):
    golden = GOLDEN["advantages"]
    rewards = np.array(golden["rewards"], np.float32)  # nan for a completion without a score
    np.testing.assert_allclose(groups.group_advantages(rewards, ~np.isnan(rewards), scale=scale), golden[scale], **TOLERANCE)


def test_overlong_penalty():
    golden = GOLDEN["overlong"]
    penalty = losses.overlong_penalty(jnp.array(golden["lengths"]), golden["max_length"], golden["cache"])
    np.testing.assert_allclose(penalty, golden["penalty"], **TOLERANCE)


PREFERENCES = GOLDEN["preferences"]


def preference_loss(log_prob, name):
    """The first half of the rows are chosen, the second half rejected."""
    options, beta = PREFERENCES["variants"][name]["options"], PREFERENCES["beta"]
    mask = mask_of(PREFERENCES["lengths"], len(log_prob))
    log_prob = jnp.where(mask, log_prob, 0.0)
    sums, means = log_prob.sum(0), log_prob.sum(0) / mask.sum(0)
    ref = jnp.where(mask, time_major(PREFERENCES["ref_log_prob"]), 0.0)
    ratio, mean_ratio = (log_prob - ref).sum(0), (log_prob - ref).sum(0) / mask.sum(0)
    pairs = len(sums) // 2

    def margin(x):
        return x[:pairs] - x[pairs:]

    smoothing = options.get("label_smoothing", 0.0)
    if name == "sigmoid_norm":
        return losses.dpo_loss(margin(mean_ratio), beta).mean()
    if name == "ipo":
        return losses.dpo_loss(margin(mean_ratio), beta, "ipo").mean()
    if name in ("sigmoid", "hinge", "robust"):
        return losses.dpo_loss(margin(ratio), beta, name, smoothing).mean()
    if name.startswith("cpo"):
        return losses.dpo_loss(margin(sums), beta, smoothing=smoothing).mean()
    if name == "simpo":
        return losses.simpo_loss(means[:pairs], means[pairs:], beta, options["simpo_gamma"]).mean()
    if name == "orpo":
        likelihood = losses.masked_mean(-log_prob[:, :pairs], mask[:, :pairs], "token")
        return likelihood + beta * losses.orpo_loss(means[:pairs], means[pairs:]).mean()
    baseline = jnp.mean(jnp.array(options["log_ratios_of_mismatched_pairs"]))
    is_desirable = jnp.arange(len(sums)) < pairs
    weight = options["undesirable_weight"]
    return losses.kto_loss(ratio, is_desirable, baseline, beta, undesirable_weight=weight).mean()


@pytest.mark.parametrize("name", PREFERENCES["variants"])
def test_preference_losses_and_gradients(name):
    variant = PREFERENCES["variants"][name]
    loss, gradient = jax.value_and_grad(preference_loss)(time_major(PREFERENCES["log_prob"]), name)
    np.testing.assert_allclose(loss, variant["loss"], **TOLERANCE)
    np.testing.assert_allclose(gradient, np.array(variant["gradient"]).T, **TOLERANCE)
