//! A simulated executor that applies slabs exactly as docs/architecture.md says, and checks what it attends to.
//!
//! Steps are executed when they are launched, in order, as a stream would; sampling may wait for masks.

use std::collections::{HashMap, HashSet};

use oneloop_core::{CoreConfig, SlabLayout, SubmitRequest};

use super::columns::{check_columns, flags_of};
use super::outputs::write_outputs;
use super::prompt_results;
use super::reference::{bias_columns, empty_prefix, extend_prefix, sample};
use super::slab::Slab;

/// (handle, index) of a sequence.
pub(crate) type SequenceId = (u64, u32);

/// What a sequence's tokens really are, as far as they are committed or sampled by sound rows.
#[derive(Debug)]
pub(crate) struct Truth {
    pub(crate) request: SubmitRequest,
    pub(crate) tokens: Vec<i32>,
    /// Prompt and committed outputs.
    pub(crate) num_committed: usize,
    /// `prefixes[p]`: hash of the tokens up to position p.
    prefixes: Vec<u64>,
}

impl Truth {
    fn new(request: &SubmitRequest) -> Self {
        let mut truth = Self {
            request: request.clone(),
            tokens: Vec::new(),
            num_committed: request.prompt.len(),
            prefixes: Vec::new(),
        };
        for &token in &request.prompt {
            truth.push(token);
        }
        truth
    }

    fn push(&mut self, token: i32) {
        let before = self
            .prefixes
            .last()
            .copied()
            .unwrap_or(empty_prefix(self.request.adapter));
        self.tokens.push(token);
        self.prefixes.push(extend_prefix(before, token));
    }

    /// Results in flight do not count any more.
    fn forget_uncommitted(&mut self) {
        self.tokens.truncate(self.num_committed);
        self.prefixes.truncate(self.num_committed);
    }

    /// Hash of the prompt and the first `num_outputs` outputs.
    pub(crate) fn prefix(&self, num_outputs: usize) -> u64 {
        self.prefixes[self.request.prompt.len() + num_outputs - 1]
    }
}

/// All sequences that were submitted and are not forgotten.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    pub(crate) truths: HashMap<SequenceId, Truth>,
    by_seed: HashMap<i64, SequenceId>,
    pub(crate) seeds: HashMap<SequenceId, i64>,
}

impl Oracle {
    /// A request was submitted; its seed is its own.
    pub(crate) fn add(&mut self, handle: u64, request: &SubmitRequest) {
        for index in 0..request.n as u32 {
            self.truths.insert((handle, index), Truth::new(request));
        }
        self.learn(request.seed.unwrap(), (handle, 0));
    }

    fn learn(&mut self, seed: i64, id: SequenceId) {
        assert_eq!(
            *self.by_seed.entry(seed).or_insert(id),
            id,
            "two sequences have the seed {seed}"
        );
        self.seeds.insert(id, seed);
    }

    /// A sequence has ended.
    pub(crate) fn forget(&mut self, id: SequenceId) {
        self.truths.remove(&id);
        if let Some(seed) = self.seeds.remove(&id) {
            self.by_seed.remove(&seed);
        }
    }
}

/// What the executor keeps per slot.
#[derive(Debug, Default, Clone)]
struct Slot {
    owner: Option<SequenceId>,
    table: Vec<i32>,
    last_token: i32,
    seed: i64,
    bias: u64,
    banned: Vec<i32>,
    min_tokens: i32,
    history: Option<Vec<i32>>,
    num_forks: u32,
}

/// One row, resolved.
struct Row {
    slot: usize,
    start: usize,
    tokens: Vec<i32>,
    last_token_index: i32,
    is_bad: bool,
}

/// A step that was not sampled.
pub(crate) struct Logits {
    rows: Vec<Row>,
    fate: Fate,
}

impl Row {
    fn first_index(&self) -> i32 {
        self.last_token_index + 1 - self.tokens.len() as i32
    }
}

/// How a step goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fate {
    /// The step leaves garbage and will be reported as failed.
    pub(crate) fails: bool,
    /// An earlier failed step is still in flight: rows may have been built on its garbage.
    pub(crate) may_be_bad: bool,
}

