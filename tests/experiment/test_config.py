import dataclasses
import datetime

import jax.numpy as jnp
import numpy as np
import pytest

from rljax.experiment import InputError, load, parse_overrides

BASE = 'env = "CartPole-v1"\ntotal_steps = 1000\n'


def write(path, text):
    path.write_text(text)
    return path


def load_flags(text):
    return load(None, {"env": "CartPole-v1", "total_steps": 1000, **parse_overrides(text.split())})


def test_defaults_are_written_out_and_read_back(tmp_path):
    e = load(write(tmp_path / "exp.toml", BASE))
    again = load(write(tmp_path / "again.toml", e.to_toml()))
    assert e.name == "exp"
    assert e.algo.learning_rate == 3e-4
    assert dataclasses.replace(again, name="exp") == e
    assert again.hash == e.hash


def test_hash_covers_what_decides_the_result_and_nothing_else(tmp_path):
    e = load(write(tmp_path / "exp.toml", BASE))
    assert dataclasses.replace(e, out="elsewhere", name="other", checkpoint_seconds=1.0).hash == e.hash
    assert dataclasses.replace(e, eval_seed=1).hash != e.hash
    assert dataclasses.replace(e, algo=dataclasses.replace(e.algo, clip=0.3)).hash != e.hash


def test_numbers_of_numpy_and_jax_are_as_good_as_pythons():
    task = {"env": "CartPole-v1", "total_steps": 1000}
    given = {
        "seeds": np.arange(3),
        "algo.clip": jnp.float32(0.5),
        "algo.hidden": np.array([8, 4]),
        "env_params.gravity": np.int64(9),
    }
    plain = {"seeds": [0, 1, 2], "algo.clip": 0.5, "algo.hidden": [8, 4], "env_params.gravity": 9}
    swept = {"sweep.algo.discount": np.array([0.5, 0.75]), "algo.num_steps": np.uint16(16)}
    e = load(None, {**task, **given, **swept})
    assert e == load(None, {**task, **plain, "sweep.algo.discount": [0.5, 0.75], "algo.num_steps": 16})
    assert (e.seeds, e.sweep, e.algo.hidden) == ((0, 1, 2), {"algo.discount": (0.5, 0.75)}, (8, 4))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"total_steps = " + b"1" * 5000, b"env ="])
def test_a_file_that_is_no_toml(tmp_path, content):
    (tmp_path / "e.toml").write_bytes(content)
    with pytest.raises(InputError, match=r"e.toml: not valid TOML: ") as error:
        load(tmp_path / "e.toml")
    assert "\n" not in str(error.value)


def test_a_list_in_the_place_of_a_number_is_shown_the_way_to_a_sweep(tmp_path):
    write(tmp_path / "e.toml", BASE + "[algo]\nlearning_rate = [1e-3, 4e-3]\n")
    with pytest.raises(InputError, match=r'"algo.learning_rate" = \[0.001, 0.004\] under \[sweep\]'):
        load(tmp_path / "e.toml")


@pytest.mark.parametrize("number", [10**400, "1" * 5000, float("inf")])
@pytest.mark.parametrize("key", ["algo.clip", "env_params.gravity"])
def test_numbers_that_no_float_can_hold(key, number):
    with pytest.raises(InputError, match=f"{key} must be a number, got"):
        load_flags(f"--{key} {number}")


def test_inheritance_the_nearest_file_wins(tmp_path):
    write(tmp_path / "a.toml", BASE + "seeds = [7]\n[algo]\nclip = 0.3\nnum_envs = 8\n")
    write(tmp_path / "b.toml", 'base = "a.toml"\ntotal_steps = 2000\n[algo]\nclip = 0.4\n')
    e = load(write(tmp_path / "c.toml", 'base = "b.toml"\n[env_params]\ngravity = 12\n'))
    assert (e.total_steps, e.seeds, e.algo.clip, e.algo.num_envs, e.env_params) == (2000, (7,), 0.4, 8, {"gravity": 12.0})


def test_a_base_that_leads_back_is_refused(tmp_path):
    write(tmp_path / "a.toml", 'base = "b.toml"\n')
    with pytest.raises(InputError, match="leads back"):
        load(write(tmp_path / "b.toml", 'base = "a.toml"\n'))


