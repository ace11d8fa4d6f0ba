"""Loads a policy that `rljax export` has written and acts with it; needs jax, numpy and flatbuffers alone.

Every exported policy has a copy of this file beside it, as ``policy.py``::

    from policy import load

    policy = load("folder")
    action, carry = policy(observation)  # the first of an episode
    action, carry = policy(observation, carry)
    action, carry = policy(observation, carry, key=jax.random.key(0), greedy=False)
"""

import hashlib
import json
import operator
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from jax import Array

FORMAT = 1  # of a folder; one that has a higher number needs a newer loader
PROGRAMS = {True: "greedy.jaxexport", False: "sampled.jaxexport"}
PARAMETERS = "parameters.npz"


class Policy:
    """A policy for batches of any size; `load` makes one.

    Attributes:
      about: what ``policy.json`` says: ``env``, ``agent``, ``observation_space``, ``action_space``, and shapes without the batch
        and dtypes of ``inputs``, ``carry`` and ``action``.
    """

    def __init__(self, about: dict[str, Any], parameters: dict[str, Any], first_carry: list[Any], programs: dict[bool, Any]):
        self.about = about
        self._parameters = jax.device_put(parameters)
        self._first_carry = first_carry
        self._programs = {greedy: jax.jit(program.call) for greedy, program in programs.items()}

    def start(self, batch: int) -> tuple[Any, ...]:
        """The carry with which episodes begin, each array ``[batch, ...]``; empty where the policy has no memory.

        Raises:
          ValueError: ``batch`` is no whole number of 1 or more.
        """
        if isinstance(batch, bool | float | str) or not hasattr(batch, "__index__") or (batch := operator.index(batch)) < 1:
            raise ValueError(f"batch must be a whole number, 1 or more, got {batch!r}")
        return tuple(np.broadcast_to(row, (batch, *row.shape[1:])) for row in self._first_carry)

    def __call__(
        self,
        observation: Any,
        carry: Any = None,
        *,
        key: Any = None,
        greedy: bool = True,
        mask: Any = None,
        reward: Any = None,
        first: Any = None,
    ) -> tuple[Array, tuple[Any, ...]]:
        """One action for each observation of a batch ``[B, ...]``.

        Args:
          observation: as the environment gives it; the policy normalises it where it was trained so.
          carry: what the last call returned; none: all B episodes begin.
          key: of the draws, as ``jax.random.key(0)``; needed where not greedy.
          greedy: the likeliest action; else one that is drawn as in training.
          mask: bool ``[B, A]``, the legal actions; needed where the environment has masks.
          reward: float32 ``[B]`` of the step before, 0 at the first; needed by a policy that is conditioned on returns.
          first: bool ``[B]``, whose observation begins a new episode, of a policy with a memory; none: nobody's.

        Returns:
          ``(actions [B, ...], carry)``; the carry is empty where the policy has no memory.

        Raises:
          ValueError: an input of another shape or dtype than the policy's, one that is missing or one too many, or a numpy array
            with numbers that are not finite.
          NotImplementedError: inside ``jax.vmap``.
        """
        inputs = self.about["inputs"]
        observation = _array("observation", observation)
        batch = observation.shape[0] if observation.ndim else 0
        _checked("observation", observation, inputs["observation"], batch)
        given = {"observation": observation, "mask": mask, "reward": reward, "first": first}
        if carry is None:
            carry = self.start(batch)
            given["reward"] = np.zeros(batch, np.float32) if reward is None and "reward" in inputs else reward
        if first is None and "first" in inputs:
            given["first"] = np.zeros(batch, bool)
        given = {name: _checked(name, value, inputs.get(name), batch) for name, value in given.items()}
        memory = self.about["carry"]
        if not isinstance(carry, tuple | list) or len(carry) != len(memory):
            raise ValueError(f"carry must be what the call before returned, {len(memory)} arrays, got {_said(carry)}")
        carry = [_checked(f"carry[{i}]", *pair, batch) for i, pair in enumerate(zip(carry, memory, strict=True))]
        if key is None and not greedy:
            raise ValueError("key is missing: actions that are drawn need one, as jax.random.key(0)")
        inputs = {name: value for name, value in given.items() if value is not None}
        try:
            action, carry = self._programs[bool(greedy)](self._parameters, inputs, carry, _bits(key))
        except NotImplementedError as error:  # by jax, of a program that is given
            raise NotImplementedError(
                "a policy takes a whole batch and cannot stand inside jax.vmap: make the axes one, [N, B, ...] to [N * B, ...]"
            ) from error
        return action, tuple(carry)


