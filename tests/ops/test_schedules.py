import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.ops import schedules


@pytest.mark.parametrize(
    ("step", "start", "end", "duration", "expected"),
    [
        (0.0, 1.0, 0.5, 4.0, 1.0),
        (1.0, 1.0, 0.5, 4.0, 0.875),
        (4.0, 1.0, 0.5, 4.0, 0.5),
        (9.0, 1.0, 0.5, 4.0, 0.5),  # and stays there
        (-1.0, 1.0, 0.5, 4.0, 1.0),
        (1.0, 0.0, 8.0, 4.0, 2.0),  # upwards
        (0.1, 1.0, 0.0, 0.2, 0.5),  # progress and a fraction of the run
        (0.0, 1.0, 0.5, 0.0, 0.5),  # no time at all: the end at once
        (3.0, 1.0, 0.5, 0.0, 0.5),
    ],
)
def test_linear_by_hand(step, start, end, duration, expected):
    assert schedules.linear(step, start, end, duration) == pytest.approx(expected, rel=1e-6)
    traced = jax.jit(schedules.linear)(*map(jnp.float32, (step, start, end, duration)))
    assert traced == pytest.approx(expected, rel=1e-6)


def test_integer_steps_and_lanes():
    steps = jnp.arange(6)
    np.testing.assert_allclose(schedules.linear(steps, 1.0, 0.0, 4), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    durations = jnp.array([0.0, 2.0, 4.0])
    np.testing.assert_allclose(jax.vmap(schedules.linear, (None, None, None, 0))(1, 1.0, 0.0, durations), [0.0, 0.5, 0.75])


def test_gradients_are_finite_without_any_duration():
    gradient = jax.grad(schedules.linear, argnums=(0, 1, 2, 3))(1.0, 1.0, 0.5, 0.0)
    np.testing.assert_array_equal(gradient, [0.0, 0.0, 1.0, 0.0])