const GARBAGE: u64 = 0xdead;

/// The executor.
#[derive(Debug)]
pub(crate) struct Device {
    block_size: usize,
    config: CoreConfig,
    layout: SlabLayout,
    slots: Vec<Slot>,
    kv: Vec<u64>,
    last_step: i64,
    /// Rows that read what a failed step left behind.
    pub(crate) num_bad_rows: u64,
    /// How often each sequence got a slot.
    pub(crate) num_admissions: HashMap<SequenceId, u32>,
}

impl Device {
    pub(crate) fn new(config: &CoreConfig, layout: &SlabLayout) -> Self {
        Self {
            block_size: config.block_size as usize,
            config: config.clone(),
            layout: layout.clone(),
            slots: vec![Slot::default(); config.max_num_seqs as usize],
            kv: vec![GARBAGE; (config.num_blocks * config.block_size) as usize],
            last_step: 0,
            num_bad_rows: 0,
            num_admissions: HashMap::new(),
        }
    }

    /// Runs a step up to its logits.
    pub(crate) fn forward_step(
        &mut self,
        slab: &mut Slab,
        oracle: &mut Oracle,
        fate: Fate,
    ) -> Logits {
        self.check_header(slab);
        self.apply_freed_and_admitted(slab, oracle);
        self.apply_deltas(slab);
        self.apply_forks(slab, oracle);
        self.copy_blocks(slab);
        let mut rows = self.resolve_rows(slab, oracle);
        self.forward(&mut rows, oracle, fate);
        self.write_prompt_results(slab, &rows, oracle);
        self.num_bad_rows += if fate.fails {
            0
        } else {
            rows.iter().filter(|row| row.is_bad).count() as u64
        };
        Logits { rows, fate }
    }

    fn check_header(&mut self, slab: &Slab) {
        assert!(slab.header("step_id") > self.last_step);
        self.last_step = slab.header("step_id");
        let num_rows = slab.count("num_rows");
        assert!(num_rows >= 1);
        let scheduled = slab.ints("row_num_scheduled", num_rows);
        let num_single = slab.count("num_single");
        assert!(scheduled[..num_single].iter().all(|&count| count == 1));
        assert!(scheduled[num_single..].iter().all(|&count| count > 1));
        let num_tokens = slab.count("num_tokens");
        assert!(num_tokens <= self.config.max_num_batched_tokens as usize);
        let starts = slab.ints("query_start", num_rows + 1);
        assert_eq!((starts[0], starts[num_rows] as usize), (0, num_tokens));
        for (row, &count) in scheduled.iter().enumerate() {
            assert_eq!(starts[row + 1] - starts[row], count);
        }
        assert_eq!(
            slab.header("max_query_len"),
            i64::from(*scheduled.iter().max().unwrap())
        );
        let computed = slab.ints("row_num_computed", num_rows);
        let max_seq_len = computed
            .iter()
            .zip(scheduled)
            .map(|(a, b)| a + b)
            .max()
            .unwrap();
        assert_eq!(slab.header("max_seq_len"), i64::from(max_seq_len));
        self.check_used_bytes(slab);
    }

    /// Everything a field's count declares valid lies before `used_bytes`.
    fn check_used_bytes(&self, slab: &Slab) {
        let used_bytes = slab.count("used_bytes");
        assert!(used_bytes <= self.layout.input_bytes);
        let starts = [
            "admitted_bias_start",
            "admitted_banned_start",
            "admitted_history_start",
        ];
        let num_admitted = slab.count("num_admitted");
        let num_starts = num_admitted + usize::from(num_admitted > 0);
        let counted = [
            ("token_ids", "num_tokens"),
            ("row_slot", "num_rows"),
            ("fork_num_blocks", "num_forks"),
            ("admitted_seed", "num_admitted"),
            ("delta_block", "num_block_deltas"),
            ("bias_value", "num_bias"),
            ("banned_token", "num_banned"),
            ("history_token", "num_history"),
            ("score_token", "num_scores"),
            ("pool_end", "num_pools"),
            ("pick_token_index", "num_picked"),
            ("pick_token", "num_picks"),
        ];
        let counted = counted.map(|(field, count)| (field, slab.count(count)));
        for (field, count) in counted
            .into_iter()
            .chain(starts.map(|field| (field, num_starts)))
        {
            let field = self
                .layout
                .fields
                .iter()
                .find(|known| known.name == field)
                .unwrap();
            assert!(count <= field.length);
            let end = field.offset + count * field.dtype.num_bytes();
            assert!(
                count == 0 || end <= used_bytes,
                "{} ends at {end}, after {used_bytes}",
                field.name
            );
        }
    }

