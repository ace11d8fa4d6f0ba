"""Prompts from a file, completions graded on the host: the token MDP over a real tokenizer.

``env = "text"`` in a config::

    [env_params]
    file = "questions.jsonl"        # prompt or messages, answer, further columns; or "reasoning_gym:NAME"
    tokenizer = "smollm2"           # or a Hugging Face directory, or a GGUF file
    max_tokens = 48
    grader = { type = "number" }    # see `rljax.lm.graders.make_grader`
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.envs.tokens import Problem, TokenEnvironment
from rljax.lm import automata, fetch, graders, pairs
from rljax.lm.packing import Packed, pack
from rljax.lm.tokenizer import Tokenizer


class TextTask:
    """Prompts of ``rows``, drawn uniformly, and a grader; the answer of a `Problem` is the number of its row.

    Attributes:
      tokenizer, rows: as given.
      prompt_length: of the longest prompt, in tokens.
      max_tokens: as given.
      components: of the grader.
      preferences: pairs as arrays, see `rljax.lm.pairs.encode_pairs`; None without any.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        grader: graders.Grader,
        max_tokens: int,
        system: str = "",
        chosen: Sequence[Mapping[str, Any]] = (),
    ):
        """
        Args:
          rows: see `rljax.lm.graders.load_jsonl`. ``messages`` go through the chat template of the tokenizer, and so does
            ``prompt`` where there is a ``system`` message; else it is taken as it stands.
          system: said before the first message.
          chosen: preference pairs, see `rljax.lm.pairs.load_pairs`.

        Raises:
          ValueError: a pair that is longer than the prompts, or than ``max_tokens``.
        """
        self.tokenizer, self.rows, self.max_tokens = tokenizer, list(rows), max_tokens
        self.components = grader.component_names
        prompts = [tokenizer.encode(self.prompt_text(row, system)) for row in self.rows]
        self.prompt_length = max(map(len, prompts))
        padded = np.full((len(prompts), self.prompt_length), -1, np.int32)
        answers = np.full((len(prompts), max_tokens), -1, np.int32)
        for i, (ids, row) in enumerate(zip(prompts, self.rows, strict=True)):
            padded[i, self.prompt_length - len(ids) :] = ids
            answer = [*tokenizer.encode(str(row.get("answer", "")), bos=False), tokenizer.eos_ids[0]][:max_tokens]
            answers[i, : len(answer)] = answer
        self._prompts, self._answers = padded, answers
        self._examples = [(ids, [int(t) for t in answer if t >= 0]) for ids, answer in zip(prompts, answers, strict=True)]
        self._reward = graders.host_reward(grader, self._item)
        asked = [tokenizer.encode(self.prompt_text(pair, system)) for pair in chosen]
        self.preferences = pairs.encode_pairs(chosen, asked, tokenizer, self.prompt_length, max_tokens) if chosen else None

    def packed(self, length: int) -> Packed:
        """All rows with their answers, packed for fine-tuning."""
        return pack(self._examples, length)

    def prompt_text(self, row: Mapping[str, Any], system: str = "") -> str:
        """What the model reads."""
        messages = row.get("messages") or ([{"role": "user", "content": row["prompt"]}] if system else None)
        if messages is None:
            return row["prompt"]
        before = [{"role": "system", "content": system}] if system else []
        return self.tokenizer.chat([*before, *messages])

    def sample(self, key: Array) -> Problem:
        return self.problem(jax.random.randint(key, (), 0, len(self.rows)))

    def problem(self, index: Array) -> Problem:
        """That of one row."""
        return Problem(jnp.asarray(self._prompts)[index], index[None].astype(jnp.int32))

    def demonstrate(self, key: Array, problem: Problem) -> Array:
        del key
        return jnp.asarray(self._answers)[problem.answer[0]]

    def verify(self, problem: Problem, completion: Array, length: Array) -> Array:
        """Nothing: `grade` says it, when the episode has ended."""
        return jnp.zeros(len(self.components))

    def grade(self, problems: Problem, completions: Array, lengths: Array) -> tuple[Array, Array, Array]:
        """``(reward [B], components [B, C], valid [B])`` of ``completions [B, T]``, by the host, all at once."""
        reward, components, valid, _ = self._reward(completions, lengths, problems.answer[:, 0])
        return jnp.where(valid, reward, 0.0), jnp.where(valid[:, None], components, 0.0), valid

    def _item(self, ids: Any, index: int) -> graders.Item:
        return graders.Item.from_row(self.rows[index], self.tokenizer.decode(ids))


