"""Exported policies: their actions are those of the run, jax alone loads them, and wrong input is said in one line."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import yaml

from rljax import exported, make_agent, make_env
from rljax.agents import ppo
from rljax.cli import main
from rljax.envs import restart
from rljax.experiment import InputError, artifact, evaluate, export, lanes, load, report, run, trace
from tests.agents.test_every_agent import SMALL, TOKENS, data_of, env_of

TINY = {
    "env": "CartPole-v1",
    "total_steps": 640,
    "seeds": [0, 1],
    "evals": 1,
    "eval_episodes": 4,
    "algo.num_envs": 4,
    "algo.num_steps": 8,
    "algo.num_epochs": 1,
    "algo.num_minibatches": 1,
    "algo.hidden": [8, 48],
    "algo.normalize_observations": True,
}
CASES = {name: (config, lambda name=name: env_of(name)) for name, config in SMALL.items() if name not in TOKENS} | {
    "ppo": (ppo.Config(network="gru", hidden=(8, 8), normalize_observations=True), lambda: make_env("StatelessCartPole")),
    "a2c": (SMALL["a2c"], lambda: make_env("TicTacToe")),
    "dqn": (dataclasses.replace(SMALL["dqn"], network="minatar_cnn"), lambda: make_env("Breakout-MinAtar")),
    "sac": (SMALL["sac"], lambda: make_env("Pendulum-v1")),
}


@pytest.fixture(scope="module", autouse=True)
def fast_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def random_state(agent, data):
    """A train state of random numbers: nothing need be compiled to make it."""
    rng = np.random.default_rng(0)

    def fill(path, x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        numbers = rng.standard_normal(x.shape) * 0.3
        return jnp.asarray(numbers if "params" in path[0].name else np.abs(numbers), x.dtype)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(agent.init, jax.random.key(0), data))


@functools.cache
def written(name, tmp):
    """``(agent, state, environment, folder)`` of a case."""
    config, env_of_case = CASES[name]
    env = env_of_case()
    agent = make_agent(config, env)
    state = random_state(agent, data_of(name))
    folder = tmp / name
    folder.mkdir()
    artifact.write_policy(folder, agent, state, env, {"env": name, "agent": name})
    return agent, state, env, folder


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    return functools.partial(written, tmp=tmp_path_factory.mktemp("policies"))


def some_timesteps(env, batch):
    """Three steps of a batch, some of which begin an episode: of random observations and legal actions."""
    rng = np.random.default_rng(batch)
    reset = jax.vmap(env.reset)(jax.random.split(jax.random.key(batch), batch))[1]
    for step in range(3):
        first = np.asarray([step == 2 and i % 2 == 1 for i in range(batch)])
        observation = np.asarray(reset.observation)
        if observation.dtype == np.float32:
            observation = rng.standard_normal(observation.shape, np.float32)
        mask = None if reset.action_mask is None else rng.random(reset.action_mask.shape) < 0.7
        if mask is not None:
            mask[:, 0] = True
        reward = rng.standard_normal(batch).astype(np.float32) if step else np.zeros(batch, np.float32)
        yield reset.replace(observation=observation, action_mask=mask, reward=reward, terminated=first)


@pytest.mark.parametrize("name", CASES)
def test_actions_are_those_of_the_agent_bit_for_bit(name, write):
    agent, state, env, folder = write(name)
    policy = exported.load(folder)
    for batch, greedy in ((7, True), (1, False)):
        act = jax.jit(functools.partial(agent.act, greedy=greedy))
        carry, ours = None, None
        for step, timestep in enumerate(some_timesteps(env, batch)):
            key = jax.random.key(step)
            inputs = {"mask": timestep.action_mask, "reward": timestep.reward, "first": timestep.terminated}
            inputs = {k: v for k, v in inputs.items() if k in policy.about["inputs"]}
            carry, wanted = act(state, carry, timestep, key)
            action, ours = policy(timestep.observation, ours, key=key, greedy=greedy, **inputs)
            assert action.dtype == env.action_space.dtype and action.shape == (batch, *env.action_space.shape)
            np.testing.assert_array_equal(action, wanted)
            jax.tree.map(np.testing.assert_array_equal, list(ours), jax.tree.leaves(carry))
    more = {"a2c": {"mask"}, "ppo": {"first"}, "decision_transformer": {"first", "reward"}}
    assert policy.about["inputs"].keys() == {"observation"} | more.get(name, set())


# Of a run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(load(None, {**TINY, "out": str(tmp_path_factory.mktemp("runs"))}))


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory):
    return export(finished.path, 1, tmp_path_factory.mktemp("exported") / "policy")


@pytest.fixture(scope="module")
def episodes(finished, folder):
    """``(observations [T, episodes, 4], returns)`` of the run's last evaluation, played by the exported policy."""
    policy, e = exported.load(folder), finished.experiment
    env = make_env(e.env)
    step = jax.jit(jax.vmap(env.step))
    reset_key, play_key = jax.random.split(lanes.evaluation_key(e))
    state, timestep = jax.vmap(env.reset)(jax.random.split(reset_key, e.eval_episodes))
    returns, done, observations = np.zeros(e.eval_episodes), np.zeros(e.eval_episodes, bool), []
    while not done.all():
        _, env_key = jax.random.split(jax.random.fold_in(play_key, len(observations)))
        observations.append(np.asarray(timestep.observation))
        action, _ = policy(timestep.observation)
        state, timestep = step(jax.random.split(env_key, e.eval_episodes), state, action)
        returns += np.where(done, 0.0, timestep.reward)
        done |= np.asarray(timestep.done)
    return np.stack(observations), returns


