//! Recorded runs, replayed as they were and after something was changed in them.

mod run;

use std::io::Cursor;

use super::bytes::Input;
use super::decode::EventReader;
use super::encode::EventWriter;
use super::frame::{append_frame, opening};
use super::queue::Pending;
use super::*;
use crate::batch::SlabLayout;
use crate::engine::Core;
use crate::request::SubmitRequest;
use crate::sched::mix;

use self::run::{config, recorded_run};

fn written(events: &[Event]) -> Vec<u8> {
    let (mut writer, mut payload) = (EventWriter::new(&config()), Vec::new());
    for event in events {
        writer.write(&mut payload, event);
    }
    let mut bytes = opening(&config());
    append_frame(&mut bytes, &payload);
    bytes
}

/// Replays to the end.
fn replayed(bytes: &[u8]) -> Result<ReplaySummary, TraceError> {
    let mut replay = Replay::open(Cursor::new(bytes))?;
    while replay.advance()?.is_some() {}
    Ok(replay.summary().clone())
}

fn difference(events: &[Event]) -> Option<Difference> {
    replayed(&written(events)).unwrap().difference
}

/// The last event of the first half that fits.
fn find(events: &[Event], is_meant: impl Fn(&Event) -> bool) -> usize {
    let half = events.len() / 2;
    events[..half].iter().rposition(is_meant).unwrap()
}

#[test]
fn events_come_back_from_their_bytes() {
    let events = recorded_run(1);
    let bytes = written(&events);
    let mut input = Input::new(&bytes[opening(&config()).len() + 8..]);
    let mut reader = EventReader::new(&config(), &SlabLayout::new(&config()));
    for event in &events {
        assert_eq!(&reader.read(&mut input).unwrap(), event);
    }
    assert_eq!(input.len(), 0);
}

#[test]
fn a_run_is_replayed_exactly() {
    for seed in 1..20 {
        let events = recorded_run(seed);
        let count =
            |is_meant: fn(&Event) -> bool| events.iter().filter(|e| is_meant(e)).count() as u64;
        let summary = replayed(&written(&events)).unwrap();
        assert_eq!(summary.difference, None);
        assert_eq!(summary.num_events, events.len() as u64);
        assert_eq!(
            summary.num_steps,
            count(|e| matches!(e, Event::Scheduled(_)))
        );
        assert_eq!(
            summary.num_requests,
            count(|e| matches!(e, Event::Ended(_)))
        );
        assert!(summary.num_preemptions > 2);
    }
}

#[test]
fn every_changed_decision_is_found() {
    let events = recorded_run(2);
    for column in columns::Column::ALL {
        let at = |event: &Event| matches!(event, Event::Scheduled(step) if !step.column(*column).is_empty());
        let Some(index) = events.iter().rposition(at) else {
            panic!("no step has {}", column.name());
        };
        let mut changed = events.clone();
        let Event::Scheduled(step) = &mut changed[index] else {
            unreachable!()
        };
        let step_id = step.step_id();
        let last = step.columns[*column as usize].last_mut().unwrap();
        *last += 1;
        let (expected, got) = (last.to_string(), (*last - 1).to_string());
        let found = difference(&changed).unwrap();
        assert_eq!(
            (found.step_id, found.expected, found.got),
            (step_id, expected, got)
        );
        assert!(found.field.starts_with(column.name()), "{}", found.field);
    }
}

