//! The conservation laws, checked against the whole state.

use super::request::NO_SEQUENCE;
use super::sequence::{NO_FRONT, NO_SLOT, Place, copy_tokens};
use super::state::Scheduler;
use crate::error::Error;

/// Fails the audit with a message unless the condition holds.
macro_rules! law {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(Error::Audit(format!($($message)+)));
        }
    };
}

impl Scheduler {
    /// Checks every law; the error names the first that does not hold. O(state).
    pub(crate) fn audit(&self) -> Result<(), Error> {
        let mut holders = vec![0; self.config.num_blocks as usize];
        for (id, sequence) in self.sequences.iter().enumerate() {
            for block in &sequence.table {
                holders[block.id() as usize] += 1;
            }
            self.audit_sequence(id as u32)?;
        }
        self.pool.audit(&holders, &self.hasher)?;
        self.audit_order()?;
        self.audit_fronts()?;
        self.audit_requests()?;
        self.audit_counts()
    }

    fn audit_sequence(&self, id: u32) -> Result<(), Error> {
        let sequence = &self.sequences[id as usize];
        let is_running = sequence.place == Place::Running;
        law!(
            is_running
                || sequence.table.is_empty()
                    && sequence.num_computed == 0
                    && sequence.admission == 0,
            "sequence {id} does not run but holds blocks"
        );
        law!(
            self.queue.contains(id) == (sequence.place == Place::Queued),
            "sequence {id} is {:?} but the queue says otherwise",
            sequence.place
        );
        law!(
            sequence.slot == NO_SLOT || self.slots.owner(sequence.slot) == Some(id),
            "sequence {id} is not the owner of its slot {}",
            sequence.slot
        );
        let may_hold_slot = is_running || sequence.place == Place::Attached;
        law!(
            sequence.slot == NO_SLOT || may_hold_slot,
            "sequence {id} holds a slot without running"
        );
        if sequence.place == Place::Vacant {
            law!(
                sequence.life == 0 && sequence.num_pending == 0,
                "vacant sequence {id} is alive"
            );
            return Ok(());
        }
        law!(
            sequence.outputs.len() as u32 + sequence.num_pending <= sequence.max_tokens,
            "sequence {id} has or awaits more than its {} tokens",
            sequence.max_tokens
        );
        let num_in_flight = self.in_flight.iter().flat_map(|step| &step.samples);
        let num_in_flight =
            num_in_flight.filter(|sample| sample.sequence == id && sample.life == sequence.life);
        law!(
            num_in_flight.count() as u32 == sequence.num_pending,
            "sequence {id} awaits {} tokens but other samples are in flight",
            sequence.num_pending
        );
        let num_steps = self.in_flight.iter().flat_map(|step| &step.results);
        let num_steps =
            num_steps.filter(|results| results.sequence == id && results.life == sequence.life);
        law!(
            num_steps.count() as u32
                == sequence
                    .prompt_results
                    .as_ref()
                    .map_or(0, |results| results.num_in_flight),
            "sequence {id} miscounts the steps in flight that bring results of its prompt"
        );
        if is_running {
            self.audit_running(id)
        } else {
            Ok(())
        }
    }

    fn audit_running(&self, id: u32) -> Result<(), Error> {
        let sequence = &self.sequences[id as usize];
        let num_allocated = sequence.table.len() as u32 * self.config.block_size;
        law!(
            sequence.slot != NO_SLOT,
            "running sequence {id} has no slot"
        );
        law!(
            sequence.num_computed <= num_allocated,
            "sequence {id} computes {} tokens in blocks for {num_allocated}",
            sequence.num_computed
        );
        law!(
            sequence.num_computed <= sequence.num_tokens(),
            "sequence {id} computes tokens it does not have"
        );
        law!(
            sequence.num_hit <= sequence.num_registered
                && sequence.num_registered * self.config.block_size
                    <= sequence.num_computed.max(sequence.num_hit),
            "sequence {id} made more blocks findable than it computed"
        );
        let mut ids: Vec<u32> = sequence.table.iter().map(crate::kv::BlockRef::id).collect();
        ids.sort_unstable();
        law!(
            ids.windows(2).all(|pair| pair[0] != pair[1]),
            "sequence {id} holds a block twice"
        );
        let spec = &self.requests[sequence.request as usize].spec;
        let mut tokens = vec![0; self.config.block_size as usize];
        for (index, block) in sequence.table.iter().enumerate() {
            law!(
                self.pool.is_current(block),
                "sequence {id} holds block {} after it was given away",
                block.id()
            );
            if let Some(content) = self.pool.findable_content(block) {
                let start = index * tokens.len();
                law!(
                    start + tokens.len() <= sequence.num_known() as usize,
                    "a block of unknown tokens is findable"
                );
                copy_tokens(&spec.prompt, &sequence.outputs, start, &mut tokens);
                law!(
                    content == tokens,
                    "block {} is found under other tokens than sequence {id}'s",
                    block.id()
                );
            }
        }
        Ok(())
    }

    fn audit_order(&self) -> Result<(), Error> {
        law!(self.queue.is_sound(), "the queue is out of order");
        law!(self.slots.is_sound(), "a slot is lost or owned twice");
        law!(
            self.running
                .windows(2)
                .all(|pair| pair[0].rank < pair[1].rank),
            "the running sequences are out of order"
        );
        for running in &self.running {
            let sequence = &self.sequences[running.sequence as usize];
            law!(
                sequence.place == Place::Running && sequence.rank == running.rank,
                "sequence {} is listed as running",
                running.sequence
            );
        }
        let num_running = self
            .sequences
            .iter()
            .filter(|sequence| sequence.place == Place::Running)
            .count();
        law!(
            num_running == self.running.len(),
            "a running sequence is not listed"
        );
        law!(
            self.in_flight
                .iter()
                .zip(self.in_flight.iter().skip(1))
                .all(|(a, b)| a.step_id < b.step_id),
            "the steps in flight are out of order"
        );
        Ok(())
    }

