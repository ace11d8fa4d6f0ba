"""Adapter for Gymnasium: ``gymnasium/<id>``, stepped on the host. `rljax.envs.as_gymnasium` is the other way.

Gymnasium's environments are Python objects, which the host steps one by one: see `rljax.envs.host`. They are made one by one, and
never reset by themselves, so that flags and final observations are theirs.
"""

import contextlib
import importlib
import inspect
import math
import os
from collections.abc import Callable
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from rljax import extensions
from rljax.envs import host
from rljax.envs.host import ON_HOST
from rljax.envs.spaces import Box, Discrete, MultiDiscrete, Space
from rljax.options import did_you_mean

IN_EXTRA = ("gymnasium.envs.box2d", "gymnasium.envs.mujoco")  # modules of environments whose libraries the extra installs


def parameters(name: str) -> dict[str, Any]:
    """Keyword arguments of `make` and their defaults: the constructor's, and the limit on steps.

    Raises:
      ValueError: an unknown name, with the nearest ones; a library that it needs is not installed.
    """
    spec = _spec(name)
    with _explained(name, spec):
        entry = _entry(name, spec)
        constructor = inspect.signature(load_env_creator(entry) if isinstance(entry, str) else entry).parameters.values()
    arguments = {p.name: p.default for p in constructor if p.default is not p.empty and p.name != "render_mode"}
    return {**arguments, **spec.kwargs, "max_episode_steps": spec.max_episode_steps}


def make(name: str, **kwargs: Any) -> host.HostEnvironment:
    """Makes ``name``, an id of Gymnasium's registry, or ``module:id`` of one that the module registers.

    Args:
      **kwargs: as of ``gymnasium.make``.

    Raises:
      ValueError: an unknown name, parameters that it refuses, a library that is not installed, or spaces that do not fit.
    """
    spec = _spec(name)
    _entry(name, spec)

    def made() -> gymnasium.Env:
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)  # `host` checks, and checking takes most of a step

    with _explained(name, spec):
        return from_gymnasium(made, ON_HOST + name)


def from_gymnasium(make: Callable[[], gymnasium.Env], name: str = "environment") -> host.HostEnvironment:
    """An `rljax.envs.Environment` whose copies are what ``make`` returns, stepped on the host.

    Observations: a Box (of float64 as float32, of integers but uint8 as int32), Discrete from 0, MultiDiscrete one-hot side by
    side and MultiBinary as a Box of float32. Actions: a Box, Discrete from 0, MultiDiscrete and MultiBinary as MultiDiscrete.

    Args:
      make: called for every copy; each must be independent of the others.
      name: for messages.

    Raises:
      ValueError: a space of another kind.
    """
    first = make()
    seen, see = _observations(first.observation_space, name)
    acted, act = _actions(first.action_space, name)
    env = host.HostEnvironment(name, lambda: _Simulator(make(), see, act), seen, acted)
    env.copies.add(_Simulator(first, see, act))
    return env


class _Simulator:
    """A Gymnasium environment as a `rljax.envs.host.Simulator`."""

    def __init__(self, env: gymnasium.Env, see: Callable[[Any], Any], act: Callable[[np.ndarray], Any]):
        self._env, self._see, self._act = env, see, act

    def reset(self, seed: int) -> Any:
        return self._see(self._env.reset(seed=seed)[0])

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool]:
        observation, reward, terminated, truncated, _ = self._env.step(self._act(action))
        return self._see(observation), float(reward), bool(terminated), bool(truncated)

    def close(self) -> None:
        self._env.close()


def _spec(name: str) -> Any:
    module, _, own = name.rpartition(":")
    try:
        if module:
            with extensions.search_path(os.getcwd()):
                importlib.import_module(module)
        return gymnasium.spec(own)
    except ImportError as error:
        raise ValueError(f"env {ON_HOST + name!r}: {error}") from error
    except gymnasium.error.Error as error:
        said = f": {' '.join(str(error).split())}"  # of a namespace, which no name of another is near
        is_known = not isinstance(error, gymnasium.error.NamespaceNotFound)
        hint = (is_known and did_you_mean(ON_HOST + own, [ON_HOST + known for known in gymnasium.registry])) or said
        raise ValueError(f"unknown env {ON_HOST + name!r}{hint}") from error


