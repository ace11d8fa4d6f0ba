import json
import random

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from rljax.lm import fetch, weights
from rljax.lm.tokenizer import CharTokenizer, Tokenizer

CORPUS = ["the number 12 and the number 345 are in the text", "don't say the words  twice\n\n", "é日本😀 the the 2024 12 34"] * 3
TEXTS = [
    "", " ", "  ", "\n", "\r\n\t", "the number", " the  number ", "a\nb\r\nc", "1", "12", "1234567890", "x=12+34", "-3.14e10",
    "\uff11\uff12", "don't DON'T", "it\u2019s", "naïve café", "cafe\u0301", "日本語", "한국어", "العربية", "ไทย",
    "😀", "👨\u200d👩", "🇫🇷", "a😀b", "\u200b", "\ufeffBOM", "\u00a0", "\u2028", "\x00", "\x01\x7f", "\ufffd", "\U0010ffff",
    "Ġhello", "Ċ", "▁x", "<0x41>", "def f(x):\n    return 1", "A" * 50, "\\n", "ß \u017f ﬁ",
]  # fmt: skip
CHATML = (
    "{% for m in messages %}\n{{ '<s>' if loop.first else '' }}<|{{ m['role'] }}|>{{ m['content'] }}</s>\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level():
    """A byte-level BPE of 300 tokens and three added ones, in which digits stand alone; BOS is added."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=alphabet, special_tokens=["<s>", "</s>", "<pad>"]
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    inner.add_tokens([tokenizers.AddedToken("é日", special=False, normalized=False)])
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return inner


def byte_fallback():
    """What Llama 2 has: spaces written as U+2581, and bytes as tokens of their own."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in ["\u2581", *"abdehnortu12", "th", "the", "\u2581the", "\u2581\u2581"]:
        vocabulary[token] = len(vocabulary)
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "\u2581")]
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return inner


def write(path, inner, template=CHATML, **config):
    """A Hugging Face directory."""
    path.mkdir(exist_ok=True)
    inner.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": template} | config
    config = {key: value for key, value in config.items() if value is not None}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("byte_level"), byte_level(), pad_token="<pad>")


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory):
    return Tokenizer.load(write(tmp_path_factory.mktemp("byte_fallback"), byte_fallback()))


def joined(tokenizer, ids):
    return b"".join(map(tokenizer.bytes_of, ids))


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_are_the_text(tokenizer, fallback, text):
    ids = tokenizer.encode(text)
    assert ids[0] == 0 and joined(tokenizer, ids) == text.encode()
    assert tokenizer.decode(ids) == text
    ids = fallback.encode(text)
    assert ids[0] == 1
    spaced = f" {text}" if text else ""  # sentencepiece begins every text with a space, and takes it off when it decodes
    assert joined(fallback, ids) == spaced.replace("\u2581", " ").encode()
    assert fallback.decode(ids) == text.replace("\u2581", " ")


def test_bytes_of_random_texts(tokenizer, fallback):
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("the number 12  \n\t.é日😀\u0301\U0010ffff<>'") for _ in range(rng.randint(1, 30)))
        assert joined(tokenizer, tokenizer.encode(text)) == text.encode()
        assert joined(fallback, fallback.encode(text)) == f" {text}".encode()


def test_tokens_that_are_part_of_a_character(tokenizer):
    ids = tokenizer.encode("é😀", bos=False)
    parts = [tokenizer.bytes_of(id) for id in ids]
    assert parts[-2:] == [b"\xf0\x9f", b"\x98\x80"]  # as trained: neither is a character
    assert b"".join(parts) == "é😀".encode()
    assert tokenizer.decode(ids[:-1]) == "é\ufffd"
    assert tokenizer.decode(np.array(ids)) == "é😀"


