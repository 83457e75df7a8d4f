"""Tile configurations: one table per card, by element size and head dimension, and a default for other cards."""

from __future__ import annotations

from dataclasses import dataclass, replace

from oneloop_kernels.launch import of_card


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Of decode.py. stages: tiles of keys and values on their way to shared memory, plus one."""

    block_n: int
    warps: int
    stages: int
    programs_per_sm: int
    min_tiles: int = 1
    """A program is given at least so many tiles: fewer partial results where there is little to do."""
    max_registers: int | None = None
    """Per thread, so that programs_per_sm fit; None: as many as the compiler likes."""
    stream_stages: int = 0
    """Where stream.py can, it takes decode.py's place with so many stages; block_n must be 64, or 128 for a cache of
    8 bits. 0: it does not."""
    together: int = 1
    """Of a cache of 8 bits stream.py takes so many key heads at once, as far as a matrix product has room for their
    queries; block_n is of all of them."""


@dataclass(frozen=True, slots=True)
class TilesConfig:
    """Of tiles.py. tma: load whole boxes of BLOCK_N tokens where a block of the cache has them.

    ring: where prefill.py can, it takes this kernel's place with so many tiles in its ring; block_m must be 128. 0: it
    does not.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs_per_sm: int
    tma: bool = False
    max_registers: int | None = None
    ring: int = 0


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """All that is tuned."""

    decode: DecodeConfig
    tiles: TilesConfig
    shared: TilesConfig
    """Of tiles.py on what rows share; many rows a block, for every block reads the keys again."""
    min_shared: int = 1024
    """Tokens that neighbouring rows must have in common to be read once…"""
    min_sharers: int = 8
    """…for so many rows."""
    chunk: int = 512
    """Shared keys of one item, at least."""
    max_chunks: int = 4
    """What a run of rows shares is cut into so many items at most, to fill the card: each leaves partial results."""
    few_rows: tuple[tuple[int, DecodeConfig], ...] = ()
    """Of decode.py in steps of at most so many rows, ascending; `decode` is for those with more."""
    streamed: tuple[tuple[int, DecodeConfig], ...] = ()
    """Likewise, ahead of both, of steps whose rows share nothing, where stream.py can run."""
    narrow_streamed: tuple[tuple[int, DecodeConfig], ...] = ()
    """Instead of `streamed`, of a cache of 8 bits."""
    beside_registers: int | None = None
    """Most registers per thread of decode.py where it runs beside tiles.py and has to fit there."""

    def decode_for(self, num_rows: int, *, streams: bool = False, narrow: bool = False) -> DecodeConfig:
        """Of a step with at most so many rows. streams: stream.py may run. narrow: on a cache of 8 bits."""
        streamed = self.narrow_streamed if narrow else self.streamed
        configs = (*(streamed if streams else ()), *self.few_rows)
        return next((config for most, config in configs if num_rows <= most), self.decode)

    @property
    def most_programs_per_sm(self) -> int:
        """Of decode.py, in any step."""
        tables = (*self.streamed, *self.narrow_streamed, *self.few_rows)
        configs = (self.decode, *(config for _, config in tables))
        return max(config.programs_per_sm for config in configs)


def default_config(element_size: int, head_dim: int) -> AttentionConfig:
    """For any card with 100 KiB of shared memory per multiprocessor and more."""
    wide = head_dim > 128
    if element_size > 2:
        tiles = TilesConfig(32, 16 if wide else 32, 4, 2, 1)
        return AttentionConfig(DecodeConfig(32, 4, 2, 2), tiles, tiles)
    tiles = TilesConfig(64, 32 if wide else 64, 4, 2, 1)
    return AttentionConfig(DecodeConfig(32 if wide else 64, 4, 2, 2), tiles, tiles)


MANY_ROWS = 1 << 30
"""As many as there may be."""


def streaming(
    stages: int, programs_per_sm: int, min_tiles: int = 1, *, keys: int = 64, together: int = 1
) -> DecodeConfig:
    """Of stream.py; and of decode.py where a cache or sinks keep that from running."""
    return DecodeConfig(keys, 4, 3, programs_per_sm, min_tiles, stream_stages=stages, together=together)


_WIDE_BLOCK = TilesConfig(128, 64, 8, 3, 1, tma=True, ring=5)
"""128 rows a block: with 64, keys and values would have to come from the L2 cache at 7 TB/s to reach 490 TFLOP/s."""
_BESIDE_DECODE = replace(_WIDE_BLOCK, max_registers=168)
"""Leaves registers and shared memory for one program of the decode kernel, which runs at the same time."""
_WIDER_HEADS = TilesConfig(128, 64, 8, 2, 1, tma=True)
_NARROW_STREAMED = (
    (1, streaming(6, 1, keys=128)),
    (48, streaming(5, 2)),
    (MANY_ROWS, streaming(5, 2, together=8)),
)
_H200 = {
    64: AttentionConfig(DecodeConfig(64, 4, 4, 3), _WIDE_BLOCK, _WIDE_BLOCK),
    128: AttentionConfig(
        DecodeConfig(64, 4, 3, 2, min_tiles=2),
        _WIDE_BLOCK,
        _BESIDE_DECODE,
        beside_registers=168,
        streamed=((1, streaming(6, 1, min_tiles=3)), (MANY_ROWS, streaming(3, 2))),
        narrow_streamed=_NARROW_STREAMED,
    ),
    256: AttentionConfig(DecodeConfig(32, 4, 3, 2), _WIDER_HEADS, _WIDER_HEADS),
}
"""By head dimension, rounded up to a power of two; 16-bit types."""
_H200_SMALL_GROUPS = _H200 | {
    128: replace(
        _H200[128],
        decode=DecodeConfig(32, 4, 3, 4, max_registers=128),
        few_rows=((1, DecodeConfig(32, 2, 4, 4)), (8, DecodeConfig(16, 2, 5, 6))),
        streamed=((1, streaming(6, 1)), (MANY_ROWS, streaming(3, 2))),
    ),
}
"""With at most SMALL_GROUP query heads per key head: less to compute for a key, so more, smaller tiles are better."""
SMALL_GROUP = 2

_BY_CARD = {"NVIDIA H200": (_H200, _H200_SMALL_GROUPS), "NVIDIA H100": (_H200, _H200_SMALL_GROUPS)}
"""By the beginning of the device's name: for larger and for small groups."""


def config_for(device_name: str, element_size: int, head_dim: int, group: int = 4) -> AttentionConfig:
    """The tuned configuration, or the default. head_dim: rounded up to a power of two; group: heads per key head."""
    tables = of_card(device_name, _BY_CARD) if element_size == 2 else None
    tuned = tables[group <= SMALL_GROUP].get(head_dim) if tables is not None else None
    return tuned or default_config(element_size, head_dim)
