"""Tiny random encoders as checkpoint folders: every family, with a tokenizer that frames a text and a pair."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.conftest import TOKENIZER_TEXT

VOCAB_SIZE = 512
MAX_TOKENS = 64
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
HIDDEN_SIZE = 48

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "max_position_embeddings": MAX_TOKENS,
}
_MORE: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "roberta": {"type_vocab_size": 1, "max_position_embeddings": MAX_TOKENS + 2},
    "xlm-roberta": {"type_vocab_size": 1, "max_position_embeddings": MAX_TOKENS + 2},
    "camembert": {"type_vocab_size": 1, "max_position_embeddings": MAX_TOKENS + 2},
    "distilbert": {"dim": HIDDEN_SIZE, "n_layers": 2, "n_heads": 4, "hidden_dim": 80},
    "electra": {"embedding_size": 32, "type_vocab_size": 2},
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2, "classifier_pooling": "mean"},
    "nomic_bert": {"type_vocab_size": 2},
}


def save_encoder(family: str, folder: Path, *, num_classes: int = 0, seed: int = 0, **config: Any) -> Path:
    """Saves a checkpoint with random weights, norms and biases included, and its tokenizer.

    Args:
        family: model_type of the configuration.
        folder: made where it is not there.
        num_classes: of a classification head; 0 for none.
        seed: of the weights.
        config: further values of the configuration.
    """
    values = {**_SHAPE, **_MORE[family], **config}
    if num_classes:
        values["num_labels"] = num_classes
    settings = transformers.AutoConfig.for_model(family, **values)
    kind = transformers.AutoModelForSequenceClassification if num_classes else transformers.AutoModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(settings, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = "norm" in name.lower() and name.endswith("weight")
                parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.2)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def save_modules(folder: Path, pooling: str, *, normalize: bool = True, dense: int = 0, **settings: Any) -> Path:
    """Adds sentence-transformers' files to a checkpoint, as its older releases write them.

    Args:
        folder: of the checkpoint.
        pooling: key of 1_Pooling/config.json that is true, such as pooling_mode_mean_tokens.
        normalize: whether the last module normalises.
        dense: outputs of a Dense module with tanh; 0 for none.
        settings: of config_sentence_transformers.json.
    """
    config = json.loads((folder / "config.json").read_text())
    hidden_size = config.get("hidden_size", config.get("dim"))
    modules = ["", "1_Pooling"]
    kinds = ["Transformer", "Pooling"]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": hidden_size, pooling: True})
    )
    if dense:
        from safetensors.torch import save_file

        place = folder / "2_Dense"
        place.mkdir()
        generator = torch.Generator().manual_seed(5)
        weights = {
            "linear.weight": torch.randn(dense, hidden_size, generator=generator) / 4,
            "linear.bias": torch.randn(dense, generator=generator) / 4,
        }
        save_file(weights, place / "model.safetensors")
        activation = "torch.nn.modules.activation.Tanh"
        values = {"in_features": hidden_size, "out_features": dense, "bias": True, "activation_function": activation}
        (place / "config.json").write_text(json.dumps(values))
        modules.append("2_Dense")
        kinds.append("Dense")
    if normalize:
        modules.append(f"{len(modules)}_Normalize")
        kinds.append("Normalize")
    listed = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(zip(modules, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


@cache
def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s>:0 $A:0 </s>:0",
        pair="<s>:0 $A:0 </s>:0 $B:1 </s>:1",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "attention_mask", "token_type_ids"],
    )