def test_every_id_has_bytes(tokenizer, fallback):
    table = [tokenizer.bytes_of(id) for id in range(tokenizer.vocab_size)]
    assert {bytes([byte]) for byte in range(256)} <= set(table)
    assert [id for id, entry in enumerate(table) if not entry] == [0, 1, 2]  # special tokens stand for no text
    assert tokenizer.bytes_of(tokenizer.vocab_size - 2) == b"<think>"
    assert tokenizer.bytes_of(tokenizer.vocab_size - 1) == "é日".encode()  # added: as it is, not in byte characters
    assert [fallback.bytes_of(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert fallback.bytes_of(fallback.encode(" the")[-1]) == b" the"
    for id in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {id} is not in 0 to {tokenizer.vocab_size - 1}"):
            tokenizer.bytes_of(id)


def test_bos_is_never_doubled(tokenizer, fallback):
    for each, bos in ((tokenizer, 0), (fallback, 1)):
        assert each.bos_id == bos
        plain = each.encode("the", bos=False)
        assert bos not in plain
        assert each.encode("the") == [bos, *plain]
        assert each.encode("<s>the").count(bos) == 1
        assert each.encode("<s>the", bos=False)[0] == bos  # it is in the text
        assert each.encode("") == [bos]
    rendered = tokenizer.chat([{"role": "user", "content": "the"}])
    assert rendered.startswith("<s>") and tokenizer.encode(rendered).count(0) == 1


@pytest.mark.parametrize("add", [True, False])
def test_add_bos_token_of_the_config_decides(add, tmp_path):
    inner = byte_level()
    if add:
        inner.post_processor = processors.ByteLevel()
    tokenizer = Tokenizer.load(write(tmp_path, inner, add_bos_token=add))
    assert tokenizer.bos_id == (0 if add else None)
    assert (tokenizer.encode("the")[0] == 0) is add


def test_a_post_processor_that_ends_texts_is_not_a_bos(tmp_path):
    inner = byte_level()
    inner.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    for bos in ("<s>", None):
        tokenizer = Tokenizer.load(write(tmp_path, inner, bos_token=bos))
        assert tokenizer.bos_id is None and not {0, 1} & set(tokenizer.encode("the"))


def test_special_tokens(tokenizer):
    ids = tokenizer.encode("the</s><think>", bos=False)
    assert ids[-2:] == [1, tokenizer.vocab_size - 2]
    assert tokenizer.decode(ids) == "the<think>"
    assert tokenizer.decode(ids, special=True) == "the</s><think>"
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((1,), 2)


@pytest.mark.parametrize(
    ("generation", "config", "eos_ids", "pad_id"),
    [
        (None, {}, (1,), 1),  # no padding token: the EOS
        ({"eos_token_id": [2, 7]}, {}, (2, 7, 1), 2),
        ({"eos_token_id": 1, "pad_token_id": 5}, {}, (1,), 5),
        ({"eos_token_id": 1, "pad_token_id": 5}, {"pad_token": "<pad>"}, (1,), 2),
        ({}, {"eos_token": None}, (), 0),
        ({"eos_token_id": 0}, {"eos_token": None}, (0,), 0),
    ],
)
def test_ends_and_padding(generation, config, eos_ids, pad_id, tmp_path):
    write(tmp_path, byte_level(), **config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.eos_ids, tokenizer.pad_id) == (eos_ids, pad_id)


def test_padding_and_truncation_that_were_saved_are_off(tmp_path):
    inner = byte_level()
    inner.enable_truncation(3)
    inner.enable_padding(length=99)
    assert Tokenizer.load(write(tmp_path, inner)).decode(Tokenizer.load(tmp_path).encode("the number 12")) == "the number 12"


def test_files_make_the_same_tokenizer(tokenizer, directory, tmp_path):
    assert tokenizer.files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    for name, text in tokenizer.files.items():
        (tmp_path / name).write_text(text)
    again = Tokenizer.load(tmp_path)
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert again.files == tokenizer.files


def test_directories_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer.json; save the fast tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read"):
        Tokenizer.load(tmp_path)
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="must be byte-level BPE or have byte fallback"):
        Tokenizer.load(tmp_path)
    write(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not valid JSON"):
        Tokenizer.load(tmp_path)


# Chat templates.

MESSAGES = [{"role": "system", "content": "Be <brief> & 'é'."}, {"role": "user", "content": "12+34?"}]


def with_template(tmp_path, template):
    return Tokenizer.load(write(tmp_path, byte_level(), template))


def test_a_chat_is_written_out(tokenizer):
    text = "<s><|system|>Be <brief> & 'é'.</s>\n<|user|>12+34?</s>\n"
    assert tokenizer.chat(MESSAGES, add_generation_prompt=False) == text
    assert tokenizer.chat(MESSAGES) == text + "<|assistant|>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "Be <brief> & \'é\'."}'),  # no HTML escapes
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("  {% for m in messages %}\n    {{ m.role }}\n  {% endfor %}\n", "    system\n    user\n"),  # trim and lstrip blocks
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "12+34?"),
        ("{% if tools %}{{ tools }}{% else %}none{% endif %}{{ x }}", "none5"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
    ],
)
def test_what_templates_may_use(template, expected, tmp_path):
    assert with_template(tmp_path, template).chat(MESSAGES, x=5) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the chat template fails: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ raise_exception.__globals__['x'] }}", "unsafe"),
        ("{{ messages.append(1) }}", "is not safely callable|unsafe"),
        ("{{ messages[0].update({}) }}", "is not safely callable|unsafe"),
        ("{{ range(10000000) }}", "range"),
        ("{{ 1 + messages }}", "unsupported operand"),
        ("{% if %}", "fails"),
    ],
)
def test_templates_that_fail_or_reach_outside(template, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        with_template(tmp_path, template).chat(MESSAGES)
    assert str(tmp_path) in str(error.value)


def test_where_the_template_is(tmp_path):
    with pytest.raises(ValueError, match="has no chat template"):
        with_template(tmp_path, None).chat(MESSAGES)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert with_template(tmp_path, named).chat(MESSAGES) == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).chat(MESSAGES) == "file"


