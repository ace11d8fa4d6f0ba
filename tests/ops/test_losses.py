import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.ops import losses


def surrogate_and_gradient(log_ratio, advantage, low, high, dual_clip=None):
    """Loss and its derivative by log_prob, at an old log-probability of -2."""

    def loss(log_prob):
        return losses.clipped_surrogate(log_prob, jnp.float32(-2.0), jnp.float32(advantage), low, high, dual_clip)

    return [float(x) for x in jax.value_and_grad(loss)(jnp.float32(log_ratio - 2.0))]


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "loss", "gradient"),
    [
        (1.5, -1.0, 0.2, 0.2, 1.5, 1.5),  # the bad action became likelier: pessimism keeps the gradient
        (1.5, 1.0, 0.2, 0.2, -1.2, 0.0),
        (0.5, 1.0, 0.2, 0.2, -0.5, -0.5),
        (0.5, -1.0, 0.2, 0.2, 0.8, 0.0),
        (1.1, 2.0, 0.2, 0.2, -2.2, -2.2),
        (1.0, 2.0, 0.2, 0.2, -2.0, -2.0),  # both branches tie: the gradient is whole, not half
        (1.0, 0.0, 0.2, 0.2, 0.0, 0.0),
        (1.25, 1.0, 0.2, 0.28, -1.25, -1.25),  # clip-higher
        (1.3, 1.0, 0.2, 0.28, -1.28, 0.0),
        (0.75, -1.0, 0.3, 0.2, 0.75, 0.75),
        (0.6, -1.0, 0.3, 0.2, 0.7, 0.0),
    ],
)
def test_surrogate_by_hand(ratio, advantage, low, high, loss, gradient):
    result = surrogate_and_gradient(np.log(ratio), advantage, low, high)
    np.testing.assert_allclose(result, [loss, gradient], rtol=1e-5, atol=1e-7)


