"""Weights of pretrained transformers: Hugging Face directories in and out, GGUF files in.

`_layout` lists, for a config and the names that a format gives its tensors, where every parameter lies in a file; reading and
writing both walk that list, so a tensor that is missing, left over or of another shape is named whichever way it goes.
"""

import dataclasses
import functools
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from rljax.files import write_whole

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
FLOATS = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")  # constants that old releases saved too
NAMES = {
    "llama": {
        "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "layers": "model.layers",
        "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    },
    "gpt2": {
        "embed": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head",
        "layers": "transformer.h", "attn_norm": "ln_1", "q": "attn.c_attn", "k": "attn.c_attn", "v": "attn.c_attn",
        "o": "attn.c_proj", "mlp_norm": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj",
    },
    "gguf": {
        "embed": "token_embd", "norm": "output_norm", "head": "output", "layers": "blk", "attn_norm": "attn_norm",
        "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
        "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor as a GGUF file holds it: ``shape`` with the slowest axis first, ``kind`` of ggml's types, raw bytes."""

    shape: tuple[int, ...]
    kind: int
    data: np.ndarray

    def dequantize(self) -> np.ndarray:
        """float32 ``[*shape]``."""
        from gguf import GGMLQuantizationType, dequantize

        rows = self.data.reshape(*self.shape[:-1], -1)
        return dequantize(rows, GGMLQuantizationType(self.kind)).reshape(self.shape)


def load(path: str | os.PathLike[str], dtype: str = "float32") -> tuple[dict[str, Any], dict[str, Any]]:
    """The keyword arguments of a `Transformer` and its parameters, numpy arrays of ``dtype``.

    Parameters (kernels are ``[in, out]``; H heads and K key-value heads of size D)::

        {"embed": [vocab, width], "positions": [positions, width], "norm": NORM, "head": [vocab, width],
         "layers": [{"attn_norm": NORM, "q": DENSE [width, H D], "k", "v": DENSE [width, K D], "o": DENSE [H D, width],
                     "q_norm", "k_norm": {"scale": [D]}, "mlp_norm": NORM,
                     "gate", "up": DENSE [width, mlp], "down": DENSE [mlp, width]}, ...]}

    NORM is ``{"scale", "bias"}`` and DENSE ``{"kernel", "bias"}``: ``positions`` and biases are gpt2's (and qwen2's of q, k, v),
    ``gate`` the others', ``q_norm`` and ``k_norm`` qwen3's; ``head`` only where it is not tied. RoPE rotates halves.

    Args:
      path: a directory with ``config.json`` of type llama, mistral, qwen2, qwen3 or gpt2 and ``model.safetensors`` (or shards
        and their index), or a ``.gguf`` file of architecture llama, qwen2 or qwen3, in any format that the gguf package can
        dequantise.
      dtype: "float32" or "bfloat16".

    Raises:
      ValueError: the model needs what is not implemented, or a tensor is missing, unexpected or of another shape.
    """
    path = Path(path)
    target = _dtype(dtype)
    config, names, have, read = _open(path)
    if config["tied"] and (head := f"{names['head']}.weight") in have:
        if not np.array_equal(read(head), read(f"{names['embed']}.weight")):
            raise ValueError(f"{path}: {head} differs from the embedding it is tied to; set tie_word_embeddings to false")
        have = have - {head}
    layout = list(_layout(config, names))
    wanted = {entry.name for entry in layout}
    _no_difference(wanted - have, have - wanted, f"{path}: tensor")
    params: dict[str, Any] = {"layers": [{} for _ in range(config["layers"])]}
    for entry in layout:
        array = read(entry.name)
        if array.shape != entry.stored:
            raise ValueError(f"{path}: {entry.name} is {list(array.shape)}, and its config says {list(entry.stored)}")
        if array.dtype not in FLOATS:
            raise ValueError(f"{path}: {entry.name} is {array.dtype}; quantised checkpoints are read as GGUF only")
        if entry.third is not None:
            array = np.split(array, 3, -1)[entry.third]
        *parents, last = entry.path
        functools.reduce(_child, parents, params)[last] = np.array(array.T if entry.transposed else array, target, order="C")
    return config, params


def save(
    path: str | os.PathLike[str],
    config: Any,
    params: Mapping[str, Any],
    tokenizer_files: Mapping[str, str] | None = None,
    dtype: str = "float32",
) -> None:
    """Writes ``config.json`` and ``model.safetensors`` so that transformers and vLLM load the directory.

    Files are renamed when they are complete. The model type is gpt2, or the one of llama, qwen2 and qwen3 that has the config's
    biases and norms (a mistral model without a window is saved as llama, which computes the same).

    Args:
      path: a directory; made if there is none.
      config: a `Transformer`, or a dict of its fields.
      params: as `load` returns them; any kind of array.
      tokenizer_files: names and texts of files written beside, such as ``Tokenizer.files``. The ids of
        ``generation_config.json`` go into ``config.json``; without them no id ends a text.
      dtype: "float32" or "bfloat16".

    Raises:
      ValueError: a parameter is missing, unexpected or of another shape; no model type fits the config; or the directory holds
        a sharded model, whose shards vLLM would read instead.
    """
    path = Path(path)
    target = _dtype(dtype)
    files = dict(tokenizer_files or {})
    if (path / "model.safetensors.index.json").exists():
        raise ValueError(f"{path} holds a sharded model; save to another directory or delete it")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; save to a directory")
    given = dict(config) if isinstance(config, Mapping) else {k: getattr(config, k) for k in _DEFAULTS if hasattr(config, k)}
    full = _DEFAULTS | given
    leaves = {where: leaf for where, leaf in _leaves(params) if leaf is not None}
    full["vocab"] = full["vocab"] or (len(leaves[("embed",)]) if ("embed",) in leaves else 0)
    full["kv_heads"] = full["kv_heads"] or full["heads"]
    full["head_size"] = full["head_size"] or full["width"] // full["heads"]
    written = _to_json(full)
    layout = {entry.path: entry for entry in _layout(full, NAMES[full["family"]])}
    _no_difference(map(_dotted, layout.keys() - leaves.keys()), map(_dotted, leaves.keys() - layout.keys()), "parameter")
    tensors: dict[str, np.ndarray] = {}
    for where, entry in layout.items():
        array = np.asarray(leaves[where])
        if array.shape != entry.shape:
            raise ValueError(f"parameter {_dotted(where)} is {list(array.shape)}, not {list(entry.shape)}")
        array = (array.T if entry.transposed else array).astype(target)
        if entry.third:
            array = np.concatenate([tensors[entry.name], array], -1)
        tensors[entry.name] = np.ascontiguousarray(array)
    ids = json.loads(files.get("generation_config.json", "{}"))
    written |= {key: ids.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"torch_dtype": dtype}
    files["config.json"] = json.dumps(written, indent=2) + "\n"
    path.mkdir(parents=True, exist_ok=True)
    partial = path / "model.safetensors.partial"
    safetensors.numpy.save_file(tensors, partial, {"format": "pt"})
    os.replace(partial, path / "model.safetensors")
    for name, text in files.items():
        write_whole(path / name, text.encode())


def read_gguf(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata and tensors of a GGUF file of version 2 or 3 (ggml's docs/gguf.md); the tensors stay on disk until they are used.

    Raises:
      ValueError: not such a file, or one that is cut short.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    path = Path(path)
    try:
        data = np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is empty") from error
    buffer, at = memoryview(data.data), 0

    def number(code: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f"<{code}", buffer, at)
        at += struct.calcsize(f"<{code}")
        return value

    def take(count: int) -> np.ndarray:
        nonlocal at
        if not 0 <= count <= len(data) - at:
            raise EOFError
        at += count
        return data[at - count : at]

    def string() -> str:
        nonlocal at
        begin = at + 8
        at = begin + number("Q")
        if at > len(buffer):
            raise EOFError
        return str(buffer[begin:at], "utf-8", "replace")

    def value(kind: int) -> Any:
        if kind == 8:
            return string()
        if kind != 9:
            return number(_GGUF_CODES[kind])
        kind, count = number("I"), number("Q")
        if kind in _GGUF_CODES:
            return take(count * struct.calcsize(f"<{_GGUF_CODES[kind]}")).view(f"<{_GGUF_NUMPY[kind]}").tolist()
        return [value(kind) for _ in range(count)]

    if bytes(data[:4]) != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it does not begin with GGUF")
    try:
        at = 4
        if (version := number("I")) not in (2, 3):
            raise ValueError(f"{path} is a GGUF file of version {version}; 2 and 3 (little-endian) can be read")
        tensors, fields = number("Q"), number("Q")
        metadata = {}
        for _ in range(fields):
            key = string()
            metadata[key] = value(number("I"))
        headers = [(string(), [number("Q") for _ in range(number("I"))], number("I"), number("Q")) for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        begin = -(-at // alignment) * alignment
        result = {}
        for name, shape, kind, offset in headers:
            if kind not in GGML_QUANT_SIZES:
                raise ValueError(f"{path}: {name} is of the unknown type {kind}; another release of gguf may know it")
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            if shape[0] % block:
                raise ValueError(f"{path}: {name} has rows of {shape[0]}, not whole blocks of {block}")
            at = begin + offset
            result[name] = GGUFTensor(tuple(reversed(shape)), kind, take(int(np.prod(shape)) // block * size))
    except (EOFError, struct.error, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"{path} is cut short or damaged; fetch it again") from error
    return metadata, result


# Codes of `struct` and numpy for the scalar types of GGUF; 8 is a string and 9 an array.
_GGUF_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_NUMPY = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}

# The fields of a `Transformer` that decide what is stored.
_DEFAULTS: dict[str, Any] = dict(
    family="llama", vocab=0, layers=2, width=64, heads=4, kv_heads=0, head_size=0, mlp=256, positions=1024, rope_theta=10_000.0,
    norm_eps=1e-5, tied=True, qkv_bias=False, qk_norm=False,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where one parameter lies: its path in the tree, the tensor's name in a file, and how the two differ."""

    path: tuple[str | int, ...]
    name: str
    shape: tuple[int, ...]  # of the parameter
    transposed: bool = False  # PyTorch's and ggml's kernels are [out, in]
    third: int | None = None  # gpt2 joins q, k and v on the last axis

    @property
    def stored(self) -> tuple[int, ...]:
        shape = self.shape[::-1] if self.transposed else self.shape
        return shape if self.third is None else (*shape[:-1], 3 * shape[-1])


def _layout(config: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[_Entry]:
    """Every parameter of a model, in the names of one format."""
    gpt2, width, mlp, size = config["family"] == "gpt2", config["width"], config["mlp"], config["head_size"]
    inner, outer = config["heads"] * size, config["kv_heads"] * size
    norm_parts = {"scale": "weight", "bias": "bias"} if gpt2 else {"scale": "weight"}
    norms = {"attn_norm": width, "mlp_norm": width} | ({"q_norm": size, "k_norm": size} if config["qk_norm"] else {})
    kernels = {"q": (width, inner), "k": (width, outer), "v": (width, outer), "o": (inner, width)}
    kernels |= {} if gpt2 else {"gate": (width, mlp)}
    kernels |= {"up": (width, mlp), "down": (mlp, width)}
    yield _Entry(("embed",), f"{names['embed']}.weight", (config["vocab"], width))
    if gpt2:
        yield _Entry(("positions",), f"{names['positions']}.weight", (config["positions"], width))
    for part, suffix in norm_parts.items():
        yield _Entry(("norm", part), f"{names['norm']}.{suffix}", (width,))
    if not config["tied"]:
        yield _Entry(("head",), f"{names['head']}.weight", (config["vocab"], width))
    for layer in range(config["layers"]):
        for module, size in norms.items():
            for part, suffix in norm_parts.items():
                yield _Entry(("layers", layer, module, part), f"{names['layers']}.{layer}.{names[module]}.{suffix}", (size,))
        for module, shape in kernels.items():
            name = f"{names['layers']}.{layer}.{names[module]}"
            third = "qkv".index(module) if gpt2 and module in "qkv" else None
            yield _Entry(("layers", layer, module, "kernel"), f"{name}.weight", shape, not gpt2, third)
            if gpt2 or (config["qkv_bias"] and module in "qkv"):
                yield _Entry(("layers", layer, module, "bias"), f"{name}.bias", shape[1:], third=third)


def sizes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keyword arguments of a `Transformer` that `load` returns, without reading the tensors.

    Raises:
      ValueError: see `load`.
    """
    return _open(Path(path))[0]


def _open(path: Path) -> tuple[dict[str, Any], Mapping[str, str], set[str], Callable[[str], np.ndarray]]:
    """``(Transformer fields, names of tensors, tensors that are there, a function that reads one)``."""
    if path.suffix == ".gguf" and path.is_file():
        return _open_gguf(path)
    if path.is_dir():
        return _open_directory(path)
    raise ValueError(f"{path} is neither a directory with config.json nor a .gguf file")


def _open_directory(path: Path) -> tuple[dict[str, Any], Mapping[str, str], set[str], Callable[[str], np.ndarray]]:
    """Config, names, the names that are there, and a function that reads one tensor."""
    config = _from_json(_read_json(path / "config.json"), path / "config.json")
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if single.exists():
        files = dict.fromkeys(_open_safetensors(single).keys(), single.name)
    elif index.exists():
        files = _read_json(index).get("weight_map", {})
        for file in sorted(set(files.values())):
            if Path(file).name != file or not (path / file).is_file():
                raise ValueError(f"{index} names {file}, which is not in {path}; fetch it")
    else:
        raise ValueError(f"{path} has no model.safetensors; save the model with safe_serialization=True")
    names = NAMES[config["family"]]
    prefix = names["layers"].partition(".")[0] + "."  # a model without its head is saved without the prefix
    stored = {name if name.startswith((prefix, f"{names['head']}.")) else prefix + name: name for name in files}
    opened = functools.cache(lambda file: _open_safetensors(path / file))

    @functools.lru_cache(2)  # gpt2's joined kernel and bias are each asked for three times
    def read(name: str) -> np.ndarray:
        try:
            return opened(files[stored[name]]).get_tensor(stored[name])
        except (safetensors.SafetensorError, TypeError, AttributeError) as error:  # the latter two: a type unknown to numpy
            raise ValueError(f"{path / files[stored[name]]}: {stored[name]} cannot be read: {error}") from error

    return config, names, {name for name in stored if not BUFFERS.search(name)}, read


def _open_safetensors(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}); fetch it again") from error


def _open_gguf(path: Path) -> tuple[dict[str, Any], Mapping[str, str], set[str], Callable[[str], np.ndarray]]:
    """As `_open_directory`."""
    metadata, tensors = read_gguf(path)
    config = _from_gguf(metadata, tensors, path)
    heads = {}
    if metadata["general.architecture"] == "llama":
        for layer in range(config["layers"]):
            heads |= {f"blk.{layer}.attn_q.weight": config["heads"], f"blk.{layer}.attn_k.weight": config["kv_heads"]}

    def read(name: str) -> np.ndarray:
        try:
            array = tensors[name].dequantize()
        except NotImplementedError as error:
            raise ValueError(f"{path}: {name}: {error}") from error
        return _halves(array, heads[name]) if name in heads else array

    return config, NAMES["gguf"], set(tensors), read


def _halves(kernel: np.ndarray, heads: int) -> np.ndarray:
    """Rows of ``[heads * size, in]`` from llama.cpp's order, in which RoPE rotates neighbours, to that which rotates halves."""
    if kernel.shape[0] % (2 * heads):
        return kernel  # of a wrong shape, which is said elsewhere
    return kernel.reshape(heads, -1, 2, kernel.shape[1]).swapaxes(1, 2).reshape(kernel.shape)


def _from_json(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """`Transformer` fields of a ``config.json``, with the defaults that transformers gives to absent keys."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"{where}: model_type {kind!r} is not implemented; {', '.join(MODEL_TYPES)} are")

    def need(key: str) -> Any:
        if config.get(key) is None:
            raise ValueError(f"{where}: {key} is missing")
        return config[key]

    def only(key: str, *allowed: Any, default: Any = None) -> None:
        if (value := config.get(key, default)) not in allowed:
            raise ValueError(f"{where}: {key} {json.dumps(value)} is not implemented; only {json.dumps(allowed[0])} is")

    only("quantization_config", None)
    if kind == "gpt2":
        only("activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
        only("scale_attn_weights", True, default=True)
        only("scale_attn_by_inverse_layer_idx", False, default=False)
        only("add_cross_attention", False, default=False)
        width, heads = need("n_embd"), need("n_head")
        return dict(
            family="gpt2", vocab=need("vocab_size"), layers=need("n_layer"), width=width, heads=heads, kv_heads=heads,
            head_size=width // heads, mlp=config.get("n_inner") or 4 * width, positions=need("n_positions"),
            rope_theta=10_000.0, norm_eps=config.get("layer_norm_epsilon", 1e-5),
            tied=config.get("tie_word_embeddings", True), qkv_bias=False, qk_norm=False,
        )  # fmt: skip
    only("hidden_act", "silu", "swish", default="silu")
    only("attention_bias", False, None, default=False)
    only("mlp_bias", False, None, default=False)
    if kind == "mistral":
        only("sliding_window", None, default=4096)
    only("use_sliding_window", False, None, default=False)
    if other := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f'{where}: layer_types {json.dumps(sorted(other))} is not implemented; only "full_attention" is')
    ropes = [rope for key in ("rope_scaling", "rope_parameters") if (rope := config.get(key))]
    for rope in ropes:
        scaling = rope.get("rope_type", rope.get("type", "default"))
        if scaling not in ("default", "none") or rope.get("partial_rotary_factor", 1) != 1:
            raise ValueError(f"{where}: RoPE of {json.dumps(rope)} is not implemented; only unscaled RoPE of whole heads is")
    only("partial_rotary_factor", 1, None)
    theta = [source["rope_theta"] for source in (*ropes, config) if source.get("rope_theta") is not None]
    width, heads = need("hidden_size"), need("num_attention_heads")
    size = need("head_dim") if kind == "qwen3" else config.get("head_dim") or width // heads
    return dict(
        family="llama", vocab=need("vocab_size"), layers=need("num_hidden_layers"), width=width, heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads if kind == "llama" else need("num_key_value_heads"),
        head_size=size, mlp=need("intermediate_size"), positions=need("max_position_embeddings"),
        rope_theta=float(theta[0]) if theta else 10_000.0, norm_eps=need("rms_norm_eps"),
        tied=config.get("tie_word_embeddings", False), qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3",
    )  # fmt: skip


def _to_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a config without zeros."""
    width, heads, size = config["width"], config["heads"], config["head_size"]
    common = dict(vocab_size=config["vocab"], tie_word_embeddings=config["tied"])
    if config["family"] == "gpt2":
        if config["kv_heads"] != heads or size * heads != width or config["qk_norm"]:
            raise ValueError("a gpt2 model has as many key-value heads as heads, head_size * heads = width, and no qk_norm")
        return common | dict(
            model_type="gpt2", architectures=["GPT2LMHeadModel"], activation_function="gelu_new", n_layer=config["layers"],
            n_embd=width, n_head=heads, n_inner=config["mlp"], n_positions=config["positions"],
            layer_norm_epsilon=config["norm_eps"],
        )  # fmt: skip
    if config["family"] != "llama":
        raise ValueError(f'family must be "llama" or "gpt2", got {config["family"]!r}')
    if config["qkv_bias"] and config["qk_norm"]:
        raise ValueError("no model type has both qkv_bias (qwen2) and qk_norm (qwen3); use one of them")
    kind = "qwen2" if config["qkv_bias"] else "qwen3" if config["qk_norm"] else "llama"
    result = common | dict(
        model_type=kind, architectures=[f"{kind.capitalize()}ForCausalLM"], hidden_act="silu", hidden_size=width,
        num_hidden_layers=config["layers"], num_attention_heads=heads, num_key_value_heads=config["kv_heads"], head_dim=size,
        intermediate_size=config["mlp"], max_position_embeddings=config["positions"], rope_theta=config["rope_theta"],
        rms_norm_eps=config["norm_eps"],
    )  # fmt: skip
    if kind == "qwen2":
        if size * heads != width:
            raise ValueError("a qwen2 model (qkv_bias) has head_size * heads = width")
        return result | dict(use_sliding_window=False)
    return result | dict(attention_bias=False) | (dict(mlp_bias=False) if kind == "llama" else dict(use_sliding_window=False))


def _from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], where: Path) -> dict[str, Any]:
    """`Transformer` fields of GGUF metadata."""
    kind = metadata.get("general.architecture")
    if kind not in GGUF_ARCHITECTURES:
        raise ValueError(f"{where}: architecture {kind!r} is not implemented; {', '.join(GGUF_ARCHITECTURES)} are")

    def need(key: str) -> int:
        if not isinstance(value := metadata.get(f"{kind}.{key}"), int):
            raise ValueError(f"{where}: {kind}.{key} is {'missing' if value is None else 'not one number'}")
        return value

    for key in ("rope.scaling.type", "attention.sliding_window", "expert_count"):
        if (value := metadata.get(f"{kind}.{key}")) not in (None, "none", 0):
            raise ValueError(f"{where}: {kind}.{key} {value!r} is not implemented")
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{where}: tensor token_embd.weight is missing")
    width, heads = need("embedding_length"), need("attention.head_count")
    size = metadata.get(f"{kind}.attention.key_length") or width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.get(f"{kind}.{key}", size) != size:
            raise ValueError(f"{where}: {kind}.{key} {metadata[f'{kind}.{key}']} differs from the head size {size}")
    theta = metadata.get(f"{kind}.rope.freq_base", 10_000.0)
    eps = metadata.get(f"{kind}.attention.layer_norm_rms_epsilon")
    if eps is None:
        raise ValueError(f"{where}: {kind}.attention.layer_norm_rms_epsilon is missing")
    return dict(
        family="llama", vocab=tensors["token_embd.weight"].shape[0], layers=need("block_count"), width=width, heads=heads,
        kv_heads=need("attention.head_count_kv") if f"{kind}.attention.head_count_kv" in metadata else heads, head_size=size,
        mlp=need("feed_forward_length"), positions=need("context_length"), rope_theta=float(str(np.float32(theta))),
        norm_eps=float(str(np.float32(eps))), tied="output.weight" not in tensors, qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )  # fmt: skip


def _no_difference(missing: Iterable[str], unexpected: Iterable[str], what: str) -> None:
    for names, word in ((sorted(missing), "missing"), (sorted(unexpected), "unexpected")):
        if names:
            raise ValueError(f"{what} {names[0]} is {word}" + (f", and {len(names) - 1} more" if len(names) > 1 else ""))


def _dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


def _leaves(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    children = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if children is None:
        yield path, tree
    else:
        for key, child in children:
            yield from _leaves(child, (*path, key))


def _child(tree: Any, key: str | int) -> Any:
    return tree.setdefault(key, {}) if isinstance(tree, dict) else tree[key]


def _dtype(name: str) -> np.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(result, dict):
        raise ValueError(f"{file} must hold an object")
    return result