    fn apply_freed_and_admitted(&mut self, slab: &Slab, oracle: &mut Oracle) {
        let admitted = slab.ints("admitted_slot", slab.count("num_admitted"));
        let freed = slab.ints("freed_slot", slab.count("num_freed"));
        for &slot in freed {
            assert!(
                !admitted.contains(&slot),
                "slot {slot} is freed and admitted"
            );
            self.slots[slot as usize] = Slot::default();
        }
        let distinct: HashSet<i32> = admitted.iter().copied().collect();
        assert_eq!(distinct.len(), admitted.len());
        for (entry, &slot) in admitted.iter().enumerate() {
            self.admit(slab, entry, slot as usize, oracle);
        }
    }

    fn admit(&mut self, slab: &Slab, entry: usize, slot: usize, oracle: &mut Oracle) {
        let list = |starts: &str| {
            let starts = slab.ints(starts, slab.count("num_admitted") + 1);
            starts[entry] as usize..starts[entry + 1] as usize
        };
        let bias = list("admitted_bias_start");
        let banned = list("admitted_banned_start");
        let history = list("admitted_history_start");
        let tokens = &slab.ints("bias_token", slab.count("num_bias"))[bias.clone()];
        let values = &slab.array::<f32>("bias_value", slab.count("num_bias"))[bias];
        let seed = slab.array::<i64>("admitted_seed", entry + 1)[entry];
        let state = &mut self.slots[slot];
        *state = Slot {
            owner: oracle.by_seed.get(&seed).copied(),
            seed,
            bias: bias_columns(tokens.iter().copied().zip(values.iter().copied())),
            banned: slab.ints("banned_token", slab.count("num_banned"))[banned].to_vec(),
            min_tokens: slab.ints("admitted_min_tokens", entry + 1)[entry],
            history: None,
            last_token: -1,
            ..Slot::default()
        };
        let penalty = slab.array::<f32>("admitted_repetition_penalty", entry + 1)[entry];
        if (penalty - 1.0).abs() > 0.0 {
            state.history =
                Some(slab.ints("history_token", slab.count("num_history"))[history].to_vec());
        }
        if let Some(id) = state.owner {
            let truth = oracle
                .truths
                .get_mut(&id)
                .expect("an ended sequence was admitted");
            truth.forget_uncommitted();
            *self.num_admissions.entry(id).or_default() += 1;
            check_columns(slab, entry, &truth.request);
            assert!(
                state
                    .history
                    .as_ref()
                    .is_none_or(|history| *history == truth.tokens),
                "wrong penalty history"
            );
        }
    }

    fn apply_forks(&mut self, slab: &Slab, oracle: &mut Oracle) {
        let count = slab.count("num_forks");
        let sources = slab.ints("fork_src", count);
        let destinations = slab.ints("fork_dst", count);
        let lengths = slab.ints("fork_num_blocks", count);
        for ((&source, &destination), &num_blocks) in sources.iter().zip(destinations).zip(lengths)
        {
            let source_state = &mut self.slots[source as usize];
            source_state.num_forks += 1;
            let index = source_state.num_forks;
            let table = source_state.table[..num_blocks as usize].to_vec();
            let history = source_state.history.clone();
            let (handle, first) = source_state.owner.expect("a fork of an unknown sequence");
            assert_eq!(first, 0);
            let state = &mut self.slots[destination as usize];
            assert!(
                state.owner.is_none() && state.table.is_empty(),
                "a fork into a slot in use"
            );
            if let Some(own) = &state.history {
                assert!(own.is_empty(), "a fork's history was sent twice");
            }
            state.owner = Some((handle, index));
            state.table = table;
            state.history = history;
            oracle.learn(state.seed, (handle, index));
        }
    }

