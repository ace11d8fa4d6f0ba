"""Gymnasium both ways. `Clock` shows in its observations all that happened to it, so that every field can be predicted."""

import functools
import json
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from jax.sharding import Mesh, PartitionSpec

from rljax.agents import Agent, dqn, grpo, make_agent
from rljax.envs import (
    Box,
    Discrete,
    EnvironmentFailed,
    MultiDiscrete,
    TimeLimit,
    check,
    env_parameters,
    from_gymnasium,
    from_gymnasium_vector,
    group,
    host,
    make_env,
    to_gymnasium,
    to_gymnasium_vector,
    vectorize,
)
from rljax.envs import gymnasium as gymnasium_adapter
from rljax.experiment import evaluate_agent

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here


class Clock(gymnasium.Env):
    """Observes ``(seed mod 997, steps, last action)`` and earns the steps; ends after 3 to 6, by termination for even seeds."""

    observation_space = spaces.Box(-1, 1000, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.closed = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.steps = seed % 997, 0
        return np.array([self.seed, 0, -1]), {}

    def step(self, action):
        self.steps += 1
        ended = self.steps == length(self.seed)
        return (
            np.array([self.seed, self.steps, action]),
            self.steps,
            ended and self.seed % 2 == 0,
            ended and self.seed % 2 == 1,
            {},
        )

    def close(self):
        self.closed = True


def length(seed):
    return 3 + seed % 4


def clock():
    return from_gymnasium(Clock, "clock")


def played(envs, key, num_steps=40):
    """``(state, first time step, actions, time steps)`` under actions that alternate."""
    actions = (jnp.arange(num_steps)[:, None] + jnp.arange(envs.num_envs)) % 2
    state, first = envs.reset(key)

    def step(state, x):
        return envs.step(x[0], state, x[1])

    state, steps = jax.lax.scan(step, state, (jax.random.split(key, num_steps), actions))
    return state, first, actions, steps


def test_every_field_is_that_of_a_plain_loop():
    env = clock()
    check(env)
    _, first, actions, steps = jit(lambda key: played(vectorize(env, 3), key))(jax.random.key(0))
    ends = 0
    for copy in range(3):
        seed, count, total = first.observation[copy, 0], 0, 0
        np.testing.assert_array_equal(first.observation[copy, 1:], [0, -1])
        for t in range(40):
            count, total = count + 1, total + count + 1
            step = jax.tree.map(lambda x, t=t, copy=copy: x[t, copy], steps)
            np.testing.assert_array_equal(step.next_observation, [seed, count, actions[t, copy]])
            assert step.reward == count
            is_last = count == length(int(seed))
            assert (bool(step.terminated), bool(step.truncated)) == (is_last and seed % 2 == 0, is_last and seed % 2 == 1)
            assert (step.info["episode_return"], step.info["episode_length"]) == (total, count)
            if is_last:
                assert step.observation[0] != seed
                np.testing.assert_array_equal(step.observation[1:], [0, -1])
                seed, count, total, ends = step.observation[0], 0, 0, ends + 1
            else:
                np.testing.assert_array_equal(step.observation, step.next_observation)
    assert ends > 15
    assert steps.terminated.any()
    assert steps.truncated.any()
    # A copy is used again and again: one for each of three, and the one that said what its spaces are is among them.
    assert env.copies.counts == (3, 0)
    # The same key, the same episodes.
    again = jit(lambda key: played(vectorize(clock(), 3), key))(jax.random.key(0))[3]
    np.testing.assert_array_equal(again.observation, steps.observation)


def test_lanes_reach_the_host_in_one_call_and_devices_each_in_theirs(monkeypatch):
    calls = []
    step = host.Copies.step

    def counted(self, handles, steps, actions):
        calls.append(len(handles))
        return step(self, handles, steps, actions)

    monkeypatch.setattr(host.Copies, "step", counted)
    envs = vectorize(clock(), 3)
    keys = jax.random.split(jax.random.key(1), 4)

    def lane(key):
        return played(envs, key, 12)[3]

    mesh = Mesh(np.asarray(jax.devices()[:2]), ("lanes",))
    specs = PartitionSpec("lanes")
    sharded = jit(jax.shard_map(jax.vmap(lane), mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))(keys)
    jax.block_until_ready(sharded)
    assert calls == [2 * 3] * (2 * 12)
    alone = [jit(lane)(key) for key in keys[:2]]
    for i, one in enumerate(alone):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), sharded, one)


