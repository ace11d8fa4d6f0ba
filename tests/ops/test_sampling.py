import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from rljax.ops import sampling

HUGGING_FACE = json.loads((Path(__file__).parents[1] / "data" / "trl_losses.json").read_text())["cuts"]
LOWEST = np.finfo(np.float32).min
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
sample = jit(sampling.sample_inverse_cdf)
filter_logits = jit(sampling.filter_logits, static_argnames=("top_k",))
RANDOM = np.random.default_rng(0).normal(0, 2, (4, 50)).astype(np.float32)
BELOW_ONE = np.float32(1.0 - 2.0**-24)


def logits_of(probabilities):
    """Their logarithms, with an offset that must not matter."""
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.maximum(np.log(probabilities) - 3.0, LOWEST), jnp.float32)


def kept(logits):
    assert np.all(np.isfinite(logits))
    return (np.asarray(logits) > LOWEST).tolist()


def test_the_lowest_logit_has_no_probability():
    assert sampling.LOWEST == LOWEST
    np.testing.assert_array_equal(jax.nn.softmax(jnp.array([-1e4, sampling.LOWEST])), [1.0, 0.0])


def test_temperature_by_hand():
    result = sampling.apply_temperature(jnp.array([[2.0, -1.0, LOWEST]]), 0.5)
    np.testing.assert_array_equal(result, [[4.0, -2.0, LOWEST]])  # and not -inf
    result = jax.jit(sampling.apply_temperature)(jnp.array([[1.0, 2.0], [1.0, 2.0]]), jnp.array([[2.0], [1.0]]))
    np.testing.assert_array_equal(result, [[0.5, 1.0], [1.0, 2.0]])


PROBABILITIES = [0.4, 0.1, 0.25, 0.05, 0.2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"top_k": 2}, [1, 0, 1, 0, 0]),
        ({"top_k": 5}, [1, 1, 1, 1, 1]),
        ({"top_k": 50}, [1, 1, 1, 1, 1]),
        ({"top_p": 0.5}, [1, 0, 1, 0, 0]),  # 0.4 is too little
        ({"top_p": 0.39}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.66}, [1, 0, 1, 0, 1]),
        ({"top_p": 0.0}, [1, 0, 0, 0, 0]),
        ({"top_p": 1.0}, [1, 1, 1, 1, 1]),
        ({"min_p": 0.49}, [1, 0, 1, 0, 1]),
        ({"min_p": 0.0}, [1, 1, 1, 1, 1]),
        ({"min_p": 1.0}, [1, 0, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.75}, [1, 0, 1, 0, 0]),  # of what top-k leaves: 0.65 / 0.85 is above 0.75
        ({"top_p": 0.75}, [1, 0, 1, 0, 1]),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.6}, [1, 0, 1, 0, 0]),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_cuts_by_hand(options, expected, traced):
    logits = logits_of([PROBABILITIES, PROBABILITIES[::-1]])
    result = (filter_logits if traced else sampling.filter_logits)(logits, **options)
    assert kept(result) == [[bool(x) for x in expected], [bool(x) for x in expected[::-1]]]
    np.testing.assert_array_equal(np.where(result > LOWEST, result, logits), logits)  # what is left is as it was


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_ties_are_kept_together(options):
    logits = logits_of([[0.3, 0.1, 0.3, 0.3]])
    assert kept(sampling.filter_logits(logits, **options)) == [[True, False, True, True]]
    flat = jnp.zeros((2, 7))
    assert np.all(kept(sampling.filter_logits(flat, **options)))


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.9999999}, {"min_p": 0.0}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}]
)
def test_what_is_cut_stays_cut(options):
    logits = jnp.array([[LOWEST, 1.0, LOWEST, 2.0, -np.inf], [LOWEST, LOWEST, LOWEST, 0.5, LOWEST]], jnp.float32)
    result = np.asarray(sampling.filter_logits(logits, **options))
    assert np.all(result[np.asarray(logits) <= LOWEST] <= LOWEST)
    assert result[0, 3] == 2.0
    assert result[1, 3] == 0.5


