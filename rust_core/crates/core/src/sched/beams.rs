//! Beam search: the sequences of a request are its beams, and their next tokens are chosen together.
//!
//! A step samples nothing for a beam but brings the log-probabilities of its likeliest next tokens. Once those of all
//! beams are there, the best continuations are chosen; a beam without one takes over the tokens and the block table of
//! one with several, whose blocks they share until one of them writes (no token is computed again). So beams do not run
//! ahead of their results, and one that is preempted is waited for. The rules are those of transformers' beam search:
//! of the best `n` continuations those that end a text are finished, the best `n` that do not go on; a finished text's
//! score is its log-probability over its length to the power of `length_penalty`.

use std::cmp::Ordering;
use std::sync::Arc;

use super::request::NO_SEQUENCE;
use super::sequence::{Place, TOLD};
use super::state::Scheduler;
use crate::batch::{NUM_LOGPROB_COLUMNS, OutputView, StepWriter};
use crate::delta::{Deltas, Failure, FinishReason, StopReason};
use crate::request::{BeamSearch, EarlyStopping};
use crate::sched::Stopping;
use crate::trace::{Candidate, Chosen, Outcome};

/// What the beams of one request know together.
#[derive(Debug)]
pub(crate) struct Beams {
    search: BeamSearch,
    /// By index of the sequence.
    states: Vec<BeamState>,
    /// Best first, at most as many as beams.
    finished: Vec<FinishedBeam>,
}

#[derive(Debug, Clone, Default)]
struct BeamState {
    logprob: f64,
    /// The likeliest next tokens; empty until they are known.
    candidates: Vec<(i32, f32)>,
}

#[derive(Debug)]
struct FinishedBeam {
    tokens: Vec<i32>,
    logprob: f64,
    score: f64,
}

/// One token more for one beam.
#[derive(Debug, Clone, Copy)]
struct Continuation {
    parent: u32,
    token: i32,
    logprob: f64,
}

/// What becomes of the beams.
enum Choice {
    Over,
    GoesOn(Vec<Continuation>),
}

impl Beams {
    pub(super) fn new(search: BeamSearch, num_beams: u32) -> Self {
        Self {
            search,
            states: vec![BeamState::default(); num_beams as usize],
            finished: Vec::new(),
        }
    }

    /// The beam's next tokens are unknown again.
    pub(super) fn forget_candidates(&mut self, index: u32) {
        self.states[index as usize].candidates.clear();
    }

    fn are_known(&self) -> bool {
        self.states.iter().all(|beam| !beam.candidates.is_empty())
    }

    /// All continuations, best first. Beams without tokens are all alike, so that the first stands for them.
    fn continuations(&self, num_outputs: usize) -> Vec<Continuation> {
        let num_parents = if num_outputs == 0 {
            1
        } else {
            self.states.len()
        };
        let parents = self.states[..num_parents].iter().enumerate();
        let mut all: Vec<Continuation> = parents
            .flat_map(|(parent, beam)| {
                beam.candidates
                    .iter()
                    .map(move |&(token, logprob)| Continuation {
                        parent: parent as u32,
                        token,
                        logprob: beam.logprob + f64::from(logprob),
                    })
            })
            .collect();
        all.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
        all
    }

    fn score(&self, logprob: f64, num_tokens: usize) -> f64 {
        logprob / (num_tokens as f64).powf(self.search.length_penalty)
    }

    /// Takes a finished text, if it is among the best.
    fn finish(&mut self, tokens: Vec<i32>, logprob: f64) {
        let score = self.score(logprob, tokens.len());
        let position = self
            .finished
            .partition_point(|other| other.score.total_cmp(&score) != Ordering::Less);
        let finished = FinishedBeam {
            tokens,
            logprob,
            score,
        };
        self.finished.insert(position, finished);
        self.finished.truncate(self.states.len());
    }

    /// Whether nothing better can come of beams of `num_tokens` tokens, the best of which has this log-probability.
    fn is_decided(&self, best_running: f64, num_tokens: usize, max_tokens: usize) -> bool {
        let Some(worst) = self
            .finished
            .last()
            .filter(|_| self.finished.len() == self.states.len())
        else {
            return false;
        };
        let longest = match self.search.early_stopping {
            EarlyStopping::Always => return true,
            EarlyStopping::Never if self.search.length_penalty > 0.0 => max_tokens,
            EarlyStopping::Never | EarlyStopping::Heuristic => num_tokens,
        };
        self.score(best_running, longest) <= worst.score
    }
}

