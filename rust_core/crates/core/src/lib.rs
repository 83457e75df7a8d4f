//! The scheduler, block pool, slab and detokenizer of oneloop: pure Rust, no I/O, no Python.

mod batch;
mod config;
mod delta;
mod engine;
mod error;
mod guard;
mod request;
pub mod text;

pub use batch::{DType, Field, HEADER_NAMES, NUM_LOGPROB_COLUMNS, SLAB_ALIGNMENT, SlabLayout};
pub use config::{
    CoreConfig, MAX_CACHE_SALT_BYTES, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS_VALUE, MAX_LOGPROBS,
    MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, Policy,
};
pub use delta::{Delta, Deltas, FinishReason, StopReason, TokenLogprobs};
pub use engine::{Core, Inbox, Stats};
pub use error::Error;
pub use request::SubmitRequest;
