//! The results of a step: tokens, stops, text.

use std::sync::Arc;

use super::state::{LaunchedRow, LaunchedSample, LaunchedStep, Scheduler};
use crate::batch::{NUM_LOGPROB_COLUMNS, OutputView, flags};
use crate::delta::{Delta, Deltas, Failure, FinishReason, LogprobEntry, Mark, StopReason};
use crate::error::Error;
use crate::trace::Outcome;

/// What the executor returns for a row whose logits hold NaN or +∞.
const NO_TOKEN: i32 = -1;

/// Where a sample's results lie in the slab.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// Among the samples.
    position: usize,
    first_pick: usize,
}

/// Why a sequence ends with its new token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Eos,
    StopToken(i32),
    StopText(u32),
    /// Its grammar lets nothing follow.
    Grammar,
    Length,
}

impl Scheduler {
    /// Appends what the oldest step in flight sampled. A step that cannot be read stays in flight.
    pub(crate) fn commit(&mut self, step_id: u64, slab: &[u8]) -> Result<Deltas, Error> {
        let outputs = OutputView::new(&self.layout, slab)?;
        self.land_step(step_id, &outputs)
    }

    fn land_step(&mut self, step_id: u64, outputs: &OutputView<'_>) -> Result<Deltas, Error> {
        let mut step = self.take_oldest(step_id)?;
        if let Some(outcomes) = &mut self.outcomes {
            outcomes.clear();
            self.chosen.clear();
        }
        for row in step.rows.drain(..) {
            self.land_row(row);
        }
        let mut deltas = Deltas::with_capacity(step.samples.len());
        for results in step.results.drain(..) {
            self.land_results(results, outputs, &mut deltas);
        }
        for (position, sample) in step.samples.drain(..).enumerate() {
            self.land_sample(position, sample, outputs, &mut deltas);
        }
        step.masked.clear();
        self.scratch.spare_steps.push(step);
        Ok(deltas)
    }

    /// The oldest step in flight, if it is this one.
    pub(super) fn take_oldest(&mut self, step_id: u64) -> Result<LaunchedStep, Error> {
        match self.in_flight.front() {
            Some(oldest) if oldest.step_id != step_id => {
                let oldest = oldest.step_id;
                Err(Error::Slab(format!(
                    "step {step_id} is not the oldest in flight; commit step {oldest} first"
                )))
            }
            _ => self
                .in_flight
                .pop_front()
                .inspect(|step| self.recent.end(step.step_id))
                .ok_or_else(|| Error::Slab(format!("step {step_id} is not in flight"))),
        }
    }

    /// The row's KV is there: its full blocks become findable.
    #[inline]
    fn land_row(&mut self, row: LaunchedRow) {
        let sequence = &self.sequences[row.sequence as usize];
        if sequence.admission == row.admission
            && row.num_computed / self.config.block_size > sequence.num_registered
        {
            self.register_blocks(row.sequence, row.num_computed, 0);
        }
    }

