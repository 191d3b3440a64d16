//! Numbers in brackets, such as `(1 (2 3))`.

use std::collections::VecDeque;
use std::fmt;

#[derive(Debug, Clone, PartialEq)]
pub enum Node {
    Number(i64),
    List(Vec<Node>),
}

#[derive(Debug)]
pub struct ParseError {
    at: usize,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected a number or '(' at {}", self.at)
    }
}

pub struct Parser<'a> {
    text: &'a str,
    open: VecDeque<Vec<Node>>,
}

impl<'a> Parser<'a> {
    /// Reads `text`.
    ///
    /// ```
    /// let parser = Parser::new("(1)");
    /// ```
    pub fn new(text: &'a str) -> Self {
        Parser { text, open: VecDeque::new() }
    }

    pub fn parse(mut self) -> Result<Vec<Node>, ParseError> {
        self.open.push_back(Vec::new());
        for (at, letter) in self.text.char_indices() {
            match letter {
                '(' => self.open.push_back(Vec::new()),
                ')' => {
                    let list = self.open.pop_back().ok_or(ParseError { at })?;
                    match self.open.back_mut() {
                        Some(outer) => outer.push(Node::List(list)),
                        None => return Err(ParseError { at }),
                    }
                }
                '0'..='9' => {
                    let value = letter.to_digit(10).unwrap_or(0);
                    if let Some(list) = self.open.back_mut() {
                        list.push(Node::Number(value.into()));
                    }
                }
                _ => {}
            }
        }
        self.open.pop_back().ok_or(ParseError { at: self.text.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested() {
        let nodes = Parser::new("(1 (2))").parse().unwrap();
        assert_eq!(nodes.len(), 1, "one list, not {:?}", nodes);
    }
}
