//! The columns of a slab that a trace holds, and how a step is read from a slab.

use super::event::{Admission, NUM_HEADER, Step};
use crate::batch::{HEADER_NAMES, SlabLayout};

macro_rules! columns {
    ($($variant:ident = $name:literal counted by $count:literal),* $(,)?) => {
        /// One array of the slab.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Column { $($variant),* }

        impl Column {
            /// In the order in which they are written.
            pub(super) const ALL: &[Self] = &[$(Self::$variant),*];

            /// The field of the slab.
            pub(super) fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// The value of the header that says how many elements are valid.
            fn count_name(self) -> &'static str {
                match self { $(Self::$variant => $count),* }
            }
        }
    };
}

columns! {
    RowSlot = "row_slot" counted by "num_rows",
    RowNumScheduled = "row_num_scheduled" counted by "num_rows",
    RowNumComputed = "row_num_computed" counted by "num_rows",
    SampleSlot = "sample_slot" counted by "num_samples",
    SampleTokenIndex = "sample_token_index" counted by "num_samples",
    SampleOutputIndex = "sample_output_index" counted by "num_samples",
    FreedSlot = "freed_slot" counted by "num_freed",
    CowSrc = "cow_src" counted by "num_cow",
    CowDst = "cow_dst" counted by "num_cow",
    ForkSrc = "fork_src" counted by "num_forks",
    ForkDst = "fork_dst" counted by "num_forks",
    ForkNumBlocks = "fork_num_blocks" counted by "num_forks",
    DeltaSlot = "delta_slot" counted by "num_block_deltas",
    DeltaIndex = "delta_index" counted by "num_block_deltas",
    DeltaBlock = "delta_block" counted by "num_block_deltas",
}

pub(super) const NUM_COLUMNS: usize = Column::ALL.len();

/// Where a slab's columns lie.
#[derive(Debug, Clone)]
pub(super) struct StepReader {
    header: usize,
    columns: [Place; NUM_COLUMNS],
    token_ids: Place,
    admitted_slot: Place,
}

/// A field: offset in bytes, capacity in elements, place of its count in the header.
#[derive(Debug, Clone, Copy)]
struct Place {
    offset: usize,
    capacity: usize,
    count: usize,
}

impl StepReader {
    pub(super) fn new(layout: &SlabLayout) -> Self {
        let place = |name: &str, count: &str| {
            let field = layout.fields.iter().find(|field| field.name == name);
            Place {
                offset: field.map_or(0, |field| field.offset),
                capacity: field.map_or(0, |field| field.length),
                count: header_index(count),
            }
        };
        Self {
            header: place("header", "step_id").offset,
            columns: std::array::from_fn(|index| {
                let column = Column::ALL[index];
                place(column.name(), column.count_name())
            }),
            token_ids: place("token_ids", "num_tokens"),
            admitted_slot: place("admitted_slot", "num_admitted"),
        }
    }

    /// Elements of a column at most.
    pub(super) fn capacity(&self, column: Column) -> usize {
        self.columns[column as usize].capacity
    }

    /// Elements of a column in the step with this header.
    pub(super) fn count(&self, column: Column, header: &[i64; NUM_HEADER]) -> i64 {
        header[self.columns[column as usize].count]
    }

    /// The step that a slab holds. `owner`: request and index of the sequence in a slot.
    pub(super) fn read(&self, slab: &[u8], owner: impl Fn(i32) -> (u64, u32)) -> Step {
        let mut header = [0; NUM_HEADER];
        let end = self.header + size_of::<[i64; NUM_HEADER]>();
        header.copy_from_slice(bytemuck::cast_slice(&slab[self.header..end]));
        let read = |place: Place| -> &[i32] {
            let count = header[place.count] as usize;
            bytemuck::cast_slice(&slab[place.offset..place.offset + 4 * count])
        };
        let admitted = read(self.admitted_slot).iter().map(|&slot| {
            let (request, index) = owner(slot);
            Admission {
                slot,
                request,
                index,
            }
        });
        Step {
            header,
            admitted: admitted.collect(),
            columns: std::array::from_fn(|index| read(self.columns[index]).to_vec()),
            num_placeholders: read(self.token_ids)
                .iter()
                .map(|&token| u32::from(token < 0))
                .sum(),
        }
    }
}

