//! What a trace is made of.

use super::columns::{Column, NUM_COLUMNS};
use crate::batch::HEADER_NAMES;
use crate::request::{EarlyStopping, Pooling};

/// Values of a slab's header that are in use.
pub(super) const NUM_HEADER: usize = HEADER_NAMES.len();
/// Values of it that follow from what binds tokens, which a trace does not hold: nothing else depends on them.
const NOT_DECIDED: [&str; 2] = ["num_masked", "masks_wait"];

/// One thing that went into the core, or came out of it, in the order in which they did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A request was taken up.
    Submitted(Box<Submission>),
    /// A request was ended from outside. Handle.
    Aborted(u64),
    /// A live request was given another priority.
    Prioritized {
        /// Handle.
        request: u64,
        /// From now on.
        priority: i64,
    },
    /// The next step was decided.
    Scheduled(Box<Step>),
    /// There was nothing to decide.
    Idle,
    /// The results of the oldest step in flight were taken: what became of each of its samples.
    Committed {
        /// The step.
        step_id: u64,
        /// In the order of the step's samples.
        outcomes: Vec<Outcome>,
        /// Of requests whose beams go on, in the order in which that was decided.
        chosen: Vec<Chosen>,
    },
    /// The oldest step in flight failed.
    Failed {
        /// The step.
        step_id: u64,
    },
    /// A request ended with what came before. Handle.
    Ended(u64),
    /// Cached blocks were to be forgotten; whether they were.
    CacheReset(bool),
    /// A panic was caught. Nothing but the end follows.
    Poisoned {
        /// In which call.
        during: &'static str,
    },
    /// The last event.
    End(TraceEnd),
}

/// Why a trace ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceEnd {
    /// The engine was shut down.
    Closed,
    /// The writer did not keep up, so the rest was left out.
    Behind,
    /// The system took no more bytes.
    Refused,
}

/// What the scheduler looks at in a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submission {
    /// Its name in the core.
    pub request: u64,
    /// Sequences.
    pub n: u32,
    /// Lower is sooner.
    pub priority: i64,
    /// Stands for adapter and cache salt: prefixes are shared within one name space only.
    pub name_space: u128,
    /// Output tokens per sequence at most.
    pub max_tokens: u32,
    /// Output tokens before which nothing but `max_tokens` ends a sequence.
    pub min_tokens: u32,
    /// What its samples ask of the sampler, as bits of the slab header's `flags`.
    pub flags: u32,
    /// Top log-probabilities per token; -1 = none.
    pub num_logprobs: i32,
    /// Top log-probabilities per prompt token; -1 = none.
    pub num_prompt_logprobs: i32,
    /// The prompt's hidden states that are wanted.
    pub pooling: Option<Pooling>,
    /// Tokens whose log-probabilities its samples name.
    pub num_picks: u32,
    /// Entries of `logit_bias`.
    pub num_bias: u32,
    /// Ids that may not be sampled before `min_tokens`.
    pub num_banned: u32,
    /// Deltas are kept back until a sequence ends.
    pub final_only: bool,
    /// The sequences are beams.
    pub beams: Option<Beams>,
    /// Tokens, or what stands for them.
    pub prompt: Vec<i32>,
}

/// How beams are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beams {
    /// Bits of the exponent of the length (f64).
    pub length_penalty: u64,
    /// When the search ends.
    pub early_stopping: EarlyStopping,
}

/// A sequence that got a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    /// The slot.
    pub slot: i32,
    /// Its request.
    pub request: u64,
    /// Which of the request's sequences.
    pub index: u32,
}

/// All of a step's slab that was decided: everything but token ids and columns of the sampler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub(super) header: [i64; NUM_HEADER],
    pub(super) admitted: Vec<Admission>,
    pub(super) columns: [Vec<i32>; NUM_COLUMNS],
    /// Input tokens that are still being sampled.
    pub(super) num_placeholders: u32,
}

impl Step {
    /// Its id.
    pub fn step_id(&self) -> u64 {
        self.header[0] as u64
    }

