//! Admission: the longest cached prefix, room for all known tokens, and a margin against thrashing.

use super::front::Deferrals;
use super::request::NO_SEQUENCE;
use super::sequence::{Sequence, copy_tokens};
use super::share::TokenBudget;
use super::state::{PlannedRow, Scheduler, StarvedHead};
use crate::batch::{Admitted, StepWriter};
use crate::config::BLOCKS_PER_MARGIN_BLOCK;
use crate::kv::BlockKey;

impl Scheduler {
    /// Admits waiting sequences in order, until one cannot be. Those that had better wait for a prefix under way step
    /// aside.
    pub(super) fn admit(
        &mut self,
        step: &mut StepWriter<'_>,
        plan: &mut Vec<PlannedRow>,
        budget: &mut TokenBudget,
        step_id: u64,
    ) {
        let mut deferrals = Deferrals::default();
        while budget.num_left() > 0 && deferrals.may_go_on() {
            let Some(id) = self.queue.first() else { break };
            if !self.may_start(id, step) || budget.limit_of(&self.sequences[id as usize]) == 0 {
                break;
            }
            if self.defer_like_last(id, &mut deferrals) {
                continue;
            }
            self.find_prefix(id);
            if self.defer_after_hits(id, &mut deferrals) {
                continue;
            }
            let sequence = &self.sequences[id as usize];
            let num_hit_tokens = self.scratch.hits.len() as u32 * self.config.block_size;
            let num_wanted = sequence.num_known() - num_hit_tokens;
            budget.serve_before(plan, sequence.rank.priority, num_wanted);
            if budget.num_left() == 0 || !self.has_blocks(id) {
                break;
            }
            self.start(id, step);
            let num_tokens = budget.take_scored(&self.sequences[id as usize], num_wanted);
            plan.push(PlannedRow {
                sequence: id,
                num_tokens,
            });
            self.register_blocks(id, num_hit_tokens + num_tokens, step_id);
        }
    }

    /// Everything but blocks: results in flight, slots, the slab's lists.
    fn may_start(&self, id: u32, step: &StepWriter<'_>) -> bool {
        let sequence = &self.sequences[id as usize];
        let request = &self.requests[sequence.request as usize];
        let num_slots = request.num_slots();
        if sequence.num_pending > 0
            || sequence.awaits_results()
            || self.slots.num_free() < num_slots
        {
            return false;
        }
        if let Some(starved) = self.starved_head
            && starved.life == sequence.life
            && self.pool.num_available() < starved.num_needed
            && !self.running.is_empty()
        {
            return false;
        }
        let sampling = &request.spec.sampling;
        let num_history = if sampling.has_penalties() {
            sequence.num_known()
        } else {
            0
        };
        step.has_room(
            self.config.blocks_for(sequence.num_known()) as usize,
            sampling.bias.len() * num_slots as usize,
            sampling.banned.len() * num_slots as usize,
            num_history as usize,
        )
    }

    /// Collects the findable blocks of the sequence's longest known prefix, at least one token short of its end.
    fn find_prefix(&mut self, id: u32) {
        let mut hits = std::mem::take(&mut self.scratch.hits);
        hits.clear();
        if self.config.enable_prefix_caching {
            let num_blocks = self.sequences[id as usize].num_cacheable() / self.config.block_size;
            for index in 0..num_blocks {
                let (key, parent) = self.key(id, index);
                let Some(block) = self.pool.find(key, parent, &self.scratch.block) else {
                    break;
                };
                hits.push(block);
            }
        }
        self.scratch.hits = hits;
    }

    /// Key of the sequence's full block `index` and of its parent. Leaves the block's tokens in `scratch.block`.
    pub(super) fn key(&mut self, id: u32, index: u32) -> (BlockKey, BlockKey) {
        let sequence = &mut self.sequences[id as usize];
        let spec = &self.requests[sequence.request as usize].spec;
        let start = (index * self.config.block_size) as usize;
        copy_tokens(
            &spec.prompt,
            &sequence.outputs,
            start,
            &mut self.scratch.block,
        );
        let index = index as usize;
        let num_prompt_keys = spec.prompt_keys.len();
        let known_key =
            |index: usize, output_keys: &[BlockKey]| match index.checked_sub(num_prompt_keys) {
                None => spec.prompt_keys[index],
                Some(index) => output_keys[index],
            };
        let parent = match index {
            0 => spec.root_key,
            _ => known_key(index - 1, &sequence.output_keys),
        };
        if index == num_prompt_keys + sequence.output_keys.len() {
            sequence
                .output_keys
                .push(self.hasher.block(parent, &self.scratch.block));
        }
        (known_key(index, &sequence.output_keys), parent)
    }

