"""Environments that live on the host: Python objects with a state of their own, behind the contract of pure functions.

A program calls the host once a step, for all copies of all lanes of a device. What stands for a copy in the program is a
`HostState`: a handle, and how many steps it has taken. Each call returns the count that the next one takes, so that calls come in
the order of the data, under ``vmap`` too, where an ordered callback cannot be had. Whoever comes with another count or with a
handle that is not known (the state was copied, or comes from a checkpoint) has lost its copy, which is said honestly: the episode
is truncated there.

The host never raises inside of a program, which would end the process with jax's own error. It keeps what went wrong, and
`raise_failure` raises it when the program has returned.
"""

import contextlib
import functools
import itertools
import secrets
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from rljax.envs.base import TimeStep, all_ended, restart, transition
from rljax.envs.spaces import Space

ON_HOST = "gymnasium/"  # what names of such environments begin with
_handles = itertools.count(secrets.randbits(30))  # one for each episode; those of an earlier process are unlikely to come again
_replaced: ContextVar[tuple[Array, Array] | None] = ContextVar("replaced", default=None)


class Simulator(Protocol):
    """One copy on the host. Observations and actions are numpy arrays of the spaces' shapes and dtypes."""

    def reset(self, seed: int) -> Any:
        """The first observation of an episode."""
        ...

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """``(observation, reward, terminated, truncated)``."""
        ...

    def close(self) -> None: ...


class EnvironmentFailed(RuntimeError):
    """An environment on the host raised, or returned what is no number; one line with its name, the copy and the step."""


class HostState(struct.PyTreeNode):
    """What stands for one copy on the host.

    Attributes:
      handle: int32 ``[]``, of its episode.
      steps: int32 ``[]``, of the episode so far.
      observation: the last one, which the episode ends with if its copy is lost.
    """

    handle: Array
    steps: Array
    observation: Any


class _Episode:
    """A copy in use."""

    def __init__(self, simulator: Simulator, seed: int, copy: str):
        self.simulator, self.seed, self.copy = simulator, seed, copy
        self.steps = 0


