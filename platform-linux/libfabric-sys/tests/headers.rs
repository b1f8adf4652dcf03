//! The crate's structures, signatures and constants are those of the installed libfabric's headers.
//!
//! A C compiler judges: each field's offset, size and type, each structure's size, each symbol's prototype and each
//! constant becomes a `_Static_assert`, made from the crate's own listings. What the installed headers are too old to
//! have is named in the test's output. Parameters of one type can change places without a compiler's noticing, so their
//! names are compared as text. That every one of the assertions can fail is shown too.
//!
//! Without headers or compiler this fails, unless `IMMWIRE_WITHOUT_HEADERS=1` says that it is meant.

// Helpers outside of `#[test]` functions may do what those may.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use libfabric_sys::{CONSTANTS, ENUMS, STRUCTS, SYMBOLS, Struct};

const INCLUDES: &str = "
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_collective.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <rdma/fi_rma.h>
#include <stddef.h>
#if __has_include(<rdma/fi_ext_efa.h>)
#include <rdma/fi_ext_efa.h>
#endif
";

/// Their C types have no name to compare with: unions, of which size and offset must do.
const NAMELESS: [(&str, &str); 2] = [("fi_mr_attr", "device"), ("fi_bus_attr", "attr")];

/// The library allocates these, or they carry their size: versions later than 1.17 append to them.
fn may_grow(name: &str) -> bool {
    name == "fi_ops"
        || name.starts_with("fi_ops_")
        || ["fi_ep_attr", "fi_domain_attr"].contains(&name)
}

