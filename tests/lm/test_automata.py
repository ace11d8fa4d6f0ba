import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.lm import automata
from rljax.lm.automata import TokenAutomaton, compile_choices, compile_regex


class Vocabulary:
    """A tokenizer by its tokens' bytes; EOS is the first one and spells nothing."""

    def __init__(self, *tokens, eos_ids=(0,)):
        self.tokens = [b"", *(t.encode() if isinstance(t, str) else t for t in tokens)]
        self.vocab_size = len(self.tokens)
        self.eos_ids = eos_ids

    def bytes_of(self, token):
        return self.tokens[token]


BYTES = Vocabulary(*(bytes([b]) for b in range(256)))


def reach(automaton: TokenAutomaton, tokens, state=0):
    """The state after tokens, -1 where one was illegal."""
    table = np.asarray(automaton.next_state)
    for token in tokens:
        state = -1 if state < 0 else int(table[state, token])
    return state


def accepts(automaton: TokenAutomaton, text: str) -> bool:
    """Of an automaton over BYTES."""
    state = reach(automaton, [byte + 1 for byte in text.encode()])
    return state >= 0 and bool(automaton.accepting[state])


def tokenizations(automaton, tokenizer, most=12):
    """Every legal sequence of tokens up to EOS, of at most so many tokens."""
    table, accepting = np.asarray(automaton.next_state), np.asarray(automaton.accepting)
    found, stack = [], [(0, ())]
    while stack:
        state, tokens = stack.pop()
        for token in np.flatnonzero(table[state] >= 0):
            if token in tokenizer.eos_ids:
                assert accepting[state]
                found.append(tokens)
            elif len(tokens) < most:
                stack.append((table[state, token], (*tokens, int(token))))
    return found


def check_invariants(automaton, tokenizer):
    """EOS is legal exactly where a match may end; every mask holds a token; every state is met and reaches a match."""
    table, accepting = np.asarray(automaton.next_state), np.asarray(automaton.accepting)
    last = len(table) - 1
    assert table.dtype in (np.int16, np.int32) and accepting.dtype == bool
    assert table.shape == (len(accepting), tokenizer.vocab_size) and table.min() >= -1 and table.max() == last
    for eos in tokenizer.eos_ids:
        np.testing.assert_array_equal(table[:, eos], np.where(accepting, last, -1))
    text = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.eos_ids)
    assert (table[:, text] != last).all() and (table[last, text] == -1).all()
    assert (table >= 0).any(1).all()
    steps = np.zeros((len(table), len(table)), bool)
    np.add.at(steps, tuple(np.stack([np.nonzero(table >= 0)[0], table[table >= 0]])), True)
    reached, ends = np.arange(len(table)) == 0, accepting
    for _ in table:
        reached, ends = reached | steps[reached].any(0), ends | steps[:, ends].any(1)
    assert reached.all() and ends.all()


