"""The labs of `experiments/`: their configs load, their cells are what they say, and their pages are those of what was kept."""

import json
import runpy
from pathlib import Path

import pytest

from rljax.experiment import load

ROOT = Path(__file__).parents[2]
LABS = ("overoptimisation", "credit", "decide", "offline", "routing")


def lab(name):
    return runpy.run_path(str(ROOT / "experiments" / name / "run.py"), run_name="lab")


@pytest.mark.parametrize("name", LABS)
def test_every_config_loads_on_five_seeds(name):
    files = sorted((ROOT / "experiments" / name).glob("*.toml"))
    assert files
    for file in files:
        experiment = load(file)
        assert experiment.seeds[:5] == (10, 11, 12, 13, 14), file
        for source in (experiment.start_from, experiment.reward_from):
            assert source is None or source.seeds == experiment.seeds


@pytest.mark.parametrize("name", LABS)
def test_the_page_is_that_of_what_was_kept(name):
    module = lab(name)
    kept = json.loads(module["RESULTS"].read_text())
    assert module["page"](kept) in module["PAGE"].read_text()
    assert module["FIGURE"].is_file()


def test_methods_are_given_the_same_number_of_labels():
    module = lab("decide")
    for labels in module["LABELS"]:
        cells = {m: module["experiment"](m, labels, 1e-3, 10) for m in ("sft", "filtered", "dpo", "reward_model", "grpo", "ppo")}
        assert cells["sft"].algo.num_examples == cells["filtered"].algo.num_examples == labels
        assert cells["filtered"].algo.demonstrations == "own"
        for method in ("dpo", "reward_model"):
            assert cells[method].algo.num_pairs * cells[method].algo.answers == labels
        for method in ("grpo", "ppo"):
            assert cells[method].total_steps == labels * 6  # an answer has up to six tokens
