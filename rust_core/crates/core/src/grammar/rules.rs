//! Everything that binds a sequence's next token, in one place: a grammar, allowed tokens, bad words, and the end of the
//! thinking, which is forced when its budget is used up or somebody asks for it.

use std::collections::VecDeque;
use std::fmt::{self, Debug, Formatter};
use std::sync::{Arc, Mutex, PoisonError};

use super::constraint::{Constraint, ConstraintSource};
use super::{clear_bit, clear_tail, has_bit, set_all, set_bit};
use crate::delta::Failure;
use crate::guard::caught;

/// A compiled grammar as a request brings it. Two are equal when they are the same object.
#[derive(Clone)]
pub struct SharedGrammar(pub Arc<dyn ConstraintSource>);

impl Debug for SharedGrammar {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("SharedGrammar")
    }
}

impl PartialEq for SharedGrammar {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// After so many tokens without the marker, the marker is forced.
#[derive(Debug)]
pub(crate) struct ThinkingLimit {
    /// Not empty.
    pub(crate) end: Vec<i32>,
    pub(crate) budget: u32,
}

/// What a request's sequences must obey.
#[derive(Debug, Default)]
pub(crate) struct RuleSpec {
    pub(crate) vocab_size: u32,
    pub(crate) grammar: Option<SharedGrammar>,
    /// The grammar holds once these were generated; empty: from the first token.
    pub(crate) grammar_after: Vec<i32>,
    /// What would end the sequence before its grammar holds, and so may not come until then.
    pub(crate) too_early: Vec<i32>,
    /// Bits of the tokens that may come at all; empty: every one.
    pub(crate) allowed: Vec<u32>,
    /// Of two tokens and more: shorter ones are among `allowed`.
    pub(crate) bad_words: Vec<Vec<i32>>,
    pub(crate) thinking: Option<ThinkingLimit>,
}

impl RuleSpec {
    /// Nothing is bound.
    pub(crate) fn none(vocab_size: u32) -> Arc<Self> {
        Arc::new(Self {
            vocab_size,
            ..Self::default()
        })
    }
}

/// What a sample's mask depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binding {
    /// Nothing: there is none.
    Free,
    /// On the request alone.
    Fixed,
    /// On the tokens before it.
    Depends,
}

enum Phase {
    /// There is no grammar.
    Without,
    /// It holds when `grammar_after` was generated.
    Awaited,
    /// It holds; `None` before the first mask. Never locked: what is `Send` alone becomes `Sync` so.
    Holds(Option<Mutex<Box<dyn Constraint>>>),
}

/// The rules of one sequence, as far as its committed tokens have led.
pub(crate) struct Rules {
    spec: Arc<RuleSpec>,
    grammar: Phase,
    /// Whether the thinking's tokens are counted.
    counts_thinking: bool,
    /// The only tokens that may come, from output `forced_from` on.
    forced: VecDeque<i32>,
    forced_from: u32,
    /// Why the sequence ends with its next token.
    problem: Option<Failure>,
}

impl Debug for Rules {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rules")
            .field("holds", &matches!(self.grammar, Phase::Holds(_)))
            .field("forced", &self.forced)
            .field("problem", &self.problem)
            .finish_non_exhaustive()
    }
}

impl Rules {
    /// Those of a sequence without a token.
    pub(crate) fn new(spec: Arc<RuleSpec>) -> Self {
        let grammar = match (&spec.grammar, spec.grammar_after.is_empty()) {
            (None, _) => Phase::Without,
            (Some(_), false) => Phase::Awaited,
            (Some(_), true) => Phase::Holds(None),
        };
        let mut rules = Self {
            grammar,
            counts_thinking: spec.thinking.is_some(),
            forced: VecDeque::new(),
            forced_from: 0,
            problem: None,
            spec,
        };
        rules.check_budget(&[]);
        rules
    }

    /// What the next token to be sampled is bound by, where `num_pending` more than these outputs are being sampled.
    pub(crate) fn binding(&self, outputs: &[i32], num_pending: u32) -> Binding {
        let spec = &self.spec;
        let next = outputs.len() as u32 + num_pending;
        let pending = num_pending as usize;
        let depends = self.problem.is_some()
            || match self.grammar {
                Phase::Without => false,
                Phase::Awaited => {
                    (1..=pending).any(|more| may_end_with(outputs, more, &spec.grammar_after))
                }
                Phase::Holds(_) => true,
            }
            || (!self.forced.is_empty() && next >= self.forced_from)
            || (self.counts_thinking && self.is_used_up(next))
            || spec
                .bad_words
                .iter()
                .any(|word| may_end_with(outputs, pending, &word[..word.len() - 1]));
        let is_fixed = !spec.allowed.is_empty() || !self.too_early().is_empty();
        match (depends, is_fixed) {
            (true, _) => Binding::Depends,
            (false, true) => Binding::Fixed,
            (false, false) => Binding::Free,
        }
    }