class HostTool:
    """A tool that is a Python function: what stands between ``opens`` and ``closes`` goes in as text, and its answer is forced.

    Every token of every episode calls the host, which a tool of arrays (`rljax.lm.tasks.Calculator`) does not. Where it raises,
    or says what the tokenizer cannot write, the answer is ``failed``.
    """

    def __init__(
        self, function: Callable[[str], str], tokenizer: Any, opens: str, closes: str, max_tokens: int, failed: str = "?"
    ):
        self.function, self.tokenizer, self.opens, self.closes = function, tokenizer, opens, closes
        self.max_tokens, self.failed = max_tokens, failed

    def __call__(self, said: Array, length: Array) -> tuple[Array, Array]:
        shapes = (jax.ShapeDtypeStruct((self.max_tokens,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32))
        return jax.pure_callback(self._on_host, shapes, said, length, vmap_method="broadcast_all")

    def _on_host(self, said: Any, length: Any) -> tuple[np.ndarray, np.ndarray]:
        said, length = np.asarray(said), np.asarray(length)
        answers = np.full((*length.shape, self.max_tokens), -1, np.int32)
        sizes = np.zeros(length.shape, np.int32)
        for place in np.ndindex(length.shape):
            text = self.tokenizer.decode(said[place][: length[place]])
            call = text.rpartition(self.opens)[2]
            if self.opens in text and call.endswith(self.closes):
                ids = self._answer(call.removesuffix(self.closes))[: self.max_tokens]
                answers[place][: len(ids)], sizes[place] = ids, len(ids)
        return answers, sizes

    def _answer(self, call: str) -> list[int]:
        try:
            return self.tokenizer.encode(self.function(call), bos=False)
        except Exception:  # the model's call may be anything
            return self.tokenizer.encode(self.failed, bos=False)


def text(
    file: str = "",
    preferences: str = "",
    tokenizer: str = "smollm2",
    max_tokens: int = 64,
    system: str = "",
    grader: Any = None,
    regex: str = "",
    choices: Any = None,
    truncated_counts: bool = False,
    size: int = 256,
    data_seed: int = 0,
) -> TokenEnvironment:
    """``make_env("text", ...)``; see the head of this file.

    Args:
      file: JSON lines, or ``reasoning_gym:NAME``, of which ``size`` items are made from ``data_seed``.
      preferences: JSON lines of pairs, see `rljax.lm.pairs.load_pairs`. Without a ``file`` theirs are the prompts, and the chosen
        completions the answers, graded by exact match unless ``grader`` says otherwise.
      tokenizer: a model's name or place.
      system: said before each prompt, by the chat template.
      grader: a table; that of a reasoning-gym task is its own scorer by default.
      regex, choices: limit completions to what the pattern matches as a whole, or to a list.

    Raises:
      ValueError: no file, no grader, both limits, or what the parts of them object to; names the key.
    """
    if not (file or preferences):
        raise ValueError('env_params.file: name a file of JSON lines with prompt and answer, or "reasoning_gym:NAME"')
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"env_params.max_tokens must be a whole number, 1 or more, got {max_tokens!r}")
    if regex and choices:
        raise ValueError("env_params.regex and env_params.choices: set one of them")
    name = file.removeprefix("reasoning_gym:")
    if grader is None and name != file:
        grader = {"type": "reasoning_gym", "dataset": name}
    if grader is None and not file:
        grader = {"type": "exact"}
    if not isinstance(grader, Mapping):
        raise ValueError('env_params.grader: say how completions are graded, as in grader = { type = "exact" }')
    if choices is not None and not choices:
        raise ValueError("env_params.choices holds none: list what a completion may be, or leave it out")
    where = json.dumps([file, preferences, tokenizer, max_tokens, system, grader, size, data_seed], sort_keys=True)
    task = _task(where)
    with _of("env_params.regex" if regex else "env_params.choices"):
        automaton = _automaton(tokenizer, regex, tuple(choices or ()))
    return TokenEnvironment(task, max_tokens=max_tokens, truncated_counts=truncated_counts, automaton=automaton)


@contextlib.contextmanager
def _of(key: str) -> Iterator[None]:
    """Names the key that an objection is to."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


@functools.lru_cache(maxsize=4)
def _tokenizer(model: str) -> Any:
    return Tokenizer.load(fetch.locate(model))


@functools.lru_cache(maxsize=4)
def _task(where: str) -> TextTask:
    file, preferences, tokenizer, max_tokens, system, grader, size, data_seed = json.loads(where)
    name = file.removeprefix("reasoning_gym:")
    with _of("env_params.preferences"):
        chosen = pairs.load_pairs(preferences) if preferences else []
        rows = [{**{k: pair[k] for k in ("prompt", "messages") if k in pair}, "answer": pair["chosen"]} for pair in chosen]
    with _of("env_params.file"):
        rows = (
            rows if not file else graders.load_jsonl(file) if name == file else graders.reasoning_gym_items(name, size, data_seed)
        )
    with _of("env_params.tokenizer"):
        reads = _tokenizer(tokenizer)
    with _of("env_params.grader"):
        rewards = graders.make_grader(grader)
    with _of("env_params.preferences"):
        return TextTask(rows, reads, rewards, max_tokens, system, chosen)


@functools.lru_cache(maxsize=4)
def _automaton(tokenizer: str, regex: str, choices: tuple[str, ...]) -> Any:
    if regex:
        return automata.compile_regex(regex, _tokenizer(tokenizer))
    return automata.compile_choices(choices, _tokenizer(tokenizer)) if choices else None
