"""Decoder-only transformers as policies over tokens: the Llama family (with what Qwen2 and Qwen3 add) and GPT-2.

Sources: Touvron et al. 2023, arXiv 2302.13971 (RMSNorm, rotary positions, SwiGLU); Ainslie et al. 2023, arXiv 2305.13245 (grouped
queries); Su et al. 2021, arXiv 2104.09864 (rotary positions); Radford et al. 2019 (GPT-2); Hu et al. 2021, arXiv 2106.09685
(LoRA).

Parameters are plain dicts of arrays, kernels ``[in, out]``::

    embed [V, width], positions [positions, width] (gpt2), norm {scale, bias (gpt2)}, head [V, width] (untied), value {kernel,
    bias}
    layers: a list of {attn_norm, q, k, v, o, q_norm and k_norm (qk_norm), mlp_norm, gate (llama), up, down}

A dense layer is ``{kernel, bias}``, and ``{kernel, bias, lora_a, lora_b}`` with an adapter.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.envs.base import TimeStep, restart
from rljax.envs.spaces import Space, Tokens
from rljax.networks.distributions import TokenCategorical
from rljax.networks.policy import Policy, PolicyOutput
from rljax.networks.precision import matmul
from rljax.options import check_fields, static

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes and switches of a transformer; ``[model]`` in a config."""

    family: str = static("llama", "llama (also Qwen2, Qwen3, Mistral) or gpt2", choices=("llama", "gpt2"))
    path: str = static(
        "", "pretrained weights, whose sizes replace those below: a Hugging Face directory, a GGUF file, or smollm2"
    )
    vocab: int = static(0, "rows of the embedding; 0: as many as the environment has tokens", low=0)
    layers: int = static(2, "blocks", low=1)
    width: int = static(64, "of the residual stream", low=1)
    heads: int = static(4, "query heads of a block", low=1)
    kv_heads: int = static(0, "key and value heads, each shared by several queries; 0: as many as heads", low=0)
    head_size: int = static(0, "of one head; 0: width / heads", low=0)
    mlp: int = static(256, "hidden size of the MLP", low=1)
    positions: int = static(1024, "learned positions of gpt2: the longest context", low=1)
    rope_theta: float = static(10_000.0, "base of the rotary frequencies", low=1.0)
    norm_eps: float = static(1e-5, "added to the variance in a norm", low=0.0)
    tied: bool = static(True, "the head that reads out logits is the embedding")
    qkv_bias: bool = static(False, "biases of query, key and value (Qwen2)")
    qk_norm: bool = static(False, "an RMSNorm of each query and key (Qwen3)")
    dtype: str = static("float32", "of the factors of dense layers; all else is float32", choices=DTYPES)
    scan_layers: bool = static(False, "compile one block for all layers: many of them compile sooner, few run slower")
    remat: bool = static(False, "recompute each block in the backward pass: less memory, more arithmetic")
    head_chunk: int = static(0, "tokens whose logits exist at once in the loss; 0: all", low=0)
    lora_rank: int = static(
        0, "train adapters of this rank on every dense layer of the blocks, and nothing else; 0: train all", low=0
    )
    lora_scale: float = static(2.0, "of the adapters: alpha / rank", low=0.0)

    def __post_init__(self):
        check_fields(self, "model")
        if self.lora_rank and not self.path:
            raise ValueError("model.lora_rank trains adapters of a pretrained model: set model.path too")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"model.kv_heads ({self.kv_heads}) must divide model.heads ({self.heads})")
        if not self.head_size and self.width % self.heads:
            raise ValueError(f"model.heads ({self.heads}) must divide model.width ({self.width}), or set model.head_size")
        if self.family == "llama" and self.size % 2:
            raise ValueError(f"model.head_size must be even for rotary positions, got {self.size}")

    @property
    def size(self) -> int:
        """Of one head."""
        return self.head_size or self.width // self.heads

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads


