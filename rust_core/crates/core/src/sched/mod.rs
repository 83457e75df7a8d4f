//! Which sequences run, with which tokens, in which blocks.
//!
//! [`Scheduler`] holds all state. Its methods are spread by what they do: `schedule` and `admit` plan a step and
//! `emit` writes it, `prompt_results` is about what is asked of a prompt itself, `beams` about sequences that are chosen
//! together, `front` lets sequences wait for a prefix under way, `commit` and `fail` take its outcome,
//! `mask` computes what binds a step's samples, `snapshot` shows it all, `lifecycle` moves sequences between queue,
//! slots and the end, `priority` changes their order, `audit` checks the laws.

mod admit;
mod audit;
mod beams;
mod commit;
mod emit;
mod fail;
mod front;
mod lifecycle;
mod mask;
mod priority;
mod prompt_results;
mod queue;
mod request;
mod schedule;
mod sequence;
mod share;
mod slots;
mod snapshot;
mod state;
mod waiters;

pub(crate) use request::{RequestSpec, Sampling, Stopping, mix};
pub use snapshot::{RunningSequence, Snapshot, StepSummary, WaitingSequence, WaitsFor};
pub(crate) use state::Scheduler;
