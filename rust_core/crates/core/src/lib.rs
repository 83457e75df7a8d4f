//! The scheduler, block pool, slab and detokenizer of oneloop: pure Rust, no I/O, no Python.

mod batch;
mod config;
mod delta;
mod engine;
mod error;
pub mod grammar;
mod guard;
mod inbox;
mod kv;
mod prompt;
mod request;
mod sched;
pub mod text;
mod trace;
mod validate;

pub use batch::{DType, Field, HEADER_NAMES, NUM_LOGPROB_COLUMNS, SLAB_ALIGNMENT, SlabLayout};
pub use config::{
    CoreConfig, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_CACHE_SALT_BYTES, MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_VALUE, MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, MAX_MARKER_TOKENS,
    MAX_SCORES_PER_STEP, MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS,
    MIN_TEMPERATURE, Policy,
};
pub use delta::{Delta, Deltas, Failure, FinishReason, StopReason, TokenLogprobs, Told};
pub use engine::{Core, Stats};
pub use error::Error;
pub use grammar::{Automaton, Constraint, ConstraintSource, SharedGrammar};
pub use inbox::Inbox;
pub use prompt::PromptLogprobs;
pub use request::{BeamSearch, EarlyStopping, Pooling, SubmitRequest};
pub use sched::{RunningSequence, Snapshot, StepSummary, WaitingSequence, WaitsFor};
pub use trace::{
    Admission, Batch, Beams, Candidate, Chosen, Difference, Event, Outcome, Replay, ReplaySummary,
    Step, Submission, TraceEncoder, TraceEnd, TraceError, TraceQueue,
};