def init_params(model: Transformer, key: Array, vocab: int, has_value: bool = False) -> dict[str, Any]:
    """Random parameters: normal kernels of standard deviation 0.02, those that write to the residual stream divided by
    ``sqrt(2 layers)`` (Radford et al. 2019); unit scales, zero biases; a zero value head."""
    keys = iter(jax.random.split(key, 7 * model.layers + 3))
    is_gpt2 = model.family == "gpt2"

    def normal(shape: tuple[int, ...], scale: float = 0.02) -> Array:
        return scale * jax.random.normal(next(keys), shape)

    def dense(rows: int, columns: int, bias: bool, scale: float = 0.02) -> dict[str, Array]:
        kernel = {"kernel": normal((rows, columns), scale)}
        return {**kernel, "bias": jnp.zeros(columns)} if bias else kernel

    def norm(size: int, bias: bool) -> dict[str, Array]:
        return {"scale": jnp.ones(size), "bias": jnp.zeros(size)} if bias else {"scale": jnp.ones(size)}

    def block() -> dict[str, Any]:
        queries, keyed, out = model.heads * model.size, model.groups * model.size, 0.02 / (2 * model.layers) ** 0.5
        layer = {
            "attn_norm": norm(model.width, is_gpt2),
            "q": dense(model.width, queries, model.qkv_bias or is_gpt2),
            "k": dense(model.width, keyed, model.qkv_bias or is_gpt2),
            "v": dense(model.width, keyed, model.qkv_bias or is_gpt2),
            "o": dense(queries, model.width, is_gpt2, out),
            "mlp_norm": norm(model.width, is_gpt2),
            "up": dense(model.width, model.mlp, is_gpt2),
            "down": dense(model.mlp, model.width, is_gpt2, out),
        }
        if not is_gpt2:
            layer["gate"] = dense(model.width, model.mlp, False)
        if model.qk_norm:
            layer |= {"q_norm": norm(model.size, False), "k_norm": norm(model.size, False)}
        return layer

    params: dict[str, Any] = {"embed": normal((vocab, model.width)), "norm": norm(model.width, is_gpt2)}
    params["layers"] = [block() for _ in range(model.layers)]
    if is_gpt2:
        params["positions"] = normal((model.positions, model.width))
    if not model.tied:
        params["head"] = normal((vocab, model.width))
    if has_value:
        params["value"] = init_value(model)
    return params


def init_value(model: Transformer) -> dict[str, Array]:
    """A value head: zero, for every state."""
    return {"kernel": jnp.zeros((model.width, 1)), "bias": jnp.zeros(1)}


def init_adapters(model: Transformer, key: Array) -> dict[str, Any]:
    """LoRA's parameters for every dense layer of the blocks: ``lora_a`` uniform as He's for a linear layer, ``lora_b`` zero, so
    that at first they change nothing (Hu et al. 2021)."""
    queries, keyed = model.heads * model.size, model.groups * model.size
    sizes = {"q": (model.width, queries), "k": (model.width, keyed), "v": (model.width, keyed), "o": (queries, model.width)}
    sizes |= {"up": (model.width, model.mlp), "down": (model.mlp, model.width)}
    if model.family == "llama":
        sizes["gate"] = sizes["up"]
    keys = iter(jax.random.split(key, len(sizes) * model.layers))

    def adapter(rows: int, columns: int) -> dict[str, Array]:
        a = jax.random.uniform(next(keys), (rows, model.lora_rank), minval=-1.0, maxval=1.0) / rows**0.5
        return {"lora_a": a, "lora_b": jnp.zeros((model.lora_rank, columns))}

    return {"layers": [{name: adapter(*size) for name, size in sizes.items()} for _ in range(model.layers)]}


def join(base: Any, adapters: Any) -> Any:
    """The parameters of a model and those of its adapters, as one."""
    if isinstance(base, dict):
        both = {name: join(base[name], adapters[name]) for name in base if name in adapters}
        return {**base, **adapters, **both}
    return [join(b, a) for b, a in zip(base, adapters, strict=True)]


