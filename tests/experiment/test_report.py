import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rljax.experiment.report import read_run, summarize, summary_text, write_curve, write_report, write_summary
from rljax.experiment.statistics import bootstrap_interval

FINALS = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 700.0]  # interquartile mean: (2 + 3 + 4 + 5) / 4


def make_run(root: Path, finals=FINALS, name="demo", sweep=None, evaluate=True, extra=None, **info) -> Path:
    """A run directory with rows at steps 0, 100 and 200; `finals` are the last returns, lane by lane."""
    path = root / "runs" / name / "abc123"
    path.mkdir(parents=True)
    values = [{}]
    for key, options in (sweep or {}).items():
        values = [{**value, key: option} for value in values for option in options]
    seeds = len(finals) // len(values)
    lanes = [{"lane": i, "seed": i % seeds, **values[i // seeds]} for i in range(len(finals))]
    rows = []
    for step in (0, 100, 200):
        for lane, final in zip(lanes, finals, strict=True):
            score = final if step == 200 or final is None else final * step / 200
            row = {"step": step, **lane, "entropy": 1.0 - step / 400, "loss/value": 2.0, "episode/length": 9.0}
            row["episode/return"] = None if step == 200 else score
            if evaluate:
                detail = {"return_std": 3.0, "length": 50.0, "episodes": 4, "unfinished": 0, **(extra or {})}
                row |= {"eval/return": score, **{f"eval/{key}": value for key, value in detail.items()}}
            rows.append(row)
    description = {
        "name": name,
        "config_hash": "abc123",
        "argv": ["rljax", "run", "demo file.toml"],
        "command": "rljax run demo.toml --total-steps 200",
        "commit": "c0ffee",
        "dirty": True,
        "versions": {"rljax": "0.1.0", "jax": "0.11.2"},
        "devices": ["cpu:0"],
        "platform": "cpu",
        "status": "finished",
        "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T00:01:15+00:00",
        "wall_seconds": 75.0,
        "compile_seconds": 8.25,
        "steps_asked": 200,
        "steps_done": 200,
        "steps_per_second": 1234.4,
        "env": "CartPole-v1",
        "agent": "ppo",
        "sweep": sweep or {},
        "lanes": lanes,
        "failed": [],
        "random": {"return": 22.1, "std": 11.0, "episodes": 128},
        **info,
    }
    (path / "run.json").write_text(json.dumps(description))
    (path / "config.toml").write_text('env = "CartPole-v1"\n# <script>alert(1)</script> & more\n')
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def change_rows(path: Path, change) -> None:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if change(row) is not False))


# Reading


def test_read_run(tmp_path):
    run = read_run(make_run(tmp_path))
    assert run.info["env"] == "CartPole-v1" and run.config.startswith("env") and len(run.rows) == 24


@pytest.mark.parametrize("name", ["config.toml", "run.json", "metrics.jsonl"])
def test_a_missing_file_is_named(tmp_path, name):
    path = make_run(tmp_path)
    (path / name).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(path / name))):
        read_run(path)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"name": "x"}'])
