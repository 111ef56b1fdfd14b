"""LoRA adapters: their files, their weights, and models that can switch between them."""
