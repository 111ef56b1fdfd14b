"""Llama, Mistral and Qwen models without transformers, which takes seconds to import."""