def test_other_devices_than_cpus_call_alike(monkeypatch):
    """They take jax's own callback, which works on a CPU too."""
    play = jit(lambda key: played(vectorize(clock(), 3), key, 12)[3])
    ours = play(jax.random.key(0))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    theirs = jit(lambda key: played(vectorize(clock(), 3), key, 12)[3])(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_groups_start_from_one_seed_and_pools_from_few():
    envs = group(clock(), 2, 3, reset_pool=2)
    _, first, _, steps = jit(lambda key: played(envs, key))(jax.random.key(3))
    starts = np.asarray(first.observation[:, 0]).reshape(2, 3)
    assert (starts == starts[:, :1]).all()
    assert len(np.unique(steps.observation[..., 0])) <= 2
    fresh = jit(lambda key: played(group(clock(), 2, 3), key))(jax.random.key(3))
    assert len(np.unique(fresh[3].observation[..., 0])) > 6
    seeds = np.asarray(fresh[3].observation[..., 0]).reshape(40, 2, 3)
    assert (seeds == seeds[:, :, :1]).all()  # alike lengths: they end together, and begin together


def test_a_time_limit_around_it_cuts_and_frees_the_copy():
    env = TimeLimit(clock(), 2)
    _, _, _, steps = jit(lambda key: played(vectorize(env, 2), key, 6))(jax.random.key(0))
    np.testing.assert_array_equal(steps.truncated, np.tile([[False], [True]], (3, 2)))
    np.testing.assert_array_equal(steps.next_observation[..., 1], np.tile([[1], [2]], (3, 2)))
    np.testing.assert_array_equal(steps.observation[..., 1], np.tile([[1], [0]], (3, 2)))
    assert env.copies.counts == (2, 0)


def test_a_state_that_has_lost_its_copy_is_cut_honestly():
    env = clock()
    envs = vectorize(env, 2)
    state, _ = jit(envs.reset)(jax.random.key(0))
    step = jit(envs.step)
    after, _ = step(jax.random.key(1), state, jnp.array([0, 1]))
    for lost in (state, jax.tree.map(jnp.copy, after).replace(env=after.env.replace(handle=jnp.array([-7, -8])))):
        # One was stepped elsewhere already, and the other is of a process that has gone.
        new_state, new = step(jax.random.key(2), lost, jnp.array([0, 1]))
        assert new.truncated.all()
        assert not new.terminated.any()
        np.testing.assert_array_equal(new.reward, 0.0)
        np.testing.assert_array_equal(new.next_observation, lost.env.observation)
        np.testing.assert_array_equal(new.observation[:, 1:], [[0, -1]] * 2)
        _, later = step(jax.random.key(3), new_state, jnp.array([0, 1]))
        assert not later.truncated.any()
        np.testing.assert_array_equal(later.reward, 1.0)


def acts(choose):
    """An agent that knows what to do."""
    return Agent(
        init=lambda key, data=None: (),
        step=lambda state, data=None: (state, {}),
        start=lambda state, timestep: (),
        act=lambda state, carry, timestep, key, greedy: ((), choose(timestep.observation).astype(jnp.int32)),
        env_steps=0,
    )


def test_evaluations_play_whole_episodes_and_give_the_copies_back():
    env = clock()
    agent = acts(lambda x: x[:, 0] * 0)
    evaluate = jit(jax.vmap(lambda key: evaluate_agent(agent, env, (), key, 8, 5)))
    result = evaluate(jax.random.split(jax.random.key(0), 2))
    lengths = np.asarray(result.lengths)
    np.testing.assert_array_equal(result.returns, lengths * (lengths + 1) / 2)
    assert set(lengths.reshape(-1).tolist()) <= {3, 4, 5}
    assert not result.finished.all()  # six steps are too many
    assert env.copies.counts == (0, 16)  # those too that were not finished
    evaluate(jax.random.split(jax.random.key(0), 2))
    assert env.copies.counts == (0, 16)


def test_lanes_that_would_share_a_copy_are_refused():
    env = clock()
    with pytest.raises(ValueError, match="vmap would step one copy on the host several times"):
        jax.vmap(lambda x: evaluate_agent(acts(lambda o: o[:, 0] * 0 + x), env, (), jax.random.key(0), 2, 5))(jnp.arange(2))


def test_a_policy_for_cartpole_earns_the_same_in_both():
    balance = acts(lambda x: x @ jnp.array([0.1, 0.5, 3.0, 1.5]) > 0)
    for name in ("CartPole-v1", "gymnasium/CartPole-v1"):
        env = make_env(name)
        result = jit(lambda key, env=env: evaluate_agent(balance, env, (), key, 8, 1000))(jax.random.key(0))
        np.testing.assert_array_equal(result.returns, 500.0)
        np.testing.assert_array_equal(result.lengths, 500)
        assert result.finished.all()


def test_closed_when_nobody_needs_it():
    made = []

    def make():
        made.append(Clock())
        return made[-1]

    env = from_gymnasium(make, "clock")
    jit(vectorize(env, 3).reset)(jax.random.key(0))
    assert [one.closed for one in made] == [False] * 3
    host.close(env)
    assert [one.closed for one in made] == [True] * 3
    made.clear()
    from_gymnasium(make, "clock")  # and dropped
    assert made[0].closed


class Strict(gymnasium.Env):
    """Takes actions of its own space only, and shows its observation space at its last point."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        return self.shown(), {}

    def shown(self):
        space = self.observation_space
        last = {spaces.Discrete: lambda: space.start + space.n - 1, spaces.MultiDiscrete: lambda: space.start + space.nvec - 1}
        return last.get(type(space), lambda: np.ones(space.shape, space.dtype))()

    def step(self, action):
        assert action in self.action_space, f"{action!r}"
        return self.shown(), float(np.sum(action)), False, False, {}


@pytest.mark.parametrize(
    ("theirs", "ours", "seen"),
    [
        (spaces.Discrete(3, start=5), Discrete(3), 2),
        (spaces.MultiDiscrete([2, 3], start=[1, 4]), Box(0.0, 1.0, (5,)), [0, 1, 0, 0, 1]),
        (spaces.MultiBinary([2, 2]), Box(0.0, 1.0, (2, 2)), [[1, 1], [1, 1]]),
        (spaces.Box(-1, 2, (2,), np.float64), Box(-1.0, 2.0, (2,)), [1, 1]),
        (spaces.Box(0, 255, (2, 2, 1), np.uint8), Box(0, 255, (2, 2, 1), jnp.uint8), [[[1], [1]], [[1], [1]]]),
        (spaces.Box(-9, 9, (1,), np.int64), Box(-9, 9, (1,), jnp.int32), [1]),
    ],
)
def test_observations(theirs, ours, seen):
    env = from_gymnasium(lambda: Strict(theirs, spaces.Discrete(2)))
    assert (type(env.observation_space), env.observation_space.shape) == (type(ours), ours.shape)
    observation = jit(env.reset)(jax.random.key(0))[1].observation
    assert observation.dtype == ours.dtype
    np.testing.assert_array_equal(observation, seen)
    assert env.observation_space.contains(observation)


@pytest.mark.parametrize(
    ("theirs", "ours", "action", "taken"),
    [
        (spaces.Discrete(3, start=5), Discrete(3), 2, 7),
        (spaces.MultiDiscrete([[2, 3]], start=[[1, 4]]), MultiDiscrete((2, 3)), [1, 2], 8),
        (spaces.MultiBinary(3), MultiDiscrete((2, 2, 2)), [1, 0, 1], 2),
        (spaces.Box(-1, 2, (2, 1), np.float64), Box(-1.0, 2.0, (2, 1)), [[-1.0], [1.5]], 0.5),
    ],
)
def test_actions(theirs, ours, action, taken):
    env = from_gymnasium(lambda: Strict(spaces.Discrete(1), theirs))
    assert (type(env.action_space), env.action_space.shape) == (type(ours), ours.shape)

    @jit
    def step(key):
        state, _ = env.reset(key)
        return env.step(key, state, jnp.asarray(action))[1].reward

    reward = step(jax.random.key(0))
    host.raise_failure(env)
    assert reward == taken


@pytest.mark.parametrize("config", [dqn, grpo], ids=lambda module: module.__name__)
def test_agents_learn_on_the_host(config):
    settings = {
        dqn: dict(num_envs=2, num_steps=4, batch_size=4, buffer_size=64, learning_starts=8, anneal_steps=100.0),
        grpo: dict(num_groups=2, group_size=2, num_steps=6, num_epochs=1, num_minibatches=1),
    }
    env = clock()
    agent = make_agent(config.Config(hidden=(4,), **settings[config]), env)

    @jit
    @jax.vmap
    def two(key):
        return jax.lax.scan(lambda state, _: agent.step(state), agent.init(key), length=3)

    _, metrics = two(jax.random.split(jax.random.key(0), 2))
    returns, count = (np.asarray(x).sum() for x in metrics["episode/return"])
    lengths, _ = (np.asarray(x).sum() for x in metrics["episode/length"])
    assert count > 0
    assert 3 <= lengths / count <= 6
    assert 6 <= returns / count <= 21
    assert env.copies.counts[0] == (0 if config is grpo else 4)  # whole episodes give theirs back


def faulty(how):
    class Faulty(Clock):
        def reset(self, *, seed=None, options=None):
            if how == "reset":
                raise RuntimeError("no power")
            return super().reset(seed=seed)

        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            if self.steps == 2:
                if how == "raise":
                    raise RuntimeError("the motor\nis broken")
                if how == "exit":
                    raise SystemExit(0)
                observation = {"nan": np.array([np.nan, 0, 0]), "shape": np.zeros(2)}.get(how, observation)
                reward = np.inf if how == "inf" else reward
            return observation, reward, terminated, truncated, info

        def close(self):
            raise RuntimeError("nobody plays it any more")

    return Faulty


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", r"clock: copy 0 of 2, step 2 of the episode with seed \d+: RuntimeError: the motor is broken$"),
        ("exit", r"clock: copy 0 of 2, step 2 of the episode with seed \d+: SystemExit: 0$"),
        ("nan", r"clock: copy 0 of 2, step 2 .*: the observation is not finite$"),
        ("inf", r"clock: copy 0 of 2, step 2 .*: the reward is inf$"),
        ("shape", r"clock: copy 0 of 2, step 2 .*: the observation has shape \[2\], and its space \[3\]$"),
        ("reset", r"clock: copy 0 of 2, reset with seed \d+: RuntimeError: no power$"),
    ],
)
def test_what_fails_is_named_when_the_program_has_returned(how, said):
    env = from_gymnasium(faulty(how), "clock")
    steps = jit(lambda key: played(vectorize(env, 2), key, 4))(jax.random.key(0))[3]
    assert steps.truncated[-1].all()  # nothing is played after it
    with pytest.raises(EnvironmentFailed, match=said):
        host.raise_failure(env)
    host.raise_failure(env)  # once
    assert env.copies.counts == (0, 0)


class Clocks(gymnasium.vector.VectorEnv):
    """`Clock`, many of them, in any mode. A copy that begins by itself has the next seed."""

    def __init__(self, num_envs=1, mode="SameStep", seeds="list"):
        self.num_envs, self._seeds = num_envs, seeds
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode(mode)}
        self.mode = self.metadata["autoreset_mode"].name
        self.single_observation_space, self.single_action_space = Clock.observation_space, Clock.action_space
        self.clocks, self.ended = [Clock() for _ in range(num_envs)], np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        if self._seeds == "mixed":  # whatever it gets, the generator is one
            self.np_random = np.random.default_rng(seed)
            seeds = self.np_random.integers(997, size=self.num_envs)
        elif self._seeds == "one":
            seeds = [*range(seed, seed + self.num_envs)] if seed is not None else [c.seed + 1 for c in self.clocks]
        elif self._seeds == "array":
            assert isinstance(seed, np.ndarray)
            seeds = np.zeros(self.num_envs, int)
            seeds[mask] = seed
        else:
            assert isinstance(seed, list)
            seeds = seed
        if mask.all():
            self.seen = np.zeros((self.num_envs, 3))
        for i in np.flatnonzero(mask):
            self.seen[i] = self.clocks[i].reset(seed=int(seeds[i]))[0]
        self.ended[mask] = False
        return self.seen.copy(), {}

    def step(self, actions):
        assert actions.shape == (self.num_envs,)
        assert self.mode != "DISABLED" or not self.ended.any()
        rewards, flags, infos = np.zeros(self.num_envs), np.zeros((2, self.num_envs), bool), {}
        for i, clock in enumerate(self.clocks):
            self.seen[i], rewards[i], *flags[:, i], _ = clock.step(actions[i])
            self.ended[i] = flags[:, i].any()
            if self.ended[i] and self.mode == "SAME_STEP":
                infos.setdefault("final_obs", np.full(self.num_envs, None))[i] = self.seen[i].copy()
                self.seen[i] = clock.reset(seed=clock.seed + 1)[0]
        return self.seen, rewards, flags[0], flags[1], infos  # its own array, as fast simulators return it

    def close_extras(self):
        for clock in self.clocks:
            clock.close()


def clocks(mode, seeds="list"):
    return from_gymnasium_vector(functools.partial(Clocks, mode=mode, seeds=seeds), "clocks")


@pytest.fixture(scope="module")
def singly():
    return jit(lambda key: played(vectorize(clock(), 3), key, 20)[3])(jax.random.key(0))


def test_a_vector_environment_that_is_reset_by_us_plays_as_its_copies_would(singly):
    env = clocks("Disabled")
    check(env)
    together = jit(lambda key: played(vectorize(env, 3), key, 20)[3])(jax.random.key(0))
    assert singly.done.sum() > 6
    jax.tree.map(np.testing.assert_array_equal, together, singly)
    assert env.copies.counts == (3, 2)
    host.close(env)
    assert env.copies.counts == (0, 0)


def test_a_vector_environment_that_goes_on_by_itself():
    """The first episodes are those of our seeds, and the ones after them its own."""
    _, first, actions, steps = jit(lambda key: played(vectorize(clocks("SameStep"), 3), key, 20))(jax.random.key(0))
    seeds, counts = np.asarray(first.observation[:, 0]).copy(), np.zeros(3)
    ends, together = 0, 0
    for t in range(20):
        counts += 1
        step = jax.tree.map(lambda x, t=t: np.asarray(x[t]), steps)
        np.testing.assert_array_equal(step.next_observation, np.stack([seeds, counts, actions[t]], 1))
        np.testing.assert_array_equal(step.reward, counts)
        done = counts == 3 + seeds % 4
        np.testing.assert_array_equal(step.terminated, done & (seeds % 2 == 0))
        np.testing.assert_array_equal(step.truncated, done & (seeds % 2 == 1))
        np.testing.assert_array_equal(step.info["episode_length"], counts)
        if done.all():  # all begin together, as at the start
            seeds, together = step.observation[:, 0].copy(), together + 1
        seeds[done] = seeds[done] + (0 if done.all() else 1)
        counts[done] = 0
        np.testing.assert_array_equal(step.observation[done], np.stack([seeds, counts, -np.ones(3)], 1)[done])
        ends += done.sum()
    assert ends > 6
    assert together < 2


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_evaluations_play_first_episodes_of_vector_environments(mode):
    env, agent = clocks(mode), acts(lambda x: x[:, 0] * 0)
    keys = jax.random.split(jax.random.key(0), 2)
    result, alone = (jit(jax.vmap(lambda key, e=e: evaluate_agent(agent, e, (), key, 8, 5)))(keys) for e in (env, clock()))
    jax.tree.map(np.testing.assert_array_equal, result, alone)
    assert not result.finished.all()
    assert env.copies.counts == (0, 2 + 16)  # one call for both lanes, and what said the spaces


@pytest.mark.parametrize("seeds", ["list", "array", "one", "mixed"])
def test_seeds_as_a_vector_environment_takes_them(seeds):
    env = clocks("Disabled", seeds)
    play = jit(lambda key: played(vectorize(env, 3), key, 8)[1:])
    first, _, steps = play(jax.random.key(0))
    host.raise_failure(env)
    starts = np.asarray(first.observation[:, 0])
    if seeds in ("one", "mixed"):
        assert seeds == "mixed" or (np.diff(starts) % 997 == 1).all()
        with pytest.raises(ValueError, match=r"algo.group_size: .* clocks takes one seed for all its copies"):
            group(env, 1, 2)
    else:
        assert len(np.unique(starts)) == 3
        twins = jit(group(env, 2, 2).reset)(jax.random.key(1))[1].observation[:, 0]
        np.testing.assert_array_equal(twins[::2], twins[1::2])
    assert steps.done.any()
    jax.tree.map(np.testing.assert_array_equal, play(jax.random.key(0))[0], first)


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_a_row_of_a_vector_environment_that_was_stepped_elsewhere_is_cut(mode):
    env = clocks(mode)
    envs = vectorize(env, 3)
    state, _ = jit(envs.reset)(jax.random.key(0))
    step = jit(envs.step)
    after, _ = step(jax.random.key(1), state, jnp.zeros(3, jnp.int32))
    _, new = step(jax.random.key(2), state, jnp.zeros(3, jnp.int32))  # all of them: begun anew together
    assert new.truncated.all()
    np.testing.assert_array_equal(new.next_observation, state.env.observation)
    np.testing.assert_array_equal(new.observation[:, 1:], [[0, -1]] * 3)
    state, _ = jit(envs.reset)(jax.random.key(0))
    after, _ = step(jax.random.key(1), state, jnp.zeros(3, jnp.int32))
    mixed = after.replace(env=after.env.replace(handle=after.env.handle.at[1].set(-7)))
    final, new = step(jax.random.key(2), mixed, jnp.zeros(3, jnp.int32))
    np.testing.assert_array_equal(new.truncated, [False, True, False])
    np.testing.assert_array_equal(new.reward, [2, 0, 2])
    if mode == "SameStep":  # nothing begins its row alone
        with pytest.raises(EnvironmentFailed, match=r"clocks: copy 1 of 3, step 1 of .*: the episode has not ended, .* its own$"):
            host.raise_failure(env)
    else:
        np.testing.assert_array_equal(new.observation[1, 1:], [0, -1])
        host.raise_failure(env)
        _, later = step(jax.random.key(3), final, jnp.zeros(3, jnp.int32))
        np.testing.assert_array_equal(later.reward[1:2], 1.0)


def test_gymnasiums_own_vector_environment_plays_as_its_copies_would():
    """Alike with a seed for each: to the last where we reset, and to the first end where it does."""

    def several(num_envs, mode):
        return gymnasium.make_vec("CartPole-v1", num_envs, "sync", vector_kwargs={"autoreset_mode": mode})

    def play(env):
        return jit(lambda key: played(vectorize(env, 4), key, 120)[3])(jax.random.key(0))

    alone = play(make_env("gymnasium/CartPole-v1"))
    assert alone.done.any(0).all()
    jax.tree.map(np.testing.assert_array_equal, play(from_gymnasium_vector(lambda n: several(n, "Disabled"))), alone)
    by_itself = play(from_gymnasium_vector(lambda n: several(n, "SameStep")))
    first = np.cumsum(np.asarray(alone.done), 0) - np.asarray(alone.done) == 0
    for name in ("next_observation", "reward", "terminated", "truncated"):
        ours, theirs = (np.asarray(getattr(x, name))[first] for x in (by_itself, alone))
        np.testing.assert_array_equal(ours, theirs)
    assert by_itself.done.sum() > 4
    assert np.abs(np.asarray(by_itself.observation)[np.asarray(by_itself.done)]).max() <= 0.05


@pytest.fixture
def registered():
    gymnasium.register("Clocks-v0", vector_entry_point=Clocks)
    gymnasium.register("Late-v0", vector_entry_point=lambda num_envs: Clocks(num_envs, "NextStep"))
    gymnasium.register("Mute-v0", vector_entry_point=mute)
    yield
    for name in ("Clocks-v0", "Late-v0", "Mute-v0"):
        del gymnasium.registry[name]


def mute(num_envs=1, autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP):
    env = Clocks(num_envs, autoreset_mode)
    if autoreset_mode is gymnasium.vector.AutoresetMode.DISABLED:
        del env.metadata["autoreset_mode"]
    return env


@pytest.mark.filterwarnings("ignore:.*AutoresetMode metadata")
def test_names_that_are_vector_environments_only(registered):
    assert env_parameters("gymnasium/Clocks-v0") == {"mode": "SameStep", "seeds": "list"}
    env = make_env("gymnasium/Clocks-v0", mode="Disabled")
    assert (env.observation_space.shape, env.action_space) == ((3,), Discrete(2))
    assert env_parameters("gymnasium/Mute-v0") == {"autoreset_mode": "NextStep"}
    assert make_env("gymnasium/Mute-v0", autoreset_mode="SameStep").action_space == Discrete(2)
    for name, params, said in (
        ("Mute-v0", {}, r"'gymnasium/Mute-v0' has autoreset mode NextStep, .*: set env_params.autoreset_mode = \"SameStep\" or"),
        ("Late-v0", {}, r"'gymnasium/Late-v0' has autoreset mode NextStep, .*: it takes no autoreset_mode$"),
        ("Mute-v0", {"autoreset_mode": "Disabled"}, r"its metadata has no autoreset_mode$"),
        ("Mute-v0", {"autoreset_mode": "never"}, r"autoreset_mode must be one of NextStep, SameStep, Disabled, got 'never'"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            make_env(f"gymnasium/{name}", **params)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="make it with autoreset_mode SameStep or Disabled, if it takes one"):
        from_gymnasium_vector(lambda n: gymnasium.make_vec("CartPole-v1", n), "poles")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", r"clocks: step 2 of 2 copies together: RuntimeError: no power$"),
        ("nan", r"clocks: copy 1 of 2, step 2 of the episode with seed \d+: the observation is not finite$"),
        ("inf", r"clocks: copy 1 of 2, step 2 of the episode with seed \d+: the reward is inf$"),
        ("few", r"clocks: step 2 of 2 copies together: it returned values of 1 copies$"),
        ("made", r"clocks: 2 copies were asked for, and 1 were made$"),
        ("reset", r"clocks: reset of 2 of 2 copies together: RuntimeError: no power$"),
    ],
)
def test_what_fails_in_a_vector_environment_is_named(how, said):
    class Faulty(Clocks):
        def reset(self, *, seed=None, options=None):
            if how == "reset" and self.num_envs > 1:
                raise RuntimeError("no power")
            return super().reset(seed=seed, options=options)

        def step(self, actions):
            observations, rewards, *others = super().step(actions)
            if self.clocks[0].steps == 2:
                if how == "raise":
                    raise RuntimeError("no power")
                observations[1] += np.nan if how == "nan" else 0
                rewards[1] += np.inf if how == "inf" else 0
                observations = observations[:1] if how == "few" else observations
            return observations, rewards, *others

    env = from_gymnasium_vector(lambda n: Faulty(1 if how == "made" else n), "clocks")
    steps = jit(lambda key: played(vectorize(env, 2), key, 3)[3])(jax.random.key(0))
    assert steps.truncated[-1].all()
    with pytest.raises(EnvironmentFailed, match=said):
        host.raise_failure(env)
    assert env.copies.counts == (0, 0)


def test_a_run_in_a_vector_environment(registered, tmp_path):
    from rljax.experiment import load, run

    (tmp_path / "clocks.toml").write_text(
        'env = "gymnasium/Clocks-v0"\nseeds = [0, 1]\ntotal_steps = 64\nevals = 1\neval_episodes = 4\neval_max_steps = 8\n'
        "[env_params]\nmode = 'Disabled'\n"
        "[algo]\nname = 'ppo'\nnum_envs = 4\nnum_steps = 8\nhidden = [4]\nnum_epochs = 1\nnum_minibatches = 1\n"
    )
    run(load(tmp_path / "clocks.toml", {"out": str(tmp_path / "runs")}))
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    lengths = [row["eval/length"] for row in rows if "eval/length" in row]
    assert len(lengths) == 4
    assert all(3 <= length <= 6 for length in lengths)


def test_the_first_of_the_copies_that_is_wrong_is_named():
    """All are checked at once, after all were stepped."""

    class Odd(Clock):
        fault = None

        def step(self, action):
            observation, reward, *others = super().step(action)
            if self.fault == "raise":
                raise RuntimeError("no power")
            return observation + (np.nan if self.fault == "nan" else 0), reward, *others

    for faults, said in (((2, "nan"), (3, "raise")), "copy 2 .* not finite"), (((1, "raise"), (2, "nan")), "copy 1 .* no power"):
        made = []
        env = from_gymnasium(lambda made=made: made.append(Odd()) or made[-1], "clock")
        handles, _ = env.copies.begin(np.arange(4, dtype=np.uint32), np.ones(4, bool), np.full(4, -1, np.int32))
        for row, fault in faults:
            made[row].fault = fault
        known = env.copies.step(handles, np.zeros(4, np.int32), np.zeros(4, np.int32))[4]
        assert known.sum() in (0, 1)
        with pytest.raises(EnvironmentFailed, match=said):
            host.raise_failure(env)


@pytest.mark.parametrize("space", [spaces.Tuple([spaces.Discrete(2)]), spaces.Dict(a=spaces.Discrete(2))])
def test_composite_actions_are_refused_with_a_way_out(space):
    said = rf"its actions are {type(space).__name__}, and must be .*; wrap it in a gymnasium.ActionWrapper whose action_space"
    with pytest.raises(ValueError, match=said):
        from_gymnasium(lambda: Strict(spaces.Discrete(1), space))


def test_an_observation_outside_of_its_space_is_not_taken_for_another():
    for space, outside in ((gymnasium.spaces.Discrete(4, start=1), 5), (gymnasium.spaces.MultiDiscrete([2, 3]), [2, 1])):
        _, see = gymnasium_adapter._observations(space, "env")
        with pytest.raises(ValueError, match=r"the observation .* is outside of"):
            see([outside])


def test_ours_refuses_what_is_no_action():
    env = to_gymnasium("CartPole-v1")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"action must be in Discrete\(2\), got 7"):
        env.step(7)
    with pytest.raises(ValueError, match="gravity: parameters go with the name of an environment"):
        to_gymnasium(make_env("CartPole-v1"), gravity=3.0)


def test_names_and_parameters(monkeypatch, tmp_path):
    assert env_parameters("gymnasium/FrozenLake-v1")["map_name"] == "4x4"
    env = make_env("gymnasium/FrozenLake-v1", map_name="8x8", time_limit=7, reward_scale=2.0)
    assert (env.observation_space, env.action_space) == (Discrete(64), Discrete(4))
    assert env_parameters("gymnasium/CartPole-v1") == {"sutton_barto_reward": False, "max_episode_steps": 500}
    (tmp_path / "clocks.py").write_text(
        "import gymnasium\nfrom tests.envs.test_gymnasium import Clock\ngymnasium.register('Clock-v0', Clock)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert make_env("gymnasium/clocks:Clock-v0").observation_space.shape == (3,)
    del gymnasium.registry["Clock-v0"], sys.modules["clocks"]


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("gymnasium/LunarLander-v9", {}, r"unknown env 'gymnasium/LunarLander-v9'; did you mean 'gymnasium/LunarLander-v3'"),
        ("gymnasium/nothing-like-it", {}, r"unknown env 'gymnasium/nothing-like-it'"),
        ("gymnasium/", {}, r"'gymnasium/' lacks the id of an environment, as in gymnasium/CartPole-v1"),
        ("gymnasium/tests.envs.clocks:", {}, r"lacks the id of an environment, as in gymnasium/tests.envs.clocks:CartPole-v1"),
        ("gymnasium/.json:CartPole-v1", {}, r"'gymnasium/.json:CartPole-v1': no package .* in full$"),
        ("gymnasium/json:CartPol-v1", {}, r"'gymnasium/json:CartPol-v1'; did you mean 'gymnasium/json:CartPole-v1'"),
        ("gymnasium/ALE/Pong-v5", {}, r'pip install ale-py, and env = "gymnasium/ale_py:ALE/Pong-v5" imports the module'),
        ("gymnasium/Farm/Pig-v0", {}, r'under Farm/; env = "gymnasium/module:Farm/Pig-v0" imports the module that registers it'),
        ("gymnasium/no_module:Foo-v0", {}, r"No module named 'no_module'"),
        ("FrozenLake-v1", {}, r"unknown env 'FrozenLake-v1'; did you mean 'gymnasium/FrozenLake-v1'\?"),
        ("gymnasium/CartPole-v1", {"gravity": 1.0}, r"unknown key env_params\.gravity for gymnasium/CartPole-v1"),
        ("gymnasium/FrozenLake-v1", {"map_name": "5x5"}, r"'gymnasium/FrozenLake-v1' cannot be made .*5x5"),
        ("gymnasium/FrozenLake-v1", {"success_rate": [1]}, r"'gymnasium/FrozenLake-v1' cannot be made"),
        (
            "gymnasium/FrozenLake-v1",
            {"success_rate": "often"},
            r"env_params.success_rate must be a number, as .* is, got 'often'",
        ),
        ("gymnasium/FrozenLake-v1", {"is_slippery": "no"}, r"env_params.is_slippery must be true or false, as True is, got 'no'"),
        ("gymnasium/FrozenLake-v1", {"map_name": 4}, r"env_params.map_name must be a string, as '4x4' is, got 4"),
        ("gymnasium/CartPole-v1", {"max_episode_steps": 2.5}, r"'gymnasium/CartPole-v1' cannot be made .* actually: 2.5"),
        ("gymnasium/Blackjack-v1", {}, r"'gymnasium/Blackjack-v1': its observations are Tuple, and must be Box, .* flatten them"),
    ],
)
def test_wrong_names_and_parameters_are_one_line(name, params, said):
    with pytest.raises(ValueError, match=said) as error:
        make_env(name, **params)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("error", [gymnasium.error.DependencyNotInstalled, ModuleNotFoundError])
def test_a_missing_library_is_named_with_the_extra(monkeypatch, error):
    def missing(entry_point):
        raise error("Box2D is not installed, run `pip install gymnasium[box2d]`")

    monkeypatch.setattr("rljax.envs.gymnasium.load_env_creator", missing)
    with pytest.raises(ValueError, match=r"LunarLander-v3': Box2D is not installed: pip install 'rljax\[gymnasium\]'$"):
        make_env("gymnasium/LunarLander-v3")


# ------------------------------------------------------------------------------------------------------------ the other way


@pytest.mark.filterwarnings("ignore")  # the checker recommends, and warns of infinite boxes
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Breakout-MinAtar", "GoalGrid", "TicTacToe"])
def test_gymnasiums_checker_passes(name):
    check_env(to_gymnasium(name))


def test_an_environment_of_ours_as_gymnasiums():
    env = to_gymnasium("TicTacToe")
    assert env.action_space == spaces.Discrete(9)

    def game(seed=None):
        observation, info = env.reset(seed=seed)
        seen, total, done = [observation], 0.0, False
        while not done:
            assert env.observation_space.contains(observation)
            mask = info["action_mask"]
            assert mask.dtype == np.int8
            action = env.action_space.sample(mask)
            observation, reward, terminated, truncated, info = env.step(action)
            assert isinstance(reward, float)
            assert not truncated
            total, done = total + reward, terminated
            seen.append(observation)
        return np.stack(seen)

    env.action_space.seed(0)
    first, other = game(seed=1), game()
    env.action_space.seed(0)
    np.testing.assert_array_equal(game(seed=1), first)
    np.testing.assert_array_equal(game(), other)
    with pytest.raises(ValueError, match="env 'CartPoe'"):
        to_gymnasium("CartPoe")


def test_copies_of_ours_as_gymnasiums():
    env = to_gymnasium_vector("CartPole-v1", 3, max_steps_in_episode=12)
    assert env.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.SAME_STEP
    assert env.action_space == spaces.MultiDiscrete([2, 2, 2])
    observations, infos = env.reset(seed=0)
    assert observations.shape == (3, 4)
    assert infos.keys() == {"episode_return", "_episode_return", "episode_length", "_episode_length"}
    kinds = set()
    for t in range(40):
        before = observations
        observations, rewards, terminations, truncations, infos = env.step(np.array([t % 2, 1, 1 - t % 2]))
        assert (rewards.dtype, rewards.shape) == (np.float64, (3,))
        done = terminations | truncations
        assert ("final_obs" in infos) == done.any()
        for i in np.flatnonzero(done):
            assert infos["_final_obs"][i]
            assert env.single_observation_space.contains(infos["final_obs"][i]) or terminations[i]
            assert np.abs(infos["final_obs"][i] - before[i]).max() < 1.0  # goes on from the step before, and ...
            assert np.abs(observations[i]).max() <= 0.05  # ... the new one is a start
            assert infos["final_info"]["episode_length"][i] <= 12
            kinds.add("terminated" if terminations[i] else "truncated")
        np.testing.assert_array_equal(infos["_episode_length"], ~done)
        if done.any():
            np.testing.assert_array_equal(infos["_final_obs"], done)
            assert all(infos["final_obs"][i] is None for i in np.flatnonzero(~done))
    assert kinds == {"terminated", "truncated"}
    np.testing.assert_array_equal(env.reset(seed=0)[0], env.reset(seed=0)[0])
    with pytest.raises(ValueError, match="one seed starts all copies"):
        env.reset(seed=[1, 2, 3])


def test_masks_of_copies():
    env = to_gymnasium_vector("TicTacToe", 2)
    _, infos = env.reset(seed=0)
    for _ in range(6):
        mask = infos["action_mask"]
        assert (mask.dtype, mask.shape) == (np.int8, (2, 9))
        _, _, terminations, _, infos = env.step(mask.argmax(1))
        if terminations.any():
            assert infos["final_info"]["action_mask"].shape == (2, 9)
            assert infos["action_mask"].any(1).all()
            return
    pytest.fail("no game ended")


BAD_ACTIONS = [
    ("Pendulum-v1", [[0.5]], r"action must be float32\[1\], got float64\[1, 1\]"),
    ("Pendulum-v1", ["left"], r"action must be float32\[1\], got <U4\[1\]"),
    ("Pendulum-v1", [float("nan")], r"action must be finite, got \[nan\]"),
    ("CartPole-v1", 0.5, r"action must be int64\[\], got float64\[\]"),
    ("CartPole-v1", [[0], [0, 1]], r"action must be an array of shape \[\], and its rows are of different lengths"),
    ("CartPole-v1", -1, r"action must be in Discrete\(2\), got -1"),
]


@pytest.mark.parametrize(("name", "action", "says"), BAD_ACTIONS)
def test_what_is_no_action_is_a_line(name, action, says):
    env = to_gymnasium(name)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=says):
        env.step(action)
    with pytest.raises(ValueError, match="there are no options"):
        env.reset(options={"low": 0.1})


def test_actions_of_a_vector_environment_are_checked_and_bounds_left_to_it():
    env = to_gymnasium_vector("Pendulum-v1", 2)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.zeros((2, 1)))
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"actions must be float32\[2, 1\], got float64\[3, 1\]"):
        env.step(np.zeros((3, 1)))
    twice, _, _, _, _ = env.step(np.full((2, 1), 4.0))  # Pendulum clips at 2
    env.reset(seed=0)
    np.testing.assert_array_equal(env.step(np.full((2, 1), 2.0))[0], twice)


@pytest.mark.slow
def test_stable_baselines_trains_on_it():
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor

    env = Monitor(to_gymnasium("CartPole-v1"))
    model = sb3.PPO("MlpPolicy", env, n_steps=1024, gae_lambda=0.98, learning_rate=1e-3, seed=0, device="cpu")
    model.learn(30_000)
    assert evaluate_policy(model, env, 20)[0] > 400
