"""Environments that live on the host: Python objects with a state of their own, behind the contract of pure functions.

A program calls the host once a step, for all copies of all lanes of a device. What stands for a copy in the program is a
`HostState`: a handle, and how many steps it has taken. Each call returns the count that the next one takes, so that calls come in
the order of the data, under ``vmap`` too, where an ordered callback cannot be had. Whoever comes with another count or with a
handle that is not known (the state was copied, or comes from a checkpoint) has lost its copy, which is said honestly: the episode
is truncated there.

The host never raises inside of a program, which would end the process with jax's own error. It keeps what went wrong, and
`raise_failure` raises it when the program has returned.
"""

import abc
import contextlib
import functools
import itertools
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

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
    """One copy on the host: what is used of a ``gymnasium.Env``."""

    def reset(self, *, seed: int) -> tuple[Any, Any]:
        """``(observation, info)``, the first of an episode."""
        ...

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """``(observation, reward, terminated, truncated, info)``."""
        ...

    def close(self) -> None: ...


class VectorSimulator(Protocol):
    """``num_envs`` copies on the host that are stepped together: what is used of a ``gymnasium.vector.VectorEnv``."""

    num_envs: int

    def reset(self, *, seed: Any, options: Any = None) -> tuple[Any, Any]:
        """``(observations, infos)``, the first of an episode, or of those of the copies in ``options["reset_mask"]``."""
        ...

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """``(observations, rewards, terminated, truncated, infos)``."""
        ...

    def close(self) -> None: ...


class Translation(NamedTuple):
    """Between a program's arrays and those of simulators; many copies at once, which costs little more than one.

    Attributes:
      observation: the program's space.
      see: observations of ``K`` copies, in a list or an array, as a new array ``[K, ...]`` of that space.
      action: the program's space.
      act: actions ``[K, ...]`` of that space as a new array of the simulators' actions ``[K, ...]``.
    """

    observation: Space
    see: Callable[[Any], np.ndarray]
    action: Space
    act: Callable[[np.ndarray], np.ndarray]


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


class _Failure(Exception):
    """Its message is the place, and its cause what went wrong there."""


class _Played(NamedTuple):
    """What a step returns to the program ``[R, ...]``; as it is made, nobody is known and all are truncated."""

    observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    known: np.ndarray

    def fill(self, rows: Any, *values: Any) -> None:
        """Of ``rows``, which are known; ``values`` in the order of the fields."""
        for array, value in zip(self, (*values, True), strict=True):
            array[rows] = value


