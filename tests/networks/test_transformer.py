"""Transformers against naive loops, and what a policy over tokens must not depend on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.envs import Box, TimeStep, Tokens
from rljax.networks import Transformer, transformer
from rljax.networks.transformer import _rotate, _rotation, forward

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
SMALL = Transformer(layers=2, width=8, heads=4, head_size=4, mlp=12)
MODELS = {
    "llama": SMALL,
    "grouped": dataclasses.replace(SMALL, kv_heads=2),
    "qwen2": dataclasses.replace(SMALL, kv_heads=1, qkv_bias=True, tied=False),
    "qwen3": dataclasses.replace(SMALL, kv_heads=2, qk_norm=True),
    "gpt2": dataclasses.replace(SMALL, family="gpt2", positions=16),
}
V, PROMPT, SAID, GROUP = 7, 5, 4, 2
SPACE = Tokens(V, PROMPT + SAID, PROMPT)
LENGTHS = (5, 5, 1, 1, 3, 3)  # of the prompts: groups of two, the second with nothing before its last token
B = len(LENGTHS)


def contexts(seed=0, prompt=PROMPT, lengths=LENGTHS, said=SAID):
    """int32 ``[B, prompt + said]``; the members of a group have the same prompt."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, V, (len(lengths), PROMPT + said))
    rows[1::GROUP, :PROMPT] = rows[::GROUP, :PROMPT]
    rows = np.concatenate([np.full((len(lengths), prompt - PROMPT), -1), rows], 1)
    for row, length in zip(rows, lengths, strict=True):
        row[: prompt - length] = -1
    return rows.astype(np.int32)


def steps_of(rows, prompt=PROMPT, mask=None):
    """``[T, B]`` time steps that an environment leads through as it is told the tokens of ``rows``."""
    said = rows.shape[1] - prompt
    observations = np.stack([np.where(np.arange(rows.shape[1]) < prompt + t, rows, -1) for t in range(said)])
    zeros = jnp.zeros((said, len(rows)))
    observation = jnp.asarray(observations)
    return TimeStep(observation, mask, zeros, zeros > 0, zeros > 0, observation, {})


def at(tree, t):
    return jax.tree.map(lambda x: x[t], tree)


@functools.cache
def params_of(name):
    """Parameters far from their start, biases and scales included."""
    model = MODELS[name]
    shapes = jax.eval_shape(transformer(model, SPACE, has_value=True).init, jax.random.key(0), None)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(1.0 if len(x.shape) == 1 else 0.0, 0.5, x.shape), jnp.float32), shapes)


@functools.cache
def policy_of(name, group_size=1, space=SPACE, **changes):
    policy = transformer(dataclasses.replace(MODELS[name], **changes), space, group_size=group_size, has_value=True)

    def unrolled(params, timesteps):
        output = policy.unroll(params, policy.start(params, at(timesteps, 0)), timesteps)
        return output.distribution.logits, output.value

    def stepped(params, timesteps):
        def step(carry, timestep):
            carry, output = policy.step(params, carry, timestep)
            return carry, (output.distribution.logits, output.value)

        return jax.lax.scan(step, policy.start(params, at(timesteps, 0)), timesteps)[1]

    return jit(unrolled), jit(stepped)


def close(a, b, atol=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5)


@functools.cache
def whole(name):
    return jax.tree.map(np.asarray, policy_of(name)[0](params_of(name), steps_of(contexts())))


@pytest.mark.parametrize("name", MODELS)
def test_unroll_equals_steps(name):
    logits, value = whole(name)
    assert logits.shape == (SAID, B, V) and value.shape == (SAID, B) and np.std(logits) > 0.1 and np.std(value) > 0.1
    close((logits, value), policy_of(name)[1](params_of(name), steps_of(contexts())))


