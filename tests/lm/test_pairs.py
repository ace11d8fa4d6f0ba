"""Preference pairs from files: what they become, and what is wrong with them, by file and line."""

import json
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import rljax
from rljax.agents import dpo, reward_model
from rljax.agents.preferences import collect_pairs
from rljax.envs.tokens import TokenEnvironment
from rljax.lm import graders, pairs
from rljax.lm.text import TextTask
from rljax.lm.tokenizer import CharTokenizer
from rljax.networks import Transformer

TOKENIZER = CharTokenizer("0123456789+=ab")
GOOD = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}


def write(tmp_path, *rows):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


def test_pairs_become_contexts(tmp_path):
    file = write(
        tmp_path,
        GOOD,
        "",
        {"prompt": "a=", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "a", "margin": 2},
    )
    rows = pairs.load_pairs(file)
    assert [row["place"] for row in rows] == [f"{file}, line 1", f"{file}, line 3"]
    prompts = [TOKENIZER.encode(row["prompt"]) for row in rows]
    chosen, rejected, margin = pairs.encode_pairs(rows, prompts, TOKENIZER, 4, 3)
    end, ids = TOKENIZER.eos_ids[0], {c: TOKENIZER.encode(c)[0] for c in "12+=ab"}
    assert chosen.tolist() == [
        [ids["1"], ids["+"], ids["1"], ids["="], ids["2"], end, -1],
        [-1, -1, ids["a"], ids["="], ids["b"], end, -1],
    ]
    assert rejected[0].tolist()[4:] == [ids["1"], ids["1"], end]
    assert margin.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**GOOD, "rejected": "2"}, "chosen and rejected are the same"),
        ({**GOOD, "chosen": "  "}, "chosen is empty"),
        ({**GOOD, "rejected": 3}, "rejected must be text"),
        ({"prompt": "1=", "chosen": "1"}, "rejected is missing"),
        ({"prompt": "1=", "chosen": "1", "rejcted": "2"}, "rejected is missing; did you mean 'rejcted'"),
        ({**GOOD, "choosen": "2"}, "unknown key choosen; did you mean 'chosen'"),
        ({**GOOD, "margin": 0}, "margin must be a number from 1e-6 to 1e6, got 0"),
        ({**GOOD, "margin": 1e300}, "margin must be a number from 1e-6 to 1e6, got 1e"),
        ({"chosen": "2", "rejected": "1"}, "must have either prompt or messages"),
        ('{"prompt": "1=", "chosen": ', "not valid JSON: Expecting value, at column 28"),
        pytest.param("[" * 100_000, "not valid JSON: nested too deeply", id="deep"),
        pytest.param('{"prompt": "1=", "margin": ' + "9" * 5000 + "}", "not valid JSON: Exceeds the limit", id="long number"),
        ("[1]", "must be an object with prompt or messages, chosen and rejected, got [1]"),
        ({**GOOD, "rejected": [{"role": "user", "content": "3"}]}, "rejected must be text, or a list of one message"),
    ],
)
def test_faults_are_named_by_file_and_line(tmp_path, row, words):
    file = write(tmp_path, GOOD, row)
    with pytest.raises(ValueError, match="line 2") as error:
        pairs.load_pairs(file)
    assert words in str(error.value)
    assert str(file) in str(error.value)


def test_what_is_too_long_is_named_by_file_and_line(tmp_path):
    rows = pairs.load_pairs(write(tmp_path, GOOD, {"prompt": "1=", "chosen": "12345", "rejected": "1"}))
    prompts = [TOKENIZER.encode(row["prompt"]) for row in rows]
    with pytest.raises(ValueError, match=r"line 2: chosen has 6 tokens with its end, more than env_params.max_tokens \(4\)"):
        pairs.encode_pairs(rows, prompts, TOKENIZER, 4, 4)
    with pytest.raises(ValueError, match="line 1: the prompt has 4 tokens"):
        pairs.encode_pairs(rows, prompts, TOKENIZER, 3, 9)


def test_an_end_token_in_a_side_is_named_by_file_and_line(tmp_path):
    """A file that was written through a chat template has them; what stood behind the first would be taught as well."""
    rows = pairs.load_pairs(write(tmp_path, GOOD, {"prompt": "1=", "chosen": "1", "rejected": "2<eos>"}))
    tokenizer = types.SimpleNamespace(eos_ids=(14,), encode=lambda text, bos: [14 if c == "<" else 1 for c in text])
    with pytest.raises(ValueError, match="line 2: rejected holds an end token"):
        pairs.encode_pairs(rows, [[1], [1]], tokenizer, 4, 9)


def test_pairs_of_a_file_are_collected_as_they_stand(tmp_path):
    rows = pairs.load_pairs(write(tmp_path, GOOD, {"prompt": "a=", "chosen": "b", "rejected": "ab"}))
    prompts = [{"prompt": row["prompt"], "answer": row["chosen"]} for row in rows]
    task = TextTask(prompts, TOKENIZER, graders.make_grader({"type": "exact"}), 4, chosen=rows)
    env = TokenEnvironment(task)
    model = Transformer(layers=1, width=8, heads=2, mlp=8)
    collected = collect_pairs(env, model, None, jax.random.key(0), 2, 2, 0.0)
    np.testing.assert_array_equal(collected.chosen.context, task.preferences[0])
    assert collected.rejected.lengths.tolist() == [3, 3]
    assert collected.chosen.lengths.tolist() == [2, 2]
    assert collected.counts.all()
    with pytest.raises(ValueError, match=r"algo.num_pairs \(3\) is more than the 2 pairs of env_params.preferences"):
        rljax.make_agent(dpo.Config(num_pairs=3, model=model), env)
    with pytest.raises(ValueError, match=r"algo.num_pairs \+ algo.num_heldout \(3\) is more than the 2 pairs"):
        rljax.make_agent(reward_model.Config(num_pairs=2, num_heldout=1, model=model), env)


def test_the_example_of_a_file_is_without_faults():
    rows = pairs.load_pairs(Path(__file__).parents[2] / "experiments/data/preferences.jsonl")
    assert len(rows) == 12 and {row["margin"] for row in rows} == {1.0, 2.0}
