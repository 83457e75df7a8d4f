//! The schedule trace: what went into the core and what it decided, in a form that can be run again.
//!
//! On the loop's thread the [`Recorder`](record::Recorder) copies each event into a bounded [`TraceQueue`]; another
//! thread veils the tokens, encodes (docs/schedule-trace.md) and writes. [`Replay`] reads a trace and runs it through
//! a scheduler of its own. No I/O here but through `Read`: files belong to the caller.

mod bytes;
mod columns;
mod decode;
mod describe;
mod encode;
mod event;
mod frame;
mod queue;
mod record;
mod replay;
mod veil;

#[cfg(test)]
mod tests;

use thiserror::Error;

pub use encode::TraceEncoder;
pub use event::{Admission, Beams, Candidate, Chosen, Event, Outcome, Step, Submission, TraceEnd};
pub use queue::{Batch, TraceQueue};
pub(crate) use record::{Call, Recorder};
pub use replay::{Difference, Replay, ReplaySummary};

/// Why a trace cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TraceError {
    /// The first bytes are not a trace's.
    #[error("this is no schedule trace")]
    NoTrace,
    /// Written by another version of the format.
    #[error(
        "the trace has format version {found}, this build reads version {known}; use the oneloop that wrote it"
    )]
    Version {
        /// The file's.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// The file ends in the middle of a frame.
    #[error("the trace is cut off at byte {offset}; everything before it was read")]
    CutOff {
        /// Where the incomplete frame begins.
        offset: u64,
    },
    /// A frame does not say what a frame can say.
    #[error("the trace is damaged in the frame at byte {offset}: {problem}")]
    Damaged {
        /// Where the frame begins.
        offset: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// The system did not give what was asked for.
    #[error("the trace cannot be read: {0}")]
    Io(String),
}
