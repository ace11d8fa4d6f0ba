"""Small verifiable tasks whose prompts, demonstrations and rewards are made inside the program.

Each is a `rljax.envs.tokens.Task` over characters and has a difficulty. A prompt is drawn from a key, so no data set is needed
and no two updates see the same batch; `verify` is arithmetic on token ids. ``make_env("tokens/addition", digits=3)`` makes one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rljax.envs import Environment
from rljax.envs.tokens import Problem, TokenEnvironment
from rljax.lm.proxies import ProxyReward
from rljax.lm.tokenizer import CharTokenizer

# Text as arrays: a pair (ids int32 [W], length int32), left-aligned; what lies past the length has no meaning.
Text = tuple[Array, Array]


def write_number(number: Array, width: int) -> Text:
    """Decimal digits of ``number`` int32, which has at most ``width``; a digit's id is its value."""
    powers = 10 ** jnp.arange(width - 1, -1, -1)
    digits = number // powers % 10
    length = jnp.maximum(1, jnp.sum(number >= powers))
    return jnp.roll(digits, length - width).astype(jnp.int32), length


def read_number(ids: Array, length: Array) -> tuple[Array, Array]:
    """``(value, valid)`` of the first ``length`` of ``ids [W]``; valid if they are one to nine digits, without a leading zero."""
    place = jnp.arange(ids.shape[0])
    inside = place < length
    power = 10 ** jnp.clip(length - 1 - place, 0, 8)
    value = jnp.sum(jnp.where(inside, ids * power, 0))
    is_digits = jnp.all(jnp.where(inside, (ids >= 0) & (ids <= 9), True))
    return value, is_digits & (length >= 1) & (length <= 9) & ((length == 1) | (ids[0] != 0))


def join(*texts: Text) -> Text:
    """One text after another; as wide as all of them."""
    width = sum(ids.shape[0] for ids, _ in texts)
    joined, total = jnp.zeros(width, jnp.int32), jnp.zeros((), jnp.int32)
    for ids, length in texts:
        place = jnp.arange(ids.shape[0])
        joined = joined.at[jnp.where(place < length, total + place, width)].set(ids, mode="drop")
        total = total + length
    return joined, total


def pad_left(text: Text, width: int) -> Array:
    """int32 ``[width]``, the text at the right end, -1 before it."""
    ids, length = text
    ids = ids[:width] if ids.shape[0] >= width else jnp.pad(ids, (0, width - ids.shape[0]))
    return jnp.where(jnp.arange(width) >= width - length, jnp.roll(ids, width - length), -1).astype(jnp.int32)


def pad_right(text: Text, width: int) -> Array:
    """int32 ``[width]``, -1 after the text."""
    ids, length = text
    ids = ids[:width] if ids.shape[0] >= width else jnp.pad(ids, (0, width - ids.shape[0]))
    return jnp.where(jnp.arange(width) < length, ids, -1).astype(jnp.int32)


def read_fields(prompt: Array, count: int) -> Array:
    """The first ``count`` numbers of a prompt int32 ``[W]``, int32 ``[count]``; whatever is no digit parts them."""
    is_digit = (prompt >= 0) & (prompt <= 9)
    field = jnp.cumsum((prompt >= 10).astype(jnp.int32))  # separators before each place

    def number(i: Array) -> Array:
        def read(value, place):
            digit, inside = place
            return jnp.where(inside, value * 10 + digit, value), None

        return jax.lax.scan(read, jnp.zeros((), jnp.int32), (prompt, is_digit & (field == i)))[0]

    return jax.vmap(number)(jnp.arange(count))


def equals(completion: Array, length: Array, answer: Array) -> Array:
    """bool: the first ``length`` of ``completion [T]`` are just ``answer [A]``, padded with -1."""
    width = max(completion.shape[0], answer.shape[0])
    said = jnp.where(jnp.arange(completion.shape[0]) < length, completion, -1)
    return jnp.all(jnp.pad(said, (0, width - said.shape[0]), constant_values=-1) == _widen(answer, width))


