"""Pooling: last hidden states of texts, packed without padding, to a vector for each text."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from engine.errors import ModelError
from engine.model.loading.checkpoint import weight_files
from engine.pooling.class_labels import ClassLabels
from engine.pooling.sentence_files import SentenceFiles, check_causal_pooling, read_sentence_files
from engine.request import Mode, Request

Vector = npt.NDArray[np.floating[Any]]


class Pooler(Protocol):
    """Makes one vector of `num_values` for each text."""

    num_values: int

    def __call__(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Pools the tokens of each text to ``[n, k]``: float32 embeddings, not cut and not normalised; or float64
        log-probabilities.

        Args:
            hidden: ``[T, hidden]``, last hidden states.
            lengths: int64 ``[n]``, tokens of each text; they add up to T.
        """


class EmbeddingPooler:
    """Embeddings in float32 by the poolings and layers of the checkpoint's sentence-transformers files; not cut, not
    normalised. Raises `ModelError` if the weights of a layer cannot be read."""

    def __init__(self, files: SentenceFiles, device: torch.device) -> None:
        self._poolings, self.num_values = files.poolings, files.num_dimensions
        self._layers: list[tuple[torch.Tensor, torch.Tensor | None, nn.Module]] = []
        for dense in files.dense:
            tensors = read_tensors(dense.weights, device)
            if "linear.weight" not in tensors:
                raise ModelError(f"{dense.weights} holds no linear.weight")
            activation = getattr(nn, dense.activation)()
            self._layers.append((tensors["linear.weight"], tensors.get("linear.bias"), activation))

    @torch.inference_mode()
    def __call__(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        vectors = torch.cat([pool(hidden, lengths, pooling) for pooling in self._poolings], dim=1)
        for weight, bias, activation in self._layers:
            vectors = activation(_project(vectors, weight, bias))
        return vectors


class CausalClassPooler:
    """Classes of a causal model: a linear layer on the last token; `ModelError` if the checkpoint has none, or other
    classes than outputs."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        labels = ClassLabels.read(folder)
        self._is_exclusive = labels.is_exclusive
        for file in weight_files(folder):
            tensors = read_tensors(file, device, only="score.weight")
            if tensors:
                self._weight = tensors["score.weight"]
                self.num_values = len(self._weight)
                labels.check_head(folder, self.num_values)
                return
        raise ModelError(f"{folder} holds no score.weight, the layer that gives a score to each class")

    @torch.inference_mode()
    def __call__(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        logits = _project(pool(hidden, lengths, "lasttoken"), self._weight)
        return class_logprobs(logits, is_exclusive=self._is_exclusive)


def _project(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer; on a CPU row by row, since the order of torch's sums depends on the number of rows."""
    if rows.device.type != "cpu":
        return functional.linear(rows, weight, bias)
    return torch.stack([functional.linear(row, weight, bias) for row in rows])


def pooled_answer(request: Request, vector: Vector) -> dict[str, Any]:
    """The fields of a `Completion` that hold the answer to a request, from the vector ``[n]`` of a `Pooler`."""
    if request.mode == "embed":
        wanted = vector[: request.dimensions].astype(np.float32)
        return {"embedding": wanted / max(float(np.linalg.norm(wanted)), 1e-12) if request.normalize else wanted}
    return {"label_logprobs": tuple(vector.tolist())}


def why_too_many(request: Request, pooler: Pooler) -> str | None:
    """Why an embedding cannot have the dimensions that a request of mode "embed" asks for; None where it can."""
    if request.dimensions is None or request.dimensions <= pooler.num_values:
        return None
    return f"dimensions is {request.dimensions}, the model's embeddings have {pooler.num_values}"


def class_logprobs(logits: torch.Tensor, *, is_exclusive: bool) -> torch.Tensor:
    """float64 log-probabilities of classes ``[n, k]``: over all classes of a row, or of each class independently."""
    return logits.double().log_softmax(dim=1) if is_exclusive else functional.logsigmoid(logits.double())


def causal_pooler(folder: Path | None, device: torch.device, hidden_size: int, mode: Mode) -> Pooler:
    """The pooler of a causal model, which pools only each prompt's last row.

    Args:
        folder: of the checkpoint; None where there is none: then the last hidden state is the embedding.
        mode: "embed" or "classify".
    Raises:
        ModelError: the checkpoint's pooling reads other tokens than the last, or it has no layer for classes.
    """
    if folder is None:
        if mode == "classify":
            raise ModelError("classes are read from a checkpoint's folder, got a loaded model")
        return EmbeddingPooler(SentenceFiles(poolings=("lasttoken",), num_dimensions=hidden_size), device)
    if mode == "classify":
        return CausalClassPooler(folder, device)
    files = read_sentence_files(folder)
    check_causal_pooling(files, folder)
    return EmbeddingPooler(files, device)


def pool(hidden: torch.Tensor, lengths: torch.Tensor, pooling: str) -> torch.Tensor:
    """One float32 vector for each text, ``[n, hidden]``.

    Args:
        hidden, lengths: ``[T, hidden]``; and int64 ``[n]``, each at least 1.
        pooling: of `engine.pooling.sentence_files.POOLINGS`.
    """
    if pooling in ("cls", "lasttoken"):
        ends = lengths.cumsum(0)
        return hidden.index_select(0, ends - 1 if pooling == "lasttoken" else ends - lengths).float()
    states, counts = hidden.float(), lengths.unsqueeze(1).float()
    if pooling == "max":
        return torch.segment_reduce(states, "max", lengths=lengths)
    if pooling == "mean":
        return torch.segment_reduce(states, "sum", lengths=lengths) / counts
    if pooling == "mean_sqrt_len_tokens":
        return torch.segment_reduce(states, "sum", lengths=lengths) / counts.sqrt()
    starts = lengths.cumsum(0) - lengths
    places = torch.arange(1, len(states) + 1, device=states.device) - torch.repeat_interleave(starts, lengths)
    weighted = torch.segment_reduce(states * places.unsqueeze(1).float(), "sum", lengths=lengths)
    return weighted / (counts * (counts + 1) / 2)


def read_tensors(file: Path, device: torch.device, only: str | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file in float32; `ModelError` if it cannot be read.

    Args:
        only: name of the one tensor to read; by default all are.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if only in (None, name)]  # noqa: SIM118 - not a mapping
            return {name: tensors.get_tensor(name).to(device=device, dtype=torch.float32) for name in names}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
