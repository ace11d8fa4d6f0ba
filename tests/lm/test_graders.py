import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.lm import graders
from rljax.lm.graders import ERRORS, Grade, Item, host_reward, load_jsonl, make_grader, reasoning_gym_items

# One grader for every way to fail: the completion says which.
FAILING = """
import decimal, os, re, signal, subprocess, sys, threading, time

def grade(sample, item):
    text = sample["output_text"]
    print("noise " * 10_000)
    os.write(1, b"more of it\\n" * 1000)
    if text == "busy":
        while True:
            pass
    if text == "sleep":
        time.sleep(1000)
    if text == "lock":  # one call of C code that lets no other thread run
        re.match("(a+)+$", "a" * 60 + "b")
    if text == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.05)
        return 0.25
    if text == "exit":
        os._exit(0)
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "late":  # the process ends while the next item is graded
        threading.Timer(0.1, os._exit, (1,)).start()
        return 0.5
    if text == "slow":
        time.sleep(0.4)
        return 0.75
    if text == "forge":
        for fd in range(3, 64):
            try:
                os.write(fd, b'["0", 1.0, "", ""]\\n')
            except OSError:
                pass
        return 0.5
    if text == "child":
        return subprocess.Popen(["sleep", "1000"]).pid
    if text == "raise":
        raise KeyError("no such thing")
    if text == "sys.exit":
        sys.exit(0)
    if text == "unprintable":
        class Odd(Exception):
            def __str__(self):
                raise ValueError
        raise Odd
    return {"none": None, "text": "1.0", "list": [1.0], "complex": 1j, "nan": float("nan"), "inf": -float("inf"), "big": 10**5000,
            "too big": 1e39, "true": True, "decimal": decimal.Decimal("0.5")}.get(text, len(text))
"""


def grade(config, completion, answer="", **columns) -> Grade:
    with make_grader(config) as grader:
        return grader.grade([Item("the prompt", completion, answer, columns)])[0]


def items(*completions):
    return [Item("", completion) for completion in completions]


@pytest.fixture(scope="module")
def failing():
    with make_grader({"type": "python", "source": FAILING, "timeout": 1.0, "workers": 2}, cache_size=0) as grader:
        yield grader