pub(super) fn header_index(name: &str) -> usize {
    HEADER_NAMES
        .iter()
        .position(|&known| known == name)
        .unwrap_or_default()
}

/// What is likely to come next, from what came before: both ends of the codec ask it, and only what differs is written.
#[derive(Debug)]
pub(super) struct Predictor {
    pub(super) header: [i64; NUM_HEADER],
    pub(super) request: u64,
    row_slots: Vec<i32>,
    num_computed: Vec<i32>,
    num_outputs: Vec<i32>,
}

impl Predictor {
    pub(super) fn new(max_num_seqs: u32) -> Self {
        Self {
            header: [0; NUM_HEADER],
            request: 0,
            row_slots: Vec::new(),
            num_computed: vec![0; max_num_seqs as usize],
            num_outputs: vec![0; max_num_seqs as usize],
        }
    }

    /// Element `index` of a column, given all that stands before it.
    pub(super) fn predict(
        &self,
        columns: &[Vec<i32>; NUM_COLUMNS],
        column: Column,
        index: usize,
    ) -> i32 {
        let before = |column: Column| {
            index
                .checked_sub(1)
                .map_or(0, |at| element(columns, column, at))
        };
        let following = before(column).wrapping_add(i32::from(index > 0));
        match column {
            Column::RowSlot => self.row_slots.get(index).copied().unwrap_or(following),
            Column::RowNumScheduled => 1,
            Column::RowNumComputed => {
                of_slot(&self.num_computed, element(columns, Column::RowSlot, index))
            }
            Column::SampleSlot => columns[Column::RowSlot as usize]
                .get(index)
                .copied()
                .unwrap_or(following),
            Column::SampleOutputIndex => of_slot(
                &self.num_outputs,
                element(columns, Column::SampleSlot, index),
            ),
            Column::DeltaIndex => {
                let goes_on = index > 0
                    && element(columns, Column::DeltaSlot, index) == before(Column::DeltaSlot);
                before(column).wrapping_add(i32::from(goes_on))
            }
            Column::DeltaSlot => before(column),
            Column::SampleTokenIndex | Column::DeltaBlock => following,
            _ => 0,
        }
    }

    /// The step is what came last from now on.
    pub(super) fn note(&mut self, step: &Step) {
        self.header = step.header;
        for admission in &step.admitted {
            set(&mut self.num_computed, admission.slot, 0);
            self.request = admission.request;
        }
        let rows = step.column(Column::RowSlot);
        for (row, &slot) in rows.iter().enumerate() {
            let end = element(&step.columns, Column::RowNumComputed, row).wrapping_add(element(
                &step.columns,
                Column::RowNumScheduled,
                row,
            ));
            set(&mut self.num_computed, slot, end);
        }
        let indices = step.column(Column::SampleOutputIndex);
        for (&slot, &index) in step.column(Column::SampleSlot).iter().zip(indices) {
            set(&mut self.num_outputs, slot, index.wrapping_add(1));
        }
        self.row_slots.clear();
        self.row_slots.extend_from_slice(rows);
    }
}

fn element(columns: &[Vec<i32>; NUM_COLUMNS], column: Column, index: usize) -> i32 {
    columns[column as usize]
        .get(index)
        .copied()
        .unwrap_or_default()
}

fn of_slot(values: &[i32], slot: i32) -> i32 {
    values.get(slot as usize).copied().unwrap_or_default()
}

fn set(values: &mut [i32], slot: i32, value: i32) {
    if let Some(place) = values.get_mut(slot as usize) {
        *place = value;
    }
}
