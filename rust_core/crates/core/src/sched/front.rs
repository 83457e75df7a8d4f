//! Waiting for a prefix that a running sequence is about to compute.
//!
//! The *front* of a running sequence is the first full block of its known tokens that no step computes yet. The map
//! from a front's key (which covers all tokens before it, the adapter and the salt) to the sequence tells a waiting
//! one, whose first missing block it is, that it need not compute that block. How many blocks the two have in common
//! is looked up once, in their keys; the waiting one then leaves the queue until so many are findable.
//!
//! Nobody waits in vain: a running sequence with a front gets a token with every step and holds all blocks for it, and
//! when it leaves its slot, or others compute what it was to, those that wait for it go back to the queue, where
//! their rank gives them their place.

use hashbrown::hash_map::Entry;

use super::sequence::{NO_FRONT, Place};
use super::state::Scheduler;
use crate::kv::BlockKey;

/// Effort of one step's admission that may end in waiting: a bound on the time that a long queue takes.
const MAX_EFFORT: u32 = 1024;
/// Of which an admission attempt that looked up the cached prefix takes so much, one that did not takes 1.
const LOOKUP_EFFORT: u32 = 16;

/// What the admission of one step knows of the sequences that others wait for.
#[derive(Debug, Default)]
pub(super) struct Deferrals {
    /// The last one found: likely the next one's too.
    recent: Option<u32>,
    effort: u32,
}

impl Deferrals {
    pub(super) fn may_go_on(&self) -> bool {
        self.effort < MAX_EFFORT
    }
}

impl Scheduler {
    /// Takes the sequence out of the queue if it shares what was found last to be under way.
    pub(super) fn defer_like_last(&mut self, id: u32, deferrals: &mut Deferrals) -> bool {
        let is_deferred = deferrals
            .recent
            .is_some_and(|awaited| self.defer(id, awaited));
        deferrals.effort += u32::from(is_deferred);
        is_deferred
    }

    /// Takes the sequence out of the queue if the block after `scratch.hits` is a running one's front.
    pub(super) fn defer_after_hits(&mut self, id: u32, deferrals: &mut Deferrals) -> bool {
        let num_hits = self.scratch.hits.len() as u32;
        if self.fronts.is_empty() || num_hits >= self.num_sharable(id) {
            return false;
        }
        let front = self
            .known_key(id, num_hits)
            .and_then(|key| self.fronts.get(&key).copied());
        let Some(awaited) = front.filter(|&awaited| self.defer(id, awaited)) else {
            return false;
        };
        deferrals.recent = Some(awaited);
        deferrals.effort += LOOKUP_EFFORT;
        true
    }

    /// Lets the queued sequence `id` wait for what it shares with `awaited`, if that includes the front.
    ///
    /// Not for a less important priority's sake: that one may be slow.
    fn defer(&mut self, id: u32, awaited: u32) -> bool {
        let (waiting, running) = (
            &self.sequences[id as usize],
            &self.sequences[awaited as usize],
        );
        if running.front == NO_FRONT || running.rank.priority > waiting.rank.priority {
            return false;
        }
        let front = running.front;
        if front >= self.num_sharable(id) || !self.have_in_common(id, awaited, front) {
            return false;
        }
        let num_common = self.num_common(id, awaited, front + 1);
        self.queue.remove(id);
        self.sequences[id as usize].place = Place::Deferred;
        // The blocks it lacked are not those that it will lack.
        self.starved_head = None;
        self.waiters.push(id, awaited, num_common);
        true
    }

    /// Full blocks at the start of a waiting sequence that it can find: at least one token is left.
    fn num_sharable(&self, id: u32) -> u32 {
        self.sequences[id as usize].num_cacheable() / self.config.block_size
    }

    /// Blocks that a waiting sequence can share with a running one, given that there are at least so many. As a key
    /// covers all that comes before it, this is a binary search.
    fn num_common(&self, id: u32, awaited: u32, at_least: u32) -> u32 {
        let (mut common, mut end) = (at_least, self.num_sharable(id));
        while common < end {
            let middle = common + (end - common) / 2;
            if self.have_in_common(id, awaited, middle) {
                common = middle + 1;
            } else {
                end = middle;
            }
        }
        common
    }

    /// Whether two sequences are known to have the same tokens up to the end of block `index`.
    fn have_in_common(&self, a: u32, b: u32, index: u32) -> bool {
        let key = self.known_key(a, index);
        key.is_some() && key == self.known_key(b, index)
    }

    /// Key of the sequence's full block `index`, if it was needed before.
    pub(super) fn known_key(&self, id: u32, index: u32) -> Option<BlockKey> {
        let sequence = &self.sequences[id as usize];
        let prompt_keys = &self.requests[sequence.request as usize].spec.prompt_keys;
        match (index as usize).checked_sub(prompt_keys.len()) {
            None => Some(prompt_keys[index as usize]),
            Some(index) => sequence.output_keys.get(index).copied(),
        }
    }

    /// A block that is findable now is no front; who was to compute it after `id` did is nobody to wait for.
    #[inline]
    pub(super) fn pass_front(&mut self, id: u32, key: BlockKey) {
        if !self.fronts.is_empty()
            && let Some(owner) = self.fronts.remove(&key)
        {
            self.sequences[owner as usize].front = NO_FRONT;
            if owner != id {
                self.wake(owner, u32::MAX);
            }
        }
    }

    /// Notes the front of a running sequence after its `num_registered` has changed, and wakes those who waited for
    /// that; all of them if it has none. Of several that are to compute one block the first one noted counts.
    pub(super) fn note_front(&mut self, id: u32) {
        let sequence = &self.sequences[id as usize];
        let index = sequence.num_registered;
        let is_known = (index + 1) * self.config.block_size <= sequence.num_known();
        if is_known && sequence.front == NO_FRONT {
            let (key, _) = self.key(id, index);
            if !self.pool.is_findable(key)
                && let Entry::Vacant(entry) = self.fronts.entry(key)
            {
                entry.insert(id);
                self.sequences[id as usize].front = index;
            }
        }
        let has_front = self.sequences[id as usize].front != NO_FRONT;
        self.wake(id, if has_front { index } else { u32::MAX });
    }

    /// The sequence leaves its slot: nobody waits for it any longer.
    pub(super) fn drop_front(&mut self, id: u32) {
        let front = std::mem::replace(&mut self.sequences[id as usize].front, NO_FRONT);
        if front != NO_FRONT
            && let Some(key) = self.known_key(id, front)
        {
            self.fronts.remove(&key);
        }
        self.wake(id, u32::MAX);
    }

    /// Sends those back to the queue that wait for no more than `num_blocks` blocks of `awaited`.
    pub(super) fn wake(&mut self, awaited: u32, num_blocks: u32) {
        let (sequences, queue) = (&mut self.sequences, &mut self.queue);
        self.waiters.take_due(awaited, num_blocks, |id| {
            let sequence = &mut sequences[id as usize];
            sequence.place = Place::Queued;
            queue.push(sequence.rank, id);
        });
    }
}