def test_episodes_of_the_evaluation_are_played_as_the_run_played_them(finished, episodes):
    np.testing.assert_array_equal(episodes[1], evaluate(finished.path)[1].returns[1])
    assert episodes[1].mean() == finished.eval_returns[1, -1] != finished.eval_returns[0, -1]


WITHOUT_RLJAX = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rljax", "flax", "optax", "gymnax", "brax", "chex", "orbax", "gymnasium"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
file, *folders = sys.argv[1:]
sys.path.insert(0, folders[0])
import jax, numpy as np
from policy import load

results = {}
for folder, (name, seen) in zip(folders, np.load(file).items()):
    policy = load(folder)
    for batch in (1, 7):
        for greedy in (True, False):
            rows = seen.reshape(-1, batch, *seen.shape[1:])
            results[f"{name} {batch} {greedy}"] = np.stack([policy(x, key=jax.random.key(3), greedy=greedy)[0] for x in rows])
    observation = seen
    if name == "ppo":
        exec(open("README.md").read().split("```python")[1].split("```")[0])
np.savez(file, **results)
assert not {"rljax", "flax"} & set(sys.modules)
"""


def test_jax_alone_loads_it_and_acts_as_the_run_does(finished, folder, episodes, write, tmp_path):
    """In a process that can import nothing else of ours, with all that XLA optimises; the card's example runs there too."""
    of_sac, sac_state, _, sac_folder = write("sac")
    seen = [episodes[0].reshape(-1, 4)[:28], np.random.default_rng(0).standard_normal((28, 3), np.float32)]
    np.savez(tmp_path / "file.npz", ppo=seen[0], sac=seen[1])
    command = [sys.executable, "-c", WITHOUT_RLJAX, str(tmp_path / "file.npz")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*command, str(folder), str(sac_folder)], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    actions = np.load(tmp_path / "file.npz")
    jax.config.update("jax_disable_most_optimizations", False)
    pairs = {"ppo": finished.policy(1), "sac": (of_sac, sac_state)}
    for (name, (agent, state)), observations in zip(pairs.items(), seen, strict=True):
        for batch, greedy in itertools.product((1, 7), (True, False)):

            @jax.jit
            def act(observation, agent=agent, state=state, greedy=greedy):
                return agent.act(state, None, jax.vmap(restart)(observation), jax.random.key(3), greedy)[1]

            wanted = np.stack([act(x) for x in observations.reshape(-1, batch, observations.shape[1])])
            np.testing.assert_array_equal(actions[f"{name} {batch} {greedy}"], wanted)
    jax.config.update("jax_disable_most_optimizations", True)


