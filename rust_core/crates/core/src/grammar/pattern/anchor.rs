//! Anchors: where they stand at the edges of the whole, they say that nothing comes before or behind.

use super::{Class, Node};
use crate::grammar::error::GrammarError;

/// The same without anchors: what stands where none was is any text.
///
/// `at_start`, `at_end`: nothing may come before or behind anyway.
pub(super) fn without_anchors(
    node: Node,
    at_start: bool,
    at_end: bool,
) -> Result<Node, GrammarError> {
    match node {
        Node::Alt(branches) => {
            let branches = branches
                .into_iter()
                .map(|branch| branch_without_anchors(branch, at_start, at_end));
            Ok(Node::Alt(branches.collect::<Result<_, _>>()?))
        }
        branch => branch_without_anchors(branch, at_start, at_end),
    }
}

fn branch_without_anchors(
    branch: Node,
    mut at_start: bool,
    mut at_end: bool,
) -> Result<Node, GrammarError> {
    let mut nodes = match branch {
        Node::Concat(nodes) => nodes,
        node => vec![node],
    };
    while nodes.first() == Some(&Node::Start) {
        nodes.remove(0);
        at_start = true;
    }
    while nodes.last() == Some(&Node::End) {
        nodes.pop();
        at_end = true;
    }
    if let [Node::Group(_)] = nodes.as_slice()
        && let Some(Node::Group(inner)) = nodes.pop()
    {
        return without_anchors(*inner, at_start, at_end);
    }
    if nodes.iter().any(has_anchor) {
        return Err(GrammarError::new(
            "^ and $ are supported at the beginning and at the end of a pattern or of its alternatives",
        ));
    }
    if !at_start {
        nodes.insert(0, any_text());
    }
    if !at_end {
        nodes.push(any_text());
    }
    Ok(Node::Concat(nodes))
}

fn any_text() -> Node {
    Node::Repeat(Box::new(Node::Class(Class::any())), 0, None)
}

fn has_anchor(node: &Node) -> bool {
    match node {
        Node::Start | Node::End => true,
        Node::Concat(nodes) | Node::Alt(nodes) => nodes.iter().any(has_anchor),
        Node::Group(node) | Node::Repeat(node, ..) => has_anchor(node),
        Node::Class(_) => false,
    }
}
