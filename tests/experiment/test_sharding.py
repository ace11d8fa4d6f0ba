"""One lane over eight devices, against one device; lanes that do not fit."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from rljax.experiment import InputError, lanes, load
from rljax.experiment.lanes import build

PPO = {
    "env": "CartPole-v1",
    "total_steps": 1024,
    "seeds": [0],
    "evals": 1,
    "eval_episodes": 16,
    "algo.num_envs": 16,
    "algo.num_steps": 16,
    "algo.num_epochs": 1,
    "algo.num_minibatches": 2,
    "algo.hidden": [16],
}
SFT = {
    "env": "tokens/addition",
    "total_steps": 512,
    "seeds": [0, 1],
    "evals": 1,
    "eval_episodes": 8,
    "algo.name": "sft",
    "algo.batch_size": 8,
    "model.layers": 1,
    "model.width": 16,
    "model.mlp": 32,
    "model.heads": 2,
    "model.vocab": 24,
}
SCRIPT = '''
import json, sys
import jax, numpy as np
from rljax.experiment import load
from rljax.experiment.lanes import build

def largest_share(tree):
    """Bytes on the fullest device over those of the tree: 1 where each device holds all of it, 1 / devices where it is split."""
    held = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values()) / sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

def train(config, devices):
    program = build(load(None, config), devices=jax.devices()[:devices])
    states = program.init(program.lanes, program.data)
    first = jax.device_get(states.params)
    chunk = program.chunk.lower(program.lanes, states, program.data).compile()
    states, _, _ = chunk(program.lanes, states, program.data)
    returns = program.evaluate(program.lanes, states, program.data).returns
    params = jax.device_get(program.unpad(states.params))
    moved = max(float(np.abs(a[: len(b)] - b).max()) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(params)))
    share = [largest_share(x) for x in (states.params, states.opt_state)]
    world = [len({str(s.index) for s in x.addressable_shards}) for x in jax.tree.leaves(getattr(states, "world", ()))]
    return params, np.asarray(program.unpad(returns)), moved, share, world, "all-reduce" in chunk.as_text()

found = []
for config, mode in json.loads(sys.argv[1]):
    one, many = train(config, 1), train({**config, "shard": mode}, 8)
    apart = max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(one[0]), jax.tree.leaves(many[0])))
    found.append({"apart": apart, "moved": many[2], "share": many[3], "world": many[4], "sums": many[5],
                  "returns": float(np.abs(one[1] - many[1]).max())})
print(json.dumps(found))
'''


def test_eight_devices_learn_what_one_does():
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    cases = json.dumps([(PPO, "envs"), (SFT, "params")])
    done = subprocess.run([sys.executable, "-c", SCRIPT, cases], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    ppo, sft = json.loads(done.stdout.splitlines()[-1])
    for found in (ppo, sft):
        assert found["moved"] > 1e-4
        assert found["apart"] < found["moved"] / 50
        assert found["returns"] == 0.0
        assert found["sums"]  # gradients are summed over devices
    assert ppo["share"] == [1.0, 1.0]  # every device has all parameters
    assert set(ppo["world"]) == {8}  # and an eighth of the environments
    assert max(sft["share"]) < 0.2  # an eighth of the parameters and of Adam's moments, but for small vectors


def test_what_cannot_be_split_evenly_is_refused():
    with pytest.raises(InputError, match="shard: 15 environments, episodes or samples cannot be split evenly over 2 devices"):
        build(load(None, {**PPO, "shard": "envs", "algo.num_envs": 15, "algo.num_minibatches": 1}))
    assert load(None, PPO).hash == load(None, {**PPO, "shard": "envs"}).hash


def test_lanes_that_do_not_fit_into_memory_take_turns(monkeypatch):
    config = load(None, {**PPO, "seeds": [0, 1, 2, 3, 4, 5], "total_steps": 256})
    jax.config.update("jax_disable_most_optimizations", True)
    ends = []
    for free in (1e12, 1.0):
        monkeypatch.setattr(lanes, "bytes_free", lambda mesh, free=free: free)
        program, chunk = build(config).compiled()
        ends.append(chunk(program.lanes, program.init(program.lanes, program.data), program.data)[0].params)
        assert program.at_once == (3 if free > 1 else 1)
        assert lanes.bytes_needed(chunk) > 0
    jax.config.update("jax_disable_most_optimizations", False)
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_memory_is_known_of_the_host():
    assert 1e8 < lanes.bytes_free(build(load(None, PPO)).mesh) < 1e14
