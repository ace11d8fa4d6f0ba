import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.networks.torsos import MinAtarCNN, ResettableGRU, orthogonal

SHAPES = [(7, 3), (3, 7), (5, 5), (3, 3, 4, 16), (3, 3, 1, 16)]  # tall, wide, square, and convolutions of either kind


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonal_kernels(shape):
    kernel = np.asarray(orthogonal(math.sqrt(2.0))(jax.random.key(0), shape))
    assert kernel.shape == shape
    matrix = kernel.reshape(-1, shape[-1])
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    np.testing.assert_allclose(tall.T @ tall, 2.0 * np.eye(tall.shape[1]), atol=1e-5)


def test_orthogonal_matches_a_qr_factorisation_with_a_positive_diagonal():
    key = jax.random.key(1)
    gaussian = np.asarray(jax.random.normal(key, (64, 48)), np.float64)
    q, r = np.linalg.qr(gaussian)
    np.testing.assert_allclose(orthogonal(1.0)(key, (64, 48)), q * np.sign(np.diag(r)), atol=1e-5)
    np.testing.assert_allclose(orthogonal(1.0)(key, (48, 64)), (q * np.sign(np.diag(r))).T, atol=1e-5)


def test_orthogonal_stays_orthogonal_at_size():
    # Gram-Schmidt done once would lose it: the columns are projected twice.
    kernel = np.asarray(jax.jit(lambda key: orthogonal(1.0)(key, (256, 256)))(jax.random.key(2)))
    np.testing.assert_allclose(kernel.T @ kernel, np.eye(256), atol=1e-5)


def test_orthogonal_under_vmap():
    keys = jax.random.split(jax.random.key(3), 3)
    lanes = jax.vmap(lambda key: orthogonal(0.5)(key, (7, 3)))(keys)
    for lane, key in zip(lanes, keys, strict=True):
        np.testing.assert_allclose(lane, orthogonal(0.5)(key, (7, 3)), atol=1e-6)
    assert np.abs(lanes[0] - lanes[1]).max() > 0.01


def test_minatar_convolution_by_hand():
    # The first feature of a kernel that picks the top left pixel of channel 1 is that pixel; no padding: 5x5 gives 3x3.
    network = MinAtarCNN((2,), "relu")
    images = jnp.asarray(np.random.default_rng(0).random((4, 5, 5, 2)), jnp.float32)
    params = jax.tree.map(jnp.zeros_like, network.init(jax.random.key(0), images))["params"]
    params["Conv_0"]["kernel"] = params["Conv_0"]["kernel"].at[0, 0, 1, 0].set(1.0)
    dense = params["MLP_0"]["Dense_0"]
    assert dense["kernel"].shape == (3 * 3 * 16, 2)
    dense["kernel"] = dense["kernel"].at[0, 0].set(1.0).at[16, 1].set(1.0)  # channel 0 at positions (0, 0) and (0, 1)
    np.testing.assert_allclose(network.apply({"params": params}, images), images[:, 0, :2, 1], rtol=1e-6)


def test_gru_by_hand():
    """The cell of Cho et al. 2014 in numpy, its carry zeroed before the step that begins an episode."""
    network = ResettableGRU(3)
    rng = np.random.default_rng(0)
    features, carry = rng.normal(size=(4, 2, 5)).astype(np.float32), rng.normal(size=(2, 3)).astype(np.float32)
    first = np.array([[False, False], [False, True], [True, False], [False, False]])
    params = network.init(jax.random.key(0), carry, (features, first))
    params = jax.tree.map(lambda x: x + rng.normal(0, 0.3, x.shape).astype(np.float32), params)
    cell = jax.tree.map(np.asarray, params["params"]["GRUCell_0"])

    def linear(name, x):
        return x @ cell[name]["kernel"] + cell[name].get("bias", 0.0)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    h, expected = carry, []
    for t in range(4):
        h = np.where(first[t][:, None], 0.0, h)
        r = sigmoid(linear("ir", features[t]) + linear("hr", h))
        z = sigmoid(linear("iz", features[t]) + linear("hz", h))
        n = np.tanh(linear("in", features[t]) + r * linear("hn", h))
        h = (1 - z) * n + z * h
        expected.append(h)
    end, outputs = network.apply(params, carry, (features, first))
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(end, outputs[-1])
