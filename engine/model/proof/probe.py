"""Compares the engine with transformers' `generate` before an architecture is used for the first time.

Both compute a tiny model with the class and the settings of the checkpoint (`tiny_model.shrink`) in float32: the engine
with chunked prefill, shared prefixes and preemption, transformers one prompt at a time. If tokens and log-probabilities
agree, the architecture is accepted. The cache folder has a record of it, keyed by the tiny model's config, the
versions of torch, transformers and this engine, and the kernels of this processor.
"""

import hashlib
import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine.code_versions import code_versions
from engine.errors import ModelError
from engine.kernels.cpu.native_build import NativeBuildError, load_library
from engine.model.loading.checkpoint import cache_folder, is_plain, is_quantized
from engine.model.loading.stock_weights import read_config
from engine.model.proof.diagnosis import explain
from engine.model.proof.tiny_model import shrink
from engine.model.proof.tiny_run import MakeEngine, find_difference
from engine.model.stock_model import refuse_known

LOGGER = logging.getLogger("batchloom.engine")


def prove_source(source: Path | PreTrainedModel, make_engine: MakeEngine) -> None:
    """As `prove`, for a checkpoint's folder or a loaded model; `ModelError` for anything else."""
    if not isinstance(source, Path | PreTrainedModel):
        kinds = "the path of a checkpoint folder or GGUF file, a hub id, or a loaded model of transformers"
        raise ModelError(f"model must be {kinds}, got {source!r}")
    if not isinstance(source, Path) and source.get_output_embeddings() is None:
        raise ModelError(
            f"a loaded model must have an output layer (AutoModelForCausalLM), got {type(source).__name__}"
        )
    if isinstance(source, Path):
        is_quantized(source)  # refuses a quantization_config of which transformers would not say what is wrong
    config = read_config(source) if isinstance(source, Path) else source.config
    if not is_plain(config.to_dict()):
        prove(config, make_engine)


def prove(config: PretrainedConfig, make_engine: MakeEngine) -> None:
    """Raises `ModelError` for an architecture for which the engine's results differ from transformers'; it names the
    layer that differs, and a setting without which there is no difference."""
    refuse_known(config)
    text_config = config.get_text_config(decoder=True)
    refuse_known(text_config)
    name = text_config.model_type
    for each in (text_config, config):
        if type(each) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            why = "transformers has no causal language model of it"
            raise ModelError(f"architecture {each.model_type!r} is not supported: {why}")
    _check_decoder(config, text_config)
    tiny = shrink(text_config)
    record = cache_folder() / "proven" / f"{tiny.model_type}-{_digest(tiny)}.json"
    if record.is_file():
        return
    LOGGER.info("architecture %r is new here: a tiny model of it is compared with transformers, once", name)
    try:
        found = find_difference(tiny, make_engine)
    except ModelError as error:
        raise ModelError(f"architecture {name!r} is not supported: {error}") from error
    if found is not None:
        raise ModelError(
            f"architecture {name!r} is not computed as transformers does: {explain(tiny, make_engine, found)}"
        )
    with suppress(OSError):  # without a record, the next night compares again
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=record.parent, delete=False) as scratch:
            json.dump({"versions": _versions(), "config": tiny.to_dict()}, scratch, indent=2, default=str)
        os.replace(scratch.name, record)


def _check_decoder(config: PretrainedConfig, text_config: PretrainedConfig) -> None:
    """Refuses a model of several modalities unless its decoder has the same class as the text model's."""
    if text_config is config:
        return
    try:
        with torch.device("meta"):
            both = [AutoModelForCausalLM.from_config(found) for found in (config, text_config)]
    except Exception as error:  # no class for the text model, or sizes that do not fit
        raise ModelError(
            f"architecture {config.model_type!r} is not supported: its text model cannot be made alone: {error}"
        ) from error
    inside, alone = (type(model.get_decoder()).__name__ for model in both)
    if inside != alone:
        raise ModelError(
            f"architecture {config.model_type!r} is not supported: its decoder is a {inside}, that of its text model "
            f"alone a {alone}"
        )


def _digest(tiny: PretrainedConfig) -> str:
    text = json.dumps([tiny.to_dict(), _versions()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _versions() -> dict[str, str]:
    """The versions of torch and transformers, a digest of the engine's source, and what computes the tiny model: the
    compiled kernels of this processor, or torch."""
    try:
        kernels = Path(load_library(cache_folder(), "native")._name).stem
    except NativeBuildError:
        kernels = "torch"
    return code_versions(".") | {"kernels": kernels}
