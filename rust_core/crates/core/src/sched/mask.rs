//! The masks of a step's samples: a bit for each token, whether it may come next.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::state::{MaskedSample, Scheduler};
use crate::batch::MaskView;
use crate::error::Error;
use crate::grammar::{Binding, Rules, mask_words};

/// Work that is worth a thread: some times what it takes to start one.
const THREAD_MICROS: u128 = 150;

/// One mask to compute.
struct Job<'a> {
    position: u32,
    binding: Binding,
    rules: Box<Rules>,
    outputs: &'a [i32],
    /// What `min_tokens` bans.
    banned: &'a [i32],
    mask: &'a mut [u32],
    binds: bool,
}

impl Job<'_> {
    fn run(&mut self) {
        self.binds = self
            .rules
            .fill(self.outputs, self.binding, self.banned, self.mask);
    }
}

impl Scheduler {
    /// Writes the masks of a step in flight; how many samples got one. What only waits for the end of its thinking has a
    /// mask together with all others that do.
    ///
    /// A step whose masks depend on tokens of earlier steps must be the oldest in flight.
    pub(crate) fn fill_masks(&mut self, step_id: u64, slab: &mut [u8]) -> Result<u32, Error> {
        let mut view = MaskView::new(&self.layout, slab)?;
        let age = self.in_flight.iter().position(|s| s.step_id == step_id);
        let Some(age) = age else {
            return Err(Error::Slab(format!("step {step_id} is not in flight")));
        };
        if age > 0 && self.in_flight[age].masks_wait {
            return Err(Error::Slab(format!(
                "the masks of step {step_id} depend on the step before it; commit that first"
            )));
        }
        let taken = self.take_rules(age);
        let step = &self.in_flight[age];
        view.sample_mask_row[..step.samples.len()].fill(-1);
        let words = mask_words(self.config.vocab_size);
        let mut masks = bytemuck::cast_slice_mut(view.mask_word).chunks_exact_mut(words);
        let mut jobs: Vec<Job<'_>> = Vec::with_capacity(taken.len());
        // Samples with the mask of another one, and that one's row.
        let mut sharing: Vec<(MaskedSample, Box<Rules>, usize)> = Vec::new();
        let mut waiting: Vec<(Vec<i32>, usize)> = Vec::new();
        for (place, rules) in taken {
            let masked = step.masked[place];
            let sequence = step.samples[masked.position as usize].sequence;
            let (outputs, banned) = self.outputs_and_bans(sequence, masked.output_index);
            let alone = rules.only_waits_with(outputs, masked.binding);
            if let Some(tokens) = alone.filter(|_| banned.is_empty()) {
                if let Some(&(_, row)) = waiting.iter().find(|(known, _)| known == tokens) {
                    sharing.push((masked, rules, row));
                    continue;
                }
                waiting.push((tokens.to_vec(), jobs.len()));
            }
            let Some(mask) = masks.next() else { break };
            jobs.push(Job {
                position: masked.position,
                binding: masked.binding,
                rules,
                outputs,
                banned,
                mask,
                binds: false,
            });
        }
        run_all(&mut jobs, self.num_mask_threads);
        let num_masks = jobs.len();
        let own = jobs.into_iter().enumerate();
        let mut done: Vec<(u32, Box<Rules>, Option<usize>)> = own
            .map(|(row, job)| (job.position, job.rules, job.binds.then_some(row)))
            .collect();
        for (masked, rules, row) in sharing {
            let row = done[row].2;
            done.push((masked.position, rules, row));
        }
        let mut num_bound = 0;
        for (position, rules, row) in done {
            let sequence = self.in_flight[age].samples[position as usize].sequence;
            self.sequences[sequence as usize].rules = Some(rules);
            if let Some(row) = row {
                view.sample_mask_row[position as usize] = row as i32;
                num_bound += 1;
            }
        }
        view.finish(&self.layout, num_masks, words);
        Ok(num_bound)
    }

    /// The rules of the masked samples whose results still count, with their place in the list.
    fn take_rules(&mut self, age: usize) -> Vec<(usize, Box<Rules>)> {
        let step = &self.in_flight[age];
        let mut taken = Vec::with_capacity(step.masked.len());
        for (place, masked) in step.masked.iter().enumerate() {
            let sample = step.samples[masked.position as usize];
            let sequence = &mut self.sequences[sample.sequence as usize];
            if sequence.life == sample.life
                && let Some(rules) = sequence.rules.take()
            {
                taken.push((place, rules));
            }
        }
        taken
    }

    fn outputs_and_bans(&self, id: u32, output_index: u32) -> (&[i32], &[i32]) {
        let sequence = &self.sequences[id as usize];
        let spec = &self.requests[sequence.request as usize].spec;
        let banned: &[i32] = if output_index < sequence.min_tokens {
            &spec.sampling.banned
        } else {
            &[]
        };
        (&sequence.outputs, banned)
    }
}

/// Computes all of them: on the caller's thread, until what is left is seen to be worth others.
fn run_all(jobs: &mut [Job<'_>], max_threads: usize) {
    let began = Instant::now();
    let mut rest = jobs;
    let mut num_done = 0;
    while let Some((job, others)) = rest.split_first_mut() {
        job.run();
        rest = others;
        num_done += 1;
        let expected = began.elapsed() / num_done * rest.len() as u32;
        let num_threads = (expected.as_micros() / THREAD_MICROS) as usize;
        if num_threads.min(max_threads).min(rest.len()) > 1 {
            run_on_threads(rest, num_threads.min(max_threads).min(rest.len()));
            return;
        }
    }
}

/// The caller's is one of the threads.
fn run_on_threads(jobs: &mut [Job<'_>], num_threads: usize) {
    let queue = Mutex::new(jobs.iter_mut());
    let work = || {
        // Not in one expression with the work: the lock would be held that long.
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some(job) = next() {
            job.run();
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..num_threads {
            // Where the system has no thread to give, those there are do it all.
            drop(std::thread::Builder::new().spawn_scoped(scope, work));
        }
        work();
    });
}
