//! What the scheduler holds, for a person to look at: bounded in size, read in one go.

use std::collections::VecDeque;
use std::time::Instant;

use super::sequence::{Place, Rank, Sequence};
use super::state::Scheduler;
use crate::batch::StepCounts;

/// Steps that are remembered.
pub(crate) const NUM_RECENT_STEPS: usize = 64;

/// A snapshot of sequences, steps and blocks. Lists are cut at the size that was asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Most important first: who is last loses its blocks first.
    pub running: Vec<RunningSequence>,
    /// In order of admission. Of a request that has not run, only sequence 0.
    pub waiting: Vec<WaitingSequence>,
    /// The last ones, oldest first.
    pub steps: Vec<StepSummary>,
    /// The blocks by number, a letter for so many of them: what most of these are. `.` free, `c` cached, `u` used, `s` used by several.
    pub kv_map: String,
    /// Blocks that a letter stands for; the last one may stand for fewer.
    pub blocks_per_letter: u32,
}

/// A sequence in a slot.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // named and explained one by one in `oneloop_core.snapshot`
pub struct RunningSequence {
    pub request: u64,
    pub index: u32,
    pub priority: i64,
    pub slot: u32,
    pub num_prompt_tokens: u32,
    pub num_output_tokens: u32,
    pub max_tokens: u32,
    pub num_computed_tokens: u32,
    pub num_owed_tokens: u32,
    pub num_blocks: u32,
    pub num_cached_blocks: u32,
    pub num_preemptions: u32,
    pub age_s: f64,
}

/// A sequence without a slot.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // as above
pub struct WaitingSequence {
    pub request: u64,
    pub index: u32,
    pub priority: i64,
    pub num_sequences: u32,
    pub num_prompt_tokens: u32,
    pub num_output_tokens: u32,
    pub max_tokens: u32,
    pub num_preemptions: u32,
    pub age_s: f64,
    pub waits_for: WaitsFor,
}

/// Why a sequence does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitsFor {
    /// Nothing is known to be in its way.
    NextStep,
    /// A token of it is still being computed.
    Results,
    /// Rows of the batch.
    Slots {
        /// How many it takes.
        needed: u32,
        /// How many there are.
        free: u32,
    },
    /// Room in the KV cache, a margin against thrashing included.
    Blocks {
        /// How many it takes.
        needed: u32,
        /// How many are free or cached.
        available: u32,
    },
    /// A running sequence that is about to compute what it needs too.
    Prefix {
        /// That one's request.
        request: u64,
        /// That one's index.
        index: u32,
        /// Blocks they have in common.
        num_blocks: u32,
    },
    /// Who is first in the queue: nobody overtakes.
    Turn {
        /// The first one's request.
        request: u64,
    },
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)] // as above
pub struct StepSummary {
    pub step_id: u64,
    pub num_rows: u32,
    pub num_decodes: u32,
    pub num_tokens: u32,
    pub num_samples: u32,
    pub num_admitted: u32,
    pub num_preempted: u32,
    pub num_finished: u32,
    /// Since it was scheduled.
    pub age_s: f64,
    /// From its schedule to its commit (or failure); `None` in flight.
    pub took_s: Option<f64>,
}

/// The last steps.
#[derive(Debug, Default)]
pub(crate) struct RecentSteps {
    steps: VecDeque<(Instant, StepSummary)>,
}

impl RecentSteps {
    pub(crate) fn push(
        &mut self,
        step_id: u64,
        counts: StepCounts,
        num_preempted: u32,
        num_finished: u32,
    ) {
        if self.steps.len() == NUM_RECENT_STEPS {
            self.steps.pop_front();
        }
        let summary = StepSummary {
            step_id,
            num_rows: counts.num_rows,
            num_decodes: counts.num_single,
            num_tokens: counts.num_tokens,
            num_samples: counts.num_samples,
            num_admitted: counts.num_admitted,
            num_preempted,
            num_finished,
            age_s: 0.0,
            took_s: None,
        };
        self.steps.push_back((Instant::now(), summary));
    }

    /// The step is in flight no longer.
    pub(crate) fn end(&mut self, step_id: u64) {
        let mut from_newest = self.steps.iter_mut().rev();
        if let Some((begin, step)) = from_newest.find(|(_, step)| step.step_id == step_id) {
            step.took_s = Some(begin.elapsed().as_secs_f64());
        }
    }

