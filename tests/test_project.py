"""The files around the code: citation, changelog, pinned versions, what a clone may not hold, and the start of the command."""

import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import rljax
from rljax.experiment import report

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEST_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/pytest"
RUN_COMMAND = "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/rljax run experiments/ppo_cartpole.toml"


def test_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == rljax.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["title"] == report.CITATION_TITLE
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_changelog_and_readme_name_this_version():
    assert re.search(rf"^## {re.escape(rljax.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
    readme = (ROOT / "README.md").read_text()
    assert f"version = {{{rljax.__version__}}}" in readme
    assert f"title   = {{{{{report.CITATION_TITLE}}}}}" in readme


@pytest.mark.parametrize("command", [RUN_COMMAND, TEST_COMMAND])
def test_readme_starts_with_the_commands_that_ci_runs(command):
    assert f"```\n{command}\n```" in (ROOT / "README.md").read_text()


def constraints() -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_constraints_pin_every_direct_dependency_once(version):
    environment = {"python_version": version}
    pins: dict[str, list[str]] = {}
    for pin in constraints():
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        if pin.marker is None or pin.marker.evaluate(environment):
            pins.setdefault(canonical(pin.name), []).append(specifier.version)
    assert all(len(versions) == 1 for versions in pins.values()), pins
    extras = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *extras["dev"], *extras["docs"]]:
        wanted = Requirement(line)
        assert canonical(wanted.name) in pins, f"{wanted.name} is not in constraints.txt"
        assert wanted.specifier.contains(pins[canonical(wanted.name)][0]), line


def tracked_files() -> list[Path]:
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def test_tracked_files_hold_no_path_of_a_machine_and_no_registry_address():
    forbidden = re.compile(
        r"(?<![\w.~-])/(?:root|work|home|Users|private)/\w|(?<![\w.])/tmp/\w"
        r"|pypi[.]org|pythonhosted[.]org|npmjs[.]org|index[-]url|find[-]links",
    )
    for path in tracked_files():
        if path.suffix in (".png", ".gif"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not forbidden.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_tracked_files_are_small():
    for path in tracked_files():
        assert path.stat().st_size < 1_000_000, path


def test_help_is_fast_and_does_not_start_jax():
    seconds = []
    for _ in range(3):  # the fastest of three, since other processes may hold the cores
        began = time.perf_counter()
        result = subprocess.run([sys.executable, "-m", "rljax", "--help"], capture_output=True, text=True)
        seconds.append(time.perf_counter() - began)
        assert result.returncode == 0
        assert "COMMAND" in result.stdout
    assert min(seconds) < 0.5
    code = "import sys, rljax.cli\ntry: rljax.cli.main(['--help'])\nexcept SystemExit: pass\nprint('jax' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "False"


def test_version_of_the_command():
    result = subprocess.run([sys.executable, "-m", "rljax", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"rljax {rljax.__version__}\n"