@pytest.mark.parametrize(
    ("config", "completion", "answer", "reward"),
    [
        ({"type": "string_check", "operation": "eq"}, "Paris", "Paris", 1),
        ({"type": "string_check", "operation": "eq"}, "paris", "Paris", 0),
        ({"type": "string_check", "operation": "ne"}, "paris", "Paris", 1),
        ({"type": "string_check", "operation": "like"}, "It is Paris.", "Paris", 1),
        ({"type": "string_check", "operation": "like"}, "It is PARIS.", "Paris", 0),
        ({"type": "string_check", "operation": "ilike"}, "It is PARIS.", "Paris", 1),
        ({"type": "exact"}, "  Paris\n", "paris.", 1),
        ({"type": "exact"}, "New\n  York", "New York", 1),
        ({"type": "exact"}, "Paris or Rome", "Paris", 0),
        ({"type": "exact"}, "-5", "5", 0),
        ({"type": "exact"}, "2\u00b2", "22", 0),
        ({"type": "exact"}, "e\u0301", "\u00e9", 1),
        ({"type": "exact"}, "", "Paris", 0),
        ({"type": "exact"}, ".", "Paris", 0),
        ({"type": "number"}, "3 + 4 = 7", "7", 1),
        ({"type": "number"}, "3 + 4 = 7.", "7", 1),
        ({"type": "number"}, "7 is 3 + 4", "7", 0),
        ({"type": "number"}, "It costs $1,234.50", "1234.5", 1),
        ({"type": "number"}, "x = -5", "-5", 1),
        ({"type": "number"}, "x = -5", "5", 0),
        ({"type": "number"}, "10-5", "5", 1),
        ({"type": "number"}, "- 5", "5", 1),
        ({"type": "number"}, "so 3/4", "0.75", 1),
        ({"type": "number"}, "so 3/4", "4", 0),
        ({"type": "number"}, "\\frac{3}{4}", "3/4", 1),
        ({"type": "number"}, "1.5e3", "1500", 1),
        ({"type": "number"}, "\u7b54\u6848\u662f5\u3002", "5", 1),
        ({"type": "number"}, "version 1.2.3 of x7", "3", 0),
        ({"type": "number"}, "42 apples", "there are 40 + 2\n#### 42", 1),
        ({"type": "number"}, "3.1416", "3.14159", 0),
        ({"type": "number", "tolerance": 1e-3}, "3.1416", "3.14159", 1),
        ({"type": "number"}, "5 or 6 or 7", "7", 0),
        ({"type": "number"}, "5, 6, 7", "7", 0),
        ({"type": "number"}, "5\n6\n7", "7", 0),
        ({"type": "number"}, "5/6/7", "7", 0),
        ({"type": "number"}, "5, or maybe 7", "7", 0),
        ({"type": "number"}, "It is 5 (or 7)", "7", 0),
        ({"type": "number"}, "it could be 5 or else the answer is 7", "7", 0),
        ({"type": "number"}, "5 or 7, so 7", "7", 1),
        ({"type": "number"}, "7 or 7", "7", 1),
        ({"type": "number"}, "with 3 or 4 of them we get 4 * 2 = 8", "8", 1),
        ({"type": "number"}, "", "7", 0),
        ({"type": "number"}, "seven", "7", 0),
        ({"type": "number"}, "9" * 100_000, "9", 0),
        ({"type": "number"}, "1/0", "0", 0),
        ({"type": "tag"}, "<think>5</think><answer> 7 </answer>", "7", 1),
        ({"type": "tag"}, "<answer>7.0</answer>", "7", 1),
        ({"type": "tag"}, "<answer>7 or 8</answer>", "7", 0),
        ({"type": "tag"}, "<answer>7</answer><answer>8</answer>", "8", 0),
        ({"type": "tag"}, "<answer>8</answer> <answer>8</answer>", "8", 1),
        ({"type": "tag"}, "<answer></answer>", "7", 0),
        ({"type": "tag"}, "<answer>7", "7", 0),
        ({"type": "tag"}, "7", "7", 0),
        ({"type": "tag", "tag": "result"}, "<result>yes</result>", "Yes", 1),
        ({"type": "boxed"}, "so \\boxed{\\frac{1}{2}}", "0.5", 1),
        ({"type": "boxed"}, "so \\boxed{\\text{blue}}", "Blue", 1),
        ({"type": "boxed"}, "\\boxed{1} \\boxed{2}", "2", 0),
        ({"type": "boxed"}, "\\boxed{}", "2", 0),
        ({"type": "boxed"}, "\\boxed{2", "2", 0),
        ({"type": "length", "target": 2}, "one two", "", 1),
        ({"type": "length", "target": 2}, "one two three four", "", 0.5),
        ({"type": "length", "target": 2, "unit": "characters"}, "12345", "", 0.4),
        ({"type": "length", "target": 2}, " \n", "", 0),
        ({"type": "text_similarity", "evaluation_metric": "fuzzy_match"}, "abcd", "abxd", 0.75),
        ({"type": "text_similarity", "evaluation_metric": "fuzzy_match"}, "", "abxd", 0),
        ({"type": "text_similarity", "evaluation_metric": "rouge_1"}, "The cat sat.", "the cat ran fast", 4 / 7),
        ({"type": "text_similarity", "evaluation_metric": "rouge_2"}, "The cat sat.", "the cat ran fast", 2 / 5),
        ({"type": "text_similarity", "evaluation_metric": "rouge_5"}, "The cat sat.", "the cat ran fast", 0),
        ({"type": "text_similarity", "evaluation_metric": "rouge_l"}, "a c b d", "a b c d", 0.75),
        ({"type": "text_similarity", "evaluation_metric": "bleu"}, "a b c d", "a b c e", (3 / 4 * 3 / 4 * 2 / 3 / 2) ** 0.25),
        ({"type": "text_similarity", "evaluation_metric": "bleu"}, "a b", "a b c d", math.exp(-1)),
        ({"type": "text_similarity", "evaluation_metric": "bleu"}, "", "a b c d", 0),
        ({"type": "text_similarity", "evaluation_metric": "gleu"}, "a b c d", "a b c e", 0.6),
        ({"type": "text_similarity", "evaluation_metric": "gleu"}, "a b", "a b c d", 0.3),
    ],
)
def test_text_graders(config, completion, answer, reward):
    if config["type"] in ("string_check", "text_similarity"):
        config = {**config, "input": "{{ completion }}", "reference": "{{ answer }}"}
    result = grade(config, completion, answer)
    assert (result.valid, result.error, result.components) == (True, "", {config["type"]: result.reward})
    assert result.reward == pytest.approx(reward, rel=1e-12)