def test_surrogate_of_a_ratio_beyond_float32_is_clipped():
    np.testing.assert_allclose(surrogate_and_gradient(100.0, 1.0, 0.2, 0.2), [-1.2, 0.0], rtol=1e-6)
    np.testing.assert_allclose(surrogate_and_gradient(-1000.0, -1.0, 0.2, 0.2), [0.8, 0.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (2.5, -1.0, 2.5, 2.5),
        (3.5, -1.0, 3.0, 0.0),  # the objective is not below 3 A
        (3.5, -2.0, 6.0, 0.0),
        (np.exp(99.0), -1.0, 3.0, 0.0),
        (0.5, -1.0, 0.8, 0.0),  # clipped below, as without
        (3.5, 1.0, -1.2, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (3.5, 0.0, 0.0, 0.0),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, gradient):
    result = surrogate_and_gradient(np.log(ratio), advantage, 0.2, 0.2, 3.0)
    np.testing.assert_allclose(result, [loss, gradient], rtol=1e-5, atol=1e-7)


def test_surrogate_keeps_the_elements_apart():
    log_prob = jnp.log(jnp.array([[1.5, 1.5], [0.5, 1.0]]))
    result = losses.clipped_surrogate(log_prob, jnp.zeros((2, 2)), jnp.array([[-1.0, 1.0], [1.0, 3.0]]), 0.2, 0.2)
    np.testing.assert_allclose(result, [[1.5, -1.2], [-0.5, -3.0]], rtol=1e-6)


# Log-ratios of three sequences of 2, 3 and 0 steps; what does not count is NaN.
LOG_RATIOS = np.array([[100.0, 0.1, np.nan], [-100.0, 0.2, np.nan], [np.nan, 0.6, np.nan]], np.float32)


@pytest.mark.parametrize("per_token", [False, True])
def test_log_ratios_of_sequences_by_hand(per_token):
    old = jnp.full(LOG_RATIOS.shape, 0.5)
    result = losses.sequence_log_ratio(jnp.asarray(LOG_RATIOS) + old, old, np.isfinite(LOG_RATIOS), per_token=per_token)
    np.testing.assert_allclose(result, [[0.0, 0.3, 0.0]] * 3, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("per_token", "expected"),
    [
        (False, [[6 / 2, 15 / 3, 0], [6 / 2, 15 / 3, 0], [0, 15 / 3, 0]]),  # of the mean, all steps get a share of all weights
        (True, [[1, 4, 0], [2, 5, 0], [0, 6, 0]]),
    ],
)
def test_gradients_of_log_ratios_of_sequences(per_token, expected):
    weights = jnp.array([[1.0, 4.0, 7.0], [2.0, 5.0, 8.0], [3.0, 6.0, 9.0]])
    mask = np.isfinite(LOG_RATIOS)

    def function(log_prob):
        return (weights * losses.sequence_log_ratio(log_prob, jnp.zeros((3, 3)), mask, per_token=per_token)).sum()

    np.testing.assert_allclose(jax.grad(function)(jnp.asarray(LOG_RATIOS)), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "floor", "weight"), [(0.5, 0.0, 0.5), (1.0, 0.0, 1.0), (4.0, 0.0, 1.28), (0.5, 0.8, 0.8), (np.exp(99.0), 0.0, 1.28)]
)
@pytest.mark.parametrize("advantage", [-2.0, 1.0])
def test_cispo_by_hand(ratio, floor, weight, advantage):
    def function(log_prob):
        return losses.cispo(log_prob, jnp.float32(-3.0 - np.log(ratio)), jnp.float32(advantage), 1.28, floor)

    # With a gradient through the ratio, the second would be another.
    result = jax.value_and_grad(function)(jnp.float32(-3.0))
    np.testing.assert_allclose(result, [3.0 * weight * advantage, -weight * advantage], rtol=1e-5)


@pytest.mark.parametrize(
    ("length", "cache", "penalty"), [(0, 4, 0), (6, 4, 0), (7, 4, -0.25), (10, 4, -1), (99, 4, -1), (9, 1, 0)]
)
def test_overlong_penalty_by_hand(length, cache, penalty):
    result = losses.overlong_penalty(jnp.array([length]), 10, cache)
    assert result.dtype == jnp.float32
    assert result.tolist() == [penalty]


def test_overlong_penalty_without_a_slope():
    assert jax.jit(losses.overlong_penalty)(jnp.array([9, 10, 11]), 10, 0).tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (3.0, 1.0, 2.0, 0.5, 1.0),  # unclipped error 1, clipped (1.5) 1/4: the larger counts
        (3.0, 1.0, 4.0, 3.125, 0.0),  # clipped error (1.5 - 4)^2 is larger, and is constant
        (1.25, 1.0, 2.0, 0.28125, -0.75),  # within the clip: plain squared error, with all of its gradient
        (-1.0, 1.0, 0.0, 0.5, -1.0),  # below the clip
    ],
)
def test_clipped_value_loss_by_hand(value, old, target, loss, gradient):
    def function(v):
        return losses.clipped_value_loss(v, jnp.float32(old), jnp.float32(target), 0.5)

    assert [float(x) for x in jax.value_and_grad(function)(value)] == [loss, gradient]


def test_inside_the_range_the_value_loss_is_the_plain_one():
    """Exactly, gradient included: rounding must not pass for clipping."""
    rng = np.random.default_rng(0)
    old, target = jnp.asarray(rng.normal(size=(2, 1000)), jnp.float32) * 37
    value = old + jnp.asarray(rng.uniform(-0.49, 0.49, 1000), jnp.float32)
    clipped = jax.value_and_grad(lambda v: losses.clipped_value_loss(v, old, target, 0.5).sum())(value)
    plain = jax.value_and_grad(lambda v: losses.squared_error(v, target).sum())(value)
    jax.tree.map(np.testing.assert_array_equal, clipped, plain)


def test_squared_error():
    np.testing.assert_array_equal(losses.squared_error(jnp.array([1.0, 4.0]), jnp.array([3.0, 4.0])), [2.0, 0.0])


@pytest.mark.parametrize("odd", range(3))
def test_wrong_shapes_raise(odd):
    arrays = [jnp.zeros((4, 2))] * 3
    arrays[odd] = jnp.zeros((4, 1))  # would broadcast
    with pytest.raises(AssertionError):
        losses.clipped_surrogate(*arrays, 0.2, 0.2)
    with pytest.raises(AssertionError):
        losses.cispo(*arrays, 0.2)
    with pytest.raises(AssertionError):
        losses.sequence_log_ratio(*arrays)
    with pytest.raises(AssertionError):
        losses.clipped_value_loss(*arrays, 0.2)
    if odd < 2:
        with pytest.raises(AssertionError):
            losses.squared_error(*arrays[:2])


