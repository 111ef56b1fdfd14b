"""From last hidden states to one vector a prompt: embeddings and class scores, as the checkpoint's own files say."""
