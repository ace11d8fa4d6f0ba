"""Graders: what a completion is worth, computed on the host and configured by plain tables.

The kinds ``string_check``, ``text_similarity``, ``python`` and ``multi`` and their keys are those of hosted reinforcement
fine-tuning. User code runs in worker processes that can be killed: a grader that fails makes its item invalid, with a reason, and
never worth 0.

This file is also the worker's program, so that at the top it imports the standard library alone.
"""

import ast
import collections
import contextlib
import faulthandler
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import keyword
import marshal
import math
import multiprocessing.connection
import numbers
import os
import pickle
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import typing
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

ERRORS = (
    "",  # valid
    "timeout",  # the grader took longer than its deadline; its process was killed
    "exception",  # it raised
    "none",  # it returned None
    "not_a_number",  # it returned something else that is no number
    "not_finite",  # it returned NaN, an infinity or what float32 cannot hold
    "crashed",  # its process ended
    "missing_column",  # the item has no column that a template names
    "no_reference",  # the reference is empty: nothing to grade against
)
LARGEST = 3.4e38  # that float32 holds
GRACE_SECONDS = 2.0  # after its deadline a worker whose parent could not kill it ends by itself
CALLBACK_PART = 20_000  # numbers; jax copies less than 100 KiB at once
START_SECONDS = 60.0  # for a worker to import what the user's code imports

GradeItem = Callable[["Item"], float]


class Item(NamedTuple):
    """One completion, and what it is graded by. ``columns`` are the further columns of the row that its prompt came from."""

    prompt: str
    completion: str
    answer: str = ""
    columns: Mapping[str, Any] = types.MappingProxyType({})

    @classmethod
    def from_row(cls, row: Mapping[str, Any], completion: str) -> "Item":
        """Of a row of `load_jsonl`. The prompt of ``messages`` is the last message of the user; ``messages`` stay a column."""
        prompt = row.get("prompt")
        if prompt is None:
            prompt = next((m["content"] for m in reversed(row["messages"]) if m["role"] == "user"), "")
        columns = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
        return cls(prompt, completion, row.get("answer", ""), columns)


class Grade(NamedTuple):
    """What a grader says of one item.

    An invalid grade has a code of `ERRORS` in ``error``, words in ``detail`` and NaN for its reward, and for those of its
    ``components`` that failed.
    """

    reward: float
    components: dict[str, float]
    valid: bool = True
    error: str = ""
    detail: str = ""


def make_grader(config: Mapping[str, Any], *, cache_size: int = 65_536) -> "Grader":
    """The grader that a table describes.

    Every table has ``type``, and may have ``name``, which its component is then called by. Texts hold templates:
    ``{{ completion }}``, ``{{ prompt }}``, ``{{ answer }}``, ``{{ column }}``, ``{{ column.key.0 }}``; ``item.`` before a column
    and ``sample.output_text`` are read too. By default ``input`` is the completion and ``reference`` the answer. An item whose
    reference is filled in with nothing is invalid.

    - ``string_check``: ``operation`` is ``eq``, ``ne``, ``like`` (the input contains the reference) or ``ilike`` (in any case).
    - ``text_similarity``: ``evaluation_metric``, from 0 to 1, is one of `METRICS`.
    - ``exact``: equal but for case, the form of white space and a final full stop.
    - ``number``: the last number of the input is the reference (of which what follows ``####`` counts), up to ``tolerance`` (0).
      Nothing if other numbers are offered beside it, as in "5 or 6".
    - ``tag``, ``boxed``: what stands in ``<answer></answer>`` (or another ``tag``), or in ``\\boxed{}``, is the reference, as
      a text as in ``exact`` or as a number. Nothing if several different answers are offered.
    - ``length``: 1 up to ``target`` ``unit`` (``"words"`` or ``"characters"``), then target / length; nothing for an empty input.
    - ``python``: ``source``, a ``.py`` file or code that defines ``grade(sample, item)``, or ``function``, ``"module:attribute"``
      or ``"file.py:attribute"``. ``sample`` is ``{"output_text": completion}``, ``item`` the row with ``prompt`` and ``answer``.
    - ``reasoning_gym``: ``dataset``, its ``config``, and the ``tag`` that the answer stands in ("": it is the whole completion).
    - a name that a package registers (`rljax.extensions`), with the keyword-only arguments of its ``grade(sample, item)``.
    - ``multi``: ``graders``, tables by name, and ``calculate_output``, an expression of their names with ``+ - * / ^`` and
      `FUNCTIONS`. Invalid where a grader that it names is.

    ``python``, ``reasoning_gym`` and graders of packages take ``timeout`` (10), seconds for one item, and ``workers``, the number
    of processes. They are no sandbox: user code has the user's rights. jax shows it no accelerator, and what it prints is
    dropped.

    Args:
      config: the table.
      cache_size: how many grades are kept; the least recently used is dropped first. Only valid ones are: an item that timed out,
        crashed or raised is graded anew. 0 grades every item anew, for graders that draw at random.

    Raises:
      ValueError: a wrong or missing key, a source that cannot be read or parsed.
    """
    return Grader(config, cache_size)