def test_the_longest_common_subsequence_against_the_plain_recurrence():
    rng = np.random.default_rng(0)
    for _ in range(50):
        left, right = ("".join(rng.choice(list("abc"), rng.integers(0, 90))) for _ in range(2))
        row = [0] * (len(right) + 1)
        for a in left:
            new = [0]
            for j, b in enumerate(right):
                new.append(row[j] + 1 if a == b else max(row[j + 1], new[j]))
            row = new
        assert graders._common_subsequence(left, right) == row[-1]


def test_templates():
    def rendered(template, **columns):
        config = {"type": "string_check", "operation": "eq", "input": template, "reference": "{{ completion }}"}
        return lambda text: grade(config, text, "42", **columns)

    assert rendered("<{{prompt}}|{{ answer }}>")("<the prompt|42>").reward == 1
    assert rendered("{{ item.answer }}{{ sample.output_text }}")("x").reward == 0
    assert rendered("{{ meta.sizes.1 }} {{ item.meta.name }}", meta={"sizes": [3, 4], "name": "n"})("4 n").reward == 1
    assert rendered("{{ a-b }}", **{"a-b": "{{ answer }}"})("{{ answer }}").reward == 1  # what is filled in is no template
    assert rendered("{{ answer }}", item={"answer": "of a column"})("42").reward == 1
    assert rendered("a } b }}")("a } b }}").reward == 1
    result = rendered("{{ lable }}", label="x")("x")
    assert (result.valid, result.error) == (False, "missing_column")
    assert result.detail == "the item has no lable; did you mean 'label'?"
    assert math.isnan(result.reward)


@pytest.mark.parametrize("kind", ["exact", "number", "tag", "boxed"])
@pytest.mark.parametrize("completion", ["", "<answer></answer>\\boxed{}", "5"])
def test_without_an_answer_nothing_is_graded(kind, completion):
    for answer in ("", " \n"):
        result = grade({"type": kind}, completion, answer)
        assert (result.valid, result.error) == (False, "no_reference")
    if kind == "number":
        assert grade({"type": kind}, completion, "five").error == "no_reference"


def test_a_literal_reference_may_be_empty():
    config = {"type": "string_check", "operation": "ne", "input": "{{ completion }}", "reference": ""}
    assert (grade(config, "x").reward, grade(config, "").reward) == (1, 0)