# GGUF: the tokenizer of above written by gguf's own writer.


def write_gguf(path, inner, pre="smollm", model="gpt2", template=CHATML, add_bos=True, unused=(), drop=()):
    state = json.loads(inner.to_str())
    added = {entry["id"]: entry for entry in state["added_tokens"]}
    tokens = sorted((id, token) for token, id in inner.get_vocab(True).items())
    kinds = [3 if added.get(id, {}).get("special") else 4 if id in added else 1 for id, _ in tokens]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for _, token in tokens] + list(unused))
    writer.add_token_types(kinds + [5] * len(unused))
    if "merges" not in drop:
        writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_eot_token_id(2)
    writer.add_add_bos_token(add_bos)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_has_the_same_tokenizer(tokenizer, tmp_path):
    got = Tokenizer.load(write_gguf(tmp_path / "m.gguf", byte_level(), unused=["[PAD1]"]))
    for text in [*TEXTS, "<s>the</s><think>", " </s> the", "é日é"]:
        assert got.encode(text) == tokenizer.encode(text)
        assert got.decode(got.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert (got.vocab_size, got.pad_id, got.bos_id, got.eos_ids) == (tokenizer.vocab_size, 2, 0, (1, 2))
    assert [got.bytes_of(id) for id in range(got.vocab_size)] == [tokenizer.bytes_of(id) for id in range(got.vocab_size)]
    assert got.chat(MESSAGES) == tokenizer.chat(MESSAGES)
    (tmp_path / "out").mkdir()
    for name, text in got.files.items():
        (tmp_path / "out" / name).write_text(text)
    again = Tokenizer.load(tmp_path / "out")
    assert (again.eos_ids, again.pad_id, again.bos_id) == (got.eos_ids, got.pad_id, got.bos_id)
    assert [again.encode(text) for text in TEXTS] == [got.encode(text) for text in TEXTS]


@pytest.mark.parametrize(("pre", "tokens"), [("gpt-2", ["12", " 1234"]), ("smollm", ["1", "2", " ", "1", "2", "3", "4"])])
def test_digits_stand_alone_only_where_the_file_says_so(pre, tokens, tmp_path):
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=alphabet, special_tokens=["<s>", "</s>", "<pad>"]
    )
    inner.train_from_iterator([" 1234 1234 12"] * 9, trainer)  # digits do merge
    got = Tokenizer.load(write_gguf(tmp_path / "m.gguf", inner, pre=pre, add_bos=False))
    assert [got.bytes_of(id).decode() for id in got.encode("12 1234")] == tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(model="llama"), "tokenizer 'llama' is not implemented; only byte-level BPE"),
        (dict(pre="tekken"), "pre-tokenizer 'tekken' is not implemented; gpt-2, smollm"),
        (dict(drop=("merges",)), "tokenizer.ggml.merges is missing"),
    ],
)
def test_gguf_tokenizers_that_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", byte_level(), **options))