class Grader:
    """Grades batches of items; make one with `make_grader`. Usable from several threads, one batch at a time.

    Attributes:
      component_names: keys of every grade's components; a grader inside of a multi inside of a multi is ``"outer/inner"``.
      hash: twelve hex digits of the resolved config, source code of ``source`` included.
      cache_hits: items so far whose grade was known, from before or from the same batch.
    """

    def __init__(self, config: Mapping[str, Any], cache_size: int = 65_536):
        self._root = _build(config, "grader")
        self._cache: collections.OrderedDict[bytes, Grade] = collections.OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self.component_names = tuple(self._root.names)
        self.hash = hashlib.sha256(json.dumps(self._root.identity, sort_keys=True, default=repr).encode()).hexdigest()[:12]
        self.cache_hits = 0

    def grade(self, items: Sequence[Item]) -> list[Grade]:
        """A grade for each item. Takes at most ``timeout * len(items) / workers`` seconds per grader, with everything hanging.

        Raises:
          ValueError: user code that cannot be loaded, the first time that it is needed.
        """
        with self._lock:
            keys = [_content(item, self.hash) if self._cache_size else str(i).encode() for i, item in enumerate(items)]
            wanted = {key: item for key, item in zip(keys, items, strict=True) if key not in self._cache}
            known = {key: self._cache[key] for key in keys if key in self._cache}
            self.cache_hits += len(items) - len(wanted)
            for key in known:
                self._cache.move_to_end(key)
            graded = dict(zip(wanted, self._root.grade(list(wanted.values())) if wanted else [], strict=True))
            if self._cache_size:
                self._cache.update((key, grade) for key, grade in graded.items() if grade.valid)
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
            return [(known | graded)[key] for key in keys]

    def close(self) -> None:
        """Ends the worker processes; they start again if the grader is used again. Also done at exit."""
        with self._lock:
            self._root.close()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def host_reward(
    grader: Grader, decode: Callable[[Any, int], Item], component_names: Sequence[str] | None = None
) -> Callable[[Any, Any, Any], tuple[Any, Any, Any, Any]]:
    """A function of arrays, for `jax.jit` and `jax.vmap`, that calls the grader on the host, once for all rows of all lanes.

    It takes ``tokens`` int32 ``[B, T]``, ``lengths`` int32 ``[B]`` and ``index`` int32 ``[B]``, the row of data, and gives
    ``reward`` float32 ``[B]``, ``components`` float32 ``[B, C]``, ``valid`` bool ``[B]`` and ``error`` int32 ``[B]``, a place in
    `ERRORS`. Rewards that are not valid are NaN: take them out with ``jnp.where(valid, reward, ...)``.

    It is a pure callback: it may be skipped where its result is not used, and nothing is differentiated through it.

    Args:
      decode: of the tokens of one completion, an int32 numpy array ``[length]``, and its index, the item.
      component_names: the columns of ``components``; all of the grader's by default.

    Raises:
      ValueError: an unknown component.
    """
    import jax
    import jax.custom_batching
    import jax.numpy as jnp
    import numpy as np

    names = tuple(grader.component_names if component_names is None else component_names)
    for name in names:
        if name not in grader.component_names:
            raise ValueError(f"component_names: the grader has no {name!r}{_near(name, grader.component_names)}")

    def on_host(rows: int, *parts: Any) -> tuple[Any, Any, Any, Any]:
        data = np.concatenate([np.asarray(part) for part in parts])
        tokens, lengths, index = data[: -2 * rows].reshape(rows, -1), data[-2 * rows : -rows], data[-rows:]
        decoded = [decode(row[:length], int(i)) for row, length, i in zip(tokens, lengths, index, strict=True)]
        grades = grader.grade(decoded)
        return (
            np.array([g.reward for g in grades], np.float32),
            np.array([[g.components[name] for name in names] for g in grades], np.float32),
            np.array([g.valid for g in grades], bool),
            np.array([ERRORS.index(g.error) for g in grades], np.int32),
        )

    @jax.custom_batching.custom_vmap
    def reward(tokens: jax.Array, lengths: jax.Array, index: jax.Array) -> tuple[Any, Any, Any, Any]:
        rows = lengths.shape[0]
        results = [((rows,), jnp.float32), ((rows, len(names)), jnp.float32), ((rows,), jnp.bool_), ((rows,), jnp.int32)]
        shapes = tuple(jax.ShapeDtypeStruct(*result) for result in results)
        # In parts: jax copies larger arguments on the threads that wait in callbacks, and with several devices for ever.
        data = jnp.concatenate([x.reshape(-1).astype(jnp.int32) for x in (tokens, lengths, index)])
        parts = [data[begin : begin + CALLBACK_PART] for begin in range(0, data.size, CALLBACK_PART)]
        return jax.pure_callback(functools.partial(on_host, rows), shapes, *parts)

    @reward.def_vmap
    def of_all_lanes(lanes: int, is_mapped: Any, *args: jax.Array) -> Any:
        args = tuple(x if mapped else jnp.broadcast_to(x, (lanes, *x.shape)) for x, mapped in zip(args, is_mapped, strict=True))
        results = reward(*(x.reshape(-1, *x.shape[2:]) for x in args))
        return tuple(x.reshape(lanes, -1, *x.shape[1:]) for x in results), (True,) * 4

    return reward


