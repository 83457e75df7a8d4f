//! One step: who gets tokens, and blocks for them.

use super::sequence::TOLD;
use super::share::{Candidate, TokenBudget};
use super::state::{PlannedRow, Scheduler};
use crate::batch::{StepWriter, score_capacity};
use crate::error::Error;

impl Scheduler {
    /// Writes the next step into the slab and returns its id; `None` when nothing can run now.
    pub(crate) fn schedule(&mut self, slab: &mut [u8]) -> Result<Option<u64>, Error> {
        let mut step = StepWriter::new(&self.layout, slab)?;
        if self.in_flight.len() >= self.config.max_steps_in_flight as usize {
            return Ok(None);
        }
        let step_id = self.counters.num_steps + 1;
        let mut plan = std::mem::take(&mut self.scratch.plan);
        let num_preemptions = self.counters.num_preemptions;
        let mut budget = self.plan_running(&mut step, &mut plan);
        budget.serve_important(&mut plan);
        self.publish(&plan, step_id);
        // Blocks that were just taken away from someone are needed by the running ones.
        if self.counters.num_preemptions == num_preemptions {
            self.admit(&mut step, &mut plan, &mut budget, step_id);
        }
        budget.serve_rest(&mut plan);
        self.scratch.wanting = budget.into_buffer();
        let has_rows = !plan.is_empty();
        if has_rows {
            self.emit(step, &plan, step_id);
            self.counters.num_steps = step_id;
        }
        for source in self.scratch.copied.drain(..) {
            self.pool.release(source);
        }
        plan.clear();
        self.scratch.plan = plan;
        Ok(has_rows.then_some(step_id))
    }

    /// Gives each running sequence that owes tokens its first one, and the block it needs for it. Where streams are
    /// among them the rest is limited.
    fn plan_running(
        &mut self,
        step: &mut StepWriter<'_>,
        plan: &mut Vec<PlannedRow>,
    ) -> TokenBudget {
        let wanting = std::mem::take(&mut self.scratch.wanting);
        let mut budget = TokenBudget::new(
            self.config.max_num_batched_tokens,
            score_capacity(&self.config) as u32,
            wanting,
        );
        let mut position = 0;
        let mut is_streaming = false;
        // The least important ones may leave the list while we walk along it.
        while let Some(&running) = self.running.get(position) {
            position += 1;
            let sequence = &self.sequences[running.sequence as usize];
            let (mut num_owed, is_scored) = (sequence.num_owed(), sequence.is_scored());
            if is_scored {
                num_owed = num_owed.min(budget.limit_of(sequence));
            }
            if num_owed == 0
                || sequence.first_stale != TOLD && !self.tell_table(running.sequence, step)
                || !self.secure_block(running.sequence, step)
            {
                continue;
            }
            is_streaming |=
                num_owed == 1 && self.sequences[running.sequence as usize].is_streaming();
            if is_scored {
                budget.reserve_scores(&self.sequences[running.sequence as usize], num_owed);
            }
            let num_tokens = budget.take(1);
            if num_owed > 1 {
                budget.want(Candidate {
                    row: plan.len() as u32,
                    priority: running.rank.priority,
                    num_wanted: num_owed - 1,
                    is_awaited: self.waiters.is_awaited(running.sequence),
                });
            }
            plan.push(PlannedRow {
                sequence: running.sequence,
                num_tokens,
            });
        }
        if is_streaming {
            budget.limit(self.config.tokens_beside_streams(plan.len() as u32));
        }
        budget
    }

    /// Sees to it that the sequence alone holds the block of its next token, at the cost of less important ones.
    ///
    /// False if it was itself the least important one and has lost its slot.
    fn secure_block(&mut self, id: u32, step: &mut StepWriter<'_>) -> bool {
        loop {
            let sequence = &mut self.sequences[id as usize];
            let index = (sequence.num_computed / self.config.block_size) as usize;
            let is_shared = match sequence.table.get(index) {
                None => false,
                Some(block) if !sequence.shares_tail || !self.pool.is_shared(block) => {
                    if sequence.first_stale != TOLD {
                        step.push_delta(sequence.slot, index as u32, block.id());
                        sequence.first_stale = TOLD;
                    }
                    sequence.shares_tail = false;
                    return true;
                }
                Some(_) => true,
            };
            let Some(block) = self.pool.allocate() else {
                // `running` holds at least this sequence.
                let victim = self.running.last().map_or(id, |running| running.sequence);
                self.preempt(victim);
                if victim == id {
                    return false;
                }
                continue;
            };
            step.push_delta(sequence.slot, index as u32, block.id());
            sequence.first_stale = TOLD;
            if is_shared {
                // The source stays held until the step is planned: only siblings share it, they come next to each
                // other in order of importance, and the last of them keeps it instead of copying. So no block is
                // both source and destination of this step's copies.
                sequence.shares_tail = false;
                step.push_cow(sequence.table[index].id(), block.id());
                let source = std::mem::replace(&mut sequence.table[index], block);
                if sequence.is_beam {
                    // Beams of several tails lie between one another, so it is held until the step is planned.
                    self.scratch.copied.push(source);
                } else {
                    self.pool.release(source);
                }
            } else {
                sequence.table.push(block);
            }
            return true;
        }
    }

    /// Makes what the planned rows will compute findable for those admitted with this step.
    fn publish(&mut self, plan: &[PlannedRow], step_id: u64) {
        for row in plan.iter().filter(|row| row.num_tokens > 1) {
            let end = self.sequences[row.sequence as usize].num_computed + row.num_tokens;
            self.register_blocks(row.sequence, end, step_id);
        }
    }

    /// Makes the full blocks among the sequence's first `num_computed` known tokens findable, and notes what it will
    /// compute next.
    ///
    /// `launch_step`: the step that computes them, 0 if they are computed.
    pub(super) fn register_blocks(&mut self, id: u32, num_computed: u32, launch_step: u64) {
        if !self.config.enable_prefix_caching {
            return;
        }
        let num_full =
            num_computed.min(self.sequences[id as usize].num_known()) / self.config.block_size;
        for index in self.sequences[id as usize].num_registered..num_full {
            let (key, parent) = self.key(id, index);
            let sequence = &mut self.sequences[id as usize];
            sequence.num_registered = index + 1;
            let block = &self.sequences[id as usize].table[index as usize];
            self.pool
                .register(block, key, parent, &self.scratch.block, launch_step);
            self.pass_front(id, key);
        }
        self.note_front(id);
    }
}
