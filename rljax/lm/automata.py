"""Constrained decoding: a regular expression or a list of choices becomes a table of legal tokens.

The pattern is compiled over UTF-8 bytes, so that it can hold any character and fits byte-level vocabularies: Thompson's
construction, subset construction, minimisation, then a walk of the whole vocabulary from every state (Willard & Louf 2023,
arXiv 2307.09702).
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from scipy import sparse
from scipy.sparse import csgraph

MAX_REPEAT = 10_000  # copies that one {m,n} may ask for
MAX_NFA_STATES = 100_000
LAST_CHARACTER = 0x10FFFF
DIGITS = [(0x30, 0x39)]
SPACES = [(0x09, 0x0D), (0x20, 0x20)]
WORDS = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
CATEGORIES = {"d": DIGITS, "s": SPACES, "w": WORDS}
CONTROLS = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}  # \b only inside of a class

Ranges = list[tuple[int, int]]


class Tokenizer(Protocol):
    """What the compiler asks of a tokenizer. ``bytes_of`` gives ``b""`` for special tokens, which are then never legal."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def bytes_of(self, token: int, /) -> bytes: ...


class TokenAutomaton(struct.PyTreeNode):
    """Which tokens are legal after which; arrays only, so pass it to a compiled function as an argument and not in a closure.

    Decoding starts in state 0. The last state is the one after EOS: there EOS is legal again and nothing else, so a mask is never
    empty. -1 is the state after an illegal token; it is left by no token, and its mask is that of the last state.

    Attributes:
      next_state: int16 or int32 ``[states, vocab]``: the state that a token leads to, or -1 where it is illegal.
      accepting: bool ``[states]``: the text so far is a whole match; there, and only there, EOS is legal.
    """

    next_state: Array
    accepting: Array

    @property
    def start(self) -> Array:
        """The first state, int32 ``[]``."""
        return jnp.zeros((), jnp.int32)

    def mask(self, state: Array) -> Array:
        """Legal tokens, bool ``[..., vocab]``, of states ``[...]``."""
        return self.next_state[state] >= 0

    def advance(self, state: Array, token: Array) -> Array:
        """The states after ``token [...]`` in ``state [...]``, int32 ``[...]``; -1 if the token was illegal."""
        return jnp.where(state < 0, -1, self.next_state[state, token].astype(jnp.int32))


def compile_regex(
    pattern: str, tokenizer: Tokenizer, *, eos_ids: Sequence[int] | None = None, vocab_size: int = 0, max_states: int = 4096
) -> TokenAutomaton:
    r"""Tokens that spell a text which ``pattern`` matches as a whole, then EOS: ``re.fullmatch(pattern, text, re.ASCII)``.

    Literals, ``.`` (all but a newline), classes with ranges and negation, ``\d \w \s`` and their negations (ASCII), escapes such
    as ``\n \x41 \u00e9``, groups, ``|``, ``* + ? {m} {m,} {m,n}``. Every way to cut a match into tokens is legal, not only that
    which the tokenizer would choose. States with no way to a match by whole tokens are cut off: no dead end under the mask.

    Args:
      tokenizer: see `Tokenizer`.
      eos_ids: tokens that end a completion; those of the tokenizer by default. They are never text.
      vocab_size: columns of the table, if more than the tokenizer has tokens, as some models do; those are never legal.
      max_states: of the automaton over bytes; the table has ``states * vocab`` entries.

    Raises:
      ValueError: a pattern that is malformed, uses what is not supported, is too large, or matches nothing that the tokens can
        spell; no EOS, or one outside of the vocabulary.
    """
    table, accepting = _minimise(*_dfa(*_nfa(_Parser(pattern).parse(), pattern), pattern, max_states))
    return _token_automaton(table, accepting, tokenizer, eos_ids, vocab_size, f"pattern {pattern!r}")