    fn apply_deltas(&mut self, slab: &Slab) {
        let count = slab.count("num_block_deltas");
        let slots = slab.ints("delta_slot", count);
        let indices = slab.ints("delta_index", count);
        let blocks = slab.ints("delta_block", count);
        for ((&slot, &index), &block) in slots.iter().zip(indices).zip(blocks) {
            let table = &mut self.slots[slot as usize].table;
            if table.len() <= index as usize {
                table.resize(index as usize + 1, -1);
            }
            assert!((0..self.config.num_blocks as i32).contains(&block));
            table[index as usize] = block;
        }
    }

    fn copy_blocks(&mut self, slab: &Slab) {
        let count = slab.count("num_cow");
        let sources = slab.ints("cow_src", count);
        let destinations = slab.ints("cow_dst", count);
        let distinct: HashSet<i32> = destinations.iter().copied().collect();
        assert_eq!(distinct.len(), count, "a block is copied over twice");
        assert!(
            sources.iter().all(|source| !distinct.contains(source)),
            "a block is source and destination"
        );
        for (&source, &destination) in sources.iter().zip(destinations) {
            let start = source as usize * self.block_size;
            self.kv.copy_within(
                start..start + self.block_size,
                destination as usize * self.block_size,
            );
        }
    }

    fn resolve_rows(&self, slab: &Slab, oracle: &Oracle) -> Vec<Row> {
        let num_rows = slab.count("num_rows");
        let slots = slab.ints("row_slot", num_rows);
        let distinct: HashSet<i32> = slots.iter().copied().collect();
        assert_eq!(distinct.len(), num_rows, "a slot has two rows");
        let starts = slab.ints("query_start", num_rows + 1);
        let computed = slab.ints("row_num_computed", num_rows);
        let token_ids = slab.ints("token_ids", slab.count("num_tokens"));
        (0..num_rows)
            .map(|row| {
                let slot = slots[row] as usize;
                let state = &self.slots[slot];
                let tokens = &token_ids[starts[row] as usize..starts[row + 1] as usize];
                assert!(
                    tokens.len() == 1 || !tokens.contains(&-1),
                    "a long row has an unknown token"
                );
                let owner = state.owner.expect("a row of a slot without a sequence");
                assert!(
                    oracle.truths.contains_key(&owner),
                    "a row of a sequence that has ended"
                );
                Row {
                    slot,
                    start: computed[row] as usize,
                    tokens: tokens
                        .iter()
                        .map(|&token| if token == -1 { state.last_token } else { token })
                        .collect(),
                    last_token_index: starts[row + 1] - 1,
                    is_bad: false,
                }
            })
            .collect()
    }

    /// Where the KV of a slot's position lies.
    fn place(&self, slot: usize, position: usize) -> usize {
        let block = self.slots[slot]
            .table
            .get(position / self.block_size)
            .copied()
            .unwrap_or(-1);
        assert!(
            block >= 0,
            "slot {slot} has no block for position {position}"
        );
        block as usize * self.block_size + position % self.block_size
    }

    /// Writes the KV of all rows, then reads what each attends to. A row that reads garbage leaves garbage.
    fn forward(&mut self, rows: &mut [Row], oracle: &Oracle, fate: Fate) {
        let mut written = HashSet::new();
        for row in rows.iter_mut() {
            let truth = &oracle.truths[&self.slots[row.slot].owner.unwrap()];
            let end = row.start + row.tokens.len();
            row.is_bad = fate.fails || truth.tokens.get(row.start..end) != Some(&row.tokens[..]);
            assert!(
                !row.is_bad || fate.fails || fate.may_be_bad,
                "a row computes wrong tokens"
            );
            for position in row.start..end {
                let place = self.place(row.slot, position);
                assert!(written.insert(place), "two rows write to the same place");
                self.kv[place] = if row.is_bad {
                    GARBAGE
                } else {
                    truth.prefixes[position]
                };
            }
        }
        loop {
            let mut changed = false;
            for row in rows.iter_mut().filter(|row| !row.is_bad) {
                let truth = &oracle.truths[&self.slots[row.slot].owner.unwrap()];
                let end = row.start + row.tokens.len();
                let wrong =
                    (0..end).find(|&p| self.kv[self.place(row.slot, p)] != truth.prefixes[p]);
                let Some(position) = wrong else { continue };
                assert!(
                    fate.may_be_bad,
                    "slot {} attends to wrong KV at position {position}",
                    row.slot
                );
                row.is_bad = true;
                changed = true;
                for position in row.start..end {
                    let place = self.place(row.slot, position);
                    self.kv[place] = GARBAGE;
                }
            }
            if !changed {
                break;
            }
        }
    }