    fn audit_fronts(&self) -> Result<(), Error> {
        let mut num_fronts = 0;
        for (id, sequence) in self.sequences.iter().enumerate() {
            let (id, front) = (id as u32, sequence.front);
            if front == NO_FRONT {
                continue;
            }
            num_fronts += 1;
            let end = (front + 1) * self.config.block_size;
            law!(
                sequence.place == Place::Running && front == sequence.num_registered,
                "sequence {id} has a front that it is not about to compute"
            );
            law!(
                sequence.num_computed < end && end <= sequence.num_known(),
                "the front of sequence {id} is launched already, or not known"
            );
            law!(
                sequence.num_owed() > 0,
                "sequence {id} has a front and nothing to do"
            );
            let key = self.known_key(id, front);
            law!(
                key.and_then(|key| self.fronts.get(&key)) == Some(&id),
                "the front of sequence {id} leads elsewhere"
            );
            law!(
                key.is_none_or(|key| !self.pool.is_findable(key)),
                "the front of sequence {id} can be found"
            );
        }
        law!(
            num_fronts == self.fronts.len(),
            "the map of fronts has entries without a sequence"
        );
        self.audit_waiters()
    }

    /// Who waits out of the queue waits for a front that is its own next missing block.
    fn audit_waiters(&self) -> Result<(), Error> {
        law!(self.waiters.is_sound(), "the lists of waiters are broken");
        for (id, sequence) in self.sequences.iter().enumerate() {
            let id = id as u32;
            let awaited = self.waiters.awaited_by(id);
            law!(
                awaited.is_some() == (sequence.place == Place::Deferred),
                "sequence {id} is {:?} but the waiters say otherwise",
                sequence.place
            );
            let Some((awaited, num_blocks)) = awaited else {
                continue;
            };
            let running = &self.sequences[awaited as usize];
            law!(
                sequence.num_pending == 0,
                "sequence {id} waits out of the queue for its results in flight too"
            );
            law!(
                running.front != NO_FRONT
                    && running.front < num_blocks
                    && running.rank.priority <= sequence.rank.priority,
                "sequence {id} waits in vain for sequence {awaited}"
            );
            let last = num_blocks - 1;
            law!(
                num_blocks * self.config.block_size < sequence.num_known()
                    && self.known_key(id, last).is_some()
                    && self.known_key(id, last) == self.known_key(awaited, last),
                "sequence {id} waits for what it does not share with sequence {awaited}"
            );
        }
        Ok(())
    }

    fn audit_requests(&self) -> Result<(), Error> {
        let mut num_live = 0;
        for (record, request) in self.requests.iter().enumerate() {
            let handle = request.spec.handle;
            let members = request
                .members
                .iter()
                .enumerate()
                .filter(|&(_, &id)| id != NO_SEQUENCE);
            law!(
                members.clone().count() as u32 == request.num_live,
                "request {handle} miscounts its live sequences"
            );
            let leader_slot = request
                .members
                .first()
                .map(|&id| self.sequences.get(id as usize).map(|s| s.slot));
            for (index, &id) in members {
                let sequence = &self.sequences[id as usize];
                law!(
                    sequence.request as usize == record && sequence.rank.index as usize == index,
                    "sequence {id} belongs to another request"
                );
                let is_attached = sequence.place == Place::Attached;
                law!(
                    is_attached == (!request.forked && index > 0),
                    "sequence {id} is {:?}",
                    sequence.place
                );
                law!(
                    !is_attached
                        || (sequence.slot == NO_SLOT) == (leader_slot == Some(Some(NO_SLOT))),
                    "sequence {id} has a slot and its first sibling has none, or the other way round"
                );
            }
            if request.num_live > 0 {
                num_live += 1;
                law!(
                    self.by_handle.get(&handle) == Some(&(record as u32)),
                    "request {handle} cannot be found"
                );
            }
        }
        law!(
            num_live == self.by_handle.len(),
            "a handle leads to a request that has ended"
        );
        Ok(())
    }

    fn audit_counts(&self) -> Result<(), Error> {
        let counters = &self.counters;
        let num_live = self
            .sequences
            .iter()
            .filter(|sequence| sequence.place != Place::Vacant)
            .count() as u64;
        let num_ended = counters.num_finished_stop
            + counters.num_finished_length
            + counters.num_aborted
            + counters.num_errored;
        law!(
            counters.num_submitted == num_ended + num_live,
            "{} sequences came, {num_ended} ended and {num_live} live",
            counters.num_submitted
        );
        let num_slots = self
            .sequences
            .iter()
            .filter(|sequence| sequence.slot != NO_SLOT)
            .count();
        law!(
            num_slots == self.slots.num_owned(),
            "a slot's owner does not know of it"
        );
        let num_vacant = self
            .sequences
            .iter()
            .filter(|sequence| sequence.place == Place::Vacant)
            .count();
        law!(
            num_vacant == self.vacant_sequences.len(),
            "a vacant sequence record is lost"
        );
        law!(
            self.in_flight.len() <= self.config.max_steps_in_flight as usize,
            "too many steps are in flight"
        );
        Ok(())
    }
}