    /// The first part in which another step differs from this one: its name, our value, theirs.
    pub(super) fn first_difference(&self, other: &Self) -> Option<(String, String, String)> {
        for (index, (ours, theirs)) in self.header.iter().zip(&other.header).enumerate() {
            let name = HEADER_NAMES[index];
            if ours != theirs && !NOT_DECIDED.contains(&name) {
                let name = format!("header.{name}");
                return Some((name, ours.to_string(), theirs.to_string()));
            }
        }
        let shown = |admission: Option<&Admission>| match admission {
            None => "none".to_owned(),
            Some(Admission {
                slot,
                request,
                index,
            }) => format!("request {request}.{index} in slot {slot}"),
        };
        for index in 0..self.admitted.len().max(other.admitted.len()) {
            let (ours, theirs) = (self.admitted.get(index), other.admitted.get(index));
            if ours != theirs {
                return Some((format!("admitted[{index}]"), shown(ours), shown(theirs)));
            }
        }
        for (column, (ours, theirs)) in Column::ALL
            .iter()
            .zip(self.columns.iter().zip(&other.columns))
        {
            if let Some((index, ours, theirs)) = first_unequal(ours, theirs) {
                return Some((format!("{}[{index}]", column.name()), ours, theirs));
            }
        }
        let (ours, theirs) = (self.num_placeholders, other.num_placeholders);
        (ours != theirs).then(|| {
            let name = "tokens that are being sampled".to_owned();
            (name, ours.to_string(), theirs.to_string())
        })
    }

    pub(super) fn column(&self, column: Column) -> &[i32] {
        &self.columns[column as usize]
    }

    pub(super) fn header_value(&self, name: &str) -> i64 {
        HEADER_NAMES
            .iter()
            .position(|&known| known == name)
            .map_or(0, |index| self.header[index])
    }
}

fn first_unequal(ours: &[i32], theirs: &[i32]) -> Option<(usize, String, String)> {
    let shown = |value: Option<&i32>| value.map_or("none".to_owned(), ToString::to_string);
    (0..ours.len().max(theirs.len()))
        .find(|&index| ours.get(index) != theirs.get(index))
        .map(|index| (index, shown(ours.get(index)), shown(theirs.get(index))))
}

/// A likely next token of a beam.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// It, or what stands for it; `None` for one that ends a text.
    pub token: Option<i32>,
    /// Bits of its log-probability (f32).
    pub logprob: u32,
}

/// With what the beams of a request go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// Handle.
    pub request: u64,
    /// Of each beam, by index: the beam that it is a copy of, or itself, and the token behind that one's tokens.
    pub heirs: Vec<(u32, i32)>,
}

/// What became of one sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Its sequence had ended, or is computed anew: dropped.
    Dropped,
    /// No token (the logits hold NaN, the id is out of range, or must not come): the sequence ended with an error.
    Failed,
    /// A token that ended the sequence: EOS, a stop id, the last of a stop string, or the last that a grammar lets come.
    Stopped,
    /// The likeliest next tokens of a beam.
    Candidates(Vec<Candidate>),
    /// Any other token, or what stands for it. Whether it was the last one follows from `max_tokens`.
    Token(i32),
}

impl Event {
    /// About how many bytes it takes in memory.
    pub(super) fn num_bytes(&self) -> usize {
        let own = size_of::<Self>();
        own + match self {
            Self::Submitted(submission) => size_of::<Submission>() + 4 * submission.prompt.len(),
            Self::Scheduled(step) => {
                let columns: usize = step.columns.iter().map(Vec::len).sum();
                size_of::<Step>() + 4 * columns + size_of::<Admission>() * step.admitted.len()
            }
            Self::Committed {
                outcomes, chosen, ..
            } => {
                let beams = outcomes.iter().map(|outcome| match outcome {
                    Outcome::Candidates(all) => size_of::<Candidate>() * all.len(),
                    _ => 0,
                });
                let heirs = chosen
                    .iter()
                    .map(|one| size_of::<Chosen>() + size_of::<(u32, i32)>() * one.heirs.len());
                size_of::<Outcome>() * outcomes.len() + beams.chain(heirs).sum::<usize>()
            }
            _ => 0,
        }
    }
}
