"""The mixes: running decodes, cached prompts, and a little of everything."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from oneloop_bench.scheduler.workload import Mix, Request, place

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_SIZE = 16
STEP_TOKENS = 8192
CACHED_PROMPT_TOKENS = 8192
NUM_CACHED_PROMPTS = 8
SHORTEST_PROMPT = 33
"""Of the decodes. The 16 lengths from here on differ in where a block ends."""
ARRIVALS_PER_STEP = 128


def decodes(batch: int, num_steps: int, text: Sequence[int], vocab_size: int) -> Mix:
    """`batch` requests that decode. Measured: `num_steps` steps in which all of them do and nothing else happens.

    Before they come every block of the pool has cached content, as in a server that has run for a while, where each new
    block takes an old one's place.
    """
    rng = random.Random(batch)
    num_arrival_steps = -(-batch // ARRIVALS_PER_STEP)
    num_outputs = num_arrival_steps + num_steps
    blocks_each = -(-(SHORTEST_PROMPT + BLOCK_SIZE + num_outputs) // BLOCK_SIZE)
    # Room for the margin that the core leaves at admission.
    blocks_per_filler = CACHED_PROMPT_TOKENS // BLOCK_SIZE
    num_fillers = -(-batch * (blocks_each + 2) // blocks_per_filler)
    prompts = [random_prompt(rng, CACHED_PROMPT_TOKENS, vocab_size) for _ in range(num_fillers)]
    requests = [Request(step, step, 1) for step in range(num_fillers)]
    for index in range(batch):
        length = SHORTEST_PROMPT + index % BLOCK_SIZE
        arrival = num_fillers + index // ARRIVALS_PER_STEP
        requests.append(Request(arrival, len(prompts), num_outputs))
        prompts.append(random_prompt(rng, length, vocab_size))
    first = num_fillers + num_arrival_steps
    return Mix(
        name=f"{batch} decodes",
        num_blocks=num_fillers * blocks_per_filler,
        max_num_seqs=batch,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=CACHED_PROMPT_TOKENS + BLOCK_SIZE,
        vocab_size=vocab_size,
        text=list(text),
        prompts=prompts,
        requests=requests,
        num_steps=first - 1 + num_outputs,
        measured_from=first,
        measured_to=first + num_steps,
    )


def cached_admissions(num_steps: int, text: Sequence[int], vocab_size: int) -> Mix:
    """Prompts that come one per step and end with it. Measured: `num_steps` steps whose prompt is cached."""
    rng = random.Random(1)
    return Mix(
        name="cached prompts",
        num_blocks=(NUM_CACHED_PROMPTS + 2) * CACHED_PROMPT_TOKENS // BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=CACHED_PROMPT_TOKENS + BLOCK_SIZE,
        vocab_size=vocab_size,
        text=list(text),
        prompts=[random_prompt(rng, CACHED_PROMPT_TOKENS, vocab_size) for _ in range(NUM_CACHED_PROMPTS)],
        requests=[
            Request(step, step % NUM_CACHED_PROMPTS, 1) for step in range(NUM_CACHED_PROMPTS + num_steps)
        ],
        num_steps=NUM_CACHED_PROMPTS + num_steps,
        measured_from=NUM_CACHED_PROMPTS,
        measured_to=NUM_CACHED_PROMPTS + num_steps,
    )


def everything(text: Sequence[int], vocab_size: int) -> Mix:
    """Long prompts in chunks, shared prefixes, second turns, a queue. Nothing of it is measured.

    Both schedulers have to do the same only while one prompt at a time is in chunks, as they share a step's tokens
    among several in different ways. So nothing comes beside a long prompt, and what comes at once fits a step.
    """
    rng = random.Random(2)
    story = _Story(rng, text, vocab_size)
    story.ask([], 2 * STEP_TOKENS + 3616, 0, 40)
    prefixes = [random_prompt(rng, 64 * (group + 1) + group, vocab_size) for group in range(8)]
    for step in range(6, 66):
        for _ in range(3):
            story.ask(rng.choice(prefixes), rng.randint(1, 60), step, rng.randint(1, 80))
    first_turns = list(range(1, len(story.requests)))
    story.ask([], STEP_TOKENS + 1000, 70, 8)
    for step in range(200, 245):  # the first turns have ended
        for _ in range(4):
            if first_turns:
                story.ask_again(first_turns.pop(rng.randrange(len(first_turns))), rng.randint(1, 30), step)
    for _ in range(240):
        story.ask(rng.choice(prefixes), rng.randint(1, 40), 300, rng.randint(1, 80))
    return Mix(
        name="everything",
        num_blocks=20_000,
        max_num_seqs=96,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=4 * STEP_TOKENS,
        vocab_size=vocab_size,
        text=list(text),
        prompts=story.prompts,
        requests=story.requests,
        num_steps=300 + 4 * 80,
    )


class _Story:
    """Requests in the order of their arrival."""

    def __init__(self, rng: random.Random, text: Sequence[int], vocab_size: int) -> None:
        self._rng, self._text, self._vocab_size = rng, text, vocab_size
        self.prompts: list[list[int]] = []
        self.requests: list[Request] = []

    def ask(self, prefix: list[int], num_more: int, arrival: int, max_tokens: int) -> None:
        """A prefix and as many random tokens."""
        self.requests.append(Request(arrival, len(self.prompts), max_tokens))
        self.prompts.append(prefix + random_prompt(self._rng, num_more, self._vocab_size))

    def ask_again(self, request: int, num_more: int, arrival: int) -> None:
        """The second turn of a request that has ended."""
        first = self.requests[request]
        places = (place(request, index, len(self._text)) for index in range(first.max_tokens))
        so_far = self.prompts[first.prompt] + [self._text[at] for at in places]
        self.ask(so_far, num_more, arrival, self._rng.randint(1, 60))


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """Token ids that nothing else begins with."""
    return [rng.randrange(vocab_size) for _ in range(length)]