PYTHON = {"type": "python", "source": "def grade(sample, item):\n    return 1"}
MULTI = {"type": "multi", "graders": {"a": {"type": "exact"}}, "calculate_output": "a"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "grader must be a table"),
        ({}, "grader.type is missing: one of string_check"),
        ({"type": "string_chek"}, "got 'string_chek'; did you mean 'string_check'"),
        ({"type": "exact", "refrence": "x"}, "unknown key grader.refrence for type 'exact'; did you mean 'reference'"),
        ({"type": "string_check", "operation": "eq", "input": "x"}, "grader.reference is missing"),
        (
            {"type": "string_check", "operation": "is", "input": "x", "reference": "y"},
            "operation must be one of eq, ne, like, ilike",
        ),
        ({"type": "string_check", "operation": "like", "input": "x", "reference": ""}, "which every text contains"),
        ({"type": "exact", "input": "{{ completion"}, r"grader.input: templates look like \{\{ answer \}\}"),
        ({"type": "exact", "input": "{{ a + b }}"}, "grader.input: templates look like"),
        ({"type": "exact", "input": 3}, "grader.input must be text, got 3"),
        (
            {"type": "text_similarity", "evaluation_metric": "cosine", "input": "", "reference": "x"},
            "fuzzy_match, bleu, .* got 'cosine'",
        ),
        ({"type": "number", "tolerance": -1}, "grader.tolerance must be 0 or more"),
        ({"type": "number", "tolerance": True}, "grader.tolerance must be a number"),
        ({"type": "tag", "tag": ""}, "grader.tag must be the name of a tag"),
        ({"type": "length"}, "grader.target is missing"),
        ({"type": "length", "target": 0}, "grader.target must be 1 or more"),
        ({"type": "length", "target": 1.5}, "grader.target must be a whole number"),
        ({"type": "length", "target": 1, "unit": "tokens"}, 'grader.unit must be "words" or "characters"'),
        ({"type": "python"}, "set either source, .* or function"),
        ({**PYTHON, "function": "a:b"}, "set either source, .* or function"),
        ({**PYTHON, "timeout": 0}, "grader.timeout must be above 0"),
        ({**PYTHON, "workers": 0}, "grader.workers must be above 0"),
        ({"type": "python", "source": "no_such_file.py"}, "grader.source: cannot read no_such_file.py: No such file"),
        ({"type": "python", "source": "def grade(:\n  pass"}, "grader.source: SyntaxError: .*line 1"),
        ({"type": "python", "source": "a grader"}, "it must be a .py file or Python code"),
        ({"type": "python", "function": "module"}, 'grader.function must be "module:attribute"'),
        ({**MULTI, "graders": {}}, "grader.graders must hold one or more"),
        ({**MULTI, "graders": {"max": {"type": "exact"}}}, "'max' cannot stand in calculate_output"),
        ({**MULTI, "graders": {"a b": {"type": "exact"}}}, "'a b' cannot stand in calculate_output"),
        ({**MULTI, "graders": {"a": {"type": "exact", "x": 1}}}, "unknown key grader.graders.a.x"),
        (
            {**MULTI, "graders": {"accuracy": {"type": "exact"}}, "calculate_output": "acuracy"},
            "called 'acuracy'; did you mean 'accuracy'",
        ),
        ({**MULTI, "calculate_output": "a +"}, "grader.calculate_output: 'a .' is no expression"),
        ({**MULTI, "calculate_output": "a.real"}, "'a.real' is not supported"),
        ({**MULTI, "calculate_output": "a if a else 1"}, "is not supported"),
        ({**MULTI, "calculate_output": "__import__('os')"}, "is not supported"),
        ({**MULTI, "calculate_output": "'x' * 3"}, "is not supported"),
        ({**MULTI, "calculate_output": "min(a)"}, "min takes two arguments or more"),
        ({**MULTI, "calculate_output": "sqrt(a, a)"}, "sqrt takes one argument"),
        ({**MULTI, "calculate_output": "-" * 5000 + "a"}, "too deep|is no expression"),
    ],
)
def test_wrong_configs_name_the_key(config, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_grader(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "reward"),
    [
        ("0.8 * right + 0.2 * brief", 0.9),
        ("right", 1.0),
        ("-brief ^ 2 + 3", 2.75),
        ("(right - 2 * brief) / 2", 0.0),
        ("min(right, brief, 0.75) + max(0, brief)", 1.0),
        ("floor(1.5) + ceil(brief) * abs(-2) + sqrt(4) + log(exp(brief))", 5.5),
    ],
)
def test_multi_combines_its_components(expression, reward):
    table = {"right": {"type": "exact"}, "brief": {"type": "length", "target": 1}}
    result = grade({"type": "multi", "graders": table, "calculate_output": expression}, "new york", "New York")
    assert result.reward == pytest.approx(reward, rel=1e-12)
    assert result.components == {"right": 1.0, "brief": 0.5}


@pytest.mark.parametrize(
    "expression", ["1 / zero", "log(zero)", "sqrt(zero - 1)", "exp(1000 + zero)", "9 ^ 9 ^ 9 ^ 9", "1e308 * 10"]
)
def test_an_expression_without_a_value_makes_the_item_invalid(expression):
    table = {"zero": {"type": "exact"}}
    result = grade({"type": "multi", "graders": table, "calculate_output": expression}, "x", "y")
    assert (result.valid, result.error, result.components) == (False, "not_finite", {"zero": 0.0})
    assert math.isnan(result.reward)


