"""From `--dataset-name` and the options of lengths to a workload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from oneloop_bench.load.datasets import MultiTurn, PrefixRepetition, RandomLengths, ShareGptShape
from oneloop_bench.load.files import CustomPrompts, TimedTrace

if TYPE_CHECKING:
    import argparse

    import numpy as np

    from oneloop_bench.load.prompts import PromptSource
    from oneloop_bench.load.workload import Session

NEEDS_FILE: Final = ("custom", "timed_trace")


class Workload(Protocol):
    """Makes sessions."""

    def sessions(self, count: int, source: PromptSource, rng: np.random.Generator) -> list[Session]:
        """For `count` requests. ValueError when it cannot."""


def read_workload(options: argparse.Namespace) -> Workload:
    """The dataset with its lengths. ValueError when the options cannot work."""
    name, path = options.dataset_name, options.dataset_path
    if (path is not None) != (name in NEEDS_FILE):
        raise ValueError(
            f"--dataset-path goes with --dataset-name {' and '.join(NEEDS_FILE)}, and only with them"
        )
    input_len, output_len = options.input_len, options.output_len
    match name:
        case "random":
            return RandomLengths(
                input_len or options.random_input_len,
                output_len or options.random_output_len,
                options.random_range_ratio,
                options.random_prefix_len,
            )
        case "prefix_repetition":
            return PrefixRepetition(
                options.prefix_repetition_prefix_len,
                input_len or options.prefix_repetition_suffix_len,
                options.prefix_repetition_num_prefixes,
                output_len or options.prefix_repetition_output_len,
            )
        case "multi_turn":
            return MultiTurn(
                options.multi_turn_num_turns,
                input_len or options.multi_turn_input_len,
                output_len or options.multi_turn_output_len,
                options.multi_turn_system_len,
                options.multi_turn_think_time,
            )
        case "sharegpt":
            return ShareGptShape(output_len)
        case "custom":
            return CustomPrompts(path, options.custom_output_len or output_len, not options.disable_shuffle)
        case _:
            return TimedTrace(path, options.timed_trace_sec_multiplier, options.timed_trace_chunk_hash_size)
