"""How the kernels divide a row among programs. By arithmetic for an H200; `--sweep` of the bench tries others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from oneloop_kernels.ops.sampling.device import GROUP, MAX_SPLITS

PROGRAMS_PER_SM: Final = 4
"""That many programs are wanted: they fit at once, and their loads hide each other's arithmetic."""
LARGEST_WARPS: Final = 8
SMALLEST_TILE: Final = 1024
GREEDY_TOKENS_PER_THREAD: Final = 16
"""Two loads of 16 bytes of a 16-bit type in flight, two more behind them."""
GREEDY_REGISTERS: Final = 64
"""Per thread: four programs of 8 warps on a multiprocessor."""
SCAN_TOKENS_PER_THREAD: Final = 16
FINISH_TILE: Final = 2048
PASS_TILE: Final = 4096
"""Of passes over much of a row."""
FINISH_WARPS: Final = 8
FINISH_REGISTERS: Final = 128
"""Two programs on a multiprocessor."""


@dataclass(frozen=True, slots=True)
class Division:
    """A row among `splits` programs of num_tiles tiles of `tile` tokens."""

    splits: int
    num_tiles: int
    tile: int
    num_warps: int

    @property
    def scan_registers(self) -> int:
        """Per thread, for the scan: as for the greedy kernel if they are enough. Without spills on sm_90."""
        return 64 if self.tile <= 32 * self.num_warps * SCAN_TOKENS_PER_THREAD else 128


def divide(
    bucket: int,
    vocab_size: int,
    num_sms: int,
    tokens_per_thread: int,
    *,
    programs_per_sm: int = PROGRAMS_PER_SM,
    largest_tile: bool = False,
) -> Division:
    """Few rows: small tiles on all multiprocessors; many rows: large tiles, several to a program.

    largest_tile: however few rows there are.
    """
    tile = 32 * LARGEST_WARPS * tokens_per_thread
    while not largest_tile and tile > SMALLEST_TILE and bucket * -(-vocab_size // tile) < num_sms:
        tile //= 2
    while tile > GROUP and tile // 2 >= vocab_size:
        tile //= 2
    num_tiles = -(-vocab_size // tile)
    splits = min(MAX_SPLITS, num_tiles, max(1, programs_per_sm * num_sms // bucket))
    tiles_per_split = -(-num_tiles // splits)
    return Division(
        splits=-(-num_tiles // tiles_per_split),
        num_tiles=tiles_per_split,
        tile=tile,
        num_warps=max(1, tile // (32 * tokens_per_thread)),
    )
