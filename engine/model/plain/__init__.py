"""Llama, Mistral and Qwen models without transformers, whose models take seconds to import."""
