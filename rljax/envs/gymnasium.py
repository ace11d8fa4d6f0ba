"""Gymnasium, both ways: its environments for our agents (``gymnasium/<id>``), and our environments for its libraries.

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
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector.utils import batch_space

from rljax.envs import host
from rljax.envs.base import Environment, TimeStep
from rljax.envs.registry import ON_HOST, did_you_mean, make_env, search_path
from rljax.envs.spaces import Box, Discrete, MultiDiscrete, Space, Tokens
from rljax.envs.vector import vectorize

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
            with search_path(os.getcwd()):
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
        said = str(error).split(", run")[0]
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
        return Discrete(int(space.n)), lambda x: int(x) - start
    if isinstance(space, spaces.MultiDiscrete):
        sizes, start = space.nvec.reshape(-1).astype(int), space.start.reshape(-1).astype(int)
        first = np.cumsum(sizes) - sizes

        def one_hot(x: Any) -> np.ndarray:
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


# ------------------------------------------------------------------------------------------------------------ the other way


def to_gymnasium(env: str | Environment, **env_params: Any) -> "GymnasiumEnv":
    """An environment of ours, by name or as an object, as a ``gymnasium.Env``.

    Args:
      env: what `make_env` takes, or an environment.
      **env_params: of `make_env`, with a name.

    Raises:
      ValueError: what `make_env` objects to; rewards that are only known when episodes have ended.
    """
    return GymnasiumEnv(_ours(env, env_params))


def to_gymnasium_vector(env: str | Environment, num_envs: int, **env_params: Any) -> "GymnasiumVectorEnv":
    """``num_envs`` copies in one compiled program as a ``gymnasium.vector.VectorEnv``; see `to_gymnasium`."""
    return GymnasiumVectorEnv(_ours(env, env_params), num_envs)


def _ours(env: str | Environment, env_params: dict[str, Any]) -> Environment:
    made = make_env(env, **env_params) if isinstance(env, str) else env
    if getattr(made, "outcome", None) is not None:
        raise ValueError(
            f"env {env if isinstance(env, str) else type(env).__name__!r}: whole episodes are paid, and a step cannot be"
        )
    return made


class GymnasiumEnv(gymnasium.Env):
    """One copy of ``env``; a step is a call of one compiled function.

    ``reset(seed=)`` fixes all randomness up to the next seed. ``info`` is the time step's, and ``info["action_mask"]``, int8
    ``[A]``, says what is legal where the environment does; ``action_space.sample`` takes the mask of Discrete actions.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  # as Gymnasium declares it

    def __init__(self, env: Environment):
        self.env = env
        self.observation_space, self.action_space = _theirs(env.observation_space), _theirs(env.action_space)
        self._reset = jax.jit(env.reset)
        self._step = jax.jit(lambda key, count, state, action: env.step(jax.random.fold_in(key, count), state, action))
        self._state: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.close()
        start, self._key = jax.random.split(jax.random.key(self.np_random.integers(2**32)))
        self._count = 0
        self._state, timestep = self._reset(start)
        timestep = self._fetch(timestep)
        return _observed(self.observation_space, timestep.observation), _info(timestep)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        action = jnp.asarray(action, self.env.action_space.dtype)
        self._state, timestep = self._step(self._key, self._count, self._state, action)
        self._count += 1
        timestep = self._fetch(timestep)
        observation = _observed(self.observation_space, timestep.observation)
        flags = bool(timestep.terminated), bool(timestep.truncated)
        return observation, float(timestep.reward), *flags, _info(timestep)

    def close(self) -> None:
        if self._state is not None:
            host.release(self.env, self._state)

    def _fetch(self, timestep: TimeStep) -> TimeStep:
        timestep = jax.device_get(timestep)
        host.raise_failure(self.env)
        return timestep


