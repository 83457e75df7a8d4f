//! Changing the priority of a request that is live.

use super::request::NO_SEQUENCE;
use super::sequence::Place;
use super::state::{Running, Scheduler};
use crate::config::Policy;

impl Scheduler {
    /// Gives a request another priority from the next step on. False, and nothing is done, when it has ended, or where
    /// the policy has no priorities.
    pub(crate) fn set_priority(&mut self, handle: u64, priority: i64) -> bool {
        let Some(&request) = self.by_handle.get(&handle) else {
            return false;
        };
        if self.config.policy != Policy::Priority {
            return false;
        }
        let request = &mut self.requests[request as usize];
        request.spec.priority = priority;
        let members = request.members.clone();
        for id in members.into_iter().filter(|&id| id != NO_SEQUENCE) {
            self.set_sequence_priority(id, priority);
        }
        // The head of the queue may be another one now.
        self.starved_head = None;
        true
    }

    fn set_sequence_priority(&mut self, id: u32, priority: i64) {
        let sequence = &mut self.sequences[id as usize];
        let before = sequence.rank;
        sequence.rank.priority = priority;
        let rank = sequence.rank;
        match sequence.place {
            Place::Vacant | Place::Attached => {}
            Place::Queued => {
                self.queue.remove(id);
                self.queue.push(rank, id);
            }
            Place::Deferred => {
                // It may be too important now for the one that it waits for: its next turn decides.
                self.waiters.remove(id);
                sequence.place = Place::Queued;
                self.queue.push(rank, id);
            }
            Place::Running => {
                let listed = self
                    .running
                    .binary_search_by(|running| running.rank.cmp(&before));
                if let Ok(position) = listed {
                    self.running.remove(position);
                }
                let position = self.running.partition_point(|running| running.rank < rank);
                self.running
                    .insert(position, Running { rank, sequence: id });
                if priority > before.priority {
                    // Nobody waits for one that is less important.
                    self.wake(id, u32::MAX);
                }
            }
        }
    }
}