# Three steps of four sequences, which count for 3, 2, 1 and no steps; what does not count is NaN.
VALUES = np.array([[1.0, 2.0, 3.0, np.nan], [4.0, 6.0, np.nan, np.nan], [7.0, np.nan, np.nan, np.nan]], np.float32)
MASK = np.isfinite(VALUES)
KINDS = ["token", "sequence", "sequence-sum", "constant"]


@pytest.mark.parametrize(
    ("how", "max_length", "numerator", "denominator"),
    [
        ("token", None, 23.0, 6.0),
        ("sequence", None, 11.0, 3.0),  # means of 4, 4 and 3; the empty sequence is none
        ("sequence-sum", None, 23.0, 3.0),
        ("constant", None, 23.0, 12.0),  # 4 sequences of up to 3 steps, the empty one too
        ("constant", 10, 23.0, 40.0),
        ("token", 10, 23.0, 6.0),
    ],
)
def test_aggregates_by_hand(how, max_length, numerator, denominator):
    result = losses.aggregate(jnp.asarray(VALUES), jnp.asarray(MASK), how, max_length)
    assert [x.dtype for x in result] == [jnp.float32] * 2
    np.testing.assert_array_equal(result, [numerator, denominator])


def test_masked_means_by_hand():
    values, mask = jnp.asarray(VALUES), jnp.asarray(MASK)
    assert losses.masked_mean(values, mask) == pytest.approx(23 / 6)
    assert losses.masked_mean(values, mask, "sequence") == pytest.approx(11 / 3)
    assert losses.masked_mean(values, mask, "constant", 10) == pytest.approx(23 / 40)
    assert losses.masked_mean(values, jnp.zeros_like(mask)) == 0.0


@pytest.mark.parametrize("how", KINDS)
def test_an_aggregate_is_the_mean_where_everything_counts(how):
    values = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    total, count = losses.aggregate(jnp.asarray(values), jnp.ones((5, 3), bool), how)
    expected = values.sum(0).mean() if how == "sequence-sum" else values.mean()
    assert total / count == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("how", "gradient"),
    [
        ("token", [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]),
        ("sequence", [[1 / 3, 1 / 2, 1, 0], [1 / 3, 1 / 2, 0, 0], [1 / 3, 0, 0, 0]]),
        ("sequence-sum", [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]),
        ("constant", [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]),
    ],
)
def test_masked_steps_get_no_gradient(how, gradient):
    result = jax.grad(lambda values: losses.aggregate(values, jnp.asarray(MASK), how)[0])(jnp.asarray(VALUES))
    np.testing.assert_allclose(result, gradient, rtol=1e-6)


@pytest.mark.parametrize(("how", "denominator"), [("token", 0.0), ("sequence", 0.0), ("sequence-sum", 0.0), ("constant", 6.0)])
def test_nothing_counts_for_nothing(how, denominator):
    values = jnp.full((3, 2), jnp.nan)
    numerator_of = jax.value_and_grad(lambda values: losses.aggregate(values, jnp.zeros((3, 2), bool), how), has_aux=True)
    (numerator, count), gradient = numerator_of(values)
    assert (numerator, count) == (0.0, denominator)
    np.testing.assert_array_equal(gradient, np.zeros((3, 2)))


@pytest.mark.parametrize("how", KINDS)
def test_micro_batches_add_up_to_the_whole(how):
    whole = losses.aggregate(jnp.asarray(VALUES), jnp.asarray(MASK), how)
    parts = [losses.aggregate(jnp.asarray(VALUES[:, part]), jnp.asarray(MASK[:, part]), how) for part in ([3, 1], [0], [2])]
    np.testing.assert_allclose(np.sum(parts, 0), whole, rtol=1e-6)