class Copies(abc.ABC):
    """The host's side of a `HostEnvironment`: the episodes in play, by handle, and simulators that wait for the next ones.

    Several devices may call at once; an episode belongs to one of them.

    Attributes:
      translation: between the program and the simulators.
      seeds_each: whether each copy can be reset with a seed of its own.
      error: what went wrong first; nothing is played after it.
      film: of the last `filmed`: by handle, what each step of the episode looks like.
    """

    seeds_each = True

    def __init__(self, name: str, translation: Translation):
        self.name, self.translation = name, translation
        self._shape, self._dtype = translation.observation.shape, np.dtype(translation.observation.dtype)
        self._lock = threading.Lock()  # what is made may be of a library that is not safe for threads
        self.error: BaseException | None = None
        self.film: dict[int, list[Any]] = {}

    @property
    @abc.abstractmethod
    def counts(self) -> tuple[int, int]:
        """Copies in play, and copies that wait."""

    def begin(self, seeds: np.ndarray, wanted: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """New episodes where ``wanted [R]``: ``(handles [R], observations [R, ...])``; elsewhere -1 and zeros.

        Args:
          before: handles of the episodes that they replace, -1 for none.
        """
        handles, observations = np.full(len(seeds), -1, np.int32), self._no_observations(len(seeds))
        if wanted.any():
            self._try(self._begin, seeds, np.flatnonzero(wanted), before, handles, observations)
        return handles, observations

    def step(self, handles: np.ndarray, steps: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        """``(observations, rewards, terminated, truncated, known, steps)`` ``[R, ...]``; what is not known is truncated."""
        rows = len(handles)
        flags = np.zeros((3, rows), bool)
        flags[1] = True
        played = _Played(self._no_observations(rows), np.zeros(rows, np.float32), *flags)
        self._try(self._step, handles, steps, actions, played)
        return *played, steps + np.int32(1)

    @abc.abstractmethod
    def release(self, handles: np.ndarray) -> None:
        """Ends episodes, known or not; their simulators wait for the next ones."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes every simulator; episodes in play are lost."""

    @property
    def can_be_drawn(self) -> bool:
        """Whether `filmed` has something to show."""
        return False

    def filmed(self, develop: Callable[[np.ndarray], Any]) -> contextlib.AbstractContextManager[None]:
        """Episodes that begin inside are drawn, reset and every step; `film` has what ``develop`` made of the pictures.

        They are played by simulators of their own, so that those that wait stay as they are.

        Raises:
          ValueError: drawing failed.
          EnvironmentFailed: playing failed.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def _begin(
        self, seeds: np.ndarray, rows: np.ndarray, before: np.ndarray, handles: np.ndarray, observations: np.ndarray
    ) -> None:
        """Fills in ``handles`` and ``observations`` of ``rows``, one or more."""

    @abc.abstractmethod
    def _step(self, handles: np.ndarray, steps: np.ndarray, actions: np.ndarray, played: _Played) -> None:
        """Fills in ``played`` where the episode is known."""

    def _no_observations(self, rows: int) -> np.ndarray:
        return np.zeros((rows, *self._shape), self._dtype)

    def _checked(self, place: Callable[[int], str], observations: Any, rewards: Any = ()) -> tuple[np.ndarray, np.ndarray]:
        """``(observations [K, ...], rewards [K])`` of what ``K`` copies returned, in lists or arrays; a reset gives no rewards.

        All are checked at once; one by one only if something is wrong.

        Raises:
          _Failure: at the ``place`` of the first copy, of ``0 .. K - 1``, whose observation or reward is wrong.
        """
        try:
            return self._arrays(observations, rewards)
        except Exception:
            for i in range(len(observations)):
                try:
                    self._arrays(observations[i : i + 1], rewards[i : i + 1])
                except Exception as error:
                    raise _Failure(place(i)) from error
            raise

    def _arrays(self, observations: Any, rewards: Any) -> tuple[np.ndarray, np.ndarray]:
        """What it raises is worded for one copy."""
        seen = self.translation.see(observations)
        if seen.shape[1:] != self._shape:
            raise ValueError(f"the observation has shape {list(seen.shape[1:])}, and its space {list(self._shape)}")
        if seen.dtype.kind == "f" and not np.isfinite(seen).all():
            raise ValueError("the observation is not finite")
        earned = np.fromiter(map(float, rewards), np.float32, len(rewards))
        if not np.isfinite(earned).all():
            raise ValueError(f"the reward is {float(rewards[0])}")
        return seen, earned

    def _try(self, play: Callable[..., None], *args: Any) -> None:
        """Keeps what it raises, and plays nothing after that."""
        if self.error is not None:
            return
        try:
            play(*args)
        except _Failure as failure:
            self._fail(f"{failure}: ", failure.__cause__ or failure)
        except BaseException as error:
            self._fail("", error)

    def _fail(self, place: str, error: BaseException) -> None:
        if not isinstance(error, KeyboardInterrupt):  # SystemExit would end the run as if all were well
            said = " ".join(str(error).split())
            kind = "" if type(error) is ValueError else type(error).__name__ + ": " * bool(said)
            error = EnvironmentFailed(f"{self.name}: {place}{kind}{said}")
        self.error = self.error or error  # an interrupt stays one


class _Episode:
    """A copy in use: row ``row`` of ``rows``."""

    __slots__ = ("row", "rows", "seed", "simulator", "steps")

    def __init__(self, simulator: Simulator, seed: int, row: int, rows: int):
        self.simulator, self.seed, self.row, self.rows = simulator, seed, row, rows
        self.steps = 0

    def place(self) -> str:
        return _place(self.row, self.rows, self.seed, self.steps)


class SingleCopies(Copies):
    """A simulator for each copy, stepped one after the other.

    Args:
      make_drawn: makes one whose ``render()`` returns uint8 ``[H, W, 3]``; None: there is no such thing.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Simulator],
        translation: Translation,
        first: Simulator,
        make_drawn: Callable[[], Any] | None = None,
    ):
        super().__init__(name, translation)
        self._make, self._make_drawn = make, make_drawn
        self._develop: Callable[[np.ndarray], Any] | None = None
        self._undrawn: Exception | None = None
        self._playing: dict[int, _Episode] = {}
        self._idle: list[Simulator] = [first]

    @property
    def counts(self) -> tuple[int, int]:
        return len(self._playing), len(self._idle)

    def release(self, handles: np.ndarray) -> None:
        for handle in handles.reshape(-1).tolist():
            episode = self._playing.pop(handle, None)
            if episode is not None:
                self._idle.append(episode.simulator)

    def close(self) -> None:
        playing, idle = self._playing, self._idle
        self._playing, self._idle = {}, []
        _close_all([*idle, *(episode.simulator for episode in playing.values())])

    @property
    def can_be_drawn(self) -> bool:
        return self._make_drawn is not None

    @contextlib.contextmanager
    def filmed(self, develop: Callable[[np.ndarray], Any]) -> Iterator[None]:
        assert self._make_drawn is not None
        make, idle = self._make, self._idle
        self._make, self._idle, self._develop, self.film, self._undrawn = self._make_drawn, [], develop, {}, None
        try:
            yield
        finally:
            self.release(np.asarray(list(self.film), np.int64))
            made, error = self._idle, self.error
            self._make, self._idle, self._develop, self.error = make, idle, None, None
            _close_all(made)
        if error is not None:
            raise error
        if self._undrawn is not None:
            said = " ".join(str(self._undrawn).split()) or type(self._undrawn).__name__
            raise ValueError(f"{self.name} cannot be drawn: {said}") from self._undrawn

    def _shoot(self, handle: int, simulator: Any) -> None:
        if self._develop is not None and self._undrawn is None:
            try:
                self.film.setdefault(handle, []).append(self._develop(simulator.render()))
            except Exception as error:  # the episode goes on
                self._undrawn = error

    def _begin(
        self, seeds: np.ndarray, rows: np.ndarray, before: np.ndarray, handles: np.ndarray, observations: np.ndarray
    ) -> None:
        self.release(before[rows])
        begun, seen = [], []
        for row, seed in zip(rows.tolist(), seeds[rows].tolist(), strict=True):
            try:
                with self._lock:
                    simulator = self._idle.pop() if self._idle else self._make()
                handle, episode = _new_handle(), _Episode(simulator, seed, row, len(seeds))
                self._playing[handle] = episode
                seen.append(simulator.reset(seed=seed)[0])
                self._shoot(handle, simulator)
            except BaseException as error:
                raise _Failure(_place(row, len(seeds), seed, 0)) from error
            begun.append(handle)
        observations[rows], _ = self._checked(lambda i: self._playing[begun[i]].place(), seen)
        handles[rows] = begun

    def _step(self, handles: np.ndarray, steps: np.ndarray, actions: np.ndarray, played: _Played) -> None:
        playing, raised, actions = self._playing, None, self.translation.act(actions)
        rows, episodes, observations, rewards, terminated, truncated = [], [], [], [], [], []
        for row, (handle, count, action) in enumerate(zip(handles.tolist(), steps.tolist(), actions, strict=True)):
            episode = playing.get(handle)
            if episode is None or episode.steps != count:
                continue
            episode.steps += 1
            episodes.append(episode)
            try:
                observation, reward, ended, cut, _ = episode.simulator.step(action)
                self._shoot(handle, episode.simulator)
            except BaseException as error:
                raised = error
                break
            rows.append(row)
            observations.append(observation)
            rewards.append(reward)
            terminated.append(ended)
            truncated.append(cut)
        if rows:
            seen, earned = self._checked(lambda i: episodes[i].place(), observations, rewards)
            every = slice(None) if len(rows) == len(handles) else rows  # a list as an index takes its time
            played.fill(every, seen, earned, terminated, truncated)
        if raised is not None:
            raise _Failure(episodes[-1].place()) from raised
        self.release(handles[(played.terminated | played.truncated) & played.known])