def test_flags_override_the_file_with_dashes_or_underscores(tmp_path):
    path = write(tmp_path / "exp.toml", BASE + "[algo]\nclip = 0.3\n")
    flags = "--algo.learning-rate 1e-3 --algo.num_envs 8 --seeds 3 4 --algo.hidden 32 --algo.clip-value none --total-steps=2_000"
    e = load(path, parse_overrides(flags.split()))
    assert (e.algo.learning_rate, e.algo.num_envs, e.seeds, e.algo.hidden) == (1e-3, 8, (3, 4), (32,))
    assert (e.algo.clip, e.algo.clip_value, e.total_steps) == (0.3, None, 2000)


def test_whole_floats_pass_as_integers_and_integers_as_floats():
    e = load_flags("--total-steps 1e5 --algo.clip 1")
    assert (e.total_steps, e.algo.clip) == (100_000, 1.0)
    assert isinstance(e.total_steps, int)
    assert isinstance(e.algo.clip, float)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--algo.learning-rte 1", r"unknown key algo.learning_rte; did you mean 'algo.learning_rate'"),
        ("--seed 0", "unknown key seed; did you mean 'seeds'"),
        ("--env CartPol-v1", "unknown env 'CartPol-v1'; did you mean 'CartPole-v1'"),
        ("--env MNISTBandit-bsuite", "downloads"),
        ("--env-params.gravty 1", "no parameter 'gravty'; did you mean 'gravity'"),
        ("--env-params.gravity heavy", "env_params.gravity must be a number, got 'heavy'"),
        ("--algo.name pp", "unknown algo.name 'pp'; did you mean 'ppo'"),
        ("--total-steps many", "total_steps must be a whole number, got 'many'"),
        ("--total-steps 10.5", "total_steps must be a whole number, got 10.5"),
        ("--total-steps 0", "total_steps must be >= 1 and <= 10000000000000, got 0"),
        ("--total-steps nan", "total_steps must be a whole number"),
        ("--algo.discount 1.5", "algo.discount must be >= 0 and <= 1, got 1.5"),
        ("--algo.clip 0", "algo.clip must be > 0, got 0.0"),
        ("--algo.clip nan", "algo.clip must be a number"),
        ("--algo.learning-rate none", "algo.learning_rate must be a number"),
        ("--algo.normalize-rewards 1", "algo.normalize_rewards must be true or false, got 1"),
        ("--algo.network cnn", "algo.network must be one of mlp, minatar_cnn, gru, got 'cnn'; did you mean 'minatar_cnn'"),
        ("--algo.hidden 0", "algo.hidden must hold one or more positive sizes"),
        ("--seeds 1 1", "seeds must hold one or more different numbers"),
        ("--seeds -1", "seeds must be >= 0"),
        ("--sweep.algo.lerning-rate 1 2", "unknown key sweep.algo.lerning_rate; did you mean 'sweep.algo.learning_rate'"),
        ("--sweep.seeds 1 2", "sweep.seeds: algo.*, model.* and env_params.* can be swept, not seeds"),
        ("--sweep.algo.learning-rate [1e-3,1e-4]", "several values are given apart, as in 0.1 0.2"),
        ("--sweep 3", "sweep is of files; here its keys are given apart"),
        ("--base x.toml", "base is of files"),
        ("--total-steps 1e30", "total_steps must be >= 1 and <= 10000000000000"),
        ("--name ..", "name must be that of a directory in `out`, without / in it, got '..'"),
        ("--name a/b", "name must be that of a directory in `out`"),
        ("--out ''", "out must be a directory, got ''"),
        ("--sweep.mode random --sweep.draws 100000000 --sweep.algo.clip 0.1", "sweep.draws must be from 1 to 10,000"),
        ("--sweep.halving 1 --sweep.keep 0.99 --sweep.algo.clip 0.1 0.2", "sweep.keep: 0.99 of 2 settings drops none"),
        ("--sweep.mode random --sweep.draws 1 --sweep.algo.clip {uniform=[-1,0.2]}", "algo.clip must be > 0, got -1.0"),
        ("--sweep.algo.clip 0.1 0.1", "sweep.algo.clip holds a value twice"),
        ("--sweep.mode lists --sweep.algo.clip 0.1", "sweep.mode must be one of grid, list, random, got 'lists'"),
        ("--sweep.mode list", "sweep.mode: nothing is swept"),
        ("--sweep.draws 3 --sweep.algo.clip 0.1", 'sweep.draws is of sweep.mode = "random"; leave it out, or set that'),
        ("--sweep.mode random --sweep.algo.clip 0.1", "sweep.draws must be from 1 to 10,000, so many settings, got 0"),
        ("--sweep.mode list --sweep.algo.clip 0.1 0.2 --sweep.algo.discount 1", "sweep.algo.discount lists 1 values and"),
        ("--sweep.mode list --sweep.algo.clip 0.1 0.1", "sweep lists a setting twice, algo.clip = 0.1"),
        ("--sweep.algo.clip {uniform=[0.1,0.2]}", 'which only sweep.mode = "random" draws from'),
        ("--sweep.mode random --sweep.draws 2 --sweep.algo.clip {normal=[0.1,0.2]}", "must be a list of values to draw from"),
        ("--sweep.mode random --sweep.draws 2 --sweep.algo.clip {uniform=[0.2,0.1]}", "must be a list of values to draw from"),
        ("--sweep.mode random --sweep.draws 2 --sweep.algo.clip {log_uniform=[0,0.1]}", "log_uniform must begin above 0"),
        ("--sweep.mode random --sweep.draws 2 --sweep.algo.num-envs {uniform=[1,2.5]}", "must have whole numbers as its ends"),
        ("--sweep.mode random --sweep.draws 9 --sweep.algo.discount {uniform=[0,9]}", "algo.discount must be >= 0 and <= 1"),
        ("--seeds", "--seeds: a value is missing"),
        ("loose", "unexpected argument 'loose'"),
    ],
)
def test_wrong_input_is_one_line_that_names_the_key(flags, message):
    with pytest.raises(InputError) as error:
        load_flags(flags)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_zero_seeds(tmp_path):
    with pytest.raises(InputError, match="seeds must hold one or more"):
        load(write(tmp_path / "exp.toml", BASE + "seeds = []\n"))


