//! A snapshot as dictionaries (their keys: `oneloop_core.snapshot`).

use oneloop_core::WaitsFor;
use pyo3::prelude::*;

/// A dictionary whose keys are the fields of a struct of the core.
macro_rules! dictionary {
    ($name:ident { $($field:ident: $ty:ty),* $(,)? }) => {
        #[derive(IntoPyObject)]
        pub(crate) struct $name { $($field: $ty),* }

        impl From<oneloop_core::$name> for $name {
            fn from(value: oneloop_core::$name) -> Self {
                let oneloop_core::$name { $($field),* } = value;
                Self { $($field: $field.into()),* }
            }
        }
    };
}

dictionary! { RunningSequence {
    request: u64, index: u32, priority: i64, slot: u32, num_prompt_tokens: u32, num_output_tokens: u32,
    max_tokens: u32, num_computed_tokens: u32, num_owed_tokens: u32, num_blocks: u32, num_cached_blocks: u32,
    num_preemptions: u32, age_s: f64,
} }

dictionary! { WaitingSequence {
    request: u64, index: u32, priority: i64, num_sequences: u32, num_prompt_tokens: u32, num_output_tokens: u32,
    max_tokens: u32, num_preemptions: u32, age_s: f64, waits_for: Reason,
} }

dictionary! { StepSummary {
    step_id: u64, num_rows: u32, num_decodes: u32, num_tokens: u32, num_samples: u32, num_admitted: u32,
    num_preempted: u32, num_finished: u32, age_s: f64, took_s: Option<f64>,
} }

/// Why a sequence does not run, in numbers.
#[derive(IntoPyObject, Default)]
pub(crate) struct Reason {
    what: &'static str,
    of_request: Option<u64>,
    of_index: Option<u32>,
    needed: Option<u32>,
    available: Option<u32>,
}

impl From<WaitsFor> for Reason {
    fn from(waits_for: WaitsFor) -> Self {
        let reason = Self::default();
        match waits_for {
            WaitsFor::NextStep => Self {
                what: "next_step",
                ..reason
            },
            WaitsFor::Results => Self {
                what: "results",
                ..reason
            },
            WaitsFor::Slots { needed, free } => Self {
                what: "slots",
                needed: Some(needed),
                available: Some(free),
                ..reason
            },
            WaitsFor::Blocks { needed, available } => Self {
                what: "blocks",
                needed: Some(needed),
                available: Some(available),
                ..reason
            },
            WaitsFor::Prefix {
                request,
                index,
                num_blocks,
            } => Self {
                what: "prefix",
                of_request: Some(request),
                of_index: Some(index),
                needed: Some(num_blocks),
                ..reason
            },
            WaitsFor::Turn { request } => Self {
                what: "turn",
                of_request: Some(request),
                ..reason
            },
        }
    }
}

/// The whole of it.
#[derive(IntoPyObject)]
pub(crate) struct Snapshot {
    running: Vec<RunningSequence>,
    waiting: Vec<WaitingSequence>,
    steps: Vec<StepSummary>,
    kv_map: String,
    blocks_per_letter: u32,
}

impl From<oneloop_core::Snapshot> for Snapshot {
    fn from(snapshot: oneloop_core::Snapshot) -> Self {
        Self {
            running: snapshot.running.into_iter().map(Into::into).collect(),
            waiting: snapshot.waiting.into_iter().map(Into::into).collect(),
            steps: snapshot.steps.into_iter().map(Into::into).collect(),
            kv_map: snapshot.kv_map,
            blocks_per_letter: snapshot.blocks_per_letter,
        }
    }
}
