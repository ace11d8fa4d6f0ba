import jax
import numpy as np
import pytest

from rljax.agents.on_policy import shuffled_minibatches


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (12, 3), (512, 4), (96, 1)])
def test_every_epoch_holds_every_index_once(size, parts):
    order = np.asarray(shuffled_minibatches(jax.random.key(0), size, 5, parts)).reshape(5, size)
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(size), (5, 1)))


def test_every_index_is_equally_likely_in_every_minibatch():
    order = np.asarray(shuffled_minibatches(jax.random.key(1), 8, 20_000, 4)).reshape(20_000, 4, 2)
    for index in range(8):
        share = (order == index).any(-1).mean(0)
        np.testing.assert_allclose(share, 0.25, atol=0.015)  # five standard deviations
