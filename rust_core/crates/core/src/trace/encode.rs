//! Events to bytes.

use super::bytes::{put, put_signed};
use super::columns::{Column, Predictor};
use super::event::{Beams, Chosen, Event, Outcome, Step, Submission, TraceEnd};
use super::frame::{FRAME_BYTES, append_frame, opening};
use super::queue::Batch;
use super::record::Call;
use super::veil::Veil;
use crate::config::CoreConfig;
use crate::kv::random_key;
use crate::request::{EarlyStopping, Pooling};

/// First bytes of the events.
pub(super) mod tags {
    pub(in super::super) const SUBMITTED: u8 = 1;
    pub(in super::super) const ABORTED: u8 = 2;
    pub(in super::super) const SCHEDULED: u8 = 3;
    pub(in super::super) const IDLE: u8 = 4;
    pub(in super::super) const COMMITTED: u8 = 5;
    pub(in super::super) const FAILED: u8 = 6;
    pub(in super::super) const ENDED: u8 = 7;
    pub(in super::super) const CACHE_RESET: u8 = 8;
    pub(in super::super) const POISONED: u8 = 9;
    pub(in super::super) const END: u8 = 10;
    pub(in super::super) const PRIORITIZED: u8 = 11;
}

/// Codes of outcomes; a token is its id plus `FIRST_TOKEN`.
pub(super) mod outcomes {
    pub(in super::super) const DROPPED: u64 = 0;
    pub(in super::super) const FAILED: u64 = 1;
    pub(in super::super) const STOPPED: u64 = 2;
    pub(in super::super) const CANDIDATES: u64 = 3;
    pub(in super::super) const FIRST_TOKEN: u64 = 4;
}

pub(super) const POOLINGS: [Option<Pooling>; 3] = [None, Some(Pooling::Last), Some(Pooling::Mean)];
pub(super) const EARLY_STOPPINGS: [EarlyStopping; 3] = [
    EarlyStopping::Heuristic,
    EarlyStopping::Always,
    EarlyStopping::Never,
];
pub(super) const ENDS: [TraceEnd; 3] = [TraceEnd::Closed, TraceEnd::Behind, TraceEnd::Refused];

/// Veils and encodes events, in order. For the writer's thread.
#[derive(Debug)]
pub struct TraceEncoder {
    config: CoreConfig,
    veil: Veil,
    writer: EventWriter,
    num_steps: u64,
}

impl TraceEncoder {
    /// For the trace of a core with this configuration. Its secret is drawn here and goes with it.
    pub fn new(config: &CoreConfig) -> Self {
        Self {
            config: config.clone(),
            veil: Veil::new(&random_key(), config.vocab_size, config.max_num_seqs),
            writer: EventWriter::new(config),
            num_steps: 0,
        }
    }

    /// The first bytes of the file.
    pub fn opening(&self) -> Vec<u8> {
        opening(&self.config)
    }

    /// The frames of the next batch, with the end mark in the last one.
    pub fn encode(&mut self, batch: Batch) -> Vec<u8> {
        let (mut bytes, mut payload) = (Vec::new(), Vec::new());
        let end = batch.end.map(Event::End);
        for mut event in batch.events.into_iter().chain(end) {
            self.veil.apply(&mut event);
            self.num_steps += u64::from(matches!(event, Event::Scheduled(_)));
            self.writer.write(&mut payload, &event);
            if payload.len() >= FRAME_BYTES {
                append_frame(&mut bytes, &payload);
                payload.clear();
            }
        }
        if !payload.is_empty() {
            append_frame(&mut bytes, &payload);
        }
        bytes
    }

    /// Steps encoded so far.
    pub fn num_steps(&self) -> u64 {
        self.num_steps
    }

    #[cfg(test)]
    pub(super) fn num_live(&self) -> usize {
        self.veil.num_live()
    }
}

/// Writes events without looking at what their tokens stand for.
#[derive(Debug)]
pub(super) struct EventWriter {
    predictor: Predictor,
    last_request: u64,
    last_prompt: Vec<i32>,
    last_name_space: u128,
}

impl EventWriter {
    pub(super) fn new(config: &CoreConfig) -> Self {
        Self {
            predictor: Predictor::new(config.max_num_seqs),
            last_request: 0,
            last_prompt: Vec::new(),
            last_name_space: 0,
        }
    }

    pub(super) fn write(&mut self, out: &mut Vec<u8>, event: &Event) {
        match event {
            Event::Submitted(submission) => self.write_submission(out, submission),
            Event::Aborted(request) => put_tagged(out, tags::ABORTED, *request),
            Event::Prioritized { request, priority } => {
                put_tagged(out, tags::PRIORITIZED, *request);
                put_signed(out, *priority);
            }
            Event::Scheduled(step) => self.write_step(out, step),
            Event::Idle => out.push(tags::IDLE),
            Event::Committed {
                step_id,
                outcomes,
                chosen,
            } => {
                put_tagged(out, tags::COMMITTED, *step_id);
                put(out, outcomes.len() as u64);
                for outcome in outcomes {
                    put_outcome(out, outcome);
                }
                put_chosen(out, chosen);
            }
            Event::Failed { step_id } => put_tagged(out, tags::FAILED, *step_id),
            Event::Ended(request) => put_tagged(out, tags::ENDED, *request),
            Event::CacheReset(was_done) => out.extend([tags::CACHE_RESET, u8::from(*was_done)]),
            Event::Poisoned { during } => {
                let call = Call::ALL.iter().position(|call| call.name() == *during);
                out.extend([tags::POISONED, call.unwrap_or_default() as u8]);
            }
            Event::End(end) => {
                let code = ENDS.iter().position(|known| known == end);
                out.extend([tags::END, code.unwrap_or_default() as u8]);
            }
        }
    }

