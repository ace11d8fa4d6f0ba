"""Adapter for MuJoCo Playground (Zakka et al. 2025, arXiv 2502.08844), the maintained physics tasks on MJX; an extra.

The tasks of the control suite come with the package. Those of robots (locomotion, manipulation) take their models from MuJoCo
Menagerie, which Playground clones with git the first time that one is made.
"""

import contextlib
import copy
import functools
import importlib.util
import io
import subprocess
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rljax.envs.base import TimeStep, like, restart, strong, transition
from rljax.envs.brax import RESET_POOL
from rljax.envs.spaces import Box
from rljax.envs.wrappers import TimeLimit

# What others do here: repeating actions and drawing pictures. The limits on contacts are of `impl = "warp"`.
LEFT_OUT = ("action_repeat", "vision", "vision_config")
SCALES = {  # of the model, by which domains are randomised
    "gravity_scale": ("opt.gravity",),
    "friction_scale": ("geom_friction",),
    "mass_scale": ("body_mass", "body_inertia"),
    "damping_scale": ("dof_damping",),
}


def require() -> None:
    """
    Raises:
      ValueError: the package is missing.
    """
    if importlib.util.find_spec("mujoco_playground") is None:
        raise ValueError("env playground/... needs the package playground: pip install 'rljax[playground]'")


@functools.cache
def _registry() -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # it prints about warp
        from mujoco_playground import registry  # pyright: ignore[reportMissingImports]
    return registry


def names() -> list[str]:
    """The environments that this adapter makes, without the prefix ``playground/``; none where the package is missing."""
    return list(_registry().ALL_ENVS) if importlib.util.find_spec("mujoco_playground") else []


def parameters(name: str) -> dict[str, Any]:
    """Keyword arguments of `make` and their defaults: ours, then the entries of the environment's own config, flattened."""
    own = _flat(_registry().get_default_config(name).to_dict())
    settings = {key: value for key, value in own.items() if key.partition(".")[0] not in LEFT_OUT}
    return {**settings, "impl": "jax", "obs": "state", **dict.fromkeys(SCALES, 1.0)}


def make(name: str, **kwargs: Any) -> TimeLimit:
    """Makes ``name``, cut after ``episode_length`` steps.

    Args:
      name: as in ``"CartpoleBalance"``.
      **kwargs: see `parameters`. ``impl``: ``"jax"``, or ``"warp"`` on a CUDA device. ``obs``: which entry an agent sees where
        observations are a dictionary. The scales multiply gravity, all friction, the masses and inertias of bodies, and the
        damping of joints; they may be traced.

    Raises:
      ValueError: a value of another type than the config's; an ``obs`` that is not there; models that could not be cloned.
    """
    given = {**parameters(name), **kwargs}
    scales = {key: given.pop(key) for key in SCALES}
    episode_length, obs = given.pop("episode_length"), given.pop("obs")
    plain = {key: float(v) if isinstance(v, jax.Array) else tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    env = _load(name, tuple(sorted(plain.items())))  # a traced number has just been refused
    changed = {key: scale for key, scale in scales.items() if key in kwargs}
    return TimeLimit(PlaygroundEnvironment(_scaled(env, changed), obs), episode_length)


class PlaygroundEnvironment:
    """An environment of MuJoCo Playground as an `rljax.envs.Environment`.

    Its ``done`` is a termination: the time limit is put around it. The state is Playground's own; actions lie in [-1, 1].
    """

    reset_pool = RESET_POOL

    def __init__(self, env: Any, obs: str = "state"):
        self.env, self._obs = env, obs
        start = jax.eval_shape(env.reset, jax.random.key(0))
        if isinstance(start.obs, Mapping) and obs not in start.obs:
            raise ValueError(f"env_params.obs must be one of {', '.join(start.obs)}, got {obs!r}")
        self.observation_space = Box(-jnp.inf, jnp.inf, self._seen(start).shape)
        self.action_space = Box(-1.0, 1.0, (env.action_size,))
        action = jnp.zeros(self.action_space.shape)
        self._state_type = jax.eval_shape(lambda s: strong(env.step(s, action)), start)

    def reset(self, key: Array) -> tuple[Any, TimeStep]:
        state = like(self._state_type, self.env.reset(key))
        return state, restart(self._seen(state))

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep]:
        del key  # what is random after the reset comes from a key in the state
        state = like(self._state_type, self.env.step(state, action))
        return state, transition(self._seen(state), state.reward, terminated=state.done > 0)

    def _seen(self, state: Any) -> Any:
        return state.obs[self._obs] if isinstance(state.obs, Mapping) else state.obs


@functools.lru_cache(maxsize=32)
def _load(name: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    """Reads the model, which takes seconds, once."""
    try:
        with jax.ensure_compile_time_eval(), contextlib.redirect_stdout(io.StringIO()):
            return _registry().load(name, config_overrides=dict(settings))
    except (TypeError, ValueError) as error:
        raise ValueError(f"env_params of playground/{name}: {error}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"env playground/{name}: its robot's model could not be fetched ({error})") from error


def _scaled(env: Any, scales: Mapping[str, Any]) -> Any:
    """``env`` with another model, as Playground's own wrapper for domain randomisation makes it."""
    if not scales:
        return env
    model = env.mjx_model
    for name, scale in scales.items():
        for field in SCALES[name]:
            value = functools.reduce(getattr, field.split("."), model)
            model = model.tree_replace({field: value * scale})
    env = copy.copy(env)
    env._mjx_model = model
    return env


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in config.items():
        entries |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return entries
