//! Stop strings as an Aho-Corasick automaton over the bytes of the text.
//!
//! The states are the prefixes of the stop strings in breadth-first order, so the children of a state are neighbours
//! and a state needs no table of its own: memory is linear in the length of the strings whatever a client sends.

use thiserror::Error;

/// A list of stop strings that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum StopSetError {
    /// An empty string would match everywhere.
    #[error("stop string {index} is empty")]
    Empty {
        /// Its index in the list.
        index: usize,
    },
    /// The automaton's states are counted in 32 bits.
    #[error("the stop strings hold more than {max} bytes", max = StopSet::MAX_BYTES)]
    TooLarge,
}

#[derive(Debug)]
struct State {
    /// Byte that leads here from the parent.
    label: u8,
    num_children: u16,
    first_child: u32,
    /// Longest proper suffix of this prefix that is a prefix too.
    fail: u32,
    /// Length of the longest suffix of the text that more text could still make a stop string.
    live_len: u32,
    /// 1 + index of the longest stop string that ends here; 0 for none.
    matched: u32,
}

impl State {
    fn new(label: u8, live_len: u32) -> Self {
        Self {
            label,
            num_children: 0,
            first_child: 0,
            fail: 0,
            live_len,
            matched: 0,
        }
    }
}

/// The stop strings of one request, compiled once and shared by its sequences.
#[derive(Debug)]
pub struct StopSet {
    strings: Vec<String>,
    states: Vec<State>,
    /// Next state from the root: 0 for bytes that start no stop string.
    root: Box<[u32; 256]>,
    pub(super) include_in_output: bool,
    pub(super) min_tokens: u32,
}

impl StopSet {
    /// Most bytes of all stop strings together.
    pub const MAX_BYTES: usize = 1 << 24;

    /// Compiles the strings; an empty list never matches.
    ///
    /// `include_in_output`: the text ends after the stop string instead of before it. `min_tokens`: a stop string
    /// counts only if it ends in text that token number `min_tokens + 1` or a later one completed.
    pub fn new(
        strings: Vec<String>,
        include_in_output: bool,
        min_tokens: u32,
    ) -> Result<Self, StopSetError> {
        if let Some(index) = strings.iter().position(String::is_empty) {
            return Err(StopSetError::Empty { index });
        }
        if strings.iter().map(String::len).sum::<usize>() > Self::MAX_BYTES {
            return Err(StopSetError::TooLarge);
        }
        let mut set = Self {
            states: build_trie(&strings),
            strings,
            root: Box::new([0; 256]),
            include_in_output,
            min_tokens,
        };
        let root = &set.states[0];
        for id in root.first_child..root.first_child + u32::from(root.num_children) {
            set.root[usize::from(set.states[id as usize].label)] = id;
        }
        set.link_failures();
        Ok(set)
    }

    /// The strings, in the order they were given.
    pub fn strings(&self) -> &[String] {
        &self.strings
    }

    /// State after one more byte.
    #[inline]
    pub(super) fn next(&self, mut state: u32, byte: u8) -> u32 {
        while state != 0 {
            match self.child(state, byte) {
                Some(child) => return child,
                None => state = self.states[state as usize].fail,
            }
        }
        self.root[usize::from(byte)]
    }

    /// Index of the longest stop string that ends in this state.
    #[inline]
    pub(super) fn matched(&self, state: u32) -> Option<u32> {
        self.states[state as usize].matched.checked_sub(1)
    }

    /// Bytes at the end of the text that must be held back in this state.
    #[inline]
    pub(super) fn live_len(&self, state: u32) -> usize {
        self.states[state as usize].live_len as usize
    }

    /// Whether text that leaves the root state at none of its bytes can pass unseen.
    #[inline]
    pub(super) fn starts_none(&self, text: &[u8]) -> bool {
        text.iter().all(|&byte| self.root[usize::from(byte)] == 0)
    }

    fn child(&self, state: u32, byte: u8) -> Option<u32> {
        let State {
            first_child,
            num_children,
            ..
        } = self.states[state as usize];
        let children =
            &self.states[first_child as usize..first_child as usize + usize::from(num_children)];
        let offset = match children {
            [only] if only.label == byte => 0,
            [] | [_] => return None,
            _ => children
                .binary_search_by_key(&byte, |child| child.label)
                .ok()?,
        };
        Some(first_child + offset as u32)
    }

