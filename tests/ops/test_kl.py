import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from rljax.ops.kl import adaptive_coefficient, kl_estimate, kl_reward

KINDS = ("k1", "k2", "k3")
LOGITS, REF_LOGITS = np.array([0.3, -1.0, 2.0, 0.1]), np.array([1.0, 0.5, 0.0, -0.7])
P, REF = np.exp(log_softmax(LOGITS)), np.exp(log_softmax(REF_LOGITS))


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.6931472), ("k2", 0.2402265), ("k3", 0.1931472)])
def test_values_by_hand(kind, expected):
    # d = log 2: k2 = (log 2)^2 / 2, k3 = 1/2 - 1 + log 2.
    assert float(kl_estimate(jnp.log(0.5), jnp.log(0.25), kind)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_give_exactly_zero(kind):
    log_prob = jnp.array([0.0, -1.0 / 3.0, -17.3, -1e4, 2.5])
    np.testing.assert_array_equal(kl_estimate(log_prob, log_prob, kind), np.zeros(5))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_by_enumeration(kind):
    expectation = np.sum(P * kl_estimate(jnp.log(P), jnp.log(REF), kind))
    np.testing.assert_allclose(expectation, np.sum(P * np.log(P / REF)), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_expected_gradient_by_enumeration(kind):
    """k1's vanishes, k2's is that of KL(pi || ref), k3's that of KL(ref || pi): what each does as a loss."""

    def expectation(logits):  # the samples are fixed: only the estimate is differentiated
        return jnp.sum(P * kl_estimate(jax.nn.log_softmax(logits), jnp.log(REF), kind))

    log_ratio = np.log(P / REF)
    expected = {"k1": np.zeros(4), "k2": P * (log_ratio - np.sum(P * log_ratio)), "k3": P - REF}[kind]
    np.testing.assert_allclose(jax.grad(expectation)(jnp.array(LOGITS, jnp.float32)), expected, atol=1e-6)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.floats(-50, 50, width=32))
def test_k2_and_k3_are_never_negative(difference):
    for kind in ("k2", "k3"):
        assert kl_estimate(jnp.float32(difference), jnp.float32(0.0), kind) >= 0.0


def test_k3_keeps_its_precision_near_zero():
    # expm1, or 1e-4 in float32 would be lost in the rounding of exp(-d) - 1.
    assert float(kl_estimate(jnp.float32(1e-4), jnp.float32(0.0), "k3")) == pytest.approx(5e-9, rel=0.01)


# Sequences of two steps, of three steps the second of which does not count, and of none.
REWARDS = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], np.float32)
MASK = np.array([[True, True, False], [True, False, False], [False, True, False]])
D = np.where(MASK, np.array([[0.5, 2.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 4.0, 0.0]]), np.nan).astype(np.float32)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token", [[0.95, 1.8, 3.0], [4.1, 5.0, 6.0], [7.0, 7.6, 9.0]]),
        ("sequence", [[1.0, 2.0, 3.0], [4.05, 5.0, 6.0], [7.0, 7.4, 9.0]]),
    ],
)
def test_rewards_less_the_kl_by_hand(how, expected):
    def function(log_prob):
        return kl_reward(jnp.asarray(REWARDS), log_prob, jnp.ones((3, 3)), jnp.asarray(MASK), 0.1, how)

    np.testing.assert_allclose(jax.jit(function)(D + 1.0), expected, rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda x: function(x).sum())(jnp.asarray(D)), np.zeros((3, 3)))


@pytest.mark.parametrize("how", ["token", "sequence"])
def test_returns_are_the_same_either_way(how):
    total = kl_reward(jnp.asarray(REWARDS), jnp.asarray(D), jnp.zeros((3, 3)), jnp.asarray(MASK), 0.1, how).sum(0)
    np.testing.assert_allclose(total, REWARDS.sum(0) - 0.1 * np.array([-0.5, 6.0, 0.0]), rtol=1e-6)


@pytest.mark.parametrize(
    ("kl", "factor"), [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (5.4, 0.99), (0.0, 0.98), (-3.0, 0.98)]
)  # a tenth of the horizon
def test_the_adaptive_coefficient_by_hand(kl, factor):
    result = jax.jit(adaptive_coefficient)(0.5, jnp.float32(kl), 6.0, 10_000.0, 1_000)
    np.testing.assert_allclose(result, 0.5 * factor, rtol=1e-6)


def test_wrong_arguments_raise():
    with pytest.raises(ValueError, match='"k1", "k2" or "k3", got \'k4\''):
        kl_estimate(jnp.zeros(2), jnp.zeros(2), "k4")
    with pytest.raises(AssertionError):
        kl_estimate(jnp.zeros(2), jnp.zeros(1), "k1")
    with pytest.raises(ValueError, match='"token" or "sequence", got \'step\''):
        kl_reward(*[jnp.zeros((2, 2))] * 3, jnp.ones((2, 2), bool), 0.1, "step")  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        kl_reward(jnp.zeros(2), jnp.zeros((2, 2)), jnp.zeros((2, 2)), jnp.ones((2, 2), bool), 0.1)