    /// Whether the blocks for all known tokens are there, and a margin.
    ///
    /// The margin is one block for each running sequence, at least 1/64 of the pool, so that their growth does not
    /// preempt the newcomer at once. It doubles with every preemption. When it exceeds the pool a sequence starts only
    /// where nothing else runs; as then all that run with it are less important, it is not preempted again. So under
    /// FCFS a sequence is preempted at most 6 times: 2^6 · (1/64 of the pool) is the whole pool.
    fn has_blocks(&mut self, id: u32) -> bool {
        let sequence = &self.sequences[id as usize];
        let hits = &self.scratch.hits;
        let num_held = hits
            .iter()
            .filter(|&&block| self.pool.is_held(block))
            .count() as u32;
        let num_new = self.config.blocks_for(sequence.num_known()) - num_held;
        if self.running.is_empty() {
            return num_new <= self.pool.num_available();
        }
        // Each fork soon needs a block of its own.
        let num_forks = self.requests[sequence.request as usize].num_slots() - 1;
        let least = self.config.num_blocks.div_ceil(BLOCKS_PER_MARGIN_BLOCK) as usize;
        // The other beams wait for this one with all that they hold: nothing else may end before.
        let num_doublings = if sequence.is_beam {
            0
        } else {
            sequence.num_preemptions.min(32)
        };
        let margin = (least.max(self.running.len()) as u64) << num_doublings;
        let num_needed = u64::from(num_new) + u64::from(num_forks) + margin;
        if num_needed <= u64::from(self.pool.num_available()) {
            return true;
        }
        self.starved_head = Some(StarvedHead {
            life: sequence.life,
            num_needed: num_needed.min(u64::from(u32::MAX)) as u32,
        });
        false
    }

    /// Gives the sequence its slot and blocks, and those attached to it their slots.
    fn start(&mut self, id: u32, step: &mut StepWriter<'_>) {
        self.queue.remove(id);
        self.starved_head = None;
        self.note_first_admission(id);
        let sequence = &mut self.sequences[id as usize];
        let num_blocks = self.config.blocks_for(sequence.num_known()) as usize;
        let num_hits = self.scratch.hits.len();
        sequence.table.extend(
            self.scratch
                .hits
                .iter()
                .map(|&block| self.pool.acquire(block)),
        );
        while sequence.table.len() < num_blocks {
            // `has_blocks` has counted them.
            let Some(block) = self.pool.allocate() else {
                break;
            };
            sequence.table.push(block);
        }
        sequence.num_hit = num_hits as u32;
        sequence.num_registered = num_hits as u32;
        sequence.num_computed = num_hits as u32 * self.config.block_size;
        self.run(id);
        self.occupy(id, step);
        let sequence = &self.sequences[id as usize];
        for (index, block) in sequence.table.iter().enumerate() {
            step.push_delta(sequence.slot, index as u32, block.id());
        }
        let request = sequence.request as usize;
        if !self.requests[request].forked {
            for index in 1..self.requests[request].members.len() {
                self.occupy(self.requests[request].members[index], step);
            }
        }
    }

    /// Takes a slot and announces it.
    fn occupy(&mut self, id: u32, step: &mut StepWriter<'_>) {
        debug_assert_ne!(id, NO_SEQUENCE);
        let Some(slot) = self.slots.take(id) else {
            return;
        };
        let sequence = &mut self.sequences[id as usize];
        sequence.slot = slot;
        let request = &self.requests[sequence.request as usize];
        let sampling = &request.spec.sampling;
        // A fork takes over the history of the sequence it comes from.
        let has_history = sampling.has_penalties() && (request.forked || sequence.rank.index == 0);
        step.push_admitted(&Admitted {
            slot,
            sampling,
            seed: sampling.seed_of(sequence.rank.index),
            min_tokens: sequence.min_tokens,
            prompt: if has_history {
                &request.spec.prompt
            } else {
                &[]
            },
            outputs: if has_history { &sequence.outputs } else { &[] },
            num_prompt: sequence.num_prompt,
        });
    }

    fn note_first_admission(&mut self, id: u32) {
        let Sequence {
            request,
            num_prompt,
            ..
        } = self.sequences[id as usize];
        let request = &mut self.requests[request as usize];
        if request.queue_s.is_some() {
            return;
        }
        let num_cached_tokens = self.scratch.hits.len() as u32 * self.config.block_size;
        request.queue_s = Some(request.spec.submitted_at.elapsed().as_secs_f64());
        // Before it none of the members can have ended alone.
        for &member in &request.members {
            self.sequences[member as usize].num_cached_tokens = num_cached_tokens;
        }
        self.counters.num_prompt_tokens += u64::from(num_prompt);
        if self.config.enable_prefix_caching {
            self.counters.num_prefix_query_tokens += u64::from(num_prompt);
            self.counters.num_prefix_hit_tokens += u64::from(num_cached_tokens);
        }
    }
}