# Characters.


def test_characters():
    tokenizer = CharTokenizer("0123456789+= é日")
    assert tokenizer.vocab_size == 16 and tokenizer.eos_ids == (15,) and tokenizer.pad_id == 15 and tokenizer.bos_id is None
    assert tokenizer.encode("12+3=é日") == [1, 2, 10, 3, 11, 13, 14]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([1, 2, 15]) == "12" and tokenizer.decode(np.array([1, 15]), special=True) == "1<eos>"
    assert joined(tokenizer, tokenizer.encode("1é日")) == "1é日".encode()
    assert tokenizer.bytes_of(15) == b""
    assert tokenizer.chat([{"role": "user", "content": "1+"}, {"role": "user", "content": "2="}]) == "1+2="
    assert json.loads(tokenizer.files["generation_config.json"])["eos_token_id"] == 15
    assert tokenizer == CharTokenizer("0123456789+= é日") and hash(tokenizer) == hash(CharTokenizer("0123456789+= é日"))


def test_characters_that_are_refused():
    with pytest.raises(ValueError, match="character 'b' is not in the alphabet 'a12'"):
        CharTokenizer("a12").encode("1b2c")
    for id in (-1, 4):
        with pytest.raises(ValueError, match=f"token id {id} is not in 0 to 3"):
            CharTokenizer("a12").decode([0, id])
    for alphabet in ("", "aba"):
        with pytest.raises(ValueError, match="an alphabet is one or more different characters"):
            CharTokenizer(alphabet)


def test_both_kinds_have_the_same_interface():
    def public(kind):
        return {name for name in {*dir(kind), *kind.__dataclass_fields__} if not name.startswith("_")}

    assert public(Tokenizer) - {"load"} == public(CharTokenizer) - {"alphabet"}


# Against other programs.


@pytest.mark.slow
def test_the_real_model_s_tokenizer(tmp_path):
    try:
        path = fetch.fetch("smollm2")
    except RuntimeError as error:
        pytest.skip(str(error))
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.bos_id) == (49152, (2,), None)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert joined(tokenizer, ids) == text.encode() and tokenizer.decode(ids) == text
    assert [tokenizer.bytes_of(id) for id in tokenizer.encode("x 12+345")] == [b"x", b" ", *(b"%c" % c for c in b"12+345")]
    assert tokenizer.chat([{"role": "user", "content": "hi"}]).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    config, params = weights.load(path)
    small = config | dict(layers=1)
    weights.save(tmp_path, small, params | {"layers": params["layers"][:1]}, tokenizer.files)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>"]:
        assert oracle.encode(text) == tokenizer.encode(text), text
        assert oracle.decode(oracle.encode(text)) == tokenizer.decode(tokenizer.encode(text), special=True)
    assert oracle.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == tokenizer.chat(MESSAGES)
    assert oracle.eos_token_id == 2 and oracle.pad_token_id == tokenizer.pad_id