@pytest.mark.parametrize("name", ["grouped", "gpt2"])
def test_groups_share_their_prompt_and_nothing_else(name):
    for function in policy_of(name, GROUP):
        close(function(params_of(name), steps_of(contexts())), whole(name))
    policy = transformer(MODELS[name], SPACE, group_size=GROUP, has_value=True)
    carry = jax.eval_shape(policy.start, params_of(name), at(steps_of(contexts()), 0))
    assert {x.shape[0] for x in jax.tree.leaves(carry["prompt"])} == {B // GROUP}


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_the_amount_of_padding_changes_nothing(name):
    wide = PROMPT + 3
    rows = contexts(prompt=wide)
    for function in policy_of(name, space=Tokens(V, wide + SAID, wide)):
        close(function(params_of(name), steps_of(rows, wide)), whole(name))


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_forward_equals_start_and_unroll(name):
    params, rows = params_of(name), contexts()
    head = params["embed" if MODELS[name].tied else "head"]
    hidden = jit(functools.partial(forward, MODELS[name]))(params, rows)
    logits = np.asarray(hidden @ head.T)[:, PROMPT - 1 : -1].swapaxes(0, 1)
    close(logits, whole(name)[0])


def test_forward_takes_padding_anywhere():
    model, params = MODELS["grouped"], params_of("grouped")
    rows = np.random.default_rng(2).integers(0, V, (1, 5)).astype(np.int32)
    gaps = np.full((1, 9), -1, np.int32)
    places = [1, 2, 5, 6, 7]
    gaps[0, places] = rows[0]
    plain, spread = (np.asarray(jit(functools.partial(forward, model))(params, x)) for x in (rows, gaps))
    close(plain, spread[:, places])
    assert np.isfinite(spread).all()


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_token_is_seen_by_later_ones_only(name):
    logits, value = whole(name)
    for place in range(SAID):
        rows = contexts()
        rows[:, PROMPT + place] = (rows[:, PROMPT + place] + 1) % V
        for function in policy_of(name):
            changed = function(params_of(name), steps_of(rows))
            close(changed[0][: place + 1], logits[: place + 1], 1e-6)
            close(changed[1][: place + 1], value[: place + 1], 1e-6)
            if place + 1 < SAID:
                assert np.abs(changed[0][place + 1 :] - logits[place + 1 :]).max((0, 2)).min() > 1e-4


def test_every_token_of_the_prompt_is_seen():
    logits, _ = whole("grouped")
    for place in range(PROMPT):
        rows = contexts()
        rows[:, place] = np.where(rows[:, place] < 0, -1, (rows[:, place] + 1) % V)
        changed = np.asarray(policy_of("grouped")[0](params_of("grouped"), steps_of(rows))[0])
        differs = np.abs(changed - logits).max((0, 2)) > 1e-4
        np.testing.assert_array_equal(differs, np.array(LENGTHS) >= PROMPT - place)


def test_unsaid_tokens_have_no_effect():
    """An episode that ended early, whose later places are empty, equals one whose later places hold anything."""
    rows = contexts()
    rows[:, PROMPT + 2 :] = -1
    changed = policy_of("llama")[0](params_of("llama"), steps_of(rows))
    close(at(changed, slice(0, 3)), at(whole("llama"), slice(0, 3)), 1e-6)


def test_a_prompt_of_padding_alone_is_finite_and_so_is_its_gradient():
    rows = contexts()
    rows[:GROUP, :PROMPT] = -1
    policy = transformer(MODELS["grouped"], SPACE, has_value=True)

    def total(params, timesteps):
        output = policy.unroll(params, policy.start(params, at(timesteps, 0)), timesteps)
        return jnp.square(output.distribution.logits).sum()

    value, gradient = jit(jax.value_and_grad(total))(params_of("grouped"), steps_of(rows))
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    assert np.isfinite(policy_of("grouped")[1](params_of("grouped"), steps_of(rows))[0]).all()


@pytest.mark.parametrize("name", ["llama"])
def test_a_prompt_of_one_token(name):
    rows, space = contexts()[:, PROMPT - 1 :], Tokens(V, 1 + SAID, 1)
    close(*(function(params_of(name), steps_of(rows, 1)) for function in policy_of(name, space=space)))


@functools.cache
def loss_and_gradient(**changes):
    policy = transformer(dataclasses.replace(MODELS["qwen2"], **changes), SPACE, group_size=GROUP, temperature=0.7)
    mask = np.random.default_rng(3).random((SAID, B, V)) < 0.7
    rows = contexts()
    actions = rows[:, PROMPT:].T
    mask |= actions[..., None] == np.arange(V)

    def loss(params):
        timesteps = steps_of(rows, mask=jnp.asarray(mask))
        distribution = policy.unroll(params, policy.start(params, at(timesteps, 0)), timesteps).distribution
        log_prob, entropy = distribution.log_prob_and_entropy(jnp.asarray(actions))
        weights = jnp.asarray(np.random.default_rng(4).normal(size=(2, SAID, B)))
        return (weights[0] * log_prob + weights[1] * entropy).sum(), log_prob

    (value, log_prob), gradient = jit(jax.value_and_grad(loss, has_aux=True))(params_of("qwen2"))
    return log_prob, value, gradient


@pytest.mark.parametrize("changes", [{"head_chunk": 5}, {"head_chunk": 8, "remat": True}, {"scan_layers": True}], ids=str)
def test_options_of_compilation_change_neither_values_nor_gradients(changes):
    close(loss_and_gradient(**changes), loss_and_gradient(), 1e-5)


def test_remat_recomputes_the_blocks():
    policy = transformer(dataclasses.replace(SMALL, remat=True), SPACE)
    timesteps = steps_of(contexts())
    jaxpr = jax.make_jaxpr(lambda params: policy.unroll(params, policy.start(params, at(timesteps, 0)), timesteps).value)
    names = [equation.primitive.name for equation in jaxpr(params_of("llama")).eqns]
    assert sum(name in ("checkpoint", "remat", "remat2") for name in names) == 2 * SMALL.layers, names  # prompt, completion


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_scanned_layers_are_the_same_policy(name):
    close(policy_of(name, scan_layers=True)[0](params_of(name), steps_of(contexts()))[0], whole(name)[0], 1e-5)
    close(policy_of(name, scan_layers=True)[1](params_of(name), steps_of(contexts()))[0], whole(name)[0], 1e-5)


def test_bfloat16_is_near():
    logits, _ = policy_of("grouped", dtype="bfloat16")[0](params_of("grouped"), steps_of(contexts()))
    assert logits.dtype == jnp.float32
    exact = whole("grouped")[0]
    assert 1e-6 < np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()
    close(policy_of("grouped", dtype="bfloat16")[1](params_of("grouped"), steps_of(contexts()))[0], logits, 0.1)


def test_rotary_positions_are_complex_rotations():
    """Pairs (i, i + size / 2) as complex numbers, turned by position * theta^(-2i / size)."""
    model = dataclasses.replace(SMALL, head_size=6, rope_theta=100.0)
    x = np.random.default_rng(5).normal(size=(2, 4, 3, 6)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3], [7, 8, 20, 300]])
    turned = x[..., :3] + 1j * x[..., 3:]
    turned = turned * np.exp(1j * positions[..., None, None] * 100.0 ** (-2 * np.arange(3) / 6))
    rotated = jit(lambda x, positions: _rotate(x, _rotation(model, positions, 301)))(x, positions)
    np.testing.assert_allclose(rotated, np.concatenate([turned.real, turned.imag], -1), atol=1e-6)