PATTERNS = [
    "",
    "a",
    "abc",
    "a|b|",
    "(a|b)*abb",
    "(?:a|(b))(?P<name>c)",
    "a{2}",
    "a{1,3}b?",
    "a{,2}",
    "a{2,}",
    "a{0}b",
    "(?:a?){3}b|c",
    "(a|)*b",
    "(a*)*",
    "(a+)+(b|c+)?",
    "((a|b)(c|))*",
    "[abc]",
    "[^a]+",
    "[a-b]c[^a-b]",
    "[]a]+",
    "[^]a]*",
    "[a-]b",
    "[-a]b",
    r"[\]\-^]",
    ".",
    ".*b.",
    "a{b",
    "a{,b",
    "{",
    "a]",
    r"\x61\u0062\U00000063",
    r"\(\[\]\)\{\}\.\*\+\?\|\^\$\\",
    r"\w",
    r"\W",
    r"\d\D",
    r"\s+\S",
    r"[\d\s]",
    r"[^\w]",
    r"[\W\d]",
    r"\n|\t|\r|\f|\v|\a",
    r"[\n-\r\b]",
    "\u00e9|\u4e2d{2}|[\u00e0-\u00ff]a|[^\U0001f600]",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_against_re_on_every_short_text(pattern):
    automaton = compile_regex(pattern, BYTES)
    check_invariants(automaton, BYTES)
    wanted = re.compile(pattern, re.ASCII)
    texts = ["".join(t) for n in range(6) for t in itertools.product("abc", repeat=n)]
    odd = "ab]^-{},0_ \n\t\r\x08\x0b(\u00e9\u00e0\u4e2d\U0001f600\u0660"
    texts += ["".join(t) for n in (1, 2) for t in itertools.product(odd, repeat=n)]
    texts += ["a{b", "a{,b", r"([]){}.*+?|^$" + "\\", "\u4e2d\u4e2d", "\u4e2d\u4e2d\u4e2d"]
    for text in texts:
        assert accepts(automaton, text) == bool(wanted.fullmatch(text)), (pattern, text)


@pytest.mark.parametrize(
    "pattern", [r".", r"\w", r"\S", r"[^\W\d]", "[\u00e9-\u0fff]", "[\u07fe-\U00010001]", "[^\u0800-\uffff]"]
)
def test_classes_hold_the_right_characters_of_unicode(pattern):
    edges = [0x7F, 0x7FF, 0xD7FF, 0xE000, 0xFFFF, 0x10FFFF, 0xE9, 0xFFF, 0x7FE, 0x10001, 0x800]
    codes = {code + offset for code in edges for offset in range(-66, 67)} | set(range(0, 0x110000, 1031)) | set(range(300))
    automaton, wanted = compile_regex(pattern, BYTES), re.compile(pattern, re.ASCII)
    for code in codes:
        if 0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
            assert accepts(automaton, chr(code)) == bool(wanted.fullmatch(chr(code))), hex(code)
    table = np.asarray(automaton.next_state)
    surrogate = [b + 1 for b in b"\xed\xa0\x80"]
    assert reach(automaton, surrogate) == -1
    assert (table[0, 1 + 0x80 : 1 + 0xC2] == -1).all()  # continuation bytes, and first bytes of overlong forms
    assert (table[0, 1 + 0xF5 : 1 + 0x100] == -1).all()


def patterns():
    atoms = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"\n", "\u00e9"])

    def extend(inner):
        counts = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "{,1}"])
        repeated = st.tuples(inner, counts).map(lambda x: f"(?:{x[0]}){x[1]}")
        several = st.lists(inner, min_size=2, max_size=3)
        return repeated | several.map("".join) | several.map(lambda x: f"({'|'.join(x)})")

    return st.recursive(atoms, extend, max_leaves=8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(patterns(), st.lists(st.text("abc\n\u00e9x", max_size=8), max_size=20))
def test_random_patterns_against_re(pattern, texts):
    automaton = compile_regex(pattern, BYTES)
    for text in [*texts, *("".join(t) for n in range(4) for t in itertools.product("abc", repeat=n))]:
        assert accepts(automaton, text) == bool(re.fullmatch(pattern, text, re.ASCII)), text


def test_states_are_as_few_as_can_be():
    # Over single bytes there is one state for each set of texts that may still follow, and one after EOS.
    for pattern, states in [
        ("(a|b)*abb", 4),
        ("a|b|c", 2),
        ("(?:ax|bx|cx)", 3),
        ("a*|a*a", 1),
        ("(a|b)*a(a|b){3}", 16),
        ("a{40}", 41),
    ]:
        assert len(compile_regex(pattern, BYTES).accepting) == states + 1, pattern


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (3, "pattern must be a text"),
        ("(a", r"missing \), unterminated subpattern"),
        ("a**", "multiple repeat"),
        ("[b-a]", "bad character range"),
        ("a*?", "position 2: lazy quantifiers are not supported; leave '\\?' out"),
        ("a{1,2}?", "lazy quantifiers"),
        ("a++", "possessive quantifiers"),
        ("^a", "anchors are implied: leave '\\^' out"),
        ("a$", r"anchors are implied: leave '\$' out, or write \\\$"),
        (r"\bword", r"\\b is not supported"),
        (r"a\Z", r"\\Z is not supported"),
        (r"(a)\1", r"\\1 is not supported"),
        (r"\07", r"\\0 is not supported"),
        (r"\N{DASH}", "is not supported|undefined character name"),
        ("(?=a)b", r"only \(\?:...\) and \(\?P<name>...\) are supported"),
        ("(?i)a", r"only \(\?:...\)"),
        ("(?i:a)", r"only \(\?:...\)"),
        ("(?P<x>a)(?P=x)", r"only \(\?:...\)"),
        ("(?#comment)a", r"only \(\?:...\)"),
        ("a{20000}", "repeats more than 10000 times"),
        ("(?:(?:a{100}){100})", "needs more than 5000 states"),
        ("(a|b)*a(a|b){13}", "needs more than max_states 4096"),
        ("(" * 3000 + "a" + ")" * 3000, "recursion|nested too deep"),
        ("\ud800", "lone surrogate"),
        (r"\ud800", "surrogate"),
        (r"[^\x00-\U0010ffff]", "matches no text at all"),
    ],
)
def test_patterns_that_are_refused(pattern, message, monkeypatch):
    monkeypatch.setattr(automata, "MAX_NFA_STATES", 5000)
    with pytest.raises(ValueError, match=message):
        compile_regex(pattern, BYTES)