def test_the_card_says_what_a_reader_asks(finished, folder):
    text = (folder / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    tags = yaml.safe_load(front)
    assert tags["library_name"] == "rljax" and {"ppo", "CartPole-v1"} <= set(tags["tags"])
    setting = finished.summary["settings"][0]
    for number in (finished.eval_returns[1, -1], setting["iqm"], setting["low"], setting["high"]):
        assert f"{number:,.2f}"[:-1] in body
    assert "; seeds: 2 |" in body and "lane 1, seed 1" in body
    info = json.loads((finished.path / "run.json").read_text())
    for word in (finished.experiment.hash, info["commit"], jax.__version__, info["command"], "@software{rljax", "us a decision"):
        assert word in body
    assert (finished.path / "config.toml").read_text().strip() in body
    about = json.loads((folder / "policy.json").read_text())
    assert 0 < about["latency"]["median_us"] <= about["latency"]["p99_us"]
    assert about["observation_space"]["shape"] == [4] and about["action_space"] == {"kind": "Discrete", "n": 2}


# Wrong input


def refused(function, *words, error=ValueError):
    with pytest.raises(error) as caught:
        function()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_inputs_that_do_not_fit_are_named_with_both_shapes(folder, write):
    policy = exported.load(folder)
    row = np.zeros((1, 4), np.float32)
    refused(lambda: policy(row[0]), "observation must be float32 [batch, 4], got float32 [4]")
    refused(lambda: policy(np.zeros((2, 5), np.float32)), "observation must be float32 [batch, 4], got float32 [2, 5]")
    refused(lambda: policy(np.zeros((2, 4))), "observation must be float32 [batch, 4], got float64 [2, 4]")
    refused(lambda: policy(row * np.nan), "observation must be finite, and is not")
    refused(lambda: policy([[1.0], [1.0, 2.0]]), "observation must be an array, and its rows are of different lengths")
    refused(lambda: jax.vmap(lambda x: policy(x)[0])(row[None]), "cannot stand inside jax.vmap", error=NotImplementedError)
    refused(lambda: policy(row[:0]), "observation must be float32 [batch, 4], got float32 [0, 4]")
    refused(lambda: policy(row, mask=np.ones((1, 2), bool)), "mask must be left out: this policy takes none, got bool [1, 2]")
    refused(lambda: policy(row, [row]), "carry must be what the call before returned, 0 arrays, got 1 arrays")
    refused(lambda: policy(row, greedy=False), "key is missing")
    refused(lambda: policy(row, greedy=False, key=jax.random.split(jax.random.key(0))), "key must be one", "got key<fry> [2]")
    masked = exported.load(write("a2c")[3])
    board = np.zeros((2, *masked.about["inputs"]["observation"]["shape"]), masked.about["inputs"]["observation"]["dtype"])
    refused(lambda: masked(board), "mask is missing: this policy takes bool [2, 9]")
    refused(lambda: masked(board, mask=np.ones((1, 9), bool)), "mask must be bool [2, 9], got bool [1, 9]")
    memory = exported.load(write("ppo")[3])
    seen = np.zeros((2, 2), np.float32)
    refused(lambda: memory(seen, ()), "carry must be what the call before returned, 1 arrays, got 0 arrays")
    refused(lambda: memory(seen[:1], memory.start(2)), "carry[0] must be float32 [1, 8], got float32 [2, 8]")
    for batch in ("a", -1, 0, 2.0, None, True):
        for one in (policy, memory):
            refused(lambda one=one, batch=batch: one.start(batch), f"batch must be a whole number, 1 or more, got {batch!r}")
    assert policy.start(np.int64(2)) == () and memory.start(np.int64(2))[0].shape == (2, 8)
    conditioned = exported.load(write("decision_transformer")[3])
    seen = np.zeros((1, *conditioned.about["inputs"]["observation"]["shape"]), np.float32)
    refused(lambda: conditioned(seen, conditioned.start(1)), "reward is missing: this policy takes float32 [1]")


def test_folders_that_cannot_be_read(folder, tmp_path):
    refused(lambda: exported.load(tmp_path), "holds no exported policy")
    broken = shutil.copytree(folder, tmp_path / "broken")
    about = json.loads((folder / "policy.json").read_text())
    (broken / "policy.json").write_text(json.dumps({**about, "format": 2}))
    refused(lambda: exported.load(broken), "has format 2, and this loader reads 1")
    (broken / "policy.json").write_text("{}")
    refused(lambda: exported.load(broken), "policy.json is damaged")
    (broken / "policy.json").write_bytes((folder / "policy.json").read_bytes()[:-5])
    refused(lambda: exported.load(broken), "policy.json is damaged")
    (broken / "policy.json").write_text("[" * 100_000)
    refused(lambda: exported.load(broken), "policy.json is damaged")
    kinds = dict.fromkeys(about["parameters"], "flot")
    wrong = [
        {"sha256": 3},
        {"parameters": []},
        {"parameters": kinds},
        {"parameters": {"x": "float32"}},
        {"carry": 3},
        {"carry": [1]},
    ]
    for change in [*wrong, {"inputs": 3}, {"inputs": {}}]:
        (broken / "policy.json").write_text(json.dumps({**about, **change}))
        refused(lambda: exported.load(broken), "policy.json is damaged")
    shutil.copy(folder / "policy.json", broken)
    content = bytearray((folder / "greedy.jaxexport").read_bytes())
    content[len(content) // 2] ^= 1
    (broken / "greedy.jaxexport").write_bytes(content)
    refused(lambda: exported.load(broken), "greedy.jaxexport is damaged")
    (broken / "greedy.jaxexport").write_bytes(content[: len(content) // 2])
    refused(lambda: exported.load(broken), "greedy.jaxexport is damaged")
    (broken / "greedy.jaxexport").unlink()
    refused(lambda: exported.load(broken), "greedy.jaxexport cannot be read")
    old = b"not a program"
    (broken / "greedy.jaxexport").write_bytes(old)
    about["sha256"]["greedy.jaxexport"] = hashlib.sha256(old).hexdigest()
    (broken / "policy.json").write_text(json.dumps({**about, "jax": "0.1"}))
    refused(lambda: exported.load(broken), f"was written with jax 0.1, and jax {jax.__version__} cannot read it")


def test_runs_and_targets_that_are_refused(finished, tmp_path, capsys):
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine.txt").write_text("kept")
    path = str(finished.path)
    assert main(["export", path, str(there)]) == 2
    assert "exists already, and nothing is written over" in capsys.readouterr().err
    assert [file.name for file in tmp_path.rglob("*")] == ["there", "mine.txt"]
    refused(lambda: export(path, 2, tmp_path / "new"), "--lane must be from 0 to 1, got 2", error=InputError)
    refused(lambda: export(path, 0, there / "mine.txt" / "new"), "cannot write", error=InputError)
    for name, place in (("file", "there/mine.txt"), ("full", "there"), ("itself", "itself")):
        (tmp_path / name).symlink_to(place)
        words = ["leads to itself"] if name == "itself" else [f"leads to {tmp_path / place}, exists already, and nothing"]
        refused(lambda name=name: export(path, 0, tmp_path / name), *words, error=InputError)
    failed = shutil.copytree(path, tmp_path / "failed")
    info = json.loads((failed / "run.json").read_text())
    info["failed"] = [{"lane": 0, "seed": 0, "step": 64, "reason": "non-finite parameters"}]
    (failed / "run.json").write_text(json.dumps(info))
    refused(
        lambda: export(failed, 0, tmp_path / "new"), "lane 0", "has failed at step 64: non-finite parameters", error=InputError
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_target_that_is_a_link_is_written_where_it_leads(tmp_path, is_there):
    if is_there:
        (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to("place")
    with artifact.appearing(tmp_path / "link") as folder:
        (folder / "policy.json").write_text("{}")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "place" / "policy.json").read_text() == "{}"
    assert sorted(os.listdir(tmp_path)) == ["link", "place"]


@dataclasses.dataclass(frozen=True)
class Acts:
    """An agent that acts as it is told to."""

    act: object
    start: object = staticmethod(lambda state, timestep: ())


def test_agents_that_cannot_be_exported(tmp_path):
    env = make_env("CartPole-v1")

    def write(act, **others):
        artifact.write_policy(tmp_path, Acts(lambda s, c, t, k, g: (c, act(t)), **others), jnp.zeros(3), env, {})

    refused(lambda: write(lambda t: (t.next_observation[:, 0] > 0).astype(int)), "it acts on next_observation of a time step")
    refused(
        lambda: write(lambda t: jnp.zeros(t.reward.shape, int) if t.reward.shape[0] > 3 else t.observation), "size of the batch"
    )
    begins = dict(start=lambda state, timestep: timestep.observation)
    refused(lambda: write(lambda t: t.observation, **begins), "what it remembers at first depends on what it sees")
    write(lambda t: jnp.zeros(t.reward.shape, int))  # sees nothing
    np.testing.assert_array_equal(exported.load(tmp_path)(np.ones((3, 4), np.float32))[0], [0, 0, 0])


# Language models


@pytest.fixture(scope="module")
def speaks(tmp_path_factory):
    """``(run directory, its export)`` of a model of characters."""
    overrides = {"env": "tokens/addition", "total_steps": 64, "seeds": [0, 1], "evals": 1, "eval_episodes": 4}
    overrides |= {"algo.name": "grpo", "algo.num_groups": 2, "algo.group_size": 2, "algo.num_minibatches": 1}
    overrides |= {"model.layers": 1, "model.width": 8, "model.heads": 2, "model.mlp": 16}
    path = run(load(None, {**overrides, "out": str(tmp_path_factory.mktemp("runs"))})).path
    return path, export(path, 1, tmp_path_factory.mktemp("exported") / "model")


def test_a_language_model_has_a_card_and_a_tokenizer(speaks):
    path, folder = speaks
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    tags = yaml.safe_load(front)
    assert tags == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rljax", "reinforcement-learning", "grpo"],
    }
    assert "Its training began with weights drawn at random." in body and "lane 1, seed 1" in body
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = make_env("tokens/addition").tokenizer
    assert tokenizer.encode("12+30=").ids == ours.encode("12+30=") and tokenizer.decode(ours.encode("12+30=")) == "12+30="
    assert tokenizer.get_vocab_size() == ours.vocab_size
    with pytest.raises(Exception, match="WordLevel"):
        tokenizer.encode("twelve")
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == tokenizer.token_to_id("<eos>")
    pretrained = SimpleNamespace(path="smollm2", lora_rank=4)
    source = SimpleNamespace(name="sft", hash="0123")
    experiment = SimpleNamespace(algo=SimpleNamespace(model=pretrained), start_from=source)
    text = artifact.language_model_card(report.read_run(path), 1, "after 64 steps", experiment)
    assert yaml.safe_load(text.split("---\n")[1])["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "by adapters of rank 4 that are merged here; it went on from the run `sft/0123`" in text
    refused(lambda: export(path, 1, folder), "exists already", error=InputError)


@pytest.mark.slow
def test_transformers_says_what_the_run_says(speaks):
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    torch = pytest.importorskip("torch", reason="the oracle is not installed")
    path, folder = speaks
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    episodes = [row for row in trace(path, 16, greedy=True)[1] if row["lane"] == 1]
    assert len(episodes) == 16
    for row in episodes:
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        said = model.generate(ids, do_sample=False, max_new_tokens=len(row["completion"]))[0, ids.shape[1] :]
        assert tokenizer.decode(said, skip_special_tokens=True) == row["completion"]