#[test]
fn every_changed_input_is_found() {
    let events = recorded_run(3);
    let with = |index: usize, event: Option<Event>| {
        let mut changed = events.clone();
        changed.splice(index..=index, event);
        difference(&changed)
    };
    let commit = find(
        &events,
        |e| matches!(e, Event::Committed { outcomes, .. } if !outcomes.is_empty()),
    );
    let Event::Committed {
        step_id,
        outcomes,
        chosen,
    } = events[commit].clone()
    else {
        unreachable!()
    };
    let mut stopped = outcomes.clone();
    stopped[0] = if stopped[0] == Outcome::Stopped {
        Outcome::Token(7)
    } else {
        Outcome::Stopped
    };
    assert!(
        with(
            commit,
            Some(Event::Committed {
                step_id,
                outcomes: stopped,
                chosen
            })
        )
        .is_some()
    );
    assert!(with(commit, None).is_some());
    assert!(with(commit, Some(Event::Failed { step_id })).is_some());
    let abort = find(&events, |e| matches!(e, Event::Aborted(_)));
    assert!(with(abort, None).is_some());
    let is_prioritized = |e: &Event| matches!(e, Event::Prioritized { .. });
    let prioritized = find(&events, is_prioritized);
    let unknown = Event::Prioritized {
        request: 1_000_000,
        priority: 1,
    };
    assert!(with(prioritized, Some(unknown)).is_some());
    let is_served = |request: u64| !events.contains(&Event::Aborted(request));
    let submission = find(
        &events,
        |e| matches!(e, Event::Submitted(s) if is_served(s.request)),
    );
    let Event::Submitted(mut changed) = events[submission].clone() else {
        unreachable!()
    };
    changed.prompt.push(1);
    assert!(with(submission, Some(Event::Submitted(changed))).is_some());
    let ended = find(&events, |e| matches!(e, Event::Ended(_)));
    let Event::Ended(request) = events[ended] else {
        unreachable!()
    };
    let found = with(ended, Some(Event::Ended(request + 1))).unwrap();
    assert_eq!(
        (found.expected, found.got),
        ((request + 1).to_string(), request.to_string())
    );
    let idle = find(&events, |e| matches!(e, Event::Scheduled(_)));
    assert_eq!(
        with(idle, Some(Event::Idle)).unwrap().expected,
        "nothing to run"
    );
    assert!(with(submission, Some(Event::CacheReset(true))).is_some());
}

#[test]
fn every_changed_choice_of_beams_is_found() {
    let events = recorded_run(3);
    let goes_on = find(
        &events,
        |e| matches!(e, Event::Committed { chosen, .. } if !chosen.is_empty()),
    );
    let Event::Committed {
        step_id,
        outcomes,
        chosen,
    } = events[goes_on].clone()
    else {
        unreachable!()
    };
    let committed = |outcomes, chosen| {
        let mut changed = events.clone();
        changed[goes_on] = Event::Committed {
            step_id,
            outcomes,
            chosen,
        };
        difference(&changed)
    };
    let mut other = chosen.clone();
    other[0].heirs[0].1 += 1;
    assert_eq!(committed(outcomes.clone(), other).unwrap().field, "beams");
    assert!(committed(outcomes.clone(), Vec::new()).is_some());
    let mut others = outcomes;
    for outcome in &mut others {
        if let Outcome::Candidates(candidates) = outcome {
            let tokens = candidates.iter_mut().flat_map(|one| &mut one.token);
            tokens.for_each(|token| *token += 1);
        }
    }
    assert_eq!(committed(others, chosen).unwrap().field, "beams");
}

/// Encoded as the writer's thread does it, in batches.
fn encoded(events: &[Event]) -> Vec<u8> {
    let mut encoder = TraceEncoder::new(&config());
    let mut bytes = encoder.opening();
    for part in events.chunks(37) {
        bytes.extend(encoder.encode(Batch {
            events: part.to_vec(),
            end: None,
        }));
    }
    bytes.extend(encoder.encode(Batch {
        events: Vec::new(),
        end: Some(TraceEnd::Closed),
    }));
    assert_eq!(encoder.num_live(), 0, "the veil forgets what has ended");
    bytes
}

