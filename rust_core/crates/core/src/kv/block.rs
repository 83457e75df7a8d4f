//! One block's record, and the lists that are threaded through the records by index.

use super::hash::BlockKey;

/// No block.
pub(super) const NONE: u32 = u32::MAX;

/// What the pool knows of one block: one cache line.
#[derive(Debug, Clone)]
#[repr(align(64))]
pub(super) struct Block {
    /// Block tables that hold it.
    pub(super) ref_count: u32,
    /// Counts the times it was handed out: tells its present content from earlier ones.
    pub(super) generation: u32,
    /// Neighbours in the list it is in, when unreferenced.
    pub(super) prev: u32,
    pub(super) next: u32,
    /// Step that computes its content, for a block made findable before that step was committed; 0 otherwise.
    pub(super) launch_step: u64,
    /// Whether it has an entry in the index of keys.
    pub(super) findable: bool,
    /// The next entry of that index's chain.
    pub(super) next_in_chain: u32,
    pub(super) key: BlockKey,
    pub(super) parent: BlockKey,
}

impl Block {
    pub(super) const EMPTY: Self = Self {
        ref_count: 0,
        generation: 0,
        prev: NONE,
        next: NONE,
        launch_step: 0,
        findable: false,
        next_in_chain: NONE,
        key: 0,
        parent: 0,
    };
}

/// A doubly linked list of unreferenced blocks; taking any member out costs O(1).
#[derive(Debug)]
pub(super) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

impl List {
    pub(super) const EMPTY: Self = Self {
        head: NONE,
        tail: NONE,
        len: 0,
    };

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn head(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    pub(super) fn push_back(&mut self, blocks: &mut [Block], id: u32) {
        blocks[id as usize].prev = self.tail;
        blocks[id as usize].next = NONE;
        match self.tail {
            NONE => self.head = id,
            tail => blocks[tail as usize].next = id,
        }
        self.tail = id;
        self.len += 1;
    }

    pub(super) fn remove(&mut self, blocks: &mut [Block], id: u32) {
        let Block { prev, next, .. } = blocks[id as usize];
        match prev {
            NONE => self.head = next,
            prev => blocks[prev as usize].next = next,
        }
        match next {
            NONE => self.tail = prev,
            next => blocks[next as usize].prev = prev,
        }
        self.len -= 1;
    }

    /// Members from head to tail; stops after as many steps as there are blocks, whatever the links say.
    pub(super) fn iter<'a>(&self, blocks: &'a [Block]) -> impl Iterator<Item = u32> + 'a {
        let mut id = self.head;
        std::iter::from_fn(move || {
            let present = id;
            id = blocks.get(present as usize)?.next;
            Some(present)
        })
        .take(blocks.len() + 1)
    }

    /// Whether forward links, backward links and the length agree.
    pub(super) fn is_sound(&self, blocks: &[Block]) -> bool {
        let mut prev = NONE;
        let mut len = 0;
        for id in self.iter(blocks) {
            if blocks[id as usize].prev != prev {
                return false;
            }
            prev = id;
            len += 1;
        }
        len == self.len && prev == self.tail
    }
}
