"""A llama.cpp model with its KV memory: rows in, logits out. The caller schedules."""

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.protocol import LoadSettings


class LlamaCppContext:
    """One context with unified memory: all sequences use one pool of cells, like vLLM's pool of blocks."""

    def __init__(self, file: Path, settings: LoadSettings, *, num_sequences: int) -> None:
        """Loads a GGUF file. Raises `RuntimeError` if llama.cpp cannot load it or has no memory for the context."""
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = settings.kv_tokens
        parameters.n_batch = settings.max_num_batched_tokens
        parameters.n_ubatch = min(512, settings.max_num_batched_tokens)
        parameters.n_seq_max = num_sequences
        parameters.n_threads = parameters.n_threads_batch = settings.num_threads
        # llama.cpp's default KV format; with int8 weights it is faster than KV in Q8_0.
        is_exact = settings.dtype == "float32"
        parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32 if is_exact else llama_cpp.GGML_TYPE_F16
        if is_exact:  # flash attention is less exact
            parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {settings.kv_tokens} tokens in {settings.dtype}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(settings.max_num_batched_tokens, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Computes rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, is_last) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = is_last
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with {status} for {len(rows)} tokens")

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Make the target hold only the source's first tokens, in the same cells."""
        if source != target:
            llama_cpp.llama_memory_seq_rm(self._memory, target, -1, -1)
            llama_cpp.llama_memory_seq_cp(self._memory, source, target, 0, num_tokens)
        else:
            llama_cpp.llama_memory_seq_rm(self._memory, target, num_tokens, -1)

    def drop(self, sequence: int) -> None:
        """Empty the sequence."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def clear(self) -> None:
        """Empty all sequences."""
        llama_cpp.llama_memory_clear(self._memory, True)

    def logits(self, row: int) -> NDArray[np.float32]:
        """Logits ``[vocab_size]`` of a row of the last `decode` that wanted them; valid until the next `decode`."""
        values = ctypes.cast(llama_cpp.llama_get_logits_ith(self._context, row), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(values, (self._vocab_size,))