    fn list(&self) -> Vec<StepSummary> {
        let with_age = |&(begin, step): &(Instant, StepSummary)| StepSummary {
            age_s: begin.elapsed().as_secs_f64(),
            ..step
        };
        self.steps.iter().map(with_age).collect()
    }
}

impl Scheduler {
    /// At most `max_sequences` running and as many waiting ones, and `max_letters` of the map.
    pub(crate) fn snapshot(&self, max_sequences: usize, max_letters: u32) -> Snapshot {
        let running = self.running.iter().take(max_sequences);
        let (kv_map, blocks_per_letter) = self.pool.map(max_letters);
        Snapshot {
            running: running
                .map(|running| self.running_view(running.sequence))
                .collect(),
            waiting: self.waiting_views(max_sequences),
            steps: self.recent.list(),
            kv_map,
            blocks_per_letter,
        }
    }

    fn running_view(&self, id: u32) -> RunningSequence {
        let sequence = &self.sequences[id as usize];
        RunningSequence {
            request: sequence.rank.arrival,
            index: sequence.rank.index,
            priority: sequence.rank.priority,
            slot: sequence.slot,
            num_prompt_tokens: sequence.num_prompt,
            num_output_tokens: sequence.outputs.len() as u32,
            max_tokens: sequence.max_tokens,
            num_computed_tokens: sequence.num_computed,
            num_owed_tokens: sequence.num_owed(),
            num_blocks: sequence.table.len() as u32,
            num_cached_blocks: sequence.num_hit,
            num_preemptions: sequence.num_preemptions,
            age_s: self.age_s(sequence),
        }
    }

    fn age_s(&self, sequence: &Sequence) -> f64 {
        let request = &self.requests[sequence.request as usize];
        request.spec.submitted_at.elapsed().as_secs_f64()
    }

    fn waiting_views(&self, max_sequences: usize) -> Vec<WaitingSequence> {
        let ranked = |id: u32| (self.sequences[id as usize].rank, id);
        let mut waiting: Vec<(Rank, u32)> = self
            .queue
            .iter()
            .chain(self.waiters.iter())
            .map(ranked)
            .collect();
        if waiting.len() > max_sequences {
            waiting.select_nth_unstable(max_sequences);
            waiting.truncate(max_sequences);
        }
        waiting.sort_unstable();
        waiting
            .into_iter()
            .map(|(_, id)| self.waiting_view(id))
            .collect()
    }

    fn waiting_view(&self, id: u32) -> WaitingSequence {
        let sequence = &self.sequences[id as usize];
        WaitingSequence {
            request: sequence.rank.arrival,
            index: sequence.rank.index,
            priority: sequence.rank.priority,
            num_sequences: self.requests[sequence.request as usize].num_slots(),
            num_prompt_tokens: sequence.num_prompt,
            num_output_tokens: sequence.outputs.len() as u32,
            max_tokens: sequence.max_tokens,
            num_preemptions: sequence.num_preemptions,
            age_s: self.age_s(sequence),
            waits_for: self.waits_for(id),
        }
    }

    /// The same questions in the same order as admission asks them.
    fn waits_for(&self, id: u32) -> WaitsFor {
        let sequence = &self.sequences[id as usize];
        if sequence.place == Place::Deferred
            && let Some((awaited, num_blocks)) = self.waiters.awaited_by(id)
        {
            let rank = self.sequences[awaited as usize].rank;
            return WaitsFor::Prefix {
                request: rank.arrival,
                index: rank.index,
                num_blocks,
            };
        }
        if let Some(first) = self.queue.first().filter(|&first| first != id) {
            return WaitsFor::Turn {
                request: self.sequences[first as usize].rank.arrival,
            };
        }
        let needed = self.requests[sequence.request as usize].num_slots();
        let free = self.slots.num_free();
        if sequence.num_pending > 0 {
            return WaitsFor::Results;
        }
        if free < needed {
            return WaitsFor::Slots { needed, free };
        }
        let available = self.pool.num_available();
        match self.starved_head {
            Some(starved) if starved.life == sequence.life && available < starved.num_needed => {
                WaitsFor::Blocks {
                    needed: starved.num_needed,
                    available,
                }
            }
            _ => WaitsFor::NextStep,
        }
    }
}
