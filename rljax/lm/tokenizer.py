"""Text to token ids and back, the bytes of each token, and chat templates.

`Tokenizer` wraps `tokenizers.Tokenizer` with what is asked of it here; `CharTokenizer` has the same interface for small tasks.
"""

import dataclasses
import datetime
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rljax.lm import weights

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json")
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")

# How a text is cut before merging, by the name that llama.cpp gives it: digits alone or not, and a pattern; None is GPT-2's.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CUTS: dict[str, tuple[bool, str | None]] = {
    "gpt-2": (False, None),
    "smollm": (True, None),
    "qwen2": (False, rf"{_WORDS}|\p{{N}}|{_REST}"),
    "llama-bpe": (False, rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),
}
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types of GGUF


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A byte-level BPE or a sentencepiece model with byte fallback.

    Attributes:
      name: where it came from, for messages.
      files: the texts of a Hugging Face directory by name; `weights.save` writes them.
      eos_ids: every id that ends a generation; of ``generation_config.json`` and the tokenizer's own.
      pad_id: for places that no mask counts. It may be an EOS: masks must come from lengths, never from ids.
      bos_id: what `encode` begins with; None where the tokenizer adds nothing.
    """

    name: str
    files: Mapping[str, str] = dataclasses.field(repr=False)
    eos_ids: tuple[int, ...]
    pad_id: int
    bos_id: int | None
    _inner: tokenizers.Tokenizer = dataclasses.field(repr=False)
    _named: Mapping[str, str] = dataclasses.field(repr=False)
    _template: str | None = dataclasses.field(repr=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """The tokenizer of a Hugging Face directory (``tokenizer.json``) or of a ``.gguf`` file (byte-level BPE only).

        Raises:
          ValueError: there is none, or one of a kind whose bytes are not known.
        """
        path = Path(path)
        if path.suffix == ".gguf":
            return cls._of(str(path), _files_of_gguf(path))
        if not (path / "tokenizer.json").is_file():
            raise ValueError(f"{path} has no tokenizer.json; save the fast tokenizer there (save_pretrained)")
        return cls._of(str(path), {name: (path / name).read_text("utf-8") for name in FILES if (path / name).is_file()})

    @classmethod
    def _of(cls, name: str, files: dict[str, str]) -> "Tokenizer":
        try:
            inner = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{name}: tokenizer.json cannot be read: {error}") from error
        if _byte_level(inner) is None:
            raise ValueError(f"{name}: a tokenizer must be byte-level BPE or have byte fallback, so that every text has ids")
        inner.no_padding()
        inner.no_truncation()
        config, special, generation = (
            _json(name, file, files) for file in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
        )
        named = {key: text for key in NAMED if (text := _text(config.get(key)) or _text(special.get(key)))}
        ids = {key: id for key, text in named.items() if (id := inner.token_to_id(text)) is not None}
        declared = generation.get("eos_token_id")
        ends: list[int] = [declared] if isinstance(declared, int) else list(declared or [])
        ends = list(dict.fromkeys([*ends, *([ids["eos_token"]] if "eos_token" in ids else [])]))
        pads = [ids.get("pad_token"), generation.get("pad_token_id"), *ends, 0]
        first = next(iter(inner.encode("").ids), None)  # what the post-processor adds; it may be an EOS
        adds = config.get("add_bos_token")
        adds = first is not None and first == ids.get("bos_token", None if first in ends else first) if adds is None else adds
        bos = ids.get("bos_token", first) if adds else None
        template = files.get("chat_template.jinja") or config.get("chat_template")
        if isinstance(template, list):  # several named ones
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return cls(name, files, tuple(ends), next(pad for pad in pads if pad is not None), bos, inner, named, template)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id. A model's embedding can have more rows."""
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of a text. BOS comes first where the tokenizer adds one, unless the text begins with it (as templates do).

        Special tokens that are written out in the text become their ids.

        Args:
          text: any string.
          bos: False for a text that continues other tokens.
        """
        ids = self._inner.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if bos and self.bos_id is not None and ids[:1] != [self.bos_id] else ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ids; what is not UTF-8 becomes U+FFFD. A sentencepiece model drops a leading space.

        Args:
          ids: any integers, also of numpy.
          special: special tokens are written out, else left out.
        """
        return self._inner.decode([int(id) for id in ids], skip_special_tokens=not special)

    def bytes_of(self, id: int) -> bytes:
        """The bytes that a token adds to a text, exactly; b"" for special tokens and ids of no token.

        Raises:
          ValueError: the id is not below `vocab_size`.
        """
        if not 0 <= id < self.vocab_size:
            raise ValueError(f"{self.name}: token id {id} is not in 0 to {self.vocab_size - 1}")
        return self._bytes[id]

    @functools.cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        byte_level, added = _byte_level(self._inner), self._inner.get_added_tokens_decoder()
        table = [b""] * self.vocab_size
        for token, id in self._inner.get_vocab(with_added_tokens=True).items():
            if id in added:
                table[id] = b"" if added[id].special else added[id].content.encode()
            elif byte_level:
                known = all(character in _BYTES for character in token)
                table[id] = bytes(_BYTES[character] for character in token) if known else token.encode()
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                table[id] = bytes([int(token[3:5], 16)])
            else:
                table[id] = token.replace("\u2581", " ").encode()
        return tuple(table)

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Messages written out by the model's chat template, as transformers does.

        The template comes with the model and is not trusted: it runs in jinja2's immutable sandbox.

        Args:
          messages: dicts with ``role`` and ``content``.
          add_generation_prompt: end with the beginning of an answer.
          **variables: others that a template knows, such as ``tools``.

        Raises:
          ValueError: there is no template, or it refuses the messages or fails.
        """
        if self._template is None:
            raise ValueError(f"{self.name} has no chat template; encode a text of your own")
        values = {"tools": None, "documents": None} | dict(self._named) | variables
        try:
            template = _environment().from_string(self._template)
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # a template can fail in any way
            raise ValueError(f"{self.name}: the chat template fails: {error or type(error).__name__}") from error


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """One id for each character of an alphabet, and the last id for the end; the interface of `Tokenizer`.

    Raises:
      ValueError: the alphabet is empty or holds a character twice.
    """

    alphabet: str

    def __post_init__(self) -> None:
        if len(set(self.alphabet)) != len(self.alphabet) or not self.alphabet:
            raise ValueError(f"an alphabet is one or more different characters, got {self.alphabet!r}")

    @property
    def name(self) -> str:
        return "characters"

    @property
    def files(self) -> dict[str, str]:
        """A token for each character; a text with a character that is not in the alphabet is refused there too."""
        end = "<eos>"
        inner = tokenizers.Tokenizer(models.WordLevel({**self._ids, end: self.pad_id}, unk_token=""))
        inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
        inner.add_special_tokens([end])
        ids = {"bos_token_id": None, "eos_token_id": self.eos_ids[0], "pad_token_id": self.pad_id}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
        config |= {"clean_up_tokenization_spaces": False}
        return {
            "tokenizer.json": inner.to_str(pretty=True) + "\n",
            "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
            "generation_config.json": json.dumps(ids) + "\n",
        }

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet) + 1

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (len(self.alphabet),)

    @property
    def pad_id(self) -> int:
        return len(self.alphabet)

    @property
    def bos_id(self) -> None:
        return None

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {character: id for id, character in enumerate(self.alphabet)}

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """An id per character; there is no BOS.

        Raises:
          ValueError: a character is not in the alphabet.
        """
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise ValueError(f"character {error.args[0]!r} is not in the alphabet {self.alphabet!r}") from None

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Characters of ids; the end is left out, or "<eos>" with ``special``."""
        return "".join("<eos>" if special and id in self.eos_ids else self.bytes_of(id).decode() for id in map(int, ids))

    def bytes_of(self, id: int) -> bytes:
        """As `Tokenizer.bytes_of`."""
        if not 0 <= id < self.vocab_size:
            raise ValueError(f"token id {id} is not in 0 to {self.vocab_size - 1}")
        return self.alphabet[id : id + 1].encode()

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The contents of the messages, one after another."""
        return "".join(message["content"] for message in messages)


def _byte_characters() -> Iterator[tuple[str, int]]:
    """The character that stands for each byte in a byte-level vocabulary (Radford et al. 2019): printable ones for themselves,
    the others from U+0100 on."""
    beyond = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            yield chr(byte), byte
        else:
            yield chr(beyond), byte
            beyond += 1


_BYTES = dict(_byte_characters())


def _byte_level(inner: tokenizers.Tokenizer) -> bool | None:
    """Whether tokens are written in byte characters; False for sentencepiece with byte fallback, None for neither."""
    decoder = {} if inner.decoder is None else json.loads(inner.decoder.__getstate__())
    kinds = {part.get("type") for part in decoder.get("decoders", [decoder])}
    return True if "ByteLevel" in kinds else False if "ByteFallback" in kinds else None


def _files_of_gguf(path: Path) -> dict[str, str]:
    """The tokenizer of a GGUF file as the files of a Hugging Face directory."""
    metadata, _ = weights.read_gguf(path)
    fields = {key.removeprefix("tokenizer."): value for key, value in metadata.items() if key.startswith("tokenizer.")}
    if fields.get("ggml.model") != "gpt2":
        raise ValueError(f"{path}: tokenizer {fields.get('ggml.model')!r} is not implemented; only byte-level BPE (gpt2) is")
    if (cut := fields.get("ggml.pre", "gpt-2")) not in _CUTS:
        raise ValueError(f"{path}: pre-tokenizer {cut!r} is not implemented; {', '.join(_CUTS)} are")
    if missing := {"ggml.tokens", "ggml.merges"} - fields.keys():
        raise ValueError(f"{path}: tokenizer.{min(missing)} is missing")
    tokens: list[str] = fields["ggml.tokens"]
    kinds: list[int] = fields.get("ggml.token_type", [1] * len(tokens))
    # A merge is two tokens with a space between, and a token holds none: byte 32 is written as another character.
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in fields["ggml.merges"])]
    vocabulary = {token: id for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    try:
        inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut == "llama-bpe"))
    except Exception as error:
        raise ValueError(f"{path}: the vocabulary and merges do not fit: {error}") from error
    digits, pattern = _CUTS[cut]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        inner.normalizer = normalizers.NFC()
    added = [
        tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    inner.add_tokens(added)
    ids = {f"{key}_token": fields.get(f"ggml.{name}_token_id") for key, name in
           (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}  # fmt: skip
    config: dict[str, Any] = {key: tokens[id] for key, id in ids.items() if id is not None and id < len(tokens)}
    if fields.get("ggml.add_bos_token") and "bos_token" in config:
        bos = config["bos_token"]
        inner.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, ids["bos_token"])])
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if "chat_template" in fields:
        config["chat_template"] = fields["chat_template"]
    ends = [id for key in ("eos", "eot", "eom") if (id := fields.get(f"ggml.{key}_token_id")) is not None]
    generation = {f"{key}_id": id for key, id in ids.items() if key != "unk_token"} | {"eos_token_id": list(dict.fromkeys(ends))}
    return {
        "tokenizer.json": inner.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(generation) + "\n",
    }


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, by which some templates mark what the model wrote: its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What chat templates are written for: transformers' settings, filter and functions."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    extensions = [jinja2.ext.loopcontrols, _Generation]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _text(token: Any) -> str | None:
    """A token as ``tokenizer_config.json`` holds it: its text, or an object with it."""
    return token.get("content") if isinstance(token, dict) else token


def _json(name: str, file: str, files: Mapping[str, str]) -> dict[str, Any]:
    try:
        return json.loads(files.get(file, "{}"))
    except ValueError as error:
        raise ValueError(f"{name}: {file} is not valid JSON: {error}") from error