class GymnasiumVectorEnv(gymnasium.vector.VectorEnv):
    """``num_envs`` copies of ``env``, reset within the step that ends their episode (``AutoresetMode.SAME_STEP``).

    Where an episode has ended, ``infos["final_obs"]`` holds its last observation and ``infos["final_info"]`` its last info, each
    with a mask (``infos["_final_obs"]``); ``infos["action_mask"]``, int8 ``[N, A]``, goes with the observations that are
    returned. ``episode_return`` and ``episode_length`` cover the episode up to the step.
    """

    metadata = {"render_modes": [], "autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, env: Environment, num_envs: int):
        self._env, self._envs, self.num_envs = env, vectorize(env, num_envs), num_envs
        self.single_observation_space, self.single_action_space = _theirs(env.observation_space), _theirs(env.action_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._reset = jax.jit(self._envs.reset)
        self._step = jax.jit(lambda key, count, state, action: self._envs.step(jax.random.fold_in(key, count), state, action))
        self._state: Any = None

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts every copy.

        Args:
          seed: one number for all copies, which still differ.

        Raises:
          ValueError: a list of seeds, or ``options``.
        """
        if isinstance(seed, list | tuple) or options:
            raise ValueError("one seed starts all copies, which still differ, and there are no options: reset(seed=0)")
        super().reset(seed=seed)
        self.close_extras()
        start, self._key = jax.random.split(jax.random.key(self.np_random.integers(2**32)))
        self._count = 0
        self._state, timestep = self._reset(start)
        timestep = self._fetch(timestep)
        return self._observed(timestep.observation), _masked(_info(timestep), np.ones(self.num_envs, bool))

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        actions = jnp.asarray(actions, self._env.action_space.dtype)
        self._state, timestep = self._step(self._key, self._count, self._state, actions)
        self._count += 1
        timestep = self._fetch(timestep)
        done, every = np.asarray(timestep.done), np.ones(self.num_envs, bool)
        infos = _masked(_info(timestep.replace(action_mask=None)), ~done)
        if timestep.action_mask is not None:
            infos |= _masked({"action_mask": timestep.action_mask.astype(np.int8)}, every)
        if done.any():
            last = np.full(self.num_envs, None, object)
            for i in np.flatnonzero(done):
                last[i] = _observed(self.single_observation_space, timestep.next_observation[i])
            final = _masked(_info(timestep.replace(action_mask=timestep.next_action_mask)), done)
            infos |= _masked({"final_obs": last, "final_info": final}, done)
        rewards = np.asarray(timestep.reward, np.float64)
        return self._observed(timestep.observation), rewards, np.array(timestep.terminated), np.array(timestep.truncated), infos

    def close_extras(self, **kwargs: Any) -> None:
        if self._state is not None:
            host.release(self._env, self._state)

    def _observed(self, observation: Any) -> np.ndarray:
        return np.array(observation, self.observation_space.dtype)

    def _fetch(self, timestep: TimeStep) -> TimeStep:
        timestep = jax.device_get(timestep)
        host.raise_failure(self._env)
        return timestep


def _theirs(space: Space) -> Any:
    if isinstance(space, Discrete):
        return spaces.Discrete(space.n)
    if isinstance(space, MultiDiscrete):
        return spaces.MultiDiscrete(list(space.nvec))
    if isinstance(space, Tokens):
        return spaces.Box(-1, space.n - 1, space.shape, np.int32)
    dtype = np.dtype(space.dtype)
    low, high = (np.broadcast_to(np.asarray(bound, dtype), space.shape) for bound in (space.low, space.high))
    return spaces.Box(low, high, space.shape, dtype.type)


def _observed(space: Any, observation: Any) -> Any:
    return space.dtype.type(observation) if isinstance(space, spaces.Discrete) else np.array(observation, space.dtype)


def _info(timestep: TimeStep) -> dict[str, Any]:
    info = {name: np.array(x) for name, x in timestep.info.items()}
    return info if timestep.action_mask is None else {**info, "action_mask": timestep.action_mask.astype(np.int8)}


def _masked(info: dict[str, Any], mask: np.ndarray) -> dict[str, Any]:
    """Each entry with the mask ``_entry`` that says for which copies it holds."""
    return {**info, **{f"_{name}": mask.copy() for name in info}}