    /// Fills `fail`, and passes on along it what a state inherits. A failure link leads to a shorter prefix, which
    /// comes earlier in breadth-first order.
    fn link_failures(&mut self) {
        for parent in 0..self.states.len() as u32 {
            let State {
                first_child,
                num_children,
                fail,
                ..
            } = self.states[parent as usize];
            for child in first_child..first_child + u32::from(num_children) {
                let label = self.states[child as usize].label;
                let target = if parent == 0 {
                    0
                } else {
                    self.next(fail, label)
                };
                let (matched, live_len) = {
                    let target = &self.states[target as usize];
                    (target.matched, target.live_len)
                };
                let state = &mut self.states[child as usize];
                state.fail = target;
                if state.matched == 0 {
                    state.matched = matched;
                }
                // A leaf is a whole stop string: only what its failure link stands for can still grow.
                if state.num_children == 0 {
                    state.live_len = live_len;
                }
            }
        }
    }
}

/// States of the trie in breadth-first order, without failure links. `live_len` is the depth for now.
fn build_trie(strings: &[String]) -> Vec<State> {
    let mut sorted: Vec<(u32, &[u8])> = (0..)
        .zip(strings)
        .map(|(index, s)| (index, s.as_bytes()))
        .collect();
    // Equal strings: the first given one is reported.
    sorted.sort_by(|a, b| a.1.cmp(b.1).then(a.0.cmp(&b.0)));
    let mut states = vec![State::new(0, 0)];
    // Per state, the part of `sorted` that shares its prefix.
    let mut spans: Vec<&[(u32, &[u8])]> = vec![&sorted];
    let mut parent = 0;
    while parent < states.len() {
        let depth = states[parent].live_len as usize;
        // Strings that end here sort before those that go on.
        let (ending, mut longer) =
            spans[parent].split_at(spans[parent].partition_point(|(_, s)| s.len() == depth));
        states[parent].matched = ending.first().map_or(0, |(index, _)| index + 1);
        states[parent].first_child = states.len() as u32;
        while let Some(&(_, string)) = longer.first() {
            let label = string[depth];
            let (same, rest) = longer.split_at(longer.partition_point(|(_, s)| s[depth] == label));
            states.push(State::new(label, depth as u32 + 1));
            spans.push(same);
            states[parent].num_children += 1;
            longer = rest;
        }
        parent += 1;
    }
    states
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(strings: &[&str]) -> StopSet {
        StopSet::new(strings.iter().map(ToString::to_string).collect(), false, 0).unwrap()
    }

    /// State, longest match and live length after `text`, without stopping at matches.
    fn walk(set: &StopSet, text: &str) -> (Option<u32>, usize) {
        let state = text.bytes().fold(0, |state, byte| set.next(state, byte));
        (set.matched(state), set.live_len(state))
    }

    #[test]
    fn live_length_is_the_longest_suffix_that_can_still_grow() {
        let set = set(&["abcd", "bce", "c"]);
        assert_eq!(walk(&set, "xxab"), (None, 2));
        assert_eq!(walk(&set, "xabc"), (Some(2), 3));
        assert_eq!(walk(&set, "xbc"), (Some(2), 2));
        assert_eq!(walk(&set, "xabcd"), (Some(0), 0));
        assert_eq!(walk(&set, "c"), (Some(2), 0));
    }

    #[test]
    fn a_whole_stop_string_leaves_only_what_can_start_another() {
        let set = set(&["aa"]);
        assert_eq!(walk(&set, "a"), (None, 1));
        assert_eq!(walk(&set, "aa"), (Some(0), 1));
        assert_eq!(walk(&set, "aaa"), (Some(0), 1));
    }

    #[test]
    fn the_longest_of_those_that_end_together_is_reported() {
        assert_eq!(walk(&set(&["c", "abc", "bc"]), "abc").0, Some(1));
        assert_eq!(walk(&set(&["c", "bc", "bc"]), "abc").0, Some(1));
    }

    #[test]
    fn bad_lists_are_refused() {
        let error = StopSet::new(vec!["a".into(), String::new()], false, 0).unwrap_err();
        assert_eq!(error, StopSetError::Empty { index: 1 });
        let error = StopSet::new(vec!["a".repeat(StopSet::MAX_BYTES + 1)], false, 0).unwrap_err();
        assert_eq!(error, StopSetError::TooLarge);
    }

    #[test]
    fn many_children_and_many_strings() {
        let strings: Vec<String> = ('\0'..='\u{7f}')
            .flat_map(|a| ('a'..='z').map(move |b| format!("{a}{b}!")))
            .collect();
        let set = StopSet::new(strings.clone(), false, 0).unwrap();
        for (index, string) in strings.iter().enumerate() {
            assert_eq!(walk(&set, string).0, Some(index as u32));
        }
    }
}
