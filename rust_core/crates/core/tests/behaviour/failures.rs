//! Steps that fail, results that cannot be, and the end of everything.

use oneloop_core::{Core, Error, FinishReason};

use crate::support::driver::Bench;
use crate::support::slab::Slab;
use crate::{config, request, tokens};

#[test]
fn a_failed_step_ends_its_requests_and_no_others() {
    let mut bench = Bench::new(config());
    let first = bench.submit(request(tokens(1, 30), 10));
    bench.schedule(true);
    let second = bench.submit(request(tokens(2, 30), 10));
    bench.schedule(false);
    assert_eq!(bench.commit(), [(first, 0)]);
    assert_eq!(
        bench.reported(first, 0).error.as_deref(),
        Some("the step failed")
    );
    bench.run_to_end(true);
    assert_eq!(bench.reported(second, 0).tokens.len(), 10);
}

#[test]
fn what_a_failed_step_was_to_compute_is_not_found() {
    let mut bench = Bench::new(config());
    bench.submit(request(tokens(1, 30), 10));
    bench.schedule(true);
    bench.commit();
    assert_eq!(bench.core.stats().num_cached_blocks, 0);
    let again = bench.submit(request(tokens(1, 30), 10));
    bench.run_to_end(true);
    assert_eq!(bench.reported(again, 0).num_cached_tokens, 0);
}

#[test]
fn who_has_shared_it_meanwhile_is_computed_anew() {
    for n in [1, 3] {
        let mut bench = Bench::new(config());
        bench.submit(request(tokens(1, 30), 10));
        bench.schedule(true);
        // Finds the blocks that the failing step was to fill, samples from them, and forks.
        let mut dependent = request(tokens(1, 30), 10);
        dependent.n = n;
        let dependent = bench.submit(dependent);
        bench.schedule(false);
        assert_eq!(bench.core.stats().num_prefix_hit_tokens, 28);
        bench.commit();
        assert_eq!(bench.core.stats().num_preemptions, n);
        assert!(
            bench.commit().is_empty(),
            "its sample was made from garbage"
        );
        bench.run_to_end(true);
        assert!((0..n as u32).all(|index| bench.reported(dependent, index).tokens.len() == 10));
    }
}

#[test]
fn chunks_of_one_prompt_fail_together() {
    let mut bench = Bench::new(config());
    let long = bench.submit(request(tokens(1, 200), 10));
    bench.schedule(true);
    bench.schedule(false);
    assert_eq!(bench.commit(), [(long, 0)]);
    assert!(bench.commit().is_empty());
    assert_eq!(bench.core.stats().num_cached_blocks, 0);
    bench.check_idle();
}

#[test]
fn all_siblings_of_a_failed_request_end() {
    let mut bench = Bench::new(config());
    let mut three = request(tokens(1, 200), 10);
    three.n = 3;
    let handle = bench.submit(three);
    bench.schedule(true);
    assert_eq!(bench.commit(), [(handle, 0), (handle, 1), (handle, 2)]);
    bench.check_idle();
}

#[test]
fn a_token_outside_the_vocabulary_ends_its_sequence_only() {
    for (bad, told) in [
        (-1, "NaN or +infinity"),
        (i32::MIN, "-2147483648"),
        (52, "52"),
        (i32::MAX, "2147483647"),
    ] {
        let mut core = Core::new(config(), None).unwrap();
        let good = core.submit(request(tokens(1, 10), 2)).unwrap();
        let other = core.submit(request(tokens(2, 10), 2)).unwrap();
        let mut slab = Slab::new(core.layout());
        let step_id = core.schedule(slab.bytes_mut()).unwrap().unwrap();
        slab.array_mut::<i32>("output_token")[..2].copy_from_slice(&[3, bad]);
        let deltas = core.commit(step_id, slab.bytes()).unwrap();
        let [fine, broken] = deltas.entries() else {
            panic!("two samples")
        };
        assert_eq!((fine.request, fine.finish_reason), (good, None));
        assert_eq!(
            (broken.request, broken.finish_reason),
            (other, Some(FinishReason::Error))
        );
        assert!(broken.error.as_ref().unwrap().message.contains(told));
        core.audit().unwrap();
    }
}

#[test]
fn steps_are_committed_in_order_and_slabs_are_checked() {
    let mut core = Core::new(config(), None).unwrap();
    core.submit(request(tokens(1, 10), 5)).unwrap();
    let mut slab = Slab::new(core.layout());
    let num_bytes = core.layout().num_bytes;
    let is_slab_error = |error: Error| matches!(error, Error::Slab(_));
    assert!(is_slab_error(
        core.schedule(&mut slab.bytes_mut()[..num_bytes - 64])
            .unwrap_err()
    ));
    let mut unaligned = vec![0; num_bytes + 65];
    let start = unaligned.as_ptr().align_offset(64) + 1;
    assert!(is_slab_error(
        core.schedule(&mut unaligned[start..start + num_bytes])
            .unwrap_err()
    ));
    let first = core.schedule(slab.bytes_mut()).unwrap().unwrap();
    let second = core.schedule(slab.bytes_mut()).unwrap().unwrap();
    assert_eq!(
        core.schedule(slab.bytes_mut()).unwrap(),
        None,
        "two steps are in flight"
    );
    slab.array_mut::<i32>("output_token").fill(1);
    assert!(is_slab_error(
        core.commit(second, slab.bytes()).unwrap_err()
    ));
    assert!(is_slab_error(
        core.commit(first, &slab.bytes()[64..]).unwrap_err()
    ));
    assert_eq!(core.commit(first, slab.bytes()).unwrap().len(), 1);
    assert!(is_slab_error(core.commit(first, slab.bytes()).unwrap_err()));
    assert!(is_slab_error(core.fail(first, "x").unwrap_err()));
    assert_eq!(core.commit(second, slab.bytes()).unwrap().len(), 1);
    assert!(is_slab_error(
        core.commit(second, slab.bytes()).unwrap_err()
    ));
    core.audit().unwrap();
}

#[test]
fn poison_ends_every_request() {
    let mut core = Core::new(config(), None).unwrap();
    let mut two = request(tokens(1, 10), 5);
    two.n = 2;
    let running = core.submit(two).unwrap();
    let mut slab = Slab::new(core.layout());
    let step_id = core.schedule(slab.bytes_mut()).unwrap().unwrap();
    let posted = core.submit(request(tokens(2, 10), 5)).unwrap();
    let deltas = core.poison("index out of bounds");
    let ended: Vec<_> = deltas
        .entries()
        .iter()
        .map(|delta| (delta.request, delta.index))
        .collect();
    assert_eq!(ended, [(running, 0), (running, 1), (posted, 0)]);
    assert!(
        deltas
            .entries()
            .iter()
            .all(|delta| delta.finish_reason == Some(FinishReason::Error))
    );
    let is_poisoned =
        |error| matches!(error, Error::Poisoned(reason) if reason == "index out of bounds");
    assert!(is_poisoned(
        core.submit(request(tokens(1, 10), 5)).unwrap_err()
    ));
    assert!(is_poisoned(core.schedule(slab.bytes_mut()).unwrap_err()));
    assert!(is_poisoned(core.commit(step_id, slab.bytes()).unwrap_err()));
    assert!(is_poisoned(core.drain().unwrap_err()));
    assert!(!core.abort(running));
    assert!(!core.has_work());
    core.audit().unwrap();
}
