//! How the tokens of a step are shared.
//!
//! 1. Every running sequence that owes tokens gets one: no stream stalls behind a prefill.
//! 2. Half of the rest goes to those that waiting sequences wait for (`front.rs`), in order of importance: each of
//!    them counts for several. Under the priority policy only within the most important priority that owes tokens.
//! 3. Half of the rest goes to those that owe more in order of importance: the oldest prefill always gets on.
//! 4. The other half goes to those that owe least first (under the priority policy, within the more important priority
//!    first): a short prompt never waits for a long one to end. New sequences take part, and go before those that run
//!    and cannot be served in full.
//! 5. What is left over goes on in the same order.
//!
//! So the first waiting sequence is admitted with every step (if there are slots and blocks) unless shorter ones that
//! run use up the half, and each waiting long prompt delays what waits behind it by one step.

use super::sequence::Sequence;
use super::state::PlannedRow;

/// A row that could use more tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    /// Index into the plan.
    pub(super) row: u32,
    pub(super) priority: i64,
    pub(super) num_wanted: u32,
    /// Whether waiting sequences wait for what it computes.
    pub(super) is_awaited: bool,
}

/// What is left of the step's tokens, and who wants them.
#[derive(Debug)]
pub(super) struct TokenBudget {
    num_left: u32,
    /// Places in the slab's list of scores that nobody has a claim to.
    num_scores_left: u32,
    /// In order of importance, later in order of service.
    wanting: Vec<Candidate>,
    num_served: usize,
}

impl TokenBudget {
    /// `wanting`: an empty buffer.
    pub(super) fn new(num_tokens: u32, num_scores: u32, wanting: Vec<Candidate>) -> Self {
        Self {
            num_left: num_tokens,
            num_scores_left: num_scores,
            wanting,
            num_served: 0,
        }
    }

    pub(super) fn num_left(&self) -> u32 {
        self.num_left
    }

    /// Leaves at most so many.
    pub(super) fn limit(&mut self, num_tokens: u32) {
        self.num_left = self.num_left.min(num_tokens);
    }

    pub(super) fn into_buffer(mut self) -> Vec<Candidate> {
        self.wanting.clear();
        self.wanting
    }

    /// Takes tokens for a row; at most what is left.
    pub(super) fn take(&mut self, num_wanted: u32) -> u32 {
        let num_taken = num_wanted.min(self.num_left);
        self.num_left -= num_taken;
        num_taken
    }

    /// Tokens that the sequence may get at most, so that the slab has room for the scores of its prompt.
    pub(super) fn limit_of(&self, sequence: &Sequence) -> u32 {
        if sequence.is_scored() {
            self.num_scores_left
        } else {
            u32::MAX
        }
    }

    /// Keeps places for the scores of so many of the sequence's tokens, if they are scored.
    pub(super) fn reserve_scores(&mut self, sequence: &Sequence, num_tokens: u32) {
        if sequence.is_scored() {
            self.num_scores_left -= num_tokens;
        }
    }

    /// Takes tokens for a row that was not announced, and places for its scores.
    pub(super) fn take_scored(&mut self, sequence: &Sequence, num_wanted: u32) -> u32 {
        let num_taken = self.take(num_wanted.min(self.limit_of(sequence)));
        self.reserve_scores(sequence, num_taken);
        num_taken
    }

    /// Announces a row that has its first token and wants more. Most important first.
    pub(super) fn want(&mut self, candidate: Candidate) {
        self.wanting.push(candidate);
    }

    /// Rules 2 and 3; then puts those that still want tokens in the order of rule 4.
    pub(super) fn serve_important(&mut self, plan: &mut [PlannedRow]) {
        let Some(&Candidate { priority, .. }) = self.wanting.first() else {
            return;
        };
        self.give_half(plan, |candidate| {
            candidate.is_awaited && candidate.priority == priority
        });
        self.give_half(plan, |_| true);
        self.wanting.retain(|candidate| candidate.num_wanted > 0);
        self.wanting.sort_unstable_by_key(|candidate| {
            (candidate.priority, candidate.num_wanted, candidate.row)
        });
    }