def load_jsonl(
    path: str | Path,
    *,
    required: Sequence[str] = ("answer",),
    each: Callable[[dict[str, Any], str], dict[str, Any]] = lambda row, place: row,
) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file: ``prompt`` (text) or ``messages`` (``{"role", "content"}`` each), ``answer``, further columns.

    An answer that is a number becomes its text. Empty lines are skipped.

    Args:
      required: the columns that every row must have beside its prompt.
      each: called with a row and its place, ``"FILE, line N"``; what it returns is kept.

    Raises:
      ValueError: what is wrong, with the file, the number of the line and the key.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line.decode())
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not valid JSON: {error.msg}, at column {error.colno}") from error
        except RecursionError as error:
            raise ValueError(f"{place}: not valid JSON: nested too deeply") from error
        except ValueError as error:  # no UTF-8, or a number of thousands of digits
            raise ValueError(f"{place}: not valid JSON: {str(error).partition(';')[0]}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place}: must be an object with prompt or messages, {' and '.join(required)}, got {str(row)[:60]}")
        if ("prompt" in row) == ("messages" in row):
            raise ValueError(f"{place}: must have either prompt or messages, got the keys {', '.join(row) or 'none'}")
        if not isinstance(row.get("prompt", ""), str):
            raise ValueError(f"{place}: prompt must be text, got {row['prompt']!r}")
        if row.get("prompt") == "":
            raise ValueError(f"{place}: prompt is empty")
        if "messages" in row and not _are_messages(row["messages"]):
            shown = str(row["messages"])[:60]
            raise ValueError(f'{place}: messages must be a list of {{"role": text, "content": text}}, got {shown}')
        for key in required:
            if key not in row:
                raise ValueError(f"{place}: {key} is missing{_near(key, row)}")
        if "completion" in row:
            raise ValueError(f"{place}: completion is what the model writes; give the column another name")
        answer = row.get("answer", "")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise ValueError(f"{place}: answer must be text or a number, got {answer!r}")
        rows.append(each({**row, "answer": str(answer)} if "answer" in row else row, place))
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def reasoning_gym_items(dataset_name: str, size: int, seed: int, **config: Any) -> list[dict[str, Any]]:
    """Rows as of `load_jsonl` of a reasoning-gym data set (Stojanovski et al. 2025, arXiv 2505.24760); ``metadata`` is a column.

    Raises:
      ValueError: reasoning-gym is not installed; an unknown or unsound data set, or a config that it refuses.
    """
    dataset = _reasoning_gym(dataset_name, {**config, "size": size, "seed": seed}, "dataset_name")
    return [{"prompt": row["question"], "answer": row["answer"] or "", "metadata": row["metadata"]} for row in dataset]


def _reasoning_gym(name: str, config: Mapping[str, Any], key: str) -> Any:
    try:
        gym = importlib.import_module("reasoning_gym")
        datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise ValueError(f"{key}: reasoning-gym is not installed: pip install 'reasoning-gym>=0.1.25,<0.2'") from error
    if name not in datasets:
        raise ValueError(f"{key}: unknown reasoning-gym data set {name!r}{_near(name, datasets)}")
    if name in UNSOUND:
        raise ValueError(f"{key}: {name!r} is left out: {UNSOUND[name]}")
    try:
        return gym.create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{key}: {name!r} refuses its config: {error}") from error


# ------------------------------------------------------------------------------------------------------- configs to graders


class _Failure(Exception):
    """An item that cannot be graded: a code of `ERRORS` and words."""


class _Node:
    """A grader of one component that is a function of the item."""

    def __init__(self, name: str, identity: Any, function: GradeItem):
        self.names, self.identity, self.function = [name], identity, function

    def grade(self, items: list[Item]) -> list[Grade]:
        return [_grade(self.names[0], *_attempt(self.function, item)) for item in items]

    def close(self) -> None:
        pass


class _PythonNode(_Node):
    """A grader of one component that is user code in worker processes."""

    def __init__(self, name: str, identity: Any, setup: dict[str, Any], timeout: float, workers: int):
        super().__init__(name, identity, lambda item: math.nan)
        self.pool = _Pool(setup, timeout, workers)

    def grade(self, items: list[Item]) -> list[Grade]:
        requests = [({"output_text": i.completion}, {**i.columns, "prompt": i.prompt, "answer": i.answer}) for i in items]
        return [_grade(self.names[0], *reply) for reply in self.pool.run(requests)]

    def close(self) -> None:
        self.pool.close()


class _MultiNode(_Node):
    """An expression of other graders' rewards."""

    def __init__(self, identity: Any, nodes: dict[str, _Node], output: Callable[[Mapping[str, Grade]], float]):
        self.identity, self.nodes, self.output = identity, nodes, output
        self.names = [f"{key}/{n}" if isinstance(node, _MultiNode) else key for key, node in nodes.items() for n in node.names]

    def grade(self, items: list[Item]) -> list[Grade]:
        parts = [node.grade(items) for node in self.nodes.values()]
        result = []
        for grades in zip(*parts, strict=True):
            values = (value for grade in grades for value in grade.components.values())
            reward, error, detail = _attempt(self.output, dict(zip(self.nodes, grades, strict=True)))
            result.append(Grade(reward, dict(zip(self.names, values, strict=True)), not error, error, detail))
        return result

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()


def _grade(name: str, reward: float, error: str, detail: str) -> Grade:
    return Grade(reward, {name: reward}, not error, error, detail)


def _attempt(function: Callable[[Any], Any], argument: Any) -> tuple[float, str, str]:
    """Reward, code of `ERRORS` and words."""
    try:
        return _reward(function(argument))
    except _Failure as error:
        return math.nan, *error.args
    except Exception as error:
        return math.nan, "exception", _words(error)


def _reward(value: Any) -> tuple[float, str, str]:
    if value is None:
        return math.nan, "none", "the grader returned None"
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a numpy scalar, or a tensor of no dimensions
    if not isinstance(value, numbers.Number) or isinstance(value, complex):
        return math.nan, "not_a_number", f"the grader returned {type(value).__name__}"
    if not abs(value) <= LARGEST:  # type: ignore[arg-type]
        return math.nan, "not_finite", "the grader returned NaN or what float32 cannot hold"
    return float(value), "", ""  # type: ignore[arg-type]


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:
        return type(error).__name__


