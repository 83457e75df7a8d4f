//! How sequences move between the queue, the slots and the end.

use super::prompt_results::PromptResults;
use super::request::{NO_SEQUENCE, Request, RequestSpec};
use super::sequence::{NO_SLOT, Place, Rank, Sequence, TOLD};
use super::state::{Running, Scheduler};
use crate::batch::flags;
use crate::delta::FinishReason;
use crate::grammar::{RuleSpec, Rules};
use crate::text::StreamDecoder;

impl Scheduler {
    /// Queues a request.
    pub(crate) fn add(&mut self, spec: RequestSpec) {
        let mut request = Request::new(spec);
        let record = self
            .vacant_requests
            .pop()
            .unwrap_or(self.requests.len() as u32);
        for index in 0..request.spec.num_sequences {
            let sequence = self.add_sequence(&request.spec, record, index);
            request.members.push(sequence);
        }
        self.counters.num_submitted += u64::from(request.spec.num_sequences);
        self.by_handle.insert(request.spec.handle, record);
        let leader = request.members[0];
        self.sequences[leader as usize].place = Place::Queued;
        self.queue
            .push(self.sequences[leader as usize].rank, leader);
        match self.requests.get_mut(record as usize) {
            Some(vacant) => *vacant = request,
            None => self.requests.push(request),
        }
    }

    fn add_sequence(&mut self, spec: &RequestSpec, request: u32, index: u32) -> u32 {
        let life = self.draw();
        let id = self
            .vacant_sequences
            .pop()
            .unwrap_or(self.sequences.len() as u32);
        if id as usize == self.sequences.len() {
            self.sequences.push(Sequence::vacant());
        }
        let stopping = &spec.stopping;
        let decoder = self
            .vocabulary
            .as_ref()
            .filter(|_| stopping.detokenize)
            .map(|vocabulary| {
                StreamDecoder::new(
                    vocabulary.clone(),
                    stopping.skip_special_tokens,
                    stopping.stop_strings.clone(),
                )
                .showing(stopping.shown_special_ids.clone())
            });
        let sequence = &mut self.sequences[id as usize];
        sequence.place = Place::Attached;
        sequence.num_prompt = spec.prompt.len() as u32;
        sequence.max_tokens = stopping.max_tokens;
        sequence.min_tokens = stopping.min_tokens;
        sequence.flags = flags::of(&spec.sampling);
        sequence.num_logprobs = spec.sampling.num_logprobs;
        if !spec.sampling.picks.is_empty() {
            sequence.flags |= flags::PICKS;
        }
        sequence.life = life;
        sequence.request = request;
        sequence.rank = Rank {
            priority: spec.priority,
            arrival: spec.handle,
            index,
        };
        sequence.decoder = decoder;
        sequence.gathered = spec.final_only.then(Box::default);
        if let Some(rules) = &spec.rules {
            sequence.rules = Some(Box::new(Rules::new(rules.clone())));
            sequence.flags |= flags::RULES;
        }
        sequence.is_beam = spec.beam_search.is_some();
        if index == 0 {
            sequence.prompt_results = PromptResults::new(spec);
        }
        id
    }

    /// Ends a request in whatever state it is; nothing happens if it has ended.
    pub(crate) fn abort(&mut self, handle: u64) {
        if let Some(&request) = self.by_handle.get(&handle) {
            self.end_request(request, FinishReason::Abort);
        }
    }

    /// The request's next tokens are these, unless its thinking has ended; nothing happens if the request has.
    ///
    /// Tokens that are being sampled come before them.
    pub(crate) fn end_thinking(&mut self, handle: u64, tokens: &[i32]) {
        let Some(&request) = self.by_handle.get(&handle) else {
            return;
        };
        for &member in &self.requests[request as usize].members {
            if member == NO_SEQUENCE {
                continue;
            }
            let sequence = &mut self.sequences[member as usize];
            let from = sequence.outputs.len() as u32 + sequence.num_pending;
            let vocab_size = self.config.vocab_size;
            let rules = sequence
                .rules
                .get_or_insert_with(|| Box::new(Rules::new(RuleSpec::none(vocab_size))));
            rules.force(tokens, from);
            sequence.flags |= flags::RULES;
        }
    }

