"""Converts GGUF files, once, to checkpoint folders with configuration and tokenizer; weights stay in the file."""

import errno
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model.loading.checkpoint import GGUF_TENSORS, cache_folder, read_json, weight_sample
from engine.model.loading.gguf_config import complete_config, find_end_tokens, find_pooling
from engine.model.loading.other_weights import refuse_missing, refuse_unread

LOGGER = logging.getLogger("batchloom.engine")

_CONVERTER_VERSION = 9

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_OF_MISTRAL = ("architectures", "model_type", "sliding_window")

_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Vocabularies, by their pre-tokenizers, in which a word is looked up before it is merged, and whose texts begin with a
token of their own unless the file says otherwise."""

_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
"""Pre-tokenizers that make each digit a word, and of all else GPT-2's words; names and rules are llama.cpp's."""

_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "mellum", "exaone4")
"""Pre-tokenizers that make GPT-2's words."""


def open_gguf(file: Path) -> Path:
    """The checkpoint folder of a GGUF file, with a table of its tensors, in the cache; raises `ModelError`."""
    file = file.resolve()
    stat = file.stat()
    known = f"{_CONVERTER_VERSION}\0{file}\0{stat.st_size}\0{stat.st_mtime_ns}\0"
    identity = hashlib.sha256(known.encode() + weight_sample(file))
    target = cache_folder() / f"{file.stem}-{identity.hexdigest()[:16]}"
    return _made_once(file, target, _write_folder)


def unpack_gguf(folder: Path) -> Path:
    """A copy of the folder with float32 safetensors weights, made once: it loads ten times faster.

    Args:
        folder: from `open_gguf`; any other folder is returned unchanged.
    Raises:
        ModelError: the file cannot be read.
    """
    if not (folder / GGUF_TENSORS).is_file():
        return folder
    return _made_once(gguf_file(folder), folder.with_name(f"{folder.name}-float32"), _write_unpacked)


def gguf_file(folder: Path) -> Path:
    """The GGUF file of a folder from `open_gguf`."""
    return Path(json.loads((folder / GGUF_TENSORS).read_text())["file"])


def gguf_digest(folder: Path) -> str:
    """See `checkpoint_digest`; without the files made from a GGUF file, whose text depends on transformers' release."""
    file, tensors = gguf_file(folder), read_json(folder / GGUF_TENSORS)["tensors"].values()
    starts = [tensor["offset"] for tensor in tensors]
    with file.open("rb") as stream:  # all before the weights: configuration, vocabulary, chat template
        header = stream.read(min(starts, default=0))
    return hashlib.sha256(header + weight_sample(file, starts)).hexdigest()


def write_tensor_table(file: Path, folder: Path) -> Any:
    """Writes the table of a GGUF file's tensors: name, format, shape (rows first), place; returns its reader."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]
        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            """Called with the place of the first tensor and the header's fields of all, before any is read."""
            end = start_offs
            for _, _, _, shape, kind, offset in (field.parts for field in fields):
                block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(int(kind[0]))]
                num_blocks = math.prod(map(int, shape)) // block_size
                end = max(end, start_offs + int(offset[0]) + num_blocks * block_bytes)
            if file.stat().st_size < end:
                raise ValueError(f"its tensors end at {end:,}")
            super()._build_tensors(start_offs, fields)

    try:
        reader = Reader(file)
    except (ValueError, LookupError) as error:
        what = f"not a readable GGUF file, or cut at {file.stat().st_size:,} bytes: {error}"
        raise ModelError(f"model {str(file)!r}: {what}") from error
    if reader.byte_order == "S":
        raise ModelError(f"model {str(file)!r}: its numbers are big-endian")
    if (parts := reader.fields.get("split.count")) is not None and (num_parts := int(parts.contents())) > 1:
        why = f"it is one of {num_parts} parts of a model; join them with `llama-gguf-split --merge` of llama.cpp"
        raise ModelError(f"model {str(file)!r}: {why}")
    tensors = {
        tensor.name: {
            "format": tensor.tensor_type.name,
            "shape": [int(size) for size in reversed(tensor.shape)],
            "offset": int(tensor.data_offset),
            "num_bytes": int(tensor.n_bytes),
        }
        for tensor in reader.tensors
    }
    (folder / GGUF_TENSORS).write_text(json.dumps({"file": str(file), "tensors": tensors}, indent=1))
    return reader