def _build(config: Any, path: str) -> _Node:
    """The grader of a table, which stands at ``path`` in the config."""
    if not isinstance(config, Mapping):
        raise ValueError(f'{path} must be a table, as in {{"type": "exact"}}, got {config!r}')
    known = grader_types()
    if "type" not in config:
        raise ValueError(f"{path}.type is missing: one of {', '.join(known)}")
    kind = config["type"]
    if kind not in known:
        raise ValueError(f"{path}.type must be one of {', '.join(known)}, got {kind!r}{_near(str(kind), known)}")
    try:
        extension = _extension(kind)
    except ValueError as error:
        raise ValueError(f"{path}.type: {error}") from error
    own, keys = extension or ({}, KINDS.get(kind, {}))
    options: dict[str, Any] = {"name": kind, **keys}
    for key, value in config.items():
        if key != "type" and key not in options:
            raise ValueError(f"unknown key {path}.{key} for type {kind!r}{_near(key, options)}")
        if key == "type":
            continue
        default = options[key]
        wanted = default if isinstance(default, type) else type(default)
        if not isinstance(value, (int, float) if wanted is float else wanted) or isinstance(value, bool) != (wanted is bool):
            words = {str: "text", float: "a number", int: "a whole number", dict: "a table", bool: "true or false"}[wanted]
            raise ValueError(f"{path}.{key} must be {words}, got {value!r}")
        options[key] = float(value) if wanted is float else value
    for key, value in options.items():
        if isinstance(value, type) and key not in ("source", "function"):
            raise ValueError(f"{path}.{key} is missing for type {kind!r}")
    name, identity = options["name"], {**options, "type": kind}
    if kind == "multi":
        if not options["graders"]:
            raise ValueError(f"{path}.graders must hold one or more graders by name")
        for key in options["graders"]:
            if not key.isidentifier() or keyword.iskeyword(key) or key in FUNCTIONS:
                raise ValueError(f"{path}.graders: {key!r} cannot stand in calculate_output; rename it to a word of its own")
        nodes = {key: _build(value, f"{path}.graders.{key}") for key, value in options["graders"].items()}
        output = _expression(options["calculate_output"], list(nodes), f"{path}.calculate_output")
        return _MultiNode({**identity, "graders": {key: node.identity for key, node in nodes.items()}}, nodes, output)
    if own or kind in ("python", "reasoning_gym"):
        if options["timeout"] <= 0 or options["workers"] < 1:
            key = "timeout" if options["timeout"] <= 0 else "workers"
            raise ValueError(f"{path}.{key} must be above 0, got {options[key]!r}")
        if own:
            setup = {**own, "options": {key: options[key] for key in keys if key not in _PROCESS}}
        else:
            setup = _python_setup(options, path) if kind == "python" else _reasoning_gym_setup(options, path)
        identity["setup"] = {key: value for key, value in setup.items() if key != "file"}  # its code counts, not where it is
        return _PythonNode(name, identity, {**setup, "path": path}, options["timeout"], options["workers"])
    render, render_reference = (_template(options.get(key, ""), f"{path}.{key}") for key in ("input", "reference"))
    grade = _pair_grader(kind, options, path)

    def function(item: Item) -> float:
        reference = render_reference(item)
        if not reference.strip() and "{{" in options.get("reference", ""):
            raise _Failure("no_reference", f"{options['reference']} is empty")
        return float(grade(render(item), reference))

    return _Node(name, identity, function)


def grader_types() -> list[str]:
    """Every ``type`` of a grader; those that packages register come last."""
    from rljax import extensions

    return list(dict.fromkeys([*KINDS, *extensions.entries("grader")]))


def grader_keys(kind: str) -> dict[str, Any]:
    """Keys of a table of that ``type`` and their defaults; a type where there is none.

    Raises:
      ValueError: it is registered twice, or by a package that cannot be loaded.
    """
    extension = _extension(kind)
    return KINDS[kind] if extension is None else extension[1]


