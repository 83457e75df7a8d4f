//! Random grammars: none panics, none hangs, and what is kept never leads astray.

use std::time::{Duration, Instant};

use oneloop_core::grammar::{Constraint, GrammarMatcher, GrammarSpec};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::support::{END, allowed, compiler, schema};

fn cases() -> u32 {
    if std::env::var("ONELOOP_FUZZ").is_ok_and(|profile| profile == "long") {
        20_000
    } else {
        400
    }
}

/// Any JSON value in which keywords of schemas stand where they may, and where they may not.
fn near_schema() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(Value::from),
        (-3i64..20).prop_map(Value::from),
        (-2.0f64..9.0).prop_map(Value::from),
        prop::sample::select(vec![
            "string",
            "object",
            "array",
            "integer",
            "number",
            "#",
            "#/properties/a",
            "#/$defs/a",
            "^a",
            "(",
            "date",
            "a",
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 60, 6, |inner| {
        let keyword = prop::sample::select(vec![
            "type",
            "properties",
            "items",
            "prefixItems",
            "required",
            "enum",
            "const",
            "anyOf",
            "allOf",
            "oneOf",
            "$ref",
            "$defs",
            "additionalProperties",
            "patternProperties",
            "minLength",
            "maxLength",
            "pattern",
            "minimum",
            "exclusiveMinimum",
            "maximum",
            "multipleOf",
            "minItems",
            "maxItems",
            "minProperties",
            "format",
            "not",
            "a",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            prop::collection::vec((keyword, inner), 0..5).prop_map(|members| Value::Object(
                members
                    .into_iter()
                    .map(|(k, v)| (k.to_owned(), v))
                    .collect::<Map<_, _>>()
            )),
        ]
    })
}

/// Goes on at random where the mask lets it; the text, if it came to an end.
fn walk(matcher: &mut GrammarMatcher, mut random: u64) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    for step in 0..60u64 {
        if matcher.is_over() {
            return Some(text);
        }
        let next = allowed(matcher);
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(step);
        let bytes: Vec<u32> = next.iter().copied().filter(|id| *id < 256).collect();
        if bytes.is_empty() || (next.contains(&END) && random >> 62 == 0) {
            return next.contains(&END).then_some(text);
        }
        let closing = bytes.iter().find(|id| b"\"]}".contains(&(**id as u8)));
        let token = match closing {
            Some(&closing) if step > 30 || random >> 63 == 0 => closing,
            _ => bytes[(random >> 33) as usize % bytes.len()],
        };
        matcher.advance(token).unwrap();
        text.push(token as u8);
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn near_schemas(value in near_schema(), random: u64) {
        let began = Instant::now();
        let result = compiler().compile(schema(&value.to_string()));
        prop_assert!(began.elapsed() < Duration::from_secs(2));
        match result {
            Ok(grammar) => {
                if let Some(text) = walk(&mut grammar.matcher(), random) {
                    let read: Result<Value, _> = serde_json::from_slice(&text);
                    // Numbers have no bounds in JSON; its readers do.
                    let is_json = read.is_ok() || read.is_err_and(|error| error.to_string().contains("out of range"));
                    prop_assert!(is_json, "{}: {}", value, String::from_utf8_lossy(&text));
                }
            }
            Err(error) => prop_assert!(!error.problem.contains("panic"), "{value}: {error}"),
        }
    }

    #[test]
    fn near_patterns(pattern in r"[ab.^$*+?(){}\[\]|\\dwsu0-9,:=<>!-]{0,24}", random: u64) {
        let result = compiler().compile(GrammarSpec::Regex(pattern.clone()));
        match result {
            Ok(grammar) => {
                if let Some(text) = walk(&mut grammar.matcher(), random) {
                    prop_assert!(String::from_utf8(text).is_ok());
                }
            }
            Err(error) => prop_assert!(!error.problem.contains("panic"), "{pattern}: {error}"),
        }
    }

    #[test]
    fn near_grammars(text in "(root ::= |start: |a|b ::= |\"x\"|\\[a-z\\]|/y/|\\(|\\)|\\||\\*|\\{2\\}|\n|%json|<a>|#|:| ){0,20}") {
        if let Err(error) = compiler().compile(GrammarSpec::Grammar(text.clone())) {
            prop_assert!(!error.problem.contains("panic"), "{text}: {error}");
        }
    }
}