def _entry(name: str, spec: Any) -> Any:
    if spec.entry_point is None:
        raise ValueError(f"env {ON_HOST + name!r} is registered as a vector environment only, and copies are stepped one by one")
    return spec.entry_point


@contextlib.contextmanager
def _explained(name: str, spec: Any) -> Any:
    """What importing or making it raises, in one line."""
    try:
        yield
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        said = str(error).split(", run")[0].split(", you can")[0]
        entry = spec.entry_point if isinstance(spec.entry_point, str) else ""
        extra = ": pip install 'rljax[gymnasium]'" if entry.startswith(IN_EXTRA) else ""
        raise ValueError(f"env {ON_HOST + name!r}: {said}{extra}") from error
    except ValueError:
        raise
    except Exception as error:  # constructors assert, and more
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"env {ON_HOST + name!r} cannot be made with these env_params: {said}") from error


def _observations(space: Any, name: str) -> tuple[Space, Callable[[Any], Any]]:
    """Our space, and Gymnasium's observations in it."""
    if isinstance(space, spaces.Box):
        return _box(space), lambda x: x
    if isinstance(space, spaces.Discrete):
        start = int(space.start)

        def from_zero(x: Any) -> int:
            if not space.contains(space.dtype.type(x)):
                raise ValueError(f"the observation {x} is outside of {space}")
            return int(x) - start

        return Discrete(int(space.n)), from_zero
    if isinstance(space, spaces.MultiDiscrete):
        sizes, start = space.nvec.reshape(-1).astype(int), space.start.reshape(-1).astype(int)
        first = np.cumsum(sizes) - sizes

        def one_hot(x: Any) -> np.ndarray:
            if not space.contains(np.asarray(x, space.dtype)):
                raise ValueError(f"the observation {x} is outside of {space}")
            places = np.zeros(sizes.sum(), np.float32)
            places[first + np.asarray(x).reshape(-1) - start] = 1.0
            return places

        return Box(0.0, 1.0, (int(sizes.sum()),)), one_hot
    if isinstance(space, spaces.MultiBinary):
        return Box(0.0, 1.0, tuple(space.shape)), lambda x: x
    raise ValueError(_unfit(name, "observations", space))


def _actions(space: Any, name: str) -> tuple[Space, Callable[[np.ndarray], Any]]:
    """Our space, and our actions in Gymnasium's."""
    if isinstance(space, spaces.Box):
        return _box(space), lambda x: x.astype(space.dtype)
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n)), lambda x: space.start + space.dtype.type(x)
    if isinstance(space, spaces.MultiDiscrete):
        sizes = MultiDiscrete(tuple(space.nvec.reshape(-1).tolist()))
        return sizes, lambda x: x.astype(space.dtype).reshape(space.shape) + space.start
    if isinstance(space, spaces.MultiBinary):
        return MultiDiscrete((2,) * math.prod(space.shape)), lambda x: x.astype(space.dtype).reshape(space.shape)
    raise ValueError(_unfit(name, "actions", space))


def _unfit(name: str, what: str, space: Any) -> str:
    return (
        f"env {name!r}: its {what} are {type(space).__name__}, and must be Box, Discrete, MultiDiscrete or MultiBinary; flatten "
        "them, as in rljax.envs.from_gymnasium(lambda: gymnasium.wrappers.FlattenObservation(gymnasium.make(...)))"
    )


def _box(space: spaces.Box) -> Box:
    dtype = jnp.float32 if space.dtype.kind == "f" else jnp.uint8 if space.dtype == np.uint8 else jnp.int32
    return Box(space.low.astype(np.float32), space.high.astype(np.float32), tuple(space.shape), dtype)