#[test]
fn veiled_runs_are_replayed_exactly_and_hold_no_token() {
    let (mut num_tokens, mut num_equal) = (0, 0);
    for seed in 1..20 {
        let events = recorded_run(seed);
        let bytes = encoded(&events);
        let summary = replayed(&bytes).unwrap();
        assert_eq!(
            (&summary.difference, summary.end),
            (&None, Some(TraceEnd::Closed))
        );
        let mut replay = Replay::open(Cursor::new(&bytes)).unwrap();
        let mut veiled = Vec::new();
        while let Some(event) = replay.advance().unwrap() {
            veiled.push(event);
        }
        let mut compare = |ours: i32, theirs: i32| {
            num_tokens += 1;
            num_equal += usize::from(ours == theirs);
        };
        for pair in events.iter().zip(&veiled) {
            match pair {
                (Event::Submitted(a), Event::Submitted(b)) => {
                    a.prompt
                        .iter()
                        .zip(&b.prompt)
                        .for_each(|(a, b)| compare(*a, *b));
                }
                (
                    Event::Committed {
                        outcomes: a,
                        chosen: c,
                        ..
                    },
                    Event::Committed {
                        outcomes: b,
                        chosen: d,
                        ..
                    },
                ) => {
                    for pair in a.iter().zip(b) {
                        match pair {
                            (Outcome::Token(a), Outcome::Token(b)) => compare(*a, *b),
                            (Outcome::Candidates(a), Outcome::Candidates(b)) => {
                                for (a, b) in a.iter().zip(b) {
                                    assert_eq!(a.logprob, b.logprob);
                                    assert_eq!(a.token.is_some(), b.token.is_some());
                                    let (a, b) = (a.token.unwrap_or(0), b.token.unwrap_or(1));
                                    compare(a, b);
                                }
                            }
                            (a, b) => assert_eq!(a, b),
                        }
                    }
                    for (c, d) in c.iter().zip(d) {
                        for (ours, theirs) in c.heirs.iter().zip(&d.heirs) {
                            assert_eq!(ours.0, theirs.0);
                            compare(ours.1, theirs.1);
                        }
                    }
                }
                (a, b) => assert_eq!(a, b, "all but tokens is as it was"),
            }
        }
    }
    // By chance one in as many as the vocabulary has; all runs together, as one alone may draw more than that.
    assert!(
        num_tokens > 19_000 && num_equal < num_tokens / 50,
        "{num_equal} of {num_tokens}"
    );
}

#[test]
fn two_traces_of_one_run_have_different_tokens() {
    let events = recorded_run(1);
    assert_ne!(encoded(&events), encoded(&events));
}

#[test]
fn a_file_that_is_cut_off_says_where() {
    let bytes = encoded(&recorded_run(4));
    let head = opening(&config()).len();
    assert_eq!(replayed(b""), Err(TraceError::NoTrace));
    assert_eq!(replayed(b"something else"), Err(TraceError::NoTrace));
    for len in 8..head {
        assert!(
            matches!(replayed(&bytes[..len]), Err(TraceError::CutOff { .. })),
            "{len}"
        );
    }
    let mut num_whole = 0;
    let ends = (head..bytes.len()).step_by(41);
    let mut borders = Vec::new();
    let mut border = head;
    while border < bytes.len() {
        borders.push(border);
        let len: [u8; 4] = bytes[border..border + 4].try_into().unwrap();
        border += 8 + u32::from_le_bytes(len) as usize;
    }
    for len in ends.chain(borders) {
        match replayed(&bytes[..len]) {
            Ok(summary) => {
                assert_eq!((summary.difference, summary.end), (None, None));
                num_whole += 1;
            }
            Err(error) => {
                assert!(matches!(error, TraceError::CutOff { offset } if offset < len as u64));
            }
        }
    }
    assert!(num_whole > 3, "ends between frames are ends without a mark");
}

#[test]
fn another_version_is_refused() {
    let mut bytes = encoded(&[]);
    bytes[8] = 77;
    assert_eq!(
        replayed(&bytes),
        Err(TraceError::Version {
            found: 77,
            known: 5
        })
    );
}

#[test]
fn a_changed_byte_is_found() {
    let bytes = encoded(&recorded_run(5));
    for index in (0..bytes.len()).step_by(13) {
        let mut changed = bytes.clone();
        changed[index] ^= 1 << (index % 8);
        assert!(
            replayed(&changed).is_err(),
            "byte {index} of {}",
            bytes.len()
        );
    }
}

/// What passes the checksum is still believed in nothing: an error or a difference, never a panic or a huge allocation.
#[test]
fn damaged_payloads_do_no_harm() {
    let events = recorded_run(6);
    let (mut writer, mut payload) = (EventWriter::new(&config()), Vec::new());
    for event in &events[..events.len().min(200)] {
        writer.write(&mut payload, event);
    }
    let mut noise = 1;
    let (mut num_errors, mut num_differences) = (0, 0);
    for _ in 0..600 {
        let mut changed = payload.clone();
        for _ in 0..3 {
            noise = mix(noise);
            let index = noise as usize % changed.len();
            changed[index] = (noise >> 40) as u8;
        }
        let mut bytes = opening(&config());
        append_frame(&mut bytes, &changed);
        match replayed(&bytes) {
            Ok(summary) => num_differences += usize::from(summary.difference.is_some()),
            Err(_) => num_errors += 1,
        }
    }
    assert!(
        num_errors > 60 && num_differences > 60,
        "{num_errors} {num_differences}"
    );
}