def test_a_typo_in_a_file_names_the_file(tmp_path):
    path = write(tmp_path / "exp.toml", BASE + "[algo]\nlr = 1\n")
    with pytest.raises(InputError, match=rf"{path}: unknown key algo.lr"):
        load(path)


@pytest.mark.parametrize("text", ["env = CartPole", BASE + "algo = 3\n", "total_steps = 5\n", BASE + 'sweep = "x"\n'])
def test_malformed_files(tmp_path, text):
    with pytest.raises(InputError) as error:
        load(write(tmp_path / "exp.toml", text))
    assert "\n" not in str(error.value)


def test_missing_file():
    with pytest.raises(InputError, match=r"cannot read config nowhere\.toml"):
        load("nowhere.toml")


def test_sweep_splits_static_axes_into_programs_and_traced_axes_into_lanes(tmp_path):
    text = BASE + "seeds = [0, 1]\n[sweep]\n" + '"algo.learning_rate" = [1e-4, 1e-3]\n"algo.num_envs" = [8, 16]\n'
    e = load(write(tmp_path / "exp.toml", text + '"env_params.gravity" = [9.8, 12]\n'))
    programs = e.programs()
    assert [p.algo.num_envs for p in programs] == [8, 16]
    assert len({p.hash for p in programs}) == 2
    lanes = programs[0].lanes()
    assert len(lanes) == 8
    assert lanes[0] == {"lane": 0, "seed": 0, "algo.learning_rate": 1e-4, "env_params.gravity": 9.8}
    assert lanes[7] == {"lane": 7, "seed": 1, "algo.learning_rate": 1e-3, "env_params.gravity": 12.0}


def test_none_and_whole_numbers_are_static_axes():
    e = load_flags("--sweep.algo.target-kl none 0.01 --sweep.env-params.max-steps-in-episode 10 20")
    assert len(e.programs()) == 4
    assert all(not p.sweep for p in e.programs())


def test_a_parameter_that_the_environment_reads_in_python_is_static():
    def programs(env, parameter):
        e = load(None, {"env": env, "total_steps": 1000, f"sweep.env_params.{parameter}": [0.2, 0.3]})
        return len(e.programs())

    assert programs("FrozenLake-misc", "success_rate") == 2
    assert programs("Pendulum-v1", "max_torque") == 1


