import json
import re

import numpy as np
import pytest

from rljax.cli import main
from rljax.experiment import compare
from rljax.experiment.statistics import improvement_interval, probability_of_improvement
from tests.experiment.test_report import Page, change_rows, make_run

ABOVE, BELOW = [5.0, 6.0, 7.0, 8.0, 9.0], [1.0, 2.0, 3.0, 4.0, 7.0]
ANCHORS = {"random_return": 0.0, "expert_return": 10.0}


def run_of(root, agent, finals, env="CartPole-v1", config="", algo="", **info):
    """A run directory of an agent; `config` and `algo` are lines of its config.toml."""
    name = info.pop("name", f"{agent}_{env}")
    path = make_run(root, finals, name=name, agent=agent, env=env, **info)
    (path / "config.toml").write_text(f'env = "{env}"\nseeds = [0, 1]\n{config}\n[algo]\nname = "{agent}"\n{algo}\n')
    return path


def test_two_algorithms_on_one_task(tmp_path):
    comparison = compare([run_of(tmp_path, "ppo", ABOVE), run_of(tmp_path, "dqn", BELOW)])
    assert comparison.tasks == ["CartPole-v1"] and comparison.contenders == ["ppo", "dqn"]
    (pair,) = comparison.pairs
    assert (pair.x, pair.y, pair.seeds, pair.reading) == ("ppo", "dqn", (5, 5), "X higher")
    assert pair.probability == (4 + 4 + 4.5 + 5 + 5) / 25  # 7 and 7 are a tie
    assert (pair.low, pair.high) == improvement_interval(ABOVE, BELOW)
    text = comparison.text()
    assert "ppo > dqn   5 and 5      0.900" in text and "Higher, more often than not: ppo than dqn." in text
    assert re.search(r"dqn +5 +3\.00", text) and "22.10 \u00b1 11.00 over 128 episodes" in text
    # One task needs no common scale.
    assert comparison.profile and comparison.profile.unit == "final greedy return"
    np.testing.assert_allclose(comparison.profile.shares["dqn"], [1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0, 0, 0, 0])


def test_what_is_not_shown_is_said(tmp_path):
    few, same = run_of(tmp_path, "dqn", [0.0, 1.0]), run_of(tmp_path, "a2c", ABOVE)
    lost = [{"lane": 4, "seed": 4, "step": 100, "reason": "non-finite parameters"}]
    comparison = compare([run_of(tmp_path, "ppo", [*ABOVE[:4], 8.5, 4.0], failed=lost), few, same])
    readings = {(pair.x, pair.y): (pair.reading, pair.low) for pair in comparison.pairs}
    assert readings["ppo", "a2c"][0] == "no difference shown"
    assert readings["ppo", "dqn"] == ("not established", 1.0)  # however far apart they are
    text = comparison.text()
    assert "(the interval holds 0.5): ppo and a2c." in text
    assert "Fewer than 5 seeds establish nothing, whatever the interval is: ppo and dqn; dqn and a2c." in text
    assert "ppo on CartPole-v1: 1 of 6 seeds failed" in text and "5 of 6" in text
    assert "[1, 1] say that no seed" in text and "The 3 intervals are at 95% each" in text


def test_a_setting_that_was_dropped_is_no_contender(tmp_path):
    out = [{"values": {"algo.clip": 0.2}, "lanes": [5, 6, 7, 8, 9], "evaluation": 1, "step": 500}]
    sweep = run_of(tmp_path, "ppo", ABOVE + BELOW, sweep={"algo.clip": [0.1, 0.2]}, dropped=out)
    comparison = compare([sweep, run_of(tmp_path, "dqn", BELOW)])
    assert len(comparison.pairs) == 1 and comparison.pairs[0].seeds == (5, 5)
    assert re.search(r"Of ppo_CartPole-v1/\w+ halving has dropped, and so they are left out here: clip=0\.2\.", comparison.text())