def _check_share(name: str, value: Any) -> None:
    """Raises ValueError where a number, which may be traced, is known to be no probability."""
    if isinstance(value, int | float) and not 0 <= value <= 1:
        raise ValueError(f"env_params.{name} must be 0 to 1, got {value}")


def _widen(ids: Array, width: int) -> Array:
    return jnp.pad(ids, (0, width - ids.shape[0]), constant_values=-1)


def _char(text: str, alphabet: str) -> Text:
    ids = jnp.asarray([alphabet.index(c) for c in text], jnp.int32)
    return ids, jnp.int32(len(text))


@dataclasses.dataclass(frozen=True)
class CharTask:
    """What tasks with one right answer share: the alphabet, and exact match as the reward."""

    alphabet = "0123456789+-*=()[]?, "
    components = ("exact",)

    @functools.cached_property
    def tokenizer(self) -> CharTokenizer:
        return CharTokenizer(self.alphabet)

    @property
    def end(self) -> Text:
        return jnp.asarray(self.tokenizer.eos_ids[:1], jnp.int32), jnp.int32(1)

    def text(self, characters: str) -> Text:
        return _char(characters, self.alphabet)

    @property
    def answer_length(self) -> int:
        raise NotImplementedError

    @property
    def max_tokens(self) -> int:
        return self.answer_length + 1

    def demonstrate(self, key: Array, problem: Problem) -> Array:
        del key
        length = jnp.sum(problem.answer >= 0)
        return pad_right(join((problem.answer, length), self.end), self.max_tokens)

    def verify(self, problem: Problem, completion: Array, length: Array) -> Array:
        return equals(completion, length, problem.answer).astype(jnp.float32)[None]