def test_a_component_that_fails_makes_the_whole_invalid_if_the_expression_names_it():
    raising = {"type": "python", "source": "def grade(sample, item):\n    raise RuntimeError('broken')"}
    inner = {"type": "multi", "graders": {"x": raising, "y": {"type": "exact"}}, "calculate_output": "x"}
    table = {"right": {"type": "exact"}, "inner": inner}
    with make_grader({"type": "multi", "graders": table, "calculate_output": "right + inner"}) as grader:
        assert grader.component_names == ("right", "inner/x", "inner/y")
        result = grader.grade([Item("", "a", "a")])[0]
    assert (result.valid, result.error, result.detail) == (False, "exception", "inner: x: RuntimeError: broken")
    assert result.components["right"] == result.components["inner/y"] == 1
    assert math.isnan(result.reward) and math.isnan(result.components["inner/x"])
    result = grade({"type": "multi", "graders": table, "calculate_output": "right"}, "a", "a")
    assert result.valid and result.reward == 1 and math.isnan(result.components["inner/x"])


@pytest.mark.parametrize(
    ("completion", "error"),
    [
        ("busy", "timeout"),
        ("sleep", "timeout"),
        ("lock", "timeout"),
        ("exit", "crashed"),
        ("kill", "crashed"),
        ("forge", "crashed"),
        ("raise", "exception"),
        ("sys.exit", "exception"),
        ("unprintable", "exception"),
        ("none", "none"),
        ("text", "not_a_number"),
        ("list", "not_a_number"),
        ("complex", "not_a_number"),
        ("nan", "not_finite"),
        ("inf", "not_finite"),
        ("big", "not_finite"),
        ("too big", "not_finite"),
    ],
)
def test_a_failure_is_invalid_and_never_worth_nothing(failing, completion, error):
    began = time.monotonic()
    results = failing.grade(items("a", completion, "abc"))
    assert time.monotonic() - began < 1.0 + 4.0  # the deadline, and a new process on a busy machine
    assert [r.valid for r in results] == [True, False, True]
    assert [r.reward for r in results[::2]] == [1.0, 3.0]
    assert results[1].error == error and results[1].detail
    assert math.isnan(results[1].reward) and math.isnan(results[1].components["python"])


def test_neighbours_of_failures_get_their_values(failing):
    completions = ["exit", "late", "slow", "late", "slow", "a" * 20_000_000, "alarm", "true", "decimal", "nan", ""]
    results = failing.grade(items(*completions))
    assert [r.error for r in results] == ["crashed", *[""] * 8, "not_finite", ""]
    rewards = [r.reward for r in results if r.valid]
    assert rewards == [0.5, 0.75, 0.5, 0.75, 20_000_000, 0.25, 1, 0.5, 0]


def test_items_that_cannot_be_sent_are_invalid(failing):
    results = failing.grade([Item("", "a"), Item("", "b", "", {"f": lambda: 0}), Item("", "ab")])
    assert [r.error for r in results] == ["", "exception", ""]
    assert "cannot be sent" in results[1].detail