def test_a_contender_is_what_differs_on_a_task(tmp_path):
    """Settings that were tuned for each task make no other contender; those that differ on one task do."""
    runs = [
        run_of(tmp_path, "ppo", ABOVE * 2, sweep={"algo.learning_rate": [0.1, 0.2]}, config="total_steps = 100"),
        run_of(tmp_path, "ppo", BELOW * 2, "Acrobot-v1", "total_steps = 200", sweep={"algo.learning_rate": [0.2, 0.1]}),
        run_of(tmp_path, "dqn", ABOVE, algo="learning_rate = 9.0", steps_done=1000),
        run_of(tmp_path, "dqn", ABOVE, "Acrobot-v1", algo="learning_rate = 8.0"),
    ]
    comparison = compare(runs)
    assert comparison.contenders == ["ppo (learning_rate=0.1)", "ppo (learning_rate=0.2)", "dqn"]
    over = {(pair.x, pair.y): pair for pair in comparison.pairs if len(pair.tasks) == 2}
    assert len(over) == 3 and len(comparison.pairs) == 9
    pair = over["ppo (learning_rate=0.1)", "dqn"]
    assert pair.probability == probability_of_improvement([ABOVE, BELOW], [ABOVE, ABOVE]) == (0.5 + 0.1) / 2
    text = comparison.text()
    assert "not the same on every task: total_steps of ppo (learning_rate=0.1); ppo (learning_rate=0.2)." in text
    assert "not the same on every task: learning_rate of dqn." in text
    assert "On CartPole-v1 they had not as many steps, 200 to 1,000 a seed." in text and "setting of a sweep" in text
    assert comparison.profile is None and "no expert's return is known for CartPole-v1" in text


def test_labels_of_many_settings_are_short_and_own_up(tmp_path):
    files = [f"a = {i}\nb = {i // 2}\nc = 0\nd = {i}\ne = {i}\nf = {i % 2}" for i in range(3)]
    comparison = compare([run_of(tmp_path, "ppo", ABOVE, name=f"r{i}", algo=algo) for i, algo in enumerate(files)])
    assert comparison.contenders == ["ppo (a=0)", "ppo (a=1)", "ppo (a=2)"]
    assert "Labels of ppo leave out settings" in comparison.text() and "explain more: b, d, e, f." in comparison.text()


def test_what_is_learned_from_is_a_setting_and_what_is_played_a_task(tmp_path):
    scaled = run_of(tmp_path, "ppo", ABOVE * 2, sweep={"env_params.reward_scale": [1.0, 10.0]})
    assert compare(scaled).contenders == ["ppo (reward_scale=1.0)", "ppo (reward_scale=10.0)"]
    sweep = {"env_params.gravity": [9.8, 12.0]}
    comparison = compare([run_of(tmp_path, agent, ABOVE + BELOW, sweep=sweep) for agent in ("a2c", "dqn")])
    assert comparison.tasks == ["CartPole-v1 (gravity=9.8)", "CartPole-v1 (gravity=12.0)"]
    assert comparison.contenders == ["a2c", "dqn"] and comparison.text().count("not measured") == 1  # random: on the first alone


def test_what_runs_first_is_one_setting(tmp_path):
    start = '[start_from]\nenv = "x"\nname = "warm"\ntotal_steps = {}\nseeds = [{}]\n[start_from.algo]\nname = "sft"'
    runs = [run_of(tmp_path, "grpo", ABOVE, name=f"r{i}", algo=start.format(steps, i)) for i, steps in enumerate((5, 6, 6))]
    labels = compare(runs[:2]).contenders
    assert all(re.fullmatch(r"grpo \(start_from=warm/[0-9a-f]{6}\)", label) for label in labels) and labels[0] != labels[1]
    with pytest.raises(ValueError, match=r"r1/abc123 and .*r2/abc123 are the same contender, grpo \("):
        compare(runs)  # other seeds are no other settings