class Copies:
    """The host's side of a `HostEnvironment`: the episodes in play, by handle, and simulators that wait for the next one.

    Several devices may call at once; an episode belongs to one of them.

    Attributes:
      error: what went wrong first; nothing is played after it.
    """

    def __init__(self, name: str, make: Callable[[], Simulator], observation: Space):
        self._name, self._make = name, make
        self._shape, self._dtype = observation.shape, np.dtype(observation.dtype)
        self._lock = threading.Lock()
        self._playing: dict[int, _Episode] = {}
        self._idle: list[Simulator] = []
        self.error: BaseException | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """Episodes in play, and simulators that wait."""
        return len(self._playing), len(self._idle)

    def add(self, simulator: Simulator) -> None:
        """One more that waits."""
        self._idle.append(simulator)

    def begin(self, seeds: np.ndarray, wanted: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """New episodes where ``wanted [R]``: ``(handles [R], observations [R, ...])``; elsewhere -1 and zeros.

        Args:
          before: handles of the episodes that they replace, -1 for none.
        """
        self.release(before[wanted])
        handles, observations = np.full(len(seeds), -1, np.int32), self._no_observations(len(seeds))
        for row in np.flatnonzero(wanted).tolist():
            if self.error is not None:
                break
            seed, copy = int(seeds[row]), f"copy {row} of {len(seeds)}"
            try:
                with self._lock:  # what is made may be of a library that is not safe for threads
                    simulator = self._idle.pop() if self._idle else self._make()
                observation = simulator.reset(seed)
                observations[row] = self._checked(observation)
            except BaseException as error:
                self._fail(f"{copy}, reset with seed {seed}", error)
                break
            handles[row] = handle = next(_handles) % 2**31
            self._playing[handle] = _Episode(simulator, seed, copy)
        return handles, observations

    def step(self, handles: np.ndarray, steps: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        """``(observations, rewards, terminated, truncated, known, steps)`` ``[R, ...]``; what is not known is truncated."""
        rows = len(handles)
        observations, rewards = self._no_observations(rows), np.zeros(rows, np.float32)
        terminated, truncated, known = np.zeros(rows, bool), np.ones(rows, bool), np.zeros(rows, bool)
        for row, (handle, count) in enumerate(zip(handles.tolist(), steps.tolist(), strict=True)):
            episode = self._playing.get(handle)
            if episode is None or episode.steps != count or self.error is not None:
                continue
            episode.steps += 1
            try:
                observation, reward, ended, cut = episode.simulator.step(actions[row])
                observations[row] = self._checked(observation)
                rewards[row] = reward
                if not np.isfinite(rewards[row]):
                    raise ValueError(f"the reward is {reward}")
            except BaseException as error:
                self._fail(f"{episode.copy}, step {episode.steps} of the episode with seed {episode.seed}", error)
                continue
            terminated[row], truncated[row], known[row] = ended, cut, True
            if ended or cut:
                self.release(np.asarray([handle]))
        return observations, rewards, terminated, truncated, known, steps + np.int32(1)

    def release(self, handles: np.ndarray) -> None:
        """Ends episodes, known or not; their simulators wait for the next ones."""
        for handle in handles.reshape(-1).tolist():
            episode = self._playing.pop(handle, None)
            if episode is not None:
                self._idle.append(episode.simulator)

    def close(self) -> None:
        """Closes every simulator; episodes in play are lost."""
        playing, idle = self._playing, self._idle
        self._playing, self._idle = {}, []
        for simulator in [*idle, *(episode.simulator for episode in playing.values())]:
            with contextlib.suppress(Exception):  # of what nobody plays any more
                simulator.close()

    def _no_observations(self, rows: int) -> np.ndarray:
        return np.zeros((rows, *self._shape), self._dtype)

    def _checked(self, observation: Any) -> np.ndarray:
        array = np.asarray(observation, self._dtype)
        if array.shape != self._shape:
            raise ValueError(f"the observation has shape {list(array.shape)}, and its space {list(self._shape)}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError("the observation is not finite")
        return array

    def _fail(self, place: str, error: BaseException) -> None:
        if not isinstance(error, KeyboardInterrupt):  # SystemExit would end the run as if all were well
            said = " ".join(str(error).split())
            kind = "" if type(error) is ValueError else type(error).__name__ + ": " * bool(said)
            error = EnvironmentFailed(f"{self._name}: {place}: {kind}{said}")
        self.error = self.error or error  # an interrupt stays one


class HostEnvironment:
    """Simulators on the host as an `rljax.envs.Environment`.

    A reset is seeded from its key; what an episode draws after that is the simulator's own. An episode that has ended, or that is
    given back by `release`, leaves its simulator to the next one.

    Attributes:
      copies: the host's side.
    """

    def __init__(self, name: str, make: Callable[[], Simulator], observation_space: Space, action_space: Space):
        self.observation_space, self.action_space = observation_space, action_space
        self.copies = Copies(name, make, observation_space)
        self._begin = _for_all_lanes(functools.partial(_begin, self.copies, observation_space))
        self._step = _for_all_lanes(functools.partial(_step, self.copies, observation_space))
        weakref.finalize(self, self.copies.close)

    def reset(self, key: Array) -> tuple[HostState, TimeStep]:
        wanted, before = _replaced.get() or (jnp.ones((), bool), jnp.full((), -1, jnp.int32))
        seed = jax.random.bits(key, (1,), jnp.uint32)
        handle, observation = (x[0] for x in self._begin(seed, wanted[None], before[None]))
        return HostState(handle, jnp.zeros((), jnp.int32), observation), restart(observation)

    def step(self, key: Array, state: HostState, action: Array) -> tuple[HostState, TimeStep]:
        del key
        action = jnp.asarray(action, self.action_space.dtype)
        found = (x[0] for x in self._step(state.handle[None], state.steps[None], action[None]))
        observation, reward, terminated, truncated, known, steps = found
        observation = jnp.where(known, observation, state.observation)
        state = HostState(state.handle, steps, observation)
        return state, transition(observation, reward, terminated, truncated)


def is_on_host(env: Any) -> bool:
    """Of a wrapped one too."""
    return getattr(env, "copies", None) is not None


def restart_ended(env: Any, keys: Array, done: Array, state: Any, timestep: TimeStep) -> tuple[Any, TimeStep]:
    """``(state, timestep)`` of new episodes ``[N]`` where ``done [N]``; the host is called only in steps that end an episode.

    A loop of one turn or none stands for the condition: ``vmap`` has no condition around a callback.
    """

    def reset(key: Array, wanted: Array, state: Any) -> Any:
        token = _replaced.set((wanted, _host_state(state).handle))  # reaches the host's reset through all wrappers
        try:
            return env.reset(key)
        finally:
            _replaced.reset(token)

    def restarted(loop: Any) -> Any:
        done, state, _ = loop
        return jnp.zeros_like(done), *jax.vmap(reset)(keys, done, state)

    return jax.lax.while_loop(lambda loop: ~all_ended(~loop[0]), restarted, (done, state, timestep))[1:]


def release(env: Any, states: Any) -> None:
    """Gives back what is on the host for ``states [N]``, which nobody will step again; of any environment."""
    if is_on_host(env):
        state = _host_state(states)
        # With the steps, which the host has counted: a handle is the same from the start, and would be given back there.
        io_callback(lambda handles, steps: env.copies.release(np.asarray(handles)), None, state.handle, state.steps)


def raise_failure(env: Any) -> None:
    """Raises what went wrong on the host in the programs that have returned; of any environment.

    Raises:
      EnvironmentFailed: once; the environment is closed. An interrupt of the user's is raised as such.
    """
    if is_on_host(env) and env.copies.error is not None:
        error, env.copies.error = env.copies.error, None
        env.copies.close()
        raise error


def close(env: Any) -> None:
    """Closes what an environment, of any kind, holds on the host."""
    if is_on_host(env):
        env.copies.close()


def _host_state(states: Any) -> HostState:
    """Wrappers put theirs around it."""
    leaves = jax.tree.leaves(states, is_leaf=lambda x: isinstance(x, HostState))
    return next(leaf for leaf in leaves if isinstance(leaf, HostState))


def _for_all_lanes(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of rows ``[R, ...]``, which ``vmap`` calls once with all rows; it must map the first argument."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def of_all(size: int, is_mapped: Any, *args: Array) -> Any:
        if not is_mapped[0]:
            raise ValueError("vmap would step one copy on the host several times: map its reset too, with a key for each")
        args = tuple(x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in zip(args, is_mapped, strict=True))
        results = mapped(*(x.reshape(-1, *x.shape[2:]) for x in args))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in results), (True,) * len(results)

    return mapped


def _begin(copies: Copies, observation: Space, seeds: Array, wanted: Array, before: Array) -> Any:
    rows = len(seeds)
    shapes = (jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows, *observation.shape), observation.dtype))
    return _call(copies.begin, shapes, seeds, wanted, before)


def _step(copies: Copies, observation: Space, handles: Array, steps: Array, actions: Array) -> Any:
    rows = len(handles)
    of_rows = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.float32, jnp.bool_, jnp.bool_, jnp.bool_, jnp.int32)]
    shapes = (jax.ShapeDtypeStruct((rows, *observation.shape), observation.dtype), *of_rows)
    return _call(copies.step, shapes, handles, steps, actions)


def _call(on_host: Callable[..., tuple[np.ndarray, ...]], shapes: Any, *args: Array) -> Any:
    """On a CPU through the program's own buffers: `io_callback` would take some 20 times as long to get there and back."""
    if jax.default_backend() != "cpu":
        return io_callback(lambda *args: on_host(*map(np.asarray, args)), shapes, *args)

    def fill(context: Any, out: Any, *args: Any) -> None:
        for buffer, value in zip(out, on_host(*map(np.asarray, args)), strict=True):
            np.asarray(buffer)[...] = value

    return buffer_callback(fill, shapes, has_side_effect=True)(*args)
