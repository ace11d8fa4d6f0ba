import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats

from rljax.networks import Categorical, EpsilonGreedy, Gaussian, MultiCategorical, TanhGaussian, TokenCategorical
from rljax.networks.distributions import mask_logits, pick

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
log_prob, entropy, to_action = (
    jit(lambda distribution, x: distribution.log_prob(x)),
    jit(lambda distribution: distribution.entropy()),
    jit(lambda distribution, x: distribution.to_action(x)),
)
NVEC = (2, 3, 2)
ALL = np.array(list(itertools.product(*map(range, NVEC))))  # the 12 joint actions
LOGITS = np.random.default_rng(0).normal(0.0, 2.0, (6, 7)).astype(np.float32)
MASK = np.random.default_rng(1).random((6, 7)) < 0.5
MASK[:, [0, 2, 5]] = True  # one legal action at least in each part


def tanh_gaussian(mean, std, low=-2.0, high=3.0):
    """One-dimensional, batched as ``mean`` ``[...]`` is."""
    mean, log_std, low, high = (np.broadcast_to(x, np.shape(mean)) for x in (mean, np.log(std), low, high))
    return TanhGaussian(*(np.asarray(x, np.float32)[..., None] for x in (mean, log_std, low, high)))


# Categorical


@pytest.mark.parametrize("mask", [None, MASK])
def test_categorical_matches_scipy_over_the_legal_actions(mask):
    distribution = Categorical(mask_logits(jnp.asarray(LOGITS), mask))
    log_probs = log_prob(distribution, np.tile(np.arange(7)[:, None], (1, 6)))  # [action, row]
    entropies = entropy(distribution)
    for row in range(6):
        legal = np.ones(7, bool) if mask is None else mask[row]
        np.testing.assert_allclose(log_probs[legal, row], scipy.special.log_softmax(LOGITS[row, legal]), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(np.exp(log_probs[~legal, row]), 0.0)
        expected = scipy.stats.entropy(scipy.special.softmax(LOGITS[row, legal]))
        np.testing.assert_allclose(entropies[row], expected, rtol=1e-5)
    np.testing.assert_allclose(np.exp(log_probs).sum(0), 1.0, rtol=1e-6)


def multi_log_prob(logits):
    """Of all joint actions, ``[12, rows]``."""
    return np.asarray(log_prob(MultiCategorical(logits, NVEC), np.tile(ALL[:, None], (1, len(logits), 1))))


@pytest.mark.parametrize("mask", [None, MASK])
def test_multi_categorical_sums_to_one_and_factorises(mask):
    logits = mask_logits(jnp.asarray(LOGITS), mask)
    log_probs = multi_log_prob(logits)
    np.testing.assert_allclose(np.exp(log_probs).sum(0), 1.0, rtol=1e-6)
    parts = [scipy.special.softmax(np.float64(part), -1) for part in np.split(np.asarray(logits), np.cumsum(NVEC)[:-1], axis=1)]
    product = np.prod([part[:, choice] for part, choice in zip(parts, ALL.T, strict=True)], 0).T
    np.testing.assert_allclose(np.exp(log_probs), product, rtol=1e-5, atol=1e-12)
    expected = np.sum([scipy.stats.entropy(part, axis=-1) for part in parts], 0)
    np.testing.assert_allclose(entropy(MultiCategorical(logits, NVEC)), expected, rtol=1e-5)


def test_one_legal_action_has_no_log_prob_no_entropy_and_no_gradient():
    def log_prob_and_entropy(logits):
        one, many = jnp.eye(3, dtype=bool)[1], jnp.array([1, 0, 0, 0, 1, 0, 1], bool)
        single = Categorical(mask_logits(logits[:3], one))
        multi = MultiCategorical(mask_logits(logits, many), NVEC)
        action = jnp.array([0, 2, 1])
        return jnp.stack([single.log_prob(jnp.int32(1)), single.entropy(), multi.log_prob(action), multi.entropy()])

    value_and_jacobian = jax.jit(lambda logits: (log_prob_and_entropy(logits), jax.jacobian(log_prob_and_entropy)(logits)))
    for logits in (LOGITS[0], 1000 * LOGITS[1]):
        value, jacobian = value_and_jacobian(logits)
        np.testing.assert_array_equal(value, np.zeros(4))
        np.testing.assert_array_equal(jacobian, np.zeros((4, 7)))


def test_a_row_without_legal_actions_stays_finite():
    def everything(logits):
        distribution = Categorical(mask_logits(logits, jnp.zeros(7, bool)))
        return jnp.stack([distribution.log_prob(jnp.int32(3)), distribution.entropy()])

    value, jacobian = jit(lambda logits: (everything(logits), jax.jacobian(everything)(logits)))(LOGITS[0])
    np.testing.assert_allclose(value, [-np.log(7), np.log(7)], rtol=1e-6)
    np.testing.assert_array_equal(jacobian, np.zeros((2, 7)))


def test_illegal_actions_get_no_gradient():
    def loss(logits):
        distribution = Categorical(mask_logits(logits, MASK))
        return jnp.sum(distribution.log_prob(jnp.zeros(6, int)) + distribution.entropy())

    gradient = np.asarray(jit(jax.grad(loss))(LOGITS))
    assert np.all(np.isfinite(gradient))
    np.testing.assert_array_equal(gradient[~MASK], 0.0)
    assert np.abs(gradient[MASK]).max() > 0.01


@functools.partial(jit, static_argnums=1)
def _draw(distribution, n):
    return jax.vmap(distribution.sample)(jax.random.split(jax.random.key(0), n))


def draw(distribution, n):
    """Samples ``[n, ...]``."""
    return np.asarray(_draw(distribution, n))


def test_illegal_actions_are_never_sampled():
    logits = mask_logits(jnp.where(MASK, -50.0, 50.0), MASK)  # however much the network wants them
    for row, actions in enumerate(draw(Categorical(logits), 10_000).T):
        assert set(actions) == set(np.flatnonzero(MASK[row]))
    joint = draw(MultiCategorical(logits, NVEC), 10_000)
    for part, start in enumerate([0, 2, 5]):
        actions = joint[:, :, part] + start
        for row in range(6):
            assert set(actions[:, row]) == set(np.flatnonzero(MASK[row, start : start + NVEC[part]]) + start)


def test_categorical_sample_frequencies():
    distribution = Categorical(mask_logits(jnp.asarray(LOGITS), MASK))
    for row, actions in enumerate(draw(distribution, 20_000).T):
        legal = np.flatnonzero(MASK[row])
        expected = 20_000 * scipy.special.softmax(np.float64(LOGITS[row, legal]))
        assert scipy.stats.chisquare(np.bincount(actions, minlength=7)[legal], expected).pvalue > 1e-3


def test_multi_categorical_sample_frequencies():
    logits = 0.5 * jnp.asarray(LOGITS[:1])
    actions = draw(MultiCategorical(logits, NVEC), 20_000)[:, 0]
    counts = np.bincount(np.ravel_multi_index(actions.T, NVEC), minlength=12)
    expected = np.exp(multi_log_prob(logits)[:, 0], dtype=np.float64)
    assert scipy.stats.chisquare(counts, 20_000 * expected / expected.sum()).pvalue > 1e-3


def test_categorical_modes():
    logits = jnp.array([[0.0, 5.0, 1.0, 2.0, 3.0, 1.0, -1.0]])
    mask = jnp.array([True, False, True, True, False, True, True])
    assert Categorical(logits).mode() == 1
    assert Categorical(mask_logits(logits, mask)).mode() == 3
    np.testing.assert_array_equal(MultiCategorical(logits, NVEC).mode(), [[1, 2, 0]])
    np.testing.assert_array_equal(MultiCategorical(mask_logits(logits, mask), NVEC).mode(), [[0, 1, 0]])


# Epsilon-greedy

EPSILON = jnp.array([0.0, 1.0, 0.3, 0.8, 0.05, 1.0])  # one for each row of LOGITS
probabilities = jit(lambda distribution: distribution.probabilities())


def epsilon_greedy(epsilon):
    return EpsilonGreedy(mask_logits(jnp.asarray(LOGITS), jnp.asarray(MASK)), jnp.asarray(epsilon))


def test_epsilon_greedy_probabilities_by_hand():
    # Three legal actions, the third is the best of them; the fourth would be better.
    values = mask_logits(jnp.tile(jnp.array([1.0, 2.0, 3.0, 4.0]), (3, 1)), jnp.array([True, True, True, False]))
    distribution = EpsilonGreedy(values, jnp.array([0.0, 0.3, 1.0]))
    expected = np.array([[0.0, 0.0, 1.0, 0.0], [0.1, 0.1, 0.8, 0.0], [1 / 3, 1 / 3, 1 / 3, 0.0]])
    np.testing.assert_allclose(probabilities(distribution), expected, rtol=1e-6)
    np.testing.assert_array_equal(distribution.mode(), [2, 2, 2])
    np.testing.assert_allclose(log_prob(distribution, jnp.full(3, 2)), np.log([1.0, 0.8, 1 / 3]), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(log_prob(distribution, jnp.zeros(3, int)), [-np.inf, np.log(0.1), np.log(1 / 3)], rtol=1e-6)
    np.testing.assert_array_equal(log_prob(distribution, jnp.full(3, 3)), -np.inf)
    expected = [0.0, -0.8 * np.log(0.8) - 0.2 * np.log(0.1), np.log(3)]
    np.testing.assert_allclose(entropy(distribution), expected, rtol=1e-6, atol=1e-7)


def test_epsilon_greedy_without_a_mask():
    distribution = EpsilonGreedy(jnp.array([[1.0, 5.0, 2.0, 0.0]]), jnp.float32(0.4))
    np.testing.assert_allclose(distribution.probabilities(), [[0.1, 0.7, 0.1, 0.1]], rtol=1e-6)


def test_epsilon_greedy_frequencies():
    actions, expected = draw(epsilon_greedy(EPSILON), 20_000), np.asarray(probabilities(epsilon_greedy(EPSILON)), np.float64)
    np.testing.assert_allclose(expected.sum(1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(expected[~MASK], 0.0)
    expected /= expected.sum(1, keepdims=True)  # a chi-square in float64 takes nothing less
    for row in range(1, 6):
        counts = np.bincount(actions[:, row], minlength=7)
        np.testing.assert_array_equal(counts[~MASK[row]], 0)
        assert scipy.stats.chisquare(counts[MASK[row]], 20_000 * expected[row, MASK[row]]).pvalue > 1e-3
    np.testing.assert_array_equal(actions[:, 0], np.argmax(np.where(MASK[0], LOGITS[0], -np.inf)))  # epsilon 0
    for row in (1, 5):  # epsilon 1
        np.testing.assert_allclose(expected[row, MASK[row]], 1 / MASK[row].sum(), rtol=1e-6)


def test_epsilon_may_be_one_number_for_all_rows():
    one, many = epsilon_greedy(0.3), epsilon_greedy(jnp.full(6, 0.3))
    np.testing.assert_array_equal(one.sample(jax.random.key(0)), many.sample(jax.random.key(0)))
    np.testing.assert_array_equal(probabilities(one), probabilities(many))


# Picking


def test_pick_is_take_along_axis_in_value_and_gradient():
    values, index = jnp.asarray(LOGITS).reshape(2, 3, 7), jnp.array([[0, 6, 3], [3, 1, 1]])
    weights = jnp.arange(1.0, 7.0).reshape(2, 3)  # so that every element has a gradient of its own

    def ours(values):
        return jnp.sum(weights * pick(values, index)), pick(values, index)

    def theirs(values):
        picked = jnp.take_along_axis(values, index[..., None], -1)[..., 0]
        return jnp.sum(weights * picked), picked

    for function in (jnp.asarray, lambda values: mask_logits(values, jnp.asarray(MASK).reshape(2, 3, 7))):
        a, b = jit(lambda x: [jax.grad(f, has_aux=True)(x) for f in (ours, theirs)])(function(values))
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_pick_does_not_look_at_the_others():
    values = jnp.array([[1.0, jnp.nan, jnp.inf], [-jnp.inf, 2.0, jnp.nan]])
    np.testing.assert_array_equal(pick(values, jnp.array([0, 1])), [1.0, 2.0])


# All five

DISTRIBUTIONS = {
    "categorical": Categorical(jnp.asarray(LOGITS)),
    "epsilon_greedy": epsilon_greedy(jnp.full(6, 0.5)),
    "multi_categorical": MultiCategorical(jnp.asarray(LOGITS), NVEC),
    "gaussian": Gaussian(*(np.full((6, 2), x, np.float32) for x in (1.0, -0.5, -1.0, 1.0))),
    "tanh_gaussian": TanhGaussian(*(np.full((6, 2), x, np.float32) for x in (1.0, -0.5, -1.0, 1.0))),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_sample_is_its_noise_transformed(name):
    distribution, key = DISTRIBUTIONS[name], jax.random.key(3)
    sample, again, mode = jit(lambda d: (d.sample(key), d.from_noise(d.noise(key)), d.mode()))(distribution)
    np.testing.assert_array_equal(sample, again)
    assert sample.dtype == (jnp.float32 if "gaussian" in name else jnp.int32)
    assert log_prob(distribution, sample).shape == entropy(distribution).shape == (6,)
    assert mode.shape == sample.shape == to_action(distribution, sample).shape


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_noise_needs_shapes_alone(name):
    # A rollout draws the noise of all its steps before it knows the logits.
    noise = jit(lambda distribution: distribution.noise(jax.random.key(3)))
    other = jax.tree.map(lambda x: 3.0 - x, DISTRIBUTIONS[name])
    np.testing.assert_array_equal(noise(DISTRIBUTIONS[name]), noise(other))


# Gaussian


def test_gaussian_matches_scipy():
    rng = np.random.default_rng(2)
    mean, log_std, x = rng.normal(size=(3, 5, 4)).astype(np.float32)
    distribution = Gaussian(mean, log_std, -np.ones_like(mean), np.ones_like(mean))
    reference = scipy.stats.norm(np.float64(mean), np.exp(np.float64(log_std)))
    np.testing.assert_allclose(log_prob(distribution, x), reference.logpdf(x).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(entropy(distribution), reference.entropy().sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(distribution.mode(), mean)


def test_gaussian_samples_are_normal():
    distribution = Gaussian(*(np.array([x], np.float32) for x in (2.0, np.log(0.3), -1.0, 1.0)))
    assert scipy.stats.kstest(draw(distribution, 20_000)[:, 0], scipy.stats.norm(2.0, 0.3).cdf).pvalue > 1e-3


def test_gaussian_actions_are_clipped_and_samples_are_not():
    distribution = Gaussian(*(np.array([[x, x]], np.float32) for x in (0.0, 0.0, -2.0, 3.0)))
    sample = np.array([[-7.0, 4.0]], np.float32)
    np.testing.assert_array_equal(to_action(distribution, sample), [[-2.0, 3.0]])
    np.testing.assert_allclose(log_prob(distribution, sample), scipy.stats.norm.logpdf(sample).sum(-1), rtol=1e-6)


# TanhGaussian


def pre_tanh(action, low=-2.0, high=3.0):
    return np.arctanh(2 * (action - low) / (high - low) - 1)


def test_tanh_gaussian_density_integrates_to_one_over_the_box():
    # In the action's own units, over an asymmetric box.
    for mean, std in [(0.0, 0.5), (0.7, 0.8), (-1.0, 0.3)]:
        actions = np.linspace(-2, 3, 20_001)[1:-1]
        distribution = tanh_gaussian(np.full(len(actions), mean), std)
        density = np.exp(log_prob(distribution, pre_tanh(actions)[:, None]))
        assert scipy.integrate.simpson(density, x=actions) == pytest.approx(1.0, abs=1e-4)


def test_tanh_gaussian_density_is_the_derivative_of_its_distribution_function():
    actions, step = np.linspace(-1.9, 2.9, 49), 1e-5
    for mean, std in [(0.0, 0.5), (0.7, 1.5), (-1.0, 0.3)]:
        above, below = (scipy.stats.norm.cdf(pre_tanh(actions + d), mean, std) for d in (step, -step))
        density = np.exp(log_prob(tanh_gaussian(np.full(49, mean), std), pre_tanh(actions)[:, None]))
        np.testing.assert_allclose(density, (above - below) / (2 * step), rtol=1e-3, atol=1e-6)


def test_tanh_gaussian_adds_its_dimensions():
    parts = tanh_gaussian(np.array([0.1, -0.4]), np.array([1.0, 0.5]), np.array([-2.0, 0.0]), np.array([3.0, 0.5]))
    joint = jax.tree.map(lambda x: x[:, 0], parts)  # [2, 1] of one dimension each -> [2] dimensions
    u = np.array([0.3, 0.9], np.float32)
    np.testing.assert_allclose(log_prob(joint, u), log_prob(parts, u[:, None]).sum(), rtol=1e-6)
    np.testing.assert_allclose(entropy(joint), entropy(parts).sum(), rtol=1e-6)


@pytest.mark.parametrize("u", [-20.0, -5.0, 0.0, 5.0, 20.0])
def test_tanh_gaussian_is_stable_far_out(u):
    distribution, u = tanh_gaussian(np.array(u - 1.0), 1.0), np.array([u], np.float32)
    value, gradients = log_prob_and_gradients(distribution, u)
    # d tanh(u) / du = 1 / cosh(u)^2, and half the width of the box is 2.5.
    expected = scipy.stats.norm.logpdf(1.0) + 2 * np.log(np.cosh(u)) - np.log(2.5)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradients[0].mean, [1.0], atol=1e-6)
    np.testing.assert_allclose(gradients[0].log_std, [0.0], atol=1e-6)
    np.testing.assert_allclose(gradients[1], -1.0 + 2 * np.tanh(u), atol=1e-5)


log_prob_and_gradients = jit(jax.value_and_grad(lambda distribution, u: distribution.log_prob(u), (0, 1)))


def test_tanh_gaussian_entropy_matches_monte_carlo():
    mean, std = np.array([0.0, 0.5, -1.0, 2.0]), np.array([0.3, 1.0, 0.7, 0.1])
    u = mean + std * np.random.default_rng(3).normal(size=(200_000, 4))
    log_probs = scipy.stats.norm.logpdf(u, mean, std) + 2 * np.log(np.cosh(u)) - np.log(2.5)
    np.testing.assert_allclose(entropy(tanh_gaussian(mean, std)), -log_probs.mean(0), atol=0.01)


def test_tanh_gaussian_entropy_matches_adaptive_quadrature():
    cases = [(0.0, 0.05), (0.0, 1.0), (0.5, 2.0), (3.0, 1.0), (-8.0, 0.5), (0.0, 3.0)]

    def exact(mean, std):
        def log_det(z):
            u = mean + std * z
            return 2 * (np.log(2) - u - np.logaddexp(0, -2 * u)) + np.log(2.5)

        integral = scipy.integrate.quad(lambda z: scipy.stats.norm.pdf(z) * log_det(z), -12, 12, limit=200)[0]
        return scipy.stats.norm(mean, std).entropy() + integral

    result, expected = entropy(tanh_gaussian(*np.array(cases).T)), [exact(*case) for case in cases]
    np.testing.assert_allclose(result, expected, atol=0.03)  # 16 nodes: some error at a deviation of 3
    np.testing.assert_allclose(result[:2], expected[:2], atol=1e-4)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-2.0, 3.0), (0.0, 255.0), (-0.3, 1.1)])
def test_tanh_gaussian_actions_stay_in_the_box(low, high):
    u = np.array([-100.0, -20.0, -5.0, 0.0, 5.0, 20.0, 100.0], np.float32)
    actions = to_action(tanh_gaussian(np.zeros(7), 1.0, low, high), u[:, None])[:, 0]
    np.testing.assert_allclose(actions, low + (high - low) * (np.tanh(u) + 1) / 2, atol=1e-6 * (high - low))
    assert np.all(actions >= np.float32(low))
    assert np.all(actions <= np.float32(high))


def test_tanh_gaussian_samples_follow_its_distribution_function():
    distribution = tanh_gaussian(np.array(0.7), 0.8)
    actions = np.float64(to_action(distribution, draw(distribution, 20_000)))[:, 0]
    assert scipy.stats.kstest(actions, lambda a: scipy.stats.norm.cdf(pre_tanh(a), 0.7, 0.8)).pvalue > 1e-3


# TokenCategorical

ROWS, WIDTH, V = (3, 4), 5, 7
RNG = np.random.default_rng(4)
HIDDEN = RNG.normal(size=(*ROWS, WIDTH)).astype(np.float32)
HEAD = RNG.normal(size=(V, WIDTH)).astype(np.float32)
CHOSEN = RNG.integers(0, V, ROWS)
LEGAL = (RNG.random((*ROWS, V)) < 0.5) | (np.arange(V) == CHOSEN[..., None])
TOKEN_LOGITS = (HIDDEN @ HEAD.T) / 0.7


def tokens(mask=None, top_k=0, top_p=1.0, min_p=0.0, chunk=0, dtype="float32", hidden=HIDDEN, temperature=0.7):
    mask = None if mask is None else jnp.asarray(mask)
    return TokenCategorical(jnp.asarray(hidden), jnp.asarray(HEAD), mask, temperature, top_p, min_p, top_k, chunk, dtype)


@pytest.mark.parametrize("mask", [None, LEGAL], ids=["all", "masked"])
def test_tokens_are_a_categorical_at_the_temperature(mask):
    plain = Categorical(mask_logits(jnp.asarray(TOKEN_LOGITS), mask))
    distribution = tokens(mask, top_k=2, top_p=0.5, min_p=0.1)  # which cut the sampling alone
    np.testing.assert_allclose(distribution.logits, plain.logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(log_prob(distribution, CHOSEN), log_prob(plain, CHOSEN), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(entropy(distribution), entropy(plain), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(distribution.mode(), plain.mode())
    np.testing.assert_allclose(
        tokens(mask, dtype="bfloat16").logits[LEGAL], plain.logits[LEGAL], atol=0.05 * np.abs(TOKEN_LOGITS).max()
    )


def of_both(hidden, head, mask, chunk):
    distribution = tokens(mask, chunk=chunk, hidden=hidden).replace(head=head)
    both = distribution.log_prob_and_entropy(jnp.asarray(CHOSEN))
    return (jnp.stack(both) * np.random.default_rng(5).normal(size=(2, *ROWS))).sum(), both


of_both_and_gradients = jit(jax.value_and_grad(of_both, (0, 1), has_aux=True), static_argnums=3)


@pytest.mark.parametrize("chunk", [1, 5, 6, 12])
@pytest.mark.parametrize("mask", [None, LEGAL], ids=["all", "masked"])
def test_chunks_of_tokens_are_the_whole(chunk, mask):
    whole, parts = (jax.tree.leaves(of_both_and_gradients(HIDDEN, HEAD, mask, c)) for c in (0, chunk))
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [0, 5])
def test_the_only_legal_token_has_no_log_prob_no_entropy_and_no_gradient(chunk):
    for scale in (1.0, 1e4):
        mask = np.arange(V) == CHOSEN[..., None]
        result = of_both_and_gradients(scale * HIDDEN, HEAD, mask, chunk)
        for x in jax.tree.leaves(result):
            np.testing.assert_array_equal(x, 0.0)


@pytest.mark.parametrize(
    "cut", [dict(top_k=3), dict(top_p=0.6), dict(min_p=0.2), dict(top_k=4, top_p=0.8, min_p=0.05), dict()], ids=str
)
def test_behaviour_log_prob_is_that_of_what_is_sampled(cut):
    distribution = tokens(LEGAL, **cut)
    every = jnp.broadcast_to(jnp.arange(V)[:, None, None], (V, *ROWS))
    probabilities = np.exp(np.float64(jit(lambda d, x: jax.vmap(d.behaviour_log_prob)(x))(distribution, every)))
    np.testing.assert_allclose(probabilities.sum(0), 1.0, rtol=1e-5)
    whole = np.exp(np.asarray(jit(lambda d, x: jax.vmap(d.log_prob)(x))(distribution, every)))
    kept = probabilities > 0
    assert not kept[~np.moveaxis(LEGAL, -1, 0)].any()
    np.testing.assert_allclose(probabilities, np.where(kept, whole, 0) / np.where(kept, whole, 0).sum(0), rtol=1e-4)
    if cut:
        assert kept.sum() < LEGAL.sum()
    draws = np.asarray(jit(jax.vmap(lambda key: distribution.sample(key)))(jax.random.split(jax.random.key(0), 4000)))
    for row in np.ndindex(ROWS):
        counts, expected = np.bincount(draws[:, *row], minlength=V), 4000 * probabilities[:, *row]
        assert counts[expected == 0].sum() == 0
        if (expected > 0).sum() > 1:
            likely = expected > 0
            total = expected[likely].sum()
            assert scipy.stats.chisquare(counts[likely], expected[likely] * 4000 / total).pvalue > 1e-4


def test_what_a_row_samples_does_not_depend_on_the_others():
    sample = jit(lambda distribution, key: distribution.sample(key))
    rows = np.tile(HIDDEN.reshape(-1, WIDTH), (3, 1))
    for i in range(4):
        many = sample(tokens(hidden=rows), jax.random.key(i))
        few = sample(tokens(hidden=rows[:5]), jax.random.key(i))
        np.testing.assert_array_equal(many[:5], few)
    assert len(set(np.asarray(sample(tokens(hidden=np.zeros((64, WIDTH), np.float32)), jax.random.key(0))).tolist())) > 4
