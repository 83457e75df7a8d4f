//! The waiting sequences, most important first: a binary heap that also lets go of any member.

use super::sequence::Rank;

/// A heap of (rank, sequence). `positions` leads from a sequence to its entry.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    heap: Vec<(Rank, u32)>,
    positions: Vec<u32>,
}

const ABSENT: u32 = u32::MAX;

impl WaitQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    pub(crate) fn contains(&self, sequence: u32) -> bool {
        self.positions
            .get(sequence as usize)
            .is_some_and(|&position| position != ABSENT)
    }

    /// The most important sequence.
    pub(crate) fn first(&self) -> Option<u32> {
        self.heap.first().map(|&(_, sequence)| sequence)
    }

    pub(crate) fn push(&mut self, rank: Rank, sequence: u32) {
        debug_assert!(!self.contains(sequence));
        if self.positions.len() <= sequence as usize {
            self.positions.resize(sequence as usize + 1, ABSENT);
        }
        self.heap.push((rank, sequence));
        self.sift_up(self.heap.len() - 1);
    }

    /// Takes the sequence out, wherever it stands. False if it was not waiting.
    pub(crate) fn remove(&mut self, sequence: u32) -> bool {
        if !self.contains(sequence) {
            return false;
        }
        let position = self.positions[sequence as usize] as usize;
        self.heap.swap_remove(position);
        self.positions[sequence as usize] = ABSENT;
        if position < self.heap.len() {
            self.sift_down(position);
            self.sift_up(position);
        }
        true
    }

    /// The waiting sequences in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.heap.iter().map(|&(_, sequence)| sequence)
    }

    /// Whether no entry comes before its parent and every position is right.
    pub(crate) fn is_sound(&self) -> bool {
        let present = self
            .positions
            .iter()
            .filter(|&&position| position != ABSENT)
            .count();
        present == self.heap.len()
            && self
                .heap
                .iter()
                .enumerate()
                .all(|(position, &(rank, sequence))| {
                    let parent = position.saturating_sub(1) / 2;
                    self.positions[sequence as usize] as usize == position
                        && self.heap[parent].0 <= rank
                })
    }

    fn sift_up(&mut self, mut position: usize) {
        while position > 0 {
            let parent = (position - 1) / 2;
            if self.heap[parent].0 <= self.heap[position].0 {
                break;
            }
            self.swap(parent, position);
            position = parent;
        }
        self.note(position);
    }

    fn sift_down(&mut self, mut position: usize) {
        loop {
            let mut least = position;
            for child in [2 * position + 1, 2 * position + 2] {
                if child < self.heap.len() && self.heap[child].0 < self.heap[least].0 {
                    least = child;
                }
            }
            if least == position {
                break;
            }
            self.swap(least, position);
            position = least;
        }
        self.note(position);
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.note(a);
        self.note(b);
    }

    fn note(&mut self, position: usize) {
        let (_, sequence) = self.heap[position];
        self.positions[sequence as usize] = position as u32;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn comes_out_in_order_whatever_was_removed(
            ranks in prop::collection::vec(-3i64..4, 0..60),
            removed in prop::collection::vec(0u32..60, 0..30),
        ) {
            let mut queue = WaitQueue::default();
            let rank = |sequence: u32| Rank {
                priority: ranks[sequence as usize],
                arrival: u64::from(sequence),
                index: 0,
            };
            let mut left: Vec<u32> = (0..ranks.len() as u32).collect();
            for &sequence in &left {
                queue.push(rank(sequence), sequence);
            }
            for sequence in removed {
                prop_assert_eq!(queue.remove(sequence), left.contains(&sequence));
                left.retain(|&other| other != sequence);
                prop_assert!(queue.is_sound());
            }
            left.sort_by_key(|&sequence| rank(sequence));
            let mut popped = Vec::new();
            while let Some(sequence) = queue.first() {
                popped.push(sequence);
                queue.remove(sequence);
            }
            prop_assert_eq!(popped, left);
        }
    }
}