    fn land_sample(
        &mut self,
        position: usize,
        sample: LaunchedSample,
        outputs: &OutputView<'_>,
        deltas: &mut Deltas,
    ) {
        let id = sample.sequence;
        let sequence = &mut self.sequences[id as usize];
        if sequence.life != sample.life {
            self.note_outcome(Outcome::Dropped);
            return;
        }
        sequence.num_pending -= 1;
        let place = Place {
            position,
            first_pick: sample.first_pick as usize,
        };
        let token = outputs.output_token[position];
        let vocab_size = self.config.vocab_size;
        if token < 0 || token as u32 >= vocab_size {
            let message = if token == NO_TOKEN {
                "the model's logits hold NaN or +infinity; another dtype may help".to_owned()
            } else {
                format!(
                    "the model returned token id {token}, outside its vocabulary of {vocab_size}"
                )
            };
            let failure = Arc::new(Failure::of_engine(message));
            self.note_outcome(Outcome::Failed);
            if self.sequences[id as usize].is_beam {
                let request = self.sequences[id as usize].request;
                self.fail_request(request, &failure, deltas);
            } else {
                self.end_with_error(id, &failure, deltas);
            }
            return;
        }
        if sequence.is_beam {
            self.land_beam(id, position, outputs, deltas);
            return;
        }
        sequence.outputs.push(token);
        let is_over = match self.obey(id, token) {
            Ok(is_over) => is_over,
            Err(failure) => {
                self.sequences[id as usize].outputs.pop();
                self.note_outcome(Outcome::Failed);
                self.end_with_error(id, &Arc::new(failure), deltas);
                return;
            }
        };
        self.counters.num_generation_tokens += 1;
        let mark = deltas.mark();
        let ending = match self.sequences[id as usize].gathered.take() {
            None => self.tell(id, token, is_over, place, outputs, deltas),
            Some(mut gathered) => {
                let ending = self.tell(id, token, is_over, place, outputs, &mut gathered);
                if ending.is_none() {
                    self.sequences[id as usize].gathered = Some(gathered);
                    return;
                }
                deltas.append(&gathered);
                ending
            }
        };
        let mut delta = self.new_delta(id, mark, deltas);
        if self.sequences[id as usize].prompt_results.is_some() {
            self.tell_results(id, &mut delta);
        }
        if let Some(ending) = ending {
            let reason = self.describe(id, ending, &mut delta);
            delta.finish_reason = Some(reason);
            self.end_sequence(id, reason);
        }
        deltas.entries.push(delta);
    }

    /// Takes the last output to the sequence's rules: whether nothing may follow it, or why it must not be.
    #[inline]
    fn obey(&mut self, id: u32, token: i32) -> Result<bool, Failure> {
        let sequence = &mut self.sequences[id as usize];
        let Some(rules) = &mut sequence.rules else {
            return Ok(false);
        };
        let stopping = &self.requests[sequence.request as usize].spec.stopping;
        let may_stop = sequence.outputs.len() as u32 > stopping.num_unstoppable;
        let ends = may_stop && stopping.is_stop_token(token);
        rules.advance(&sequence.outputs, ends)
    }

    /// Adds the token with its text and log-probabilities to `told`, and says whether the sequence ends with it.
    fn tell(
        &mut self,
        id: u32,
        token: i32,
        is_over: bool,
        place: Place,
        outputs: &OutputView<'_>,
        told: &mut Deltas,
    ) -> Option<Ending> {
        let ending = self.test_stops(id, token, is_over, &mut told.text);
        self.note_outcome(match ending {
            None | Some(Ending::Length) => Outcome::Token(token),
            Some(_) => Outcome::Stopped,
        });
        told.token_ids.push(token);
        let sequence = &self.sequences[id as usize];
        if let Ok(num_top) = usize::try_from(sequence.num_logprobs) {
            let picks: &[i32] = if sequence.flags & flags::PICKS != 0 {
                &self.requests[sequence.request as usize].spec.sampling.picks
            } else {
                &[]
            };
            read_logprobs(place, num_top, picks, outputs, told);
        }
        ending
    }

    #[inline]
    pub(super) fn note_outcome(&mut self, outcome: Outcome) {
        if let Some(outcomes) = &mut self.outcomes {
            outcomes.push(outcome);
        }
    }

    /// Appends the token's text and tells whether the sequence ends with it.
    ///
    /// A stop token is not part of the text unless that was asked for. Ends flush what was held back.
    fn test_stops(
        &mut self,
        id: u32,
        token: i32,
        is_over: bool,
        text: &mut String,
    ) -> Option<Ending> {
        let sequence = &mut self.sequences[id as usize];
        let stopping = &self.requests[sequence.request as usize].spec.stopping;
        let num_outputs = sequence.outputs.len() as u32;
        let mut ending = None;
        if num_outputs > stopping.num_unstoppable {
            if stopping.eos_token_ids.contains(&token) {
                ending = Some(Ending::Eos);
            } else if stopping.stop_token_ids.contains(&token) {
                ending = Some(Ending::StopToken(token));
            }
        }
        if let Some(decoder) = &mut sequence.decoder {
            let mut matched = None;
            if ending.is_none() || stopping.include_stop_in_output {
                matched = decoder.push(token as u32, text);
            }
            let is_last = ending.is_some() || is_over || num_outputs >= sequence.max_tokens;
            if matched.is_none() && is_last {
                matched = decoder.flush(text);
            }
            ending = ending.or(matched.map(Ending::StopText));
        }
        ending
            .or(is_over.then_some(Ending::Grammar))
            .or((num_outputs >= sequence.max_tokens).then_some(Ending::Length))
    }

