//! What a request wants of its prompt beside the KV: log-probabilities of its tokens, or a pooled hidden state.
//!
//! Such a prompt is computed token by token whatever the cache holds, since cached KV has no hidden states; its blocks
//! become findable as any others. Only what was committed already is not computed again after a preemption. Results of
//! a chunk lie in the slab of its step and are added up here.

use std::sync::Arc;

use super::state::{LaunchedStep, Scheduler};
use crate::batch::{NUM_LOGPROB_COLUMNS, OutputView, StepWriter};
use crate::delta::{Delta, Deltas, Failure, FinishReason};
use crate::prompt::PromptLogprobs;
use crate::request::Pooling;
use crate::sched::RequestSpec;

/// The results so far of one sequence's prompt.
#[derive(Debug)]
pub(crate) struct PromptResults {
    /// Top log-probabilities per token; -1 = none.
    num_top: i32,
    pooling: Option<Pooling>,
    /// Tokens at the start of the prompt whose results were committed.
    pub(super) num_landed: u32,
    /// These, and those whose results are in flight.
    num_launched: u32,
    /// Steps in flight that bring results.
    pub(super) num_in_flight: u32,
    logprobs: PromptLogprobs,
    /// Sum over the tokens so far.
    pooled: Vec<f64>,
    /// Whether there was something that is no number.
    is_broken: bool,
}

/// A step in flight brings results of a prompt.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaunchedResults {
    pub(super) sequence: u32,
    pub(super) life: u64,
    /// Tokens of the prompt with results after the step.
    end: u32,
    first_score: u32,
    num_scores: u32,
    pool: Option<u32>,
}

impl PromptResults {
    /// `None` where the request wants nothing of the kind.
    pub(super) fn new(spec: &RequestSpec) -> Option<Box<Self>> {
        if spec.num_prompt_logprobs < 0 && spec.pooling.is_none() {
            return None;
        }
        Some(Box::new(Self {
            num_top: spec.num_prompt_logprobs,
            pooling: spec.pooling,
            num_landed: 0,
            num_launched: 0,
            num_in_flight: 0,
            logprobs: PromptLogprobs::default(),
            pooled: Vec::new(),
            is_broken: false,
        }))
    }

    /// Tokens at the start of the sequence that may come from the cache.
    pub(super) fn num_cacheable(&self, num_prompt: u32) -> u32 {
        if self.pooling == Some(Pooling::Last) || self.is_complete(num_prompt) {
            u32::MAX
        } else {
            self.num_landed
        }
    }

    /// Whether its chunks take places in the slab's list of scores.
    pub(super) fn is_scored(&self, num_prompt: u32) -> bool {
        self.num_top >= 0 && self.num_launched < num_prompt
    }

    /// What is in flight does not count: it is computed anew.
    pub(super) fn forget_launched(&mut self) {
        self.num_in_flight = 0;
        self.num_launched = self.num_landed;
    }

    fn is_complete(&self, num_prompt: u32) -> bool {
        self.num_landed == num_prompt
    }

    /// Adds what a step brought.
    fn land(
        &mut self,
        launched: &LaunchedResults,
        outputs: &OutputView<'_>,
        num_prompt: u32,
        hidden_size: usize,
    ) {
        self.num_in_flight -= 1;
        self.num_landed = launched.end;
        if self.num_top >= 0 && self.logprobs.is_empty() {
            self.logprobs = PromptLogprobs::new(num_prompt as usize, self.num_top as usize);
        }
        for at in launched.first_score..launched.first_score + launched.num_scores {
            let at = at as usize;
            let columns = at * NUM_LOGPROB_COLUMNS..(at + 1) * NUM_LOGPROB_COLUMNS;
            let logprobs = &outputs.score_logprob[columns.clone()];
            self.is_broken |= logprobs[0].is_nan();
            let token_ids = &outputs.score_logprob_token[columns];
            self.logprobs
                .push(outputs.score_rank[at], token_ids, logprobs);
        }
        if let Some(pool) = launched.pool {
            let start = pool as usize * hidden_size;
            let sum = &outputs.pooled[start..start + hidden_size];
            self.pooled.resize(hidden_size, 0.0);
            for (total, &value) in self.pooled.iter_mut().zip(sum) {
                *total += f64::from(value);
            }
            self.is_broken |= !self.pooled.iter().all(|value| value.is_finite());
        }
    }

