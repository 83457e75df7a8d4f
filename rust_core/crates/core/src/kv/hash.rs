//! Keys of cached blocks: a keyed 128-bit hash that covers everything the KV of a block depends on.

use std::hash::{BuildHasherDefault, Hasher};

use siphasher::sip128::{Hasher128, SipHasher24};

/// Stands for all tokens from the start of a sequence to the end of a block, its adapter, the order of its sums and its
/// salt.
pub(crate) type BlockKey = u128;

// First word of every hashed message. A block's message and a root's can never be the same bytes.
const ROOT_DOMAIN: u64 = 0x6f6e_656c_726f_6f74;
const BLOCK_DOMAIN: u64 = 0x6f6e_656c_626c_6f6b;

/// SipHash-2-4-128 with a secret key: who does not know the key can neither predict nor collide keys.
#[derive(Debug, Clone)]
pub(crate) struct PrefixHasher {
    keyed: SipHasher24,
}

impl PrefixHasher {
    pub(crate) fn new(key: &[u8; 16]) -> Self {
        Self {
            keyed: SipHasher24::new_with_key(key),
        }
    }

    /// Parent of a first block: its adapter, the order of its sums and its salt, each in a field of its own (tag, then
    /// fixed-size adapter and order, then the salt with its length).
    pub(crate) fn root(&self, adapter: i32, fixed_order: bool, salt: &[u8]) -> BlockKey {
        let mut hasher = self.keyed;
        hasher.write(&ROOT_DOMAIN.to_le_bytes());
        hasher.write(&i64::from(adapter).to_le_bytes());
        hasher.write(&u64::from(fixed_order).to_le_bytes());
        hasher.write(&(salt.len() as u64).to_le_bytes());
        hasher.write(salt);
        hasher.finish128().into()
    }

    /// Key of the block with these tokens whose predecessor has the key `parent`.
    #[inline]
    pub(crate) fn block(&self, parent: BlockKey, tokens: &[i32]) -> BlockKey {
        let mut head = [0; 24];
        head[..8].copy_from_slice(&BLOCK_DOMAIN.to_le_bytes());
        head[8..].copy_from_slice(&parent.to_le_bytes());
        let mut hasher = self.keyed;
        hasher.write(&head);
        hasher.write(bytemuck::cast_slice(tokens));
        hasher.finish128().into()
    }

    /// Appends the keys of the full blocks of `tokens`, whose first block has the parent `root`.
    pub(crate) fn blocks(
        &self,
        root: BlockKey,
        tokens: &[i32],
        block_size: usize,
    ) -> Vec<BlockKey> {
        let mut parent = root;
        tokens
            .chunks_exact(block_size)
            .map(|block| {
                parent = self.block(parent, block);
                parent
            })
            .collect()
    }
}

/// Hasher of maps from keys: a key is a keyed hash already, half of it is a good table index.
#[derive(Debug, Default)]
pub(crate) struct KeyBits(u64);

impl Hasher for KeyBits {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    #[inline]
    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }
}

pub(crate) type BuildKeyBits = BuildHasherDefault<KeyBits>;

#[cfg(test)]
mod tests {
    use super::*;

    fn hasher() -> PrefixHasher {
        PrefixHasher::new(&[7; 16])
    }

    #[test]
    fn every_ingredient_changes_the_key() {
        let h = hasher();
        let base = h.block(h.root(-1, false, b""), &[1, 2, 3, 4]);
        let others = [
            h.block(h.root(0, false, b""), &[1, 2, 3, 4]),
            h.block(h.root(-1, false, b"a"), &[1, 2, 3, 4]),
            h.block(base, &[1, 2, 3, 4]),
            h.block(h.root(-1, false, b""), &[1, 2, 3, 5]),
            h.block(h.root(-1, false, b""), &[1, 2, 3]),
            PrefixHasher::new(&[8; 16]).block(h.root(-1, false, b""), &[1, 2, 3, 4]),
            h.block(h.root(-1, true, b""), &[1, 2, 3, 4]),
        ];
        for (index, key) in others.iter().enumerate() {
            assert_ne!(*key, base, "variant {index}");
        }
    }

    #[test]
    fn a_salt_cannot_imitate_an_adapter() {
        let h = hasher();
        let adapter = h.root(5, false, b"");
        for salt in [
            &b"5"[..],
            &5i32.to_le_bytes(),
            &5i64.to_le_bytes(),
            &[0; 8],
            &[0; 16],
        ] {
            assert_ne!(h.root(-1, false, salt), adapter);
        }
        assert_ne!(h.root(-1, false, b"\0"), h.root(-1, false, b"\0\0"));
    }

    #[test]
    fn a_chain_is_the_fold_of_its_blocks() {
        let h = hasher();
        let root = h.root(-1, false, b"s");
        let tokens: Vec<i32> = (0..11).collect();
        let keys = h.blocks(root, &tokens, 4);
        let first = h.block(root, &tokens[..4]);
        assert_eq!(keys, [first, h.block(first, &tokens[4..8])]);
    }
}