    /// The tokens that alone may not come next, as a grammar is to hold first: sequences with the same ones have the same
    /// mask. `None` where anything else binds. Outputs and binding as for `fill`.
    pub(crate) fn only_waits_with(&self, outputs: &[i32], binding: Binding) -> Option<&[i32]> {
        let spec = &self.spec;
        let depends = binding == Binding::Depends;
        let is_forced = depends && self.forced_at(outputs.len() as u32).is_some();
        let is_alone = self.problem.is_none()
            && !is_forced
            && spec.allowed.is_empty()
            && (spec.bad_words.is_empty() || !depends);
        let banned = self.too_early();
        (is_alone && !banned.is_empty()).then_some(banned)
    }

    /// Writes the mask of the token after these outputs; false when every token may come. `binding`: as it was when the
    /// sample was planned: with `Fixed` the outputs may lack some tokens. `banned`: ids that the sampler refuses too.
    ///
    /// What goes wrong ends the sequence with its next token.
    pub(crate) fn fill(
        &mut self,
        outputs: &[i32],
        binding: Binding,
        banned: &[i32],
        mask: &mut [u32],
    ) -> bool {
        let filled = caught(|| self.try_fill(outputs, binding, banned, mask));
        match filled.unwrap_or_else(|panic| Err(broken(&panic))) {
            Ok(binds) => binds,
            Err(problem) => {
                self.problem.get_or_insert(problem);
                false
            }
        }
    }

    fn try_fill(
        &mut self,
        outputs: &[i32],
        binding: Binding,
        banned: &[i32],
        mask: &mut [u32],
    ) -> Result<bool, Failure> {
        if self.problem.is_some() {
            return Ok(false);
        }
        mask.fill(0);
        let depends = binding == Binding::Depends;
        let forced = self.forced_at(outputs.len() as u32).filter(|_| depends);
        let binds = match forced {
            Some(token) => {
                set_bit(mask, token);
                true
            }
            None => self.allow(outputs, depends, mask)?,
        };
        if binds && !has_another(mask, banned) {
            return Err(Failure::of_request(if banned.is_empty() {
                "no token may come next: the request's constraints contradict each other"
            } else {
                "only the end may come next, and min_tokens asks for more tokens"
            }));
        }
        Ok(binds)
    }

    /// Sets the bits of the tokens that may come, where none is forced; false when every one may. `depends`: whether
    /// the outputs are complete, so that what depends on them is looked at.
    fn allow(&mut self, outputs: &[i32], depends: bool, mask: &mut [u32]) -> Result<bool, Failure> {
        let spec = Arc::clone(&self.spec);
        let mut binds = false;
        if let Some(constraint) = self.constraint().filter(|_| depends) {
            constraint.fill_mask(mask).map_err(Failure::of_request)?;
            clear_tail(mask, spec.vocab_size);
            binds = true;
        } else {
            set_all(mask, spec.vocab_size);
        }
        for (word, allowed) in mask.iter_mut().zip(&spec.allowed) {
            *word &= allowed;
            binds = true;
        }
        for &token in self.too_early() {
            clear_bit(mask, token);
            binds = true;
        }
        for bad in spec.bad_words.iter().filter(|_| depends) {
            if let Some((&last, before)) = bad.split_last()
                && outputs.ends_with(before)
            {
                clear_bit(mask, last);
                binds = true;
            }
        }
        Ok(binds)
    }

    /// The sequence has got its last output. Whether nothing may follow it, or why it must not be.
    ///
    /// `ends`: whether it ends the sequence by itself, as EOS does; a grammar is not asked then.
    pub(crate) fn advance(&mut self, outputs: &[i32], ends: bool) -> Result<bool, Failure> {
        let advanced = caught(|| self.try_advance(outputs, ends));
        advanced.unwrap_or_else(|panic| Err(broken(&panic)))
    }

    fn try_advance(&mut self, outputs: &[i32], ends: bool) -> Result<bool, Failure> {
        if let Some(problem) = self.problem.take() {
            return Err(problem);
        }
        if let Some(&token) = outputs
            .last()
            .filter(|&&token| self.is_too_early(token, outputs))
        {
            return Err(refused(token));
        }
        let Some((&token, before)) = outputs.split_last().filter(|_| !ends) else {
            return Ok(false);
        };
        let mut is_over = false;
        if let Some(forced) = self.forced_at(before.len() as u32) {
            if token != forced {
                return Err(refused(token));
            }
            self.forced.pop_front();
            if self.forced.is_empty() {
                self.end_thinking();
            }
        } else {
            let is_bad = |word: &Vec<i32>| outputs.ends_with(word);
            let is_allowed = self.spec.allowed.is_empty() || has_bit(&self.spec.allowed, token);
            if !is_allowed || self.spec.bad_words.iter().any(is_bad) {
                return Err(refused(token));
            }
            if let Some(constraint) = self.constraint() {
                constraint.advance(token as u32)?;
                is_over = constraint.is_over();
            }
            self.note_thinking(outputs);
        }
        Ok(is_over)
    }

