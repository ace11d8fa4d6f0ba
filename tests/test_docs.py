"""Every page of the documentation runs: its files, its Python and its commands, in order, each page in a directory of its own.

A block with ``title="file"`` is written to that file, ``python`` blocks run in one namespace a page, and ``bash`` blocks hold
commands of rljax. ``<!-- test: skip -->`` on the line before a block leaves it out; plain fences and ``text`` are never run.
Commands that are left out are in `NOT_RUN`, each with its reason.

Configs that are loaded get a tiny budget. Of the commands that train, the first of a page does so, and the others are built:
every key is validated and every program is traced as far as its shapes. In commands, the run directory of an example stands for
that of the page's last run.
"""

import contextlib
import dataclasses
import io
import json
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
import pytest

from rljax import agents, cli, experiment
from rljax.envs import gymnax, make_env, registry
from rljax.experiment.lanes import build
from rljax.networks import Transformer
from rljax.ops.dataset import make_dataset
from rljax.ops.replay import Transition

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
TINY = {"total_steps": 2000, "evals": 1, "eval_episodes": 2, "seeds": [0, 1]}
TINY_FLAGS = ["--total-steps", "2000", "--evals", "1", "--eval-episodes", "2", "--seeds", "0", "1"]
FENCE = re.compile(
    r"^(?:<!-- test: (?P<marker>\w+) -->\n\n?)?```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$",
    re.M | re.S,
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
EXAMPLE_RUN = re.compile(r"\bruns/\w+/[0-9a-f]{12}\b")
OPTIONAL_METRICS = {"ppo": {"target_kl": 1.0}, "reinforce": {"gradient_variance": True}, "grpo": {"kl_coef": 0.1}}
OF_TOKENS = {"sft": {}, "dpo": {}, "reward_model": {}, "ppo": {"kl_coef": 0.1}}
MEASURED = re.compile(r"\*\*[-.\d]+\*\*")
COMMAND = re.compile(r"^\s*(?:rljax|python3?|pip|podman|srun|mpirun|gcloud|sky|systemd-run|\.venv/bin/\w+) .*$", re.M)
NOT_RUN = {  # what commands in fences that are not run begin with, and why
    "python3 -m venv": "installs; .ci/run does so on each version of Python, and runs what README says first",
    "pip install": "as above",
    ".venv/bin/rljax run experiments/ppo_cartpole.toml --out runs": "a unit of systemd",
    "rljax fetch smollm2": "needs the network; tests/lm/test_weights.py fetches from a stand-in",
    "rljax run experiments/grpo_smollm2.toml": "needs a download; its results are in benchmarks/results",
    "rljax run experiments/dpo_smollm2.toml": "the same model",
    "rljax redteam experiments/grpo_smollm2.toml": "the same model",
    "rljax submit experiments/sweep.toml --slurm": "needs Slurm; tests/test_jobs.py has a stand-in",
    "srun rljax run": "needs Slurm; tests/experiment/test_hosts.py reads its variables, and starts processes",
    "mpirun": "needs Open MPI; as above",
    "gcloud": "needs a TPU pod; as above",
    "rljax run experiments/ppo_cartpole.toml --coordinator": "one run of several processes: tests/experiment/test_hosts.py",
    "podman": "needs podman and an image",
    "systemd-run": "needs systemd",
    "rljax run --env Ladder --algo.name cem": "needs the example package, which tests/test_extensions.py installs and runs",
    "rljax list": "as above",
    "python experiments/": "labs of hours; tests/experiment/test_labs.py holds their pages to what was kept",
}
TABLE_ROW = re.compile(r"^\| `([^`]+)` \| (?:`([^`]*)`)?[^|]*\| (.*?) \|", re.M)


@pytest.fixture(autouse=True)
def fast_compilation():
    """Programs here run for a moment, and most of the time is compilation, which may as well be poor."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@dataclasses.dataclass
class Block:
    language: str
    title: str | None
    body: str
    line: int


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [
        Block(match["language"], match["title"], match["body"], text[: match.start("body")].count("\n"))
        for match in FENCE.finditer(text)
        if match["marker"] != "skip"
    ]


def tiny(e: experiment.Experiment) -> experiment.Experiment:
    """What runs first is as short, and no more pairs are sampled than that takes."""
    sources = {key: tiny(source) for key in ("start_from", "reward_from") if (source := getattr(e, key)) is not None}
    few = {name: 32 for name in ("num_pairs", "num_heldout") if hasattr(e.algo, name)}
    algo = dataclasses.replace(e.algo, **few)
    return dataclasses.replace(e, total_steps=min(e.total_steps, TINY["total_steps"]), algo=algo, **sources)


class Page:
    """Runs the blocks of one page one after the other, as a reader would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch = monkeypatch
        self.last_run: Path | None = None
        self.has_trained = False
        self.namespace: dict = {"__name__": "page"}
        load, run = experiment.load, experiment.run

        def tiny_load(path=None, overrides=None):
            return tiny(load(path, {**(overrides or {}), **TINY}))

        def noted_run(*args, **kwargs):
            result = run(*args, **kwargs)
            self.last_run, self.has_trained = result.path, True
            return result

        # `load` is looked up in the package both by the command line and by a reader's import.
        monkeypatch.setattr(experiment, "load", tiny_load)
        monkeypatch.setattr(experiment, "run", noted_run)

    def block(self, block: Block, page: str) -> None:
        if block.title:
            path = Path(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body)
        elif block.language == "python":
            code = "\n" * block.line + block.body
            exec(compile(code, str(ROOT / page), "exec"), self.namespace)
        elif block.language == "bash":
            for command in block.body.splitlines():
                self.command(command)

    def command(self, command: str) -> None:
        if EXAMPLE_RUN.search(command):
            assert self.last_run is not None, f"{command}: no run before it on this page"
            command = EXAMPLE_RUN.sub(str(self.last_run), command)
        words = shlex.split(command)
        assert words[0] == "rljax", f"a bash block holds commands of rljax; others go in a plain fence: {command}"
        trains = words[1] in ("run", "plan") and "--help" not in words
        if trains and (words[1] == "plan" or self.has_trained):
            overrides = experiment.parse_overrides(words[3:])
            overrides.pop("log", None)
            for program in experiment.load(words[2], overrides).programs():
                build(program)
            return
        self.has_trained |= trains
        self.monkeypatch.setattr(sys, "argv", words)
        assert cli.main(words[1:]) == 0, command


def runs(page: str) -> bool:
    return any(block.title or block.language in ("python", "bash") for block in blocks(page))


@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)])
def test_page_runs(page, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known, registered = dict(agents.AGENTS), dict(registry._registered)
    modules = set(sys.modules)
    try:
        reader = Page(monkeypatch)
        for block in blocks(page):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                reader.block(block, page)
    finally:
        for table, before in ((agents.AGENTS, known), (registry._registered, registered)):
            table.clear()
            table.update(before)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[name]


def commands_not_run() -> list[str]:
    """Every command on a page that no test of this file runs."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        run = {match.start("body") for match in FENCE.finditer(text) if match["marker"] != "skip"}
        for fence in re.finditer(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", text, re.M | re.S):
            is_code = fence["kind"] in ("python", "bash") or "title=" in fence["kind"]
            if not (is_code and fence.start("body") in run):
                found += [line.strip() for line in COMMAND.findall(fence["body"])]
    return found


def test_what_is_not_run_is_listed_with_its_reason():
    commands = commands_not_run()
    for command in commands:
        assert any(command.startswith(known) for known in NOT_RUN), f"{command}: run it, or say in NOT_RUN why not"
    for known in NOT_RUN:
        assert any(command.startswith(known) for command in commands), f"{known}: no page has it"


def test_parts_of_configs_are_toml_with_known_keys():
    """Blocks that are no whole file, and so are not loaded."""
    names = {field.name for field in dataclasses.fields(experiment.Experiment)} | {"base", "model"}
    for page in PAGES:
        for block in re.findall(r"^```toml\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S):
            assert set(tomllib.loads(block.replace("# or\n", "# or\n[other]\n"))) - {"other"} <= names, block


def test_notes_on_migration_name_options_that_there_are():
    """The second column of their tables."""
    fields = [dataclasses.fields(agents.agent_module(name).Config) for name in agents.AGENTS]
    known = {field.name for of_agent in fields for field in of_agent}
    known |= {field.name for field in dataclasses.fields(experiment.Experiment)}
    known |= {f"model.{field.name}" for field in dataclasses.fields(Transformer)} | {"[env_params]"}
    known |= {f"env_params.{name}" for name in registry.env_parameters("text")}
    rows = re.findall(r"^\| [^|]+ \| ([^|]*) \|[^|\n]*\|$", (ROOT / "docs/migration.md").read_text(), re.M)
    named = {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}
    assert len(named) > 60
    assert named <= known, named - known


@pytest.mark.parametrize("name", agents.AGENTS)
def test_page_of_an_algorithm_has_measured_results_that_are_those_of_their_pages(name):
    text = (ROOT / f"docs/algorithms/{name}.md").read_text()
    assert "rljax run" in text
    assert "## Pitfalls" in text
    assert "arXiv" in text or "Williams 1992" in text
    section = text.partition("## Measured results")[2]
    pages = ("results.md", "cloning.md", "overoptimisation.md", "routing.md")
    sources = "".join((ROOT / "docs" / page).read_text() for page in pages)
    rows = [line for line in section.splitlines() if line.startswith("|") and MEASURED.search(line)]
    assert rows, "a table with intervals"
    for row in rows:
        first, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        cells = [cell for cell in cells if MEASURED.search(cell)]
        at_home = [line for line in sources.splitlines() if line.startswith(f"| {first} |")]
        assert any(all(cell in line for cell in cells) for line in at_home), row


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_output_that_is_shown_is_of_the_config_as_it_is(page):
    """The summary on the page names the hash of its config; where this fails, run the config again and paste what it prints."""
    config = experiment.load(ROOT / "experiments/ppo_cartpole.toml")
    assert f"rljax reproduce {config.path}\n" in (ROOT / page).read_text()


def test_script_of_the_python_api(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["experiments/run.py", *TINY_FLAGS])
    runpy.run_path(str(ROOT / "experiments" / "run.py"), run_name="__main__")
    assert "one episode of seed" in capsys.readouterr().out
    assert len(list(tmp_path.glob("runs/ppo_cartpole/*/report.html"))) == 1


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in LINK.findall((ROOT / page).read_text()):
        if not target.startswith(("http", "#")):
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path
            assert file.exists(), f"{page}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
                slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]
                assert anchor in slugs, f"{page}: {target}"


def table(page: str) -> dict[str, tuple[str, str]]:
    """{name: (default, third cell)} of every row of a page's tables that starts with a name in backticks."""
    return {name: (default, rest) for name, default, rest in TABLE_ROW.findall((ROOT / page).read_text())}


def written(default) -> str:
    """A default as a config writes it."""
    if isinstance(default, bool) or default is None:
        return str(default).lower()
    return str(list(default)) if isinstance(default, tuple) else str(default)


@pytest.mark.parametrize("name", agents.AGENTS)
def test_page_of_an_algorithm_has_every_option_with_its_default(name):
    rows = table(f"docs/algorithms/{name}.md")
    for field in dataclasses.fields(agents.agent_module(name).Config):
        assert field.name in rows, f"{field.name} is not on the page of {name}"
        if field.name == "model":  # the table of [model]
            continue
        default, kind = rows[field.name]
        assert default == written(field.default), field.name
        assert kind == ("traced" if field.metadata["traced"] else "static"), field.name


def test_page_of_configs_has_every_key_with_its_default():
    rows = table("docs/config.md")
    for field in dataclasses.fields(experiment.Experiment):
        if field.name in ("algo", "env_params", "sweep"):
            assert f"[{field.name}]" in (ROOT / "docs/config.md").read_text()
            continue
        name = field.name.replace("sweep_", "sweep.")
        assert name in rows, name
        if name not in ("env", "total_steps", "name"):  # no default, or one that is said in words
            assert rows[name][0] == written(field.default), name


def assert_named(metrics: Iterable[str], name: str) -> None:
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("runs.md", f"algorithms/{name}.md"))
    for metric in set(metrics) - {"episode/return_square"}:
        assert f"`{metric}`" in pages, f"{metric} is neither on the page of runs nor on that of {name}"


