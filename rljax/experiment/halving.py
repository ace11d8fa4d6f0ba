"""Successive halving: after given evaluations the worst settings of a program are dropped, and the lanes that are left go on.

One compiled program serves every rung. It takes as many lanes as the last rung has; a chunk of an earlier rung is several calls
of it, and of a later one fewer. All states stay where they are, a dropped lane's as it was when it was dropped, so checkpoints do
not depend on the rung. Who is dropped is read from the rows of ``metrics.jsonl``: a resumed run drops the same.

Source: Jamieson and Talwalkar 2016, arXiv 1502.07943.
"""

import bisect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rljax.experiment.config import InputError
from rljax.experiment.lanes import AXIS, Program
from rljax.experiment.statistics import iqm


class Halving:
    """The lanes of a program that are still in; all of them where its experiment drops none.

    Attributes:
      dropped: what has been dropped, as ``run.json`` holds it: the ``values`` of a setting, its ``lanes``, and the ``evaluation``
        and ``step`` after which.
      left: the lanes that go on.

    Raises:
      InputError: the run has several processes, which do not share lanes.
    """

    def __init__(self, program: Program):
        self._program, self._experiment = program, program.experiment
        self.dropped: list[dict[str, Any]] = []
        self.left = list(range(program.num_lanes))
        if self._experiment.sweep_halving and jax.process_count() > 1:
            raise InputError("sweep.halving packs the lanes of one process; leave it out, or run on one host")

    def of_all(self, compiled: Any) -> Any:
        """A compiled ``program.chunk`` or ``program.evaluate`` of some lanes, as a function of all. What it returns of dropped
        lanes is zero, and their states as they were."""
        if not self._experiment.sweep_halving:
            return compiled
        program = self._program
        size = program.padded(program.num_lanes)
        gives_states = isinstance(compiled.out_info, tuple)
        info = compiled.out_info[1:] if gives_states else compiled.out_info
        at_once = jax.tree.leaves(info)[0].shape[0]
        sharding = NamedSharding(program.mesh, PartitionSpec(AXIS))
        blank = jax.device_put(jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), info), sharding)

        # A call that is not full has lanes past the last: for these the last is taken, and nothing is put back.
        def put(tree: Any, part: Any, rows: Any) -> Any:
            return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), tree, part)

        take = jax.jit(lambda tree, rows: jax.tree.map(lambda x: x.at[rows].get(mode="clip"), tree), out_shardings=sharding)
        put_states = jax.jit(put, out_shardings=sharding, donate_argnums=0)
        put = jax.jit(put, out_shardings=sharding)

        def packed(lanes: Any, states: Any, data: Any) -> Any:
            out = blank
            for begin in range(0, len(self.left), at_once):
                some = self.left[begin : begin + at_once]
                rows = np.full(at_once, size, np.int32)
                rows[: len(some)] = some
                part = compiled(*take((lanes, states), rows), data)
                if gives_states:
                    states, part = put_states(states, part[0], rows), part[1:]
                out = put(out, part, rows)
            return (states, *out) if gives_states else out

        return packed

    def drop(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Drops what the evaluations in ``rows`` decide; returns what was not dropped before.

        The score of a setting is the IQM over its seeds. One with a seed that has failed, or whose return is not known, is below
        all that have none.
        """
        done = len(self.dropped)
        experiment, program = self._experiment, self._program
        last = rows[-1]["step"] if rows else -1
        settings, seeds = experiment.settings(), len(experiment.seeds)
        lanes_of = [list(range(i * seeds, (i + 1) * seeds)) for i in range(len(settings))]
        alive = list(range(len(settings)))
        self.dropped = []
        for evaluation, keep in zip(experiment.sweep_halving, experiment.rungs[1:], strict=True):
            step = program.steps_at(evaluation * program.chunks_per_eval)
            if step > last:
                break
            returns = {row["lane"]: row.get("eval/return") for row in rows if row["step"] == step}

            def rank(setting: int, returns: dict[int, Any] = returns) -> tuple[int, float]:
                lanes = lanes_of[setting]
                known = [value for lane in lanes if (value := returns.get(lane)) is not None]
                return len(lanes) - len(known), -float(iqm(np.asarray(known))) if known else math.inf

            best = sorted(alive, key=rank)[:keep]
            for i in alive:
                if i not in best:
                    drop = {"values": settings[i], "lanes": lanes_of[i], "evaluation": evaluation, "step": step}
                    self.dropped.append(drop)
            alive = sorted(best)
        self.left = [lane for i in alive for lane in lanes_of[i]]
        return self.dropped[done:]

    def planned(self) -> list[int]:
        """Lanes of each chunk of the whole run."""
        ends = [evaluation * self._program.chunks_per_eval for evaluation in self._experiment.sweep_halving]
        rungs = [bisect.bisect_left(ends, chunk) for chunk in range(1, self._program.num_chunks + 1)]
        return [self._experiment.rungs[rung] * len(self._experiment.seeds) for rung in rungs]

    def calls(self, lanes: int) -> int:
        """Of a compiled program, for so many lanes."""
        return -(-lanes // self._program.padded(self._experiment.lanes_a_call))

    def lane_chunks(self, done: int) -> int:
        """Chunks of single lanes in the first ``done`` chunks of the run."""
        ends = {lane: drop["evaluation"] * self._program.chunks_per_eval for drop in self.dropped for lane in drop["lanes"]}
        return sum(min(done, ends.get(lane, done)) for lane in range(self._program.num_lanes))