def merge(model: Transformer, params: Any) -> Any:
    """Joined parameters with every adapter added into its kernel."""
    if isinstance(params, list):
        return [merge(model, part) for part in params]
    if not isinstance(params, dict):
        return params
    if "lora_a" in params:
        kernel = params["kernel"] + model.lora_scale * (params["lora_a"] @ params["lora_b"])
        return {"kernel": kernel, **{name: x for name, x in params.items() if name == "bias"}}
    return {name: merge(model, part) for name, part in params.items()}


# The parts of a block. Activations are ``[..., width]``. A matrix product always gets two-dimensional rows: XLA on CPU is slow at
# three.


def _dense(model: Transformer, layer: dict[str, Array], x: Array) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    y = matmul(rows, layer["kernel"], model.dtype)
    if "lora_a" in layer:
        y = y + model.lora_scale * matmul(matmul(rows, layer["lora_a"], model.dtype), layer["lora_b"], model.dtype)
    if "bias" in layer:
        y = y + layer["bias"]
    return y.reshape(*x.shape[:-1], -1)


def _norm(model: Transformer, layer: dict[str, Array], x: Array) -> Array:
    """RMSNorm, or LayerNorm where there is a bias."""
    if "bias" in layer:
        x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + model.norm_eps) * layer["scale"]
    return x + layer["bias"] if "bias" in layer else x


def _rotation(model: Transformer, positions: Array, length: int) -> tuple[Array, Array]:
    """Cosine and sine of the rotary angles at ``positions [...]``, all below ``length``: two ``[..., 1, size / 2]``.

    They are read from a table, for XLA on CPU would compute them anew for every head and layer.
    """
    half = model.size // 2
    angle = np.arange(length)[:, None] * model.rope_theta ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angle), jnp.float32)[positions][..., None, :] for f in (np.cos, np.sin))
    return cos, sin


def _rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """``x [..., heads, size]`` turned by its `_rotation`: element i is paired with i + size / 2."""
    cos, sin = rotation
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _block(model: Transformer, layer: dict[str, Any], x: Array, rotation: Any, attend: Any, *memory: Any) -> tuple[Array, Any]:
    """``x [..., width]`` -> ``[..., width]`` and new memory; ``attend(q [..., heads, size], k, v [..., kv_heads, size], *memory)
    -> ([..., heads, size], new memory)``."""
    h = _norm(model, layer["attn_norm"], x)
    q, k, v = (_dense(model, layer[name], h).reshape(*x.shape[:-1], -1, model.size) for name in "qkv")
    if model.qk_norm:
        q, k = _norm(model, layer["q_norm"], q), _norm(model, layer["k_norm"], k)
    if model.family == "llama":
        q, k = _rotate(q, rotation), _rotate(k, rotation)
    mixed, new = attend(q, k, v, *memory)
    x = x + _dense(model, layer["o"], mixed.reshape(*x.shape[:-1], -1))
    h = _norm(model, layer["mlp_norm"], x)
    up = _dense(model, layer["up"], h)
    h = jax.nn.gelu(up) if model.family == "gpt2" else jax.nn.silu(_dense(model, layer["gate"], h)) * up
    return x + _dense(model, layer["down"], h), new


def _embed(model: Transformer, params: dict[str, Any], tokens: Array, positions: Array) -> Array:
    """``tokens [...]`` at ``positions [...]`` -> ``[..., width]``."""
    x = params["embed"][jnp.maximum(tokens, 0)].astype(jnp.float32)
    return x + params["positions"][jnp.minimum(positions, model.positions - 1)] if model.family == "gpt2" else x


def _through(
    model: Transformer, params: dict[str, Any], x: Array, positions: Array, length: int, attend: Any, *memories: Any
) -> tuple[Array, Any]:
    """``x [..., width]`` at ``positions [...]``, all below ``length``, through all blocks, each with its own of the ``memories``
    (see `_each_layer`): the residual stream ``[..., width]`` and the new memory of the layers."""
    rotation = _rotation(model, positions, length) if model.family == "llama" else None

    def block(x, of_layer):
        layer, *memory = of_layer
        return _block(model, layer, x, rotation, attend, *memory)

    block = jax.checkpoint(block) if model.remat else block
    if model.scan_layers:
        return jax.lax.scan(block, x, (jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"]), *memories))
    new = []
    for of_layer in zip(params["layers"], *memories, strict=True):
        x, memory = block(x, of_layer)
        new.append(memory)
    return x, new


def _each_layer(model: Transformer, memory: Any) -> Any:
    """The same memory for each layer: a list, or, where layers are scanned, stacked arrays."""
    if model.scan_layers:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (model.layers, *x.shape)), memory)
    return [memory] * model.layers


