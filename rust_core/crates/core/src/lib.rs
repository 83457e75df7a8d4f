//! The scheduler, block pool, slab and detokenizer of oneloop: pure Rust, no I/O, no Python.

pub mod text;
