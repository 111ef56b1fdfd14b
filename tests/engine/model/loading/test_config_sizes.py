"""Sizes that are read from a config.json, and those that it leaves out."""

from engine.model.loading.config_sizes import kv_bytes_per_layer, read_sizes

SIZES = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}


def test_a_head_that_is_left_out_has_the_size_that_the_model_gives_it() -> None:
    llama = read_sizes(SIZES | {"model_type": "llama"})
    qwen3 = read_sizes(SIZES | {"model_type": "qwen3"})
    assert kv_bytes_per_layer(llama, "float32") == 2 * 8 * (1024 // 16) * 4
    assert kv_bytes_per_layer(qwen3, "float32") == 2 * 8 * 128 * 4, "Qwen3's heads have 128 dimensions"
    own = read_sizes(SIZES | {"model_type": "qwen3", "head_dim": 96})
    assert kv_bytes_per_layer(own, "float32") == 2 * 8 * 96 * 4