impl Scheduler {
    /// The candidates of a beam have come. One that has lost its slot meanwhile is computed again.
    #[cold]
    pub(super) fn land_beam(
        &mut self,
        id: u32,
        position: usize,
        outputs: &OutputView<'_>,
        deltas: &mut Deltas,
    ) {
        let sequence = &self.sequences[id as usize];
        if sequence.place != Place::Running {
            self.note_outcome(Outcome::Dropped);
            return;
        }
        let (request, index) = (sequence.request, sequence.rank.index as usize);
        let first = position * NUM_LOGPROB_COLUMNS + 1;
        let columns = first..first + sequence.num_logprobs.unsigned_abs() as usize;
        let ids = outputs.output_logprob_token[columns.clone()].iter();
        let pairs = ids
            .copied()
            .zip(outputs.output_logprob[columns].iter().copied());
        let candidates: Vec<_> = pairs.collect();
        self.note_candidates(request, &candidates);
        let Some(beams) = &mut self.requests[request as usize].beams else {
            return;
        };
        beams.states[index].candidates = candidates;
        if !beams.are_known() {
            return;
        }
        match self.choose(request) {
            Choice::Over => self.end_beams(request, deltas),
            Choice::GoesOn(chosen) => self.go_on(request, &chosen),
        }
    }

    /// For a trace.
    fn note_candidates(&mut self, request: u32, candidates: &[(i32, f32)]) {
        if self.outcomes.is_none() {
            return;
        }
        let stopping = &self.requests[request as usize].spec.stopping;
        let noted = candidates.iter().map(|&(token, logprob)| Candidate {
            token: (!ends_text(stopping, token)).then_some(token),
            logprob: logprob.to_bits(),
        });
        let outcome = Outcome::Candidates(noted.collect());
        self.note_outcome(outcome);
    }

    /// For a trace.
    fn note_heirs(&mut self, request: u32, heirs: &[Option<Continuation>]) {
        if self.outcomes.is_none() {
            return;
        }
        let heirs = heirs.iter().flatten();
        self.chosen.push(Chosen {
            request: self.requests[request as usize].spec.handle,
            heirs: heirs.map(|next| (next.parent, next.token)).collect(),
        });
    }

    /// Notes what has finished, and finds the continuations that go on.
    fn choose(&mut self, request: u32) -> Choice {
        let request = &mut self.requests[request as usize];
        let leader = &self.sequences[request.members[0] as usize];
        let (num_outputs, max_tokens) = (leader.outputs.len(), leader.max_tokens as usize);
        let stopping = &request.spec.stopping;
        let num_beams = request.members.len();
        let Some(beams) = &mut request.beams else {
            return Choice::Over;
        };
        let all = beams.continuations(num_outputs);
        let is_last = num_outputs + 1 >= max_tokens;
        for best in all.iter().take(num_beams) {
            if is_last || ends_text(stopping, best.token) {
                let parent = request.members[best.parent as usize];
                let mut tokens = self.sequences[parent as usize].outputs.clone();
                tokens.push(best.token);
                beams.finish(tokens, best.logprob);
            }
        }
        let open = all
            .into_iter()
            .filter(|next| !ends_text(stopping, next.token));
        let chosen: Vec<Continuation> = open.take(num_beams).collect();
        let best = chosen.first().map(|best| best.logprob);
        let is_over = is_last
            || chosen.len() < num_beams
            || best.is_none_or(|best| beams.is_decided(best, num_outputs + 1, max_tokens));
        if is_over {
            Choice::Over
        } else {
            Choice::GoesOn(chosen)
        }
    }

    /// Gives each continuation a sequence: the first of a beam its own, the others those of beams without any.
    fn go_on(&mut self, request: u32, chosen: &[Continuation]) {
        let members = self.requests[request as usize].members.clone();
        let mut heirs: Vec<Option<Continuation>> = vec![None; members.len()];
        let mut others = Vec::new();
        for &next in chosen {
            match &mut heirs[next.parent as usize] {
                vacant @ None => *vacant = Some(next),
                Some(_) => others.push(next),
            }
        }
        let mut others = others.into_iter();
        for index in 0..heirs.len() {
            if heirs[index].is_none()
                && let Some(next) = others.next()
            {
                self.take_over(members[index], members[next.parent as usize]);
                heirs[index] = Some(next);
            }
        }
        self.note_heirs(request, &heirs);
        for (index, heir) in heirs.into_iter().enumerate() {
            let Some(next) = heir else { continue };
            self.sequences[members[index] as usize]
                .outputs
                .push(next.token);
            self.counters.num_generation_tokens += 1;
            if let Some(beams) = &mut self.requests[request as usize].beams {
                beams.states[index] = BeamState {
                    logprob: next.logprob,
                    candidates: Vec::new(),
                };
            }
        }
    }

