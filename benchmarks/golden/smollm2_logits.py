"""Logits of SmolLM2-135M-Instruct by transformers, written to `tests/data/smollm2_logits.json`.

    python -m venv VENV && VENV/bin/pip install -r benchmarks/speed/requirements-trl.txt gguf
    VENV/bin/python benchmarks/golden/smollm2_logits.py FILE     # the GGUF file that `rljax fetch smollm2` names

transformers reads the GGUF file by its own code, in float32. Of each position of twenty prompts are kept: the likeliest token,
its logit, the logarithm of the sum of all exponentials, and the logits of `COUNT` tokens that differ from position to position.
`tests/lm/test_weights.py` compares. With `--all OUT.npz` every logit is kept there too.
"""

# pyright: reportMissingImports=false

import argparse
import json
import os
from importlib import metadata
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

OUT = Path(__file__).resolve().parents[2] / "tests" / "data" / "smollm2_logits.json"
COUNT = 6
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def add(a, b):\n    return",
    "<|im_start|>user\nHow many legs has a spider?<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at",
    "The opposite of hot is",
    "12 + 30 =",
    "Zwei plus zwei ist",
    "import numpy as np\n\nx = np.zeros((",
    "Dear Sir or Madam,",
    "The quick brown fox jumps over the lazy",
    "E = mc",
    "\n\n\n",
    "To be, or not to be, that is the",
    "a a a a a a a a a a a a a a a a",
    "Q: What is the colour of the sky?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "SELECT name FROM users WHERE",
    "The patient was given 5 mg of",
    "Ärger über Öl: größer als",
]


def tokens_at(position: int, vocab: int) -> np.ndarray:
    """The ids whose logits are kept of a position; the test has the same rule."""
    return (np.arange(COUNT) * 8191 + position * 127) % vocab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--all", type=Path, help="keep every logit in this file too")
    options = parser.parse_args()
    source = {"gguf_file": options.file.name}
    tokenizer = AutoTokenizer.from_pretrained(options.file.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(options.file.parent, dtype=torch.float32, **source).eval()
    prompts, everything = [], {}
    for number, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].numpy()
        everything[f"ids{number}"], everything[f"logits{number}"] = np.array(ids), logits
        some = [logits[t, tokens_at(t, logits.shape[1])] for t in range(len(ids))]
        prompts.append(
            {
                "ids": ids,
                "likeliest": logits.argmax(-1).tolist(),
                "highest": [float(f"{x:.7g}") for x in logits.max(-1)],
                "log_sum": [float(f"{x:.7g}") for x in np.logaddexp.reduce(logits.astype(np.float64), axis=-1)],
                "some": [[float(f"{x:.7g}") for x in row] for row in some],
            }
        )
    versions = {name: metadata.version(name) for name in ("transformers", "torch", "gguf")}
    OUT.write_text(json.dumps({"versions": versions, "prompts": prompts}, separators=(",", ":")) + "\n")
    if options.all:
        np.savez(options.all, **everything)


if __name__ == "__main__":
    main()
