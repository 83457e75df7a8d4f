use super::*;

#[test]
fn anchors_say_what_may_stand_around() {
    assert_eq!(full("^ab$").unwrap(), "ab");
    assert_eq!(search("^ab$").unwrap(), "ab");
    assert_eq!(
        search("^a|b$").unwrap(),
        r"(?:a(?:[\x{0}-\x{10FFFF}])*|(?:[\x{0}-\x{10FFFF}])*b)"
    );
    assert_eq!(search("^(|a)$").unwrap(), "(?:|a)");
    assert_eq!(search("(^a$)").unwrap(), "a");
    for pattern in ["a^b", "(a$|b)c", "x(^a)", "^*", "$+"] {
        assert!(search(pattern).is_err(), "{pattern}");
    }
}

#[test]
fn escapes_and_classes() {
    assert_eq!(full(r"go\!\-\/").unwrap(), r"go\x{21}\x{2D}\x{2F}");
    assert_eq!(full(r"\d\W").unwrap(), r"[[0-9]][[^0-9A-Z\x{5F}a-z]]");
    assert_eq!(full(r"[^\]a-c-]").unwrap(), r"[^\x{5D}a-c\x{2D}]");
    assert_eq!(
        full(r"[[&&~~]").unwrap(),
        r"[\x{5B}\x{26}\x{26}\x{7E}\x{7E}]"
    );
    assert_eq!(
        full(r"\ud83d\ude00\u{1F600}\x41\cA").unwrap(),
        r"\x{1F600}\x{1F600}A\x{1}"
    );
    assert_eq!(
        full(r"a{2}b{1,}c{0,3}?d{x}").unwrap(),
        r"(?:a){2,2}(?:b)+(?:c){0,3}d\x{7B}x\x{7D}"
    );
    assert_eq!(
        full(r"\p{Lu}[^\P{Script=Greek}]").unwrap(),
        r"[\p{Lu}][^\P{Script=Greek}]"
    );
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let refused = [
        "(",
        ")",
        "a)",
        "(a",
        "[a",
        "[]a]",
        "[^]",
        "a**",
        "*",
        "+a",
        "(?=a)",
        "(?!a)",
        "(?<=a)",
        "(?<!a)",
        "(?i)a",
        r"(a)\1",
        r"\k<n>",
        r"\bword\b",
        r"\Aa",
        r"a\Z",
        "a{3,1}",
        "a{0,100001}",
        r"\ud83d",
        r"\p{",
        r"\p",
        r"\x1",
        r"\u12",
        "[z-a]",
        r"[\w-z]",
        r"[a-\d]",
        "[[:alpha:]]",
        r"\",
        "(?P=name)",
        "(?P<a b>x)",
        r"\u{110000}",
        r"\u{+41}",
        r"\00",
    ];
    for pattern in refused {
        assert!(search(pattern).is_err(), "{pattern}");
    }
    assert!(search(&"(".repeat(100_000)).is_err());
    assert!(search(&format!("{}a{}", "(".repeat(60), ")".repeat(60))).is_err());
    assert!(search(&"a".repeat(MAX_BYTES + 1)).is_err());
}

const MAX_BYTES: usize = crate::grammar::limits::MAX_PATTERN_BYTES;

#[test]
fn white_space_is_white_space() {
    assert_eq!(whitespace(r"\s*").unwrap(), r"(?:[\x{20}\x{A}\x{D}\x{9}])*");
    assert_eq!(whitespace("[ ]?").unwrap(), r"(?:\x{20}){0,1}");
    assert_eq!(whitespace("[^a]").unwrap(), r"[\x{20}\x{A}\x{D}\x{9}]");
    for pattern in [".*x", "a", "[,]", r"\p{Zs}", r"\d"] {
        assert!(whitespace(pattern).is_err(), "{pattern}");
    }
}

#[test]
fn texts_of_a_pattern_are_told_where_they_are_few() {
    let found = |pattern: &str| texts(pattern, 6).unwrap();
    let some = |names: &[&str]| Some(names.iter().map(ToString::to_string).collect::<Vec<_>>());
    assert_eq!(found("^(a|b)$"), some(&["a", "b"]));
    assert_eq!(found("^(?:b|a|b)$|^c$"), some(&["a", "b", "c"]));
    assert_eq!(
        found("^x[0-2]{1}(yz)?$"),
        some(&["x0", "x0yz", "x1", "x1yz", "x2", "x2yz"])
    );
    assert_eq!(found("^a{0,2}$"), some(&["", "a", "aa"]));
    assert_eq!(found("^$"), some(&[""]));
    for many in [
        "a",
        "^a",
        "a$",
        "^a*$",
        "^\\d$",
        "^[^a]$",
        "^\\D$",
        "^[0-6]$",
        "^[ab]{3}$",
        "^\\p{L}$",
        "^a{7}$",
    ] {
        assert_eq!(found(many), None, "{many}");
    }
    assert!(texts("(?=a)", 6).is_err());
}