def _extension(kind: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Of a grader that a package registers, what a worker needs to load its function, and its keys with their defaults."""
    from rljax import extensions

    entry = extensions.find("grader", kind, lambda: KINDS)
    if entry is None:
        return None
    function = extensions.load("grader", entry)
    who = f"grader {kind!r} of {extensions.package(entry)}"
    if not callable(function) or not entry.attr.isidentifier():
        raise ValueError(f"{who}: {entry.value} must be a function grade(sample, item), as module:function")
    keys = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY}
    for key, default in keys.items():
        if key in ("type", "name", *_PROCESS) or type(default) not in (str, int, float, bool):
            raise ValueError(
                f"{who}: its keyword {key} must have another name, or text, a number, a truth value or a dict by default"
            )
    return {"module": entry.module, "attribute": entry.attr}, {**keys, **_PROCESS}


def _pair_grader(kind: str, options: dict[str, Any], path: str) -> Callable[[str, str], float]:
    """The function of an input and a reference."""
    if kind == "string_check":
        operation = options["operation"]
        if operation not in OPERATIONS:
            near = _near(operation, OPERATIONS)
            raise ValueError(f"{path}.operation must be one of {', '.join(OPERATIONS)}, got {operation!r}{near}")
        if operation in ("like", "ilike") and not options["reference"].strip():
            raise ValueError(f"{path}.reference is empty, which every text contains; name what the input must contain")
        return OPERATIONS[operation]
    if kind == "text_similarity":
        metric = options["evaluation_metric"]
        if metric not in METRICS:
            near = _near(metric, METRICS)
            raise ValueError(f"{path}.evaluation_metric must be one of {', '.join(METRICS)}, got {metric!r}{near}")
        return METRICS[metric]
    if kind == "exact":
        return lambda text, reference: _normal(text) == _normal(reference)
    if kind == "number":
        if not 0 <= options["tolerance"] < math.inf:
            raise ValueError(f"{path}.tolerance must be 0 or more, got {options['tolerance']}")
        return functools.partial(_last_number_is, tolerance=Fraction(options["tolerance"]))
    if kind == "length":
        if options["target"] < 1:
            raise ValueError(f"{path}.target must be 1 or more, got {options['target']}")
        if options["unit"] not in ("words", "characters"):
            raise ValueError(f'{path}.unit must be "words" or "characters", got {options["unit"]!r}')

        def brevity(text: str, _: str) -> float:
            length = len(text.split() if options["unit"] == "words" else text.strip())
            return min(1.0, options["target"] / length) if length else 0.0

        return brevity
    find = _boxed if kind == "boxed" else functools.partial(_tagged, tag=options["tag"])
    if not options.get("tag", "answer"):
        raise ValueError(f'{path}.tag must be the name of a tag, as in "answer", got ""')

    def contained(text: str, reference: str) -> float:
        found = find(text)
        first = found[0] if found else ""
        return bool(first) and all(_equal(other, first) for other in found[1:]) and _equal(first, reference)

    return contained


def _python_setup(options: dict[str, Any], path: str) -> dict[str, Any]:
    """What a worker needs to load the user's function: its code and file, or the module to import, and the attribute."""
    source, function = options["source"], options["function"]
    if isinstance(source, str) == isinstance(function, str):
        raise ValueError(f"{path}: set either source, a .py file or code with grade(sample, item), or function, module:attribute")
    attribute = "grade"
    if isinstance(function, str):
        source, _, attribute = function.rpartition(":")
        if not source or not attribute.isidentifier():
            raise ValueError(f'{path}.function must be "module:attribute" or "file.py:attribute", got {function!r}')
        if not source.endswith(".py"):
            return {"module": source, "attribute": attribute}
    key, file = f"{path}.{'function' if isinstance(function, str) else 'source'}", ""
    if "\n" not in source and source.endswith(".py"):
        file = os.path.abspath(source)
        try:
            source = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{key}: cannot read {source}: {getattr(error, 'strerror', 'it is not UTF-8')}") from error
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        hint = "" if file or "\n" in source else "; it must be a .py file or Python code"
        raise ValueError(f"{key}: {_words(error)}{hint}") from error
    return {"code": source, "file": file, "attribute": attribute}


def _reasoning_gym_setup(options: dict[str, Any], path: str) -> dict[str, Any]:
    _reasoning_gym(options["dataset"], options["config"], f"{path}.dataset")  # for its errors
    return {"reasoning_gym": {key: options[key] for key in ("dataset", "config", "tag")}}


def _template(text: str, path: str) -> Callable[[Item], str]:
    """``{{ name }}`` filled in from the item, once: what is filled in is not read as a template again."""
    parts = re.split(r"\{\{\s*(.*?)\s*\}\}", text)
    for literal, name in zip(parts[::2], [*parts[1::2], "x"], strict=True):
        if "{{" in literal or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", name):
            raise ValueError(f"{path}: templates look like {{{{ answer }}}} or {{{{ column.key }}}}, got {text!r}")

    def look_up(name: str, item: Item) -> str:
        keys = ["completion"] if name == "sample.output_text" else name.split(".")
        keys = keys[1:] if keys[0] == "item" and len(keys) > 1 else keys
        own = {"completion": item.completion, "prompt": item.prompt, "answer": item.answer}
        value: Any = {**item.columns, **own}
        for key in keys:
            try:
                value = value[int(key)] if isinstance(value, list | tuple) else value[key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise _Failure("missing_column", f"the item has no {name}{_near(keys[0], [*own, *item.columns])}") from None
        return "" if value is None else str(value)

    return lambda item: "".join(look_up(part, item) if i % 2 else part for i, part in enumerate(parts))


def _expression(text: str, names: list[str], path: str) -> Callable[[Mapping[str, Grade]], float]:
    """A function of the grades by name: numbers, names, ``+ - * / ^``, and calls of `FUNCTIONS`; nothing else is evaluated."""
    try:
        tree = ast.parse(text.replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path}: {text!r} is no expression: {error}") from error

    def known(name: str, grade: Grade) -> float:
        if not grade.valid:
            raise _Failure(grade.error, f"{name}: {grade.detail}")
        return grade.reward

    def build(node: ast.AST) -> Callable[[Mapping[str, Grade]], float]:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            number = float(node.value)  # type: ignore[arg-type]
            return lambda grades: number
        if isinstance(node, ast.Name):
            name = node.id
            if name not in names:
                raise ValueError(f"{path}: no grader is called {name!r}{_near(name, [*names, *FUNCTIONS])}")
            return lambda grades: known(name, grades[name])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            inner, sign = build(node.operand), -1.0 if isinstance(node.op, ast.USub) else 1.0
            return lambda grades: sign * inner(grades)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right, operator = build(node.left), build(node.right), OPERATORS[type(node.op)]
            return lambda grades: operator(left(grades), right(grades))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords:
            function, least, most = FUNCTIONS[node.func.id]
            arguments = [build(argument) for argument in node.args]
            if not least <= len(arguments) <= most:
                raise ValueError(f"{path}: {node.func.id} takes {'one argument' if most == 1 else 'two arguments or more'}")
            return lambda grades: function(*(argument(grades) for argument in arguments))
        allowed = f"numbers, graders' names, + - * / ^ and {', '.join(FUNCTIONS)}"
        raise ValueError(f"{path}: {ast.unparse(node)!r} is not supported; use {allowed}")

    try:
        output = build(tree)
    except RecursionError as error:
        raise ValueError(f"{path}: the expression is nested too deep") from error

    def evaluate(grades: Mapping[str, Grade]) -> float:
        try:
            return output(grades)
        except (ArithmeticError, ValueError) as error:  # a division by zero, the logarithm of a negative number
            raise _Failure("not_finite", f"{text}: {error}") from error

    return evaluate


def _content(item: Item, grader: str) -> bytes:
    """A hash of an item's content; types count, the identity of objects does not."""
    plain = (item.prompt, item.completion, item.answer, dict(item.columns))
    try:
        data = marshal.dumps(plain, 2)  # the last version without back-references
    except ValueError:  # something else than plain data
        data = pickle.dumps(plain)
    return hashlib.sha256(grader.encode() + data).digest()


def _near(word: str, options: Iterable[str]) -> str:
    from rljax.options import did_you_mean

    return did_you_mean(word, list(options))


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value)
    )