def test_profiles_over_tasks_are_of_normalised_scores(tmp_path):
    runs = [
        run_of(tmp_path, "iql", ABOVE, data=ANCHORS, config='data = ["/x/medium.npz"]\ndata_digest = ["0a"]'),
        run_of(tmp_path, "bc", BELOW),
        run_of(tmp_path, "iql", [500.0, 600.0, 700.0], "Acrobot-v1", data={"random_return": 0.0, "expert_return": 1000.0}),
        run_of(tmp_path, "bc", [100.0, 200.0], "Acrobot-v1", data={**ANCHORS, "env": "Pendulum-v1"}),  # elsewhere
        run_of(tmp_path, "cql", [100.0, 200.0], "Acrobot-v1"),
    ]
    comparison = compare(runs)
    assert comparison.profile and "normalised score" in comparison.profile.unit
    of_iql = dict(zip(comparison.profile.thresholds, comparison.profile.shares["iql"], strict=True))
    assert of_iql[50.0] == (4 / 5 + 2 / 3) / 2 and of_iql[90.0] == 0
    text = comparison.text()
    assert "leaves out what has no score on some task: cql." in text
    assert re.search(r"iql +8 +65\.0", text)  # of 50 50 60 60 70 70 80 90, two dropped at each end
    page = Page(comparison.write(tmp_path / "compare.html"))
    assert page.tags.count("img") == 3 and all(source.startswith("data:image/png;base64,") for source in page.loads)
    assert page.links == [] and not {"script", "link", "iframe"}.intersection(page.tags)
    for part in ("What can be said", "Performance profile", "averaged over tasks", "spread not established", "iql > bc"):
        assert part in page.text
    other = run_of(tmp_path, "td3_bc", ABOVE, data={**ANCHORS, "expert_return": 20.0})
    assert "the data sets of CartPole-v1 have different anchors" in compare([*runs, other]).text()


def test_a_contender_without_a_seed_left_has_no_probability(tmp_path):
    lost = [{"lane": lane, "seed": lane, "step": 100, "reason": "non-finite parameters"} for lane in (0, 1)]
    comparison = compare([run_of(tmp_path, "ppo", ABOVE), run_of(tmp_path, "dqn", [1.0, 2.0], failed=lost)])
    (pair,) = comparison.pairs
    assert (pair.probability, pair.low, pair.reading) == (None, None, "not established")
    assert comparison.profile is None and "0 of 2" in comparison.text() and "2 of 2 seeds failed" in comparison.text()
    comparison.write(tmp_path / "page.html")


def test_command(tmp_path, capsys):
    runs = [str(run_of(tmp_path, "ppo", ABOVE)), str(run_of(tmp_path, "dqn", BELOW))]
    page = tmp_path / "new" / "compare.html"
    assert main(["compare", *runs]) == 0
    assert "ppo > dqn" in capsys.readouterr().out and not page.exists()
    assert main(["compare", *runs, "--out", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"\n{page}\n") and "ppo &gt; dqn" in page.read_text()
    assert main(["compare", *runs, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("rljax: --out: cannot write")


def test_wrong_input_is_one_line_and_status_two(tmp_path, capsys):
    done = run_of(tmp_path, "ppo", ABOVE)
    rest = {
        "is this a run directory\\?": [],
        "is not finished, 100 of 200 steps are done: `rljax run ": [
            run_of(tmp_path, "a2c", ABOVE, status="running", steps_done=100)
        ],
        "two contenders on one task are needed, and there is ppo on CartPole-v1": [done],
        "ppo on CartPole-v1; dqn on Acrobot-v1": [done, run_of(tmp_path, "dqn", ABOVE, "Acrobot-v1")],
        "is named twice": [done, done],
        "are the same contender, ppo on CartPole-v1": [done, run_of(tmp_path, "ppo", BELOW, name="again")],
        "a run of reward_model without greedy returns": [done, run_of(tmp_path, "reward_model", [None, None])],
        "config.toml: not valid TOML": [done, run_of(tmp_path, "sac", ABOVE, config="=")],
    }
    change_rows(rest["a run of reward_model without greedy returns"][1], lambda row: row.update({"eval/return": None}))
    for message, paths in rest.items():
        assert main(["compare", *map(str, paths or [tmp_path])]) == 2, message
        error = capsys.readouterr().err
        assert error.startswith("rljax: ") and error.count("\n") == 1
        assert re.search(message.replace("is this", "is .*") if not paths else re.escape(message), error), error
    assert json.loads((done / "run.json").read_text())["status"] == "finished"  # nothing is written into a run