def compile_choices(
    choices: Sequence[str],
    tokenizer: Tokenizer,
    *,
    eos_ids: Sequence[int] | None = None,
    vocab_size: int = 0,
    max_states: int = 4096,
) -> TokenAutomaton:
    """Tokens that spell exactly one of ``choices``, then EOS; arguments as for `compile_regex`.

    Raises:
      ValueError: no choices, one twice, an empty one, one that the tokens cannot spell; too many; EOS as in `compile_regex`.
    """
    if isinstance(choices, str) or not choices:
        raise ValueError(f'choices must be a list of one or more texts, as in ["yes", "no"], got {choices!r}')
    rows, accepting = [np.full(256, -1)], [False]
    vocabulary = {text for _, text in _vocabulary(tokenizer, _eos(tokenizer, eos_ids))}
    longest = max(map(len, vocabulary), default=0)
    seen: set[str] = set()
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise ValueError(f"choices[{i}] must be a text that is not empty, got {choice!r}")
        if choice in seen:
            raise ValueError(f"choices[{i}] {choice!r} is listed twice; leave one out")
        seen.add(choice)
        text, state, ends = _encode(choice, f"choices[{i}]"), 0, {0}
        for at, byte in enumerate(text):
            if at in ends:  # a token may begin here
                ends |= {stop for stop in range(at + 1, min(at + longest, len(text)) + 1) if text[at:stop] in vocabulary}
            if rows[state][byte] < 0:
                rows[state][byte] = len(rows)
                rows.append(np.full(256, -1))
                accepting.append(False)
            state = rows[state][byte]
        if len(text) not in ends:
            raise ValueError(f"choices[{i}] {choice!r} cannot be spelled with this tokenizer's tokens; leave it out")
        accepting[state] = True
    table, accepting = _minimise(np.stack(rows), np.array(accepting))
    if len(table) > max_states:
        raise ValueError(f"choices need {len(table)} states, more than max_states {max_states}: list fewer, or raise it")
    return _token_automaton(table, accepting, tokenizer, eos_ids, vocab_size, "choices")


class _Parser:
    """Recursive descent over a pattern that `re` accepts; what it leaves of Python's syntax is refused by name.

    Nodes are ``("set", ranges)``, ``("cat", nodes)``, ``("alt", nodes)`` and ``("repeat", node, least, most or None)``.
    """

    def __init__(self, pattern: str):
        if not isinstance(pattern, str):
            raise ValueError(f"pattern must be a text, got {pattern!r}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                re.compile(pattern, re.ASCII)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern {pattern!r}: {error}") from error
        self.pattern = pattern
        self.at = 0

    def parse(self) -> Any:
        try:
            return self.alternatives()
        except RecursionError as error:
            raise ValueError(f"pattern of {len(self.pattern)} characters: its groups are nested too deep") from error

    def refuse(self, what: str) -> ValueError:
        return ValueError(f"pattern {self.pattern!r}, position {self.at}: {what}")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        self.at += len(text) * (found := self.peek(text))
        return found

    def alternatives(self) -> Any:
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        return options[0] if len(options) == 1 else ("alt", options)

    def sequence(self) -> Any:
        nodes = []
        while self.at < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            nodes.append(self.repeated(self.atom()))
        return nodes[0] if len(nodes) == 1 else ("cat", nodes)

    def repeated(self, node: Any) -> Any:
        found = re.compile(r"[*+?]|\{([0-9]+)\}|\{([0-9]*),([0-9]*)\}").match(self.pattern, self.at)
        if found is None:
            return node
        exact, least, most = found.groups()
        self.at = found.end()
        if self.peek("?") or self.peek("+"):
            kind = "lazy" if self.peek("?") else "possessive"
            raise self.refuse(f"{kind} quantifiers are not supported; leave {self.pattern[self.at]!r} out")
        if exact is not None:
            least = most = exact
        elif least is None:
            least, most = {"*": ("0", ""), "+": ("1", ""), "?": ("0", "1")}[found[0]]
        if max(int(least or 0), int(most or 0)) > MAX_REPEAT:
            raise self.refuse(f"{found[0]} repeats more than {MAX_REPEAT} times; use a smaller count")
        return ("repeat", node, int(least or 0), int(most) if most else None)

    def atom(self) -> Any:
        if self.take("("):
            if self.peek("?") and not self.take("?:"):
                name = re.compile(r"\?P<\w+>").match(self.pattern, self.at)
                if name is None:
                    raise self.refuse("of (?...) only (?:...) and (?P<name>...) are supported")
                self.at = name.end()
            node = self.alternatives()
            self.take(")")
            return node
        if self.take("["):
            return ("set", self.character_class())
        if self.peek("^") or self.peek("$"):
            sign = self.pattern[self.at]
            raise self.refuse(f"the whole text must match, so anchors are implied: leave {sign!r} out, or write {chr(92) + sign}")
        if self.take("."):
            return ("set", _complement([(0x0A, 0x0A)]))
        if self.take("\\"):
            return ("set", self.escape(in_class=False))
        return ("set", [self.literal()])

    def literal(self) -> tuple[int, int]:
        self.at += 1
        code = ord(self.pattern[self.at - 1])
        if 0xD800 <= code <= 0xDFFF:
            raise self.refuse("a lone surrogate is no character of UTF-8; leave it out")
        return code, code

    def escape(self, in_class: bool) -> Ranges:
        letter = self.pattern[self.at]
        if letter.lower() in CATEGORIES:
            self.at += 1
            ranges = CATEGORIES[letter.lower()]
            return ranges if letter.islower() else _complement(ranges)
        if letter in CONTROLS and (letter != "b" or in_class):
            self.at += 1
            return [(CONTROLS[letter], CONTROLS[letter])]
        number = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})").match(self.pattern, self.at)
        if number is not None:
            self.at = number.end()
            code = int(number[0][1:], 16)
            if 0xD800 <= code <= 0xDFFF:
                raise self.refuse("a surrogate is no character of UTF-8; write the character itself")
            return [(code, code)]
        if letter.isascii() and letter.isalnum():
            raise self.refuse(f"\\{letter} is not supported: no back-references, boundaries or octal numbers")
        return [self.literal()]

    def character_class(self) -> Ranges:
        negate = self.take("^")
        ranges: Ranges = []
        first = True
        while first or not self.peek("]"):
            first = False
            low = self.escape(in_class=True) if self.take("\\") else [self.literal()]
            if self.peek("-") and not self.peek("-]"):
                self.at += 1
                high = self.escape(in_class=True) if self.take("\\") else [self.literal()]
                low = [(low[0][0], high[0][1])]
            ranges += low
        self.at += 1
        return _complement(ranges) if negate else ranges