# A whole model, token by token and head by head, in float64.


def naive(model, params, tokens):
    params = jax.tree.map(np.float64, params)
    gpt2 = model.family == "gpt2"

    def dense(layer, x):
        return x @ layer["kernel"] + layer.get("bias", 0.0)

    def norm(layer, x):
        if gpt2:
            return (x - x.mean()) / np.sqrt(x.var() + model.norm_eps) * layer["scale"] + layer["bias"]
        return x / np.sqrt(np.mean(x * x) + model.norm_eps) * layer["scale"]

    def turn(x, position):
        half = model.size // 2
        z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * model.rope_theta ** (-np.arange(half) / half))
        return np.concatenate([z.real, z.imag])

    xs = [params["embed"][token] + (params["positions"][i] if gpt2 else 0.0) for i, token in enumerate(tokens)]
    for layer in params["layers"]:
        heads = {"q": [], "k": [], "v": []}
        for i, x in enumerate(xs):
            h = norm(layer["attn_norm"], x)
            for name, rows in heads.items():
                parts = list(dense(layer[name], h).reshape(-1, model.size))
                if model.qk_norm and name != "v":
                    parts = [p / np.sqrt(np.mean(p * p) + model.norm_eps) * layer[f"{name}_norm"]["scale"] for p in parts]
                if not gpt2 and name != "v":
                    parts = [turn(p, i) for p in parts]
                rows.append(parts)
        for i in range(len(xs)):
            mixed = []
            for head in range(model.heads):
                shared = head // (model.heads // model.groups)
                scores = np.array([heads["q"][i][head] @ heads["k"][j][shared] for j in range(i + 1)]) / np.sqrt(model.size)
                weights = np.exp(scores - scores.max())
                mixed.append(sum(w * heads["v"][j][shared] for j, w in enumerate(weights / weights.sum())))
            xs[i] = xs[i] + dense(layer["o"], np.concatenate(mixed))
            h = norm(layer["mlp_norm"], xs[i])
            up = dense(layer["up"], h)
            if gpt2:
                active = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
            else:
                gate = dense(layer["gate"], h)
                active = gate / (1 + np.exp(-gate)) * up
            xs[i] = xs[i] + dense(layer["down"], active)
    return np.stack([norm(params["norm"], x) for x in xs]) @ params["embed" if model.tied else "head"].T