/// Runs the C compiler on `source`; what it printed, and whether it was content.
fn compile(flags: &[&str], source: &str) -> std::io::Result<(bool, String)> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut child = Command::new(compiler)
        .args(flags)
        .args(["-std=gnu11", "-x", "c", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    child.stdin.take().unwrap().write_all(source.as_bytes())?;
    let done = child.wait_with_output()?;
    let text = [done.stdout, done.stderr].concat();
    Ok((done.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

struct Headers {
    version: (u32, u32),
    /// `#define` lines.
    macros: String,
}

/// The installed headers; `None` if there are none and the caller of the tests said that this is meant.
fn headers() -> Option<Headers> {
    let problem = match compile(&["-E", "-dM"], INCLUDES) {
        Ok((true, macros)) => {
            let number = |name: &str| -> u32 {
                let start = format!("#define {name} ");
                let line = macros.lines().find_map(|line| line.strip_prefix(&start));
                line.unwrap_or_else(|| panic!("no {name} in <rdma/fabric.h>"))
                    .trim()
                    .parse()
                    .unwrap()
            };
            let version = (number("FI_MAJOR_VERSION"), number("FI_MINOR_VERSION"));
            return Some(Headers { version, macros });
        }
        Ok((false, said)) => said,
        Err(error) => format!("no C compiler: {error}"),
    };
    if std::env::var_os("IMMWIRE_WITHOUT_HEADERS").is_some_and(|value| value == "1") {
        println!(
            "NOT RUN: IMMWIRE_WITHOUT_HEADERS=1, and libfabric's headers cannot be used: {problem}"
        );
        return None;
    }
    panic!(
        "libfabric's headers cannot be used: apt-get install gcc libfabric-dev, or set IMMWIRE_WITHOUT_HEADERS=1 to \
         go without this test\n{problem}"
    );
}

/// Reads a Rust type as `stringify!` writes it, and says it in C.
struct Types<'a> {
    tokens: Vec<&'a str>,
    at: usize,
    /// The names of a function's parameters.
    parameters: Vec<&'a str>,
}

impl<'a> Types<'a> {
    fn c(text: &'a str) -> String {
        Types::read(text).0
    }

    /// The type in C, and the parameters' names if it is a function's.
    fn read(text: &'a str) -> (String, Vec<&'a str>) {
        let mut tokens = Vec::new();
        let mut rest = text.trim_start();
        while let Some(first) = rest.chars().next() {
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let length = if rest.starts_with("->") {
                2
            } else if word(first) {
                rest.find(|c| !word(c)).unwrap_or(rest.len())
            } else {
                1
            };
            tokens.push(&rest[..length]);
            rest = rest[length..].trim_start();
        }
        let mut types = Types { tokens, at: 0, parameters: Vec::new() };
        let c = types.any();
        assert_eq!(types.at, types.tokens.len(), "not all of {text} was understood");
        (c, types.parameters)
    }

    fn peek(&self, ahead: usize) -> &'a str {
        self.tokens.get(self.at + ahead).copied().unwrap_or("")
    }

    fn next(&mut self) -> &'a str {
        let token = self.peek(0);
        self.at += 1;
        token
    }

    fn expect(&mut self, tokens: &[&str]) {
        for token in tokens {
            assert_eq!(self.next(), *token, "in {:?}", self.tokens);
        }
    }

    fn any(&mut self) -> String {
        match self.next() {
            "*" => {
                let how = if self.next() == "const" { " const *" } else { " *" };
                self.any() + how
            }
            "[" => {
                let element = self.any();
                self.expect(&[";"]);
                let count = self.next();
                self.expect(&["]"]);
                format!("{element} [{count}]")
            }
            "Option" => {
                self.expect(&["<"]);
                let function = self.any();
                self.expect(&[">"]);
                function
            }
            "unsafe" => self.function(),
            "c_void" => "void".to_owned(),
            "c_char" => "char".to_owned(),
            "c_int" => "int".to_owned(),
            "u8" => "uint8_t".to_owned(),
            "u16" => "uint16_t".to_owned(),
            "u32" => "uint32_t".to_owned(),
            "u64" => "uint64_t".to_owned(),
            "usize" => "size_t".to_owned(),
            "isize" => "ssize_t".to_owned(),
            "fi_addr_t" => "fi_addr_t".to_owned(),
            name if ENUMS.contains(&name) => format!("enum {name}"),
            name if ["iovec", "pollfd"].contains(&name) || name.starts_with("fi") => {
                format!("struct {name}")
            }
            name => panic!("a type that this test does not know: {name}"),
        }
    }

    fn function(&mut self) -> String {
        self.expect(&["extern", "\"", "C", "\"", "fn", "("]);
        let mut arguments = Vec::new();
        while self.peek(0) != ")" {
            if self.peek(1) == ":" {
                let name = self.next();
                self.parameters.push(name);
                self.at += 1;
            }
            arguments.push(self.any());
            if self.peek(0) == "," {
                self.at += 1;
            }
        }
        self.expect(&[")"]);
        let returns = if self.peek(0) == "->" {
            self.at += 1;
            self.any()
        } else {
            "void".to_owned()
        };
        let arguments = if arguments.is_empty() { "void".to_owned() } else { arguments.join(", ") };
        format!("{returns} (*)({arguments})")
    }
}

/// How the assertions come out: as the crate has it, or each one wrong.
#[derive(Clone, Copy, PartialEq)]
enum Say {
    Right,
    Wrong,
}

/// The assertions as a C program, their names, and the names of what these headers are too old for.
#[derive(Default)]
struct Program {
    source: String,
    names: Vec<String>,
    unchecked: Vec<String>,
}

impl Program {
    fn new(headers: &Headers, say: Say) -> Program {
        let mut program = Program { source: INCLUDES.to_owned(), ..Program::default() };
        for item in STRUCTS {
            program.structure(item, headers.version, say);
        }
        for (name, ty) in SYMBOLS {
            program.same(
                format!("symbol {name}"),
                &format!("__typeof__(&{name})"),
                &Types::c(ty),
                say,
            );
        }
        for name in ENUMS {
            program.same(format!("enum {name}"), &format!("enum {name}"), "unsigned int", say);
        }
        for constant in CONSTANTS {
            // EFA's own flags are in a header that a package may leave out.
            let missing = constant.name.starts_with("FI_EFA_")
                && !headers.macros.contains(&format!("#define {} ", constant.name));
            if missing || constant.since.is_some_and(|since| since > headers.version) {
                program.unchecked.push(constant.name.to_owned());
                continue;
            }
            let value = constant.value + i128::from(say == Say::Wrong);
            let suffix = if value < 0 { "LL" } else { "ULL" };
            let value = if value > i128::from(u64::MAX) { 0 } else { value };
            program.equal(
                format!("constant {}", constant.name),
                constant.name,
                &format!("({value}{suffix})"),
            );
        }
        program
    }

    fn structure(&mut self, item: &Struct, version: (u32, u32), say: Say) {
        let wrong = usize::from(say == Say::Wrong);
        let name = item.name;
        let is_there = |since: Option<(u32, u32)>| since.is_none_or(|since| since <= version);
        for field in item.fields {
            let label = format!("{name}.{}", field.name);
            if !is_there(field.since) {
                self.unchecked.push(label);
                continue;
            }
            let c = field.name.trim_end_matches('_'); // `type_` is `type` in C.
            let place = format!("((struct {name} *)0)->{c}");
            let number = |number: usize| format!("{}", number + wrong);
            self.equal(
                format!("offset {label}"),
                &format!("offsetof(struct {name}, {c})"),
                &number(field.offset),
            );
            self.equal(format!("size {label}"), &format!("sizeof({place})"), &number(field.size));
            if !NAMELESS.contains(&(name, field.name)) {
                let ty = Types::c(field.ty);
                self.same(format!("type {label}"), &format!("__typeof__({place})"), &ty, say);
            }
        }
        // Up to the first field that these headers do not have; one that has a version may have come somewhat earlier.
        let mut ends: Vec<usize> = vec![item.size];
        ends.extend(item.fields.iter().filter(|it| !is_there(it.since)).map(|it| it.offset));
        ends.sort_unstable();
        if ends[0] == 0 {
            return;
        }
        if version <= (1, 17) {
            ends.truncate(1);
        }
        let compare = if may_grow(name) && version > (1, 17) { ">=" } else { "==" };
        let sizes: Vec<_> = ends
            .iter()
            .map(|end| format!("sizeof(struct {name}) {compare} {}", end + 4096 * wrong))
            .collect();
        self.assert(format!("whole {name}"), &sizes.join(" || "));
    }

    fn equal(&mut self, label: String, left: &str, right: &str) {
        self.assert(label, &format!("({left}) == {right}"));
    }

    fn same(&mut self, label: String, left: &str, right: &str, say: Say) {
        let not = if say == Say::Wrong { "_Complex double" } else { right };
        self.assert(label, &format!("__builtin_types_compatible_p({left}, {not})"));
    }

    fn assert(&mut self, label: String, condition: &str) {
        writeln!(self.source, "_Static_assert({condition}, \"[{label}]\");").unwrap();
        self.names.push(label);
    }
}

#[test]
fn everything_is_as_in_the_headers() {
    let Some(headers) = headers() else { return };
    let program = Program::new(&headers, Say::Right);
    let (good, said) = compile(&["-fsyntax-only", "-w"], &program.source).unwrap();
    assert!(good, "libfabric's headers ({:?}) say otherwise:\n{said}", headers.version);
    let (major, minor) = headers.version;
    println!("{} facts are as in the headers of libfabric {major}.{minor}", program.names.len());
    println!("these headers are too old for: {}", program.unchecked.join(", "));
}

/// Says each thing wrongly, by one or as another type, and expects the compiler to object to each.
#[test]
fn the_checker_notices_each_error() {
    let Some(headers) = headers() else { return };
    let program = Program::new(&headers, Say::Wrong);
    let (good, said) =
        compile(&["-fsyntax-only", "-w", "-fmax-errors=0"], &program.source).unwrap();
    assert!(!good);
    for name in &program.names {
        assert!(said.contains(&format!("[{name}]")), "not noticed: {name}");
    }
    println!("{} planted errors were noticed", program.names.len());
}

/// The text from the end of `start` to the first `end` behind it.
fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    text.split_once(start)?.1.split_once(end).map(|(inside, _)| inside)
}

