//! Grammars that were sent to do harm, or by mistake: each ends soon, refused or kept, and never as free text.

use std::fmt::Write;
use std::time::{Duration, Instant};

use oneloop_core::Failure;
use oneloop_core::grammar::{
    Constraint, GrammarCompiler, GrammarSpec, JsonStyle, MAX_SOURCE_BYTES,
};

use crate::support::{END, allowed, compiler, schema, vocabulary};

fn grammar(text: &str) -> GrammarSpec {
    GrammarSpec::Grammar(text.to_owned())
}

fn pattern(pattern: &str) -> GrammarSpec {
    let quoted = serde_json::to_string(pattern).unwrap();
    schema(&format!(r#"{{"type":"string","pattern":{quoted}}}"#))
}

fn nested(open: &str, close: &str, depth: usize) -> String {
    format!("{}true{}", open.repeat(depth), close.repeat(depth))
}

/// Legal ones, which have to be kept.
fn heavy() -> Vec<GrammarSpec> {
    vec![
        pattern("(a+)+b"),
        pattern("(.*a){25}"),
        pattern("^(|.*)$"),
        pattern(r"\p{L}+"),
        pattern("a{0,100000}"),
        pattern("((a{0,100}){0,100}){0,100}b"),
        pattern("((a{0,100000}){0,100000}){0,100000}(b{0,100000}){0,100000}"),
        schema(r#"{"type":"string","maxLength":1000000000000}"#),
        schema(r#"{"type":"integer","maximum":20000000000}"#),
        schema("{}"),
        schema(r##"{"properties":{"a":{"$ref":"#"}},"type":"object"}"##),
        grammar("root ::= root \"a\" | \"a\""),
        GrammarSpec::Choice((0..4096).map(|index| format!("choice {index}")).collect()),
    ]
}

fn hostile() -> Vec<GrammarSpec> {
    let many = |count: usize| {
        (0..count)
            .map(|index| format!("\"v{index}\""))
            .collect::<Vec<_>>()
            .join(",")
    };
    let mut chain = String::from("start: r0\n");
    let mut doubled = String::from("root ::= r40\nr0 ::= \"a\" | \"b\"\n");
    for index in 0..20_000 {
        let _ = writeln!(chain, "r{index}: r{} \"a\"", index + 1);
    }
    for index in 0..40 {
        let _ = writeln!(doubled, "r{} ::= r{index} r{index}", index + 1);
    }
    vec![
        pattern("("),
        pattern("(?=a)b"),
        pattern(r"(a)\1"),
        pattern("(?<!a)b"),
        pattern(&"(".repeat(100_000)),
        pattern(r"\p{Nonsense}"),
        schema(&format!(r#"{{"enum":[{}]}}"#, many(10_000))),
        schema(&format!(r#"{{"enum":["{}"]}}"#, "x".repeat(5 << 20))),
        schema(r#"{"type":"array","minItems":1000000000}"#),
        schema(r#"{"type":"unknown"}"#),
        schema(r#"{"type":["x"]}"#),
        schema(r##"{"$ref":"#"}"##),
        schema(r##"{"allOf":[{"$ref":"#"}]}"##),
        schema(
            r##"{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}"##,
        ),
        schema(r#"{"$ref":"http://127.0.0.1/schema"}"#),
        schema(&nested(r#"{"anyOf":["#, "]}", 10_000)),
        schema(&nested(r#"{"properties":{"a":"#, "}}", 100_000)),
        schema(""),
        schema("nul"),
        schema(r#"{"x-guidance":{"lenient":true},"type":"string","format":"regex"}"#),
        grammar(""),
        grammar("  \n"),
        grammar("root ::= root \"a\""),
        grammar("root ::= \"a\"\nroot ::= \"b\""),
        grammar("start: \"a\"\nstart: \"b\""),
        grammar(&format!("root ::= {}", "(".repeat(100_000))),
        grammar(&format!("start: {}", "(".repeat(100_000))),
        grammar(&format!("start: {}", "[".repeat(100_000))),
        grammar(&format!(
            "start: {}\"a\"{}",
            "(".repeat(90_000),
            ")".repeat(90_000)
        )),
        grammar(&chain),
        grammar(&doubled),
        grammar("start: <|im_end|>"),
        grammar("start: <[0-300]>"),
        grammar("start: <[*]>"),
        grammar("start: @other"),
        grammar("start: /(?P<stop>a)/"),
        grammar("start[stop=\"x\"]: /a*/"),
        grammar("start[max_tokens=3]: /a*/"),
        grammar("%llguidance {\"allow_invalid_utf8\": true}\nstart: \"a\""),
        grammar("start: %json {\"not\": {}}"),
        grammar("start: %json {\"x-guidance\": {\"lenient\": true}, \"uniqueItems\": true}"),
        grammar("start: undefined"),
        grammar("start: \"a"),
        grammar("no rule at all"),
        GrammarSpec::Choice(Vec::new()),
        GrammarSpec::Choice(vec![String::new()]),
        GrammarSpec::Choice(vec!["a".to_owned(); 5000]),
        GrammarSpec::Regex(String::new()),
        GrammarSpec::Regex("a".repeat(MAX_SOURCE_BYTES + 1)),
        GrammarSpec::StructuralTag("{}".to_owned(), JsonStyle::default()),
    ]
}

#[test]
fn each_is_judged_alone_and_soon() {
    let compiler = compiler();
    let legal = || schema(r#"{"type":"boolean"}"#);
    for spec in hostile() {
        assert!(compiler.compile(legal()).is_ok());
        let shown = format!("{spec:?}");
        let began = Instant::now();
        let result = compiler.compile(spec);
        assert!(began.elapsed() < Duration::from_secs(2), "{shown:.200}");
        let error = result
            .err()
            .unwrap_or_else(|| panic!("not refused: {shown:.200}"));
        assert!(
            !error.problem.is_empty() && error.problem.len() < 2000,
            "{shown:.200}: {error}"
        );
        assert!(!error.problem.contains("panic"), "{shown:.200}: {error}");
    }
    for spec in heavy() {
        let shown = format!("{spec:?}");
        let began = Instant::now();
        let grammar = compiler
            .compile(spec)
            .unwrap_or_else(|error| panic!("{shown:.200}: {error}"));
        assert!(began.elapsed() < Duration::from_secs(2), "{shown:.200}");
        let mut matcher = grammar.matcher();
        for token in 0..3 {
            let Some(&next) = allowed(&mut matcher).iter().find(|id| **id != END) else {
                break;
            };
            matcher
                .advance(next)
                .unwrap_or_else(|error| panic!("{shown:.200} at {token}: {error}"));
        }
    }
}

/// Keywords that are said in others, as much of them as fits: kept or refused.
fn multiplied() -> Vec<GrammarSpec> {
    let list = |count: usize, each: &dyn Fn(usize) -> String| {
        (0..count).map(each).collect::<Vec<_>>().join(",")
    };
    let required = |index: usize| format!(r#"{{"required":["p{index}"]}}"#);
    let pattern = |index: usize| format!(r#"{{"pattern":"^(a|b)*{index}(a|b)*{index}"}}"#);
    let condition =
        |index: usize| format!(r#"{{"if":{},"then":{}}}"#, required(index), pattern(index));
    let kind = |index: usize| {
        format!(
            r#"{{"if":{{"properties":{{"kind":{{"const":"{index}"}}}}}},"then":{}}}"#,
            required(index)
        )
    };
    vec![
        schema(&format!(r#"{{"oneOf":[{}]}}"#, list(4000, &required))),
        schema(&format!(r#"{{"oneOf":[{}]}}"#, list(300, &pattern))),
        schema(&format!(
            r#"{{"not":{{"oneOf":[{}]}}}}"#,
            list(8, &required)
        )),
        schema(&format!(r#"{{"allOf":[{}]}}"#, list(1000, &condition))),
        schema(&format!(r#"{{"allOf":[{}]}}"#, list(1000, &kind))),
        schema(&nested(r#"{"not":"#, "}", 100_000)),
        schema(&nested(r#"{"not":"#, "}", 40)),
        schema(&nested(r#"{"if":{"required":["a"]},"then":"#, "}", 40)),
        schema(&nested(
            r#"{"oneOf":[{"required":["a"]},{"required":["b"]},"#,
            "]}",
            12,
        )),
        schema(&nested(
            r#"{"not":{"oneOf":[{"required":["a"]},{"required":["b"]},"#,
            "]}}",
            12,
        )),
        schema(r##"{"not":{"$ref":"#"}}"##),
        schema(r##"{"if":{"$ref":"#"},"then":{"$ref":"#"},"else":{"$ref":"#"}}"##),
        schema(r##"{"oneOf":[{"$ref":"#"},{"properties":{"a":{"$ref":"#"}}}]}"##),
        schema(r##"{"unevaluatedProperties":false,"allOf":[{"$ref":"#"}]}"##),
        schema(r##"{"propertyNames":{"$ref":"#"}}"##),
        schema(&format!(
            r#"{{"uniqueItems":true,"items":{{"enum":[{}]}}}}"#,
            list(4000, &|index| index.to_string())
        )),
        schema(r#"{"contains":{"required":["a"]},"maxItems":100000,"minContains":50000}"#),
        schema(r#"{"contains":{"required":["a"]},"maxItems":6,"minContains":2,"maxContains":3}"#),
        schema(&format!(
            r#"{{"unevaluatedProperties":false,"allOf":[{}]}}"#,
            list(20, &|index| format!(
                r#"{{"anyOf":[{},{{"properties":{{"q{index}":true}}}}]}}"#,
                required(index)
            ))
        )),
        schema(&format!(
            r#"{{"dependentRequired":{{{}}}}}"#,
            list(60, &|index| format!(r#""p{index}":["q{index}"]"#))
        )),
        schema(&format!(
            r#"{{"not":{{"enum":["{}"]}}}}"#,
            "x".repeat(10_000)
        )),
    ]
}

#[test]
fn what_is_said_otherwise_is_judged_soon() {
    let compiler = compiler();
    for spec in multiplied() {
        let shown = format!("{spec:?}");
        let began = Instant::now();
        let result = compiler.compile(spec);
        assert!(began.elapsed() < Duration::from_secs(2), "{shown:.200}");
        if let Err(error) = result {
            let told =
                !error.problem.contains("panic") && !error.problem.contains("more than 1.8 s");
            assert!(told, "{shown:.200}: {error}");
        }
    }
}

#[test]
fn a_compilation_ends_in_time() {
    let compiler = GrammarCompiler::new(vocabulary(), &[END]).unwrap();
    let compiler = compiler.with_timeout(Duration::ZERO);
    let slow = || {
        let properties: Vec<_> = (0..1000)
            .map(|index| format!(r#""p{index}":{{"type":"string"}}"#))
            .collect();
        schema(&format!(
            r#"{{"type":"object","properties":{{{}}}}}"#,
            properties.join(",")
        ))
    };
    let began = Instant::now();
    let errors: Vec<_> = (0..8)
        .map(|_| compiler.compile(slow()).err().unwrap())
        .collect();
    assert!(began.elapsed() < Duration::from_secs(2));
    assert!(errors[0].problem.contains("takes more than"), "{errors:?}");
    assert!(!errors[0].is_busy);
    let busy: Vec<_> = errors.iter().filter(|error| error.is_busy).collect();
    assert!(!busy.is_empty(), "{errors:?}");
    assert!(
        busy.iter()
            .all(|error| error.problem.contains("try again later"))
    );
    // Those that ran on end by themselves, and then others get their turn again.
    let waited = Instant::now();
    while compiler
        .compile(slow())
        .err()
        .unwrap()
        .problem
        .contains("try again later")
    {
        assert!(waited.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn steps_are_bounded_and_fail_alone() {
    let compiler = compiler();
    // Legal, but with more states the longer the text: each step either ends soon or ends its sequence.
    let grammar = compiler.compile(pattern("^.*a.{40}b$")).unwrap();
    let mut matcher = grammar.matcher();
    matcher.advance(u32::from(b'"')).unwrap();
    let mut random = 1u64;
    let mut mask = [0; 9];
    for _ in 0..3000 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let began = Instant::now();
        mask.fill(0);
        let stepped = matcher
            .fill_mask(&mut mask)
            .map_err(Failure::of_request)
            .and_then(|()| matcher.advance(97 + (random >> 63) as u32));
        assert!(began.elapsed() < Duration::from_secs(1));
        if let Err(failure) = stepped {
            assert!(failure.is_of_request, "{failure}");
            break;
        }
    }
    let mut other = grammar.matcher();
    other.advance(u32::from(b'"')).unwrap();
    assert!(other.fill_mask(&mut [0; 9]).is_ok());
}
