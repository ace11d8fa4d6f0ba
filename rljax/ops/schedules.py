"""Schedules: hyper-parameters as functions of the progress of a run."""

from jax import Array
from jax import numpy as jnp


def linear(step: Array | float, start: Array | float, end: Array | float, duration: Array | float) -> Array:
    """From ``start`` at step 0 to ``end`` at ``duration``, and ``end`` from there on; a duration of 0 is ``end`` at once."""
    progress = jnp.where(duration > 0, jnp.clip(step / jnp.where(duration > 0, duration, 1.0), 0.0, 1.0), 1.0)
    return start + (end - start) * progress