def _complement(ranges: Ranges) -> Ranges:
    result, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            result.append((at, low - 1))
        at = max(at, high + 1)
    return [*result, (at, LAST_CHARACTER)] if at <= LAST_CHARACTER else result


def _merge(ranges: Ranges) -> Ranges:
    return _complement(_complement(ranges))


def _utf8_ranges(low: int, high: int) -> Iterator[Ranges]:
    """Sequences of byte ranges that together spell the characters from ``low`` to ``high``, surrogates left out."""
    for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, LAST_CHARACTER)):
        yield from _of_one_length(max(low, first), min(high, last))


def _of_one_length(low: int, high: int) -> Iterator[Ranges]:
    """Splits a range until each of its parts is a product of byte ranges."""
    if low > high:
        return
    for size in (6, 12, 18) if high > 0x7F else ():
        block = (1 << size) - 1
        if low >> size == high >> size or (low & block == 0 and high & block == block):
            continue
        cut = low | block if low & block else (high & ~block) - 1
        yield from _of_one_length(low, cut)
        yield from _of_one_length(cut + 1, high)
        return
    yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))


def _encode(text: str, key: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{key}: a lone surrogate is no character of UTF-8; leave it out") from error


def _nfa(tree: Any, pattern: str) -> tuple[list[list[int]], list[list[tuple[int, int, int]]], int]:
    """Thompson's construction: of each state its empty moves and its ``(low byte, high byte, target)``; and which is final."""
    empty: list[list[int]] = []
    moves: list[list[tuple[int, int, int]]] = []

    def state() -> int:
        if len(empty) >= MAX_NFA_STATES:
            raise ValueError(f"pattern {pattern!r} needs more than {MAX_NFA_STATES} states; use smaller counts")
        empty.append([])
        moves.append([])
        return len(empty) - 1

    def build(node: Any, begin: int) -> int:
        """Adds what spells ``node`` from state ``begin``; the state where it ends."""
        kind = node[0]
        if kind == "set":
            end = state()
            for low, high in _merge(node[1]):
                for sequence in _utf8_ranges(low, high):
                    at = begin
                    for position, (first, last) in enumerate(sequence):
                        target = end if position == len(sequence) - 1 else state()
                        moves[at].append((first, last, target))
                        at = target
            return end
        if kind == "cat":
            for child in node[1]:
                begin = build(child, begin)
            return begin
        if kind == "alt":
            end = state()
            for child in node[1]:
                option = state()
                empty[begin].append(option)
                empty[build(child, option)].append(end)
            return end
        _, child, least, most = node
        for _ in range(least):
            begin = build(child, begin)
        end = state()
        if most is None:
            loop = state()
            empty[begin].append(loop)
            empty[build(child, loop)].append(loop)
            empty[loop].append(end)
            return end
        for _ in range(most - least):
            empty[begin].append(end)
            copy = state()
            empty[begin].append(copy)
            begin = build(child, copy)
        empty[begin].append(end)
        return end

    start = state()
    return empty, moves, build(tree, start)


def _dfa(
    empty: list[list[int]], moves: list[list[tuple[int, int, int]]], final: int, pattern: str, max_states: int
) -> tuple[np.ndarray, np.ndarray]:
    """Subset construction: the table of next states ``[states, 256]``, -1 where there is none, and which are accepting."""
    edges = sorted({0, 256} | {edge for state in moves for low, high, _ in state for edge in (low, high + 1)})
    block_of = np.searchsorted(edges, np.arange(256), "right") - 1  # bytes that no move tells apart
    closures: dict[int, frozenset[int]] = {}

    def closure(state: int) -> frozenset[int]:
        """The states that empty moves reach, those with a byte to read and the final one."""
        if state not in closures:
            seen, stack = {state}, [state]
            while stack:
                for target in empty[stack.pop()]:
                    if target not in seen:
                        seen.add(target)
                        stack.append(target)
            closures[state] = frozenset(s for s in seen if moves[s] or s == final)
        return closures[state]

    start = closure(0)
    number, order, rows = {start: 0}, [start], []
    for subset in order:  # grows while it is read
        reached: dict[int, set[int]] = {}
        for state in subset:
            for low, high, target in moves[state]:
                for block in range(block_of[low], block_of[high] + 1):
                    reached.setdefault(block, set()).update(closure(target))
        row = np.full(len(edges) - 1, -1)
        for block, states in reached.items():
            target = frozenset(states)
            if target not in number:
                if len(number) >= max_states:
                    raise ValueError(
                        f"pattern {pattern!r} needs more than max_states {max_states} states: use smaller counts, or raise it"
                    )
                number[target] = len(number)
                order.append(target)
            row[block] = number[target]
        rows.append(row)
    return np.stack(rows)[:, block_of], np.array([final in subset for subset in order])


def _minimise(table: np.ndarray, accepting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moore's partition refinement, without the states that lead to no match; state 0 stays the first. A table may be empty."""
    sources, columns = np.nonzero(table >= 0)
    # The shortest way to a match tells states apart at once, where refining alone would take a round for each step of it.
    distance = _steps(sources, table[sources, columns], accepting)
    alive = np.isfinite(distance)
    table, accepting = _keep(table, accepting, alive)
    if not len(table):
        return table, accepting
    columns = np.unique(table, axis=1)
    weights = np.random.default_rng(0).integers(1, 2**63, columns.shape[1] + 1, np.uint64)
    _, part = np.unique(distance[alive], return_inverse=True)
    while True:
        targets = np.where(columns >= 0, part[columns] + 1, 0).astype(np.uint64)
        keys = (_scramble(targets) * weights[1:]).sum(1, dtype=np.uint64) + _scramble(part.astype(np.uint64)) * weights[0]
        _, first, refined = np.unique(keys, return_index=True, return_inverse=True)
        if len(first) == part.max() + 1:
            break
        part = refined
    order = np.argsort(first)  # of the classes by their first state, so that state 0 is in class 0
    rank = np.argsort(order)[refined]
    table = table[first[order]]
    return np.where(table >= 0, rank[table], -1), accepting[first[order]]


def _scramble(values: np.ndarray) -> np.ndarray:
    """A 64-bit mix (splitmix64), so that a weighted sum of rows is a hash of them."""
    values = (values + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _steps(sources: np.ndarray, targets: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The fewest steps from each state to one in ``ends`` (bool ``[states]``), infinite where there is no way."""
    states = len(ends)
    origin = np.flatnonzero(ends)  # a state more leads to them all, and steps are taken backwards
    rows = np.concatenate([targets, np.full(len(origin), states)])
    columns = np.concatenate([sources, origin])
    graph = sparse.csr_array((np.ones(len(rows)), (rows, columns)), (states + 1, states + 1))
    return csgraph.dijkstra(graph, indices=states, unweighted=True)[:-1] - 1


def _keep(table: np.ndarray, accepting: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The table without the other states; empty if state 0 is one of them."""
    if not kept[0]:
        return table[:0], accepting[:0]
    number = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1).astype(table.dtype)
    return number[table[kept]], accepting[kept]


def _eos(tokenizer: Tokenizer, eos_ids: Sequence[int] | None) -> list[int]:
    ids = [int(i) for i in (tokenizer.eos_ids if eos_ids is None else eos_ids)]
    if not ids or min(ids) < 0 or max(ids) >= tokenizer.vocab_size:
        raise ValueError(f"eos_ids must hold one or more tokens from 0 to {tokenizer.vocab_size - 1}, got {ids}")
    return ids


def _vocabulary(tokenizer: Tokenizer, eos: Iterable[int]) -> list[tuple[int, bytes]]:
    """The tokens that are text, and what they spell."""
    spelled = ((i, tokenizer.bytes_of(i)) for i in range(tokenizer.vocab_size) if i not in set(eos))
    return [(i, text) for i, text in spelled if text]


def _token_automaton(
    table: np.ndarray, accepting: np.ndarray, tokenizer: Tokenizer, eos_ids: Sequence[int] | None, vocab_size: int, what: str
) -> TokenAutomaton:
    """The automaton over tokens of the one over bytes."""
    eos = _eos(tokenizer, eos_ids)
    if not len(table):
        raise ValueError(f"{what} matches no text at all")
    tokens = _token_table(table, _vocabulary(tokenizer, eos), max(vocab_size, tokenizer.vocab_size))
    # Over whole tokens fewer states are met, and from some of them no match is.
    targets = [np.unique(row[row >= 0]) for row in tokens]
    sources, targets = np.repeat(np.arange(len(tokens)), list(map(len, targets))), np.concatenate(targets)
    alive = np.isfinite(_steps(sources, targets, accepting))
    on = alive[sources] & alive[targets]
    met = alive & np.isfinite(_steps(targets[on], sources[on], np.arange(len(tokens)) == 0))
    tokens, accepting = _keep(tokens, accepting, met)
    if not len(tokens):
        raise ValueError(f"{what}: no sequence of this tokenizer's tokens spells a match; change one of the two")
    last = len(tokens)
    tokens = np.concatenate([tokens, np.full_like(tokens[:1], -1)])
    accepting = np.append(accepting, True)
    tokens[np.ix_(np.flatnonzero(accepting), np.array(eos))] = last
    return TokenAutomaton(jnp.asarray(tokens), jnp.asarray(accepting))


def _token_table(table: np.ndarray, vocabulary: list[tuple[int, bytes]], vocab_size: int) -> np.ndarray:
    """Where each token leads from each state, ``[states, vocab]``: a walk of the vocabulary's prefix tree, a level at a time."""
    node_of: dict[bytes, int] = {b"": 0}  # prefix to its place in its level
    levels: list[tuple[list[int], ...]] = []  # parents and bytes of its nodes; tokens that end in it, and at which node
    for depth in range(1, 1 + max((len(text) for _, text in vocabulary), default=0)):
        parents, letters, ending, places = [], [], [], []
        below: dict[bytes, int] = {}
        for token, text in vocabulary:
            prefix = text[:depth]
            if prefix not in below:
                below[prefix] = len(below)
                parents.append(node_of[prefix[:-1]])
                letters.append(prefix[-1])
            if len(text) == depth:
                ending.append(token)
                places.append(below[prefix])
        vocabulary = [(token, text) for token, text in vocabulary if len(text) > depth]
        levels.append((parents, letters, ending, places))
        node_of = below
    states = len(table)
    dtype = np.int16 if states < np.iinfo(np.int16).max else np.int32  # one state more will follow
    moves = np.append(table, np.full((1, 256), -1), 0).astype(dtype)  # from -1, which is the last row too, to -1
    result = np.full((states, vocab_size), -1, dtype)
    for begin in range(0, states, 64):  # in parts, to bound the memory
        reached = np.arange(begin, min(begin + 64, states), dtype=dtype)[:, None]
        for parents, letters, ending, places in levels:
            reached = moves[reached[:, parents], letters]
            result[begin : begin + 64, ending] = reached[:, places]
    return result
