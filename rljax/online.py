"""Bandits at run time: one decision at a time, whose reward comes when it comes."""

import dataclasses
import functools
import io
import json
import math
import reprlib
import typing
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.agents.bandits import Bandit, best
from rljax.agents.base import BANDITS, agent_module
from rljax.files import write_whole
from rljax.options import check_range, convert, did_you_mean

DRAWS = 1000  # by which a propensity is estimated that has no closed form
BLOCK = 1024  # decisions of a log that one call of the compiled program takes at most
FORMAT = "rljax online 1"
LARGEST = 1e6  # of what is learnt from, in size: its squares are summed in float32, and one that is not finite would stay
MOST_NUMBERS = 2**31  # that are learned: more are a mistyped size, and XLA may end the process over one
traces: Counter[str] = Counter()  # how often each function was traced, in this process


class Decision(NamedTuple):
    """What was decided.

    Attributes:
      action: the arm.
      propensity: its probability, as the decider was. Exact of ``linucb``, whose choice is certain, and ``epsilon_greedy``; of
        ``thompson`` and ``neural_linear`` the share of 1,001 draws, of which the decision is one, so that it is never 0.
      id: decisions made before, to tell one from another in a log.
    """

    action: int
    propensity: float
    id: int


class Online:
    """A bandit that decides and learns one request at a time.

    The functions are those of the agent of that name; they are compiled at the first call, once for all deciders in the process
    that have the same sizes and static options. Equal seeds and equal calls in the same order give the same decisions.
    """

    def __init__(self, name: str, *, num_actions: int, context_size: int = 0, seed: int = 0, **options: Any):
        """Makes a decider that has learnt nothing.

        Args:
          name: ``linucb``, ``thompson``, ``epsilon_greedy`` or ``neural_linear``.
          num_actions: arms, numbered from 0.
          context_size: numbers in a context; 0: there is none.
          seed: of all that is drawn, below 2**32.
          **options: of the agent, as in ``[algo]``: ``alpha=0.5``.

        Raises:
          ValueError: an unknown name or option, a value of another type or out of its range; one line.
        """
        if name not in BANDITS:
            raise ValueError(
                f"name: {name!r} does not decide online{did_you_mean(str(name), [*BANDITS])}; {', '.join(BANDITS)} do"
            )
        config_class: Any = agent_module(name).Config
        fields, hints = {field.name: field for field in dataclasses.fields(config_class)}, typing.get_type_hints(config_class)
        for key in options:
            if key not in fields:
                raise ValueError(f"unknown option {key!r} of {name}{did_you_mean(key, list(fields))}")
            options[key] = convert(key, options[key], hints[key])
            check_range(key, options[key], fields[key].metadata)
        self.num_actions = _whole("num_actions", num_actions, 1, 2**31 - 1)
        self.context_size = _whole("context_size", context_size, 0, 2**31 - 1)
        self.seed = _whole("seed", seed, 0, 2**32 - 1)
        self.name, self.config = name, config_class(**options)
        self.decided = self.learned = 0
        self._sizes = (self.num_actions, self.context_size)
        self._options = jax.tree.map(jnp.float32, self.config)  # on the device once, and not at every call
        self._key = jax.random.key(self.seed)
        try:
            shapes = _init.eval_shape(self._options, self._sizes, self._key)
            numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
        except OverflowError:
            numbers = math.inf
        if numbers > MOST_NUMBERS:
            raise ValueError(f"num_actions, context_size and options ask for {numbers:,} numbers, more than {MOST_NUMBERS:,}")
        self._learner = _init(self._options, self._sizes, self._key)

    def decide(self, context: Any = None, action_mask: Any = None) -> Decision:
        """Chooses an arm, and learns nothing.

        Args:
          context: ``[context_size]``; None where there is none.
          action_mask: bool ``[num_actions]``, which arms may be chosen; None: all.

        Raises:
          ValueError: a context of another size or that is not finite, a mask of another size or without a legal arm; one line.
        """
        row = self._contexts(() if context is None else context, ())
        wanted = f"action_mask must be {self.num_actions} truth values with one True or more"
        mask = None if action_mask is None else _numbers(wanted, action_mask)
        if mask is not None:
            if mask.shape != (self.num_actions,) or not ((mask == 0) | (mask == 1)).all() or not mask.any():
                raise ValueError(f"{wanted}, got {_said(action_mask)}")
            mask = mask.astype(bool)
        number = np.uint32(self.decided % 2**32)
        action, propensity = jax.device_get(_decide(self._options, self._sizes, self._learner, self._key, number, row, mask))
        self.decided += 1
        return Decision(int(action), float(propensity), self.decided - 1)

    def learn(self, context: Any, action: int, reward: float) -> None:
        """Learns the reward of a decision, which need be neither the last nor its own.

        What comes late or in another order is taken as it comes: with ``discount`` 1 it makes no difference but for rounding.

        Raises:
          ValueError: a context of another size, an action that is no arm, a reward that is not finite (or, of a Beta posterior,
            not 0 to 1); one line.
        """
        row = self._contexts(() if context is None else context, ())
        for key, value in (("action", action), ("reward", reward)):
            if _numbers(f"{key} must be a number", value).shape:
                raise ValueError(f"{key} must be a number, got {_said(value)}")
        self.replay(row[None], [action], [reward])

    def replay(self, contexts: Any, actions: Sequence[int] | np.ndarray, rewards: Sequence[float] | np.ndarray) -> None:
        """Learns from a log of decisions, whoever made them: the same as `learn` of one after the other.

        Args:
          contexts: ``[N, context_size]``; None where there are none.
          actions: ``[N]``.
          rewards: ``[N]``.

        Raises:
          ValueError: as `learn`; columns of different lengths. Nothing has been learned then.
        """
        chosen = _numbers("action must be a number", actions)
        paid = _numbers("reward must be a number", rewards)
        if chosen.ndim != 1 or paid.shape != chosen.shape:
            raise ValueError(f"actions and rewards must be two columns of one length, got {chosen.shape} and {paid.shape}")
        contexts = np.zeros((len(chosen), 0)) if contexts is None else contexts
        is_empty = not len(chosen) and not np.size(contexts)  # however it is written
        rows = self._contexts(np.zeros((0, self.context_size)) if is_empty else contexts, chosen.shape)
        is_arm = (chosen >= 0) & (chosen < self.num_actions) & (chosen == np.floor(chosen)) if chosen.size else np.ones(0, bool)
        if not is_arm.all():
            raise ValueError(f"action must be a whole number of 0 to {self.num_actions - 1}, got {chosen[~is_arm][0]}")
        if not np.isfinite(paid).all():
            raise ValueError(f"reward must be finite, got {paid[~np.isfinite(paid)][0]}")
        if not (np.abs(paid) <= LARGEST).all():
            raise ValueError(f"reward must be at most {LARGEST:g} in size, got {paid[np.abs(paid) > LARGEST][0]:g}; scale it")
        if getattr(self.config, "prior", None) == "bernoulli" and not ((paid >= 0) & (paid <= 1)).all():
            raise ValueError(f"reward must be 0 to 1 with prior 'bernoulli', got {paid[(paid < 0) | (paid > 1)][0]:g}")
        chosen, paid, start = chosen.astype(np.int32), paid.astype(np.float32), 0
        while start < len(chosen):
            until_refresh = self.config.num_steps - self.learned % self.config.num_steps
            count = min(len(chosen) - start, BLOCK, until_refresh if self.name == "neural_linear" else BLOCK)
            size = 1 if count == 1 else BLOCK

            def block(x: np.ndarray, start: int = start, count: int = count, size: int = size) -> np.ndarray:
                part = x[start : start + count]
                return np.concatenate([part, np.zeros((size - count, *x.shape[1:]), x.dtype)])

            columns = (block(rows), block(chosen), block(paid))
            self._learner = _learn(self._options, self._sizes, self._learner, *columns, np.int32(count))
            self.learned += count
            start += count
            if self.name == "neural_linear" and self.learned % self.config.num_steps == 0:
                number = np.uint32(self.learned % 2**32)
                self._learner = _refresh(self._options, self._sizes, self._learner, self._key, number)

    def save(self, path: str | Path) -> None:
        """Writes all that it is to a file, whole or not at all: a process that is killed leaves the file that was there before.

        A decider that is loaded from it makes the same decisions, bit for bit, as this one.

        Raises:
          OSError: it cannot be written.
        """
        head = {
            "format": FORMAT,
            "name": self.name,
            "num_actions": self.num_actions,
            "context_size": self.context_size,
            "seed": self.seed,
            "decided": self.decided,
            "learned": self.learned,
            "options": dataclasses.asdict(self.config),
        }
        leaves: dict[str, Any] = {
            f"leaf_{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(jax.device_get(self._learner)))
        }
        content = io.BytesIO()
        np.savez(content, head=np.asarray(json.dumps(head)), **leaves)
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: str | Path, name: str | None = None) -> "Online":
        """The decider of a file that `save` wrote.

        Args:
          name: the agent that it must be; None: whichever it is.

        Raises:
          ValueError: no such file, one that is damaged or of another kind, a file of another agent; one line.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                head = json.loads(str(file["head"]))
                leaves = [file[f"leaf_{i}"] for i in range(len(file.files) - 1)]
        except FileNotFoundError as error:
            raise ValueError(f"{path}: no such file") from error
        except Exception as error:  # whatever numpy and zipfile say of bytes that they cannot read
            raise ValueError(f"{path} is no file that Online.save wrote, or is damaged") from error
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise ValueError(f"{path} is no file that this version of Online.save wrote")
        if name is not None and head.get("name") != name:
            raise ValueError(f"{path} holds a {head.get('name')}, and not a {name}")
        try:
            sizes = {key: head[key] for key in ("num_actions", "context_size", "seed")}
            decider = cls(head["name"], **sizes, **head["options"])
            decider.decided = _whole("decided", head["decided"], 0, 2**53)
            decider.learned = _whole("learned", head["learned"], 0, 2**53)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} is damaged: {reason}") from error
        structure, wanted = jax.tree.structure(decider._learner), jax.tree.leaves(decider._learner)
        if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in wanted]:
            raise ValueError(f"{path} is damaged: its arrays are not those of a {head['name']} of its sizes")
        if not all(np.isfinite(x).all() for x in leaves):
            raise ValueError(f"{path} is damaged: its arrays hold numbers that are not finite")
        decider._learner = jax.tree.unflatten(structure, [jnp.asarray(x) for x in leaves])
        return decider

    def _contexts(self, context: Any, lead: tuple[int, ...]) -> np.ndarray:
        """float32 ``[*lead, context_size]``."""
        rows = _numbers(f"context must be {self.context_size} numbers", context)
        if rows.shape != (*lead, self.context_size):
            raise ValueError(f"context must be of shape {[*lead, self.context_size]}, got {list(rows.shape)}")
        if not np.isfinite(rows).all():
            raise ValueError("context must be finite, and is not")
        if not (np.abs(rows) <= LARGEST).all():
            raise ValueError(f"context must hold numbers of at most {LARGEST:g} in size, got {_said(context)}; scale them")
        return rows.astype(np.float32)


def _whole(key: str, value: Any, low: int, high: int) -> int:
    number = convert(key, value, int)
    check_range(key, number, {"low": low, "high": high})
    return number


def _numbers(wanted: str, value: Any) -> np.ndarray:
    """``value`` as an array of real numbers; truth values are 0 and 1, None is NaN."""
    try:
        numbers = np.asarray(value)
        if numbers.dtype.kind in "USc":
            raise TypeError("text, or complex")
        return numbers if numbers.size and numbers.dtype.kind in "iuf" else numbers.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{wanted}, got {_said(value)}") from error


def _said(value: Any) -> str:
    """Some of it, on one line."""
    return " ".join(reprlib.repr(value).split())


def _bandit(options: Any, sizes: tuple[int, int]) -> Bandit:
    return agent_module(type(options).__module__.rpartition(".")[2]).bandit(options, *sizes)


@functools.partial(jax.jit, static_argnums=1)
def _init(options: Any, sizes: tuple[int, int], key: Array) -> Any:
    traces["init"] += 1
    return _bandit(options, sizes).init(jax.random.fold_in(key, 0))


@functools.partial(jax.jit, static_argnums=1)
def _decide(
    options: Any, sizes: tuple[int, int], learner: Any, key: Array, number: Array, context: Array, mask: Array | None
) -> tuple[Array, Array]:
    """``(action, propensity)``."""
    traces["decide"] += 1
    bandit = _bandit(options, sizes)
    rows, legal = context[None], None if mask is None else mask[None]
    own_key, draws_key = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, 1), number))
    action = best(bandit.scores(learner, rows, bandit.noise(own_key, 1))[1], legal)[0]
    if bandit.probabilities is not None:
        return action, bandit.probabilities(learner, rows, legal)[0, action]
    noise = bandit.noise(draws_key, DRAWS)
    again = jax.vmap(lambda one: best(bandit.scores(learner, rows, one[None])[1], legal)[0])(noise)
    return action, ((again == action).sum() + 1) / (DRAWS + 1)


@functools.partial(jax.jit, static_argnums=1)
def _learn(
    options: Any, sizes: tuple[int, int], learner: Any, contexts: Array, actions: Array, rewards: Array, count: Array
) -> Any:
    """After the first ``count`` decisions of a block, one by one."""
    traces["learn"] += 1
    update = _bandit(options, sizes).update

    def one(i: Array, learner: Any) -> Any:
        return update(learner, contexts[i][None], actions[i][None], rewards[i][None])

    return jax.lax.fori_loop(0, count, one, learner)


@functools.partial(jax.jit, static_argnums=1)
def _refresh(options: Any, sizes: tuple[int, int], learner: Any, key: Array, number: Array) -> Any:
    traces["refresh"] += 1
    refresh = _bandit(options, sizes).refresh
    assert refresh is not None
    return refresh(learner, jax.random.fold_in(jax.random.fold_in(key, 2), number))[0]