    fn vector(&self, num_prompt: u32) -> Vec<f32> {
        let num_tokens = match self.pooling {
            Some(Pooling::Mean) => f64::from(num_prompt),
            _ => 1.0,
        };
        let mean = self.pooled.iter().map(|&sum| (sum / num_tokens) as f32);
        mean.collect()
    }
}

impl Scheduler {
    /// The row that was just written computes the sequence's tokens `[start, end)`: what is wanted of them.
    #[cold]
    pub(super) fn emit_results(
        &mut self,
        id: u32,
        (start, end): (u32, u32),
        step: &mut StepWriter<'_>,
        launched: &mut LaunchedStep,
    ) {
        let sequence = &mut self.sequences[id as usize];
        let Some(results) = &mut sequence.prompt_results else {
            return;
        };
        let num_prompt = sequence.num_prompt;
        let (first, end) = (start.max(results.num_launched), end.min(num_prompt));
        if first >= end {
            return;
        }
        let row_start = step.num_tokens() - (sequence.num_computed - start);
        let at = |position: u32| row_start + (position - start);
        let mut first_score = None;
        if results.num_top >= 0 {
            let prompt = &self.requests[sequence.request as usize].spec.prompt;
            for position in first..end.min(num_prompt - 1) {
                let token = prompt[position as usize + 1];
                let place = step.push_score(at(position), token, results.num_top);
                first_score.get_or_insert(place);
            }
        }
        let pool = match results.pooling {
            Some(Pooling::Mean) => Some(step.push_pool(at(first), at(end))),
            Some(Pooling::Last) if end == num_prompt => Some(step.push_pool(at(end - 1), at(end))),
            _ => None,
        };
        results.num_launched = end;
        results.num_in_flight += 1;
        launched.results.push(LaunchedResults {
            sequence: id,
            life: sequence.life,
            end,
            first_score: first_score.unwrap_or_default(),
            num_scores: first_score.map_or(0, |_| end.min(num_prompt - 1) - first),
            pool,
        });
    }

    /// Takes in the results of a step. A sequence that wants nothing else ends with the last of them.
    pub(super) fn land_results(
        &mut self,
        launched: LaunchedResults,
        outputs: &OutputView<'_>,
        deltas: &mut Deltas,
    ) {
        let id = launched.sequence;
        let sequence = &mut self.sequences[id as usize];
        if sequence.life != launched.life {
            return;
        }
        let num_prompt = sequence.num_prompt;
        let hidden_size = self.config.hidden_size as usize;
        let Some(results) = &mut sequence.prompt_results else {
            return;
        };
        results.land(&launched, outputs, num_prompt, hidden_size);
        // What a prompt's NaN does to the tokens behind it the sampler tells.
        if sequence.max_tokens > 0 || !results.is_complete(num_prompt) {
            return;
        }
        if results.is_broken {
            let message = "the model's results hold NaN or infinity; another dtype may help";
            self.end_with_error(id, &Arc::new(Failure::of_engine(message)), deltas);
            return;
        }
        let mark = deltas.mark();
        let mut delta = self.last_delta(id, mark, deltas);
        delta.finish_reason = Some(FinishReason::Length);
        self.end_sequence(id, FinishReason::Length);
        deltas.entries.push(delta);
    }

    /// Hands the complete results over to a delta.
    #[cold]
    pub(super) fn tell_results(&mut self, id: u32, delta: &mut Delta) {
        let sequence = &mut self.sequences[id as usize];
        let num_prompt = sequence.num_prompt;
        let complete = sequence
            .prompt_results
            .take_if(|results| results.is_complete(num_prompt));
        if let Some(results) = complete {
            let told = delta.told.get_or_insert_default();
            told.pooled = results.pooling.map(|_| results.vector(num_prompt));
            if results.num_top >= 0 {
                told.prompt_logprobs = Some(Arc::new(results.logprobs));
            }
        }
    }
}