    fn write_prompt_results(&self, slab: &mut Slab, rows: &[Row], oracle: &Oracle) {
        prompt_results::write(slab, |index| {
            let mut rows = rows.iter();
            let row = rows.find(|row| index <= row.last_token_index && index >= row.first_index());
            let row = row.expect("a result of no row");
            let position = row.start + (index - row.first_index()) as usize;
            let truth = &oracle.truths[&self.slots[row.slot].owner.unwrap()];
            (!row.is_bad).then(|| truth.prefixes[position])
        });
    }

    /// Samples a step whose masks, if it has any, are there, and writes its results into the slab.
    pub(crate) fn sample_step(&mut self, slab: &mut Slab, oracle: &mut Oracle, logits: &Logits) {
        let Logits { rows, fate } = logits;
        let count = slab.count("num_samples");
        let slots = slab.ints("sample_slot", count).to_vec();
        let token_indices = slab.ints("sample_token_index", count).to_vec();
        let output_indices = slab.ints("sample_output_index", count).to_vec();
        let vocab_size = self.config.vocab_size;
        let mut tokens = Vec::new();
        let mut expected_flags = 0;
        let mut has_dead = false;
        for row in rows {
            let owner = self.slots[row.slot].owner.unwrap();
            match oracle.truths.get(&owner) {
                Some(truth) => expected_flags |= i64::from(truth.request.deterministic) << 5,
                None => has_dead = true,
            }
        }
        for position in 0..count {
            let slot = slots[position] as usize;
            let row = rows
                .iter()
                .find(|row| row.last_token_index == token_indices[position]);
            let row = row.expect("a sample in the middle of a row");
            let state = &mut self.slots[slot];
            let output_index = output_indices[position];
            let id = state.owner.unwrap();
            let Some(truth) = oracle.truths.get_mut(&id) else {
                assert!(slab.header("masks_wait") == 1); // it ended while the step waited
                assert_eq!(slab.mask(position), None);
                has_dead = true;
                state.last_token = 0;
                tokens.push(0);
                continue;
            };
            let binding = output_index < state.min_tokens;
            expected_flags |= flags_of(&truth.request) | if binding { 8 } else { 0 };
            if row.is_bad || fate.fails {
                state.last_token = (u64::from(output_index as u32) % u64::from(vocab_size)) as i32;
            } else {
                assert_eq!(
                    truth.tokens.len(),
                    truth.request.prompt.len() + output_index as usize
                );
                let last = row.start + row.tokens.len() - 1;
                assert_eq!(
                    last + 1,
                    truth.tokens.len(),
                    "sampled before all tokens are computed"
                );
                let history = state.history.as_ref();
                assert!(
                    history.is_none_or(|history| *history == truth.tokens),
                    "wrong penalty history"
                );
                let banned: &[i32] = if binding { &state.banned } else { &[] };
                let prefix = *truth.prefixes.last().unwrap();
                let mask = slab.mask(position);
                let may_come = |token: i32| {
                    let is_allowed = |mask: &[u32]| mask[token as usize / 32] >> (token % 32) & 1;
                    !banned.contains(&token) && mask.is_none_or(|mask| is_allowed(mask) == 1)
                };
                let token = sample(
                    prefix,
                    state.seed,
                    state.bias,
                    output_index as u32,
                    may_come,
                    vocab_size,
                );
                state.last_token = token;
                truth.push(token);
            }
            if let Some(history) = &mut state.history {
                history.push(state.last_token);
            }
            tokens.push(state.last_token);
        }
        assert!(has_dead || slab.header("flags") == expected_flags);
        write_outputs(slab, &tokens, vocab_size);
    }
}