    /// Gives half of what is left to some rows, in order of importance.
    fn give_half(&mut self, plan: &mut [PlannedRow], is_meant: impl Fn(&Candidate) -> bool) {
        let mut num_to_give = self.num_left / 2;
        for candidate in self
            .wanting
            .iter_mut()
            .filter(|candidate| is_meant(candidate))
        {
            let num_given = candidate.num_wanted.min(num_to_give);
            num_to_give -= num_given;
            self.num_left -= num_given;
            candidate.num_wanted -= num_given;
            plan[candidate.row as usize].num_tokens += num_given;
        }
    }

    /// Rule 4 for the running rows that come before a new one of this priority that owes `num_wanted`.
    pub(super) fn serve_before(&mut self, plan: &mut [PlannedRow], priority: i64, num_wanted: u32) {
        while let Some(&candidate) = self.wanting.get(self.num_served) {
            let comes_first = candidate.priority < priority
                || (candidate.priority, candidate.num_wanted)
                    <= (priority, num_wanted.min(self.num_left));
            if !comes_first || self.num_left == 0 {
                break;
            }
            self.serve_next(plan);
        }
    }

    /// Rule 5.
    pub(super) fn serve_rest(&mut self, plan: &mut [PlannedRow]) {
        while self.num_left > 0 && self.num_served < self.wanting.len() {
            self.serve_next(plan);
        }
    }

    fn serve_next(&mut self, plan: &mut [PlannedRow]) {
        let candidate = self.wanting[self.num_served];
        self.num_served += 1;
        plan[candidate.row as usize].num_tokens += self.take(candidate.num_wanted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shares 100 tokens among running rows that want these numbers; a new row that wants `new` comes along.
    fn share(wanted: &[u32], new: Option<u32>) -> (Vec<u32>, u32) {
        share_awaited(wanted, None, new)
    }

    /// The same where somebody waits for what one of the rows computes.
    fn share_awaited(wanted: &[u32], awaited: Option<usize>, new: Option<u32>) -> (Vec<u32>, u32) {
        let mut plan = vec![
            PlannedRow {
                sequence: 0,
                num_tokens: 0
            };
            wanted.len()
        ];
        let mut budget = TokenBudget::new(100, 100, Vec::new());
        for (row, &num_wanted) in wanted.iter().enumerate() {
            budget.want(Candidate {
                row: row as u32,
                priority: 0,
                num_wanted,
                is_awaited: Some(row) == awaited,
            });
        }
        budget.serve_important(&mut plan);
        let mut num_new = 0;
        if let Some(num_wanted) = new {
            budget.serve_before(&mut plan, 0, num_wanted);
            num_new = budget.take(num_wanted);
        }
        budget.serve_rest(&mut plan);
        (plan.iter().map(|row| row.num_tokens).collect(), num_new)
    }

    #[test]
    fn a_lone_prefill_gets_everything() {
        assert_eq!(share(&[500], None), (vec![100], 0));
    }

    #[test]
    fn half_goes_by_importance_and_half_to_the_shortest() {
        assert_eq!(share(&[500, 400, 300], None), (vec![50, 0, 50], 0));
        assert_eq!(share(&[20, 400, 300], None), (vec![20, 30, 50], 0));
    }

    #[test]
    fn a_short_newcomer_goes_before_long_prefills() {
        assert_eq!(share(&[500, 400], Some(30)), (vec![50, 20], 30));
        assert_eq!(share(&[500, 10, 400], Some(30)), (vec![50, 10, 10], 30));
    }

    #[test]
    fn a_long_newcomer_gets_what_shorter_ones_leave() {
        assert_eq!(share(&[500, 20], Some(900)), (vec![50, 20], 30));
        assert_eq!(share(&[500, 50], Some(900)), (vec![50, 50], 0));
        assert_eq!(share(&[500, 60], Some(900)), (vec![50, 0], 50));
        assert_eq!(share(&[], Some(900)), (vec![], 100));
    }

    #[test]
    fn half_goes_to_who_is_waited_for_and_half_of_the_rest_by_importance() {
        assert_eq!(share_awaited(&[500, 400], Some(1), None), (vec![25, 75], 0));
        assert_eq!(
            share_awaited(&[500, 400, 300], Some(1), Some(900)),
            (vec![25, 50, 0], 25)
        );
        assert_eq!(
            share_awaited(&[500, 400], Some(0), Some(900)),
            (vec![75, 0], 25)
        );
        assert_eq!(
            share_awaited(&[500, 30], Some(1), Some(900)),
            (vec![35, 30], 35)
        );
    }
}
