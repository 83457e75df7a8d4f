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

    /// All elements of a field, for the device to write.
    pub(crate) fn array_mut<T: Pod>(&mut self, name: &str) -> &mut [T] {
        let field = self.field(name).clone();
        let bytes = &mut self.bytes_mut()
            [field.offset..field.offset + field.length * field.dtype.num_bytes()];
        bytemuck::cast_slice_mut(bytes)
    }
}
