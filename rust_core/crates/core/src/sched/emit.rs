//! The planned rows go into the slab, and into the record of the step in flight.

use super::sequence::{Place, Sequence, copy_tokens};
use super::state::{
    LaunchedRow, LaunchedSample, LaunchedStep, MaskedSample, PlannedRow, Scheduler,
};
use crate::batch::{StepWriter, flags, sample_flags};
use crate::grammar::Binding;

impl Scheduler {
    /// Writes all rows, those of one token first, then the header.
    pub(super) fn emit(&mut self, mut step: StepWriter<'_>, plan: &[PlannedRow], step_id: u64) {
        let mut launched = self.scratch.spare_steps.pop().unwrap_or_default();
        launched.step_id = step_id;
        launched.masks_wait = false;
        for row in plan.iter().filter(|row| row.num_tokens == 1) {
            self.emit_row(*row, &mut step, &mut launched);
        }
        for row in plan.iter().filter(|row| row.num_tokens > 1) {
            self.emit_row(*row, &mut step, &mut launched);
        }
        self.slots.drain_released(|slot| step.push_freed(slot));
        let since = std::mem::take(&mut self.since_last_step);
        self.recent.push(
            step_id,
            step.counts(),
            since.num_preempted,
            since.num_finished,
        );
        step.finish(
            &self.layout,
            step_id,
            since.num_preempted,
            since.num_finished,
            self.pool.num_widely_shared(),
        );
        self.in_flight.push_back(launched);
    }

    fn emit_row(
        &mut self,
        row: PlannedRow,
        step: &mut StepWriter<'_>,
        launched: &mut LaunchedStep,
    ) {
        let id = row.sequence;
        self.check_writes(id, row.num_tokens, launched.step_id);
        let sequence = &mut self.sequences[id as usize];
        let start = sequence.num_computed;
        let end = start + row.num_tokens;
        let tokens = step.push_row(sequence.slot, start, row.num_tokens);
        if start >= sequence.num_known() {
            tokens.fill(-1);
        } else if start >= sequence.num_prompt {
            let first = (start - sequence.num_prompt) as usize;
            tokens.copy_from_slice(&sequence.outputs[first..first + tokens.len()]);
        } else {
            let spec = &self.requests[sequence.request as usize].spec;
            copy_tokens(&spec.prompt, &sequence.outputs, start as usize, tokens);
        }
        sequence.num_computed = end;
        step.row_flags(sequence.flags & flags::FIXED_ORDER);
        launched.rows.push(LaunchedRow {
            sequence: id,
            life: sequence.life,
            admission: sequence.admission,
            num_computed: end,
        });
        let is_last = end == sequence.num_tokens() && sequence.max_tokens > 0;
        if end / self.config.block_size > sequence.num_registered {
            self.register_blocks(id, end, launched.step_id);
        }
        if self.sequences[id as usize].prompt_results.is_some() {
            self.emit_results(id, (start, end), step, launched);
        }
        if is_last {
            let sequence = &self.sequences[id as usize];
            let (request, is_first) = (sequence.request, end == sequence.num_prompt);
            self.emit_sample(id, step, launched);
            if is_first && !self.requests[request as usize].forked {
                self.fork(request, step, launched);
            }
        }
    }

    fn emit_sample(&mut self, id: u32, step: &mut StepWriter<'_>, launched: &mut LaunchedStep) {
        let sequence = &mut self.sequences[id as usize];
        let output_index = sequence.outputs.len() as u32 + sequence.num_pending;
        let flags = sample_flags(sequence.flags, output_index, sequence.min_tokens);
        step.push_sample(sequence.slot, output_index, flags, sequence.num_logprobs);
        if sequence.flags & flags::RULES != 0 {
            mask_sample(sequence, output_index, step, launched);
        }
        sequence.num_pending += 1;
        let first_pick = if sequence.flags & flags::PICKS != 0 {
            step.push_picks(&self.requests[sequence.request as usize].spec.sampling.picks)
        } else {
            0
        };
        launched.samples.push(LaunchedSample {
            sequence: id,
            first_pick,
            life: sequence.life,
        });
    }

    /// The prompt's last token is in the step: each sequence of the request samples from its logits and goes on alone.
    ///
    /// The blocks are shared from the end of this step on; a partial last one is copied by whoever writes to it next.
    fn fork(&mut self, request: u32, step: &mut StepWriter<'_>, launched: &mut LaunchedStep) {
        self.requests[request as usize].forked = true;
        let leader = self.requests[request as usize].members[0];
        let has_partial_block = !self.sequences[leader as usize]
            .num_prompt
            .is_multiple_of(self.config.block_size);
        self.sequences[leader as usize].shares_tail = has_partial_block;
        for index in 1..self.requests[request as usize].members.len() {
            let member = self.requests[request as usize].members[index];
            let mut table = std::mem::take(&mut self.sequences[member as usize].table);
            let source = &self.sequences[leader as usize];
            table.extend(source.table.iter().map(|block| self.pool.share(block)));
            let (num_computed, num_registered, num_hit) =
                (source.num_computed, source.num_registered, source.num_hit);
            let source_slot = source.slot;
            let sequence = &mut self.sequences[member as usize];
            debug_assert_eq!(sequence.place, Place::Attached);
            sequence.num_computed = num_computed;
            sequence.num_registered = num_registered;
            sequence.num_hit = num_hit;
            sequence.shares_tail = has_partial_block;
            step.push_fork(source_slot, sequence.slot, table.len() as u32);
            sequence.table = table;
            self.run(member);
            self.emit_sample(member, step, launched);
        }
    }

    /// In debug builds: nobody else holds a block that the row writes to, but for those who found in the cache what
    /// this very step puts there.
    fn check_writes(&self, id: u32, num_tokens: u32, step_id: u64) {
        if cfg!(debug_assertions) {
            let sequence = &self.sequences[id as usize];
            let first = sequence.num_computed / self.config.block_size;
            let end = self.config.blocks_for(sequence.num_computed + num_tokens);
            for block in &sequence.table[first as usize..end as usize] {
                assert!(
                    self.pool.is_current(block),
                    "block {} was given away",
                    block.id()
                );
                let is_exclusive =
                    !self.pool.is_shared(block) || self.pool.was_launched_since(block, step_id);
                assert!(is_exclusive, "block {} is shared and written", block.id());
            }
        }
    }
}

/// Notes that the sample which was written last may get a mask, where it may. The sequence has rules.
#[cold]
#[inline(never)]
fn mask_sample(
    sequence: &Sequence,
    output_index: u32,
    step: &mut StepWriter<'_>,
    launched: &mut LaunchedStep,
) {
    let Some(rules) = &sequence.rules else { return };
    let binding = rules.binding(&sequence.outputs, sequence.num_pending);
    if binding == Binding::Free {
        return;
    }
    let waits = binding == Binding::Depends && sequence.num_pending > 0;
    step.mask_sample(waits);
    launched.masks_wait |= waits;
    launched.masked.push(MaskedSample {
        position: launched.samples.len() as u32,
        output_index,
        binding,
    });
}
