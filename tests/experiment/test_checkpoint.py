import jax
import jax.numpy as jnp
import numpy as np

from rljax.experiment.checkpoint import Checkpoints


def test_keys_and_arrays_without_an_element_come_back(tmp_path):
    """orbax refuses the latter, which physics models have in their states."""
    states = {
        "params": jnp.arange(6.0).reshape(2, 3),
        "key": jax.random.split(jax.random.key(0), 2),
        "world": {"contacts": jnp.zeros((2, 0, 4)), "act": jnp.zeros((2, 0), jnp.int32)},
    }
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, states)
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints").restore(1, jax.eval_shape(lambda: states))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), again) == jax.tree.map(lambda x: (x.shape, x.dtype), states)
    np.testing.assert_array_equal(again["params"], states["params"])
    np.testing.assert_array_equal(jax.random.key_data(again["key"]), jax.random.key_data(states["key"]))