@jax.custom_vjp
def _softmax(scores: list[Array]) -> list[Array]:
    """Softmax over the last axes of several arrays together; masked scores are -inf, and some score of each row is not.

    Its derivative is written out: ``w (g - sum(g w))``.
    """
    highest = jnp.stack([s.max(-1) for s in scores if s.shape[-1]]).max(0)[..., None]
    exps = [jnp.exp(s - highest) for s in scores]
    total = sum((e.sum(-1, keepdims=True) for e in exps), jnp.float32(0.0))
    return [e / total for e in exps]


def _softmax_forward(scores: list[Array]) -> tuple[list[Array], list[Array]]:
    weights = _softmax(scores)
    return weights, weights


def _softmax_backward(weights: list[Array], gradients: list[Array]) -> tuple[list[Array]]:
    both = list(zip(weights, gradients, strict=True))
    mean = sum((jnp.einsum("...s,...s->...", g, w) for w, g in both), jnp.float32(0.0))[..., None]  # a sum is slow on CPU
    return ([w * (g - mean) for w, g in both],)


_softmax.defvjp(_softmax_forward, _softmax_backward)


def forward(model: Transformer, params: dict[str, Any], tokens: Array, segments: Array | None = None) -> Array:
    """Hidden states ``[B, S, width]`` after the last norm, of ``tokens`` int32 ``[B, S]`` padded anywhere with -1.

    Positions count real tokens only, and padding is attended to by none. With ``segments`` int32 ``[B, S]``, which do not
    decrease along a row, every segment is a text of its own: it starts at position 0 and sees no other.
    """
    is_real = tokens >= 0
    segments = jnp.zeros_like(tokens) if segments is None else segments
    before = jnp.cumsum(is_real, -1) - is_real  # real tokens to the left
    is_new = jnp.concatenate([jnp.ones_like(is_real[:, :1]), segments[:, 1:] != segments[:, :-1]], -1)
    positions = before - jax.lax.cummax(jnp.where(is_new, before, 0), axis=1)
    return encode(model, params, _embed(model, params, tokens, positions), positions, is_real, segments)


def encode(
    model: Transformer, params: dict[str, Any], x: Array, positions: Array, is_real: Array, segments: Array | None = None
) -> Array:
    """Hidden states ``[B, S, width]`` after the last norm, of what is embedded already: ``x [B, S, width]`` at ``positions
    [B, S]``, all below S, which matter to rotary embeddings alone; see `forward`."""
    return _norm(model, params["norm"], _prefill(model, params, x, positions, is_real, segments)[0])


def _prefill(
    model: Transformer, params: Any, x: Array, positions: Array, is_real: Array, segments: Array | None = None
) -> tuple[Array, Any]:
    """``x [P, S, width]`` -> residual stream ``[P, S, width]`` and the layers' keys ``[P, kv_heads, S, size]`` and values
    ``[P, kv_heads, size, S]``, as the products of `transformer` on CPU are fastest."""
    length = x.shape[1]
    seen = jnp.tril(jnp.ones((length, length), bool)) & is_real[:, None, :]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    seen = seen | jnp.eye(length, dtype=bool)  # a padding place sees itself alone, so that its row stays finite

    def attend(q, k, v):
        q = q.reshape(*q.shape[:2], model.groups, -1, model.size)
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        scores = jnp.einsum("ptgrd,pgsd->pgrts", q, k) * model.size**-0.5
        (weights,) = _softmax([jnp.where(seen[:, None, None], scores, -jnp.inf)])
        return jnp.einsum("pgrts,pgsd->ptgrd", weights, v), (k, v.swapaxes(2, 3))

    return _through(model, params, x, positions, length, attend)


