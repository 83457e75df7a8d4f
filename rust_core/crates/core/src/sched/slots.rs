//! The batch rows that the executor keeps state for. A sequence holds one slot from admission to its end.

/// Free slots, and those released since the last step.
#[derive(Debug)]
pub(crate) struct Slots {
    /// Owner of each slot.
    owners: Vec<u32>,
    free: Vec<u32>,
    released: Vec<u32>,
}

/// Marks a slot without owner.
const NO_OWNER: u32 = u32::MAX;

impl Slots {
    pub(crate) fn new(num_slots: u32) -> Self {
        Self {
            owners: vec![NO_OWNER; num_slots as usize],
            free: (0..num_slots).rev().collect(),
            released: Vec::with_capacity(num_slots as usize),
        }
    }

    pub(crate) fn num_free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Gives a slot to a sequence.
    pub(crate) fn take(&mut self, sequence: u32) -> Option<u32> {
        let slot = self.free.pop()?;
        self.owners[slot as usize] = sequence;
        Some(slot)
    }

    pub(crate) fn release(&mut self, slot: u32) {
        self.owners[slot as usize] = NO_OWNER;
        self.free.push(slot);
        self.released.push(slot);
    }

    /// Hands over the slots that were released since the last call and have no new owner.
    pub(crate) fn drain_released(&mut self, mut each: impl FnMut(u32)) {
        for slot in self.released.drain(..) {
            if self.owners[slot as usize] == NO_OWNER {
                each(slot);
            }
        }
    }

    pub(crate) fn owner(&self, slot: u32) -> Option<u32> {
        self.owners
            .get(slot as usize)
            .copied()
            .filter(|&owner| owner != NO_OWNER)
    }

    pub(crate) fn num_owned(&self) -> usize {
        self.owners
            .iter()
            .filter(|&&owner| owner != NO_OWNER)
            .count()
    }

    /// Whether each slot is owned or free, exactly once.
    pub(crate) fn is_sound(&self) -> bool {
        let mut seen: Vec<bool> = self.owners.iter().map(|&owner| owner != NO_OWNER).collect();
        self.free
            .iter()
            .all(|&slot| !std::mem::replace(&mut seen[slot as usize], true))
            && seen.into_iter().all(|seen| seen)
            && self.released.len() <= self.owners.len()
    }
}