def is_alive(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@needs_proc
def test_close_ends_the_workers_and_what_they_started():
    grader = make_grader({"type": "python", "source": FAILING, "workers": 1}, cache_size=0)
    child = int(grader.grade(items("child"))[0].reward)
    worker = grader._root.pool.workers[0].process.pid
    assert is_alive(child) and is_alive(worker)
    grader.close()
    grader.close()
    assert wait_until(lambda: not is_alive(child) and not is_alive(worker))
    assert grader.grade(items("abc"))[0].reward == 3  # it starts again
    worker = grader._root.pool.workers[0].process.pid
    del grader
    assert wait_until(lambda: not is_alive(worker))


@needs_proc
def test_workers_end_with_their_parent(tmp_path):
    code = f"""
import threading, time
from rljax.lm.graders import Item, make_grader
grader = make_grader({{"type": "python", "source": {FAILING!r}, "timeout": 0.5, "workers": 2}})
grader.grade([Item("", "a"), Item("", "slow"), Item("", "ab")])
root = grader._root.pool
root.timeout = 1000  # the worker's own deadline is what is left
threading.Thread(target=grader.grade, args=([Item("", "busy"), Item("", "lock")],), daemon=True).start()
time.sleep(0.3)
print(*(w.process.pid for w in root.workers), flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2 and all(map(is_alive, pids))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    try:
        assert wait_until(lambda: not any(map(is_alive, pids)), 5 + graders.GRACE_SECONDS)
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("x = 1", r"there is no function grade\(sample, item\)"),
        ("import os\nos._exit(1)", "the grader's process ended"),
        ("import time\ntime.sleep(1000)", "it took more than 0.5 s"),
    ],
)
def test_code_that_cannot_be_loaded_is_an_error_and_not_a_grade(source, message, monkeypatch):
    monkeypatch.setattr(graders, "START_SECONDS", 0.5 if "sleep" in source else 60.0)
    with (
        make_grader({"type": "python", "source": source}) as grader,
        pytest.raises(ValueError, match=f"grader: the Python grader cannot be loaded: {message}"),
    ):
        grader.grade(items("a"))


def test_a_file_may_import_its_neighbours_and_a_function_may_be_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward/helpers.py").write_text("SCALE = 3")
    code = """import helpers
def grade(sample, item):
    return helpers.SCALE * len(item["extra"])
def other(sample, item):
    return 7
"""
    (tmp_path / "reward/main.py").write_text(code)
    own = "def fixed(sample, item):\n    return len(sample['output_text']) + len(item['prompt'] + item['answer'])"
    (tmp_path / "own.py").write_text(own)
    assert grade({"type": "python", "source": "reward/main.py"}, "", extra="ab").reward == 6
    assert grade({"type": "python", "function": "reward/main.py:other"}, "").reward == 7
    assert grade({"type": "python", "function": "own:fixed"}, "abc", "de").reward == 3 + 2 + len("the prompt")


def test_the_worker_needs_no_jax_and_shows_none_of_the_accelerators():
    source = """import os, sys
def grade(sample, item):
    return ("jax" in sys.modules) + 2 * (os.environ["JAX_PLATFORMS"] == "cpu")
"""
    assert grade({"type": "python", "source": source}, "").reward == 2


def test_grades_are_cached_by_content():
    drawing = {"type": "python", "source": "import random\ndef grade(sample, item):\n    return random.random()", "workers": 1}
    with make_grader(drawing, cache_size=3) as grader:
        first = grader.grade([Item("p", "a"), Item("p", "b"), Item("p", "a")])
        assert grader.cache_hits == 1
        assert first[0] == first[2] != first[1]
        again = "".join(["p"])  # equal, and another object
        assert grader.grade([Item(again, "b"), Item(again, "a")]) == [first[1], first[0]]
        assert grader.cache_hits == 3
        others = [Item("q", "a"), Item("p", "a", "x"), Item("p", "a", "", {"x": 1}), Item("p", "a", "", {"x": 1.0})]
        rewards = {g.reward for g in [*first, *grader.grade(others)]}
        assert grader.cache_hits == 3
        assert len(rewards) == 6
        assert grader.grade([Item("p", "b")])[0] != first[1]  # the least recently used are gone
        assert grader.cache_hits == 3
    with make_grader(drawing, cache_size=0) as grader:
        assert len({g.reward for g in grader.grade([Item("p", "a")] * 3)}) == 3
        assert grader.cache_hits == 0


def test_failures_are_not_cached(tmp_path):
    flag = tmp_path / "flag"
    code = f"import os\ndef grade(sample, item):\n    return 1 / os.path.exists({str(flag)!r})"
    with make_grader({"type": "python", "source": code}) as grader:
        assert not grader.grade(items("a"))[0].valid
        flag.touch()
        assert grader.grade(items("a"))[0].reward == 1


def test_the_hash_is_that_of_the_config_and_the_source(tmp_path):
    file = tmp_path / "g.py"
    hashes = []
    for text in ("def grade(sample, item):\n    return 1", "def grade(sample, item):\n    return 2"):
        file.write_text(text)
        hashes.append(make_grader({"type": "python", "source": str(file)}).hash)
    hashes += [make_grader({"type": "exact"}).hash, make_grader({"type": "exact", "input": "{{ prompt }}"}).hash]
    assert len(set(hashes)) == 4
    assert make_grader({"type": "exact", "input": "{{ completion }}"}).hash == hashes[2]


def test_many_items_are_quick():
    with make_grader({**PYTHON, "workers": 2}) as grader:
        grader.grade(items("start"))
        began = time.monotonic()
        results = grader.grade(items(*map(str, range(1000))))
        assert time.monotonic() - began < 5
    assert all(r.reward == 1 for r in results)


class Decoder:
    """Tokens are characters; the answer is the index. Counts its rows."""

    def __init__(self):
        self.rows = 0

    def __call__(self, tokens, index):
        self.rows += 1
        assert isinstance(tokens, np.ndarray)
        return Item("", "".join(map(chr, tokens)), str(index))


class CountingGrader(graders.Grader):
    calls = 0

    def grade(self, items):
        self.calls += 1
        return super().grade(items)


ON_HOST = {
    "type": "multi",
    "graders": {"right": {"type": "exact"}, "brief": {"type": "length", "target": 1, "unit": "characters"}},
    "calculate_output": "right / brief",
}


def test_host_reward_under_jit_and_vmap():
    grader = CountingGrader(ON_HOST)
    reward = host_reward(grader, Decoder(), ["brief"])
    #        right   "12" is right  not right     empty: brief is 0
    tokens = jnp.array([[48, 0, 0], [49, 50, 0], [49, 50, 51], [55, 55, 55]])
    lengths, index = jnp.array([1, 2, 3, 0]), jnp.array([0, 12, 12, 5])
    result = jax.jit(reward)(tokens, lengths, index)
    assert [x.dtype for x in result] == [jnp.float32, jnp.float32, jnp.bool_, jnp.int32]
    np.testing.assert_array_equal(result[0], [1.0, 2.0, 0.0, np.nan])
    np.testing.assert_allclose(result[1], [[1.0], [0.5], [1 / 3], [0.0]], rtol=1e-6)
    np.testing.assert_array_equal(result[2], [True, True, True, False])
    assert [ERRORS[i] for i in result[3]] == ["", "", "", "not_finite"]
    assert grader.calls == 1

    lanes = [jnp.stack([x, x[::-1], x]) for x in (tokens, lengths, index)]
    mapped = jax.jit(jax.vmap(jax.vmap(lambda *x: tuple(y[0] for y in reward(*(z[None] for z in x))))))(*lanes)
    assert grader.calls == 2  # once for all lanes and rows
    for got, expected in zip(mapped, result, strict=True):
        np.testing.assert_array_equal(got, jnp.stack([expected, expected[::-1], expected]))
    shared = jax.jit(jax.vmap(reward, in_axes=(0, 0, None)))(lanes[0][::2], lanes[1][::2], index)
    np.testing.assert_array_equal(shared[0], jnp.stack([result[0], result[0]]))

    everything = host_reward(grader, Decoder())(tokens, lengths, index)
    assert everything[1].shape == (4, 2)
    with pytest.raises(ValueError, match="component_names: the grader has no 'brif'; did you mean 'brief'"):
        host_reward(grader, Decoder(), ["brif"])


def test_host_reward_in_a_scan_and_on_several_devices():
    grader = make_grader({"type": "exact"})
    decoder = Decoder()
    reward = host_reward(grader, decoder)
    mesh = jax.make_mesh((len(jax.devices()),), ("lanes",))
    spec = jax.sharding.PartitionSpec("lanes")

    def body(total, _):
        tokens = jnp.broadcast_to(jnp.array([49, 50] + [0] * 998), (256, 1000)) + total.astype(jnp.int32)[:, None] // 1000
        return total + reward(tokens, jnp.full(256, 2), jnp.arange(256))[0], None

    def run(total):
        return jax.lax.scan(body, total, length=3)[0]

    totals = jax.device_put(np.zeros((2 * len(jax.devices()), 256), np.float32), jax.NamedSharding(mesh, spec))
    result = jax.jit(jax.shard_map(jax.vmap(run), mesh=mesh, in_specs=spec, out_specs=spec))(totals)
    expected = np.zeros(totals.shape)
    expected[:, 12] = 3
    np.testing.assert_array_equal(result, expected)
    assert decoder.rows == 3 * totals.size


def test_load_jsonl(tmp_path):
    rows = [
        {"prompt": "2 + 2 =", "answer": 4, "level": 1},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "answer": "\u00e9"},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\ufeff" + json.dumps(rows[0]) + "\r\n\n" + json.dumps(rows[1], ensure_ascii=False), encoding="utf-8")
    loaded = load_jsonl(path)
    assert loaded == [{**rows[0], "answer": "4"}, rows[1]]
    assert Item.from_row(loaded[0], "5") == Item("2 + 2 =", "5", "4", {"level": 1})
    assert Item.from_row(loaded[1], "") == Item("u", "", "\u00e9", {"messages": rows[1]["messages"]})
    path.write_text('{"prompt": "x"}')
    assert load_jsonl(path, required=()) == [{"prompt": "x"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON"),
        (b'{"prompt": "\xff", "answer": ""}', "not valid JSON: .*utf-8"),
        (b"[1]", "must be an object"),
        (b'{"answer": "1"}', "must have either prompt or messages, got the keys answer"),
        (b'{"prompt": "a", "messages": [], "answer": "1"}', "must have either prompt or messages"),
        (b'{"prompt": 1, "answer": "1"}', "prompt must be text, got 1"),
        (b'{"prompt": "", "answer": "1"}', "prompt is empty"),
        (b'{"messages": [{"role": "user"}], "answer": "1"}', "messages must be a list of"),
        (b'{"messages": [], "answer": "1"}', "messages must be a list of"),
        (b'{"prompt": "a", "anwser": "1"}', "answer is missing; did you mean 'anwser'"),
        (b'{"prompt": "a", "answer": null}', "answer must be text or a number, got None"),
        (b'{"prompt": "a", "answer": true}', "answer must be text or a number, got True"),
        (b'{"prompt": "a", "answer": "1", "completion": "x"}', "completion is what the model writes"),
    ],
)
def test_load_jsonl_names_file_line_and_key(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"data.jsonl, line 3: .*{message}"):
        load_jsonl(path)


def test_load_jsonl_without_rows(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*none.jsonl: No such file"):
        load_jsonl(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty.jsonl holds no rows"):
        load_jsonl(tmp_path / "empty.jsonl")


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    rows = reasoning_gym_items("prime_factorization", 3, 7, min_value=10, max_value=50)
    assert rows == reasoning_gym_items("prime_factorization", 3, 7, min_value=10, max_value=50)
    assert rows != reasoning_gym_items("prime_factorization", 3, 8, min_value=10, max_value=50)
    assert rows[0].keys() == {"prompt", "answer", "metadata"}
    texts = ["<answer>{}</answer>", "{}", "<answer></answer>", "<answer>many</answer>", "<answer>1</answer>"]
    with make_grader({"type": "reasoning_gym", "dataset": "prime_factorization", "workers": 1}) as grader:
        results = grader.grade([Item.from_row(rows[0], text.format(rows[0]["answer"])) for text in texts])
    assert [r.valid for r in results] == [True, True, True, False, True]
    assert [r.reward for r in results if r.valid] == [1.0, 0.0, 0.0, 0.01]
    assert results[3].error == "exception"  # the scorer fails on a text: that is no reward

    with pytest.raises(ValueError, match=r"grader.dataset: unknown .*'leg_countin'; did you mean 'leg_counting'"):
        make_grader({"type": "reasoning_gym", "dataset": "leg_countin"})
    with pytest.raises(ValueError, match="'game_of_life_halting' is left out: its scorer pays for any text"):
        make_grader({"type": "reasoning_gym", "dataset": "game_of_life_halting"})
    with pytest.raises(ValueError, match="'leg_counting' refuses its config"):
        reasoning_gym_items("leg_counting", 1, 0, no_such_option=1)


def test_reasoning_gym_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="reasoning-gym is not installed: pip install"):
        make_grader({"type": "reasoning_gym", "dataset": "leg_counting"})