def test_every_way_to_cut_a_match_into_tokens_is_legal():
    tokenizer = Vocabulary("a", "b", "ab", "aa", "aab", "c")
    a, b, ab, aa, aab = range(1, 6)
    automaton = compile_regex("aab", tokenizer)
    check_invariants(automaton, tokenizer)
    assert set(tokenizations(automaton, tokenizer)) == {(a, a, b), (a, ab), (aa, b), (aab,)}


def test_a_token_may_run_over_several_parts_of_the_pattern():
    tokenizer = Vocabulary('{"', '":', " 1", "2}", "x", "y", "}", '{"x": ')
    automaton = compile_regex(r'\{"[xy]": \d+\}', tokenizer)
    texts = {b"".join(tokenizer.tokens[t] for t in tokens) for tokens in tokenizations(automaton, tokenizer, 8)}
    assert {b'{"x": 12}', b'{"y": 1}'} <= texts and b'{"x": }' not in texts
    assert all(re.fullmatch(rb'\{"[xy]": \d+\}', text) for text in texts)


def test_dead_ends_by_tokens_are_cut_off():
    # "abc" is no match that tokens spell, as "c" has none: after "a" only "d" can follow, and "b" must not begin a text.
    tokenizer = Vocabulary("a", "b", "d", "bx")
    automaton = compile_regex("a(bc|d)|b(c|xe)", tokenizer)
    check_invariants(automaton, tokenizer)
    assert tokenizations(automaton, tokenizer) == [(1, 3)]
    assert len(automaton.accepting) == 4  # start, after "a", after "ad", after EOS
    # A loop without an exit by tokens is a dead end as well.
    automaton = compile_regex("(?:aa)*c|d", tokenizer)
    assert tokenizations(automaton, tokenizer) == [(3,)]
    with pytest.raises(ValueError, match="pattern 'a\\*c': no sequence of this tokenizer's tokens spells a match"):
        compile_regex("a*c", tokenizer)


def test_states_inside_of_tokens_are_left_out():
    tokenizer = Vocabulary("abcdefgh", "ij")
    assert len(compile_regex("(abcdefghij)*", tokenizer).accepting) == 3


