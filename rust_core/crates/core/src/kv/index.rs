//! Key → findable block, as chains through the blocks' records.
//!
//! An entry lies in its block's record, which whoever asks for the block looks at anyway: in a pool of many blocks each
//! place in memory that is not looked at saves a cache miss, and each new block of a full pool means one entry less and
//! one more.

use super::block::{Block, NONE};
use super::hash::BlockKey;

/// The heads of the chains, about two for each block, by the low bits of the key, which is a keyed hash already.
#[derive(Debug)]
pub(super) struct KeyIndex {
    heads: Vec<u32>,
    len: usize,
}

impl KeyIndex {
    /// For at most so many entries.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            heads: vec![NONE; (2 * capacity).next_power_of_two()],
            len: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The block whose entry has this key.
    #[inline]
    pub(super) fn find(&self, blocks: &[Block], key: BlockKey) -> Option<u32> {
        let mut id = self.heads[self.chain(key)];
        while id != NONE {
            let block = &blocks[id as usize];
            if block.key == key {
                return Some(id);
            }
            id = block.next_in_chain;
        }
        None
    }

    /// Adds the block's entry, under the key in its record. There must be none with this key.
    pub(super) fn insert(&mut self, blocks: &mut [Block], id: u32) {
        let block = &mut blocks[id as usize];
        let chain = self.chain(block.key);
        block.next_in_chain = std::mem::replace(&mut self.heads[chain], id);
        self.len += 1;
    }

    /// Removes the entry of a block that has one.
    pub(super) fn remove(&mut self, blocks: &mut [Block], id: u32) {
        let Block {
            key, next_in_chain, ..
        } = blocks[id as usize];
        let chain = self.chain(key);
        if self.heads[chain] == id {
            self.heads[chain] = next_in_chain;
        } else {
            let mut before = self.heads[chain];
            while blocks[before as usize].next_in_chain != id {
                before = blocks[before as usize].next_in_chain;
            }
            blocks[before as usize].next_in_chain = next_in_chain;
        }
        self.len -= 1;
    }

    fn chain(&self, key: BlockKey) -> usize {
        key as usize & (self.heads.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys of two chains only, so that every place in a chain is met.
    fn key(id: u32) -> BlockKey {
        BlockKey::from(id % 2) | BlockKey::from(id) << 64
    }

    #[test]
    fn entries_come_and_go_in_any_order() {
        let mut blocks = vec![Block::EMPTY; 6];
        for id in 0..6 {
            blocks[id as usize].key = key(id);
        }
        for first in 0..6 {
            let mut index = KeyIndex::new(6);
            for id in 0..6 {
                assert_eq!(index.find(&blocks, key(id)), None);
                index.insert(&mut blocks, id);
            }
            for gone in 0..6 {
                assert_eq!(index.len(), 6 - gone as usize);
                for id in 0..6 {
                    let is_there = (id + 6 - first) % 6 >= gone;
                    assert_eq!(index.find(&blocks, key(id)), is_there.then_some(id));
                }
                index.remove(&mut blocks, (first + gone) % 6);
            }
        }
    }
}