# ------------------------------------------------------------------------------------------------------ texts against texts

_NUMERAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-+\u2212])?[$€£]?(?:\\[dt]?frac\{{(?P<top>\d+)\}}\{{(?P<bottom>\d+)\}}"
    rf"|(?P<number>{_NUMERAL})(?:e(?P<exponent>[-+]?\d{{1,3}}))?(?:\s?/\s?(?P<divisor>\d+))?)",
    re.I | re.A,
)
# Between two numbers that are both offered as the answer: signs of a list, and the words of a choice.
_ALTERNATIVE = re.compile(r"[^\w.:!?=+*^<>-]*(?:(?:or|and|maybe|perhaps|possibly|either|else|also)\b[^\w.:!?=+*^<>-]*)*", re.I)
_OR = re.compile(r"[^.!?\n=]*\bor\b[^.!?\n=]*", re.I)


def _numbers(text: str) -> list[tuple[Fraction, int, int]]:
    """The numbers of a text, and where each begins and ends. A minus is a sign only where it touches the number and no word."""
    found = []
    for match in _NUMBER.finditer(text):
        top, bottom = match["top"] or match["number"], int(match["bottom"] or match["divisor"] or 1)
        if bottom:
            value = Fraction(top.replace(",", "")) * Fraction(10) ** int(match["exponent"] or 0) / bottom
            negative = match["sign"] in ("-", "\u2212")
            found.append((-value if negative else value, match.start(), match.end()))
    return found


def _last_number_is(text: str, reference: str, tolerance: Fraction) -> float:
    wanted = _as_number(reference.rpartition("####")[2])
    if wanted is None:
        raise _Failure("no_reference", f"the reference {reference[:60]!r} is no number")
    # Only the end counts, and no number is longer: a completion of digits costs no more than another.
    found = _numbers(text[-4096:])
    if not found or abs(found[-1][0] - wanted) > tolerance:
        return 0.0
    for (value, _, end), (_, begin, _) in zip(found[-2::-1], found[:0:-1], strict=True):
        between = text[-4096:][end:begin]
        if not (_ALTERNATIVE.fullmatch(between) or (len(between) < 60 and _OR.fullmatch(between))):
            break
        if value != found[-1][0]:
            return 0.0
    return 1.0


def _as_number(text: str) -> Fraction | None:
    """The number that a text is as a whole, signs of currency, percent and mathematics aside."""
    text = re.sub(r"\\[,!; ]|\$|\\%|%", "", text).strip().rstrip(".")
    found = _numbers(text) if len(text) < 4096 else []
    return found[0][0] if len(found) == 1 and found[0][1:] == (0, len(text)) else None


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().split()).rstrip(".") or text.strip()


def _equal(text: str, other: str) -> bool:
    numbers = _as_number(text), _as_number(other)
    return _normal(text) == _normal(other) or (numbers[0] is not None and numbers[0] == numbers[1])


def _tagged(text: str, tag: str) -> list[str]:
    """What stands between an opening tag and the next closing one, for each pair."""
    pieces = text.split(f"<{tag}>")[1:]
    return [piece.partition(f"</{tag}>")[0].strip() for piece in pieces if f"</{tag}>" in piece]


