"""A tiny Llama with random weights, in transformers and as a folder that the engine loads."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from oneloop import LLM

BLOCK_SIZE = 16
EOS = 257


@dataclass(frozen=True)
class Twin:
    """One model twice."""

    folder: Path
    model: Any
    """transformers', float32."""

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens - 1, vocabulary]: row i is about token i + 1."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([token_ids])).logits[0, :-1]
        return logits.log_softmax(-1)

    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, hidden_size] behind the final norm."""
        with torch.inference_mode():
            return self.model.model(torch.tensor([token_ids])).last_hidden_state[0]


@pytest.fixture(scope="session")
def twin(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    folder = tmp_path_factory.mktemp("twin")
    for path in tiny_model.iterdir():
        shutil.copy(path, folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).eval()
    for weight in model.parameters():  # peaked enough that the order of tokens is no accident
        weight.data.mul_(2.5)
    model.save_pretrained(folder)
    return Twin(folder, model)


@pytest.fixture(scope="session")
def make_llm(twin: Twin) -> Any:
    """An LLM over the twin."""

    def make(**settings: Any) -> LLM:
        sizes = {"dtype": "float32", "num_gpu_blocks_override": 256, "block_size": BLOCK_SIZE, "device": "cpu"}
        return LLM(str(twin.folder), use_tqdm=False, **{**sizes, **settings})

    return make
