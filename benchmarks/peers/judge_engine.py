"""The referee: a stock transformers model in float32 that judges answers, one sequence at a time."""

import torch
import transformers

from benchmarks.peers.protocol import Loaded, LoadSettings, serve
from benchmarks.peers.stock_model import load_stock_model


class JudgeEngine:
    """Teacher forcing: compares each token of an answer with the logits after the prompt and the tokens before."""

    def load(self, settings: LoadSettings) -> Loaded:
        self._model = load_stock_model(settings, torch.float32)
        return Loaded(versions={"transformers": transformers.__version__, "torch": torch.__version__})

    @torch.inference_mode()
    def token_gaps(self, arguments: dict[str, list[list[int]]]) -> dict[str, list[list[float]]]:
        """For prompts and answers, per answered token: the best logit minus the logit of that token; 0 is greedy."""
        gaps = []
        for prompt, answer in zip(arguments["prompts"], arguments["answers"], strict=True):
            logits = self._logits(prompt + answer[:-1], len(answer))
            chosen = logits.gather(1, torch.tensor(answer, device=logits.device).unsqueeze(1))[:, 0]
            gaps.append((logits.max(dim=1).values - chosen).tolist())
        return {"gaps": gaps}

    @torch.inference_mode()
    def label_logprobs(self, arguments: dict[str, list[list[int]]]) -> dict[str, list[list[float]]]:
        """For prompts and one-token labels: their natural log-probabilities, normalised over the labels."""
        labels = arguments["labels"][0]
        return {
            "label_logprobs": [
                self._logits(prompt, 1)[0, labels].log_softmax(dim=0).tolist() for prompt in arguments["prompts"]
            ]
        }

    def _logits(self, token_ids: list[int], num_last: int) -> torch.Tensor:
        ids = torch.tensor([token_ids], device=self._model.device)
        logits: torch.Tensor = self._model(input_ids=ids, use_cache=False, logits_to_keep=num_last).logits[0]
        return logits.float()


if __name__ == "__main__":
    serve(JudgeEngine())
