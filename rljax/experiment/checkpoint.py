"""Checkpoints of the whole `TrainState` of every lane, through orbax. The only file that knows of orbax.

orbax writes a step into a temporary directory and renames it when it is complete, so a save that was killed or ran out of disk
leaves the previous checkpoint as it was.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.experiment import hosts
from rljax.experiment.config import InputError

KEEP = 2


class SaveError(OSError):
    """A checkpoint could not be written; the one before it is still valid."""


class Checkpoints:
    """The checkpoints of one run, numbered by chunks done.

    States are saved as numpy arrays without padding lanes, and typed PRNG keys as their data, so that a run can be resumed on
    another number of devices. Of several processes the first alone writes, and each reads for itself.
    """

    def __init__(self, directory: Path):
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)
        self._ocp = ocp
        self.directory = directory.absolute()
        # Left to itself, orbax has processes wait for each other, and a disk that is full for one would hang all of them.
        alone = ocp.options.MultiprocessingOptions(jax.process_index(), active_processes={jax.process_index()})
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEEP,
            enable_async_checkpointing=False,
            create=False,
            read_only=not hosts.leads(),
            multiprocessing_options=alone,
        )
        try:
            hosts.lead(lambda: self.directory.mkdir(parents=True, exist_ok=True))
            # The handler is named, or orbax would infer it from the newest checkpoint and read none where that one is broken.
            handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
            self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handler)
        except OSError as error:
            raise SaveError(f"cannot write to {directory}: {error.strerror or error}") from error

    def steps(self) -> list[int]:
        """Complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, chunk: int, states: Any) -> None:
        """Writes the states of all lanes ``[num_lanes, ...]``; of several processes the first alone.

        Raises:
          SaveError: the disk is full or not writable; earlier checkpoints stay valid.
        """
        tree = jax.tree.map(np.asarray, jax.device_get(_storable(states)))
        hosts.lead(lambda: self._write(chunk, tree))

    def _write(self, chunk: int, tree: Any) -> None:
        try:
            self._manager.save(chunk, args=self._ocp.args.StandardSave(tree), force=True)
            self._manager.wait_until_finished()
        except Exception as error:  # orbax and tensorstore raise errors of many types
            reason = str(error).strip().splitlines()[-1][:200] if str(error).strip() else type(error).__name__
            kept = ", ".join(map(str, self.steps())) or "none"
            self._remove_partial(chunk)
            raise SaveError(f"could not save checkpoint {chunk} in {self.directory}: {reason}; valid ones: {kept}") from error

    def restore(self, chunk: int, like: Any) -> Any:
        """States with the structure of ``like`` (arrays or ShapeDtypeStructs).

        Raises:
          InputError: the checkpoint is gone, cannot be read, or is of another structure.
        """
        if chunk not in self.steps():
            raise InputError(
                f"checkpoint {chunk} is gone: a run keeps its last {KEEP}, here {', '.join(map(str, self.steps())) or 'none'}"
            )
        plain = jax.eval_shape(_storable, like)
        template = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), plain)
        try:
            tree = self._manager.restore(chunk, args=self._ocp.args.StandardRestore(template))
        except Exception as error:
            raise InputError(f"checkpoint {self.directory / str(chunk)} cannot be read ({type(error).__name__})") from error
        for wanted, got in zip(jax.tree.leaves(plain), jax.tree.leaves(tree), strict=True):
            if (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
                shapes = f"{got.dtype}{list(got.shape)} where {wanted.dtype}{list(wanted.shape)} is wanted"
                raise InputError(f"checkpoint {self.directory / str(chunk)} is of another program: {shapes}")
        return _restored(like, tree)

    def restore_latest(self, like: Any) -> tuple[int, Any, list[str]] | None:
        """``(chunk, states, notes)`` of the newest checkpoint that process 0 can read; None where there is none at all.

        Raises:
          InputError: there are checkpoints, and none can be read.
        """
        read = {}

        def newest() -> tuple[int, list[str]] | None:
            notes: list[str] = []
            for chunk in reversed(self.steps()):
                try:
                    read[chunk] = self.restore(chunk, like)
                    return chunk, notes
                except InputError as error:
                    notes.append(str(error))
            if notes:
                raise InputError(f"{notes[0]}, nor any older one; start over with --fresh")
            return None

        found = hosts.lead(newest)
        if found is None:
            return None
        chunk, notes = found
        return chunk, read[chunk] if chunk in read else self.restore(chunk, like), notes

    def drop_after(self, chunk: int) -> None:
        """Deletes checkpoints newer than ``chunk`` (unreadable ones)."""
        for newer in self.steps():
            if newer > chunk:
                self._manager.delete(newer)

    def close(self) -> None:
        self._manager.close()

    def _remove_partial(self, chunk: int) -> None:
        for path in self.directory.glob(f"{chunk}*"):
            if path.name != str(chunk):
                shutil.rmtree(path, ignore_errors=True)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _storable(tree: Any) -> Any:
    """What orbax can save: keys as their data, and None for arrays without an element, of which physics models have some."""
    return jax.tree.map(lambda x: None if x.size == 0 else jax.random.key_data(x) if _is_key(x) else x, tree)


def _restored(like: Any, tree: Any) -> Any:
    """The other way; what nothing was saved of is empty, as in ``like``."""

    def leaf(wanted: Any, x: Any) -> Any:
        if x is None:
            return np.zeros(wanted.shape, wanted.dtype)
        return jax.random.wrap_key_data(x) if _is_key(wanted) else x

    return jax.tree.map(leaf, like, tree)