@pytest.mark.parametrize(
    ("name", "is_language"),
    [*((n, False) for n in agents.AGENTS if n not in OF_TOKENS or n == "ppo"), *((n, True) for n in OF_TOKENS)],
)
def test_page_of_an_algorithm_names_every_metric(name, is_language):
    config_class = agents.agent_module(name).Config
    options = {**OF_TOKENS[name], "model": Transformer()} if is_language else dict(OPTIONAL_METRICS.get(name, {}))
    if "anneal_steps" in {field.name for field in dataclasses.fields(config_class)}:
        options["anneal_steps"] = 1e6
    continuous = ("td3", "td3_bc")
    env = make_env("tokens/addition" if is_language else "Pendulum-v1" if name in continuous else "CartPole-v1")
    agent = agents.make_agent(config_class(**options), env)
    data = recorded(env) if agent.learns_from == "data" else None
    _, metrics = jax.eval_shape(agent.step, jax.eval_shape(agent.init, jax.random.key(0), data), data)
    assert_named({m for m in metrics if not m.startswith("reward/")}, name)


def recorded(env):
    """One step, as a data set."""
    seen, action = (
        np.zeros((1, *env.observation_space.shape), np.float32),
        np.asarray(env.action_space.sample(jax.random.key(0)))[None],
    )
    no = np.zeros(1, bool)
    return {"dataset": make_dataset(Transition(seen, None, action, np.zeros(1, np.float32), no, no, seen, None))}


def test_pages_name_every_metric_and_file_of_a_run(tmp_path):
    tiny = {**TINY, "out": str(tmp_path)}
    path = experiment.run(experiment.load(ROOT / "experiments/ppo_cartpole.toml", tiny)).path
    rows = [json.loads(line) for line in (path / "metrics.jsonl").open()]
    assert_named({key for row in rows for key in row}, "ppo")
    for file in path.iterdir():
        assert file.name in (ROOT / "docs/runs.md").read_text(), f"{file.name} is not described"


def test_pages_name_every_environment_suite_and_command():
    text = (ROOT / "docs/environments.md").read_text()
    for name in gymnax.EXCLUDED:
        assert name in text
    everything = "".join((ROOT / page).read_text() for page in PAGES)
    for command in cli.COMMANDS:
        assert f"rljax {command}" in everything, command