    /// A beam becomes a copy of another one: the same tokens in the same blocks. Both run, nothing of them is in flight.
    fn take_over(&mut self, id: u32, parent: u32) {
        self.drop_front(id);
        let admission = self.draw();
        let old = std::mem::take(&mut self.sequences[id as usize].table);
        let source = &self.sequences[parent as usize];
        let shared = source.table.iter().map(|block| self.pool.share(block));
        let table: Vec<_> = shared.collect();
        let pairs = old.iter().zip(&table);
        let first_stale = pairs.take_while(|(a, b)| a.id() == b.id()).count() as u32;
        let (outputs, output_keys) = (source.outputs.clone(), source.output_keys.clone());
        let (num_computed, num_registered, num_hit) =
            (source.num_computed, source.num_registered, source.num_hit);
        let sequence = &mut self.sequences[id as usize];
        (sequence.outputs, sequence.output_keys) = (outputs, output_keys);
        sequence.num_computed = num_computed;
        sequence.num_registered = num_registered;
        sequence.num_hit = num_hit;
        sequence.admission = admission;
        sequence.table = table;
        sequence.first_stale = first_stale.min(sequence.first_stale);
        let has_partial_block = !num_computed.is_multiple_of(self.config.block_size);
        sequence.shares_tail = has_partial_block;
        self.sequences[parent as usize].shares_tail |= has_partial_block;
        for block in old {
            self.pool.release(block);
        }
    }

    /// Tells the device the blocks that a beam took over, but for the one it writes next. False where the slab has no
    /// room for them now.
    #[cold]
    pub(super) fn tell_table(&mut self, id: u32, step: &mut StepWriter<'_>) -> bool {
        let sequence = &mut self.sequences[id as usize];
        let next = sequence.num_computed / self.config.block_size;
        let stale = sequence.first_stale..next.min(sequence.table.len() as u32);
        // What is left serves the running rows: at most two entries each.
        if !step.has_room(stale.len() + 2 * self.config.max_num_seqs as usize, 0, 0, 0) {
            return false;
        }
        for index in stale {
            step.push_delta(sequence.slot, index, sequence.table[index as usize].id());
        }
        sequence.first_stale = next.max(sequence.first_stale);
        if sequence.first_stale as usize >= sequence.table.len() {
            sequence.first_stale = TOLD;
        }
        true
    }

    /// Tells the finished texts, the best as the first sequence's, and ends the request.
    fn end_beams(&mut self, request: u32, deltas: &mut Deltas) {
        let Some(beams) = self.requests[request as usize].beams.take() else {
            return;
        };
        let members = self.requests[request as usize].members.clone();
        let mut finished = beams.finished.into_iter();
        for id in members.into_iter().filter(|&id| id != NO_SEQUENCE) {
            let Some(beam) = finished.next() else {
                // There are always enough; whoever waits for one hears of it all the same.
                let failure =
                    Failure::of_engine("beam search has found fewer texts than it has beams");
                self.end_with_error(id, &Arc::new(failure), deltas);
                continue;
            };
            self.tell_beam(id, &beam, deltas);
        }
    }

    fn tell_beam(&mut self, id: u32, beam: &FinishedBeam, deltas: &mut Deltas) {
        let mark = deltas.mark();
        let sequence = &mut self.sequences[id as usize];
        let stopping = &self.requests[sequence.request as usize].spec.stopping;
        let last = beam.tokens.last().copied().unwrap_or_default();
        let is_stopped = ends_text(stopping, last);
        let stop_reason =
            stopping.stop_token_ids.contains(&last) && !stopping.eos_token_ids.contains(&last);
        let num_shown =
            beam.tokens.len() - usize::from(is_stopped && !stopping.include_stop_in_output);
        if let Some(decoder) = &mut sequence.decoder {
            for &token in &beam.tokens[..num_shown] {
                let _ = decoder.push(token as u32, &mut deltas.text);
            }
            let _ = decoder.flush(&mut deltas.text);
        }
        deltas.token_ids.extend_from_slice(&beam.tokens);
        let mut delta = self.last_delta(id, mark, deltas);
        delta.logprobs = None;
        delta.told.get_or_insert_default().cumulative_logprob = Some(beam.logprob);
        delta.stop_reason = stop_reason.then_some(StopReason::Token(last));
        let reason = if is_stopped {
            FinishReason::Stop
        } else {
            FinishReason::Length
        };
        delta.finish_reason = Some(reason);
        self.end_sequence(id, reason);
        deltas.entries.push(delta);
    }
}

fn ends_text(stopping: &Stopping, token: i32) -> bool {
    stopping.eos_token_ids.contains(&token) || stopping.stop_token_ids.contains(&token)
}
