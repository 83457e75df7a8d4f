//! Structural tags.

use oneloop_core::grammar::{Grammar, GrammarSpec, JsonStyle};

use crate::support::{CALL, accepts, accepts_tokens, compiled, refused};

fn tag(text: &str) -> GrammarSpec {
    GrammarSpec::StructuralTag(text.to_owned(), JsonStyle::default())
}

fn calls(more: &str) -> Grammar {
    compiled(tag(&format!(
        r#"{{"type":"structural_tag","triggers":["<f="],{more}"structures":[
            {{"begin":"<f=a>","schema":{{"type":"object","properties":{{"x":{{"type":"integer"}}}},"required":["x"]}},"end":"</f>"}},
            {{"begin":"<f=b>","schema":{{"type":"boolean"}},"end":"</f>"}}]}}"#
    )))
}

#[test]
fn free_text_between_tags() {
    let grammar = calls("");
    let good = [
        "",
        "no tag here, 1 < 2 and <f",
        "<f=b>true</f>",
        "well <f=a>{\"x\": 1}</f> and\n<f=b>false</f> <f that was it",
        "<<f=b>true</f><f=b>true</f>",
    ];
    for text in good {
        assert!(accepts(&grammar, text), "{text}");
    }
    let bad = [
        "<f=",
        "<f=c>",
        "<f=b>1</f>",
        "text <f=b>true",
        "text <f=b>true</g>",
        "<f=a>{\"x\":\"1\"}</f>",
        "<f=b>true</f><f=x",
    ];
    for text in bad {
        assert!(!accepts(&grammar, text), "{text}");
    }
}

#[test]
fn a_tag_can_be_required_and_be_all() {
    let grammar = calls(r#""at_least_one":true,"#);
    assert!(accepts(&grammar, "<f=b>true</f> text"));
    assert!(!accepts(&grammar, "") && !accepts(&grammar, "text <f=b>true</f>"));
    let grammar = calls(r#""at_least_one":true,"stop_after_first":true,"#);
    assert!(accepts(&grammar, "<f=b>true</f>"));
    assert!(
        !accepts(&grammar, "<f=b>true</f> text")
            && !accepts(&grammar, "<f=b>true</f><f=b>true</f>")
    );
    let grammar = calls(r#""stop_after_first":true,"#);
    assert!(accepts(&grammar, "text") && accepts(&grammar, "text <f=b>true</f>"));
    assert!(!accepts(&grammar, "<f=b>true</f> text"));
}

#[test]
fn special_tokens_of_a_tag_are_tokens() {
    let grammar = compiled(tag(
        r#"{"type":"structural_tag","triggers":["[CALL]"],"structures":[
            {"begin":"[CALL]a:","schema":{"type":"boolean"},"end":"."}]}"#,
    ));
    let tokens = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let call = [tokens("so "), vec![CALL], tokens("a:true."), tokens(" ok")].concat();
    assert!(accepts_tokens(&grammar, &call));
    assert!(accepts(&grammar, "so [CALL]b: is text"));
    let wrong = [vec![CALL], tokens("b:true.")].concat();
    assert!(!accepts_tokens(&grammar, &wrong));
}

#[test]
fn the_newer_form_and_other_contents() {
    let grammar = compiled(tag(
        r#"{"type":"structural_tag","format":{"type":"triggered_tags","triggers":["<"],"tags":[
            {"type":"tag","begin":"<n>","content":{"type":"regex","pattern":"\\d+"},"end":"</n>"},
            {"begin":"<j>","content":{"type":"json_schema","json_schema":{"const":null}},"end":""}]}}"#,
    ));
    assert!(accepts(&grammar, "a<n>12</n>b<j>null"));
    assert!(!accepts(&grammar, "<n></n>") && !accepts(&grammar, "<x>"));
}

#[test]
fn tags_alone_with_a_text_between_them() {
    let list = |more: &str| {
        compiled(tag(&format!(
            r#"{{"format":{{"type":"sequence","elements":[{{"type":"const_string","value":"["}},
                {{"type":"tags_with_separator","separator":", ",{more}"tags":[
                    {{"begin":"a=","content":{{"type":"regex","pattern":"[0-9]+"}},"end":";"}},
                    {{"begin":"b=","content":{{"type":"json_schema","json_schema":{{"type":"boolean"}}}},"end":""}}]}},
                {{"type":"const_string","value":"]"}}]}}}}"#
        )))
    };
    let grammar = list(r#""at_least_one":true,"#);
    for text in ["[a=1;]", "[b=true, a=12;, b=false]"] {
        assert!(accepts(&grammar, text), "{text}");
    }
    for text in [
        "",
        "[]",
        "[a=1;, ]",
        "[a=1; a=2;]",
        "[a=;]",
        "a=1;",
        "[a=1;] x",
    ] {
        assert!(!accepts(&grammar, text), "{text}");
    }
    assert!(accepts(&list(""), "[]"));
    let grammar = list(r#""at_least_one":true,"stop_after_first":true,"#);
    assert!(accepts(&grammar, "[b=true]") && !accepts(&grammar, "[b=true, b=true]"));
}

#[test]
fn what_is_wrong_is_named() {
    let cases = [
        ("", "#"),
        ("[]", "#"),
        (r#"{"type":"other"}"#, "#/type"),
        (
            r#"{"type":"structural_tag","structures":[],"triggers":["a"]}"#,
            "#/structures",
        ),
        (
            r#"{"structures":[{"begin":"b","schema":{},"end":""}],"triggers":["a"]}"#,
            "#/structures/0/begin",
        ),
        (
            r#"{"structures":[{"begin":"a","schema":{"not":1},"end":""}],"triggers":["a"]}"#,
            "#/structures/0/schema/not",
        ),
        (
            r#"{"structures":[{"begin":"a","end":""}],"triggers":["a"]}"#,
            "#/structures/0",
        ),
        (
            r#"{"structures":[{"begin":"a","schema":{},"end":""}],"triggers":[]}"#,
            "#/triggers",
        ),
        (
            r#"{"structures":[{"begin":"a","schema":{},"end":"","x":1}],"triggers":["a"]}"#,
            "#/structures/0/x",
        ),
        (r#"{"format":{"type":"or"}}"#, "#/format/type"),
        (r#"{"format":{"type":"sequence"}}"#, "#/format/elements"),
        (
            r#"{"format":{"type":"sequence","elements":[{"type":"const_string"}]}}"#,
            "#/format/elements/0/value",
        ),
        (
            r#"{"format":{"type":"sequence","elements":[{"type":"sequence","elements":[]}]}}"#,
            "#/format/elements/0/type",
        ),
        (
            r#"{"format":{"type":"tags_with_separator","separator":",","tags":[{"begin":"a","content":{"type":"x"},"end":""}]}}"#,
            "#/format/tags/0/content/type",
        ),
    ];
    for (text, path) in cases {
        assert_eq!(refused(tag(text)).path, path, "{text}");
    }
}