def test_an_unreadable_description_is_named(tmp_path, text):
    path = make_run(tmp_path)
    (path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json: not a run's description") as error:
        read_run(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("half", ['{"step": 200, "la', '{"step"', '{"step": 200, "lane": 0, "note": "\u00e9'])
def test_a_half_written_last_line_is_left_out(tmp_path, half):
    path = make_run(tmp_path)
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(half.encode("utf-8")[: -1 if half.endswith("\u00e9") else None])
    assert len(read_run(path).rows) == 24


@pytest.mark.parametrize("line", ['{"step": 2', "[1]", '{"step": 1}', ""])
def test_any_other_broken_line_is_an_error(tmp_path, line):
    path = make_run(tmp_path)
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text + line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 25: not a row"):
        read_run(path)


# The summary


def test_summary_by_hand(tmp_path):
    summary = summarize(make_run(tmp_path))
    (setting,) = summary["settings"]
    assert setting["iqm"] == 3.5
    assert setting["mean"] == sum(FINALS) / 8 and setting["min"] == 0.0 and setting["max"] == 700.0
    assert (setting["low"], setting["high"]) == bootstrap_interval(FINALS)
    assert [seed["return"] for seed in setting["seeds"]] == FINALS
    assert summary["spread"] == setting["spread"] == "established"
    assert setting["label"] == "ppo" and setting["failed"] == [] and summary["best"] is None
    assert summary["random"]["return"] == 22.1 and summary["steps_done"] == 200
    assert summary["metric"] == "eval/return" and summary["note"] is None


def test_the_interval_is_over_seeds_not_episodes(tmp_path):
    few = summarize(make_run(tmp_path, name="few", extra={"episodes": 1}))["settings"][0]
    many = summarize(make_run(tmp_path, name="many", extra={"episodes": 10_000}))["settings"][0]
    assert (few["low"], few["high"]) == (many["low"], many["high"])
    # What more seeds would do, and more episodes of the same seeds must not.
    more = summarize(make_run(tmp_path, FINALS[:7] * 8, name="more"))["settings"][0]
    fewer = summarize(make_run(tmp_path, FINALS[:7], name="fewer"))["settings"][0]
    assert more["high"] - more["low"] < 0.6 * (fewer["high"] - fewer["low"])


def test_a_failed_seed_is_named_and_left_out(tmp_path):
    failed = [{"lane": 7, "seed": 7, "step": 12345, "reason": "non-finite parameters"}]
    path = make_run(tmp_path, failed=failed)
    (setting,) = summarize(path)["settings"]
    assert setting["failed"] == [{"seed": 7, "lane": 7, "step": 12345, "reason": "non-finite parameters"}]
    assert setting["max"] == 6.0 and setting["iqm"] == 3.0  # of 0 to 6, one dropped at each end
    text = summary_text(summarize(path))
    assert "seed 7 at step 12,345: non-finite parameters" in text and "7 of 8" in text


def test_a_seed_whose_evaluation_is_not_finite_is_named(tmp_path):
    (setting,) = summarize(make_run(tmp_path, [*FINALS[:7], None]))["settings"]
    assert setting["failed"] == [{"seed": 7, "lane": 7, "step": 200, "reason": "eval/return is not finite"}]
    assert len(setting["seeds"]) == 7


def test_seeds_that_all_failed_leave_no_number(tmp_path):
    path = make_run(tmp_path, [None, None])
    (setting,) = write_summary(path)["settings"]
    assert setting["iqm"] is setting["low"] is setting["mean"] is None and len(setting["failed"]) == 2
    assert "0 of 2" in summary_text(summarize(path))
    assert write_curve(path) is None
    assert "eval/return is not finite" in write_report(path).read_text()


def test_under_five_seeds_the_spread_is_not_established(tmp_path):
    summary = summarize(make_run(tmp_path, [1.0, 2.0, 3.0]))
    assert summary["spread"] == "spread not established: 3 seeds, five or more are needed"
    assert "not established: 3 seeds, five or more are needed" in summary_text(summary)
    assert "spread" not in summary_text(summarize(make_run(tmp_path, name="enough")))


def test_one_seed_has_no_interval(tmp_path):
    path = make_run(tmp_path, [5.0])
    summary = write_summary(path)
    assert summary["settings"][0]["iqm"] == 5.0 and summary["settings"][0]["low"] is None
    assert summary["spread"] == "spread not established: 1 seed, five or more are needed"
    assert write_curve(path) and "IQM over 1 seed;" in write_report(path).read_text()


def test_a_sweep_has_a_setting_for_each_combination(tmp_path):
    sweep = {"algo.learning_rate": [1e-4, 1e-3], "algo.num_envs": [16, 64]}
    failed = [{"lane": 11, "seed": 2, "step": 100, "reason": "non-finite parameters"}]
    summary = summarize(make_run(tmp_path, [float(i) for i in range(12)], sweep=sweep, failed=failed))
    labels = [setting["label"] for setting in summary["settings"]]
    assert labels == [f"learning_rate={rate}, num_envs={n}" for rate in (0.0001, 0.001) for n in (16, 64)]
    assert [setting["iqm"] for setting in summary["settings"]] == [1.0, 4.0, 7.0, 9.5]
    assert summary["settings"][1]["values"] == {"algo.learning_rate": 1e-4, "algo.num_envs": 64}
    assert summary["best"] == "learning_rate=0.001, num_envs=64"
    text = summary_text(summary)
    assert "\n* learning_rate=0.001, num_envs=64 " in text and "optimistic" in text
    assert "seed 2 (learning_rate=0.001, num_envs=64) at step 100" in text


def test_swept_keys_that_end_alike_are_shown_in_full(tmp_path):
    sweep = {"algo.actor.rate": [1, 2], "algo.critic.rate": [3]}
    settings = summarize(make_run(tmp_path, [1.0, 2.0], sweep=sweep))["settings"]
    assert [s["label"] for s in settings] == [f"algo.actor.rate={i}, algo.critic.rate=3" for i in (1, 2)]


def test_a_run_killed_between_two_rows_is_read_at_the_last_common_step(tmp_path):
    path = make_run(tmp_path, [10.0, 20.0], status="running", steps_done=100)
    change_rows(path, lambda row: not (row["step"] == 200 and row["lane"] == 1))
    (setting,) = summarize(path)["settings"]
    assert [(seed["step"], seed["return"]) for seed in setting["seeds"]] == [(100, 5.0), (100, 10.0)]


def test_without_evaluations_the_training_return_stands_in(tmp_path):
    path = make_run(tmp_path, [10.0, 20.0], evaluate=False)
    summary = summarize(path)
    assert summary["metric"] == "episode/return" and "no evaluation rows" in summary["note"]
    # Null at step 200, where no episode had finished: the last that is not.
    assert [seed["return"] for seed in summary["settings"][0]["seeds"]] == [5.0, 10.0]
    assert "no evaluation rows" in summary_text(summary) and write_curve(path)


def test_a_run_without_rows_still_has_a_summary(tmp_path):
    path = make_run(tmp_path, [1.0, 2.0], random=None)
    (path / "metrics.jsonl").write_text("")
    assert "not measured" in summary_text(write_summary(path))
    assert "no episode/return recorded" in write_report(path).read_text()


def test_write_summary_is_strict_json_and_leaves_nothing_else(tmp_path):
    path = make_run(tmp_path, [1.0])
    before = set(path.iterdir())
    summary = write_summary(path)
    text = (path / "summary.json").read_text()
    assert json.loads(text) == summary and "NaN" not in text
    assert set(path.iterdir()) - before == {path / "summary.json"}


def test_summary_text_answers_a_readers_questions(tmp_path):
    lines = summary_text(summarize(make_run(tmp_path, extra={"unfinished": 1}))).splitlines()
    assert lines[0] == "ppo on CartPole-v1   demo/abc123   finished"
    low, high = bootstrap_interval(FINALS)
    assert lines[3].split() == ["ppo", "8", "3.5", f"[{low:.1f},", f"{high:.1f}]", "90.1", "0.0", "to", "700.0"]
    assert lines[2].index("IQM") + len("IQM") == lines[3].index("3.5") + len("3.5")
    facts = dict(line.split(maxsplit=1) for line in lines[5:])
    assert facts["random"] == "22.1 \u00b1 11.0 over 128 episodes"
    assert facts["failed"] == "none"
    assert facts["unfinished"] == "8 of 32 evaluation episodes did not end"
    assert facts["steps"] == "200 asked, 200 done, per seed"
    assert facts["time"] == "1 min 15 s wall, of which 8.2 s compiling"
    assert facts["reproduce"] == "rljax run demo.toml --total-steps 200"


# Curve and page


class Page(HTMLParser):
    """What a page loads, where it links, and its visible text."""

    def __init__(self, path: Path):
        super().__init__()
        self.loads, self.links, self.tags, self.text = [], [], [], ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "data", "action"):
                self.loads.append(value)
            elif name == "href":
                self.links.append(value)

    def handle_data(self, data):
        self.text += data


def test_curve_is_a_png(tmp_path):
    path = make_run(tmp_path, [float(i) for i in range(12)], sweep={"algo.learning_rate": [0.1, 0.2]})
    assert write_curve(path) == path / "curve.png"
    data = (path / "curve.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (1200, 800)


def test_report_is_self_contained_and_complete(tmp_path):
    failed = [{"lane": 1, "seed": 1, "step": 100, "reason": "non-finite <parameters>"}]
    path = make_run(tmp_path, failed=failed)
    (path / "samples").mkdir()
    (path / "samples" / "episode.gif").write_bytes(b"GIF89a")
    (path / "samples" / "answer.txt").write_text("2 < 3 & so on")
    out = write_report(path)
    page = Page(out)
    assert out == path / "report.html"
    assert len(page.loads) == 4 and all(re.match("data:image/(png|gif);base64,", source) for source in page.loads)
    assert page.loads[-1] == "data:image/gif;base64,R0lGODlh"
    assert page.links == [] and not {"script", "link", "iframe", "object"}.intersection(page.tags)
    assert "url(" not in page.source and "@import" not in page.source and "http" not in page.text
    for text in [
        (path / "config.toml").read_text(),
        "2 < 3 & so on",
        "episode.gif",
        "seed 1 at step 100: non-finite <parameters>",
        "22.1 \u00b1 11.0 over 128 episodes",
        "c0ffee, with uncommitted changes",
        "jax 0.11.2",
        "cpu:0",
        "1 min 15 s wall, of which 8.2 s compiling",
        "rljax run 'demo file.toml'",
        "rljax run demo.toml --total-steps 200",
        "author  = {{The rljax developers}}",
        "ppo on CartPole-v1, run demo/abc123, commit c0ffee",
    ]:
        assert text in page.text


def test_report_of_several_runs_compares_them_by_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [
        make_run(tmp_path, name="one"),
        make_run(tmp_path, name="two", sweep={"algo.learning_rate": [0.1, 0.2]}),
        make_run(tmp_path, name="three", env="Pendulum-v1"),
    ]
    out = write_report(paths)
    page = Page(out)
    assert out.resolve() == tmp_path / "report.html"
    assert page.tags.count("img") == 2 + 3 * 3  # a comparison an environment; a learning curve and two grids a run
    assert page.links == ["#one/abc123", "#two/abc123", "#three/abc123"]
    assert "two (learning_rate=0.2, best of 2)" in page.text
    assert page.tags.count("h2") == 3 and "Comparison of 3 runs" in page.text


def test_report_goes_where_it_is_asked(tmp_path):
    out = tmp_path / "new" / "page.html"
    assert write_report([make_run(tmp_path)], out) == out and out.is_file()
    with pytest.raises(ValueError, match="a run directory or more"):
        write_report([])
