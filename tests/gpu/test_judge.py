"""The judge of greedy answers refuses what it must, or the other tests here could not fail."""

import pytest
import torch


@pytest.fixture
def judge(tiny_checkpoint, make_judge):
    from transformers import LlamaForCausalLM

    return make_judge(LlamaForCausalLM.from_pretrained(tiny_checkpoint))


@torch.inference_mode()
def greedy(judge, prompt, count):
    """Token by token, with one forward pass over everything for each."""
    token_ids = list(prompt)
    device = next(judge.model.parameters()).device
    for _ in range(count):
        logits = judge.model(torch.tensor([token_ids], device=device)).logits[0, -1]
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]


def test_right_answers_of_all_lengths_pass_and_a_wrong_token_does_not(judge):
    prompts = [list(range(10, 10 + length)) for length in (1, 7, 30)]
    answers = [greedy(judge, prompt, count) for prompt, count in zip(prompts, (9, 4, 1), strict=True)]
    judge.check(prompts, answers)
    for number, place in ((0, 8), (0, 3), (1, 0), (2, 0)):
        wrong = [list(answer) for answer in answers]
        wrong[number][place] = (wrong[number][place] + 1) % 250
        with pytest.raises(AssertionError, match="deviations off"):
            judge.check(prompts, wrong)
    with pytest.raises(AssertionError, match="deviations off"):
        judge.check([[*prompts[2], 5]], [answers[2]])