def test_a_list_takes_the_values_of_a_row_together():
    e = load_flags("--seeds 0 1 --sweep.mode list --sweep.algo.clip 0.1 0.1 0.3 --sweep.algo.num-envs 8 16 8")
    small, large = e.programs()
    assert (small.algo.num_envs, small.sweep, large.sweep) == (8, {"algo.clip": (0.1, 0.3)}, {"algo.clip": (0.1,)})
    assert [lane["algo.clip"] for lane in small.lanes()] == [0.1, 0.1, 0.3, 0.3]
    grid = load_flags("--seeds 0 1 --sweep.algo.clip 0.1 0.3 --algo.num-envs 8")
    assert grid.hash == load_flags("--seeds 0 1 --sweep.mode grid --sweep.algo.clip 0.1 0.3 --algo.num-envs 8").hash


RANDOM = """[sweep]
mode = "random"
draws = 20
seed = 3
"algo.learning_rate" = { log_uniform = [1e-5, 1e-2] }
"algo.clip" = [0.1, 0.2]
[sweep.algo]
num_envs = { uniform = [1, 3] }
"""


def test_random_settings_are_drawn_once_from_the_seed(tmp_path):
    path = write(tmp_path / "exp.toml", BASE + RANDOM)
    e = load(path)
    rates = [setting["algo.learning_rate"] for setting in e.settings()]
    assert len(rates) == 20 and 1e-5 <= min(rates) < 1e-4 and 1e-3 < max(rates) <= 1e-2
    assert {setting["algo.num_envs"] for setting in e.settings()} == {1, 2, 3}
    assert {setting["algo.clip"] for setting in e.settings()} == {0.1, 0.2}
    again = load(write(tmp_path / "again.toml", e.to_toml()))  # as a list
    assert (again.hash, again.settings()) == (load(path).hash, e.settings()) == (e.hash, e.settings())
    assert load(path, {"sweep.draws": 5}).settings() == e.settings()[:5]
    assert load(path, {"sweep.seed": 4}).settings() != e.settings()
    assert sum(len(p.settings()) for p in e.programs()) == 20


def test_a_value_in_place_of_those_that_a_file_sweeps(tmp_path):
    path = write(tmp_path / "exp.toml", BASE + RANDOM)
    e = load(path, {"algo.num-envs": 4, "algo.clip": 0.1})
    assert (e.algo.num_envs, e.algo.clip, list(e.sweep)) == (4, 0.1, ["algo.learning_rate"])
    alone = load(path, {"algo.num_envs": 4, "algo.clip": 0.1, "algo.learning_rate": 1e-4})
    plain = write(tmp_path / "plain.toml", BASE)
    assert alone.hash == load(plain, {"algo.num_envs": 4, "algo.clip": 0.1, "algo.learning_rate": 1e-4}).hash


def test_a_run_directory_is_where_it_is(tmp_path, monkeypatch):
    place = tmp_path / "runs" / "name"
    e = load(write(tmp_path / "exp.toml", BASE), {"out": "runs", "name": "name"})
    (place / e.hash).mkdir(parents=True)
    write(place / e.hash / "config.toml", e.to_toml())
    monkeypatch.chdir("/")
    assert load(place / e.hash).path == place / e.hash


def test_linear_schedules_take_the_length_of_the_run():
    e = load_flags("--algo.learning-rate-schedule linear")
    assert e.algo.anneal_steps == 1000.0
    assert load_flags("--algo.anneal-steps 500").algo.anneal_steps == 500.0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"env": "tokens/addition", "env_params.reverse": "no"}, "env_params.reverse must be true or false, got 'no'"),
        ({"env": "text", "env_params.preferences": 3}, "env_params.preferences must be text, got 3"),
        ({"env": "text", "env_params.regex": [5]}, r"env_params.regex must be text, got \[5\]"),
        (
            {"env": "text", "env_params.file": datetime.date(2020, 1, 1)},
            "env_params.file is read as a date, 2020-01-01; put it in quotes",
        ),
    ],
    ids=str,
)
def test_parameters_of_an_environment_are_of_the_type_of_their_default(params, message):
    with pytest.raises(InputError, match=message):
        load(None, {"total_steps": 10, "algo.name": "sft", **params})


def test_a_whole_float_is_a_whole_number_to_an_environment_too():
    e = load(None, {"env": "tokens/addition", "total_steps": 10, "algo.name": "sft", "env_params.digits": 2.0})
    assert e.env_params["digits"] == 2 and isinstance(e.env_params["digits"], int)