    fn write_submission(&mut self, out: &mut Vec<u8>, submission: &Submission) {
        // Requests are named in ascending order.
        put_tagged(
            out,
            tags::SUBMITTED,
            submission.request.wrapping_sub(self.last_request),
        );
        self.last_request = submission.request;
        put(out, u64::from(submission.n));
        put_signed(out, submission.priority);
        let is_known = submission.name_space == self.last_name_space;
        out.push(u8::from(!is_known));
        if !is_known {
            out.extend_from_slice(&submission.name_space.to_le_bytes());
            self.last_name_space = submission.name_space;
        }
        for value in [
            submission.max_tokens,
            submission.min_tokens,
            submission.flags,
            (submission.num_logprobs + 1) as u32,
            (submission.num_prompt_logprobs + 1) as u32,
            POOLINGS
                .iter()
                .position(|&known| known == submission.pooling)
                .unwrap_or_default() as u32,
            submission.num_picks,
            submission.num_bias,
            submission.num_banned,
            u32::from(submission.final_only),
        ] {
            put(out, u64::from(value));
        }
        put_beams(out, submission.beams);
        put(out, submission.prompt.len() as u64);
        let pairs = submission.prompt.iter().zip(&self.last_prompt);
        let num_shared = pairs.take_while(|(ours, theirs)| ours == theirs).count();
        put(out, num_shared as u64);
        for &token in &submission.prompt[num_shared..] {
            put(out, token as u64);
        }
        self.last_prompt.clear();
        self.last_prompt.extend_from_slice(&submission.prompt);
    }

    fn write_step(&mut self, out: &mut Vec<u8>, step: &Step) {
        out.push(tags::SCHEDULED);
        let pairs = step.header.iter().zip(&self.predictor.header);
        put_residuals(out, pairs.map(|(&value, &last)| value.wrapping_sub(last)));
        let mut last_request = self.predictor.request;
        for admission in &step.admitted {
            put(out, admission.slot as u64);
            put_signed(out, admission.request.wrapping_sub(last_request) as i64);
            put(out, u64::from(admission.index));
            last_request = admission.request;
        }
        for &column in Column::ALL {
            let values = step.column(column).iter().enumerate();
            put_residuals(
                out,
                values.map(|(index, &value)| {
                    let likely = self.predictor.predict(&step.columns, column, index);
                    i64::from(value.wrapping_sub(likely))
                }),
            );
        }
        put(out, u64::from(step.num_placeholders));
        self.predictor.note(step);
    }
}

fn put_tagged(out: &mut Vec<u8>, tag: u8, value: u64) {
    out.push(tag);
    put(out, value);
}

fn put_outcome(out: &mut Vec<u8>, outcome: &Outcome) {
    match outcome {
        Outcome::Dropped => put(out, outcomes::DROPPED),
        Outcome::Failed => put(out, outcomes::FAILED),
        Outcome::Stopped => put(out, outcomes::STOPPED),
        Outcome::Token(token) => put(out, outcomes::FIRST_TOKEN + *token as u64),
        Outcome::Candidates(candidates) => {
            put(out, outcomes::CANDIDATES);
            put(out, candidates.len() as u64);
            for candidate in candidates {
                put(out, candidate.token.map_or(0, |token| 1 + token as u64));
                out.extend_from_slice(&candidate.logprob.to_le_bytes());
            }
        }
    }
}

fn put_chosen(out: &mut Vec<u8>, chosen: &[Chosen]) {
    put(out, chosen.len() as u64);
    for one in chosen {
        put(out, one.request);
        put(out, one.heirs.len() as u64);
        for &(parent, token) in &one.heirs {
            put(out, u64::from(parent));
            put(out, token as u64);
        }
    }
}

fn put_beams(out: &mut Vec<u8>, beams: Option<Beams>) {
    let Some(beams) = beams else {
        put(out, 0);
        return;
    };
    let known = EARLY_STOPPINGS
        .iter()
        .position(|&known| known == beams.early_stopping);
    put(out, 1 + known.unwrap_or_default() as u64);
    out.extend_from_slice(&beams.length_penalty.to_le_bytes());
}

/// Each as a signed number; zeros as one, followed by how many more of them come.
fn put_residuals(out: &mut Vec<u8>, residuals: impl Iterator<Item = i64>) {
    let mut num_zeros = 0;
    let end_run = |out: &mut Vec<u8>, num_zeros: &mut u64| {
        if *num_zeros > 0 {
            out.push(0);
            put(out, *num_zeros - 1);
            *num_zeros = 0;
        }
    };
    for residual in residuals {
        if residual == 0 {
            num_zeros += 1;
        } else {
            end_run(out, &mut num_zeros);
            put_signed(out, residual);
        }
    }
    end_run(out, &mut num_zeros);
}