    /// What may not come yet: the grammar is to hold first.
    fn too_early(&self) -> &[i32] {
        match self.grammar {
            Phase::Awaited => &self.spec.too_early,
            Phase::Without | Phase::Holds(_) => &[],
        }
    }

    /// Whether the last output, which nothing has forced, must not have come.
    fn is_too_early(&self, token: i32, outputs: &[i32]) -> bool {
        self.forced_at(outputs.len() as u32 - 1).is_none() && self.too_early().contains(&token)
    }

    /// The end of the thinking may have come, or be due.
    fn note_thinking(&mut self, outputs: &[i32]) {
        let spec = Arc::clone(&self.spec);
        let has_come = |marker: &[i32]| !marker.is_empty() && outputs.ends_with(marker);
        let is_end = spec
            .thinking
            .as_ref()
            .is_some_and(|limit| has_come(&limit.end));
        let is_begin = matches!(self.grammar, Phase::Awaited) && has_come(&spec.grammar_after);
        let was_asked = has_come(self.forced.make_contiguous());
        if is_end || is_begin || was_asked {
            self.forced.clear();
            self.counts_thinking &= !(is_end || was_asked);
            if is_begin {
                self.grammar = Phase::Holds(None);
            }
        }
        self.check_budget(outputs);
    }

    /// Forces what is missing of the marker where the budget is used up.
    fn check_budget(&mut self, outputs: &[i32]) {
        let next = outputs.len() as u32;
        if !self.counts_thinking || !self.is_used_up(next) || !self.forced.is_empty() {
            return;
        }
        if let Some(ThinkingLimit { end, .. }) = &self.spec.thinking {
            let num_there = (0..end.len())
                .rev()
                .find(|&len| outputs.ends_with(&end[..len]));
            self.forced.extend(&end[num_there.unwrap_or(0)..]);
            self.forced_from = next;
        }
    }

    /// All that was forced has come.
    fn end_thinking(&mut self) {
        self.counts_thinking = false;
        if matches!(self.grammar, Phase::Awaited) {
            self.grammar = Phase::Holds(None);
        }
    }

    /// From output `from` on these tokens come, unless the thinking has ended, or ends before.
    pub(crate) fn force(&mut self, tokens: &[i32], from: u32) {
        let has_ended = matches!(self.grammar, Phase::Holds(_))
            || (self.spec.thinking.is_some() && !self.counts_thinking);
        if !has_ended && self.forced.is_empty() {
            self.forced.extend(tokens);
            self.forced_from = from;
        }
    }

    fn is_used_up(&self, num_tokens: u32) -> bool {
        let limit = self.spec.thinking.as_ref();
        limit.is_some_and(|limit| num_tokens >= limit.budget)
    }

    fn forced_at(&self, output_index: u32) -> Option<i32> {
        let first = self.forced.front().copied();
        first.filter(|_| output_index >= self.forced_from)
    }

    /// The grammar's, where it holds.
    fn constraint(&mut self) -> Option<&mut Box<dyn Constraint>> {
        match (&mut self.grammar, &self.spec.grammar) {
            (Phase::Holds(constraint), Some(source)) => {
                let started = constraint.get_or_insert_with(|| Mutex::new(source.0.start()));
                Some(started.get_mut().unwrap_or_else(PoisonError::into_inner))
            }
            _ => None,
        }
    }
}

fn refused(token: i32) -> Failure {
    Failure::of_engine(format!(
        "the model returned token id {token}, which must not come here"
    ))
}

fn broken(panic: &str) -> Failure {
    Failure::of_engine(format!("the grammar broke ({panic})"))
}

/// Whether outputs that lack their last `num_unknown` tokens may end with the marker.
fn may_end_with(outputs: &[i32], num_unknown: usize, marker: &[i32]) -> bool {
    outputs.ends_with(&marker[..marker.len().saturating_sub(num_unknown)])
}

/// Whether a bit is set that is none of these tokens'. `banned`: each once.
fn has_another(mask: &[u32], banned: &[i32]) -> bool {
    let num_banned = banned.iter().filter(|&&token| has_bit(mask, token)).count() as u32;
    let mut num_set = 0;
    mask.iter().any(|word| {
        num_set += word.count_ones();
        num_set > num_banned
    })
}
