//! Each form a client may ask for.

use oneloop_core::grammar::{Constraint, ConstraintSource, GrammarSpec, JsonStyle};

use crate::support::{
    CALL, END, accepts, accepts_tokens, allowed, compiled, compiler, refused, schema,
};

/// The engine takes all escapes for one of a class that has all control characters: `pattern::class` keeps it from that.
#[test]
fn patterns_without_quotes_let_none_through() {
    for (pattern, good, bad) in [
        (r#"^[^\"]*$"#, r"a\\\n\u0001", r#"a\""#),
        (r"^[^\\]$", r#"\""#, r"\\"),
        (r#"^[^\"\\]+$"#, r"\n", r"\\"),
        (r#"^[^\"\n]+$"#, r"\t", r#"\""#),
        (r#"^(?:[^\"]|[^\"a])$"#, "a", r#"\""#),
        (
            r#"^(?:[^\"]|\"[^\n])[^]?$"#.replace("[^]", r"[\s\S]").as_str(),
            "x",
            r#"\"\n"#,
        ),
        (r"^\P{L}$", r#"\""#, "a"),
    ] {
        let text = serde_json::json!({"type": "string", "pattern": pattern}).to_string();
        let grammar = compiled(schema(&text));
        assert!(accepts(&grammar, &format!("\"{good}\"")), "{pattern}");
        assert!(!accepts(&grammar, &format!("\"{bad}\"")), "{pattern}");
    }
    assert!(
        refused(schema(r#"{"type":"string","pattern":"\\x00"}"#))
            .problem
            .contains("character 0")
    );
}

#[test]
fn json_in_compact_and_ordinary_spelling() {
    let grammar = compiled(schema(
        r#"{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","é"]}},"required":["a"],"additionalProperties":false}"#,
    ));
    for text in [
        r#"{"a":1}"#,
        r#"{"a": 1, "b": "é"}"#,
        "{\n  \"a\": -10,\n  \"b\": \"x\"\n}",
    ] {
        assert!(accepts(&grammar, text), "{text}");
    }
    for text in [
        "",
        "{}",
        r#"{"a":1"#,
        r#"{"a":"1"}"#,
        r#"{"b":"x","a":1}"#,
        r#"{"a":1,"c":2}"#,
        r#"{"a":01}"#,
        r#" {"a":1}"#,
    ] {
        assert!(!accepts(&grammar, text), "{text}");
    }
    // Tokens that cross JSON's borders.
    assert!(accepts_tokens(&grammar, &[258, 97, 259, 268, 125]));
}

#[test]
fn a_grammar_is_over_when_nothing_can_follow() {
    let grammar = compiled(schema(r#"{"type":"object"}"#));
    let mut matcher = grammar.matcher();
    for &byte in b"{}" {
        assert!(!matcher.is_over());
        matcher.advance(u32::from(byte)).unwrap();
    }
    assert!(matcher.is_over());
    assert_eq!(allowed(&mut matcher), [END]);
    let numbers = compiled(schema(r#"{"type":"integer"}"#));
    let mut matcher = numbers.matcher();
    matcher.advance(u32::from(b'7')).unwrap();
    assert!(!matcher.is_over() && matcher.may_end());
    assert!(allowed(&mut matcher).contains(&END));
}

#[test]
fn named_properties_cannot_come_in_disguise() {
    let grammar = compiled(schema(
        r#"{"type":"object","properties":{"foo":{"type":"string"}}}"#,
    ));
    assert!(accepts(&grammar, r#"{"bar":1}"#));
    for text in [
        r#"{"foo":1}"#,
        r#"{"\u0066oo":1}"#,
        r#"{"bar":2,"foo":1}"#,
        r#"{"f\u006fo":1}"#,
    ] {
        assert!(!accepts(&grammar, text), "{text}");
    }
}

#[test]
fn any_object() {
    let grammar = compiled(GrammarSpec::JsonObject(JsonStyle::default()));
    for text in ["{}", r#"{"a":[1,2.5e3,null,true,{"b":"\n\u0001"}]}"#] {
        assert!(accepts(&grammar, text), "{text}");
    }
    for text in ["[]", "1", "", "{a:1}", r#"{"a":1}x"#, r#"{"a":NaN}"#] {
        assert!(!accepts(&grammar, text), "{text}");
    }
}

#[test]
fn a_regex_is_about_the_whole_text() {
    let grammar = compiled(GrammarSpec::Regex(r"^\d{3}-(foo|b[aä]r)$".to_owned()));
    for text in ["123-foo", "000-bär"] {
        assert!(accepts(&grammar, text), "{text}");
    }
    for text in ["123-", "x123-foo", "123-foo\n", "123-fooo"] {
        assert!(!accepts(&grammar, text), "{text}");
    }
    assert!(accepts(
        &compiled(GrammarSpec::Regex(r"go\!".to_owned())),
        "go!"
    ));
    assert!(accepts(
        &compiled(GrammarSpec::Regex("a/b".to_owned())),
        "a/b"
    ));
}

#[test]
fn a_choice_may_begin_with_another() {
    let texts = ["yes", "yes, please", "no\n", "(.*)"].map(str::to_owned);
    let grammar = compiled(GrammarSpec::Choice(texts.to_vec()));
    for text in &texts {
        assert!(accepts(&grammar, text), "{text}");
    }
    for text in ["", "y", "yes,", "no", "(x)"] {
        assert!(!accepts(&grammar, text), "{text}");
    }
}

#[test]
fn lark() {
    let grammar = compiled(GrammarSpec::Grammar(
        "// sums\nstart: term (\"+\" term)*\nterm: NUMBER | \"(\" start \")\" # nested\nNUMBER: /[0-9]+/ \n".to_owned(),
    ));
    for text in ["1", "1+23", "(1+2)+(3)"] {
        assert!(accepts(&grammar, text), "{text}");
    }
    for text in ["", "1+", "(1", "1)"] {
        assert!(!accepts(&grammar, text), "{text}");
    }
    let grammar = compiled(GrammarSpec::Grammar(
        "start: \"x=\" %json {\"type\": \"string\", \"maxLength\": 2, \"x-guidance\": {\"lenient\": true}} \";\"".to_owned(),
    ));
    assert!(accepts(&grammar, "x=\"ab\";") && !accepts(&grammar, "x=\"abc\";"));
}

#[test]
fn gbnf() {
    let grammar = compiled(GrammarSpec::Grammar(
        r#"# a list
root   ::= "[" ws (item ("," ws item)*)? "]"
item   ::= [a-z_]+ | '"' [^"\\]{1,3} '"' |
           root
ws     ::= [ \t]*
"#
        .to_owned(),
    ));
    for text in ["[]", "[ ab,  c_]", "[\"xy\",[[],z]]"] {
        assert!(accepts(&grammar, text), "{text}");
    }
    for text in ["[", "[,]", "[A]", "[\"abcd\"]", "[\"\"]"] {
        assert!(!accepts(&grammar, text), "{text}");
    }
    let grammar = compiled(GrammarSpec::Grammar(
        r#"root ::= [a-z]* "end" ("\x41" | "\u00e9")?"#.to_owned(),
    ));
    for text in ["end", "enxend", "endendA", "bendé"] {
        assert!(accepts(&grammar, text), "{text}");
    }
}

#[test]
fn text_leads_to_no_special_token() {
    let free = compiled(GrammarSpec::Regex("(?:.|\n)*".to_owned()));
    let mut matcher = free.matcher();
    let next = allowed(&mut matcher);
    assert!(next.contains(&END) && !next.contains(&CALL));
    assert!(accepts(&free, "[CALL]</s>"));
    assert!(matcher.advance(CALL).is_err());
    // An empty piece is never allowed; two ids of the same text are.
    let ids: Vec<u32> = next.into_iter().filter(|id| *id > CALL).collect();
    assert!(
        !ids.contains(&269) && ids.contains(&264) && ids.contains(&270),
        "{ids:?}"
    );
}

#[test]
fn an_error_ends_one_sequence_only() {
    let grammar = compiled(schema(r#"{"type":"array","items":{"type":"boolean"}}"#));
    let (mut good, mut bad) = (grammar.start(), grammar.start());
    good.advance(u32::from(b'[')).unwrap();
    let mut fork = good.fork();
    assert!(bad.advance(u32::from(b'x')).is_err());
    assert!(bad.fill_mask(&mut [0; 9]).is_err() && bad.advance(u32::from(b'[')).is_err());
    assert!(!bad.is_over());
    good.advance(263).unwrap();
    assert!(fork.advance(u32::from(b',')).is_err());
    good.advance(u32::from(b']')).unwrap();
    assert!(good.is_over());
    assert!(grammar.start().advance(u32::from(b'[')).is_ok());
}

#[test]
fn ids_out_of_range_are_errors() {
    let grammar = compiled(schema("{}"));
    for id in [1000, u32::MAX] {
        assert!(grammar.matcher().advance(id).is_err());
    }
    // A mask of a model with fewer or more rows than the tokenizer has ids.
    for words in [8, 100] {
        let mut mask = vec![0; words];
        grammar.matcher().fill_mask(&mut mask).unwrap();
    }
}

#[test]
fn vocabularies_that_cannot_be_used() {
    use oneloop_core::grammar::GrammarCompiler;
    use oneloop_core::text::Vocabulary;
    use std::sync::Arc;
    let vocabulary = |pieces: &[&str]| Arc::new(Vocabulary::new(pieces, &[], false).unwrap());
    for (pieces, ends) in [(&[][..], &[0][..]), (&["a"], &[]), (&["a"], &[1])] {
        assert!(GrammarCompiler::new(vocabulary(pieces), ends).is_err());
    }
    // Tokens longer than the trie takes are never allowed.
    let long = "a".repeat(5000);
    let compiler = GrammarCompiler::new(vocabulary(&["</s>", "a", &long]), &[0]).unwrap();
    let mut matcher = compiler
        .compile(GrammarSpec::Regex("a*".to_owned()))
        .unwrap()
        .matcher();
    let mut mask = [0];
    matcher.fill_mask(&mut mask).unwrap();
    assert_eq!(mask, [0b011]);
}

#[test]
fn good_and_bad_grammars_are_judged_alone() {
    let compiler = compiler();
    for _ in 0..3 {
        assert!(
            compiler
                .compile(schema(r#"{"type":"string","pattern":"^go\\!$"}"#))
                .is_ok()
        );
        let error = compiler
            .compile(schema(r#"{"type":"string","pattern":"^(go$"}"#))
            .err()
            .unwrap();
        assert_eq!(error.path, "#/pattern");
        assert!(compiler.compile(GrammarSpec::Choice(Vec::new())).is_err());
    }
    assert_eq!(refused(schema(r#"{"const":"#)).path, "#");
}