def test_characters_of_several_bytes_may_be_cut():
    euro, smile = "\u20ac".encode(), "\U0001f600".encode()
    tokenizer = Vocabulary(euro, euro[:1], euro[1:], euro[1:2], smile[:2], smile[2:], euro + smile[:2])
    automaton = compile_regex("(?:\u20ac|\U0001f600)+", tokenizer)
    check_invariants(automaton, tokenizer)
    table = np.asarray(automaton.next_state)
    np.testing.assert_array_equal(np.flatnonzero(table[0] >= 0), [1, 2, 5, 7])  # whole characters and their beginnings
    np.testing.assert_array_equal(np.flatnonzero(table[table[0, 2]] >= 0), [3])  # its second byte alone has no third
    assert reach(automaton, [2, 3, 7, 6, 0]) == len(table) - 1
    assert reach(automaton, [2, 6]) == -1


def test_special_tokens_and_eos_are_no_text():
    tokenizer = Vocabulary("a", "", "</s>", eos_ids=(0, 3))
    automaton = compile_regex("(?:a|</s>)*", tokenizer)
    np.testing.assert_array_equal(automaton.next_state, [[1, 0, -1, 1], [1, -1, -1, 1]])
    np.testing.assert_array_equal(automaton.accepting, [True, True])
    automaton = compile_regex("(?:a|</s>)*", tokenizer, eos_ids=[2], vocab_size=6)
    np.testing.assert_array_equal(automaton.next_state, [[-1, 0, 1, 0, -1, -1], [-1, -1, 1, -1, -1, -1]])
    for ids in ([], [-1], [4]):
        with pytest.raises(ValueError, match="eos_ids must hold one or more tokens from 0 to 3"):
            compile_regex("a", tokenizer, eos_ids=ids)


def test_choices_with_shared_prefixes():
    tokenizer = Vocabulary("y", "e", "s", "yes", "sir", " ", " sir", "n", "o", "no")
    choices = ["yes", "yes sir", "no", "noes", "eye"]
    automaton = compile_choices(choices, tokenizer)
    check_invariants(automaton, tokenizer)
    texts = [b"".join(tokenizer.tokens[t] for t in tokens).decode() for tokens in tokenizations(automaton, tokenizer)]
    assert set(texts) == set(choices)
    assert texts.count("yes sir") == 2 * 2  # "yes" in one token or three, " sir" in one or two
    as_regex = compile_regex("|".join(map(re.escape, choices)), tokenizer)
    assert len(as_regex.accepting) == len(automaton.accepting)
    assert set(tokenizations(as_regex, tokenizer)) == set(tokenizations(automaton, tokenizer))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "choices must be a list of one or more texts"),
        ("yes", "choices must be a list"),
        (["a", ""], r"choices\[1\] must be a text that is not empty"),
        (["a", 1], r"choices\[1\] must be a text"),
        (["a", "b", "a"], r"choices\[2\] 'a' is listed twice"),
        (["a", "ab", "bac"], r"choices\[2\] 'bac' cannot be spelled"),
        (["\ud800"], r"choices\[0\]: a lone surrogate"),
    ],
)
def test_choices_that_are_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        compile_choices(choices, Vocabulary("a", "b", "cc"))
    with pytest.raises(ValueError, match="choices need 31 states, more than max_states 30"):
        compile_choices(["a" * 30], Vocabulary("a"), max_states=30)


def sample_words(rng, count):
    letters = list('abcdefghijklmnopqrstuvwxyz0123456789 .,:{}"-\u00e9\u00fc\u4e2d')
    return sorted({"".join(rng.choice(letters, rng.integers(1, 9))) for _ in range(count)})