def _made_once(file: Path, target: Path, write: Callable[[Path, Path], None]) -> Path:
    """The target folder; unless it exists, `write(file, folder)` fills a scratch folder, which is then renamed."""
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    except OSError as error:
        where = f"{target.parent}, which cannot be written ({error.strerror}); name another folder in BATCHLOOM_CACHE"
        raise ModelError(f"model {str(file)!r}: its configuration is kept in {where}") from error
    try:
        write(file, scratch)
        os.replace(scratch, target)
    except ImportError as error:
        raise ModelError(
            f"model {str(file)!r}: reading GGUF files needs `pip install '.[gguf]'` in batchloom's checkout: {error}"
        ) from error
    except ModelError:
        raise
    except Exception as error:  # transformers raises errors of any kind for what it does not know
        if isinstance(error, OSError) and (target / "config.json").is_file():
            return target  # another process converted it meanwhile
        why = f"cannot be used: {type(error).__name__}: {error}"
        if full := [reason for reason in map(os.strerror, _DISK_FULL) if reason in str(error)]:
            free = f"{shutil.disk_usage(target.parent).free:,} bytes free"
            where = f"{target.parent}, which cannot be written: {full[0]}; {free}"
            why = f"what is read from it is kept in {where}; name another folder in BATCHLOOM_CACHE"
        raise ModelError(f"model {str(file)!r}: {why}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write_folder(file: Path, folder: Path) -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    reader = write_tensor_table(file, folder)
    source: dict[str, Any] = {"gguf_file": file.name}
    from engine.model.loading.stock_weights import no_progress_bars

    pre, prefix, kind = (
        None if (field := reader.fields.get(f"tokenizer.ggml.{name}")) is None else field.contents()
        for name in ("pre", "add_space_prefix", "model")
    )
    has_whole_words = pre in _WHOLE_WORDS
    begins = {"add_bos_token": True} if has_whole_words and "tokenizer.ggml.add_bos_token" not in reader.fields else {}
    with no_progress_bars():
        config = transformers.AutoConfig.from_pretrained(file.parent, **source)
        if config.model_type == "mistral":  # a Llama of this name: transformers would give it a window
            values = {key: value for key, value in config.to_dict().items() if key not in _OF_MISTRAL}
            config = transformers.LlamaConfig(**values)
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **source, **begins)
    if has_whole_words:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    if kind == "llama" and prefix is not None and not prefix and not config.model_type.startswith("gemma"):
        _drop_space_prefix(tokenizer.backend_tokenizer)
    if kind == "gpt2":
        _set_words(file, tokenizer.backend_tokenizer, pre)
    tokenizer.save_pretrained(folder)
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:  # the file does not name its class
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    try:
        complete_config(config, reader)
    except ModelError as error:
        raise ModelError(f"model {str(file)!r}: {error}") from error
    if config.architectures:
        _refuse_unread(file, config, reader)
    config.save_pretrained(folder)
    if kind == "gpt2":
        _keep_words(file, tokenizer, folder)
    generation = transformers.GenerationConfig.from_model_config(config)
    generation.eos_token_id = find_end_tokens(reader) or generation.eos_token_id
    generation.save_pretrained(folder)
    if (pooling := find_pooling(reader)) is not None:
        modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))


def _refuse_unread(file: Path, config: Any, reader: Any) -> None:
    """See `refuse_unread`: transformers leaves such tensors out without a word."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    architectures = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    if (name := reader.fields["general.architecture"].contents()) not in architectures:
        raise ModelError(f"model {str(file)!r}: the format has no architecture {name!r}")
    names = get_tensor_name_map(architectures[name], config.num_hidden_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    known = [names.get_name(name, (".weight", ".bias")) for name, _ in model.named_parameters()]
    refuse_unread(file, [tensor.name for tensor in reader.tensors], [name for name in known if name])


def _set_words(file: Path, tokenizer: Any, pre: str | None) -> None:
    """Makes a byte-level tokenizer split texts into words as the file says, and not as GPT-2's, which transformers
    leaves where it does not know the file's way; `ModelError` if it is not known here either. A file that does not say
    it keeps GPT-2's, with a warning."""
    from tokenizers import pre_tokenizers

    if not isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel) or pre in _GPT2:
        return
    if pre in (None, "default"):
        what = "%s: tokenizer.ggml.pre does not say how texts are split into words: they are split as GPT-2's"
        LOGGER.warning(what, file)
        return
    if pre not in _SINGLE_DIGITS:
        what = f"tokenizer.ggml.pre is {pre!r}; it is not known here how such texts are split into words"
        raise ModelError(f"model {str(file)!r}: {what}; use the model's safetensors files or another GGUF file")
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])


def _keep_words(file: Path, tokenizer: Any, folder: Path) -> None:
    """Makes a saved tokenizer split texts when it is read as it does now: the classes that transformers has for some
    architectures split in their own way. `ModelError` if transformers insists on its class."""
    import transformers

    def words(tokenizer: Any) -> tuple[bytes, bool]:
        backend = tokenizer.backend_tokenizer
        return backend.pre_tokenizer.__getstate__(), backend.model.ignore_merges

    if words(transformers.AutoTokenizer.from_pretrained(folder)) != words(tokenizer):
        settings = folder / "tokenizer_config.json"
        settings.write_text(json.dumps(read_json(settings) | {"tokenizer_class": "TokenizersBackend"}, indent=2))
        if words(transformers.AutoTokenizer.from_pretrained(folder)) != words(tokenizer):
            name = type(tokenizer).__name__
            raise ModelError(
                f"model {str(file)!r}: transformers' {name} does not split texts as tokenizer.ggml.pre says"
            )


def _drop_space_prefix(tokenizer: Any) -> None:
    """Makes a tokenizer put no space in front of a text, and drop none from an answer; transformers makes all do so."""
    from tokenizers import decoders, pre_tokenizers

    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _write_unpacked(file: Path, folder: Path) -> None:
    import torch
    import transformers
    from gguf import GGUFReader

    # Newer transformers keep GGUF weights packed by default; older ones always unpack them.
    unpack = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    # A code of 4 to 8 bits times its scale: float32 is exact enough for parity tests.
    from engine.model.loading.stock_weights import no_progress_bars

    LOGGER.info("unpacking the weights of %s: once, a minute or more", file.name)
    opened = open_gguf(file)
    config = transformers.AutoConfig.from_pretrained(opened)
    how = {"dtype": torch.float32, "output_loading_info": True}
    with no_progress_bars():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, config=config, gguf_file=file.name, **how, **unpack
        )
        refuse_missing(info["missing_keys"], file)
        if config.model_type == "llama" and "llama.attention.head_count_kv" not in GGUFReader(file).fields:
            # transformers has left the two halves of each head interleaved, as the file has them.
            for name, parameter in model.named_parameters():
                if name.split(".")[-2] in ("q_proj", "k_proj"):
                    halves = parameter.data.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2)
                    parameter.data = halves.flatten(0, 2).contiguous()
        model.generation_config = transformers.GenerationConfig.from_pretrained(opened)
        model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(opened).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(values, indent=2))
