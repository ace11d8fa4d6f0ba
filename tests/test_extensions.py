"""Packages that register environments, agents and graders: the example, installed for real, and small ones that are wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rljax import extensions
from rljax.agents import AGENTS, agent_module, agent_names
from rljax.cli import main
from rljax.envs import env_names, env_parameters, make_env, register_env, registry
from rljax.experiment import InputError, load
from rljax.lm.graders import Item, grader_types, make_grader

EXAMPLE = Path(__file__).parent.parent / "examples" / "rljax_example"


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """A folder that the example has been installed into, as pip does it."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", folder, EXAMPLE], check=True)
    return folder


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install("name", {group: {entry: value}}, {module: code})``: a package, by hand."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)

    def add(name, groups, code=None):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[rljax.{group}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for group, e in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for module, text in (code or {}).items():
            (tmp_path / f"{module}.py").write_text(text)
        extensions.entries.cache_clear()

    yield add
    extensions.entries.cache_clear()
    for module in set(sys.modules) - modules:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]


AGENT = """\"\"\"Does nothing, well.\"\"\"
from rljax.agents import bc
from rljax.options import config, traced

@config
class Config:
    rate: float = traced(0.5, "a rate", low=0)

make = bc.make
"""


def test_the_example_is_listed_trained_evaluated_reported_and_grades(site, tmp_path):
    code = """
import sys
from pathlib import Path
from rljax import extensions
from rljax.cli import main
assert not [name for name in sys.modules if name.startswith("rljax_example")]
assert main(["list", "agents"]) == main(["list", "graders"]) == 0
flags = "--env Ladder --env-params.rungs 3 --algo.name cem --algo.population 4 --algo.num-elites 2 --algo.num-steps 8".split()
flags += "--total-steps 64 --seeds 0 1 --evals 1 --eval-episodes 2 --eval-max-steps 16 --sweep.algo.noise 0.1 0.2".split()
assert main(["plan", *flags]) == 0
assert main(["run", *flags]) == 0
run = str(next(Path("runs").glob("*/*/config.toml")).parent)
assert main(["eval", run]) == main(["report", run]) == 0
from rljax.lm.graders import Item, make_grader
with make_grader({"type": "palindrome", "ignore_case": False, "workers": 1}) as grader:
    print([grade.reward for grade in grader.grade([Item("", "level"), Item("", "Abba"), Item("", "ab"), Item("", "")])])
"""
    paths = os.pathsep.join([str(site), str(Path(__file__).parent.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cem                            The cross-entropy method over a linear policy" in done.stdout
    assert "palindrome                     ignore_case, timeout, workers (rljax-example 0.1.0)" in done.stdout
    assert "[1.0, 0.5, 0.0, 0.0]" in done.stdout
    (info,) = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/run.json")]
    assert (info["agent"], info["env"], info["status"]) == ("cem", "Ladder", "finished")
    assert info["versions"]["rljax-example"] == "0.1.0"
    assert len(info["lanes"]) == 4


@pytest.mark.parametrize("file", ["pyproject.toml", "rljax_example/ladder.py", "rljax_example/graders.py"])
def test_the_page_on_extending_shows_the_example_as_it_is(file):
    page = (EXAMPLE.parent.parent / "docs" / "extending.md").read_text()
    assert f'title="{file}"\n{(EXAMPLE / file).read_text()}```\n' in page


@pytest.mark.slow
def test_the_agent_of_the_example_solves_cartpole(site, tmp_path):
    code = """
from rljax.experiment import load, run
options = {"env": "CartPole-v1", "total_steps": 256_000, "evals": 2, "algo.name": "cem"}
print(run(load(None, options)).eval_returns[:, -1].min())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(Path(__file__).parent.parent)])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert float(done.stdout) == 500.0, done.stderr


def test_names_are_known_before_anything_is_imported(install):
    groups = {"environments": {"Nowhere": "absent:make"}, "agents": {"nobody": "absent"}, "graders": {"none": "absent:grade"}}
    install("ghost", groups)
    assert env_names()[-1] == "Nowhere" and agent_names()[-1] == "nobody" and grader_types()[-1] == "none"
    with pytest.raises(ValueError, match=r"unknown env 'Nowhree'; did you mean 'Nowhere'"):
        make_env("Nowhree")
    with pytest.raises(InputError, match=r"unknown algo.name 'nobdy'; did you mean 'nobody'"):
        load(None, {"env": "CartPole-v1", "total_steps": 1, "algo.name": "nobdy"})
    with pytest.raises(ValueError, match=r"environment 'Nowhere' exists already"):
        register_env("Nowhere", lambda: None)


def test_a_broken_package_is_named_where_it_is_used_and_breaks_nothing_else(install, capsys):
    groups = {"environments": {"Broken": "broken:make"}, "agents": {"breaks": "broken"}, "graders": {"grades": "broken:grade"}}
    install("broken", groups, {"broken": "raise RuntimeError('no such device\\nand more')"})
    said = "of broken 1.0 cannot be loaded from broken.*: RuntimeError: no such device$"
    with pytest.raises(ValueError, match=f"environment 'Broken' {said}"):
        env_parameters("Broken")
    with pytest.raises(ValueError, match=f"grader.type: grader 'grades' {said}"):
        make_grader({"type": "grades"})
    for options in (["--env", "Broken"], ["--env", "CartPole-v1", "--algo.name", "breaks"]):
        assert main(["run", *options, "--total-steps", "1"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "of broken 1.0 cannot be loaded" in error
    assert main(["list", "agents"]) == main(["list", "graders"]) == 0
    out = capsys.readouterr().out
    assert "ppo " in out and "exact " in out
    assert out.count("cannot be loaded") == 2 and out.count("(broken 1.0)") == 2
    assert make_env("CartPole-v1") and agent_module("ppo")


def test_a_name_of_rljax_is_refused(install):
    groups = {"environments": {"CartPole-v1": "mine:make"}, "agents": {"ppo": "mine"}, "graders": {"exact": "mine:grade"}}
    install("mine", groups)
    with pytest.raises(ValueError, match=r"environment 'CartPole-v1' is of rljax and of mine 1.0: rename one"):
        make_env("CartPole-v1")
    with pytest.raises(InputError, match=r"agent 'ppo' is of rljax and of mine 1.0"):
        load(None, {"env": "Pendulum-v1", "total_steps": 1, "algo.name": "ppo"})
    with pytest.raises(ValueError, match=r"grader 'exact' is of rljax and of mine 1.0"):
        make_grader({"type": "exact"})
    assert env_names().count("CartPole-v1") == 1 and agent_names().count("ppo") == 1
    assert make_env("Pendulum-v1") and agent_module("dqn")


def test_two_packages_of_one_name_are_both_named(install):
    for name in ("first", "second"):
        install(name, {"environments": {"Twice": "absent:make"}})
    with pytest.raises(ValueError, match=r"'Twice' is of first 1.0 and of second 1.0"):
        make_env("Twice")


def test_an_agent_is_known_by_its_name_whatever_its_module_is_called(install, tmp_path):
    install("idle", {"agents": {"idler": "lazy_module"}}, {"lazy_module": AGENT})
    experiment = load(None, {"env": "CartPole-v1", "total_steps": 1, "algo.name": "idler", "algo.rate": 0.25})
    assert experiment.algo_name == "idler"
    (tmp_path / "config.toml").write_text(experiment.to_toml())
    assert load(tmp_path / "config.toml", {"name": experiment.name}).hash == experiment.hash
    with pytest.raises(InputError, match=r"algo.rate must be >= 0"):
        load(None, {"env": "CartPole-v1", "total_steps": 1, "algo.name": "idler", "algo.rate": -1.0})


@pytest.mark.parametrize("value", ["half", "half:Config", "borrowed"])
def test_what_is_no_agent_is_refused(install, value):
    install("half", {"agents": {"half": value}}, {"half": "Config = 1", "borrowed": "from rljax.agents.ppo import Config, make"})
    with pytest.raises(ValueError, match=f"agent 'half' of half 1.0: {value} must be a module of Config and make"):
        agent_module("half")
    assert "half" not in AGENTS


GRADERS = """
def plain(sample, item): return float(sample["output_text"] == item["answer"])
def keyed(sample, item, *, scale: float = 2.0, strict: bool = False, unit: str = "m"): return scale * (1 + strict)
def reserved(sample, item, *, timeout: float = 2.0): return 1.0
def needs(sample, item, *, scale): return 1.0
constant = 3
"""


@pytest.fixture
def graders(install):
    names = ("plain", "keyed", "reserved", "needs", "constant", "missing")
    install("gradings", {"graders": {name: f"gradings:{name}" for name in names}}, {"gradings": GRADERS})


def test_a_grader_of_a_package_runs_in_workers_and_takes_its_keywords(graders):
    tables = {"a": {"type": "plain", "workers": 1}, "b": {"type": "keyed", "scale": 3, "strict": True, "workers": 1}}
    with make_grader({"type": "multi", "graders": tables, "calculate_output": "a + b"}) as grader:
        assert [g.reward for g in grader.grade([Item("", "x", "x"), Item("", "y", "x")])] == [7.0, 6.0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"type": "keyed", "scal": 1}, "unknown key grader.scal for type 'keyed'; did you mean 'scale'"),
        ({"type": "keyed", "strict": 1}, "grader.strict must be true or false, got 1"),
        ({"type": "keyed", "scale": True}, "grader.scale must be a number, got True"),
        ({"type": "keyed", "timeout": 0}, "grader.timeout must be above 0"),
        ({"type": "reserved"}, "its keyword timeout must have another name"),
        ({"type": "needs"}, "its keyword scale must have another name, or text, a number"),
        ({"type": "constant"}, "gradings:constant must be a function grade"),
        ({"type": "missing"}, "grader 'missing' of gradings 1.0 cannot be loaded from gradings:missing"),
        ({"type": "plane"}, "did you mean 'plain'"),
    ],
)
def test_wrong_tables_of_a_packages_grader(graders, table, message):
    with pytest.raises(ValueError, match=message):
        make_grader(table)


def test_a_module_has_one_name_as_an_agent(install, capsys):
    install("twice", {"agents": {"one": "twice", "two": "twice", "mine": "rljax.agents.pqn"}}, {"twice": AGENT})
    for name, place, other in (("one", "twice", "two"), ("two", "twice", "one"), ("mine", "rljax.agents.pqn", "pqn")):
        said = f"agent '{name}' of twice 1.0: {place} is '{other}' too, and an agent has one name: keep one of the entry points"
        with pytest.raises(ValueError, match=said):
            agent_module(name)
    assert load(None, {"env": "CartPole-v1", "total_steps": 1, "algo.name": "pqn"}).algo_name == "pqn"  # and not mine
    assert main(["list", "agents"]) == 0
    out = capsys.readouterr().out
    assert out.count("too, and an agent has one name") == 3 and "pqn    " in out


@pytest.mark.parametrize(
    "code", ["raise SystemExit(3)", "class Odd(BaseException): ...\nraise Odd('no')", "x = (", "import absent_it"]
)
def test_whatever_an_import_raises_is_a_line_and_the_list_goes_on(install, code, capsys):
    install("raises", {"agents": {"raises": "raises"}, "environments": {"Raises": "raises:make"}}, {"raises": code})
    with pytest.raises(ValueError, match=r"agent 'raises' of raises 1.0 cannot be loaded from raises: ") as error:
        agent_module("raises")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"environment 'Raises' of raises 1.0 cannot be loaded from raises:make: "):
        make_env("Raises")
    assert main(["list", "agents"]) == 0
    out = capsys.readouterr().out
    assert out.count("cannot be loaded") == 1 and "ppo " in out


def test_the_list_of_environments_says_what_is_broken(install, capsys, monkeypatch):
    """One of rljax too, which is made of one whose name a package has taken."""
    groups = {"CartPole-v1": "takes:make", "Broken": "nowhere_at_all:make", "Needs": "takes:needs"}
    install("takes", {"environments": groups}, {"takes": "def needs(size, speed=1.0): ..."})
    monkeypatch.setattr(registry, "_own_names", lambda: ["CartPole-v1", "StatelessCartPole", "GoalGrid"])
    assert main(["list", "envs"]) == 0
    out = capsys.readouterr().out
    for name in ("CartPole-v1", "StatelessCartPole"):
        assert f"  {name:<31}environment 'CartPole-v1' is of rljax and of takes 1.0: rename one" in out
    assert f"  {'Broken':<31}environment 'Broken' of takes 1.0 cannot be loaded from nowhere_at_all:make" in out
    assert f"  {'Needs':<31}env_params.size is missing: Needs has no default for it (takes 1.0)" in out
    assert f"  {'GoalGrid':<31}observations" in out


def test_an_environment_that_is_none(install):
    install("odd", {"environments": {"Odd": "odd:thing"}}, {"odd": "thing = 3"})
    with pytest.raises(ValueError, match=r"env 'Odd' of odd 1.0: odd:thing must be a callable"):
        make_env("Odd")