@dataclasses.dataclass(frozen=True)
class Addition(CharTask):
    """``12+34=`` -> ``46``; ``reverse`` asks for the last digit first, which is easier for a transformer (arXiv 2307.03381).

    Numbers have up to ``digits`` digits, or with ``min_digits`` up to any number of them from that to ``digits``, drawn for both.
    Of the demonstrations a share of ``forget_carry`` adds digit by digit and forgets every carry, as a careless teacher would:
    ``57+68=`` -> ``15``.
    """

    digits: int = 2
    reverse: bool = False
    forget_carry: float = 0.0
    min_digits: int = 0

    def __post_init__(self):
        if not 1 <= self.digits <= 8:
            raise ValueError(f"env_params.digits must be 1 to 8, got {self.digits}")
        _check_share("forget_carry", self.forget_carry)
        if not isinstance(self.min_digits, int) or not 0 <= self.min_digits <= self.digits:
            raise ValueError(f"env_params.min_digits must be 1 to env_params.digits ({self.digits}), got {self.min_digits}")

    @property
    def prompt_length(self) -> int:
        return 2 * self.digits + 2

    @property
    def answer_length(self) -> int:
        return self.digits + 1

    def sample(self, key: Array) -> Problem:
        largest = 10 ** jax.random.randint(jax.random.fold_in(key, 0), (), self.min_digits or self.digits, self.digits + 1)
        a, b = jax.random.randint(key, (2,), 0, largest)
        prompt = join(write_number(a, self.digits), self.text("+"), write_number(b, self.digits), self.text("="))
        return Problem(pad_left(prompt, self.prompt_length), pad_right(self._write(a + b), self.answer_length))

    def demonstrate(self, key: Array, problem: Problem) -> Array:
        a, b = read_fields(problem.prompt, 2)
        powers = 10 ** jnp.arange(self.digits)
        without_carry = jnp.sum((a // powers + b // powers) % 10 * powers)
        forgets = jax.random.bernoulli(key, self.forget_carry)
        return pad_right(join(self._write(jnp.where(forgets, without_carry, a + b)), self.end), self.max_tokens)

    def _write(self, number: Array) -> Text:
        ids, length = write_number(number, self.answer_length)
        return (jnp.roll(ids[::-1], length - self.answer_length) if self.reverse else ids), length


@dataclasses.dataclass(frozen=True)
class ChainSum(CharTask):
    """``3+14+7=`` -> ``24``: ``terms`` numbers of up to ``digits`` digits."""

    terms: int = 3
    digits: int = 1

    def __post_init__(self):
        if not (2 <= self.terms <= 9 and 1 <= self.digits <= 7):
            raise ValueError(f"env_params.terms must be 2 to 9 and env_params.digits 1 to 7, got {self.terms} and {self.digits}")

    @property
    def prompt_length(self) -> int:
        return self.terms * (self.digits + 1)

    @property
    def answer_length(self) -> int:
        return self.digits + 1

    def sample(self, key: Array) -> Problem:
        numbers = jax.random.randint(key, (self.terms,), 0, 10**self.digits)
        parts = [part for i in range(self.terms) for part in (write_number(numbers[i], self.digits), self.text("+"))]
        prompt = join(*parts[:-1], self.text("="))
        return Problem(
            pad_left(prompt, self.prompt_length), pad_right(write_number(numbers.sum(), self.answer_length), self.answer_length)
        )


@dataclasses.dataclass(frozen=True)
class RunningSum(CharTask):
    """``3+1+4=`` -> ``348``: the sum so far, modulo 10, after each of ``min_terms`` to ``terms`` digits (0: always ``terms``).

    Components: ``exact``, and ``steps``: the share of the answer that is right before the first mistake, 1/3 for ``358``. No
    token lowers ``steps``, and after a mistake none raises it.

    In demonstrations each step forgets the sum so far with probability ``forget_sum``, and goes on from its digit alone, as a
    careless teacher would: ``315``. A policy cloned from those finds the right answer to ``n`` digits about ``(1 -
    forget_sum) ** (n - 1)`` of the time.
    """

    terms: int = 5
    min_terms: int = 0
    forget_sum: float = 0.0
    components = ("exact", "steps")

    def __post_init__(self):
        if not 1 <= self.terms <= 32:
            raise ValueError(f"env_params.terms must be 1 to 32, got {self.terms}")
        _check_share("forget_sum", self.forget_sum)
        if not isinstance(self.min_terms, int) or not 0 <= self.min_terms <= self.terms:
            raise ValueError(f"env_params.min_terms must be 1 to env_params.terms ({self.terms}), got {self.min_terms}")

    @property
    def prompt_length(self) -> int:
        return 2 * self.terms

    @property
    def answer_length(self) -> int:
        return self.terms

    def sample(self, key: Array) -> Problem:
        count_key, digits_key = jax.random.split(key)
        count = jax.random.randint(count_key, (), self.min_terms or self.terms, self.terms + 1)
        digits = jax.random.randint(digits_key, (self.terms,), 0, 10)
        (plus, equal), _ = self.text("+=")
        signs = jnp.where(jnp.arange(self.terms) == count - 1, equal, plus)
        prompt = jnp.stack([digits, signs], 1).reshape(-1)
        return Problem(
            pad_left((prompt, 2 * count), self.prompt_length), pad_right((jnp.cumsum(digits) % 10, count), self.answer_length)
        )

    def demonstrate(self, key: Array, problem: Problem) -> Array:
        steps = jnp.diff(problem.answer, prepend=0) % 10  # the digits: a sum less the one before it
        forgets = jax.random.bernoulli(key, self.forget_sum, steps.shape)

        def step(total: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
            digit, forgets = x
            total = (jnp.where(forgets, 0, total) + digit) % 10
            return total, total

        _, sums = jax.lax.scan(step, jnp.int32(0), (steps, forgets))
        return pad_right(join((sums, jnp.sum(problem.answer >= 0)), self.end), self.max_tokens)

    def verify(self, problem: Problem, completion: Array, length: Array) -> Array:
        width = max(completion.shape[0], self.answer_length)
        said = _widen(jnp.where(jnp.arange(completion.shape[0]) < length, completion, -1), width)[: self.answer_length]
        is_asked = problem.answer >= 0
        right = jnp.cumprod((is_asked & (said == problem.answer)).astype(jnp.int32))
        return jnp.stack([equals(completion, length, problem.answer), right.sum() / is_asked.sum()]).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Reversing(CharTask):
    """``40213=`` -> ``31204``: one to ``length`` digits backwards; ``sort`` asks for them in ascending order instead."""

    length: int = 5
    sort: bool = False

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"env_params.length must be 1 or more, got {self.length}")

    @property
    def prompt_length(self) -> int:
        return self.length + 1

    @property
    def answer_length(self) -> int:
        return self.length

    def sample(self, key: Array) -> Problem:
        length_key, digits_key = jax.random.split(key)
        length = jax.random.randint(length_key, (), 1, self.length + 1)
        ids = jax.random.randint(digits_key, (self.length,), 0, 10)
        inside = jnp.arange(self.length) < length
        answer = jnp.sort(jnp.where(inside, ids, 10)) if self.sort else jnp.roll(ids[::-1], length)
        prompt = join((ids, length), self.text("="))
        return Problem(pad_left(prompt, self.prompt_length), pad_right((answer, length), self.length))


@dataclasses.dataclass(frozen=True)
class Brackets(CharTask):
    """``([(`` -> ``)])``: closes what is open. Any completion that makes the whole a balanced word of two kinds is right."""

    length: int = 6

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"env_params.length must be 1 or more, got {self.length}")

    @property
    def prompt_length(self) -> int:
        return self.length

    @property
    def answer_length(self) -> int:
        return self.length

    def sample(self, key: Array) -> Problem:
        length_key, *keys = jax.random.split(key, 3)
        length = jax.random.randint(length_key, (), 1, self.length + 1)
        square, closes = (jax.random.bernoulli(k, 0.5, (self.length,)) for k in keys)
        (open_round, close_round, open_square, close_square), _ = self.text("()[]")

        def write(stack_depth, place):
            stack, depth = stack_depth
            close = closes[place] & (depth > 0)
            top = stack[jnp.maximum(depth - 1, 0)]
            opening = jnp.where(square[place], open_square, open_round)
            symbol = jnp.where(close, jnp.where(top == open_square, close_square, close_round), opening)
            counts = place < length
            stack = jnp.where(counts & ~close, stack.at[depth].set(opening), stack)
            return (stack, jnp.where(counts, depth + jnp.where(close, -1, 1), depth)), symbol

        start = (jnp.zeros(self.length, jnp.int32), jnp.zeros((), jnp.int32))
        (stack, depth), symbols = jax.lax.scan(write, start, jnp.arange(self.length))
        opened = jnp.roll(stack[::-1], depth)
        answer = jnp.where(opened == open_square, close_square, close_round)
        return Problem(pad_left((symbols, length), self.prompt_length), pad_right((answer, depth), self.length))

    def verify(self, problem: Problem, completion: Array, length: Array) -> Array:
        (open_round, close_round, open_square, close_square), _ = self.text("()[]")
        said = jnp.where(jnp.arange(completion.shape[0]) < length, completion, -1)
        word = jnp.concatenate([problem.prompt, said])

        def read(loop, symbol):
            stack, depth, good = loop
            opens = (symbol == open_round) | (symbol == open_square)
            top = stack[jnp.maximum(depth - 1, 0)]
            matches = (depth > 0) & (
                ((symbol == close_round) & (top == open_round)) | ((symbol == close_square) & (top == open_square))
            )
            good = good & ((symbol < 0) | opens | matches)
            stack = jnp.where(opens, stack.at[depth].set(symbol), stack)
            return (stack, depth + jnp.where(opens, 1, jnp.where(matches, -1, 0)), good), None

        start = (jnp.zeros(word.shape[0], jnp.int32), jnp.zeros((), jnp.int32), jnp.ones((), bool))
        (_, depth, good), _ = jax.lax.scan(read, start, word)
        return (good & (depth == 0)).astype(jnp.float32)[None]


@dataclasses.dataclass(frozen=True)
class Countdown(CharTask):
    """``2,3,7?13`` -> ``2*3+7``: reach the target with +, - and *, each number at most once (a number's order is free).

    Components: ``exact``, and ``format``: a well-formed expression of the given numbers, whatever its value.
    """

    numbers: int = 3
    largest: int = 9
    components = ("exact", "format")

    def __post_init__(self):
        if not (2 <= self.numbers <= 6 and 1 <= self.largest <= 99):
            raise ValueError(
                f"env_params.numbers must be 2 to 6 and env_params.largest 1 to 99, got {self.numbers} and {self.largest}"
            )

    @property
    def width(self) -> int:
        return len(str(self.largest))

    @property
    def prompt_length(self) -> int:
        return self.numbers * (self.width + 1) + 4

    @property
    def answer_length(self) -> int:
        return self.numbers * (self.width + 1) - 1

    def sample(self, key: Array) -> Problem:
        """The target is the value of a random expression of all numbers in a random order, redrawn to a sum where it is negative
        or has more than four digits. The answer holds that expression."""
        number_key, operator_key, order_key = jax.random.split(key, 3)
        numbers = jax.random.randint(number_key, (self.numbers,), 1, self.largest + 1)
        (plus, minus, times), _ = self.text("+-*")
        operators = jnp.asarray([plus, minus, times])[jax.random.randint(operator_key, (self.numbers - 1,), 0, 3)]
        order = jax.random.permutation(order_key, self.numbers)

        def expression(operators: Array) -> Text:
            parts = [write_number(numbers[order[0]], self.width)]
            for i in range(self.numbers - 1):
                parts += [(operators[i][None], jnp.int32(1)), write_number(numbers[order[i + 1]], self.width)]
            return join(*parts)

        text = expression(operators)
        value, _, _ = self.evaluate(*text, numbers)
        is_good = (value >= 0) & (value <= 9999)
        sums = expression(jnp.full_like(operators, plus))
        ids, length = jnp.where(is_good, text[0], sums[0]), jnp.where(is_good, text[1], sums[1])
        target = jnp.where(is_good, value, numbers.sum())
        parts = [part for i in range(self.numbers) for part in (write_number(numbers[i], self.width), self.text(","))]
        prompt = join(*parts[:-1], self.text("?"), write_number(target, 4))
        return Problem(pad_left(prompt, self.prompt_length), pad_right((ids, length), self.answer_length))

    def evaluate(self, ids: Array, length: Array, numbers: Array) -> tuple[Array, Array, Array]:
        """``(value, well formed, uses only the given numbers, each at most once)`` of an expression, products first."""
        (plus, minus, times), _ = self.text("+-*")

        def read(loop, symbol):
            total, product, number, digits, used, good = loop
            is_digit = (symbol >= 0) & (symbol <= 9)
            is_operator = (symbol == plus) | (symbol == minus) | (symbol == times)
            ends = is_operator | (symbol == -1)
            # At an operator or the end, the number before it joins the product.
            matches = ~used & (numbers == number)
            taken = matches & (jnp.cumsum(matches) == 1)
            is_given = (digits > 0) & jnp.any(matches)
            grown = product * number
            good = good & (is_digit | ends) & jnp.where(ends, is_given, True) & ~(is_digit & (digits > 0) & (number == 0))
            used = jnp.where(ends, used | taken, used)
            closes = ends & (symbol != times)
            total = jnp.where(closes, total + grown, total)
            product = jnp.where(closes, jnp.where(symbol == minus, -1, 1), jnp.where(ends, grown, product))
            number = jnp.where(is_digit, jnp.minimum(number * 10 + symbol, 999), 0)
            return (total, product, number, jnp.where(is_digit, digits + 1, 0), used, good), None

        # Everything after the end is dropped but one -1, which closes the last number.
        inside = jnp.arange(ids.shape[0] + 1)
        symbols = jnp.where(inside < length, jnp.pad(ids, (0, 1)), jnp.where(inside == length, -1, -2))
        zero = jnp.zeros((), jnp.int32)

        def read_inside(loop, symbol):
            new, _ = read(loop, symbol)
            return jax.tree.map(lambda a, b: jnp.where(symbol == -2, a, b), loop, new), None

        start = (zero, zero + 1, zero, zero, jnp.zeros(numbers.shape, bool), jnp.ones((), bool))
        (total, *_, good), _ = jax.lax.scan(read_inside, start, symbols)
        return total, good, good

    def verify(self, problem: Problem, completion: Array, length: Array) -> Array:
        *numbers, target = read_fields(problem.prompt, self.numbers + 1)
        numbers = jnp.stack(numbers)
        value, good, _ = self.evaluate(completion, length, numbers)
        return jnp.stack([good & (value == target), good]).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Calculator:
    """Answers ``[12*34]`` with ``(408)``: two whole numbers of up to four digits and +, - or * between; else ``(?)``.

    A negative result is answered with ``(?)`` too.
    """

    task: CharTask
    max_tokens: int = 10

    def __call__(self, said: Array, length: Array) -> tuple[Array, Array]:
        (left, right, plus, minus, times), _ = self.task.text("[]+-*")
        place = jnp.arange(said.shape[0])
        before = place < length
        calls = said[jnp.maximum(length - 1, 0)] == right
        begin = jnp.max(jnp.where(before & (said == left), place, -1)) + 1
        operator_at = jnp.max(
            jnp.where(before & (place >= begin) & ((said == plus) | (said == minus) | (said == times)), place, -1)
        )
        a, a_good = read_number(jnp.roll(said, -begin), operator_at - begin)
        b, b_good = read_number(jnp.roll(said, -operator_at - 1), length - 2 - operator_at)
        operator = said[jnp.maximum(operator_at, 0)]
        value = jnp.where(operator == plus, a + b, jnp.where(operator == minus, a - b, a * b))
        good = (begin > 0) & (operator_at > begin) & a_good & b_good & (a <= 9999) & (b <= 9999) & (value >= 0)
        result = join(self.task.text("("), write_number(value, 8), self.task.text(")"))
        unknown = join(self.task.text("(?)"), (jnp.zeros(7, jnp.int32), jnp.zeros((), jnp.int32)))
        ids, size = jax.tree.map(lambda x, y: jnp.where(good, x, y), result, unknown)
        return ids.astype(jnp.int32), jnp.where(calls, size, 0)


@dataclasses.dataclass(frozen=True)
class Multiplication(CharTask):
    """``37*52?`` -> ``=1924``, or by the calculator ``[37*52](1924)=1924``: what stands after the only ``=`` is the answer.

    Demonstrations call the tool with probability ``tool_share``; components are ``exact``, and ``called``, which is worth nothing
    unless it is given a weight.
    """

    digits: int = 2
    tool_share: float = 0.5
    components = ("exact", "called")

    def __post_init__(self):
        _check_share("tool_share", self.tool_share)
        if not 1 <= self.digits <= 4:
            raise ValueError(f"env_params.digits must be 1 to 4, got {self.digits}")

    @property
    def prompt_length(self) -> int:
        return 2 * self.digits + 2

    @property
    def answer_length(self) -> int:
        return 2 * self.digits

    @property
    def max_tokens(self) -> int:
        return (2 * self.digits + 3) + (self.answer_length + 2) + 1 + self.answer_length + 1

    def sample(self, key: Array) -> Problem:
        a, b = jax.random.randint(key, (2,), 0, 10**self.digits)
        prompt = join(write_number(a, self.digits), self.text("*"), write_number(b, self.digits), self.text("?"))
        answer = write_number(a * b, self.answer_length)
        return Problem(pad_left(prompt, self.prompt_length), pad_right(answer, self.answer_length))

    def demonstrate(self, key: Array, problem: Problem) -> Array:
        answer = (problem.answer, jnp.sum(problem.answer >= 0))
        size = jnp.sum(problem.prompt >= 0) - 1
        question = (jnp.roll(problem.prompt, size + 1), size)
        direct = join(self.text("="), answer, self.end)
        call = join(self.text("["), question, self.text("]"), *(direct,))
        calls = jax.random.bernoulli(key, self.tool_share)
        width = max(direct[0].shape[0], call[0].shape[0])
        return pad_right(
            (
                jnp.where(calls, call[0], jnp.pad(direct[0], (0, width - direct[0].shape[0]))),
                jnp.where(calls, call[1], direct[1]),
            ),
            self.max_tokens,
        )

    def verify(self, problem: Problem, completion: Array, length: Array) -> Array:
        (equal, right), _ = self.text("=]")
        place = jnp.arange(completion.shape[0])
        before = place < length
        begin = jnp.max(jnp.where(before & (completion == equal), place, -1)) + 1
        is_only = jnp.sum(before & (completion == equal)) == 1
        is_right = is_only & equals(jnp.roll(completion, -begin), length - begin, problem.answer)
        return jnp.stack([is_right, jnp.any(before & (completion == right))]).astype(jnp.float32)


class MixedProblem(Problem):
    """A `Problem` of a `Mixture`.

    Attributes:
      task: int32, the number of the task that it is from.
    """

    task: Array


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Problems of several `CharTask` over one alphabet, of ``tasks[i]`` with probability ``shares[i]``: the same but for padding.

    A policy sees which task is meant by the form of its prompt alone. The components are those of all tasks; one that a problem's
    task does not have is 0.
    """

    tasks: tuple[Any, ...]
    shares: tuple[Any, ...]

    def __post_init__(self):
        if len({task.alphabet for task in self.tasks}) != 1 or len(self.shares) != len(self.tasks):
            raise ValueError("a mixture needs one or more tasks over the same alphabet, and a share of each")

    @property
    def tokenizer(self) -> CharTokenizer:
        return self.tasks[0].tokenizer

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for task in self.tasks for name in task.components))

    @property
    def prompt_length(self) -> int:
        return max(task.prompt_length for task in self.tasks)

    @property
    def answer_length(self) -> int:
        return max(task.answer_length for task in self.tasks)

    @property
    def max_tokens(self) -> int:
        return max(task.max_tokens for task in self.tasks)

    def sample(self, key: Array) -> MixedProblem:
        task_key, key = jax.random.split(key)
        shares = jnp.stack([jnp.asarray(share, jnp.float32) for share in self.shares])
        number = jax.random.choice(task_key, len(self.tasks), p=shares)

        def draw(task: Any) -> MixedProblem:
            problem = task.sample(key)
            prompt = jnp.pad(problem.prompt, (self.prompt_length - task.prompt_length, 0), constant_values=-1)
            return MixedProblem(prompt, _widen(problem.answer, self.answer_length), number)

        return self._by_task(number, draw)

    def demonstrate(self, key: Array, problem: Any) -> Array:
        return self._by_task(
            problem.task, lambda task: _widen(task.demonstrate(key, self._as_of(task, problem)), self.max_tokens)
        )

    def verify(self, problem: Any, completion: Array, length: Array) -> Array:
        def score(task: Any) -> Array:
            scores = dict(zip(task.components, task.verify(self._as_of(task, problem), completion, length), strict=True))
            return jnp.stack([scores.get(name, jnp.float32(0.0)) for name in self.components])

        return self._by_task(problem.task, score)

    def _by_task(self, number: Array, function: Callable[[Any], Any]) -> Any:
        """``function`` of the task of that number."""
        return jax.lax.switch(number, [functools.partial(function, task) for task in self.tasks])

    def _as_of(self, task: Any, problem: Problem) -> Problem:
        return Problem(problem.prompt[self.prompt_length - task.prompt_length :], problem.answer[: task.answer_length])


# What `make_env` makes of ``tokens/<name>``; keyword arguments are the task's, then the environment's, then the proxy to learn
# from, if any (`rljax.lm.proxies`).


def addition(
    digits: int = 2,
    reverse: bool = False,
    forget_carry: float = 0.0,
    min_digits: int = 0,
    truncated_counts: bool = False,
    max_tokens: int | None = None,
    proxy: str | None = None,
) -> Environment:
    """See `Addition`."""
    task = Addition(digits, reverse, forget_carry, min_digits)
    return _environment(task, proxy, truncated_counts=truncated_counts, max_tokens=max_tokens)


def chain_sum(
    terms: int = 3, digits: int = 1, truncated_counts: bool = False, max_tokens: int | None = None, proxy: str | None = None
) -> Environment:
    """See `ChainSum`."""
    return _environment(ChainSum(terms, digits), proxy, truncated_counts=truncated_counts, max_tokens=max_tokens)


def running_sum(
    terms: int = 5,
    min_terms: int = 0,
    forget_sum: float = 0.0,
    process: float = 0.0,
    dense: bool = False,
    truncated_counts: bool = False,
    max_tokens: int | None = None,
    proxy: str | None = None,
) -> Environment:
    """See `RunningSum`; ``process`` is the weight of ``steps``, which ``dense`` pays step by step."""
    options: dict[str, Any] = {"weights": {"steps": process}, "dense": ("steps",) if dense else ()}
    task = RunningSum(terms, min_terms, forget_sum)
    return _environment(task, proxy, **options, truncated_counts=truncated_counts, max_tokens=max_tokens)


def reversing(
    length: int = 5, truncated_counts: bool = False, max_tokens: int | None = None, proxy: str | None = None
) -> Environment:
    """See `Reversing`."""
    return _environment(Reversing(length), proxy, truncated_counts=truncated_counts, max_tokens=max_tokens)


def sorting(
    length: int = 5, truncated_counts: bool = False, max_tokens: int | None = None, proxy: str | None = None
) -> Environment:
    """See `Reversing`."""
    return _environment(Reversing(length, sort=True), proxy, truncated_counts=truncated_counts, max_tokens=max_tokens)


def brackets(
    length: int = 6, truncated_counts: bool = False, max_tokens: int | None = None, proxy: str | None = None
) -> Environment:
    """See `Brackets`."""
    return _environment(Brackets(length), proxy, truncated_counts=truncated_counts, max_tokens=max_tokens)


def countdown(
    numbers: int = 3,
    largest: int = 9,
    format: float = 0.0,
    truncated_counts: bool = False,
    max_tokens: int | None = None,
    proxy: str | None = None,
) -> Environment:
    """See `Countdown`; ``format`` is the weight of that component."""
    task, weights = Countdown(numbers, largest), {"format": format}
    return _environment(task, proxy, weights=weights, truncated_counts=truncated_counts, max_tokens=max_tokens)


def multiplication(
    digits: int = 2,
    tool: bool = True,
    tool_share: float = 0.5,
    called: float = 0.0,
    truncated_counts: bool = False,
    max_tokens: int | None = None,
    proxy: str | None = None,
) -> Environment:
    """See `Multiplication` and `Calculator`; without ``tool`` nobody answers a call, and demonstrations make none."""
    task = Multiplication(digits, tool_share if tool else 0.0)
    options: dict[str, Any] = {"weights": {"called": called}, "tool": Calculator(task) if tool else None}
    return _environment(task, proxy, **options, truncated_counts=truncated_counts, max_tokens=max_tokens)


def addition_and_reversing(
    digits: int = 2,
    length: int = 5,
    share: float = 0.5,
    reverse: bool = False,
    forget_carry: float = 0.0,
    min_digits: int = 0,
    truncated_counts: bool = False,
    max_tokens: int | None = None,
    proxy: str | None = None,
) -> Environment:
    """A `Mixture` of `Addition`, which ``share`` of the problems are of, and `Reversing`."""
    _check_share("share", share)
    task = Mixture((Addition(digits, reverse, forget_carry, min_digits), Reversing(length)), (share, 1 - share))
    return _environment(task, proxy, truncated_counts=truncated_counts, max_tokens=max_tokens)


def _environment(task: Any, proxy: str | None, **options: Any) -> Environment:
    env = TokenEnvironment(task, **options)
    return env if proxy is None else ProxyReward(env, proxy)
