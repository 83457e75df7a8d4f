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

/// Members "a" to "d", of which "b" is required; every choice of them is tried.
#[test]
fn members_in_their_order() {
    for separator in ["", ", "] {
        let grammar = compiled(tag(&format!(
            r#"{{"format":{{"type":"tag","begin":"f(","end":")","content":{{"type":"members_with_separator","separator":"{separator}",
            "members":[
                {{"begin":"a=","content":{{"type":"regex","pattern":"[0-9]+"}},"end":""}},
                {{"begin":"b=","content":{{"type":"json_schema","json_schema":{{"type":"integer"}}}},"end":"","required":true}},
                {{"begin":"c=","content":{{"type":"or","elements":[{{"type":"regex","pattern":"True|False"}},
                    {{"type":"json_schema","json_schema":{{"type":"number"}}}}]}},"end":""}},
                {{"begin":"d=","schema":{{"const":null}},"end":"!"}}]}}}}}}"#
        )));
        let parts = ["a=12", "b=-7", "c=True", "d=null!"];
        for chosen in 0..16_usize {
            let some: Vec<_> = (0..4)
                .filter(|index| chosen >> index & 1 == 1)
                .map(|index| parts[index])
                .collect();
            let text = format!("f({})", some.join(separator));
            assert_eq!(accepts(&grammar, &text), chosen & 2 == 2, "{text}");
        }
        let more = [
            "f(b=1,)",
            "f(,b=1)",
            "f(b=1, b=1)",
            "f(c=True, b=1)",
            "f(b=1",
        ];
        assert!(!more.iter().any(|text| accepts(&grammar, text)));
        assert!(accepts(&grammar, &format!("f(b=1{separator}c=-2.5)")));
    }
    let none = r#"{"format":{"type":"tag","begin":"f(","end":")","content":
        {"type":"members_with_separator","separator":", ","members":[]}}}"#;
    let grammar = compiled(tag(none));
    assert!(accepts(&grammar, "f()") && !accepts(&grammar, "f(a)"));
}

fn text(schema: &str, end: &str) -> Grammar {
    compiled(tag(&format!(
        r#"{{"format":{{"type":"tag","begin":"<v>","end":"{end}","content":
            {{"type":"text","json_schema":{schema},"excludes":["</v>"]}}}}}}"#
    )))
}

#[test]
fn texts_by_schemas() {
    let cases: [(&str, &[&str], &[&str]); 8] = [
        (
            "{}",
            &["", "a", "\n", "\n</v", "a\n\n", "\"\\<é🙂>\n</v\n"],
            &["</v>", "a\n</v>b"],
        ),
        (
            r#"{"minLength":2,"maxLength":3}"#,
            &["ab", "é🙂\n"],
            &["a", "abcd"],
        ),
        (
            r#"{"enum":["","null","a\n"]}"#,
            &["", "null", "a\n"],
            &["a", "nul"],
        ),
        (
            r#"{"pattern":"^[a-c]*$","minLength":1}"#,
            &["a", "cab"],
            &["", "d", "ad"],
        ),
        (r#"{"pattern":"b"}"#, &["b", "a\nbc"], &["", "a"]),
        (
            r#"{"anyOf":[{"type":"string","format":"date"},{"const":"null"}]}"#,
            &["2024-02-29", "null"],
            &["2023-02-29", "", "x"],
        ),
        (
            r#"{"format":"email","maxLength":12}"#,
            &["a.b@c.de", "x@y"],
            &["a@", "a b@c.de", "abcdefgh@i.jk"],
        ),
        (
            r#"{"format":"uuid"}"#,
            &["123e4567-e89b-12d3-a456-426614174000"],
            &["123e4567"],
        ),
    ];
    for (schema, good, bad) in cases {
        let grammar = text(schema, "\\n</v>.");
        for given in good {
            assert!(
                accepts(&grammar, &format!("<v>{given}\n</v>.")),
                "{schema} {given:?}"
            );
        }
        for given in bad {
            assert!(
                !accepts(&grammar, &format!("<v>{given}\n</v>.")),
                "{schema} {given:?}"
            );
        }
        assert!(!accepts(&grammar, &format!("<v>{}\n</v", good[0])));
    }
}

#[test]
fn a_special_token_ends_a_text() {
    let tokens = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    for (schema, given, is_one) in [
        ("{}", "", true),
        ("{}", "a[CALL", true),
        ("{}", "a[CALL]", false),
        (r#"{"minLength":1}"#, "", false),
        (r#"{"pattern":"^a*$"}"#, "", true),
        (r#"{"pattern":"a"}"#, "", false),
    ] {
        let grammar = compiled(tag(&format!(
            r#"{{"format":{{"type":"tag","begin":"<v>","end":"[CALL];","content":
                {{"type":"text","json_schema":{schema},"excludes":["[CALL]"]}}}}}}"#
        )));
        let all = [tokens("<v>"), tokens(given), vec![CALL], tokens(";")].concat();
        assert_eq!(accepts_tokens(&grammar, &all), is_one, "{schema} {given:?}");
    }
}

