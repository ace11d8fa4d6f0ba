"""Adapter for brax: rigid-body locomotion and control, with the backends generalized, spring, positional and mjx."""

import contextlib
import importlib
import inspect
import io
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rljax.envs.base import TimeStep, like, restart, strong, transition
from rljax.envs.spaces import Box
from rljax.envs.wrappers import TimeLimit

BACKENDS = ("generalized", "spring", "positional", "mjx")
EPISODE_LENGTH = 1000
RESET_POOL = 256  # a physics reset costs as much as several steps


class _OldClip:
    """``jax.numpy`` with the keyword ``a_min`` that jax 0.10 removed and brax 0.14's fluid forces (swimmer) still use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def clip(x: Array, a_min: Any = None, a_max: Any = None) -> Array:
        return jnp.clip(x, a_min, a_max)


def _brax() -> Any:
    # brax is slow to import, and mjx prints about optional accelerators that are absent.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from brax import envs, fluid
    fluid.jp = _OldClip()
    return envs


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that brax's models are not developed further, and mujoco's about an attribute in their files.

    mujoco would also write a log into the working directory.
    """
    mujoco: Any = importlib.import_module("mujoco")  # its extension module declares no types

    def handler(message: str) -> None:
        if "settotalmass" not in message:
            warnings.warn(message, stacklevel=2)

    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(handler)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Brax System, piplines")
            yield
    finally:
        mujoco.set_mju_user_warning(before)


def names() -> list[str]:
    """The environments that this adapter makes, without the prefix ``brax/``."""
    return list(_brax()._envs)


def parameters(name: str) -> dict[str, Any]:
    """Keyword arguments of `make` and their defaults."""
    constructor = inspect.signature(_brax()._envs[name].__init__).parameters.values()
    arguments = {p.name: p.default for p in constructor if p.default is not inspect.Parameter.empty}
    return {"backend": "generalized", "episode_length": EPISODE_LENGTH, **arguments, "n_frames": None}


def make(name: str, episode_length: Any = EPISODE_LENGTH, **kwargs: Any) -> TimeLimit:
    """Makes ``name``, cut after ``episode_length`` steps; ``kwargs`` go to its constructor, where numbers may be traced.

    Raises:
      ValueError: an unknown backend.
    """
    if kwargs.get("backend", "generalized") not in BACKENDS:
        raise ValueError(f"env_params.backend must be one of {', '.join(BACKENDS)}, got {kwargs['backend']!r}")
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    # Built in a traced function too (a swept parameter): the model itself must still be made of concrete arrays.
    with _quiet(), jax.ensure_compile_time_eval():
        try:
            env = _brax()._envs[name](**kwargs)
        except ValueError as error:  # swimmer knows one backend only
            raise ValueError(f"env_params.backend of brax/{name}: {error}") from error
    return TimeLimit(BraxEnvironment(env), episode_length)


class BraxEnvironment:
    """A brax environment as an `rljax.envs.Environment`: its ``done`` is a termination, the time limit is put around it.

    The state is brax's own ``State``; actions lie in [-1, 1].
    """

    reset_pool = RESET_POOL

    def __init__(self, env: Any):
        self.env = env
        shape = jax.eval_shape(env.reset, jax.random.key(0))
        if not hasattr(shape.obs, "shape"):
            raise TypeError("brax environments with dictionary observations are not supported; leave obs_mode at its default")
        self.observation_space = Box(-jnp.inf, jnp.inf, shape.obs.shape)
        self.action_space = Box(-1.0, 1.0, (env.action_size,))
        action = jnp.zeros(self.action_space.shape)
        self._state_type = jax.eval_shape(lambda s: strong(env.step(s, action)), shape)

    def reset(self, key: Array) -> tuple[Any, TimeStep]:
        state = like(self._state_type, self.env.reset(key))
        return state, restart(state.obs)

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        del key  # brax environments are deterministic after the reset
        state = like(self._state_type, self.env.step(state, action))
        return state, transition(state.obs, state.reward, terminated=state.done > 0)