@functools.partial(jax.jit, static_argnames="length", compiler_options={"xla_backend_optimization_level": 0})
def walk(automaton, keys, length):
    """Tokens drawn under the mask, ``[walks, length]``, and the states after them. The automaton, a pytree, is an argument."""

    def step(state, key):
        token = jax.random.categorical(key, jnp.where(automaton.mask(state), 0.0, -jnp.inf))
        state = automaton.advance(state, token)
        return state, (token, state)

    return jax.vmap(lambda key: jax.lax.scan(step, automaton.start, jax.random.split(key, length))[1])(keys)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{1,3}(?:\.\d{1,2})?",
        r'\{"name": "[a-z\u00e0-\u00ff]{1,8}", "size": (?:small|smaller|large)\}',
        "(?:[^a-z]{2}\u4e2d|ab|abc){1,3}",
    ],
)
def test_walks_under_the_mask_end_in_a_match(pattern):
    rng = np.random.default_rng(0)
    singles = [bytes([b]) for b in range(256)]
    tokenizer = Vocabulary(*singles, *sample_words(rng, 300))
    automaton = compile_regex(pattern, tokenizer)
    check_invariants(automaton, tokenizer)
    tokens, states = walk(automaton, jax.random.split(jax.random.key(0), 64), 64)
    texts = set()
    for row, path in zip(np.asarray(tokens), np.asarray(states), strict=True):
        end = int(np.argmax(row == 0))
        assert row[end] == 0 and (row[end:] == 0).all()  # EOS comes, and nothing after it
        assert path[end] == len(automaton.accepting) - 1 and (path >= 0).all()
        text = b"".join(tokenizer.tokens[t] for t in row[:end]).decode()
        assert re.fullmatch(pattern, text, re.ASCII), text
        texts.add(text)
    assert len(texts) > 10


def test_masks_and_states_in_batches():
    automaton = compile_regex("ab*", Vocabulary("a", "b"))
    states = jnp.array([[0, 1], [2, -1]])  # start, after "a", after EOS, after an illegal token
    masks = [[[False, True, False], [True, False, True]], [[True, False, False], [True, False, False]]]
    np.testing.assert_array_equal(automaton.mask(states), masks)
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(automaton.mask)))(states), masks)
    for token, after in [(0, [[-1, 2], [2, -1]]), (1, [[1, -1], [-1, -1]]), (2, [[-1, 1], [-1, -1]])]:
        got = jax.jit(TokenAutomaton.advance)(automaton, states, jnp.full((2, 2), token))
        np.testing.assert_array_equal(got, after)
        assert got.dtype == jnp.int32
    assert automaton.start == 0
    assert len(jax.tree.leaves(automaton)) == 2


def test_a_large_vocabulary_is_compiled_by_prefixes():
    """The walk of the prefix tree against that of each token alone, and with more states than are walked at once."""
    rng = np.random.default_rng(1)
    tokenizer = Vocabulary(*sample_words(rng, 20_000))
    pattern = r"(?:[a-z]{1,6} ){0,30}[0-9]{2}"
    automaton = compile_regex(pattern, tokenizer)
    table = np.asarray(automaton.next_state)
    assert len(table) > 150 and table.dtype == np.int16
    parser = automata._Parser(pattern)
    moves, accepting = automata._minimise(*automata._dfa(*automata._nfa(parser.parse(), pattern), pattern, 4096))
    for token in rng.integers(1, tokenizer.vocab_size, 300):
        state = 0
        for byte in tokenizer.bytes_of(token):
            state = moves[state, byte] if state >= 0 else -1
        assert (table[0, token] >= 0) == (state >= 0), tokenizer.bytes_of(token)
        if state >= 0:
            assert automaton.accepting[table[0, token]] == accepting[state]


def test_long_counts_stay_quick_and_many_states_need_wider_numbers():
    automaton = compile_regex("a{5000}", Vocabulary("a"), max_states=6000)
    assert automaton.next_state.dtype == jnp.int16 and len(automaton.accepting) == 5002
    table = np.full((33_000, 256), -1)
    table[:-1, ord("a")] = np.arange(1, 33_000)
    assert automata._token_table(table, [(1, b"a")], 2).dtype == np.int32
