"""What sinks hold: event files, Weights & Biases' and trackio's stores are read back.

The latter two need their packages, which are no part of `dev`; stand-ins that note the calls are always tested.
"""

import json
import re
import shutil
import sqlite3
import struct
import sys
from types import SimpleNamespace

import jax
import pytest
from tensorboardX.proto import event_pb2

from rljax.cli import main
from rljax.experiment import InputError, load, resume, run, sinks
from tests.experiment.runs import rows, stop_after

OPTIONS = {
    "env": "CartPole-v1",
    "total_steps": 320,
    "seeds": [3, 4],
    "evals": 1,
    "eval_episodes": 2,
    "checkpoint_seconds": 0.0,
    "algo.num_envs": 2,
    "algo.num_steps": 8,
    "algo.num_epochs": 1,
    "algo.num_minibatches": 1,
    "algo.hidden": [8],
    "sweep.algo.learning_rate": [1e-3, 1e-2],
}
NAMES = [f"seed={seed}, learning_rate={rate}" for rate in (0.001, 0.01) for seed in (3, 4)]


@pytest.fixture(scope="module", autouse=True)
def fast_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def experiment(tmp_path, **changes):
    return load(None, {**OPTIONS, "out": str(tmp_path), **changes})


def folders(path):
    """Those of the lanes in TensorBoard's."""
    return [path / "tensorboard" / name.replace(", ", ",") for name in NAMES]


def table(steps, failed=None, since=128):
    """Rows of all four lanes; ``failed`` is a lane that has no finite parameters from step ``since`` on."""
    lanes = load(None, OPTIONS).lanes()
    return [
        {
            "step": step,
            **lane,
            "kl": None if step == 64 else step + lane["lane"],
            "finite": lane["lane"] != failed or step < since,
        }
        for step in steps
        for lane in lanes
    ]


def logged(e, names, *parts):
    """Gives sinks the rows that a run goes on from, and then others; returns what they say."""
    said = []
    with sinks.Sinks(e, names, said.append) as logs:
        logs.begin("0a1b", parts[0])
        for part in parts[1:]:
            logs.write(part)
    return said


def records(data):
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + length]
        at += 16 + length