def test_aggregates_of_an_unknown_kind_or_of_wrong_shapes_raise():
    with pytest.raises(ValueError, match=r"how must be .* got 'mean'"):
        losses.aggregate(jnp.zeros((3, 2)), jnp.ones((3, 2), bool), "mean")  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        losses.aggregate(jnp.zeros((3, 2)), jnp.ones((3, 1), bool), "token")
    with pytest.raises(AssertionError):
        losses.aggregate(jnp.zeros(3), jnp.ones(3, bool), "token")


def test_dpo_by_hand():
    margin = jnp.array([0.0, 2.0, -1.0])
    sigmoid = 1 / (1 + np.exp(-0.5 * np.array(margin)))
    np.testing.assert_allclose(losses.dpo_loss(margin, 0.5), -np.log(sigmoid), rtol=1e-6)
    smoothed = -0.9 * np.log(sigmoid) - 0.1 * np.log(1 - sigmoid)
    np.testing.assert_allclose(losses.dpo_loss(margin, 0.5, smoothing=0.1), smoothed, rtol=1e-5)
    np.testing.assert_allclose(losses.dpo_loss(margin, 0.5, "ipo"), (np.array(margin) - 1.0) ** 2, rtol=1e-6)
    np.testing.assert_allclose(losses.dpo_loss(margin, 0.5, "hinge"), [1.0, 0.0, 1.5], rtol=1e-6)
    # Labels that are wrong with probability e: on average the robust loss is that of right labels.
    mixed = 0.8 * losses.dpo_loss(margin, 0.5, "robust", 0.2) + 0.2 * losses.dpo_loss(-margin, 0.5, "robust", 0.2)
    np.testing.assert_allclose(mixed, losses.dpo_loss(margin, 0.5), rtol=1e-5)
    with pytest.raises(ValueError, match='smoothing is of kind "sigmoid" and "robust", got \'ipo\''):
        losses.dpo_loss(margin, 0.5, "ipo", 0.1)
    with pytest.raises(ValueError, match="got 'bt'"):
        losses.dpo_loss(margin, 0.5, "bt")  # type: ignore[arg-type]


def test_kto_baseline_is_not_negative_and_has_no_gradient():
    ratio, good = jnp.array([0.4, -0.3]), jnp.array([True, False])
    np.testing.assert_allclose(losses.kto_loss(ratio, good, jnp.float32(-5.0), 1.0), losses.kto_loss(ratio, good, 0.0, 1.0))
    assert jax.grad(lambda z: losses.kto_loss(ratio, good, z, 1.0).sum())(0.5) == 0.0
    by_hand = [2 / (1 + np.exp(0.3 * 0.4)), 3 / (1 + np.exp(0.3 * 0.3))]
    np.testing.assert_allclose(losses.kto_loss(ratio, good, 0.0, 0.3, 2.0, 3.0), by_hand, rtol=1e-6)


@pytest.mark.parametrize("x", [-1e-6, -0.5, -0.7, -40.0])
def test_odds_are_accurate_at_both_ends(x):
    """log(p / (1 - p)), against float64."""
    chosen, rejected = jnp.float32(x), jnp.float32(-1.0)
    odds = x - np.log(-np.expm1(np.float64(np.float32(x)))) - (-1.0 - np.log(-np.expm1(-1.0)))
    loss, gradient = jax.value_and_grad(losses.orpo_loss)(chosen, rejected)
    np.testing.assert_allclose(loss, np.logaddexp(0.0, -odds), rtol=1e-5, atol=1e-9)
    assert np.isfinite(gradient)


def test_bradley_terry_by_hand():
    chosen, rejected = jnp.array([1.0, -0.5]), jnp.array([0.2, 0.5])
    plain = np.log1p(np.exp(-(np.array(chosen - rejected) - 0.3)))
    np.testing.assert_allclose(losses.bradley_terry_loss(chosen, rejected, 0.3), plain, rtol=1e-6)
    centred = plain + 0.1 * np.array([1.44, 0.0])
    np.testing.assert_allclose(losses.bradley_terry_loss(chosen, rejected, 0.3, 0.1), centred, rtol=1e-6)
    # A constant added to all scores changes the second term alone.
    np.testing.assert_allclose(losses.bradley_terry_loss(chosen + 7.0, rejected + 7.0, 0.3), plain, rtol=1e-5)
