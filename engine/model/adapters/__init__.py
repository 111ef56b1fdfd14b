"""LoRA adapters: their files, their weights, and models that exchange them."""
