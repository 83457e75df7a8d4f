//! A slab in ordinary memory, read and written by field name.

use bytemuck::Pod;
use oneloop_core::{Field, HEADER_NAMES, SLAB_ALIGNMENT, SlabLayout};

/// One slab of the ring.
#[derive(Debug)]
pub(crate) struct Slab {
    layout: SlabLayout,
    memory: Vec<u8>,
    start: usize,
}

impl Slab {
    /// A slab filled with bytes that no test expects.
    pub(crate) fn new(layout: &SlabLayout) -> Self {
        let memory = vec![0xa5; layout.num_bytes + SLAB_ALIGNMENT];
        let start = memory.as_ptr().align_offset(SLAB_ALIGNMENT);
        Self {
            layout: layout.clone(),
            memory,
            start,
        }
    }

    /// All bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.layout.num_bytes]
    }

    /// All bytes, for the core to write.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.layout.num_bytes]
    }

    fn field(&self, name: &str) -> &Field {
        self.layout
            .fields
            .iter()
            .find(|field| field.name == name)
            .unwrap()
    }

    /// A value of the header.
    pub(crate) fn header(&self, name: &str) -> i64 {
        let index = HEADER_NAMES
            .iter()
            .position(|&known| known == name)
            .unwrap();
        self.array::<i64>("header", HEADER_NAMES.len())[index]
    }

    /// A count of the header.
    pub(crate) fn count(&self, name: &str) -> usize {
        usize::try_from(self.header(name)).unwrap()
    }

    /// The first `len` elements of a field.
    pub(crate) fn array<T: Pod>(&self, name: &str, len: usize) -> &[T] {
        let field = self.field(name);
        assert_eq!(field.dtype.num_bytes(), size_of::<T>());
        assert!(
            len <= field.length,
            "{name} has {} elements, not {len}",
            field.length
        );
        &bytemuck::cast_slice(&self.bytes()[field.offset..])[..len]
    }

    /// The first `len` elements of a 32-bit integer field.
    pub(crate) fn ints(&self, name: &str, len: usize) -> &[i32] {
        self.array(name, len)
    }

    /// The mask of a sample, where one binds it.
    pub(crate) fn mask(&self, position: usize) -> Option<&[u32]> {
        if self.header("num_masked") == 0 {
            return None;
        }
        let row = self.ints("sample_mask_row", position + 1)[position];
        let row = usize::try_from(row).ok()?;
        let num_rows = self.field("sample_mask_row").length;
        let words = self.field("mask_word").length / num_rows;
        let used_bytes = self.array::<i64>("mask_header", 1)[0] as usize;
        let end = self.field("mask_word").offset + (row + 1) * words * 4;
        assert!(end <= self.layout.mask_offset + used_bytes);
        Some(&self.array::<u32>("mask_word", (row + 1) * words)[row * words..])
    }

    /// All elements of a field, for the device to write.
    pub(crate) fn array_mut<T: Pod>(&mut self, name: &str) -> &mut [T] {
        let field = self.field(name).clone();
        let bytes = &mut self.bytes_mut()
            [field.offset..field.offset + field.length * field.dtype.num_bytes()];
        bytemuck::cast_slice_mut(bytes)
    }
}
