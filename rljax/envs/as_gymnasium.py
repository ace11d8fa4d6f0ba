"""Our environments as Gymnasium's, single and vectorised, for its libraries. `rljax.envs.gymnasium` is the other way."""

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from rljax.envs import host
from rljax.envs.base import Environment, TimeStep
from rljax.envs.registry import make_env
from rljax.envs.spaces import Discrete, MultiDiscrete, Space, Tokens
from rljax.envs.vector import vectorize


def to_gymnasium(env: str | Environment, **env_params: Any) -> "GymnasiumEnv":
    """An environment of ours, by name or as an object, as a ``gymnasium.Env``.

    Args:
      env: what `make_env` takes, or an environment.
      **env_params: of `make_env`, with a name.

    Raises:
      ValueError: what `make_env` objects to; rewards that are only known when episodes have ended. Of the environment, actions
        that are none and options of a reset.
    """
    return GymnasiumEnv(_ours(env, env_params))


def to_gymnasium_vector(env: str | Environment, num_envs: int, **env_params: Any) -> "GymnasiumVectorEnv":
    """``num_envs`` copies in one compiled program as a ``gymnasium.vector.VectorEnv``; see `to_gymnasium`."""
    return GymnasiumVectorEnv(_ours(env, env_params), num_envs)


def _ours(env: str | Environment, env_params: dict[str, Any]) -> Environment:
    if env_params and not isinstance(env, str):
        raise ValueError(f"{next(iter(env_params))}: parameters go with the name of an environment, not with one that is made")
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
        if options:
            raise ValueError("there are no options: reset(seed=0)")
        super().reset(seed=seed)
        self.close()
        start, self._key = jax.random.split(jax.random.key(self.np_random.integers(2**32)))
        self._count = 0
        self._state, timestep = self._reset(start)
        timestep = self._fetch(timestep)
        return _observed(self.observation_space, timestep.observation), _info(timestep)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._state is None:
            raise gymnasium.error.ResetNeeded("call reset before step")
        ours = _acted("action", self.env.action_space, self.action_space, action)
        self._state, timestep = self._step(self._key, self._count, self._state, ours)
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
        if self._state is None:
            raise gymnasium.error.ResetNeeded("call reset before step")
        ours = _acted("actions", self._env.action_space, self.action_space, actions)
        self._state, timestep = self._step(self._key, self._count, self._state, ours)
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


def _acted(name: str, ours: Space, theirs: Any, action: Any) -> np.ndarray:
    """An action of ``theirs``, a single space or that of a batch, for our environment, which judges the bounds of a Box itself.

    Raises:
      ValueError: another shape or kind, a choice that there is not, a number that is not finite.
    """
    try:
        array = np.asarray(action)
    except ValueError as error:
        raise ValueError(
            f"{name} must be an array of shape {list(theirs.shape)}, and its rows are of different lengths"
        ) from error
    is_box = isinstance(theirs, spaces.Box) and jnp.issubdtype(ours.dtype, jnp.floating)
    if array.shape != theirs.shape or array.dtype.kind not in ("iuf" if is_box else "iu"):
        wanted = f"{theirs.dtype}{list(theirs.shape)}"
        raise ValueError(f"{name} must be {wanted}, got {array.dtype}{list(array.shape)}")
    if is_box and not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, got {array.tolist()}")
    if not is_box and not theirs.contains(array.astype(theirs.dtype)):
        raise ValueError(f"{name} must be in {theirs}, got {array.tolist()}")
    return array.astype(ours.dtype)


def _observed(space: Any, observation: Any) -> Any:
    return space.dtype.type(observation) if isinstance(space, spaces.Discrete) else np.array(observation, space.dtype)


def _info(timestep: TimeStep) -> dict[str, Any]:
    info = {name: np.array(x) for name, x in timestep.info.items()}
    return info if timestep.action_mask is None else {**info, "action_mask": timestep.action_mask.astype(np.int8)}


def _masked(info: dict[str, Any], mask: np.ndarray) -> dict[str, Any]:
    """Each entry with the mask ``_entry`` that says for which copies it holds."""
    return {**info, **{f"_{name}": mask.copy() for name in info}}
