//! A parsed pattern in Rust's syntax.

use std::fmt::Write;

use super::{Class, Node};

pub(super) fn write(node: &Node) -> String {
    let mut out = String::new();
    push(&mut out, node);
    out
}

fn push(out: &mut String, node: &Node) {
    match node {
        Node::Class(class) => push_class(out, class),
        Node::Concat(nodes) => nodes.iter().for_each(|node| push_part(out, node)),
        Node::Alt(nodes) => {
            out.push_str("(?:");
            for (index, node) in nodes.iter().enumerate() {
                if index > 0 {
                    out.push('|');
                }
                push(out, node);
            }
            out.push(')');
        }
        Node::Group(node) => push_group(out, node),
        Node::Repeat(node, min, max) => {
            push_group(out, node);
            match (*min, *max) {
                (0, None) => out.push('*'),
                (1, None) => out.push('+'),
                (min, None) => {
                    let _ = write!(out, "{{{min},}}");
                }
                (min, Some(max)) => {
                    let _ = write!(out, "{{{min},{max}}}");
                }
            }
        }
        // Taken away before.
        Node::Start | Node::End => {}
    }
}

fn push_part(out: &mut String, node: &Node) {
    if matches!(node, Node::Concat(_)) {
        push_group(out, node);
    } else {
        push(out, node);
    }
}

fn push_group(out: &mut String, node: &Node) {
    out.push_str("(?:");
    push(out, node);
    out.push(')');
}

fn push_class(out: &mut String, class: &Class) {
    let single = |ranges: &[(char, char)]| ranges.len() == 1 && ranges[0].0 == ranges[0].1;
    if !class.negated
        && class.sets.is_empty()
        && class.properties.is_empty()
        && single(&class.ranges)
    {
        return push_char(out, class.ranges[0].0);
    }
    if class.without_nul {
        out.push('[');
    }
    out.push_str(if class.negated { "[^" } else { "[" });
    push_ranges(out, &class.ranges);
    for (not, ranges) in &class.sets {
        out.push_str(if *not { "[^" } else { "[" });
        push_ranges(out, ranges);
        out.push(']');
    }
    for (not, name) in &class.properties {
        let _ = write!(out, "\\{}{{{name}}}", if *not { 'P' } else { 'p' });
    }
    out.push(']');
    if class.without_nul {
        out.push_str("&&[^\\x{0}]]");
    }
}

fn push_ranges(out: &mut String, ranges: &[(char, char)]) {
    for &(from, to) in ranges {
        push_char(out, from);
        if from != to {
            out.push('-');
            push_char(out, to);
        }
    }
}

/// Letters and digits as they are, everything else by its number: nothing is left that could mean something else.
pub(super) fn push_char(out: &mut String, letter: char) {
    if letter.is_ascii_alphanumeric() {
        out.push(letter);
    } else {
        let _ = write!(out, "\\x{{{:X}}}", u32::from(letter));
    }
}