    /// Notes what stopped the sequence.
    fn describe(&self, id: u32, ending: Ending, delta: &mut Delta) -> FinishReason {
        let request = &self.requests[self.sequences[id as usize].request as usize];
        delta.stop_reason = match ending {
            Ending::Eos | Ending::Grammar | Ending::Length => None,
            Ending::StopToken(token) => Some(StopReason::Token(token)),
            Ending::StopText(index) => {
                let strings = request.spec.stopping.stop_strings.as_ref();
                strings
                    .and_then(|set| set.strings().get(index as usize))
                    .cloned()
                    .map(StopReason::Text)
            }
        };
        if ending == Ending::Length {
            FinishReason::Length
        } else {
            FinishReason::Stop
        }
    }

    /// A delta of what was appended since `mark`.
    #[inline]
    fn new_delta(&mut self, id: u32, mark: Mark, deltas: &Deltas) -> Delta {
        let sequence = &mut self.sequences[id as usize];
        let queue_s = if std::mem::replace(&mut sequence.has_reported, true) {
            None
        } else {
            self.requests[sequence.request as usize].queue_s
        };
        let now = deltas.mark();
        let has_logprobs = sequence.num_logprobs >= 0 && now.tokens > mark.tokens;
        Delta {
            request: sequence.rank.arrival,
            index: sequence.rank.index,
            text: mark.text..now.text,
            tokens: mark.tokens..now.tokens,
            logprobs: has_logprobs.then_some(mark.logprobs..now.logprobs),
            finish_reason: None,
            stop_reason: None,
            num_cached_tokens: sequence.num_cached_tokens,
            queue_s,
            error: None,
            told: None,
        }
    }

    /// As `new_delta`, with what is said of the prompt: for sequences that end otherwise than with a sampled token.
    #[cold]
    pub(super) fn last_delta(&mut self, id: u32, mark: Mark, deltas: &Deltas) -> Delta {
        let mut delta = self.new_delta(id, mark, deltas);
        self.tell_results(id, &mut delta);
        delta
    }

    /// Ends one sequence with an error; text that was held back is handed out first.
    pub(super) fn end_with_error(&mut self, id: u32, failure: &Arc<Failure>, deltas: &mut Deltas) {
        let mark = deltas.mark();
        let sequence = &mut self.sequences[id as usize];
        if let Some(gathered) = sequence.gathered.take() {
            deltas.append(&gathered);
        }
        if let Some(decoder) = &mut sequence.decoder {
            decoder.flush(&mut deltas.text);
        }
        let mut delta = self.new_delta(id, mark, deltas);
        delta.finish_reason = Some(FinishReason::Error);
        delta.error = Some(failure.clone());
        deltas.entries.push(delta);
        self.end_sequence(id, FinishReason::Error);
    }
}

/// Copies the log-probabilities of the sampled token, the top tokens and the named ones out of the slab.
fn read_logprobs(
    place: Place,
    num_top: usize,
    picks: &[i32],
    outputs: &OutputView<'_>,
    deltas: &mut Deltas,
) {
    let position = place.position;
    let columns = position * NUM_LOGPROB_COLUMNS..position * NUM_LOGPROB_COLUMNS + num_top + 1;
    let start = deltas.logprob_ids.len() as u32;
    deltas
        .logprob_ids
        .extend_from_slice(&outputs.output_logprob_token[columns.clone()]);
    deltas
        .logprob_values
        .extend_from_slice(&outputs.output_logprob[columns]);
    deltas.logprob_ids.extend_from_slice(picks);
    let picked = place.first_pick..place.first_pick + picks.len();
    deltas
        .logprob_values
        .extend_from_slice(&outputs.pick_logprob[picked]);
    deltas.logprob_entries.push(LogprobEntry {
        rank: outputs.output_rank[position],
        range: start..deltas.logprob_ids.len() as u32,
    });
}
