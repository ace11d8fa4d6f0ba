"""What tests of runs share: rows and numbers to compare, and a run that is stopped on the way."""

import json

import jax
import numpy as np


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def leaves(states):
    return [
        np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(states)
    ]


def assert_same(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def stop_after(n):
    """A listener that stops the run at its n-th chunk, as Ctrl-C would."""
    seen = []

    def listen(event):
        seen.append(event["event"])
        if seen.count("chunk") == n:
            raise KeyboardInterrupt

    return listen