def load(folder: str | Path) -> Policy:
    """The policy that lies in a folder.

    Raises:
      ValueError: there is none, a file is missing or is not the one that was written, or a newer rljax has written it.
    """
    folder = Path(folder)
    try:
        about = json.loads((folder / "policy.json").read_text(encoding="utf-8"))
        version, digests, written_by = about["format"], dict(about["sha256"]), about["jax"]
        arrays_of = {name: np.dtype(dtype) for name, dtype in about["parameters"].items()} if version == FORMAT else {}
        for spec in (about["inputs"]["observation"], *about["carry"]) if version == FORMAT else ():
            _, _ = tuple(spec["shape"]), np.dtype(spec["dtype"])
    except OSError as error:
        raise ValueError(f"{folder} holds no exported policy: policy.json cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder}: policy.json is damaged; export the policy again") from error
    if version != FORMAT:
        raise ValueError(f"{folder} has format {version}, and this loader reads {FORMAT}: use the policy.py of that folder")
    for name in (PARAMETERS, *PROGRAMS.values()):
        try:
            digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except OSError as error:
            raise ValueError(f"{folder}: {name} cannot be read ({error.strerror}); export the policy again") from error
        if digest != digests.get(name):
            raise ValueError(f"{folder}: {name} is damaged: its SHA-256 is not that of policy.json; export the policy again")
    try:
        with np.load(folder / PARAMETERS, allow_pickle=False) as arrays:
            # bfloat16 comes back from a file as two bytes without a type.
            found = {name: arrays[name].view(dtype) for name, dtype in arrays_of.items()}
        first_carry = [found.pop(f"carry/{i}") for i in range(len(about["carry"]))]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{folder}: policy.json is damaged: its parameters are not those of {PARAMETERS}") from error
    try:
        programs = {greedy: jax.export.deserialize(bytearray((folder / name).read_bytes())) for greedy, name in PROGRAMS.items()}
    except ModuleNotFoundError as error:
        raise ValueError(f"jax.export needs a package that is not here: pip install {error.name}") from error
    except Exception as error:  # what jax says of an old or a new program depends on its version
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{folder} was written with jax {written_by}, and jax {jax.__version__} cannot read it: {reason}"
        ) from error
    return Policy(about, found, first_carry, programs)


def _array(name: str, value: Any) -> Any:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} must be an array, and its rows are of different lengths") from error


def _bits(key: Any) -> Any:
    """The two words of a key; of none, zeros, on which no greedy action depends."""
    if key is None:
        return np.zeros(2, np.uint32)
    key = _array("key", key)
    bits = jax.random.key_data(key) if jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if bits.shape != (2,) or bits.dtype != np.uint32:
        raise ValueError(f"key must be one threefry key, as jax.random.key(0), got {_said(key)}")
    return bits


def _checked(name: str, value: Any, spec: dict[str, Any] | None, batch: int) -> Any:
    """``value`` as an array, or None where there is to be none and is none."""
    if spec is None:
        if value is not None:
            raise ValueError(f"{name} must be left out: this policy takes none, got {_said(value)}")
        return None
    wanted = f"{spec['dtype']} [{', '.join(map(str, ['batch' if name == 'observation' else batch, *spec['shape']]))}]"
    if value is None:
        raise ValueError(f"{name} is missing: this policy takes {wanted}")
    value = _array(name, value)
    if value.shape != (batch, *spec["shape"]) or value.dtype != spec["dtype"] or not batch:
        raise ValueError(f"{name} must be {wanted}, got {_said(value)}")
    if isinstance(value, np.ndarray):  # of an array on a device it would be waited for
        if name == "mask" and not value.any(-1).all():
            raise ValueError("mask must have a legal action in each row")
        if value.dtype.kind not in "biu" and not np.isfinite(value).all():
            raise ValueError(f"{name} must be finite, and is not")
    return value


def _said(value: Any) -> str:
    """Dtype and shape of an array, or what it is instead."""
    if isinstance(value, tuple | list):
        return f"{len(value)} arrays"
    value = _array("it", value)
    return f"{value.dtype} {list(value.shape)}"