/// The names of the parameters of a C declaration: `int a, struct b *c`.
fn names_in_c(parameters: &str) -> Vec<&str> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let last = |piece: &'_ str| piece.trim_end().rfind(|c| !word(c)).map_or(0, |at| at + 1);
    let names = parameters.split(',').map(|piece| piece.trim_end()[last(piece)..].trim());
    names.filter(|name| *name != "void").collect()
}

/// What is wrong with the parameters of the crate's functions, by the preprocessed headers; and how many were compared.
fn parameter_faults(headers: &str) -> (Vec<String>, usize) {
    let text = headers.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut functions = Vec::new();
    for item in STRUCTS {
        let body = between(&text, &format!("struct {} {{ ", item.name), "};").unwrap_or_default();
        for field in item.fields.iter().filter(|field| field.ty.starts_with("Option")) {
            let there = between(body, &format!("(*{})(", field.name), ")");
            functions.push((format!("{}.{}", item.name, field.name), field.ty, there));
        }
    }
    for (name, ty) in SYMBOLS {
        let there = [format!(" *{name}("), format!(" {name}(")];
        let there = there.iter().find_map(|start| between(&text, start, ")"));
        functions.push(((*name).to_owned(), ty, there));
    }
    let count = functions.len();
    let mut faults = Vec::new();
    for (label, ty, there) in functions {
        let here = Types::read(ty).1;
        match there.map(names_in_c) {
            Some(there) if there == here => {}
            there => faults.push(format!("{label}: here {here:?}, there {there:?}")),
        }
    }
    (faults, count)
}

#[test]
fn parameters_are_in_the_order_of_the_headers() {
    if headers().is_none() {
        return;
    }
    let (_, text) = compile(&["-E", "-P"], INCLUDES).unwrap();
    let (faults, count) = parameter_faults(&text);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(count > 80, "only {count} functions were compared");
    // Two of one type that change places, one that is gone, and a function that is gone.
    for (right, wrong) in [
        ("uint64_t data, fi_addr_t dest_addr", "fi_addr_t dest_addr, uint64_t data"),
        ("struct fid_mr **mr);", "struct fid_mr **m);"),
        ("(*trywait)", "(*waittry)"),
        ("fi_strerror(int errnum)", "fi_strerror(int errno)"),
    ] {
        assert!(text.contains(right), "the headers do not say {right}");
        assert!(!parameter_faults(&text.replace(right, wrong)).0.is_empty(), "{wrong}");
    }
}

/// Types as the crate writes them.
#[test]
fn rust_types_are_said_in_c() {
    for (rust, c) in [
        ("*const c_char", "char const *"),
        ("*mut *const fi_info", "struct fi_info const * *"),
        ("[*mut c_void; 4]", "void * [4]"),
        ("fi_threading", "enum fi_threading"),
        ("unsafe extern \"C\" fn() -> u32", "uint32_t (*)(void)"),
        (
            "Option<unsafe extern \"C\" fn(fid: *mut fid, *mut *mut fid_ep, len: usize,) -> isize>",
            "ssize_t (*)(struct fid *, struct fid_ep * *, size_t)",
        ),
        ("unsafe extern \"C\" fn(info: *mut fi_info)", "void (*)(struct fi_info *)"),
    ] {
        assert_eq!(Types::c(rust), c, "{rust}");
    }
}