def read_out(
    model: Transformer,
    params: dict[str, Any],
    hidden: Array,
    size: int,
    mask: Array | None = None,
    temperature: Array | float = 1.0,
    top_k: int = 0,
    top_p: Array | float = 1.0,
    min_p: Array | float = 0.0,
) -> TokenCategorical:
    """The distribution over the first ``size`` tokens after ``hidden [..., width]``."""
    head = params["embed" if model.tied else "head"][:size]
    return TokenCategorical(hidden, head, mask, temperature, top_p, min_p, top_k, model.head_chunk, model.dtype)


def reading(context: Array, steps: int) -> TimeStep:
    """Time steps ``[steps + 1, N]`` for `Policy.unroll` of a transformer over the completions of ``context`` int32 ``[N, S]``:
    each shows all of it, of which `unroll` reads what was said before. There are no rewards and no action masks."""
    timesteps = jax.vmap(restart)(context)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (steps + 1, *x.shape)), timesteps)


def transformer(
    model: Transformer,
    observation_space: Space,
    *,
    group_size: int = 1,
    temperature: Array | float = 1.0,
    top_k: int = 0,
    top_p: Array | float = 1.0,
    min_p: Array | float = 0.0,
    has_value: bool = False,
) -> Policy:
    """A transformer as a `Policy` over the tokens of an environment.

    ``start`` runs the prompt up to its last token through the network, once for each group of ``group_size`` adjacent rows, whose
    prompts are equal; the keys and values of the prompt are shared by the group in every later step. ``step`` adds the newest
    token to a cache of static size and ``unroll`` runs all tokens at once. An episode lasts one `start`: there is no reset inside
    it.

    The distribution is over ``observation_space.n`` tokens, at ``temperature``, of which ``top_k``, ``top_p`` and ``min_p`` cut
    the sampling (see `rljax.ops.sampling`) and not the log-probability.

    With ``model.lora_rank`` the parameters are the adapters alone, and the functions expect them joined to the base: see `join`.

    Raises:
      ValueError: observations that are no tokens, or a model with fewer rows or positions than the environment has tokens; names
        the key.
    """
    if not isinstance(observation_space, Tokens):
        raise ValueError(
            f"[model] takes token observations, the environment has {type(observation_space).__name__}; use algo.network"
        )
    space = observation_space
    vocab = model.vocab or space.n
    if vocab < space.n:
        raise ValueError(f"model.vocab ({vocab}) is smaller than the environment's {space.n} tokens")
    if model.family == "gpt2" and model.positions < space.length:
        raise ValueError(f"model.positions ({model.positions}) is shorter than the environment's {space.length} tokens")
    prompt, steps = space.prompt, space.length - space.prompt

    def output(params: dict[str, Any], x: Array, mask: Array | None) -> PolicyOutput:
        """``x [..., width]``, the residual stream after the last block."""
        hidden = _norm(model, params["norm"], x)
        distribution = read_out(model, params, hidden, space.n, mask, temperature, top_k, top_p, min_p)
        value = _dense(model, params["value"], hidden)[..., 0] if has_value else jnp.zeros(hidden.shape[:-1])
        return PolicyOutput(distribution, value)

    def init(key: Array, timestep: TimeStep) -> dict[str, Any]:
        del timestep
        if not model.lora_rank:
            return init_params(model, key, vocab, has_value)
        return init_adapters(model, key) | ({"value": init_value(model)} if has_value else {})

    def start(params: dict[str, Any], timestep: TimeStep) -> dict[str, Any]:
        tokens = timestep.observation[::group_size, : prompt - 1]
        is_real = tokens >= 0
        padding = prompt - 1 - is_real.sum(-1)  # [P]
        positions = jnp.maximum(jnp.arange(prompt - 1) - padding[:, None], 0)
        if prompt > 1:
            memory = _prefill(model, params, _embed(model, params, tokens, positions), positions, is_real)[1]
        else:
            nothing = jnp.zeros((tokens.shape[0], model.groups, 0, model.size))
            memory = _each_layer(model, (nothing, nothing.swapaxes(2, 3)))
        batch = timestep.observation.shape[0]
        empty = jnp.zeros((batch, model.groups, steps, model.size))
        said = _each_layer(model, (empty, empty))
        return {"prompt": memory, "said": said, "padding": padding, "step": jnp.zeros((), jnp.int32)}

    def attention(q: Array, prompt_memory: Any, is_real: Array, k: Array, v: Array, seen: Array) -> Array:
        """``q [B, T, heads, size]`` over the prompt's memory, see `_prefill`, and what was said, ``k, v [B, kv_heads,
        U, size]`` of which ``seen [T, U]``; ``[B, T, heads, size]``."""
        batch, length = q.shape[:2]
        prompts = batch // group_size
        shared = q.reshape(prompts, group_size, length, model.groups, model.heads // model.groups, model.size)
        own = q.reshape(batch, length, model.groups, -1, model.size)
        scale = model.size**-0.5
        of_prompt = jnp.einsum("pbtgrd,pgsd->pbgrts", shared, prompt_memory[0]) * scale
        of_prompt = jnp.where(is_real[:, None, None, None, None], of_prompt, -jnp.inf).reshape(batch, *of_prompt.shape[2:])
        of_said = jnp.where(seen, jnp.einsum("btgrd,bgud->bgrtu", own, k) * scale, -jnp.inf)
        on_prompt, on_said = _softmax([of_prompt, of_said])
        on_prompt = on_prompt.reshape(prompts, group_size, *on_prompt.shape[1:])
        mixed = jnp.einsum("pbgrts,pgds->pbtgrd", on_prompt, prompt_memory[1]).reshape(own.shape)
        return mixed + jnp.einsum("bgrtu,bgud->bgrtd", on_said, v).transpose(0, 3, 1, 2, 4)

    def step(params: dict[str, Any], carry: dict[str, Any], timestep: TimeStep) -> tuple[dict[str, Any], PolicyOutput]:
        now = carry["step"]
        token = jax.lax.dynamic_slice_in_dim(timestep.observation, prompt - 1 + now, 1, axis=1)
        padding = jnp.repeat(carry["padding"], group_size)
        positions = prompt - 1 + now - padding[:, None]
        is_real = jnp.arange(prompt - 1) >= carry["padding"][:, None]
        seen = (jnp.arange(steps) <= now)[None]

        def attend(q, k, v, prompt_memory, said):
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(cache, new.swapaxes(1, 2), now, axis=2)
                for cache, new in zip(said, (k, v), strict=True)
            )
            return attention(q, prompt_memory, is_real, keys, values, seen), (keys, values)

        x = _embed(model, params, token, positions)
        x, said = _through(model, params, x, positions, space.length, attend, carry["prompt"], carry["said"])
        return {**carry, "said": said, "step": now + 1}, output(params, x[:, 0], timestep.action_mask)

    def unroll(params: dict[str, Any], carry: dict[str, Any], timesteps: TimeStep) -> PolicyOutput:
        length = timesteps.reward.shape[0]
        tokens = jax.lax.dynamic_slice_in_dim(timesteps.observation[-1], prompt - 1, length, axis=1)
        padding = jnp.repeat(carry["padding"], group_size)
        positions = prompt - 1 + jnp.arange(length) - padding[:, None]
        is_real = jnp.arange(prompt - 1) >= carry["padding"][:, None]
        seen = jnp.tril(jnp.ones((length, length), bool))

        def attend(q, k, v, prompt_memory):
            return attention(q, prompt_memory, is_real, k.swapaxes(1, 2), v.swapaxes(1, 2), seen), None

        x = _embed(model, params, tokens, positions)
        x, _ = _through(model, params, x, positions, space.length, attend, carry["prompt"])
        return output(params, x.swapaxes(0, 1), timesteps.action_mask)

    return Policy(init, start, step, unroll)