#[test]
fn free_text_without_some_texts() {
    let grammar = compiled(tag(
        r#"{"format":{"type":"triggered_tags","triggers":["<f>","[CALL]"],"excludes":["[CALL]","<g>"],"tags":[
            {"begin":"<f>","content":{"type":"tags_with_separator","separator":",","at_least_one":true,
                "tags":[{"begin":"a","schema":{"type":"boolean"},"end":""}]},"end":";"},
            {"begin":"[CALL]","schema":{"type":"boolean"},"end":""}]}}"#,
    ));
    for text in ["", "a <g <f", "x<f>atrue,afalse;y<f>atrue;"] {
        assert!(accepts(&grammar, text), "{text}");
    }
    for text in ["<g>", "a<g>b<f>atrue;", "[CALL]true", "<f>atrue,;"] {
        assert!(!accepts(&grammar, text), "{text}");
    }
    let tokens = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let call = [tokens("so "), vec![CALL], tokens("true"), tokens(" ok")].concat();
    assert!(accepts_tokens(&grammar, &call));
}

#[test]
fn any_text_but_some() {
    let grammar = compiled(tag(r#"{"format":{"type":"or","elements":[
            {"type":"tag","begin":"{\"f\": ","schema":{"type":"boolean"},"end":"}"},
            {"type":"any_text","excludes":["[CALL]"],"not_beginning":"\\s*\\{\\s*\"[fg]\""}]}}"#));
    for text in [
        "",
        "{\"f\": true}",
        "{\"h\": 1}",
        "so {\"f\": 1}",
        "{ \"f",
        "[CALL",
    ] {
        assert!(accepts(&grammar, text), "{text}");
    }
    for text in ["{\"f\": 1}", "\n{ \"g\"", "a[CALL]b", "{\"f\": true} "] {
        assert!(!accepts(&grammar, text), "{text}");
    }
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
        (r#"{"format":{"type":"other"}}"#, "#/format/type"),
        (
            r#"{"format":{"type":"any_text","not_beginning":"("}}"#,
            "#/format/not_beginning",
        ),
        (r#"{"format":{"type":"or"}}"#, "#/format/elements"),
        (r#"{"format":{"type":"text","json_schema":{}}}"#, "#/format"),
        (
            r#"{"format":{"type":"tag","begin":"a","content":{"type":"text","json_schema":{"minimum":1}},"end":"b"}}"#,
            "#/format/content/json_schema/minimum",
        ),
        (
            r#"{"format":{"type":"members_with_separator","separator":"","members":[{"begin":"a","end":"","required":1}]}}"#,
            "#/format/members/0/required",
        ),
        (r#"{"format":{"type":"sequence"}}"#, "#/format/elements"),
        (
            r#"{"format":{"type":"sequence","elements":[{"type":"const_string"}]}}"#,
            "#/format/elements/0/value",
        ),
        (
            r#"{"format":{"type":"sequence","elements":[{"type":"sequence","elements":[]}]}}"#,
            "#/format/elements/0/elements",
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