#[test]
fn sizes_that_no_core_has_are_refused() {
    let mut huge = config();
    (huge.num_blocks, huge.block_size) = (1 << 28, 1024);
    let error = replayed(&opening(&huge)).unwrap_err();
    assert!(matches!(error, TraceError::Damaged { problem, .. } if problem.contains("exceeds")));
    let mut none = config();
    none.num_blocks = 0;
    assert!(matches!(
        replayed(&opening(&none)),
        Err(TraceError::Damaged { .. })
    ));
}

#[test]
fn a_writer_that_does_not_keep_up_ends_the_trace_and_nothing_else() {
    let queue = TraceQueue::with_room(1000);
    let offer = |events: usize| {
        let mut pending = Pending::default();
        (0..events).for_each(|_| pending.push(Event::Idle));
        queue.offer(&mut pending)
    };
    assert!(offer(3));
    assert!(!offer(100));
    assert!(!offer(1));
    let batch = queue.take();
    assert_eq!((batch.events.len(), batch.end), (3, Some(TraceEnd::Behind)));
}

#[test]
fn a_writer_that_gives_up_ends_the_recording() {
    let mut core = Core::new(config(), None).unwrap();
    let queue = core.record_trace().unwrap();
    queue.refuse();
    core.submit(SubmitRequest::new(vec![1, 2])).unwrap();
    core.drain().unwrap();
    core.close_trace();
    let batch = queue.take();
    assert_eq!(
        (batch.events.len(), batch.end),
        (0, Some(TraceEnd::Refused))
    );
    assert!(core.has_work());
}

#[test]
fn a_trace_begins_with_its_core() {
    let mut core = Core::new(config(), None).unwrap();
    core.submit(SubmitRequest::new(vec![1, 2])).unwrap();
    assert!(core.record_trace().is_err());
    let mut core = Core::new(config(), None).unwrap();
    core.record_trace().unwrap();
    assert!(core.record_trace().is_err());
}

#[test]
fn a_core_that_is_dropped_ends_its_trace() {
    let mut core = Core::new(config(), None).unwrap();
    let queue = core.record_trace().unwrap();
    drop(core);
    assert_eq!(queue.take().end, Some(TraceEnd::Closed));
}

#[test]
fn a_panic_is_the_last_that_is_replayed() {
    let mut core = Core::new(config(), None).unwrap();
    let queue = core.record_trace().unwrap();
    core.submit(SubmitRequest::new(vec![1, 2])).unwrap();
    core.drain().unwrap();
    let outcome: Result<(), _> = core.guarded(|_| panic!("broken"));
    assert!(outcome.is_err());
    core.close_trace();
    let mut encoder = TraceEncoder::new(&config());
    let mut bytes = encoder.opening();
    bytes.extend(encoder.encode(queue.take()));
    let summary = replayed(&bytes).unwrap();
    assert_eq!(summary.poisoned_during, Some("drain"));
    assert_eq!(
        (summary.difference, summary.end),
        (None, Some(TraceEnd::Closed))
    );
}

#[test]
fn a_panic_in_schedule_must_happen_again() {
    let events = [
        Event::Poisoned { during: "schedule" },
        Event::End(TraceEnd::Closed),
    ];
    let found = difference(&events).unwrap();
    assert_eq!(
        (found.field.as_str(), found.got.as_str()),
        ("panic", "none")
    );
}

#[test]
fn lines_for_a_person() {
    let lines: Vec<String> = recorded_run(7).iter().map(ToString::to_string).collect();
    let has = |text: &str| lines.iter().any(|line| line.contains(text));
    for text in [
        "submit 1: ",
        "n = 2",
        "abort ",
        "step 1: ",
        "; admits 1.0 to slot 0",
        "; computes ",
        "preempted",
        "forks",
        "commit 1: ",
        "stopped",
        "dropped",
        " failed",
        "request 1 ended",
        "nothing to run",
    ] {
        assert!(has(text), "{text}");
    }
}
