//! A step failed: what it was to compute does not exist, and neither does what was built on it.

use std::sync::Arc;

use super::request::NO_SEQUENCE;
use super::state::Scheduler;
use crate::delta::{Deltas, Failure};
use crate::error::Error;

impl Scheduler {
    /// Ends the requests of the oldest step in flight.
    ///
    /// Sequences that are not in the step but took a block from the cache whose content was on its way are computed
    /// anew. It is not told apart which of the steps in flight was to write such a block, so some may lose work that
    /// was sound; none keeps work that was not.
    pub(crate) fn fail(&mut self, step_id: u64, message: &str) -> Result<Deltas, Error> {
        let mut step = self.take_oldest(step_id)?;
        let failure = Arc::new(Failure::of_engine(message));
        let mut deltas = Deltas::default();
        let rows = step.rows.iter().map(|row| (row.sequence, row.life));
        for (id, life) in rows.chain(
            step.samples
                .iter()
                .map(|sample| (sample.sequence, sample.life)),
        ) {
            if self.sequences[id as usize].life == life {
                let request = self.sequences[id as usize].request;
                self.fail_request(request, &failure, &mut deltas);
            }
        }
        step.rows.clear();
        step.samples.clear();
        step.masked.clear();
        step.results.clear();
        self.scratch.spare_steps.push(step);
        self.recompute_dependents(step_id);
        Ok(deltas)
    }

    /// Ends every request with this message, and forgets the steps in flight.
    pub(crate) fn fail_all(&mut self, message: &str) -> Deltas {
        let failure = Arc::new(Failure::of_engine(message));
        let mut deltas = Deltas::default();
        for request in 0..self.requests.len() as u32 {
            self.fail_request(request, &failure, &mut deltas);
        }
        let first_step = self.in_flight.front().map_or(u64::MAX, |step| step.step_id);
        self.in_flight.clear();
        self.pool.forget_launched_since(first_step);
        deltas
    }

    pub(super) fn fail_request(
        &mut self,
        request: u32,
        failure: &Arc<Failure>,
        deltas: &mut Deltas,
    ) {
        for index in 0..self.requests[request as usize].members.len() {
            let member = self.requests[request as usize].members.get(index).copied();
            if let Some(id) = member.filter(|&id| id != NO_SEQUENCE) {
                self.end_with_error(id, failure, deltas);
            }
        }
    }

    /// Gives up the KV and the results in flight of all sequences that may depend on what step `first` or a later
    /// one was to compute for others, and forgets that content.
    fn recompute_dependents(&mut self, first: u64) {
        let mut tainted = Vec::new();
        for running in &self.running {
            let sequence = &self.sequences[running.sequence as usize];
            let hits = &sequence.table[..sequence.num_hit as usize];
            if hits
                .iter()
                .any(|block| self.pool.was_launched_since(block, first))
            {
                tainted.push(running.sequence);
            }
        }
        // First forgotten, then released: nothing of it gets into the cache.
        self.pool.forget_launched_since(first);
        for &id in &tainted {
            self.preempt(id);
        }
        // A queued sequence's table is gone, so it cannot be told on what its results in flight were built.
        tainted.clear();
        tainted.extend(self.queue.iter().filter(|&id| {
            let sequence = &self.sequences[id as usize];
            sequence.num_pending > 0 || sequence.awaits_results()
        }));
        for id in tainted {
            let life = self.draw();
            let sequence = &mut self.sequences[id as usize];
            sequence.life = life;
            sequence.num_pending = 0;
            if let Some(results) = &mut sequence.prompt_results {
                results.forget_launched();
            }
        }
    }
}