class _Batch:
    """A vector simulator in use.

    Attributes:
      handles: int32 ``[R]``, the episode that each row played last.
      steps: int32 ``[R]``, of it.
      seeds: int64 ``[R]``, of it; -1 where it began without one.
      alive: bool ``[R]``, it goes on, and whoever has it stepped it last.
      over: bool ``[R]``, the last step ended an episode of the row.
      fresh: ``[R, ...]``, of simulators that begin the next episode in the same step: its first observation where ``over``.
      count: steps of all rows since they were reset together.
    """

    def __init__(self, simulator: VectorSimulator):
        rows = simulator.num_envs
        self.simulator = simulator
        self.handles, self.steps, self.seeds = np.full(rows, -1, np.int32), np.zeros(rows, np.int32), np.full(rows, -1)
        self.alive, self.over = np.zeros((2, rows), bool)
        self.fresh = np.zeros(0)
        self.count = 0

    def place(self, row: int) -> str:
        return _place(row, len(self.handles), int(self.seeds[row]), int(self.steps[row]))


class VectorCopies(Copies):
    """A simulator for all copies of a call, which it steps together.

    They begin together too, and where an episode has ended, the next begins. Where it does not, as in evaluations, its row is
    played on unseen.

    Args:
      make: of a number of copies.
      first: one that was made before.
      same_step: the simulator begins the next episode in the step that ends one; otherwise it is reset where one has ended.
      seed_as: how it takes seeds: a ``"list"``, an ``"array"`` of those of the copies that are reset, or ``"one"`` for all, which
        it gets when all are reset.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int], VectorSimulator],
        translation: Translation,
        first: VectorSimulator,
        same_step: bool,
        seed_as: str,
    ):
        super().__init__(name, translation)
        self._make, self._same_step, self._seed_as = make, same_step, seed_as
        self.seeds_each = seed_as != "one"
        self._playing: dict[int, _Batch] = {}
        self._idle: list[VectorSimulator] = [first]

    @property
    def counts(self) -> tuple[int, int]:
        return len(self._playing), sum(simulator.num_envs for simulator in self._idle)

    def release(self, handles: np.ndarray) -> None:
        found = (self._playing.pop(handle, None) for handle in handles.reshape(-1).tolist())
        for batch in {id(batch): batch for batch in found if batch is not None}.values():
            if not any(handle in self._playing for handle in batch.handles.tolist()):
                self._idle.append(batch.simulator)

    def close(self) -> None:
        playing, idle = {id(batch): batch.simulator for batch in self._playing.values()}, self._idle
        self._playing, self._idle = {}, []
        _close_all([*idle, *playing.values()])

    def _begin(
        self, seeds: np.ndarray, rows: np.ndarray, before: np.ndarray, handles: np.ndarray, observations: np.ndarray
    ) -> None:
        size = len(seeds)
        is_whole = len(rows) == size
        batch = self._batch(before) or (self._new(size) if is_whole else None)
        if batch is None:
            raise ValueError(f"copy {rows[0]} of {size} cannot begin alone: those beside it are not in play")
        goes_on = self._same_step and not is_whole
        if goes_on and not batch.over[rows].all():
            late = rows[~batch.over[rows]][0]
            raise _Failure(batch.place(late)) from ValueError(
                "the episode has not ended, and the simulator begins no other: a limit on steps must be its own"
            )
        for row in rows.tolist():
            self._playing.pop(int(batch.handles[row]), None)
            handles[row] = batch.handles[row] = handle = _new_handle()
            self._playing[handle] = batch
        batch.steps[rows], batch.alive[rows] = 0, True
        if goes_on:
            batch.seeds[rows] = -1
            observations[rows] = batch.fresh[rows]
        else:
            first = self._reset(batch, seeds, None if is_whole else np.isin(np.arange(size), rows))
            observations[rows], _ = self._checked(lambda i: batch.place(rows[i]), first[rows])

    def _step(self, handles: np.ndarray, steps: np.ndarray, actions: np.ndarray, played: _Played) -> None:
        batch = self._batch(handles)
        if batch is None:
            return
        known = batch.alive & (handles == batch.handles) & (steps == batch.steps)
        if not known.any():
            return
        if not self._same_step and batch.over.any():
            self._reset(batch, batch.seeds, batch.over)
        rows = np.flatnonzero(known)
        batch.steps[rows] += 1
        batch.count += 1
        try:
            observations, rewards, *flags, infos = batch.simulator.step(self.translation.act(actions))
            observations, rewards = np.asarray(observations), np.asarray(rewards)
            terminated, truncated = np.asarray(flags, bool)
            for values in (observations, rewards, terminated):
                if len(values) != len(known):
                    raise ValueError(f"it returned values of {len(values)} copies")
            batch.over = done = terminated | truncated
            last = observations if len(rows) == len(known) else observations[rows]
            if self._same_step and done.any():
                if "final_obs" not in infos:
                    raise ValueError("an episode has ended, and info has no final_obs")
                last = [infos["final_obs"][row] if done[row] else observations[row] for row in rows.tolist()]
        except BaseException as error:
            raise _Failure(f"step {batch.count} of {len(known)} copies together") from error
        seen, earned = self._checked(lambda i: batch.place(rows[i]), last, rewards[rows])
        if self._same_step and done.any():
            ended = np.flatnonzero(done)
            batch.fresh = self._no_observations(len(known))
            batch.fresh[ended], _ = self._checked(lambda i: batch.place(ended[i]), observations[ended])
        batch.alive = known & ~done
        played.fill(rows, seen, earned, terminated[rows], truncated[rows])

    def _batch(self, handles: np.ndarray) -> _Batch | None:
        """Whose rows these are; of several, the first."""
        found = (self._playing.get(handle) for handle in handles.tolist())
        return next((batch for batch in found if batch is not None and len(batch.handles) == len(handles)), None)

    def _new(self, rows: int) -> _Batch:
        with self._lock:
            simulator = next((one for one in self._idle if one.num_envs == rows), None)
            if simulator is not None:
                self._idle.remove(simulator)
                return _Batch(simulator)
            simulator = self._make(rows)
            if simulator.num_envs != rows:
                self._idle.append(simulator)
                raise ValueError(f"{rows} copies were asked for, and {simulator.num_envs} were made")
            return _Batch(simulator)

    def _reset(self, batch: _Batch, seeds: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        """Observations ``[R, ...]`` after a reset of the rows in ``mask``, or of all."""
        rows = np.arange(len(seeds)) if mask is None else np.flatnonzero(mask)
        batch.seeds[rows] = seeds[rows]
        if self._seed_as == "list":
            seed = seeds.tolist()
        elif self._seed_as == "array":
            seed = (seeds[rows] >> 1).astype(np.int64)  # within int32, which is behind ale_py's
        else:
            seed = int(seeds[0]) if mask is None else None
            batch.seeds[rows] = -1 if seed is None else seed
        options = {} if mask is None else {"options": {"reset_mask": mask.copy()}}
        batch.over[rows], batch.count = False, batch.count if mask is not None else 0
        try:
            observations = np.asarray(batch.simulator.reset(seed=seed, **options)[0])
            if len(observations) != len(seeds):
                raise ValueError(f"it returned observations of {len(observations)} copies")
        except BaseException as error:
            raise _Failure(f"reset of {len(rows)} of {len(seeds)} copies together") from error
        return observations


def _place(row: int, rows: int, seed: int, steps: int) -> str:
    of_seed = f" with seed {seed}" if seed >= 0 else ""
    return f"copy {row} of {rows}, " + (f"step {steps} of the episode{of_seed}" if steps else f"reset{of_seed}")


def _new_handle() -> int:
    return next(_handles) % 2**31


def _close_all(simulators: Iterable[Simulator | VectorSimulator]) -> None:
    for simulator in simulators:
        with contextlib.suppress(Exception):  # of what nobody plays any more
            simulator.close()


class HostEnvironment:
    """Simulators on the host as an `rljax.envs.Environment`.

    A reset is seeded from its key; what an episode draws after that is the simulator's own. An episode that has ended, or that is
    given back by `release`, leaves its simulator to the next one.

    Attributes:
      copies: the host's side.
    """

    def __init__(self, copies: Copies):
        self.copies = copies
        self.observation_space, self.action_space = copies.translation.observation, copies.translation.action
        self._begin = _for_all_lanes(functools.partial(_begin, copies, self.observation_space))
        self._step = _for_all_lanes(functools.partial(_step, copies, self.observation_space))
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
        token = _replaced.set((wanted, host_state(state).handle))  # reaches the host's reset through all wrappers
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
        state = host_state(states)
        # With the steps, which the host has counted: a handle is the same from the start, and would be given back there.
        io_callback(lambda handles, steps: env.copies.release(np.asarray(handles)), None, state.handle, state.steps)


def filmed(env: Any, develop: Callable[[np.ndarray], Any]) -> contextlib.AbstractContextManager[None]:
    """`Copies.filmed`; of an environment that is not on the host, nothing."""
    return env.copies.filmed(develop) if is_on_host(env) else contextlib.nullcontext()


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


def host_state(states: Any) -> HostState:
    """What is in the state of an environment on the host; wrappers put theirs around it."""
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