@pytest.mark.parametrize("variant", HUGGING_FACE["variants"], ids=lambda v: ",".join(f"{k}={x}" for k, x in v["options"].items()))
def test_cuts_are_those_of_hugging_face(variant):
    options = dict(variant["options"])
    logits = sampling.apply_temperature(jnp.asarray(HUGGING_FACE["logits"], jnp.float32), options.pop("temperature", 1.0))
    probabilities = jax.nn.softmax(filter_logits(logits, **options))
    np.testing.assert_allclose(probabilities, variant["probabilities"], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(probabilities > 0, np.array(variant["probabilities"]) > 0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_cuts_against_sorting(scale):
    logits = RANDOM * np.float32(scale)
    ordered = np.sort(logits)[:, ::-1]
    np.testing.assert_array_equal(sampling.top_k_mask(jnp.asarray(logits), 7), logits >= ordered[:, [6]])
    probabilities = special.softmax(ordered.astype(np.float64), 1)
    count = (np.cumsum(probabilities, 1) - probabilities < 0.6).sum(1)
    np.testing.assert_array_equal(sampling.top_p_mask(jnp.asarray(logits), 0.6).sum(1), count)


@pytest.mark.parametrize("top_p", [1.0, 2.0])
def test_a_top_p_of_one_cuts_nothing(top_p):
    logits = jnp.array([[0.0, -25.0, LOWEST]])  # the second is lost in the sum of the two
    np.testing.assert_array_equal(sampling.filter_logits(logits, top_p=top_p), logits)
    np.testing.assert_array_equal(filter_logits(logits, top_p=top_p), logits)


def test_gradients_reach_what_is_left():
    def log_prob(logits):
        return jax.nn.log_softmax(sampling.filter_logits(logits, top_k=4, top_p=0.5, min_p=0.01))[0]

    logits = logits_of(PROBABILITIES)
    np.testing.assert_allclose(jax.grad(log_prob)(logits), [1 - 0.4 / 0.65, 0.0, -0.25 / 0.65, 0.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize("size", [2, 16, 64, 67, 509, 512, 1000, 1024])  # one level or two, blocks that divide or do not
def test_every_token_gets_its_share(size):
    # Uniform numbers on a grid: the share of a token is then its probability to the width of the grid.
    weights = np.random.default_rng(size).gamma(0.5, size=size)
    weights[::5] = 0.0
    probabilities = weights / weights.sum()
    count = 20_000
    logits = jnp.broadcast_to(logits_of(probabilities), (count, size))
    tokens = sample(logits, (jnp.arange(count) + 0.5) / count)
    assert tokens.dtype == jnp.int32
    shares = np.bincount(tokens, minlength=size) / count
    np.testing.assert_allclose(shares, probabilities, atol=1.01 / count)
    assert np.all(shares[::5] == 0)
    assert np.all(np.diff(tokens) >= 0)  # the inverse of a distribution function


@pytest.mark.parametrize("size", [16, 300])
def test_the_distribution_by_chi_square(size):
    probabilities = special.softmax(np.random.default_rng(size).normal(size=size))
    count = 100_000
    uniform = jax.random.uniform(jax.random.key(size), (count,))
    tokens = jax.lax.map(lambda u: sampling.sample_inverse_cdf(logits_of(probabilities), u), uniform, batch_size=10_000)
    p_value = stats.chisquare(np.bincount(tokens, minlength=size), probabilities * count).pvalue
    assert 0.001 < p_value < 0.999


@pytest.mark.parametrize("size", [5, 64, 100, 300, 4096, 5003])
@pytest.mark.parametrize("uniform", [0.0, 1e-30, 0.5, BELOW_ONE, 1.0])
def test_an_illegal_token_is_never_drawn(size, uniform):
    generator = np.random.default_rng(size)
    rows = 200
    legal = generator.random((rows, size)) < np.linspace(0.0, 1.0, rows)[:, None]
    legal[np.arange(rows), generator.integers(size, size=rows)] = True
    legal[: rows // 2, -size // 3 :] = False  # whole blocks
    legal[: rows // 2, 0] = True
    logits = np.where(legal, generator.normal(0, 5, (rows, size)), LOWEST).astype(np.float32)
    tokens = np.asarray(sample(logits, jnp.full(rows, uniform, jnp.float32)))
    assert np.all(legal[np.arange(rows), tokens])
    if uniform == 0.0:
        likely = np.exp(logits - logits.max(1, keepdims=True)) > 0
        np.testing.assert_array_equal(tokens, likely.argmax(1))
    np.testing.assert_array_equal(np.asarray(sample(np.where(legal, logits, -np.inf), jnp.full(rows, uniform))), tokens)


def test_rounding_draws_no_illegal_token():
    # Sums that grow where there is no weight, and one that is smaller than the target at the end.
    weights, cumulative = jnp.array([[1.0, 0.0, 1.0, 0.0]]), jnp.array([[1.0, 1.1, 2.0, 2.1]])
    for target, index, before in ((0.5, 0, 0.0), (1.05, 2, 1.1), (2.05, 2, 1.1), (3.0, 2, 1.1)):
        result = sampling._first_above(cumulative, jnp.array([[target]]), weights)
        np.testing.assert_array_equal(result, [[[index]], [[np.float32(before)]]])


@pytest.mark.parametrize("size", [7, 1024])
def test_a_certain_token_is_always_drawn(size):
    logits = jnp.full((size, size), LOWEST).at[jnp.arange(size), jnp.arange(size)].set(-1e30)
    for uniform in (0.0, 0.3, float(BELOW_ONE)):
        np.testing.assert_array_equal(sample(logits, jnp.full(size, uniform)), np.arange(size))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_any_number_of_rows(batch):
    logits = jnp.broadcast_to(logits_of(PROBABILITIES), (*batch, 5))
    assert sampling.sample_inverse_cdf(logits, jnp.full(batch, 0.45)).tolist() == np.full(batch, 1).tolist()


def test_wrong_arguments_raise():
    with pytest.raises(AssertionError):
        sampling.sample_inverse_cdf(jnp.zeros((4, 5)), jnp.zeros((1,)))
    with pytest.raises(AssertionError):
        sampling.sample_inverse_cdf(jnp.zeros((4, 5)), jnp.zeros((4, 5)))
    for function in (
        lambda x: sampling.apply_temperature(x, 0.5),
        lambda x: sampling.top_k_mask(x, 2),
        lambda x: sampling.top_p_mask(x, 0.5),
        lambda x: sampling.min_p_mask(x, 0.5),
        lambda x: sampling.sample_inverse_cdf(x, jnp.zeros(4)),
    ):
        with pytest.raises(AssertionError):
            function(jnp.zeros((4, 5), jnp.bfloat16))