def events(folder):
    """``({tag: {step: value}}, {tag: text})``, with what a later file purges taken out, as TensorBoard's reader does."""
    scalars, texts = {}, {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for record in records(file.read_bytes()):
            event = event_pb2.Event.FromString(record)
            if event.HasField("session_log"):
                assert event.session_log.status == event_pb2.SessionLog.START
                scalars = {tag: {s: v for s, v in points.items() if s < event.step} for tag, points in scalars.items()}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    assert event.step not in scalars.setdefault(value.tag, {}), "a step is there twice"
                    scalars[value.tag][event.step] = value.simple_value
                else:
                    texts[value.tag.removesuffix("/text_summary")] = value.tensor.string_val[0].decode()
    return scalars, texts


def assert_holds_all(path):
    """TensorBoard has each lane's rows, once."""
    aside = ("step", "lane", "seed", "algo.learning_rate")
    for lane, folder in enumerate(folders(path)):
        own = [row for row in rows(path) if row["lane"] == lane]
        expected = {}
        for row in own:
            for name, value in row.items():
                if name not in aside and value is not None:
                    expected.setdefault(name, {})[row["step"]] = pytest.approx(float(value), rel=1e-6)
        scalars, texts = events(folder)
        assert scalars == expected
        assert f"seed = {own[0]['seed']}\n" in texts["config"]
        assert f"learning_rate = {own[0]['algo.learning_rate']}\n" in texts["config"]


def test_a_run_that_resumes_and_one_that_has_finished(tmp_path, capsys):
    """Killed after a row that it has no checkpoint of; and sent anew when all is done."""
    e = experiment(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(e, listener=stop_after(3), log="tensorboard")
    assert {p.name for p in (e.path / "tensorboard").iterdir()} == {folder.name for folder in folders(e.path)}
    newest = max(int(p.name) for p in (e.path / "checkpoints").iterdir() if p.name.isdigit())
    shutil.rmtree(e.path / "checkpoints" / str(newest))
    notes = []
    resume(e.path, listener=lambda event: notes.append(event.get("text", "")), log=["tensorboard"])
    assert_holds_all(e.path)
    assert [len(list(folder.iterdir())) for folder in folders(e.path)] == [2] * 4
    assert f"logs to tensorboard --logdir {e.path}/tensorboard" in notes
    shutil.rmtree(e.path / "tensorboard")
    before = (e.path / "metrics.jsonl").read_bytes()
    assert main(["run", str(e.path), "--log", "tensorboard"]) == 0
    assert "finished already" in capsys.readouterr().out
    assert_holds_all(e.path)
    assert (e.path / "metrics.jsonl").read_bytes() == before


def test_a_run_that_begins_again_before_its_first_checkpoint(tmp_path):
    e = experiment(tmp_path)
    logged(e, ["tensorboard"], [], table([0, 64, 128]))
    logged(e, ["tensorboard"], [], table([0, 64]))
    assert events(folders(e.path)[2])[0] == {"kl": {0: 2}, "finite": {0: 1, 64: 1}}


def test_a_lane_that_fails_is_marked_in_tensorboard(tmp_path):
    e = experiment(tmp_path)
    logged(e, ["tensorboard"], [], table([0, 64]), table([128, 192], failed=1))
    assert events(folders(e.path)[1])[1]["failed"] == "non-finite parameters at step 128"
    assert "failed" not in events(folders(e.path)[0])[1]
    assert events(folders(e.path)[1])[0] == {"kl": {0: 1, 128: 129, 192: 193}, "finite": {0: 1, 64: 1, 128: 0, 192: 0}}


def test_half_of_an_event_at_the_end_of_a_file_is_written_anew(tmp_path):
    e = experiment(tmp_path)
    logged(e, ["tensorboard"], [], table([0, 64, 128]))
    (file,) = folders(e.path)[0].iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    logged(e, ["tensorboard"], table([0, 64, 128]), table([192]))
    file.write_bytes(whole[: len(whole) - len(list(records(whole))[-1]) - 16])  # for `events`, which reads whole ones
    scalars = events(file.parent)[0]
    assert scalars == {"kl": {0: 0, 128: 128, 192: 192}, "finite": {0: 1, 64: 1, 128: 1, 192: 1}}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["wandbb"], "--log: unknown sink 'wandbb'; did you mean 'wandb'?; known: tensorboard, wandb, trackio"),
        ("tensorbord", "did you mean 'tensorboard'"),
        (3, "unknown sink '3'"),
    ],
)
def test_an_unknown_sink(tmp_path, names, message):
    with pytest.raises(InputError, match=re.escape(message)):
        run(experiment(tmp_path), log=names)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_one_line_before_anything_is_made(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    status = main(
        ["run", "--env", "CartPole-v1", "--total-steps", "64", "--out", str(tmp_path), "--log", "tensorboard", "trackio"]
    )
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("rljax: --log trackio: ") and error.endswith("pip install 'rljax[trackio]'\n")
    assert error.count("\n") == 1 and not list(tmp_path.iterdir())


class Noted:
    """A run of a stand-in for Weights & Biases or trackio."""

    def __init__(self, module, arguments, held):
        self.arguments, self.rows, self.ended, self.alerts = arguments, [], None, []
        self.tags, self.summary, self.offline, self.project_url = (), {}, False, "https://example.org/rljax"
        self.step = self._next_step = held
        self.module = module

    def log(self, values, step):
        if step in self.module.breaks:
            raise ConnectionError("the network is gone\nand more")
        self.rows.append((step, values))

    def alert(self, title, text, level, step):
        self.alerts.append((title, text, level, step))

    def finish(self, exit_code=None):
        self.ended = True if exit_code is None else exit_code


def stand_in(monkeypatch, name, held=0, breaks=()):
    module = SimpleNamespace(runs=[], breaks=breaks, Settings=dict, AlertLevel=SimpleNamespace(ERROR="error"))

    def init(project, **arguments):
        module.runs.append(Noted(module, {"project": project, **arguments}, held))
        return module.runs[-1]

    module.init = init
    module.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode="online"))
    module.login = lambda prompt: module.knows_user
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_calls_of_wandb(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    module, e = stand_in(monkeypatch, "wandb"), experiment(tmp_path)
    said = logged(e, ["wandb"], [], table([0, 64]), table([128], failed=2))
    assert said == ["logs to wandb, https://example.org/rljax"]
    assert [r.arguments["name"] for r in module.runs] == NAMES
    assert {r.arguments["group"] for r in module.runs} == {f"{e.name}/{e.hash}"}
    assert [r.arguments["id"] for r in module.runs] == [f"{e.hash}-0a1b-{lane}" for lane in range(4)]
    assert {(r.arguments["resume"], r.arguments["reinit"], r.arguments["project"]) for r in module.runs} == {
        ("allow", "create_new", "rljax")
    }
    config = module.runs[2].arguments["config"]
    assert (config["seed"], config["lane"], config["hash"]) == (3, 2, e.hash)
    assert config["algo"]["learning_rate"] == 0.01 and config["sweep"] == {"algo.learning_rate": 0.01}
    assert module.runs[2].rows == [(0, {"kl": 2.0, "finite": 1.0}), (64, {"finite": 1.0}), (128, {"kl": 130.0, "finite": 0.0})]
    assert [r.ended for r in module.runs] == [0, 0, 1, 0]
    assert [r.tags for r in module.runs] == [(), (), ("failed",), ()]
    assert module.runs[2].summary == {"failed": "non-finite parameters at step 128"}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_steps_that_a_sink_holds_are_not_sent_again(tmp_path, monkeypatch, name):
    """It was killed at 128, and resumes from 64."""
    module = stand_in(monkeypatch, name, held=129)
    logged(experiment(tmp_path), [name], table([0, 64]), table([128, 192]))
    assert [[step for step, _ in r.rows] for r in module.runs] == [[192]] * 4


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_sink_that_is_new_in_the_middle_gets_all_rows(tmp_path, monkeypatch, name):
    module = stand_in(monkeypatch, name)
    logged(experiment(tmp_path), [name], table([0, 64]), table([128]))
    assert [[step for step, _ in r.rows] for r in module.runs] == [[0, 64, 128]] * 4


def test_calls_of_trackio(tmp_path, monkeypatch):
    module, e = stand_in(monkeypatch, "trackio"), experiment(tmp_path)
    assert logged(e, ["trackio"], [], table([0]), table([128], failed=0)) == ["logs to trackio show --project rljax"]
    assert [r.arguments["name"] for r in module.runs] == [f"{n} {e.hash}-0a1b-{lane}" for lane, n in enumerate(NAMES)]
    assert module.runs[0].arguments["group"] == f"{e.name}/{e.hash}"
    assert module.runs[0].alerts == [("failed", "non-finite parameters at step 128", "error", 128)]
    assert not any(r.alerts for r in module.runs[1:]) and all(r.ended for r in module.runs)


def test_a_sink_that_fails_is_named_once_and_the_others_go_on(tmp_path, monkeypatch):
    module, e = stand_in(monkeypatch, "wandb", breaks=(64,)), experiment(tmp_path)
    said = logged(e, ["wandb", "tensorboard"], [], table([0]), table([64]), table([128]))
    line = "--log wandb has failed, and the run goes on without it: ConnectionError: the network is gone"
    assert [text for text in said if not text.startswith("logs to")] == [line]
    assert [[step for step, _ in r.rows] for r in module.runs] == [[0]] * 4
    assert sorted(events(folders(e.path)[3])[0]["finite"]) == [0, 64, 128]


def test_a_sink_that_cannot_begin(tmp_path):
    e = experiment(tmp_path)
    e.path.mkdir(parents=True)
    (e.path / "tensorboard").write_text("a file, in the way")
    (said,) = logged(e, ["tensorboard"], [], table([0]))
    assert said.startswith("--log tensorboard has failed, and the run goes on without it: NotADirectoryError: ")


def test_wandb_without_an_account_is_one_line(monkeypatch):
    module = stand_in(monkeypatch, "wandb")
    module.knows_user = False
    with pytest.raises(InputError, match=r"^--log wandb: not logged in, which `wandb login` does; WANDB_MODE=offline needs no"):
        sinks.check(["wandb"])
    module.knows_user = True
    sinks.check(["wandb"])
    del module.knows_user
    with pytest.raises(InputError, match=r"^--log wandb: .* has no attribute 'knows_user'; WANDB_MODE=offline"):
        sinks.check(["wandb"])


def test_what_tensorboard_itself_reads(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    e = experiment(tmp_path)
    logged(e, ["tensorboard"], [], table([0, 64, 128, 192]))
    logged(e, ["tensorboard"], table([0, 64]), table([128, 192, 256], failed=0))
    reader = accumulator.EventAccumulator(str(folders(e.path)[0]))
    reader.Reload()
    assert [event.step for event in reader.Scalars("finite")] == [0, 64, 128, 192, 256]
    assert [event.value for event in reader.Scalars("kl")] == [0, 128, 192, 256]
    assert {"config/text_summary", "failed/text_summary"} <= set(reader.Tags()["tensors"])


def wandb_history(file):
    """``([{key: value}], exit code)`` of a ``.wandb`` file: records in blocks of 32 KiB, as LevelDB's log has them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, history, code = file.read_bytes(), 7, b"", [], None
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, whole = Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                items = {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                history.append({key: value for key, value in items.items() if key in ("kl", "finite", "_step")})
            elif record.WhichOneof("record_type") == "exit":
                code = record.exit.exit_code
    return history, code


def test_wandb_offline_for_real(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sinks.check(["wandb"])
    e = experiment(tmp_path)
    for steps in ([0, 64, 128], [0, 64]):  # the second goes on from 64
        said = logged(e, ["wandb"], table(steps[:2] if steps == [0, 64] else []), table([128, 192], failed=1))
    assert said == [f"logs to wandb, offline: wandb sync {e.path}/wandb/offline-run-*"]
    files = sorted(e.path.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stem)
    assert [file.stem for file in files] == [f"run-{e.hash}-0a1b-{lane}" for lane in range(4)]
    for lane, file in enumerate(files):
        history, code = wandb_history(file)
        expected = [(row["step"], row["kl"], row["finite"]) for row in table([0, 64, 128, 192], failed=1) if row["lane"] == lane]
        assert [(row["_step"], row.get("kl"), row["finite"]) for row in history] == expected
        assert code == int(lane == 1)


def test_trackio_for_real(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage, sys.modules["trackio"]):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "store")
    e = experiment(tmp_path)
    logged(e, ["trackio"], [], table([0, 64, 128]))
    logged(e, ["trackio"], table([0, 64]), table([128, 192], failed=1, since=192))
    with sqlite3.connect(tmp_path / "store" / "rljax.db") as store:
        found = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
        alerts = store.execute("select run_name, title, step from alerts").fetchall()
    for lane, name in enumerate(NAMES):
        own = [(step, json.loads(metrics)) for run_name, step, metrics in found if run_name == f"{name} {e.hash}-0a1b-{lane}"]
        assert [step for step, _ in own] == [0, 64, 128, 192]
        assert [values.get("kl") for _, values in own] == [lane, None, 128 + lane, 192 + lane]
    assert [(title, step) for _, title, step in alerts] == [("failed", 192)]
