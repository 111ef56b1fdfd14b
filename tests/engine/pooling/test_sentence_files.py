"""What a checkpoint's sentence-transformers files say, in the forms of their releases, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelError
from engine.model.loading.checkpoint import checkpoint_digest
from engine.pooling.class_labels import ClassLabels
from engine.pooling.pooler import EmbeddingPooler
from engine.pooling.sentence_files import read_sentence_files
from tests.tiny_encoders import save_modules


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, "config.json", {"model_type": "bert", "hidden_size": 24, "architectures": ["BertModel"]})


def write(folder: Path, name: str, values: object) -> Path:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values))
    return folder


def test_all_files(folder: Path) -> None:
    save_modules(folder, "pooling_mode_cls_token", dense=8, prompts={"query": "search: "}, default_prompt_name="query")
    neutral = {"model_args": {"dtype": "float32"}, "modality_config": {"text": {}}, "processing_kwargs": {}}
    write(folder, "sentence_bert_config.json", {"max_seq_length": 33, "do_lower_case": False, **neutral})
    files = read_sentence_files(folder)
    assert (files.poolings, files.num_dimensions, files.is_normalized) == (("cls",), 8, True)
    assert (files.prompts, files.default_prompt, files.max_tokens) == ({"query": "search: "}, "query", 33)
    assert files.dense[0].activation == "Tanh"


def test_newer_names_and_several_poolings(folder: Path) -> None:
    save_modules(folder, "pooling_mode_cls_token", normalize=False, truncate_dim=4)
    write(folder, "1_Pooling/config.json", {"pooling_mode": ["cls", "max"], "include_prompt": False})
    files = read_sentence_files(folder)
    assert (files.poolings, files.num_dimensions, files.default_dimensions) == (("cls", "max"), 48, 4)
    assert (files.is_normalized, files.pools_prompt) == (False, False)


def test_the_file_about_texts_may_have_the_name_of_another_family(folder: Path) -> None:
    save_modules(folder, "pooling_mode_cls_token")
    before = checkpoint_digest(folder)
    write(folder, "sentence_roberta_config.json", {"max_seq_length": 33})
    assert read_sentence_files(folder).max_tokens == 33
    assert checkpoint_digest(folder) != before
    write(folder, "sentence_roberta_config.json", {"do_lower_case": True})
    with pytest.raises(ModelError, match=r"sentence_roberta_config\.json: do_lower_case is not supported$"):
        read_sentence_files(folder)


def test_no_files(folder: Path) -> None:
    assert read_sentence_files(folder).poolings == ("mean",)
    write(folder, "config.json", {"hidden_size": 24, "architectures": ["Qwen3ForCausalLM"]})
    assert read_sentence_files(folder).poolings == ("lasttoken",)


@pytest.mark.parametrize(
    ("config", "num_dimensions"),
    [
        ({"model_type": "distilbert", "dim": 24}, 24),
        ({"model_type": "gpt2", "n_embd": 32}, 32),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 40}}, 40),
        ({"model_type": "bert"}, 768),
    ],
)
def test_the_hidden_size_has_its_family_s_name_or_default(
    tmp_path: Path, config: dict[str, object], num_dimensions: int
) -> None:
    assert read_sentence_files(write(tmp_path, "config.json", config)).num_dimensions == num_dimensions


def test_a_hidden_size_that_nobody_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: hidden_size must be a positive whole number, got None"):
        read_sentence_files(write(tmp_path, "config.json", {"model_type": "unknown"}))


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("modules.json", [{"type": "a.Transformer", "path": ""}, {"type": "a.CNN", "path": "1"}], "Transformer, CNN"),
        ("modules.json", {"type": 3}, "cannot be read"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "got \\['median'\\]"),
        ("2_Dense/config.json", {"activation_function": "os.system", "out_features": 8}, "'os.system'"),
        ("2_Dense/config.json", {"use_residual": True, "out_features": 8}, "use_residual"),
        ("2_Dense/config.json", {}, "2_Dense/config.json: out_features must be a positive whole number, got None"),
        ("2_Dense/config.json", {"out_features": "8"}, "out_features must be a positive whole number, got '8'"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task 'fill-mask' is not"),
        ("sentence_bert_config.json", {"modality_config": {"text": {}, "message": {}}}, "with message, by which texts"),
        ("sentence_bert_config.json", {"model_args": {"add_pooling_layer": True}}, "model_args {'add_pooling_layer': "),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"padding": 1}}}, "processing_kwargs {'text': "),
        ("config_sentence_transformers.json", [], "must hold an object"),
    ],
)
def test_what_is_not_computed_is_refused(folder: Path, name: str, values: object, reason: str) -> None:
    save_modules(folder, "pooling_mode_cls_token", dense=8)
    write(folder, name, values)
    with pytest.raises(ModelError, match=reason):
        read_sentence_files(folder)


def test_a_dense_layer_without_its_weight_is_refused(folder: Path) -> None:
    save_modules(folder, "pooling_mode_cls_token", dense=8)
    save_file({"linear.bias": torch.zeros(8)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(ModelError, match=r"2_Dense/model\.safetensors holds no linear\.weight"):
        EmbeddingPooler(read_sentence_files(folder), torch.device("cpu"))


def test_classes(folder: Path) -> None:
    with pytest.raises(ModelError, match="no classification head"):
        ClassLabels.read(folder)
    config = {"architectures": ["BertForSequenceClassification"], "id2label": {"1": "b", "0": "a", "10": "c"}}
    assert ClassLabels.read(write(folder, "config.json", config)).names == ("a", "b", "c")
    assert ClassLabels.read(folder).is_exclusive
    write(folder, "config.json", {**config, "problem_type": "multi_label_classification"})
    assert not ClassLabels.read(folder).is_exclusive
    for counted, names in (({}, ("LABEL_0", "LABEL_1")), ({"num_labels": 1}, ("LABEL_0",))):
        write(folder, "config.json", {"architectures": config["architectures"], **counted})
        assert ClassLabels.read(folder).names == names
    assert not ClassLabels.read(folder).is_exclusive
