//! The waiting sequences that are not in the queue because a running one is about to compute what they need: for
//! each running one the list of those that wait for it.

/// No sequence.
const NONE: u32 = u32::MAX;
/// Nobody waits.
const NEVER: u32 = u32::MAX;

/// One sequence in both its roles.
#[derive(Debug, Clone, Copy)]
struct Node {
    /// Whom it waits for, and until how many of that one's blocks are findable.
    awaited: u32,
    num_blocks: u32,
    /// Neighbours in that one's list.
    prev: u32,
    next: u32,
    /// Those that wait for it.
    first: u32,
    /// No member of that list waits for less.
    least: u32,
}

impl Node {
    const IDLE: Self = Self {
        awaited: NONE,
        num_blocks: 0,
        prev: NONE,
        next: NONE,
        first: NONE,
        least: NEVER,
    };
}

/// Lists threaded through one record per sequence; joining and leaving cost O(1) and allocate nothing.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    nodes: Vec<Node>,
    len: usize,
}

impl Waiters {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// All that wait, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let num_nodes = if self.len == 0 { 0 } else { self.nodes.len() };
        (0..num_nodes as u32).filter(|&id| self.nodes[id as usize].awaited != NONE)
    }

    pub(crate) fn is_awaited(&self, sequence: u32) -> bool {
        self.nodes
            .get(sequence as usize)
            .is_some_and(|node| node.first != NONE)
    }

    /// Whom the sequence waits for, and until how many of its blocks are findable.
    pub(crate) fn awaited_by(&self, sequence: u32) -> Option<(u32, u32)> {
        self.nodes
            .get(sequence as usize)
            .filter(|node| node.awaited != NONE)
            .map(|node| (node.awaited, node.num_blocks))
    }

    /// `sequence` waits from now on until `num_blocks` blocks of `awaited` are findable.
    pub(crate) fn push(&mut self, sequence: u32, awaited: u32, num_blocks: u32) {
        debug_assert!(self.awaited_by(sequence).is_none());
        let num_nodes = sequence.max(awaited) as usize + 1;
        if self.nodes.len() < num_nodes {
            self.nodes.resize(num_nodes, Node::IDLE);
        }
        let head = &mut self.nodes[awaited as usize];
        let next = std::mem::replace(&mut head.first, sequence);
        head.least = head.least.min(num_blocks);
        if next != NONE {
            self.nodes[next as usize].prev = sequence;
        }
        let node = &mut self.nodes[sequence as usize];
        node.awaited = awaited;
        node.num_blocks = num_blocks;
        node.prev = NONE;
        node.next = next;
        self.len += 1;
    }

    /// The sequence waits no more, for whatever reason. Nothing happens if it did not.
    pub(crate) fn remove(&mut self, sequence: u32) {
        let Some((awaited, _)) = self.awaited_by(sequence) else {
            return;
        };
        let Node { prev, next, .. } = self.nodes[sequence as usize];
        match prev {
            NONE => self.nodes[awaited as usize].first = next,
            prev => self.nodes[prev as usize].next = next,
        }
        if next != NONE {
            self.nodes[next as usize].prev = prev;
        }
        let head = &mut self.nodes[awaited as usize];
        if head.first == NONE {
            head.least = NEVER;
        }
        self.nodes[sequence as usize].awaited = NONE;
        self.len -= 1;
    }

    /// Takes out those that wait for no more than `num_blocks` blocks of `awaited`. O(1) when there are none.
    #[inline]
    pub(crate) fn take_due(&mut self, awaited: u32, num_blocks: u32, mut each: impl FnMut(u32)) {
        let Some(&head) = self.nodes.get(awaited as usize) else {
            return;
        };
        if head.first == NONE || num_blocks < head.least {
            return;
        }
        let mut least = NEVER;
        let mut sequence = head.first;
        while sequence != NONE {
            let node = self.nodes[sequence as usize];
            if node.num_blocks <= num_blocks {
                self.remove(sequence);
                each(sequence);
            } else {
                least = least.min(node.num_blocks);
            }
            sequence = node.next;
        }
        self.nodes[awaited as usize].least = least;
    }

    /// Whether every list holds exactly those that wait for its head, and none of them is overdue for its bound.
    pub(crate) fn is_sound(&self) -> bool {
        let mut num_listed = 0;
        for (id, head) in self.nodes.iter().enumerate() {
            let mut prev = NONE;
            let mut sequence = head.first;
            while sequence != NONE {
                let node = &self.nodes[sequence as usize];
                num_listed += 1;
                if node.awaited as usize != id
                    || node.prev != prev
                    || node.num_blocks < head.least
                    || num_listed > self.len
                {
                    return false;
                }
                prev = sequence;
                sequence = node.next;
            }
        }
        let num_waiting = self.nodes.iter().filter(|node| node.awaited != NONE);
        num_listed == self.len && num_waiting.count() == self.len
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Sequences 0 to 2 are awaited, 3 to 19 wait: (who, for whom, until when), or leave, or are taken when due.
        #[test]
        fn who_is_due_comes_out_and_nobody_else(
            operations in prop::collection::vec((0u32..4, 3u32..20, 0u32..3, 1u32..9), 0..80),
        ) {
            let mut waiters = Waiters::default();
            let mut model: Vec<(u32, u32, u32)> = Vec::new();
            for (operation, sequence, awaited, num_blocks) in operations {
                match operation {
                    0 => {
                        waiters.remove(sequence);
                        model.retain(|entry| entry.0 != sequence);
                    }
                    1 => {
                        let mut due = Vec::new();
                        waiters.take_due(awaited, num_blocks, |id| due.push(id));
                        let is_due = |entry: &(u32, u32, u32)| entry.1 == awaited && entry.2 <= num_blocks;
                        let mut expected: Vec<u32> =
                            model.iter().filter(|entry| is_due(entry)).map(|entry| entry.0).collect();
                        due.sort_unstable();
                        expected.sort_unstable();
                        prop_assert_eq!(due, expected);
                        model.retain(|entry| !is_due(entry));
                    }
                    _ => {
                        if model.iter().all(|entry| entry.0 != sequence) {
                            waiters.push(sequence, awaited, num_blocks);
                            model.push((sequence, awaited, num_blocks));
                        }
                    }
                }
                prop_assert!(waiters.is_sound());
                prop_assert_eq!(waiters.len(), model.len());
                let mut expected: Vec<u32> = model.iter().map(|entry| entry.0).collect();
                expected.sort_unstable();
                prop_assert_eq!(waiters.iter().collect::<Vec<_>>(), expected);
                for awaited in 0..3 {
                    prop_assert_eq!(
                        waiters.is_awaited(awaited),
                        model.iter().any(|entry| entry.1 == awaited)
                    );
                }
                for sequence in 3..20 {
                    let expected = model.iter().find(|entry| entry.0 == sequence);
                    prop_assert_eq!(
                        waiters.awaited_by(sequence),
                        expected.map(|entry| (entry.1, entry.2))
                    );
                }
            }
        }
    }
}