@pytest.mark.parametrize("name", MODELS)
def test_a_naive_loop_agrees(name):
    logits = whole(name)[0]
    for b, (row, length) in enumerate(zip(contexts(), LENGTHS, strict=True)):
        expected = naive(MODELS[name], params_of(name), row[PROMPT - length : -1])[length - 1 :]
        np.testing.assert_allclose(logits[:, b], expected, atol=2e-5, rtol=1e-4)


def test_more_rows_than_the_environment_has_tokens():
    model = dataclasses.replace(SMALL, vocab=V + 3)
    policy = transformer(model, SPACE)
    params = jax.eval_shape(policy.init, jax.random.key(0), None)
    assert params["embed"].shape == (V + 3, 8)
    timestep = at(steps_of(contexts()), 0)
    logits = jax.eval_shape(lambda p: policy.step(p, policy.start(p, timestep), timestep)[1].distribution.logits, params)
    assert logits.shape == (B, V)


def test_first_parameters_are_nearly_uniform_and_of_the_documented_scales():
    model = dataclasses.replace(SMALL, width=64, head_size=0, mlp=128)
    params = jit(transformer(model, SPACE, has_value=True).init)(jax.random.key(0), None)
    layer = params["layers"][1]
    for name, scale in (("q", 0.02), ("up", 0.02), ("o", 0.01), ("down", 0.01)):
        assert np.std(layer[name]["kernel"]) == pytest.approx(scale, rel=0.1), name
    np.testing.assert_array_equal(params["value"]["kernel"], 0.0)
    assert not np.array_equal(params["layers"][0]["q"]["kernel"], layer["q"]["kernel"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Transformer(heads=4, kv_heads=3), r"model\.kv_heads \(3\) must divide model\.heads \(4\)"),
        (lambda: Transformer(heads=3, width=64), r"model\.heads \(3\) must divide model\.width \(64\)"),
        (lambda: Transformer(heads=4, width=12), r"model\.head_size must be even .* got 3"),
        (lambda: Transformer(family="bert"), r"model\.family must be one of llama, gpt2"),
        (lambda: Transformer(dtype="float16"), r"model\.dtype must be one of float32, bfloat16"),
        (lambda: Transformer(layers=0), r"model\.layers must be >= 1"),
        (lambda: transformer(SMALL, Box(0.0, 1.0, (3,))), r"takes token observations, the environment has Box"),
        (lambda: transformer(dataclasses.replace(SMALL, vocab=V - 1), SPACE), r"model\.vocab \(6\) is smaller .* 7 tokens"),
        (
            lambda: transformer(Transformer(family="gpt2", positions=3), SPACE),
            r"model\.positions \(3\) is shorter",
        ),
    ],
)
def test_what_does_not_fit_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
