"""Tasks against plain Python: what a prompt asks, which completions earn the reward, and the arrays that texts are."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.lm import tasks
from rljax.lm.tasks import (
    Addition,
    Brackets,
    Calculator,
    ChainSum,
    Countdown,
    Mixture,
    Multiplication,
    Reversing,
    RunningSum,
)

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
TASKS = {
    "addition": Addition(2),
    "addition, reversed": Addition(3, reverse=True),
    "addition, one digit": Addition(1),
    "addition, eight digits": Addition(8),
    "chain sum": ChainSum(3, 1),
    "chain sum, two terms": ChainSum(2, 7),
    "chain sum, nine terms": ChainSum(9, 1),
    "chain sum, nine long terms": ChainSum(9, 7),
    "running sum": RunningSum(4),
    "running sum, one term": RunningSum(1),
    "running sum, one to six terms": RunningSum(6, 1),
    "running sum, many terms": RunningSum(32, 31),
    "reversing": Reversing(5),
    "reversing, one": Reversing(1),
    "sorting": Reversing(5, sort=True),
    "brackets": Brackets(6),
    "brackets, one": Brackets(1),
    "countdown": Countdown(3, 9),
    "countdown, two": Countdown(2, 1),
    "countdown, six": Countdown(6, 99),
    "multiplication": Multiplication(2),
    "multiplication, one digit": Multiplication(1, 0.0),
    "multiplication, four digits": Multiplication(4, 1.0),
    "mixture": Mixture((Addition(3), Reversing(5)), (0.5, 0.5)),
    "mixture of one": Mixture((Addition(2), RunningSum(4)), (0.0, 1.0)),
}
MANY = 300


def text_of(task, ids):
    """Text of ids; padding must be at one end."""
    ids = np.asarray(ids)
    return task.tokenizer.decode(ids[ids >= 0])


@functools.cache
def drawn(name):
    """``(problems, demonstrations)`` of many keys."""
    task = TASKS[name]

    def draw(key):
        problem = task.sample(key)
        return problem, task.demonstrate(jax.random.fold_in(key, 1), problem)

    return jax.tree.map(np.asarray, jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), MANY)))


@functools.cache
def verifier(name):
    return jit(jax.vmap(TASKS[name].verify))


def rewards(name, completions, problems=None):
    """Of texts, one for each of the first problems drawn; ``[n, components]``."""
    task = TASKS[name]
    problems = jax.tree.map(lambda x: x[: len(completions)], drawn(name)[0] if problems is None else problems)
    width = task.prompt_length + task.max_tokens + 8
    # What lies past the length is no part of the completion: fill it with digits.
    rows = np.random.default_rng(0).integers(0, 10, (MANY, width)).astype(np.int32)
    for row, completion in zip(rows, completions, strict=False):
        row[: len(completion)] = task.tokenizer.encode(completion)
    lengths = np.zeros(MANY, np.int32)
    lengths[: len(completions)] = [len(completion) for completion in completions]
    padded = jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[:1], MANY - len(x), 0)]), problems)
    return np.asarray(verifier(name)(padded, rows, lengths))[: len(completions)]


def prompts(name):
    return [text_of(TASKS[name], prompt) for prompt in drawn(name)[0].prompt]


@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_padded_at_the_left_and_answers_at_the_right(name):
    task, (problems, demonstrations) = TASKS[name], drawn(name)
    assert problems.prompt.shape == (MANY, task.prompt_length) and problems.prompt.dtype == np.int32
    assert problems.answer.shape == (MANY, task.answer_length) and demonstrations.shape == (MANY, task.max_tokens)
    for rows, at_right in ((problems.prompt, True), (problems.answer, False), (demonstrations, False)):
        assert rows.min() >= -1 and rows.max() < task.tokenizer.vocab_size
        real = rows >= 0
        np.testing.assert_array_equal(real, np.sort(real, 1) if at_right else -np.sort(-real.astype(int), 1))
    assert (problems.prompt[:, -1] >= 0).all()
    assert len(np.unique(problems.prompt, axis=0)) > 1


@pytest.mark.parametrize("name", TASKS)
def test_demonstrations_earn_the_full_reward_and_end(name):
    task, (_, demonstrations) = TASKS[name], drawn(name)
    lengths = (demonstrations >= 0).sum(1)
    np.testing.assert_array_equal(demonstrations[np.arange(MANY), lengths - 1], task.tokenizer.eos_ids[0])
    assert (np.isin(demonstrations, task.tokenizer.eos_ids).sum(1) == 1).all()
    texts = [text_of(task, row) for row in demonstrations]
    if isinstance(task, Multiplication):  # what the tool says comes in between
        texts = [re.sub(r"\](=)", "](0)=", text) for text in texts]
    earned = rewards(name, texts)
    np.testing.assert_array_equal(earned[:, 0], 1.0)
    if task.components[1:] in [("format",), ("steps",)]:
        np.testing.assert_array_equal(earned[:, 1], 1.0)


def solve(name, prompt):
    """The one right answer to a prompt."""
    if name.startswith("running") or name == "mixture of one":
        terms = list(map(int, prompt[:-1].split("+")))
        return "".join(str(sum(terms[: i + 1]) % 10) for i in range(len(terms)))
    if name == "mixture" and "+" in prompt:
        return str(sum(map(int, prompt[:-1].split("+"))))
    if name.startswith(("addition", "chain")):
        answer = str(sum(map(int, prompt[:-1].split("+"))))
        return answer[::-1] if "reversed" in name else answer
    if name.startswith("multiplication"):
        left, right = prompt[:-1].split("*")
        return "=" + str(int(left) * int(right))
    return "".join(sorted(prompt[:-1])) if name == "sorting" else prompt[-2::-1]


EXACT = [name for name in TASKS if not name.startswith(("brackets", "countdown"))]
SHAPES = {
    "addition": r"\d{1,8}\+\d{1,8}=",
    "chain": r"\d{1,7}(\+\d{1,7}){1,8}=",
    "running": r"\d(\+\d){0,31}=",
    "mixture": r"\d{1,5}=|\d{1,3}(\+\d{1,3}){1,3}=",
    "reversing": r"\d{1,5}=",
    "sorting": r"\d{1,5}=",
    "multiplication": r"\d{1,4}\*\d{1,4}\?",
}


@pytest.mark.parametrize("name", EXACT)
def test_prompts_and_right_answers(name):
    asked = prompts(name)
    shape = SHAPES[re.split(r"[ ,]", name)[0]]
    for prompt in asked:
        assert re.fullmatch(shape, prompt), prompt
        if "reversing" not in name and name not in ("sorting", "mixture"):
            assert all(number == str(int(number)) for number in re.findall(r"\d+", prompt)), prompt
    np.testing.assert_array_equal(rewards(name, [solve(name, prompt) for prompt in asked])[:, 0], 1.0)


@pytest.mark.parametrize("name", EXACT)
def test_wrong_answers_earn_nothing(name):
    asked = prompts(name)
    right = [solve(name, prompt) for prompt in asked]
    rng = np.random.default_rng(1)

    def another(answer):
        place = rng.integers(answer.startswith("="), len(answer))
        return answer[:place] + str((int(answer[place]) + rng.integers(1, 10)) % 10) + answer[place + 1 :]

    head = "=" if name.startswith("multiplication") else ""
    wrong = {
        "another digit": [another(answer) for answer in right],
        "nothing": [""] * MANY,
        "a prefix": [answer[:-1] for answer in right],
        "a suffix": [answer[1:] if not head else "=" + answer[2:] for answer in right],
        "a digit more": [answer + "0" for answer in right],
        "a leading zero": [head + "0" + answer.removeprefix("=") for answer in right],
        "two answers": [answer + "," + answer.removeprefix("=") for answer in right],
        "all answers": [head + "0,1,2,3" for _ in right],
        "a space before": [head + " " + answer.removeprefix("=") for answer in right],
        "a space after": [answer + " " for answer in right],
        "a sign": [head + "+" + answer.removeprefix("=") for answer in right],
    }
    if not head:
        wrong["twice"] = [answer + answer for answer in right]
        wrong["the question again"] = [prompt + answer for prompt, answer in zip(asked, right, strict=True)]
    else:
        wrong["no equals sign"] = [answer[1:] for answer in right]
        wrong["an empty answer after the right one"] = [answer + "=" for answer in right]
        wrong["a wrong answer after the right one"] = [answer + another(answer) for answer in right]
    for kind, completions in wrong.items():
        earned = rewards(name, completions)[:, 0]
        assert not earned.any(), (kind, asked[int(earned.argmax())], completions[int(earned.argmax())])


def test_of_two_products_none_counts():
    asked = prompts("multiplication")
    right = [solve("multiplication", prompt) for prompt in asked]
    np.testing.assert_array_equal(rewards("multiplication", ["=1" + answer for answer in right])[:, 0], 0.0)
    called = rewards("multiplication", ["[1*1](1)" + answer for answer in right])
    np.testing.assert_array_equal(called, 1.0)
    np.testing.assert_array_equal(rewards("multiplication", right)[:, 1], 0.0)


# Running sums


def test_running_sums_by_hand():
    task = RunningSum(4)
    ids = jnp.asarray(task.tokenizer.encode("3+1+4+5="), jnp.int32)
    problem = tasks.Problem(ids, jnp.asarray([3, 4, 8, 3], jnp.int32))
    scores = {
        "3483": (1, 1),
        "": (0, 0),
        "3": (0, 0.25),
        "34": (0, 0.5),
        "348": (0, 0.75),
        "34830": (0, 1),  # right to its end, and then more
        "3583": (0, 0.25),  # what comes after a mistake counts for nothing
        "0483": (0, 0),
        "3 483": (0, 0.25),
        "3,4,8,3": (0, 0.25),
    }
    verify = jit(task.verify)
    for said, expected in scores.items():
        rest = [3, 4, 8, 3, 3, 3, 3, 3][len(said) :]  # what lies past the length is no part of it
        completion = jnp.asarray([*task.tokenizer.encode(said), *rest], jnp.int32)
        np.testing.assert_array_equal(verify(problem, completion, jnp.int32(len(said))), expected, said)


def test_the_number_of_terms_is_drawn_between_both_ends():
    def counts(name):
        return np.bincount([prompt.count("+") + 1 for prompt in prompts(name)], minlength=7)

    assert counts("running sum")[4] == MANY
    drawn = counts("running sum, one to six terms")
    assert drawn[0] == 0 and drawn[1:].sum() == MANY
    assert (abs(drawn[1:] - MANY / 6) < 4 * (MANY * 5 / 36) ** 0.5).all()  # four deviations of a uniform draw
    # A share is of the problem's own terms.
    names = "running sum, one to six terms"
    halves = [solve(names, prompt)[: (prompt.count("+") + 1) // 2] for prompt in prompts(names)]
    expected = [len(half) / (prompt.count("+") + 1) for half, prompt in zip(halves, prompts(names), strict=True)]
    np.testing.assert_allclose(rewards(names, halves)[:, 1], expected, rtol=1e-6)


def test_running_sums_of_odd_sizes_are_refused():
    for terms, low, name in ((0, 0, "terms"), (33, 0, "terms"), (4, 5, "min_terms"), (4, -1, "min_terms")):
        with pytest.raises(ValueError, match=rf"env_params\.{name} must be"):
            RunningSum(terms, low)


def test_a_teacher_who_forgets_the_sum_goes_on_from_the_digit():
    def said(forget_sum):
        task, keys = RunningSum(6, 2, forget_sum), jax.random.split(jax.random.key(0), MANY)
        problems = jax.vmap(task.sample)(keys)
        return np.asarray(problems.answer), np.asarray(jit(jax.vmap(task.demonstrate))(keys, problems))

    answer, never = said(0.0)
    np.testing.assert_array_equal(np.where(answer >= 0, never[:, :6], -1), answer)
    _, always = said(1.0)
    digits = np.diff(answer, prepend=0, axis=1) % 10
    np.testing.assert_array_equal(np.where(answer >= 0, always[:, :6], -1), np.where(answer >= 0, digits, -1))
    _, half = said(0.5)
    before = np.pad(half[:, :5], ((0, 0), (1, 0)))
    goes_on, begins = half[:, :6] == (before + digits) % 10, half[:, :6] == digits
    assert (goes_on | begins)[answer >= 0].all()
    told_apart = (answer >= 0) & (goes_on != begins) & (np.arange(6) > 0)
    assert goes_on[told_apart].mean() == pytest.approx(0.5, abs=4 * 0.5 / told_apart.sum() ** 0.5)
    ends = never[np.arange(MANY), (answer >= 0).sum(1)]
    np.testing.assert_array_equal(ends, RunningSum().tokenizer.eos_ids[0])


def test_sums_of_fewer_digits_are_drawn_too():
    task, keys = Addition(3, min_digits=1), jax.random.split(jax.random.key(0), 3 * MANY)
    problems = jit(jax.vmap(task.sample))(keys)
    a, b = np.asarray(jax.vmap(lambda p: tasks.read_fields(p, 2))(problems.prompt)).T
    larger = np.maximum(a, b)
    shares = [(larger < 10).mean(), (larger < 100).mean()]
    expected = [(1 + 0.1**2 + 0.01**2) / 3, (2 + 0.1**2) / 3]
    np.testing.assert_allclose(shares, expected, atol=4 * 0.5 / (3 * MANY) ** 0.5)
    for low in (-1, 4):
        with pytest.raises(ValueError, match=r"env_params\.min_digits must be"):
            Addition(3, min_digits=low)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Addition(forget_carry=1.5), "forget_carry"),
        (lambda: RunningSum(forget_sum=-0.5), "forget_sum"),
        (lambda: Multiplication(tool_share=3.0), "tool_share"),
        (lambda: tasks.addition_and_reversing(share=1.5), "share"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_shares_are_0_to_1(make, name):
    with pytest.raises(ValueError, match=rf"env_params\.{name} must be 0 to 1"):
        make()


# Mixtures


def test_a_mixture_draws_as_many_of_each_task_as_its_share_says():
    task, keys = TASKS["mixture"], jax.random.split(jax.random.key(3), MANY)
    draw = jit(lambda share: jax.vmap(tasks.addition_and_reversing(3, 5, share).task.sample)(keys))
    for share in (0.0, 0.25, 1.0):
        problems = draw(share)
        is_sum = ["+" in text_of(task, prompt) for prompt in np.asarray(problems.prompt)]
        np.testing.assert_array_equal(problems.task, np.where(is_sum, 0, 1))
        assert abs(sum(is_sum) - share * MANY) <= 4 * (share * (1 - share) * MANY) ** 0.5
    with pytest.raises(ValueError, match=r"env_params\.share must be 0 to 1"):
        tasks.addition_and_reversing(share=1.5)


def test_a_problem_of_a_mixture_is_judged_by_its_own_task():
    """The answer that the other task would call right is wrong, and a component that the own task lacks is 0."""
    mixture = Mixture((Addition(2), RunningSum(2)), (0.5, 0.5))
    assert mixture.components == ("exact", "steps")
    verify = jit(mixture.verify)
    ids = jnp.asarray([-1, -1, *mixture.tokenizer.encode("7+5=")], jnp.int32)
    answers = {0: "12", 1: "72"}
    scores = {(0, "12"): (1, 0), (0, "72"): (0, 0), (1, "72"): (1, 1), (1, "12"): (0, 0), (1, "71"): (0, 0.5)}
    for (number, said), expected in scores.items():
        answer = jnp.asarray([*mixture.tokenizer.encode(answers[number]), -1], jnp.int32)
        problem = tasks.MixedProblem(ids, answer, jnp.int32(number))
        completion = jnp.asarray([*mixture.tokenizer.encode(said), 9, 9], jnp.int32)
        np.testing.assert_array_equal(verify(problem, completion, jnp.int32(2)), expected)


def test_a_mixture_needs_one_alphabet():
    class Letters(Reversing):
        alphabet = "abc"

    for members, shares in (((Addition(), Letters()), (0.5, 0.5)), ((Addition(), Reversing()), (1.0,)), ((), ())):
        with pytest.raises(ValueError, match="the same alphabet"):
            Mixture(members, shares)


# Brackets


def is_balanced(word):
    while (shorter := word.replace("()", "").replace("[]", "")) != word:
        word = shorter
    return word == ""


def test_any_way_to_balance_the_brackets_is_right_and_nothing_else():
    asked, rng = prompts("brackets"), np.random.default_rng(2)
    assert {len(prompt) for prompt in asked} == set(range(1, 7))
    assert any(")" in prompt or "]" in prompt for prompt in asked)
    alphabets = ["()[]", ")]", "()[]0 "]
    completions = ["".join(rng.choice(list(alphabets[i % 3]), rng.integers(0, 7))) for i in range(MANY)]
    texts = [text_of(TASKS["brackets"], row) for row in drawn("brackets")[1]]
    for i in range(0, MANY, 4):
        completions[i] = "()" * rng.integers(0, 2) + texts[i] + "[()]" * rng.integers(0, 2)
    expected = [is_balanced(prompt + completion) for prompt, completion in zip(asked, completions, strict=True)]
    assert MANY / 4 <= sum(expected) < MANY
    np.testing.assert_array_equal(rewards("brackets", completions)[:, 0], expected)
    for prompt, text in zip(asked, texts, strict=True):
        assert is_balanced(prompt + text)
        assert not any(is_balanced(prompt + text[:end]) for end in range(len(text)))  # none is shorter


# Countdown


def judge(prompt, expression):
    """``(exact, format)`` of an expression."""
    numbers, target = prompt.split("?")
    given = numbers.split(",")
    if not re.fullmatch(r"(0|[1-9]\d*)([-+*](0|[1-9]\d*))*", expression):
        return 0.0, 0.0
    for used in re.findall(r"\d+", expression):
        if used not in given:
            return 0.0, 0.0
        given.remove(used)
    return float(eval(expression) == int(target)), 1.0


@pytest.mark.parametrize("name", ["countdown", "countdown, two", "countdown, six"])
def test_countdown_against_python(name):
    task, asked, rng = TASKS[name], prompts(name), np.random.default_rng(3)
    texts = [text_of(task, row) for row in drawn(name)[1]]
    completions = []
    for i, prompt in enumerate(asked):
        numbers, target = prompt.split("?")
        given = numbers.split(",")
        assert len(given) == task.numbers and 0 <= int(target) <= 9999
        assert all(1 <= int(number) <= task.largest for number in given)
        assert judge(prompt, texts[i]) == (1.0, 1.0), (prompt, texts[i])
        order = rng.permutation(given)[: rng.integers(1, task.numbers + 1)]
        expression = "".join(number + rng.choice(list("+-*")) for number in order)[:-1]
        changes = [
            expression,
            expression + "+" + given[0],  # perhaps used already
            "-" + expression,
            expression + "+",
            expression.replace("+", "++"),
            "0" + expression,
            expression + "=" + target,
            "".join(rng.choice(list("0123456789+-*=()[]?, "), 5)),
            expression + "*0",
            expression.replace("*", "-"),
            target,
        ]
        completions.append(changes[i % len(changes)])
    completions[: MANY // 5] = texts[: MANY // 5]
    expected = np.array([judge(*pair) for pair in zip(asked, completions, strict=True)])
    assert 0 < expected[MANY // 5 :, 1].mean() < 1
    earned = rewards(name, completions)
    for i in np.flatnonzero((earned != expected).any(1)):
        raise AssertionError((asked[i], completions[i], earned[i], expected[i]))


@pytest.mark.parametrize(
    ("prompt", "expression", "expected"),
    [
        ("2,3,4?14", "2+3*4", (1, 1)),  # products first
        ("2,3,4?20", "2+3*4", (0, 1)),
        ("2,3,4?14", "3*4+2", (1, 1)),
        ("9,3,2?3", "9-3*2", (1, 1)),
        ("9,3,2?4", "9-3-2", (1, 1)),  # from the left
        ("9,3,2?8", "9-3-2", (0, 1)),
        ("1,2,3?6", "3*2", (1, 1)),  # not all numbers need be used
        ("1,2,3?9", "3*3", (0, 0)),  # each only once
        ("3,3,1?9", "3*3", (1, 1)),  # unless given twice
        ("3,3,1?27", "3*3*3", (0, 0)),
        ("1,2,3?3", "3", (1, 1)),
        ("1,2,3?2", "-1+3", (0, 0)),  # no unary minus
        ("1,2,3?2", "3*-1", (0, 0)),
        ("1,2,3?6", "", (0, 0)),
        ("1,2,3?6", "6", (0, 0)),
        ("1,2,3?3", "12-9", (0, 0)),
        ("1,2,3?5", "2+03", (0, 0)),
        ("1,2,3?5", "2+3=5", (0, 0)),
        ("1,2,3?5", "2+3 ", (0, 0)),
        ("1,2,3?5", "(2+3)", (0, 0)),
        ("1,2,3?0", "3-2-1", (1, 1)),
        ("1,2,3?0", "1-3", (0, 1)),  # below zero is no target
    ],
)
def test_countdown_by_hand(prompt, expression, expected):
    task = TASKS["countdown"]
    ids = task.tokenizer.encode(prompt)
    row = np.full((1, task.prompt_length), -1, np.int32)
    row[0, task.prompt_length - len(ids) :] = ids
    problem = tasks.Problem(row, np.full((1, task.answer_length), -1, np.int32))
    np.testing.assert_array_equal(rewards("countdown", [expression], problem)[0], expected)


# Calculator


def calculate(said):
    """What the tool answers to a text."""
    if not said.endswith("]"):
        return ""
    call = said[said.rfind("[") + 1 : -1] if "[" in said else None
    match = re.fullmatch(r"(0|[1-9]\d{0,3})([-+*])(0|[1-9]\d{0,3})", call or "")
    value = eval(match[0]) if match else -1
    return f"({value})" if value >= 0 else "(?)"


CALLS = [
    "[12*34]", "[9999*9999]", "[0*0]", "[0+0]", "[3-5]", "[5-5]", "[9999+9999]", "[10000+1]", "[1+10000]", "[01+1]", "[1+01]",
    "[]", "[1]", "[+]", "[1+]", "[+1]", "[1+2+3]", "[-1+2]", "[1*-2]", "]", "1+2]", "[1+2", "12", "", "[[1+2]", "[1+2]]",
    "[1+2](3)[4*5]", "[1+2](3)=3]", "=7[6*7]", "[1 +2]", "[1=2]", "[1+2?]", "[7*8](56)",
]  # fmt: skip


def test_calculator_against_python():
    rng = np.random.default_rng(4)
    calls = list(CALLS)
    for _ in range(MANY):
        a, b = rng.integers(0, 10 ** rng.integers(1, 6, 2))
        calls.append("".join(rng.choice(list("0123456789=[]"), rng.integers(0, 4))) + f"[{a}{rng.choice(list('+-*'))}{b}]")
    calls += ["".join(rng.choice(list("012+-*[]"), rng.integers(1, 9))) + "]" for _ in range(MANY)]
    task = Multiplication(4)
    width = max(map(len, calls)) + 2
    said = rng.integers(0, 20, (len(calls), width)).astype(np.int32)
    for row, call in zip(said, calls, strict=True):
        row[: len(call)] = task.tokenizer.encode(call)
    answers, sizes = jit(jax.vmap(Calculator(task)))(said, np.array([len(call) for call in calls], np.int32))
    assert answers.shape[1] == Calculator(task).max_tokens
    for call, answer, size in zip(calls, np.asarray(answers), np.asarray(sizes), strict=True):
        assert task.tokenizer.decode(answer[:size]) == calculate(call), call


# Difficulties


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Addition(0), "digits"),
        (lambda: Addition(9), "digits"),
        (lambda: ChainSum(1), "terms"),
        (lambda: ChainSum(10), "terms"),
        (lambda: ChainSum(3, 8), "digits"),
        (lambda: Reversing(0), "length"),
        (lambda: Brackets(0), "length"),
        (lambda: Countdown(1), "numbers"),
        (lambda: Countdown(7), "numbers"),
        (lambda: Countdown(3, 0), "largest"),
        (lambda: Countdown(3, 100), "largest"),
        (lambda: Multiplication(0), "digits"),
        (lambda: Multiplication(5), "digits"),
    ],
)
def test_a_difficulty_out_of_range_names_the_key(make, key):
    with pytest.raises(ValueError, match=rf"env_params\.{key}"):
        make()


# Texts as arrays


def text(string, width):
    """A `Text` of digits, with other digits past its end."""
    ids = np.full(width, 7, np.int32)
    ids[: len(string)] = [int(c) for c in string]
    return jnp.asarray(ids), jnp.int32(len(string))


def read(pair):
    ids, length = np.asarray(pair[0]), int(pair[1])
    assert ids.dtype == np.int32
    return "".join(map(str, ids[:length]))


write_number = {width: jit(lambda n, width=width: tasks.write_number(n, width)) for width in (1, 2, 5, 9)}
read_number = {width: jit(tasks.read_number) for width in (1, 4, 9, 12)}


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 2, 5, 9]), st.data())
def test_numbers_are_written(width, data):
    number = data.draw(st.integers(0, 10**width - 1) | st.sampled_from([0, 1, 9, 10 ** (width - 1), 10**width - 1]))
    assert read(write_number[width](jnp.int32(number))) == str(number)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 4, 9, 12]), st.data())
def test_numbers_are_read(width, data):
    symbols = data.draw(st.lists(st.integers(0, 9) | st.sampled_from([-1, 0, 10, 20]), max_size=width))
    ids = np.full(width, 3, np.int32)
    ids[: len(symbols)] = symbols
    value, valid = read_number[width](ids, jnp.int32(len(symbols)))
    string = "".join(str(s) if 0 <= s <= 9 else "x" for s in symbols)
    assert bool(valid) == bool(re.fullmatch(r"0|[1-9]\d{0,8}", string))
    if valid:
        assert int(value) == int(string)


join, equals = jit(tasks.join), jit(tasks.equals)
pad_left, pad_right = (jit(pad, static_argnums=1) for pad in (tasks.pad_left, tasks.pad_right))


def strings(width):
    return st.text("0123456789", max_size=width)


@settings(max_examples=100, deadline=None)
@given(strings(3), strings(5), strings(2))
def test_texts_are_joined(a, b, c):
    joined = join(text(a, 3), text(b, 5), text(c, 2))
    assert read(joined) == a + b + c
    assert joined[0].shape == (10,)


@settings(max_examples=100, deadline=None)
@given(strings(5), st.sampled_from([5, 8]), st.sampled_from([5, 7]))
def test_texts_are_padded(string, width, to):
    ids = [int(c) for c in string]
    padding = [-1] * (to - len(ids))
    np.testing.assert_array_equal(pad_left(text(string, width), to), padding + ids)
    np.testing.assert_array_equal(pad_right(text(string, width), to), ids + padding)


@settings(max_examples=100, deadline=None)
@given(strings(4), strings(4), st.sampled_from([4, 6]), st.sampled_from([4, 5]))
def test_equal_texts(a, b, said, asked):
    completion, length = text(a, said)
    assert bool(equals(completion, length, pad_right(text(b, 4), asked))) == (a == b)
    assert bool(equals(completion, length, pad_right(text(a, 4), asked)))