    pub(super) fn end_request(&mut self, request: u32, reason: FinishReason) {
        for index in 0..self.requests[request as usize].members.len() {
            // The last member's end leaves an empty list behind.
            let member = self.requests[request as usize].members.get(index).copied();
            if let Some(sequence) = member.filter(|&sequence| sequence != NO_SEQUENCE) {
                self.end_sequence(sequence, reason);
            }
        }
    }

    /// Gives back all that the sequence holds. Its results in flight are dropped.
    pub(super) fn end_sequence(&mut self, id: u32, reason: FinishReason) {
        match self.sequences[id as usize].place {
            Place::Vacant => return,
            Place::Queued => {
                self.queue.remove(id);
            }
            Place::Deferred => self.waiters.remove(id),
            Place::Running => self.leave_slot(id),
            Place::Attached => self.give_back_slot(id),
        }
        let counters = &mut self.counters;
        *match reason {
            FinishReason::Stop => &mut counters.num_finished_stop,
            FinishReason::Length => &mut counters.num_finished_length,
            FinishReason::Abort => &mut counters.num_aborted,
            FinishReason::Error => &mut counters.num_errored,
        } += 1;
        self.since_last_step.num_finished += 1;
        let sequence = &mut self.sequences[id as usize];
        let (request, index) = (sequence.request, sequence.rank.index);
        sequence.clear();
        self.vacant_sequences.push(id);
        self.leave_request(request, index);
    }

    fn leave_request(&mut self, id: u32, index: u32) {
        let request = &mut self.requests[id as usize];
        request.members[index as usize] = NO_SEQUENCE;
        request.num_live -= 1;
        if request.num_live == 0 {
            let handle = request.spec.handle;
            *request = Request::new(RequestSpec::vacant());
            self.by_handle.remove(&handle);
            self.ended.push(handle);
            self.vacant_requests.push(id);
        }
    }

    /// Takes a running sequence out of its slot. Its tokens stay, those in flight included; its KV is given up.
    pub(super) fn preempt(&mut self, id: u32) {
        self.leave_slot(id);
        let sequence = &mut self.sequences[id as usize];
        sequence.place = Place::Queued;
        sequence.num_preemptions += 1;
        self.queue.push(sequence.rank, id);
        let (request, index) = (sequence.request as usize, sequence.rank.index);
        if let Some(beams) = &mut self.requests[request].beams {
            beams.forget_candidates(index);
        }
        let mut num_preempted = 1;
        if !self.requests[request].forked {
            for index in 1..self.requests[request].members.len() {
                self.give_back_slot(self.requests[request].members[index]);
                num_preempted += 1;
            }
        }
        self.counters.num_preemptions += num_preempted;
        self.since_last_step.num_preempted += num_preempted as u32;
    }

    /// Puts a sequence that has a slot and a block table among the running ones.
    pub(super) fn run(&mut self, id: u32) {
        self.sequences[id as usize].admission = self.draw();
        self.sequences[id as usize].place = Place::Running;
        let rank = self.sequences[id as usize].rank;
        let position = self.running.partition_point(|running| running.rank < rank);
        self.running
            .insert(position, Running { rank, sequence: id });
    }

    fn leave_slot(&mut self, id: u32) {
        self.drop_front(id);
        let rank = self.sequences[id as usize].rank;
        if let Ok(position) = self
            .running
            .binary_search_by(|running| running.rank.cmp(&rank))
        {
            self.running.remove(position);
        }
        self.give_back_slot(id);
        let sequence = &mut self.sequences[id as usize];
        sequence.num_computed = 0;
        sequence.num_registered = 0;
        sequence.num_hit = 0;
        sequence.shares_tail = false;
        sequence.first_stale = TOLD;
        sequence.admission = 0;
        // From the tail, so that it is evicted before the prefix it needs.
        while let Some(block) = sequence.table.pop() {
            self.pool.release(block);
        }
    }

    fn give_back_slot(&mut self, id: u32) {
        let slot = std::mem::replace(&mut self.sequences[id as usize].slot, NO_SLOT);
        if slot != NO_SLOT {
            self.slots.release(slot);
        }
    }
}