def _boxed(text: str) -> list[str]:
    """What stands in each ``\\boxed{}``, braces balanced, LaTeX's text, sizes and dollars taken off."""
    found, begin = [], text.find("\\boxed{")
    while begin >= 0:
        depth, at = 1, begin + 7
        while at < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        if depth:
            break
        inner = re.sub(r"\\(?:left|right|displaystyle)\b|\\[,!; ]|\$", "", text[begin + 7 : at - 1])
        found.append(re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", inner).strip())
        begin = text.find("\\boxed{", at)
    return found


def _common_subsequence(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the longest common subsequence, bit-parallel (Hyyrö 2004)."""
    if len(left) > len(right):
        left, right = right, left
    places: dict[Any, int] = {}
    for i, symbol in enumerate(left):
        places[symbol] = places.get(symbol, 0) | 1 << i
    ones = row = (1 << len(left)) - 1
    for symbol in right:
        matched = row & places.get(symbol, 0)
        row = ((row + matched) | (row - matched)) & ones
    return len(left) - row.bit_count()


def _ngrams(words: list[str], n: int) -> collections.Counter[tuple[str, ...]]:
    return collections.Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _f1(common: float, left: int, right: int) -> float:
    return 2 * common / (left + right) if left and right else 0.0


def _fuzzy_match(text: str, reference: str) -> float:
    return _f1(_common_subsequence(text, reference), len(text), len(reference))


def _rouge_words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _rouge(text: str, reference: str, n: int) -> float:
    left, right = (_ngrams(_rouge_words(t), n) for t in (text, reference))
    return _f1((left & right).total(), left.total(), right.total())


def _rouge_l(text: str, reference: str) -> float:
    left, right = _rouge_words(text), _rouge_words(reference)
    return _f1(_common_subsequence(left, right), len(left), len(right))


def _word_pieces(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def _bleu(text: str, reference: str) -> float:
    left, right = _word_pieces(text), _word_pieces(reference)
    if not left or not right:
        return 0.0
    logs = 0.0
    for n in range(1, 5):
        grams = _ngrams(left, n)
        common, one = (grams & _ngrams(right, n)).total(), int(n > 1)
        if common + one == 0:
            return 0.0
        logs += math.log((common + one) / (grams.total() + one)) / 4
    return math.exp(logs + min(0.0, 1 - len(right) / len(left)))


def _gleu(text: str, reference: str) -> float:
    left, right = _word_pieces(text), _word_pieces(reference)
    counts = [(_ngrams(left, n), _ngrams(right, n)) for n in range(1, 5)]
    longer = max(sum(a.total() for a, _ in counts), sum(b.total() for _, b in counts))
    return sum((a & b).total() for a, b in counts) / longer if longer else 0.0


OPERATIONS: dict[str, Callable[[str, str], float]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}
METRICS: dict[str, Callable[[str, str], float]] = {
    "fuzzy_match": _fuzzy_match,  # 2 LCS / (n + m) over characters: 1 - normalised insertions and deletions
    "bleu": _bleu,  # of one sentence, 4-grams, add-one above unigrams (Lin & Och 2004, "ORANGE"), case and punctuation count
    "gleu": _gleu,  # the smaller of precision and recall over all 1- to 4-grams (Wu et al. 2016, arXiv 1609.08144)
    **{f"rouge_{n}": functools.partial(_rouge, n=n) for n in range(1, 6)},  # F1 over lower-case words, no stemming (Lin 2004)
    "rouge_l": _rouge_l,  # F1 from the longest common subsequence of words
}
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: math.pow,
}
FUNCTIONS: dict[str, tuple[Callable[..., float], int, float]] = {  # and their least and greatest number of arguments
    "min": (min, 2, math.inf),
    "max": (max, 2, math.inf),
    **{name: (function, 1, 1) for name, function in {"abs": abs, "floor": math.floor, "ceil": math.ceil}.items()},
    **{name: (function, 1, 1) for name, function in {"exp": math.exp, "sqrt": math.sqrt, "log": math.log}.items()},
}
UNSOUND = {"game_of_life_halting": "its scorer pays for any text"}  # of reasoning-gym 0.1.25
_PAIR = {"input": "{{ completion }}", "reference": "{{ answer }}"}
_PROCESS = {"timeout": 10.0, "workers": min(4, os.cpu_count() or 1)}
KINDS: dict[str, dict[str, Any]] = {  # keys of each kind and their defaults; a type where there is none
    "string_check": {"operation": str, "input": str, "reference": str},
    "text_similarity": {"evaluation_metric": str, "input": str, "reference": str},
    "exact": _PAIR,
    "number": {**_PAIR, "tolerance": 0.0},
    "tag": {**_PAIR, "tag": "answer"},
    "boxed": _PAIR,
    "length": {"input": "{{ completion }}", "target": int, "unit": "words"},
    "python": {"source": str, "function": str, **_PROCESS},
    "reasoning_gym": {"dataset": str, "config": {}, "tag": "answer", **_PROCESS},
    "multi": {"graders": dict, "calculate_output": str},
}

# ---------------------------------------------------------------------------------------------------------- worker processes


class _Worker:
    """A process with the user's function, which answers one request at a time: a number, a pickle; then a line of JSON."""

    def __init__(self, setup: dict[str, Any]):
        self.socket, theirs = socket.socketpair()
        with theirs:
            # -P: the directory of this file holds modules whose names must not hide others.
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        self.loaded = False
        self.served = 0  # items so far
        self.deadline: float | None = None  # of the request that it is at; None: it is idle
        self.ask(setup, START_SECONDS)

    def ask(self, request: Any, seconds: float, task: int = -1) -> None:
        """Sends a request; `reply` tells what became of it."""
        self.task, self.deadline, self.received, self.nonce = task, time.monotonic() + seconds, b"", secrets.token_hex(8)
        data = pickle.dumps((self.nonce, request))
        self.socket.settimeout(seconds)
        with contextlib.suppress(OSError):  # it does not read, or is gone: `reply` finds out
            self.socket.sendall(struct.pack("!Q", len(data)) + data)
        self.socket.settimeout(0)

    def reply(self) -> tuple[float, str, str] | None:
        """Reward, code and words once there are some. What is no answer to the request counts as a crash."""
        gone = False
        try:
            data = self.socket.recv(65_536)
            self.received += data
            gone = not data
        except BlockingIOError:
            pass
        except OSError:
            gone = True
        if self.received.endswith(b"\n"):
            try:
                nonce, reward, error, detail = json.loads(self.received)
                if nonce == self.nonce and error in ERRORS and (error or math.isfinite(reward)):
                    self.deadline = None
                    return math.nan if error else float(reward), error, str(detail)
            except (ValueError, TypeError):
                pass
            gone = True
        if gone:
            return math.nan, "crashed", "the grader's process ended" if not self.received else "the grader wrote to our socket"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return math.nan, "timeout", "no answer before the deadline"
        return None

    def kill(self) -> None:
        """Ends the process and what it started."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.socket.close()


class _Pool:
    """Worker processes of one function, started when there is work and replaced when they fail."""

    def __init__(self, setup: dict[str, Any], timeout: float, count: int):
        self.setup, self.timeout, self.count = setup, timeout, count
        self.workers: list[_Worker] = []
        self.has_loaded = False
        self.finalizer = weakref.finalize(self, _kill_all, self.workers, os.getpid())  # when it is forgotten, and at exit

    def close(self) -> None:
        _kill_all(self.workers, os.getpid())

    def run(self, requests: list[Any]) -> list[tuple[float, str, str]]:
        """Reward, code and words for each request."""
        replies: dict[int, tuple[float, str, str]] = {}
        waiting = collections.deque(range(len(requests)))
        setup = {**self.setup, "timeout": self.timeout, "parent": os.getpid(), "sys_path": [os.getcwd(), *sys.path]}
        try:
            while len(replies) < len(requests):
                self._hand_out(requests, waiting, replies, setup)
                busy = [worker for worker in self.workers if worker.deadline is not None]
                soonest = min((worker.deadline for worker in busy if worker.deadline is not None), default=0.0)
                multiprocessing.connection.wait([worker.socket for worker in busy], max(0.0, soonest - time.monotonic()))
                for worker in busy:
                    reply = worker.reply()
                    if reply is not None:
                        self._receive(worker, reply, waiting, replies)
        finally:
            for worker in [w for w in self.workers if w.deadline is not None]:  # interrupted
                self._drop(worker)
        return [replies[i] for i in range(len(requests))]

    def _hand_out(self, requests: list[Any], waiting: collections.deque[int], replies: dict[int, Any], setup: Any) -> None:
        starting = sum(not worker.loaded for worker in self.workers)
        idle = [worker for worker in self.workers if worker.deadline is None]
        for worker in idle[: len(waiting)]:
            task = waiting.popleft()
            try:
                worker.ask(requests[task], self.timeout, task)
            except Exception as error:  # of pickle
                worker.deadline = None
                replies[task] = math.nan, "exception", f"the item cannot be sent: {_words(error)}"
        for _ in range(min(self.count - len(self.workers), len(waiting) - starting)):
            self.workers.append(_Worker(setup))

    def _receive(self, worker: _Worker, reply: tuple[float, str, str], waiting: collections.deque[int], replies: Any) -> None:
        _, error, detail = reply
        broken = error in ("crashed", "timeout")
        if broken:
            self._drop(worker)
        if worker.task < 0:  # it was loading the user's code
            if not error:
                worker.loaded = self.has_loaded = True
                return
            self._drop(worker)
            if not self.has_loaded:
                detail = f"it took more than {START_SECONDS:g} s" if error == "timeout" else detail
                raise ValueError(f"{self.setup['path']}: the Python grader cannot be loaded: {detail}")
            if waiting:  # one that loaded before: the machine is at fault, and must not be asked for ever
                replies[waiting.popleft()] = math.nan, "crashed", f"no new process could be started: {detail}"
        elif error == "crashed" and worker.served:
            waiting.appendleft(worker.task)  # an earlier item may be at fault: once more, in a new process
        else:
            worker.served += 1
            replies[worker.task] = reply

    def _drop(self, worker: _Worker) -> None:
        worker.deadline = None
        worker.kill()
        if worker in self.workers:
            self.workers.remove(worker)


def _kill_all(workers: list[_Worker], owner: int) -> None:
    while workers and os.getpid() == owner:  # and not in a fork of the process that started them
        workers.pop().kill()


def _serve(descriptor: int) -> None:
    """What a worker runs: loads the user's function, then grades what comes, until its parent is gone."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    stream = connection.makefile("rb")
    silent = open(os.devnull, "w")  # noqa: SIM115

    def receive() -> tuple[str, Any]:
        header = stream.read(8)
        if len(header) < 8:
            os.killpg(0, signal.SIGKILL)
        return pickle.loads(stream.read(struct.unpack("!Q", header)[0]))

    nonce, setup = receive()
    threading.Thread(target=_end_with_parent, args=(setup["parent"],), daemon=True).start()
    function: Any = None
    argument: Any = None

    def load(_: Any) -> float:
        nonlocal function
        function = _load(setup)
        return 0.0

    def grade(_: Any) -> float:
        try:
            return function(*argument)
        except Exception:
            raise
        except BaseException as error:  # sys.exit, and what some time-out packages raise
            raise _Failure("exception", _words(error)) from error

    attempt, limit = load, START_SECONDS
    while True:
        faulthandler.dump_traceback_later(limit + GRACE_SECONDS, exit=True, file=silent)  # even if the user's code holds the GIL
        reward, error, detail = _attempt(attempt, None)
        faulthandler.cancel_dump_traceback_later()
        connection.sendall(json.dumps([nonce, 0.0 if error else reward, error, detail]).encode() + b"\n")
        if attempt is load and error:
            os._exit(1)
        attempt, limit = grade, setup["timeout"]
        nonce, argument = receive()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _load(setup: dict[str, Any]) -> Callable[[Any, Any], Any]:
    """The user's function."""
    sys.path[:] = setup["sys_path"]
    if "reasoning_gym" in setup:
        return _load_reasoning_gym(**setup["reasoning_gym"])
    if "module" in setup:
        module = importlib.import_module(setup["module"])
    else:
        file = setup["file"]
        if file:
            sys.path.insert(0, os.path.dirname(file))
        module = types.ModuleType("user_grader")
        module.__file__ = file or None
        sys.modules["user_grader"] = module
        exec(compile(setup["code"], file or "<grader source>", "exec"), module.__dict__)
    function = getattr(module, setup["attribute"], None)
    if not callable(function):
        raise _Failure("exception", f"there is no function {setup['attribute']}(sample, item)")
    return functools.partial(typing.cast(Callable[[Any, Any], Any], function), **setup.get("options", {}))


def _load_reasoning_gym(dataset: str, config: dict[str, Any], tag: str) -> Callable[[Any, Any], Any]:
    scorer = importlib.import_module("reasoning_gym").create_dataset(dataset, **config)

    def grade(sample: Any, item: Any) -> float:
        text = sample["output_text"]
        found = _tagged(text, tag) if tag else [text.strip()]
        if not found or not found[0] or len(set(found)) > 1:
            return 0.0
        entry = {"question": item["prompt"], "answer": item["answer"] or None, "metadata": item["metadata"]}
        return scorer.score_answer(answer=found[0], entry=entry)

    return grade


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
