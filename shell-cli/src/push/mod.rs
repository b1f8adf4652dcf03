//! Moving files: `push` and `recv`.
//!
//! | module | what |
//! |---|---|
//! | [`path`] | names that are safe to use |
//! | [`manifest`] | what is to be sent |
//! | [`message`] | what the two sides say |
//! | [`stream`] | the bytes of all files as chunks in slots |
//! | [`store`] | the receiver's folder |
//! | [`talk`] | messages over an engine |
//! | [`send`], [`recv`] | the two commands |

pub mod manifest;
pub mod message;
pub mod path;
pub mod recv;
pub mod send;
pub mod store;
pub mod stream;
pub mod talk;
